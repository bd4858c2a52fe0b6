// SIGTERM, SIGINT, SIGHUP and SIGUSR1 ask the run to save itself and end after the step at hand; Slurm
// sends the first before it kills a job. A second SIGINT ends it at once.
#pragma once

#include <atomic>
#include <csignal>
#include <cstddef>

namespace llmc {

namespace detail {
// The handler may run on any thread; a lock-free atomic is what it may write.
inline std::atomic<int> stop_signal{0};
inline std::atomic<int> interrupts{0};
static_assert(std::atomic<int>::is_always_lock_free);

inline void on_stop_signal(int signal) {
    if (signal == SIGINT && interrupts++ > 0) {
        std::signal(SIGINT, SIG_DFL);
        std::raise(SIGINT);
    }
    stop_signal = signal;
}
}  // namespace detail

// A reader of standard output that goes away, such as a `tee`, does not end the run either: what cannot be
// printed is an error at its end.
inline void install_stop_signals() {
    std::signal(SIGPIPE, SIG_IGN);
    struct sigaction action {};
    action.sa_handler = detail::on_stop_signal;
    action.sa_flags = SA_RESTART;
    for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1}) {
        // nohup's wish to live on is kept. That a shell ignores SIGINT in what it starts with & is not:
        // whoever sends it to this process by number means it.
        struct sigaction old {};
        sigaction(signal, nullptr, &old);
        if (signal != SIGHUP || old.sa_handler != SIG_IGN) sigaction(signal, &action, nullptr);
    }
}

// While one lives, a signal that would end this process is noted, and ends it when the object goes: what
// was destroyed before has been cleaned up by then. One at a time.
class HeldSignals {
  public:
    HeldSignals() {
        held_ = 0;
        struct sigaction action {};
        action.sa_handler = [](int signal) { held_ = signal; };
        action.sa_flags = SA_RESTART;
        for (size_t i = 0; i < kCount; ++i) {
            sigaction(kSignals[i], nullptr, &before_[i]);
            if (before_[i].sa_handler != SIG_IGN) sigaction(kSignals[i], &action, nullptr);
        }
    }
    HeldSignals(const HeldSignals&) = delete;
    HeldSignals& operator=(const HeldSignals&) = delete;
    ~HeldSignals() {
        for (size_t i = 0; i < kCount; ++i) sigaction(kSignals[i], &before_[i], nullptr);
        if (held_ != 0) std::raise(held_);
    }

    // The signal noted, or 0.
    int held() const { return held_; }

  private:
    static constexpr int kSignals[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1};
    static constexpr size_t kCount = sizeof(kSignals) / sizeof(kSignals[0]);
    static inline std::atomic<int> held_{0};
    struct sigaction before_[kCount];
};

// Number of the signal that asked to stop, or 0.
inline int stop_requested() {
    return detail::stop_signal;
}

inline const char* stop_signal_name(int signal) {
    switch (signal) {
        case SIGTERM:
            return "SIGTERM";
        case SIGINT:
            return "SIGINT";
        case SIGHUP:
            return "SIGHUP";
        default:
            return "SIGUSR1";
    }
}

}  // namespace llmc
