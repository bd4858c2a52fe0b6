// The device that this process computes on: its name, and how much memory it can still give.
#pragma once

#include <sys/resource.h>
#ifdef LLMC_CPU
#include <cblas.h>
#include <gnu/libc-version.h>
#else
#include <dlfcn.h>
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
#include "llmc/precision.h"
#ifndef LLMC_CPU
#include "llmc/launchers.h"
#endif

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

constexpr uint64_t kNoLimit = std::numeric_limits<uint64_t>::max();

// The number that a file holds; kNoLimit when it holds a word ("max") or is not there.
inline uint64_t number_in(const std::string& path) {
    std::ifstream file(path);
    uint64_t value = 0;
    return file >> value ? value : kNoLimit;
}

// Bytes of page cache that a control group can give back at once.
inline uint64_t inactive_cache(const std::string& path, const std::string& key) {
    std::ifstream file(path);
    std::string name;
    for (uint64_t value = 0; file >> name >> value;) {
        if (name == key) return value;
    }
    return 0;
}

// What this process's control group and those above it leave, version 2 (one hierarchy, "0::PATH") or
// version 1 (its memory controller); kNoLimit without any.
inline uint64_t left_by_control_groups() {
    uint64_t left = kNoLimit;
    std::ifstream groups("/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
        const bool version2 = line.rfind("0::", 0) == 0;
        const size_t memory = line.find(":memory:");
        if (!version2 && memory == std::string::npos) continue;
        const std::string root = version2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
        std::string group = version2 ? line.substr(3) : line.substr(memory + 8);
        while (true) {
            const std::string folder = root + (group == "/" ? "" : group) + "/";
            const uint64_t limit =
                number_in(folder + (version2 ? "memory.max" : "memory.limit_in_bytes"));
            const uint64_t used =
                number_in(folder + (version2 ? "memory.current" : "memory.usage_in_bytes"));
            const uint64_t cache = inactive_cache(
                folder + "memory.stat", version2 ? "inactive_file" : "total_inactive_file");
            if (limit != kNoLimit && used != kNoLimit) {
                const uint64_t busy = used - std::min(used, cache);
                left = std::min(left, limit > busy ? limit - busy : 0);
            }
            if (group.empty() || group == "/") break;
            group.resize(group.rfind('/'));
        }
    }
    return left;
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
    if (available == 0) available = detail::kNoLimit;
    available = std::min(available, detail::left_by_control_groups());
    rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
        // Each thread that multiplies maps a buffer of OpenBLAS, which waits for ever when it cannot
        // have it; each thread of the pool, the streams and the loader maps a heap of its own.
        constexpr uint64_t kBlasBuffer = uint64_t{128} << 20, kHeap = uint64_t{64} << 20;
        const uint64_t cores = cpu::usable_cores();
        const uint64_t threads = cores * kBlasBuffer + (cores + 6) * kHeap;
        const uint64_t used = detail::kilobytes_in("/proc/self/status", "VmSize:") + threads;
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

// Throws Error when there is no device to compute on: never, for a CPU.
inline void require_device(int) {}

#else

constexpr bool kHasTf32 = true;

namespace detail {

inline const cudaDeviceProp& device_properties() {
    static const cudaDeviceProp properties = [] {
        cudaDeviceProp p{};
        int device = 0;
        cuda_check(cudaGetDevice(&device));
        cuda_check(cudaGetDeviceProperties(&p, device));
        return p;
    }();
    return properties;
}

// NVIDIA's management library belongs to the driver and is looked for at run time, so that the
// program starts without one. Numbers of its interface: NVML API reference, "Device Queries".
class Nvml {
  public:
    Nvml() : library_(::dlopen("libnvidia-ml.so.1", RTLD_NOW)) {
        using Init = int (*)();
        const auto init = find<Init>("nvmlInit_v2");
        ready_ = init != nullptr && init() == 0;
    }
    // A device by its PCI address, or null.
    void* device(const char* pci) const {
        const auto by_pci = find<int (*)(const char*, void**)>("nvmlDeviceGetHandleByPciBusId_v2");
        void* handle = nullptr;
        return ready_ && by_pci != nullptr && by_pci(pci, &handle) == 0 ? handle : nullptr;
    }
    // Calls a query of the form f(device, [which,] unsigned*); -1 when it fails.
    long read(const char* query, void* device) const {
        const auto call = find<int (*)(void*, unsigned*)>(query);
        unsigned value = 0;
        return call != nullptr && call(device, &value) == 0 ? static_cast<long>(value) : -1;
    }
    long read(const char* query, void* device, int which) const {
        const auto call = find<int (*)(void*, int, unsigned*)>(query);
        unsigned value = 0;
        return call != nullptr && call(device, which, &value) == 0 ? static_cast<long>(value) : -1;
    }

  private:
    template <class Function>
    Function find(const char* name) const {
        if (library_ == nullptr) return nullptr;
        return reinterpret_cast<Function>(::dlsym(library_, name));
    }
    void* library_;
    bool ready_ = false;
};

}  // namespace detail

inline std::string device_name() {
    return detail::device_properties().name;
}

inline size_t available_memory() {
    size_t free_bytes = 0, total = 0;
    cuda_check(cudaMemGetInfo(&free_bytes, &total));
    return free_bytes;
}

// One line on the state of the device, for -lg.
inline std::string device_status() {
    size_t free_bytes = 0, total = 0;
    cuda_check(cudaMemGetInfo(&free_bytes, &total));
    std::string line = format("GPU memory %zu of %zu MiB", (total - free_bytes) >> 20, total >> 20);
    static const detail::Nvml nvml;
    char pci[32] = {};
    int device = 0;
    cuda_check(cudaGetDevice(&device));
    cuda_check(cudaDeviceGetPCIBusId(pci, sizeof(pci), device));
    void* handle = nvml.device(pci);
    if (handle == nullptr) return line + ", no NVML";
    constexpr int kSmClock = 1, kGpuTemperature = 0;
    const auto add = [&line](const char* what, long value, long divisor, const char* unit) {
        if (value >= 0) line += format(", %s %ld %s", what, value / divisor, unit);
    };
    add("SM clock", nvml.read("nvmlDeviceGetClockInfo", handle, kSmClock), 1, "MHz");
    add("power", nvml.read("nvmlDeviceGetPowerUsage", handle), 1000, "W");
    add("limit", nvml.read("nvmlDeviceGetEnforcedPowerLimit", handle), 1000, "W");
    add("temperature", nvml.read("nvmlDeviceGetTemperature", handle, kGpuTemperature), 1, "C");
    return line;
}

// Names and versions of the libraries that results depend on.
inline std::vector<std::pair<std::string, std::string>> library_versions() {
    int runtime = 0, driver = 0;
    cuda_check(cudaRuntimeGetVersion(&runtime));
    cuda_check(cudaDriverGetVersion(&driver));
    std::vector<std::pair<std::string, std::string>> versions = matmul_versions();
    versions.insert(versions.begin(), {{"CUDA runtime", std::to_string(runtime)},
                                       {"CUDA driver", std::to_string(driver)}});
    // Of a shape that a library computes wherever there is one.
    versions.emplace_back("attention", attention_backend(2, 64));
    return versions;
}

// Makes GPU `index` this process's. Throws Error with one clear line when there is none that this
// build can compute on.
inline void require_device(int index) {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0) {
        int driver = 0;  // stays 0 where there is none, which `status` would call too old
        cudaDriverGetVersion(&driver);
        throw Error(format("no GPU: %s; train_gpt2cpu (make train_gpt2cpu) runs without one",
                           driver == 0             ? "no NVIDIA driver was found"
                           : status != cudaSuccess ? cudaGetErrorString(status)
                                                   : "none was found"));
    }
    cuda_check(cudaSetDevice(index));
    const cudaDeviceProp& p = detail::device_properties();
    if (sizeof(floatX) == 2 && p.major < 8) {
        throw Error(format("%s: compute capability %d.%d has no bf16; build with PRECISION=FP32",
                           p.name, p.major, p.minor));
    }
    if (!device_has_code()) {
        throw Error(
            format("%s: this build has no code for compute capability %d.%d; build with "
                   "GPU_ARCH=%d%d",
                   p.name, p.major, p.minor, p.major, p.minor));
    }
}

#endif  // LLMC_CPU

}  // namespace llmc
