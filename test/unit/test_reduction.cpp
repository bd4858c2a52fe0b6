#include "llmc/reduction.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

namespace llmc {
namespace {

// A plan on the canonical path; no model's tensors are asked.
ReductionPlan plan_of(int micro_batches, int processes, int width) {
    ReductionPlan plan;
    plan.num_micro_batches = micro_batches;
    plan.num_processes = processes;
    plan.width = width;
    return plan;
}

// The sum of micro-batches first ... end-1 in the contract's order: slots in order, then neighbours.
std::string expected_sum(const ReductionPlan& plan, int first, int end) {
    if (end - first > plan.micro_per_slot()) {
        const int middle = first + (end - first) / 2;
        return "[" + expected_sum(plan, first, middle) + " " + expected_sum(plan, middle, end) +
               "]";
    }
    std::string sum;
    for (int j = first; j < end; ++j) sum += (j > first ? "+" : "") + std::to_string(j);
    return sum;
}

// Does what the targets say with texts in place of gradients: what the gradients hold at the end.
std::string sum_by_targets(const ReductionPlan& plan) {
    std::map<int, std::string> buffers;
    for (int local = 0; local < plan.micro_per_rank(); ++local) {
        const GradientTarget target = gradient_target(plan, local);
        std::string& buffer = buffers[target.buffer];
        buffer = (target.accumulate ? buffer + "+" : "") + std::to_string(local);
        for (const TreeNode& node : target.nodes) {
            std::string sum = "[" + buffers[node.left] + " " + buffers[node.right] + "]";
            buffers[node.out] = sum;
        }
    }
    return buffers[kGradients];
}

TEST(GradientTargets, AddUpSlotsInOrderAndThenTheTree) {
    for (const int width : {1, 2, 4, 8, 16}) {
        for (const int per_slot : {1, 2, 3, 16}) {
            for (int processes = 1; processes <= width; processes *= 2) {
                const ReductionPlan plan = plan_of(width * per_slot, processes, width);
                EXPECT_EQ(sum_by_targets(plan), expected_sum(plan, 0, plan.micro_per_rank()))
                    << "width " << width << ", " << per_slot << " a slot, " << processes;
            }
        }
    }
}

// A sum that the next node of the row overwrites need not go to memory: two of a row took as long as three.
TEST(GradientTargets, ARowOfNodesAddsUpInOneBuffer) {
    const ReductionPlan plan = plan_of(16, 1, 16);
    for (int slot = 0; slot < 16; ++slot) {
        const std::vector<TreeNode> nodes = nodes_after_slot(plan, slot);
        for (size_t i = 0; i < nodes.size(); ++i) {
            EXPECT_EQ(nodes[i].out, nodes.back().out) << slot;
            EXPECT_EQ(nodes[i].right, i == 0 ? kGradients : nodes.back().out) << slot;
        }
    }
}

TEST(GradientTargets, OnlyTheLastMicroBatchCompletesTheStep) {
    const ReductionPlan plan = plan_of(32, 2, 8);
    for (int local = 0; local < plan.micro_per_rank(); ++local) {
        EXPECT_EQ(gradient_target(plan, local).step_complete, local == 15) << local;
    }
}

// Graphs were kept by the micro-batch's number, 128 at most: of 128 micro-steps half ran without.
TEST(GradientTargets, AreFewHoweverManyTheMicroBatches) {
    for (const int width : {1, 2, 8, 1024}) {
        for (const int per_slot : {1, 2, 16, 512}) {
            for (int processes = 1; processes <= width; processes *= 2) {
                const ReductionPlan plan = plan_of(width * per_slot, processes, width);
                std::set<GradientTarget> kinds;
                for (int local = 0; local < plan.micro_per_rank(); ++local) {
                    kinds.insert(gradient_target(plan, local));
                }
                EXPECT_LE(kinds.size(), 4u + plan.num_spares())
                    << "width " << width << ", " << per_slot << " a slot, " << processes;
            }
        }
    }
}

// Each field alone makes another key.
TEST(GradientTargets, DifferByEveryField) {
    std::vector<GradientTarget> targets(8);
    targets[1].buffer = 0;
    targets[2].accumulate = true;
    targets[3].step_complete = true;
    targets[4].from_spare = true;
    targets[5].nodes = {{0, kGradients, kGradients}};
    targets[6].nodes = {{0, kGradients, 1}};
    targets[7].nodes = {{0, 1, 1}};
    EXPECT_EQ(std::set<GradientTarget>(targets.begin(), targets.end()).size(), targets.size());
}

}  // namespace
}  // namespace llmc
