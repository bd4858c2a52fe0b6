#include "llmc/portable_math.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "llmc/rng.h"

// The reference must carry more digits than a double.
static_assert(std::numeric_limits<long double>::digits >= 64, "needs the x87 long double");

namespace {

using namespace llmc;

double uniform(uint64_t i, double low, double high) {
    return low + (high - low) * random_uniform(1, RandomPurpose::kTest, 0, i);
}

// Distance in units of the last place of a double at `exact`.
double ulps(double got, long double exact) {
    const double nearest = static_cast<double>(exact);
    const double ulp = std::nextafter(std::fabs(nearest), std::numeric_limits<double>::infinity()) -
                       std::fabs(nearest);
    return static_cast<double>(std::fabs(static_cast<long double>(got) - exact) / ulp);
}

TEST(PortableMath, LogIsWithinThreeUlps) {
    double worst = 0.0;
    for (uint64_t i = 0; i < 200000; ++i) {
        // Over the whole range of exponents, over (0, 1) as Box and Muller use it, and close to 1.
        const double wide = std::ldexp(uniform(3 * i, 1.0, 2.0), static_cast<int>(i % 2045) - 1022);
        const double unit = uniform(3 * i + 1, 0.0, 1.0);
        const double close =
            1.0 + std::ldexp(uniform(3 * i + 2, -1.0, 1.0), -2 - static_cast<int>(i % 40));
        for (const double x : {wide, unit, close}) {
            if (x == 1.0) continue;
            worst = std::max(worst, ulps(portable::log(x), std::log(static_cast<long double>(x))));
        }
    }
    EXPECT_LT(worst, 3.0);
    EXPECT_EQ(portable::log(1.0), 0.0);
}

TEST(PortableMath, ExpIsWithinThreeUlps) {
    double worst = 0.0;
    for (uint64_t i = 0; i < 200000; ++i) {
        for (const double x : {uniform(2 * i, -700.0, 709.0), uniform(2 * i + 1, -1.0, 1.0)}) {
            worst = std::max(worst, ulps(portable::exp(x), std::exp(static_cast<long double>(x))));
        }
    }
    EXPECT_LT(worst, 3.0);
    EXPECT_EQ(portable::exp(0.0), 1.0);
    EXPECT_EQ(portable::exp(-1000.0), 0.0);
    EXPECT_TRUE(std::isinf(portable::exp(1000.0)));
}

TEST(PortableMath, PowIsAsExactAsItsLogarithm) {
    for (uint64_t i = 0; i < 100000; ++i) {
        const double x = uniform(2 * i, 0.01, 10.0), y = uniform(2 * i + 1, -20.0, 20.0);
        const long double exact =
            std::pow(static_cast<long double>(x), static_cast<long double>(y));
        // An error of a few ulps in y log x is multiplied by y log x.
        const double bound = 4.0 + 4.0 * std::fabs(y * std::log(x));
        ASSERT_LT(ulps(portable::pow(x, y), exact), bound) << x << " " << y;
    }
    EXPECT_EQ(portable::pow(1.0, 5.0), 1.0);
    EXPECT_EQ(portable::pow(3.0, 0.0), 1.0);
}

TEST(PortableMath, SineAndCosineOfTurns) {
    const long double two_pi = 2.0L * std::acos(-1.0L);
    double worst = 0.0;
    for (uint64_t i = 0; i < 200000; ++i) {
        const double turns = i % 2 == 0 ? uniform(i, 0.0, 1.0) : uniform(i, 0.0, 1000.0);
        const portable::SinCos got = portable::sincos_turns(turns);
        const long double angle = two_pi * (static_cast<long double>(turns) -
                                            std::floor(static_cast<long double>(turns)));
        worst = std::max(worst, static_cast<double>(std::fabs(got.sin - std::sin(angle))));
        worst = std::max(worst, static_cast<double>(std::fabs(got.cos - std::cos(angle))));
    }
    EXPECT_LT(worst, 4e-16);
    const double expected[4][2] = {{0, 1}, {1, 0}, {0, -1}, {-1, 0}};
    for (int quarter = 0; quarter < 8; ++quarter) {
        const portable::SinCos got = portable::sincos_turns(quarter * 0.25);
        EXPECT_EQ(got.sin, expected[quarter % 4][0]);
        EXPECT_EQ(got.cos, expected[quarter % 4][1]);
    }
}

}  // namespace
