// The device that this process computes on: its name, and how much memory it can still give.
#pragma once

#include <sys/resource.h>
#ifdef LLMC_CPU
#include <cblas.h>
#include <gnu/libc-version.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "llmc/cpu/parallel.h"
#include "llmc/cuda_common.h"

namespace llmc {

#ifdef LLMC_CPU

constexpr bool kHasTf32 = false;

namespace detail {

// The number after `key` in a file of "key: number kB" lines, in bytes; 0 when it is not there.
inline uint64_t kilobytes_in(const char* path, const std::string& key) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        if (line.compare(0, key.size(), key) == 0) {
            return std::strtoull(line.c_str() + key.size(), nullptr, 10) * 1024;
        }
    }
    return 0;
}

inline uint64_t number_in(const char* path) {
    std::ifstream file(path);
    uint64_t value = 0;
    return file >> value ? value : std::numeric_limits<uint64_t>::max();
}

}  // namespace detail

inline std::string device_name() {
    std::ifstream file("/proc/cpuinfo");
    const std::string key = "model name";
    std::string name = "CPU";
    for (std::string line; std::getline(file, line);) {
        const size_t colon = line.find(": ");
        if (line.compare(0, key.size(), key) == 0 && colon != std::string::npos) {
            name = line.substr(colon + 2);
            break;
        }
    }
    return name + format(", %d threads", cpu::usable_cores());
}

// The least of what the machine, a control group and the address-space limit leave.
inline size_t available_memory() {
    uint64_t available = detail::kilobytes_in("/proc/meminfo", "MemAvailable:");
    if (available == 0) available = std::numeric_limits<uint64_t>::max();
    const uint64_t group_limit = detail::number_in("/sys/fs/cgroup/memory.max");
    const uint64_t group_used = detail::number_in("/sys/fs/cgroup/memory.current");
    if (group_limit != std::numeric_limits<uint64_t>::max() && group_used < group_limit) {
        available = std::min(available, group_limit - group_used);
    }
    rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
        const uint64_t used = detail::kilobytes_in("/proc/self/status", "VmSize:");
        available =
            std::min<uint64_t>(available, limit.rlim_cur > used ? limit.rlim_cur - used : 0);
    }
    return available;
}

// One line on the state of the device, for -lg.
inline std::string device_status() {
    const double resident =
        static_cast<double>(detail::kilobytes_in("/proc/self/status", "VmRSS:")) / (1 << 20);
    const double peak =
        static_cast<double>(detail::kilobytes_in("/proc/self/status", "VmHWM:")) / (1 << 20);
    return format("CPU memory %.0f MiB, peak %.0f MiB", resident, peak);
}

// Names and versions of the libraries that results depend on.
inline std::vector<std::pair<std::string, std::string>> library_versions() {
    return {{"OpenBLAS", openblas_get_config()},
            {"OpenBLAS core", openblas_get_corename()},
            {"glibc", gnu_get_libc_version()}};
}

#endif  // LLMC_CPU

}  // namespace llmc
