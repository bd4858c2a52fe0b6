// Softmax, cross entropy and its gradient in one pass over the logits.
//
// Bound by memory: in bf16 2 bytes an element read and 2 written. A row of 50257 bf16 logits is
// 98 KB, so that a multiprocessor of an H200 keeps two of them in shared memory, one for each of two
// blocks, and reads nothing twice. A block goes from row to row: while it writes one, it has the next
// one brought to the places that become free, so that memory is busy while it sums up. 91 to 93 % of
// an H200's copy bandwidth at 65536 rows.
//
// Arithmetic is the next bound. An element costs two exponentials, of which the special function
// units of a multiprocessor do 16 a clock, and 15 instructions with these, of which 128 a clock are
// issued: at 1.5 GHz 4.2 us and 3.9 us for a row of 50257, where an H200's memory needs 6.3 us.
// (Two blocks joined into one, whose halves take turns at writing, were no faster.)
//
// Rows of which four and more fit, unaligned ones, ones that do not fit (they are read again, from the
// L2 cache when that has room), and the loss alone have a block for each row. A row's bits are the
// same in all these ways.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cstddef>

#include "llmc/cpu/shapes.h"
#include "llmc/cuda_utils.cuh"
#include "llmc/mma.cuh"
#include "llmc/nvtx_range.cuh"

namespace llmc {

// ============================================================================
// kernels

constexpr int kClassifierThreads = 512;
constexpr int kClassifierWarps = kClassifierThreads / kWarpSize;
constexpr int kClassifierBatch = 4;  // vectors that a thread has in flight
// Where a multiprocessor has room for so many rows, their blocks keep memory busy by themselves.
constexpr int kManyRows = 4;
// Blocks that go from row to row come in up to kMostRounds rounds, of no less than kRowsOfBlock rows a
// block: one round alone would take twice as long where another kernel holds some multiprocessors.
constexpr int kMostRounds = 8;
constexpr int kRowsOfBlock = 16;
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
        // No multiply-add with the sum below, in whichever loop this is.
        total.sum = __fmul_rn(total.sum, exp_of_difference<T>(total.largest - largest));
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

// ---- blocks that go from row to row ----

// Space of block_max and block_sum. One array is written again only after the other one's barrier, so
// that a row need not wait for the threads that are still at the one before.
struct RowReduction {
    double sums[kClassifierWarps];
    float maxima[kClassifierWarps];
};

// A thread's copies come in batches: of kClassifierBatch groups, fewer at the row's end. Waits for all
// but the youngest `later`, at the least.
__device__ inline void wait_for_all_but(int later) {
    if (later == 0) {
        device::wait_for_batches<0>();
    } else if (later == 1) {
        device::wait_for_batches<1>();
    } else if (later == 2) {
        device::wait_for_batches<2>();
    } else {
        device::wait_for_batches<3>();
    }
}

// Has this thread's groups of the row brought to `cache`.
template <class T>
__device__ inline void fetch_row(Packed128<T>* cache, const T* row, int groups) {
    constexpr int kWidth = Packed128<T>::kSize;
    constexpr int kStride = kClassifierBatch * kClassifierThreads;
    const int thread = threadIdx.x;
#pragma unroll 1
    for (int begin = 0; begin < groups; begin += kStride) {
#pragma unroll
        for (int j = 0; j < kClassifierBatch; ++j) {
            const int i = begin + thread + j * kClassifierThreads;
            if (i < groups) device::copy_async<16>(cache + i, row + i * kWidth, true);
        }
        device::end_batch();
    }
}

// As sum_of_row, of a row under way to `cache`. All of the thread's copies have arrived at the end.
template <class T>
__device__ inline ExpSum sum_of_fetched_row(const Packed128<T>* cache, int V) {
    constexpr int kWidth = Packed128<T>::kSize;
    constexpr int kStride = kClassifierBatch * kClassifierThreads;
    const int thread = threadIdx.x, groups = ceil_div(V, kWidth), whole = V / kWidth;
    int later = ceil_div(groups, kStride);
    ExpSum total;
    for (int begin = 0; begin < groups; begin += kStride) {
        wait_for_all_but(--later);
        const int first = begin + thread;
        if (first + (kClassifierBatch - 1) * kClassifierThreads < whole) {
#pragma unroll
            for (int j = 0; j < kClassifierBatch; ++j) {
                add_group(total, cache[first + j * kClassifierThreads], kWidth);
            }
        } else {
#pragma unroll 1
            for (int i = first; i < groups; i += kClassifierThreads) {
                // The same instructions as for other whole groups: a sum's bits hang on them.
                if (i < whole) {
                    add_group(total, cache[i], kWidth);
                } else {
                    add_group(total, cache[i], V - i * kWidth);
                }
            }
        }
    }
    return total;
}

// The gradients of one group, as if it did not have the target.
template <class T>
__device__ inline Packed128<T> gradients(const Packed128<T>& group, float largest,
                                         ProbabilityScale scale, int count) {
    float x[Packed128<T>::kSize];
    unpack(x, group);
#pragma unroll
    for (int k = 0; k < Packed128<T>::kSize; ++k) {
        x[k] = k < count ? scaled_probability<T>(x[k], largest, scale) : 0.0f;
    }
    return pack<T>(x);
}

// Writes the gradients of the row in `cache`, as if it had no target, and what the last group has
// of padding. Has the row `next`, if there is one, brought to the places that have been read: a
// thread reads and fetches its own groups only, so there is nobody to wait for.
template <class T>
__device__ inline void write_and_fetch(T* row, const T* next, Packed128<T>* cache, int V,
                                       float largest, ProbabilityScale scale) {
    constexpr int kWidth = Packed128<T>::kSize;
    constexpr int kStride = kClassifierBatch * kClassifierThreads;
    const int thread = threadIdx.x, groups = ceil_div(V, kWidth), whole = V / kWidth;
    for (int begin = 0; begin < groups; begin += kStride) {
        const int first = begin + thread;
        if (first + (kClassifierBatch - 1) * kClassifierThreads < whole) {
            Packed128<T>* from = cache + first;
            T* to = row + first * kWidth;
            Packed128<T> batch[kClassifierBatch];
#pragma unroll
            for (int j = 0; j < kClassifierBatch; ++j) batch[j] = from[j * kClassifierThreads];
#pragma unroll
            for (int j = 0; j < kClassifierBatch; ++j) {
                store128_streaming(to + j * kClassifierThreads * kWidth,
                                   gradients(batch[j], largest, scale, kWidth));
            }
            if (next) {
                const T* fetched = next + first * kWidth;
#pragma unroll
                for (int j = 0; j < kClassifierBatch; ++j) {
                    device::copy_async<16>(from + j * kClassifierThreads,
                                           fetched + j * kClassifierThreads * kWidth, true);
                }
            }
        } else {
#pragma unroll 1
            for (int i = first; i < groups; i += kClassifierThreads) {
                const int count = V - i * kWidth;
                store128_streaming(row + i * kWidth, gradients(cache[i], largest, scale, count));
                if (next) device::copy_async<16>(cache + i, next + i * kWidth, true);
            }
        }
        device::end_batch();
    }
}

// What a block knows of its row before it writes.
struct RowSum {
    float largest;
    float of_target;  // the target's logit
    double total;     // of exp(x[i] - largest)
};

// For the row on its way to `cache`; all threads of the block have read the whole row at the end.
template <class T>
__device__ inline RowSum reduce_row(const Packed128<T>* cache, int V, int target,
                                    RowReduction& shared) {
    const ExpSum mine = sum_of_fetched_row(cache, V);
    RowSum sum;
    sum.largest = block_max<kClassifierWarps>(mine.largest, shared.maxima);
    // Another thread's group: the barrier before says that it is there, and the one after that
    // nobody has the next row brought to its place yet.
    sum.of_target = widen(reinterpret_cast<const T*>(cache)[target]);
    double total[1] = {static_cast<double>(mine.sum) *
                       static_cast<double>(exp_of_difference<T>(mine.largest - sum.largest))};
    block_sum<kClassifierWarps>(total, shared.sums);
    sum.total = total[0];
    return sum;
}

// Turns the row into its gradient, and fetches the next one.
template <class T>
__device__ inline void differentiate_row(const Classifier<T>& p, T* row, const T* next,
                                         Packed128<T>* cache, int target, const RowSum& sum) {
    constexpr int kWidth = Packed128<T>::kSize;
    const double dloss = p.dloss;
    const float factor = static_cast<float>(dloss / sum.total);
    write_and_fetch(row, next, cache, p.V, sum.largest, {factor, factor * 0x1p-24f});
    zero_columns<T, true>(row, ceil_div(p.V, kWidth) * kWidth, p.Vp);
    // The thread that wrote the target's group writes the target over it.
    if (target / kWidth % kClassifierThreads == static_cast<int>(threadIdx.x)) {
        const double p_target =
            static_cast<double>(exp_of_difference<T>(sum.of_target - sum.largest)) / sum.total;
        row[target] = narrow<T>(static_cast<float>((p_target - 1.0) * dloss));
    }
}

// Block b takes rows b, b + gridDim.x, ...
template <class T>
__global__ void __launch_bounds__(kClassifierThreads)
    classify_rows_kernel(Classifier<T> p, int rows) {
    extern __shared__ uint4 row_cache[];
    __shared__ RowReduction reduction;
    const int groups = ceil_div(p.V, Packed128<T>::kSize);
    Packed128<T>* cache = reinterpret_cast<Packed128<T>*>(row_cache);
    const size_t end = rows, stride = gridDim.x;
    const auto target_of = [&](size_t row) { return row < end ? p.targets[row] : -1; };

    int target = target_of(blockIdx.x);
    if (target >= 0) fetch_row(cache, p.logits + size_t{blockIdx.x} * p.Vp, groups);
    for (size_t row = blockIdx.x; row < end; row += stride) {
        const int next_target = target_of(row + stride);
        T* x = p.logits + row * p.Vp;
        const T* next = next_target >= 0 ? x + stride * p.Vp : nullptr;
        RowSum sum = {};
        if (target >= 0) {
            sum = reduce_row(cache, p.V, target, reduction);
            differentiate_row(p, x, next, cache, target, sum);
        } else {
            if (next) fetch_row(cache, next, groups);
            zero_columns<T, true>(x, 0, p.Vp);
        }
        // By the last warp, which has fewer groups than the first.
        if (threadIdx.x == kClassifierThreads - 1) {
            const double distance =
                static_cast<double>(sum.largest) - static_cast<double>(sum.of_target);
            p.losses[row] = target >= 0 ? static_cast<float>(log(sum.total) + distance) : 0.0f;
        }
        target = next_target;
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

template <class T>
size_t cached_row_bytes(int V) {
    return static_cast<size_t>(ceil_div(V, Packed128<T>::kSize)) * sizeof(uint4);
}

// How many rows of `row_bytes` a block can keep.
inline int rows_in_shared_memory(size_t row_bytes) {
    // What the kernels hold beside the rows.
    constexpr size_t kOtherBytes = 1024;
    const size_t most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    return static_cast<int>((most - kOtherBytes) / row_bytes);
}

// For aligned rows, of which one fits in shared memory.
template <class T>
void launch_classify_rows(const Classifier<T>& p, int rows, cudaStream_t stream) {
    const auto kernel = classify_rows_kernel<T>;
    const size_t bytes = cached_row_bytes<T>(p.V);
    allow_shared_memory(kernel, bytes);
    int blocks = 0;  // that a multiprocessor has room for
    cuda_check(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kClassifierThreads, bytes));
    const int at_once = std::max(blocks, 1) * device_attribute(cudaDevAttrMultiProcessorCount);
    const int rounds = rows / kRowsOfBlock / at_once;
    const int most = at_once * std::min(std::max(rounds, 1), kMostRounds);
    kernel<<<std::min(rows, most), kClassifierThreads, bytes, stream>>>(p, rows);
    launch_check();
}

// losses[row] = -log softmax(logits[row, 0:V])[target], targets in -1 ... V-1; a target of -1 gives
// loss 0 and zero dlogits. With write_dlogits, logits (rows,Vp) become (softmax - onehot) * dloss,
// columns V ... Vp-1 become 0; without, they are not written. A NaN among a row's V logits makes
// its loss and dlogits NaN.
LLMC_LAUNCHER void fused_classifier(floatX* logits, float* losses, const int* targets, float dloss,
                                    int rows, int V, int Vp, bool write_dlogits,
                                    cudaStream_t stream) {
    cpu::require_positive("fused_classifier", {{"rows", rows}, {"V", V}});
    if (Vp < V) {
        throw Error(format("fused_classifier: Vp is %d, must be at least V, which is %d", Vp, V));
    }
    const LauncherRange range(
        "fused_classifier", {{"rows", rows}, {"V", V}, {"Vp", Vp}},
        bytes_of<floatX>(rows, write_dlogits ? V + Vp : V) + bytes_of<float>(rows, 2));
    const Classifier<floatX> p = {logits, losses, targets, dloss, V, Vp, write_dlogits};
    const bool vector = Vp % Packed128<floatX>::kSize == 0 && all_aligned(16, logits);
    const size_t row_bytes = cached_row_bytes<floatX>(V);
    const int cached = write_dlogits ? rows_in_shared_memory(row_bytes) : 0;
    if (vector && cached >= kManyRows) {
        launch_fused_classifier<floatX, true, true>(p, rows, row_bytes, stream);
    } else if (vector && cached >= 1) {
        launch_classify_rows<floatX>(p, rows, stream);
    } else if (vector) {
        launch_fused_classifier<floatX, true, false>(p, rows, 0, stream);
    } else if (cached >= 1) {
        launch_fused_classifier<floatX, false, true>(p, rows, row_bytes, stream);
    } else {
        launch_fused_classifier<floatX, false, false>(p, rows, 0, stream);
    }
}

// *out = the average of losses (rows), in double, in an order that `rows` alone decides.
LLMC_LAUNCHER void mean_loss(double* out, const float* losses, int rows, cudaStream_t stream) {
    cpu::require_positive("mean_loss", {{"rows", rows}});
    const LauncherRange range("mean_loss", {{"rows", rows}}, bytes_of<float>(rows));
    mean_loss_kernel<<<1, kMeanLossThreads, 0, stream>>>(out, losses, rows);
    launch_check();
}

}  // namespace llmc
