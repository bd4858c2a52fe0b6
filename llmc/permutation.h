// A random permutation of 0 ... n-1 in constant memory, for any n.
//
// A Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations from
// pseudorandom functions", 1988) permutes the 2h-bit numbers, 4^h being the smallest power of four
// >= n. Results that are not below n are fed back until one is (Black and Rogaway, "Ciphers with
// arbitrary finite domains", 2002, section 3, cycle walking): fewer than four passes on average,
// and the result is a permutation of 0 ... n-1.
#pragma once

#include <cstdint>

#include "llmc/error.h"
#include "llmc/rng.h"

namespace llmc {

class KeyedPermutation {
  public:
    static constexpr uint64_t kLargest = uint64_t{1} << 62;

    // The permutation of 0 ... n-1 for (seed, epoch, stream). Error unless 1 <= n <= kLargest.
    KeyedPermutation(uint64_t n, uint64_t seed, uint64_t epoch, uint32_t stream) : n_(n) {
        if (n < 1 || n > kLargest) {
            throw Error(format("permutation of %llu elements, expected 1 to 2^62",
                               static_cast<unsigned long long>(n)));
        }
        while ((uint64_t{1} << (2 * half_bits_)) < n) ++half_bits_;
        const Philox4 key = philox(seed, RandomPurpose::kDataOrder, stream, epoch);
        key_ = key.lane[0] | static_cast<uint64_t>(key.lane[1]) << 32;
        swap_ = key.lane[2] & 1;
    }

    uint64_t size() const { return n_; }

    // The element at `place`. Error unless place < n.
    uint64_t operator()(uint64_t place) const {
        if (place >= n_) {
            throw Error(format("place %llu in a permutation of %llu elements",
                               static_cast<unsigned long long>(place),
                               static_cast<unsigned long long>(n_)));
        }
        do {
            place = encrypt(place);
        } while (place >= n_);
        return place;
    }

  private:
    // Four rounds are enough for large halves; with halves of one or two bits, twelve are where
    // tests no longer tell the result from all permutations alike.
    static constexpr uint32_t kRounds = 12;

    uint64_t encrypt(uint64_t value) const {
        const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
        uint64_t left = value >> half_bits_, right = value & mask;
        for (uint32_t round = 0; round < kRounds; ++round) {
            const uint64_t bits = philox(key_, RandomPurpose::kDataOrder, round, right).lane[0];
            const uint64_t next = left ^ (bits & mask);
            left = right;
            right = next;
        }
        const uint64_t result = left << half_bits_ | right;
        // With halves of two bits or more a round moves an even number of pairs, so that half of all
        // permutations would never come out; one swap in half of the keys brings them in.
        return swap_ && result < 2 ? result ^ 1 : result;
    }

    uint64_t n_;
    int half_bits_ = 1;
    uint64_t key_ = 0;
    bool swap_ = false;
};

}  // namespace llmc
