// Gradient norm: sums of squares by chunk, and the step's decision from them.
//
// Bound by memory: one read of the gradient, 2 bytes an element in bf16, at an H200's copy bandwidth
// (4.2 TB/s) for d48 and at 87 % of it for d12, in 0.07 ms. Squares are taken and added in double, so
// that none over- or underflows; an H200 could convert and add nearly twice what memory brings. (GPUs
// without full-rate double are bound by the conversions, once a step.)
//
// A chunk is cut into pieces of a fixed size, and a piece into the groups of 16 bytes from its
// start: its sum does not depend on which block takes it, nor on where the chunk begins. Chunks of
// biases and LayerNorms are short, and two thirds of all: one takes a warp, not a block.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "llmc/cpu/blocks.h"
#include "llmc/cuda_utils.cuh"
#include "llmc/nvtx_range.cuh"
#include "llmc/step_decision.h"
#include "llmc/step_state.h"
#include "llmc/update_checks.h"

namespace llmc {

// ============================================================================
// kernels

constexpr int kNormThreads = 256;
constexpr int kNormWarps = kNormThreads / kWarpSize;
constexpr int kNormBlocks = 8;   // a multiprocessor, in two waves
constexpr int kNormVectors = 8;  // in flight in a thread
template <class G>
constexpr int kNormPiece = kNormThreads* kNormVectors* Packed128<G>::kSize;
// The longest chunk that one warp takes.
template <class G>
constexpr size_t kNormShort = kWarpSize* kNormVectors* Packed128<G>::kSize;
constexpr int kDecideThreads = 256;
// Losses and chunk sums that one block copies to shared memory; 45 KB, below what any GPU has.
constexpr size_t kDecideStaged = 5760;

// The sum of squares of `count` elements from `grad` on, as far as they are this thread's: of the groups
// `first` and every `step`-th after it, kNormVectors of them.
template <class G>
__device__ inline double squares_of_thread(const G* grad, int count, int first, int step,
                                           bool vector) {
    constexpr int kWidth = Packed128<G>::kSize, kSums = 4;
    Packed128<G> packed[kNormVectors];
#pragma unroll
    for (int j = 0; j < kNormVectors; ++j) {
        const int k = (j * step + first) * kWidth;
        packed[j] = load_group_streaming(grad + k, count - k, vector);
    }
    double sum[kSums] = {};
#pragma unroll
    for (int j = 0; j < kNormVectors; ++j) {
        float x[kWidth];
        unpack(x, packed[j]);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
            const double wide = x[k];
            sum[k % kSums] = __fma_rn(wide, wide, sum[k % kSums]);
        }
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Elements of a chunk that count.
template <class G>
__device__ inline size_t chunk_count(const NormChunk<G>& chunk, size_t max_count) {
    return min(chunk.count, max_count);
}

// partial[chunk * stride + piece] = sum of squares of the piece. Short chunks have none.
template <class G>
__global__ void __launch_bounds__(kNormThreads)
    sum_of_squares_kernel(double* partial, size_t stride, const NormChunk<G>* chunks,
                          int num_chunks, size_t max_count) {
    extern __shared__ uint32_t ends[];
    __shared__ double shared[2][kNormWarps];
    constexpr int kPiece = kNormPiece<G>;
    number_pieces(ends, num_chunks, [&](int i) {
        const size_t count = chunk_count(chunks[i], max_count);
        return count > kNormShort<G> ? static_cast<uint32_t>(ceil_div<size_t>(count, kPiece)) : 0u;
    });
    int turn = 0;
    for (uint32_t number = blockIdx.x; number < ends[num_chunks - 1];
         number += gridDim.x, turn ^= 1) {
        const int i = run_of_piece(ends, num_chunks, number);
        const uint32_t piece = number - (i > 0 ? ends[i - 1] : 0);
        const size_t begin = static_cast<size_t>(piece) * kPiece;
        const size_t left = chunk_count(chunks[i], max_count) - begin;
        const int count = static_cast<int>(min(left, static_cast<size_t>(kPiece)));
        const G* grad = chunks[i].grad + begin;
        const bool vector = count == kPiece && all_aligned(16, grad);
        double total[1] = {squares_of_thread(grad, count, threadIdx.x, kNormThreads, vector)};
        block_sum(total, shared[turn]);
        if (threadIdx.x == 0) partial[i * stride + piece] = total[0];
    }
}

// A warp for each chunk: lane l adds pieces l, l + 32, ..., of a short chunk its groups, then the lanes are
// added.
template <class G>
__global__ void __launch_bounds__(kNormThreads)
    add_pieces_kernel(double* sums, const double* partial, size_t stride,
                      const NormChunk<G>* chunks, int num_chunks, size_t max_count) {
    const int i = blockIdx.x * kNormWarps + threadIdx.x / kWarpSize;
    if (i >= num_chunks) return;
    const int lane = threadIdx.x % kWarpSize;
    const size_t count = chunk_count(chunks[i], max_count);
    double sum = 0.0;
    if (count <= kNormShort<G>) {
        const G* grad = chunks[i].grad;
        const bool vector = count % Packed128<G>::kSize == 0 && all_aligned(16, grad);
        sum = squares_of_thread(grad, static_cast<int>(count), lane, kWarpSize, vector);
    } else {
        const size_t pieces = ceil_div<size_t>(count, kNormPiece<G>);
#pragma unroll 4
        for (size_t piece = lane; piece < pieces; piece += kWarpSize) {
            sum += partial[i * stride + piece];
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[i] = sum;
}

// One block copies everything to shared memory; one thread then adds in index order and decides,
// with the functions that the CPU uses. The order costs it about 5 ns a value: 6 us for the 1184
// chunk sums of 124M parameters, 25 us for the 4640 of 1558M, once a step.
template <class S>
__global__ void __launch_bounds__(kDecideThreads)
    decide_step_kernel(S* state, const double* losses, int num_losses, const double* sums,
                       size_t num_sums, StepRules rules) {
    extern __shared__ double staged[];  // losses and sums, where there is room
    constexpr int kWords = sizeof(S) / sizeof(uint64_t);
    static_assert(sizeof(S) % sizeof(uint64_t) == 0, "the state is copied in words of 8 bytes");
    __shared__ uint64_t words[kWords];
    uint64_t* state_words = reinterpret_cast<uint64_t*>(state);
    for (int i = threadIdx.x; i < kWords; i += kDecideThreads) words[i] = state_words[i];
    if (num_losses + num_sums <= kDecideStaged) {
        for (int i = threadIdx.x; i < num_losses; i += kDecideThreads) staged[i] = losses[i];
        for (size_t i = threadIdx.x; i < num_sums; i += kDecideThreads) {
            staged[num_losses + i] = sums[i];
        }
        losses = staged;
        sums = staged + num_losses;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        const double loss = sum_in_order(losses, static_cast<size_t>(num_losses)) / num_losses;
        const double norm = std::sqrt(sum_in_order(sums, num_sums));
        decide(*reinterpret_cast<S*>(words), loss, norm, rules);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kWords; i += kDecideThreads) state_words[i] = words[i];
}

// ============================================================================
// launchers

// Bytes of scratch for global_norm_chunks.
LLMC_LAUNCHER size_t global_norm_chunks_scratch_bytes(int num_chunks, size_t max_count) {
    if (num_chunks <= 0) return 0;
    return static_cast<size_t>(num_chunks) * ceil_div<size_t>(max_count, kNormPiece<gradX>) *
           sizeof(double);
}

// sums[i] = sum of squares of chunk i, in double, split by the chunk's size alone. `sums` double
// (num_chunks); `chunks` NormChunk<gradX>[num_chunks] in device memory; `max_count` the largest
// count. Throws Error for a negative num_chunks and for null pointers.
LLMC_LAUNCHER void global_norm_chunks(double* sums, const NormChunk<gradX>* chunks, int num_chunks,
                                      size_t max_count, void* scratch, cudaStream_t stream) {
    cpu::check_table("global_norm_chunks", chunks, num_chunks);
    if (num_chunks == 0) return;
    if (sums == nullptr) throw Error("global_norm_chunks: sums is a null pointer");
    if (scratch == nullptr && max_count > 0) {
        throw Error("global_norm_chunks: scratch is a null pointer");
    }
    const LauncherRange range("global_norm_chunks", {{"chunks", num_chunks}}, 0);
    double* partial = static_cast<double*>(scratch);
    const size_t stride = ceil_div<size_t>(max_count, kNormPiece<gradX>);
    if (max_count > 0) {
        for_each_table_launch(
            num_chunks, max_count, kNormPiece<gradX>, kNormBlocks,
            [&](int first, int count, unsigned blocks) {
                sum_of_squares_kernel<<<blocks, kNormThreads, count * sizeof(uint32_t), stream>>>(
                    partial + first * stride, stride, chunks + first, count, max_count);
                launch_check();
            });
    }
    add_pieces_kernel<<<ceil_div(num_chunks, kNormWarps), kNormThreads, 0, stream>>>(
        sums, partial, stride, chunks, num_chunks, max_count);
    launch_check();
}

// Averages `losses` (num_losses) and adds `sums` (num_sums), each in index order, takes the root of
// the latter as the norm, and decides the step in *state (step_decision.h). Throws Error for empty
// or null inputs and for rules out of range.
LLMC_LAUNCHER void decide_step(StepState* state, const double* losses, int num_losses,
                               const double* sums, size_t num_sums, const StepRules& rules,
                               cudaStream_t stream) {
    check_decide_arguments(state, losses, num_losses, sums, num_sums, rules);
    const size_t values = static_cast<size_t>(num_losses) + num_sums;
    const LauncherRange range("decide_step", {{"values", static_cast<long long>(values)}},
                              bytes_of<double>(values));
    const size_t bytes = values <= kDecideStaged ? values * sizeof(double) : 0;
    decide_step_kernel<<<1, kDecideThreads, bytes, stream>>>(state, losses, num_losses, sums,
                                                             num_sums, rules);
    launch_check();
}

}  // namespace llmc
