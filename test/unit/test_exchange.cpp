// The reduction across ranks as a whole, on ranks that are threads here: the owner's sums, however a list
// is cut into rounds and whatever travels together.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>
#include <vector>

#include "llmc/cpu/tree.h"
#include "llmc/zero.cuh"
#include "test/unit/child_process.h"
#include "test/unit/held_port.h"

#ifdef MULTI_GPU

namespace llmc {
namespace {

constexpr size_t kSizes[] = {4096, 24, 8192, 1000, 16, 512};
constexpr size_t kTensors = std::size(kSizes);

gradX value(int rank, size_t tensor, size_t i) {
    const double angle = 1.0 + 3.0 * rank + 0.37 * static_cast<double>(tensor) + 0.9 * i;
    return from_float<gradX>(static_cast<float>(std::sin(angle)));
}

gradX expected_sum(int n, size_t tensor, size_t i) {
    std::vector<gradX> sums;
    for (int rank = 0; rank < n; ++rank) sums.push_back(value(rank, tensor, i));
    for (int step = 1; step < n; step *= 2) {
        for (int left = 0; left < n; left += 2 * step) {
            sums[left] = cpu::tree_node(sums[left], sums[left + step]);
        }
    }
    return sums[0];
}

// One rank's gradients, and the exchange set up with this round and ratio. They come as one list, or as
// a list each, of which the exchange makes three: the second waits for the third, and the last three
// for the end of the step.
struct Exchanged {
    Exchanged(MultiGpuConfig* config, size_t round, size_t ratio, bool one_list)
        : one_list(one_list) {
        ReductionPlan plan;
        plan.num_processes = config->num_processes;
        multi_gpu_plan_reduction(config, plan);
        GradientExchange& exchange = *config->exchange;
        exchange.round_elements = round;
        exchange.pack_ratio = ratio;
        std::vector<std::vector<size_t>> lists;
        for (const size_t size : kSizes) {
            if (lists.empty() || !one_list) lists.emplace_back();
            lists.back().push_back(size);
        }
        plan_exchange_buffers(&exchange, lists, config->num_processes);
        EXPECT_EQ(merged_lists(lists, exchange.list_elements).size(), one_list ? 1u : 3u);
        received = DeviceBuffer<gradX>(2 * exchange.half_elements);
        staging = DeviceBuffer<gradX>(2 * exchange.staging_half_elements);
        exchange.received = received.get();
        exchange.staging = staging.get();
        exchange.open();
        for (size_t t = 0; t < kTensors; ++t) tensors[t] = DeviceBuffer<gradX>(kSizes[t]);
        rank = config->process_rank;
    }
    // The gradients are there late: nothing may go out before.
    void reduce(MultiGpuConfig* config, cudaStream_t stream) {
        cuda_check(cudaLaunchHostFunc(
            stream, [](void* self) { static_cast<Exchanged*>(self)->fill(); }, this));
        gradX* pointers[kTensors];
        for (size_t t = 0; t < kTensors; ++t) pointers[t] = tensors[t].get();
        if (one_list) {
            multi_gpu_async_reduce_gradient(pointers, kSizes, config, stream);
        } else {
            for (size_t t = 0; t < kTensors; ++t) {
                gradX* const one[] = {pointers[t]};
                const size_t size[] = {kSizes[t]};
                multi_gpu_async_reduce_gradient(one, size, config, stream);
            }
        }
        multi_gpu_finish_reduction(config, stream);
        wait_for_stream(*config, "the test", stream);
    }
    void fill() {
        std::this_thread::sleep_for(std::chrono::milliseconds(3));
        for (size_t t = 0; t < kTensors; ++t) {
            for (size_t i = 0; i < kSizes[t]; ++i) tensors[t].get()[i] = value(rank, t, i);
        }
    }
    bool one_list;
    int rank;
    DeviceBuffer<gradX> received, staging, tensors[kTensors];
};

// Elements of this rank's shards, or of all, that are not the tree's sum.
size_t count_wrong(const Exchanged& done, const MultiGpuConfig& config) {
    size_t wrong = 0;
    for (size_t t = 0; t < kTensors; ++t) {
        const ShardInfo part = multi_gpu_get_shard_offset(kSizes[t], &config, 1);
        for (size_t i = part.offset; i < part.offset + part.size; ++i) {
            const float sum = to_float(expected_sum(config.num_processes, t, i));
            wrong += to_float(done.tensors[t].get()[i]) != sum;
        }
    }
    return wrong;
}

// Runs body(config) as each of n ranks, `per_node` of them on a node.
template <class Body>
void as_ranks(int n, int per_node, Body&& body) {
    const test::HeldPort port;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < n; ++rank) {
        threads.emplace_back([&, rank] {
            MultiGpuConfig config =
                multi_gpu_config_init(n, rank, per_node, "127.0.0.1", "", "tcp", port.number());
            body(&config);
            multi_gpu_config_free(&config);
        });
    }
    for (std::thread& thread : threads) thread.join();
}

void check_all_ways(int n, int per_node, int zero_stage) {
    as_ranks(n, per_node, [&](MultiGpuConfig* config) {
        config->zero_stage = zero_stage;
        cudaStream_t stream;  // the default one would be the same for all ranks
        cuda_check(cudaStreamCreate(&stream));
        for (const size_t round : {size_t{384}, size_t{3000}, size_t{1} << 20}) {
            for (const size_t ratio : {0, 1, 16}) {
                for (const bool one_list : {true, false}) {
                    Exchanged exchanged(config, round, ratio, one_list);
                    exchanged.reduce(config, stream);
                    EXPECT_EQ(count_wrong(exchanged, *config), 0u)
                        << n << " ranks, " << per_node << " on a node, ZeRO-" << zero_stage
                        << ", rounds of " << round << ", ratio " << ratio
                        << (one_list ? ", one list" : ", a list each");
                    config->exchange.reset();
                }
            }
        }
        cudaStreamDestroy(stream);
    });
}

TEST(ExchangeOfTwoRanks, EveryWayToSendGivesTheTreesSums) {
    check_all_ways(2, 8, 0);
    check_all_ways(2, 8, 1);
}

TEST(ExchangeOfFourRanks, EveryWayToSendGivesTheTreesSums) {
    check_all_ways(4, 8, 0);
    check_all_ways(4, 8, 1);
}

TEST(ExchangeOfTwoNodes, EveryWayToSendGivesTheTreesSums) {
    check_all_ways(4, 2, 0);
    check_all_ways(4, 2, 1);
}

// Rank 1 goes before a sum in which it has a part. Rank 0 waits only when its stream has passed it.
std::string late_host() {
    std::atomic<bool> queued{false};
    as_ranks(2, 8, [&](MultiGpuConfig* config) {
        if (config->process_rank == 1) {
            while (!queued) std::this_thread::yield();
            ncclCommAbort(config->nccl_comm);
            std::this_thread::sleep_for(std::chrono::seconds(30));
            return;
        }
        *config->unified_buffer = 1.0f;
        nccl_group(*config, "sum", -1, [&] {
            nccl_check(*config,
                       ncclAllReduce(config->unified_buffer, config->unified_buffer, 1, ncclFloat32,
                                     ncclSum, config->nccl_comm, config->nccl_stream),
                       "sum");
        });
        queued = true;
        cudaEvent_t passed;
        cudaEventCreate(&passed);
        cudaEventRecord(passed, config->nccl_stream);
        cudaEventSynchronize(passed);
        std::puts("passed");
        std::fflush(stdout);
        multi_gpu_wait_for(passed, config);
        _exit(7);
    });
    return "both ended";
}
const test::ChildMode late_mode("exchange late host", late_host);

TEST(ExchangeOfTwoRanks, ALateHostDoesNotTakeASumThatALostRankHadNoPartIn) {
    EXPECT_EQ(test::run_again("exchange late host"), "passed\nexit status 1");
}

}  // namespace
}  // namespace llmc

#endif  // MULTI_GPU
