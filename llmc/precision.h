// floatX, the type of weights and activations, and gradX, the type of gradients.
//
// PRECISION=FP32 or BF16 in the Makefile sets LLMC_FP32 or LLMC_BF16; GRAD_PRECISION=FP32 sets
// LLMC_GRAD_FP32. Conversions round to nearest even and give the bits of CUDA's own conversions,
// NaN included (0x7fff).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef LLMC_CPU
struct __nv_bfloat16 {
    uint16_t bits;
};
#else
#include <cuda_bf16.h>
#endif

namespace llmc {

using bf16 = __nv_bfloat16;

#if defined(LLMC_BF16) && defined(LLMC_FP32)
#error "set one of LLMC_BF16 and LLMC_FP32"
#elif defined(LLMC_BF16)
using floatX = bf16;
constexpr const char* kPrecisionName = "BF16";
#else
using floatX = float;
constexpr const char* kPrecisionName = "FP32";
#endif

#ifdef LLMC_GRAD_FP32
using gradX = float;
#else
using gradX = floatX;
#endif

inline uint16_t float_to_bf16_bits(float value) {
    uint32_t u;
    std::memcpy(&u, &value, sizeof(u));
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

inline float bf16_bits_to_float(uint16_t bits) {
    const uint32_t u = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &u, sizeof(value));
    return value;
}

inline float to_float(float value) {
    return value;
}
inline float to_float(bf16 value) {
    uint16_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bf16_bits_to_float(bits);
}

// from_float<T>(x): x rounded to T, to nearest even.
template <class T>
inline T from_float(float value);
template <>
inline float from_float<float>(float value) {
    return value;
}
template <>
inline bf16 from_float<bf16>(float value) {
    const uint16_t bits = float_to_bf16_bits(value);
    bf16 result;
    std::memcpy(static_cast<void*>(&result), &bits, sizeof(bits));
    return result;
}

// The type that sums and statistics of T are kept in. The twins also run on double, so that their
// gradients can be held against finite differences.
template <class T>
struct Accum {
    using type = float;
};
template <>
struct Accum<double> {
    using type = double;
};
template <class T>
using accum_t = typename Accum<T>::type;

// load(x) widens to the accumulator's type, store<T>(x) rounds to T.
template <class T>
inline accum_t<T> load(T value) {
    if constexpr (std::is_same_v<T, double>) {
        return value;
    } else {
        return to_float(value);
    }
}
template <class T>
inline T store(accum_t<T> value) {
    if constexpr (std::is_same_v<T, double>) {
        return value;
    } else {
        return from_float<T>(value);
    }
}

}  // namespace llmc
