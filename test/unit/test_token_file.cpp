#include "llmc/token_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <clocale>
#include <thread>

#include "test/unit/data_files.h"

namespace llmc {
namespace {

using test::count_up;
using test::error_of;
using test::expect_contains;
using test::header_bytes;
using test::TemporaryFolder;
using test::uint16_bytes;
using test::write_file;
using test::write_tokens;

TEST(ExpandPattern, SortsByBytesNotByLocaleOrNumber) {
    TemporaryFolder folder;
    for (const char* name : {"a_10.bin", "a_9.bin", "B_1.bin", "a_1.bin", "\xc3\xa4.bin", "a.txt"})
        write_file(folder.file(name), "x");
    std::setlocale(LC_ALL, "en_US.UTF-8");  // where it exists, it sorts a before B
    const std::vector<std::string> files = expand_pattern(folder.file("*.bin"), "-i");
    std::setlocale(LC_ALL, "C");
    EXPECT_EQ(files, (std::vector<std::string>{folder.file("B_1.bin"), folder.file("a_1.bin"),
                                               folder.file("a_10.bin"), folder.file("a_9.bin"),
                                               folder.file("\xc3\xa4.bin")}));
}

TEST(ExpandPattern, PlainNameAndNameWithBrackets) {
    TemporaryFolder folder;
    write_file(folder.file("one.bin"), "x");
    write_file(folder.file("run[2].bin"), "x");
    EXPECT_EQ(expand_pattern(folder.file("one.bin"), "-i").size(), 1u);
    EXPECT_EQ(expand_pattern(folder.file("run[2].bin"), "-i"),
              std::vector<std::string>{folder.file("run[2].bin")});
}

TEST(ExpandPattern, NothingFoundNamesTheFlagAndThePattern) {
    TemporaryFolder folder;
    const std::string pattern = folder.file("train_*.bin");
    expect_contains(error_of([&] { expand_pattern(pattern, "-i"); }), {"-i", pattern});
    expect_contains(error_of([&] { expand_pattern("", "-j"); }), {"-j"});
}

TEST(TokenFile, ReadsAnyRange) {
    TemporaryFolder folder;
    write_tokens(folder.file("a.bin"), count_up(100, 50));
    write_tokens(folder.file("b.bin"), count_up(500, 7));
    const TokenFiles files({folder.file("a.bin"), folder.file("b.bin")});
    ASSERT_EQ(files.size(), 2u);
    EXPECT_EQ(files.tokens(0), 50u);
    EXPECT_EQ(files.tokens(1), 7u);
    std::vector<uint16_t> out(50);
    files.read(0, 0, 50, out.data());
    EXPECT_EQ(out, count_up(100, 50));
    files.read(1, 3, 4, out.data());
    EXPECT_EQ(std::vector<uint16_t>(out.begin(), out.begin() + 4), count_up(503, 4));
    files.read(0, 49, 1, out.data());
    EXPECT_EQ(out[0], 149);
}

std::string error_of_file(const std::string& bytes) {
    TemporaryFolder folder;
    const std::string path = folder.file("bad.bin");
    write_file(path, bytes);
    const std::string text = error_of([&] { TokenFiles({path}); });
    expect_contains(text, {path});
    return text;
}

// llm.c#736 and LMOps#321: such files were trained on.
TEST(TokenFile, RefusesWhatIsNotATokenFile) {
    const std::string tokens = uint16_bytes(count_up(0, 10));
    expect_contains(error_of_file(""), {"empty"});
    expect_contains(error_of_file("short"), {"5 bytes", "1024"});
    expect_contains(error_of_file(header_bytes({20240521, 1, 10}) + tokens),
                    {"20240521", "20240520"});
    expect_contains(error_of_file(header_bytes({20240520, 2, 10}) + tokens),
                    {"version 2", "version 1"});
    expect_contains(error_of_file(header_bytes({20240520, 1, 0})), {"0 tokens", "at least 1"});
    expect_contains(error_of_file(header_bytes({20240520, 1, -1}) + tokens), {"-1 tokens"});
    expect_contains(error_of_file(header_bytes({20240520, 1, 11}) + tokens),
                    {"11 tokens", "20 bytes", "22"});
    expect_contains(error_of_file(header_bytes({20240520, 1, 9}) + tokens),
                    {"9 tokens", "20 bytes", "18"});
    // 32-bit tokens under the header of 16-bit ones.
    expect_contains(error_of_file(header_bytes({20240520, 1, 10}) + tokens + tokens),
                    {"10 tokens of 2 bytes", "40 bytes"});
}

TEST(TokenFile, RefusesWhatIsNotAFile) {
    TemporaryFolder folder;
    expect_contains(error_of([&] { TokenFiles({folder.file("none.bin")}); }),
                    {"none.bin", "No such file"});
    expect_contains(error_of([&] { TokenFiles({folder.path()}); }),
                    {folder.path(), "not a regular file"});
    const std::string pipe = folder.file("pipe.bin");
    ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
    expect_contains(error_of([&] { TokenFiles({pipe}); }), {pipe, "not a regular file"});
}

TEST(TokenFile, FileThatShrinksDuringTheRunIsAnError) {
    TemporaryFolder folder;
    const std::string path = folder.file("a.bin");
    write_tokens(path, count_up(0, 100));
    const TokenFiles files({path});
    std::vector<uint16_t> out(100);
    files.read(0, 0, 100, out.data());
    std::filesystem::resize_file(path, 1024 + 2 * 60);
    expect_contains(error_of([&] { files.read(0, 50, 20, out.data()); }), {path, "byte 1144"});
}

TEST(TokenFile, FileReplacedBeforeItIsOpenedAgainIsAnError) {
    TemporaryFolder folder;
    const std::string a = folder.file("a.bin"), b = folder.file("b.bin");
    write_tokens(a, count_up(0, 100));
    write_tokens(b, count_up(0, 100));
    const TokenFiles files({a, b}, 1);
    write_tokens(a, count_up(0, 90));
    uint16_t out;
    expect_contains(error_of([&] { files.read(0, 0, 1, &out); }), {a, "changed"});
}

TEST(TokenFile, DescriptorsAreBoundedAndRightAfterEviction) {
    TemporaryFolder folder;
    std::vector<std::string> paths;
    for (size_t i = 0; i < 40; ++i) {
        paths.push_back(folder.file(format("%02zu.bin", i)));
        write_tokens(paths.back(), count_up(1000 * i, 8));
    }
    const TokenFiles files(paths, 4);
    const auto descriptors = [] {
        const std::filesystem::directory_iterator all("/proc/self/fd");
        return std::distance(begin(all), end(all));
    };
    const auto before = descriptors();
    for (size_t round = 0; round < 200; ++round) {
        const size_t file = round * round % 40;
        uint16_t out;
        files.read(file, 5, 1, &out);
        ASSERT_EQ(out, static_cast<uint16_t>(1000 * file + 5));
        ASSERT_LE(files.open_descriptors(), 4u);
    }
    EXPECT_LE(descriptors() - before, 4);
}

TEST(TokenFile, ThreadsShareOneList) {
    TemporaryFolder folder;
    std::vector<std::string> paths;
    for (size_t i = 0; i < 8; ++i) {
        paths.push_back(folder.file(format("%zu.bin", i)));
        write_tokens(paths.back(), count_up(100 * i, 64));
    }
    const TokenFiles files(paths, 2);
    std::vector<int> wrong(4, 0);
    std::vector<std::thread> threads;
    for (size_t t = 0; t < wrong.size(); ++t) {
        threads.emplace_back([&, t] {
            std::vector<uint16_t> out(64);
            for (size_t i = 0; i < 500; ++i) {
                const size_t file = (i * 5 + t) % 8;
                files.read(file, 0, 64, out.data());
                wrong[t] += out != count_up(100 * file, 64);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

TEST(TokenFile, RemoveShorterThan) {
    TemporaryFolder folder;
    for (const char* name : {"a", "b", "c"}) {
        write_tokens(folder.file(name), count_up(0, name[0] == 'b' ? 3 : 10));
    }
    TokenFiles files({folder.file("a"), folder.file("b"), folder.file("c")});
    const auto removed = files.remove_shorter_than(10);
    ASSERT_EQ(removed.size(), 1u);
    EXPECT_EQ(removed[0].path, folder.file("b"));
    ASSERT_EQ(files.size(), 2u);
    EXPECT_EQ(files.path(0), folder.file("a"));
    EXPECT_EQ(files.path(1), folder.file("c"));
}

TEST(PreadAll, ShortReadsAndInterruptsAreGoneOverAgain) {
    const std::string source = "the quick brown fox";
    int calls = 0;
    const auto pread = [&](void* out, size_t bytes, off_t at) -> ssize_t {
        if (++calls % 3 == 0) {
            errno = EINTR;
            return -1;
        }
        const size_t from = std::min(static_cast<size_t>(at), source.size());
        const size_t n = std::min({bytes, size_t{2}, source.size() - from});
        std::copy_n(source.data() + from, n, static_cast<char*>(out));
        return static_cast<ssize_t>(n);
    };
    std::string out(9, '?');
    EXPECT_EQ(pread_all(pread, out.data(), 9, 4), 9);
    EXPECT_EQ(out, "quick bro");
    // The end of the file.
    out.assign(9, '?');
    EXPECT_EQ(pread_all(pread, out.data(), 9, 16), 3);
    EXPECT_EQ(out.substr(0, 3), "fox");
}

TEST(PreadAll, OtherErrorsAreReported) {
    const auto pread = [](void*, size_t, off_t) -> ssize_t {
        errno = EIO;
        return -1;
    };
    char out;
    EXPECT_EQ(pread_all(pread, &out, 1, 0), -1);
    EXPECT_EQ(errno, EIO);
}

}  // namespace
}  // namespace llmc
