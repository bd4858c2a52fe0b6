// Bias gradients: sums over the rows of a gradient, alone or on the way of GELU's backward pass.
//
// Bound by memory: one read of the gradient; with GELU, two reads and a write, 6 bytes an element in
// bf16: 97 and 97 % of an H200's copy bandwidth (4.2 TB/s) at 65536 x 3072. The rows are cut into
// parts, a cut that depends on their number alone; a block sums some columns of one part, and a second
// kernel adds the parts.
#pragma once

#include <cstddef>
#include <type_traits>

#include "llmc/cpu/shapes.h"
#include "llmc/cuda_utils.cuh"
#include "llmc/dependent_launch.cuh"
#include "llmc/gelu.cuh"
#include "llmc/nvtx_range.cuh"

namespace llmc {

namespace bias_detail {

// At most kParts parts, of whole multiples of kRows rows.
constexpr int kWarps = 16;
constexpr int kRows = 64;
constexpr int kParts = 256;
constexpr int kGroups = 8;  // of parts, in the second kernel
constexpr int kBatch = 4;   // rows whose loads a thread has in flight

inline int rows_per_part(int rows) {
    return ceil_div(ceil_div(rows, kParts), kRows) * kRows;
}
inline int parts(int rows) {
    return ceil_div(rows, rows_per_part(rows));
}

// partial (parts,OC): sums of each part's rows. Rows has fetch<kVector>(i), which reads what element i
// and its kVector - 1 neighbours need, and use(values, fetched, i), which gives their values, rounded as
// they are, or will be, in memory. A warp covers 32 * kVector columns of one row; the block's warps take
// rows in turn, and their sums are added in the order of the warps.
template <int kVector, class Rows>
__global__ void __launch_bounds__(kWarpSize* kWarps)
    partial_kernel(float* partial, Rows source, int rows, int OC, int rows_of_part) {
    constexpr int kColumns = kWarpSize * kVector;
    __shared__ float shared[kWarps][kColumns];
    const int lane = threadIdx.x, warp = threadIdx.y;
    const int column = blockIdx.x * kColumns + lane * kVector;
    const int first = blockIdx.y * rows_of_part;
    const int last = min(rows, first + rows_of_part);
    float sums[kVector] = {};
    if (column < OC) {
        for (int row = first + warp; row < last; row += kBatch * kWarps) {
            decltype(source.template fetch<kVector>(0)) fetched[kBatch];
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                const size_t i = static_cast<size_t>(row + j * kWarps) * OC + column;
                if (row + j * kWarps < last) fetched[j] = source.template fetch<kVector>(i);
            }
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                const size_t i = static_cast<size_t>(row + j * kWarps) * OC + column;
                float values[kVector];
                if (row + j * kWarps >= last) continue;
                source.use(values, fetched[j], i);
#pragma unroll
                for (int k = 0; k < kVector; ++k) sums[k] += values[k];
            }
        }
    }
    let_next_kernel_start();
#pragma unroll
    for (int i = 0; i < kVector; ++i) shared[warp][lane * kVector + i] = sums[i];
    __syncthreads();
    for (int c = warp * kWarpSize + lane; c < kColumns; c += kWarpSize * kWarps) {
        const int out = blockIdx.x * kColumns + c;
        if (out >= OC) continue;
        float sum = 0.0f;
        for (int w = 0; w < kWarps; ++w) sum += shared[w][c];
        partial[static_cast<size_t>(blockIdx.y) * OC + out] = sum;
    }
}

// dbias = (old +) the parts, rounded once. Row g of a block adds the g-th run of parts in order, then the
// runs are added in order.
template <class G>
__global__ void __launch_bounds__(kWarpSize* kGroups)
    sum_kernel(G* dbias, const float* partial, int num_parts, int OC, bool accumulate) {
    __shared__ float shared[kGroups][kWarpSize];
    wait_for_first_kernel();
    const int column = blockIdx.x * kWarpSize + threadIdx.x, group = threadIdx.y;
    float sum = 0.0f;
    if (column < OC) {
        const int end = num_parts * (group + 1) / kGroups;
#pragma unroll 4
        for (int p = num_parts * group / kGroups; p < end; ++p) {
            sum += partial[static_cast<size_t>(p) * OC + column];
        }
    }
    shared[group][threadIdx.x] = sum;
    __syncthreads();
    if (group > 0 || column >= OC) return;
    sum = accumulate ? widen(dbias[column]) : 0.0f;
    for (int g = 0; g < kGroups; ++g) sum += shared[g][threadIdx.x];
    dbias[column] = narrow<G>(sum);
}

// 16 bytes of T, or one element.
template <class T, int kVector>
struct Fetched {
    std::conditional_t<kVector == 1, T, Packed128<T>> bits;
};

template <int kVector, bool kStreaming, class T>
__device__ inline Fetched<T, kVector> fetch_row(const T* from) {
    if constexpr (kVector == 1) {
        return {*from};
    } else {
        return {kStreaming ? load128_streaming(from) : load128(from)};
    }
}
template <int kVector, class T>
__device__ inline void widen_row(float (&values)[kVector], const Fetched<T, kVector>& fetched) {
    if constexpr (kVector == 1) {
        values[0] = widen(fetched.bits);
    } else {
        unpack(values, fetched.bits);
    }
}

// Rows in memory.
template <class T>
struct StoredRows {
    const T* dout;

    template <int kVector>
    __device__ Fetched<T, kVector> fetch(size_t i) const {
        return fetch_row<kVector, true>(dout + i);
    }
    template <int kVector>
    __device__ void use(float (&values)[kVector], const Fetched<T, kVector>& fetched,
                        size_t) const {
        widen_row(values, fetched);
    }
};

// GELU's gradient row by row, for the sums of bias.cuh: computed, rounded and stored on the way.
template <class T>
struct GeluGradientRows {
    T* dinp;
    const T* dout;
    const T* inp;

    template <int kVector>
    struct Both {
        Fetched<T, kVector> dout, inp;
    };
    template <int kVector>
    __device__ Both<kVector> fetch(size_t i) const {
        return {fetch_row<kVector, false>(dout + i), fetch_row<kVector, false>(inp + i)};
    }
    template <int kVector>
    __device__ void use(float (&values)[kVector], const Both<kVector>& fetched, size_t i) const {
        float x[kVector];
        widen_row(values, fetched.dout);
        widen_row(x, fetched.inp);
#pragma unroll
        for (int k = 0; k < kVector; ++k) values[k] *= gelu_derivative(x[k]);
        if constexpr (kVector == 1) {
            dinp[i] = narrow<T>(values[0]);
            values[0] = widen(narrow<T>(values[0]));
        } else {
            const Packed128<T> rounded = pack<T>(values);
            store128(dinp + i, rounded);
            unpack(values, rounded);
        }
    }
};

}  // namespace bias_detail

// Bytes of scratch for the functions below.
LLMC_LAUNCHER size_t bias_scratch_bytes(int rows, int OC) {
    return static_cast<size_t>(bias_detail::parts(rows)) * OC * sizeof(float);
}

// dbias (OC) = the sum over `rows` rows that `source` gives, OC columns wide; with `accumulate` the old
// values enter the sum before its one rounding. `vector`: OC is a multiple of 16 bytes of T, and what
// the source reads is aligned likewise.
template <class T, class G, class Rows>
void sum_rows_into_bias(G* dbias, const Rows& source, void* scratch, int rows, int OC,
                        bool accumulate, bool vector, cudaStream_t stream) {
    using namespace bias_detail;
    constexpr int kWidth = Packed128<T>::kSize;
    float* partial = static_cast<float*>(scratch);
    const int count = parts(rows);
    const dim3 grid(ceil_div(OC, kWarpSize * (vector ? kWidth : 1)), count);
    const dim3 block(kWarpSize, kWarps);
    const auto kernel = vector ? partial_kernel<kWidth, Rows> : partial_kernel<1, Rows>;
    kernel<<<grid, block, 0, stream>>>(partial, source, rows, OC, rows_per_part(rows));
    launch_check();
    launch_second_kernel(sum_kernel<G>, ceil_div(OC, kWarpSize), dim3(kWarpSize, kGroups), stream,
                         dbias, partial, count, OC, accumulate);
    launch_check();
}

// dbias (OC) = the sum over the rows of dout (rows,OC).
LLMC_LAUNCHER void bias_backward(gradX* dbias, const floatX* dout, void* scratch, int rows, int OC,
                                 bool accumulate, cudaStream_t stream) {
    cpu::require_positive("bias_backward", {{"rows", rows}, {"OC", OC}});
    const LauncherRange range("bias_backward", {{"rows", rows}, {"OC", OC}},
                              bytes_of<floatX>(rows, OC));
    const bool vector = OC % Packed128<floatX>::kSize == 0 && all_aligned(16, dout);
    sum_rows_into_bias<floatX>(dbias, bias_detail::StoredRows<floatX>{dout}, scratch, rows, OC,
                               accumulate, vector, stream);
}

// As gelu_backward on (rows,OC), and dbias (OC) = the sum over the rows of dinp, to which the old values
// are added with `accumulate`: one pass over memory less than the two apart, and the same bits.
LLMC_LAUNCHER void gelu_backward_bias(floatX* dinp, gradX* dbias, const floatX* dout,
                                      const floatX* inp, void* scratch, int rows, int OC,
                                      bool accumulate, cudaStream_t stream) {
    cpu::require_positive("gelu_backward_bias", {{"rows", rows}, {"OC", OC}});
    const LauncherRange range("gelu_backward_bias", {{"rows", rows}, {"OC", OC}},
                              bytes_of<floatX>(rows, OC, 3));
    const bool vector = OC % Packed128<floatX>::kSize == 0 && all_aligned(16, dinp, dout, inp);
    sum_rows_into_bias<floatX>(dbias, bias_detail::GeluGradientRows<floatX>{dinp, dout, inp},
                               scratch, rows, OC, accumulate, vector, stream);
}

}  // namespace llmc
