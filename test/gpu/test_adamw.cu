#include <cmath>
#include <limits>
#include <memory>

#include "llmc/adamw.cuh"
#include "llmc/cpu/adamw.h"
#include "llmc/params.h"
#include "llmc/step_decision.h"
#include "llmc/step_state_init.h"
#include "test/gpu/gpu_checks.h"
#include "test/unit/bits.h"

namespace {

using namespace llmc;
using namespace llmc::test;

using Segment = AdamwSegment<floatX, gradX>;

StepState state_after(int updates, double norm = 0.5) {
    StepState state = initial_step_state();
    for (int i = 0; i < updates; ++i) decide(state, 1.0, norm, StepRules{});
    return state;
}

// The arrays of a run of elements, on the host and on the device.
struct Arrays {
    Arrays(size_t count, bool with_master, size_t offset = 0)
        : param(normal_values<floatX>(count, 1, 0.02)),
          master(with_master ? count : 0),
          m(count, 0.0f),
          v(count, 0.0f),
          grad(normal_values<gradX>(count, 2, 0.1)),
          device_param(param, offset),
          device_master(with_master ? count : 0, offset),
          device_m(m, offset),
          device_v(v, offset),
          device_grad(grad, offset) {
        for (size_t i = 0; i < master.size(); ++i) master[i] = to_float(param[i]);
        device_master.upload(master);
    }
    void set_gradient(const std::vector<gradX>& values) {
        grad = values;
        device_grad.upload(values);
    }
    Segment on_host(size_t begin, size_t end, uint64_t first_index, float decay) {
        return {param.data() + begin, master.empty() ? nullptr : master.data() + begin,
                grad.data() + begin,  m.data() + begin,
                v.data() + begin,     end - begin,
                first_index + begin,  decay};
    }
    Segment on_device(size_t begin, size_t end, uint64_t first_index, float decay) const {
        return {device_param.get() + begin, master.empty() ? nullptr : device_master.get() + begin,
                device_grad.get() + begin,  device_m.get() + begin,
                device_v.get() + begin,     end - begin,
                first_index + begin,        decay};
    }
    void expect_equal(const char* what) const {
        const size_t count = param.size();
        EXPECT_EQ(count_different(device_param.download().data(), param.data(), count), 0u) << what;
        EXPECT_EQ(count_different(device_m.download().data(), m.data(), count), 0u) << what;
        EXPECT_EQ(count_different(device_v.download().data(), v.data(), count), 0u) << what;
        EXPECT_EQ(count_different(device_master.download().data(), master.data(), master.size()),
                  0u)
            << what;
        device_param.expect_guards_intact("param");
        device_master.expect_guards_intact("master");
        device_m.expect_guards_intact("m");
        device_v.expect_guards_intact("v");
    }
    std::vector<floatX> param;
    std::vector<float> master, m, v;
    std::vector<gradX> grad;
    DeviceGuarded<floatX> device_param;
    DeviceGuarded<float> device_master, device_m, device_v;
    DeviceGuarded<gradX> device_grad;
};

void launch(const std::vector<Segment>& segments, const StepInputs& inputs, const StepState& state,
            const AdamwOptions& options = {}) {
    size_t max_count = 0;
    for (const Segment& segment : segments) max_count = std::max(max_count, segment.count);
    const DeviceGuarded<Segment> table(segments);
    const DeviceGuarded<StepInputs> device_inputs(std::vector<StepInputs>{inputs});
    const DeviceGuarded<StepState> device_state(std::vector<StepState>{state});
    adamw_update(table.get(), static_cast<int>(segments.size()), max_count, options,
                 device_inputs.get(), device_state.get(), nullptr);
    cuda_check(cudaDeviceSynchronize());
}
void launch_twin(const std::vector<Segment>& segments, const StepInputs& inputs,
                 const StepState& state, const AdamwOptions& options = {}) {
    size_t max_count = 0;
    for (const Segment& segment : segments) max_count = std::max(max_count, segment.count);
    cpu::adamw_update(segments.data(), static_cast<int>(segments.size()), max_count, options,
                      &inputs, &state, nullptr);
}

TEST(GpuAdamw, FiveUpdatesHaveTheTwinsBits) {
    for (const size_t count : {1, 3, 36, 768, 2047, 2048, 2049, 40003}) {
        for (const bool with_master : {false, true}) {
            for (const uint64_t first : {uint64_t{0}, uint64_t{1000004}, (uint64_t{5} << 32) + 3}) {
                Arrays arrays(count, with_master);
                AdamwOptions options;
                options.seed = 99;
                StepState state = initial_step_state();
                for (int t = 1; t <= 5; ++t) {
                    decide(state, 1.0, 3.0, StepRules{});  // a grad_scale of 1/3
                    arrays.set_gradient(normal_values<gradX>(count, 10 + t, 1e-3 * t));
                    const StepInputs inputs = {static_cast<uint32_t>(t), 1e-2f / t};
                    launch({arrays.on_device(0, count, first, 0.1f)}, inputs, state, options);
                    launch_twin({arrays.on_host(0, count, first, 0.1f)}, inputs, state, options);
                }
                arrays.expect_equal(format("%zu from %zu", count, size_t{first}).c_str());
            }
        }
    }
}

// Denormals, zeros, huge values, where an approximate division or a flush would show. None makes a
// NaN, whose bits differ between processors.
TEST(GpuAdamw, ExtremeValuesHaveTheTwinsBits) {
    std::vector<gradX> extreme;
    for (const float x : {0.0f, -0.0f, 1e-45f, 1e-38f, 1e-30f, 3e-23f, 1e-19f, 1e-12f, 1.0f, 1e10f,
                          1.8e19f, 1e25f, 2e38f}) {
        for (const float sign : {1.0f, -1.0f}) {
            for (int i = 0; i < 160; ++i) {
                extreme.push_back(from_float<gradX>(sign * x * (1.0f + i / 256.0f)));
            }
        }
    }
    const size_t count = extreme.size();
    for (const bool with_master : {false, true}) {
        Arrays arrays(count, with_master);
        for (int t = 1; t <= 3; ++t) {
            arrays.set_gradient(extreme);
            const StepInputs inputs = {static_cast<uint32_t>(t), 1e-3f};
            launch({arrays.on_device(0, count, 0, 0.1f)}, inputs, state_after(t));
            launch_twin({arrays.on_host(0, count, 0, 0.1f)}, inputs, state_after(t));
        }
        arrays.expect_equal("extreme gradients");
    }
}

TEST(GpuAdamw, ShardsCutAnywhereAndBuffersAnywhereGiveTheSameBits) {
    const size_t count = 40000;
    const uint64_t first = 1000003;  // not a multiple of 8
    for (const size_t offset : {0, 1, 4}) {
        for (const bool with_master : {false, true}) {
            Arrays arrays(count, with_master, offset);
            std::vector<Segment> segments;
            const std::vector<size_t> cuts = {0, 1, 4, 5, 13, 16389, 16390, 33333, count};
            for (size_t i = cuts.size() - 1; i > 0; --i) {
                segments.push_back(arrays.on_device(cuts[i - 1], cuts[i], first, 0.1f));
            }
            segments.push_back(arrays.on_device(7, 7, first, 0.1f));  // empty
            launch(segments, {1, 1e-3f}, state_after(1));
            launch_twin({arrays.on_host(0, count, first, 0.1f)}, {1, 1e-3f}, state_after(1));
            arrays.expect_equal(format("offset %zu", offset).c_str());
        }
    }
}

TEST(GpuAdamw, MoreSegmentsThanOneLaunchTakes) {
    const size_t segments = kMaxRuns + 300, each = 5;
    Arrays arrays(segments * each, true);
    std::vector<Segment> table;
    for (size_t i = 0; i < segments; ++i) {
        table.push_back(arrays.on_device(i * each, (i + 1) * each, 0, 0.1f));
    }
    launch(table, {1, 1e-3f}, state_after(1));
    launch_twin({arrays.on_host(0, segments * each, 0, 0.1f)}, {1, 1e-3f}, state_after(1));
    arrays.expect_equal("many segments");
}

TEST(GpuAdamw, ASkippedStepLeavesEveryByte) {
    for (const SkipReason reason :
         {SkipReason::not_finite, SkipReason::loss_outlier, SkipReason::norm_outlier}) {
        Arrays arrays(5000, true);
        std::vector<gradX> gradient = arrays.grad;
        gradient[3] = from_float<gradX>(std::nanf(""));
        arrays.set_gradient(gradient);
        StepState state = state_after(1);
        state.skip = reason;
        launch({arrays.on_device(0, 5000, 0, 0.1f)}, {1, 1e-3f}, state);
        arrays.expect_equal("skipped");
    }
}

TEST(GpuAdamw, RoundingBitsOfFourAreThoseOfEachElement) {
    for (uint64_t index = (uint64_t{1} << 35) - 5; index < (uint64_t{1} << 35) + 40; ++index) {
        const RoundingBits4 four = rounding_bits4(7, 123, index);
        for (int k = 0; k < 4; ++k) {
            const uint32_t expected = rounding_bits16(rounding_block(7, 123, index + k), index + k);
            EXPECT_EQ(four.word[k / 2] >> (16 * (k % 2)) & 0xffff, expected) << index << " " << k;
        }
    }
}

TEST(GpuAdamw, BadArgumentsAreRefused) {
    const Segment segment = {};
    const StepInputs inputs;
    const StepState state = initial_step_state();
    AdamwOptions options;
    const auto update = [&](const Segment* table, int n, const StepInputs* in,
                            const StepState* st) {
        adamw_update(table, n, 1, options, in, st, nullptr);
    };
    EXPECT_THROW(update(&segment, -1, &inputs, &state), Error);
    EXPECT_THROW(update(nullptr, 1, &inputs, &state), Error);
    EXPECT_THROW(update(&segment, 1, nullptr, &state), Error);
    EXPECT_THROW(update(&segment, 1, &inputs, nullptr), Error);
    options.beta2 = 1.0f;
    EXPECT_THROW(update(&segment, 1, &inputs, &state), Error);
    options.beta2 = 0.95f;
    options.eps = 0.0f;
    EXPECT_THROW(update(&segment, 1, &inputs, &state), Error);
}

TEST(GpuAdamw, Bandwidth) {
    const ParamLayout layout(ModelConfig{});
    const size_t whole = layout.buffer_elements();
    const DeviceBuffer<floatX> param = device_values<floatX>(whole, 1, 0.02);
    const DeviceBuffer<float> master = device_values<float>(whole, 1, 0.02);
    const DeviceBuffer<float> m = device_values<float>(whole, 2, 1e-3), v(whole);
    const DeviceBuffer<gradX> grad = device_values<gradX>(whole, 4, 1e-3);
    cuda_check(cudaMemset(v.get(), 0, v.bytes()));
    const bool use_master = sizeof(floatX) < sizeof(float);
    std::vector<Segment> segments;
    size_t elements = 0, max_count = 0, begin = 0;
    layout.for_each_layer([&](const ParamInfo& info, size_t layer) {
        const size_t count = layout.layer_elements(info.id);
        segments.push_back({param.get() + begin, use_master ? master.get() + begin : nullptr,
                            grad.get() + begin, m.get() + begin, v.get() + begin, count,
                            layout.model_offset(info.id, layer), info.weight_decay ? 0.1f : 0.0f});
        begin += count / 128 * 128;
        elements += count;
        max_count = std::max(max_count, count);
    });
    const DeviceGuarded<Segment> table(segments);
    const DeviceGuarded<StepInputs> inputs(std::vector<StepInputs>{{1, 1e-5f}});
    const DeviceGuarded<StepState> state(std::vector<StepState>{state_after(1)});
    // Weights are written; where they are their own master they are read, too.
    const double bytes = sizeof(gradX) + 16.0 + (use_master ? 2 + 8 : 8);
    report_bandwidth("adamw_update d12", bytes * static_cast<double>(elements),
                     [&](cudaStream_t stream, int) {
                         adamw_update(table.get(), static_cast<int>(segments.size()), max_count,
                                      AdamwOptions{}, inputs.get(), state.get(), stream);
                     });
}

}  // namespace
