// Layer normalisation (Ba, Kiros, Hinton 2016, section 3), eps 1e-5, over the last dimension.
// Bound by memory: a row fits the first-level cache, so each array goes through memory once.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "llmc/cpu/parallel.h"
#include "llmc/cpu/shapes.h"
#include "llmc/cpu/vector_math.h"
#include "llmc/precision.h"

namespace llmc::cpu {

// One row: `x` (width) is the input, widened.
template <class T>
void normalize_row(T* out, accum_t<T>* mean, accum_t<T>* rstd, const accum_t<T>* x, const T* weight,
                   const T* bias, size_t width) {
    using A = accum_t<T>;
    const A count = static_cast<A>(width);
    const A m = sum(x, width) / count;
    const A variance =
        lane_sum<A>(width, [=](size_t c) { return (x[c] - m) * (x[c] - m); }) / count;
    const A r = A(1) / std::sqrt(variance + static_cast<A>(1e-5));
    for (size_t c = 0; c < width; ++c) {
        out[c] = store<T>((x[c] - m) * r * load(weight[c]) + load(bias[c]));
    }
    *mean = m;
    *rstd = r;
}

// out (rows,C) = (inp - mean) * rstd * weight + bias; mean and rstd (rows) are of each row.
template <class T>
void layernorm_forward(T* out, accum_t<T>* mean, accum_t<T>* rstd, const T* inp, const T* weight,
                       const T* bias, int rows, int C, cudaStream_t stream) {
    require_positive("layernorm_forward", {{"rows", rows}, {"C", C}});
    const size_t width = static_cast<size_t>(C);
    enqueue(stream, [=] {
        const size_t count = static_cast<size_t>(rows);
        parallel_for(count, rows_per_block(width), [=](size_t begin, size_t end) {
            std::vector<accum_t<T>> x(width);
            for (size_t row = begin; row < end; ++row) {
                for (size_t c = 0; c < width; ++c) x[c] = load(inp[row * width + c]);
                normalize_row(out + row * width, mean + row, rstd + row, x.data(), weight, bias,
                              width);
            }
        });
    });
}

// residual (rows,C) = a + b, rounded to T, then layernorm_forward on that. residual may be a.
template <class T>
void fused_residual_layernorm_forward(T* residual, T* out, accum_t<T>* mean, accum_t<T>* rstd,
                                      const T* a, const T* b, const T* weight, const T* bias,
                                      int rows, int C, cudaStream_t stream) {
    require_positive("fused_residual_layernorm_forward", {{"rows", rows}, {"C", C}});
    const size_t width = static_cast<size_t>(C);
    enqueue(stream, [=] {
        const size_t count = static_cast<size_t>(rows);
        parallel_for(count, rows_per_block(width), [=](size_t begin, size_t end) {
            std::vector<accum_t<T>> x(width);
            for (size_t row = begin; row < end; ++row) {
                const size_t first = row * width;
                for (size_t c = 0; c < width; ++c) {
                    x[c] = load(store<T>(load(a[first + c]) + load(b[first + c])));
                }
                for (size_t c = 0; c < width; ++c) residual[first + c] = store<T>(x[c]);
                normalize_row(out + first, mean + row, rstd + row, x.data(), weight, bias, width);
            }
        });
    });
}

// dweight, dbias and dinp_sum are summed over at most 64 parts of at least 16 rows, each part in double.
inline size_t layernorm_part_rows(size_t rows) {
    return std::max<size_t>(16, (rows + 63) / 64);
}
inline size_t layernorm_parts(size_t rows) {
    const size_t part = layernorm_part_rows(rows);
    return (rows + part - 1) / part;
}

inline size_t layernorm_backward_scratch_bytes(int rows, int C) {
    require_positive("layernorm_backward", {{"rows", rows}, {"C", C}});
    return layernorm_parts(static_cast<size_t>(rows)) * 3 * static_cast<size_t>(C) * sizeof(double);
}

// One row of dinp, and its share of dweight and dbias. With n = (inp - mean) * rstd and
// g = weight * dout: dinp = (g - average(g) - n * average(g * n)) * rstd.
template <class T>
void layernorm_backward_row(T* dinp, double* dweight, double* dbias, const T* dout, const T* inp,
                            const T* weight, accum_t<T> m, accum_t<T> r, size_t width,
                            bool add_to_dinp) {
    using A = accum_t<T>;
    const A count = static_cast<A>(width);
    const A mean_g = dot(weight, dout, width) / count;
    const A mean_gn =
        lane_sum<A>(
            width,
            [=](size_t c) { return load(weight[c]) * load(dout[c]) * ((load(inp[c]) - m) * r); }) /
        count;
    for (size_t c = 0; c < width; ++c) {
        const A n = (load(inp[c]) - m) * r;
        const A d = load(dout[c]);
        dweight[c] += static_cast<double>(d * n);
        dbias[c] += static_cast<double>(d);
    }
    for (size_t c = 0; c < width; ++c) {
        const A n = (load(inp[c]) - m) * r;
        const A value = (load(weight[c]) * load(dout[c]) - mean_g - n * mean_gn) * r;
        dinp[c] = store<T>(add_to_dinp ? load(dinp[c]) + value : value);
    }
}

// dinp (rows,C), added to with add_to_dinp; dweight and dbias (C), added to with `accumulate`; likewise
// dinp_sum (C) = the sum over the rows of dinp as stored, unless it is null.
template <class T, class G>
void layernorm_backward(T* dinp, G* dweight, G* dbias, G* dinp_sum, const T* dout, const T* inp,
                        const T* weight, const accum_t<T>* mean, const accum_t<T>* rstd,
                        void* scratch, int rows, int C, bool add_to_dinp, bool accumulate,
                        cudaStream_t stream) {
    require_positive("layernorm_backward", {{"rows", rows}, {"C", C}});
    const size_t count = static_cast<size_t>(rows), width = static_cast<size_t>(C);
    double* partial = static_cast<double*>(scratch);  // (parts, 3, C)
    enqueue(stream, [=] {
        const size_t part = layernorm_part_rows(count);
        parallel_for(count, part, [=](size_t begin, size_t end) {
            double* dw = partial + begin / part * 3 * width;
            double* db = dw + width;
            double* sum = db + width;
            std::fill(dw, dw + 3 * width, 0.0);
            for (size_t row = begin; row < end; ++row) {
                layernorm_backward_row(dinp + row * width, dw, db, dout + row * width,
                                       inp + row * width, weight, mean[row], rstd[row], width,
                                       add_to_dinp);
                if (dinp_sum == nullptr) continue;
                const T* stored = dinp + row * width;
                for (size_t c = 0; c < width; ++c) sum[c] += static_cast<double>(load(stored[c]));
            }
        });
        const auto add_parts = [=](G* gradient, size_t c, const double* first) {
            double total = 0.0;
            for (size_t p = 0; p < layernorm_parts(count); ++p) total += first[p * 3 * width + c];
            if (accumulate) total += static_cast<double>(load(gradient[c]));
            gradient[c] = store<G>(static_cast<accum_t<G>>(total));
        };
        parallel_for(width, 256, [=](size_t begin, size_t end) {
            for (size_t c = begin; c < end; ++c) {
                add_parts(dweight, c, partial);
                add_parts(dbias, c, partial + width);
                if (dinp_sum != nullptr) add_parts(dinp_sum, c, partial + 2 * width);
            }
        });
    });
}

}  // namespace llmc::cpu
