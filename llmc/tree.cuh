// The node of the gradients' reduction tree.
//
// Bound by memory: reads two gradients and writes one, 6 bytes an element in bf16: 91 % of an
// H200's copy bandwidth (4.2 TB/s) for d12's gradients.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "llmc/cpu/blocks.h"
#include "llmc/cuda_utils.cuh"
#include "llmc/nvtx_range.cuh"
#include "llmc/step_state.h"

namespace llmc {

// a + b, rounded to nearest even; the one place where the GPU adds two slots' gradients. For bf16
// the sum is rounded to fp32 first, which changes nothing (cpu/tree.h says why). A NaN is 0x7fff in
// bf16 and 0x7fffffff in fp32.
template <class G>
__device__ inline G tree_node(G a, G b) {
    return narrow<G>(__fadd_rn(widen(a), widen(b)));
}

// ============================================================================
// kernels

constexpr int kTreeThreads = 256;
constexpr int kTreeBlocks = 8;   // a multiprocessor
constexpr int kTreeVectors = 2;  // of each operand, in flight in a thread
template <class G>
constexpr int kTreePiece = kTreeThreads* kTreeVectors* Packed128<G>::kSize;

template <class G>
__device__ inline Packed128<G> tree_node(const Packed128<G>& a, const Packed128<G>& b) {
    float x[Packed128<G>::kSize], y[Packed128<G>::kSize];
    unpack(x, a);
    unpack(y, b);
#pragma unroll
    for (int k = 0; k < Packed128<G>::kSize; ++k) x[k] = __fadd_rn(x[k], y[k]);
    return pack<G>(x);
}

// A short table that travels with the launch. Range is TreeRange<G> or CopyRange<G>.
constexpr int kTreeListRanges = 64;
template <class Range>
struct RangeList {
    Range ranges[kTreeListRanges];
    __device__ const Range& operator[](int i) const { return ranges[i]; }
};
template <class G>
using TreeRangeList = RangeList<TreeRange<G>>;

// Table is const TreeRange<G>*, in device memory, or TreeRangeList<G>.
template <class G, class Table>
__global__ void __launch_bounds__(kTreeThreads)
    tree_add_kernel(const __grid_constant__ Table ranges, int num_ranges, size_t max_count) {
    extern __shared__ uint32_t ends[];
    constexpr int kPiece = kTreePiece<G>, kWidth = Packed128<G>::kSize;
    number_pieces(ends, num_ranges, [&](int i) {
        return static_cast<uint32_t>(ceil_div<size_t>(min(ranges[i].count, max_count), kPiece));
    });
    for (uint32_t piece = blockIdx.x; piece < ends[num_ranges - 1]; piece += gridDim.x) {
        const int i = run_of_piece(ends, num_ranges, piece);
        const TreeRange<G> range = ranges[i];
        const size_t count = min(range.count, max_count);
        const size_t begin = static_cast<size_t>(piece - (i > 0 ? ends[i - 1] : 0)) * kPiece;
        if (begin + kPiece <= count && all_aligned(16, range.out, range.a, range.b)) {
            Packed128<G> a[kTreeVectors], b[kTreeVectors];
#pragma unroll
            for (int j = 0; j < kTreeVectors; ++j) {
                const size_t k = begin + (j * kTreeThreads + threadIdx.x) * kWidth;
                // The spare is done with; the gradient may still be in the cache, and the sum is
                // read again by the next node or for the other ranks.
                a[j] = load128_streaming(range.a + k);
                b[j] = load128(range.b + k);
            }
#pragma unroll
            for (int j = 0; j < kTreeVectors; ++j) {
                const size_t k = begin + (j * kTreeThreads + threadIdx.x) * kWidth;
                store128(range.out + k, tree_node(a[j], b[j]));
            }
            continue;
        }
        const size_t end = min(count, begin + kPiece);
        for (size_t k = begin + threadIdx.x; k < end; k += kTreeThreads) {
            range.out[k] = tree_node(range.a[k], range.b[k]);
        }
    }
}

template <class G>
__global__ void __launch_bounds__(kTreeThreads)
    copy_list_kernel(const __grid_constant__ RangeList<CopyRange<G>> ranges, int num_ranges) {
    extern __shared__ uint32_t ends[];
    constexpr int kPiece = kTreePiece<G>, kWidth = Packed128<G>::kSize;
    number_pieces(ends, num_ranges, [&](int i) {
        return static_cast<uint32_t>(ceil_div<size_t>(ranges[i].count, kPiece));
    });
    for (uint32_t piece = blockIdx.x; piece < ends[num_ranges - 1]; piece += gridDim.x) {
        const int i = run_of_piece(ends, num_ranges, piece);
        const CopyRange<G> range = ranges[i];
        const size_t begin = static_cast<size_t>(piece - (i > 0 ? ends[i - 1] : 0)) * kPiece;
        const size_t end = min(range.count, begin + kPiece);
        size_t k = begin + threadIdx.x;
        if (all_aligned(16, range.to, range.from)) {
            const size_t whole = end / kWidth * kWidth;
            for (k = begin + threadIdx.x * kWidth; k < whole; k += kTreeThreads * kWidth) {
                store128(range.to + k, load128(range.from + k));
            }
            k = max(begin, whole) + threadIdx.x;
        }
        for (; k < end; k += kTreeThreads) range.to[k] = range.from[k];
    }
}

// ============================================================================
// launchers

// out = tree_node(a, b) over each range. `ranges` TreeRange<gradX>[num_ranges] in device memory;
// `max_count` the largest count. out may be a or b, but not overlap them otherwise. Throws Error
// for a negative num_ranges and for a null table.
LLMC_LAUNCHER void tree_add(const TreeRange<gradX>* ranges, int num_ranges, size_t max_count,
                            cudaStream_t stream) {
    cpu::check_table("tree_add", ranges, num_ranges);
    if (num_ranges == 0 || max_count == 0) return;
    const LauncherRange range("tree_add", {{"ranges", num_ranges}}, 0);
    for_each_table_launch(num_ranges, max_count, kTreePiece<gradX>, kTreeBlocks,
                          [&](int first, int count, unsigned blocks) {
                              tree_add_kernel<gradX, const TreeRange<gradX>*>
                                  <<<blocks, kTreeThreads, count * sizeof(uint32_t), stream>>>(
                                      ranges + first, count, max_count);
                              launch_check();
                          });
}

// All elements of a table in host memory.
template <class Range>
size_t elements_of(const Range* ranges, int num_ranges) {
    size_t sum = 0;
    for (int i = 0; i < num_ranges; ++i) sum += ranges[i].count;
    return sum;
}

// As tree_add, with `ranges` in host memory, which may go once this returns.
LLMC_LAUNCHER void tree_add_list(const TreeRange<gradX>* ranges, int num_ranges,
                                 cudaStream_t stream) {
    cpu::check_table("tree_add_list", ranges, num_ranges);
    const LauncherRange range("tree_add_list", {{"ranges", num_ranges}},
                              bytes_of<gradX>(elements_of(ranges, num_ranges), 3));
    for (int done = 0; done < num_ranges; done += kTreeListRanges) {
        const int some = std::min(kTreeListRanges, num_ranges - done);
        TreeRangeList<gradX> list;
        size_t max_count = 0;
        for (int i = 0; i < some; ++i) {
            list.ranges[i] = ranges[done + i];
            max_count = std::max(max_count, list.ranges[i].count);
        }
        if (max_count == 0) continue;
        for_each_table_launch(some, max_count, kTreePiece<gradX>, kTreeBlocks,
                              [&](int, int count, unsigned blocks) {
                                  tree_add_kernel<gradX, TreeRangeList<gradX>>
                                      <<<blocks, kTreeThreads, count * sizeof(uint32_t), stream>>>(
                                          list, count, max_count);
                                  launch_check();
                              });
    }
}

// Copies each range, bit for bit; ranges do not overlap. `ranges` CopyRange<gradX>[num_ranges] in host
// memory, which may go once this returns. Throws Error as tree_add.
LLMC_LAUNCHER void copy_list(const CopyRange<gradX>* ranges, int num_ranges, cudaStream_t stream) {
    cpu::check_table("copy_list", ranges, num_ranges);
    const LauncherRange range("copy_list", {{"ranges", num_ranges}},
                              bytes_of<gradX>(elements_of(ranges, num_ranges), 2));
    for (int done = 0; done < num_ranges; done += kTreeListRanges) {
        const int some = std::min(kTreeListRanges, num_ranges - done);
        RangeList<CopyRange<gradX>> list;
        size_t max_count = 0;
        for (int i = 0; i < some; ++i) {
            list.ranges[i] = ranges[done + i];
            max_count = std::max(max_count, list.ranges[i].count);
        }
        if (max_count == 0) continue;
        for_each_table_launch(
            some, max_count, kTreePiece<gradX>, kTreeBlocks, [&](int, int count, unsigned blocks) {
                copy_list_kernel<gradX>
                    <<<blocks, kTreeThreads, count * sizeof(uint32_t), stream>>>(list, count);
                launch_check();
            });
    }
}

}  // namespace llmc
