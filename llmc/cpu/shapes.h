// What a launcher does with its shapes before any work: checks them, and cuts rows into blocks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <initializer_list>

#include "llmc/error.h"

namespace llmc::cpu {

struct NamedSize {
    const char* name;
    long long value;
};

// Throws Error naming the first size below 1.
inline void require_positive(const char* launcher, std::initializer_list<NamedSize> sizes) {
    for (const NamedSize& size : sizes) {
        if (size.value >= 1) continue;
        throw Error(format("%s: %s is %lld, must be at least 1", launcher, size.name, size.value));
    }
}

// Rows of `width` elements that make a block big enough to outweigh handing it to a thread.
inline size_t rows_per_block(size_t width) {
    constexpr size_t kBlockElements = 16384;
    return std::max<size_t>(1, kBlockElements / width);
}

}  // namespace llmc::cpu
