// What a training step reads and decides in device memory, so that the host never has to wait for
// the one to launch the other.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace llmc {

// Written by the host before a step, copied to the device with the step's tokens.
struct StepInputs {
    uint32_t step = 0;  // keys stochastic rounding
    float learning_rate = 0.0f;
};

// The last kSize values of a series, and their sums as of the newest one; z-scores are taken against it.
struct OutlierWindow {
    static constexpr int kSize = 128;
    double values[kSize];
    double sum;
    double sum_of_squares;
    int count;  // values held, up to kSize
    int next;   // place of the next value once the window is full
};

enum class SkipReason : int { none = 0, not_finite = 1, loss_outlier = 2, norm_outlier = 3 };

inline const char* skip_reason_text(SkipReason reason) {
    switch (reason) {
        case SkipReason::none:
            return "not skipped";
        case SkipReason::not_finite:
            return "loss or norm is not finite";
        case SkipReason::loss_outlier:
            return "the loss is an outlier (-sl)";
        case SkipReason::norm_outlier:
            return "the norm is an outlier (-sg)";
    }
    return "";
}

// Lives in device memory for the whole run. Checkpoints save it whole.
struct StepState {
    // Carried from step to step.
    double beta1_power;  // beta1^t after t updates: Adam's bias correction is 1 - beta1^t
    double beta2_power;
    uint64_t updates;  // t; a skipped step is not an update
    OutlierWindow loss_window;
    OutlierWindow norm_window;

    // Decided by decide_step for the step at hand.
    double loss;    // mean of the micro-batch losses
    double norm;    // of the whole gradient, before clipping
    double loss_z;  // NaN until the window is full
    double norm_z;
    float grad_scale;  // min(1, max_norm / norm)
    SkipReason skip;   // anything but none: weights and Adam's state stay as they are
};

struct StepRules {
    float max_norm = 1.0f;  // gradients are scaled down to this norm
    float beta1 = 0.9f;
    float beta2 = 0.95f;
    double skip_loss_z = 0.0;  // skip when the loss's z-score exceeds this; 0 never
    double skip_norm_z = 0.0;
};

struct AdamwOptions {
    float beta1 = 0.9f;
    float beta2 = 0.95f;
    float eps = 1e-8f;
    uint64_t seed = 0;
};

// A run of consecutive elements that one rank updates. Tables of these lie in device memory.
template <class T, class G>
struct AdamwSegment {
    T* param;
    float* master;  // fp32 copy of the weights, or null
    const G* grad;
    float* m;
    float* v;
    size_t count;
    uint64_t first_index;  // of the first element in the whole model
    float weight_decay;    // 0 for tensors without decay
};

// A chunk whose sum of squares is one term of the gradient norm.
template <class G>
struct NormChunk {
    const G* grad;
    size_t count;
};

// One range of the tree node out = a + b.
template <class G>
struct TreeRange {
    G* out;
    const G* a;
    const G* b;
    size_t count;
};

// One range of a copy.
template <class G>
struct CopyRange {
    G* to;
    const G* from;
    size_t count;
};

}  // namespace llmc
