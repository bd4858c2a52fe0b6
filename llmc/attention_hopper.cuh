// Backward pass of causal attention on Hopper, for heads of 64 in bf16 (method: Dao 2023,
// FlashAttention-2).
//
// A block has two or three warpgroups. Each owns 64 rows of one head and shares with the others
// the tiles of 64 rows that stream past them: for the gradients of k and v it owns keys and
// values and streams queries and dout, for that of q the other way round. A thread of one
// warpgroup more starts all copies; warpgroups wait for tiles, and not for each other. Scores are
// computed with the owned rows as rows, so that p and ds are in registers what the next product
// takes for its first factor, and nothing but the streamed tiles goes through shared memory. A
// row's sums are added up by one warpgroup in the order of the tiles: no atomics, no (T,T)
// matrix, and bits that depend on the shape alone. The price is 7 products instead of 5, and
// every exponential twice.
//
// Bound by products, 7 T^2 HS FLOP a head, and the exponentials between them, which a warpgroup does one
// after the other: while one is at its exponentials, the tensor cores work for the others. On an H200 at
// B 64, T 1024, 12 heads 1.01 ms, 255 TFLOP/s of the 5 products that are needed; each kernel by itself 0.38 ms
// (q), 0.59 (k and v), 0.06 (values of rows).
#pragma once

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

namespace llmc::attention_hopper {

constexpr int kHeadSize = 64, kTile = 64;  // a tile is kTile rows of a head
constexpr int kTileElements = kTile * kHeadSize, kTileBytes = kTileElements * 2;
// Warpgroups of a block; the sums for dk and dv leave registers for two of them alone.
constexpr int kKeyGroups = 2, kQueryGroups = 3;
constexpr int kGroupThreads = 128, kWarpsOfGroup = kGroupThreads / kWarpSize;
constexpr int kStages = 4;
// Heads whose blocks follow one another, for the L2 cache's sake.
constexpr int kHeadsTogether = 64;

struct Shape {
    int B, T, NH;
    float scale;  // of the scores

    __host__ __device__ int heads() const { return B * NH; }
    __host__ __device__ size_t rows() const { return static_cast<size_t>(heads()) * T; }
    __host__ __device__ int tiles() const { return T / kTile; }
    // Blocks of `groups` warpgroups.
    __host__ __device__ int blocks_of_head(int groups) const { return ceil_div(tiles(), groups); }
    __host__ __device__ size_t channels() const { return static_cast<size_t>(NH) * kHeadSize; }
};

// What is the same for all products of a row, in the launcher's scratch.
struct RowValues {
    float* log2_lse;  // (B,NH,T)  lse * log2(e)
    float* weighted;  // (B,NH,T)  sum over the head of dout * out, D in the papers
};

// ============================================================================
// kernels

// Bound by memory: reads dout and out once, at 80 % of the copy bandwidth (4.2 TB/s).
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    attention_row_values_kernel(RowValues values, const bf16* dout, const bf16* out,
                                const float* lse, Shape shape) {
    constexpr int kLanes = kHeadSize / 8;  // of a row, each with 16 bytes
    const size_t thread = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
    const size_t row = thread / kLanes;  // of (B,T,NH)
    const bool valid = row < shape.rows();
    float sum = 0.0f;
    if (valid) {
        float a[8], b[8];
        unpack(a, load128(dout + thread * 8));
        unpack(b, load128(out + thread * 8));
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = fmaf(a[i], b[i], sum);
    }
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    }
    if (!valid || thread % kLanes != 0) return;
    const size_t head = row / (static_cast<size_t>(shape.NH) * shape.T) * shape.NH + row % shape.NH;
    const size_t place = head * shape.T + row / shape.NH % shape.T;
    values.weighted[place] = sum;
    values.log2_lse[place] = lse[place] * kLog2e;
}

template <int kGroups>
struct SharedMemory {
    bf16 owned[2][kGroups][kTileElements];
    bf16 streamed[kStages][2][kTileElements];
    float row_values[kStages][2][kTile];  // of streamed queries: log2_lse, weighted
    // What a warpgroup owns is there; a stage's tiles are there; a stage may be filled again.
    device::Barrier owned_full[kGroups], full[kStages], empty[kStages];
};
template <int kGroups>
constexpr size_t kSharedBytes = sizeof(SharedMemory<kGroups>) +
                                1024;  // begins at a multiple of 1024

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int kGroups>
__device__ SharedMemory<kGroups>& shared_memory() {
    extern __shared__ unsigned char memory[];
    const uint32_t past = device::shared_address(memory) % 1024;
    return *reinterpret_cast<SharedMemory<kGroups>*>(memory + (1024 - past) % 1024);
}

// By all threads of a block, first of all.
template <int kGroups>
__device__ void open_barriers(SharedMemory<kGroups>& shared) {
    if (threadIdx.x == 0) {
        for (device::Barrier& barrier : shared.owned_full) barrier.init(1);
        for (device::Barrier& barrier : shared.full) barrier.init(1);
        for (device::Barrier& barrier : shared.empty) barrier.init(kGroups * kWarpsOfGroup);
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
    // This warp reads the n-th tiles no more.
    template <class Shared>
    __device__ static void release(Shared& shared, int n) {
        __syncwarp();
        if (threadIdx.x % kWarpSize == 0) shared.empty[n % kStages].arrive();
    }
};

// What a block owns, and where its threads stand in it.
template <int kGroups>
struct Block {
    int batch, head;  // of the batch
    int number;       // among the blocks of its head
    int row, column;  // this lane's first element of a warpgroup's 64 x 64

    // `latest_first`: blocks with the largest number come first.
    __device__ Block(const Shape& shape, bool latest_first) {
        const int blocks = shape.blocks_of_head(kGroups);
        const int together = kHeadsTogether * blocks;
        const int first_head = static_cast<int>(blockIdx.x) / together * kHeadsTogether;
        const int heads = min(shape.heads() - first_head, kHeadsTogether);
        const int place = static_cast<int>(blockIdx.x) % together;
        const int number_of_head = first_head + place % heads;
        batch = number_of_head / shape.NH;
        head = number_of_head % shape.NH;
        number = latest_first ? blocks - 1 - place / heads : place / heads;
        const int lane = threadIdx.x % kWarpSize;
        row = threadIdx.x % kGroupThreads / kWarpSize * 16 + lane / 4;
        column = lane % 4 * 2;
    }
    // The tile that a warpgroup owns; there may be none of that number.
    __device__ int owned_tile(int group) const { return number * kGroups + group; }
    // A tile's first row in (B*T,C), and in (B,NH,T).
    __device__ int row_of(int tile, const Shape& shape) const {
        return batch * shape.T + tile * kTile;
    }
    __device__ size_t place_of(int tile, const Shape& shape) const {
        return (static_cast<size_t>(batch) * shape.NH + head) * shape.T + tile * kTile;
    }
    // This lane's first element of part 0 (q), 1 (k) or 2 (v) of a tile in (B,T,3,NH,HS).
    __device__ bf16* in_qkv(bf16* qkv, int part, int tile, const Shape& shape) const {
        const size_t first = row_of(tile, shape) + row;
        return qkv + (first * 3 + part) * shape.channels() + head * kHeadSize + column;
    }
};

// scores (64,64) = owned[0] * streamed[0]^T and dscores = owned[1] * streamed[1]^T, a batch each.
template <int kGroup, class Shared>
__device__ inline void begin_scores(float (&scores)[32], float (&dscores)[32], const Shared& shared,
                                    int stage) {
    const uint32_t a = device::tile_descriptor(shared.owned[0][kGroup]);
    const uint32_t b = device::tile_descriptor(shared.streamed[stage][0]);
    const uint32_t da = device::tile_descriptor(shared.owned[1][kGroup]);
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

// A 64 x 64 result as factors of a product, sixteen columns each.
__device__ inline void to_factors(uint32_t (&factors)[4][4], const float (&sums)[32]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            factors[k][i] = two_halves(sums[8 * k + 2 * i], sums[8 * k + 2 * i + 1]);
        }
    }
}

// Stores a result times `factor`, rows `stride` elements apart; `to` is this lane's first element.
__device__ inline void store_rows(bf16* to, size_t stride, const float (&sums)[32], float factor) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            *reinterpret_cast<uint32_t*>(to + half * 8 * stride + 8 * n) =
                two_halves(sums[4 * n + 2 * half] * factor, sums[4 * n + 2 * half + 1] * factor);
        }
    }
}

// The gradients of the keys and values of warpgroup kGroup.
template <int kGroup, int kGroups>
__device__ void run_keys(SharedMemory<kGroups>& shared, const Block<kGroups>& block,
                         const Shape& shape, bf16* dqkv) {
    const int own = block.owned_tile(kGroup), tiles = shape.tiles();
    int tile = block.owned_tile(0);
    Turn turn;
    for (; tile < min(own, tiles); ++tile, ++turn.n) {  // none of its queries sees the keys
        turn.wait(shared);
        Turn::release(shared, turn.n);
    }
    if (own >= tiles) return;
    shared.owned_full[kGroup].wait(0);
    const float log2_scale = shape.scale * kLog2e;
    float scores[32], dscores[32], dk[32], dv[32];
    do {
        const int stage = turn.stage();
        turn.wait(shared);
        begin_scores<kGroup>(scores, dscores, shared, stage);
        device::wait_for_products<1>(scores);
        if (tile > own) Turn::release(shared, turn.n - 1);
        float p[32];
        const float* log2_lse = shared.row_values[stage][0] + block.column;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const float2 lse = *reinterpret_cast<const float2*>(log2_lse + 8 * n);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float subtract = i % 2 == 0 ? lse.x : lse.y;
                p[4 * n + i] = approximate_exp2(fmaf(scores[4 * n + i], log2_scale, -subtract));
            }
        }
        if (tile == own) {
#pragma unroll
            for (int n = 0; n < 8; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const bool later = block.row + i / 2 * 8 > block.column + 8 * n + i % 2;
                    if (later) p[4 * n + i] = 0.0f;
                }
            }
        }
        uint32_t factors[4][4];
        to_factors(factors, p);
        begin_sums(dv, factors, shared.streamed[stage][1], tile > own);
        device::wait_for_products<1>(dscores);
        const float* weighted = shared.row_values[stage][1] + block.column;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const float2 w = *reinterpret_cast<const float2*>(weighted + 8 * n);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                p[4 * n + i] *= dscores[4 * n + i] - (i % 2 == 0 ? w.x : w.y);
            }
        }
        uint32_t dfactors[4][4];
        to_factors(dfactors, p);
        begin_sums(dk, dfactors, shared.streamed[stage][0], tile > own);
        ++turn.n;
    } while (++tile < tiles);
    device::wait_for_products<0>(dk);
    device::wait_for_products<0>(dv);
    const size_t stride = 3 * shape.channels();
    store_rows(block.in_qkv(dqkv, 1, own, shape), stride, dk, shape.scale);
    store_rows(block.in_qkv(dqkv, 2, own, shape), stride, dv, 1.0f);
}

// The gradient of the queries of warpgroup kGroup.
template <int kGroup, int kGroups>
__device__ void run_queries(SharedMemory<kGroups>& shared, const Block<kGroups>& block,
                            const Shape& shape, const RowValues& values, bf16* dqkv) {
    const int own = block.owned_tile(kGroup), tiles = shape.tiles();
    static_assert(kStages >= kGroups, "nobody waits for stages after a warpgroup's last tile");
    Turn turn;
    if (own >= tiles) {
        for (; turn.n < tiles; ++turn.n) {
            turn.wait(shared);
            Turn::release(shared, turn.n);
        }
        return;
    }
    const size_t place = block.place_of(own, shape) + block.row;
    const float log2_scale = shape.scale * kLog2e;
    const float log2_lse[2] = {values.log2_lse[place], values.log2_lse[place + 8]};
    const float weighted[2] = {values.weighted[place], values.weighted[place + 8]};
    shared.owned_full[kGroup].wait(0);
    float scores[32], dscores[32], dq[32];
    do {
        const int tile = turn.n, stage = turn.stage();
        turn.wait(shared);
        begin_scores<kGroup>(scores, dscores, shared, stage);
        device::wait_for_products<1>(scores);
        if (tile > 0) Turn::release(shared, tile - 1);
        float p[32];
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            p[i] = approximate_exp2(fmaf(scores[i], log2_scale, -log2_lse[i / 2 % 2]));
        }
        if (tile == own) {
#pragma unroll
            for (int n = 0; n < 8; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const bool later = block.column + 8 * n + i % 2 > block.row + i / 2 * 8;
                    if (later) p[4 * n + i] = 0.0f;
                }
            }
        }
        device::wait_for_products<0>(dscores);
#pragma unroll
        for (int i = 0; i < 32; ++i) p[i] *= dscores[i] - weighted[i / 2 % 2];
        uint32_t dfactors[4][4];
        to_factors(dfactors, p);
        begin_sums(dq, dfactors, shared.streamed[stage][0], tile > 0);
    } while (++turn.n <= own);
    device::wait_for_products<0>(dq);
    store_rows(block.in_qkv(dqkv, 0, own, shape), 3 * shape.channels(), dq, shape.scale);
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

// What a block's copying thread does: owned(group, row) starts the two copies of what a warpgroup owns,
// streamed(stage, tile) those of tile first ... end - 1 that stream past, of `bytes` together.
template <int kGroups, class Owned, class Streamed>
__device__ void start_copies(SharedMemory<kGroups>& shared, const Block<kGroups>& block,
                             const Shape& shape, int first, int end, int bytes, Owned&& owned,
                             Streamed&& streamed) {
    for (int group = 0; group < kGroups; ++group) {
        const int own = block.owned_tile(group);
        if (own >= shape.tiles()) break;
        shared.owned_full[group].arrive_and_expect(2 * kTileBytes);
        owned(group, block.row_of(own, shape));
    }
    for (int tile = first; tile < end; ++tile) {
        const int n = tile - first, stage = n % kStages;
        if (n >= kStages) shared.empty[stage].wait((n / kStages - 1) % 2);
        shared.full[stage].arrive_and_expect(bytes);
        streamed(stage, tile);
    }
}

#endif

// A block's threads: its warpgroups, and one more, whose first thread starts all copies and whose
// registers go to the others.
template <int kGroups>
constexpr int kBlockThreads = (kGroups + 1) * kGroupThreads;
constexpr int kCopyRegisters = 24, kKeyRegisters = 240, kQueryRegisters = 160;

template <int kGroups>
__global__ void __launch_bounds__(kBlockThreads<kGroups>, 1)
    attention_hopper_keys_kernel(bf16* dqkv, const __grid_constant__ CUtensorMap qkv,
                                 const __grid_constant__ CUtensorMap dout, RowValues values,
                                 Shape shape) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    auto& shared = shared_memory<kGroups>();
    open_barriers(shared);
    const Block<kGroups> block(shape, false);
    if (threadIdx.x < kGroups * kGroupThreads) {
        by_group<kGroups>([&](auto number) {
            device::increase_registers<kKeyRegisters>();
            run_keys<decltype(number)::value>(shared, block, shape, dqkv);
        });
        return;
    }
    device::decrease_registers<kCopyRegisters>();
    if (threadIdx.x % kGroupThreads != 0) return;
    const int C = static_cast<int>(shape.channels()), column = block.head * kHeadSize;
    constexpr int kValueBytes = kTile * sizeof(float);
    start_copies(
        shared, block, shape, block.owned_tile(0), shape.tiles(), 2 * kTileBytes + 2 * kValueBytes,
        [&](int group, int row) {
            device::Barrier& full = shared.owned_full[group];
            device::copy_tile(shared.owned[0][group], &qkv, row, C + column, full);
            device::copy_tile(shared.owned[1][group], &qkv, row, 2 * C + column, full);
        },
        [&](int stage, int tile) {
            device::Barrier& full = shared.full[stage];
            const int row = block.row_of(tile, shape);
            const size_t place = block.place_of(tile, shape);
            device::copy_tile(shared.streamed[stage][0], &qkv, row, column, full);
            device::copy_tile(shared.streamed[stage][1], &dout, row, column, full);
            device::copy_bytes(shared.row_values[stage][0], values.log2_lse + place, kValueBytes,
                               full);
            device::copy_bytes(shared.row_values[stage][1], values.weighted + place, kValueBytes,
                               full);
        });
#endif
}

template <int kGroups>
__global__ void __launch_bounds__(kBlockThreads<kGroups>, 1)
    attention_hopper_queries_kernel(bf16* dqkv, const __grid_constant__ CUtensorMap qkv,
                                    const __grid_constant__ CUtensorMap dout, RowValues values,
                                    Shape shape) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    auto& shared = shared_memory<kGroups>();
    open_barriers(shared);
    const Block<kGroups> block(shape, true);
    if (threadIdx.x < kGroups * kGroupThreads) {
        by_group<kGroups>([&](auto number) {
            device::increase_registers<kQueryRegisters>();
            run_queries<decltype(number)::value>(shared, block, shape, values, dqkv);
        });
        return;
    }
    device::decrease_registers<kCopyRegisters>();
    if (threadIdx.x % kGroupThreads != 0) return;
    const int C = static_cast<int>(shape.channels()), column = block.head * kHeadSize;
    start_copies(
        shared, block, shape, 0, min(block.owned_tile(kGroups), shape.tiles()), 2 * kTileBytes,
        [&](int group, int row) {
            device::Barrier& full = shared.owned_full[group];
            device::copy_tile(shared.owned[0][group], &qkv, row, column, full);
            device::copy_tile(shared.owned[1][group], &dout, row, column, full);
        },
        [&](int stage, int tile) {
            device::Barrier& full = shared.full[stage];
            const int row = block.row_of(tile, shape);
            device::copy_tile(shared.streamed[stage][0], &qkv, row, C + column, full);
            device::copy_tile(shared.streamed[stage][1], &qkv, row, 2 * C + column, full);
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

// As attention_backward (launchers.h) for types and shapes that takes() names. Throws Error for others, when
// they are too large for one launch, and when the driver makes no tensor map.
template <class X>
void backward(X* dqkv, const X* dout, const X* qkv, const X* out, const float* lse, void* scratch,
              int B, int T, int NH, cudaStream_t stream) {
    if constexpr (!std::is_same_v<X, bf16>) {
        throw Error("attention_backward: Hopper's kernels are for bf16");
    } else {
        const Shape shape = make_shape(B, T, NH);
        const RowValues values{static_cast<float*>(scratch),
                               static_cast<float*>(scratch) + shape.rows()};
        constexpr int kRowThreads = 256;
        const size_t row_blocks = ceil_div<size_t>(shape.rows() * (kHeadSize / 8), kRowThreads);
        if (static_cast<size_t>(B) * NH * T > INT_MAX / 8) {
            throw Error(format(
                "attention_backward: B %d, T %d and NH %d are too many for one launch", B, T, NH));
        }
        attention_row_values_kernel<kRowThreads>
            <<<static_cast<unsigned>(row_blocks), kRowThreads, 0, stream>>>(values, dout, out, lse,
                                                                            shape);
        launch_check();
        const size_t rows = static_cast<size_t>(B) * T, C = shape.channels();
        const CUtensorMap qkv_map = make_tensor_map(qkv, rows, 3 * C),
                          dout_map = make_tensor_map(dout, rows, C);
        const auto launch = [&](auto* kernel, int groups, size_t shared_bytes) {
            cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(shared_bytes)));
            kernel<<<static_cast<unsigned>(shape.heads() * shape.blocks_of_head(groups)),
                     (groups + 1) * kGroupThreads, shared_bytes, stream>>>(dqkv, qkv_map, dout_map,
                                                                           values, shape);
            launch_check();
        };
        launch(attention_hopper_queries_kernel<kQueryGroups>, kQueryGroups,
               kSharedBytes<kQueryGroups>);
        launch(attention_hopper_keys_kernel<kKeyGroups>, kKeyGroups, kSharedBytes<kKeyGroups>);
    }
}

}  // namespace llmc::attention_hopper
