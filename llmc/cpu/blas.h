// What the twins that call OpenBLAS share: gemm on one thread, and memory that a thread keeps.
//
// The bits of an OpenBLAS product depend on its shape, on the core that OpenBLAS chose
// (openblas_core.h) and on its number of threads. The last is always one here: the twins cut a
// product into blocks and share those out themselves.
#pragma once

#include <cblas.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

#include "llmc/precision.h"

namespace llmc::cpu {

// A matrix stored row by row, `stride` elements from one row to the next; or its transpose.
template <class T>
struct MatrixView {
    const T* data;
    size_t stride;
    bool transposed = false;

    // The part that starts at this row and column of the matrix, transposed or not.
    MatrixView at(size_t row, size_t column) const {
        const size_t offset = transposed ? column * stride + row : row * stride + column;
        return {data + offset, stride, transposed};
    }
};

inline void use_one_blas_thread() {
    static const bool once = [] {
        openblas_set_num_threads(1);
        return true;
    }();
    (void)once;
}

// c (m,n) = alpha * a (m,k) * b (k,n) + beta * c; with beta 0, c is not read.
inline void gemm(size_t m, size_t n, size_t k, float alpha, MatrixView<float> a,
                 MatrixView<float> b, float beta, float* c, size_t stride) {
    use_one_blas_thread();
    cblas_sgemm(CblasRowMajor, a.transposed ? CblasTrans : CblasNoTrans,
                b.transposed ? CblasTrans : CblasNoTrans, static_cast<int>(m), static_cast<int>(n),
                static_cast<int>(k), alpha, a.data, static_cast<int>(a.stride), b.data,
                static_cast<int>(b.stride), beta, c, static_cast<int>(stride));
}
inline void gemm(size_t m, size_t n, size_t k, double alpha, MatrixView<double> a,
                 MatrixView<double> b, double beta, double* c, size_t stride) {
    use_one_blas_thread();
    cblas_dgemm(CblasRowMajor, a.transposed ? CblasTrans : CblasNoTrans,
                b.transposed ? CblasTrans : CblasNoTrans, static_cast<int>(m), static_cast<int>(n),
                static_cast<int>(k), alpha, a.data, static_cast<int>(a.stride), b.data,
                static_cast<int>(b.stride), beta, c, static_cast<int>(stride));
}

// At least `count` elements that the calling thread keeps until it ends, 64-byte aligned, contents
// undefined. One buffer for each element type and slot.
template <class A, int kSlot>
A* thread_buffer(size_t count) {
    struct Free {
        void operator()(A* pointer) const { std::free(pointer); }
    };
    thread_local std::unique_ptr<A, Free> data;
    thread_local size_t capacity = 0;
    if (capacity < count) {
        data.reset();
        capacity = 0;
        data.reset(static_cast<A*>(std::aligned_alloc(64, (count * sizeof(A) + 63) / 64 * 64)));
        if (data == nullptr) throw std::bad_alloc();
        capacity = count;
    }
    return data.get();
}

// to (rows,columns), packed, = from widened, rows of `from` being `stride` elements apart.
template <class T>
void widen(accum_t<T>* to, const T* from, size_t stride, size_t rows, size_t columns) {
    for (size_t r = 0; r < rows; ++r) {
        for (size_t c = 0; c < columns; ++c) to[r * columns + c] = load(from[r * stride + c]);
    }
}

}  // namespace llmc::cpu
