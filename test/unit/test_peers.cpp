// llmc/peers.h: ranks meet, whoever else calls.
#include "llmc/peers.h"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <future>
#include <iterator>

#include "test/unit/held_port.h"
#include "test/unit/peer_ranks.h"

namespace llmc::peer_test {
namespace {

// ---- the start

// A rank that dies as soon as it has been counted. Returns what rank 0 told it: who is missing.
std::string say_hello(int port, int rank, int size) {
    const net::Socket socket = connect(port);
    const hs::MessageBytes hello = hello_bytes(rank, size);
    EXPECT_TRUE(net::send_all(socket, hello.data(), hello.size(), net::after(1)));
    hs::MessageBytes bytes;
    EXPECT_TRUE(net::receive_all(socket, bytes.data(), bytes.size(), net::after(kLong / 2)));
    hs::Message answer;
    EXPECT_EQ(hs::parse_message(bytes.data(), bytes.size(), &answer), hs::Parsed::kMessage);
    return answer.text;
}

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
    const test::HeldPort held;
    const int port = held.number();
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

TEST(Peers, AbsentRankZeroIsNamedWithItsAddress) {
    const test::HeldPort held;
    const int port = held.number();
    EXPECT_EQ(join(port, info(1, 2), 0.3).get().error,
              format("-ps: rank 0 did not answer at 127.0.0.1:%d within 0.3 s "
                     "(LLMC_INIT_TIMEOUT_S): Connection refused",
                     port));
    Id id;
    std::string error;
    const net::Deadline start = net::Clock::now();
    try {
        join_peers({{"", port}}, kJob, info(1, 2), id.bytes, kLong, "-ps ''");
    } catch (const Error& e) {
        error = e.what();
    }
    EXPECT_EQ(error, "-ps '': the host's name is empty; give rank 0's host name or address");
    EXPECT_LT(seconds_since(start), kLong / 2);
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

// ---- what is said at the limit

// Rank 0's, in seconds: on a busy machine, too, whoever comes is heard before.
constexpr double kLimit = 4;

void expect_missing_ranks_are_named_on_every_rank() {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::future<Outcome> zero = serve(&server, info(0, 8), kLimit);
    std::future<Outcome> one = join(server.port(), info(1, 8), kLimit);
    std::future<Outcome> four = join(server.port(), info(4, 8));
    const std::string expected = format(
        "ranks 2, 3 and 5-7 of 8 did not arrive within 4 s (LLMC_INIT_TIMEOUT_S); rank 0 waited "
        "at 127.0.0.1:%d",
        server.port());
    EXPECT_EQ(zero.get().error, expected);
    EXPECT_EQ(one.get().error, expected);
    EXPECT_EQ(four.get().error, expected);
}

void expect_rank_that_came_and_left_is_not_called_absent() {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::future<Outcome> zero = serve(&server, info(0, 3), kLimit);
    say_hello(server.port(), 1, 3);
    EXPECT_EQ(zero.get().error,
              format("rank 2 of 3 did not arrive and rank 1 came and left again within 4 s "
                     "(LLMC_INIT_TIMEOUT_S); rank 0 waited at 127.0.0.1:%d",
                     server.port()));
}

void expect_word_beside_a_hello_closes_the_connection() {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::future<Outcome> zero = serve(&server, info(0, 3), kLimit);
    const net::Socket socket = connect(server.port());
    hs::MessageBytes bytes = hello_bytes(1, 3);
    ASSERT_TRUE(net::send_all(socket, bytes.data(), bytes.size(), net::after(1)));
    hs::Message word;
    word.type = hs::MessageType::kFailure;
    word.rank = 2;  // another's
    word.size = 3;
    word.text = "rank 2: -b 0";
    bytes = hs::encode(word);
    ASSERT_TRUE(net::send_all(socket, bytes.data(), bytes.size(), net::after(1)));
    const std::string error = zero.get().error;
    EXPECT_NE(error.find("rank 2 of 3 did not arrive and rank 1 came and left"), std::string::npos)
        << error;
}

void expect_refusal_is_named_when_a_missing_rank_is_the_reason() {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::future<Outcome> zero = serve(&server, info(0, 2), kLimit);
    join(server.port(), info(1, 3)).get();
    EXPECT_EQ(zero.get().error,
              format("rank 1 of 2 did not arrive within 4 s (LLMC_INIT_TIMEOUT_S); rank 0 "
                     "waited at 127.0.0.1:%d; the last process refused was rank 1 from "
                     "127.0.0.1: it was started as one of 3 ranks and rank 0 as one of 2; "
                     "give all ranks the same number",
                     server.port()));
}

// Together, since each of them has to wait for its limit.
TEST(Peers, AtTheLimitItIsSaidWhoIsMissingAndWhy) {
    std::vector<std::future<void>> all;
    for (auto* part : {expect_missing_ranks_are_named_on_every_rank,
                       expect_rank_that_came_and_left_is_not_called_absent,
                       expect_word_beside_a_hello_closes_the_connection,
                       expect_refusal_is_named_when_a_missing_rank_is_the_reason}) {
        all.push_back(std::async(std::launch::async, part));
    }
    for (std::future<void>& one : all) one.get();
}

// ---- ranks that decline

std::future<bool> decline(int port, const PeerInfo& self, const std::string& text,
                          double limit_s = kLong, const StartTiming& timing = {}) {
    return std::async(std::launch::async, [=] {
        return decline_peers({{"127.0.0.1", port}}, kJob, self, text, limit_s, timing);
    });
}

TEST(Peers, ARankThatDeclinesEndsTheStartOfAll) {
    PeerServer server("127.0.0.1", 0, kJob, "", began_ago(0));
    std::vector<std::future<Outcome>> futures;
    futures.push_back(serve(&server, info(0, 4)));
    futures.push_back(join(server.port(), info(1, 4)));
    sleep_ms(100);
    EXPECT_TRUE(decline(server.port(), info(2, 4), "rank 2: -b 0", kLong, began_ago(0)).get());
    // One that comes later is told the same.
    sleep_ms(300);
    const net::Deadline start = net::Clock::now();
    futures.push_back(join(server.port(), info(3, 4)));
    for (std::future<Outcome>& future : futures) {
        const Outcome outcome = future.get();
        EXPECT_EQ(outcome.error, "rank 2: -b 0");
    }
    EXPECT_LT(seconds_since(start), kLong / 2);
}

TEST(Peers, ARankZeroThatDeclinesTellsAllThatCome) {
    const test::HeldPort held;
    const int port = held.number();
    std::future<Outcome> one = join(port, info(1, 3));
    std::future<bool> two = decline(port, info(2, 3), "rank 2: -t 0");
    sleep_ms(100);
    PeerServer server("127.0.0.1", port, kJob, "");
    const net::Deadline start = net::Clock::now();
    server.decline_all(3, "rank 0: -b 0", kLong);
    EXPECT_LT(seconds_since(start), kLong / 2);
    EXPECT_EQ(one.get().error, "rank 0: -b 0");
    EXPECT_TRUE(two.get());
}

TEST(Peers, ARankZeroThatDeclinesGivesUpAtItsLimit) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    const net::Deadline start = net::Clock::now();
    server.decline_all(3, "rank 0: -b 0", 0.3);
    EXPECT_GE(seconds_since(start), 0.3);
    const test::HeldPort nobodys;
    EXPECT_FALSE(decline(nobodys.number(), info(2, 3), "rank 2: -b 0", 0.3).get());
}

TEST(Peers, AWordThatComesAfterTheStartIsHeardToo) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::future<Outcome> zero = serve(&server, info(0, 2));
    const net::Socket socket = connect(server.port());
    hs::MessageBytes bytes = hello_bytes(1, 2);
    ASSERT_TRUE(net::send_all(socket, bytes.data(), bytes.size(), net::after(1)));
    const Outcome outcome = zero.get();
    ASSERT_NE(outcome.peers, nullptr);
    hs::Message failure;
    failure.type = hs::MessageType::kFailure;
    failure.rank = 1;
    failure.size = 2;
    failure.text = "rank 1: -b 0";
    bytes = hs::encode(failure);
    ASSERT_TRUE(net::send_all(socket, bytes.data(), bytes.size(), net::after(1)));
    EXPECT_EQ(outcome.peers->wait_for_failure(5), "rank 1: -b 0");
}

TEST(Peers, AStrangerCannotDecline) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    const int port = server.port();
    std::future<Outcome> zero = serve(&server, info(0, 4)), one = join(port, info(1, 4));
    // Until rank 1 is counted.
    ASSERT_TRUE(happens_within(kLong / 2, [&] { return say_hello(port, 3, 4) == "rank 2"; }));
    // Of another job, of another size, and in the place of a rank that is here.
    EXPECT_TRUE(decline_peers({{"127.0.0.1", port}}, "another job", info(2, 4), "x", kLong));
    EXPECT_TRUE(decline(port, info(2, 3), "x").get());
    EXPECT_TRUE(decline(port, info(1, 4), "x").get());
    std::future<Outcome> two = join(port, info(2, 4)), three = join(port, info(3, 4));
    expect_start({&zero, &one, &two, &three});
}

TEST(Peers, AnEmptyWordIsNotOne) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::future<Outcome> zero = serve(&server, info(0, 2));
    const net::Socket socket = connect(server.port());
    hs::Message word;
    word.type = hs::MessageType::kFailure;
    word.rank = 1;
    word.size = 2;
    word.job_token = hs::job_token_of(kJob);
    const hs::MessageBytes bytes = hs::encode(word);
    ASSERT_TRUE(net::send_all(socket, bytes.data(), bytes.size(), net::after(1)));
    // The connection is closed without an answer, and rank 1 is not counted.
    EXPECT_TRUE(happens_within(kLong / 2, [&] {
        char byte;
        return ::recv(socket.fd(), &byte, 1, MSG_DONTWAIT) == 0;
    }));
    std::future<Outcome> one = join(server.port(), info(1, 2));
    expect_start({&zero, &one});
}

// ---- a start right after one that was declined, at the same place

TEST(Peers, AWordOfAnEarlierStartDoesNotEndTheNextOne) {
    PeerServer server("127.0.0.1", 0, kJob, "", began_ago(0));
    std::future<Outcome> zero = serve(&server, info(0, 3)), one = join(server.port(), info(1, 3));
    sleep_ms(100);
    // It is answered, so that it does not stay.
    const StartTiming earlier = began_ago(kOneStartSeconds + 1);
    EXPECT_TRUE(decline(server.port(), info(2, 3), "rank 2: -b 0", kLong, earlier).get());
    std::future<Outcome> two = join(server.port(), info(2, 3));
    expect_start({&zero, &one, &two});
}

TEST(Peers, ARankZeroThatDeclinesLeavesItsPlaceToTheNext) {
    const test::HeldPort held;
    const int port = held.number();
    const StartTiming earlier = began_ago(kOneStartSeconds + 1);
    std::future<void> old = std::async(std::launch::async, [&] {
        PeerServer(std::string("127.0.0.1"), port, kJob, "", earlier)
            .decline_all(3, "rank 0: -b 0", kLong);
    });
    // One that waited before hears of it, one of the next start does not.
    EXPECT_EQ(join(port, info(1, 3), kLong, kJob, 0, earlier).get().error, "rank 0: -b 0");
    std::future<Outcome> one = join(port, info(1, 3), kLong, kJob, 0, began_ago(0));
    sleep_ms(100);
    PeerServer server("127.0.0.1", port, kJob, "", began_ago(0));
    std::vector<PeersPointer> all = start_ranks(3, &server, {1});
    all[1] = one.get().peers;
    ASSERT_TRUE(all[0] && all[1] && all[2]);
    close_all(&all);
    old.get();
}

TEST(Peers, ARankZeroThatTellsOfADeclineLeavesItsPlaceToTheNext) {
    const test::HeldPort held;
    const int port = held.number();
    const StartTiming earlier = began_ago(kOneStartSeconds + 1);
    std::future<Outcome> old = in_thread([=](Id* id) {
        return PeerServer("127.0.0.1", port, kJob, "", earlier)
            .wait_for_all(info(0, 3), id->bytes, kLong);
    });
    EXPECT_TRUE(decline(port, info(2, 3), "rank 2: -b 0", kLong, earlier).get());
    PeerServer server("127.0.0.1", port, kJob, "", began_ago(0));
    EXPECT_EQ(old.get().error, "rank 2: -b 0");
    std::vector<PeersPointer> all = start_ranks(3, &server);
    ASSERT_TRUE(all[0] && all[1] && all[2]);
    close_all(&all);
}

TEST(Peers, ARankZeroThatWaitsKeepsItsPlace) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::future<Outcome> zero = serve(&server, info(0, 2));
    try {
        PeerServer("127.0.0.1", server.port(), kJob, "-pp");
        FAIL() << "took the port of a rank 0 that waits";
    } catch (const Error& error) {
        EXPECT_EQ(std::string(error.what()).find("-pp: port "), 0u) << error.what();
    }
    std::future<Outcome> one = join(server.port(), info(1, 2));
    expect_start({&zero, &one});
}

// ---- who does not belong

TEST(Peers, StrangersAreToldWhyAndDoNoHarm) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    const int port = server.port();
    std::future<Outcome> zero = serve(&server, info(0, 4));
    std::future<Outcome> one = join(port, info(1, 4));
    // Until rank 1 is counted.
    ASSERT_TRUE(happens_within(kLong / 2, [&] { return say_hello(port, 3, 4) == "rank 2"; }));
    const auto refusal = [&](const PeerInfo& self, const std::string& job = kJob) {
        Outcome outcome = join(port, self, kLong, job).get();
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
    expect_start({&zero, &one, &two, &three});
}

TEST(Peers, OtherProtocolVersionIsTold) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    std::future<Outcome> zero = serve(&server, info(0, 2));
    const net::Socket socket = connect(server.port());
    const hs::MessageBytes hello = hello_bytes(1, 2, 9);
    // Of the other version's message only the part that never changes.
    ASSERT_TRUE(net::send_all(socket, hello.data(), 16, net::after(1)));
    hs::MessageBytes bytes;
    ASSERT_TRUE(net::receive_all(socket, bytes.data(), bytes.size(), net::after(kLong / 2)));
    hs::Message answer;
    ASSERT_EQ(hs::parse_message(bytes.data(), bytes.size(), &answer), hs::Parsed::kMessage);
    EXPECT_EQ(answer.type, hs::MessageType::kRefusal);
    EXPECT_NE(answer.text.find("speaks version 9"), std::string::npos) << answer.text;
    std::future<Outcome> one = join(server.port(), info(1, 2));
    expect_start({&zero, &one});
}

TEST(Peers, RankThatFindsAnotherVersionSaysSo) {
    const net::Socket listener = net::listen_on("127.0.0.1", 0, "");
    std::future<Outcome> one = join(net::local_port(listener), info(1, 2), 5);
    const net::Socket socket = net::accept_one(listener, net::after(5));
    const hs::MessageBytes answer = hello_bytes(0, 2, 9);
    ASSERT_TRUE(net::send_all(socket, answer.data(), 16, net::after(1)));
    EXPECT_EQ(one.get().error,
              format("rank 0 at 127.0.0.1:%d speaks version 9 of the protocol and this "
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
    expect_start({&zero, &one, &two});
}

TEST(Peers, RestartedRankTakesItsPlaceAlsoWhenBothCallsWaitTogether) {
    PeerServer server("127.0.0.1", 0, kJob, "");
    {
        const net::Socket killed = connect(server.port());
        const hs::MessageBytes hello = hello_bytes(1, 2);
        ASSERT_TRUE(net::send_all(killed, hello.data(), hello.size(), net::after(1)));
    }
    std::future<Outcome> one = join(server.port(), info(1, 2));
    sleep_ms(100);
    std::vector<PeersPointer> all;
    all.push_back(serve(&server, info(0, 2)).get().peers);
    all.push_back(one.get().peers);
    ASSERT_TRUE(all[0] && all[1]);
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
    for (size_t i = 0; i < count; ++i) bytes += static_cast<char>(mix_element(seed, i));
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
    EXPECT_LT(seconds_since(start), 4);  // less than the silent ones are kept
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
    // Some of the oldest are dropped already, before their five seconds are over.
    EXPECT_TRUE(happens_within(4, [&] {
        char byte;
        return ::recv(idle[0].fd(), &byte, 1, MSG_DONTWAIT) == 0;
    }));
    const net::Deadline start = net::Clock::now();
    std::vector<PeersPointer> all;
    all.push_back(join(server.port(), info(1, 2)).get().peers);
    EXPECT_LT(seconds_since(start), 4);  // before their time is over, too
    all.push_back(zero.get().peers);
    ASSERT_TRUE(all[0] && all[1]);
    close_all(&all);
}

}  // namespace
}  // namespace llmc::peer_test
