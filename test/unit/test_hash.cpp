#include "llmc/hash.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "llmc/rng.h"

namespace {

using namespace llmc;

std::vector<uint32_t> random_words(size_t count) {
    std::vector<uint32_t> words(count);
    for (size_t i = 0; i < count; ++i) words[i] = random_bits32(1, RandomPurpose::kTest, 0, i);
    return words;
}

// SplitMix64 with seed 1234567: its state goes up by the golden-ratio constant, its outputs are the
// finalised states.
TEST(Hash, TheMixerIsSplitMix64s) {
    const uint64_t expected[] = {6457827717110365317ull, 3203168211198807973ull,
                                 9817491932198370423ull, 4593380528125082431ull,
                                 16408922859458223821ull};
    uint64_t state = 1234567;
    for (const uint64_t output : expected) {
        state += 0x9e3779b97f4a7c15ull;
        EXPECT_EQ(mix64(state), output);
    }
}

TEST(Hash, PartsAddUpToTheWholeInAnyOrderAndSplit) {
    const std::vector<uint32_t> words = random_words(3000001);
    const uint64_t first = (uint64_t{1} << 40) + 7;
    const uint64_t whole = hash_elements(words.data(), 4, words.size(), first);
    const std::vector<size_t> cuts = {0, 1, 8, 1000, 1000, 2222222, words.size()};
    uint64_t sum = 0;
    for (size_t i = cuts.size() - 1; i > 0; --i) {
        sum += hash_elements(words.data() + cuts[i - 1], 4, cuts[i] - cuts[i - 1],
                             first + cuts[i - 1]);
    }
    EXPECT_EQ(sum, whole);
    uint64_t one_by_one = 0;
    for (size_t i = 0; i < words.size(); ++i) one_by_one += mix_element(first + i, words[i]);
    EXPECT_EQ(one_by_one, whole);
}

TEST(Hash, ElementsOfAnySizeAreTheirBits) {
    unsigned char data[16];
    std::iota(data, data + 16, static_cast<unsigned char>(0xf0));
    EXPECT_EQ(hash_elements(data, 1, 1, 5), mix_element(5, 0xf0));
    EXPECT_EQ(hash_elements(data, 2, 1, 5), mix_element(5, 0xf1f0));
    EXPECT_EQ(hash_elements(data, 4, 1, 5), mix_element(5, 0xf3f2f1f0));
    EXPECT_EQ(hash_elements(data, 8, 1, 5), mix_element(5, 0xf7f6f5f4f3f2f1f0));
    EXPECT_EQ(hash_elements(data + 1, 8, 1, 5), mix_element(5, 0xf8f7f6f5f4f3f2f1));  // unaligned
    EXPECT_EQ(hash_elements(nullptr, 4, 0, 5), 0u);
    for (const size_t bytes : {0, 3, 16}) EXPECT_THROW(hash_elements(data, bytes, 1, 0), Error);
}

TEST(Hash, OneBitOrTwoSwappedElementsChangeIt) {
    std::vector<uint32_t> words = random_words(1000);
    std::set<uint64_t> seen = {hash_elements(words.data(), 4, words.size(), 0)};
    size_t changes = 0;
    for (size_t i = 0; i < words.size(); i += 37) {
        for (int bit = 0; bit < 32; ++bit) {
            words[i] ^= 1u << bit;
            seen.insert(hash_elements(words.data(), 4, words.size(), 0));
            words[i] ^= 1u << bit;
            ++changes;
        }
        std::swap(words[i], words[(i + 1) % words.size()]);
        seen.insert(hash_elements(words.data(), 4, words.size(), 0));
        std::swap(words[i], words[(i + 1) % words.size()]);
        ++changes;
    }
    EXPECT_EQ(seen.size(), changes + 1);
}

TEST(Hash, SignOfZeroAndPlaceOfTheFirstElementMatter) {
    const float plus = 0.0f, minus = -0.0f;
    EXPECT_NE(hash_elements(&plus, 4, 1, 0), hash_elements(&minus, 4, 1, 0));
    EXPECT_NE(hash_elements(&plus, 4, 1, 0), hash_elements(&plus, 4, 1, 1));
    EXPECT_NE(hash_elements(&plus, 4, 1, 0), 0u);
}

TEST(Hash, SmallIndicesAndValuesDoNotCollide) {
    std::set<uint64_t> seen;
    for (uint64_t index = 0; index < 300; ++index) {
        for (uint64_t bits = 0; bits < 300; ++bits) seen.insert(mix_element(index, bits));
    }
    EXPECT_EQ(seen.size(), 90000u);
}

TEST(Hash, BytesAndTextsDifferByContentAndLength) {
    std::set<uint64_t> seen;
    std::string zeros, text;
    for (int length = 0; length < 100; ++length) {
        seen.insert(hash_bytes(zeros.data(), zeros.size()));
        zeros.push_back('\0');
        text.push_back(static_cast<char>('a' + length % 26));
        seen.insert(hash_text(text));
    }
    EXPECT_EQ(seen.size(), 200u);
    std::string changed = text;
    for (size_t i = 0; i < text.size(); ++i) {
        changed[i] ^= 1;
        EXPECT_NE(hash_text(changed), hash_text(text)) << i;
        changed[i] ^= 1;
    }
    EXPECT_EQ(hash_text(text), hash_bytes(text.data(), text.size()));
}

// Ranks on different machines compare these, and checkpoints hold them. The numbers come from a
// calculation in Python.
TEST(Hash, ValuesAreTheSameEverywhere) {
    EXPECT_EQ(hash_text(""), 0x95f086e26b9b0982u);
    EXPECT_EQ(hash_text("GPT-2"), 0xe6c15264b6cda666u);
    EXPECT_EQ(hash_text("a longer text of many words"), 0x36134bcab3341b39u);
}

}  // namespace
