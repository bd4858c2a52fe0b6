// Causal attention's forward pass: attention_tiles.cuh says how, and what bounds it.
#pragma once

#include "llmc/attention_tiles.cuh"

namespace llmc {

namespace attention_detail {

// ------------------------------------------------------------------------------------------------
// Kernel

// The softmax of rows whose scores come tile by tile (Milakov and Gimelshein 2018): turns scores
// into exp(score - largest so far) and corrects earlier sums when the largest grows. `total` is the
// lane's part of its rows' sums. exp is taken as a power of 2 with log2(e) in the scale.
template <int M, int N, int K>
__device__ void softmax_step(float (&scores)[M][N][4], float (&sums)[M][K][4],
                             float (&largest)[M][2], float (&total)[M][2], float scale) {
    const float log2_scale = scale * kLog2e;
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float now = -INFINITY;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                now = fmaxf(now, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
            }
            now = fmaxf(largest[m][half], largest_of_row(now));
            const float correction = approximate_exp2((largest[m][half] - now) * log2_scale);
            largest[m][half] = now;
            float sum = total[m][half] * correction;
#pragma unroll
            for (int n = 0; n < N; ++n) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float& score = scores[m][n][2 * half + j];
                    score = approximate_exp2(fmaf(score, log2_scale, -now * log2_scale));
                    sum += score;
                }
            }
            total[m][half] = sum;
#pragma unroll
            for (int k = 0; k < K; ++k) {
                sums[m][k][2 * half] *= correction;
                sums[m][k][2 * half + 1] *= correction;
            }
        }
    }
}

// out and lse of kRows queries.
template <class T, int D, bool kWide>
__global__ void __launch_bounds__(Tiles<T, D, kWide, Pass::kForward>::kThreads,
                                  Tiles<T, D, kWide, Pass::kForward>::kBlocksPerProcessor)
    attention_forward_kernel(T* out, float* lse, const T* qkv, HeadShape shape) {
    using Sizes = Tiles<T, D, kWide, Pass::kForward>;
    constexpr int M = Sizes::kRowTiles, N = Sizes::kColumns / 8;
    constexpr int kStride = Sizes::kStride, kColumns = Sizes::kColumns;
    extern __shared__ __align__(16) unsigned char shared_memory[];
    T* queries = reinterpret_cast<T*>(shared_memory);
    T* stages = queries + Sizes::kOwned;  // of a tile of keys and one of values

    const Place place = block_place<Sizes::kRows>(shape.T, true);
    const size_t C = shape.channels();
    const T* q = qkv + shape.in_qkv(place.head);
    const int warp_first = place.first + warp_index() * Sizes::kWarpRows;
    const T* warp_queries = queries + warp_index() * Sizes::kWarpRows * kStride;
    const int tiles = (min(shape.T, place.first + Sizes::kRows) + kColumns - 1) / kColumns;
    const auto fetch = [&](int tile) {
        T* keys = stages + tile % 2 * Sizes::kStage;
        copy_tile<T, D, Sizes, kColumns>(keys, q + C, 3 * C, tile * kColumns, shape);
        copy_tile<T, D, Sizes, kColumns>(keys + Sizes::kStreamed, q + 2 * C, 3 * C, tile * kColumns,
                                         shape);
    };
    copy_tile<T, D, Sizes, Sizes::kRows>(queries, q, 3 * C, place.first, shape);
    fetch(0);

    float scores[M][N][4], sums[M][D / 8][4], largest[M][2], total[M][2];
    clear(sums);
#pragma unroll
    for (int m = 0; m < M; ++m) {
        largest[m][0] = largest[m][1] = -INFINITY;
        total[m][0] = total[m][1] = 0.0f;
    }
    for (int tile = 0; tile < tiles; ++tile) {
        device::wait_for_copies();
        __syncthreads();  // this tile is there, and nobody reads the other stage any more
        if (tile + 1 < tiles) fetch(tile + 1);
        const int first_key = tile * kColumns;
        if (first_key >= warp_first + Sizes::kWarpRows) continue;  // no query of the warp sees it

        const T* keys = stages + tile % 2 * Sizes::kStage;
        product_transposed<D, kStride>(scores, warp_queries, keys);
        if (first_key + kColumns - 1 > warp_first) {
            hide_later_keys<false>(scores, warp_first - first_key);
        }
        softmax_step(scores, sums, largest, total, shape.scale);
        product_add<D, kStride>(sums, scores, keys + Sizes::kStreamed);
    }

    float factor[M][2];
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = sum_of_row(total[m][half]);
            factor[m][half] = 1.0f / sum;
            const int row = warp_first + fragment_row(m, 2 * half);
            if (lane_index() % 4 == 0 && row < shape.T) {
                lse[shape.in_lse(place.head) + row] = largest[m][half] * shape.scale + logf(sum);
            }
        }
    }
    store_rows<kWide>(out + shape.in_out(place.head), C, sums, factor, warp_first, shape);
}

// ------------------------------------------------------------------------------------------------
// Launchers

template <class T, int D, bool kWide>
void forward_padded(T* out, float* lse, const T* qkv, int B, const HeadShape& shape,
                    cudaStream_t stream) {
    using Sizes = Tiles<T, D, kWide, Pass::kForward>;
    const size_t bytes = (Sizes::kOwned + 2 * Sizes::kStage) * sizeof(T);
    launch_blocks<Sizes>(attention_forward_kernel<T, D, kWide>, "attention_forward", bytes, B,
                         shape, stream, out, lse, qkv, shape);
}

}  // namespace attention_detail

// Our own kernel, for every head size up to 256 and both types; arguments as below. Buffers start
// at multiples of 16 bytes.
template <class X>
void own_attention_forward(X* out, float* lse, const X* qkv, int B, int T, int C, int NH,
                           cudaStream_t stream) {
    const auto shape = attention_detail::checked_shape("attention_forward", B, T, C, NH);
    attention_detail::with_padded_head<X>(shape.HS, [&](auto padded, auto wide) {
        attention_detail::forward_padded<X, padded.value, wide.value>(out, lse, qkv, B, shape,
                                                                      stream);
    });
}

// Our own kernels need none.
LLMC_LAUNCHER size_t attention_forward_scratch_bytes(int B, int T, int C, int NH) {
#ifdef LLMC_CUDNN
    if (attention_detail::cudnn_takes(T, C / NH)) {
        return cudnn_attention_forward_workspace_bytes(B, T, NH, C / NH);
    }
#endif
    (void)B, (void)T, (void)C, (void)NH;
    return 0;
}

// out (B,T,C), lse (B,NH,T), qkv (B,T,3C); see launchers.h. Products and sums in fp32, probabilities
// rounded to floatX as factors of the second product, one rounding of the result.
LLMC_LAUNCHER void attention_forward(floatX* out, float* lse, const floatX* qkv, void* scratch,
                                     int B, int T, int C, int NH, cudaStream_t stream) {
    (void)scratch;
    const LauncherRange range("attention_forward", {{"B", B}, {"T", T}, {"C", C}, {"NH", NH}},
                              attention_detail::least_bytes(B, T, C, NH, 4),
                              attention_detail::causal_flops(B, T, C, 2));
#ifdef LLMC_CUDNN
    const auto shape = attention_detail::checked_shape("attention_forward", B, T, C, NH);
    if constexpr (std::is_same_v<floatX, bf16>) {
        if (attention_detail::cudnn_takes(T, shape.HS)) {
            return cudnn_attention_forward(out, lse, qkv, scratch, B, T, NH, shape.HS, stream);
        }
    }
#endif
    own_attention_forward(out, lse, qkv, B, T, C, NH, stream);
}

}  // namespace llmc
