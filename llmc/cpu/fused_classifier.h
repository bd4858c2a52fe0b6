// Softmax, cross entropy and its gradient in one pass over a row of logits that stays in cache.
// Bound by arithmetic: two exponentials an element, because a sum in T could not hold the first.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "llmc/cpu/parallel.h"
#include "llmc/cpu/shapes.h"
#include "llmc/cpu/vector_math.h"
#include "llmc/portable_math.h"
#include "llmc/precision.h"

namespace llmc::cpu {

// Sum of exp(x[i] - largest). A row has tens of thousands of terms, so stretches of 1024 are summed
// in fp32 and the stretches in double.
template <class T>
double sum_of_exp(const T* x, accum_t<T> largest, size_t count) {
    constexpr size_t kStretch = 1024;
    double total = 0.0;
    for (size_t first = 0; first < count; first += kStretch) {
        const T* part = x + first;
        total += static_cast<double>(
            lane_sum<accum_t<T>>(std::min(kStretch, count - first),
                                 [=](size_t i) { return vexp(load(part[i]) - largest); }));
    }
    return total;
}

// One row: returns the loss; with write_dlogits turns x (Vp) into its gradient.
template <class T>
accum_t<T> classify_row(T* x, size_t target, accum_t<T> dloss, size_t V, size_t Vp,
                        bool write_dlogits) {
    using A = accum_t<T>;
    const A largest = max_value(x, V);
    const A of_target = load(x[target]);
    const double total = sum_of_exp(x, largest, V);
    // portable::log takes finite numbers only; NaN and infinity shall reach the loss.
    const double log_total = std::isfinite(total) ? portable::log(total) : total;
    const double distance = static_cast<double>(largest) - static_cast<double>(of_target);
    if (write_dlogits) {
        const double scale = static_cast<double>(dloss);
        const A factor = static_cast<A>(scale / total);
        for (size_t i = 0; i < V; ++i) x[i] = store<T>(vexp(load(x[i]) - largest) * factor);
        const double p = static_cast<double>(vexp(of_target - largest)) / total;
        x[target] = store<T>(static_cast<A>((p - 1.0) * scale));
        std::fill(x + V, x + Vp, store<T>(A(0)));
    }
    return static_cast<A>(log_total + distance);
}

// losses[row] = -log softmax(logits[row, 0:V])[target], targets in -1 ... V-1; a target of -1 gives
// loss 0 and zero dlogits. With write_dlogits, logits (rows,Vp) become (softmax - onehot) * dloss,
// columns V ... Vp-1 become 0; without, they are not written. A NaN among a row's V logits makes
// its loss and dlogits NaN.
template <class T>
void fused_classifier(T* logits, accum_t<T>* losses, const int* targets, accum_t<T> dloss, int rows,
                      int V, int Vp, bool write_dlogits, cudaStream_t stream) {
    require_positive("fused_classifier", {{"rows", rows}, {"V", V}});
    if (Vp < V) {
        throw Error(format("fused_classifier: Vp is %d, must be at least V, which is %d", Vp, V));
    }
    const size_t stride = static_cast<size_t>(Vp);
    enqueue(stream, [=] {
        const size_t count = static_cast<size_t>(rows);
        parallel_for(count, rows_per_block(stride), [=](size_t begin, size_t end) {
            for (size_t row = begin; row < end; ++row) {
                T* x = logits + row * stride;
                if (targets[row] >= 0) {
                    losses[row] = classify_row(x, static_cast<size_t>(targets[row]), dloss,
                                               static_cast<size_t>(V), stride, write_dlogits);
                    continue;
                }
                losses[row] = 0;
                if (write_dlogits) std::fill(x, x + stride, store<T>(accum_t<T>(0)));
            }
        });
    });
}

// *out = the average of losses (rows), in double, in the order of the rows.
template <class L>
void mean_loss(double* out, const L* losses, int rows, cudaStream_t stream) {
    require_positive("mean_loss", {{"rows", rows}});
    enqueue(stream, [=] {
        double total = 0.0;
        for (int row = 0; row < rows; ++row) total += static_cast<double>(losses[row]);
        *out = total / rows;
    });
}

}  // namespace llmc::cpu
