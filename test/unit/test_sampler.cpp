#include "llmc/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "test/unit/data_files.h"

namespace llmc {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Logits whose softmax is 1/8, 1/2, 1/4, 1/8.
const std::vector<float> kEighths = {0.0f, std::log(4.0f), std::log(2.0f), 0.0f};

int sample(const std::vector<float>& logits, double u) {
    return sample_token(logits.data(), static_cast<int>(logits.size()), u);
}

TEST(Sampler, CutsTheUnitIntervalByProbability) {
    EXPECT_EQ(sample(kEighths, 1e-9), 0);
    EXPECT_EQ(sample(kEighths, 0.1249), 0);
    EXPECT_EQ(sample(kEighths, 0.1251), 1);
    EXPECT_EQ(sample(kEighths, 0.6249), 1);
    EXPECT_EQ(sample(kEighths, 0.6251), 2);
    EXPECT_EQ(sample(kEighths, 0.8749), 2);
    EXPECT_EQ(sample(kEighths, 0.8751), 3);
    EXPECT_EQ(sample(kEighths, 1.0 - 0x1p-33), 3);
}

TEST(Sampler, FrequenciesAreTheSoftmax) {
    std::vector<int> counts(4, 0);
    const int draws = 40000;
    for (int i = 0; i < draws; ++i) {
        ++counts[static_cast<size_t>(
            sample_token(kEighths.data(), 4, 1337, 10, static_cast<uint64_t>(i)))];
    }
    const double expected[] = {0.125, 0.5, 0.25, 0.125};
    for (size_t k = 0; k < 4; ++k) {
        const double p = expected[k], sigma = std::sqrt(p * (1 - p) / draws);
        EXPECT_NEAR(counts[k] / static_cast<double>(draws), p, 4.5 * sigma) << k;
    }
}

TEST(Sampler, SeedStepAndPositionGiveOtherNumbers) {
    const std::vector<float> flat(1000, 0.0f);
    const auto text = [&](uint64_t seed, uint32_t step) {
        std::vector<int> tokens;
        for (uint64_t i = 0; i < 50; ++i)
            tokens.push_back(sample_token(flat.data(), 1000, seed, step, i));
        return tokens;
    };
    EXPECT_EQ(text(1, 1), text(1, 1));
    EXPECT_NE(text(1, 1), text(2, 1));
    EXPECT_NE(text(1, 1), text(1, 2));
    const std::vector<int> tokens = text(1, 1);
    EXPECT_GT(std::set<int>(tokens.begin(), tokens.end()).size(), 40u);
}

TEST(Sampler, LargeLogitsNeitherOverflowNorVanish) {
    EXPECT_EQ(sample({1e30f, 1e30f, -1e30f}, 0.25), 0);
    EXPECT_EQ(sample({1e30f, 1e30f, -1e30f}, 0.75), 1);
    EXPECT_EQ(sample({-1e30f, -1e30f}, 0.75), 1);
    EXPECT_EQ(sample({std::numeric_limits<float>::lowest(), -kInf}, 0.999), 0);
}

TEST(Sampler, LogitsThatAreNotFinite) {
    EXPECT_EQ(sample({kNan, 0.0f, kNan, 0.0f}, 0.25), 1);
    EXPECT_EQ(sample({kNan, 0.0f, kNan, 0.0f}, 0.75), 3);
    EXPECT_EQ(sample({-kInf, 0.0f, -kInf}, 0.9999), 1);
    EXPECT_EQ(sample({0.0f, kInf, 3.0f}, 0.01), 1);
    test::expect_contains(test::error_of([] { sample({kNan, kNan}, 0.5); }), {"2 logits"});
    test::error_of([] { sample({-kInf, kNan}, 0.5); });
}

TEST(Sampler, OneTokenVocabulary) {
    EXPECT_EQ(sample({-3.0f}, 0.999), 0);
}

}  // namespace
}  // namespace llmc
