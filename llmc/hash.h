// Hashes that tell whether two tensors, files or texts are the same. Not against an adversary.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string_view>
#include <thread>
#include <vector>

#include "llmc/error.h"

namespace llmc {

// A bijection of 64 bits in which every input bit flips each output bit about half the time: the
// finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
// OOPSLA 2014, with the constants of Stafford's variant 13).
inline uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// Hash of one element: its bits at its place. The golden-ratio constant keeps place 0 from 0.
inline uint64_t mix_element(uint64_t index, uint64_t bits) {
    return mix64(mix64(index + 0x9e3779b97f4a7c15ull) ^ bits);
}

namespace hash_detail {

template <class Bits>
uint64_t sum_elements(const unsigned char* data, size_t count, uint64_t first_index) {
    uint64_t sum = 0;
    for (size_t i = 0; i < count; ++i) {
        Bits bits;
        std::memcpy(&bits, data + i * sizeof(Bits), sizeof(Bits));
        sum += mix_element(first_index + i, bits);
    }
    return sum;
}

inline uint64_t sum_elements(const unsigned char* data, size_t bytes_per_element, size_t count,
                             uint64_t first_index) {
    if (bytes_per_element == 1) return sum_elements<uint8_t>(data, count, first_index);
    if (bytes_per_element == 2) return sum_elements<uint16_t>(data, count, first_index);
    if (bytes_per_element == 4) return sum_elements<uint32_t>(data, count, first_index);
    return sum_elements<uint64_t>(data, count, first_index);
}

}  // namespace hash_detail

// Sum modulo 2^64 of mix_element(index, bits) over `count` elements, the first of which has index
// `first_index` in the whole. Hashes of parts therefore add up to the hash of the whole, however it
// is cut and in whatever order the parts come. `data` host memory, any alignment. Large inputs are
// shared out to threads. Throws Error when an element is not 1, 2, 4 or 8 bytes.
inline uint64_t hash_elements(const void* data, size_t bytes_per_element, size_t count,
                              uint64_t first_index) {
    const size_t sizes[] = {1, 2, 4, 8};
    if (std::find(std::begin(sizes), std::end(sizes), bytes_per_element) == std::end(sizes)) {
        throw Error(
            format("hash_elements: %zu bytes an element, must be 1, 2, 4 or 8", bytes_per_element));
    }
    constexpr size_t kElementsPerThread = size_t{1} << 20;
    const unsigned char* bytes = static_cast<const unsigned char*>(data);
    const size_t cores = std::clamp(std::thread::hardware_concurrency(), 1u, 16u);
    const size_t parts = std::clamp(count / kElementsPerThread, size_t{1}, cores);
    std::vector<uint64_t> sums(parts, 0);
    const auto hash_part = [&](size_t part) {
        const size_t begin = count / parts * part;
        const size_t end = part + 1 == parts ? count : count / parts * (part + 1);
        sums[part] = hash_detail::sum_elements(bytes + begin * bytes_per_element, bytes_per_element,
                                               end - begin, first_index + begin);
    };
    std::vector<std::thread> threads;
    for (size_t part = 1; part < parts; ++part) threads.emplace_back(hash_part, part);
    hash_part(0);
    for (std::thread& thread : threads) thread.join();
    uint64_t sum = 0;
    for (const uint64_t value : sums) sum += value;
    return sum;
}

// Hash of `size` bytes in order, their number included; of a file's contents, for example. The same
// on little-endian machines.
inline uint64_t hash_bytes(const void* data, size_t size) {
    const size_t words = size / sizeof(uint64_t);
    uint64_t tail = 0;
    if (size % sizeof(uint64_t) != 0) {
        std::memcpy(&tail, static_cast<const unsigned char*>(data) + words * sizeof(uint64_t),
                    size % sizeof(uint64_t));
    }
    return mix64(hash_elements(data, sizeof(uint64_t), words, 0) + mix_element(words, tail) +
                 mix_element(~uint64_t{0}, size));
}

inline uint64_t hash_text(std::string_view text) {
    return hash_bytes(text.data(), text.size());
}

}  // namespace llmc
