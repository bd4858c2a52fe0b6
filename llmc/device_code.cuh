// Whether this program has kernels for the GPU at hand.
#pragma once

#include <cuda_runtime.h>

namespace llmc {

namespace detail {
// Does nothing; its attributes can be had where the program has code for the GPU.
static __global__ void probe_kernel() {}
}  // namespace detail

inline bool device_has_code() {
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, detail::probe_kernel) == cudaSuccess) return true;
    cudaGetLastError();
    return false;
}

}  // namespace llmc
