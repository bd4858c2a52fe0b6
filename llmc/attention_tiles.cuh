// What the two halves of causal attention (attention_forward.cuh, attention_backward.cuh) have in
// common: no (T,T) matrix in memory (Dao 2023, FlashAttention-2); cuDNN does it instead where it was
// built in and can, and attention_hopper.cuh a backward pass on Hopper.
//
// A block owns some rows of one head and streams the other side past them, tile by tile, through two
// stages of shared memory: forward and the gradient of q own queries and stream keys and values, the
// gradient of k and v owns keys and values and streams queries and dout. Each warp works on its own
// rows alone, and a row's sums are added up by one warp in the order of the tiles: no atomics, and
// bits that depend on the shape alone. The price is 7 products instead of 5 in the backward pass.
//
// Bound by products: 2 T^2 HS FLOP a head forward (4, halved by the mask) and 7 T^2 HS backward;
// memory traffic is a hundredth of that time at T 1024. In bf16 they run on the tensor cores through
// mma.sync, whose own limit is shared memory's bandwidth: a warp reads 256 bytes of a tile for every
// 16 x 8 x 16 product, 128 where it owns 32 rows (forward, HS <= 64). In fp32 they are plain FMAs.
#pragma once

#include <climits>
#include <cmath>
#include <cstddef>
#include <type_traits>

#include "llmc/cuda_common.h"
#include "llmc/cuda_utils.cuh"
#include "llmc/mma.cuh"
#include "llmc/nvtx_range.cuh"
#include "llmc/precision.h"

#ifdef LLMC_CUDNN
#include "llmc/cudnn_att.h"
#endif

namespace llmc {

namespace attention_detail {

// Of one launch; the same for every block.
struct HeadShape {
    int T, NH, HS;
    float scale;  // 1 / sqrt(HS)

    __host__ __device__ size_t channels() const { return static_cast<size_t>(NH) * HS; }
    // Places of one head's first element, in (B,T,C), in (B,T,3,NH,HS) and in (B,NH,T).
    __device__ size_t in_out(size_t head) const {
        return head / NH * T * channels() + head % NH * HS;
    }
    __device__ size_t in_qkv(size_t head) const {
        return head / NH * T * 3 * channels() + head % NH * HS;
    }
    __device__ size_t in_lse(size_t head) const { return head * T; }
};

enum class Pass { kForward, kBackward };

// Sizes of tiles for heads padded to D elements of type T. Chosen so that a block stays below the 99
// KiB that every GPU since sm_80 gives it, and a thread below 255 registers.
template <class T, int D, bool kWideCopies, Pass kPass>
struct Tiles {
    static constexpr bool kWide = kWideCopies;
    static constexpr int kRowBytes = D * static_cast<int>(sizeof(T));
    static constexpr bool kBackward = kPass == Pass::kBackward;
    static constexpr int kWarps = kRowBytes > (kBackward ? 256 : 512) ? 2 : 4;
    static constexpr int kThreads = kWarpSize * kWarps;
    // Rows that a warp owns, in sixteens.
    static constexpr int kRowTiles = !kBackward && kRowBytes <= 128 ? 2 : 1;
    static constexpr int kWarpRows = 16 * kRowTiles;
    static constexpr int kRows = kWarps * kWarpRows;
    // Rows of a streamed tile, which are columns of the scores.
    static constexpr int kColumns = kRowBytes <= (kBackward ? 128 : 256)    ? 64
                                    : kRowBytes <= 256                      ? 32
                                    : kRowBytes <= (kBackward ? 512 : 1024) ? 16
                                                                            : 8;
    static constexpr int kBlocksPerProcessor = kRowBytes > 128 ? 1 : kBackward ? 3 : 2;
    // 16 bytes more than a row has: then rows start in different banks.
    static constexpr int kStride = D + 16 / static_cast<int>(sizeof(T));
    static constexpr int kOwned = kRows * kStride;        // elements of an owned tile
    static constexpr int kStreamed = kColumns * kStride;  // and of a streamed one
    // A stage: two streamed tiles, and backward two vectors of floats.
    static constexpr int kStage =
        2 * kStreamed + (kBackward ? 2 * kColumns * 4 / static_cast<int>(sizeof(T)) : 0);
    static_assert(kRows % kColumns == 0, "a block's first row begins a streamed tile");
};

// ------------------------------------------------------------------------------------------------
// Kernels

__device__ inline int lane_index() {
    return static_cast<int>(threadIdx.x) % kWarpSize;
}
__device__ inline int warp_index() {
    return static_cast<int>(threadIdx.x) / kWarpSize;
}

// The four lanes that hold parts of one row of a fragment are neighbours.
__device__ inline float sum_of_row(float value) {
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
}
__device__ inline float largest_of_row(float value) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
    return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

// Starts copying rows first ... first+kRows-1 of a head, `stride` elements apart in memory, into a
// tile; what lies beyond T rows or HS columns becomes 0.
template <class T, int D, class Sizes, int kRows>
__device__ void copy_tile(T* tile, const T* from, size_t stride, int first,
                          const HeadShape& shape) {
    if constexpr (Sizes::kWide) {
        // A thread copies the same 16 bytes of every kStep-th row.
        constexpr int kWidth = 16 / static_cast<int>(sizeof(T));
        constexpr int kStep = Sizes::kThreads * kWidth / D;
        static_assert(Sizes::kThreads % (D / kWidth) == 0 && kRows % kStep == 0,
                      "a thread keeps its columns, and all have the same number of rows");
        const int row = threadIdx.x / (D / kWidth), column = threadIdx.x % (D / kWidth) * kWidth;
        const int rows = column < shape.HS ? shape.T - first - row : 0;
        const T* source = from + (first + row) * stride + column;
        T* to = tile + row * Sizes::kStride + column;
#pragma unroll
        for (int i = 0; i < kRows; i += kStep) {
            device::copy_async<16>(to + i * Sizes::kStride, source, i < rows);
            source += kStep * stride;
        }
    } else {
        for (int i = threadIdx.x; i < kRows * D; i += Sizes::kThreads) {
            const int row = i / D, column = i % D;
            const bool valid = first + row < shape.T && column < shape.HS;
            tile[row * Sizes::kStride + column] =
                valid ? from[(first + row) * stride + column] : narrow<T>(0.0f);
        }
    }
}

// Likewise kCount floats of a (T) vector.
template <int kCount>
__device__ void copy_vector(float* to, const float* from, int first, const HeadShape& shape) {
    if (static_cast<int>(threadIdx.x) < kCount) {
        const int i = first + static_cast<int>(threadIdx.x);
        device::copy_async<4>(to + threadIdx.x, i < shape.T ? from + i : from, i < shape.T);
    }
}

// c = rows (16 M,D) * tile (8 N,D)^T, for one warp.
template <int D, int kStride, int M, int N>
__device__ void product_transposed(float (&c)[M][N][4], const bf16* rows, const bf16* tile) {
    static_assert(N % 2 == 0, "tiles are taken in pairs");
    const int lane = lane_index();
    const bf16* a_row = rows + lane % 16 * kStride + lane / 16 * 8;
    const bf16* b_row = tile + (lane % 8 + lane / 16 * 8) * kStride + lane / 8 % 2 * 8;
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0.0f;
        }
    }
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        uint32_t a[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m) device::load_matrices(a[m], a_row + m * 16 * kStride + k);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t b[4];
            device::load_matrices(b, b_row + n * 8 * kStride + k);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                device::multiply_add(c[m][n], a[m], b[0], b[1]);
                device::multiply_add(c[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// c (16 M,D) += p (16 M,8 N) * tile (8 N,D), for one warp. p is rounded to bf16: two neighbours of a
// product's result are laid out as the left factor of the next.
template <int D, int kStride, int M, int N>
__device__ void product_add(float (&c)[M][D / 8][4], const float (&p)[M][N][4], const bf16* tile) {
    static_assert(N % 2 == 0, "tiles are taken in pairs");
    const int lane = lane_index();
    const bf16* b_row = tile + lane % 16 * kStride + lane / 16 * 8;
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        uint32_t a[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m) {
            a[m][0] = two_halves(p[m][n][0], p[m][n][1]);
            a[m][1] = two_halves(p[m][n][2], p[m][n][3]);
            a[m][2] = two_halves(p[m][n + 1][0], p[m][n + 1][1]);
            a[m][3] = two_halves(p[m][n + 1][2], p[m][n + 1][3]);
        }
#pragma unroll
        for (int d = 0; d < D / 8; d += 2) {
            uint32_t b[4];
            device::load_matrices_transposed(b, b_row + n * 8 * kStride + d * 8);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                device::multiply_add(c[m][d], a[m], b[0], b[1]);
                device::multiply_add(c[m][d + 1], a[m], b[2], b[3]);
            }
        }
    }
}

__device__ inline float dot4(float sum, const float4& a, const float4& b) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// Both products in fp32, with results laid out as above.
template <int D, int kStride, int M, int N>
__device__ void product_transposed(float (&c)[M][N][4], const float* rows, const float* tile) {
    const int lane = lane_index();
    const float* a_row = rows + lane / 4 * kStride;
    const float* b_row = tile + lane % 4 * 2 * kStride;
    const auto four = [](const float* p) { return *reinterpret_cast<const float4*>(p); };
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0.0f;
        }
    }
#pragma unroll 2
    for (int k = 0; k < D; k += 4) {
        float4 a[M][2];
#pragma unroll
        for (int m = 0; m < M; ++m) {
            a[m][0] = four(a_row + m * 16 * kStride + k);
            a[m][1] = four(a_row + (m * 16 + 8) * kStride + k);
        }
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const float4 b0 = four(b_row + n * 8 * kStride + k);
            const float4 b1 = four(b_row + (n * 8 + 1) * kStride + k);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                c[m][n][0] = dot4(c[m][n][0], a[m][0], b0);
                c[m][n][1] = dot4(c[m][n][1], a[m][0], b1);
                c[m][n][2] = dot4(c[m][n][2], a[m][1], b0);
                c[m][n][3] = dot4(c[m][n][3], a[m][1], b1);
            }
        }
    }
}

template <int D, int kStride, int M, int N>
__device__ void product_add(float (&c)[M][D / 8][4], const float (&p)[M][N][4], const float* tile) {
    const int lane = lane_index();
    const float* b_row = tile + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float a[M][2];
#pragma unroll
            for (int m = 0; m < M; ++m) {
                const int owner = lane / 4 * 4 + j / 2;
                a[m][0] = __shfl_sync(0xffffffffu, p[m][n][j % 2], owner);
                a[m][1] = __shfl_sync(0xffffffffu, p[m][n][j % 2 + 2], owner);
            }
#pragma unroll
            for (int d = 0; d < D / 8; ++d) {
                const float2 b =
                    *reinterpret_cast<const float2*>(b_row + (n * 8 + j) * kStride + d * 8);
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    c[m][d][0] = fmaf(a[m][0], b.x, c[m][d][0]);
                    c[m][d][1] = fmaf(a[m][0], b.y, c[m][d][1]);
                    c[m][d][2] = fmaf(a[m][1], b.x, c[m][d][2]);
                    c[m][d][3] = fmaf(a[m][1], b.y, c[m][d][3]);
                }
            }
        }
    }
}

template <int M, int N>
__device__ void clear(float (&c)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0.0f;
        }
    }
}

// Row and column of element i of fragment (m, n), counted from the warp's first.
__device__ inline int fragment_row(int m, int i) {
    return m * 16 + i / 2 * 8 + lane_index() / 4;
}
__device__ inline int fragment_column(int n, int i) {
    return n * 8 + lane_index() % 4 * 2 + i % 2;
}

// Two neighbours, at a multiple of their size together.
__device__ inline void store_pair(float* to, float first, float second) {
    *reinterpret_cast<float2*>(to) = {first, second};
}
__device__ inline void store_pair(bf16* to, float first, float second) {
    *reinterpret_cast<uint32_t*>(to) = two_halves(first, second);
}

// Writes c, each row times its factor, to rows from first_row on, `stride` elements apart.
template <bool kWide, class T, int M, int N>
__device__ void store_rows(T* to, size_t stride, const float (&c)[M][N][4],
                           const float (&factor)[M][2], int first_row, const HeadShape& shape) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + fragment_row(m, 2 * half);
            if (row >= shape.T) continue;
            T* place = to + row * stride + fragment_column(0, 0);
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const int column = fragment_column(n, 0);
                const float first = c[m][n][2 * half] * factor[m][half];
                const float second = c[m][n][2 * half + 1] * factor[m][half];
                if constexpr (kWide) {
                    if (column < shape.HS) store_pair(place + n * 8, first, second);
                } else {
                    if (column < shape.HS) place[n * 8] = narrow<T>(first);
                    if (column + 1 < shape.HS) place[n * 8 + 1] = narrow<T>(second);
                }
            }
        }
    }
}

// Hides scores of keys after their query from exp: where the column's index less the row's is above
// `limit`, or, when rows are keys, the row's less the column's.
template <bool kRowsAreKeys, int M, int N>
__device__ void hide_later_keys(float (&scores)[M][N][4], int limit) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int ahead = fragment_column(n, i) - fragment_row(m, i);
                if ((kRowsAreKeys ? -ahead : ahead) > limit) scores[m][n][i] = -INFINITY;
            }
        }
    }
}

// First row of the block's tile and number of its head. A head's tiles are neighbours, so that its
// keys and values stay in L2; those with the most work come first.
struct Place {
    size_t head;
    int first;
};
template <int kRows>
__device__ inline Place block_place(int T, bool last_tile_first) {
    const unsigned tiles = (T + kRows - 1) / kRows;
    const unsigned tile = blockIdx.x % tiles;
    return {blockIdx.x / tiles,
            static_cast<int>(last_tile_first ? tiles - 1 - tile : tile) * kRows};
}

// ------------------------------------------------------------------------------------------------
// Launchers

constexpr int kMaxHeadSize = 256;

inline HeadShape checked_shape(const char* launcher, int B, int T, int C, int NH) {
    if (B <= 0 || T <= 0 || C <= 0 || NH <= 0) {
        throw Error(
            format("%s: B %d, T %d, C %d and NH %d must all be positive", launcher, B, T, C, NH));
    }
    if (C % NH != 0) {
        throw Error(format("%s: C %d must be a multiple of NH %d", launcher, C, NH));
    }
    const int HS = C / NH;
    if (HS > kMaxHeadSize) {
        throw Error(
            format("%s: head size %d (C %d / NH %d) is above %d, the largest there is a "
                   "kernel for; use more heads",
                   launcher, HS, C, NH, kMaxHeadSize));
    }
    return {T, NH, HS, 1.0f / std::sqrt(static_cast<float>(HS))};
}

// Starts one block for every kRows rows of every head.
template <class Sizes, class... Parameters, class... Arguments>
void launch_blocks(void (*kernel)(Parameters...), const char* launcher, size_t shared_bytes, int B,
                   const HeadShape& shape, cudaStream_t stream, Arguments... arguments) {
    const size_t heads = static_cast<size_t>(B) * shape.NH;
    const size_t blocks = heads * ((shape.T + Sizes::kRows - 1) / Sizes::kRows);
    if (blocks > INT_MAX) {
        throw Error(format("%s: B %d, T %d and NH %d need %zu blocks, at most %d can be started",
                           launcher, B, shape.T, shape.NH, blocks, INT_MAX));
    }
    const cudaError_t granted = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (granted == cudaErrorInvalidValue) {
        cudaGetLastError();
        throw Error(
            format("%s: head size %d needs %zu bytes of shared memory a block, more than "
                   "this GPU has; use more heads",
                   launcher, shape.HS, shared_bytes));
    }
    cuda_check(granted);
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                    cudaSharedmemCarveoutMaxShared));
    kernel<<<static_cast<unsigned>(blocks), Sizes::kThreads, shared_bytes, stream>>>(arguments...);
    launch_check();
}

// Calls use(padded head size, whether rows are copied 16 bytes at a time) with the two as types of
// constants. Rows whose ends are not multiples of 16 bytes take a slow path, in fewer sizes.
template <class T, class Use>
void with_padded_head(int HS, Use&& use) {
    const bool wide = HS * sizeof(T) % 16 == 0;
    if (HS <= 64) {
        const std::integral_constant<int, 64> padded;
        wide ? use(padded, std::true_type()) : use(padded, std::false_type());
    } else if (HS <= 128 && wide) {
        use(std::integral_constant<int, 128>(), std::true_type());
    } else {
        const std::integral_constant<int, kMaxHeadSize> padded;
        wide ? use(padded, std::true_type()) : use(padded, std::false_type());
    }
}

// A function of the build and the shape alone, so that all ranks choose alike. cuDNN's backward pass
// takes head sizes that are multiples of 8, up to 128 on every GPU since sm_80, and no T of 1.
inline bool cudnn_takes(int T, int HS) {
#ifdef LLMC_CUDNN
    return std::is_same_v<floatX, bf16> && T > 1 && HS % 8 == 0 && HS <= 128;
#else
    (void)T;
    (void)HS;
    return false;
#endif
}

// Of `tensors` tensors (B,T,C), and lse.
inline size_t least_bytes(int B, int T, int C, int NH, int tensors) {
    const size_t rows = static_cast<size_t>(B) * T;
    return bytes_of<floatX>(rows, C, tensors) + bytes_of<float>(rows, NH);
}

// Of `products` products of all heads: half of (T,T) each, since no position sees later ones.
inline double causal_flops(int B, int T, int C, int products) {
    return products * product_flops(static_cast<size_t>(B) * T, C, T) / 2.0;
}

}  // namespace attention_detail

}  // namespace llmc
