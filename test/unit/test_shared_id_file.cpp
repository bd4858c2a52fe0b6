// llmc/shared_id_file.h: ranks find rank 0 through a folder, whatever lies in it.
#include "llmc/shared_id_file.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <sstream>
#include <utility>

#include "test/unit/held_port.h"

namespace fs = std::filesystem;
namespace net = llmc::net;
using llmc::Error;
using llmc::kIdBytes;
using llmc::PeerInfo;
using llmc::Peers;
using llmc::PeerServer;
using llmc::SharedId;

namespace {

struct Outcome {
    std::unique_ptr<Peers> peers;
    unsigned char first_of_id = 0;
    std::string error = "";
};

class SharedIdFile : public ::testing::Test {
  protected:
    void SetUp() override {
        std::string name = (fs::temp_directory_path() / "shared_id_XXXXXX").string();
        ASSERT_NE(mkdtemp(name.data()), nullptr);
        folder_ = name;
    }
    void TearDown() override { fs::remove_all(folder_); }

    std::string file() const { return folder_ + "/ncclUniqueId.sync"; }
    void put(const std::string& text) const { std::ofstream(file(), std::ios::binary) << text; }
    std::string contents() const {
        std::ifstream in(file(), std::ios::binary);
        std::stringstream text;
        text << in.rdbuf();
        return text.str();
    }
    std::vector<std::string> names() const {
        std::vector<std::string> all;
        for (const fs::directory_entry& entry : fs::directory_iterator(folder_)) {
            all.push_back(entry.path().filename().string());
        }
        return all;
    }

    // Rank 0 and rank 1 of a run of two, each in a thread.
    std::future<Outcome> serve(unsigned char first_of_id, const std::string& job = "job",
                               double limit_s = 20) const {
        return std::async(std::launch::async, [=, folder = folder_] {
            Outcome outcome;
            try {
                const unsigned char id[kIdBytes] = {first_of_id};
                PeerServer server("", 0, job, "");
                outcome.peers = llmc::serve_through_folder(&server, folder, job,
                                                           PeerInfo{0, 2, 1, ""}, id, limit_s);
            } catch (const Error& error) {
                outcome.error = error.what();
            }
            return outcome;
        });
    }
    std::future<Outcome> join(const std::string& job = "job", double limit_s = 20) const {
        return std::async(std::launch::async, [=, folder = folder_] {
            Outcome outcome;
            try {
                unsigned char id[kIdBytes] = {};
                outcome.peers =
                    llmc::join_through_folder(folder, job, PeerInfo{1, 2, 1, ""}, id, limit_s);
                outcome.first_of_id = id[0];
            } catch (const Error& error) {
                outcome.error = error.what();
            }
            return outcome;
        });
    }
    // Both come together, rank 1 with rank 0's id.
    static void expect_run(std::future<Outcome> zero, std::future<Outcome> one,
                           unsigned char first_of_id) {
        Outcome a = zero.get(), b = one.get();
        EXPECT_EQ(a.error + b.error, "");
        ASSERT_TRUE(a.peers && b.peers);
        EXPECT_EQ(b.first_of_id, first_of_id);
        b.peers->close();
        a.peers->close();
    }
    bool appears() const {
        const net::Deadline deadline = net::after(10);
        while (!fs::exists(file())) {
            if (net::Clock::now() >= deadline) return false;
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
        return true;
    }

    std::string folder_;
};

SharedId example() {
    SharedId shared;
    shared.server_token = 4711;
    shared.where = {{"10.0.0.1", 17171}, {"fd00::2", 17171}, {"127.0.0.1", 17171}};
    for (size_t i = 0; i < kIdBytes; ++i) shared.id[i] = static_cast<unsigned char>(255 - i);
    return shared;
}

std::string encoded(const SharedId& shared, const std::string& job = "job") {
    const std::vector<unsigned char> bytes = llmc::id_file::encode(shared, job);
    return std::string(bytes.begin(), bytes.end());
}

TEST_F(SharedIdFile, IsReadAsItWasWritten) {
    put(encoded(example()));
    const auto read = llmc::read_id(folder_, "job");
    ASSERT_TRUE(read);
    EXPECT_EQ(read->server_token, 4711u);
    EXPECT_EQ(read->id, example().id);
    ASSERT_EQ(read->where.size(), 3u);
    EXPECT_EQ(net::endpoint_text(read->where[1]), "[fd00::2]:17171");
    EXPECT_FALSE(llmc::read_id(folder_, ""));
    EXPECT_FALSE(llmc::read_id(folder_, "job2"));
}

TEST_F(SharedIdFile, TooManyAddressesLoseTheUnlikelyOnes) {
    SharedId shared = example();
    for (int i = 0; i < 500; ++i) shared.where.push_back({"192.168.1." + std::to_string(i), 17171});
    put(encoded(shared));
    const auto read = llmc::read_id(folder_, "job");
    ASSERT_TRUE(read);
    EXPECT_GT(read->where.size(), 50u);
    EXPECT_LT(read->where.size(), 200u);
    EXPECT_EQ(read->where[0].host, "10.0.0.1");
}

TEST_F(SharedIdFile, HalfWrittenOrDamagedIsNotTaken) {
    const std::string good = encoded(example());
    for (size_t length = 0; length < good.size(); length += length < 200 ? 1 : 61) {
        put(good.substr(0, length));
        EXPECT_FALSE(llmc::read_id(folder_, "job")) << length;
    }
    put(good + "x");
    EXPECT_FALSE(llmc::read_id(folder_, "job"));
    for (size_t i = 0; i < good.size(); i += i < 300 ? 1 : 61) {
        std::string bad = good;
        bad[i] = static_cast<char>(bad[i] ^ 1);
        put(bad);
        EXPECT_FALSE(llmc::read_id(folder_, "job")) << i;
    }
    put(good);
    EXPECT_TRUE(llmc::read_id(folder_, "job"));
}

TEST_F(SharedIdFile, AddressesInItAreChecked) {
    for (const net::Endpoint& bad :
         {net::Endpoint{"", 1}, net::Endpoint{"a.host", 1}, net::Endpoint{"10.0.0.1", 0},
          net::Endpoint{"10.0.0.1", 65536}, net::Endpoint{"10.0.0.1", -1},
          net::Endpoint{"10.0.0.1 5", 1}}) {
        SharedId shared = example();
        shared.where.push_back(bad);
        put(encoded(shared));
        EXPECT_FALSE(llmc::read_id(folder_, "job")) << net::endpoint_text(bad);
    }
    SharedId shared = example();
    shared.where.clear();
    put(encoded(shared));
    EXPECT_FALSE(llmc::read_id(folder_, "job"));
    shared = example();
    shared.server_token = 0;
    put(encoded(shared));
    EXPECT_FALSE(llmc::read_id(folder_, "job"));
}

TEST_F(SharedIdFile, RanksMeetAndTheFolderIsCleanAfterwards) {
    std::future<Outcome> one = join();
    expect_run(serve(3), std::move(one), 3);
    EXPECT_TRUE(names().empty());
}

TEST_F(SharedIdFile, OnlyTheUserMayReadTheId) {
    PeerServer server("127.0.0.1", 0, "job", "");
    const unsigned char id[kIdBytes] = {1};
    EXPECT_EQ(llmc::publish_id(folder_, "job", server, id), file());
    EXPECT_EQ(fs::status(file()).permissions(), fs::perms::owner_read | fs::perms::owner_write);
    EXPECT_EQ(names().size(), 1u);
}

TEST_F(SharedIdFile, IdOfAKilledRunIsNotTaken) {
    const pid_t child = fork();
    if (child == 0) {
        // Rank 0 of the earlier run, up to the moment in which it would wait.
        const unsigned char id[kIdBytes] = {99};
        PeerServer server("", 0, "job", "");
        llmc::publish_id(folder_, "job", server, id);
        pause();
        _exit(1);
    }
    ASSERT_TRUE(appears());
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    ASSERT_TRUE(llmc::read_id(folder_, "job"));
    std::future<Outcome> early = join();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    expect_run(serve(4), std::move(early), 4);
    EXPECT_TRUE(names().empty());
}

TEST_F(SharedIdFile, ServerOfAnotherRunOnTheOldPortIsNotTaken) {
    // The file's rank 0 is dead, and another run got its port; that run waits elsewhere.
    PeerServer other("127.0.0.1", 0, "job", "");
    auto other_waits = std::async(std::launch::async, [&] {
        const unsigned char id[kIdBytes] = {99};
        try {
            other.wait_for_all(PeerInfo{0, 2, 1, ""}, id, 0.7);
        } catch (const Error& error) {
            return std::string(error.what());
        }
        return std::string("started");
    });
    SharedId old = example();
    old.where = {{"127.0.0.1", other.port()}};
    put(encoded(old));
    std::future<Outcome> early = join();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    expect_run(serve(5), std::move(early), 5);
    EXPECT_NE(other_waits.get().find("rank 1 of 2 did not arrive"), std::string::npos);
}

TEST_F(SharedIdFile, RandomBytesInItsPlaceAreOverwritten) {
    std::string junk;
    for (uint64_t i = 0; i < 2048; ++i) junk += static_cast<char>(llmc::mix64(i));
    put(junk);
    EXPECT_EQ(join("job", 0.2).get().error.substr(0, 4 + folder_.size()), "-pf " + folder_);
    std::future<Outcome> early = join();
    expect_run(serve(6), std::move(early), 6);
    EXPECT_TRUE(names().empty());
}

TEST_F(SharedIdFile, RunsWithTokensOfTheirOwnMayShareAFolder) {
    std::future<Outcome> zero_a = serve(10, "a"), zero_b = serve(20, "b");
    ASSERT_TRUE(appears());
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::future<Outcome> one_a = join("a"), one_b = join("b");
    expect_run(std::move(zero_a), std::move(one_a), 10);
    expect_run(std::move(zero_b), std::move(one_b), 20);
}

TEST_F(SharedIdFile, SecondRunWithTheSameTokenIsRefused) {
    std::future<Outcome> zero = serve(1);
    ASSERT_TRUE(appears());
    const std::string error = serve(2).get().error;
    EXPECT_EQ(error.find("-pf " + folder_ + ": another run's rank 0 waits in this folder, at "), 0u)
        << error;
    expect_run(std::move(zero), join(), 1);
}

TEST_F(SharedIdFile, AnotherRunsFileStaysWhereItIs) {
    PeerServer server("127.0.0.1", 0, "job", ""), other("127.0.0.1", 0, "job", "");
    const unsigned char id[kIdBytes] = {1};
    llmc::publish_id(folder_, "job", other, id);
    const std::string before = contents();
    llmc::withdraw_id(folder_, "job", server);
    EXPECT_EQ(contents(), before);
    llmc::withdraw_id(folder_, "job", other);
    EXPECT_TRUE(names().empty());
    llmc::withdraw_id(folder_, "job", other);
}

TEST_F(SharedIdFile, RemovedAlsoWhenTheStartFails) {
    EXPECT_NE(serve(1, "job", 0.2).get().error.find("rank 1 of 2 did not arrive"),
              std::string::npos);
    EXPECT_TRUE(names().empty());
}

TEST_F(SharedIdFile, LeadsARankThatDeclinesToRankZero) {
    std::future<bool> one = std::async(std::launch::async, [this] {
        const PeerInfo self = {1, 2, 1, ""};
        return llmc::decline_through_folder(folder_, "job", self, "rank 1: -b 0", 20);
    });
    EXPECT_EQ(serve(1).get().error, "rank 1: -b 0");
    EXPECT_TRUE(one.get());
    EXPECT_TRUE(names().empty());
}

TEST_F(SharedIdFile, LeadsTheOthersToARankZeroThatDeclines) {
    std::future<Outcome> one = join();
    PeerServer server("127.0.0.1", 0, "job", "");
    llmc::decline_all_through_folder(&server, folder_, "job", 2, "rank 0: -b 0", 20);
    EXPECT_EQ(one.get().error, "rank 0: -b 0");
    EXPECT_TRUE(names().empty());
}

TEST_F(SharedIdFile, OfARankZeroThatDeclinesGivesWayToTheNextOne) {
    llmc::StartTiming earlier;  // than that of this process, which the others have
    earlier.began -= std::chrono::seconds(60);
    std::future<void> old = std::async(std::launch::async, [&, folder = folder_] {
        PeerServer server("127.0.0.1", 0, "job", "", earlier);
        llmc::decline_all_through_folder(&server, folder, "job", 2, "rank 0: -b 0", 100);
    });
    ASSERT_TRUE(appears());
    std::future<Outcome> one = join("job", 100);
    expect_run(serve(7), std::move(one), 7);
    old.get();
}

TEST_F(SharedIdFile, ReasonIsNamedAtTheLimit) {
    const std::string begin =
        "-pf " + folder_ + ": rank 0 was not found within 0.1 s (LLMC_INIT_TIMEOUT_S): ";
    EXPECT_EQ(join("job", 0.1).get().error, begin + "no ncclUniqueId.sync appeared there");
    put("half of it");
    EXPECT_EQ(join("job", 0.1).get().error,
              begin + "ncclUniqueId.sync there is not a file of this program, or not whole");
    put(encoded(example(), "another job"));
    EXPECT_EQ(join("job", 0.1).get().error,
              begin +
                  "ncclUniqueId.sync there is of a job with another LLMC_JOB_TOKEN (where that "
                  "is unset, SLURM_JOB_ID counts)");
    SharedId dead = example();
    const llmc::test::HeldPort nobodys;
    dead.where = {{"127.0.0.1", nobodys.number()}};
    put(encoded(dead));
    EXPECT_EQ(join("job", 0.1).get().error, begin + "rank 0, which ncclUniqueId.sync says is at " +
                                                net::endpoint_text(dead.where[0]) +
                                                ", did not answer: Connection refused");
    fs::remove(file());
    fs::create_directory(file());
    EXPECT_EQ(join("job", 0.1).get().error,
              begin + "ncclUniqueId.sync there is not a file of this program, or not whole");
    EXPECT_EQ(serve(1).get().error.find("-pf " + folder_ + ": cannot write ncclUniqueId.sync"), 0u);
}

TEST_F(SharedIdFile, MissingFolderIsNamed) {
    fs::remove_all(folder_);
    // It may come in the first half of the limit, of a long one in the first two seconds.
    for (const double limit_s : {0, 20}) {
        EXPECT_EQ(
            join("job", limit_s).get().error,
            "-pf " + folder_ +
                ": cannot be read (No such file or directory); give an existing folder that all "
                "ranks see");
    }
    EXPECT_EQ(serve(1).get().error,
              "-pf " + folder_ +
                  ": cannot write ncclUniqueId.sync there (No such file or directory); give an "
                  "existing folder that all ranks see and rank 0 may write in");
}

TEST_F(SharedIdFile, FolderWithoutWritePermissionIsNamed) {
    // In /proc even root may create nothing.
    const std::string kept = std::exchange(folder_, "/proc/self");
    const std::string error = serve(1).get().error;
    folder_ = kept;
    EXPECT_EQ(error.find("-pf /proc/self: cannot write ncclUniqueId.sync there ("), 0u) << error;
}

}  // namespace
