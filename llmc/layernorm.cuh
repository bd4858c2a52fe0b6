// Layer normalisation (Ba, Kiros, Hinton 2016, section 3), eps 1e-5, over the last dimension.
//
// Bound by memory: each array goes through it once, in bf16 4 bytes an element forward, 8 with the
// residual sum, 8 backward. A row stays in the registers of the threads that read it: a warp for
// narrow rows, which then need no barrier, a block for wide ones. Of an H200's copy bandwidth
// (4.2 TB/s) with the residual sum and backward: 92 and 87 % at 65536 x 768, 88 and 84 % at
// 32768 x 1024, 82 and 80 % at 16384 x 1600; 83 to 64 % forward alone.
//
// dweight, dbias and the sum of dinp go over all rows. Threads keep their columns' sums while they
// go through rows; a number of parts that the shape decides is left in scratch and added by a second
// kernel.
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

constexpr int kLayernormThreads = 256;  // where a warp has a row to itself
constexpr int kLayernormWarps = kLayernormThreads / kWarpSize;
constexpr int kLayernormMaxBlock = 384;  // where a block has
constexpr int kLayernormMaxChannels = 32 * kLayernormMaxBlock;

// The columns of a row that one thread holds: groups of 16 bytes, as far apart as the team (the
// threads of the row) is wide. A group may be cut short by the end of the row, or be empty.
template <class T, int kColumns>
struct RowTile {
    static constexpr int kWidth = Packed128<T>::kSize;
    static constexpr int kGroups = kColumns / kWidth;

    __device__ void load(const T* row, int C, int thread, int team, bool vector) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            const int column = (g * team + thread) * kWidth;
            group[g] = load_group(row + column, C - column, vector);
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

// Sums over the row's team. `shared` as for block_sum.
template <bool kWarpRow, int kCount>
__device__ inline void team_sum(float (&value)[kCount], float* shared) {
    if constexpr (kWarpRow) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) value[k] = warp_sum(value[k]);
    } else {
        block_sum(value, shared);
    }
}

// Mean and reciprocal standard deviation of a row. Two passes, since the mean of the squares minus
// the square of the mean has no digit left when the mean is large. Spelt in single operations: the
// plain and the fused forward kernel must round alike.
template <bool kWarpRow, class T, int kColumns>
__device__ inline float2 row_statistics(const RowTile<T, kColumns>& tile, int C, int thread,
                                        int team, float* shared) {
    constexpr int kWidth = Packed128<T>::kSize;
    float total[1] = {0.0f}, squares[1] = {0.0f};
#pragma unroll
    for (int g = 0; g < tile.kGroups; ++g) {
        float x[kWidth];
        unpack(x, tile.group[g]);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) total[0] = __fadd_rn(total[0], x[k]);
    }
    team_sum<kWarpRow>(total, shared);
    const float mean = __fdiv_rn(total[0], static_cast<float>(C));
#pragma unroll
    for (int g = 0; g < tile.kGroups; ++g) {
        const int count = C - (g * team + thread) * kWidth;
        float x[kWidth];
        unpack(x, tile.group[g]);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
            const float difference = k < count ? __fsub_rn(x[k], mean) : 0.0f;
            squares[0] = __fmaf_rn(difference, difference, squares[0]);
        }
    }
    team_sum<kWarpRow>(squares, shared + kWarpSize);
    const float variance = __fdiv_rn(squares[0], static_cast<float>(C));
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
    bool vector;
};

// Normalises inp, or inp + added, rounded, which it also stores.
template <class T, int kColumns, bool kWarpRow, bool kFused>
__global__ void __launch_bounds__(kWarpRow ? kLayernormThreads : kLayernormMaxBlock)
    layernorm_forward_kernel(LayernormForward<T> p) {
    __shared__ float shared[kWarpRow ? 1 : 2 * kWarpSize];
    constexpr int kWidth = Packed128<T>::kSize;
    const int team = kWarpRow ? kWarpSize : blockDim.x;
    const int thread = kWarpRow ? threadIdx.x % kWarpSize : threadIdx.x;
    const size_t row =
        kWarpRow ? size_t{blockIdx.x} * kLayernormWarps + threadIdx.x / kWarpSize : blockIdx.x;
    if (row >= static_cast<size_t>(p.rows)) return;
    const size_t first = row * p.C;

    RowTile<T, kColumns> tile;
    tile.load(p.inp + first, p.C, thread, team, p.vector);
    if constexpr (kFused) {
        RowTile<T, kColumns> other;
        other.load(p.added + first, p.C, thread, team, p.vector);
#pragma unroll
        for (int g = 0; g < tile.kGroups; ++g) {
            float x[kWidth], y[kWidth];
            unpack(x, tile.group[g]);
            unpack(y, other.group[g]);
#pragma unroll
            for (int k = 0; k < kWidth; ++k) x[k] = __fadd_rn(x[k], y[k]);
            tile.group[g] = pack<T>(x);
        }
        tile.store(p.residual + first, p.C, thread, team, p.vector);
    }

    const float2 statistics = row_statistics<kWarpRow>(tile, p.C, thread, team, shared);
    const float mean = statistics.x, rstd = statistics.y;
#pragma unroll
    for (int g = 0; g < tile.kGroups; ++g) {
        const int column = (g * team + thread) * kWidth, count = p.C - column;
        float x[kWidth], w[kWidth], b[kWidth];
        unpack(x, tile.group[g]);
        unpack(w, load_group(p.weight + column, count, p.vector));
        unpack(b, load_group(p.bias + column, count, p.vector));
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
            x[k] = __fmaf_rn(__fmul_rn(__fsub_rn(x[k], mean), rstd), w[k], b[k]);
        }
        store_group(p.out + first + column, pack<T>(x), count, p.vector);
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

// A thread's sums over rows, of its columns: in registers, or, where these run short, in shared memory.
// There they lie in groups of four, those of neighbouring threads side by side, so that the threads of
// a warp hit different banks.
template <int kGroups, int kWidth, bool kShared>
struct ColumnSums {
    static constexpr int kFours = kWidth / 4;

    __device__ explicit ColumnSums(float4* memory) : shared(memory + threadIdx.x) {
        const float zeros[kWidth] = {};
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            if constexpr (kShared) put(g, zeros);
        }
    }
    __device__ void put(int g, const float (&x)[kWidth]) const {
#pragma unroll
        for (int q = 0; q < kFours; ++q) {
            shared[(g * kFours + q) * kLayernormThreads] =
                make_float4(x[4 * q], x[4 * q + 1], x[4 * q + 2], x[4 * q + 3]);
        }
    }
    __device__ void add(int g, const float (&x)[kWidth]) {
        float old[kWidth];
#pragma unroll
        for (int q = 0; q < kFours; ++q) {
            const float4 four = kShared ? shared[(g * kFours + q) * kLayernormThreads]
                                        : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            old[4 * q] = four.x, old[4 * q + 1] = four.y;
            old[4 * q + 2] = four.z, old[4 * q + 3] = four.w;
        }
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
            float& sum = kShared ? old[k] : own[g][k];
            sum = __fadd_rn(sum, x[k]);
        }
        if constexpr (kShared) put(g, old);
    }

    float4* shared;  // of this thread
    float own[kShared ? 1 : kGroups][kWidth] = {};
};

// partial (C) = what the warps of a block have in `sums` for the same columns, added in their order.
// Begins and ends with a barrier.
template <int kColumns, int kWidth, bool kVector>
__device__ inline void add_warps(float* partial, const float4* sums, int C) {
    constexpr int kFours = kWidth / 4;
    static_assert(kColumns / 4 * kWarpSize <= kLayernormThreads, "a thread adds four columns");
    const int plane = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    __syncthreads();
    if (plane < kColumns / 4) {
        const float4* from = sums + plane * kLayernormThreads + lane;
        float sum[4] = {};
#pragma unroll
        for (int w = 0; w < kLayernormWarps; ++w) {
            const float4 more = from[w * kWarpSize];
            sum[0] = w == 0 ? more.x : __fadd_rn(sum[0], more.x);
            sum[1] = w == 0 ? more.y : __fadd_rn(sum[1], more.y);
            sum[2] = w == 0 ? more.z : __fadd_rn(sum[2], more.z);
            sum[3] = w == 0 ? more.w : __fadd_rn(sum[3], more.w);
        }
        const int column = (plane / kFours * kWarpSize + lane) * kWidth + plane % kFours * 4;
        store_floats(partial + column, sum, C - column, kVector);
    }
    __syncthreads();
}

// partial (3,C) from the threads' sums: the last that a block does, so the kernel that adds the parts
// may come.
template <int kColumns, bool kVector, int kGroups, int kWidth, bool kWarpRow>
__device__ inline void store_partial(float* partial, const float (&dweight)[kGroups][kWidth],
                                     const float (&dbias)[kGroups][kWidth],
                                     const ColumnSums<kGroups, kWidth, kWarpRow>& dinp_sum,
                                     const float4* sums, int C, int thread, int team) {
    let_next_kernel_start();
    if constexpr (kWarpRow) {
        add_warps<kColumns, kWidth, kVector>(partial + 2 * C, sums, C);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) dinp_sum.put(g, dweight[g]);
        add_warps<kColumns, kWidth, kVector>(partial, sums, C);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) dinp_sum.put(g, dbias[g]);
        add_warps<kColumns, kWidth, kVector>(partial + C, sums, C);
    } else {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            const int column = (g * team + thread) * kWidth, count = C - column;
            store_floats(partial + column, dweight[g], count, kVector);
            store_floats(partial + C + column, dbias[g], count, kVector);
            store_floats(partial + 2 * C + column, dinp_sum.own[g], count, kVector);
        }
    }
}

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

// A team takes kRows rows at a time, so that there are loads enough in flight and a barrier serves
// several rows. The sum of dinp is of what is stored.
template <class T, int kColumns, bool kWarpRow, int kRows, bool kVector>
__global__ void __launch_bounds__(kWarpRow ? kLayernormThreads : kLayernormMaxBlock,
                                  kVector&& kWarpRow && sizeof(T) == 2 ? 2 : 1)
    layernorm_backward_kernel(LayernormBackward<T> p) {
    using Tile = RowTile<T, kColumns>;
    constexpr int kWidth = Tile::kWidth, kGroups = Tile::kGroups;
    // With 32 columns the sums take all registers: the row is then read twice, from the cache the
    // second time.
    constexpr bool kKeep = kColumns < 32;
    __shared__ float shared[kWarpRow ? 1 : 2 * 2 * kRows * 16];
    // Where a warp has a row, the registers do not take three sums: dinp's is here.
    __shared__ float4 shared_sums[kWarpRow ? kColumns / 4 * kLayernormThreads : 1];
    const int team = kWarpRow ? kWarpSize : blockDim.x;
    const int thread = kWarpRow ? threadIdx.x % kWarpSize : threadIdx.x;
    const unsigned row_team =
        kWarpRow ? blockIdx.x * kLayernormWarps + threadIdx.x / kWarpSize : blockIdx.x;
    const unsigned step = kRows * (kWarpRow ? kLayernormWarps : 1) * gridDim.x;
    const unsigned rows = p.rows;

    float dweight[kGroups][kWidth] = {}, dbias[kGroups][kWidth] = {};
    ColumnSums<kGroups, kWidth, kWarpRow> dinp_sum(shared_sums);
    int turn = 0;
    for (unsigned row = kRows * row_team; row < rows; row += step, turn ^= 1) {
        Tile inp[kRows], dout[kRows], dinp[kRows];
        float mean[kRows], rstd[kRows], sums[2 * kRows] = {};
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            // A row too many counts as empty: what it reads is 0, and it adds and stores nothing.
            const bool exists = row + r < rows;
            const int width = exists ? p.C : 0;
            const size_t first = size_t{row + r} * p.C;
            if constexpr (kKeep) {
                inp[r].load(p.inp + first, width, thread, team, kVector);
                dout[r].load(p.dout + first, width, thread, team, kVector);
                if (p.add_to_dinp) dinp[r].load(p.dinp + first, width, thread, team, kVector);
            }
            mean[r] = exists ? p.mean[row + r] : 0.0f;
            rstd[r] = exists ? p.rstd[row + r] : 0.0f;
        }
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            const int column = (g * team + thread) * kWidth;
            float w[kWidth];
            unpack(w, load_group(p.weight + column, p.C - column, kVector));
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                const int count = row + r < rows ? p.C - column : 0;
                const size_t first = size_t{row + r} * p.C + column;
                float x[kWidth], d[kWidth];
                unpack(x, kKeep ? inp[r].group[g] : load_group(p.inp + first, count, kVector));
                unpack(d, kKeep ? dout[r].group[g] : load_group(p.dout + first, count, kVector));
                add_group(dweight[g], dbias[g], &sums[2 * r], x, d, w, mean[r], rstd[r]);
                if constexpr (kKeep) {
                    unpack_again(inp[r].group[g]);
                    unpack_again(dout[r].group[g]);
                }
            }
        }
        team_sum<kWarpRow>(sums, shared + (kWarpRow ? 0 : turn * 2 * kRows * 16));
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            const int column = (g * team + thread) * kWidth;
            float w[kWidth];
            unpack(w, load_group(p.weight + column, p.C - column, kVector));
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                const int count = row + r < rows ? p.C - column : 0;
                const size_t first = size_t{row + r} * p.C + column;
                float x[kWidth], d[kWidth];
                unpack(x, kKeep ? inp[r].group[g] : load_group(p.inp + first, count, kVector));
                unpack(d, kKeep ? dout[r].group[g] : load_group(p.dout + first, count, kVector));
                group_dinp(x, d, w, &sums[2 * r], p.per_channel, mean[r], rstd[r]);
                if (p.add_to_dinp) {
                    unpack(d,
                           kKeep ? dinp[r].group[g] : load_group(p.dinp + first, count, kVector));
#pragma unroll
                    for (int k = 0; k < kWidth; ++k) x[k] = __fadd_rn(x[k], d[k]);
                }
                const Packed128<T> rounded = pack<T>(x);
                store_group(p.dinp + first, rounded, count, kVector);
                unpack(x, rounded);
                dinp_sum.add(g, x);
            }
        }
    }
    store_partial<kColumns, kVector>(p.partial + size_t{3} * blockIdx.x * p.C, dweight, dbias,
                                     dinp_sum, shared_sums, p.C, thread, team);
}

// What a thread of layernorm_backward_block_kernel will need of the block's next rows: its groups of
// inp, dout and dinp come to places in shared memory that no other thread reads, hence need no
// barrier. Those of a warp's lanes lie side by side.
template <class T, int kGroups, int kRows>
class NextRows {
  public:
    enum Array { kInp, kDout, kDinp, kArrays };
    static constexpr int kPlaces = kArrays * kRows * kGroups;  // of a thread

    __device__ NextRows(uint4* memory, const LayernormBackward<T>& p)
        : p(p),
          place(memory + threadIdx.x / kWarpSize * kPlaces * kWarpSize + threadIdx.x % kWarpSize) {}

    // Has group g of row + r brought; zeros if there is none.
    __device__ void fetch(Array array, const T* from, unsigned row, int r, int g) const {
        const int column = (g * blockDim.x + threadIdx.x) * Packed128<T>::kSize;
        const bool exists = row + r < static_cast<unsigned>(p.rows) && column < p.C;
        device::copy_async<16>(at(array, r, g), from + size_t{row + r} * p.C + column, exists);
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
    __device__ Packed128<T> get(Array array, int r, int g) const {
        return {*at(array, r, g)};
    }

  private:
    __device__ uint4* at(Array array, int r, int g) const {
        return place + ((array * kRows + r) * kGroups + g) * kWarpSize;
    }
    const LayernormBackward<T>& p;
    uint4* place;
};

// As layernorm_backward_kernel where a block has a row, for aligned rows, with the same bits. What a
// thread takes out of shared memory it replaces at once by the next rows', so that loads are on
// their way at all times, also while the block reduces, computes and stores. The next rows of dinp
// are read before the present ones are written, which is safe: no element of dinp is touched by two
// threads or in two rounds. 512 holds the threads to 128 registers.
template <class T, int kColumns, int kRows, bool kAdd>
__global__ void __launch_bounds__(512) layernorm_backward_block_kernel(LayernormBackward<T> p) {
    using Tile = RowTile<T, kColumns>;
    constexpr int kWidth = Tile::kWidth, kGroups = Tile::kGroups;
    using Next = NextRows<T, kGroups, kRows>;
    extern __shared__ uint4 next_rows[];
    __shared__ __align__(16) float shared[2][2 * kRows * kLayernormMaxBlock / kWarpSize];
    const int team = blockDim.x, thread = threadIdx.x;
    const unsigned step = kRows * gridDim.x, rows = p.rows;

    Packed128<T> weight[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
        const int column = (g * team + thread) * kWidth;
        weight[g] = load_group(p.weight + column, p.C - column, true);
    }
    float dweight[kGroups][kWidth] = {}, dbias[kGroups][kWidth] = {};
    ColumnSums<kGroups, kWidth, false> dinp_sum(nullptr);
    const Next next(next_rows, p);
    unsigned row = kRows * blockIdx.x;
    next.fetch_rows(Next::kInp, p.inp, row);
    next.fetch_rows(Next::kDout, p.dout, row);
    device::end_batch();
    if constexpr (kAdd) next.fetch_rows(Next::kDinp, p.dinp, row);
    device::end_batch();
    float statistic = next.load_statistic(row);
    for (int turn = 0; row < rows; row += step, turn ^= 1) {
        Tile inp[kRows], dout[kRows];
        float mean[kRows], rstd[kRows], sums[2 * kRows] = {};
        device::wait_for_batches<1>();  // inp and dout are there
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            mean[r] = __shfl_sync(0xffffffffu, statistic, r);
            rstd[r] = __shfl_sync(0xffffffffu, statistic, kRows + r);
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
                inp[r].group[g] = next.get(Next::kInp, r, g);
                dout[r].group[g] = next.get(Next::kDout, r, g);
            }
        }
        next.fetch_rows(Next::kInp, p.inp, row + step);
        next.fetch_rows(Next::kDout, p.dout, row + step);
        device::end_batch();
        statistic = next.load_statistic(row + step);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            float w[kWidth];
            unpack(w, weight[g]);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                float x[kWidth], d[kWidth];
                unpack(x, inp[r].group[g]);
                unpack(d, dout[r].group[g]);
                add_group(dweight[g], dbias[g], &sums[2 * r], x, d, w, mean[r], rstd[r]);
                unpack_again(inp[r].group[g]);
                unpack_again(dout[r].group[g]);
            }
            unpack_again(weight[g]);
        }
        block_sum(sums, shared[turn]);
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
                group_dinp(x, d, w, &sums[2 * r], p.per_channel, mean[r], rstd[r]);
                if constexpr (kAdd) {
                    unpack(d, next.get(Next::kDinp, r, g));
                    next.fetch(Next::kDinp, p.dinp, row + step, r, g);
#pragma unroll
                    for (int k = 0; k < kWidth; ++k) x[k] = __fadd_rn(x[k], d[k]);
                }
                const Packed128<T> rounded = pack<T>(x);
                const int count = row + r < rows ? p.C - column : 0;
                store_group(p.dinp + size_t{row + r} * p.C + column, rounded, count, true);
                unpack(x, rounded);
                dinp_sum.add(g, x);
            }
            unpack_again(weight[g]);
        }
        device::end_batch();
    }
    device::wait_for_copies();
    store_partial<kColumns, true>(p.partial + size_t{3} * blockIdx.x * p.C, dweight, dbias,
                                  dinp_sum, nullptr, p.C, thread, team);
}

// The parts' sum: a block takes 16 columns, which are two sectors of memory, and cuts the parts into
// 32 stretches, so that with 264 parts a thread has all its loads in flight at once.
constexpr int kPartColumns = 16;
constexpr int kPartStretches = 32;
constexpr int kPartBatch = 9;

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

// Threads of a block that has a row to itself.
inline int layernorm_block(int C, int columns) {
    return ceil_div(ceil_div(C, columns), kWarpSize) * kWarpSize;
}

template <class T, int kColumns, bool kWarpRow, bool kFused>
void launch_layernorm_forward(const LayernormForward<T>& p, cudaStream_t stream) {
    const int threads = kWarpRow ? kLayernormThreads : layernorm_block(p.C, kColumns);
    const int blocks = kWarpRow ? ceil_div(p.rows, kLayernormWarps) : p.rows;
    layernorm_forward_kernel<T, kColumns, kWarpRow, kFused><<<blocks, threads, 0, stream>>>(p);
    launch_check();
}

// The kernel is chosen by C alone. A warp whose lanes have room for much more than the row has registers
// lying idle, and too few rows on their way: hence a size for each of GPT-2's widths.
template <bool kFused, class T>
void layernorm_forward_any(const LayernormForward<T>& p, cudaStream_t stream) {
    if (p.C <= 8 * kWarpSize) return launch_layernorm_forward<T, 8, true, kFused>(p, stream);
    if (p.C <= 24 * kWarpSize) return launch_layernorm_forward<T, 24, true, kFused>(p, stream);
    if (p.C <= 32 * kWarpSize) return launch_layernorm_forward<T, 32, true, kFused>(p, stream);
    if (p.C <= 40 * kWarpSize) return launch_layernorm_forward<T, 40, true, kFused>(p, stream);
    if (p.C <= 56 * kWarpSize) return launch_layernorm_forward<T, 56, true, kFused>(p, stream);
    if (p.C <= 64 * kWarpSize) return launch_layernorm_forward<T, 64, true, kFused>(p, stream);
    launch_layernorm_forward<T, 32, false, kFused>(p, stream);
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
        {nullptr, out, mean, rstd, inp, nullptr, weight, bias, rows, C, vector}, stream);
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
    layernorm_forward_any<true, floatX>(
        {residual, out, mean, rstd, a, b, weight, bias, rows, C, vector}, stream);
}

// How many parts dweight, dbias and dinp_sum are summed in, for any GPU: as many blocks as fit on an
// H200's 132 multiprocessors at 128 registers a thread. That is two of 256 threads; where a block
// has a row, four of 128, three of 160, two of up to 256.
inline int layernorm_backward_parts(int rows, int C) {
    if (C <= 24 * kWarpSize) return std::min(264, ceil_div(rows, kLayernormWarps));
    const int most = C <= 8 * 128 ? 528 : C <= 8 * 160 ? 396 : 264;
    return std::min(most, ceil_div(rows, C <= 8 * kLayernormMaxBlock ? 4 : 1));
}

// Bytes of scratch for layernorm_backward.
LLMC_LAUNCHER size_t layernorm_backward_scratch_bytes(int rows, int C) {
    check_layernorm_shape("layernorm_backward", rows, C);
    return static_cast<size_t>(layernorm_backward_parts(rows, C)) * 3 * C * sizeof(float);
}

// For aligned rows of up to kColumns * kLayernormMaxBlock columns.
template <class T, int kColumns, int kRows>
void launch_layernorm_backward_block(const LayernormBackward<T>& p, int parts,
                                     cudaStream_t stream) {
    constexpr int kPlaces = NextRows<T, RowTile<T, kColumns>::kGroups, kRows>::kPlaces;
    const auto kernel = p.add_to_dinp ? layernorm_backward_block_kernel<T, kColumns, kRows, true>
                                      : layernorm_backward_block_kernel<T, kColumns, kRows, false>;
    const int threads = layernorm_block(p.C, kColumns);
    const size_t bytes = sizeof(uint4) * kPlaces * threads;
    allow_shared_memory(kernel, bytes);
    kernel<<<parts, threads, bytes, stream>>>(p);
    launch_check();
}

template <class T, int kColumns, bool kWarpRow, int kRows>
void launch_layernorm_backward(const LayernormBackward<T>& p, int parts, cudaStream_t stream) {
    const int threads = kWarpRow ? kLayernormThreads : layernorm_block(p.C, kColumns);
    if constexpr (!kWarpRow && kColumns == 8) {
        if (p.vector) return launch_layernorm_backward_block<T, kColumns, kRows>(p, parts, stream);
    } else if (p.vector) {
        layernorm_backward_kernel<T, kColumns, kWarpRow, kRows, true>
            <<<parts, threads, 0, stream>>>(p);
        return launch_check();
    }
    layernorm_backward_kernel<T, kColumns, kWarpRow, kRows, false>
        <<<parts, threads, 0, stream>>>(p);
    launch_check();
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
    constexpr int kBlockRows = sizeof(floatX) == 2 ? 4 : 2;
    if (C <= 8 * kWarpSize) {
        launch_layernorm_backward<floatX, 8, true, 1>(p, parts, stream);
    } else if (C <= 24 * kWarpSize) {
        launch_layernorm_backward<floatX, 24, true, 1>(p, parts, stream);
    } else if (C <= 8 * kLayernormMaxBlock) {
        launch_layernorm_backward<floatX, 8, false, kBlockRows>(p, parts, stream);
    } else {
        launch_layernorm_backward<floatX, 32, false, 1>(p, parts, stream);
    }
    const int columns = (dinp_sum != nullptr ? 3 : 2) * C;
    launch_second_kernel(layernorm_add_parts_kernel<gradX>, ceil_div(columns, kPartColumns),
                         kPartColumns * kPartStretches, stream, dweight, dbias, dinp_sum, partial,
                         parts, C, accumulate);
    launch_check();
}

}  // namespace llmc
