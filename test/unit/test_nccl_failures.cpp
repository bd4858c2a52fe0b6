// The stand-in for NCCL when something goes wrong: ranks that leave, die, stop or never come, and
// wrong arguments. Ranks that die are processes of their own.
#ifdef MULTI_GPU

#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <nccl.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "llmc/cpu/gloo_store.h"
#include "llmc/error.h"
#include "llmc/net.h"
#include "test/unit/child_process.h"
#include "test/unit/nccl_ranks.h"

namespace {

using llmc::test::async_error;
using llmc::test::ChildMode;
using llmc::test::Clock;
using llmc::test::eventually;
using llmc::test::give_time;
using llmc::test::kSoon;
using llmc::test::new_id;
using llmc::test::Rank;
using llmc::test::run_ranks;
using llmc::test::seconds_since;

// One rank leaves while another still works on other things: no failure, and all data is there.
TEST(NcclFailures, ARankThatHasLeftInOrderIsNoFailure) {
    for (const bool finalize : {false, true}) {
        run_ranks(3, [finalize](Rank& self) {
            std::vector<float> x(1 << 20, 1.0f);
            for (int i = 0; i < 3; ++i) {
                ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat, ncclSum, self.comm,
                              self.stream);
            }
            if (self.rank == 1) {
                self.synchronize();
                std::this_thread::sleep_for(std::chrono::milliseconds(300));
            } else if (finalize) {
                EXPECT_EQ(ncclCommFinalize(self.comm), ncclSuccess);
                EXPECT_EQ(ncclAllReduce(x.data(), x.data(), 1, ncclFloat, ncclSum, self.comm,
                                        self.stream),
                          ncclInvalidUsage);
            }
            EXPECT_EQ(async_error(self.comm), ncclSuccess) << ncclGetLastError(self.comm);
            if (!finalize) {
                ncclCommDestroy(self.comm);  // completes what is under way
            }
            EXPECT_EQ(x.front(), 27.0f);
            EXPECT_EQ(x.back(), 27.0f);
            if (!finalize) {
                ncclCommInitRank(&self.comm, 1, new_id(), 0);
            }
        });
    }
}

TEST(NcclFailures, AbortEndsTheWaitForASilentRank) {
    std::atomic<int> looked{0};
    run_ranks(3, [&looked](Rank& self) {
        std::vector<float> x(1 << 22, 1.0f);
        if (self.rank != 1) {
            ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat, ncclSum, self.comm, self.stream);
            ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat, ncclSum, self.comm, self.stream);
            give_time();
            EXPECT_EQ(cudaStreamQuery(self.stream), cudaErrorNotReady);
        }
        ++looked;
        EXPECT_TRUE(eventually([&] { return looked == 3; }));
        const Clock::time_point start = Clock::now();
        EXPECT_EQ(ncclCommAbort(self.comm), ncclSuccess);
        self.synchronize();
        EXPECT_LT(seconds_since(start), kSoon);
        ncclCommInitRank(&self.comm, 1, new_id(), 0);
    });
}

// The peers of a rank that aborts lose it; their streams go on, later calls return the error.
TEST(NcclFailures, AnAbortIsTheOthersRemoteError) {
    const ncclUniqueId id = new_id();
    std::thread quitter([&] {
        Rank self(1, 2, id);
        float y = 0;
        ncclAllReduce(&y, &y, 1, ncclFloat, ncclSum, self.comm, self.stream);
        self.synchronize();
        ncclCommAbort(self.comm);
        self.comm = nullptr;
    });
    Rank self(0, 2, id);
    ASSERT_EQ(self.start, ncclSuccess);
    float x = 1, after = 0;
    const float mark = 7;
    ncclAllReduce(&x, &x, 1, ncclFloat, ncclSum, self.comm, self.stream);
    self.synchronize();
    ncclAllReduce(&x, &x, 1, ncclFloat, ncclSum, self.comm, self.stream);
    cudaMemcpyAsync(&after, &mark, sizeof(mark), cudaMemcpyDefault, self.stream);
    self.synchronize();
    quitter.join();
    EXPECT_EQ(after, 7);
    EXPECT_EQ(x, 1);
    EXPECT_EQ(async_error(self.comm), ncclRemoteError);
    EXPECT_EQ(ncclAllReduce(&x, &x, 1, ncclFloat, ncclSum, self.comm, self.stream),
              ncclRemoteError);
    EXPECT_NE(std::string(ncclGetLastError(self.comm)).find("lost rank 1"), std::string::npos)
        << ncclGetLastError(self.comm);
}

TEST(NcclFailures, RanksThatDisagreeOnTheSizeWaitAndDoNotCrash) {
    std::atomic<int> looked{0};
    run_ranks(2, [&looked](Rank& self) {
        std::vector<float> x(100);
        ncclAllReduce(x.data(), x.data(), 100 - self.rank * 50, ncclFloat, ncclSum, self.comm,
                      self.stream);
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        EXPECT_EQ(cudaStreamQuery(self.stream), cudaErrorNotReady);
        ++looked;
        EXPECT_TRUE(eventually([&] { return looked == 2; }));
        ncclCommAbort(self.comm);
        self.synchronize();
        ncclCommInitRank(&self.comm, 1, new_id(), 0);
    });
}

// ---- processes ----

std::string hex(const ncclUniqueId& id) {
    std::string text;
    for (const char c : id.internal) text += llmc::format("%02x", static_cast<unsigned char>(c));
    return text;
}
ncclUniqueId id_of_child() {
    ncclUniqueId id;
    const std::string text = std::getenv("LLMC_TEST_NCCL_ID");
    for (size_t i = 0; i < sizeof(id.internal); ++i) {
        id.internal[i] = static_cast<char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
    }
    return id;
}

// The last of three ranks, in a process of its own; what its mode does there.
struct Child {
    Child(const char* mode, const ncclUniqueId& id)
        : thread([this, mode, id] {
              output = llmc::test::run_again(mode, {{"LLMC_TEST_NCCL_ID=" + hex(id)}, false});
          }) {}
    ~Child() {
        if (thread.joinable()) thread.join();
    }
    std::string output;
    std::thread thread;
};

// Tells the others its process id, then does not take part any more.
std::string share_pid(Rank& self) {
    int64_t pid = getpid();
    std::vector<int64_t> pids(3);
    ncclAllGather(&pid, pids.data(), 1, ncclInt64, self.comm, self.stream);
    self.synchronize();
    return std::to_string(pids[2]);
}
std::string passive_rank() {
    Rank self(2, 3, id_of_child());
    if (self.start != ncclSuccess) return ncclGetLastError(nullptr);
    share_pid(self);
    std::this_thread::sleep_for(std::chrono::seconds(60));
    return "slept";
}
std::string busy_rank() {
    Rank self(2, 3, id_of_child());
    share_pid(self);
    std::vector<float> x(1 << 24);
    for (;;) {
        ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat, ncclSum, self.comm, self.stream);
        self.synchronize();
    }
}
// One long message to rank 0.
std::string sending_rank() {
    Rank self(2, 3, id_of_child());
    std::vector<char> x(size_t{1} << 28, 1);
    share_pid(self);
    ncclSend(x.data(), x.size(), ncclInt8, 0, self.comm, self.stream);
    self.synchronize();
    std::this_thread::sleep_for(std::chrono::seconds(60));
    return "slept";
}
const ChildMode sending_mode("nccl sending rank", sending_rank);
const ChildMode passive_mode("nccl passive rank", passive_rank);
const ChildMode busy_mode("nccl busy rank", busy_rank);

// Ranks 0 and 1 as threads, 2 as a process in `mode`; `body` gets that process's id.
void run_with_child(const char* mode, const std::function<void(Rank&, pid_t)>& body) {
    const ncclUniqueId id = new_id();
    Child child(mode, id);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
        threads.emplace_back([&, rank] {
            Rank self(rank, 3, id);
            ASSERT_EQ(self.start, ncclSuccess) << ncclGetLastError(nullptr);
            body(self, static_cast<pid_t>(std::stol(share_pid(self))));
        });
    }
    for (std::thread& thread : threads) thread.join();
}

void expect_loss_of_rank_2(Rank& self) {
    EXPECT_TRUE(eventually([&] { return async_error(self.comm) != ncclSuccess; }));
    EXPECT_EQ(async_error(self.comm), ncclRemoteError);
    const std::string reason = ncclGetLastError(self.comm);
    EXPECT_EQ(reason.find("lost rank 2: "), 0u) << reason;
    const Clock::time_point start = Clock::now();
    self.synchronize();
    ncclCommDestroy(self.comm);
    self.comm = nullptr;
    EXPECT_LT(seconds_since(start), kSoon);
}

TEST(NcclFailures, AKilledRankIsSeenByAnIdleCommunicator) {
    run_with_child("nccl passive rank", [](Rank& self, pid_t pid) {
        if (self.rank == 0) kill(pid, SIGKILL);
        expect_loss_of_rank_2(self);
    });
}

// Gloo alone leaves the receiver of half a message waiting.
TEST(NcclFailures, ARankKilledHalfWayThroughAMessageEndsTheWait) {
    run_with_child("nccl sending rank", [](Rank& self, pid_t pid) {
        std::vector<char> x(size_t{1} << 28);
        if (self.rank == 0) {
            ncclRecv(x.data(), x.size(), ncclInt8, 2, self.comm, self.stream);
            std::this_thread::sleep_for(std::chrono::milliseconds(30));
            kill(pid, SIGKILL);
        }
        expect_loss_of_rank_2(self);
    });
}

TEST(NcclFailures, AKilledRankEndsTheCollectivesUnderWay) {
    run_with_child("nccl busy rank", [](Rank& self, pid_t pid) {
        std::vector<float> x(1 << 24);
        for (int i = 0; i < 50; ++i) {
            ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat, ncclSum, self.comm, self.stream);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        if (self.rank == 0) kill(pid, SIGKILL);
        expect_loss_of_rank_2(self);
    });
}

TEST(NcclFailures, AbortEndsTheWaitForAStoppedRank) {
    std::atomic<int> looked{0};
    run_with_child("nccl busy rank", [&looked](Rank& self, pid_t pid) {
        std::vector<float> x(1 << 24);
        for (int i = 0; i < 50; ++i) {
            ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat, ncclSum, self.comm, self.stream);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        if (self.rank == 0) kill(pid, SIGSTOP);
        std::this_thread::sleep_for(std::chrono::milliseconds(500));
        EXPECT_EQ(async_error(self.comm), ncclSuccess);
        EXPECT_EQ(cudaStreamQuery(self.stream), cudaErrorNotReady);
        ++looked;
        EXPECT_TRUE(eventually([&] { return looked == 2; }));
        const Clock::time_point start = Clock::now();
        ncclCommAbort(self.comm);
        self.comm = nullptr;
        self.synchronize();
        EXPECT_LT(seconds_since(start), kSoon);
        if (self.rank == 0) kill(pid, SIGKILL);
    });
}

TEST(NcclFailures, DestroyDoesNotWaitForAStoppedRank) {
    run_with_child("nccl passive rank", [](Rank& self, pid_t pid) {
        if (self.rank == 0) kill(pid, SIGSTOP);
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        const Clock::time_point start = Clock::now();
        EXPECT_EQ(ncclCommDestroy(self.comm), ncclSuccess);
        self.comm = nullptr;
        EXPECT_LT(seconds_since(start), kSoon);
        if (self.rank == 0) kill(pid, SIGKILL);
    });
}

// The process ends although a collective waits for a rank that never calls.
std::string leaving_rank() {
    const ncclUniqueId id = id_of_child();
    ncclComm_t comms[2];
    ncclGroupStart();
    for (int rank = 0; rank < 2; ++rank) ncclCommInitRank(&comms[rank], 2, id, rank);
    if (ncclGroupEnd() != ncclSuccess) return ncclGetLastError(nullptr);
    static float x = 1;
    ncclAllReduce(&x, &x, 1, ncclFloat, ncclSum, comms[0], nullptr);
    std::puts("leaves");
    std::exit(0);
}
const ChildMode leaving_mode("nccl leaving rank", leaving_rank);

TEST(NcclFailures, ExitDuringACollectiveEndsTheProcess) {
    Child child("nccl leaving rank", new_id());
    child.thread.join();
    EXPECT_EQ(child.output, "leaves\n");
}

// ---- starts that fail ----

ncclConfig_t nonblocking() {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    return config;
}

TEST(NcclFailures, ANonblockingStartReturnsAtOnce) {
    const ncclUniqueId id = new_id();
    std::atomic<bool> looked{false};
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
        threads.emplace_back([&, rank] {
            ncclConfig_t config = nonblocking();
            cudaStream_t stream;
            cudaStreamCreate(&stream);
            ncclComm_t comm;
            float x = 2;
            if (rank == 1) {
                EXPECT_TRUE(eventually([&] { return looked.load(); }));
            }
            EXPECT_EQ(ncclCommInitRankConfig(&comm, 2, id, rank, &config), ncclInProgress);
            if (rank == 0) {
                EXPECT_EQ(async_error(comm), ncclInProgress);
                EXPECT_EQ(ncclAllReduce(&x, &x, 1, ncclFloat, ncclSum, comm, stream),
                          ncclInvalidArgument);
                looked = true;
            }
            EXPECT_TRUE(eventually([&] { return async_error(comm) == ncclSuccess; }));
            EXPECT_EQ(ncclAllReduce(&x, &x, 1, ncclFloat, ncclSum, comm, stream), ncclSuccess);
            EXPECT_EQ(ncclCommFinalize(comm), ncclInProgress);
            EXPECT_TRUE(eventually([&] { return async_error(comm) == ncclSuccess; }));
            EXPECT_EQ(x, 4);
            EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
            cudaStreamDestroy(stream);
        });
    }
    for (std::thread& thread : threads) thread.join();
}

TEST(NcclFailures, AStartWithAMissingRankCanBeAborted) {
    const ncclUniqueId id = new_id();
    ncclComm_t comms[2];
    for (int rank = 0; rank < 2; ++rank) {
        ncclConfig_t config = nonblocking();
        EXPECT_EQ(ncclCommInitRankConfig(&comms[rank], 3, id, rank, &config), ncclInProgress);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    const Clock::time_point start = Clock::now();
    for (ncclComm_t comm : comms) {
        EXPECT_EQ(async_error(comm), ncclInProgress);
        EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
    }
    EXPECT_LT(seconds_since(start), kSoon);
}

TEST(NcclFailures, StrangersDoNotDisturbAStart) {
    const ncclUniqueId id = new_id();
    llmc::standin::StoreAddress store;
    ASSERT_TRUE(store.unpack(id.internal));
    std::vector<llmc::net::Socket> strangers;
    for (int i = 0; i < 20; ++i) {
        strangers.push_back(llmc::net::connect_to(
            {store.hosts.front(), static_cast<int>(store.port)}, llmc::net::after(5)));
        ASSERT_TRUE(strangers.back());
        const std::vector<char> junk(static_cast<size_t>(i) * 10, 'G');
        llmc::net::send_all(strangers.back(), junk.data(), junk.size(), llmc::net::after(5));
    }
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank) {
        threads.emplace_back([&, rank] {
            Rank self(rank, 3, id);
            EXPECT_EQ(self.start, ncclSuccess) << ncclGetLastError(nullptr);
        });
    }
    for (std::thread& thread : threads) thread.join();
}

TEST(NcclFailures, ASecondRankOfOneNumberIsRefused) {
    const ncclUniqueId id = new_id();
    ncclComm_t zeros[2], one;
    for (ncclComm_t& comm : zeros) {
        ncclConfig_t config = nonblocking();
        EXPECT_EQ(ncclCommInitRankConfig(&comm, 2, id, 0, &config), ncclInProgress);
    }
    const auto refused = [&](int i) { return async_error(zeros[i]) == ncclInvalidUsage; };
    ASSERT_TRUE(eventually([&] { return refused(0) || refused(1); }));
    const int late = refused(0) ? 0 : 1;
    EXPECT_STREQ(ncclGetLastError(zeros[late]), "there are two ranks 0");
    EXPECT_EQ(ncclCommAbort(zeros[late]), ncclSuccess);
    EXPECT_EQ(ncclCommInitRank(&one, 3, id, 1), ncclInvalidUsage);
    EXPECT_EQ(one, nullptr);
    EXPECT_STREQ(ncclGetLastError(nullptr), "rank 1 expects 3 ranks, the others expect 2");
    // The first goes on as if nothing had been.
    EXPECT_EQ(ncclCommInitRank(&one, 2, id, 1), ncclSuccess);
    EXPECT_TRUE(eventually([&] { return async_error(zeros[1 - late]) == ncclSuccess; }));
    ncclCommDestroy(zeros[1 - late]);
    ncclCommDestroy(one);
}

TEST(NcclFailures, AnIdWhoseProcessHasGoneIsAnError) {
    llmc::standin::StoreAddress gone;
    {
        const llmc::net::Socket listener = llmc::net::listen_on("127.0.0.1", 0, "");
        gone.port = static_cast<uint32_t>(llmc::net::local_port(listener));
    }
    gone.hosts = {"127.0.0.1"};
    ncclUniqueId id;
    gone.pack(id.internal);
    ncclComm_t comm;
    EXPECT_EQ(ncclCommInitRank(&comm, 2, id, 0), ncclSystemError);
    const std::string reason = ncclGetLastError(nullptr);
    EXPECT_NE(reason.find("127.0.0.1:" + std::to_string(gone.port)), std::string::npos) << reason;
}

TEST(NcclFailures, WrongArgumentsAreRefused) {
    ncclComm_t comm = nullptr;
    ncclUniqueId zero{};
    EXPECT_EQ(ncclGetUniqueId(nullptr), ncclInvalidArgument);
    EXPECT_EQ(ncclGetVersion(nullptr), ncclInvalidArgument);
    EXPECT_EQ(ncclCommInitRank(&comm, 1, zero, 0), ncclInvalidArgument);
    const ncclUniqueId id = new_id();
    EXPECT_EQ(ncclCommInitRank(nullptr, 1, id, 0), ncclInvalidArgument);
    EXPECT_EQ(ncclCommInitRank(&comm, 0, id, 0), ncclInvalidArgument);
    EXPECT_EQ(ncclCommInitRank(&comm, 2, id, 2), ncclInvalidArgument);
    EXPECT_EQ(ncclCommInitRank(&comm, 2, id, -1), ncclInvalidArgument);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 2;
    EXPECT_EQ(ncclCommInitRankConfig(&comm, 1, id, 0, &config), ncclInvalidArgument);
    config = NCCL_CONFIG_INITIALIZER;
    config.minCTAs = 8;
    config.maxCTAs = 4;
    EXPECT_EQ(ncclCommInitRankConfig(&comm, 1, id, 0, &config), ncclInvalidArgument);
    EXPECT_EQ(comm, nullptr);
    EXPECT_EQ(ncclCommDestroy(comm), ncclInvalidArgument);
    EXPECT_EQ(ncclCommAbort(comm), ncclInvalidArgument);
    EXPECT_EQ(ncclCommFinalize(comm), ncclInvalidArgument);
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);

    run_ranks(2, [](Rank& self) {
        float x = 1;
        int n = 0;
        const auto reduce = [&](const void* send, void* receive, int type, int op) {
            return ncclAllReduce(send, receive, 1, static_cast<ncclDataType_t>(type),
                                 static_cast<ncclRedOp_t>(op), self.comm, self.stream);
        };
        EXPECT_EQ(ncclAllReduce(&x, &x, 1, ncclFloat, ncclSum, nullptr, self.stream),
                  ncclInvalidArgument);
        EXPECT_EQ(reduce(nullptr, &x, ncclFloat, ncclSum), ncclInvalidArgument);
        EXPECT_EQ(reduce(&x, nullptr, ncclFloat, ncclSum), ncclInvalidArgument);
        EXPECT_EQ(reduce(&x, &x, 6, ncclSum), ncclInvalidArgument);
        EXPECT_EQ(reduce(&x, &x, ncclFloat, 1), ncclInvalidArgument);
        for (const int peer : {-1, 2}) {
            EXPECT_EQ(ncclSend(&x, 1, ncclFloat, peer, self.comm, self.stream),
                      ncclInvalidArgument);
            EXPECT_EQ(ncclRecv(&x, 1, ncclFloat, peer, self.comm, self.stream),
                      ncclInvalidArgument);
            EXPECT_EQ(ncclBroadcast(&x, &x, 1, ncclFloat, peer, self.comm, self.stream),
                      ncclInvalidArgument);
        }
        EXPECT_EQ(ncclSend(&x, 1, ncclFloat, self.rank, self.comm, self.stream), ncclInvalidUsage);
        EXPECT_EQ(ncclCommCount(self.comm, nullptr), ncclInvalidArgument);
        EXPECT_EQ(ncclCommUserRank(nullptr, &n), ncclInvalidArgument);
        EXPECT_EQ(ncclCommGetAsyncError(self.comm, nullptr), ncclInvalidArgument);
        // A wrong call in a group: none of its calls is issued, its end says so.
        ncclGroupStart();
        EXPECT_EQ(ncclAllReduce(&x, &x, 1, ncclFloat, ncclSum, self.comm, self.stream),
                  ncclSuccess);
        EXPECT_EQ(reduce(&x, nullptr, ncclFloat, ncclSum), ncclInvalidArgument);
        EXPECT_EQ(ncclGroupEnd(), ncclInvalidArgument);
        self.synchronize();
        EXPECT_EQ(x, 1);
        ncclAllReduce(&x, &x, 1, ncclFloat, ncclSum, self.comm, self.stream);
        self.synchronize();
        EXPECT_EQ(x, 2);
    });
}

TEST(NcclFailures, VersionAndErrorsHaveNames) {
    int version = 0;
    EXPECT_EQ(ncclGetVersion(&version), ncclSuccess);
    EXPECT_EQ(version, 22809);
    EXPECT_STREQ(ncclGetErrorString(ncclSuccess), "no error");
    EXPECT_STREQ(ncclGetErrorString(ncclInProgress), "in progress");
    EXPECT_STREQ(ncclGetErrorString(static_cast<ncclResult_t>(99)), "unknown result code");
}

}  // namespace

#endif  // MULTI_GPU
