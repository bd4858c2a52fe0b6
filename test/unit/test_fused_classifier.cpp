#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "guarded.h"
#include "llmc/cpu/fused_classifier.h"
#include "twin_checks.h"

using namespace llmc;
using namespace llmc::test;

namespace {

struct Shape {
    int rows, V, Vp;
};
const Shape kShapes[] = {{1, 1, 1},   {3, 5, 8},       {7, 97, 128},
                         {4, 36, 37}, {5, 1600, 1600}, {3, 50257, 50304}};

std::vector<int> some_targets(Shape s) {
    std::vector<int> targets(s.rows);
    for (int row = 0; row < s.rows; ++row) {
        const uint32_t bits = random_bits32(9, RandomPurpose::kTest, 0, row);
        targets[row] = static_cast<int>(bits % static_cast<uint32_t>(s.V));
    }
    targets[0] = s.V - 1;
    return targets;
}

// Losses and dlogits (rows,Vp) of the plain formula, in double.
struct Exact {
    template <class T>
    Exact(const T* logits, const std::vector<int>& targets, double dloss, Shape s)
        : losses(s.rows, 0.0), dlogits(static_cast<size_t>(s.rows) * s.Vp, 0.0) {
        for (int row = 0; row < s.rows; ++row) {
            if (targets[row] < 0) continue;
            const T* x = logits + static_cast<size_t>(row) * s.Vp;
            double* d = dlogits.data() + static_cast<size_t>(row) * s.Vp;
            double largest = load(x[0]), total = 0.0;
            for (int i = 1; i < s.V; ++i) largest = std::max<double>(largest, load(x[i]));
            for (int i = 0; i < s.V; ++i) total += std::exp(load(x[i]) - largest);
            losses[row] = std::log(total) + largest - load(x[targets[row]]);
            for (int i = 0; i < s.V; ++i) {
                d[i] = (std::exp(load(x[i]) - largest) / total - (i == targets[row])) * dloss;
            }
        }
    }
    std::vector<double> losses, dlogits;
};

template <class T>
void classify(T* logits, accum_t<T>* losses, const std::vector<int>& targets, double dloss, Shape s,
              bool write_dlogits) {
    cpu::fused_classifier<T>(logits, losses, targets.data(), static_cast<accum_t<T>>(dloss), s.rows,
                             s.V, s.Vp, write_dlogits, nullptr);
    cuda_check(cudaDeviceSynchronize());
}

template <class T>
void expect_exact() {
    for (const Shape s : kShapes) {
        const size_t count = static_cast<size_t>(s.rows) * s.Vp;
        const std::vector<int> targets = some_targets(s);
        Guarded<T> logits(count);
        Guarded<accum_t<T>> losses(s.rows), again(s.rows);
        fill_normal(logits.data(), count, 1, 3.0);
        const std::vector<T> before(logits.data(), logits.data() + count);
        const double dloss = 1.0 / 512;
        const Exact exact(before.data(), targets, dloss, s);
        classify<T>(logits, losses, targets, dloss, s, false);
        EXPECT_TRUE(same_bits(logits.data(), before.data(), count)) << "logits written, V " << s.V;
        constexpr double kLossBound = std::is_same_v<T, double> ? 1e-13 : 1e-6;
        EXPECT_LT(relative_error(losses.data(), exact.losses.data(), s.rows), kLossBound) << s.V;
        classify<T>(logits, again, targets, dloss, s, true);
        EXPECT_TRUE(same_bits(losses.data(), again.data(), s.rows));
        EXPECT_LT(relative_error(logits.data(), exact.dlogits.data(), count), kBound<T>) << s.V;
        losses.expect_guards_intact("losses");
        logits.expect_guards_intact("logits");
    }
}

TEST(FusedClassifier, MatchesFormula) {
    expect_exact<float>();
    expect_exact<bf16>();
    expect_exact<double>();
}

TEST(FusedClassifier, DlogitsMatchFiniteDifferences) {
    for (const Shape s : {Shape{3, 5, 8}, Shape{2, 97, 97}}) {
        const size_t count = static_cast<size_t>(s.rows) * s.Vp;
        const double dloss = 0.37;
        const std::vector<int> targets = some_targets(s);
        std::vector<double> logits(count), losses(s.rows);
        fill_normal(logits.data(), count, 1, 2.0);
        std::vector<double> dlogits = logits;
        classify(dlogits.data(), losses.data(), targets, dloss, s, true);
        const std::vector<double> expected = slopes(logits.data(), count, [&] {
            classify(logits.data(), losses.data(), targets, dloss, s, false);
            double total = 0.0;
            for (double loss : losses) total += dloss * loss;
            return total;
        });
        EXPECT_LT(relative_error(dlogits.data(), expected.data(), count), 1e-9);
    }
}

template <class T>
void expect_padding_ignored() {
    const Shape s{4, 97, 128};
    const size_t count = static_cast<size_t>(s.rows) * s.Vp;
    const std::vector<int> targets = {96, -1, 3, 0};
    std::vector<T> reference;
    std::vector<accum_t<T>> reference_losses;
    for (const double padding : {0.0, 1e4, std::nan("")}) {
        std::vector<T> logits(count);
        std::vector<accum_t<T>> losses(s.rows);
        fill_normal(logits.data(), count, 1, 3.0);
        for (size_t i = 0; i < count; ++i) {
            if (i % s.Vp >= static_cast<size_t>(s.V)) logits[i] = rounded<T>(padding);
        }
        classify(logits.data(), losses.data(), targets, 1.0, s, true);
        const T zero = rounded<T>(0.0);
        for (size_t i = 0; i < count; ++i) {
            if (i % s.Vp < static_cast<size_t>(s.V)) continue;
            ASSERT_TRUE(same_bits(&logits[i], &zero, 1)) << "padding " << padding << " at " << i;
        }
        if (reference.empty()) {
            reference = logits;
            reference_losses = losses;
        }
        EXPECT_TRUE(same_bits(logits.data(), reference.data(), count)) << "padding " << padding;
        EXPECT_TRUE(same_bits(losses.data(), reference_losses.data(), s.rows));
    }
}

TEST(FusedClassifier, PaddingColumnsAreIgnoredAndZeroed) {
    expect_padding_ignored<float>();
    expect_padding_ignored<bf16>();
    expect_padding_ignored<double>();
}

TEST(FusedClassifier, TargetMinusOneGivesNoLossAndNoGradient) {
    const Shape s{3, 5, 8};
    const std::vector<int> targets = {2, -1, 4};
    Guarded<float> logits(24), losses(3);
    fill_normal(logits.data(), 24, 1);
    logits[8 + 1] = std::nanf("");  // a row without a target is not read
    const std::vector<float> before(logits.data(), logits.data() + 24);
    classify(logits.data(), losses.data(), targets, 1.0, s, false);
    EXPECT_EQ(losses[1], 0.0f);
    EXPECT_TRUE(same_bits(logits.data(), before.data(), 24));
    classify(logits.data(), losses.data(), targets, 1.0, s, true);
    EXPECT_EQ(losses[1], 0.0f);
    const std::vector<float> zeros(8, 0.0f);
    EXPECT_TRUE(same_bits(logits.data() + 8, zeros.data(), 8));
    losses.expect_written("losses");
    EXPECT_GT(losses[0], 0.0f);
}

// Each element of a softmax whose smallest members are 3e-38, not only their norm: one that
// flushes early loses them.
template <class T>
void expect_tails(double bound) {
    const Shape s{1, 87, 96};
    std::vector<T> logits(s.Vp, rounded<T>(0.0));
    for (int i = 0; i < s.V; ++i) logits[i] = rounded<T>(1000.0 - i);
    const Exact exact(logits.data(), {40}, 1.0, s);
    accum_t<T> loss = 0;
    classify(logits.data(), &loss, {40}, 1.0, s, true);
    EXPECT_LT(exact.dlogits[s.V - 1], 3e-38);
    for (int i = 0; i < s.V; ++i) {
        EXPECT_NEAR(load(logits[i]) / exact.dlogits[i], 1.0, bound) << i;
    }
    EXPECT_NEAR(loss, exact.losses[0], 1e-5);
}

TEST(FusedClassifier, TailsDownTo3e38AreKept) {
    expect_tails<float>(1e-6);
    expect_tails<double>(1e-12);
    // bf16 has no 1000 - i; count down from 0 instead, exact to 86.
    const Shape s{1, 87, 96};
    std::vector<bf16> logits(s.Vp);
    for (int i = 0; i < s.V; ++i) logits[i] = rounded<bf16>(-i);
    const Exact exact(logits.data(), {40}, 1.0, s);
    float loss = 0;
    classify(logits.data(), &loss, {40}, 1.0, s, true);
    for (int i = 0; i < s.V; ++i) {
        EXPECT_NEAR(load(logits[i]) / exact.dlogits[i], 1.0, 1.0 / 256) << i;
    }
}

// One NaN or infinity must show in its row's loss, or a step that should be skipped is taken.
TEST(FusedClassifier, NaNAndInfinityReachTheLoss) {
    for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
        for (const int place : {0, 3, 96}) {
            const Shape s{2, 97, 128};
            std::vector<float> logits(2 * 128), losses(2);
            fill_normal(logits.data(), logits.size(), 1);
            logits[128 + place] = bad;
            classify(logits.data(), losses.data(), {3, 3}, 1.0, s, true);
            EXPECT_TRUE(std::isfinite(losses[0]));
            EXPECT_FALSE(std::isfinite(losses[1])) << bad << " at " << place;
            for (int i = 0; i < s.V; ++i) EXPECT_TRUE(std::isfinite(logits[i]));
            EXPECT_TRUE(std::isnan(logits[128 + place]));
        }
    }
}

// A sum of 50257 exponentials in a few fp32 lanes drifts by 1e-5 and more.
TEST(FusedClassifier, LongRowsKeepTheLossAccurate) {
    const Shape s{1, 50257, 50304};
    std::vector<float> logits(s.Vp), losses(1);
    fill_normal(logits.data(), logits.size(), 1, 0.01);
    const Exact exact(logits.data(), {17}, 1.0, s);
    const double total = cpu::sum_of_exp(logits.data(), 0.0f, s.V);
    double exact_total = 0.0;
    for (int i = 0; i < s.V; ++i) exact_total += std::exp(static_cast<double>(logits[i]));
    EXPECT_NEAR(total / exact_total, 1.0, 2e-8);
    classify(logits.data(), losses.data(), {17}, 1.0, s, false);
    EXPECT_NEAR(losses[0] / exact.losses[0], 1.0, 1e-7);
}

TEST(FusedClassifier, MeanLossAddsInDouble) {
    std::vector<float> losses(100001, 1.0f);
    losses[0] = 1e8f;  // an fp32 sum would lose every 1 after it
    Guarded<double> mean(1);
    cpu::mean_loss<float>(mean, losses.data(), 100001, nullptr);
    cuda_check(cudaDeviceSynchronize());
    EXPECT_EQ(mean[0], (1e8 + 1e5) / 100001);
    mean.expect_guards_intact("out");
    const std::vector<double> wide = {1.0, 2.0, 4.0};
    cpu::mean_loss<double>(mean, wide.data(), 3, nullptr);
    cuda_check(cudaDeviceSynchronize());
    EXPECT_EQ(mean[0], 7.0 / 3.0);
}

TEST(FusedClassifier, RefusesBadShapes) {
    float x = 0.0f;
    double mean = 0.0;
    const int target = 0;
    EXPECT_THROW(cpu::fused_classifier(&x, &x, &target, 1.0f, 0, 1, 1, true, nullptr), Error);
    EXPECT_THROW(cpu::fused_classifier(&x, &x, &target, 1.0f, 1, 0, 1, true, nullptr), Error);
    EXPECT_THROW(cpu::fused_classifier(&x, &x, &target, 1.0f, 1, 2, 1, true, nullptr), Error);
    EXPECT_THROW(cpu::mean_loss(&mean, &x, 0, nullptr), Error);
}

TEST(FusedClassifier, SameBitsOnOneAndTwoCores) {
    expect_same_bits_on_one_and_two_cores([] {
        const Shape s{60, 5001, 5056};
        std::vector<float> logits(static_cast<size_t>(s.rows) * s.Vp), losses(s.rows);
        fill_normal(logits.data(), logits.size(), 1, 3.0);
        classify(logits.data(), losses.data(), some_targets(s), 1.0 / 60, s, true);
        double mean = 0.0;
        cpu::mean_loss(&mean, losses.data(), s.rows, nullptr);
        cuda_check(cudaDeviceSynchronize());
        Hash hash;
        hash.add(logits.data(), logits.size());
        hash.add(losses.data(), losses.size());
        hash.add(&mean, 1);
        return hash.value();
    });
}

}  // namespace
