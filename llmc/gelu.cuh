// GELU in its tanh form (Hendrycks and Gimpel 2016, section 2):
//     gelu(x) = x/2 (1 + tanh u),  u = sqrt(2/pi) (x + 0.044715 x^3)
//
// Bound by memory: in bf16 4 bytes an element forward, 6 backward. 1 + tanh u = 2 / (1 + e^(-2u)),
// so that an element costs one exponential and one reciprocal of the special function unit, which
// could do nearly twice the elements that memory can bring: 97 and 101 % of an H200's copy bandwidth
// (4.2 TB/s) at 65536 x 3072. Nothing cancels for negative x either.
#pragma once

#include <cstddef>

#include "llmc/cpu/shapes.h"
#include "llmc/cuda_utils.cuh"
#include "llmc/nvtx_range.cuh"

namespace llmc {

// ============================================================================
// kernels

constexpr int kGeluThreads = 256;
constexpr int kGeluVectors = 4;  // of each array, in flight in a thread
template <class T>
constexpr size_t kGeluPiece = size_t{kGeluThreads} * kGeluVectors* Packed128<T>::kSize;

// tanh u is 1 or -1 well before |x| = 16; cutting there keeps x^3 finite, NaN stays.
__device__ inline float gelu_clamp(float x) {
    x = x > 16.0f ? 16.0f : x;
    return x < -16.0f ? -16.0f : x;
}

// (1 + tanh u) / 2 for |x| <= 16.
__device__ inline float gelu_gate(float x) {
    constexpr float kScale = -2.0f * 0.7978845608028654f * 1.4426950408889634f;
    const float exponent = kScale * x * fmaf(0.044715f * x, x, 1.0f);
    return approximate_reciprocal(1.0f + approximate_exp2(exponent));
}

__device__ inline float gelu_value(float x) {
    return x * gelu_gate(gelu_clamp(x));
}

__device__ inline float gelu_derivative(float x) {
    const float c = gelu_clamp(x);
    const float gate = gelu_gate(c);
    const float twice_du = 2.0f * 0.7978845608028654f * fmaf(3.0f * 0.044715f * c, c, 1.0f);
    return fmaf(c * gate * (1.0f - gate), twice_du, gate);
}

template <class T>
__global__ void __launch_bounds__(kGeluThreads)
    gelu_forward_kernel(T* out, const T* inp, size_t count, bool vector) {
    constexpr int kWidth = Packed128<T>::kSize;
    const size_t begin = blockIdx.x * kGeluPiece<T>;
    if (!vector || begin + kGeluPiece < T >> count) {
        const size_t end = min(count, begin + kGeluPiece<T>);
        for (size_t i = begin + threadIdx.x; i < end; i += kGeluThreads) {
            out[i] = narrow<T>(gelu_value(widen(inp[i])));
        }
        return;
    }
    Packed128<T> packed[kGeluVectors];
#pragma unroll
    for (int j = 0; j < kGeluVectors; ++j) {
        packed[j] = load128(inp + begin + (j * kGeluThreads + threadIdx.x) * kWidth);
    }
#pragma unroll
    for (int j = 0; j < kGeluVectors; ++j) {
        float x[kWidth];
        unpack(x, packed[j]);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) x[k] = gelu_value(x[k]);
        store128(out + begin + (j * kGeluThreads + threadIdx.x) * kWidth, pack<T>(x));
    }
}

template <class T>
__global__ void __launch_bounds__(kGeluThreads)
    gelu_backward_kernel(T* dinp, const T* dout, const T* inp, size_t count, bool vector) {
    constexpr int kWidth = Packed128<T>::kSize;
    const size_t begin = blockIdx.x * kGeluPiece<T>;
    if (!vector || begin + kGeluPiece < T >> count) {
        const size_t end = min(count, begin + kGeluPiece<T>);
        for (size_t i = begin + threadIdx.x; i < end; i += kGeluThreads) {
            dinp[i] = narrow<T>(widen(dout[i]) * gelu_derivative(widen(inp[i])));
        }
        return;
    }
    Packed128<T> packed_x[kGeluVectors], packed_d[kGeluVectors];
#pragma unroll
    for (int j = 0; j < kGeluVectors; ++j) {
        const size_t i = begin + (j * kGeluThreads + threadIdx.x) * kWidth;
        packed_x[j] = load128(inp + i);
        packed_d[j] = load128(dout + i);
    }
#pragma unroll
    for (int j = 0; j < kGeluVectors; ++j) {
        float x[kWidth], d[kWidth];
        unpack(x, packed_x[j]);
        unpack(d, packed_d[j]);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) d[k] *= gelu_derivative(x[k]);
        store128(dinp + begin + (j * kGeluThreads + threadIdx.x) * kWidth, pack<T>(d));
    }
}

// ============================================================================
// launchers

// out = gelu(inp), `count` elements. out may be inp.
LLMC_LAUNCHER void gelu_forward(floatX* out, const floatX* inp, size_t count, cudaStream_t stream) {
    cpu::require_positive("gelu_forward", {{"count", static_cast<long long>(count)}});
    const LauncherRange range("gelu_forward", {{"count", static_cast<long long>(count)}},
                              bytes_of<floatX>(count, 2));
    const unsigned blocks = static_cast<unsigned>(ceil_div(count, kGeluPiece<floatX>));
    gelu_forward_kernel<<<blocks, kGeluThreads, 0, stream>>>(out, inp, count,
                                                             all_aligned(16, out, inp));
    launch_check();
}

// dinp = dout * gelu'(inp), `count` elements. dinp may be dout.
LLMC_LAUNCHER void gelu_backward(floatX* dinp, const floatX* dout, const floatX* inp, size_t count,
                                 cudaStream_t stream) {
    cpu::require_positive("gelu_backward", {{"count", static_cast<long long>(count)}});
    const LauncherRange range("gelu_backward", {{"count", static_cast<long long>(count)}},
                              bytes_of<floatX>(count, 3));
    const unsigned blocks = static_cast<unsigned>(ceil_div(count, kGeluPiece<floatX>));
    gelu_backward_kernel<<<blocks, kGeluThreads, 0, stream>>>(dinp, dout, inp, count,
                                                              all_aligned(16, dinp, dout, inp));
    launch_check();
}

}  // namespace llmc
