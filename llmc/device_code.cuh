// Kernels that compute nothing: they ask whether this program has code for the GPU, and make a stream
// stand still.
#pragma once

#include "llmc/cuda_common.h"
#include "llmc/cuda_utils.cuh"

namespace llmc {

// Its attributes can be had where the program has code for the GPU.
static __global__ void probe_kernel() {}

LLMC_LAUNCHER bool device_has_code() {
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, probe_kernel) == cudaSuccess) return true;
    cudaGetLastError();
    return false;
}

#ifdef LLMC_TEST_SWITCHES
static __global__ void delay_kernel(unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}

LLMC_LAUNCHER void delay_stream(int microseconds, cudaStream_t stream) {
    delay_kernel<<<1, 1, 0, stream>>>(1000ull * static_cast<unsigned>(microseconds));
    launch_check();
}
#endif

}  // namespace llmc
