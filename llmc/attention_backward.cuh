// Causal attention's backward pass: attention_tiles.cuh says how, and what bounds it.
#pragma once

#include "llmc/attention_hopper.cuh"
#include "llmc/attention_tiles.cuh"

namespace llmc {

namespace attention_detail {

// ------------------------------------------------------------------------------------------------
// Kernels

// For the lane's two rows of the warp's sixteen the sum over the head of dout * out: what the
// softmax's gradient subtracts (Dao et al. 2022, appendix B.2). Also into `to`, for the kernel of the
// keys.
template <class T, int D, bool kWide>
__device__ void weigh_rows(float (&weighted)[2], float* to, const T* dout, const T* out, int first,
                           const HeadShape& shape) {
    // Elements that a lane reads at once; the four lanes of a row take turns.
    constexpr int kWidth = kWide ? 16 / static_cast<int>(sizeof(T)) : 1;
    constexpr int kUnroll = kWide ? D / (4 * kWidth) : 4;
    struct alignas(kWidth * sizeof(T)) Part {
        T element[kWidth];
    };
    const int lane = lane_index();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first + fragment_row(0, 2 * half);
        float sum = 0.0f;
#pragma unroll kUnroll
        for (int c = 0; c < D; c += 4 * kWidth) {
            const int column = c + lane % 4 * kWidth;
            Part a{}, b{};
            if (row < shape.T && column < shape.HS) {
                const size_t place = row * shape.channels() + column;
                a = *reinterpret_cast<const Part*>(dout + place);
                b = *reinterpret_cast<const Part*>(out + place);
            }
#pragma unroll
            for (int i = 0; i < kWidth; ++i) {
                sum = fmaf(widen(a.element[i]), widen(b.element[i]), sum);
            }
        }
        weighted[half] = sum_of_row(sum);
        if (lane % 4 == 0 && row < shape.T) to[row] = weighted[half];
    }
}

// Gradient of kRows queries: with p the probabilities, ds = p * (dout v^T - weighted) and
// dq = ds k * scale.
template <class T, int D, bool kWide>
__global__ void __launch_bounds__(Tiles<T, D, kWide, Pass::kBackward>::kThreads,
                                  Tiles<T, D, kWide, Pass::kBackward>::kBlocksPerProcessor)
    attention_backward_queries_kernel(T* dqkv, float* weighted, const T* dout, const T* qkv,
                                      const T* out, const float* lse, HeadShape shape) {
    using Sizes = Tiles<T, D, kWide, Pass::kBackward>;
    constexpr int N = Sizes::kColumns / 8;
    constexpr int kStride = Sizes::kStride, kColumns = Sizes::kColumns;
    static_assert(Sizes::kRowTiles == 1, "one fragment of rows a warp");
    extern __shared__ __align__(16) unsigned char shared_memory[];
    T* queries = reinterpret_cast<T*>(shared_memory);
    T* douts = queries + Sizes::kOwned;
    T* stages = douts + Sizes::kOwned;  // of a tile of keys and one of values

    const Place place = block_place<Sizes::kRows>(shape.T, true);
    const size_t C = shape.channels(), in_out = shape.in_out(place.head);
    const T* q = qkv + shape.in_qkv(place.head);
    const int warp_offset = warp_index() * Sizes::kWarpRows;
    const int warp_first = place.first + warp_offset;
    const int tiles = (min(shape.T, place.first + Sizes::kRows) + kColumns - 1) / kColumns;
    const auto fetch = [&](int tile) {
        T* keys = stages + tile % 2 * Sizes::kStage;
        copy_tile<T, D, Sizes, kColumns>(keys, q + C, 3 * C, tile * kColumns, shape);
        copy_tile<T, D, Sizes, kColumns>(keys + Sizes::kStreamed, q + 2 * C, 3 * C, tile * kColumns,
                                         shape);
    };
    copy_tile<T, D, Sizes, Sizes::kRows>(queries, q, 3 * C, place.first, shape);
    copy_tile<T, D, Sizes, Sizes::kRows>(douts, dout + in_out, C, place.first, shape);
    fetch(0);

    const float log2_scale = shape.scale * kLog2e;
    float row_weighted[2], row_lse[2];  // lse in powers of 2
    weigh_rows<T, D, kWide>(row_weighted, weighted + shape.in_lse(place.head), dout + in_out,
                            out + in_out, warp_first, shape);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = warp_first + fragment_row(0, 2 * half);
        row_lse[half] = row < shape.T ? lse[shape.in_lse(place.head) + row] * kLog2e : 0.0f;
    }
    float scores[1][N][4], dscores[1][N][4], sums[1][D / 8][4];
    clear(sums);
    for (int tile = 0; tile < tiles; ++tile) {
        device::wait_for_copies();
        __syncthreads();  // this tile is there, and nobody reads the other stage any more
        if (tile + 1 < tiles) fetch(tile + 1);
        const int first_key = tile * kColumns;
        if (first_key >= warp_first + Sizes::kWarpRows) continue;  // no query of the warp sees it

        const T* keys = stages + tile % 2 * Sizes::kStage;
        product_transposed<D, kStride>(scores, queries + warp_offset * kStride, keys);
        product_transposed<D, kStride>(dscores, douts + warp_offset * kStride,
                                       keys + Sizes::kStreamed);
        if (first_key + kColumns - 1 > warp_first) {
            hide_later_keys<false>(scores, warp_first - first_key);
        }
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float p =
                    approximate_exp2(fmaf(scores[0][n][i], log2_scale, -row_lse[i / 2]));
                scores[0][n][i] = p * (dscores[0][n][i] - row_weighted[i / 2]);
            }
        }
        product_add<D, kStride>(sums, scores, keys);
    }
    const float factor[1][2] = {{shape.scale, shape.scale}};
    store_rows<kWide>(dqkv + shape.in_qkv(place.head), 3 * C, sums, factor, warp_first, shape);
}

// Gradients of kRows keys and values, or of one of both: dv = p^T dout, dk = ds^T q * scale.
template <class T, int D, bool kWide, bool kForKeys, bool kForValues>
__global__ void __launch_bounds__(Tiles<T, D, kWide, Pass::kBackward>::kThreads,
                                  Tiles<T, D, kWide, Pass::kBackward>::kBlocksPerProcessor)
    attention_backward_keys_kernel(T* dqkv, const T* dout, const T* qkv, const float* lse,
                                   const float* weighted, HeadShape shape) {
    using Sizes = Tiles<T, D, kWide, Pass::kBackward>;
    constexpr int N = Sizes::kColumns / 8;
    constexpr int kStride = Sizes::kStride, kColumns = Sizes::kColumns;
    static_assert(Sizes::kRowTiles == 1, "one fragment of rows a warp");
    extern __shared__ __align__(16) unsigned char shared_memory[];
    T* keys = reinterpret_cast<T*>(shared_memory);
    T* values = keys + Sizes::kOwned;
    // Of a tile of queries and one of dout, with their lse and weighted.
    T* stages = values + Sizes::kOwned;

    const Place place = block_place<Sizes::kRows>(shape.T, false);
    const size_t C = shape.channels(), in_qkv = shape.in_qkv(place.head);
    const size_t in_lse = shape.in_lse(place.head);
    const T* q = qkv + in_qkv;
    const int warp_offset = warp_index() * Sizes::kWarpRows;
    const int warp_first = place.first + warp_offset;
    const int tiles = (shape.T + kColumns - 1) / kColumns;
    const auto fetch = [&](int tile) {
        T* queries = stages + tile % 2 * Sizes::kStage;
        float* tile_lse = reinterpret_cast<float*>(queries + 2 * Sizes::kStreamed);
        copy_tile<T, D, Sizes, kColumns>(queries, q, 3 * C, tile * kColumns, shape);
        copy_tile<T, D, Sizes, kColumns>(
            queries + Sizes::kStreamed, dout + shape.in_out(place.head), C, tile * kColumns, shape);
        copy_vector<kColumns>(tile_lse, lse + in_lse, tile * kColumns, shape);
        copy_vector<kColumns>(tile_lse + kColumns, weighted + in_lse, tile * kColumns, shape);
    };
    copy_tile<T, D, Sizes, Sizes::kRows>(keys, q + C, 3 * C, place.first, shape);
    if constexpr (kForKeys) {
        copy_tile<T, D, Sizes, Sizes::kRows>(values, q + 2 * C, 3 * C, place.first, shape);
    }
    const int first_tile = place.first / kColumns;  // earlier queries see none of the keys
    fetch(first_tile);

    const float log2_scale = shape.scale * kLog2e;
    float scores[1][N][4], dscores[1][N][4], dk[1][D / 8][4], dv[1][D / 8][4];
    clear(dk);
    clear(dv);
    for (int tile = first_tile; tile < tiles; ++tile) {
        device::wait_for_copies();
        __syncthreads();  // this tile is there, and nobody reads the other stage any more
        if (tile + 1 < tiles) fetch(tile + 1);
        const int first_query = tile * kColumns;
        if (first_query + kColumns <= warp_first) continue;  // none sees a key of the warp

        const T* queries = stages + tile % 2 * Sizes::kStage;
        const T* douts = queries + Sizes::kStreamed;
        const float* tile_lse = reinterpret_cast<const float*>(douts + Sizes::kStreamed);
        product_transposed<D, kStride>(scores, keys + warp_offset * kStride, queries);
        if (first_query < warp_first + Sizes::kWarpRows - 1) {
            hide_later_keys<true>(scores, first_query - warp_first);
        }
        // Beyond T queries and dout are 0, and so is what they add.
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float query_lse = tile_lse[fragment_column(n, i)] * kLog2e;
                scores[0][n][i] = approximate_exp2(fmaf(scores[0][n][i], log2_scale, -query_lse));
            }
        }
        if constexpr (kForValues) product_add<D, kStride>(dv, scores, douts);
        if constexpr (kForKeys) {
            product_transposed<D, kStride>(dscores, values + warp_offset * kStride, douts);
#pragma unroll
            for (int n = 0; n < N; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float subtract = tile_lse[kColumns + fragment_column(n, i)];
                    scores[0][n][i] *= dscores[0][n][i] - subtract;
                }
            }
            product_add<D, kStride>(dk, scores, queries);
        }
    }
    const float scale[1][2] = {{shape.scale, shape.scale}}, one[1][2] = {{1.0f, 1.0f}};
    if (kForKeys) store_rows<kWide>(dqkv + in_qkv + C, 3 * C, dk, scale, warp_first, shape);
    if (kForValues) store_rows<kWide>(dqkv + in_qkv + 2 * C, 3 * C, dv, one, warp_first, shape);
}

// ------------------------------------------------------------------------------------------------
// Launchers

template <class T, int D, bool kWide>
void backward_padded(T* dqkv, const T* dout, const T* qkv, const T* out, const float* lse,
                     float* weighted, int B, const HeadShape& shape, cudaStream_t stream) {
    using Sizes = Tiles<T, D, kWide, Pass::kBackward>;
    const char* name = "attention_backward";
    const size_t bytes = (2 * Sizes::kOwned + 2 * Sizes::kStage) * sizeof(T);
    launch_blocks<Sizes>(attention_backward_queries_kernel<T, D, kWide>, name, bytes, B, shape,
                         stream, dqkv, weighted, dout, qkv, out, lse, shape);
    const float* for_keys = weighted;
    if constexpr (D <= 128) {
        launch_blocks<Sizes>(attention_backward_keys_kernel<T, D, kWide, true, true>, name, bytes,
                             B, shape, stream, dqkv, dout, qkv, lse, for_keys, shape);
    } else {
        // The sums of dk and dv of one warp together do not fit into its registers.
        launch_blocks<Sizes>(attention_backward_keys_kernel<T, D, kWide, true, false>, name, bytes,
                             B, shape, stream, dqkv, dout, qkv, lse, for_keys, shape);
        launch_blocks<Sizes>(attention_backward_keys_kernel<T, D, kWide, false, true>, name, bytes,
                             B, shape, stream, dqkv, dout, qkv, lse, for_keys, shape);
    }
}

}  // namespace attention_detail

// Our own kernels, as own_attention_forward. Scratch: one float for each row of each head.
inline size_t own_attention_backward_scratch_bytes(int B, int T, int, int NH) {
    return static_cast<size_t>(B) * T * NH * sizeof(float);
}

template <class X>
void own_attention_backward(X* dqkv, const X* dout, const X* qkv, const X* out, const float* lse,
                            void* scratch, int B, int T, int C, int NH, cudaStream_t stream) {
    const auto shape = attention_detail::checked_shape("attention_backward", B, T, C, NH);
    attention_detail::with_padded_head<X>(shape.HS, [&](auto padded, auto wide) {
        attention_detail::backward_padded<X, padded.value, wide.value>(
            dqkv, dout, qkv, out, lse, static_cast<float*>(scratch), B, shape, stream);
    });
}

LLMC_LAUNCHER std::string attention_backend(int T, int head_size) {
    const bool hopper = attention_hopper::takes<floatX>(T, head_size);
#ifdef LLMC_CUDNN
    if (attention_detail::cudnn_takes(T, head_size)) {
        return std::string(cudnn_name()) + (hopper ? ", backward own for Hopper" : "");
    }
#endif
    return hopper ? "own, backward for Hopper" : "own";
}

// cuDNN's deterministic backward pass is never part of a graph: captured, that of cuDNN 9.14 read outside of
// its memory on an H200 for heads of 16 and 32, and for heads of 64 at T 96. For others it was right, but
// nothing says for which.
LLMC_LAUNCHER bool attention_fits_graphs([[maybe_unused]] int T, [[maybe_unused]] int head_size) {
#ifdef LLMC_CUDNN
    if (attention_detail::cudnn_takes(T, head_size)) {
        return attention_hopper::takes<floatX>(T, head_size);
    }
#endif
    return true;
}

LLMC_LAUNCHER size_t attention_backward_scratch_bytes(int B, int T, int C, int NH) {
    if (attention_hopper::takes<floatX>(T, C / NH)) {
        return attention_hopper::scratch_bytes(B, T, NH);
    }
#ifdef LLMC_CUDNN
    if (attention_detail::cudnn_takes(T, C / NH)) {
        return cudnn_attention_backward_workspace_bytes(B, T, NH, C / NH);
    }
#endif
    return own_attention_backward_scratch_bytes(B, T, C, NH);
}

// dqkv (B,T,3C), overwriting, from dout (B,T,C) and what the forward pass read and wrote.
LLMC_LAUNCHER void attention_backward(floatX* dqkv, const floatX* dout, const floatX* qkv,
                                      const floatX* out, const float* lse, void* scratch, int B,
                                      int T, int C, int NH, cudaStream_t stream) {
    const LauncherRange range("attention_backward", {{"B", B}, {"T", T}, {"C", C}, {"NH", NH}},
                              attention_detail::least_bytes(B, T, C, NH, 8),
                              attention_detail::causal_flops(B, T, C, 5));
    const auto shape = attention_detail::checked_shape("attention_backward", B, T, C, NH);
    if (attention_hopper::takes<floatX>(T, shape.HS)) {
        return attention_hopper::backward(dqkv, dout, qkv, out, lse, scratch, B, T, NH, stream);
    }
#ifdef LLMC_CUDNN
    if constexpr (std::is_same_v<floatX, bf16>) {
        if (attention_detail::cudnn_takes(T, shape.HS)) {
            return cudnn_attention_backward(dqkv, dout, qkv, out, lse, scratch, B, T, NH, shape.HS,
                                            stream);
        }
    }
#endif
    own_attention_backward(dqkv, dout, qkv, out, lse, scratch, B, T, C, NH, stream);
}

}  // namespace llmc
