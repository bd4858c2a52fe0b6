// CPU twins of the matmuls: out = inp * weight^T + bias, and its two gradients.
//
// Bound by OpenBLAS's gemm, and at the LM head (rows 256, C 128, V 50304) nearly as much by memory:
// 51 MB of fp32 logits are written for 3.3 GFLOP. All three are one blocked product. The cut into
// blocks, and of a long sum into pieces, is a function of the shape alone; pieces are added in
// ascending order. bf16 is widened block by block into memory that the thread keeps: a block of 256
// by 512 outputs widens each of its operands once, which costs less than a tenth of its gemm, so no
// fp32 copy of a whole weight is ever made.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "llmc/cpu/bias.h"
#include "llmc/cpu/blas.h"
#include "llmc/cpu/gelu.h"
#include "llmc/cpu/parallel.h"
#include "llmc/cpu/shapes.h"
#include "llmc/memory_plan.h"

namespace llmc::cpu {

namespace matmul_detail {

// How a product of (M,K) and (K,N) is cut.
struct Blocking {
    size_t rows, columns, depth;  // of one block
    size_t row_blocks, column_blocks, pieces;

    size_t tiles() const { return row_blocks * column_blocks; }
};

inline size_t divide_up(size_t a, size_t b) {
    return (a + b - 1) / b;
}

// Large blocks keep gemm efficient; about 16 of them keep several cores busy to the end. A small
// output with a long sum (the LM head's dinp) gets its blocks by cutting the sum.
inline Blocking choose_blocking(size_t M, size_t N, size_t K) {
    constexpr size_t kWanted = 16, kMinSide = 128, kMinDepth = 2048;
    Blocking cut{256, 512, K, 0, 0, 1};
    const auto count = [&] {
        cut.row_blocks = divide_up(M, cut.rows);
        cut.column_blocks = divide_up(N, cut.columns);
        return cut.tiles() * cut.pieces;
    };
    if (count() < kWanted && K >= 2 * kMinDepth) {
        const size_t pieces = std::min(divide_up(kWanted, cut.tiles()), K / kMinDepth);
        cut.depth = divide_up(divide_up(K, pieces), 16) * 16;
        cut.pieces = divide_up(K, cut.depth);
    }
    while (count() < kWanted && cut.columns > kMinSide) cut.columns /= 2;
    while (count() < kWanted && cut.rows > kMinSide) cut.rows /= 2;
    return cut;
}

// c (m,n) = a (m,k) * b (k,n) + beta * c.
template <class T>
void multiply_block(size_t m, size_t n, size_t k, MatrixView<T> a, MatrixView<T> b, accum_t<T> beta,
                    accum_t<T>* c, size_t stride) {
    using A = accum_t<T>;
    if constexpr (std::is_same_v<T, A>) {
        gemm(m, n, k, A(1), a, b, beta, c, stride);
    } else {
        constexpr size_t kDepth = 256;  // a widened block fits the second-level cache
        const auto widened = [](A* to, MatrixView<T> from, size_t rows, size_t columns) {
            if (from.transposed) std::swap(rows, columns);
            widen(to, from.data, from.stride, rows, columns);
            return MatrixView<A>{to, columns, from.transposed};
        };
        A* wide_a = thread_buffer<A, 0>(m * kDepth);
        A* wide_b = thread_buffer<A, 1>(n * kDepth);
        for (size_t begin = 0; begin < k; begin += kDepth) {
            const size_t depth = std::min(kDepth, k - begin);
            gemm(m, n, depth, A(1), widened(wide_a, a.at(0, begin), m, depth),
                 widened(wide_b, b.at(begin, 0), depth, n), begin == 0 ? beta : A(1), c, stride);
        }
    }
}

// out = round(sum + bias + old out), n elements; bias may be null.
template <class G, class T>
void finish(G* out, const accum_t<G>* sum, const T* bias, bool add_to_out, size_t n) {
    const auto term = [=](size_t i) { return bias != nullptr ? sum[i] + load(bias[i]) : sum[i]; };
    if (add_to_out) {
        for (size_t i = 0; i < n; ++i) out[i] = store<G>(term(i) + load(out[i]));
    } else {
        for (size_t i = 0; i < n; ++i) out[i] = store<G>(term(i));
    }
}

// A tile of the output whose sum is not cut.
template <class G, class T>
void product_tile(G* out, size_t stride, size_t m, size_t n, size_t K, MatrixView<T> a,
                  MatrixView<T> b, const T* bias, bool add_to_out) {
    using A = accum_t<T>;
    if constexpr (std::is_same_v<G, A>) {
        if (bias != nullptr) {
            for (size_t r = 0; r < m; ++r) {
                for (size_t c = 0; c < n; ++c) out[r * stride + c] = load(bias[c]);
            }
        }
        const bool add = add_to_out || bias != nullptr;
        multiply_block(m, n, K, a, b, add ? A(1) : A(0), out, stride);
    } else {
        A* tile = thread_buffer<A, 2>(m * n);
        multiply_block(m, n, K, a, b, A(0), tile, n);
        for (size_t r = 0; r < m; ++r) {
            finish(out + r * stride, tile + r * n, bias, add_to_out, n);
        }
    }
}

// out (M,N) = a (M,K) * b (K,N), + bias (N) or + the old out.
template <class G, class T>
void product(G* out, size_t M, size_t N, size_t K, MatrixView<T> a, MatrixView<T> b, const T* bias,
             bool add_to_out) {
    using A = accum_t<T>;
    static_assert(std::is_same_v<A, accum_t<G>>, "T and G sum in the same type");
    const Blocking cut = choose_blocking(M, N, K);
    // The products of one piece of the sum, one (M,N) matrix after the other.
    std::unique_ptr<A[]> partial(cut.pieces > 1 ? new A[cut.pieces * M * N] : nullptr);

    parallel_for(cut.tiles() * cut.pieces, 1, [&](size_t block, size_t) {
        const size_t piece = block / cut.tiles(), tile = block % cut.tiles();
        const size_t row = tile % cut.row_blocks * cut.rows;
        const size_t column = tile / cut.row_blocks * cut.columns;
        const size_t begin = piece * cut.depth;
        const size_t m = std::min(cut.rows, M - row), n = std::min(cut.columns, N - column);
        const size_t k = std::min(cut.depth, K - begin);
        if (cut.pieces == 1) {
            product_tile(out + row * N + column, N, m, n, K, a.at(row, 0), b.at(0, column),
                         bias != nullptr ? bias + column : nullptr, add_to_out);
        } else {
            multiply_block(m, n, k, a.at(row, begin), b.at(begin, column), A(0),
                           partial.get() + (piece * M + row) * N + column, N);
        }
    });
    if (cut.pieces == 1) return;
    parallel_for(M, 8, [&](size_t first, size_t last) {
        for (size_t row = first; row < last; ++row) {
            A* sum = partial.get() + row * N;
            for (size_t piece = 1; piece < cut.pieces; ++piece) {
                const A* next = partial.get() + (piece * M + row) * N;
                for (size_t c = 0; c < N; ++c) sum[c] += next[c];
            }
            finish(out + row * N, sum, bias, add_to_out, N);
        }
    });
}

}  // namespace matmul_detail

// The twins have no TF32 and no workspace: these only have the GPU's names.
inline void matmul_allow_tf32(bool) {}
inline void matmul_plan_workspace(MemoryPlan*) {}
inline void matmul_forget_workspace() {}

// out (rows,OC) = inp (rows,C) * weight (OC,C)^T + bias (OC), which may be null. Sums in fp32
// (double for double), one rounding to T.
template <class T>
void matmul_forward(T* out, const T* inp, const T* weight, const std::common_type_t<T>* bias,
                    int rows, int C, int OC, cudaStream_t stream) {
    require_positive("matmul_forward", {{"rows", rows}, {"C", C}, {"OC", OC}});
    enqueue(stream, [=] {
        const size_t depth = C;
        matmul_detail::product(out, rows, OC, depth, MatrixView<T>{inp, depth},
                               MatrixView<T>{weight, depth, true}, bias, false);
    });
}

// dinp (rows,C) = dout (rows,OC) * weight (OC,C), overwriting.
template <class T>
void matmul_backward_input(T* dinp, const T* dout, const T* weight, int rows, int C, int OC,
                           cudaStream_t stream) {
    require_positive("matmul_backward_input", {{"rows", rows}, {"C", C}, {"OC", OC}});
    enqueue(stream, [=] {
        const size_t columns = C, depth = OC;
        matmul_detail::product(dinp, rows, columns, depth, MatrixView<T>{dout, depth},
                               MatrixView<T>{weight, columns}, static_cast<const T*>(nullptr),
                               false);
    });
}

// The twins compute GELU apart from the product, whatever `fuse` says.
inline int matmul_gelu_fusion(int, int, int, int) {
    return 0;
}

// Who multiplies, for the plan that is printed.
inline std::string matmul_backend(int, int, int, int, int) {
    return "OpenBLAS";
}

// pre (rows,OC) = inp (rows,C) * weight (OC,C)^T + bias (OC), which may be null; out (rows,OC) =
// gelu(pre), of the rounded values.
template <class T>
void matmul_gelu_forward(T* out, T* pre, const T* inp, const T* weight,
                         const std::common_type_t<T>* bias, int rows, int C, int OC, bool fuse,
                         cudaStream_t stream) {
    require_positive("matmul_gelu_forward", {{"rows", rows}, {"C", C}, {"OC", OC}});
    (void)fuse;
    matmul_forward(pre, inp, weight, bias, rows, C, OC, stream);
    gelu_forward(out, pre, static_cast<size_t>(rows) * OC, stream);
}

// dinp (rows,C) = gelu'(pre) * (dout (rows,OC) * weight (OC,C)), overwriting. The product is rounded
// before it meets gelu'.
template <class T>
void matmul_gelu_backward_input(T* dinp, const T* dout, const T* weight, const T* pre, int rows,
                                int C, int OC, bool fuse, cudaStream_t stream) {
    require_positive("matmul_gelu_backward_input", {{"rows", rows}, {"C", C}, {"OC", OC}});
    (void)fuse;
    matmul_backward_input(dinp, dout, weight, rows, C, OC, stream);
    gelu_backward(dinp, dinp, pre, static_cast<size_t>(rows) * C, stream);
}

// The twin needs no scratch memory.
inline size_t matmul_backward_weight_scratch_bytes(int, int, int) {
    return 0;
}

// dweight (OC,C) = dout (rows,OC)^T * inp (rows,C); dbias (OC) = the sum over the rows of dout, and
// may be null. With `accumulate` the old values enter the sums before their one rounding to G.
template <class T, class G>
void matmul_backward_weight(G* dweight, std::common_type_t<G>* dbias, const T* dout, const T* inp,
                            void* scratch, int rows, int C, int OC, bool accumulate,
                            cudaStream_t stream) {
    require_positive("matmul_backward_weight", {{"rows", rows}, {"C", C}, {"OC", OC}});
    (void)scratch;
    enqueue(stream, [=] {
        const size_t channels = C, outputs = OC, depth = rows;
        matmul_detail::product(dweight, outputs, channels, depth,
                               MatrixView<T>{dout, outputs, true}, MatrixView<T>{inp, channels},
                               static_cast<const T*>(nullptr), accumulate);
        if (dbias != nullptr) {
            sum_rows(dbias, dout, depth, outputs, accumulate);
        }
    });
}

}  // namespace llmc::cpu
