// Bias gradients: sums over the rows of a gradient, alone or on the way of GELU's backward pass.
#pragma once

#include <algorithm>
#include <cstddef>

#include "llmc/cpu/gelu.h"
#include "llmc/cpu/parallel.h"
#include "llmc/cpu/shapes.h"
#include "llmc/precision.h"

namespace llmc::cpu {

// out (columns) = round(sum over the rows of `in` + old out). Rows are added in groups of 64, and
// the groups' sums in ascending order, so that the error grows with neither alone.
template <class G, class T>
void sum_rows(G* out, const T* in, size_t rows, size_t columns, bool add_to_out) {
    using A = accum_t<T>;
    constexpr size_t kColumns = 256, kGroup = 64;
    parallel_for(columns, kColumns, [=](size_t first, size_t last) {
        const size_t n = last - first;
        A total[kColumns] = {};
        for (size_t begin = 0; begin < rows; begin += kGroup) {
            A group[kColumns] = {};
            for (size_t row = begin; row < std::min(rows, begin + kGroup); ++row) {
                const T* line = in + row * columns + first;
                for (size_t c = 0; c < n; ++c) group[c] += load(line[c]);
            }
            for (size_t c = 0; c < n; ++c) total[c] += group[c];
        }
        for (size_t c = 0; c < n; ++c) {
            const A old = add_to_out ? load(out[first + c]) : A(0);
            out[first + c] = store<G>(add_to_out ? total[c] + old : total[c]);
        }
    });
}

// The twins need no scratch memory.
inline size_t bias_scratch_bytes(int, int) {
    return 0;
}

// dbias (OC) = the sum over the rows of dout (rows,OC), to which the old values are added with
// `accumulate`.
template <class T, class G>
void bias_backward(G* dbias, const T* dout, void* scratch, int rows, int OC, bool accumulate,
                   cudaStream_t stream) {
    require_positive("bias_backward", {{"rows", rows}, {"OC", OC}});
    (void)scratch;
    const size_t depth = rows, outputs = OC;
    enqueue(stream, [=] { sum_rows(dbias, dout, depth, outputs, accumulate); });
}

// As gelu_backward on (rows,OC), and dbias (OC) = the sum over the rows of dinp, to which the old values
// are added with `accumulate`.
template <class T, class G>
void gelu_backward_bias(T* dinp, G* dbias, const T* dout, const T* inp, void* scratch, int rows,
                        int OC, bool accumulate, cudaStream_t stream) {
    require_positive("gelu_backward_bias", {{"rows", rows}, {"OC", OC}});
    gelu_backward(dinp, dout, inp, static_cast<size_t>(rows) * OC, stream);
    bias_backward(dbias, static_cast<const T*>(dinp), scratch, rows, OC, accumulate, stream);
}

}  // namespace llmc::cpu
