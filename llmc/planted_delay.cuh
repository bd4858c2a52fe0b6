// Test switches (test_switches.h): a stream that stands still for a while, so that a missing wait for it
// shows. A kernel on a GPU, a pause of the stream's thread in the CPU build; nothing elsewhere.
#pragma once

#ifdef LLMC_TEST_SWITCHES
#include <chrono>
#include <cstdint>
#include <thread>
#endif

#include "llmc/cuda_common.h"
#include "llmc/test_switches.h"

namespace llmc {

#ifdef LLMC_TEST_SWITCHES

namespace detail {

#ifdef LLMC_CPU
inline void delay_stream(int microseconds, cudaStream_t stream) {
    cuda_check(cudaLaunchHostFunc(
        stream,
        [](void* us) {
            std::this_thread::sleep_for(std::chrono::microseconds(reinterpret_cast<intptr_t>(us)));
        },
        reinterpret_cast<void*>(static_cast<intptr_t>(microseconds))));
}
#else
static __global__ void delay_kernel(unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}
inline void delay_stream(int microseconds, cudaStream_t stream) {
    unsigned long long nanoseconds = 1000ull * static_cast<unsigned>(microseconds);
    void* arguments[] = {&nanoseconds};
    cuda_check(cudaLaunchKernel(delay_kernel, dim3(1), dim3(1), arguments, 0, stream));
}
#endif

}  // namespace detail

// `stream` stands still for up to as many microseconds as the switch `name` says.
inline void planted_delay(const char* name, cudaStream_t stream) {
    const int delay = random_part(switch_value(name));
    if (delay > 0) detail::delay_stream(delay, stream);
}

#else

inline void planted_delay(const char*, cudaStream_t) {}

#endif

}  // namespace llmc
