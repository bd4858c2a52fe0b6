// Softmax, cross entropy and its gradient in one pass over the logits.
//
// Bound by memory: in bf16 2 bytes an element read and 2 written. A row of 50304 bf16 logits is
// 98 KB, so that two blocks of a multiprocessor keep theirs in shared memory: one reads while the
// other writes, and nothing is read twice. A row that does not fit is read again, from the L2 cache
// when that has room. An element costs two exponentials of the special function unit, which could
// do nearly twice the elements that memory can bring.
#pragma once

#include <cfloat>
#include <cstddef>

#include "llmc/cpu/shapes.h"
#include "llmc/cuda_utils.cuh"
#include "llmc/nvtx_range.cuh"

namespace llmc {

// ============================================================================
// kernels

constexpr int kClassifierThreads = 512;
constexpr int kClassifierWarps = kClassifierThreads / kWarpSize;
constexpr int kClassifierBatch = 4;  // vectors that a thread has in flight
constexpr int kMeanLossThreads = 1024;

// A thread's share of the sum over i of exp(x[i] - largest).
struct ExpSum {
    float largest = -FLT_MAX;  // finite, so that -inf - largest is no NaN
    float sum = 0.0f;
};

// e^x, x <= 0 or NaN, for sums that are at least 1: to bf16's needs by the special function unit,
// or to fp32's.
template <class T>
__device__ inline float exp_of_difference(float x) {
    if constexpr (std::is_same_v<T, float>) {
        return expf(x);
    } else {
        return approximate_exp2(x * 1.44269504f);
    }
}

// Takes `count` of a group's elements, from its start on, into the sum. A NaN reaches the sum.
template <class T>
__device__ inline void add_group(ExpSum& total, const Packed128<T>& group, int count) {
    constexpr int kWidth = Packed128<T>::kSize;
    float x[kWidth];
    unpack(x, group);
    float largest = total.largest;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) largest = k < count ? fmaxf(largest, x[k]) : largest;
    if (largest > total.largest) {
        total.sum *= exp_of_difference<T>(total.largest - largest);
        total.largest = largest;
    }
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
        const float term = exp_of_difference<T>(x[k] - total.largest);
        sum += k < count ? term : 0.0f;
    }
    total.sum += sum;
}

// A probability times dloss. Down to the smallest denormal, although the special
// function unit flushes: it computes 2^24 times the exponential, and `shifted` makes up for that.
struct ProbabilityScale {
    float exact;    // dloss / sum
    float shifted;  // the same by 2^-24
};
template <class T>
__device__ inline float scaled_probability(float x, float largest, ProbabilityScale scale) {
    if constexpr (std::is_same_v<T, float>) {
        return expf(x - largest) * scale.exact;
    } else {
        return approximate_exp2(fmaf(x - largest, 1.44269504f, 24.0f)) * scale.shifted;
    }
}

template <class T>
struct Classifier {
    T* logits;
    float* losses;
    const int* targets;
    float dloss;
    int V;
    int Vp;
    bool write_dlogits;
};

// Zeros from `begin` to the end of the row.
template <class T, bool kVector>
__device__ inline void zero_columns(T* row, int begin, int Vp) {
    constexpr int kWidth = Packed128<T>::kSize;
    const int group = begin / kWidth + threadIdx.x;
    for (int i = group; i < ceil_div(Vp, kWidth); i += kClassifierThreads) {
        store_group(row + i * kWidth, Packed128<T>{make_uint4(0, 0, 0, 0)}, Vp - i * kWidth,
                    kVector);
    }
}

// This thread's sum over its groups of the row: group threadIdx.x and every 512th after it.
template <class T, bool kVector, bool kCached>
__device__ inline ExpSum sum_of_row(const T* row, int V, Packed128<T>* cache) {
    constexpr int kWidth = Packed128<T>::kSize;
    const int groups = ceil_div(V, kWidth);
    ExpSum total;
    for (int first = threadIdx.x; first < groups; first += kClassifierBatch * kClassifierThreads) {
        Packed128<T> batch[kClassifierBatch];
#pragma unroll
        for (int j = 0; j < kClassifierBatch; ++j) {
            const int i = first + j * kClassifierThreads;
            if (i >= groups) continue;
            if constexpr (kCached) {
                batch[j] = load_group_streaming(row + i * kWidth, V - i * kWidth, kVector);
            } else {
                batch[j] = load_group(row + i * kWidth, V - i * kWidth, kVector);
            }
        }
#pragma unroll
        for (int j = 0; j < kClassifierBatch; ++j) {
            const int i = first + j * kClassifierThreads;
            if (i >= groups) continue;
            const int count = V - i * kWidth;
            if (count >= kWidth) {
                add_group(total, batch[j], kWidth);
            } else {
                add_group(total, batch[j], count);
            }
            if constexpr (kCached) cache[i] = batch[j];
        }
    }
    return total;
}

// Writes the gradient of columns 0 ... V-1 and what the last of their groups has of padding.
template <class T, bool kVector, bool kCached>
__device__ inline void write_gradient(T* row, int V, int Vp, int target, float target_gradient,
                                      float largest, ProbabilityScale scale,
                                      const Packed128<T>* cache) {
    constexpr int kWidth = Packed128<T>::kSize;
#pragma unroll 2
    for (int i = threadIdx.x; i < ceil_div(V, kWidth); i += kClassifierThreads) {
        const int column = i * kWidth;
        float x[kWidth];
        // A thread reads the groups that it has cached itself, so there is nothing to wait for.
        unpack(x, kCached ? cache[i] : load_group(row + column, Vp - column, kVector));
#pragma unroll
        for (int k = 0; k < kWidth; ++k) x[k] = scaled_probability<T>(x[k], largest, scale);
        if (column <= target && target < column + kWidth) {
#pragma unroll
            for (int k = 0; k < kWidth; ++k) x[k] = column + k == target ? target_gradient : x[k];
        }
        if (column + kWidth > V) {
#pragma unroll
            for (int k = 0; k < kWidth; ++k) x[k] = column + k < V ? x[k] : 0.0f;
        }
        if constexpr (kVector) {
            store128_streaming(row + column, pack<T>(x));
        } else {
            store_some(row + column, pack<T>(x), Vp - column);
        }
    }
}

// A block for each row.
template <class T, bool kVector, bool kCached>
__global__ void __launch_bounds__(kClassifierThreads) fused_classifier_kernel(Classifier<T> p) {
    extern __shared__ uint4 row_cache[];
    __shared__ float maxima[kClassifierWarps];
    __shared__ double sums[kClassifierWarps];
    Packed128<T>* cache = reinterpret_cast<Packed128<T>*>(row_cache);
    T* row = p.logits + size_t{blockIdx.x} * p.Vp;
    const int target = p.targets[blockIdx.x];
    if (target < 0) {
        if (threadIdx.x == 0) p.losses[blockIdx.x] = 0.0f;
        if (p.write_dlogits) zero_columns<T, kVector>(row, 0, p.Vp);
        return;
    }
    const float of_target = widen(row[target]);
    const ExpSum mine = sum_of_row<T, kVector, kCached>(row, p.V, cache);
    const float largest = block_max(mine.largest, maxima);
    // The barriers of these two also put every read of `row` before its first write.
    double total[1] = {static_cast<double>(mine.sum) *
                       static_cast<double>(exp_of_difference<T>(mine.largest - largest))};
    block_sum(total, sums);
    if (p.write_dlogits) {
        const double dloss = p.dloss;
        const float factor = static_cast<float>(dloss / total[0]);
        const double p_target =
            static_cast<double>(exp_of_difference<T>(of_target - largest)) / total[0];
        write_gradient<T, kVector, kCached>(row, p.V, p.Vp, target,
                                            static_cast<float>((p_target - 1.0) * dloss), largest,
                                            {factor, factor * 0x1p-24f}, cache);
        constexpr int kWidth = Packed128<T>::kSize;
        zero_columns<T, kVector>(row, ceil_div(p.V, kWidth) * kWidth, p.Vp);
    }
    if (threadIdx.x == 0) {
        const double distance = static_cast<double>(largest) - static_cast<double>(of_target);
        p.losses[blockIdx.x] = static_cast<float>(log(total[0]) + distance);
    }
}

// One block: thread t adds losses t, t + 1024, ..., then the threads are added by warp.
template <class L>
__global__ void __launch_bounds__(kMeanLossThreads)
    mean_loss_kernel(double* out, const L* losses, int rows) {
    __shared__ double sums[kMeanLossThreads / kWarpSize];
    double total[1] = {0.0};
#pragma unroll 8
    for (int row = threadIdx.x; row < rows; row += kMeanLossThreads) {
        total[0] += static_cast<double>(losses[row]);
    }
    block_sum(total, sums);
    if (threadIdx.x == 0) *out = total[0] / rows;
}

// ============================================================================
// launchers

template <class T, bool kVector, bool kCached>
void launch_fused_classifier(const Classifier<T>& p, int rows, size_t cache_bytes,
                             cudaStream_t stream) {
    if (kCached) allow_shared_memory(fused_classifier_kernel<T, kVector, kCached>, cache_bytes);
    fused_classifier_kernel<T, kVector, kCached>
        <<<rows, kClassifierThreads, cache_bytes, stream>>>(p);
    launch_check();
}

// losses[row] = -log softmax(logits[row, 0:V])[target], targets in -1 ... V-1; a target of -1 gives
// loss 0 and zero dlogits. With write_dlogits, logits (rows,Vp) become (softmax - onehot) * dloss,
// columns V ... Vp-1 become 0; without, they are not written. A NaN among a row's V logits makes
// its loss and dlogits NaN.
inline void fused_classifier(floatX* logits, float* losses, const int* targets, float dloss,
                             int rows, int V, int Vp, bool write_dlogits, cudaStream_t stream) {
    cpu::require_positive("fused_classifier", {{"rows", rows}, {"V", V}});
    if (Vp < V) {
        throw Error(format("fused_classifier: Vp is %d, must be at least V, which is %d", Vp, V));
    }
    const LauncherRange range(
        "fused_classifier", {{"rows", rows}, {"V", V}, {"Vp", Vp}},
        bytes_of<floatX>(rows, write_dlogits ? V + Vp : V) + bytes_of<float>(rows, 2));
    constexpr int kWidth = Packed128<floatX>::kSize;
    const Classifier<floatX> p = {logits, losses, targets, dloss, V, Vp, write_dlogits};
    const bool vector = Vp % kWidth == 0 && all_aligned(16, logits);
    const size_t row_bytes = static_cast<size_t>(ceil_div(V, kWidth)) * sizeof(uint4);
    // What the kernel holds beside the row.
    constexpr size_t kOtherBytes = 1024;
    const size_t most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    const bool cached = write_dlogits && row_bytes + kOtherBytes <= most;
    if (vector && cached) {
        launch_fused_classifier<floatX, true, true>(p, rows, row_bytes, stream);
    } else if (vector) {
        launch_fused_classifier<floatX, true, false>(p, rows, 0, stream);
    } else if (cached) {
        launch_fused_classifier<floatX, false, true>(p, rows, row_bytes, stream);
    } else {
        launch_fused_classifier<floatX, false, false>(p, rows, 0, stream);
    }
}

// *out = the average of losses (rows), in double, in an order that `rows` alone decides.
inline void mean_loss(double* out, const float* losses, int rows, cudaStream_t stream) {
    cpu::require_positive("mean_loss", {{"rows", rows}});
    const LauncherRange range("mean_loss", {{"rows", rows}}, bytes_of<float>(rows));
    mean_loss_kernel<<<1, kMeanLossThreads, 0, stream>>>(out, losses, rows);
    launch_check();
}

}  // namespace llmc
