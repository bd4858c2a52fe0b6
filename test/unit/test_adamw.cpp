#include "llmc/cpu/adamw.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "llmc/error.h"
#include "llmc/step_decision.h"
#include "llmc/step_state_init.h"
#include "test/unit/bits.h"
#include "test/unit/guarded.h"
#include "test/unit/stream_gate.h"

namespace {

using namespace llmc;
using namespace llmc::test;

// The buffers of one update, between guard zones.
template <class T, class G>
struct Buffers {
    Buffers(size_t count, bool with_master, double scale = 0.02)
        : param(count), master(with_master ? count : 0), m(count), v(count), grad(count) {
        fill_normal(param.data(), count, 1, scale);
        for (size_t i = 0; i < count; ++i) {
            m[i] = 0.0f;
            v[i] = 0.0f;
            if (with_master) master[i] = static_cast<float>(load(param[i]));
        }
    }
    void new_gradient(uint32_t stream, double scale) {
        fill_normal(grad.data(), grad.size(), stream, scale);
    }
    AdamwSegment<T, G> segment(size_t begin, size_t end, uint64_t first_index, float decay) {
        float* master_data = master.size() > 0 ? master.data() + begin : nullptr;
        return {param.data() + begin, master_data, grad.data() + begin, m.data() + begin,
                v.data() + begin,     end - begin, first_index + begin, decay};
    }
    void expect_guards_intact() {
        param.expect_guards_intact("param");
        master.expect_guards_intact("master");
        m.expect_guards_intact("m");
        v.expect_guards_intact("v");
    }
    Guarded<T> param;
    Guarded<float> master, m, v;
    Guarded<G> grad;
};

StepState state_after(int updates, double norm = 0.5) {
    StepState state = initial_step_state();
    for (int i = 0; i < updates; ++i) decide(state, 1.0, norm, StepRules{});
    return state;
}

template <class T, class G>
void launch(const std::vector<AdamwSegment<T, G>>& segments, const StepInputs& inputs,
            const StepState& state, const AdamwOptions& options = {}) {
    size_t max_count = 0;
    for (const auto& segment : segments) max_count = std::max(max_count, segment.count);
    cpu::adamw_update(segments.data(), static_cast<int>(segments.size()), max_count, options,
                      &inputs, &state, nullptr);
    cudaDeviceSynchronize();
}

struct NaiveElement {
    double value, m = 0.0, v = 0.0;
};

void naive_update(NaiveElement& e, double g, int t, double lr, double decay, double eps) {
    const double beta1 = 0.9f, beta2 = 0.95f;
    e.m = beta1 * e.m + (1 - beta1) * g;
    e.v = beta2 * e.v + (1 - beta2) * g * g;
    const double m_hat = e.m / (1 - std::pow(beta1, t)), v_hat = e.v / (1 - std::pow(beta2, t));
    e.value -= lr * (m_hat / (std::sqrt(v_hat) + eps) + decay * e.value);
}

// Five updates against a calculation in double. An eps of the gradient's size and a decay that
// matters show where each belongs; a scale of 1/3 shows a gradient rounded to G after scaling.
template <class T, class G>
void expect_matches_naive(bool with_master, double bound) {
    const size_t count = 20011;
    const float decay = 0.1f;
    AdamwOptions options;
    options.eps = 1e-3f;
    Buffers<T, G> buffers(count, with_master);
    std::vector<NaiveElement> naive(count);
    for (size_t i = 0; i < count; ++i) naive[i].value = static_cast<double>(load(buffers.param[i]));
    StepState state = initial_step_state();
    for (int t = 1; t <= 5; ++t) {
        buffers.new_gradient(static_cast<uint32_t>(10 + t), 1e-3 * t);
        decide(state, 1.0, 3.0, StepRules{});
        ASSERT_EQ(state.grad_scale, 1.0f / 3.0f);
        const StepInputs inputs = {static_cast<uint32_t>(t), 1e-2f / t};
        launch<T, G>({buffers.segment(0, count, 0, decay)}, inputs, state, options);
        for (size_t i = 0; i < count; ++i) {
            naive_update(naive[i], static_cast<double>(load(buffers.grad[i])) * (1.0f / 3.0f), t,
                         inputs.learning_rate, decay, options.eps);
        }
    }
    buffers.expect_guards_intact();
    std::vector<double> value, m, v;
    for (const NaiveElement& e : naive) {
        value.push_back(e.value);
        m.push_back(e.m);
        v.push_back(e.v);
    }
    EXPECT_LT(relative_error(buffers.param.data(), value.data(), count), bound);
    EXPECT_LT(relative_error(buffers.m.data(), m.data(), count), 1e-6);
    EXPECT_LT(relative_error(buffers.v.data(), v.data(), count), 1e-6);
    if (with_master) {
        EXPECT_LT(relative_error(buffers.master.data(), value.data(), count), 1e-6);
    }
}

TEST(Adamw, Fp32MatchesDouble) {
    expect_matches_naive<float, float>(false, 1e-6);
    expect_matches_naive<float, float>(true, 1e-6);
}
TEST(Adamw, Bf16WithMasterMatchesDoubleToBf16) {
    expect_matches_naive<bf16, bf16>(true, 4e-3);
    expect_matches_naive<bf16, float>(true, 4e-3);
}
TEST(Adamw, Bf16WithoutMasterMatchesDoubleToBf16) {
    expect_matches_naive<bf16, bf16>(false, 8e-3);
}
TEST(Adamw, DoubleMatchesDoubleToFp32) {
    expect_matches_naive<double, double>(false, 1e-6);
}

TEST(Adamw, MasterIsUpdatedFromMasterAndParamFollowsIt) {
    Buffers<float, float> buffers(100, true);
    for (size_t i = 0; i < 100; ++i) buffers.param[i] = 77.0f;  // must not be read
    buffers.new_gradient(2, 1.0);
    launch<float, float>({buffers.segment(0, 100, 0, 0.0f)}, {1, 1e-3f}, state_after(1));
    EXPECT_EQ(count_different(buffers.param.data(), buffers.master.data(), 100), 0u);
    for (size_t i = 0; i < 100; ++i) EXPECT_LT(std::fabs(buffers.param[i]), 1.0f);
}

TEST(Adamw, DecayAloneScalesTheWeights) {
    Buffers<float, float> buffers(8, false);
    for (size_t i = 0; i < 8; ++i) {
        buffers.param[i] = 1.0f;
        buffers.grad[i] = 0.0f;
    }
    launch<float, float>({buffers.segment(0, 4, 0, 0.5f), buffers.segment(4, 8, 0, 0.0f)},
                         {1, 0.25f}, state_after(1));
    EXPECT_EQ(buffers.param[3], 0.875f);
    EXPECT_EQ(buffers.param[4], 1.0f);
}

// ---- any split into shards gives the same bits ----

template <class T, class G>
void expect_split_changes_nothing(bool with_master) {
    const size_t count = 40000;
    const uint64_t first = 1000003;  // not a multiple of 8
    Buffers<T, G> whole(count, with_master), split(count, with_master);
    std::vector<AdamwSegment<T, G>> segments;
    const std::vector<size_t> cuts = {0, 1, 4, 5, 13, 16389, 16390, 33333, count};
    for (size_t i = cuts.size() - 1; i > 0; --i) {
        segments.push_back(split.segment(cuts[i - 1], cuts[i], first, 0.1f));
    }
    for (int t = 1; t <= 2; ++t) {
        whole.new_gradient(static_cast<uint32_t>(t), 0.1);
        split.new_gradient(static_cast<uint32_t>(t), 0.1);
        const StepInputs inputs = {static_cast<uint32_t>(t), 1e-3f};
        launch<T, G>({whole.segment(0, count, first, 0.1f)}, inputs, state_after(t));
        launch<T, G>(segments, inputs, state_after(t));
    }
    EXPECT_EQ(count_different(whole.param.data(), split.param.data(), count), 0u);
    EXPECT_EQ(count_different(whole.m.data(), split.m.data(), count), 0u);
    EXPECT_EQ(count_different(whole.v.data(), split.v.data(), count), 0u);
    if (with_master) {
        EXPECT_EQ(count_different(whole.master.data(), split.master.data(), count), 0u);
    }
    whole.expect_guards_intact();
    split.expect_guards_intact();
}

TEST(Adamw, ShardsCutAnywhereGiveTheSameBits) {
    expect_split_changes_nothing<bf16, bf16>(true);
    expect_split_changes_nothing<bf16, float>(false);
    expect_split_changes_nothing<float, float>(true);
}

TEST(Adamw, RoundingBitsAreThoseOfTheElementsIndexSeedAndStep) {
    const size_t count = 1000;
    const uint64_t first = (uint64_t{5} << 32) + 3;
    Buffers<bf16, bf16> buffers(count, true);
    buffers.new_gradient(3, 1.0);
    AdamwOptions options;
    options.seed = 99;
    launch<bf16, bf16>({buffers.segment(0, count, first, 0.0f)}, {17, 1e-3f}, state_after(1),
                       options);
    for (size_t i = 0; i < count; ++i) {
        const uint64_t index = first + i;
        const Philox4 block = philox(99, RandomPurpose::kStochasticRounding, 17, index / 8);
        const uint32_t random = block.lane[index % 8 / 2] >> (index % 2 * 16) & 0xffff;
        const uint32_t sum = bits_of(buffers.master[i]) + random;
        ASSERT_EQ(bits_of(buffers.param[i]), sum >> 16) << i;
    }
}

// ---- stochastic rounding ----

// A step with learning rate 0: param becomes master, rounded.
std::vector<bf16> round_by_update(const std::vector<float>& values, uint64_t seed, uint32_t step) {
    Buffers<bf16, bf16> buffers(values.size(), true);
    std::copy(values.begin(), values.end(), buffers.master.data());
    // Positive: -0 minus a step of -0 would be +0.
    for (size_t i = 0; i < values.size(); ++i) buffers.grad[i] = store<bf16>(1.0f);
    AdamwOptions options;
    options.seed = seed;
    launch<bf16, bf16>({buffers.segment(0, values.size(), 0, 0.0f)}, {step, 0.0f}, state_after(1),
                       options);
    EXPECT_EQ(count_different(values.data(), buffers.master.data(), values.size()), 0u);
    return std::vector<bf16>(buffers.param.data(), buffers.param.data() + values.size());
}

TEST(StochasticRounding, IsUnbiasedOverSeedsAndSteps) {
    std::vector<float> values;
    for (int i = 1; i < 64; ++i) {
        values.push_back(1.0f + static_cast<float>(i) / 64.0f * 0x1p-7f);
        values.push_back(-3.0f - static_cast<float>(i) / 64.0f * 0x1p-6f);
    }
    for (const bool over_seeds : {true, false}) {
        const int draws = 4000;
        std::vector<double> mean(values.size(), 0.0);
        for (int draw = 0; draw < draws; ++draw) {
            const std::vector<bf16> rounded = round_by_update(
                values, over_seeds ? draw : 5, over_seeds ? 9u : static_cast<uint32_t>(draw));
            for (size_t i = 0; i < values.size(); ++i) mean[i] += load(rounded[i]) / draws;
        }
        for (size_t i = 0; i < values.size(); ++i) {
            const double gap = std::fabs(values[i]) < 2.0f ? 0x1p-7 : 0x1p-6;
            // Five standard errors of a draw between two neighbours, at most gap/2 each.
            EXPECT_NEAR(mean[i], values[i], 5 * gap / 2 / std::sqrt(draws)) << values[i];
        }
    }
}

TEST(StochasticRounding, GoesUpWithTheExactProbability) {
    for (const uint32_t low : {1u, 2u, 0x4000u, 0x8000u, 0xffffu}) {
        for (const uint32_t high : {0x3f80u, 0xbf81u, 0x0000u, 0x8000u, 0x007fu, 0x7f00u}) {
            size_t up = 0;
            for (uint32_t random = 0; random < 65536; ++random) {
                const uint16_t bits =
                    stochastic_bf16_bits(from_bits<float>(high << 16 | low), random);
                ASSERT_TRUE(bits == high || bits == high + 1);
                up += bits == high + 1;
            }
            EXPECT_EQ(up, low);
        }
    }
}

TEST(StochasticRounding, NeverChangesAValueThatBf16Holds) {
    std::vector<float> values;
    for (uint32_t bits = 0; bits < 65536; ++bits) {
        const float value = bf16_bits_to_float(static_cast<uint16_t>(bits));
        for (const uint32_t random : {0u, 1u, 0x7fffu, 0x8000u, 0xffffu}) {
            const uint16_t expected = std::isnan(value) ? 0x7fff : static_cast<uint16_t>(bits);
            ASSERT_EQ(stochastic_bf16_bits(value, random), expected);
        }
        if (std::isfinite(value)) values.push_back(value);
    }
    const std::vector<bf16> rounded = round_by_update(values, 3, 4);
    for (size_t i = 0; i < values.size(); ++i) {
        ASSERT_EQ(bits_of(load(rounded[i])), bits_of(values[i]));
    }
}

// Adding 16 bits to 0x7f7fffff carries into infinity, and to 0x7fffffff into -0.
TEST(StochasticRounding, FiniteStaysFiniteInfinityAndNanStayWhatTheyAre) {
    const float max = std::numeric_limits<float>::max();
    const float inf = std::numeric_limits<float>::infinity();
    for (uint32_t random = 0; random < 65536; ++random) {
        ASSERT_EQ(stochastic_bf16_bits(max, random), 0x7f7f);
        ASSERT_EQ(stochastic_bf16_bits(-max, random), 0xff7f);
        ASSERT_EQ(stochastic_bf16_bits(from_bits<float>(0x7f7f0001u), random), 0x7f7f);
        ASSERT_EQ(stochastic_bf16_bits(inf, random), 0x7f80);
        ASSERT_EQ(stochastic_bf16_bits(-inf, random), 0xff80);
        for (const uint32_t nan : {0x7f800001u, 0x7fffffffu, 0xffffffffu, 0xff800001u}) {
            ASSERT_EQ(stochastic_bf16_bits(from_bits<float>(nan), random), 0x7fff);
        }
    }
}

// ---- what is read when, and what is left alone ----

TEST(Adamw, ASkippedStepLeavesEveryByte) {
    for (const SkipReason reason :
         {SkipReason::not_finite, SkipReason::loss_outlier, SkipReason::norm_outlier}) {
        Buffers<bf16, bf16> buffers(1000, true), before(1000, true);
        buffers.new_gradient(1, 1.0);
        buffers.grad[3] = from_bits<bf16>(0x7fff);
        StepState state = state_after(1);
        state.skip = reason;
        launch<bf16, bf16>({buffers.segment(0, 1000, 0, 0.1f)}, {1, 1e-3f}, state);
        EXPECT_EQ(count_different(buffers.param.data(), before.param.data(), 1000), 0u);
        EXPECT_EQ(count_different(buffers.master.data(), before.master.data(), 1000), 0u);
        EXPECT_EQ(count_different(buffers.m.data(), before.m.data(), 1000), 0u);
        EXPECT_EQ(count_different(buffers.v.data(), before.v.data(), 1000), 0u);
        buffers.expect_guards_intact();
    }
}

TEST(Adamw, TableInputsAndStateAreReadWhenTheStreamGetsThere) {
    Buffers<float, float> now(64, false), later(64, false);
    now.new_gradient(1, 1.0);
    later.new_gradient(1, 1.0);
    launch<float, float>({now.segment(0, 64, 0, 0.1f)}, {1, 1e-3f}, state_after(1));

    AdamwSegment<float, float> segment = {};
    StepInputs inputs;
    StepState state = initial_step_state();
    state.skip = SkipReason::not_finite;
    StreamGate gate;
    gate.close(nullptr);
    cpu::adamw_update(&segment, 1, 64, AdamwOptions{}, &inputs, &state, nullptr);
    segment = later.segment(0, 64, 0, 0.1f);
    inputs = {1, 1e-3f};
    state = state_after(1);
    gate.open();
    cudaDeviceSynchronize();
    EXPECT_EQ(count_different(now.param.data(), later.param.data(), 64), 0u);
}

TEST(Adamw, BadArgumentsAreRefused) {
    const AdamwSegment<float, float> segment = {};
    const StepInputs inputs;
    const StepState state = initial_step_state();
    AdamwOptions options;
    const auto update = [&](const AdamwSegment<float, float>* table, int n, const StepInputs* in,
                            const StepState* st) {
        cpu::adamw_update(table, n, 1, options, in, st, nullptr);
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

}  // namespace
