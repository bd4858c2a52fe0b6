// Layer normalisation (Ba, Kiros, Hinton 2016, section 3), eps 1e-5, over the last dimension.
//
// Bound by memory: each array goes through it once, in bf16 4 bytes an element forward, 8 with the
// residual sum, 8 backward. A row stays in the registers of the threads that read it: forward a warp for
// rows of up to 2048, which then need no barrier, a block for wider ones. Of an H200's copy bandwidth
// (4.2 TB/s), in a graph, forward alone, with the residual sum, and backward: 94, 97 and 98 % at
// 65536 x 768, 89, 94 and 95 % at 32768 x 1024, 85, 92 and 89 % at 16384 x 1280, 84, 92 and 90 % at
// 16384 x 1600 (a copy of as much as forward alone reads and writes: 93, 90, 87, 89 %).
//
// dweight, dbias and the sum of dinp go over all rows. Threads keep their columns' sums while they
// go through rows; a block adds those of its teams, and a number of parts that the shape decides is left
// in scratch and added by a second kernel.
#pragma once

#include <algorithm>
#include <cstddef>

#include "llmc/cpu/shapes.h"
#include "llmc/cuda_utils.cuh"
#include "llmc/dependent_launch.cuh"
#include "llmc/mma.cuh"
#include "llmc/nvtx_range.cuh"

namespace llmc {

// ============================================================================
// kernels

constexpr int kLayernormMaxBlock = 384;   // threads, where a block has a row to itself
constexpr int kLayernormMaxColumns = 32;  // of a thread there
constexpr int kLayernormMaxChannels = kLayernormMaxColumns * kLayernormMaxBlock;

// Forward, where a warp has a row to itself: small blocks, since a multiprocessor takes the next one only
// when all warps of one are done.
constexpr int kLayernormForwardThreads = 128;
constexpr int kLayernormForwardWarps = kLayernormForwardThreads / kWarpSize;

// Backward, where a team of a block's threads has: columns of a thread, and threads of the block at most.
constexpr int kLayernormColumns = 8;
constexpr int kLayernormBlock = 512;

// The columns of a row that one thread holds: groups of 16 bytes, as far apart as the team (the
// threads of the row) is wide. A group may be cut short by the end of the row, or be empty.
template <class T, int kColumns>
struct RowTile {
    static constexpr int kWidth = Packed128<T>::kSize;
    static constexpr int kGroups = kColumns / kWidth;

    template <bool kStreaming = false>
    __device__ void load(const T* row, int C, int thread, int team, bool vector) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            const int column = (g * team + thread) * kWidth, count = C - column;
            group[g] = kStreaming ? load_group_streaming(row + column, count, vector)
                                  : load_group(row + column, count, vector);
        }
    }
    __device__ void store(T* row, int C, int thread, int team, bool vector) const {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            const int column = (g * team + thread) * kWidth;
            store_group(row + column, group[g], C - column, vector);
        }
    }

    Packed128<T> group[kGroups];
};

// Sums over the row's team: a warp, or the block, for which `shared` is as for block_sum.
template <bool kWarpRow>
__device__ inline float row_sum(float value, float* shared) {
    if constexpr (kWarpRow) {
        return warp_sum(value);
    } else {
        float sum[1] = {value};
        block_sum(sum, shared);
        return sum[0];
    }
}

// Mean and reciprocal standard deviation of a row. Two passes, since the mean of the squares minus
// the square of the mean has no digit left when the mean is large. Spelt in single operations: the
// plain and the fused forward kernel must round alike.
template <bool kWarpRow, class T, int kColumns>
__device__ inline float2 row_statistics(const RowTile<T, kColumns>& tile, int C, int thread,
                                        int team, float* shared) {
    constexpr int kWidth = Packed128<T>::kSize;
    float total = 0.0f, squares = 0.0f;
#pragma unroll
    for (int g = 0; g < tile.kGroups; ++g) {
        float x[kWidth];
        unpack(x, tile.group[g]);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) total = __fadd_rn(total, x[k]);
    }
    const float mean = __fdiv_rn(row_sum<kWarpRow>(total, shared), static_cast<float>(C));
#pragma unroll
    for (int g = 0; g < tile.kGroups; ++g) {
        const int count = C - (g * team + thread) * kWidth;
        float x[kWidth];
        unpack(x, tile.group[g]);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
            const float difference = k < count ? __fsub_rn(x[k], mean) : 0.0f;
            squares = __fmaf_rn(difference, difference, squares);
        }
    }
    const float sum = row_sum<kWarpRow>(squares, shared + kWarpSize);
    const float variance = __fdiv_rn(sum, static_cast<float>(C));
    return {mean, __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(variance, 1e-5f)))};
}

template <class T>
struct LayernormForward {
    T* residual;  // null where there is nothing to add
    T* out;
    float* mean;
    float* rstd;
    const T* inp;
    const T* added;  // to inp, or null
    const T* weight;
    const T* bias;
    int rows;
    int C;
};

// Normalises inp, or inp + added, rounded, which it also stores.
template <class T, int kColumns, bool kWarpRow, bool kFused, bool kVector>
__global__ void __launch_bounds__(kWarpRow ? kLayernormForwardThreads : kLayernormMaxBlock)
    layernorm_forward_kernel(LayernormForward<T> p) {
    __shared__ float shared[kWarpRow ? 1 : 2 * kWarpSize];
    constexpr int kWidth = Packed128<T>::kSize;
    const int team = kWarpRow ? kWarpSize : blockDim.x;
    const int thread = kWarpRow ? threadIdx.x % kWarpSize : threadIdx.x;
    const size_t row = kWarpRow
                           ? size_t{blockIdx.x} * kLayernormForwardWarps + threadIdx.x / kWarpSize
                           : blockIdx.x;
    if (row >= static_cast<size_t>(p.rows)) return;
    const size_t first = row * p.C;

    RowTile<T, kColumns> tile;
    tile.template load<!kFused>(p.inp + first, p.C, thread, team, kVector);
    if constexpr (kFused) {
        RowTile<T, kColumns> other;
        other.load(p.added + first, p.C, thread, team, kVector);
#pragma unroll
        for (int g = 0; g < tile.kGroups; ++g) {
            float x[kWidth], y[kWidth];
            unpack(x, tile.group[g]);
            unpack(y, other.group[g]);
#pragma unroll
            for (int k = 0; k < kWidth; ++k) x[k] = __fadd_rn(x[k], y[k]);
            tile.group[g] = pack<T>(x);
        }
        tile.store(p.residual + first, p.C, thread, team, kVector);
    }

    const float2 statistics = row_statistics<kWarpRow>(tile, p.C, thread, team, shared);
    const float mean = statistics.x, rstd = statistics.y;
#pragma unroll
    for (int g = 0; g < tile.kGroups; ++g) {
        const int column = (g * team + thread) * kWidth, count = p.C - column;
        float x[kWidth], w[kWidth], b[kWidth];
        unpack(x, tile.group[g]);
        unpack(w, load_group(p.weight + column, count, kVector));
        unpack(b, load_group(p.bias + column, count, kVector));
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
            x[k] = __fmaf_rn(__fmul_rn(__fsub_rn(x[k], mean), rstd), w[k], b[k]);
        }
        if constexpr (kFused) {
            store_group(p.out + first + column, pack<T>(x), count, kVector);
        } else {
            store_group_streaming(p.out + first + column, pack<T>(x), count, kVector);
        }
    }
    if (thread == 0) {
        p.mean[row] = mean;
        p.rstd[row] = rstd;
    }
}

template <class T>
struct LayernormBackward {
    T* dinp;
    float* partial;  // (parts, 3, C): dweight, dbias, sum of dinp
    const T* dout;
    const T* inp;
    const T* weight;
    const float* mean;
    const float* rstd;
    int rows;
    int C;
    float per_channel;  // 1 / C
    bool add_to_dinp;
    bool vector;
};

// The two passes over a group of a row, x of inp and d of dout: with n = (inp - mean) * rstd and
// g = weight * dout, dinp = (g - average(g) - n * average(g * n)) * rstd. Spelt in single operations,
// so that all kernels round alike.
//
// The first adds g and g * n to sums[0] and sums[1].
template <int kWidth>
__device__ inline void add_group(float (&dweight)[kWidth], float (&dbias)[kWidth], float* sums,
                                 const float (&x)[kWidth], const float (&d)[kWidth],
                                 const float (&w)[kWidth], float mean, float rstd) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
        const float n = __fmul_rn(__fsub_rn(x[k], mean), rstd);
        const float gradient = __fmul_rn(w[k], d[k]);
        dweight[k] = __fmaf_rn(d[k], n, dweight[k]);
        dbias[k] = __fadd_rn(dbias[k], d[k]);
        sums[0] = __fadd_rn(sums[0], gradient);
        sums[1] = __fmaf_rn(gradient, n, sums[1]);
    }
}
// The second turns x into dinp; sums are the row's.
template <int kWidth>
__device__ inline void group_dinp(float (&x)[kWidth], const float (&d)[kWidth],
                                  const float (&w)[kWidth], const float* sums, float per_channel,
                                  float mean, float rstd) {
    const float mean_g = __fmul_rn(sums[0], per_channel);
    const float mean_gn = __fmul_rn(sums[1], per_channel);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
        const float n = __fmul_rn(__fsub_rn(x[k], mean), rstd);
        const float centred = __fmaf_rn(w[k], d[k], -mean_g);
        x[k] = __fmul_rn(__fmaf_rn(-n, mean_gn, centred), rstd);
    }
}

// Stores `count` of x, rounded, and adds to `sum` what is stored.
template <class T, int kWidth>
__device__ inline void store_dinp(T* dinp, float (&sum)[kWidth], float (&x)[kWidth], int count,
                                  bool vector) {
    const Packed128<T> rounded = pack<T>(x);
    store_group(dinp, rounded, count, vector);
    unpack(x, rounded);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sum[k] = __fadd_rn(sum[k], x[k]);
}

// A thread's sums over rows for its columns.
template <int kGroups, int kWidth>
struct ColumnSums {
    float dweight[kGroups][kWidth] = {}, dbias[kGroups][kWidth] = {}, dinp[kGroups][kWidth] = {};
};

// What a thread of layernorm_backward_kernel will need of its team's next rows: its groups of inp, dout
// and dinp come to places in shared memory that no other thread reads, hence need no barrier. Those of a
// warp's lanes lie side by side. Rows that are not aligned come by loads that are waited for.
template <class T, int kGroups, int kRows, bool kVector>
class NextRows {
  public:
    enum Array { kInp, kDout, kDinp, kArrays };
    static constexpr int kPlaces = kArrays * kRows * kGroups;  // of a thread

    __device__ NextRows(uint4* memory, const LayernormBackward<T>& p, int thread, int team)
        : p(p),
          place(memory + threadIdx.x / kWarpSize * kPlaces * kWarpSize + threadIdx.x % kWarpSize),
          thread(thread),
          team(team) {}

    // Has group g of row + r brought; zeros if there is none.
    __device__ void fetch(Array array, const T* from, unsigned row, int r, int g) const {
        const int column = (g * team + thread) * Packed128<T>::kSize;
        const int count = row + r < static_cast<unsigned>(p.rows) ? p.C - column : 0;
        const T* group = from + size_t{row + r} * p.C + column;
        if constexpr (kVector) {
            device::copy_async<16>(at(array, r, g), group, count > 0);
        } else {
            *at(array, r, g) = load_some(group, count).bits;
        }
    }
    // The same for all groups of kRows rows, row being the first.
    __device__ void fetch_rows(Array array, const T* from, unsigned row) const {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int g = 0; g < kGroups; ++g) fetch(array, from, row, r, g);
        }
    }
    // Lane r of a warp gets the mean of row + r, lane kRows + r its rstd.
    __device__ float load_statistic(unsigned row) const {
        const int lane = threadIdx.x % kWarpSize;
        const unsigned mine = row + lane % kRows;
        if (lane >= 2 * kRows || mine >= static_cast<unsigned>(p.rows)) return 0.0f;
        return (lane < kRows ? p.mean : p.rstd)[mine];
    }
    // For the whole warp, from what its lanes have loaded so.
    __device__ static float mean(float statistic, int r) {
        return __shfl_sync(0xffffffffu, statistic, r);
    }
    __device__ static float rstd(float statistic, int r) {
        return __shfl_sync(0xffffffffu, statistic, kRows + r);
    }
    __device__ Packed128<T> get(Array array, int r, int g) const {
        return {*at(array, r, g)};
    }

  private:
    __device__ uint4* at(Array array, int r, int g) const {
        return place + ((array * kRows + r) * kGroups + g) * kWarpSize;
    }
    const LayernormBackward<T>& p;
    uint4* place;
    int thread, team;
};

// block_sum for one of the block's teams, which the others do not wait for: `team` threads in whole warps,
// the first of the block's warps being `first_warp`. `shared` is the block's, kCount values for each warp.
template <int kCount>
__device__ inline void team_sum(float (&value)[kCount], float* shared, int first_warp, int team) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) value[k] = warp_sum(value[k]);
    if (team == kWarpSize) return;
    const int warp = threadIdx.x / kWarpSize, warps = team / kWarpSize;
    if (threadIdx.x % kWarpSize == 0) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) shared[warp * kCount + k] = value[k];
    }
    // A team of two warps and more: at most 8 of them, barriers 1 to 8; 0 is that of __syncthreads.
    asm volatile("bar.sync %0, %1;" ::"r"(1 + first_warp / warps), "r"(team) : "memory");
    const float* sums = shared + first_warp * kCount;
#pragma unroll
    for (int k = 0; k < kCount; ++k) value[k] = sums[k];
#pragma unroll
    for (int w = 1; w < warps; ++w) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) value[k] += sums[w * kCount + k];
    }
}

// partial (3,C) = the sums of all teams of the block, in their order: the last that a block does, so the
// kernel that adds the parts may come. `memory` has 96 bytes for each thread.
template <bool kVector, int kGroups, int kWidth>
__device__ inline void store_partial(float* partial, const ColumnSums<kGroups, kWidth>& sums,
                                     float4* memory, int C, int team) {
    constexpr int kFours = kWidth / 4, kArrayPlanes = kGroups * kFours;
    let_next_kernel_start();
    __syncthreads();  // nobody reads rows there any more
    const int threads = blockDim.x;
#pragma unroll
    for (int plane = 0; plane < 3 * kArrayPlanes; ++plane) {
        const int array = plane / kArrayPlanes, g = plane / kFours % kGroups, q = plane % kFours;
        const float* x = array == 0 ? sums.dweight[g] : array == 1 ? sums.dbias[g] : sums.dinp[g];
        memory[plane * threads + threadIdx.x] =
            make_float4(x[4 * q], x[4 * q + 1], x[4 * q + 2], x[4 * q + 3]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 3 * kArrayPlanes * team; i += threads) {
        const int plane = i / team, thread = i % team;
        const int array = plane / kArrayPlanes, g = plane / kFours % kGroups, q = plane % kFours;
        const float4* terms = memory + plane * threads + thread;
        float sum[4] = {terms[0].x, terms[0].y, terms[0].z, terms[0].w};
        for (int t = team; t < threads; t += team) {
            sum[0] = __fadd_rn(sum[0], terms[t].x);
            sum[1] = __fadd_rn(sum[1], terms[t].y);
            sum[2] = __fadd_rn(sum[2], terms[t].z);
            sum[3] = __fadd_rn(sum[3], terms[t].w);
        }
        const int column = (g * team + thread) * kWidth + 4 * q;
        store_floats(partial + array * C + column, sum, C - column, kVector);
    }
}

// A block has as many teams of `team` threads as it has room for. Each takes kRows rows at a time, so
// that one barrier serves several, and the block adds its teams' sums, so that the parts are few. What a
// thread takes out of shared memory it replaces at once by the next rows', so that loads are on their way at
// all times, also while the team reduces, computes and stores. The next rows of dinp are read before the
// present ones are written, which is safe: no element of dinp is touched by two threads or in two
// rounds. A row too many counts as empty. The sum of dinp is of what is stored. The bounds hold the
// threads to 128 registers. kTeam: the team, where the compiler is to know it, else 0.
template <class T, int kTeam, int kRows, bool kAdd, bool kVector>
__global__ void __launch_bounds__(kLayernormBlock)
    layernorm_backward_kernel(LayernormBackward<T> p, int any_team) {
    constexpr int kWidth = Packed128<T>::kSize, kGroups = kLayernormColumns / kWidth;
    using Tile = RowTile<T, kLayernormColumns>;
    using Next = NextRows<T, kGroups, kRows, kVector>;
    static_assert(Next::kPlaces * sizeof(uint4) >= 3 * kLayernormColumns * sizeof(float),
                  "the sums come to where the rows were");
    extern __shared__ uint4 next_rows[];
    __shared__ __align__(16) float shared[2][2 * kRows * kLayernormBlock / kWarpSize];
    const int team = kTeam > 0 ? kTeam : any_team;
    const int number = threadIdx.x / team, thread = threadIdx.x % team;
    const int first_warp = number * team / kWarpSize;
    const unsigned teams = blockDim.x / team, step = kRows * teams * gridDim.x, rows = p.rows;

    Packed128<T> weight[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
        const int column = (g * team + thread) * kWidth;
        weight[g] = load_group(p.weight + column, p.C - column, kVector);
    }
    ColumnSums<kGroups, kWidth> column_sums;
    const Next next(next_rows, p, thread, team);
    // All teams of a block take as many turns, some without a row in the last: compute-sanitizer's
    // racecheck cannot tell threads apart that have gone through different numbers of barriers.
    const unsigned ahead = kRows * number;  // of the block's first team
    unsigned row = kRows * blockIdx.x * teams + ahead;
    next.fetch_rows(Next::kInp, p.inp, row);
    next.fetch_rows(Next::kDout, p.dout, row);
    device::end_batch();
    if constexpr (kAdd) next.fetch_rows(Next::kDinp, p.dinp, row);
    device::end_batch();
    float next_statistic = next.load_statistic(row);
    for (int turn = 0; row - ahead < rows; row += step, turn ^= 1) {
        const float statistic = next_statistic;
        Tile inp[kRows], dout[kRows];
        float sums[2 * kRows] = {};
        device::wait_for_batches<1>();  // inp and dout are there
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
                inp[r].group[g] = next.get(Next::kInp, r, g);
                dout[r].group[g] = next.get(Next::kDout, r, g);
            }
        }
        next.fetch_rows(Next::kInp, p.inp, row + step);
        next.fetch_rows(Next::kDout, p.dout, row + step);
        device::end_batch();
        next_statistic = next.load_statistic(row + step);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            float w[kWidth];
            unpack(w, weight[g]);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                float x[kWidth], d[kWidth];
                unpack(x, inp[r].group[g]);
                unpack(d, dout[r].group[g]);
                add_group(column_sums.dweight[g], column_sums.dbias[g], &sums[2 * r], x, d, w,
                          Next::mean(statistic, r), Next::rstd(statistic, r));
                unpack_again(inp[r].group[g]);
                unpack_again(dout[r].group[g]);
            }
            unpack_again(weight[g]);
        }
        team_sum(sums, shared[turn], first_warp, team);
        device::wait_for_batches<1>();  // dinp is there
        // Addresses are worked out once more, since keeping them would cost registers.
        asm volatile("" : "+r"(row));
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            const int column = (g * team + thread) * kWidth;
            float w[kWidth];
            unpack(w, weight[g]);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                float x[kWidth], d[kWidth];
                unpack(x, inp[r].group[g]);
                unpack(d, dout[r].group[g]);
                group_dinp(x, d, w, &sums[2 * r], p.per_channel, Next::mean(statistic, r),
                           Next::rstd(statistic, r));
                if constexpr (kAdd) {
                    unpack(d, next.get(Next::kDinp, r, g));
                    next.fetch(Next::kDinp, p.dinp, row + step, r, g);
#pragma unroll
                    for (int k = 0; k < kWidth; ++k) x[k] = __fadd_rn(x[k], d[k]);
                }
                store_dinp(p.dinp + size_t{row + r} * p.C + column, column_sums.dinp[g], x,
                           row + r < rows ? p.C - column : 0, kVector);
            }
            unpack_again(weight[g]);
        }
        device::end_batch();
    }
    device::wait_for_copies();
    store_partial<kVector>(p.partial + size_t{3} * blockIdx.x * p.C, column_sums,
                           reinterpret_cast<float4*>(next_rows), p.C, team);
}

// The same for rows too wide to stay in registers beside their sums: a block takes them one by one, and
// reads each twice, from the cache the second time.
template <class T>
__global__ void __launch_bounds__(kLayernormMaxBlock)
    layernorm_backward_wide_kernel(LayernormBackward<T> p) {
    constexpr int kWidth = Packed128<T>::kSize, kGroups = kLayernormMaxColumns / kWidth;
    __shared__ float shared[2][2 * kLayernormMaxBlock / kWarpSize];
    const int team = blockDim.x, thread = threadIdx.x;
    ColumnSums<kGroups, kWidth> column_sums;
    int turn = 0;
    for (unsigned row = blockIdx.x; row < static_cast<unsigned>(p.rows);
         row += gridDim.x, turn ^= 1) {
        const float mean = p.mean[row], rstd = p.rstd[row];
        const auto load = [&](float(&x)[kWidth], float(&d)[kWidth], float(&w)[kWidth], int g) {
            const int column = (g * team + thread) * kWidth, count = p.C - column;
            const size_t first = size_t{row} * p.C + column;
            unpack(w, load_group(p.weight + column, count, p.vector));
            unpack(x, load_group(p.inp + first, count, p.vector));
            unpack(d, load_group(p.dout + first, count, p.vector));
        };
        float sums[2] = {};
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            float x[kWidth], d[kWidth], w[kWidth];
            load(x, d, w, g);
            add_group(column_sums.dweight[g], column_sums.dbias[g], sums, x, d, w, mean, rstd);
        }
        block_sum(sums, shared[turn]);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            const int column = (g * team + thread) * kWidth, count = p.C - column;
            T* dinp = p.dinp + size_t{row} * p.C + column;
            float x[kWidth], d[kWidth], w[kWidth];
            load(x, d, w, g);
            group_dinp(x, d, w, sums, p.per_channel, mean, rstd);
            if (p.add_to_dinp) {
                unpack(d, load_group(dinp, count, p.vector));
#pragma unroll
                for (int k = 0; k < kWidth; ++k) x[k] = __fadd_rn(x[k], d[k]);
            }
            store_dinp(dinp, column_sums.dinp[g], x, count, p.vector);
        }
    }
    let_next_kernel_start();
    float* partial = p.partial + size_t{3} * blockIdx.x * p.C;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
        const int column = (g * team + thread) * kWidth, count = p.C - column;
        store_floats(partial + column, column_sums.dweight[g], count, p.vector);
        store_floats(partial + p.C + column, column_sums.dbias[g], count, p.vector);
        store_floats(partial + 2 * p.C + column, column_sums.dinp[g], count, p.vector);
    }
}

// The parts' sum: a block takes 16 columns, which are two sectors of memory, and cuts the parts into
// 32 stretches, so that with 132 parts a thread has all its loads in flight at once.
constexpr int kPartColumns = 16;
constexpr int kPartStretches = 32;
constexpr int kPartBatch = 5;

// dweight, dbias and dinp_sum, unless it is null, from the parts: the stretches in double, each with its
// neighbour, then these pairs in order.
template <class G>
__global__ void __launch_bounds__(kPartColumns* kPartStretches)
    layernorm_add_parts_kernel(G* dweight, G* dbias, G* dinp_sum, const float* partial, int parts,
                               int C, bool accumulate) {
    __shared__ double sums[kPartStretches / 2][kPartColumns];
    wait_for_first_kernel();
    const int lane = threadIdx.x % kPartColumns, stretch = threadIdx.x / kPartColumns;
    const int column = blockIdx.x * kPartColumns + lane;  // of the three side by side
    const bool exists = column < (dinp_sum != nullptr ? 3 : 2) * C;
    const bool last_adder = exists && stretch == 0;
    double sum = 0.0;
    if (exists) {
        const int end = parts * (stretch + 1) / kPartStretches;
        for (int part = parts * stretch / kPartStretches; part < end; part += kPartBatch) {
            float values[kPartBatch];
#pragma unroll
            for (int k = 0; k < kPartBatch; ++k) {
                values[k] = part + k < end ? partial[size_t{3} * (part + k) * C + column] : 0.0f;
            }
#pragma unroll
            for (int k = 0; k < kPartBatch; ++k) sum += static_cast<double>(values[k]);
        }
    }
    G* gradient = column < C       ? dweight + column
                  : column < 2 * C ? dbias + (column - C)
                                   : dinp_sum + (column - 2 * C);
    const float old = accumulate && last_adder ? widen(*gradient) : 0.0f;
    sum += __shfl_down_sync(0xffffffffu, sum, kPartColumns);
    if (stretch % 2 == 0) sums[stretch / 2][lane] = sum;
    __syncthreads();
    if (!last_adder) return;
#pragma unroll
    for (int s = 1; s < kPartStretches / 2; ++s) sum += sums[s][lane];
    if (accumulate) sum += static_cast<double>(old);
    *gradient = narrow<G>(static_cast<float>(sum));
}

// ============================================================================
// launchers

inline void check_layernorm_shape(const char* launcher, int rows, int C) {
    cpu::require_positive(launcher, {{"rows", rows}, {"C", C}});
    if (C > kLayernormMaxChannels) {
        throw Error(format("%s: C is %d, must be at most %d", launcher, C, kLayernormMaxChannels));
    }
}

// Threads for a row, in whole warps.
inline int layernorm_team(int C, int columns) {
    return ceil_div(ceil_div(C, columns), kWarpSize) * kWarpSize;
}

template <class T, int kColumns, bool kWarpRow, bool kFused, bool kVector>
void launch_layernorm_forward(const LayernormForward<T>& p, cudaStream_t stream) {
    const int threads = kWarpRow ? kLayernormForwardThreads : layernorm_team(p.C, kColumns);
    const int blocks = kWarpRow ? ceil_div(p.rows, kLayernormForwardWarps) : p.rows;
    layernorm_forward_kernel<T, kColumns, kWarpRow, kFused, kVector>
        <<<blocks, threads, 0, stream>>>(p);
    launch_check();
}

template <int kColumns, bool kFused, class T>
void layernorm_forward_by_warps(const LayernormForward<T>& p, cudaStream_t stream) {
    launch_layernorm_forward<T, kColumns, true, kFused, true>(p, stream);
}

// The kernel is chosen by C, and by `vector`, whether rows are aligned, which makes no difference to the
// bits. A warp whose lanes have room for much more than the row has registers lying idle, and too few
// rows on their way: hence a size for each of GPT-2's widths.
template <bool kFused, class T>
void layernorm_forward_any(const LayernormForward<T>& p, bool vector, cudaStream_t stream) {
    constexpr int kWide = kLayernormMaxColumns;
    if (p.C > 64 * kWarpSize) {
        return vector ? launch_layernorm_forward<T, kWide, false, kFused, true>(p, stream)
                      : launch_layernorm_forward<T, kWide, false, kFused, false>(p, stream);
    }
    if (!vector) return launch_layernorm_forward<T, 64, true, kFused, false>(p, stream);
    if (p.C <= 8 * kWarpSize) return layernorm_forward_by_warps<8, kFused>(p, stream);
    if (p.C <= 24 * kWarpSize) return layernorm_forward_by_warps<24, kFused>(p, stream);
    if (p.C <= 32 * kWarpSize) return layernorm_forward_by_warps<32, kFused>(p, stream);
    if (p.C <= 40 * kWarpSize) return layernorm_forward_by_warps<40, kFused>(p, stream);
    if (p.C <= 56 * kWarpSize) return layernorm_forward_by_warps<56, kFused>(p, stream);
    layernorm_forward_by_warps<64, kFused>(p, stream);
}

// out (rows,C) = (inp - mean) * rstd * weight + bias; mean and rstd (rows) are of each row. Throws
// Error for a C above kLayernormMaxChannels.
LLMC_LAUNCHER void layernorm_forward(floatX* out, float* mean, float* rstd, const floatX* inp,
                                     const floatX* weight, const floatX* bias, int rows, int C,
                                     cudaStream_t stream) {
    check_layernorm_shape("layernorm_forward", rows, C);
    const LauncherRange range("layernorm_forward", {{"rows", rows}, {"C", C}},
                              bytes_of<floatX>(rows + 1, C, 2) + bytes_of<float>(rows, 2));
    const bool vector =
        C % Packed128<floatX>::kSize == 0 && all_aligned(16, out, inp, weight, bias);
    layernorm_forward_any<false, floatX>(
        {nullptr, out, mean, rstd, inp, nullptr, weight, bias, rows, C}, vector, stream);
}

// residual (rows,C) = a + b, rounded to floatX, then layernorm_forward on that, with the same bits.
// residual may be a.
LLMC_LAUNCHER void fused_residual_layernorm_forward(floatX* residual, floatX* out, float* mean,
                                                    float* rstd, const floatX* a, const floatX* b,
                                                    const floatX* weight, const floatX* bias,
                                                    int rows, int C, cudaStream_t stream) {
    check_layernorm_shape("fused_residual_layernorm_forward", rows, C);
    const LauncherRange range("fused_residual_layernorm_forward", {{"rows", rows}, {"C", C}},
                              bytes_of<floatX>(rows, C, 4) + bytes_of<float>(rows, 2));
    const bool vector =
        C % Packed128<floatX>::kSize == 0 && all_aligned(16, residual, out, a, b, weight, bias);
    layernorm_forward_any<true, floatX>({residual, out, mean, rstd, a, b, weight, bias, rows, C},
                                        vector, stream);
}

// Whether a thread's columns of a row stay in registers beside their sums.
inline bool layernorm_backward_is_wide(int C) {
    return C > kLayernormColumns * kLayernormMaxBlock;
}

// Rows that a team takes at a time.
constexpr int kLayernormRows = sizeof(floatX) == 2 ? 2 : 1;

// The teams of a block.
inline int layernorm_backward_teams(int C) {
    return kLayernormBlock / layernorm_team(C, kLayernormColumns);
}

// How many parts dweight, dbias and dinp_sum are summed in, for any GPU: as many blocks as run at once
// on an H200's 132 multiprocessors.
inline int layernorm_backward_parts(int rows, int C) {
    if (layernorm_backward_is_wide(C)) return std::min(264, rows);
    return std::min(132, ceil_div(rows, layernorm_backward_teams(C) * kLayernormRows));
}

// Bytes of scratch for layernorm_backward.
LLMC_LAUNCHER size_t layernorm_backward_scratch_bytes(int rows, int C) {
    check_layernorm_shape("layernorm_backward", rows, C);
    return static_cast<size_t>(layernorm_backward_parts(rows, C)) * 3 * C * sizeof(float);
}

template <class T, int kTeam, bool kAdd, bool kVector>
void launch_layernorm_backward(const LayernormBackward<T>& p, int parts, cudaStream_t stream) {
    constexpr int kRows = kLayernormRows;
    const auto kernel = layernorm_backward_kernel<T, kTeam, kRows, kAdd, kVector>;
    constexpr int kGroups = kLayernormColumns / Packed128<T>::kSize;
    const int team = layernorm_team(p.C, kLayernormColumns);
    const int threads = layernorm_backward_teams(p.C) * team;
    const size_t bytes = sizeof(uint4) * NextRows<T, kGroups, kRows, kVector>::kPlaces * threads;
    allow_shared_memory(kernel, bytes);
    kernel<<<parts, threads, bytes, stream>>>(p, team);
    launch_check();
}

template <class T, int kTeam>
void layernorm_backward_aligned(const LayernormBackward<T>& p, int parts, cudaStream_t stream) {
    p.add_to_dinp ? launch_layernorm_backward<T, kTeam, true, true>(p, parts, stream)
                  : launch_layernorm_backward<T, kTeam, false, true>(p, parts, stream);
}

template <class T>
void layernorm_backward_any(const LayernormBackward<T>& p, int parts, cudaStream_t stream) {
    if (layernorm_backward_is_wide(p.C)) {
        layernorm_backward_wide_kernel<T>
            <<<parts, layernorm_team(p.C, kLayernormMaxColumns), 0, stream>>>(p);
        return launch_check();
    }
    if (!p.vector) {
        return p.add_to_dinp ? launch_layernorm_backward<T, 0, true, false>(p, parts, stream)
                             : launch_layernorm_backward<T, 0, false, false>(p, parts, stream);
    }
    switch (layernorm_team(p.C, kLayernormColumns)) {  // GPT-2's widths
        case 96:
            return layernorm_backward_aligned<T, 96>(p, parts, stream);
        case 128:
            return layernorm_backward_aligned<T, 128>(p, parts, stream);
        case 160:
            return layernorm_backward_aligned<T, 160>(p, parts, stream);
        case 224:
            return layernorm_backward_aligned<T, 224>(p, parts, stream);
    }
    layernorm_backward_aligned<T, 0>(p, parts, stream);
}

// dinp (rows,C), added to with add_to_dinp; dweight and dbias (C), added to with `accumulate`; likewise
// dinp_sum (C) = the sum over the rows of dinp as stored, unless it is null. Throws Error for a C above
// kLayernormMaxChannels.
LLMC_LAUNCHER void layernorm_backward(floatX* dinp, gradX* dweight, gradX* dbias, gradX* dinp_sum,
                                      const floatX* dout, const floatX* inp, const floatX* weight,
                                      const float* mean, const float* rstd, void* scratch, int rows,
                                      int C, bool add_to_dinp, bool accumulate,
                                      cudaStream_t stream) {
    check_layernorm_shape("layernorm_backward", rows, C);
    const LauncherRange range(
        "layernorm_backward", {{"rows", rows}, {"C", C}},
        bytes_of<floatX>(rows, C, add_to_dinp ? 4 : 3) + bytes_of<float>(rows, 2));
    float* partial = static_cast<float*>(scratch);
    const bool vector =
        C % Packed128<floatX>::kSize == 0 && all_aligned(16, dinp, dout, inp, weight, partial);
    const float per_channel = 1.0f / static_cast<float>(C);
    const LayernormBackward<floatX> p = {dinp, partial, dout, inp,         weight,      mean,
                                         rstd, rows,    C,    per_channel, add_to_dinp, vector};
    const int parts = layernorm_backward_parts(rows, C);
    layernorm_backward_any(p, parts, stream);
    const int columns = (dinp_sum != nullptr ? 3 : 2) * C;
    launch_second_kernel(layernorm_add_parts_kernel<gradX>, ceil_div(columns, kPartColumns),
                         kPartColumns * kPartStretches, stream, dweight, dbias, dinp_sum, partial,
                         parts, C, accumulate);
    launch_check();
}

}  // namespace llmc
