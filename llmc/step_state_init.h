// StepState at the start of a run.
#pragma once

#include <limits>

#include "llmc/step_state.h"

namespace llmc {

// Checkpoints save the bytes, so there must be none that nobody sets.
static_assert(sizeof(OutlierWindow) ==
                  (OutlierWindow::kSize + 2) * sizeof(double) + 2 * sizeof(int),
              "OutlierWindow has padding");
static_assert(sizeof(StepState) == 2 * sizeof(OutlierWindow) + 7 * sizeof(double) + 8,
              "StepState has padding");

// No updates yet (beta powers 1), empty windows, z-scores NaN.
inline StepState initial_step_state() {
    StepState state{};
    state.beta1_power = 1.0;
    state.beta2_power = 1.0;
    state.loss_z = std::numeric_limits<double>::quiet_NaN();
    state.norm_z = std::numeric_limits<double>::quiet_NaN();
    state.grad_scale = 1.0f;
    state.skip = SkipReason::none;
    return state;
}

}  // namespace llmc
