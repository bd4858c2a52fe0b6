// The node of the gradients' reduction tree.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <vector>

#include "llmc/cpu/blocks.h"
#include "llmc/precision.h"
#include "llmc/step_state.h"

namespace llmc::cpu {

// a + b, rounded to nearest even in G; the one place where the CPU adds two slots' gradients.
//
// For bf16 the sum is rounded to fp32 and then to bf16, which gives the same bits as rounding once:
// 24 bits of significand are at least 2 * 8 + 2 (Figueroa, "When is double rounding innocuous?",
// 1995). A NaN gets the GPU's bits whatever the operands' were.
template <class G>
inline G tree_node(G a, G b) {
    const accum_t<G> sum = load(a) + load(b);
    if constexpr (std::is_same_v<G, float>) {
        constexpr uint32_t kGpuNan = 0x7fffffffu;
        float nan;
        std::memcpy(&nan, &kGpuNan, sizeof(nan));
        return sum == sum ? sum : nan;
    } else {
        return store<G>(sum);
    }
}

template <class G>
void add_range(const TreeRange<G> range, size_t begin, size_t end) {
    for (size_t k = begin; k < end; ++k) range.out[k] = tree_node(range.a[k], range.b[k]);
}

constexpr int kMostTreeNodes = 64;  // of one call

// Throws Error unless `ranges` (num_nodes, num_ranges) can be what tree_add takes.
template <class G>
void check_tree_table(const TreeRange<G>* ranges, int num_nodes, int num_ranges) {
    if (num_nodes < 1 || num_nodes > kMostTreeNodes) {
        throw Error(format("tree_add: %d nodes, must be 1 to %d", num_nodes, kMostTreeNodes));
    }
    check_table("tree_add", ranges, num_ranges);
    for (int i = num_ranges; i < num_nodes * num_ranges; ++i) {
        const size_t first = ranges[i % num_ranges].count;
        if (ranges[i].count == first) continue;
        throw Error(format("tree_add: range %d has %zu elements in node 0 and %zu in node %d",
                           i % num_ranges, first, ranges[i].count, i / num_ranges));
    }
}

// out = tree_node(a, b) over each range, node after node. `ranges` TreeRange<G>(num_nodes, num_ranges) in
// host memory, which may go once this returns; a range is as long in all nodes. out may be a or b, but
// not overlap them otherwise, and a node may read what an earlier one left in the same range. Throws
// Error for a negative num_ranges, for num_nodes outside 1 ... kMostTreeNodes, for a null table, and
// where lengths differ.
template <class G>
void tree_add(const TreeRange<G>* ranges, int num_nodes, int num_ranges, cudaStream_t stream) {
    check_tree_table(ranges, num_nodes, num_ranges);
    const std::vector<TreeRange<G>> list(ranges, ranges + num_nodes * num_ranges);
    size_t max_count = 0;
    for (const TreeRange<G>& range : list) max_count = std::max(max_count, range.count);
    enqueue(stream, [list, num_nodes, num_ranges, max_count] {
        constexpr size_t kBlock = size_t{1} << 15;
        for (int node = 0; node < num_nodes; ++node) {
            const TreeRange<G>* of_node = list.data() + node * num_ranges;
            for_each_block(
                static_cast<size_t>(num_ranges), max_count, kBlock,
                [&](size_t i) { return of_node[i].count; },
                [&](size_t i, size_t begin, size_t end) { add_range(of_node[i], begin, end); });
        }
    });
}

// Copies each range, bit for bit; ranges do not overlap. `ranges` CopyRange<G>[num_ranges] in host
// memory, which may go once this returns. Throws Error for a negative num_ranges and for a null table.
template <class G>
void copy_list(const CopyRange<G>* ranges, int num_ranges, cudaStream_t stream) {
    check_table("copy_list", ranges, num_ranges);
    const std::vector<CopyRange<G>> list(ranges, ranges + num_ranges);
    enqueue(stream, [list] {
        for (const CopyRange<G>& range : list) {
            std::memcpy(static_cast<void*>(range.to), range.from, range.count * sizeof(G));
        }
    });
}

}  // namespace llmc::cpu
