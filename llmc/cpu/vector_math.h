// What the CPU's kernels share: exp and tanh that g++ vectorises, and sums in a fixed order.
//
// g++ does not reorder a sum of floats without fast-math, so a plain loop over a row runs one
// element at a time. Here sixteen partial sums run beside each other: the order is written down,
// fits a vector register, and is the same on every machine and for every number of threads.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "llmc/precision.h"

namespace llmc::cpu {

constexpr size_t kLanes = 16;

inline uint32_t float_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}
inline float float_from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

// e^x within 1 ulp; denormal below -87.3, 0 below -103.98, infinity above 88.72, NaN for NaN.
//
// x = n ln 2 + r with |r| <= ln 2 / 2, and e^r = 1 + r + r^2 q(r), q minimax. ln 2 is split so that
// n times its high part is exact. 2^n comes as two factors, each a normal number, so that a
// denormal result is rounded once and 2^128 does not overflow early. A factor of 0 makes the zeros,
// since the processor takes a hundred times as long over a product that underflows.
inline float vexp(float x) {
    x = x > 89.0f ? 89.0f : x;
    x = x < -105.0f ? -105.0f : x;
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const float shifted = x * 1.44269504f + kRound;
    const float n = shifted - kRound;
    const float r = (x - n * 0.693145751953125f) - n * 1.42860682e-6f;
    float q = 0.0013814559f;
    q = q * r + 0.008368735f;
    q = q * r + 0.04166839f;
    q = q * r + 0.16666521f;
    q = q * r + 0.49999994f;
    const float e_r = ((r * r) * q + r) + 1.0f;
    const int32_t exponent = static_cast<int32_t>(float_bits(shifted) - float_bits(kRound));
    const int32_t half = exponent >> 1;
    const float scale = float_from_bits(static_cast<uint32_t>(half + 127) << 23);
    const float rest = float_from_bits(static_cast<uint32_t>(exponent - half + 127) << 23);
    return (e_r * scale) * (x < -103.98f ? 0.0f : rest);
}
inline double vexp(double x) {
    return std::exp(x);
}

// tanh x within 2 ulp: an odd polynomial below 5/8, else 1 - 2 / (e^(2x) + 1).
inline float vtanh(float x) {
    const float a = std::fabs(x);
    const float a2 = a * a;
    float q = -0.005697384f;
    q = q * a2 + 0.020632546f;
    q = q * a2 - 0.053737797f;
    q = q * a2 + 0.1333142f;
    q = q * a2 - 0.3333328f;
    const float small = (a * a2) * q + a;
    const float large = 1.0f - 2.0f / (vexp(2.0f * a) + 1.0f);
    return std::copysign(a < 0.625f ? small : large, x);
}
inline double vtanh(double x) {
    return std::tanh(x);
}

// The lanes added pairwise: i and i+8, then i and i+4, ...
template <class A>
inline A add_lanes(A (&lane)[kLanes]) {
    for (size_t width = kLanes / 2; width > 0; width /= 2) {
        for (size_t j = 0; j < width; ++j) lane[j] += lane[j + width];
    }
    return lane[0];
}

// term(0) + ... + term(n-1); element i goes to lane i % 16. For rows of up to some thousands: the
// error of a lane grows with n / 16.
template <class A, class Term>
inline A lane_sum(size_t n, Term&& term) {
    A lane[kLanes] = {};
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        for (size_t j = 0; j < kLanes; ++j) lane[j] += term(i + j);
    }
    for (size_t j = 0; i + j < n; ++j) lane[j] += term(i + j);
    return add_lanes(lane);
}

// Sum of a[i] * b[i].
template <class T>
inline accum_t<T> dot(const T* a, const T* b, size_t n) {
    return lane_sum<accum_t<T>>(n, [=](size_t i) { return load(a[i]) * load(b[i]); });
}

// Sum of a[i].
template <class T>
inline accum_t<T> sum(const T* a, size_t n) {
    return lane_sum<accum_t<T>>(n, [=](size_t i) { return load(a[i]); });
}

// Largest a[i], NaN passed over; minus infinity when there is none.
template <class T>
inline accum_t<T> max_value(const T* a, size_t n) {
    using A = accum_t<T>;
    A lane[kLanes];
    for (A& value : lane) value = -std::numeric_limits<A>::infinity();
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        for (size_t j = 0; j < kLanes; ++j) {
            const A value = load(a[i + j]);
            lane[j] = value > lane[j] ? value : lane[j];
        }
    }
    for (size_t j = 0; i + j < n; ++j) {
        const A value = load(a[i + j]);
        lane[j] = value > lane[j] ? value : lane[j];
    }
    A largest = lane[0];
    for (size_t j = 1; j < kLanes; ++j) largest = lane[j] > largest ? lane[j] : largest;
    return largest;
}

}  // namespace llmc::cpu
