// Raw bits of numbers, for tests that compare bit for bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "llmc/precision.h"

namespace llmc::test {

template <class T>
using bits_t = std::conditional_t<sizeof(T) == 8, uint64_t,
                                  std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;

template <class T>
bits_t<T> bits_of(T value) {
    bits_t<T> bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

template <class T>
T from_bits(bits_t<T> bits) {
    T value;
    std::memcpy(static_cast<void*>(&value), &bits, sizeof(value));
    return value;
}

// Elements whose bits differ.
template <class T>
size_t count_different(const T* a, const T* b, size_t count) {
    size_t different = 0;
    for (size_t i = 0; i < count; ++i) different += bits_of(a[i]) != bits_of(b[i]);
    return different;
}

// `value` rounded to the nearest bf16, ties to even, by scaling to whole numbers: shares nothing
// with the code under test.
inline uint16_t nearest_bf16_bits(double value) {
    if (std::isnan(value)) return 0x7fff;
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double size = std::fabs(value);
    if (std::isinf(size)) return sign | 0x7f80;
    if (size == 0.0) return sign;
    int exponent;
    std::frexp(size, &exponent);
    // The last place of an 8-bit significand; below 2^-126, of the denormals.
    const int last_place = std::max(exponent - 8, -133);
    const double rounded = std::ldexp(std::nearbyint(std::ldexp(size, -last_place)), last_place);
    if (rounded >= 0x1p128) return sign | 0x7f80;
    return sign | static_cast<uint16_t>(bits_of(static_cast<float>(rounded)) >> 16);
}

}  // namespace llmc::test
