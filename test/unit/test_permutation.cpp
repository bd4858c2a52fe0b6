#include "llmc/permutation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <vector>

#include "test/unit/data_files.h"

namespace llmc {
namespace {

std::vector<uint64_t> all_of(const KeyedPermutation& permutation) {
    std::vector<uint64_t> values(permutation.size());
    for (uint64_t i = 0; i < permutation.size(); ++i) values[i] = permutation(i);
    return values;
}

bool is_bijection(std::vector<uint64_t> values) {
    std::sort(values.begin(), values.end());
    for (uint64_t i = 0; i < values.size(); ++i) {
        if (values[i] != i) return false;
    }
    return true;
}

// How many standard deviations a chi-square over equally likely cells lies above its mean; about
// normal when there are many cells.
double chi_square_excess(const std::vector<double>& counts, double expected, double freedom) {
    double sum = 0.0;
    for (const double count : counts) sum += (count - expected) * (count - expected) / expected;
    return (sum - freedom) / std::sqrt(2.0 * freedom);
}

TEST(Permutation, BijectionForEverySmallSize) {
    for (uint64_t n = 1; n <= 300; ++n) {
        for (uint64_t seed = 0; seed < 3; ++seed) {
            ASSERT_TRUE(is_bijection(all_of(KeyedPermutation(n, seed, 7, 1)))) << n;
        }
    }
}

TEST(Permutation, BijectionAtPowersOfFourAndBeside) {
    for (const uint64_t n : {1023u, 1024u, 1025u, 4095u, 4096u, 4097u, 65535u, 65536u, 65537u}) {
        ASSERT_TRUE(is_bijection(all_of(KeyedPermutation(n, 11, 0, 0)))) << n;
    }
}

TEST(Permutation, LargeSizes) {
    for (const uint64_t n : {uint64_t{1} << 33, (uint64_t{1} << 48) - 59, uint64_t{1} << 48,
                             KeyedPermutation::kLargest}) {
        const KeyedPermutation permutation(n, 3, 1, 2);
        std::set<uint64_t> seen;
        double mean = 0.0;
        for (uint64_t i = 0; i < 4000; ++i) {
            const uint64_t value = permutation(i < 2000 ? i : n - 1 - i);
            ASSERT_LT(value, n);
            ASSERT_TRUE(seen.insert(value).second) << n << " " << i;
            mean += static_cast<double>(value) / static_cast<double>(n) / 4000;
        }
        // Standard deviation of the mean: 0.2887 / sqrt(4000) = 0.0046.
        EXPECT_NEAR(mean, 0.5, 5 * 0.0046) << n;
    }
}

TEST(Permutation, EachPermutationOfFewElementsIsAsLikely) {
    for (const uint64_t n : {2u, 3u, 4u, 5u, 6u}) {
        size_t permutations = 1;
        for (uint64_t k = 2; k <= n; ++k) permutations *= k;
        const size_t draws = 200 * permutations;
        std::map<std::vector<uint64_t>, double> counts;
        for (uint64_t seed = 0; seed < draws; ++seed) {
            counts[all_of(KeyedPermutation(n, seed, 0, 0))] += 1;
        }
        EXPECT_EQ(counts.size(), permutations) << n;
        std::vector<double> cells;
        for (const auto& [permutation, count] : counts) cells.push_back(count);
        EXPECT_LT(chi_square_excess(cells, 200.0, static_cast<double>(permutations) - 1), 4.5) << n;
    }
}

// Counts of (place, value) over seeds or epochs, and of the step from one place to the next.
void expect_random_places(uint64_t n, bool vary_epoch) {
    const size_t draws = 1000;
    std::vector<double> cells(n * n, 0.0), steps(n, 0.0);
    for (size_t draw = 0; draw < draws; ++draw) {
        const KeyedPermutation permutation(n, vary_epoch ? 5 : draw, vary_epoch ? draw : 5, 9);
        const std::vector<uint64_t> values = all_of(permutation);
        for (size_t i = 0; i < n; ++i) cells[i * n + values[i]] += 1;
        for (size_t i = 0; i + 1 < n; ++i) steps[(values[i + 1] + n - values[i]) % n] += 1;
    }
    const double m = static_cast<double>(n);
    EXPECT_LT(chi_square_excess(cells, draws / m, (m - 1) * (m - 1)), 5.0) << n;
    EXPECT_EQ(steps[0], 0.0);
    steps.erase(steps.begin());
    if (n == 2) return;
    EXPECT_LT(chi_square_excess(steps, draws, m - 2), 5.0) << n;
}

TEST(Permutation, EveryValueIsAsLikelyAtEveryPlace) {
    for (const uint64_t n : {2u, 3u, 4u, 5u, 6u, 7u, 11u, 15u, 16u, 17u, 31u, 64u, 65u, 100u}) {
        expect_random_places(n, false);
        expect_random_places(n, true);
    }
}

// A random permutation has one fixed point on average, with variance one.
TEST(Permutation, NoFixedStructureForSmallSizes) {
    for (uint64_t n = 2; n <= 100; ++n) {
        const size_t draws = 400;
        size_t fixed = 0;
        for (uint64_t epoch = 0; epoch < draws; ++epoch) {
            const KeyedPermutation permutation(n, 77, epoch, 0);
            for (uint64_t i = 0; i < n; ++i) fixed += permutation(i) == i;
        }
        EXPECT_NEAR(static_cast<double>(fixed) / draws, 1.0, 5.0 / std::sqrt(draws)) << n;
    }
}

TEST(Permutation, SeedEpochAndStreamEachGiveAnotherOrder) {
    const std::vector<uint64_t> base = all_of(KeyedPermutation(1000, 1, 1, 1));
    EXPECT_EQ(base, all_of(KeyedPermutation(1000, 1, 1, 1)));
    // High halves of seed and epoch count too.
    for (const auto& other :
         {KeyedPermutation(1000, 2, 1, 1), KeyedPermutation(1000, 1, 2, 1),
          KeyedPermutation(1000, 1, 1, 2), KeyedPermutation(1000, 1 + (uint64_t{1} << 32), 1, 1),
          KeyedPermutation(1000, 1, 1 + (uint64_t{1} << 32), 1)}) {
        const std::vector<uint64_t> values = all_of(other);
        size_t equal = 0;
        for (size_t i = 0; i < base.size(); ++i) equal += values[i] == base[i];
        EXPECT_LT(equal, 10u);
    }
}

// The order of the data is part of what a checkpoint relies on.
TEST(Permutation, OrderIsTheSameForEver) {
    EXPECT_EQ(all_of(KeyedPermutation(10, 1337, 0, 0)),
              (std::vector<uint64_t>{9, 3, 6, 4, 5, 0, 8, 7, 1, 2}));
    EXPECT_EQ(all_of(KeyedPermutation(10, 1337, 1, 3)),
              (std::vector<uint64_t>{0, 7, 2, 1, 6, 3, 5, 9, 4, 8}));
}

TEST(Permutation, RefusesSizesAndPlacesOutOfRange) {
    test::expect_contains(test::error_of([] { KeyedPermutation(0, 1, 1, 1); }), {"0 elements"});
    test::error_of([] { KeyedPermutation(KeyedPermutation::kLargest + 1, 1, 1, 1); });
    test::expect_contains(test::error_of([] { KeyedPermutation(5, 1, 1, 1)(5); }), {"place 5"});
}

}  // namespace
}  // namespace llmc
