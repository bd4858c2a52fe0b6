#include "llmc/cpu/global_norm.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/step_state_init.h"
#include "test/unit/bits.h"
#include "test/unit/guarded.h"
#include "test/unit/stream_gate.h"

namespace {

using namespace llmc;
using namespace llmc::test;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

// Sums of squares of `chunks` by one launch; guards and unwritten sums are checked.
template <class G>
std::vector<double> launch_norm(const std::vector<NormChunk<G>>& chunks, size_t max_count,
                                cudaStream_t stream = nullptr) {
    const int n = static_cast<int>(chunks.size());
    Guarded<double> sums(chunks.size());
    Guarded<char> scratch(cpu::global_norm_chunks_scratch_bytes(n, max_count));
    cpu::global_norm_chunks(sums.data(), chunks.data(), n, max_count, scratch.data(), stream);
    cudaStreamSynchronize(stream);
    sums.expect_guards_intact("sums");
    scratch.expect_guards_intact("scratch");
    return std::vector<double>(sums.data(), sums.data() + chunks.size());
}

const std::vector<size_t> kCounts = {0, 1, 15, 16, 17, 1000, 32768, 32769, 100003};

template <class G>
void expect_matches_naive() {
    std::vector<std::vector<G>> data;
    std::vector<NormChunk<G>> chunks;
    for (const size_t count : kCounts) {
        data.emplace_back(count);
        fill_normal(data.back().data(), count, static_cast<uint32_t>(count));
        chunks.push_back({data.back().data(), count});
    }
    const std::vector<double> sums = launch_norm(chunks, 100003);
    for (size_t i = 0; i < chunks.size(); ++i) {
        long double expected = 0.0L;
        for (const G value : data[i]) {
            expected += static_cast<long double>(load(value)) * load(value);
        }
        EXPECT_NEAR(sums[i], static_cast<double>(expected), 1e-13 * static_cast<double>(expected))
            << kCounts[i];
    }
}
TEST(GlobalNorm, Bf16MatchesANaiveSum) {
    expect_matches_naive<bf16>();
}
TEST(GlobalNorm, Fp32MatchesANaiveSum) {
    expect_matches_naive<float>();
}
TEST(GlobalNorm, DoubleMatchesANaiveSum) {
    expect_matches_naive<double>();
}

TEST(GlobalNorm, SquaresThatFp32CannotHoldAreCounted) {
    const std::vector<float> data = {1e30f, 1e-30f, 3.0f};
    const std::vector<double> large = launch_norm<float>({{data.data(), 1}}, 1);
    const std::vector<double> small = launch_norm<float>({{data.data() + 1, 1}}, 1);
    EXPECT_DOUBLE_EQ(large[0], static_cast<double>(1e30f) * static_cast<double>(1e30f));
    EXPECT_DOUBLE_EQ(small[0], static_cast<double>(1e-30f) * static_cast<double>(1e-30f));
}

TEST(GlobalNorm, AChunksBitsDependOnItsSizeAlone) {
    std::vector<bf16> data(100003);
    fill_normal(data.data(), data.size(), 3);
    const NormChunk<bf16> chunk = {data.data(), data.size()};
    const NormChunk<bf16> other = {data.data() + 5, 70000};
    const double alone = launch_norm<bf16>({chunk}, data.size())[0];
    EXPECT_EQ(bits_of(launch_norm<bf16>({other, chunk, other}, data.size())[1]), bits_of(alone));
    EXPECT_EQ(bits_of(launch_norm<bf16>({other, chunk}, 5 * data.size())[1]), bits_of(alone));
    std::vector<bf16> moved(data.size() + 1);
    std::copy(data.begin(), data.end(), moved.begin() + 1);
    EXPECT_EQ(bits_of(launch_norm<bf16>({{moved.data() + 1, data.size()}}, data.size())[0]),
              bits_of(alone));
}

TEST(GlobalNorm, NanInOneChunkStaysInItsSum) {
    std::vector<bf16> data(3000);
    fill_normal(data.data(), data.size(), 4);
    data[1500] = from_bits<bf16>(0x7fff);
    const std::vector<double> sums = launch_norm<bf16>(
        {{data.data(), 1000}, {data.data() + 1000, 1000}, {data.data() + 2000, 1000}}, 1000);
    EXPECT_TRUE(std::isfinite(sums[0]));
    EXPECT_TRUE(std::isnan(sums[1]));
    EXPECT_TRUE(std::isfinite(sums[2]));
}

TEST(GlobalNorm, TheTableIsReadWhenTheStreamGetsThere) {
    const std::vector<float> data = {3.0f, 4.0f};
    NormChunk<float> chunk = {nullptr, 0};
    double sum = kNan;
    double scratch[1];
    StreamGate gate;
    gate.close(nullptr);
    cpu::global_norm_chunks(&sum, &chunk, 1, 2, scratch, nullptr);
    chunk = {data.data(), 2};
    gate.open();
    cudaDeviceSynchronize();
    EXPECT_EQ(sum, 25.0);
}

TEST(GlobalNorm, BadArgumentsAreRefused) {
    const NormChunk<float> chunk = {nullptr, 0};
    double sum, scratch;
    EXPECT_THROW(cpu::global_norm_chunks(&sum, &chunk, -1, 1, &scratch, nullptr), Error);
    EXPECT_THROW(cpu::global_norm_chunks<float>(&sum, nullptr, 1, 1, &scratch, nullptr), Error);
    EXPECT_THROW(cpu::global_norm_chunks<float>(nullptr, &chunk, 1, 1, &scratch, nullptr), Error);
    EXPECT_THROW(cpu::global_norm_chunks<float>(&sum, &chunk, 1, 1, nullptr, nullptr), Error);
}

// ---- bits for any number of threads: this binary again, bound to fewer cores ----

std::vector<double> sums_of_known_data() {
    static std::vector<float> data(300000);
    fill_normal(data.data(), data.size(), 5);
    return launch_norm<float>({{data.data(), data.size()}, {data.data() + 1, 99999}}, data.size());
}

// Its output is what the next test reads.
TEST(GlobalNormThreads, SumsOfKnownDataAreClose) {
    const std::vector<double> sums = sums_of_known_data();
    EXPECT_NEAR(sums[0] / 300000, 1.0, 0.02);
    EXPECT_NEAR(sums[1] / 99999, 1.0, 0.03);
    for (const double sum : sums) {
        std::printf("sum %d %016llx\n", cpu::usable_cores(),
                    static_cast<unsigned long long>(bits_of(sum)));
    }
}

TEST(GlobalNormThreads, OneThreadGivesTheSameBitsAsAll) {
    char self[4096];
    const ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
    ASSERT_GT(length, 0);
    const std::string command = "'" + std::string(self, static_cast<size_t>(length)) +
                                "' --gtest_filter=GlobalNormThreads.SumsOfKnownDataAreClose";

    cpu_set_t all, one;
    ASSERT_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++cpu) {
        if (CPU_ISSET(cpu, &all)) CPU_SET(cpu, &one);
    }
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    FILE* child = popen(command.c_str(), "r");
    ASSERT_EQ(sched_setaffinity(0, sizeof(all), &all), 0);
    ASSERT_NE(child, nullptr);
    std::vector<unsigned long long> child_bits;
    char line[256];
    while (std::fgets(line, sizeof(line), child) != nullptr) {
        int cores;
        unsigned long long bits;
        if (std::sscanf(line, "sum %d %llx", &cores, &bits) != 2) continue;
        EXPECT_EQ(cores, 1);
        child_bits.push_back(bits);
    }
    EXPECT_EQ(pclose(child), 0);
    const std::vector<double> sums = sums_of_known_data();
    ASSERT_EQ(child_bits.size(), sums.size());
    for (size_t i = 0; i < sums.size(); ++i) EXPECT_EQ(child_bits[i], bits_of(sums[i]));
}

// ---- decide_step ----

StepState decide_with(StepState state, const std::vector<double>& losses,
                      const std::vector<double>& sums, const StepRules& rules = {}) {
    cpu::decide_step(&state, losses.data(), static_cast<int>(losses.size()), sums.data(),
                     sums.size(), rules, nullptr);
    cudaDeviceSynchronize();
    return state;
}

TEST(DecideStep, MeanLossNormAndClipFactor) {
    const StepState state = decide_with(initial_step_state(), {1.0, 2.0, 6.0}, {9.0, 16.0});
    EXPECT_EQ(state.loss, 3.0);
    EXPECT_EQ(state.norm, 5.0);
    EXPECT_EQ(state.grad_scale, 0.2f);
    EXPECT_EQ(state.skip, SkipReason::none);
    StepRules rules;
    rules.max_norm = 5.0f;
    EXPECT_EQ(decide_with(initial_step_state(), {1.0}, {25.0}, rules).grad_scale, 1.0f);
    rules.max_norm = 4.0f;
    EXPECT_EQ(decide_with(initial_step_state(), {1.0}, {25.0}, rules).grad_scale, 0.8f);
}

TEST(DecideStep, ValuesAreAddedInIndexOrder) {
    // Each 1 is lost against 2^53; added first, they are not.
    std::vector<double> values(1025, 1.0);
    values[0] = 0x1p53;
    const StepState state = decide_with(initial_step_state(), values, values);
    EXPECT_EQ(state.loss, 0x1p53 / 1025);
    EXPECT_EQ(state.norm, std::sqrt(0x1p53));
    std::swap(values[0], values[1024]);
    const StepState reversed = decide_with(initial_step_state(), values, values);
    EXPECT_NE(reversed.loss, state.loss);
    EXPECT_NE(reversed.norm, state.norm);
}

TEST(DecideStep, UpdatesAreCountedInTheBetaPowers) {
    StepState state = initial_step_state();
    for (int i = 0; i < 3; ++i) state = decide_with(state, {1.0}, {1.0});
    EXPECT_EQ(state.updates, 3u);
    EXPECT_NEAR(state.beta1_power, std::pow(0.9, 3), 1e-7);
    EXPECT_NEAR(state.beta2_power, std::pow(0.95, 3), 1e-7);
}

// NaN in one rank's gradient (llm.c#637): every rank sees the same sums and skips.
TEST(DecideStep, NotFiniteLossOrNormSkips) {
    const StepState start = decide_with(initial_step_state(), {2.0}, {4.0});
    struct Case {
        double loss, sum;
    };
    for (const Case c : {Case{kNan, 1.0}, Case{kInf, 1.0}, Case{1.0, kNan}, Case{1.0, kInf}}) {
        const StepState state = decide_with(start, {c.loss}, {1.0, c.sum, 1.0});
        EXPECT_EQ(state.skip, SkipReason::not_finite);
        EXPECT_EQ(state.updates, 1u);
        EXPECT_EQ(state.beta1_power, start.beta1_power);
        EXPECT_EQ(state.beta2_power, start.beta2_power);
        EXPECT_EQ(state.loss_window.count, std::isfinite(c.loss) ? 2 : 1);
        EXPECT_EQ(state.norm_window.count, std::isfinite(c.sum) ? 2 : 1);
        EXPECT_TRUE(std::isfinite(state.loss_window.sum));
        EXPECT_TRUE(std::isfinite(state.norm_window.sum_of_squares));
        EXPECT_EQ(decide_with(state, {1.0}, {1.0}).skip, SkipReason::none);
    }
}

double series(int i) {
    return 3.0 + 0.1 * random_normal4(7, RandomPurpose::kTest, 0, static_cast<uint64_t>(i)).lane[0];
}

double naive_z_score(int newest) {
    double mean = 0.0, variance = 0.0;
    for (int i = newest - 127; i <= newest; ++i) mean += series(i) / 128;
    for (int i = newest - 127; i <= newest; ++i) {
        variance += (series(i) - mean) * (series(i) - mean) / 128;
    }
    return (series(newest) - mean) / std::sqrt(variance);
}

TEST(DecideStep, ZScoresAreOverTheLast128ValuesOnceThereAreThatMany) {
    StepState state = initial_step_state();
    for (int i = 0; i < 400; ++i) {
        const double norm = 2.0 * series(i);
        state = decide_with(state, {series(i)}, {norm * norm});
        if (i < 128) {
            ASSERT_TRUE(std::isnan(state.loss_z)) << i;
            ASSERT_TRUE(std::isnan(state.norm_z)) << i;
        } else {
            ASSERT_NEAR(state.loss_z, naive_z_score(i), 1e-9) << i;
            ASSERT_NEAR(state.norm_z, naive_z_score(i), 1e-9) << i;
        }
    }
    EXPECT_EQ(state.loss_window.count, 128);
    EXPECT_EQ(state.updates, 400u);
}

TEST(DecideStep, ValuesThatAreNotFiniteDoNotMoveTheWindow) {
    StepState with = initial_step_state(), without = initial_step_state();
    for (int i = 0; i < 200; ++i) {
        if (i % 50 == 7) with = decide_with(with, {kNan}, {kInf});
        with = decide_with(with, {series(i)}, {series(i)});
        without = decide_with(without, {series(i)}, {series(i)});
    }
    EXPECT_EQ(bits_of(with.loss_z), bits_of(without.loss_z));
    EXPECT_EQ(bits_of(with.norm_z), bits_of(without.norm_z));
}

// Sums that are updated by adding the newest value and subtracting the oldest never recover from
// one value so large that the others are lost beside it.
TEST(DecideStep, AHugeValueLeavesNoTraceOnceItHasLeftTheWindow) {
    StepState state = initial_step_state();
    for (int i = 0; i < 300; ++i) {
        state = decide_with(state, {i == 150 ? 1e20 : series(i)}, {1.0});
        if (i >= 150 + 128) {
            ASSERT_NEAR(state.loss_z, naive_z_score(i), 1e-9) << i;
        }
    }
}

// Their variance comes out as 0, or by rounding a little above or below it.
TEST(DecideStep, ConstantValuesAreNoOutliers) {
    StepRules rules;
    rules.skip_loss_z = rules.skip_norm_z = 0.5;
    for (const double value : {0.5, 0.1, 0.3, 0.7, 3.3, 11.0, 1e-3}) {
        StepState state = initial_step_state();
        for (int i = 0; i < 300; ++i) {
            state = decide_with(state, {value}, {value}, rules);
            ASSERT_EQ(state.skip, SkipReason::none) << value << " " << i;
        }
        EXPECT_LT(std::fabs(state.loss_z), 1e-6) << value;
        EXPECT_LT(std::fabs(state.norm_z), 1e-6) << value;
    }
}

TEST(DecideStep, OutliersSkipWhenTheirRuleIsOn) {
    StepState full = initial_step_state();
    for (int i = 0; i < 200; ++i) full = decide_with(full, {series(i)}, {series(i)});
    StepRules rules;
    EXPECT_EQ(decide_with(full, {9.0}, {81.0}, rules).skip, SkipReason::none);
    rules.skip_loss_z = 3.0;
    const StepState skipped = decide_with(full, {9.0}, {3.0}, rules);
    EXPECT_EQ(skipped.skip, SkipReason::loss_outlier);
    EXPECT_GT(skipped.loss_z, 3.0);
    EXPECT_EQ(skipped.updates, full.updates);
    EXPECT_EQ(skipped.beta1_power, full.beta1_power);
    EXPECT_EQ(decide_with(full, {3.0}, {81.0}, rules).skip, SkipReason::none);
    rules.skip_norm_z = 3.0;
    EXPECT_EQ(decide_with(full, {3.0}, {81.0}, rules).skip, SkipReason::norm_outlier);
    EXPECT_EQ(decide_with(full, {9.0}, {81.0}, rules).skip, SkipReason::loss_outlier);
    EXPECT_EQ(decide_with(full, {3.0}, {3.0}, rules).skip, SkipReason::none);
    EXPECT_EQ(decide_with(full, {-9.0}, {3.0}, rules).skip, SkipReason::none);  // low is no outlier
    // It has gone into the window all the same.
    EXPECT_EQ(skipped.loss_window.values[full.loss_window.next], 9.0);
}

TEST(DecideStep, BadArgumentsAreRefused) {
    StepState state = initial_step_state();
    const double x = 1.0;
    StepRules rules;
    EXPECT_THROW(cpu::decide_step(nullptr, &x, 1, &x, 1, rules, nullptr), Error);
    EXPECT_THROW(cpu::decide_step(&state, &x, 0, &x, 1, rules, nullptr), Error);
    EXPECT_THROW(cpu::decide_step(&state, &x, 1, &x, 0, rules, nullptr), Error);
    rules.max_norm = 0.0f;
    EXPECT_THROW(cpu::decide_step(&state, &x, 1, &x, 1, rules, nullptr), Error);
}

}  // namespace
