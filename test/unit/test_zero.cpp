// What zero.cuh and zero_exchange.cuh do without other processes: shards, nodes, the stages of the
// exchange, and the owner's tree.
#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

#include "llmc/zero.cuh"

namespace llmc {
namespace {

MultiGpuConfig rank_of(int rank, int n, int zero_stage = 0) {
    MultiGpuConfig config;
    config.process_rank = rank;
    config.num_processes = n;
    config.zero_stage = zero_stage;
    return config;
}

TEST(Shards, AreEqualConsecutiveAndCoverTheTensor) {
    for (const int n : {1, 2, 3, 4, 8}) {
        size_t next = 0;
        for (int rank = 0; rank < n; ++rank) {
            const MultiGpuConfig config = rank_of(rank, n, 1);
            const ShardInfo shard = multi_gpu_get_shard_offset(48, &config, 1);
            EXPECT_EQ(shard.offset, next);
            EXPECT_EQ(shard.size, 48u / n);
            next += shard.size;
        }
        EXPECT_EQ(next, 48u);
    }
}

TEST(Shards, BelowTheStageEveryRankHasAll) {
    const MultiGpuConfig config = rank_of(2, 4, 0);
    const ShardInfo shard = multi_gpu_get_shard_offset(49, &config, 1);
    EXPECT_EQ(shard.offset, 0u);
    EXPECT_EQ(shard.size, 49u);
}

TEST(Shards, ThatWouldNotBeEqualAreRefused) {
    const MultiGpuConfig config = rank_of(0, 4, 1);
    EXPECT_THROW(multi_gpu_get_shard_offset(49, &config, 1), Error);
}

TEST(ZeroConfigs, StageOneNeedsEveryTensorToDivide) {
    ModelConfig model;
    model.num_layers = 2;
    model.num_heads = 4;
    model.channels = 36;
    model.max_seq_len = 16;
    MultiGpuConfig config = rank_of(0, 4);
    EXPECT_EQ(set_zero_configs(&config, 1, ParamLayout(model)), "");
    EXPECT_EQ(config.zero_stage, 1);
    EXPECT_EQ(config.shard_num_parameters, ParamLayout(model).num_parameters() / 4);

    config = rank_of(0, 8);  // 36 elements of a bias do not divide by 8
    const std::string note = set_zero_configs(&config, 1, ParamLayout(model));
    EXPECT_NE(note.find("Can't equally partition parameters"), std::string::npos) << note;
    EXPECT_EQ(config.zero_stage, 0);
    EXPECT_EQ(config.shard_num_parameters, ParamLayout(model).num_parameters());
}

TEST(ZeroConfigs, StagesTwoAndThreeFallBackAndSaySo) {
    for (const int stage : {2, 3}) {
        MultiGpuConfig config = rank_of(0, 2);
        const std::string note = set_zero_configs(&config, stage, ParamLayout(ModelConfig{}));
        EXPECT_NE(note.find("not supported"), std::string::npos) << note;
        EXPECT_EQ(config.zero_stage, 0);
    }
}

TEST(OneProcess, NeedsNoCommunication) {
    MultiGpuConfig config;
    multi_gpu_barrier(&config);
    EXPECT_EQ(multi_gpu_cpu_float_sum(2.5f, &config), 2.5f);
    multi_gpu_agree(config, "");
    EXPECT_THROW(multi_gpu_agree(config, "no"), Error);
    multi_gpu_config_free(&config);
}

TEST(TimeLimits, MustBeNumbersAboveZero) {
    const char* name = "LLMC_TEST_LIMIT_S";
    ::unsetenv(name);
    EXPECT_EQ(seconds_from_environment(name, 12.0), 12.0);
    ::setenv(name, "1.5", 1);
    EXPECT_EQ(seconds_from_environment(name, 12.0), 1.5);
    for (const char* wrong : {"", "0", "-3", "5s", "nan", "inf"}) {
        ::setenv(name, wrong, 1);
        EXPECT_THROW(seconds_from_environment(name, 12.0), Error) << wrong;
    }
    ::unsetenv(name);
}

#ifdef MULTI_GPU

TEST(Nodes, TwoLevelsOnlyForEqualPowersOfTwoOfConsecutiveRanks) {
    EXPECT_EQ(ranks_per_node({0, 0, 0, 0, 1, 1, 1, 1}), 4);
    EXPECT_EQ(ranks_per_node({0, 0, 1, 1, 2, 2, 3, 3}), 2);
    EXPECT_EQ(ranks_per_node({0, 0, 0, 0}), 0);              // one node
    EXPECT_EQ(ranks_per_node({0, 1, 2, 3}), 0);              // one rank each
    EXPECT_EQ(ranks_per_node({0, 0, 0, 0, 0, 0, 1, 1}), 0);  // 6 + 2
    EXPECT_EQ(ranks_per_node({0, 0, 0, 0, 1, 1, 2, 2}), 0);  // 4 + 2 + 2
    EXPECT_EQ(ranks_per_node({0, 1, 0, 1, 0, 1, 0, 1}), 0);  // round robin
    EXPECT_EQ(ranks_per_node({0, 0, 1, 1, 0, 0, 1, 1}), 0);  // a node in two places
    EXPECT_EQ(ranks_per_node({0, 0, 0, 1, 1, 1}), 0);        // three are no power of two
}

// Every rank's stages, run on plain vectors: after them rank p must hold, of its own shard, the sum of
// all ranks' numbers by the tree, here written as text.
std::string shard_after_stages(const std::vector<int>& nodes, int owner) {
    const size_t n = nodes.size();
    std::vector<std::vector<std::string>> shard(n, std::vector<std::string>(n));
    for (size_t rank = 0; rank < n; ++rank) {
        for (std::string& text : shard[rank]) text = std::to_string(rank);
    }
    const size_t count = exchange_stages(nodes, 0).size();
    for (size_t number = 0; number < count; ++number) {
        std::vector<std::vector<std::string>> next = shard;
        for (size_t rank = 0; rank < n; ++rank) {
            const ExchangeStage stage = exchange_stages(nodes, static_cast<int>(rank))[number];
            EXPECT_EQ(stage.ranks[stage.self], static_cast<int>(rank));
            for (const size_t p : stage.shards[stage.self]) {
                std::vector<std::string> pieces;
                for (const int peer : stage.ranks) pieces.push_back(shard[peer][p]);
                for (size_t step = 1; step < pieces.size(); step *= 2) {
                    for (size_t i = 0; i < pieces.size(); i += 2 * step) {
                        pieces[i] = "(" + pieces[i] + "+" + pieces[i + step] + ")";
                    }
                }
                next[rank][p] = pieces[0];
            }
        }
        shard = next;
    }
    return shard[owner][owner];
}

TEST(Nodes, TwoLevelsAddByTheSameTreeAsOne) {
    const std::string tree = "(((0+1)+(2+3))+((4+5)+(6+7)))";
    for (const std::vector<int>& nodes : {std::vector<int>{0, 0, 0, 0, 0, 0, 0, 0},
                                          {0, 0, 0, 0, 1, 1, 1, 1},
                                          {0, 0, 1, 1, 2, 2, 3, 3},
                                          {0, 0, 0, 0, 0, 0, 1, 1}}) {
        for (int owner = 0; owner < 8; ++owner) EXPECT_EQ(shard_after_stages(nodes, owner), tree);
    }
}

// The sum of each rank's pieces by the tree, one node at a time.
gradX tree_of(std::vector<gradX> values) {
    for (size_t step = 1; step < values.size(); step *= 2) {
        for (size_t i = 0; i < values.size(); i += 2 * step) {
            values[i] = cpu::tree_node(values[i], values[i + step]);
        }
    }
    return values[0];
}

TEST(OwnersTree, AddsTwoFourAndEightPiecesWhereverTheOwnOneIs) {
    constexpr size_t kCount = 1000;
    for (const size_t n : {2, 4, 8}) {
        for (size_t self = 0; self < n; ++self) {
            std::vector<std::vector<gradX>> memory(n, std::vector<gradX>(kCount));
            for (size_t rank = 0; rank < n; ++rank) {
                for (size_t k = 0; k < kCount; ++k) {
                    const float sign = (rank + k) % 3 == 0 ? -1.0f : 1.0f;
                    memory[rank][k] = from_float<gradX>(
                        sign * (1.0f + static_cast<float>((k * 37 + rank * 101) % 997) / 31.0f));
                }
            }
            std::vector<gradX> expected;
            for (size_t k = 0; k < kCount; ++k) {
                std::vector<gradX> values;
                for (size_t rank = 0; rank < n; ++rank) values.push_back(memory[rank][k]);
                expected.push_back(tree_of(values));
            }
            std::vector<gradX*> buffers;
            for (std::vector<gradX>& each : memory) buffers.push_back(each.data());
            detail::add_pieces({buffers}, {{0, 0, 0, kCount, 0}}, self, nullptr);
            cuda_check(cudaDeviceSynchronize());
            for (size_t k = 0; k < kCount; ++k) {
                ASSERT_EQ(to_float(memory[self][k]), to_float(expected[k])) << n << " " << self;
            }
        }
    }
}

size_t half_elements(const std::vector<std::vector<size_t>>& lists, int n) {
    GradientExchange exchange;
    plan_exchange_buffers(&exchange, lists, n);
    return exchange.half_elements;
}

TEST(Exchange, RoomForOneRoundAndForOneAlignedPieceOfEachRank) {
    EXPECT_EQ(half_elements({{256, 1024}}, 2), 128u + 512u);
    EXPECT_EQ(half_elements({{size_t{1} << 30}}, 2), GradientExchange::kRoundElements);
    EXPECT_EQ(half_elements({{8}}, 8), 7u * 128u);
}

TEST(Exchange, TensorsTravelTogether) {
    using Flags = std::vector<bool>;
    EXPECT_EQ(packed_tensors({100, 1600, 99, 101}, 16), (Flags{true, false, true, false}));
    EXPECT_EQ(packed_tensors({100, 1600, 99, 101}, 0), (Flags{false, false, false, false}));
    EXPECT_EQ(packed_tensors({100, 1600, 99, 101}, 1), (Flags{true, true, true, true}));
    EXPECT_EQ(packed_tensors({100, 1600}, 16), (Flags{false, false})) << "one alone gains nothing";

    for (const auto& [ratio, staged] : {std::pair{1, 1024 + 3 * 128}, {16, 3 * 128}, {0, 0}}) {
        GradientExchange exchange;
        exchange.pack_ratio = ratio;
        plan_exchange_buffers(&exchange, {{4096, 128, 16}, {64, 4096, 8, 8}}, 4);
        EXPECT_EQ(exchange.half_elements, 3u * (1024 + 3 * 128)) << ratio;
        EXPECT_EQ(exchange.staging_half_elements, 3u * staged) << ratio;
    }
}

TEST(Exchange, ShortListsWaitForTheNext) {
    using Lists = std::vector<std::vector<size_t>>;
    const Lists lists = {{2, 2}, {90, 10}, {60}, {40, 1}, {7, 3}};
    EXPECT_EQ(merged_lists(lists, 0), lists);
    EXPECT_EQ(merged_lists(lists, 100), (Lists{{2, 2, 90, 10}, {60, 40, 1}, {7, 3}}));
    EXPECT_EQ(merged_lists(lists, 1000), (Lists{{2, 2, 90, 10, 60, 40, 1, 7, 3}}));
    // However small a model, its reductions do not all wait for the end of the backward pass.
    GradientExchange exchange;
    plan_exchange_buffers(&exchange, lists, 2);
    EXPECT_EQ(exchange.list_elements, 215u / GradientExchange::kLeastLists);
}

#endif  // MULTI_GPU

}  // namespace
}  // namespace llmc
