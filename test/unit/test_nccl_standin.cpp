// The stand-in for NCCL: values, groups and streams, with N threads as the N ranks.
#ifdef MULTI_GPU

#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>
#include <type_traits>
#include <vector>

#include "llmc/hash.h"
#include "llmc/precision.h"
#include "test/unit/nccl_ranks.h"
#include "test/unit/stream_gate.h"

#ifdef __SANITIZE_THREAD__
// Gloo's library is not compiled with the sanitizer, which therefore does not see the reference
// count by which a buffer's destructor waits for Gloo's thread to let go of it.
extern "C" const char* __tsan_default_suppressions() {
    return "race:gloo::transport::tcp::UnboundBuffer::handle*Completion\n";
}
#endif

namespace {

using llmc::bf16;
using llmc::test::give_time;
using llmc::test::new_id;
using llmc::test::Rank;
using llmc::test::run_ranks;
using llmc::test::StreamGate;

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

using Bytes = std::vector<char>;

// One type, its values and reductions as bytes, so that the checks are compiled once for all types.
struct TypeCase {
    ncclDataType_t type;
    size_t bytes;
    Bytes (*values)(int rank, size_t count);
    Bytes (*reductions)(ncclRedOp_t op, int size, size_t first, size_t count);
};
template <class T>
TypeCase type_case(ncclDataType_t type) {
    return {type, sizeof(T),
            [](int rank, size_t count) {
                Bytes result(count * sizeof(T));
                for (size_t i = 0; i < count; ++i) {
                    const T x = value<T>(rank, i);
                    std::memcpy(result.data() + i * sizeof(T), &x, sizeof(T));
                }
                return result;
            },
            [](ncclRedOp_t op, int size, size_t first, size_t count) {
                Bytes result(count * sizeof(T));
                for (size_t i = 0; i < count; ++i) {
                    const T x = expected<T>(op, size, first + i);
                    std::memcpy(result.data() + i * sizeof(T), &x, sizeof(T));
                }
                return result;
            }};
}
const TypeCase kTypes[] = {
    type_case<float>(ncclFloat32),   type_case<bf16>(ncclBfloat16), type_case<double>(ncclFloat64),
    type_case<int8_t>(ncclInt8),     type_case<uint8_t>(ncclUint8), type_case<int32_t>(ncclInt32),
    type_case<uint32_t>(ncclUint32), type_case<int64_t>(ncclInt64), type_case<uint64_t>(ncclUint64),
};

std::vector<float> floats(int rank, size_t count) {
    std::vector<float> result(count);
    for (size_t i = 0; i < count; ++i) result[i] = value<float>(rank, i);
    return result;
}

void check_all_reduce(Rank& self, const TypeCase& t, ncclRedOp_t op, size_t count) {
    const Bytes should = t.reductions(op, self.size, 0, count);
    const Bytes in = t.values(self.rank, count);
    Bytes out(in.size()), in_place = in;
    EXPECT_EQ(ncclAllReduce(in.data(), out.data(), count, t.type, op, self.comm, self.stream),
              ncclSuccess);
    ncclAllReduce(in_place.data(), in_place.data(), count, t.type, op, self.comm, self.stream);
    self.synchronize();
    EXPECT_TRUE(out == should) << "type " << t.type << " operation " << op << " count " << count;
    EXPECT_TRUE(in_place == should) << "in place, type " << t.type << " operation " << op;
    EXPECT_TRUE(in == t.values(self.rank, count));
}

void check_reduce_scatter(Rank& self, const TypeCase& t, ncclRedOp_t op, size_t count) {
    const size_t first = count * static_cast<size_t>(self.rank);
    const Bytes part = t.reductions(op, self.size, first, count);
    const Bytes in = t.values(self.rank, count * static_cast<size_t>(self.size));
    Bytes out(part.size()), in_place = in, should = in;
    std::copy(part.begin(), part.end(), should.begin() + static_cast<long>(first * t.bytes));
    ncclReduceScatter(in.data(), out.data(), count, t.type, op, self.comm, self.stream);
    ncclReduceScatter(in_place.data(), in_place.data() + first * t.bytes, count, t.type, op,
                      self.comm, self.stream);
    self.synchronize();
    EXPECT_TRUE(out == part) << "type " << t.type << " operation " << op << " count " << count;
    // What lies outside this rank's part is as before.
    EXPECT_TRUE(in_place == should) << "in place, type " << t.type << " operation " << op;
}

void check_all_gather(Rank& self, const TypeCase& t, size_t count) {
    Bytes should;
    for (int rank = 0; rank < self.size; ++rank) {
        const Bytes part = t.values(rank, count);
        should.insert(should.end(), part.begin(), part.end());
    }
    const Bytes in = t.values(self.rank, count);
    Bytes out(should.size()), in_place(should.size());
    char* const own = in_place.data() + in.size() * static_cast<size_t>(self.rank);
    std::copy(in.begin(), in.end(), own);
    ncclAllGather(in.data(), out.data(), count, t.type, self.comm, self.stream);
    ncclAllGather(own, in_place.data(), count, t.type, self.comm, self.stream);
    self.synchronize();
    EXPECT_TRUE(out == should);
    EXPECT_TRUE(in_place == should);
}

void check_broadcast(Rank& self, const TypeCase& t, size_t count) {
    for (int root = 0; root < self.size; ++root) {
        const Bytes should = t.values(root, count), in = t.values(self.rank, count);
        Bytes out(in.size()), in_place = in;
        const char* const source = self.rank == root ? in.data() : nullptr;
        EXPECT_EQ(ncclBroadcast(source, out.data(), count, t.type, root, self.comm, self.stream),
                  ncclSuccess);
        ncclBroadcast(in_place.data(), in_place.data(), count, t.type, root, self.comm,
                      self.stream);
        self.synchronize();
        EXPECT_TRUE(out == should);
        EXPECT_TRUE(in_place == should);
    }
}

class NcclStandinRanks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(N, NcclStandinRanks, testing::Values(1, 2, 3, 4, 8));

TEST_P(NcclStandinRanks, EveryTypeAndOperationGivesTheExactValues) {
    run_ranks(GetParam(), [](Rank& self) {
        // Also none, and fewer elements than ranks.
        const auto check = [&](const TypeCase& t, size_t count) {
            for (const ncclRedOp_t op : {ncclSum, ncclAvg, ncclMin, ncclMax}) {
                check_all_reduce(self, t, op, count);
                check_reduce_scatter(self, t, op, count);
            }
            check_all_gather(self, t, count);
            check_broadcast(self, t, count);
        };
        for (const size_t count : {0, 1, 2, 7}) check(kTypes[0], count);
        for (const TypeCase& t : kTypes) check(t, 1031);
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
                out.push_back(floats(self.rank * 100 + peer * 2 + n, size(self.rank, peer, n)));
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
                    floats(peer * 100 + self.rank * 2 + n, size(peer, self.rank, n));
                EXPECT_TRUE(in[static_cast<size_t>(2 * peer + n)] == should);
            }
        }
    });
}

TEST_P(NcclStandinRanks, AGroupOfCollectivesMayUseTwoStreams) {
    run_ranks(GetParam(), [](Rank& self) {
        cudaStream_t second;
        cudaStreamCreate(&second);
        const size_t count = 777, all = count * static_cast<size_t>(self.size);
        std::vector<float> a = floats(self.rank, all), b = a, c = a;
        const size_t first = count * static_cast<size_t>(self.rank);
        ncclGroupStart();
        ncclGroupStart();
        ncclReduceScatter(a.data(), a.data() + first, count, ncclFloat, ncclSum, self.comm,
                          self.stream);
        EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
        give_time();
        EXPECT_TRUE(a == b) << "issued before the end of the outer group";
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
    constexpr size_t kCount = (size_t{64} << 20) / sizeof(float) + 3;
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
            a.push_back(floats(first.rank, 1000));
            b.push_back(floats(first.rank, 1000));
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

}  // namespace

#endif  // MULTI_GPU
