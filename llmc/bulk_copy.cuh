// Hopper's copy engine for tiles of matrices, and the barriers in shared memory that tell of its copies
// (PTX ISA: cp.async.bulk.tensor, mbarrier). One thread starts a copy; no other has a part in it.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "llmc/cuda_common.h"
#include "llmc/mma.cuh"

namespace llmc {

// The tensor map of a matrix (rows, columns) of bf16 in device memory, without gaps, for copies of its
// 64 x 64 tiles into shared memory as wgmma.cuh has them. The matrix begins at a multiple of 16 bytes and
// so does each row. Throws Error when the driver refuses it.
inline CUtensorMap make_tensor_map(const __nv_bfloat16* matrix, size_t rows, size_t columns) {
    using Encode =
        CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                     const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                     CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    static const Encode encode = [] {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
        cuda_check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                    cudaEnableDefault, &result));
#else
        cuda_check(
            cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result));
#endif
        if (result != cudaDriverEntryPointSuccess) {
            throw Error("the driver has no cuTensorMapEncodeTiled: it is older than CUDA 12");
        }
        return reinterpret_cast<Encode>(found);
    }();
    CUtensorMap map;
    const cuuint64_t sizes[2] = {columns, rows}, row_bytes[1] = {columns * sizeof(__nv_bfloat16)};
    const cuuint32_t tile[2] = {64, 64}, step[2] = {1, 1};
    const CUresult status =
        encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<__nv_bfloat16*>(matrix), sizes,
               row_bytes, tile, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) {
        throw Error(format("cuTensorMapEncodeTiled: error %d for a matrix of %zu x %zu",
                           static_cast<int>(status), rows, columns));
    }
    return map;
}

namespace device {

// A barrier in shared memory, which opens again and again: each time when `arrivals` threads have arrived
// and the bytes announced with them are there.
class Barrier {
  public:
    __device__ void init(int arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&state_)),
                     "r"(arrivals)
                     : "memory");
    }
    __device__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&state_))
                     : "memory");
    }
    __device__ void arrive_and_expect(int bytes) {
        asm volatile(
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&state_)),
            "r"(bytes)
            : "memory");
    }
    // Waits until it has opened for the n-th time, given n - 1 modulo 2.
    __device__ void wait(int parity) {
        asm volatile(
            "{\n"
            ".reg .pred open;\n"
            "again:\n"
            "mbarrier.try_wait.parity.shared::cta.b64 open, [%0], %1;\n"
            "@open bra done;\n"
            "bra again;\n"
            "done:\n"
            "}\n" ::"r"(shared_address(&state_)),
            "r"(parity)
            : "memory");
    }
    // Whether it has opened so, without waiting.
    __device__ bool has_opened(int parity) {
        uint32_t opened;
        asm volatile(
            "{\n"
            ".reg .pred open;\n"
            "mbarrier.test_wait.parity.shared::cta.b64 open, [%1], %2;\n"
            "selp.u32 %0, 1, 0, open;\n"
            "}\n"
            : "=r"(opened)
            : "r"(shared_address(&state_)), "r"(parity)
            : "memory");
        return opened != 0;
    }
    __device__ uint32_t address() const { return shared_address(&state_); }

  private:
    uint64_t state_;
};

#if __CUDA_ARCH__ >= 900

// After init() of barriers and before the block's first __syncthreads.
__device__ inline void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Starts copying the tile whose first element is (row, column) of the matrix that a tensor map is for;
// 8192 bytes.
__device__ inline void copy_tile(__nv_bfloat16* tile, const CUtensorMap* matrix, int row,
                                 int column, const Barrier& barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(tile)),
        "l"(matrix), "r"(column), "r"(row), "r"(barrier.address())
        : "memory");
}

// After a thread's own writes to tiles in shared memory, before it tells the thread that starts copying them
// to a matrix.
__device__ inline void publish_tiles() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Starts copying a tile to where its first element is (row, column) of the matrix.
__device__ inline void copy_tile_back(const CUtensorMap* matrix, int row, int column,
                                      const __nv_bfloat16* tile) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(matrix),
        "r"(column), "r"(row), "r"(shared_address(tile))
        : "memory");
}
// Waits until the tiles that this thread copies back have been read, so that they may be written again.
__device__ inline void wait_for_copies_back() {
    asm volatile(
        "cp.async.bulk.commit_group;\n"
        "cp.async.bulk.wait_group.read 0;" ::
            : "memory");
}

// Starts copying `bytes`, a multiple of 16 between places that are such.
__device__ inline void copy_bytes(void* to_shared, const void* from, int bytes,
                                  const Barrier& barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(to_shared)),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier.address())
        : "memory");
}

#endif

}  // namespace device

}  // namespace llmc
