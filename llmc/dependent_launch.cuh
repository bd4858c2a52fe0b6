// A kernel that starts while the one before it on the stream ends (programmatic dependent launch, CUDA
// programming guide, "Programmatic Dependent Launch and Synchronization"), so that the time between
// two short kernels is not lost. For pairs of kernels of which the second adds what the first left.
//
// The first is launched as usual, hence begins after everything before it. The second may begin
// earlier than the first ends, but no earlier than the first begins: of all kernels before it, only
// the first can still be running. What the first wrote, the second sees only after its wait, which
// lasts until the first is complete and its writes are in memory; letting it start is a hint
// without any such promise.
//
// Compute capability 9.0 and newer have such launches. Elsewhere the two functions for kernels are
// empty and the launch is an ordinary one.
#pragma once

#include <cuda_runtime.h>

#include "llmc/cuda_utils.cuh"

namespace llmc {

// For the first kernel: says that the next kernel may be put where there is room. It is, once every
// block has said so or has ended.
__device__ inline void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// For the second kernel: every thread calls it, before it writes device memory or reads any that the first
// writes. No block may end without it: a kernel behind the second counts on the first being complete with
// it.
__device__ inline void wait_for_first_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

// Whether the code that the device runs was compiled for such launches: the newest that is not newer
// than the device. In graphs the driver has them from 12.3 on.
inline bool has_dependent_launches() {
    static const bool has = [] {
        const int device = 100 * device_attribute(cudaDevAttrComputeCapabilityMajor) +
                           10 * device_attribute(cudaDevAttrComputeCapabilityMinor);
        int driver = 0, newest = 0;
        cuda_check(cudaDriverGetVersion(&driver));
        for (const int compiled : {__CUDA_ARCH_LIST__}) {
            if (compiled <= device && compiled > newest) newest = compiled;
        }
        return newest >= 900 && driver >= 12030 && CUDART_VERSION >= 12030;
    }();
    return has;
}

// Launches `kernel` as the second of a pair; the launch before it on `stream` must be the first. The
// caller calls launch_check(), as after any launch.
template <class... Parameters, class... Arguments>
void launch_second_kernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream,
                          Arguments... arguments) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = has_dependent_launches() ? 1 : 0;
    static_cast<void>(cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace llmc
