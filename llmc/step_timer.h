// How fast steps are, and how long the rest will take.
#pragma once

#include <chrono>
#include <string>

#include "llmc/error.h"

namespace llmc {

// Speed of the steps so far, smoothed, the first one left out.
class StepTimer {
  public:
    // Milliseconds since the last call.
    double lap() {
        const auto now = std::chrono::steady_clock::now();
        const double ms = std::chrono::duration<double, std::milli>(now - last_).count();
        last_ = now;
        return ms;
    }
    void restart() { last_ = std::chrono::steady_clock::now(); }
    void add(double ms) {
        count_ += 1;
        if (count_ == 1) first_ = ms;
        if (count_ == 1) return;
        weight_ = 0.95 * weight_ + 0.05;
        sum_ = 0.95 * sum_ + 0.05 * ms;
    }
    double smoothed_ms() const { return weight_ > 0.0 ? sum_ / weight_ : first_; }

  private:
    std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
    int count_ = 0;
    double first_ = 0.0, sum_ = 0.0, weight_ = 0.0;
};

// Seconds as 42s, 3m07s or 2h15m.
inline std::string duration_text(double seconds) {
    const long s = static_cast<long>(seconds + 0.5);
    if (s < 60) return format("%lds", s);
    if (s < 3600) return format("%ldm%02lds", s / 60, s % 60);
    return format("%ldh%02ldm", s / 3600, s / 60 % 60);
}

}  // namespace llmc
