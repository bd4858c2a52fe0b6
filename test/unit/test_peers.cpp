// llmc/peers.h and llmc/control_channel.h: ranks meet, whoever else calls, and watch each other.
#include "llmc/peers.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <iterator>
#include <set>

#include "test/unit/child_process.h"

namespace hs = llmc::handshake;
namespace net = llmc::net;
using llmc::Error;
using llmc::join_peers;
using llmc::kIdBytes;
using llmc::PeerInfo;
using llmc::Peers;
using llmc::PeerServer;
using PeersPointer = std::unique_ptr<Peers>;

namespace {

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

double seconds_since(net::Deadline start) {
    return std::chrono::duration<double>(net::Clock::now() - start).count();
}

void sleep_ms(int ms) {
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

PeerInfo info(int rank, int size, const std::string& device = "") {
    return {rank, size, 1, device};
}

std::future<Outcome> serve(PeerServer* server, const PeerInfo& self, double limit_s = 20) {
    return in_thread([=](Id* id) {
        *id = Id(1);
        return server->wait_for_all(self, id->bytes, limit_s);
    });
}

std::future<Outcome> join(int port, const PeerInfo& self, double limit_s = 20,
                          const std::string& job = kJob, uint64_t token = 0) {
    return in_thread([=](Id* id) {
        return join_peers({{"127.0.0.1", port}}, job, self, id->bytes, limit_s, "-ps", token);
    });
}

// All ranks of a run, in threads of this process. Those in `elsewhere` are left to the caller.
std::vector<PeersPointer> start_ranks(int size, PeerServer* server,
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

void close_all(std::vector<PeersPointer>* peers) {
    std::vector<std::future<void>> closings;
    for (PeersPointer& one : *peers) {
        if (one == nullptr) continue;
        closings.push_back(std::async(std::launch::async, [&one] { one->close(); }));
    }
    for (std::future<void>& closing : closings) closing.get();
}

// ---- a rank in a process of its own, that can be killed or stopped

std::string variable(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

// The child: joins as the variables say, notes a position, and stays.
std::string run_child_rank() {
    const int rank = std::stoi(variable("TEST_RANK")), size = std::stoi(variable("TEST_SIZE"));
    const int port = std::stoi(variable("TEST_PORT"));
    Id id(1);
    PeersPointer peers;
    try {
        if (rank == 0) {
            PeerServer server("127.0.0.1", port, kJob, "");
            peers = server.wait_for_all(info(0, size), id.bytes, 20);
        } else {
            peers = join_peers({{"127.0.0.1", port}}, kJob, info(rank, size), id.bytes, 20, "");
        }
    } catch (const Error& error) {
        std::fprintf(stderr, "child: %s\n", error.what());
        _exit(1);
    }
    peers->progress(12, 40, kName);
    while (peers->failure().empty()) sleep_ms(20);
    _exit(0);
}

const llmc::test::ChildMode child_mode("peers", run_child_rank);

class Child {
  public:
    Child(int rank, int size, int port) {
        std::vector<std::string> variables;
        for (char** entry = environ; *entry != nullptr; ++entry) variables.emplace_back(*entry);
        variables.push_back(std::string(llmc::test::kModeVariable) + "=peers");
        variables.push_back("TEST_RANK=" + std::to_string(rank));
        variables.push_back("TEST_SIZE=" + std::to_string(size));
        variables.push_back("TEST_PORT=" + std::to_string(port));
        std::vector<char*> pointers;
        for (std::string& one : variables) pointers.push_back(one.data());
        pointers.push_back(nullptr);
        char program[] = "/proc/self/exe";
        char* arguments[] = {program, nullptr};
        EXPECT_EQ(posix_spawn(&pid_, program, nullptr, nullptr, arguments, pointers.data()), 0);
    }
    ~Child() {
        send(SIGCONT);
        send(SIGKILL);
        waitpid(pid_, nullptr, 0);
    }
    void send(int signal) const { kill(pid_, signal); }

  private:
    pid_t pid_ = -1;
};

int free_port() {
    return net::local_port(net::listen_on("127.0.0.1", 0, ""));
}

net::Socket connect(int port) {
    net::Socket socket = net::connect_to({"127.0.0.1", port}, net::after(5));
    EXPECT_TRUE(socket);
    return socket;
}

hs::MessageBytes hello_bytes(int rank, int size, uint32_t version = hs::kProtocolVersion) {
    hs::Message hello;
    hello.rank = rank;
    hello.size = size;
    hello.version = version;
    hello.job_token = hs::job_token_of(kJob);
    return hs::encode(hello);
}

// A rank that dies as soon as it has been counted.
void say_hello(int port, int rank, int size) {
    const net::Socket socket = connect(port);
    const hs::MessageBytes hello = hello_bytes(rank, size);
    ASSERT_TRUE(net::send_all(socket, hello.data(), hello.size(), net::after(1)));
    hs::MessageBytes answer;
    ASSERT_TRUE(net::receive_all(socket, answer.data(), answer.size(), net::after(2)));
}

// ---- the start

TEST(Peers, EveryRankLearnsTheTableAndTheId) {
    const int size = 5;
    PeerServer server("127.0.0.1", 0, kJob, "");
    const auto self = [](int rank) {
        return PeerInfo{rank, size, static_cast<uint64_t>(rank / 2), "gpu" + std::to_string(rank)};
    };
    std::vector<std::future<Outcome>> futures;
    futures.push_back(serve(&server, self(0)));
    for (const int rank : {3, 1, 4, 2}) futures.push_back(join(server.port(), self(rank)));
    std::vector<PeersPointer> all;
    for (std::future<Outcome>& future : futures) {
        Outcome outcome = future.get();
        ASSERT_EQ(outcome.error, "");
        EXPECT_EQ(outcome.id.text(), Id(1).text());
        const std::vector<PeerInfo>& table = outcome.peers->table();
        ASSERT_EQ(table.size(), static_cast<size_t>(size));
        for (int rank = 0; rank < size; ++rank) {
            const PeerInfo& row = table[static_cast<size_t>(rank)];
            EXPECT_EQ(row.rank, rank);
            EXPECT_EQ(row.size, size);
            EXPECT_EQ(row.host_hash, static_cast<uint64_t>(rank / 2));
            EXPECT_EQ(row.device, "gpu" + std::to_string(rank));
        }
        all.push_back(std::move(outcome.peers));
    }
    // Nobody else gets in.
    std::string reason;
    EXPECT_FALSE(net::connect_to({"127.0.0.1", server.port()}, net::after(1), &reason));
    EXPECT_EQ(reason, "Connection refused");
    close_all(&all);
}

TEST(Peers, OneRankNeedsNobody) {
    PeerServer server("", 0, kJob, "");
    Outcome outcome = serve(&server, info(0, 1)).get();
    ASSERT_NE(outcome.peers, nullptr);
    EXPECT_EQ(outcome.peers->table().size(), 1u);
    EXPECT_EQ(outcome.peers->late(), "all ranks answer and are before the first step");
    outcome.peers->close();
}

TEST(Peers, RanksMayStartLongBeforeRankZero) {
    const int port = free_port();
    std::future<Outcome> early = join(port, info(1, 2));
    sleep_ms(300);
    PeerServer server("127.0.0.1", port, kJob, "");
    // Nor need rank 0 serve at once.
    sleep_ms(100);
    std::vector<PeersPointer> all;
    all.push_back(serve(&server, info(0, 2)).get().peers);
    all.push_back(early.get().peers);
    ASSERT_TRUE(all[0] && all[1]);
    close_all(&all);
}

size_t open_descriptors() {
    const std::filesystem::directory_iterator folder("/proc/self/fd"), end;
    return static_cast<size_t>(std::distance(folder, end));
}

TEST(Peers, TwoHundredStartsInARow) {
    const size_t before = open_descriptors();
    const net::Deadline start = net::Clock::now();
    for (int i = 0; i < 200; ++i) {
        PeerServer server("127.0.0.1", 0, kJob, "");
        std::vector<PeersPointer> all = start_ranks(2, &server);
        ASSERT_TRUE(all[0] && all[1]) << i;
        close_all(&all);
        ASSERT_EQ(all[0]->failure() + all[1]->failure(), "") << i;
    }
    EXPECT_LT(seconds_since(start), 60);
    EXPECT_EQ(open_descriptors(), before);
}

TEST(Peers, MissingRanksAreNamedOnEveryRank) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::future<Outcome> zero = serve(&server, info(0, 8), 0.5);
    std::future<Outcome> one = join(server.port(), info(1, 8), 0.5);
    std::future<Outcome> four = join(server.port(), info(4, 8), 10);
    const std::string expected = llmc::format(
        "ranks 2, 3 and 5-7 of 8 did not arrive within 0.5 s (LLMC_INIT_TIMEOUT_S); rank 0 waited "
        "at 127.0.0.1:%d",
        server.port());
    EXPECT_EQ(zero.get().error, expected);
    EXPECT_EQ(one.get().error, expected);
    EXPECT_EQ(four.get().error, expected);
}

TEST(Peers, RankThatCameAndLeftIsNotCalledAbsent) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::future<Outcome> zero = serve(&server, info(0, 3), 0.4);
    say_hello(server.port(), 1, 3);
    EXPECT_EQ(zero.get().error,
              llmc::format("rank 2 of 3 did not arrive and rank 1 came and left again within 0.4 s "
                           "(LLMC_INIT_TIMEOUT_S); rank 0 waited at 127.0.0.1:%d",
                           server.port()));
}

// Rank 0 has more patience: the other rank leaves, after three seconds of grace.
void expect_rank_gives_up_first() {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::future<Outcome> zero = serve(&server, info(0, 3), 4);
    EXPECT_EQ(join(server.port(), info(1, 3), 0.2).get().error,
              llmc::format("rank 2 of 3 did not arrive within 0.2 s (LLMC_INIT_TIMEOUT_S); rank 0 "
                           "waits at 127.0.0.1:%d",
                           server.port()));
    zero.get();
}

TEST(Peers, AbsentRankZeroIsNamedWithItsAddress) {
    const int port = free_port();
    EXPECT_EQ(join(port, info(1, 2), 0.3).get().error,
              llmc::format("-ps: rank 0 did not answer at 127.0.0.1:%d within 0.3 s "
                           "(LLMC_INIT_TIMEOUT_S): Connection refused",
                           port));
    Id id;
    std::string error;
    const net::Deadline start = net::Clock::now();
    try {
        join_peers({{"", port}}, kJob, info(1, 2), id.bytes, 20, "-ps ''");
    } catch (const Error& e) {
        error = e.what();
    }
    EXPECT_EQ(error, "-ps '': the host's name is empty; give rank 0's host name or address");
    EXPECT_LT(seconds_since(start), 4);
}

TEST(Peers, RanksOnOneGpuAreNamedOnEveryRank) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::vector<std::future<Outcome>> futures;
    futures.push_back(serve(&server, info(0, 4, "0000:3b:00.0")));
    futures.push_back(join(server.port(), info(1, 4, "0000:5e:00.0")));
    futures.push_back(join(server.port(), info(2, 4, "0000:af:00.0")));
    futures.push_back(join(server.port(), info(3, 4, "0000:5e:00.0")));
    for (std::future<Outcome>& future : futures) {
        EXPECT_EQ(future.get().error,
                  "ranks 1 and 3 use the same GPU, 0000:5e:00.0, on one host; start one rank for "
                  "each GPU");
    }
}

// ---- who does not belong

TEST(Peers, StrangersAreToldWhyAndDoNoHarm) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    const int port = server.port();
    std::future<Outcome> zero = serve(&server, info(0, 4));
    std::future<Outcome> one = join(port, info(1, 4));
    // Until rank 1 is counted.
    sleep_ms(200);
    const auto refusal = [&](const PeerInfo& self, const std::string& job = kJob) {
        Outcome outcome = join(port, self, 5, job).get();
        EXPECT_EQ(outcome.id.text(), Id().text());
        return outcome.error;
    };
    EXPECT_EQ(refusal(info(2, 4), "another job"),
              "rank 0 refused this process, rank 2 from 127.0.0.1: its job token is not rank 0's; "
              "give all ranks of a run the same LLMC_JOB_TOKEN (where that is unset, SLURM_JOB_ID "
              "counts)");
    EXPECT_EQ(
        refusal(info(2, 3)),
        "rank 0 refused this process, rank 2 from 127.0.0.1: it was started as one of 3 ranks "
        "and rank 0 as one of 4; give all ranks the same number");
    EXPECT_EQ(refusal(info(0, 4)),
              "rank 0 refused this process, rank 0 from 127.0.0.1: it is rank 0, too; give every "
              "process a rank of its own");
    EXPECT_EQ(
        refusal(info(4, 4)),
        "rank 0 refused this process, rank 4 from 127.0.0.1: its rank 4 must be between 1 and "
        "3");
    EXPECT_EQ(refusal(info(1, 4)),
              "rank 0 refused this process, rank 1 from 127.0.0.1: rank 1 is here already, from "
              "127.0.0.1; give every process a rank of its own");
    std::future<Outcome> two = join(port, info(2, 4)), three = join(port, info(3, 4));
    std::vector<PeersPointer> all;
    for (auto* future : {&zero, &one, &two, &three}) {
        all.push_back(future->get().peers);
        ASSERT_NE(all.back(), nullptr);
    }
    close_all(&all);
}

TEST(Peers, RefusalIsNamedWhenAMissingRankIsTheReason) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::future<Outcome> zero = serve(&server, info(0, 2), 0.5);
    join(server.port(), info(1, 3), 5).get();
    EXPECT_EQ(zero.get().error,
              llmc::format("rank 1 of 2 did not arrive within 0.5 s (LLMC_INIT_TIMEOUT_S); rank 0 "
                           "waited at 127.0.0.1:%d; the last process refused was rank 1 from "
                           "127.0.0.1: it was started as one of 3 ranks and rank 0 as one of 2; "
                           "give all ranks the same number",
                           server.port()));
}

TEST(Peers, OtherProtocolVersionIsTold) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::future<Outcome> zero = serve(&server, info(0, 2), 0.3);
    const net::Socket socket = connect(server.port());
    const hs::MessageBytes hello = hello_bytes(1, 2, 9);
    // Of the other version's message only the part that never changes.
    ASSERT_TRUE(net::send_all(socket, hello.data(), 16, net::after(1)));
    hs::MessageBytes bytes;
    ASSERT_TRUE(net::receive_all(socket, bytes.data(), bytes.size(), net::after(2)));
    hs::Message answer;
    ASSERT_EQ(hs::parse_message(bytes.data(), bytes.size(), &answer), hs::Parsed::kMessage);
    EXPECT_EQ(answer.type, hs::MessageType::kRefusal);
    EXPECT_NE(answer.text.find("speaks version 9"), std::string::npos) << answer.text;
    zero.get();
}

TEST(Peers, RankThatFindsAnotherVersionSaysSo) {
    const net::Socket listener = net::listen_on("127.0.0.1", 0, "");
    std::future<Outcome> one = join(net::local_port(listener), info(1, 2), 5);
    const net::Socket socket = net::accept_one(listener, net::after(5));
    const hs::MessageBytes answer = hello_bytes(0, 2, 9);
    ASSERT_TRUE(net::send_all(socket, answer.data(), 16, net::after(1)));
    EXPECT_EQ(one.get().error,
              llmc::format("rank 0 at 127.0.0.1:%d speaks version 9 of the protocol and this "
                           "process version 1; start the same program on all ranks",
                           net::local_port(listener)));
}

TEST(Peers, ServerThatIsNotRankZeroIsNotTaken) {
    const net::Socket listener = net::listen_on("127.0.0.1", 0, "");
    std::future<Outcome> one = join(net::local_port(listener), info(1, 2), 0.4);
    const net::Socket socket = net::accept_one(listener, net::after(5));
    ASSERT_TRUE(net::send_all(socket, "220 mail ready\r\n", 16, net::after(1)));
    const std::string error = one.get().error;
    EXPECT_NE(error.find("(LLMC_INIT_TIMEOUT_S): "), std::string::npos) << error;
}

TEST(Peers, OnlyTheServerWithTheTokenIsTaken) {
    PeerServer wrong("127.0.0.1", 0, kJob, ""), right("127.0.0.1", 0, kJob, "");
    ASSERT_NE(wrong.token(), right.token());
    std::future<Outcome> stranger = serve(&wrong, info(0, 2), 0.3);
    std::future<Outcome> zero = serve(&right, info(0, 2));
    // Both addresses are tried, one after the other.
    std::future<Outcome> one = in_thread([&](Id* id) {
        return join_peers({{"127.0.0.1", wrong.port()}, {"127.0.0.1", right.port()}}, kJob,
                          info(1, 2), id->bytes, 10, "", right.token());
    });
    std::vector<PeersPointer> all;
    all.push_back(zero.get().peers);
    all.push_back(one.get().peers);
    ASSERT_TRUE(all[0] && all[1]);
    EXPECT_EQ(stranger.get().peers, nullptr);
    close_all(&all);
}

TEST(Peers, KilledAndRestartedRankTakesItsPlace) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::future<Outcome> zero = serve(&server, info(0, 3));
    say_hello(server.port(), 1, 3);
    std::future<Outcome> one = join(server.port(), info(1, 3)),
                         two = join(server.port(), info(2, 3));
    std::vector<PeersPointer> all;
    for (auto* future : {&zero, &one, &two}) {
        all.push_back(future->get().peers);
        ASSERT_NE(all.back(), nullptr);
    }
    close_all(&all);
}

TEST(Peers, RestartedRankZeroIsFoundAgain) {
    net::Socket listener = net::listen_on("127.0.0.1", 0, "");
    const int port = net::local_port(listener);
    std::future<Outcome> one = join(port, info(1, 2));
    {
        const net::Socket first = net::accept_one(listener, net::after(5));
        hs::Message waiting;
        waiting.type = hs::MessageType::kWaiting;
        waiting.size = 2;
        const hs::MessageBytes bytes = hs::encode(waiting);
        ASSERT_TRUE(net::send_all(first, bytes.data(), bytes.size(), net::after(1)));
        sleep_ms(50);
        listener.close();
    }
    PeerServer second("127.0.0.1", port, kJob, "");
    std::vector<PeersPointer> all;
    all.push_back(serve(&second, info(0, 2)).get().peers);
    all.push_back(one.get().peers);
    ASSERT_TRUE(all[0] && all[1]);
    close_all(&all);
}

// ---- attacks

// One hostile connection: what it sends, and what it got when all was over.
struct Junk {
    net::Socket socket;
    std::string received;
};

std::string random_bytes(size_t count, uint64_t seed) {
    std::string bytes;
    for (size_t i = 0; i < count; ++i) bytes += static_cast<char>(llmc::mix_element(seed, i));
    return bytes;
}

// 50 connections of eight kinds.
std::vector<Junk> attack(int port) {
    const hs::MessageBytes good = hello_bytes(1, 4);
    const std::string hello(good.begin(), good.end());
    const auto start_message = [] {
        hs::Message start;
        start.type = hs::MessageType::kStart;
        start.rank = 1;
        start.size = 4;
        const hs::MessageBytes bytes = hs::encode(start);
        return std::string(bytes.begin(), bytes.end());
    };
    std::vector<Junk> all(50);
    for (size_t i = 0; i < all.size(); ++i) {
        all[i].socket = connect(port);
        std::string text;
        switch (i % 8) {
            case 0:  // silence
                break;
            case 1:
                text = random_bytes(4096, i);
                break;
            case 2:
                text = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
                break;
            case 3:  // stops within a hello
                text = hello.substr(0, 1 + i * 10);
                break;
            case 4:  // half-closes with nothing, or with half a hello
                text = hello.substr(0, i % 16 == 4 ? 0 : 300);
                break;
            case 5:  // our protocol, but not a hello
                text = start_message();
                break;
            case 6:  // right but for one byte of the job token, and more behind it
                text = hello + hello;
                text[35] ^= 1;
                break;
            default:  // right magic and version, then anything
                text = hello.substr(0, 12) + random_bytes(2000, i);
        }
        net::send_all(all[i].socket, text.data(), text.size(), net::after(1));
        if (i % 8 == 4) ::shutdown(all[i].socket.fd(), SHUT_WR);
    }
    return all;
}

void read_all_that_came(Junk* junk) {
    char buffer[4096];
    for (ssize_t n; (n = ::recv(junk->socket.fd(), buffer, sizeof(buffer), MSG_DONTWAIT)) > 0;) {
        junk->received.append(buffer, static_cast<size_t>(n));
    }
}

TEST(Peers, JunkConnectionsHarmNobodyAndNeverGetTheId) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::future<Outcome> zero = serve(&server, info(0, 4));
    std::future<Outcome> one = join(server.port(), info(1, 4));
    std::vector<Junk> junk = attack(server.port());
    // One that sends a byte now and then, as long as it lasts.
    std::atomic<bool> over{false};
    auto slow = std::async(std::launch::async, [&, port = server.port()] {
        Junk drip{connect(port), ""};
        const hs::MessageBytes hello = hello_bytes(3, 4);
        for (size_t i = 0; i < 400 && !over; ++i) {
            if (::send(drip.socket.fd(), &hello[i], 1, MSG_NOSIGNAL) != 1) break;
            sleep_ms(5);
        }
        read_all_that_came(&drip);
        return drip.received;
    });
    sleep_ms(300);
    const net::Deadline start = net::Clock::now();
    std::future<Outcome> two = join(server.port(), info(2, 4)),
                         three = join(server.port(), info(3, 4));
    std::vector<PeersPointer> all;
    for (auto* future : {&zero, &one, &two, &three}) {
        Outcome outcome = future->get();
        ASSERT_EQ(outcome.error, "");
        EXPECT_EQ(outcome.id.text(), Id(1).text());
        all.push_back(std::move(outcome.peers));
    }
    EXPECT_LT(seconds_since(start), 4);
    over = true;
    const std::string part_of_id = Id(1).text().substr(8, 16);
    EXPECT_EQ(slow.get(), "");
    size_t answered = 0;
    for (size_t i = 0; i < junk.size(); ++i) {
        read_all_that_came(&junk[i]);
        EXPECT_EQ(junk[i].received.find(part_of_id), std::string::npos) << i;
        if (junk[i].received.empty()) continue;
        ++answered;
        // A whole hello with another job's token: told so, in one message.
        EXPECT_EQ(i % 8, 6u);
        EXPECT_EQ(junk[i].received.size(), hs::kMessageBytes);
        EXPECT_NE(junk[i].received.find("job token"), std::string::npos);
    }
    EXPECT_EQ(answered, 6u);
    close_all(&all);
    EXPECT_EQ(all[0]->failure(), "");
}

TEST(Peers, IdleConnectionsBeyondTheBoundKeepNobodyOut) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::future<Outcome> zero = serve(&server, info(0, 2));
    std::vector<net::Socket> idle;
    for (int i = 0; i < 300; ++i) idle.push_back(connect(server.port()));
    // Some of the oldest are dropped already, long before their time is over.
    EXPECT_TRUE(happens_within(2, [&] {
        char byte;
        return ::recv(idle[0].fd(), &byte, 1, MSG_DONTWAIT) == 0;
    }));
    const net::Deadline start = net::Clock::now();
    std::vector<PeersPointer> all;
    all.push_back(join(server.port(), info(1, 2)).get().peers);
    EXPECT_LT(seconds_since(start), 4);
    all.push_back(zero.get().peers);
    ASSERT_TRUE(all[0] && all[1]);
    close_all(&all);
}

// ---- watching

TEST(Peers, KilledRankIsKnownToAllAtOnce) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    Child child(2, 3, server.port());
    std::vector<PeersPointer> all = start_ranks(3, &server, {2});
    ASSERT_TRUE(all[0] && all[1]);
    const std::string place = "in step 12 (allgather of layer 4)";
    // Once its position has come through.
    ASSERT_TRUE(happens_within(10, [&] { return all[1]->late().find(place) != std::string::npos; }))
        << all[1]->late();
    EXPECT_EQ(all[0]->failure() + all[1]->failure(), "");
    child.send(SIGKILL);
    for (const int rank : {0, 1}) {
        EXPECT_TRUE(happens_within(2, [&] { return !all[rank]->failure().empty(); }));
        EXPECT_EQ(all[rank]->failure(), "rank 2 died " + place);
    }
    close_all(&all);
}

TEST(Peers, KilledRankZeroIsKnownToAllAtOnce) {
    const int port = free_port();
    Child child(0, 3, port);
    std::future<Outcome> one = join(port, info(1, 3)), two = join(port, info(2, 3));
    std::vector<PeersPointer> all;
    all.push_back(one.get().peers);
    all.push_back(two.get().peers);
    ASSERT_TRUE(all[0] && all[1]);
    ASSERT_TRUE(happens_within(10, [&] {
        return all[0]->late().find("rank 0 is in step 12") != std::string::npos;
    })) << all[0]->late();
    child.send(SIGKILL);
    for (const PeersPointer& peers : all) {
        EXPECT_TRUE(happens_within(2, [&] { return !peers->failure().empty(); }));
        EXPECT_EQ(peers->failure().substr(0, 11), "rank 0 died");
    }
    close_all(&all);
}

// Rank 0 waits for a rank that does not end, but not for ever.
void expect_bounded_close() {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::vector<PeersPointer> all = start_ranks(2, &server);
    const net::Deadline start = net::Clock::now();
    all[0]->close();
    EXPECT_GT(seconds_since(start), 4.5);
    EXPECT_LT(seconds_since(start), 7);
    EXPECT_EQ(all[1]->failure(), "");
    all[1]->close();
    EXPECT_EQ(all[1]->failure(), "");
}

void expect_stopped_rank_is_found() {
    PeerServer server("127.0.0.1", 0, kJob, "");
    Child child(2, 4, server.port());
    std::vector<PeersPointer> all = start_ranks(4, &server, {2});
    ASSERT_TRUE(all[0] && all[1] && all[3]);
    for (const int rank : {0, 1, 3}) all[rank]->progress(12, 40, kName);
    const std::string all_well = "all ranks answer and are in step 12 (allgather of layer 4)";
    ASSERT_TRUE(happens_within(10, [&] { return all[3]->late() == all_well; })) << all[3]->late();
    child.send(SIGSTOP);
    for (const int rank : {0, 1, 3}) {
        std::string late;
        EXPECT_TRUE(happens_within(10, [&] { return (late = all[rank]->late()) != all_well; }));
        EXPECT_EQ(late.find("rank 2 gave no sign of life for "), 0u) << late;
        EXPECT_NE(late.find("last in step 12 (allgather of layer 4); ranks 0, 1 and 3 are in step "
                            "12 (allgather of layer 4)"),
                  std::string::npos)
            << late;
        EXPECT_EQ(all[rank]->failure(), "");
    }
    child.send(SIGCONT);
    EXPECT_TRUE(happens_within(5, [&] { return all[1]->late() == all_well; })) << all[1]->late();
    all[0]->announce_failure("the test is over");
    close_all(&all);
}

void expect_stopped_rank_zero_is_found() {
    const int port = free_port();
    Child child(0, 3, port);
    std::future<Outcome> one = join(port, info(1, 3)), two = join(port, info(2, 3));
    std::vector<PeersPointer> all;
    all.push_back(one.get().peers);
    all.push_back(two.get().peers);
    ASSERT_TRUE(all[0] && all[1]);
    all[0]->progress(13, 1, "forward");
    ASSERT_TRUE(happens_within(10, [&] {
        return all[1]->late().find("rank 0 is behind, in step 12") != std::string::npos;
    }));
    child.send(SIGSTOP);
    std::string late;
    EXPECT_TRUE(happens_within(10, [&] {
        late = all[0]->late();
        return late.find("rank 0 gave no sign of life for ") == 0;
    })) << late;
    // Rank 2 may be well: nobody tells.
    EXPECT_NE(late.find("last in step 12 (allgather of layer 4); rank 1 is in step 13 (forward)"),
              std::string::npos)
        << late;
    child.send(SIGKILL);
    close_all(&all);
}

// Together, since each of them has to wait for some seconds.
TEST(Peers, StoppedRanksAreFoundByTheirSilenceAndNobodyWaitsForEver) {
    std::vector<std::future<void>> all;
    for (auto* part : {expect_bounded_close, expect_rank_gives_up_first,
                       expect_stopped_rank_is_found, expect_stopped_rank_zero_is_found}) {
        all.push_back(std::async(std::launch::async, part));
    }
    for (std::future<void>& one : all) one.get();
}

TEST(Peers, RankBehindIsNamedWithItsPlace) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::vector<PeersPointer> all = start_ranks(4, &server);
    for (const int rank : {0, 3}) all[rank]->progress(12, 8, kName);
    for (const int rank : {1, 2}) all[rank]->progress(12, 7, "reduction of layer 0");
    const std::string expected =
        "ranks 1 and 2 are behind, in step 12 (reduction of layer 0); ranks 0 and 3 are in step 12 "
        "(allgather of layer 4)";
    for (const PeersPointer& peers : all) {
        EXPECT_TRUE(happens_within(3, [&] { return peers->late() == expected; })) << peers->late();
    }
    close_all(&all);
}

TEST(Peers, ErrorOfOneRankReachesAllWithItsMessage) {
    for (const int source : {0, 2}) {
        PeerServer server("127.0.0.1", 0, kJob, "");
        std::vector<PeersPointer> all = start_ranks(4, &server);
        const net::Deadline start = net::Clock::now();
        all[source]->announce_failure("out/model.bin: cannot write:\nNo space left on device");
        EXPECT_LT(seconds_since(start), 1);
        const std::string expected =
            llmc::format("rank %d: out/model.bin: cannot write:?No space left on device", source);
        for (const PeersPointer& peers : all) {
            EXPECT_EQ(peers->wait_for_failure(2), expected);
            EXPECT_EQ(peers->failure(), expected);
        }
        // The first cause stays: what follows from it is not news.
        all[1]->announce_failure("a collective broke");
        all[source].reset();
        EXPECT_EQ(all[3]->failure(), expected);
        close_all(&all);
    }
}

TEST(Peers, MessageOfARankThatExitsAtOnceArrives) {
    for (int i = 0; i < 20; ++i) {
        PeerServer server("127.0.0.1", 0, kJob, "");
        std::vector<PeersPointer> all = start_ranks(3, &server);
        all[i % 2 == 0 ? 1 : 0]->announce_failure("last words");
        all[i % 2 == 0 ? 1 : 0].reset();
        EXPECT_EQ(all[2]->wait_for_failure(2),
                  i % 2 == 0 ? "rank 1: last words" : "rank 0: last words");
        close_all(&all);
    }
}

TEST(Peers, RankThatEndsEarlyIsNamed) {
    for (const int source : {0, 1}) {
        PeerServer server("127.0.0.1", 0, kJob, "");
        std::vector<PeersPointer> all = start_ranks(3, &server);
        all[source]->progress(3, 1, "forward");
        all[source].reset();
        const std::string expected =
            llmc::format("rank %d ended early in step 3 (forward)", source);
        EXPECT_EQ(all[2]->wait_for_failure(2), expected);
        EXPECT_EQ(all[1 - source]->wait_for_failure(2), expected);
        close_all(&all);
    }
}

TEST(Peers, RanksMayEndOneAfterTheOther) {
    for (int order = 0; order < 3; ++order) {
        PeerServer server("127.0.0.1", 0, kJob, "");
        std::vector<PeersPointer> all = start_ranks(3, &server);
        std::vector<std::future<void>> closings;
        const net::Deadline start = net::Clock::now();
        for (int i = 0; i < 3; ++i) {
            closings.push_back(std::async(std::launch::async, [&all, i, order] {
                Peers& peers = *all[static_cast<size_t>((order + i) % 3)];
                sleep_ms(60 * i);
                EXPECT_EQ(peers.failure(), "");
                peers.close();
                EXPECT_EQ(peers.failure(), "");
            }));
        }
        for (std::future<void>& closing : closings) closing.get();
        EXPECT_LT(seconds_since(start), 4);
    }
}

TEST(Peers, EndedRankIsNotCalledDead) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::vector<PeersPointer> all = start_ranks(3, &server);
    all[1]->close();
    all[1].reset();
    const std::string expected = "rank 1 has ended; ranks 0 and 2 are before the first step";
    for (const int rank : {0, 2}) {
        EXPECT_TRUE(happens_within(2, [&] { return all[rank]->late() == expected; }));
        EXPECT_EQ(all[rank]->failure(), "");
    }
    close_all(&all);
}

TEST(Peers, GarbageFromARankIsItsEnd) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::future<Outcome> zero = serve(&server, info(0, 3)), one = join(server.port(), info(1, 3));
    const net::Socket socket = connect(server.port());
    const hs::MessageBytes hello = hello_bytes(2, 3);
    ASSERT_TRUE(net::send_all(socket, hello.data(), hello.size(), net::after(1)));
    std::vector<PeersPointer> all;
    all.push_back(zero.get().peers);
    all.push_back(one.get().peers);
    ASSERT_TRUE(all[0] && all[1]);
    ASSERT_TRUE(net::send_all(socket, "garbage", 7, net::after(1)));
    for (const PeersPointer& peers : all) {
        EXPECT_EQ(peers->wait_for_failure(2), "rank 2 died before the first step");
    }
    close_all(&all);
}

TEST(Peers, RankThatDiesWhileTheOthersStartIsNoticed) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::future<Outcome> zero = serve(&server, info(0, 3)), one = join(server.port(), info(1, 3));
    {
        const net::Socket socket = connect(server.port());
        const hs::MessageBytes hello = hello_bytes(2, 3);
        ASSERT_TRUE(net::send_all(socket, hello.data(), hello.size(), net::after(1)));
        std::vector<char> table(hs::kMessageBytes);
        ASSERT_TRUE(net::receive_all(socket, table.data(), table.size(), net::after(2)));
        // With the id unread in the connection.
        ASSERT_TRUE(net::wait_for(socket, POLLIN, net::after(2)));
    }
    std::vector<PeersPointer> all;
    all.push_back(zero.get().peers);
    all.push_back(one.get().peers);
    ASSERT_TRUE(all[0] && all[1]);
    for (const PeersPointer& peers : all) {
        EXPECT_EQ(peers->wait_for_failure(2), "rank 2 died before the first step");
    }
    close_all(&all);
}

TEST(Peers, ProgressIsReadInOnePiece) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::vector<PeersPointer> all = start_ranks(2, &server);
    std::atomic<bool> over{false};
    auto writing = std::async(std::launch::async, [&] {
        for (int64_t step = 0; !over; ++step) {
            all[1]->progress(step, static_cast<uint64_t>(step), step % 2 == 0 ? "even" : "odd");
            for (volatile int i = 0; i < 100; i = i + 1) {
            }
        }
    });
    int torn = 0;
    const net::Deadline end = net::after(0.5);
    while (net::Clock::now() < end) {
        const std::string late = all[1]->late();
        const size_t at = late.find("rank 1 is in step ");
        if (at == std::string::npos) continue;
        const std::string rest = late.substr(at + 18);
        const bool even = std::stoll(rest) % 2 == 0;
        if (rest.find(even ? "(even)" : "(odd)") == std::string::npos) ++torn;
    }
    EXPECT_EQ(torn, 0);
    over = true;
    writing.get();
    close_all(&all);
}

}  // namespace
