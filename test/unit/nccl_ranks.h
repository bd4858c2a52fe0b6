// Ranks of the NCCL stand-in as threads of one test program.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <chrono>
#include <functional>
#include <thread>
#include <vector>

namespace llmc::test {

using Clock = std::chrono::steady_clock;

// How long a test waits to see that something does not happen.
inline void give_time() {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
}

inline double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}
// A wait that must end within about a second, on a machine that is busy with other things.
constexpr double kSoon = 10;

inline bool eventually(const std::function<bool()>& condition) {
    const Clock::time_point start = Clock::now();
    while (!condition()) {
        if (seconds_since(start) > 30) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return true;
}

inline ncclResult_t async_error(ncclComm_t comm) {
    ncclResult_t error = ncclNumResults;
    EXPECT_EQ(ncclCommGetAsyncError(comm, &error), ncclSuccess);
    return error;
}

inline ncclUniqueId new_id() {
    ncclUniqueId id;
    EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess) << ncclGetLastError(nullptr);
    return id;
}

struct Rank {
    Rank(int r, int n, const ncclUniqueId& id) : rank(r), size(n) {
        cudaStreamCreate(&stream);
        start = ncclCommInitRank(&comm, n, id, r);
    }
    ~Rank() {
        if (comm != nullptr) ncclCommDestroy(comm);
        cudaStreamDestroy(stream);
    }
    void synchronize() { cudaStreamSynchronize(stream); }

    int rank, size;
    ncclComm_t comm = nullptr;
    cudaStream_t stream = nullptr;
    ncclResult_t start;
};

// Runs `body` as each of `size` ranks.
inline void run_ranks(int size, const std::function<void(Rank&)>& body) {
    const ncclUniqueId id = new_id();
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
        threads.emplace_back([&, rank] {
            Rank self(rank, size, id);
            ASSERT_EQ(self.start, ncclSuccess) << ncclGetLastError(nullptr);
            body(self);
            EXPECT_EQ(async_error(self.comm), ncclSuccess) << ncclGetLastError(self.comm);
        });
    }
    for (std::thread& thread : threads) thread.join();
}

}  // namespace llmc::test
