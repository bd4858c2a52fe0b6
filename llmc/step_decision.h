// What a step does with its loss and gradient norm: clip, skip, count. One function for the CPU's
// decide_step and the GPU's, in IEEE double without libm, so that both decide the same.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>

#include "llmc/portable_math.h"
#include "llmc/step_state.h"

namespace llmc {

// Sum of `count` values in index order.
__host__ __device__ inline double sum_in_order(const double* values, size_t count) {
    double sum = 0.0;
    for (size_t i = 0; i < count; ++i) sum = portable::add(sum, values[i]);
    return sum;
}

__host__ __device__ inline bool is_finite(double x) {
    return portable::add(x, -x) == 0.0;
}

// Takes `value` into the window and returns its z-score, (value - mean) / std over the window with
// it; NaN while the window had room, and for a value that is not finite, which stays out. Equal
// values give 0.
__host__ __device__ inline double window_z_score(OutlierWindow& window, double value) {
    constexpr int kSize = OutlierWindow::kSize;
    if (!is_finite(value)) return static_cast<double>(NAN);
    const bool full = window.count == kSize;
    if (full) {
        window.values[window.next] = value;
        window.next = (window.next + 1) % kSize;
    } else {
        window.values[window.count] = value;
        window.count += 1;
    }
    // Summed anew each time: adding the newest and subtracting the oldest would keep the rounding
    // error of one huge value for ever after it has left.
    double sum = 0.0, sum_of_squares = 0.0;
    for (int i = 0; i < window.count; ++i) {
        sum = portable::add(sum, window.values[i]);
        sum_of_squares =
            portable::add(sum_of_squares, portable::mul(window.values[i], window.values[i]));
    }
    window.sum = sum;
    window.sum_of_squares = sum_of_squares;
    if (!full) return static_cast<double>(NAN);
    const double mean = sum / kSize;
    const double variance = portable::add(sum_of_squares / kSize, -portable::mul(mean, mean));
    if (!(variance > 0.0)) return 0.0;
    return portable::add(value, -mean) / std::sqrt(variance);
}

// Decides the step in `state` from its loss and the norm of its gradient.
//
// The step is skipped when either is not finite, or when a z-score exceeds its rule (a rule of 0 is
// off). A skipped step counts no update and leaves the beta powers alone. An outlier stays in its
// window, so that a lasting change of level ends being one.
__host__ __device__ inline void decide(StepState& state, double loss, double norm,
                                       const StepRules& rules) {
    state.loss = loss;
    state.norm = norm;
    state.loss_z = window_z_score(state.loss_window, loss);
    state.norm_z = window_z_score(state.norm_window, norm);

    state.skip = SkipReason::none;
    if (!is_finite(loss) || !is_finite(norm)) {
        state.skip = SkipReason::not_finite;
    } else if (rules.skip_loss_z > 0.0 && state.loss_z > rules.skip_loss_z) {
        state.skip = SkipReason::loss_outlier;
    } else if (rules.skip_norm_z > 0.0 && state.norm_z > rules.skip_norm_z) {
        state.skip = SkipReason::norm_outlier;
    }

    // The quotient is taken in double: fp32 division is not IEEE under every nvcc flag.
    const double max_norm = rules.max_norm;
    state.grad_scale = norm > max_norm ? static_cast<float>(max_norm / norm) : 1.0f;

    if (state.skip == SkipReason::none) {
        state.updates += 1;
        state.beta1_power = portable::mul(state.beta1_power, rules.beta1);
        state.beta2_power = portable::mul(state.beta2_power, rules.beta2);
    }
}

}  // namespace llmc
