// AdamW.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "llmc/cpu/blocks.h"
#include "llmc/precision.h"
#include "llmc/rng.h"
#include "llmc/step_state.h"
#include "llmc/stochastic_rounding.h"
#include "llmc/update_checks.h"

namespace llmc::cpu {

// What all elements of one update have in common.
struct AdamwRates {
    float learning_rate;
    float grad_scale;
    float beta1;
    float beta2;
    float eps;
    float correction1;  // 1 - beta1^t
    float correction2;  // 1 - beta2^t
};

// One element's new value; moves m and v on (Loshchilov and Hutter 2019, algorithm 2, lines 6-12).
inline float adamw_element(float value, float grad, float& m, float& v, float weight_decay,
                           const AdamwRates& rates) {
    const float g = grad * rates.grad_scale;
    m = rates.beta1 * m + (1.0f - rates.beta1) * g;
    v = rates.beta2 * v + (1.0f - rates.beta2) * (g * g);
    const float step = (m / rates.correction1) / (std::sqrt(v / rates.correction2) + rates.eps);
    return value - rates.learning_rate * (step + weight_decay * value);
}

// Elements begin ... end-1 of a segment.
template <class T, class G>
void adamw_block(const AdamwSegment<T, G>& segment, size_t begin, size_t end,
                 const AdamwRates& rates, uint64_t seed, uint32_t step) {
    Philox4 random{};
    for (size_t i = begin; i < end; ++i) {
        const float old_value = segment.master != nullptr
                                    ? segment.master[i]
                                    : static_cast<float>(load(segment.param[i]));
        const float value = adamw_element(old_value, static_cast<float>(load(segment.grad[i])),
                                          segment.m[i], segment.v[i], segment.weight_decay, rates);
        if (segment.master != nullptr) segment.master[i] = value;
        if constexpr (std::is_same_v<T, bf16>) {
            // Keyed by the element's index in the model, so that a shard may begin anywhere.
            const uint64_t index = segment.first_index + i;
            if (i == begin || index % 8 == 0) random = rounding_block(seed, step, index);
            const uint16_t bits = stochastic_bf16_bits(value, rounding_bits16(random, index));
            std::memcpy(static_cast<void*>(&segment.param[i]), &bits, sizeof(bits));
        } else {
            segment.param[i] = value;
        }
    }
}

// Updates every element of `segments` (AdamwSegment<T,G>[num_segments], `max_count` the largest
// count); nothing when state->skip is set. Table, *inputs and *state are read when the stream gets
// there, *state as decide_step left it: the update already counted in the beta powers.
//
// m, v, master and the new value are fp32 for every T. With T = double the parameters hold fp32
// values after an update, so a comparison with a calculation in double ends at fp32's precision,
// about 1e-7 of the value; gradients in double are best checked before the first update.
// Throws Error for a negative num_segments, null pointers and options out of range.
template <class T, class G>
void adamw_update(const AdamwSegment<T, G>* segments, int num_segments, size_t max_count,
                  const AdamwOptions& options, const StepInputs* inputs, const StepState* state,
                  cudaStream_t stream) {
    check_table("adamw_update", segments, num_segments);
    check_adamw_arguments(options, inputs, state);
    if (num_segments == 0 || max_count == 0) return;
    enqueue(stream, [=] {
        if (state->skip != SkipReason::none) return;
        const AdamwRates rates = {inputs->learning_rate,
                                  state->grad_scale,
                                  options.beta1,
                                  options.beta2,
                                  options.eps,
                                  static_cast<float>(1.0 - state->beta1_power),
                                  static_cast<float>(1.0 - state->beta2_power)};
        constexpr size_t kBlock = size_t{1} << 14;
        for_each_block(
            static_cast<size_t>(num_segments), max_count, kBlock,
            [&](size_t i) { return segments[i].count; },
            [&](size_t i, size_t begin, size_t end) {
                adamw_block(segments[i], begin, end, rates, options.seed, inputs->step);
            });
    });
}

}  // namespace llmc::cpu
