// Which micro-batch goes where: the order in which gradients are added up.
//
// One step has M micro-batches, dealt to N ranks in contiguous runs of A = M / N. W, the width, is
// the largest power of two up to -rw that divides M. When N divides W (the canonical path) each rank
// holds W / N slots of M / W consecutive micro-batches. Inside a slot gradients accumulate in order
// into one buffer; the slots are then summed by a binary tree over neighbours, (0,1) (2,3) ..., whose
// nodes round once to gradX. The tree's shape depends on M and W alone, never on N: that is what
// makes the sum the same bits for every N. A rank adds up its own subtree as a binary counter, with
// one spare buffer a level; owners of shards continue the same tree across ranks.
#pragma once

#include <string>
#include <tuple>
#include <vector>

#include "llmc/error.h"
#include "llmc/params.h"
#include "llmc/test_switches.h"

namespace llmc {

struct ReductionPlan {
    int num_micro_batches = 1;  // M, of one step over all ranks
    int num_processes = 1;      // N
    int width = 1;              // W
    bool canonical = true;      // N divides W and W divides every tensor
    std::string why_not;        // when not canonical: the reason

    int micro_per_rank() const { return num_micro_batches / num_processes; }
    int slots_per_rank() const { return canonical ? width / num_processes : 1; }
    int micro_per_slot() const { return micro_per_rank() / slots_per_rank(); }
    // Spare gradient buffers of a rank: log2 of its slots.
    int num_spares() const {
        int spares = 0;
        while ((1 << spares) < slots_per_rank()) ++spares;
        return spares;
    }
    // Chunks that each layer of each tensor is cut into for the gradient norm.
    int chunks_per_tensor() const { return canonical ? width : num_processes; }
};

// The plan of a step. Throws Error when N does not divide M.
inline ReductionPlan make_reduction_plan(int num_micro_batches, int num_processes, int max_width,
                                         const ParamLayout& layout) {
    if (num_processes < 1 || num_micro_batches % num_processes != 0) {
        throw Error(format("%d micro-batches a step cannot be dealt to %d processes evenly",
                           num_micro_batches, num_processes));
    }
    ReductionPlan plan;
    plan.num_micro_batches = num_micro_batches;
    plan.num_processes = num_processes;
    while (plan.width * 2 <= max_width && num_micro_batches % (plan.width * 2) == 0) {
        plan.width *= 2;
    }
    if (plan.width % num_processes != 0) {
        plan.why_not = format(
            "%d processes do not divide the width %d, the largest power of two up to -rw %d that "
            "divides the %d micro-batches of a step",
            num_processes, plan.width, max_width, num_micro_batches);
    }
    layout.for_each_layer([&](const ParamInfo& info, size_t) {
        if (layout.layer_elements(info.id) % plan.width != 0 && plan.why_not.empty()) {
            plan.why_not = format("the width %d does not divide the %zu elements of %s", plan.width,
                                  layout.layer_elements(info.id), info.name);
        }
    });
    plan.canonical = plan.why_not.empty();
    return plan;
}

// Buffers of the binary counter by number: kGradients is the one that the result ends up in.
constexpr int kGradients = -1;

// One node of the tree: buffer out = buffer left + buffer right.
struct TreeNode {
    int left;   // spare that holds the sum of the earlier slots
    int right;  // kGradients, or what the node before it in its row left in `out`
    int out;    // kGradients, or the spare that keeps the sum until its neighbour is done

    friend bool operator<(const TreeNode& a, const TreeNode& b) {
        return std::tie(a.left, a.right, a.out) < std::tie(b.left, b.right, b.out);
    }
};

// Buffer that the backward pass of local slot `slot` writes to: spare 0 where the slot waits for its
// neighbour, which then is the right operand of their node.
inline int slot_target(const ReductionPlan& plan, int slot) {
    return slot % 2 == 0 && plan.slots_per_rank() > 1 ? 0 : kGradients;
}

// The row of nodes to add up once local slot `slot` is complete, in order: as many as `slot` has trailing
// ones. All of a row leave their sums in the buffer that its last one must, so that each is overwritten in
// the cache by the next, and only the last goes to memory. Of 8 slots, number 3 (binary 011) has two nodes:
// {left 0, right kGradients, out 2}, which is (slot 2 + slot 3), and {left 1, right 2, out 2}, in place,
// which adds to that the sum of slots 0 and 1.
inline std::vector<TreeNode> nodes_after_slot(const ReductionPlan& plan, int slot) {
    int levels = 0;
    while ((slot >> levels) & 1) ++levels;
    const int out = slot == plan.slots_per_rank() - 1 ? kGradients : levels;
    std::vector<TreeNode> nodes;
    for (int level = 0; level < levels; ++level) {
        nodes.push_back({level, level == 0 ? kGradients : out, out});
    }
    return nodes;
}

// Where one micro-batch's gradients go, and what follows once they are there.
//
// That is also all in which the launches of one micro-step differ from another's: tokens are copied to one
// fixed place before it, and its loss from one after. Micro-steps with equal targets therefore queue the
// same work, and the target is the key under which CapturedWork keeps their CUDA graph. A rank has few
// different ones, however many its micro-batches: two buffers, written or added to, make four without
// nodes; those with nodes end a slot, and each ends as many levels of the rank's tree as it has nodes: one
// for each of the log2(W / N) levels.
struct GradientTarget {
    int buffer = kGradients;      // kGradients, or the spare that is written
    bool accumulate = false;      // add to what an earlier micro-batch of the slot left
    bool step_complete = false;   // the rank's last micro-batch: reduce as gradients become final
    bool from_spare = false;      // Fault::fused_leaf: the slot goes on from what spare 0 holds
    std::vector<TreeNode> nodes;  // to add up then, in order: the slot is complete

    friend bool operator<(const GradientTarget& a, const GradientTarget& b) {
        return std::tie(a.buffer, a.accumulate, a.step_complete, a.from_spare, a.nodes) <
               std::tie(b.buffer, b.accumulate, b.step_complete, b.from_spare, b.nodes);
    }
};

// Target of this rank's micro-batch number `local`, 0 ... A-1.
inline GradientTarget gradient_target(const ReductionPlan& plan, int local) {
    const int slot = local / plan.micro_per_slot(), place = local % plan.micro_per_slot();
    GradientTarget target;
    target.buffer = slot_target(plan, slot);
    target.from_spare = planted_fault() == Fault::fused_leaf && slot % 2 == 1 && place == 0;
    target.accumulate = place > 0 || target.from_spare;
    target.step_complete = local == plan.micro_per_rank() - 1;
    if (place == plan.micro_per_slot() - 1) target.nodes = nodes_after_slot(plan, slot);
    return target;
}

}  // namespace llmc
