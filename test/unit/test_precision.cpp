#include "llmc/precision.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "llmc/rng.h"
#include "test/unit/bits.h"

namespace {

using namespace llmc;
using namespace llmc::test;

TEST(Bf16, All65536PatternsRoundTrip) {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
        const bf16 value = from_bits<bf16>(static_cast<uint16_t>(bits));
        const float wide = to_float(value);
        ASSERT_EQ(bits_of(wide), bits << 16);
        const uint32_t expected = std::isnan(wide) ? 0x7fff : bits;
        ASSERT_EQ(bits_of(from_float<bf16>(wide)), expected);
        ASSERT_EQ(bits_of(store<bf16>(load(value))), expected);
    }
}

TEST(Bf16, RoundsToNearestEvenEverywhere) {
    for (uint32_t high = 0; high < 65536; ++high) {
        for (const uint32_t low : {0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
            const float value = from_bits<float>(high << 16 | low);
            ASSERT_EQ(float_to_bf16_bits(value), nearest_bf16_bits(value))
                << std::hex << high << " " << low;
        }
    }
    for (uint64_t i = 0; i < 500000; ++i) {
        const float value = from_bits<float>(random_bits32(1, RandomPurpose::kTest, 0, i));
        ASSERT_EQ(float_to_bf16_bits(value), nearest_bf16_bits(value)) << value;
    }
}

TEST(Bf16, HalfwayCasesDenormalsInfinityAndNan) {
    EXPECT_EQ(float_to_bf16_bits(from_bits<float>(0x3f808000u)), 0x3f80);  // tie, down to even
    EXPECT_EQ(float_to_bf16_bits(from_bits<float>(0x3f818000u)), 0x3f82);  // tie, up to even
    EXPECT_EQ(float_to_bf16_bits(from_bits<float>(0x3f808001u)), 0x3f81);
    EXPECT_EQ(float_to_bf16_bits(from_bits<float>(0x3f8fffffu)), 0x3f90);  // carries
    EXPECT_EQ(float_to_bf16_bits(from_bits<float>(0x00008000u)), 0x0000);
    EXPECT_EQ(float_to_bf16_bits(from_bits<float>(0x00018000u)), 0x0002);
    EXPECT_EQ(float_to_bf16_bits(from_bits<float>(0x007fffffu)), 0x0080);  // smallest normal
    EXPECT_EQ(float_to_bf16_bits(-0.0f), 0x8000);
    EXPECT_EQ(float_to_bf16_bits(from_bits<float>(0x7f7f7fffu)), 0x7f7f);
    EXPECT_EQ(float_to_bf16_bits(from_bits<float>(0x7f7f8000u)), 0x7f80);
    EXPECT_EQ(float_to_bf16_bits(std::numeric_limits<float>::infinity()), 0x7f80);
    EXPECT_EQ(float_to_bf16_bits(-std::numeric_limits<float>::infinity()), 0xff80);
    for (const uint32_t nan : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0xff800001u, 0xffffffffu}) {
        EXPECT_EQ(float_to_bf16_bits(from_bits<float>(nan)), 0x7fff);
    }
}

TEST(Precision, LoadAndStoreKeepFp32AndDoubleAsTheyAre) {
    const float f = 1.2345678f;
    const double d = 1.234567890123456;
    EXPECT_EQ(store<float>(load(f)), f);
    EXPECT_EQ(store<double>(load(d)), d);
    static_assert(std::is_same_v<accum_t<bf16>, float>);
    static_assert(std::is_same_v<accum_t<float>, float>);
    static_assert(std::is_same_v<accum_t<double>, double>);
    static_assert(sizeof(bf16) == 2);
}

}  // namespace
