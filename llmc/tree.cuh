// The node of the gradients' reduction tree.
//
// Bound by memory: reads two gradients and writes one, 6 bytes an element in bf16: 97 % of an
// H200's copy bandwidth (4.2 TB/s) for d12's gradients. A block takes one piece: blocks that took
// several in turn reached 91 %. It takes it through all nodes of a row: the next one finds the last
// one's sum in the cache, so that two nodes take 1.5 times as long as one, three twice.
#pragma once

#include <cstddef>
#include <cstdint>

#include "llmc/cpu/tree.h"
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

constexpr int kTreeThreads = 128;
constexpr int kTreeVectors = 4;  // of each operand, in flight in a thread
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

// A short table that travels with the launch. Range is TreeRange<G> or CopyRange<G>. Of ranges with
// several nodes each, those of one follow each other.
constexpr int kTreeListRanges = cpu::kMostTreeNodes;
template <class Range>
struct RangeList {
    Range ranges[kTreeListRanges];
    uint32_t ends[kTreeListRanges];  // of each range's pieces, counted from the first range on
    int count = 0;                   // ranges
    int nodes = 1;                   // of each
};

// A block's piece of a list: elements begin ... end-1 of a range, in all its nodes.
template <class Range>
struct RangePiece {
    const Range* nodes;
    size_t begin, end;
};
template <class Range>
__device__ inline RangePiece<Range> piece_of_block(const RangeList<Range>& list, int elements) {
    const int i = run_of_piece(list.ends, list.count, blockIdx.x);
    const uint32_t first = i > 0 ? list.ends[i - 1] : 0;
    const size_t begin = static_cast<size_t>(blockIdx.x - first) * elements;
    const Range* nodes = list.ranges + i * list.nodes;
    return {nodes, begin, min(nodes->count, begin + elements)};
}

// A node reads its operands from memory and stores its sum there, also where the next one reads it: a
// thread has the same elements in all nodes.
template <class G>
__global__ void __launch_bounds__(kTreeThreads)
    tree_add_kernel(const __grid_constant__ RangeList<TreeRange<G>> list) {
    constexpr int kPiece = kTreePiece<G>, kWidth = Packed128<G>::kSize;
    const auto [nodes, begin, end] = piece_of_block(list, kPiece);
    bool vector = begin + kPiece == end;
    for (int n = 0; n < list.nodes; ++n) {
        vector = vector && all_aligned(16, nodes[n].out, nodes[n].a, nodes[n].b);
    }
    for (int n = 0; n < list.nodes; ++n) {
        const TreeRange<G>& range = nodes[n];
        if (!vector) {
            for (size_t k = begin + threadIdx.x; k < end; k += kTreeThreads) {
                range.out[k] = tree_node(range.a[k], range.b[k]);
            }
            continue;
        }
        Packed128<G> a[kTreeVectors], b[kTreeVectors];
#pragma unroll
        for (int j = 0; j < kTreeVectors; ++j) {
            const size_t k = begin + (j * kTreeThreads + threadIdx.x) * kWidth;
            a[j] = load128(range.a + k);
            b[j] = load128(range.b + k);
        }
#pragma unroll
        for (int j = 0; j < kTreeVectors; ++j) {
            const size_t k = begin + (j * kTreeThreads + threadIdx.x) * kWidth;
            store128(range.out + k, tree_node(a[j], b[j]));
        }
    }
}

template <class G>
__global__ void __launch_bounds__(kTreeThreads)
    copy_list_kernel(const __grid_constant__ RangeList<CopyRange<G>> list) {
    constexpr int kPiece = kTreePiece<G>, kWidth = Packed128<G>::kSize;
    const auto [node, begin, end] = piece_of_block(list, kPiece);
    const CopyRange<G>& range = *node;
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

// ============================================================================
// launchers

// Whether `next` goes on where `range` ends.
template <class G>
bool goes_on(const TreeRange<G>& range, const TreeRange<G>& next) {
    return range.out + range.count == next.out && range.a + range.count == next.a &&
           range.b + range.count == next.b;
}
template <class G>
bool goes_on(const CopyRange<G>& range, const CopyRange<G>& next) {
    return range.to + range.count == next.to && range.from + range.count == next.from;
}

// Calls launch(list, blocks) with all of `ranges` (num_nodes, num_ranges), in lists of at most
// kTreeListRanges. Neighbours in memory that follow each other become one range.
template <class Range, class Launch>
void for_each_list(const Range* ranges, int num_nodes, int num_ranges, size_t piece,
                   Launch&& launch) {
    RangeList<Range> list;
    list.nodes = num_nodes;
    const auto flush = [&] {
        uint32_t blocks = 0;
        for (int i = 0; i < list.count; ++i) {
            blocks += static_cast<uint32_t>(ceil_div(list.ranges[i * num_nodes].count, piece));
            list.ends[i] = blocks;
        }
        if (blocks > 0) launch(list, blocks);
        list.count = 0;
    };
    for (int i = 0; i < num_ranges; ++i) {
        if (ranges[i].count == 0) continue;
        const auto node = [&](int n) -> const Range& { return ranges[n * num_ranges + i]; };
        const auto place = [&](int n) -> Range& {
            return list.ranges[(list.count - 1) * num_nodes + n];
        };
        bool follows = list.count > 0;
        for (int n = 0; n < num_nodes && follows; ++n) follows = goes_on(place(n), node(n));
        if (follows) {
            for (int n = 0; n < num_nodes; ++n) place(n).count += node(n).count;
            continue;
        }
        if ((list.count + 1) * num_nodes > kTreeListRanges) flush();
        ++list.count;
        for (int n = 0; n < num_nodes; ++n) place(n) = node(n);
    }
    flush();
}

// All elements of a table.
template <class Range>
size_t elements_of(const Range* ranges, int num_ranges) {
    size_t sum = 0;
    for (int i = 0; i < num_ranges; ++i) sum += ranges[i].count;
    return sum;
}

// out = tree_node(a, b) over each range, node after node. `ranges` TreeRange<gradX>(num_nodes,
// num_ranges) in host memory, which may go once this returns; a range is as long in all nodes. out may
// be a or b, but not overlap them otherwise, and a node may read what an earlier one left in the same
// range. Throws Error for a negative num_ranges, for num_nodes outside 1 ... kTreeListRanges, for a null
// table, and where lengths differ.
LLMC_LAUNCHER void tree_add(const TreeRange<gradX>* ranges, int num_nodes, int num_ranges,
                            cudaStream_t stream) {
    cpu::check_tree_table(ranges, num_nodes, num_ranges);
    const LauncherRange range("tree_add", {{"nodes", num_nodes}, {"ranges", num_ranges}},
                              bytes_of<gradX>(elements_of(ranges, num_ranges), num_nodes + 2));
    for_each_list(ranges, num_nodes, num_ranges, kTreePiece<gradX>,
                  [&](const RangeList<TreeRange<gradX>>& list, uint32_t blocks) {
                      tree_add_kernel<gradX><<<blocks, kTreeThreads, 0, stream>>>(list);
                      launch_check();
                  });
}

// Copies each range, bit for bit; ranges do not overlap. `ranges` CopyRange<gradX>[num_ranges] in host
// memory, which may go once this returns. Throws Error for a negative num_ranges and for a null table.
LLMC_LAUNCHER void copy_list(const CopyRange<gradX>* ranges, int num_ranges, cudaStream_t stream) {
    cpu::check_table("copy_list", ranges, num_ranges);
    const LauncherRange range("copy_list", {{"ranges", num_ranges}},
                              bytes_of<gradX>(elements_of(ranges, num_ranges), 2));
    for_each_list(ranges, 1, num_ranges, kTreePiece<gradX>,
                  [&](const RangeList<CopyRange<gradX>>& list, uint32_t blocks) {
                      copy_list_kernel<gradX><<<blocks, kTreeThreads, 0, stream>>>(list);
                      launch_check();
                  });
}

}  // namespace llmc
