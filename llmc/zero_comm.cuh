// The communicator: NCCL calls that are checked, waits that end, and small collectives on host values.
//
// The communicator does not block: a call that NCCL has not finished is polled, and so is every wait
// of the host for the device, together with what the other ranks say about themselves (peers.h) and a
// time limit, LLMC_COMM_TIMEOUT_S. A rank that dies or stops therefore ends the others, with its name.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "llmc/cuda_common.h"
#include "llmc/planted_delay.cuh"
#include "llmc/precision.h"
#include "llmc/test_switches.h"

#ifdef MULTI_GPU
#include <nccl.h>

#include "llmc/peers.h"
#endif

namespace llmc {

// An error that rank 0 prints for all.
struct AgreedError : Error {
    using Error::Error;
};

// An error of this rank alone, before it has looked for the others, who wait for it until they are told.
struct UnmetError : Error {
    using Error::Error;
};

struct GradientExchange;  // zero_exchange.cuh
struct CollectiveLog;
class HostWatch;

struct MultiGpuConfig {
    int process_rank = 0;
    int num_processes = 1;
    int local_device_idx = 0;  // GPU of this process on its node
    int zero_stage = 0;        // 0: optimizer state whole on every rank; 1: a shard on each
    size_t shard_num_parameters = 0;
#ifdef MULTI_GPU
    // All null with one process.
    ncclComm_t nccl_comm = nullptr;
    cudaStream_t nccl_stream = nullptr;  // communicates
    cudaEvent_t compute_nccl_sync =
        nullptr;                      // where the compute stream is when a collective starts
    cudaEvent_t host_wait = nullptr;  // what the host waits for
    float* unified_buffer = nullptr;  // one value that host and device see
    std::shared_ptr<Peers> peers;
    std::vector<int> nodes;  // node of each rank
    std::shared_ptr<CollectiveLog> log;
    std::shared_ptr<HostWatch> watch;
    std::shared_ptr<GradientExchange> exchange;  // of the canonical path
    double time_limit_s = 600.0;                 // of every wait
    bool started_by_mpi = false;
#endif
};

// How NCCL's communicator is opened; the bits of a run do not depend on it.
struct CommunicatorOptions {
    int max_ctas = 0;       // thread blocks of one of NCCL's kernels, at most; 0: NCCL's own choice
    bool blocking = false;  // the host waits inside NCCL's calls, where it does not see a rank die
};

// A time limit in seconds from the environment. Throws Error when it is not a positive number.
inline double seconds_from_environment(const char* name, double fallback) {
    const char* text = std::getenv(name);
    if (text == nullptr) return fallback;
    char* end = nullptr;
    const double value = std::strtod(text, &end);
    if (end == text || *end != '\0' || !(value > 0.0) || value > 1e6) {
        throw Error(
            format("%s=%s: must be a number of seconds above 0 and up to 1000000, such as %g", name,
                   text, fallback));
    }
    return value;
}

#ifdef MULTI_GPU

template <class T>
constexpr ncclDataType_t kNcclType = ncclFloat32;
template <>
constexpr ncclDataType_t kNcclType<bf16> = ncclBfloat16;
template <>
constexpr ncclDataType_t kNcclType<double> = ncclFloat64;

// What has been queued on the NCCL stream lately, so that an error can name what did not complete.
struct CollectiveLog {
    static constexpr size_t kSize = 256;
    struct Entry {
        cudaEvent_t done = nullptr;
        const char* name = "";
        int index = -1;  // of several in a step
        int64_t step = 0;
    };

    CollectiveLog() {
        for (Entry& entry : entries) {
            cuda_check(cudaEventCreateWithFlags(&entry.done, cudaEventDisableTiming));
        }
    }
    CollectiveLog(const CollectiveLog&) = delete;
    CollectiveLog& operator=(const CollectiveLog&) = delete;
    ~CollectiveLog() {
        for (Entry& entry : entries) {
            if (entry.done != nullptr) cudaEventDestroy(entry.done);
        }
    }

    void queued(const char* name, int index, cudaStream_t stream) {
        Entry& entry = entries[count++ % kSize];
        entry.name = name;
        entry.index = index;
        entry.step = step;
        cuda_check(cudaEventRecord(entry.done, stream));
    }
    // The oldest that has not completed, or null.
    const Entry* oldest_unfinished() const {
        for (uint64_t i = count > kSize ? count - kSize : 0; i < count; ++i) {
            const Entry& entry = entries[i % kSize];
            if (cudaEventQuery(entry.done) == cudaErrorNotReady) return &entry;
        }
        return nullptr;
    }

    Entry entries[kSize];
    uint64_t count = 0;
    int64_t step = 0;  // the one that is being queued, counted from 1
};

// ---- waits ----

// Ends this process because of `why`, with a line that names the step and the collective it stood in.
// What the streams hold will never complete, and freeing device memory would wait for it: hence no
// exception, and no destructors.
[[noreturn]] inline void lost_peer(const MultiGpuConfig& config, const std::string& why) {
    std::string where = "at the start";
    if (config.log != nullptr) {
        const CollectiveLog::Entry* entry = config.log->oldest_unfinished();
        const int64_t step = entry == nullptr ? config.log->step : entry->step;
        where = step < 1 ? "before the first step"
                         : format("in step %lld", static_cast<long long>(step));
        if (entry != nullptr) {
            where += std::string(", ") + entry->name;
            if (entry->index >= 0) where += format(", group %d", entry->index);
        }
    }
    // stdout was flushed by who printed; the main thread may hold it, when nobody reads.
    std::fprintf(stderr, "%s: rank %d, %s: %s\n", kProgramName, config.process_rank, where.c_str(),
                 why.c_str());
    std::_Exit(1);
}

// Ends this process because of an error that it alone has seen, and tells the others.
[[noreturn]] inline void multi_gpu_abandon(const MultiGpuConfig& config, const std::string& error) {
    config.peers->announce_failure(error);
    std::fflush(stdout);
    std::fprintf(stderr, "%s: rank %d: %s\n", kProgramName, config.process_rank, error.c_str());
    std::_Exit(1);
}

// Ends this process since `what` has taken longer than the limit.
[[noreturn]] inline void over_time(const MultiGpuConfig& config, const char* what) {
    const std::string late = config.peers->late(config.time_limit_s);
    // Whoever was stopped himself finds the others gone.
    const std::string failure = config.peers->failure();
    if (!failure.empty()) lost_peer(config, failure);
    const bool at_the_start = config.log == nullptr;  // until NCCL has started
    const std::string why =
        format("%s took more than %g s (%s): %s", what, config.time_limit_s,
               at_the_start ? "LLMC_INIT_TIMEOUT_S" : "LLMC_COMM_TIMEOUT_S", late.c_str());
    config.peers->announce_failure(why);
    lost_peer(config, why);
}

// Ends this process because of NCCL's error in `what`.
[[noreturn]] inline void lost_communicator(const MultiGpuConfig& config, ncclResult_t error,
                                           const char* what) {
    // A rank's end shows here first at times; the control channel knows which one it was.
    const std::string named = config.peers->wait_for_failure(2.0);
    if (!named.empty()) lost_peer(config, named);
    const std::string own =
        format("%s: %s: %s", what, ncclGetErrorString(error), ncclGetLastError(config.nccl_comm));
    config.peers->announce_failure(own);
    lost_peer(config, own);
}

// Ends this process when the communicator has failed.
inline void end_with_communicator(const MultiGpuConfig& config) {
    if (config.nccl_comm == nullptr) return;
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(config.nccl_comm, &state);
    if (asked != ncclSuccess) state = asked;
    if (state != ncclSuccess && state != ncclInProgress) lost_communicator(config, state, "NCCL");
}

// Ends this process when another rank has failed: work that goes on without them is in vain, and may be
// in the way of the next try.
inline void multi_gpu_end_with_others(const MultiGpuConfig& config) {
    if (config.num_processes == 1) return;
    const std::string failure = config.peers->failure();
    if (!failure.empty()) lost_peer(config, failure);
}

// Returns when done() does not return false any more. Ends the process when, before that, a rank or
// the communicator fails or the time limit is over.
template <class Done>
void wait_until(const MultiGpuConfig& config, const char* what, Done&& done) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point start = Clock::now();
    const auto seconds_since = [](Clock::time_point time) {
        return std::chrono::duration<double>(Clock::now() - time).count();
    };
    for (int polls = 0; !done(); ++polls) {
        multi_gpu_end_with_others(config);
        end_with_communicator(config);
        if (seconds_since(start) > config.time_limit_s) {
            over_time(config, what);
        }
        // NCCL takes up to a tenth of a millisecond to queue a group, and the host waits for that some
        // ten times in a step: a sleep would cost as much again. The end of a step is noticed soon.
        // (Where the device is the host, who polls takes its time: sleeps grow with the wait, to 2 ms.)
        const double waited = seconds_since(start);
        if (kDeviceIsHost) {
            const double seconds = std::clamp(waited / 4, 200e-6, 2e-3);
            std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
        } else if (waited < 300e-6) {
            std::this_thread::yield();
        } else {
            std::this_thread::sleep_for(std::chrono::microseconds(waited < 2.0 ? 20 : 200));
        }
    }
}

// Watches over the main thread where it cannot watch itself: a launch blocks once the device has
// enough to do, which on a rank whose streams wait for a lost one is for ever. A thread ends the process
// when a failure of another rank has been known for some seconds and the main thread has not reacted, or
// when a step takes longer than the limit.
class HostWatch {
  public:
    explicit HostWatch(const MultiGpuConfig& config) : config_(config) {
        config_.watch.reset();
        thread_ = std::thread([this] { run(); });
    }
    HostWatch(const HostWatch&) = delete;
    HostWatch& operator=(const HostWatch&) = delete;
    ~HostWatch() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        changed_.notify_all();
        thread_.join();
    }

    void step_begins() { step_start_ = Clock::now().time_since_epoch().count(); }
    void step_ends() { step_start_ = 0; }

  private:
    using Clock = std::chrono::steady_clock;
    static constexpr double kReactSeconds = 10.0;

    void run() {
        double failed_for = 0.0;
        std::unique_lock<std::mutex> lock(mutex_);
        while (!changed_.wait_for(lock, std::chrono::milliseconds(500), [this] { return stop_; })) {
            const std::string failure = config_.peers->failure();
            failed_for = failure.empty() ? 0.0 : failed_for + 0.5;
            if (failed_for > kReactSeconds) lost_peer(config_, failure);
            const int64_t start = step_start_;
            if (start == 0) continue;
            const Clock::duration since = Clock::now().time_since_epoch() - Clock::duration(start);
            // The main thread's own wait, which starts later, comes first where it can.
            if (std::chrono::duration<double>(since).count() >
                config_.time_limit_s + kReactSeconds) {
                over_time(config_, "the step");
            }
        }
    }

    MultiGpuConfig config_;
    std::mutex mutex_;
    std::condition_variable changed_;
    bool stop_ = false;
    std::atomic<int64_t> step_start_{0};
    std::thread thread_;  // last: it reads the others
};

// Checks an NCCL call; waits until one that NCCL works on in the background has taken effect.
inline void nccl_check(const MultiGpuConfig& config, ncclResult_t result, const char* what) {
    if (result == ncclInProgress) {
        wait_until(config, what, [&] {
            return ncclCommGetAsyncError(config.nccl_comm, &result) == ncclSuccess &&
                   result != ncclInProgress;
        });
    }
    if (result != ncclSuccess) lost_communicator(config, result, what);
}

// Waits on the host until the device has passed `event`. What a stream holds behind a collective that
// has failed may run all the same, on whatever its buffers held: the communicator is asked once more.
inline void wait_for_event(const MultiGpuConfig& config, const char* what, cudaEvent_t event) {
    wait_until(config, what, [&] {
        const cudaError_t status = cudaEventQuery(event);
        if (status != cudaErrorNotReady) cuda_check(status);
        return status == cudaSuccess;
    });
    end_with_communicator(config);
}

// Waits on the host until `stream` has come as far as now.
inline void wait_for_stream(const MultiGpuConfig& config, const char* what, cudaStream_t stream) {
    cuda_check(cudaEventRecord(config.host_wait, stream));
    wait_for_event(config, what, config.host_wait);
}

// Calls body(), which issues collectives on the NCCL stream, as one group. The host does not wait for
// them. `name` must be a string that lasts; `index` tells several of one name in a step apart.
template <class Body>
void nccl_group(const MultiGpuConfig& config, const char* name, int index, Body&& body) {
    planted_delay("LLMC_DELAY_NCCL_US", config.nccl_stream);
    nccl_check(config, ncclGroupStart(), name);
    body();
    nccl_check(config, ncclGroupEnd(), name);
    config.log->queued(name, index, config.nccl_stream);
    config.peers->progress(config.log->step, config.log->count, name);
}

// The NCCL stream goes on when `stream` has come as far as now.
inline void nccl_waits_for(const MultiGpuConfig& config, cudaStream_t stream) {
    cuda_check(cudaEventRecord(config.compute_nccl_sync, stream));
    cuda_check(cudaStreamWaitEvent(config.nccl_stream, config.compute_nccl_sync, 0));
}

// ---- host values ----

// Every rank's `bytes` bytes from `mine`, by rank. Waits.
inline std::vector<unsigned char> all_gather_bytes(const MultiGpuConfig& config, const void* mine,
                                                   size_t bytes, const char* name) {
    const size_t n = static_cast<size_t>(config.num_processes);
    DeviceBuffer<unsigned char> device(n * bytes);
    std::vector<unsigned char> all(n * bytes);
    if (all.empty()) return all;
    unsigned char* own = device.get() + config.process_rank * bytes;
    cuda_check(cudaMemcpyAsync(own, mine, bytes, cudaMemcpyHostToDevice, config.nccl_stream));
    nccl_group(config, name, -1, [&] {
        nccl_check(config,
                   ncclAllGather(own, device.get(), bytes, ncclUint8, config.nccl_comm,
                                 config.nccl_stream),
                   name);
    });
    wait_for_stream(config, name, config.nccl_stream);
    copy_to_host(all.data(), device.get(), all.size(), config.nccl_stream);
    return all;
}

#else

inline void multi_gpu_abandon(const MultiGpuConfig&, const std::string&) {}
inline void multi_gpu_end_with_others(const MultiGpuConfig&) {}

#endif  // MULTI_GPU

// Every rank's `count` values, by rank. T can be copied as bytes.
template <class T>
std::vector<T> multi_gpu_all_gather_host([[maybe_unused]] const MultiGpuConfig& config,
                                         const T* mine, size_t count,
                                         [[maybe_unused]] const char* name) {
    std::vector<T> all(mine, mine + count);
#ifdef MULTI_GPU
    if (config.num_processes > 1) {
        const std::vector<unsigned char> bytes =
            all_gather_bytes(config, mine, count * sizeof(T), name);
        all.resize(config.num_processes * count);
        std::memcpy(all.data(), bytes.data(), bytes.size());
    }
#endif
    return all;
}

// The lowest rank whose value is not rank 0's, or 0.
template <class T>
size_t first_unlike_rank_0(const std::vector<T>& values) {
    size_t rank = 1;
    while (rank < values.size() && values[rank] == values[0]) ++rank;
    return rank < values.size() ? rank : 0;
}

// Which rank's weights are not rank 0's, in words, or "" when all are; `own` is the hash of this rank's.
// The same on every rank.
inline std::string difference_of_weights(const MultiGpuConfig& config, uint64_t own) {
    const std::vector<uint64_t> hashes =
        multi_gpu_all_gather_host(config, &own, 1, "hashes of weights");
    const size_t rank = first_unlike_rank_0(hashes);
    if (rank == 0) return "";
    return format("rank %zu has other weights than rank 0 (hash %016llx, not %016llx)", rank,
                  static_cast<unsigned long long>(hashes[rank]),
                  static_cast<unsigned long long>(hashes[0]));
}

// The text of every rank, by rank.
inline std::vector<std::string> multi_gpu_all_gather_text(const MultiGpuConfig& config,
                                                          const std::string& mine,
                                                          const char* name) {
    const uint64_t length = mine.size();
    const std::vector<uint64_t> lengths = multi_gpu_all_gather_host(config, &length, 1, name);
    uint64_t longest = 0;
    for (const uint64_t each : lengths) longest = std::max(longest, each);
    std::vector<char> padded(longest, '\0');
    std::copy(mine.begin(), mine.end(), padded.begin());
    const std::vector<char> all =
        multi_gpu_all_gather_host(config, padded.data(), padded.size(), name);
    std::vector<std::string> texts;
    for (size_t rank = 0; rank < lengths.size(); ++rank) {
        texts.emplace_back(all.data() + rank * longest, lengths[rank]);
    }
    return texts;
}

// Every rank calls this with its error, or "" when it has none. Returns when nobody has one; else
// throws on every rank what the lowest rank with an error says.
inline void multi_gpu_agree(const MultiGpuConfig& config, const std::string& error) {
    if (config.num_processes == 1) {
        if (!error.empty()) throw Error(error);
        return;
    }
    const std::vector<std::string> errors =
        multi_gpu_all_gather_text(config, error, "agreement on errors");
    for (size_t rank = 0; rank < errors.size(); ++rank) {
        if (errors[rank].empty()) continue;
        throw AgreedError(rank == 0 ? errors[rank]
                                    : format("rank %zu: %s", rank, errors[rank].c_str()));
    }
}

// Runs work(), which must not communicate, on every rank; an error of one is an error of all.
template <class Work>
void multi_gpu_together(const MultiGpuConfig& config, Work&& work) {
    if (config.num_processes == 1) {
        work();
        return;
    }
    std::string error;
    try {
        work();
    } catch (const std::exception& caught) {
        error = caught.what();
        if (error.empty()) error = "failed";
    }
    multi_gpu_agree(config, error);
}

}  // namespace llmc
