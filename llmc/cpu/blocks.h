// Blocks over tables of runs, which tree_add, adamw_update and global_norm_chunks have in common.
#pragma once

#include <algorithm>
#include <cstddef>

#include "llmc/cpu/parallel.h"
#include "llmc/error.h"

namespace llmc::cpu {

// Throws Error when `count` entries cannot lie at `table`.
inline void check_table(const char* launcher, const void* table, int count) {
    if (count < 0) throw Error(format("%s: %d table entries, must be 0 or more", launcher, count));
    if (count > 0 && table == nullptr) {
        throw Error(format("%s: %d table entries at a null pointer", launcher, count));
    }
}

inline size_t num_blocks(size_t count, size_t block) {
    return (count + block - 1) / block;
}

// Calls body(run, begin, end) for each block of `block` elements of each of `num_runs` runs, where
// run i has count_of(i) elements. As on the GPU, where max_count sets the grid, elements of a run
// past max_count are left out.
template <class CountOf, class Body>
void for_each_block(size_t num_runs, size_t max_count, size_t block, CountOf&& count_of,
                    Body&& body) {
    const size_t blocks = num_blocks(max_count, block);
    thread_pool().for_each(num_runs * blocks, [&](size_t i) {
        const size_t run = i / blocks, begin = i % blocks * block;
        const size_t end = std::min({count_of(run), max_count, begin + block});
        if (begin < end) body(run, begin, end);
    });
}

}  // namespace llmc::cpu
