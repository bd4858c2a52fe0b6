// Learning rate by step.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include "llmc/error.h"
#include "llmc/portable_math.h"

namespace llmc {

enum class ScheduleType { cosine, linear, constant, wsd };

// The schedule of that name. Throws Error naming the valid ones.
inline ScheduleType parse_schedule(const std::string& name) {
    if (name == "cosine") return ScheduleType::cosine;
    if (name == "linear") return ScheduleType::linear;
    if (name == "constant") return ScheduleType::constant;
    if (name == "wsd") return ScheduleType::wsd;
    throw Error(format("learning rate schedule '%s': must be cosine, linear, constant or wsd",
                       name.c_str()));
}

// Linear warmup over the first `warmup_iterations` steps (the first has 1/warmup_iterations of the
// rate, the last all of it), then by `type`:
//   cosine    half a cosine, from the whole rate at the first step after the warmup to
//             final_learning_rate_frac of it at the last step (Loshchilov and Hutter 2017, eq. 5)
//   linear    a straight line between the same two points
//   constant  the whole rate
//   wsd       the whole rate, then over the last fifth of all steps (rounded down) from it to
//             final_learning_rate_frac of it by 1 - sqrt(progress) (Hägele et al. 2024, section 3)
// A descent that is one step long stays at the whole rate. Computed in double with portable
// functions: the same bits on every machine.
struct LearningRateScheduler {
    ScheduleType type = ScheduleType::cosine;
    float learning_rate = 3e-4f;
    int warmup_iterations = 0;
    int train_num_batches = 1;              // steps 0 ... train_num_batches-1
    float final_learning_rate_frac = 1.0f;  // of learning_rate, at the end

    // Rate of `step`, which counts from 0; past the last step, the last step's.
    float at(int step) const {
        const double rate = learning_rate;
        if (step < warmup_iterations) {
            return static_cast<float>(portable::mul(rate, step + 1.0) / warmup_iterations);
        }
        const int decay_start =
            type == ScheduleType::wsd
                ? std::max(warmup_iterations, train_num_batches - train_num_batches / 5)
                : warmup_iterations;
        const double p = progress(step, decay_start);
        switch (type) {
            case ScheduleType::cosine:
                return between(portable::mul(
                    0.5, portable::add(1.0, portable::sincos_turns(portable::mul(0.5, p)).cos)));
            case ScheduleType::linear:
                return between(portable::add(1.0, -p));
            case ScheduleType::wsd:
                return between(portable::add(1.0, -std::sqrt(p)));
            case ScheduleType::constant:
                break;
        }
        return learning_rate;
    }

  private:
    // 0 at `start` and before, 1 at the last step.
    double progress(int step, int start) const {
        const double length = static_cast<double>(train_num_batches) - 1.0 - start;
        if (step <= start || length <= 0.0) return 0.0;
        return std::min(1.0, (static_cast<double>(step) - start) / length);
    }
    // `share` of the way from the final rate up to the whole one.
    float between(double share) const {
        const double rate = learning_rate;
        const double final_rate = portable::mul(rate, final_learning_rate_frac);
        return static_cast<float>(
            portable::add(final_rate, portable::mul(share, portable::add(rate, -final_rate))));
    }
};

}  // namespace llmc
