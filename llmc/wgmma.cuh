// Matrix products of a warpgroup (four warps) on Hopper's tensor cores, straight from shared memory:
// wgmma of the PTX ISA (section "Asynchronous Warpgroup Level Matrix Instructions"), for bf16 factors
// and sums in fp32. Code for sm_90a alone has it; elsewhere nothing here may be called.
//
// A tile in shared memory has rows of 64 elements, 128 bytes, and begins at a multiple of 1024 bytes. Of
// each row the eight pieces of 16 bytes change places (128-byte swizzle): piece p of row r lies in place
// p ^ (r % 8), so that a column of pieces meets all banks.
//
// A result of 64 rows is spread over the warpgroup: warp w has rows 16w ... 16w + 15, as mma.m16n8k16
// has them (mma.cuh), with sum[4n + i] element i of the n-th 16 x 8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "llmc/mma.cuh"

namespace llmc::device {

// The lower half of a tile's matrix descriptor (address / 16; 1 for the leading dimension, which is not
// used with this swizzle), of which the upper half is the same for all tiles: 0x40000040, 1024 bytes
// from 8 rows to the next 8 and the 128-byte swizzle. Row by
// row a tile is a factor whose sums run along the rows, transposed one whose sums run from row to row.
// Added to a descriptor, bytes / 16 lead on: 16 elements of a sum are 32 bytes in the first case, 2048 in
// the second.
__device__ inline uint32_t tile_descriptor(const __nv_bfloat16* tile) {
    return 1u << 16 | shared_address(tile) >> 4;
}
constexpr uint32_t kAlongRows = 32 >> 4, kFromRowToRow = 2048 >> 4;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Changes how many registers each thread of a warpgroup may use, to kCount, a multiple of 8: up, which
// waits until other warpgroups of the block have given up as many, or down.
template <int kCount>
__device__ inline void increase_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void decrease_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Before the first of some products: orders them behind what the warpgroup did to registers that they
// use, and to shared memory.
__device__ inline void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Ends a batch of products, which are under way until wait_for_products says otherwise.
__device__ inline void end_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits for all batches but the youngest kLater. `sums` are then there.
template <int kLater, int N>
__device__ inline void wait_for_products(float (&sums)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLater) : "memory");
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}
// sums (64,64) (+)= a (64,16) * b (16,64), both in shared memory. Adds when `add`.
template <bool kTransposedA, bool kTransposedB>
__device__ inline void multiply_tiles(float (&d)[32], uint32_t a, uint32_t b, bool add) {
    asm volatile(
        "{\n"
        ".reg .pred more;\n"
        ".reg .b64 a, b;\n"
        "setp.ne.b32 more, %34, 0;\n"
        "mov.b64 a, {%32, 0x40000040};\n"
        "mov.b64 b, {%33, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "a, b, more, 1, 1, %35, %36;\n"
        "}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
          "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
          "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
          "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a), "r"(b), "r"(static_cast<int>(add)), "n"(kTransposedA), "n"(kTransposedB)
        : "memory");
}

// sums (64,64) (+)= a (64,16) * b (16,64), a in registers: of each warp the quarters upper left, lower
// left, upper right, lower right of its 16 x 16.
template <bool kTransposedB>
__device__ inline void multiply_tile(float (&d)[32], const uint32_t (&a)[4], uint32_t b, bool add) {
    asm volatile(
        "{\n"
        ".reg .pred more;\n"
        ".reg .b64 b;\n"
        "setp.ne.b32 more, %37, 0;\n"
        "mov.b64 b, {%36, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, b, more, 1, 1, %38;\n"
        "}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
          "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
          "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
          "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(static_cast<int>(add)),
          "n"(kTransposedB)
        : "memory");
}

#endif

}  // namespace llmc::device
