// Stochastic rounding from fp32 to bf16.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace llmc {

// The bits of `value` as bf16, up or down with a probability that makes the expected value exact:
// 16 random bits are added to the half that is cut off (Croci et al., "Stochastic rounding:
// implementation, error analysis and applications", 2022, section 2). A value that bf16 holds keeps
// its bits.
//
// Between the largest bf16 and infinity there is nothing to be unbiased about, so a finite value
// stays finite and is cut off. Infinity stays infinity; NaN becomes 0x7fff, as when rounding to
// nearest.
__host__ __device__ inline uint16_t stochastic_bf16_bits(float value, uint32_t random_bits16) {
    uint32_t u;
    memcpy(&u, &value, sizeof(u));
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    const uint32_t cut_off = u >> 16;
    const uint32_t rounded = (u + (random_bits16 & 0xffffu)) >> 16;
    return static_cast<uint16_t>((rounded & 0x7fffu) == 0x7f80u ? cut_off : rounded);
}

}  // namespace llmc
