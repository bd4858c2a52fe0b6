// Backward pass of causal attention on Hopper, for heads of 64 in bf16 (method: Dao 2023,
// FlashAttention-2; that warpgroups take turns at their exponentials: Shah et al. 2024,
// FlashAttention-3).
//
// A block has two or three warpgroups. Each owns 64 rows of one head and shares with the others
// the tiles of 64 rows that stream past them: for the gradients of k and v it owns keys and
// values and streams queries and dout, for that of q the other way round. Scores are computed
// with the owned rows as rows, so that p and ds are in registers what the next product takes for
// its first factor, and nothing but tiles goes through shared memory. A row's sums are added up by
// one warpgroup in the order of the tiles: no atomics on them, no (T,T) matrix, and bits that
// depend on the shape alone. The price is 7 products instead of 5, and every exponential twice.
//
// A block stays on its multiprocessor (a persistent block) and takes one item of work after
// another: two or three tiles of one head that follow one another, one for each warpgroup. The first
// thread of one warpgroup more (the producer) starts all copies by TMA, those of the next item and
// those of results back to memory while the warpgroups are at this one. Blocks with one item each
// spent a quarter of their time on the start and the end of it.
//
// Bound by products, 7 T^2 HS FLOP a head where half of the scores are masked, and by the
// exponentials between them: of a tile of scores the products take 128 cycles each, 384 for q and
// 512 for k and v, and the exponentials 256, at 16 a cycle and multiprocessor. On an H200 at B 64,
// T 1024, 12 heads 0.76 ms, 338 TFLOP/s of the 5 products that are needed: 0.35 for q, 0.41 for k
// and v. In a row without pauses 0.82, since the clock falls at the power limit.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "llmc/bulk_copy.cuh"
#include "llmc/cuda_common.h"
#include "llmc/cuda_utils.cuh"
#include "llmc/precision.h"
#include "llmc/wgmma.cuh"
#include "llmc/work_counters.h"

namespace llmc::attention_hopper {

constexpr int kHeadSize = 64, kTile = 64;  // a tile is kTile rows of a head
constexpr int kTileElements = kTile * kHeadSize, kTileBytes = kTileElements * 2;
constexpr int kGroupThreads = 128, kWarpsOfGroup = kGroupThreads / kWarpSize;
constexpr int kStages = 4;
// Heads whose items follow one another, for the L2 cache's sake.
constexpr int kHeadsTogether = 64;

struct Shape {
    int B, T, NH;
    float scale;  // of the scores

    __host__ __device__ int heads() const { return B * NH; }
    __host__ __device__ size_t rows() const { return static_cast<size_t>(heads()) * T; }
    __host__ __device__ int tiles() const { return T / kTile; }
    // Of `groups` tiles each.
    __host__ __device__ int items_of_head(int groups) const { return ceil_div(tiles(), groups); }
    __host__ __device__ int items(int groups) const { return heads() * items_of_head(groups); }
    __host__ __device__ size_t channels() const { return static_cast<size_t>(NH) * kHeadSize; }
};

// What is the same for all products of a row, in the launcher's scratch: the kernel for queries
// leaves it there for the one for keys.
struct RowValues {
    float* log2_lse;  // (B,NH,T)  lse * log2(e)
    float* weighted;  // (B,NH,T)  sum over the head of dout * out, D in the papers
};

// ============================================================================
// kernels

// Of a block with kGroups_ warpgroups, of which each owns kParts tiles.
template <int kGroups_, int kParts>
struct SharedMemory {
    static constexpr int kGroups = kGroups_;

    // Of two items in turn, each in its slot (double buffer): what each warpgroup owns, and then its
    // results in its place.
    bf16 owned[2][kParts][kGroups][kTileElements];
    bf16 streamed[kStages][2][kTileElements];
    float row_values[kStages][2][kTile];  // of streamed queries (for keys): log2_lse, weighted
    float owned_lse[2][kGroups][kTile];   // of owned queries (for queries)
    int items[2];                         // negative: there are no more
    // Of a slot: its copies are there (the producer arrives, and bytes); its results are there and it is
    // read no more (every warp of the warpgroups arrives).
    device::Barrier owned_full[2], owned_empty[2];
    // Of a stage: its copies are there (the producer, and bytes); it is read no more (every warp).
    device::Barrier full[kStages], empty[kStages];
};
// Two warpgroups for keys: with the accumulators of dk and dv there are no registers for a third.
using KeyMemory = SharedMemory<2, 2>;    // k, v
using QueryMemory = SharedMemory<3, 3>;  // q, dout, out
template <class Shared>
constexpr size_t kSharedBytes = sizeof(Shared) + 1024;  // begins at a multiple of 1024
static_assert(kSharedBytes<KeyMemory> <= 227 * 1024 && kSharedBytes<QueryMemory> <= 227 * 1024,
              "more shared memory than a block can have");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <class Shared>
__device__ Shared& shared_memory() {
    extern __shared__ unsigned char memory[];
    const uint32_t past = device::shared_address(memory) % 1024;
    return *reinterpret_cast<Shared*>(memory + (1024 - past) % 1024);
}

// By all threads of a block, first of all.
template <class Shared>
__device__ void open_barriers(Shared& shared) {
    if (threadIdx.x == 0) {
        for (device::Barrier& barrier : shared.owned_full) barrier.init(1);
        for (device::Barrier& barrier : shared.owned_empty)
            barrier.init(Shared::kGroups * kWarpsOfGroup);
        for (device::Barrier& barrier : shared.full) barrier.init(1);
        for (device::Barrier& barrier : shared.empty) barrier.init(Shared::kGroups * kWarpsOfGroup);
        device::publish_barriers();
    }
    __syncthreads();
}

// Where a thread of a warpgroup stands in the tiles that stream past: the n-th of them has its stage.
struct Turn {
    int n = 0;

    __device__ int stage() const { return n % kStages; }
    template <class Shared>
    __device__ void wait(Shared& shared) const {
        shared.full[stage()].wait(n / kStages % 2);
    }
    template <class Shared>
    __device__ bool next_is_there(Shared& shared) const {
        return shared.full[(n + 1) % kStages].has_opened((n + 1) / kStages % 2);
    }
    // This warp reads the n-th tiles no more.
    template <class Shared>
    __device__ static void release(Shared& shared, int n) {
        __syncwarp();
        if (threadIdx.x % kWarpSize == 0) shared.empty[n % kStages].arrive();
    }
};

// An item of work: some tiles of one head that follow one another, one for each warpgroup.
template <int kGroups>
struct Item {
    int batch;  // the sequence, 0 to B - 1
    int head;   // of the sequence, 0 to NH - 1
    int row;    // its first tile is row * kGroups

    // The item with a number. Items are numbered head by head of kHeadsTogether, and among those by
    // `row`, falling (`latest_first`) or rising: such that work gets less.
    __device__ Item(int number, const Shape& shape, bool latest_first) {
        const int of_head = shape.items_of_head(kGroups);
        const int together = kHeadsTogether * of_head;
        const int first_head = number / together * kHeadsTogether;
        const int heads = min(shape.heads() - first_head, kHeadsTogether);
        const int among = number % together;
        const int head_of_all = first_head + among % heads;
        batch = head_of_all / shape.NH;
        head = head_of_all % shape.NH;
        row = latest_first ? of_head - 1 - among / heads : among / heads;
    }
    // The tile that a warpgroup owns; there may be none of that number.
    __device__ int owned_tile(int group) const { return row * kGroups + group; }
    // A tile's first row in (B*T,C), and in (B,NH,T).
    __device__ int row_of(int tile, const Shape& shape) const {
        return batch * shape.T + tile * kTile;
    }
    __device__ size_t place_of(int tile, const Shape& shape) const {
        return (static_cast<size_t>(batch) * shape.NH + head) * shape.T + tile * kTile;
    }
    // Its first column in (B*T,C).
    __device__ int column() const { return head * kHeadSize; }
};

// Row and column of this lane's first element of a 64 x 64 result (wgmma.cuh has the layout): its
// others are 8 rows further and at multiples of 8 columns, two side by side.
__device__ inline int lane_row() {
    return threadIdx.x % kGroupThreads / kWarpSize * 16 + threadIdx.x % kWarpSize / 4;
}
__device__ inline int lane_column() {
    return threadIdx.x % 4 * 2;
}
// Where in a tile, whose pieces of 8 elements are swizzled (wgmma.cuh), the two of them lie that are `half`
// times 8 rows and n times 8 columns further.
__device__ inline int place_in_tile(int half, int n) {
    const int row = lane_row();
    return (row + half * 8) * kHeadSize + (n ^ row % 8) * 8 + lane_column();
}

// scores (64,64) = owned[0] * streamed[0]^T and dscores = owned[1] * streamed[1]^T, a batch (wgmma
// group) each.
template <int kGroup, class Shared>
__device__ inline void begin_scores(float (&scores)[32], float (&dscores)[32], const Shared& shared,
                                    int slot, int stage) {
    const uint32_t a = device::tile_descriptor(shared.owned[slot][0][kGroup]);
    const uint32_t b = device::tile_descriptor(shared.streamed[stage][0]);
    const uint32_t da = device::tile_descriptor(shared.owned[slot][1][kGroup]);
    const uint32_t db = device::tile_descriptor(shared.streamed[stage][1]);
    device::begin_products();
#pragma unroll
    for (int k = 0; k < kHeadSize / 16; ++k) {
        device::multiply_tiles<false, false>(scores, a + device::kAlongRows * k,
                                             b + device::kAlongRows * k, k > 0);
    }
    device::end_products();
#pragma unroll
    for (int k = 0; k < kHeadSize / 16; ++k) {
        device::multiply_tiles<false, false>(dscores, da + device::kAlongRows * k,
                                             db + device::kAlongRows * k, k > 0);
    }
    device::end_products();
}

// sums (+)= factors (64,64) * tile (64,64), a batch. Adds when `add`.
__device__ inline void begin_sums(float (&sums)[32], const uint32_t (&factors)[4][4],
                                  const bf16* tile, bool add) {
    const uint32_t rows = device::tile_descriptor(tile);
    device::begin_products();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        device::multiply_tile<true>(sums, factors[k], rows + device::kFromRowToRow * k,
                                    add || k > 0);
    }
    device::end_products();
}

// A 64 x 64 result as factors (A operands in registers) of a product, sixteen columns each.
__device__ inline void to_factors(uint32_t (&factors)[4][4], const float (&sums)[32]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            factors[k][i] = two_halves(sums[8 * k + 2 * i], sums[8 * k + 2 * i + 1]);
        }
    }
}

// Leaves a result times `factor` in a tile.
__device__ inline void store_tile(bf16* tile, const float (&sums)[32], float factor) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            *reinterpret_cast<uint32_t*>(tile + place_in_tile(half, n)) =
                two_halves(sums[4 * n + 2 * half] * factor, sums[4 * n + 2 * half + 1] * factor);
        }
    }
}

// Warpgroups take turns at their exponentials: while one is at them, the tensor cores work for the
// other. Who has the baton passes it to the next, and the last to the first. So that it comes
// round, each warpgroup waits for it and passes it once for every tile that streams past, also for
// one that it skips; the last warpgroup passes it once before the first tile, and the first one
// waits once more at the end. At named barrier 1 + kGroup warpgroup kGroup waits (bar.sync) and the
// one before it arrives without waiting (bar.arrive); 0 is that of __syncthreads. Three warpgroups,
// as for queries, are slower with a baton than without.
template <int kGroup>
__device__ inline void wait_for_baton() {
    asm volatile("bar.sync %0, %1;" ::"n"(1 + kGroup), "n"(2 * kGroupThreads) : "memory");
}
template <int kGroup, int kGroups>
__device__ inline void pass_baton() {
    asm volatile("bar.arrive %0, %1;" ::"n"(1 + (kGroup + 1) % kGroups), "n"(2 * kGroupThreads)
                 : "memory");
}

// This warp reads a slot no more, and has left its results there if it has any.
template <class Shared>
__device__ inline void leave_results(Shared& shared, int slot) {
    device::publish_tiles();
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) shared.owned_empty[slot].arrive();
}

// The causal mask of a tile on the diagonal: zero where the key comes after the query.
template <bool kKeysAreRows>
__device__ inline void drop_later_keys(float (&p)[32], int row, int column) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = row + i / 2 * 8, c = column + 8 * n + i % 2;
            if (kKeysAreRows ? r > c : c > r) p[4 * n + i] = 0.0f;
        }
    }
}

// p (64,64) = exp(scores - lse), the logarithms those of the columns.
__device__ inline void exponentials_by_column(float (&p)[32], const float (&scores)[32],
                                              float log2_scale, const float* log2_lse) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        const float2 lse = *reinterpret_cast<const float2*>(log2_lse + 8 * n);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            p[4 * n + i] = approximate_exp2(
                fmaf(scores[4 * n + i], log2_scale, -(i % 2 == 0 ? lse.x : lse.y)));
        }
    }
}
// The same with those of the rows.
__device__ inline void exponentials_by_row(float (&p)[32], const float (&scores)[32],
                                           float log2_scale, const float (&log2_lse)[2]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        p[i] = approximate_exp2(fmaf(scores[i], log2_scale, -log2_lse[i / 2 % 2]));
    }
}

// p (64,64) becomes ds = p * (dscores - weighted), `weighted` that of the columns.
__device__ inline void to_dscores_by_column(float (&p)[32], const float (&dscores)[32],
                                            const float* weighted) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        const float2 w = *reinterpret_cast<const float2*>(weighted + 8 * n);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            p[4 * n + i] *= dscores[4 * n + i] - (i % 2 == 0 ? w.x : w.y);
        }
    }
}
// The same with that of the rows.
__device__ inline void to_dscores_by_row(float (&p)[32], const float (&dscores)[32],
                                         const float (&weighted)[2]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) p[i] *= dscores[i] - weighted[i / 2 % 2];
}

// The gradients of the keys and values of warpgroup kGroup.
template <int kGroup>
__device__ void run_keys(KeyMemory& shared, const Shape& shape) {
    constexpr int kGroups = KeyMemory::kGroups;
    const int tiles = shape.tiles(), row = lane_row(), column = lane_column();
    const float log2_scale = shape.scale * kLog2e;
    Turn turn;
    if (kGroup == kGroups - 1) pass_baton<kGroup, kGroups>();  // the first turn is warpgroup 0's
    for (int n_item = 0;; ++n_item) {
        const int slot = n_item % 2;
        shared.owned_full[slot].wait(n_item / 2 % 2);
        const int item_number = shared.items[slot];
        if (item_number < 0) break;
        const Item<kGroups> item(item_number, shape, false);
        const int own = item.owned_tile(kGroup);
        int tile = item.owned_tile(0);
        for (; tile < min(own, tiles); ++tile, ++turn.n) {  // none of its queries sees the keys
            turn.wait(shared);
            Turn::release(shared, turn.n);
            wait_for_baton<kGroup>();
            pass_baton<kGroup, kGroups>();
        }
        if (own < tiles) {
            float scores[32], dscores[32], dk[32], dv[32];
            bool there = false;
            do {
                const int stage = turn.stage();
                if (!there) turn.wait(shared);
                begin_scores<kGroup>(scores, dscores, shared, slot, stage);
                there = turn.next_is_there(shared);
                device::wait_for_products<1>(scores);
                if (tile > own) Turn::release(shared, turn.n - 1);
                wait_for_baton<kGroup>();
                float p[32];
                exponentials_by_column(p, scores, log2_scale, shared.row_values[stage][0] + column);
                if (tile == own) drop_later_keys<true>(p, row, column);
                pass_baton<kGroup, kGroups>();
                uint32_t factors[4][4];
                to_factors(factors, p);
                begin_sums(dv, factors, shared.streamed[stage][1], tile > own);
                device::wait_for_products<1>(dscores);
                to_dscores_by_column(p, dscores, shared.row_values[stage][1] + column);
                uint32_t dfactors[4][4];
                to_factors(dfactors, p);
                begin_sums(dk, dfactors, shared.streamed[stage][0], tile > own);
                ++turn.n;
            } while (++tile < tiles);
            device::wait_for_products<0>(dk);
            device::wait_for_products<0>(dv);
            Turn::release(shared, turn.n - 1);
            store_tile(shared.owned[slot][0][kGroup], dk, shape.scale);
            store_tile(shared.owned[slot][1][kGroup], dv, 1.0f);
        }
        leave_results(shared, slot);
    }
    if (kGroup == 0) wait_for_baton<kGroup>();  // the last pass meets its wait
}

// sums = for each of this lane's two rows, the sum of products of two tiles' elements.
__device__ inline void multiply_rows(float (&sums)[2], const bf16* a, const bf16* b) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const int at = place_in_tile(half, n);
            const float2 x = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(a + at));
            const float2 y = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(b + at));
            sum = fmaf(x.x, y.x, sum);
            sum = fmaf(x.y, y.y, sum);
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        sums[half] = sum;
    }
}

// The gradient of the queries of warpgroup kGroup, and the values of their rows.
template <int kGroup>
__device__ void run_queries(QueryMemory& shared, const Shape& shape, const RowValues& values) {
    constexpr int kGroups = QueryMemory::kGroups;
    const int tiles = shape.tiles(), row = lane_row(), column = lane_column();
    const float log2_scale = shape.scale * kLog2e;
    Turn turn;
    for (int n_item = 0;; ++n_item) {
        const int slot = n_item % 2;
        shared.owned_full[slot].wait(n_item / 2 % 2);
        const int item_number = shared.items[slot];
        if (item_number < 0) return;
        const Item<kGroups> item(item_number, shape, true);
        const int own = item.owned_tile(kGroup);
        int tile = 0;
        if (own < tiles) {
            const float* const lse = shared.owned_lse[slot][kGroup] + row;
            const float log2_lse[2] = {lse[0] * kLog2e, lse[8] * kLog2e};
            float weighted[2];
            multiply_rows(weighted, shared.owned[slot][1][kGroup], shared.owned[slot][2][kGroup]);
            if (column == 0) {
                const size_t place = item.place_of(own, shape) + row;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    values.log2_lse[place + half * 8] = log2_lse[half];
                    values.weighted[place + half * 8] = weighted[half];
                }
            }
            float scores[32], dscores[32], dq[32];
            do {
                const int stage = turn.stage();
                turn.wait(shared);
                begin_scores<kGroup>(scores, dscores, shared, slot, stage);
                device::wait_for_products<1>(scores);
                if (tile > 0) Turn::release(shared, turn.n - 1);
                float p[32];
                exponentials_by_row(p, scores, log2_scale, log2_lse);
                if (tile == own) drop_later_keys<false>(p, row, column);
                device::wait_for_products<0>(dscores);
                to_dscores_by_row(p, dscores, weighted);
                uint32_t dfactors[4][4];
                to_factors(dfactors, p);
                begin_sums(dq, dfactors, shared.streamed[stage][0], tile > 0);
                ++turn.n;
            } while (++tile <= own);
            device::wait_for_products<0>(dq);
            Turn::release(shared, turn.n - 1);
            store_tile(shared.owned[slot][0][kGroup], dq, shape.scale);
        }
        leave_results(shared, slot);
        for (; tile < min(item.owned_tile(kGroups), tiles); ++tile, ++turn.n) {
            turn.wait(shared);
            Turn::release(shared, turn.n);
        }
    }
}

// Calls run(kGroup) with the number of the thread's warpgroup as a constant: then where its tiles lie
// is the same for all threads as far as the compiler sees.
template <int kGroups, class Run>
__device__ inline void by_group(Run&& run) {
    const int group = threadIdx.x / kGroupThreads;
    if (group == 0) {
        run(std::integral_constant<int, 0>());
    } else if (group == 1 || kGroups == 2) {
        run(std::integral_constant<int, 1>());
    } else {
        run(std::integral_constant<int, kGroups - 1>());
    }
}

// What a block's copying thread does. Blocks take items by number until there are none: the first is
// the block's number, and the next is taken as soon as this one's copies begin, since the counter
// answers late. Which block takes an item is a matter of time, and changes no bits.
//   range(item)                       tiles that stream past: first, and one behind the last
//   owned(item, slot, group, tile)    starts copies of what a warpgroup owns, owned_bytes together
//   streamed(item, stage, tile)       those of a tile that streams past, streamed_bytes together
//   results(item, slot, group, tile)  those of what a warpgroup has left, back to memory
template <class Shared, class Range, class Owned, class Streamed, class Results>
__device__ void copy_for_items(Shared& shared, const Shape& shape, int* taken, bool latest_first,
                               int owned_bytes, int streamed_bytes, Range&& range, Owned&& owned,
                               Streamed&& streamed, Results&& results) {
    constexpr int kGroups = Shared::kGroups;
    const auto for_groups = [&](const Item<kGroups>& item, int slot, auto&& copies) {
        for (int group = 0; group < kGroups; ++group) {
            const int own = item.owned_tile(group);
            if (own < shape.tiles()) copies(item, slot, group, own);
        }
    };
    // The n-th item's slot is free for item n + 2 when its results are on their way to memory.
    const auto take_results = [&](int n, int number) {
        shared.owned_empty[n % 2].wait(n / 2 % 2);
        for_groups(Item<kGroups>(number, shape, latest_first), n % 2, results);
        device::wait_for_copies_back();
    };
    // Item n of this block; before[0] and before[1] are the numbers of n - 1 and n - 2.
    int number = blockIdx.x, before[2] = {}, n = 0, n_tile = 0;
    for (; number < shape.items(kGroups); ++n) {
        if (n >= 2) take_results(n - 2, before[1]);
        const Item<kGroups> item(number, shape, latest_first);
        const int slot = n % 2, groups = min(kGroups, shape.tiles() - item.owned_tile(0));
        shared.items[slot] = number;
        shared.owned_full[slot].arrive_and_expect(groups * owned_bytes);
        for_groups(item, slot, owned);
        before[1] = before[0];
        before[0] = number;
        number = gridDim.x + atomicAdd(taken, 1);
        const int2 tiles = range(item);
        for (int tile = tiles.x; tile < tiles.y; ++tile, ++n_tile) {
            const int stage = n_tile % kStages;
            if (n_tile >= kStages) shared.empty[stage].wait((n_tile / kStages - 1) % 2);
            shared.full[stage].arrive_and_expect(streamed_bytes);
            streamed(item, stage, tile);
        }
    }
    if (n >= 2) take_results(n - 2, before[1]);
    shared.items[n % 2] = -1;
    shared.owned_full[n % 2].arrive();
    if (n >= 1) take_results(n - 1, before[0]);
}

#endif

// A block's threads: its warpgroups, and one more, whose first thread starts all copies and whose
// registers go to the others.
template <int kGroups>
constexpr int kBlockThreads = (kGroups + 1) * kGroupThreads;
// Registers of a thread, which change once a warpgroup runs.
struct Registers {
    int working, copying;
};
constexpr Registers kKeyRegisters{232, 40}, kQueryRegisters{160, 32};
// A block gets all registers of its multiprocessor, and more than those no warpgroup can be given: it
// would wait for ever.
template <int kGroups>
constexpr bool enough_registers(Registers registers) {
    constexpr int kAtStart = 65536 / kBlockThreads<kGroups> / 8 * 8;
    return kGroups * registers.working + registers.copying <= (kGroups + 1) * kAtStart;
}
static_assert(enough_registers<KeyMemory::kGroups>(kKeyRegisters));
static_assert(enough_registers<QueryMemory::kGroups>(kQueryRegisters));

// The kernels are templates so that a program may have them in several objects; Shared is KeyMemory,
// and QueryMemory. `taken`: how many items blocks have taken, apart from the first of each; 0 before the
// launch.
template <class Shared>
__global__ void __launch_bounds__(kBlockThreads<Shared::kGroups>, 1)
    attention_hopper_keys_kernel(const __grid_constant__ CUtensorMap dqkv,
                                 const __grid_constant__ CUtensorMap qkv,
                                 const __grid_constant__ CUtensorMap dout, RowValues values,
                                 int* taken, Shape shape) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    auto& shared = shared_memory<Shared>();
    open_barriers(shared);
    if (threadIdx.x < Shared::kGroups * kGroupThreads) {
        by_group<Shared::kGroups>([&](auto number) {
            device::increase_registers<kKeyRegisters.working>();
            run_keys<decltype(number)::value>(shared, shape);
        });
        return;
    }
    device::decrease_registers<kKeyRegisters.copying>();
    if (threadIdx.x % kGroupThreads != 0) return;
    const int C = static_cast<int>(shape.channels());
    constexpr int kValueBytes = kTile * sizeof(float);
    using ItemOf = Item<Shared::kGroups>;
    copy_for_items(
        shared, shape, taken, false, 2 * kTileBytes, 2 * kTileBytes + 2 * kValueBytes,
        [&](const ItemOf& item) { return make_int2(item.owned_tile(0), shape.tiles()); },
        [&](const ItemOf& item, int slot, int group, int tile) {
            device::Barrier& full = shared.owned_full[slot];
            const int row = item.row_of(tile, shape), column = item.column();
            device::copy_tile(shared.owned[slot][0][group], &qkv, row, C + column, full);
            device::copy_tile(shared.owned[slot][1][group], &qkv, row, 2 * C + column, full);
        },
        [&](const ItemOf& item, int stage, int tile) {
            device::Barrier& full = shared.full[stage];
            const int row = item.row_of(tile, shape), column = item.column();
            const size_t place = item.place_of(tile, shape);
            device::copy_tile(shared.streamed[stage][0], &qkv, row, column, full);
            device::copy_tile(shared.streamed[stage][1], &dout, row, column, full);
            device::copy_bytes(shared.row_values[stage][0], values.log2_lse + place, kValueBytes,
                               full);
            device::copy_bytes(shared.row_values[stage][1], values.weighted + place, kValueBytes,
                               full);
        },
        [&](const ItemOf& item, int slot, int group, int tile) {
            const int row = item.row_of(tile, shape), column = item.column();
            device::copy_tile_back(&dqkv, row, C + column, shared.owned[slot][0][group]);
            device::copy_tile_back(&dqkv, row, 2 * C + column, shared.owned[slot][1][group]);
        });
#endif
}

template <class Shared>
__global__ void __launch_bounds__(kBlockThreads<Shared::kGroups>, 1)
    attention_hopper_queries_kernel(const __grid_constant__ CUtensorMap dqkv,
                                    const __grid_constant__ CUtensorMap qkv,
                                    const __grid_constant__ CUtensorMap dout,
                                    const __grid_constant__ CUtensorMap out, const float* lse,
                                    RowValues values, int* taken, Shape shape) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    auto& shared = shared_memory<Shared>();
    open_barriers(shared);
    if (threadIdx.x < Shared::kGroups * kGroupThreads) {
        by_group<Shared::kGroups>([&](auto number) {
            device::increase_registers<kQueryRegisters.working>();
            run_queries<decltype(number)::value>(shared, shape, values);
        });
        return;
    }
    device::decrease_registers<kQueryRegisters.copying>();
    if (threadIdx.x % kGroupThreads != 0) return;
    const int C = static_cast<int>(shape.channels());
    constexpr int kValueBytes = kTile * sizeof(float);
    using ItemOf = Item<Shared::kGroups>;
    copy_for_items(
        shared, shape, taken, true, 3 * kTileBytes + kValueBytes, 2 * kTileBytes,
        [&](const ItemOf& item) {
            return make_int2(0, min(item.owned_tile(Shared::kGroups), shape.tiles()));
        },
        [&](const ItemOf& item, int slot, int group, int tile) {
            device::Barrier& full = shared.owned_full[slot];
            const int row = item.row_of(tile, shape), column = item.column();
            const size_t place = item.place_of(tile, shape);
            device::copy_tile(shared.owned[slot][0][group], &qkv, row, column, full);
            device::copy_tile(shared.owned[slot][1][group], &dout, row, column, full);
            device::copy_tile(shared.owned[slot][2][group], &out, row, column, full);
            device::copy_bytes(shared.owned_lse[slot][group], lse + place, kValueBytes, full);
        },
        [&](const ItemOf& item, int stage, int tile) {
            device::Barrier& full = shared.full[stage];
            const int row = item.row_of(tile, shape), column = item.column();
            device::copy_tile(shared.streamed[stage][0], &qkv, row, C + column, full);
            device::copy_tile(shared.streamed[stage][1], &qkv, row, 2 * C + column, full);
        },
        [&](const ItemOf& item, int slot, int group, int tile) {
            device::copy_tile_back(&dqkv, item.row_of(tile, shape), item.column(),
                                   shared.owned[slot][0][group]);
        });
#endif
}

// ============================================================================
// launchers

// Whether this backward pass is for a shape: for heads of 64 in bf16 and T in whole tiles, on a GPU of
// compute capability 9.0. The same on all ranks that have one model of GPU.
template <class X>
bool takes(int T, int HS) {
    static const bool hopper = 10 * device_attribute(cudaDevAttrComputeCapabilityMajor) +
                                   device_attribute(cudaDevAttrComputeCapabilityMinor) ==
                               90;
    return std::is_same_v<X, bf16> && HS == kHeadSize && T % kTile == 0 && hopper;
}

inline Shape make_shape(int B, int T, int NH) {
    return {B, T, NH, 1.0f / std::sqrt(static_cast<float>(kHeadSize))};
}

// Bytes of scratch, of which every element is written before it is read.
inline size_t scratch_bytes(int B, int T, int NH) {
    return 2 * make_shape(B, T, NH).rows() * sizeof(float);
}

// As attention_backward (launchers.h) for types and shapes that takes() names. Throws Error for
// others, when they are too large for one launch, and when the driver makes no tensor map.
template <class X>
void backward(X* dqkv, const X* dout, const X* qkv, const X* out, const float* lse, void* scratch,
              int B, int T, int NH, cudaStream_t stream) {
    if constexpr (!std::is_same_v<X, bf16>) {
        throw Error("attention_backward: Hopper's kernels are for bf16");
    } else {
        const Shape shape = make_shape(B, T, NH);
        const RowValues values{static_cast<float*>(scratch),
                               static_cast<float*>(scratch) + shape.rows()};
        int* const taken = static_cast<int*>(work_counters().take());
        if (static_cast<size_t>(B) * NH * T > INT_MAX / 8) {
            throw Error(format(
                "attention_backward: B %d, T %d and NH %d are too many for one launch", B, T, NH));
        }
        const size_t rows = static_cast<size_t>(B) * T, C = shape.channels();
        const CUtensorMap dqkv_map = make_tensor_map(dqkv, rows, 3 * C),
                          qkv_map = make_tensor_map(qkv, rows, 3 * C),
                          dout_map = make_tensor_map(dout, rows, C),
                          out_map = make_tensor_map(out, rows, C);
        cuda_check(cudaMemsetAsync(taken, 0, 2 * sizeof(int), stream));
        static const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
        const auto launch = [&](auto* kernel, int groups, size_t shared_bytes, auto... arguments) {
            cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(shared_bytes)));
            kernel<<<static_cast<unsigned>(std::min(shape.items(groups), multiprocessors)),
                     (groups + 1) * kGroupThreads, shared_bytes, stream>>>(arguments...);
            launch_check();
        };
        // In this order: the second kernel reads the values of rows that the first one leaves.
        launch(attention_hopper_queries_kernel<QueryMemory>, QueryMemory::kGroups,
               kSharedBytes<QueryMemory>, dqkv_map, qkv_map, dout_map, out_map, lse, values, taken,
               shape);
        launch(attention_hopper_keys_kernel<KeyMemory>, KeyMemory::kGroups, kSharedBytes<KeyMemory>,
               dqkv_map, qkv_map, dout_map, values, taken + 1, shape);
    }
}

}  // namespace llmc::attention_hopper
