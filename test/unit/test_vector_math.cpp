#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "guarded.h"
#include "llmc/cpu/vector_math.h"
#include "twin_checks.h"

using namespace llmc;
using namespace llmc::cpu;
using namespace llmc::test;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// The distance of float `value` from `exact`, in units of the last place there.
double ulps(float value, double exact) {
    int exponent = 0;
    std::frexp(exact, &exponent);
    return std::fabs(static_cast<double>(value) - exact) /
           std::ldexp(1.0, std::max(exponent - 24, -149));
}

// Every `step`-th float there is, of both signs, NaN left out.
template <class F>
void over_floats(uint32_t step, F&& f) {
    for (uint64_t bits = 0; bits < (1ull << 32); bits += step) {
        const float x = float_from_bits(static_cast<uint32_t>(bits));
        if (!std::isnan(x)) f(x);
    }
}

TEST(VectorMath, ExpWithinTwoUlpOverAllFloats) {
    double worst = 0.0;
    size_t wrong_infinity = 0;
    over_floats(2011, [&](float x) {
        const double exact = std::exp(static_cast<double>(x));
        const bool overflows = exact > 0x1.ffffffp127;  // rounds to infinity from here
        const float value = vexp(x);
        wrong_infinity += std::isinf(value) != overflows;
        if (!overflows) worst = std::max(worst, ulps(value, exact));
    });
    EXPECT_LT(worst, 1.0);
    EXPECT_EQ(wrong_infinity, 0u);
}

TEST(VectorMath, ExpAtItsEdges) {
    EXPECT_EQ(vexp(0.0f), 1.0f);
    EXPECT_EQ(vexp(-0.0f), 1.0f);
    EXPECT_EQ(vexp(kInf), kInf);
    EXPECT_EQ(vexp(1e30f), kInf);
    EXPECT_EQ(vexp(-kInf), 0.0f);
    EXPECT_EQ(vexp(-1e30f), 0.0f);
    EXPECT_EQ(vexp(-104.0f), 0.0f);
    EXPECT_TRUE(std::isnan(vexp(kNaN)));
    EXPECT_EQ(vexp(88.722839f), std::exp(88.722839f));  // the last one below infinity
    EXPECT_EQ(vexp(88.722846f), kInf);
    // Denormal results are rounded, not flushed: 1e-38, 1e-40, and the smallest of all.
    for (float x : {-87.5f, -92.1f, -100.0f, -103.2f}) {
        EXPECT_GT(vexp(x), 0.0f);
        EXPECT_LE(ulps(vexp(x), std::exp(static_cast<double>(x))), 1.0) << x;
    }
}

TEST(VectorMath, TanhWithinTwoUlpOverAllFloats) {
    double worst = 0.0;
    over_floats(2011, [&](float x) {
        if (x != 0.0f) worst = std::max(worst, ulps(vtanh(x), std::tanh(static_cast<double>(x))));
    });
    EXPECT_LT(worst, 2.0);
}

TEST(VectorMath, TanhAtItsEdges) {
    EXPECT_EQ(vtanh(0.0f), 0.0f);
    EXPECT_FALSE(std::signbit(vtanh(0.0f)));
    EXPECT_TRUE(std::signbit(vtanh(-0.0f)));
    EXPECT_EQ(vtanh(kInf), 1.0f);
    EXPECT_EQ(vtanh(-kInf), -1.0f);
    EXPECT_EQ(vtanh(50.0f), 1.0f);
    EXPECT_TRUE(std::isnan(vtanh(kNaN)));
    for (float x : {1e-20f, 0.3f, 0.625f, 2.0f}) EXPECT_EQ(vtanh(-x), -vtanh(x));
}

// The order of the sum as the comment on lane_sum states it, in a way no compiler turns round.
template <class A>
A sum_by_the_book(const std::vector<A>& terms) {
    volatile A lane[kLanes] = {};
    for (size_t i = 0; i < terms.size(); ++i) lane[i % kLanes] = lane[i % kLanes] + terms[i];
    for (size_t width : {8, 4, 2, 1}) {
        for (size_t j = 0; j < width; ++j) lane[j] = lane[j] + lane[j + width];
    }
    return lane[0];
}

template <class T>
void expect_sums_in_fixed_order() {
    using A = accum_t<T>;
    for (size_t n : {0u, 1u, 15u, 16u, 17u, 36u, 129u, 1600u, 50257u}) {
        std::vector<T> a(n), b(n);
        fill_normal(a.data(), n, 1);
        fill_normal(b.data(), n, 2);
        std::vector<A> products(n), values(n);
        double exact_dot = 0.0, exact_sum = 0.0, size = 0.0;
        for (size_t i = 0; i < n; ++i) {
            products[i] = load(a[i]) * load(b[i]);
            values[i] = load(a[i]);
            exact_dot += static_cast<double>(load(a[i])) * static_cast<double>(load(b[i]));
            exact_sum += static_cast<double>(values[i]);
            size += std::fabs(static_cast<double>(products[i])) + std::fabs(double(values[i]));
        }
        EXPECT_EQ(dot(a.data(), b.data(), n), sum_by_the_book(products)) << n;
        EXPECT_EQ(sum(a.data(), n), sum_by_the_book(values)) << n;
        EXPECT_NEAR(dot(a.data(), b.data(), n), exact_dot, 1e-6 * size) << n;
        EXPECT_NEAR(sum(a.data(), n), exact_sum, 1e-6 * size) << n;
    }
}

TEST(VectorMath, SumsInFixedOrder) {
    expect_sums_in_fixed_order<float>();
    expect_sums_in_fixed_order<bf16>();
    expect_sums_in_fixed_order<double>();
}

TEST(VectorMath, MaxValueFindsEveryPlaceAndPassesNaNOver) {
    for (size_t n : {1u, 15u, 16u, 17u, 50u}) {
        std::vector<float> a(n, -2.0f);
        for (size_t i = 0; i < n; ++i) {
            a[i] = -1.0f;
            EXPECT_EQ(max_value(a.data(), n), -1.0f) << n << " " << i;
            a[i] = -2.0f;
        }
        if (n > 1) {
            a[n - 1] = kNaN;
            EXPECT_EQ(max_value(a.data(), n), -2.0f);
        }
    }
    EXPECT_EQ(max_value(static_cast<const double*>(nullptr), 0),
              -std::numeric_limits<double>::infinity());
}

}  // namespace
