// Names the launchers to profilers, by NVTX: Nsight Systems and `make profile` show for each kernel
// which launcher queued it, for which shape, and in which phase of the step.
//
// Without a profiler, a range costs two looks at null pointers. The shape, the bytes and the flops
// are written out only where the environment variable LLMC_PROFILE is set; a profiler sees the
// launcher's name alone otherwise. Nothing here touches a kernel. The CPU build, and a toolkit
// without NVTX, have empty ranges.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "llmc/cpu/shapes.h"

#if !defined(LLMC_CPU) && defined(__has_include)
#if __has_include(<nvtx3/nvToolsExt.h>)
#define LLMC_NVTX
#include <nvtx3/nvToolsExt.h>
#endif
#endif

namespace llmc {

// Bytes of `how_many` matrices (rows,columns).
template <class T>
constexpr size_t bytes_of(size_t rows, size_t columns = 1, size_t how_many = 1) {
    return sizeof(T) * rows * columns * how_many;
}

// Of the product (rows,C) by (C,OC).
constexpr double product_flops(size_t rows, size_t C, size_t OC) {
    return 2.0 * static_cast<double>(rows) * static_cast<double>(C) * static_cast<double>(OC);
}

#ifdef LLMC_NVTX

// What the host queues while this object lives belongs to `name`, such as "forward".
class ProfileRange {
  public:
    explicit ProfileRange(const char* name) { nvtxRangePushA(name); }
    ProfileRange(const ProfileRange&) = delete;
    ProfileRange& operator=(const ProfileRange&) = delete;
    ~ProfileRange() { nvtxRangePop(); }
};

namespace profile_detail {

inline bool wanted() {
    static const bool set = std::getenv("LLMC_PROFILE") != nullptr;
    return set;
}

// A range's whole text, which dev/bench/profile_step.py reads:
// "launcher matmul_forward rows=65536 C=768 OC=2304 bytes=406978560 flops=231928233984".
struct RangeText {
    char text[256];

    RangeText(const char* name, std::initializer_list<cpu::NamedSize> shape, size_t bytes,
              double flops) {
        size_t used = 0;
        const auto add = [&](const char* format, auto... values) {
            const int wrote = std::snprintf(text + used, sizeof(text) - used, format, values...);
            if (wrote > 0) used += wrote;
            if (used >= sizeof(text)) used = sizeof(text) - 1;
        };
        add("launcher %s", name);
        for (const cpu::NamedSize& size : shape) add(" %s=%lld", size.name, size.value);
        add(" bytes=%zu flops=%.0f", bytes, flops);
    }
};

}  // namespace profile_detail

// As ProfileRange, for the launcher `name`. `bytes` is the least that must move through the GPU's
// memory: each tensor read and written once. 0 where only the device knows, as for tables there.
class LauncherRange {
  public:
    LauncherRange(const char* name, std::initializer_list<cpu::NamedSize> shape, size_t bytes,
                  double flops = 0.0) {
        if (profile_detail::wanted()) {
            nvtxRangePushA(profile_detail::RangeText(name, shape, bytes, flops).text);
        } else {
            nvtxRangePushA(name);
        }
    }
    LauncherRange(const LauncherRange&) = delete;
    LauncherRange& operator=(const LauncherRange&) = delete;
    ~LauncherRange() { nvtxRangePop(); }
};

#else

class ProfileRange {
  public:
    explicit ProfileRange(const char*) {}
};

class LauncherRange {
  public:
    LauncherRange(const char*, std::initializer_list<cpu::NamedSize>, size_t, double = 0.0) {}
};

#endif

}  // namespace llmc
