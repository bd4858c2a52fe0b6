// Token and position embedding. Bound by memory: every element is read and written once, the
// backward pass reads dout twice.
#pragma once

#include <algorithm>
#include <cstddef>

#include "llmc/cpu/parallel.h"
#include "llmc/cpu/shapes.h"
#include "llmc/precision.h"

namespace llmc::cpu {

constexpr size_t kEncoderChannels = 256;  // channels that one block sums beside each other
constexpr size_t kEncoderPlaces = 64;     // places in `order` that one block looks through

// out (B,seq,C) = wte[token] + wpe[t], rounded once. tokens (B,seq) are rows of wte.
template <class T>
void encoder_forward(T* out, const int* tokens, const T* wte, const T* wpe, int B, int seq, int C,
                     cudaStream_t stream) {
    require_positive("encoder_forward", {{"B", B}, {"T", seq}, {"C", C}});
    const size_t width = static_cast<size_t>(C), length = static_cast<size_t>(seq);
    const size_t rows = static_cast<size_t>(B) * length;
    enqueue(stream, [=] {
        parallel_for(rows, rows_per_block(width), [=](size_t begin, size_t end) {
            for (size_t row = begin; row < end; ++row) {
                const T* token = wte + static_cast<size_t>(tokens[row]) * width;
                const T* place = wpe + row % length * width;
                T* result = out + row * width;
                for (size_t c = 0; c < width; ++c) {
                    result[c] = store<T>(load(token[c]) + load(place[c]));
                }
            }
        });
    });
}

// sums[c] += row[c]
template <class T>
inline void add_row(accum_t<T>* sums, const T* row, size_t count) {
    for (size_t c = 0; c < count; ++c) sums[c] += load(row[c]);
}

// dwte: a block takes the tokens whose first place in `order` lies in its stretch, to their last
// place wherever that is, and one range of channels. A batch of one repeated token is thus still
// spread over the channels, and costs no more than any other.
template <class T, class G>
void encoder_backward_tokens(G* dwte, const T* dout, const int* tokens, const int* order,
                             size_t rows, size_t width) {
    const size_t channel_blocks = (width + kEncoderChannels - 1) / kEncoderChannels;
    const size_t stretches = (rows + kEncoderPlaces - 1) / kEncoderPlaces;
    parallel_for(stretches * channel_blocks, 1, [=](size_t block, size_t) {
        const size_t channel = block % channel_blocks * kEncoderChannels;
        const size_t count = std::min(kEncoderChannels, width - channel);
        const size_t begin = block / channel_blocks * kEncoderPlaces;
        const size_t end = std::min(rows, begin + kEncoderPlaces);
        for (size_t place = begin; place < end;) {
            const int token = tokens[order[place]];
            const bool first = place == 0 || tokens[order[place - 1]] != token;
            if (!first) {
                ++place;
                continue;
            }
            accum_t<T> sums[kEncoderChannels] = {};
            for (; place < rows && tokens[order[place]] == token; ++place) {
                add_row(sums, dout + static_cast<size_t>(order[place]) * width + channel, count);
            }
            G* gradient = dwte + static_cast<size_t>(token) * width + channel;
            for (size_t c = 0; c < count; ++c) {
                gradient[c] = store<G>(load(gradient[c]) + sums[c]);
            }
        }
    });
}

// dwpe: the sum over the batch, in order.
template <class T, class G>
void encoder_backward_positions(G* dwpe, const T* dout, size_t batch, size_t length, size_t width,
                                bool accumulate) {
    parallel_for(length, rows_per_block(batch * width), [=](size_t begin, size_t end) {
        for (size_t t = begin; t < end; ++t) {
            for (size_t channel = 0; channel < width; channel += kEncoderChannels) {
                const size_t count = std::min(kEncoderChannels, width - channel);
                accum_t<T> sums[kEncoderChannels] = {};
                for (size_t b = 0; b < batch; ++b) {
                    add_row(sums, dout + (b * length + t) * width + channel, count);
                }
                G* gradient = dwpe + t * width + channel;
                for (size_t c = 0; c < count; ++c) {
                    gradient[c] = store<G>(accumulate ? load(gradient[c]) + sums[c] : sums[c]);
                }
            }
        }
    });
}

// The CPU needs none.
inline size_t encoder_backward_scratch_bytes(int, int, int) {
    return 0;
}

// dwte[token] += the sum of its rows of dout (B,seq,C), in ascending order of position; dwpe[t] =
// the sum over the batch, or += with `accumulate`. order (B*seq) holds the positions sorted by
// token, ties ascending. Sums in fp32, one rounding into the gradient.
template <class T, class G>
void encoder_backward(G* dwte, G* dwpe, const T* dout, const int* tokens, const int* order,
                      void* scratch, int B, int seq, int C, bool accumulate, cudaStream_t stream) {
    require_positive("encoder_backward", {{"B", B}, {"T", seq}, {"C", C}});
    (void)scratch;
    const size_t batch = static_cast<size_t>(B), length = static_cast<size_t>(seq);
    const size_t width = static_cast<size_t>(C);
    enqueue(stream, [=] {
        encoder_backward_tokens(dwte, dout, tokens, order, batch * length, width);
        encoder_backward_positions(dwpe, dout, batch, length, width, accumulate);
    });
}

}  // namespace llmc::cpu
