// What both builds' launchers of the update check before they queue anything.
#pragma once

#include <cstddef>

#include "llmc/error.h"
#include "llmc/step_state.h"

namespace llmc {

// Throws Error for null pointers and options out of range.
inline void check_adamw_arguments(const AdamwOptions& options, const StepInputs* inputs,
                                  const StepState* state) {
    if (inputs == nullptr || state == nullptr) {
        throw Error("adamw_update: inputs or state is a null pointer");
    }
    const auto is_beta = [](float beta) { return beta >= 0.0f && beta < 1.0f; };
    if (!is_beta(options.beta1) || !is_beta(options.beta2) || !(options.eps > 0.0f)) {
        throw Error(
            format("adamw_update: beta1 %g, beta2 %g, eps %g: betas must be in [0, 1) and "
                   "eps positive",
                   static_cast<double>(options.beta1), static_cast<double>(options.beta2),
                   static_cast<double>(options.eps)));
    }
}

// Throws Error for empty or null inputs and for rules out of range.
inline void check_decide_arguments(const StepState* state, const double* losses, int num_losses,
                                   const double* sums, size_t num_sums, const StepRules& rules) {
    if (state == nullptr || losses == nullptr || sums == nullptr) {
        throw Error("decide_step: state, losses or sums is a null pointer");
    }
    if (num_losses < 1 || num_sums < 1) {
        throw Error(format("decide_step: %d losses and %zu sums, must be at least one of each",
                           num_losses, num_sums));
    }
    if (!(rules.max_norm > 0.0f)) {
        throw Error(format("decide_step: max_norm %g, must be positive",
                           static_cast<double>(rules.max_norm)));
    }
}

}  // namespace llmc
