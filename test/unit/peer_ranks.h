// Ranks of a run in threads of the test, for tests of the connections between them.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <initializer_list>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "llmc/peers.h"

namespace llmc::peer_test {

namespace hs = llmc::handshake;

using PeersPointer = std::unique_ptr<Peers>;

const char* const kJob = "the job of this test";
const char* const kName = "allgather of layer 4";

struct Id {
    unsigned char bytes[kIdBytes] = {};
    explicit Id(unsigned char first = 0) {
        for (size_t i = 0; first != 0 && i < kIdBytes; ++i) {
            bytes[i] = static_cast<unsigned char>(first + 7 * i);
        }
    }
    std::string text() const { return std::string(bytes, bytes + kIdBytes); }
};

inline double seconds_since(net::Deadline start) {
    return std::chrono::duration<double>(net::Clock::now() - start).count();
}

inline void sleep_ms(int ms) {
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

template <class Condition>
bool happens_within(double seconds, Condition&& condition) {
    const net::Deadline deadline = net::after(seconds);
    while (!condition()) {
        if (net::Clock::now() >= deadline) return false;
        sleep_ms(2);
    }
    return true;
}

// What a rank got: its connection and the id, or an error.
struct Outcome {
    PeersPointer peers;
    Id id;
    std::string error = "";
};

template <class Join>
std::future<Outcome> in_thread(Join join) {
    return std::async(std::launch::async, [join] {
        Outcome outcome;
        try {
            outcome.peers = join(&outcome.id);
        } catch (const Error& error) {
            outcome.error = error.what();
        }
        return outcome;
    });
}

inline PeerInfo info(int rank, int size, const std::string& device = "") {
    return {rank, size, 1, device};
}

// Seconds. No test waits so long for an end that comes, and half of it is long enough for one that comes
// at once, on a busy machine, too.
constexpr double kLong = 100;

// A process that began so long ago, and stays long to tell others that it declines.
inline StartTiming began_ago(double seconds) {
    return {net::Clock::now() - std::chrono::milliseconds(static_cast<int>(1000 * seconds)), kLong};
}

inline std::future<Outcome> serve(PeerServer* server, const PeerInfo& self,
                                  double limit_s = kLong) {
    return in_thread([=](Id* id) {
        *id = Id(1);
        return server->wait_for_all(self, id->bytes, limit_s);
    });
}

inline std::future<Outcome> join(int port, const PeerInfo& self, double limit_s = kLong,
                                 const std::string& job = kJob, uint64_t token = 0,
                                 const StartTiming& timing = {}) {
    return in_thread([=](Id* id) {
        return join_peers({{"127.0.0.1", port}}, job, self, id->bytes, limit_s, "-ps", token,
                          timing);
    });
}

// All ranks of a run, in threads of this process. Those in `elsewhere` are left to the caller.
inline std::vector<PeersPointer> start_ranks(int size, PeerServer* server,
                                             const std::set<int>& elsewhere = {}) {
    std::vector<std::future<Outcome>> futures;
    std::vector<PeersPointer> peers(static_cast<size_t>(size));
    for (int rank = 0; rank < size; ++rank) {
        if (elsewhere.count(rank) > 0) {
            futures.emplace_back();
        } else {
            futures.push_back(rank == 0 ? serve(server, info(0, size))
                                        : join(server->port(), info(rank, size)));
        }
    }
    for (size_t rank = 0; rank < futures.size(); ++rank) {
        if (!futures[rank].valid()) continue;
        Outcome outcome = futures[rank].get();
        EXPECT_EQ(outcome.error, "");
        EXPECT_EQ(outcome.id.text(), Id(1).text());
        peers[rank] = std::move(outcome.peers);
    }
    return peers;
}

inline void close_all(std::vector<PeersPointer>* peers) {
    std::vector<std::future<void>> closings;
    for (PeersPointer& one : *peers) {
        if (one == nullptr) continue;
        closings.push_back(std::async(std::launch::async, [&one] { one->close(); }));
    }
    for (std::future<void>& closing : closings) closing.get();
}

// All these come together, and part again.
inline void expect_start(std::initializer_list<std::future<Outcome>*> futures) {
    std::vector<PeersPointer> all;
    for (std::future<Outcome>* future : futures) {
        all.push_back(future->get().peers);
        ASSERT_NE(all.back(), nullptr);
    }
    close_all(&all);
}

inline net::Socket connect(int port) {
    net::Socket socket = net::connect_to({"127.0.0.1", port}, net::after(5));
    EXPECT_TRUE(socket);
    return socket;
}

inline hs::MessageBytes hello_bytes(int rank, int size, uint32_t version = hs::kProtocolVersion) {
    hs::Message hello;
    hello.rank = rank;
    hello.size = size;
    hello.version = version;
    hello.job_token = hs::job_token_of(kJob);
    return hs::encode(hello);
}

}  // namespace llmc::peer_test
