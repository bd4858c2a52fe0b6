// Token and position embedding.
//
// Bound by memory. Forward: a row of wte read and a row written for each position, wpe from the
// cache. Backward: dout read twice (once by token, once by position), a row of dwte read and
// written for each token that occurs. Of an H200's copy bandwidth (4.2 TB/s), in a graph, 87 and 90 % at
// 65536 x 768, where both together are 0.1 % of a micro-batch; backward 89 % at 32768 x 1024, 86 % at
// 16384 x 1600.
//
// dwte's sums go by token. The positions sorted by token are cut into pieces of 32, of 16 where they
// are few, so that the work is spread evenly whatever the tokens are. A token whose positions lie in
// one piece is finished there; one that crosses into others leaves a partial sum in scratch for each,
// and a second kernel adds these in order. Which sums are formed depends on the tokens and their
// number alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "llmc/cpu/shapes.h"
#include "llmc/cuda_utils.cuh"
#include "llmc/dependent_launch.cuh"
#include "llmc/nvtx_range.cuh"

namespace llmc {

// ============================================================================
// kernels

constexpr int kEncoderForwardThreads = 128;  // small blocks, as LayerNorm has them forward
constexpr int kEncoderForwardWarps = kEncoderForwardThreads / kWarpSize;
constexpr int kEncoderThreads = 64;  // backward; a warp takes a piece or a place
constexpr int kEncoderWarps = kEncoderThreads / kWarpSize;
constexpr int kMergeThreads = 256;
constexpr int kMergeWarps = kMergeThreads / kWarpSize;
// Places of a piece in the sorted order. A piece is a warp's: few positions would leave multiprocessors
// without one.
constexpr int kEncoderPiece = 32, kEncoderSmallPiece = 16;
constexpr size_t kEncoderFewRows = 16384;
constexpr int kEncoderBatch = 4;  // rows that a thread of the backward pass has in flight

// A warp for each position.
template <class T>
__global__ void __launch_bounds__(kEncoderForwardThreads)
    encoder_forward_kernel(T* out, const int* tokens, const T* wte, const T* wpe, size_t rows,
                           int length, int C, bool vector) {
    constexpr int kWidth = Packed128<T>::kSize;
    const size_t row = size_t{blockIdx.x} * kEncoderForwardWarps + threadIdx.x / kWarpSize;
    if (row >= rows) return;
    const T* token = wte + static_cast<size_t>(tokens[row]) * C;
    const T* place = wpe + row % length * C;
    T* result = out + row * C;
#pragma unroll 4
    for (int column = threadIdx.x % kWarpSize * kWidth; column < C; column += kWarpSize * kWidth) {
        float x[kWidth], y[kWidth];
        unpack(x, load_group(token + column, C - column, vector));
        unpack(y, load_group(place + column, C - column, vector));
#pragma unroll
        for (int k = 0; k < kWidth; ++k) x[k] += y[k];
        // Streamed, so that the rows of wte that come again stay in the cache.
        store_group_streaming(result + column, pack<T>(x), C - column, vector);
    }
}

// Where a run of one token lies in its piece, and so where its sum goes.
enum class RunSum {
    whole,  // into dwte
    head,   // the piece's first run, which has begun in an earlier piece
    tail,   // the piece's last run, which goes on in the next piece
};
// A run that fills its piece and is cut at both ends is a head, so that the merging kernel finds
// one tail, at the piece where the token begins, and heads after it.
__host__ __device__ inline RunSum run_sum(bool begins_here, bool ends_here) {
    if (!begins_here) return RunSum::head;
    return ends_here ? RunSum::whole : RunSum::tail;
}

// partial[piece]: C floats of the head, C floats of the tail.
__host__ __device__ inline size_t head_offset(size_t piece, int C) {
    return piece * 2 * C;
}
__host__ __device__ inline size_t tail_offset(size_t piece, int C) {
    return piece * 2 * C + C;
}

template <class T, class G>
struct EncoderBackward {
    G* dwte;
    G* dwpe;
    float* partial;  // (pieces, 2, C)
    const T* dout;
    const int* tokens;
    const int* order;
    size_t rows;  // batch * length
    int batch, length, C;
    bool accumulate;  // in dwpe; dwte always is added to: the LM head's gradient is there
    bool vector;
};

// The token at a place of the sorted order; -1 where there is none.
template <class T, class G>
__device__ inline int token_at(const EncoderBackward<T, G>& p, size_t place) {
    return place < p.rows ? p.tokens[p.order[place]] : -1;
}

template <class T, class G>
__device__ inline G* gradient_row(const EncoderBackward<T, G>& p, int token) {
    return p.dwte + static_cast<size_t>(token) * p.C;
}

// Loads kParts vectors from `from` on.
template <class G, int kParts>
__device__ inline void load_row(Packed128<G> (&row)[kParts], const G* from, int count,
                                bool vector) {
    constexpr int kWidth = Packed128<G>::kSize;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
        row[i] = load_group(from + i * kWidth, count - i * kWidth, vector);
    }
}
// Stores at `to` what `row` holds plus x, with one rounding.
template <class G, int kParts, int kCount>
__device__ inline void store_sum(G* to, const Packed128<G> (&row)[kParts], const float (&x)[kCount],
                                 int count, bool vector) {
    constexpr int kWidth = Packed128<G>::kSize;
    static_assert(kParts * kWidth == kCount, "the vectors must hold as much as x");
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
        float sum[kWidth];
        unpack(sum, row[i]);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) sum[k] += x[i * kWidth + k];
        store_group(to + i * kWidth, pack<G>(sum), count - i * kWidth, vector);
    }
}

// Sums by token of one piece, for a thread's group of channels from `column` on; by a whole warp. A run's row of
// dwte is loaded along with its rows of dout: one after the other, they took most of the time.
template <int kPiece, class T, class G>
__device__ inline void add_up_piece(const EncoderBackward<T, G>& p, unsigned piece, int column) {
    constexpr int kWidth = Packed128<T>::kSize;
    // Of the piece's places, and the tokens of these, the one before and the one after.
    __shared__ int positions[kEncoderWarps][kPiece], tokens[kEncoderWarps][kPiece + 2];
    int* position_of = positions[threadIdx.x / kWarpSize];
    int* token_of = tokens[threadIdx.x / kWarpSize];
    const size_t begin = size_t{piece} * kPiece;
    const int places = static_cast<int>(min(p.rows - begin, static_cast<size_t>(kPiece)));
    for (int i = threadIdx.x % kWarpSize; i < places + 2; i += kWarpSize) {
        // Before place 0 the unsigned number wraps round, where there is no token either.
        token_of[i] = token_at(p, begin + i - 1);
        if (i < places) position_of[i] = p.order[begin + i];
    }
    __syncwarp();

    const int count = p.C - column;
    if (count <= 0) return;
    float sum[kWidth] = {};
    bool begins_here = token_of[0] != token_of[1];
    for (int first = 0; first < places; first += kEncoderBatch) {
        Packed128<T> batch[kEncoderBatch];
        Packed128<G> old[kEncoderBatch][kWidth / Packed128<G>::kSize];  // of dwte, where runs end
#pragma unroll
        for (int j = 0; j < kEncoderBatch; ++j) {
            const int i = first + j;
            if (i >= places) continue;
            const size_t row = position_of[i];
            batch[j] = load_group(p.dout + row * p.C + column, count, p.vector);
            if (token_of[i + 1] != token_of[i + 2]) {
                load_row(old[j], gradient_row(p, token_of[i + 1]) + column, count, p.vector);
            }
        }
#pragma unroll
        for (int j = 0; j < kEncoderBatch; ++j) {
            const int i = first + j;
            if (i >= places) continue;
            float x[kWidth];
            unpack(x, batch[j]);
#pragma unroll
            for (int k = 0; k < kWidth; ++k) sum[k] += x[k];
            const int token = token_of[i + 1];
            const bool ends_here = token != token_of[i + 2];
            if (!ends_here && i + 1 < places) continue;
            switch (run_sum(begins_here, ends_here)) {
                case RunSum::whole:
                    store_sum(gradient_row(p, token) + column, old[j], sum, count, p.vector);
                    break;
                case RunSum::head:
                    store_floats(p.partial + head_offset(piece, p.C) + column, sum, count,
                                 p.vector);
                    break;
                case RunSum::tail:
                    store_floats(p.partial + tail_offset(piece, p.C) + column, sum, count,
                                 p.vector);
                    break;
            }
#pragma unroll
            for (int k = 0; k < kWidth; ++k) sum[k] = 0.0f;
            begins_here = true;
        }
    }
}

// The sum of place `t` of all sequences, in their order, for a thread's group of channels.
template <class T, class G>
__device__ inline void add_up_place(const EncoderBackward<T, G>& p, int t, int column) {
    constexpr int kWidth = Packed128<T>::kSize;
    const int count = p.C - column;
    if (count <= 0) return;
    float sum[kWidth] = {};
    for (int first = 0; first < p.batch; first += kEncoderBatch) {
        Packed128<T> packed[kEncoderBatch];
#pragma unroll
        for (int j = 0; j < kEncoderBatch; ++j) {
            const size_t row = static_cast<size_t>(first + j) * p.length + t;
            packed[j] =
                load_group(p.dout + row * p.C + column, first + j < p.batch ? count : 0, p.vector);
        }
#pragma unroll
        for (int j = 0; j < kEncoderBatch; ++j) {
            float x[kWidth];
            unpack(x, packed[j]);
#pragma unroll
            for (int k = 0; k < kWidth; ++k) sum[k] += x[k];
        }
    }
    G* gradient = p.dwpe + static_cast<size_t>(t) * p.C + column;
    if (p.accumulate) {
        add_floats(gradient, sum, count, p.vector);
    } else {
        store_floats(gradient, sum, count, p.vector);
    }
}

// Blocks (two places or pieces, range of channels). A warp has one place or piece and as many channels as its
// lanes hold: all work on one range before the next, so that what the places have read is in the cache when
// the pieces read it again. Places come first; they all take the same time.
template <int kPiece, class T, class G>
__global__ void __launch_bounds__(kEncoderThreads)
    encoder_backward_kernel(EncoderBackward<T, G> p, unsigned pieces) {
    let_next_kernel_start();
    const int lane = threadIdx.x % kWarpSize;
    const int column = (blockIdx.y * kWarpSize + lane) * Packed128<T>::kSize;
    const unsigned item = blockIdx.x * kEncoderWarps + threadIdx.x / kWarpSize, places = p.length;
    if (item < places) {
        add_up_place(p, item, column);
    } else if (item - places < pieces) {
        add_up_piece<kPiece>(p, item - places, column);
    }
}

// Channels that a thread of the merging kernel has; a warp has 32 times as many.
constexpr int kMergeWidth = 8;

// Terms of the run that begins in `piece` and goes on after it, a tail and the heads of the pieces that start
// with its token; 0 when there is none. For a whole warp.
template <int kPiece, class T, class G>
__device__ inline size_t terms_from(const EncoderBackward<T, G>& p, size_t piece) {
    const size_t begin = piece * kPiece, end = begin + kPiece;
    const int token = token_at(p, end - 1), next = token_at(p, end);
    const int before = token_at(p, begin - 1), first = token_at(p, begin);
    if (token < 0 || token != next || (token == first && token == before)) return 0;
    size_t terms = 1;
    for (unsigned votes = ~0u; votes == ~0u;) {
        const size_t place = (piece + terms + threadIdx.x % kWarpSize) * kPiece;
        votes = __ballot_sync(0xffffffffu, token_at(p, place) == token);
        terms += __popc(votes);
    }
    return terms;
}

// sum = terms first, first + step, ... of the run that begins in `piece`.
template <class T, class G>
__device__ inline void add_up_terms(float (&sum)[kMergeWidth], const EncoderBackward<T, G>& p,
                                    size_t piece, size_t terms, int first, int step, int column) {
#pragma unroll
    for (int k = 0; k < kMergeWidth; ++k) sum[k] = 0.0f;
#pragma unroll 4
    for (size_t i = first; i < terms; i += step) {
        const size_t offset = i == 0 ? tail_offset(piece, p.C) : head_offset(piece + i, p.C);
        float x[kMergeWidth];
        load_floats(x, p.partial + offset + column, p.C - column, p.vector);
#pragma unroll
        for (int k = 0; k < kMergeWidth; ++k) sum[k] += x[k];
    }
}

// Blocks (eight pieces, range of channels). Each warp has one piece and finishes the token whose run begins
// there and goes on in later pieces: it adds up to eight terms in order. Of more, warp w of the block adds
// terms w, w + 8, ..., and then the warps' sums are added in order.
template <int kPiece, class T, class G>
__global__ void __launch_bounds__(kMergeThreads)
    encoder_backward_merge_kernel(EncoderBackward<T, G> p) {
    __shared__ float sums[kMergeWarps][kMergeWidth][kWarpSize];
    __shared__ size_t terms_of[kMergeWarps];
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int column = (blockIdx.y * kWarpSize + lane) * kMergeWidth, count = p.C - column;
    const size_t first_piece = size_t{blockIdx.x} * kMergeWarps, own_piece = first_piece + warp;
    const auto add_to_row = [&](size_t piece, const float(&sum)[kMergeWidth]) {
        const int token = token_at(p, piece * kPiece + kPiece - 1);
        add_floats(gradient_row(p, token) + column, sum, count, p.vector);
    };
    float sum[kMergeWidth];
    const size_t own_terms = terms_from<kPiece>(p, own_piece);  // reads tokens and order alone
    wait_for_first_kernel();                                    // which writes partial and dwte
    if (own_terms > 0 && own_terms <= kMergeWarps) {
        add_up_terms(sum, p, own_piece, own_terms, 0, 1, column);
        if (count > 0) add_to_row(own_piece, sum);
    }
    if (lane == 0) terms_of[warp] = own_terms;
    __syncthreads();
    for (int i = 0; i < kMergeWarps; ++i) {
        if (terms_of[i] <= kMergeWarps) continue;
        add_up_terms(sum, p, first_piece + i, terms_of[i], warp, kMergeWarps, column);
#pragma unroll
        for (int k = 0; k < kMergeWidth; ++k) sums[warp][k][lane] = sum[k];
        __syncthreads();
        if (warp == 0 && count > 0) {
            for (int w = 1; w < kMergeWarps; ++w) {
#pragma unroll
                for (int k = 0; k < kMergeWidth; ++k) sum[k] += sums[w][k][lane];
            }
            add_to_row(first_piece + i, sum);
        }
        __syncthreads();
    }
}

// ============================================================================
// launchers

// out (B,seq,C) = wte[token] + wpe[t], rounded once. tokens (B,seq) are rows of wte.
LLMC_LAUNCHER void encoder_forward(floatX* out, const int* tokens, const floatX* wte,
                                   const floatX* wpe, int B, int seq, int C, cudaStream_t stream) {
    cpu::require_positive("encoder_forward", {{"B", B}, {"T", seq}, {"C", C}});
    const size_t rows = static_cast<size_t>(B) * seq;
    // Each position's row of wte, although some are the same.
    const LauncherRange range(
        "encoder_forward", {{"B", B}, {"T", seq}, {"C", C}},
        bytes_of<floatX>(rows, C, 2) + bytes_of<floatX>(seq, C) + bytes_of<int>(rows));
    const bool vector = C % Packed128<floatX>::kSize == 0 && all_aligned(16, out, wte, wpe);
    const unsigned blocks = static_cast<unsigned>(ceil_div<size_t>(rows, kEncoderForwardWarps));
    encoder_forward_kernel<<<blocks, kEncoderForwardThreads, 0, stream>>>(out, tokens, wte, wpe,
                                                                          rows, seq, C, vector);
    launch_check();
}

inline bool has_few_rows(size_t rows) {
    return rows <= kEncoderFewRows;
}

template <int kPiece>
void launch_encoder_backward(const EncoderBackward<floatX, gradX>& p, cudaStream_t stream) {
    const unsigned pieces = static_cast<unsigned>(ceil_div<size_t>(p.rows, kPiece));
    const dim3 blocks(ceil_div<unsigned>(p.length + pieces, kEncoderWarps),
                      ceil_div(p.C, Packed128<floatX>::kSize * kWarpSize));
    encoder_backward_kernel<kPiece><<<blocks, kEncoderThreads, 0, stream>>>(p, pieces);
    launch_check();
    const dim3 merge_blocks(ceil_div<unsigned>(pieces, kMergeWarps),
                            ceil_div(p.C, kMergeWidth * kWarpSize));
    launch_second_kernel(encoder_backward_merge_kernel<kPiece, floatX, gradX>, merge_blocks,
                         kMergeThreads, stream, p);
    launch_check();
}

// Bytes of scratch for encoder_backward.
LLMC_LAUNCHER size_t encoder_backward_scratch_bytes(int B, int seq, int C) {
    cpu::require_positive("encoder_backward", {{"B", B}, {"T", seq}, {"C", C}});
    const size_t rows = static_cast<size_t>(B) * seq;
    const size_t piece = has_few_rows(rows) ? kEncoderSmallPiece : kEncoderPiece;
    return ceil_div(rows, piece) * 2 * C * sizeof(float);
}

// dwte[token] += the sum of its rows of dout (B,seq,C); dwpe[t] = the sum over the batch, or +=
// with `accumulate`. order (B*seq) holds the positions sorted by token, ties ascending. Sums in
// fp32, one rounding into the gradient; a token's sum is taken in stretches of the sorted order,
// each in ascending order of position.
LLMC_LAUNCHER void encoder_backward(gradX* dwte, gradX* dwpe, const floatX* dout, const int* tokens,
                                    const int* order, void* scratch, int B, int seq, int C,
                                    bool accumulate, cudaStream_t stream) {
    cpu::require_positive("encoder_backward", {{"B", B}, {"T", seq}, {"C", C}});
    const size_t rows = static_cast<size_t>(B) * seq;
    // Without dwte: how many of its rows are touched, the tokens decide.
    const LauncherRange range("encoder_backward", {{"B", B}, {"T", seq}, {"C", C}},
                              bytes_of<floatX>(rows, C) + bytes_of<int>(rows, 2) +
                                  bytes_of<gradX>(seq, C, accumulate ? 2 : 1));
    const bool vector =
        C % 8 == 0 && all_aligned(16, dwte, dwpe, dout, static_cast<char*>(scratch));
    const EncoderBackward<floatX, gradX> p = {
        dwte,       dwpe,  static_cast<float*>(scratch), dout, tokens, order, rows, B, seq, C,
        accumulate, vector};
    if (has_few_rows(rows)) {
        launch_encoder_backward<kEncoderSmallPiece>(p, stream);
    } else {
        launch_encoder_backward<kEncoderPiece>(p, stream);
    }
}

}  // namespace llmc
