// CPU twins of causal attention: out = softmax(q k^T / sqrt(HS), masked) v, and its gradient.
//
// One task a (batch, head). It keeps the head's keys and values widened, and goes through the
// queries in strips of 64: a strip holds its scores against all keys up to its last query, so a
// softmax sees its whole row, and no (T,T) matrix exists. Bound by gemm: 4 T^2 HS FLOP a head
// forward and 10 T^2 HS backward, half of each saved by the mask; then by exp. A masked score
// counts as probability 0, not as a value left out: a later v that is infinite or NaN reaches the
// earlier queries of its strip.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "llmc/cpu/blas.h"
#include "llmc/cpu/parallel.h"
#include "llmc/cpu/shapes.h"
#include "llmc/cpu/vector_math.h"

namespace llmc::cpu {

namespace attention_detail {

constexpr size_t kStrip = 64;  // queries

struct Shape {
    size_t B, T, C, NH;

    size_t head_size() const { return C / NH; }
    // Places of one head's first element, in (B,T,C), in (B,T,3,NH,HS) and in (B,NH,T).
    size_t in_out(size_t head) const { return head / NH * T * C + head % NH * head_size(); }
    size_t in_qkv(size_t head) const { return head / NH * T * 3 * C + head % NH * head_size(); }
    size_t in_lse(size_t head) const { return head * T; }
};

// Buffers of a thread.
enum Slot { kKeys = 10, kValues, kDKeys, kDValues, kQueries, kDOut, kScores, kDScores, kResult };

inline Shape checked_shape(const char* name, int B, int T, int C, int NH) {
    require_positive(name, {{"B", B}, {"T", T}, {"C", C}, {"NH", NH}});
    if (C % NH != 0) {
        throw Error(format("%s: C %d must be a multiple of NH %d", name, C, NH));
    }
    return {static_cast<size_t>(B), static_cast<size_t>(T), static_cast<size_t>(C),
            static_cast<size_t>(NH)};
}

template <class T>
void narrow(T* to, size_t stride, const accum_t<T>* from, size_t rows, size_t columns) {
    for (size_t r = 0; r < rows; ++r) {
        for (size_t c = 0; c < columns; ++c) to[r * stride + c] = store<T>(from[r * columns + c]);
    }
}

template <class X>
void forward_head(X* out, accum_t<X>* lse, const X* qkv, const Shape& shape, size_t head) {
    using A = accum_t<X>;
    using View = MatrixView<A>;
    const size_t T = shape.T, C = shape.C, HS = shape.head_size();
    const A scale = A(1) / std::sqrt(static_cast<A>(HS));
    const X* q_in = qkv + shape.in_qkv(head);
    A* k = thread_buffer<A, kKeys>(T * HS);
    A* v = thread_buffer<A, kValues>(T * HS);
    widen(k, q_in + C, 3 * C, T, HS);
    widen(v, q_in + 2 * C, 3 * C, T, HS);
    A* q = thread_buffer<A, kQueries>(kStrip * HS);
    A* scores = thread_buffer<A, kScores>(kStrip * T);
    A* result = thread_buffer<A, kResult>(kStrip * HS);

    for (size_t first = 0; first < T; first += kStrip) {
        const size_t rows = std::min(kStrip, T - first), keys = first + rows;
        widen(q, q_in + first * 3 * C, 3 * C, rows, HS);
        gemm(rows, keys, HS, scale, View{q, HS}, View{k, HS, true}, A(0), scores, keys);
        A total[kStrip];
        for (size_t r = 0; r < rows; ++r) {
            A* p = scores + r * keys;
            const size_t seen = first + r + 1;
            const A largest = max_value(p, seen);
            for (size_t j = 0; j < seen; ++j) p[j] = vexp(p[j] - largest);
            std::fill(p + seen, p + keys, A(0));
            total[r] = sum(p, seen);
            lse[shape.in_lse(head) + first + r] = largest + std::log(total[r]);
        }
        gemm(rows, HS, keys, A(1), View{scores, keys}, View{v, HS}, A(0), result, HS);
        for (size_t r = 0; r < rows; ++r) {
            X* line = out + shape.in_out(head) + (first + r) * C;
            for (size_t c = 0; c < HS; ++c) line[c] = store<X>(result[r * HS + c] / total[r]);
        }
    }
}

// With p the probabilities: dv = p^T dout, dp = dout v^T, ds = p * (dp - sum of dout * out over the
// head), dq = ds k * scale, dk = ds^T q * scale (Dao et al. 2022, appendix B.2).
template <class X>
void backward_head(X* dqkv, const X* dout, const X* qkv, const X* out, const accum_t<X>* lse,
                   const Shape& shape, size_t head) {
    using A = accum_t<X>;
    using View = MatrixView<A>;
    const size_t T = shape.T, C = shape.C, HS = shape.head_size();
    const A scale = A(1) / std::sqrt(static_cast<A>(HS));
    const X* q_in = qkv + shape.in_qkv(head);
    X* dq_out = dqkv + shape.in_qkv(head);
    A* k = thread_buffer<A, kKeys>(T * HS);
    A* v = thread_buffer<A, kValues>(T * HS);
    widen(k, q_in + C, 3 * C, T, HS);
    widen(v, q_in + 2 * C, 3 * C, T, HS);
    A* dk = thread_buffer<A, kDKeys>(T * HS);
    A* dv = thread_buffer<A, kDValues>(T * HS);
    std::fill(dk, dk + T * HS, A(0));
    std::fill(dv, dv + T * HS, A(0));
    A* q = thread_buffer<A, kQueries>(kStrip * HS);
    A* d_out = thread_buffer<A, kDOut>(kStrip * HS);
    A* p = thread_buffer<A, kScores>(kStrip * T);
    A* ds = thread_buffer<A, kDScores>(kStrip * T);
    A* dq = thread_buffer<A, kResult>(kStrip * HS);

    for (size_t first = 0; first < T; first += kStrip) {
        const size_t rows = std::min(kStrip, T - first), keys = first + rows;
        const size_t place = shape.in_out(head) + first * C;
        widen(q, q_in + first * 3 * C, 3 * C, rows, HS);
        widen(d_out, dout + place, C, rows, HS);
        gemm(rows, keys, HS, scale, View{q, HS}, View{k, HS, true}, A(0), p, keys);
        gemm(rows, keys, HS, A(1), View{d_out, HS}, View{v, HS, true}, A(0), ds, keys);
        for (size_t r = 0; r < rows; ++r) {
            A* p_row = p + r * keys;
            A* ds_row = ds + r * keys;
            const size_t seen = first + r + 1;
            const A row_lse = lse[shape.in_lse(head) + first + r];
            const A weighted = dot(dout + place + r * C, out + place + r * C, HS);
            for (size_t j = 0; j < seen; ++j) {
                p_row[j] = vexp(p_row[j] - row_lse);
                ds_row[j] = p_row[j] * (ds_row[j] - weighted);
            }
            std::fill(p_row + seen, p_row + keys, A(0));
            std::fill(ds_row + seen, ds_row + keys, A(0));
        }
        gemm(keys, HS, rows, A(1), View{p, keys, true}, View{d_out, HS}, A(1), dv, HS);
        gemm(keys, HS, rows, scale, View{ds, keys, true}, View{q, HS}, A(1), dk, HS);
        gemm(rows, HS, keys, scale, View{ds, keys}, View{k, HS}, A(0), dq, HS);
        narrow(dq_out + first * 3 * C, 3 * C, dq, rows, HS);
    }
    narrow(dq_out + C, 3 * C, dk, T, HS);
    narrow(dq_out + 2 * C, 3 * C, dv, T, HS);
}

}  // namespace attention_detail

// out (B,T,C), lse (B,NH,T), qkv (B,T,3C); see launchers.h. Computed in fp32 (double for double),
// one rounding to X.
template <class X>
void attention_forward(X* out, accum_t<X>* lse, const X* qkv, void* scratch, int B, int T, int C,
                       int NH, cudaStream_t stream) {
    const auto shape = attention_detail::checked_shape("attention_forward", B, T, C, NH);
    (void)scratch;
    enqueue(stream, [=] {
        parallel_for(shape.B * shape.NH, 1, [&](size_t head, size_t) {
            attention_detail::forward_head(out, lse, qkv, shape, head);
        });
    });
}

// The twins need no scratch memory.
inline size_t attention_forward_scratch_bytes(int, int, int, int) {
    return 0;
}
inline size_t attention_backward_scratch_bytes(int, int, int, int) {
    return 0;
}

// The twins' streams have no graphs.
inline bool attention_fits_graphs(int, int) {
    return true;
}

// Whose kernels compute attention: these, for every head size.
inline std::string attention_backend(int, int) {
    return "own";
}

// dqkv (B,T,3C), overwriting, from dout (B,T,C) and what the forward pass read and wrote.
template <class X>
void attention_backward(X* dqkv, const X* dout, const X* qkv, const X* out, const accum_t<X>* lse,
                        void* scratch, int B, int T, int C, int NH, cudaStream_t stream) {
    const auto shape = attention_detail::checked_shape("attention_backward", B, T, C, NH);
    (void)scratch;
    enqueue(stream, [=] {
        parallel_for(shape.B * shape.NH, 1, [&](size_t head, size_t) {
            attention_detail::backward_head(dqkv, dout, qkv, out, lse, shape, head);
        });
    });
}

}  // namespace llmc::cpu
