// SIGTERM, SIGINT and SIGUSR1 ask the run to save itself and end; Slurm sends the first before it
// kills a job. A second SIGINT ends it at once.
#pragma once

#include <csignal>
#include <cstring>

namespace llmc {

namespace detail {
inline volatile std::sig_atomic_t stop_signal = 0;
inline void on_stop_signal(int signal) {
    if (signal == SIGINT && stop_signal == SIGINT) {
        std::signal(SIGINT, SIG_DFL);
        std::raise(SIGINT);
    }
    stop_signal = signal;
}
}  // namespace detail

inline void install_stop_signals() {
    struct sigaction action {};
    action.sa_handler = detail::on_stop_signal;
    action.sa_flags = SA_RESTART;
    for (const int signal : {SIGTERM, SIGINT, SIGUSR1}) sigaction(signal, &action, nullptr);
}

// Number of the signal that asked to stop, or 0.
inline int stop_requested() {
    return detail::stop_signal;
}

inline const char* stop_signal_name(int signal) {
    return signal == SIGTERM ? "SIGTERM" : signal == SIGINT ? "SIGINT" : "SIGUSR1";
}

}  // namespace llmc
