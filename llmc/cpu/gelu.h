// GELU in its tanh form (Hendrycks and Gimpel 2016, section 2), element by element:
//     gelu(x) = x/2 (1 + tanh u),  u = sqrt(2/pi) (x + 0.044715 x^3)
// Bound by arithmetic, about 30 operations an element; the vectors come from g++.
#pragma once

#include <algorithm>
#include <cstddef>

#include "llmc/cpu/parallel.h"
#include "llmc/cpu/shapes.h"
#include "llmc/cpu/vector_math.h"
#include "llmc/precision.h"

namespace llmc::cpu {

constexpr double kGeluScale = 0.7978845608028654;  // sqrt(2/pi)
constexpr double kGeluCubic = 0.044715;
constexpr size_t kGeluChunk = 256;  // elements held in local arrays, which nothing aliases

// tanh u is 1 or -1 well before |x| = 16; cutting there keeps x^3 finite, NaN stays.
template <class A>
inline A gelu_clamp(A x) {
    x = x > A(16) ? A(16) : x;
    return x < A(-16) ? A(-16) : x;
}

template <class A>
inline A gelu_tanh(A clamped) {
    const A cubic = static_cast<A>(kGeluCubic) * clamped * clamped * clamped;
    return vtanh(static_cast<A>(kGeluScale) * (clamped + cubic));
}

template <class A>
inline A gelu_value(A x) {
    return A(0.5) * x * (A(1) + gelu_tanh(gelu_clamp(x)));
}

template <class A>
inline A gelu_derivative(A x) {
    const A c = gelu_clamp(x);
    const A t = gelu_tanh(c);
    const A du = static_cast<A>(kGeluScale) * (A(1) + static_cast<A>(3.0 * kGeluCubic) * c * c);
    return A(0.5) * (A(1) + t) + A(0.5) * c * (A(1) - t * t) * du;
}

// out = gelu(inp), `count` elements. out may be inp.
template <class T>
void gelu_forward(T* out, const T* inp, size_t count, cudaStream_t stream) {
    require_positive("gelu_forward", {{"count", static_cast<long long>(count)}});
    enqueue(stream, [=] {
        parallel_for(count, rows_per_block(1), [=](size_t begin, size_t end) {
            accum_t<T> x[kGeluChunk];
            for (size_t first = begin; first < end; first += kGeluChunk) {
                const size_t n = std::min(kGeluChunk, end - first);
                for (size_t i = 0; i < n; ++i) x[i] = gelu_value(load(inp[first + i]));
                for (size_t i = 0; i < n; ++i) out[first + i] = store<T>(x[i]);
            }
        });
    });
}

// dinp = dout * gelu'(inp), `count` elements. dinp may be dout.
template <class T>
void gelu_backward(T* dinp, const T* dout, const T* inp, size_t count, cudaStream_t stream) {
    require_positive("gelu_backward", {{"count", static_cast<long long>(count)}});
    enqueue(stream, [=] {
        parallel_for(count, rows_per_block(1), [=](size_t begin, size_t end) {
            accum_t<T> d[kGeluChunk];
            for (size_t first = begin; first < end; first += kGeluChunk) {
                const size_t n = std::min(kGeluChunk, end - first);
                for (size_t i = 0; i < n; ++i) {
                    d[i] = load(dout[first + i]) * gelu_derivative(load(inp[first + i]));
                }
                for (size_t i = 0; i < n; ++i) dinp[first + i] = store<T>(d[i]);
            }
        });
    });
}

}  // namespace llmc::cpu
