// Random numbers by counter: a pure function of (seed, purpose, step, index).
//
// Philox4x32-10, from Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3"
// (SC 2011), section 3.3. Nothing has a state, so no draw depends on how many draws came before it,
// on the number of ranks or on who asks.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "llmc/portable_math.h"

namespace llmc {

// What a number is for: the same (seed, step, index) gives unrelated numbers for two purposes.
enum class RandomPurpose : uint32_t {
    kWeightInit = 1,
    kStochasticRounding = 2,
    kDataOrder = 3,
    kSampling = 4,
    kTest = 5,
};

struct Philox4 {
    uint32_t lane[4];
};

// Four independent 32-bit numbers for one counter value.
__host__ __device__ inline Philox4 philox(uint64_t seed, RandomPurpose purpose, uint32_t step,
                                          uint64_t block) {
    uint32_t c0 = static_cast<uint32_t>(block), c1 = static_cast<uint32_t>(block >> 32);
    uint32_t c2 = step, c3 = static_cast<uint32_t>(purpose);
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c0;
        const uint64_t p1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
        const uint32_t next0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
        const uint32_t next2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
        c1 = static_cast<uint32_t>(p1);
        c3 = static_cast<uint32_t>(p0);
        c0 = next0;
        c2 = next2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// 32 random bits for element `index`.
__host__ __device__ inline uint32_t random_bits32(uint64_t seed, RandomPurpose purpose,
                                                  uint32_t step, uint64_t index) {
    return philox(seed, purpose, step, index >> 2).lane[index & 3];
}

// The 16 bits that round element `index` stochastically from fp32 to bf16. One Philox block serves
// eight neighbours: block index / 8, lane (index % 8) / 2, low half first.
__host__ __device__ inline uint32_t rounding_bits16(const Philox4& block, uint64_t index) {
    return (block.lane[(index & 7) >> 1] >> (16 * (index & 1))) & 0xffffu;
}
__host__ __device__ inline Philox4 rounding_block(uint64_t seed, uint32_t step, uint64_t index) {
    return philox(seed, RandomPurpose::kStochasticRounding, step, index >> 3);
}

// Uniform in the open interval (0, 1), a multiple of 2^-33.
__host__ __device__ inline double uniform_from_bits(uint32_t bits) {
    return portable::mul(portable::add(static_cast<double>(bits), 0.5), 0x1p-32);
}
__host__ __device__ inline double random_uniform(uint64_t seed, RandomPurpose purpose,
                                                 uint32_t step, uint64_t index) {
    return uniform_from_bits(random_bits32(seed, purpose, step, index));
}

struct Normal4 {
    double lane[4];
};

// Four standard normals for elements 4 * block ... 4 * block + 3 (Box and Muller, 1958).
__host__ __device__ inline Normal4 random_normal4(uint64_t seed, RandomPurpose purpose,
                                                  uint32_t step, uint64_t block) {
    const Philox4 bits = philox(seed, purpose, step, block);
    Normal4 result;
    for (int pair = 0; pair < 2; ++pair) {
        const double u = uniform_from_bits(bits.lane[2 * pair]);
        const double radius = std::sqrt(portable::mul(-2.0, portable::log(u)));
        const portable::SinCos angle =
            portable::sincos_turns(uniform_from_bits(bits.lane[2 * pair + 1]));
        result.lane[2 * pair] = portable::mul(radius, angle.cos);
        result.lane[2 * pair + 1] = portable::mul(radius, angle.sin);
    }
    return result;
}

}  // namespace llmc
