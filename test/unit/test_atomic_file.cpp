// llmc/atomic_file.h: a file appears whole or not at all, whatever goes wrong.
#include "llmc/atomic_file.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

namespace fs = std::filesystem;
using llmc::AtomicFile;
using llmc::Error;

namespace {

std::function<void()> before_next_lock;

}  // namespace

// Stands in for the C library's, so that a test can act between a file's opening and its locking.
extern "C" int flock(int fd, int operation) noexcept {
    if (before_next_lock) std::exchange(before_next_lock, nullptr)();
    return static_cast<int>(syscall(SYS_flock, fd, operation));
}

namespace {

class AtomicFileTest : public ::testing::Test {
  protected:
    void SetUp() override {
        std::string name = (fs::temp_directory_path() / "atomic_file_XXXXXX").string();
        ASSERT_NE(mkdtemp(name.data()), nullptr);
        folder_ = name;
    }
    void TearDown() override { fs::remove_all(folder_); }

    std::string in_folder(const std::string& name) const { return (folder_ / name).string(); }
    static std::string contents(const std::string& path) {
        std::ifstream file(path, std::ios::binary);
        std::stringstream text;
        text << file.rdbuf();
        return text.str();
    }
    static void put(const std::string& path, const std::string& text) {
        std::ofstream(path, std::ios::binary) << text;
    }
    size_t files_in_folder() const {
        return static_cast<size_t>(
            std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
    }

    fs::path folder_;
};

std::string message(const std::function<void()>& action) {
    try {
        action();
    } catch (const Error& error) {
        return error.what();
    }
    return "no error";
}

TEST_F(AtomicFileTest, AppearsOnlyWhenCommitted) {
    const std::string path = in_folder("a.bin");
    AtomicFile file(path);
    file.write("one ", 4);
    file.write(std::string_view("two\0three", 9));
    EXPECT_FALSE(fs::exists(path));
    EXPECT_EQ(file.bytes_written(), 13u);
    file.commit();
    EXPECT_EQ(contents(path), std::string("one two\0three", 13));
    EXPECT_EQ(files_in_folder(), 1u);
}

TEST_F(AtomicFileTest, ReplacesTheOldFileOnlyWhenCommitted) {
    const std::string path = in_folder("a.bin");
    put(path, "old");
    {
        AtomicFile file(path);
        file.write("new");
        EXPECT_EQ(contents(path), "old");
    }
    EXPECT_EQ(contents(path), "old");
    EXPECT_EQ(files_in_folder(), 1u) << "what was not committed is removed";
    AtomicFile file(path);
    file.write("new");
    file.commit();
    EXPECT_EQ(contents(path), "new");
}

TEST_F(AtomicFileTest, EmptyFileIsAFile) {
    AtomicFile(in_folder("empty")).commit();
    EXPECT_TRUE(fs::exists(in_folder("empty")));
    EXPECT_EQ(fs::file_size(in_folder("empty")), 0u);
}

TEST_F(AtomicFileTest, WriteOrCommitAfterCommitIsAnError) {
    AtomicFile file(in_folder("a"));
    file.commit();
    EXPECT_THROW(file.write("more"), Error);
    EXPECT_THROW(file.commit(), Error);
}

TEST_F(AtomicFileTest, LeftoverOfAKilledProcessDoesNotShineThrough) {
    const std::string path = in_folder("a.bin");
    put(path, "old");
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        AtomicFile file(path);
        file.write("a longer text that is never finished");
        kill(getpid(), SIGKILL);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
    EXPECT_EQ(contents(path), "old");
    EXPECT_TRUE(fs::exists(path + ".tmp"));
    AtomicFile file(path);
    file.write("new");
    file.commit();
    EXPECT_EQ(contents(path), "new");
    EXPECT_EQ(files_in_folder(), 1u);
}

TEST_F(AtomicFileTest, MissingFolderIsNamed) {
    const std::string path = in_folder("missing/a.bin");
    const std::string text = message([&] { AtomicFile file(path); });
    EXPECT_NE(text.find(path), std::string::npos) << text;
    EXPECT_NE(text.find("No such file or directory"), std::string::npos) << text;
}

TEST_F(AtomicFileTest, FolderInTheFilesPlaceIsNamed) {
    const std::string path = in_folder("a");
    fs::create_directory(path);
    AtomicFile file(path);
    file.write("text");
    const std::string text = message([&] { file.commit(); });
    EXPECT_EQ(text.rfind(path + ": cannot rename", 0), 0u) << text;
    EXPECT_NE(text.find("directory"), std::string::npos) << text;
    EXPECT_FALSE(fs::exists(path + ".tmp"));
}

TEST_F(AtomicFileTest, NameWithoutAFolderIsInTheCurrentOne) {
    const fs::path before = fs::current_path();
    fs::current_path(folder_);
    {
        AtomicFile file("a.bin");
        file.write("text");
        file.commit();
    }
    fs::current_path(before);
    EXPECT_EQ(contents(in_folder("a.bin")), "text");
}

// A limit on file size stops a write half-way, as a full disk does, and needs no privileges.
TEST_F(AtomicFileTest, FileSizeLimitLeavesTheOldFileWhole) {
    const std::string path = in_folder("a.bin");
    put(path, "old");
    const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
    rlimit before{};
    ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
    rlimit small = before;
    small.rlim_cur = 4096;
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
    std::string text, after;
    {
        AtomicFile file(path);
        file.write("fits");
        text = message([&] { file.write(std::string(10000, 'x')); });
        after = message([&] { file.commit(); });
    }
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
    std::signal(SIGXFSZ, old_handler);
    EXPECT_EQ(text, path + ": cannot write: File too large");
    EXPECT_NE(after, "no error") << "half a file must not be committed";
    EXPECT_EQ(contents(path), "old");
    EXPECT_EQ(files_in_folder(), 1u) << "the half-written file frees its space";
}

// A disk of 64 KiB; needs the right to mount.
TEST_F(AtomicFileTest, FullDiskLeavesTheOldCheckpointWhole) {
    const std::string disk = in_folder("disk");
    fs::create_directory(disk);
    if (mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=64k") != 0) {
        GTEST_SKIP() << "cannot mount a small disk here";
    }
    const std::string path = disk + "/model.bin";
    const std::string old_data(30000, 'o');
    std::string text, second;
    {
        AtomicFile file(path);
        file.write(old_data);
        file.commit();
        AtomicFile next(path);
        text = message([&] { next.write(std::string(60000, 'n')); });
    }
    const std::string left = contents(path);
    const bool leftover = fs::exists(path + ".tmp");
    second = message([&] {
        AtomicFile file(path);
        file.write("small");
        file.commit();
    });
    const std::string replaced = contents(path);
    ASSERT_EQ(umount(disk.c_str()), 0);
    EXPECT_EQ(text, path + ": cannot write: No space left on device");
    EXPECT_EQ(left, old_data);
    EXPECT_FALSE(leftover);
    EXPECT_EQ(second, "no error");
    EXPECT_EQ(replaced, "small");
}

TEST_F(AtomicFileTest, TwoWritersOfOneFileAreRefused) {
    const std::string path = in_folder("a.bin");
    AtomicFile first(path);
    first.write("first");
    const std::string text = message([&] { AtomicFile second(path); });
    EXPECT_NE(text.find("another process"), std::string::npos) << text;
    EXPECT_NE(text.find(path), std::string::npos) << text;
    first.write(" whole");
    first.commit();
    EXPECT_EQ(contents(path), "first whole");
    AtomicFile second(path);
    second.write("second");
    second.commit();
    EXPECT_EQ(contents(path), "second");
}

// The second writer then holds the first one's finished file in its hands, and must not empty it.
TEST_F(AtomicFileTest, FileFinishedBetweenOpeningAndLockingIsNotTouched) {
    const std::string path = in_folder("a.bin");
    AtomicFile first(path);
    first.write("first");
    before_next_lock = [&] { first.commit(); };
    AtomicFile second(path);
    ASSERT_FALSE(before_next_lock);
    EXPECT_EQ(contents(path), "first");
    second.write("second");
    EXPECT_EQ(contents(path), "first");
    second.commit();
    EXPECT_EQ(contents(path), "second");
    EXPECT_EQ(files_in_folder(), 1u);
}

// The same, and a third writer has begun by then: the name leads to its file.
TEST_F(AtomicFileTest, FileFinishedWhileAThirdWriterBeginsIsNotTouched) {
    const std::string path = in_folder("a.bin");
    AtomicFile first(path);
    first.write("first");
    std::unique_ptr<AtomicFile> third;
    before_next_lock = [&] {
        first.commit();
        third = std::make_unique<AtomicFile>(path);
    };
    EXPECT_THROW(AtomicFile second(path), Error);
    EXPECT_EQ(contents(path), "first");
    ASSERT_NE(third, nullptr);
    third->write("third");
    third->commit();
    EXPECT_EQ(contents(path), "third");
}

// Likewise when the first writer gave up, and its file has no name any more.
TEST_F(AtomicFileTest, FileRemovedBetweenOpeningAndLockingIsMadeAnew) {
    const std::string path = in_folder("a.bin");
    auto first = std::make_unique<AtomicFile>(path);
    before_next_lock = [&] { first.reset(); };
    AtomicFile second(path);
    ASSERT_FALSE(before_next_lock);
    second.write("second");
    second.commit();
    EXPECT_EQ(contents(path), "second");
}

TEST_F(AtomicFileTest, RacingWritersNeverShowHalfAFile) {
    const std::string path = in_folder("a.bin");
    constexpr size_t kSize = 2000;
    put(path, std::string(kSize, '0'));
    std::atomic<int> committed{0}, torn{0}, running{3};
    std::vector<std::thread> writers;
    for (int t = 0; t < 3; ++t) {
        writers.emplace_back([&, t] {
            for (int i = 0; i < 50; ++i) {
                try {
                    AtomicFile file(path);
                    file.write(std::string(kSize, static_cast<char>('a' + t)));
                    file.commit();
                    ++committed;
                } catch (const Error&) {
                    std::this_thread::yield();
                }
            }
            --running;
        });
    }
    while (running > 0) {
        const std::string text = contents(path);
        if (text.size() != kSize || text != std::string(kSize, text[0])) ++torn;
    }
    for (std::thread& writer : writers) writer.join();
    EXPECT_GT(committed, 0);
    EXPECT_EQ(torn, 0);
    EXPECT_EQ(files_in_folder(), 1u);
}

TEST(WriteAll, GoesOnAfterShortWritesAndSignals) {
    std::string data, written;
    for (int i = 0; i < 1000; ++i) data += static_cast<char>(i * 7);
    int calls = 0;
    const int status = llmc::detail::write_all(
        [&](const char* piece, size_t size) -> ssize_t {
            if (++calls % 3 == 0) {
                errno = EINTR;
                return -1;
            }
            const size_t taken = std::min<size_t>(size, 1 + calls % 17);
            written.append(piece, taken);
            return static_cast<ssize_t>(taken);
        },
        data.data(), data.size());
    EXPECT_EQ(status, 0);
    EXPECT_EQ(written, data);
}

TEST(WriteAll, MoreThanFourGiBGoInPiecesThatOneCallCanTake) {
    const size_t bytes = (size_t{5} << 30) + 12345;
    size_t total = 0, largest = 0;
    void* const memory =  // addresses alone: nothing is read
        mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    const char* const base = static_cast<const char*>(memory);
    bool in_order = true;
    const int status = llmc::detail::write_all(
        [&](const char* piece, size_t size) {
            in_order = in_order && piece == base + total;
            total += size;
            largest = std::max(largest, size);
            return static_cast<ssize_t>(size);
        },
        base, bytes);
    munmap(memory, bytes);
    EXPECT_EQ(status, 0);
    EXPECT_EQ(total, bytes);
    EXPECT_LT(largest, size_t{0x7ffff000});
    EXPECT_TRUE(in_order);
}

TEST(WriteAll, ReportsErrorsAndDoesNotSpinOnNothing) {
    const auto failing = [](const char*, size_t) -> ssize_t {
        errno = ENOSPC;
        return -1;
    };
    const auto stuck = [](const char*, size_t) -> ssize_t { return 0; };
    EXPECT_EQ(llmc::detail::write_all(failing, "x", 1), ENOSPC);
    EXPECT_EQ(llmc::detail::write_all(stuck, "x", 1), EIO);
    EXPECT_EQ(llmc::detail::write_all(failing, "x", 0), 0);
}

}  // namespace
