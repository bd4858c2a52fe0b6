#include "llmc/rng.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

namespace {

using namespace llmc;

// Known answers that the authors of Random123 publish for philox4x32 with 10 rounds. Counter words
// are block (low, high), step, purpose; key words are seed (low, high).
void expect_answer(const Philox4& got, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    EXPECT_EQ(got.lane[0], a);
    EXPECT_EQ(got.lane[1], b);
    EXPECT_EQ(got.lane[2], c);
    EXPECT_EQ(got.lane[3], d);
}

TEST(Philox, KnownAnswerOfZeros) {
    expect_answer(philox(0, static_cast<RandomPurpose>(0), 0, 0), 0x6627e8d5, 0xe169c58d,
                  0xbc57ac4c, 0x9b00dbd8);
}
TEST(Philox, KnownAnswerOfOnes) {
    expect_answer(
        philox(~uint64_t{0}, static_cast<RandomPurpose>(0xffffffff), 0xffffffff, ~uint64_t{0}),
        0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd);
}
TEST(Philox, KnownAnswerOfThePiDigits) {
    expect_answer(philox(0x299f31d0a4093822, static_cast<RandomPurpose>(0x03707344), 0x13198a2e,
                         0x85a308d3243f6a88),
                  0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1);
}

TEST(Rng, PurposesStepsSeedsAndIndicesShareNoNumbers) {
    std::set<uint64_t> seen;
    size_t drawn = 0;
    const auto take = [&](const Philox4& block) {
        seen.insert(uint64_t{block.lane[0]} << 32 | block.lane[1]);
        seen.insert(uint64_t{block.lane[2]} << 32 | block.lane[3]);
        drawn += 2;
    };
    for (const RandomPurpose purpose :
         {RandomPurpose::kWeightInit, RandomPurpose::kStochasticRounding, RandomPurpose::kDataOrder,
          RandomPurpose::kSampling, RandomPurpose::kTest}) {
        for (const uint64_t seed : {uint64_t{1}, uint64_t{2}, uint64_t{1} << 32}) {
            for (const uint32_t step : {0u, 1u, 2u}) {
                for (uint64_t block = 0; block < 500; ++block) {
                    take(philox(seed, purpose, step, block));
                    take(philox(seed, purpose, step, (uint64_t{1} << 32) + block));
                }
            }
        }
    }
    EXPECT_EQ(seen.size(), drawn);
}

TEST(Rng, ElementBitsAreTheLanesOfTheirBlock) {
    const Philox4 block = philox(3, RandomPurpose::kTest, 4, 25);
    for (uint64_t i = 0; i < 4; ++i) {
        EXPECT_EQ(random_bits32(3, RandomPurpose::kTest, 4, 100 + i), block.lane[i]);
    }
    const Philox4 rounding = rounding_block(3, 4, 803);
    const Philox4 expected = philox(3, RandomPurpose::kStochasticRounding, 4, 100);
    for (uint64_t i = 0; i < 8; ++i) {
        const uint32_t word = expected.lane[i / 2];
        EXPECT_EQ(rounding_bits16(rounding, 800 + i), i % 2 == 0 ? word & 0xffff : word >> 16);
    }
}

TEST(Rng, UniformsAreOpenAndEven) {
    EXPECT_GT(uniform_from_bits(0), 0.0);
    EXPECT_LT(uniform_from_bits(0xffffffff), 1.0);
    const int count = 200000;
    double sum = 0.0, squares = 0.0;
    std::vector<int> bins(16);
    for (int i = 0; i < count; ++i) {
        const double u = random_uniform(1, RandomPurpose::kTest, 0, static_cast<uint64_t>(i));
        sum += u;
        squares += u * u;
        ++bins[static_cast<size_t>(u * 16)];
    }
    EXPECT_NEAR(sum / count, 0.5, 5 * std::sqrt(1.0 / 12 / count));
    EXPECT_NEAR(squares / count, 1.0 / 3, 5 * std::sqrt(4.0 / 45 / count));
    for (const int bin : bins) {
        EXPECT_NEAR(bin, count / 16.0, 5 * std::sqrt(count / 16.0 * 15 / 16));
    }
}

TEST(Rng, NormalsHaveTheMomentsAndTailsOfANormal) {
    const int blocks = 100000;
    const double n = 4.0 * blocks;
    double moment[5] = {};
    double products = 0.0, beyond_two = 0.0, largest = 0.0;
    for (int b = 0; b < blocks; ++b) {
        const Normal4 normal = random_normal4(1, RandomPurpose::kTest, 0, static_cast<uint64_t>(b));
        for (const double x : normal.lane) {
            moment[1] += x / n;
            moment[2] += x * x / n;
            moment[3] += x * x * x / n;
            moment[4] += x * x * x * x / n;
            beyond_two += (std::fabs(x) > 2.0) / n;
            largest = std::max(largest, std::fabs(x));
        }
        products += (normal.lane[0] * normal.lane[1] + normal.lane[1] * normal.lane[2] +
                     normal.lane[2] * normal.lane[3]) /
                    (3.0 * blocks);
    }
    // Five standard errors: the variances of x^k are 1, 2, 15 and 96.
    EXPECT_NEAR(moment[1], 0.0, 5 * std::sqrt(1 / n));
    EXPECT_NEAR(moment[2], 1.0, 5 * std::sqrt(2 / n));
    EXPECT_NEAR(moment[3], 0.0, 5 * std::sqrt(15 / n));
    EXPECT_NEAR(moment[4], 3.0, 5 * std::sqrt(96 / n));
    EXPECT_NEAR(products, 0.0, 5 * std::sqrt(1 / (3.0 * blocks)));
    EXPECT_NEAR(beyond_two, 0.0455, 5 * std::sqrt(0.0455 / n));
    EXPECT_GT(largest, 4.0);
    EXPECT_LT(largest, 7.0);
}

}  // namespace
