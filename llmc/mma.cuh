// What a warp does with tiles in shared memory: copies into them that run beside its arithmetic, and
// matrix products on the tensor cores.
//
// A fragment is a small matrix spread over the 32 lanes of a warp, in the layouts that the PTX ISA
// gives for mma.m16n8k16: lane 4g + t holds of a 16 x 8 result the elements (g, 2t), (g, 2t+1),
// (g+8, 2t) and (g+8, 2t+1).
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace llmc::device {

__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies kBytes (4 or 16, both places so aligned) into shared memory, or zeros when not `valid`.
// There after wait_for_copies(), or wait_for_batches for its batch; other threads need a barrier after
// that.
template <int kBytes>
__device__ inline void copy_async(void* to_shared, const void* from, bool valid) {
    static_assert(kBytes == 4 || kBytes == 16, "the sizes in use");
#if __CUDA_ARCH__ >= 800
    // The source is not read when its size is 0.
    const int size = valid ? kBytes : 0;
    if constexpr (kBytes == 16) {
        asm volatile(
            "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to_shared)),
            "l"(__cvta_generic_to_global(from)), "r"(size)
            : "memory");
    } else {
        asm volatile(
            "cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to_shared)),
            "l"(__cvta_generic_to_global(from)), "r"(size)
            : "memory");
    }
#else
    uint32_t* to = static_cast<uint32_t*>(to_shared);
    for (int i = 0; i < kBytes / 4; ++i) {
        to[i] = valid ? static_cast<const uint32_t*>(from)[i] : 0u;
    }
#endif
}

// Waits for all of the calling thread's asynchronous copies.
__device__ inline void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Ends a batch of the calling thread's copies, which may be empty.
__device__ inline void end_batch() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all of the calling thread's batches but the youngest kLater.
template <int kLater>
__device__ inline void wait_for_batches() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
#endif
}

// Four 8 x 8 matrices of bf16; lane 8i + r names row r of matrix i. Lane 4g + t then holds in
// matrix[i] the elements (g, 2t) and (g, 2t+1).
__device__ inline void load_matrices(uint32_t (&matrix)[4], const __nv_bfloat16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same with each matrix transposed: (2t, g) and (2t+1, g).
__device__ inline void load_matrices_transposed(uint32_t (&matrix)[4], const __nv_bfloat16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// c (16,8) += a (16,16) * b (16,8). a holds the 8 x 8 quarters upper left, lower left, upper right,
// lower right; b0 and b1 the upper and lower half of b, transposed.
__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace llmc::device
