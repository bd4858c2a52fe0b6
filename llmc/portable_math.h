// log, exp, pow, sin and cos in double, built from IEEE operations alone.
//
// The machine's libm differs between C libraries and versions by an ulp here and there. What
// reaches weights, the learning rate or the order of the data must not, so it uses these. Each is
// within a few ulp of the exact value. Device code spells multiply and add out so that they are not
// fused.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace llmc::portable {

__host__ __device__ inline double mul(double a, double b) {
#ifdef __CUDA_ARCH__
    return __dmul_rn(a, b);
#else
    return a * b;
#endif
}

__host__ __device__ inline double add(double a, double b) {
#ifdef __CUDA_ARCH__
    return __dadd_rn(a, b);
#else
    return a + b;
#endif
}

constexpr double kPi = 3.141592653589793;
// ln 2 in two parts; the high one has trailing zeros, so that k * kLn2Hi is exact for |k| < 2^11.
constexpr double kLn2Hi = 6.93147180369123816490e-01;
constexpr double kLn2Lo = 1.90821492927058770002e-10;

// 2^k for -1022 <= k <= 1023.
__host__ __device__ inline double exp2_int(int k) {
    const uint64_t bits = static_cast<uint64_t>(k + 1023) << 52;
    double value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

// Natural logarithm of a positive, normal number: with x = m 2^e and s = (m-1)/(m+1),
// log m = 2 (s + s^3/3 + s^5/5 + ...), |s| < 0.172.
__host__ __device__ inline double log(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof(bits));
    int e = static_cast<int>(bits >> 52) - 1023;
    bits = (bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull;
    double m;
    memcpy(&m, &bits, sizeof(m));
    if (m > 1.4142135623730951) {
        m = mul(m, 0.5);
        e += 1;
    }
    const double s = add(m, -1.0) / add(m, 1.0);
    const double s2 = mul(s, s);
    double series = 0.0;
    for (int k = 23; k >= 3; k -= 2) series = mul(s2, add(1.0 / k, series));
    const double log_m = add(mul(2.0, s), mul(mul(2.0, s), series));
    return add(mul(e, kLn2Hi), add(log_m, mul(e, kLn2Lo)));
}

// e^x; 0 below -708, infinity above 709.
__host__ __device__ inline double exp(double x) {
    if (x < -708.0) return 0.0;
    if (x > 709.0) return HUGE_VAL;
    const double scaled = mul(x, 1.4426950408889634);
    const int k = static_cast<int>(add(scaled, scaled < 0 ? -0.5 : 0.5));
    const double r = add(add(x, -mul(k, kLn2Hi)), -mul(k, kLn2Lo));
    double series = 1.0;
    for (int n = 14; n >= 1; --n) series = add(1.0, mul(r / n, series));
    return mul(series, exp2_int(k));
}

// x^y for positive x.
__host__ __device__ inline double pow(double x, double y) {
    return exp(mul(y, log(x)));
}

struct SinCos {
    double sin;
    double cos;
};

// Sine and cosine of `turns` full turns, 0 <= turns < 2^20. Counting in turns makes the reduction
// to an eighth of a turn exact.
__host__ __device__ inline SinCos sincos_turns(double turns) {
    const int quarter = static_cast<int>(add(mul(turns, 4.0), 0.5));
    const double r = mul(add(turns, mul(quarter, -0.25)), 2.0 * kPi);
    const double r2 = mul(r, r);
    double sin_r = 1.0, cos_r = 1.0;
    for (int n = 17; n >= 3; n -= 2) sin_r = add(1.0, -mul(mul(r2, 1.0 / (n * (n - 1))), sin_r));
    for (int n = 18; n >= 2; n -= 2) cos_r = add(1.0, -mul(mul(r2, 1.0 / (n * (n - 1))), cos_r));
    sin_r = mul(sin_r, r);
    switch (quarter & 3) {
        case 0:
            return {sin_r, cos_r};
        case 1:
            return {cos_r, -sin_r};
        case 2:
            return {-sin_r, -cos_r};
        default:
            return {-cos_r, sin_r};
    }
}

}  // namespace llmc::portable
