// Gradient norm: sums of squares by chunk, and the step's decision from them.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>

#include "llmc/cpu/blocks.h"
#include "llmc/precision.h"
#include "llmc/step_decision.h"
#include "llmc/step_state.h"
#include "llmc/update_checks.h"

namespace llmc::cpu {

// Elements whose squares are summed in one go.
constexpr size_t kNormBlock = size_t{1} << 15;

// Sum of squares in double, in an order that `count` alone decides: 16 interleaved sums, which the
// compiler may keep in vector registers of any width, then folded in halves.
template <class G>
double sum_of_squares(const G* values, size_t count) {
    constexpr size_t kLanes = 16;
    double lanes[kLanes] = {};
    const size_t whole = count / kLanes * kLanes;
    for (size_t i = 0; i < whole; i += kLanes) {
        for (size_t lane = 0; lane < kLanes; ++lane) {
            const double value = static_cast<double>(load(values[i + lane]));
            lanes[lane] += value * value;
        }
    }
    for (size_t i = whole; i < count; ++i) {
        const double value = static_cast<double>(load(values[i]));
        lanes[i - whole] += value * value;
    }
    for (size_t width = kLanes / 2; width > 0; width /= 2) {
        for (size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    }
    return lanes[0];
}

// Bytes of scratch for global_norm_chunks.
inline size_t global_norm_chunks_scratch_bytes(int num_chunks, size_t max_count) {
    if (num_chunks <= 0) return 0;
    return static_cast<size_t>(num_chunks) * num_blocks(max_count, kNormBlock) * sizeof(double);
}

// sums[i] = sum of squares of chunk i, in double, split by the chunk's size alone. `sums` double
// (num_chunks); `chunks` NormChunk<G>[num_chunks], read when the stream gets there; `max_count` the
// largest count. Throws Error for a negative num_chunks and for null pointers.
template <class G>
void global_norm_chunks(double* sums, const NormChunk<G>* chunks, int num_chunks, size_t max_count,
                        void* scratch, cudaStream_t stream) {
    check_table("global_norm_chunks", chunks, num_chunks);
    if (num_chunks == 0) return;
    if (sums == nullptr) throw Error("global_norm_chunks: sums is a null pointer");
    if (scratch == nullptr && max_count > 0) {
        throw Error("global_norm_chunks: scratch is a null pointer");
    }
    enqueue(stream, [=] {
        double* partial = static_cast<double*>(scratch);
        const size_t stride = num_blocks(max_count, kNormBlock);
        for_each_block(
            static_cast<size_t>(num_chunks), max_count, kNormBlock,
            [&](size_t i) { return chunks[i].count; },
            [&](size_t i, size_t begin, size_t end) {
                partial[i * stride + begin / kNormBlock] =
                    sum_of_squares(chunks[i].grad + begin, end - begin);
            });
        for (size_t i = 0; i < static_cast<size_t>(num_chunks); ++i) {
            const size_t count = std::min(chunks[i].count, max_count);
            sums[i] = sum_in_order(partial + i * stride, num_blocks(count, kNormBlock));
        }
    });
}

// Averages `losses` (num_losses) and adds `sums` (num_sums), each in index order, takes the root of
// the latter as the norm, and decides the step in *state (step_decision.h). Throws Error for empty
// or null inputs and for rules out of range.
inline void decide_step(StepState* state, const double* losses, int num_losses, const double* sums,
                        size_t num_sums, const StepRules& rules, cudaStream_t stream) {
    check_decide_arguments(state, losses, num_losses, sums, num_sums, rules);
    enqueue(stream, [=] {
        const double loss = sum_in_order(losses, static_cast<size_t>(num_losses)) / num_losses;
        decide(*state, loss, std::sqrt(sum_in_order(sums, num_sums)), rules);
    });
}

}  // namespace llmc::cpu
