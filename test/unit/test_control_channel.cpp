// llmc/control_channel.h: ranks watch each other.
#include "llmc/control_channel.h"

#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <future>

#include "test/unit/child_process.h"
#include "test/unit/held_port.h"
#include "test/unit/peer_ranks.h"

namespace {

std::atomic<int> delay_of_failures_ms{0}, failures_sent{0};

}  // namespace

// Stands in for the C library's, so that a test can hold up messages that tell of a failure.
extern "C" ssize_t send(int fd, const void* data, size_t bytes, int flags) {
    namespace hs = llmc::handshake;
    const auto* message = static_cast<const unsigned char*>(data);
    const bool is_failure = delay_of_failures_ms > 0 && bytes >= hs::kMessageBytes &&
                            message[12] == static_cast<unsigned char>(hs::MessageType::kFailure);
    if (is_failure) llmc::peer_test::sleep_ms(delay_of_failures_ms);
    const ssize_t sent = syscall(SYS_sendto, fd, data, bytes, flags, nullptr, 0);
    if (is_failure) ++failures_sent;
    return sent;
}

namespace llmc::peer_test {
namespace {

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

const test::ChildMode child_mode("peers", run_child_rank);

class Child {
  public:
    Child(int rank, int size, int port) {
        std::vector<std::string> variables;
        for (char** entry = environ; *entry != nullptr; ++entry) variables.emplace_back(*entry);
        variables.push_back(std::string(test::kModeVariable) + "=peers");
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

// ---- watching

TEST(ControlChannel, KilledRankIsKnownToAllAtOnce) {
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
        EXPECT_TRUE(happens_within(kLong / 2, [&] { return !all[rank]->failure().empty(); }));
        EXPECT_EQ(all[rank]->failure(), "rank 2 died, last heard of " + place);
    }
    close_all(&all);
}

TEST(ControlChannel, KilledRankZeroIsKnownToAllAtOnce) {
    const test::HeldPort port;
    Child child(0, 3, port.number());
    std::future<Outcome> one = join(port.number(), info(1, 3)),
                         two = join(port.number(), info(2, 3));
    std::vector<PeersPointer> all;
    all.push_back(one.get().peers);
    all.push_back(two.get().peers);
    ASSERT_TRUE(all[0] && all[1]);
    ASSERT_TRUE(happens_within(10, [&] {
        return all[0]->late().find("rank 0 is in step 12") != std::string::npos;
    })) << all[0]->late();
    child.send(SIGKILL);
    for (const PeersPointer& peers : all) {
        EXPECT_TRUE(happens_within(kLong / 2, [&] { return !peers->failure().empty(); }));
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
    EXPECT_LT(seconds_since(start), kLong / 2);
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
    // A short time limit's message must not call a rank alive that stopped when the wait began: half
    // of the limit is enough, where other messages want three seconds of silence.
    EXPECT_TRUE(happens_within(2.4, [&] {
        return all[1]->late(3).find("rank 2 gave no sign of life for ") == 0;
    })) << all[1]->late(3);
    for (const int rank : {0, 1, 3}) {
        std::string late;
        EXPECT_TRUE(happens_within(10, [&] { return (late = all[rank]->late()) != all_well; }));
        EXPECT_EQ(late.find("rank 2 gave no sign of life for "), 0u) << late;
        EXPECT_NE(
            late.find(
                "last heard of in step 12 (allgather of layer 4); ranks 0, 1 and 3 are in step "
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
    const test::HeldPort port;
    Child child(0, 3, port.number());
    std::future<Outcome> one = join(port.number(), info(1, 3)),
                         two = join(port.number(), info(2, 3));
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
    EXPECT_NE(
        late.find(
            "last heard of in step 12 (allgather of layer 4); rank 1 is in step 13 (forward)"),
        std::string::npos)
        << late;
    child.send(SIGKILL);
    close_all(&all);
}

// Rank 0 has more patience: the other rank leaves, after three seconds of grace.
void expect_rank_gives_up_first() {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::future<Outcome> zero = serve(&server, info(0, 3));
    EXPECT_EQ(join(server.port(), info(1, 3), 2).get().error,
              format("rank 2 of 3 did not arrive within 2 s (LLMC_INIT_TIMEOUT_S); rank 0 "
                     "waits at 127.0.0.1:%d",
                     server.port()));
    // Rank 0 still waits. It need not do so to its limit.
    EXPECT_TRUE(
        decline_peers({{"127.0.0.1", server.port()}}, kJob, info(2, 3), "rank 2: -b 0", kLong));
    EXPECT_EQ(zero.get().error, "rank 2: -b 0");
}

// Together, since each of them has to wait for some seconds.
TEST(ControlChannel, StoppedRanksAreFoundByTheirSilenceAndNobodyWaitsForEver) {
    std::vector<std::future<void>> all;
    for (auto* part : {expect_bounded_close, expect_rank_gives_up_first,
                       expect_stopped_rank_is_found, expect_stopped_rank_zero_is_found}) {
        all.push_back(std::async(std::launch::async, part));
    }
    for (std::future<void>& one : all) one.get();
}

TEST(ControlChannel, RankBehindIsNamedWithItsPlace) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::vector<PeersPointer> all = start_ranks(4, &server);
    for (const int rank : {0, 3}) all[rank]->progress(12, 8, kName);
    for (const int rank : {1, 2}) all[rank]->progress(12, 7, "reduction of layer 0");
    const std::string expected =
        "ranks 1 and 2 are behind, in step 12 (reduction of layer 0); ranks 0 and 3 are in step 12 "
        "(allgather of layer 4)";
    for (const PeersPointer& peers : all) {
        EXPECT_TRUE(happens_within(kLong / 2, [&] { return peers->late() == expected; }))
            << peers->late();
    }
    close_all(&all);
}

TEST(ControlChannel, ErrorOfOneRankReachesAllWithItsMessage) {
    for (const int source : {0, 2}) {
        PeerServer server("127.0.0.1", 0, kJob, "");
        std::vector<PeersPointer> all = start_ranks(4, &server);
        const net::Deadline start = net::Clock::now();
        all[source]->announce_failure("out/model.bin: cannot write:\nNo space left on device");
        EXPECT_LT(seconds_since(start), 1.9);  // less than it waits for an answer
        const std::string expected =
            format("rank %d: out/model.bin: cannot write:?No space left on device", source);
        for (const PeersPointer& peers : all) {
            EXPECT_EQ(peers->wait_for_failure(kLong / 2), expected);
            EXPECT_EQ(peers->failure(), expected);
        }
        // The first cause stays: what follows from it is not news.
        all[1]->announce_failure("a collective broke");
        all[source].reset();
        EXPECT_EQ(all[3]->failure(), expected);
        close_all(&all);
    }
}

TEST(ControlChannel, MessageOfARankThatExitsAtOnceArrives) {
    for (int i = 0; i < 20; ++i) {
        PeerServer server("127.0.0.1", 0, kJob, "");
        std::vector<PeersPointer> all = start_ranks(3, &server);
        all[i % 2 == 0 ? 1 : 0]->announce_failure("last words");
        all[i % 2 == 0 ? 1 : 0].reset();
        EXPECT_EQ(all[2]->wait_for_failure(kLong / 2),
                  i % 2 == 0 ? "rank 1: last words" : "rank 0: last words");
        close_all(&all);
    }
}

TEST(ControlChannel, AnnouncementReturnsWhenTheOthersHaveIt) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::future<Outcome> zero = serve(&server, info(0, 2));
    const net::Socket one = connect(server.port());
    const hs::MessageBytes hello = hello_bytes(1, 2);
    ASSERT_TRUE(net::send_all(one, hello.data(), hello.size(), net::after(1)));
    const PeersPointer peers = zero.get().peers;
    ASSERT_TRUE(peers);
    auto reading = std::async(std::launch::async, [&one] {
        hs::Message message;
        while (message.type != hs::MessageType::kFailure) {
            hs::MessageBytes bytes;
            if (!net::receive_all(one, bytes.data(), bytes.size(), net::after(5))) return;
            hs::parse_message(bytes.data(), bytes.size(), &message);
        }
        sleep_ms(300);
        hs::Message answer;
        answer.type = hs::MessageType::kReceived;
        answer.rank = 1;
        answer.size = 2;
        const hs::MessageBytes bytes = hs::encode(answer);
        net::send_all(one, bytes.data(), bytes.size(), net::after(1));
    });
    const net::Deadline start = net::Clock::now();
    peers->announce_failure("the disk is full");
    EXPECT_GE(seconds_since(start), 0.3);
    EXPECT_LT(seconds_since(start), 1.9);
    reading.get();
}

TEST(ControlChannel, RankZeroKnowsOfADeathNoSoonerThanItHasToldTheOthers) {
    // Else it might exit in between, and the others would take it for the cause.
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::future<Outcome> zero = serve(&server, info(0, 3)), one = join(server.port(), info(1, 3));
    net::Socket two = connect(server.port());
    const hs::MessageBytes hello = hello_bytes(2, 3);
    ASSERT_TRUE(net::send_all(two, hello.data(), hello.size(), net::after(1)));
    std::vector<PeersPointer> all;
    all.push_back(zero.get().peers);
    all.push_back(one.get().peers);
    ASSERT_TRUE(all[0] && all[1]);
    failures_sent = 0;
    delay_of_failures_ms = 200;
    two.close();
    EXPECT_TRUE(happens_within(5, [&] { return !all[0]->failure().empty(); }));
    EXPECT_EQ(failures_sent, 1);
    delay_of_failures_ms = 0;
    EXPECT_EQ(all[1]->wait_for_failure(5), "rank 2 died, last heard of before the first step");
    close_all(&all);
}

TEST(ControlChannel, RankThatEndsEarlyIsNamed) {
    for (const int source : {0, 1}) {
        PeerServer server("127.0.0.1", 0, kJob, "");
        std::vector<PeersPointer> all = start_ranks(3, &server);
        all[source]->progress(3, 1, "forward");
        all[source].reset();
        const std::string expected = format("rank %d ended early in step 3 (forward)", source);
        EXPECT_EQ(all[2]->wait_for_failure(kLong / 2), expected);
        EXPECT_EQ(all[1 - source]->wait_for_failure(kLong / 2), expected);
        close_all(&all);
    }
}

TEST(ControlChannel, RanksMayEndOneAfterTheOther) {
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
        EXPECT_LT(seconds_since(start), 4.9);  // less than rank 0 waits for a rank that stays
    }
}

TEST(ControlChannel, EndedRankIsNotCalledDead) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::vector<PeersPointer> all = start_ranks(3, &server);
    all[1]->close();
    all[1].reset();
    const std::string expected = "rank 1 has ended; ranks 0 and 2 are before the first step";
    for (const int rank : {0, 2}) {
        EXPECT_TRUE(happens_within(kLong / 2, [&] { return all[rank]->late() == expected; }));
        EXPECT_EQ(all[rank]->failure(), "");
    }
    close_all(&all);
}

TEST(ControlChannel, GarbageFromARankIsItsEnd) {
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
        EXPECT_EQ(peers->wait_for_failure(kLong / 2),
                  "rank 2 died, last heard of before the first step");
    }
    close_all(&all);
}

TEST(ControlChannel, RankThatDiesWhileTheOthersStartIsNoticed) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::future<Outcome> zero = serve(&server, info(0, 3)), one = join(server.port(), info(1, 3));
    {
        const net::Socket socket = connect(server.port());
        const hs::MessageBytes hello = hello_bytes(2, 3);
        ASSERT_TRUE(net::send_all(socket, hello.data(), hello.size(), net::after(1)));
        std::vector<char> table(hs::kMessageBytes);
        ASSERT_TRUE(net::receive_all(socket, table.data(), table.size(), net::after(kLong / 2)));
        // With the id unread in the connection.
        ASSERT_TRUE(net::wait_for(socket, POLLIN, net::after(kLong / 2)));
    }
    std::vector<PeersPointer> all;
    all.push_back(zero.get().peers);
    all.push_back(one.get().peers);
    ASSERT_TRUE(all[0] && all[1]);
    for (const PeersPointer& peers : all) {
        EXPECT_EQ(peers->wait_for_failure(kLong / 2),
                  "rank 2 died, last heard of before the first step");
    }
    close_all(&all);
}

TEST(ControlChannel, ProgressIsReadInOnePiece) {
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
}  // namespace llmc::peer_test
