// The stand-in for NCCL: mostly N threads with a communicator each; ranks that die are processes.
#ifdef MULTI_GPU

#include <gtest/gtest.h>
#include <nccl.h>
#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "llmc/error.h"
#include "llmc/hash.h"
#include "llmc/net.h"
#include "llmc/precision.h"
#include "test/unit/child_process.h"
#include "test/unit/stream_gate.h"

namespace {

using llmc::bf16;
using llmc::test::ChildMode;
using llmc::test::StreamGate;
using Clock = std::chrono::steady_clock;

// How long a test waits to see that something does not happen.
void give_time() {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
}

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}
// A wait that must end within about a second, on a machine that is busy with other things.
constexpr double kSoon = 4;

bool eventually(const std::function<bool()>& condition) {
    const Clock::time_point start = Clock::now();
    while (!condition()) {
        if (seconds_since(start) > 30) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return true;
}

ncclResult_t async_error(ncclComm_t comm) {
    ncclResult_t error = ncclNumResults;
    EXPECT_EQ(ncclCommGetAsyncError(comm, &error), ncclSuccess);
    return error;
}

ncclUniqueId new_id() {
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
void run_ranks(int size, const std::function<void(Rank&)>& body) {
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

// ---- values ----

template <class T>
constexpr ncclDataType_t kType = ncclFloat32;
template <>
constexpr ncclDataType_t kType<int8_t> = ncclInt8;
template <>
constexpr ncclDataType_t kType<uint8_t> = ncclUint8;
template <>
constexpr ncclDataType_t kType<int32_t> = ncclInt32;
template <>
constexpr ncclDataType_t kType<uint32_t> = ncclUint32;
template <>
constexpr ncclDataType_t kType<int64_t> = ncclInt64;
template <>
constexpr ncclDataType_t kType<uint64_t> = ncclUint64;
template <>
constexpr ncclDataType_t kType<double> = ncclFloat64;
template <>
constexpr ncclDataType_t kType<bf16> = ncclBfloat16;

// Rank `rank`'s element i: all bits vary, sums of eight fit into 64.
template <class T>
T value(int rank, size_t i) {
    const uint64_t bits = llmc::mix64(1000003 * (i + 1) + static_cast<uint64_t>(rank));
    if constexpr (std::is_integral_v<T>) {
        const T full = static_cast<T>(bits);
        return sizeof(T) == 8 ? static_cast<T>(full / 16) : full;
    } else {
        const double x =
            (static_cast<double>(bits >> 11) * 0x1p-53 - 0.5) * std::pow(2.0, bits % 9);
        if constexpr (std::is_same_v<T, bf16>) return llmc::from_float<bf16>(static_cast<float>(x));
        if constexpr (!std::is_same_v<T, bf16>) return static_cast<T>(x);
    }
}

template <class T>
std::vector<T> values(int rank, size_t count) {
    std::vector<T> result(count);
    for (size_t i = 0; i < count; ++i) result[i] = value<T>(rank, i);
    return result;
}

// The reduction of element i over all ranks, as NCCL's operations are defined; sums go in rank
// order in the type, bf16 in fp32.
template <class T>
T expected(ncclRedOp_t op, int size, size_t i) {
    const auto read = [&](int rank) {
        const T x = value<T>(rank, i);
        if constexpr (std::is_same_v<T, bf16>) return llmc::to_float(x);
        if constexpr (std::is_floating_point_v<T>) return x;
        if constexpr (std::is_integral_v<T>) return static_cast<__int128>(x);
    };
    auto result = read(0);
    for (int rank = 1; rank < size; ++rank) {
        const auto x = read(rank);
        if (op == ncclMax) result = x > result ? x : result;
        if (op == ncclMin) result = x < result ? x : result;
        if (op == ncclSum || op == ncclAvg) result = result + x;
    }
    if (op == ncclAvg) result = result / static_cast<decltype(result)>(size);
    if constexpr (std::is_same_v<T, bf16>) return llmc::from_float<bf16>(result);
    if constexpr (!std::is_same_v<T, bf16>) return static_cast<T>(result);
}

// The place of the first element that is another, or -1.
template <class T>
long first_difference(const std::vector<T>& is, const std::vector<T>& should) {
    if (is.size() != should.size()) return -2;
    for (size_t i = 0; i < is.size(); ++i) {
        if (std::memcmp(&is[i], &should[i], sizeof(T)) != 0) return static_cast<long>(i);
    }
    return -1;
}

template <class T>
void check_all_reduce(Rank& self, ncclRedOp_t op, size_t count) {
    std::vector<T> should(count);
    for (size_t i = 0; i < count; ++i) should[i] = expected<T>(op, self.size, i);
    std::vector<T> in = values<T>(self.rank, count), out(count);
    EXPECT_EQ(ncclAllReduce(in.data(), out.data(), count, kType<T>, op, self.comm, self.stream),
              ncclSuccess);
    self.synchronize();
    EXPECT_EQ(first_difference(out, should), -1) << "type " << kType<T> << " op " << op;
    EXPECT_EQ(first_difference(in, values<T>(self.rank, count)), -1);
    ncclAllReduce(in.data(), in.data(), count, kType<T>, op, self.comm, self.stream);
    self.synchronize();
    EXPECT_EQ(first_difference(in, should), -1) << "in place, type " << kType<T> << " op " << op;
}

template <class T>
void check_reduce_scatter(Rank& self, ncclRedOp_t op, size_t count) {
    const size_t first = count * static_cast<size_t>(self.rank);
    std::vector<T> should(count);
    for (size_t i = 0; i < count; ++i) should[i] = expected<T>(op, self.size, first + i);
    const std::vector<T> in = values<T>(self.rank, count * static_cast<size_t>(self.size));
    std::vector<T> out(count), in_place = in;
    ncclReduceScatter(in.data(), out.data(), count, kType<T>, op, self.comm, self.stream);
    ncclReduceScatter(in_place.data(), in_place.data() + first, count, kType<T>, op, self.comm,
                      self.stream);
    self.synchronize();
    EXPECT_EQ(first_difference(out, should), -1) << "type " << kType<T> << " op " << op;
    std::copy(should.begin(), should.end(), out.begin());
    for (size_t i = 0; i < in.size(); ++i) {
        const bool mine = i >= first && i < first + count;
        const T& is = in_place[i];
        ASSERT_EQ(std::memcmp(&is, mine ? &should[i - first] : &in[i], sizeof(T)), 0)
            << "element " << i << (mine ? " of this rank" : " of another rank");
    }
}

template <class T>
void check_all_gather(Rank& self, size_t count) {
    std::vector<T> should;
    for (int rank = 0; rank < self.size; ++rank) {
        const std::vector<T> part = values<T>(rank, count);
        should.insert(should.end(), part.begin(), part.end());
    }
    const std::vector<T> in = values<T>(self.rank, count);
    std::vector<T> out(should.size()), in_place(should.size());
    T* const own = in_place.data() + count * static_cast<size_t>(self.rank);
    std::copy(in.begin(), in.end(), own);
    ncclAllGather(in.data(), out.data(), count, kType<T>, self.comm, self.stream);
    ncclAllGather(own, in_place.data(), count, kType<T>, self.comm, self.stream);
    self.synchronize();
    EXPECT_EQ(first_difference(out, should), -1);
    EXPECT_EQ(first_difference(in_place, should), -1);
}

template <class T>
void check_broadcast(Rank& self, size_t count) {
    for (int root = 0; root < self.size; ++root) {
        const std::vector<T> should = values<T>(root, count);
        const std::vector<T> in = values<T>(self.rank, count);
        std::vector<T> out(count), in_place = in;
        const T* const source = self.rank == root ? in.data() : nullptr;
        EXPECT_EQ(ncclBroadcast(source, out.data(), count, kType<T>, root, self.comm, self.stream),
                  ncclSuccess);
        ncclBroadcast(in_place.data(), in_place.data(), count, kType<T>, root, self.comm,
                      self.stream);
        self.synchronize();
        EXPECT_EQ(first_difference(out, should), -1);
        EXPECT_EQ(first_difference(in_place, should), -1);
    }
}

template <class T>
void check_type(Rank& self) {
    for (const size_t count : {size_t{0}, size_t{1}, size_t{7}, size_t{2051}}) {
        for (const ncclRedOp_t op : {ncclSum, ncclAvg, ncclMin, ncclMax}) {
            check_all_reduce<T>(self, op, count);
            check_reduce_scatter<T>(self, op, count);
        }
        check_all_gather<T>(self, count);
        check_broadcast<T>(self, count);
    }
}

class NcclStandinRanks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(N, NcclStandinRanks, testing::Values(1, 2, 3, 4, 8));

TEST_P(NcclStandinRanks, EveryTypeAndOperationGivesTheExactValues) {
    run_ranks(GetParam(), [](Rank& self) {
        check_type<float>(self);
        check_type<bf16>(self);
        check_type<double>(self);
        check_type<int8_t>(self);
        check_type<uint8_t>(self);
        check_type<int32_t>(self);
        check_type<uint32_t>(self);
        check_type<int64_t>(self);
        check_type<uint64_t>(self);
    });
}

TEST_P(NcclStandinRanks, AGroupOfMessagesGoesTogether) {
    run_ranks(GetParam(), [](Rank& self) {
        // From each rank to each, its own included: two messages of sizes that tell all apart.
        const auto size = [](int from, int to, int n) {
            return static_cast<size_t>(from * 1000 + to * 10 + n * 5);
        };
        std::vector<std::vector<float>> in, out;
        for (int peer = 0; peer < self.size; ++peer) {
            for (int n = 0; n < 2; ++n) {
                out.push_back(
                    values<float>(self.rank * 100 + peer * 2 + n, size(self.rank, peer, n)));
                in.emplace_back(size(peer, self.rank, n));
            }
        }
        ncclGroupStart();
        for (int peer = 0; peer < self.size; ++peer) {
            for (int n = 0; n < 2; ++n) {
                auto& message = out[static_cast<size_t>(2 * peer + n)];
                EXPECT_EQ(ncclSend(message.data(), message.size(), ncclFloat, peer, self.comm,
                                   self.stream),
                          ncclSuccess);
            }
        }
        for (int peer = 0; peer < self.size; ++peer) {
            for (int n = 0; n < 2; ++n) {
                auto& message = in[static_cast<size_t>(2 * peer + n)];
                ncclRecv(message.data(), message.size(), ncclFloat, peer, self.comm, self.stream);
            }
        }
        EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
        self.synchronize();
        for (int peer = 0; peer < self.size; ++peer) {
            for (int n = 0; n < 2; ++n) {
                const auto should =
                    values<float>(peer * 100 + self.rank * 2 + n, size(peer, self.rank, n));
                EXPECT_EQ(first_difference(in[static_cast<size_t>(2 * peer + n)], should), -1);
            }
        }
    });
}

TEST_P(NcclStandinRanks, AGroupOfCollectivesMayUseTwoStreams) {
    run_ranks(GetParam(), [](Rank& self) {
        cudaStream_t second;
        cudaStreamCreate(&second);
        const size_t count = 777, all = count * static_cast<size_t>(self.size);
        std::vector<float> a = values<float>(self.rank, all), b = a, c = a;
        const size_t first = count * static_cast<size_t>(self.rank);
        ncclGroupStart();
        ncclGroupStart();
        ncclReduceScatter(a.data(), a.data() + first, count, ncclFloat, ncclSum, self.comm,
                          self.stream);
        EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
        give_time();
        EXPECT_EQ(first_difference(a, b), -1) << "issued before the end of the outer group";
        ncclReduceScatter(b.data(), b.data() + first, count, ncclFloat, ncclAvg, self.comm, second);
        ncclAllReduce(c.data(), c.data(), all, ncclFloat, ncclMax, self.comm, second);
        EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
        cudaStreamSynchronize(second);
        for (size_t i = 0; i < all; ++i) {
            ASSERT_EQ(c[i], expected<float>(ncclMax, self.size, i));
            if (i < first || i >= first + count) continue;
            ASSERT_EQ(a[i], expected<float>(ncclSum, self.size, i));
            ASSERT_EQ(b[i], expected<float>(ncclAvg, self.size, i));
        }
        self.synchronize();
        cudaStreamDestroy(second);
    });
}

TEST(NcclStandin, ThreeRanksThatHoldThreeInBf16HaveTheMeanThree) {
    run_ranks(3, [](Rank& self) {
        std::vector<bf16> x(1001, llmc::from_float<bf16>(3.0f));
        ncclAllReduce(x.data(), x.data(), x.size(), ncclBfloat16, ncclAvg, self.comm, self.stream);
        self.synchronize();
        for (const bf16 v : x) ASSERT_EQ(llmc::to_float(v), 3.0f);
    });
}

TEST(NcclStandin, SixtyFourMebibytes) {
    constexpr size_t kCount = (size_t{64} << 20) / sizeof(float);
    run_ranks(2, [](Rank& self) {
        std::vector<float> out(kCount), in(kCount);
        for (size_t i = 0; i < kCount; ++i) out[i] = static_cast<float>(i % 10007) + self.rank;
        ncclGroupStart();
        ncclSend(out.data(), kCount, ncclFloat, 1 - self.rank, self.comm, self.stream);
        ncclRecv(in.data(), kCount, ncclFloat, 1 - self.rank, self.comm, self.stream);
        ncclGroupEnd();
        ncclAllReduce(out.data(), out.data(), kCount, ncclFloat, ncclSum, self.comm, self.stream);
        self.synchronize();
        for (size_t i = 0; i < kCount; ++i) {
            ASSERT_EQ(in[i], static_cast<float>(i % 10007) + 1 - self.rank);
            ASSERT_EQ(out[i], 2 * static_cast<float>(i % 10007) + 1);
        }
    });
}

// ---- streams ----

TEST(NcclStandin, OnlyAnEventOrdersACollectiveBehindAnotherStream) {
    for (const bool with_wait : {false, true}) {
        run_ranks(2, [with_wait](Rank& self) {
            cudaStream_t compute;
            cudaEvent_t event;
            cudaStreamCreate(&compute);
            cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
            const float fresh = 5;
            float gradient = 1, sum = 0;
            StreamGate gate;
            gate.close(compute);
            cudaMemcpyAsync(&gradient, &fresh, sizeof(fresh), cudaMemcpyDefault, compute);
            cudaEventRecord(event, compute);
            if (with_wait) cudaStreamWaitEvent(self.stream, event);
            EXPECT_EQ(ncclAllReduce(&gradient, &sum, 1, ncclFloat, ncclSum, self.comm, self.stream),
                      ncclSuccess);
            if (!with_wait) {
                self.synchronize();
                EXPECT_EQ(sum, 2);
            } else {
                give_time();
                EXPECT_EQ(cudaStreamQuery(self.stream), cudaErrorNotReady);
                EXPECT_EQ(sum, 0);
            }
            gate.open();
            self.synchronize();
            cudaStreamSynchronize(compute);
            EXPECT_EQ(sum, with_wait ? 10 : 2);
            cudaEventDestroy(event);
            cudaStreamDestroy(compute);
        });
    }
}

TEST(NcclStandin, TwoCommunicatorsAtOnceKeepApart) {
    const ncclUniqueId id = new_id();
    run_ranks(3, [&id](Rank& first) {
        Rank second(first.rank, first.size, id);
        ASSERT_EQ(second.start, ncclSuccess);
        std::vector<std::vector<float>> a, b;
        for (int i = 0; i < 20; ++i) {
            a.push_back(values<float>(first.rank, 1000));
            b.push_back(values<float>(first.rank, 1000));
        }
        for (size_t i = 0; i < a.size(); ++i) {
            ncclAllReduce(a[i].data(), a[i].data(), 1000, ncclFloat, ncclSum, first.comm,
                          first.stream);
            ncclAllReduce(b[i].data(), b[i].data(), 1000, ncclFloat, ncclMin, second.comm,
                          second.stream);
        }
        first.synchronize();
        second.synchronize();
        for (size_t i = 0; i < 1000; ++i) {
            ASSERT_EQ(a.back()[i], expected<float>(ncclSum, 3, i));
            ASSERT_EQ(b.back()[i], expected<float>(ncclMin, 3, i));
        }
    });
}

TEST(NcclStandin, ManyStartsInARow) {
    for (int i = 0; i < 20; ++i) {
        run_ranks(2, [](Rank& self) {
            int one = 1;
            ncclAllReduce(&one, &one, 1, ncclInt, ncclSum, self.comm, self.stream);
            self.synchronize();
            EXPECT_EQ(one, 2);
        });
    }
}

TEST(NcclStandin, OneThreadStartsTwoRanksInAGroup) {
    const ncclUniqueId id = new_id();
    ncclComm_t comms[2] = {};
    cudaStream_t streams[2];
    int values[2] = {1, 2};
    ncclGroupStart();
    for (int rank = 0; rank < 2; ++rank) {
        cudaStreamCreate(&streams[rank]);
        EXPECT_EQ(ncclCommInitRank(&comms[rank], 2, id, rank), ncclSuccess);
    }
    ASSERT_EQ(ncclGroupEnd(), ncclSuccess);
    ncclGroupStart();
    for (int rank = 0; rank < 2; ++rank) {
        ncclAllReduce(&values[rank], &values[rank], 1, ncclInt, ncclSum, comms[rank],
                      streams[rank]);
    }
    EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
    for (int rank = 0; rank < 2; ++rank) {
        cudaStreamSynchronize(streams[rank]);
        EXPECT_EQ(values[rank], 3);
        int count = 0, user_rank = -1;
        EXPECT_EQ(ncclCommCount(comms[rank], &count), ncclSuccess);
        EXPECT_EQ(ncclCommUserRank(comms[rank], &user_rank), ncclSuccess);
        EXPECT_EQ(count, 2);
        EXPECT_EQ(user_rank, rank);
    }
    for (int rank = 0; rank < 2; ++rank) {
        ncclCommDestroy(comms[rank]);
        cudaStreamDestroy(streams[rank]);
    }
}

// ---- the end ----

// One rank leaves while another still works on other things: no failure, and all data is there.
TEST(NcclStandin, ARankThatHasLeftInOrderIsNoFailure) {
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

TEST(NcclStandin, AbortEndsTheWaitForASilentRank) {
    run_ranks(3, [](Rank& self) {
        std::vector<float> x(1 << 22, 1.0f);
        const Clock::time_point start = Clock::now();
        if (self.rank != 1) {
            ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat, ncclSum, self.comm, self.stream);
            ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat, ncclSum, self.comm, self.stream);
            give_time();
            EXPECT_EQ(cudaStreamQuery(self.stream), cudaErrorNotReady);
        } else {
            std::this_thread::sleep_for(std::chrono::milliseconds(300));
        }
        EXPECT_EQ(ncclCommAbort(self.comm), ncclSuccess);
        self.synchronize();
        EXPECT_LT(seconds_since(start), kSoon);
        ncclCommInitRank(&self.comm, 1, new_id(), 0);
    });
}

// The peers of a rank that aborts lose it; their streams go on, later calls return the error.
TEST(NcclStandin, AnAbortIsTheOthersRemoteError) {
    const ncclUniqueId id = new_id();
    std::thread quitter([&] {
        Rank self(1, 2, id);
        ncclCommAbort(self.comm);
        self.comm = nullptr;
    });
    Rank self(0, 2, id);
    ASSERT_EQ(self.start, ncclSuccess);
    float x = 1, after = 0;
    const float mark = 7;
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

TEST(NcclStandin, RanksThatDisagreeOnTheSizeWaitAndDoNotCrash) {
    run_ranks(2, [](Rank& self) {
        std::vector<float> x(100);
        ncclAllReduce(x.data(), x.data(), 100 - self.rank * 50, ncclFloat, ncclSum, self.comm,
                      self.stream);
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        EXPECT_EQ(cudaStreamQuery(self.stream), cudaErrorNotReady);
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

TEST(NcclStandin, AKilledRankIsSeenByAnIdleCommunicator) {
    run_with_child("nccl passive rank", [](Rank& self, pid_t pid) {
        if (self.rank == 0) kill(pid, SIGKILL);
        expect_loss_of_rank_2(self);
    });
}

// Rank 2 dies half way through a message: Gloo alone leaves its receiver waiting.
TEST(NcclStandin, AKilledRankEndsTheMessagesUnderWay) {
    for (int milliseconds : {3, 20, 50}) {
        run_with_child("nccl busy rank", [milliseconds](Rank& self, pid_t pid) {
            std::vector<float> x(1 << 24);
            for (int i = 0; i < 50; ++i) {
                ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat, ncclSum, self.comm,
                              self.stream);
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
            if (self.rank == 0) kill(pid, SIGKILL);
            expect_loss_of_rank_2(self);
        });
    }
}

TEST(NcclStandin, AbortEndsTheWaitForAStoppedRank) {
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

TEST(NcclStandin, DestroyDoesNotWaitForAStoppedRank) {
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

TEST(NcclStandin, ExitDuringACollectiveEndsTheProcess) {
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

TEST(NcclStandin, ANonblockingStartReturnsAtOnce) {
    const ncclUniqueId id = new_id();
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
        threads.emplace_back([&, rank] {
            ncclConfig_t config = nonblocking();
            cudaStream_t stream;
            cudaStreamCreate(&stream);
            ncclComm_t comm;
            float x = 2;
            if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
            EXPECT_EQ(ncclCommInitRankConfig(&comm, 2, id, rank, &config), ncclInProgress);
            if (rank == 0) {
                EXPECT_EQ(async_error(comm), ncclInProgress);
                EXPECT_EQ(ncclAllReduce(&x, &x, 1, ncclFloat, ncclSum, comm, stream),
                          ncclInvalidArgument);
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

TEST(NcclStandin, AStartWithAMissingRankCanBeAborted) {
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

TEST(NcclStandin, StrangersDoNotDisturbAStart) {
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

TEST(NcclStandin, ASecondRankOfOneNumberIsRefused) {
    const ncclUniqueId id = new_id();
    ncclConfig_t config = nonblocking();
    ncclComm_t first, second;
    EXPECT_EQ(ncclCommInitRankConfig(&first, 2, id, 0, &config), ncclInProgress);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    EXPECT_EQ(ncclCommInitRank(&second, 2, id, 0), ncclInvalidUsage);
    EXPECT_EQ(second, nullptr);
    EXPECT_STREQ(ncclGetLastError(nullptr), "there are two ranks 0");
    EXPECT_EQ(ncclCommInitRank(&second, 3, id, 1), ncclInvalidUsage);
    EXPECT_STREQ(ncclGetLastError(nullptr), "rank 1 expects 3 ranks, the others expect 2");
    // The first goes on as if nothing had been.
    EXPECT_EQ(ncclCommInitRank(&second, 2, id, 1), ncclSuccess);
    EXPECT_TRUE(eventually([&] { return async_error(first) == ncclSuccess; }));
    ncclCommDestroy(first);
    ncclCommDestroy(second);
}

TEST(NcclStandin, AnIdWhoseProcessHasGoneIsAnError) {
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

TEST(NcclStandin, WrongArgumentsAreRefused) {
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

TEST(NcclStandin, VersionAndErrorsHaveNames) {
    int version = 0;
    EXPECT_EQ(ncclGetVersion(&version), ncclSuccess);
    EXPECT_EQ(version, 22809);
    EXPECT_STREQ(ncclGetErrorString(ncclSuccess), "no error");
    EXPECT_STREQ(ncclGetErrorString(ncclInProgress), "in progress");
    EXPECT_STREQ(ncclGetErrorString(static_cast<ncclResult_t>(99)), "unknown result code");
}

}  // namespace

#endif  // MULTI_GPU
