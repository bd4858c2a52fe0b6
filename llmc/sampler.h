// Draws the next token from a row of logits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "llmc/error.h"
#include "llmc/portable_math.h"
#include "llmc/rng.h"

namespace llmc {

// Logits of which none is a number.
struct NothingToSample : Error {
    using Error::Error;
};

// The token i with sum(p[0:i]) <= u < sum(p[0:i+1]), p = softmax(logits[0:V]), 0 < u < 1. In
// double, in index order and with an exp of our own, so that a machine's libm does not choose the
// text. A logit that is NaN has probability 0, an infinite one 1; NothingToSample when nothing is left
// to choose from.
inline int sample_token(const float* logits, int V, double u) {
    int best = -1;
    for (int i = 0; i < V; ++i) {
        if (!std::isnan(logits[i]) && (best < 0 || logits[i] > logits[best])) best = i;
    }
    if (best < 0 || logits[best] == -HUGE_VALF) {
        throw NothingToSample(format("sampling: none of the %d logits is a finite number", V));
    }
    if (logits[best] == HUGE_VALF) return best;

    const double largest = static_cast<double>(logits[best]);
    const auto weight = [&](int i) {
        if (std::isnan(logits[i])) return 0.0;
        return portable::exp(portable::add(static_cast<double>(logits[i]), -largest));
    };
    double sum = 0.0;
    for (int i = 0; i < V; ++i) sum = portable::add(sum, weight(i));
    const double threshold = portable::mul(u, sum);
    double running = 0.0;
    for (int i = 0; i < V; ++i) {
        running = portable::add(running, weight(i));
        if (running > threshold) return i;
    }
    return best;
}

// The same with the uniform number of (seed, step, position): the text sampled at a step depends on
// neither what was sampled before nor the rank that does it.
inline int sample_token(const float* logits, int V, uint64_t seed, uint32_t step,
                        uint64_t position) {
    return sample_token(logits, V, random_uniform(seed, RandomPurpose::kSampling, step, position));
}

// Positions that the forward pass over `used` tokens of a sample computes: a multiple of 32, so that
// few shapes occur, but no more than T.
constexpr int kSampleStep = 32;
inline int padded_sample_length(int used, int T) {
    return std::min((used + kSampleStep - 1) / kSampleStep * kSampleStep, T);
}

}  // namespace llmc
