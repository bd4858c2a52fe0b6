#include <cmath>
#include <cstring>
#include <limits>

#include "llmc/cpu/global_norm.h"
#include "llmc/global_norm.cuh"
#include "llmc/params.h"
#include "llmc/step_state_init.h"
#include "test/gpu/gpu_checks.h"
#include "test/unit/bits.h"

namespace {

using namespace llmc;
using namespace llmc::test;

using Chunks = std::vector<NormChunk<gradX>>;

std::vector<double> launch_norm(const Chunks& chunks, size_t max_count) {
    const int n = static_cast<int>(chunks.size());
    const DeviceGuarded<NormChunk<gradX>> table(chunks);
    DeviceGuarded<double> sums(chunks.size());
    DeviceGuarded<char> scratch(global_norm_chunks_scratch_bytes(n, max_count));
    global_norm_chunks(sums.get(), table.get(), n, max_count, scratch.get(), nullptr);
    sums.expect_guards_intact("sums");
    scratch.expect_guards_intact("scratch");
    return sums.download();
}

// The CPU tests' counts, the longest short chunks, pieces of 16384 and 8192 elements and their neighbours,
// d12's shards.
const std::vector<size_t> kCounts = {0,     1,     15,    16,    17,    96,    1000,  1023,
                                     1024,  1025,  2047,  2048,  2049,  8191,  8192,  8193,
                                     16383, 16384, 16385, 32768, 32769, 73728, 98304, 100003};

TEST(GpuGlobalNorm, MatchesTwin) {
    const std::vector<gradX> data = normal_values<gradX>(400000, 1, 1e-3);
    const DeviceGuarded<gradX> device(data);
    Chunks chunks, host_chunks;
    for (size_t i = 0; i < kCounts.size(); ++i) {
        const size_t begin = 64 * i + i % 3;  // aligned and not
        chunks.push_back({device.get() + begin, kCounts[i]});
        host_chunks.push_back({data.data() + begin, kCounts[i]});
    }
    const size_t max_count = 100003;
    const int n = static_cast<int>(chunks.size());
    std::vector<double> expected(chunks.size());
    std::vector<char> scratch(cpu::global_norm_chunks_scratch_bytes(n, max_count));
    cpu::global_norm_chunks(expected.data(), host_chunks.data(), n, max_count, scratch.data(),
                            nullptr);
    const std::vector<double> sums = launch_norm(chunks, max_count);
    for (size_t i = 0; i < sums.size(); ++i) {
        EXPECT_NEAR(sums[i], expected[i], 1e-13 * expected[i]) << kCounts[i];
    }
    EXPECT_TRUE(same_bits(launch_norm(chunks, max_count), sums)) << "another run";
}

TEST(GpuGlobalNorm, SquaresThatFp32CannotHoldAreCounted) {
    std::vector<gradX> data(16, from_float<gradX>(0.0f));
    data[0] = from_float<gradX>(1e30f);
    data[8] = from_float<gradX>(1e-30f);
    const DeviceGuarded<gradX> device(data);
    const std::vector<double> sums = launch_norm({{device.get(), 8}, {device.get() + 8, 8}}, 8);
    const double large = to_float(data[0]), small = to_float(data[8]);
    EXPECT_EQ(sums[0], large * large);
    EXPECT_EQ(sums[1], small * small);
}

TEST(GpuGlobalNorm, AChunksBitsDependOnItsSizeAlone) {
    const std::vector<gradX> data = normal_values<gradX>(100003, 3);
    const DeviceGuarded<gradX> device(data), moved(data, 1);
    const NormChunk<gradX> chunk = {device.get(), data.size()};
    const NormChunk<gradX> other = {device.get() + 5, 70000};
    const double alone = launch_norm({chunk}, data.size())[0];
    EXPECT_EQ(bits_of(launch_norm({other, chunk, other}, data.size())[1]), bits_of(alone));
    EXPECT_EQ(bits_of(launch_norm({other, chunk}, 5 * data.size())[1]), bits_of(alone));
    EXPECT_EQ(bits_of(launch_norm({{moved.get(), data.size()}}, data.size())[0]), bits_of(alone));

    for (const size_t count : {size_t{96}, size_t{97}, kNormShort<gradX>, kNormShort<gradX> + 1}) {
        const std::vector<double> sums =
            launch_norm({{device.get(), count}, chunk, {moved.get(), count}}, data.size());
        EXPECT_EQ(bits_of(sums[2]), bits_of(sums[0])) << count;
        EXPECT_EQ(bits_of(launch_norm({chunk}, count)[0]), bits_of(sums[0])) << count;
    }
}

TEST(GpuGlobalNorm, MoreChunksThanOneLaunchTakes) {
    const size_t n = kMaxRuns + 100, apart = 21, longest = kNormShort<gradX> + 21;
    const std::vector<gradX> data = normal_values<gradX>(n * apart + longest, 4);
    const DeviceGuarded<gradX> device(data);
    Chunks chunks;  // that overlap, short ones and others
    for (size_t i = 0; i < n; ++i) {
        chunks.push_back({device.get() + i * apart, i % 3 == 0 ? longest : apart});
    }
    const std::vector<double> sums = launch_norm(chunks, longest);
    for (size_t i = 0; i < n; ++i) {
        const double expected = cpu::sum_of_squares(data.data() + i * apart, chunks[i].count);
        ASSERT_NEAR(sums[i], expected, 1e-14 * expected) << i;
    }
}

TEST(GpuGlobalNorm, NanInOneChunkStaysInItsSum) {
    std::vector<gradX> data = normal_values<gradX>(3000, 4);
    data[1500] = from_float<gradX>(std::nanf(""));
    const DeviceGuarded<gradX> device(data);
    const std::vector<double> sums = launch_norm(
        {{device.get(), 1000}, {device.get() + 1000, 1000}, {device.get() + 2000, 1000}}, 1000);
    EXPECT_TRUE(std::isfinite(sums[0]));
    EXPECT_TRUE(std::isnan(sums[1]));
    EXPECT_TRUE(std::isfinite(sums[2]));
}

TEST(GpuGlobalNorm, BadArgumentsAreRefused) {
    const NormChunk<gradX> chunk = {nullptr, 0};
    double sum, scratch;
    EXPECT_THROW(global_norm_chunks(&sum, &chunk, -1, 1, &scratch, nullptr), Error);
    EXPECT_THROW(global_norm_chunks(&sum, nullptr, 1, 1, &scratch, nullptr), Error);
    EXPECT_THROW(global_norm_chunks(nullptr, &chunk, 1, 1, &scratch, nullptr), Error);
    EXPECT_THROW(global_norm_chunks(&sum, &chunk, 1, 1, nullptr, nullptr), Error);
}

// ---- decide_step ----

// The NaNs of a state, whose bits differ between processors, made one.
StepState with_plain_nans(StepState state) {
    for (double* value : {&state.loss, &state.norm, &state.loss_z, &state.norm_z}) {
        if (std::isnan(*value)) *value = std::nan("");
    }
    return state;
}

// The same step on both; every byte of the state must agree.
void expect_same_decision(DeviceGuarded<StepState>& device, StepState& host,
                          const std::vector<double>& losses, const std::vector<double>& sums,
                          const StepRules& rules, const std::string& what) {
    const DeviceGuarded<double> device_losses(losses), device_sums(sums);
    decide_step(device.get(), device_losses.get(), static_cast<int>(losses.size()),
                device_sums.get(), sums.size(), rules, nullptr);
    cpu::decide_step(&host, losses.data(), static_cast<int>(losses.size()), sums.data(),
                     sums.size(), rules, nullptr);
    const StepState got = with_plain_nans(device.download()[0]);
    const StepState expected = with_plain_nans(host);
    ASSERT_EQ(std::memcmp(&got, &expected, sizeof(got)), 0)
        << what << ": loss " << got.loss << " " << host.loss << ", norm " << got.norm << " "
        << host.norm << ", z " << got.loss_z << " " << host.loss_z << ", skip "
        << static_cast<int>(got.skip) << " " << static_cast<int>(host.skip);
    device.expect_guards_intact("state");
}

TEST(GpuDecideStep, ThreeHundredStepsHaveTheTwinsBits) {
    StepRules rules;
    rules.skip_loss_z = rules.skip_norm_z = 3.0;
    StepState host = initial_step_state();
    DeviceGuarded<StepState> device(std::vector<StepState>{host});
    size_t skipped = 0;
    for (int i = 0; i < 300; ++i) {
        // A few losses, d12's chunks; now and then an outlier, an infinity or a NaN.
        std::vector<double> losses = normal_values<double>(8, 1000 + i, 0.1, 3.0);
        std::vector<double> sums = normal_values<double>(1184, 2000 + i, 1e-4, 1e-3);
        if (i % 40 == 39) losses[3] = 100.0;
        if (i % 50 == 49) sums[1000] = 1e5;
        if (i == 70 || i == 200) losses[0] = std::nan("");
        if (i == 80 || i == 210) sums[1183] = std::numeric_limits<double>::infinity();
        expect_same_decision(device, host, losses, sums, rules, "step " + std::to_string(i));
        if (HasFatalFailure()) return;
        skipped += host.skip != SkipReason::none;
    }
    EXPECT_GT(skipped, 6u);
    EXPECT_LT(skipped, 30u);
}

TEST(GpuDecideStep, AnyNumberOfValuesIsAddedInIndexOrder) {
    for (const size_t count : {1, 2, 255, 256, 4640, 5759, 5760, 5761, 20000}) {
        // Each 1 is lost against 2^53; added first, they are not.
        std::vector<double> values(count, 1.0);
        values[0] = 0x1p53;
        StepState host = initial_step_state();
        DeviceGuarded<StepState> device(std::vector<StepState>{host});
        expect_same_decision(device, host, {1.0, 0x1p53, 1.0}, values, StepRules{},
                             std::to_string(count));
        std::swap(values[0], values[count - 1]);
        expect_same_decision(device, host, {0x1p53, 1.0, 1.0}, values, StepRules{},
                             std::to_string(count) + " reversed");
    }
}

TEST(GpuDecideStep, BadArgumentsAreRefused) {
    StepState state = initial_step_state();
    const double x = 1.0;
    StepRules rules;
    EXPECT_THROW(decide_step(nullptr, &x, 1, &x, 1, rules, nullptr), Error);
    EXPECT_THROW(decide_step(&state, &x, 0, &x, 1, rules, nullptr), Error);
    EXPECT_THROW(decide_step(&state, &x, 1, &x, 0, rules, nullptr), Error);
    rules.max_norm = 0.0f;
    EXPECT_THROW(decide_step(&state, &x, 1, &x, 1, rules, nullptr), Error);
}

void report(const char* size, const ModelConfig& config) {
    constexpr size_t kPieces = 8;  // what -rw 8 makes of each tensor
    const ParamLayout layout(config, kPieces);
    const DeviceBuffer<gradX> grads[2] = {
        device_values<gradX>(kPieces * layout.buffer_elements(), 1),
        device_values<gradX>(kPieces * layout.buffer_elements(), 2)};
    Chunks chunks[2];
    size_t elements = 0, max_count = 0, begin = 0;
    layout.for_each_layer([&](const ParamInfo& info, size_t) {
        const size_t count = layout.part_elements(info.id);
        for (size_t k = 0; k < kPieces; ++k) {
            for (int set : {0, 1}) chunks[set].push_back({grads[set].get() + begin, count});
            begin += count;
        }
        elements += kPieces * count;
        max_count = std::max(max_count, count);
    });
    const int n = static_cast<int>(chunks[0].size());
    const DeviceGuarded<NormChunk<gradX>> first(chunks[0]), second(chunks[1]);
    const DeviceBuffer<char> scratch(global_norm_chunks_scratch_bytes(n, max_count));
    const DeviceBuffer<double> sums(chunks[0].size());
    report_bandwidth(format("global_norm_chunks %s", size).c_str(),
                     static_cast<double>(elements) * sizeof(gradX),
                     [&](cudaStream_t stream, int set) {
                         global_norm_chunks(sums.get(), set == 0 ? first.get() : second.get(), n,
                                            max_count, scratch.get(), stream);
                     });
    const DeviceGuarded<StepState> state(std::vector<StepState>{initial_step_state()});
    report_bandwidth(
        format("decide_step %s, %d sums", size, n).c_str(), n * 8.0, [&](cudaStream_t stream, int) {
            decide_step(state.get(), sums.get(), 8, sums.get(), sums.count(), StepRules{}, stream);
        });
}

TEST(GpuGlobalNorm, Bandwidth) {
    report("d12", ModelConfig{});
    ModelConfig d48;
    d48.num_layers = 48;
    d48.num_heads = 25;
    d48.channels = 1600;
    report("d48", d48);
}

}  // namespace
