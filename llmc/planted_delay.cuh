// Test switches (test_switches.h): a stream that stands still for a while, so that a missing wait for it
// shows. A kernel on a GPU, a pause of the stream's thread in the CPU build; nothing elsewhere.
#pragma once

#ifdef LLMC_TEST_SWITCHES
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <thread>
#endif

#include "llmc/cuda_common.h"
#include "llmc/test_switches.h"
#ifndef LLMC_CPU
#include "llmc/launchers.h"
#endif

namespace llmc {

#ifdef LLMC_TEST_SWITCHES

#ifdef LLMC_CPU
inline void delay_stream(int microseconds, cudaStream_t stream) {
    cuda_check(cudaLaunchHostFunc(
        stream,
        [](void* us) {
            std::this_thread::sleep_for(std::chrono::microseconds(reinterpret_cast<intptr_t>(us)));
        },
        reinterpret_cast<void*>(static_cast<intptr_t>(microseconds))));
}
#endif

// `stream` stands still for up to as many microseconds as the switch `name` says.
inline void planted_delay(const char* name, cudaStream_t stream) {
    const int delay = random_part(switch_value(name));
    if (delay > 0) delay_stream(delay, stream);
}

// The host stands still, and says so first: a test that acts in this moment waits for the line.
inline void planted_host_delay() {
    const int delay = switch_value("LLMC_DELAY_HOST_US");
    if (delay == 0) return;
    fprintf(stderr, "LLMC_DELAY_HOST_US: the host stands still\n");
    std::this_thread::sleep_for(std::chrono::microseconds(delay));
}

#else

inline void planted_delay(const char*, cudaStream_t) {}
inline void planted_host_delay() {}

#endif

}  // namespace llmc
