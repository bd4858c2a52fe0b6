// AdamW.
//
// Bound by memory: with bf16 weights and gradients and fp32 m, v and master an element is 14 bytes
// read and 14 written, which leaves time for some 200 instructions; it takes about half of them,
// for random bits and IEEE divisions. 88 % of an H200's copy bandwidth (4.2 TB/s) over all of d12.
//
// Every operation is IEEE and spelt out, so that nothing is fused and the bits are the CPU's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "llmc/cpu/blocks.h"
#include "llmc/cuda_utils.cuh"
#include "llmc/nvtx_range.cuh"
#include "llmc/rng.h"
#include "llmc/step_state.h"
#include "llmc/stochastic_rounding.h"
#include "llmc/update_checks.h"

namespace llmc {

// ============================================================================
// kernels

constexpr int kAdamwThreads = 256;
// A thread takes two units of four neighbours, far enough apart that a warp's accesses to the fp32
// arrays are whole: eight neighbours would leave every other 16 bytes to a second access.
constexpr int kAdamwUnit = 4;
constexpr int kAdamwUnits = 2;
constexpr int kAdamwBlocks = 3;  // that a multiprocessor has registers for
constexpr int kAdamwPiece = kAdamwThreads * kAdamwUnit * kAdamwUnits;

// What all elements of one update have in common.
struct UpdateRates {
    float learning_rate;
    float grad_scale;
    float beta1;
    float beta2;
    float rest1;  // 1 - beta1
    float rest2;
    float eps;
    float correction1;  // 1 - beta1^t
    float correction2;
};

__device__ inline UpdateRates update_rates(const AdamwOptions& options, const StepInputs& inputs,
                                           const StepState& state) {
    return {inputs.learning_rate,
            state.grad_scale,
            options.beta1,
            options.beta2,
            __fsub_rn(1.0f, options.beta1),
            __fsub_rn(1.0f, options.beta2),
            options.eps,
            static_cast<float>(__dsub_rn(1.0, state.beta1_power)),
            static_cast<float>(__dsub_rn(1.0, state.beta2_power))};
}

// One element's new value; moves m and v on (Loshchilov and Hutter 2019, algorithm 2, lines 6-12),
// operation by operation as adamw_element in cpu/adamw.h.
__device__ inline float updated_value(float value, float grad, float& m, float& v,
                                      float weight_decay, const UpdateRates& rates) {
    const float g = __fmul_rn(grad, rates.grad_scale);
    m = __fadd_rn(__fmul_rn(rates.beta1, m), __fmul_rn(rates.rest1, g));
    v = __fadd_rn(__fmul_rn(rates.beta2, v), __fmul_rn(rates.rest2, __fmul_rn(g, g)));
    const float root = __fsqrt_rn(__fdiv_rn(v, rates.correction2));
    const float step = __fdiv_rn(__fdiv_rn(m, rates.correction1), __fadd_rn(root, rates.eps));
    const float decayed = __fadd_rn(step, __fmul_rn(weight_decay, value));
    return __fsub_rn(value, __fmul_rn(rates.learning_rate, decayed));
}

// The bits that round four neighbours, 16 each: element k's are half k, the low half of a word
// first.
struct RoundingBits4 {
    uint32_t word[2];
};

// For elements index ... index+3. They are halves index % 8 ... of a block of eight, and may run on
// into the next block.
__host__ __device__ inline RoundingBits4 rounding_bits4(uint64_t seed, uint32_t step,
                                                        uint64_t index) {
    const int first = static_cast<int>(index & 7);
    const Philox4 block = rounding_block(seed, step, index);
    Philox4 next = {};
    if (first > 8 - kAdamwUnit) next = rounding_block(seed, step, index + kAdamwUnit);
    uint32_t word[6] = {block.lane[0], block.lane[1], block.lane[2],
                        block.lane[3], next.lane[0],  next.lane[1]};
    for (int shift = 0; shift < 3; ++shift) {
        if (shift >= first / 2) continue;
        for (int i = 0; i < 5; ++i) word[i] = word[i + 1];
    }
    if (first % 2 == 0) return {{word[0], word[1]}};
    return {{word[0] >> 16 | word[1] << 16, word[1] >> 16 | word[2] << 16}};
}

// What an access to four neighbours moves.
template <class T>
struct Unit {
    using Bits = std::conditional_t<sizeof(T) == 2, uint2, uint4>;

    __device__ void load(const T* from) { bits = __ldcs(reinterpret_cast<const Bits*>(from)); }
    __device__ void store(T* to) const { __stcs(reinterpret_cast<Bits*>(to), bits); }
    __device__ void get(float (&x)[kAdamwUnit]) const {
        if constexpr (sizeof(T) == 2) {
            x[0] = low_half(bits.x);
            x[1] = high_half(bits.x);
            x[2] = low_half(bits.y);
            x[3] = high_half(bits.y);
        } else {
            x[0] = __uint_as_float(bits.x);
            x[1] = __uint_as_float(bits.y);
            x[2] = __uint_as_float(bits.z);
            x[3] = __uint_as_float(bits.w);
        }
    }
    __device__ void set(const float (&x)[kAdamwUnit]) {
        static_assert(sizeof(T) == 4, "bf16 is rounded stochastically");
        bits = {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                __float_as_uint(x[3])};
    }

    Bits bits;
};

// param = x, rounded stochastically when it is bf16; x is that of elements index ... index+3.
template <class T>
__device__ inline void set_rounded(Unit<T>& param, const float (&x)[kAdamwUnit], uint64_t seed,
                                   uint32_t step, uint64_t index) {
    if constexpr (sizeof(T) == 4) {
        param.set(x);
    } else {
        const RoundingBits4 random = rounding_bits4(seed, step, index);
        uint32_t rounded[kAdamwUnit];
#pragma unroll
        for (int k = 0; k < kAdamwUnit; ++k) {
            rounded[k] = stochastic_bf16_bits(x[k], random.word[k / 2] >> (16 * (k % 2)));
        }
        param.bits = {rounded[0] | rounded[1] << 16, rounded[2] | rounded[3] << 16};
    }
}

// A whole piece of a segment whose arrays can all be accessed by units.
template <class T, class G>
__device__ inline void update_piece(const AdamwSegment<T, G>& s, size_t begin,
                                    const UpdateRates& rates, uint64_t seed, uint32_t step) {
    Unit<T> param[kAdamwUnits];
    Unit<G> grad[kAdamwUnits];
    Unit<float> m[kAdamwUnits], v[kAdamwUnits], master[kAdamwUnits];
#pragma unroll
    for (int j = 0; j < kAdamwUnits; ++j) {
        const size_t i = begin + (j * kAdamwThreads + threadIdx.x) * kAdamwUnit;
        grad[j].load(s.grad + i);
        m[j].load(s.m + i);
        v[j].load(s.v + i);
        if (s.master != nullptr) {
            master[j].load(s.master + i);
        } else {
            param[j].load(s.param + i);
        }
    }
#pragma unroll
    for (int j = 0; j < kAdamwUnits; ++j) {
        const size_t i = begin + (j * kAdamwThreads + threadIdx.x) * kAdamwUnit;
        float value[kAdamwUnit], g[kAdamwUnit], new_m[kAdamwUnit], new_v[kAdamwUnit];
        if (s.master != nullptr) {
            master[j].get(value);
        } else {
            param[j].get(value);
        }
        grad[j].get(g);
        m[j].get(new_m);
        v[j].get(new_v);
#pragma unroll
        for (int k = 0; k < kAdamwUnit; ++k) {
            value[k] = updated_value(value[k], g[k], new_m[k], new_v[k], s.weight_decay, rates);
        }
        m[j].set(new_m);
        v[j].set(new_v);
        m[j].store(s.m + i);
        v[j].store(s.v + i);
        if (s.master != nullptr) {
            master[j].set(value);
            master[j].store(s.master + i);
        }
        set_rounded(param[j], value, seed, step, s.first_index + i);
        param[j].store(s.param + i);
    }
}

// One element, of a segment's last piece or of one that does not lie on units.
template <class T, class G>
__device__ inline void update_element(const AdamwSegment<T, G>& s, size_t i,
                                      const UpdateRates& rates, uint64_t seed, uint32_t step) {
    const float old_value = s.master != nullptr ? s.master[i] : widen(s.param[i]);
    const float value =
        updated_value(old_value, widen(s.grad[i]), s.m[i], s.v[i], s.weight_decay, rates);
    if (s.master != nullptr) s.master[i] = value;
    if constexpr (std::is_same_v<T, float>) {
        s.param[i] = value;
    } else {
        const uint32_t random = rounding_bits4(seed, step, s.first_index + i).word[0];
        s.param[i] = __ushort_as_bfloat16(stochastic_bf16_bits(value, random));
    }
}

template <class T, class G>
__global__ void __launch_bounds__(kAdamwThreads, kAdamwBlocks)
    adamw_kernel(const AdamwSegment<T, G>* segments, int num_segments, size_t max_count,
                 AdamwOptions options, const StepInputs* inputs, const StepState* state) {
    extern __shared__ uint32_t ends[];
    if (state->skip != SkipReason::none) return;
    const UpdateRates rates = update_rates(options, *inputs, *state);
    const uint32_t step = inputs->step;
    number_pieces(ends, num_segments, [&](int i) {
        return static_cast<uint32_t>(
            ceil_div<size_t>(min(segments[i].count, max_count), kAdamwPiece));
    });
    for (uint32_t piece = blockIdx.x; piece < ends[num_segments - 1]; piece += gridDim.x) {
        const int number = run_of_piece(ends, num_segments, piece);
        const AdamwSegment<T, G>& s = segments[number];
        const size_t count = min(s.count, max_count);
        const size_t begin =
            static_cast<size_t>(piece - (number > 0 ? ends[number - 1] : 0)) * kAdamwPiece;
        if (begin + kAdamwPiece <= count && all_aligned(16, s.m, s.v, s.master) &&
            all_aligned(kAdamwUnit * sizeof(T), s.param) &&
            all_aligned(kAdamwUnit * sizeof(G), s.grad)) {
            update_piece(s, begin, rates, options.seed, step);
            continue;
        }
        const size_t end = min(count, begin + kAdamwPiece);
        for (size_t i = begin + threadIdx.x; i < end; i += kAdamwThreads) {
            update_element(s, i, rates, options.seed, step);
        }
    }
}

// ============================================================================
// launchers

// Updates every element of `segments` (AdamwSegment<floatX,gradX>[num_segments] in device memory,
// `max_count` the largest count); nothing when state->skip is set. *state is as decide_step left
// it: the update already counted in the beta powers. Throws Error for a negative num_segments, null
// pointers and options out of range.
LLMC_LAUNCHER void adamw_update(const AdamwSegment<floatX, gradX>* segments, int num_segments,
                                size_t max_count, const AdamwOptions& options,
                                const StepInputs* inputs, const StepState* state,
                                cudaStream_t stream) {
    cpu::check_table("adamw_update", segments, num_segments);
    check_adamw_arguments(options, inputs, state);
    if (num_segments == 0 || max_count == 0) return;
    const LauncherRange range("adamw_update", {{"segments", num_segments}}, 0);
    for_each_table_launch(
        num_segments, max_count, kAdamwPiece, 2 * kAdamwBlocks,
        [&](int first, int count, unsigned blocks) {
            adamw_kernel<<<blocks, kAdamwThreads, count * sizeof(uint32_t), stream>>>(
                segments + first, count, max_count, options, inputs, state);
            launch_check();
        });
}

}  // namespace llmc
