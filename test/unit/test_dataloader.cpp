#include "llmc/dataloader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "test/unit/data_files.h"

namespace llmc {
namespace {

using test::count_up;
using test::error_of;
using test::expect_contains;
using test::TemporaryFolder;
using test::write_tokens;

constexpr int kVocab = 65536;

// Token files whose tokens are all different: the first token of a window says which one it is.
struct Shards {
    explicit Shards(const std::vector<size_t>& lengths) {
        size_t first = 0;
        for (size_t i = 0; i < lengths.size(); ++i) {
            paths.push_back(folder.file(format("shard_%02zu.bin", i)));
            write_tokens(paths.back(), count_up(first, lengths[i]));
            first += lengths[i];
        }
    }
    TokenDataset open(int T, uint64_t seed, bool shuffle) const {
        return TokenDataset(paths, T, kVocab, seed, shuffle);
    }
    TemporaryFolder folder;
    std::vector<std::string> paths;
};

// First tokens of windows first ... first+count-1, each checked to be T+1 consecutive tokens.
std::vector<int> ids(const TokenDataset& data, uint64_t first, uint64_t count) {
    std::vector<int> result;
    std::vector<int> tokens(static_cast<size_t>(data.T()) + 1);
    for (uint64_t q = first; q < first + count; ++q) {
        data.read_window(q, tokens.data());
        for (size_t i = 0; i < tokens.size(); ++i) {
            EXPECT_EQ(tokens[i], tokens[0] + static_cast<int>(i)) << "window " << q;
        }
        result.push_back(tokens[0]);
    }
    return result;
}

std::vector<int> sorted(std::vector<int> values) {
    std::sort(values.begin(), values.end());
    return values;
}

// T = 8; none of the lengths shares a factor with B*T, and two end exactly on a window.
const std::vector<size_t> kLengths = {8 * 13 + 5, 8 * 7 + 1, 8 * 30 + 7, 8 * 1 + 1, 8 * 20 + 3};
constexpr uint64_t kWindows = 13 + 7 + 30 + 1 + 20;

std::vector<int> all_window_ids() {
    std::vector<int> expected;
    int first = 0;
    for (const size_t length : kLengths) {
        for (size_t w = 0; 8 * w + 9 <= length; ++w)
            expected.push_back(first + static_cast<int>(8 * w));
        first += static_cast<int>(length);
    }
    return expected;
}

TEST(TokenDataset, IdentityOrderCutsFilesWithStrideT) {
    const Shards shards(kLengths);
    const TokenDataset data = shards.open(8, 1, false);
    EXPECT_EQ(data.num_windows(), kWindows);
    EXPECT_EQ(ids(data, 0, kWindows), all_window_ids());
    EXPECT_EQ(ids(data, kWindows, kWindows), all_window_ids());
}

// llm.c#792: some windows came twice in an epoch, others never.
TEST(TokenDataset, AnEpochCoversEachWindowOnce) {
    const Shards shards(kLengths);
    for (const uint64_t seed : {0u, 1u, 1337u}) {
        const TokenDataset data = shards.open(8, seed, true);
        for (uint64_t epoch = 0; epoch < 4; ++epoch) {
            EXPECT_EQ(sorted(ids(data, epoch * kWindows, kWindows)), all_window_ids());
        }
    }
}

// The ids of steps 0 ... steps-1, as N ranks with A = M/N micro-batches each read them, every rank
// with a data set of its own.
std::vector<int> ids_read_by(int N, const Shards& shards, bool shuffle, int steps, int M, int B) {
    std::vector<int> result(static_cast<size_t>(steps * M * B), -1);
    const int A = M / N;
    for (int rank = 0; rank < N; ++rank) {
        const TokenDataset data = shards.open(8, 42, shuffle);
        std::vector<int> inputs(static_cast<size_t>(B) * 8), targets(inputs.size());
        for (int step = 0; step < steps; ++step) {
            for (int j = rank * A; j < (rank + 1) * A; ++j) {
                data.read_rows(TokenDataset::micro_batch(static_cast<uint64_t>(step), j, M, B), B,
                               inputs.data(), targets.data());
                for (int b = 0; b < B; ++b) {
                    for (int t = 0; t < 8; ++t) {
                        const size_t at = static_cast<size_t>(b * 8 + t);
                        EXPECT_EQ(inputs[at], inputs[static_cast<size_t>(b) * 8] + t);
                        EXPECT_EQ(targets[at], inputs[at] + 1);
                    }
                    result[static_cast<size_t>((step * M + j) * B + b)] =
                        inputs[static_cast<size_t>(b) * 8];
                }
            }
        }
    }
    return result;
}

// llm.c#792: the samples of a step depended on the number of ranks. 12 steps of 16 rows are 2.7
// epochs of 71 windows.
TEST(TokenDataset, SamplesOfAStepAreTheSameForAnyNumberOfRanks) {
    const Shards shards(kLengths);
    for (const bool shuffle : {false, true}) {
        const std::vector<int> one = ids_read_by(1, shards, shuffle, 12, 8, 2);
        EXPECT_EQ(sorted({one.begin(), one.begin() + kWindows}), all_window_ids());
        EXPECT_EQ(sorted({one.begin() + kWindows, one.begin() + 2 * kWindows}), all_window_ids());
        const std::set<int> third(one.begin() + 2 * kWindows, one.end());
        EXPECT_EQ(third.size(), one.size() - 2 * kWindows);
        for (const int N : {2, 4, 8}) {
            EXPECT_EQ(ids_read_by(N, shards, shuffle, 12, 8, 2), one) << N;
        }
    }
}

// Micro-batches of another shape leave the order of the windows alone.
TEST(TokenDataset, OrderDoesNotDependOnTheBatch) {
    const Shards shards(kLengths);
    EXPECT_EQ(ids_read_by(1, shards, true, 12, 8, 2), ids_read_by(1, shards, true, 3, 4, 16));
}

TEST(TokenDataset, SeedsAndEpochsChangeTheOrder) {
    const Shards shards(kLengths);
    const TokenDataset data = shards.open(8, 1, true), other = shards.open(8, 2, true);
    const std::vector<int> first = ids(data, 0, kWindows);
    EXPECT_EQ(first, ids(shards.open(8, 1, true), 0, kWindows));
    EXPECT_NE(first, all_window_ids());
    EXPECT_NE(first, ids(data, kWindows, kWindows));
    EXPECT_NE(first, ids(other, 0, kWindows));
}

TEST(TokenDataset, FilesAndWindowsAreBothShuffledAndReadingStaysLocal) {
    const Shards shards(kLengths);
    const TokenDataset data = shards.open(8, 5, true);
    std::set<std::vector<size_t>> file_orders;
    std::set<std::vector<uint64_t>> window_orders;  // of the longest file, 30 windows
    size_t in_order = 0;
    for (uint64_t epoch = 0; epoch < 20; ++epoch) {
        std::vector<size_t> files;
        std::vector<uint64_t> windows;
        uint64_t last = 0;
        for (uint64_t q = epoch * kWindows; q < (epoch + 1) * kWindows; ++q) {
            const Window window = data.window(q);
            EXPECT_EQ(window.epoch, epoch);
            EXPECT_EQ(window.place, q % kWindows);
            if (files.empty() || files.back() != window.file) {
                files.push_back(window.file);
            } else {
                in_order += window.index == last + 1;
            }
            last = window.index;
            if (window.file == 2) windows.push_back(window.index);
        }
        // Each file once: all its windows lie together.
        EXPECT_EQ(files.size(), kLengths.size());
        file_orders.insert(files);
        window_orders.insert(windows);
    }
    EXPECT_GT(file_orders.size(), 15u);
    EXPECT_EQ(window_orders.size(), 20u);
    // Neighbours in the order are neighbours in the file about once a file.
    EXPECT_LT(in_order, 20u * 10u);
}

TEST(TokenDataset, FilesOfOneLengthHaveOrdersOfTheirOwn) {
    const Shards shards({8 * 50 + 1, 8 * 50 + 1});
    const TokenDataset data = shards.open(8, 5, true);
    std::vector<uint64_t> order[2];
    for (uint64_t q = 0; q < 100; ++q) order[data.window(q).file].push_back(data.window(q).index);
    EXPECT_NE(order[0], order[1]);
}

TEST(TokenDataset, AnyNumberIsAWindow) {
    const Shards shards(kLengths);
    const TokenDataset data = shards.open(8, 5, true);
    const uint64_t last = UINT64_MAX;
    EXPECT_EQ(data.window(last).epoch, last / kWindows);
    EXPECT_EQ(data.window(last).place, last % kWindows);
    ids(data, last - 200, 200);
    // Step 3e9 of 512 micro-batches of 64 rows: past 32 bits everywhere.
    EXPECT_EQ(TokenDataset::micro_batch(3000000000u, 511, 512, 64),
              (3000000000u * uint64_t{512} + 511) * 64);
    EXPECT_EQ(TokenDataset::micro_batch(2000000000u, 2000000000, 2000000001, 1),
              2000000000u * uint64_t{2000000001} + 2000000000u);
}

// Going back to an epoch after another gives the same again: nothing is carried along.
TEST(TokenDataset, WindowsCanBeReadInAnyOrder) {
    const Shards shards(kLengths);
    const TokenDataset data = shards.open(8, 5, true);
    const std::vector<int> forward = ids(data, 0, 3 * kWindows);
    for (uint64_t i = 0; i < 3 * kWindows; ++i) {
        const uint64_t q = (i * 100) % (3 * kWindows);
        ASSERT_EQ(ids(data, q, 1)[0], forward[q]);
    }
}

TEST(TokenDataset, FileShorterThanAWindowIsSkippedWithAWarning) {
    const Shards shards({8 * 3 + 1, 8, 8 * 2 + 1});
    testing::internal::CaptureStderr();
    const TokenDataset data = shards.open(8, 1, false);
    expect_contains(testing::internal::GetCapturedStderr(),
                    {"warning", shards.paths[1], "8 tokens", "9"});
    EXPECT_EQ(data.num_files(), 2u);
    EXPECT_EQ(ids(data, 0, 5), (std::vector<int>{0, 8, 16, 33, 41}));

    testing::internal::CaptureStderr();
    const TokenDataset quiet(shards.paths, 8, kVocab, 1, false, "-i x", false);
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(TokenDataset, NoWindowAtAllIsAnError) {
    const Shards shards({8, 5});
    testing::internal::CaptureStderr();
    const std::string text = error_of([&] { shards.open(8, 1, false); });
    testing::internal::GetCapturedStderr();
    expect_contains(text, {shards.paths[0], "9 tokens", "-t"});
    error_of([&] { TokenDataset({}, 8, kVocab, 1, false, "-i nothing"); });
    expect_contains(error_of([&] { shards.open(0, 1, false); }), {"-t 0"});
}

// llm.c#727: -b 64 -t 1024 on tiny Shakespeare's 32,768 validation tokens ended in an assert.
TEST(TokenDataset, FewerWindowsThanABatchSaysWhatWouldBeRight) {
    const Shards shards({32768});
    const TokenDataset data = shards.open(1024, 1, false);
    EXPECT_EQ(data.num_windows(), 31u);
    expect_contains(error_of([&] { data.require_batch(64); }),
                    {"-b 64", "-t 1024", "64 windows", "1025 tokens", shards.paths[0], "has 31",
                     "largest -b is 31"});
    data.require_batch(31);
    error_of([&] { data.require_batch(32); });
    error_of([&] { data.require_batch(0); });
}

TEST(TokenDataset, TokenOutsideTheVocabularyNamesFilePositionAndToken) {
    TemporaryFolder folder;
    const std::string path = folder.file("a.bin");
    std::vector<uint16_t> tokens(8 * 4 + 1, 7);
    tokens[21] = 100;
    write_tokens(path, tokens);
    const TokenDataset data({path}, 8, 100, 1, false);
    std::vector<int> row(9), targets(9);
    std::vector<uint16_t> narrow(9);
    const std::vector<std::string> parts = {path, "token 100", "position 21", "100", "0 to 99"};
    data.read_window(1, row.data());
    data.read_window(3, row.data());
    expect_contains(error_of([&] { data.read_window(2, row.data()); }), parts);
    expect_contains(error_of([&] { data.read_window(2, narrow.data()); }), parts);
    expect_contains(error_of([&] { data.read_rows(2, 1, row.data(), targets.data()); }), parts);
    const TokenDataset wider({path}, 8, 101, 1, false);
    wider.read_window(2, row.data());

    // The last token of a window is a target only, and is looked at as well.
    tokens[21] = 7;
    tokens[32] = 65535;
    write_tokens(path, tokens);
    const TokenDataset last({path}, 8, 50257, 1, false);
    expect_contains(error_of([&] { last.read_window(3, row.data()); }), {"65535", "position 32"});
}

TEST(TokenDataset, ValidationIsTheFilesOwnOrderWhateverTheShuffling) {
    const Shards shards(kLengths);
    const TokenDataset data = shards.open(8, 5, true);
    EXPECT_EQ(data.validation_micro_batches(4), kWindows / 4);
    EXPECT_EQ(data.validation_micro_batches(71), 1u);
    EXPECT_EQ(data.validation_micro_batches(72), 0u);
    const std::vector<int> expected = all_window_ids();
    std::vector<int> inputs(32), targets(32);
    for (uint64_t j = 0; j < kWindows / 4; ++j) {
        data.read_validation_micro_batch(j, 4, inputs.data(), targets.data());
        for (size_t b = 0; b < 4; ++b) {
            EXPECT_EQ(inputs[8 * b], expected[4 * j + b]);
            EXPECT_EQ(inputs[8 * b + 7], expected[4 * j + b] + 7);
            EXPECT_EQ(targets[8 * b], expected[4 * j + b] + 1);
            EXPECT_EQ(targets[8 * b + 7], expected[4 * j + b] + 8);
        }
    }
    expect_contains(error_of([&] {
                        data.read_validation_micro_batch(kWindows / 4, 4, inputs.data(),
                                                         targets.data());
                    }),
                    {"there are 17"});
}

TEST(TokenDataset, HashTellsListsOfFilesApart) {
    const Shards shards({100, 60}), elsewhere({100, 60}), longer({100, 61}), fewer({100});
    const uint64_t hash = shards.open(8, 1, true).data_hash();
    EXPECT_EQ(hash, elsewhere.open(8, 1, true).data_hash());
    EXPECT_NE(hash, longer.open(8, 1, true).data_hash());
    EXPECT_NE(hash, fewer.open(8, 1, true).data_hash());
    const TokenDataset reversed({shards.paths[1], shards.paths[0]}, 8, kVocab, 1, true);
    EXPECT_NE(hash, reversed.data_hash());
    const std::string renamed = shards.folder.file("other.bin");
    std::filesystem::rename(shards.paths[1], renamed);
    EXPECT_NE(hash, TokenDataset({shards.paths[0], renamed}, 8, kVocab, 1, true).data_hash());
}

TEST(SortPositionsByToken, AscendingTokensTiesByPosition) {
    const std::vector<int> tokens = {5, 0, 5, 3, 0, 9, 5};
    std::vector<int> order(7, -1);
    sort_positions_by_token(tokens.data(), 7, 10, order.data());
    EXPECT_EQ(order, (std::vector<int>{1, 4, 3, 0, 2, 6, 5}));
}

TEST(SortPositionsByToken, AgreesWithAStableSort) {
    for (const int vocab : {1, 7, 50257}) {
        std::vector<int> tokens(3000), order(3000, -1), expected(3000);
        for (size_t i = 0; i < tokens.size(); ++i) {
            tokens[i] = static_cast<int>(random_bits32(1, RandomPurpose::kTest, 0, i) %
                                         static_cast<uint32_t>(vocab));
        }
        sort_positions_by_token(tokens.data(), 3000, vocab, order.data());
        std::iota(expected.begin(), expected.end(), 0);
        std::stable_sort(expected.begin(), expected.end(), [&](int a, int b) {
            return tokens[static_cast<size_t>(a)] < tokens[static_cast<size_t>(b)];
        });
        EXPECT_EQ(order, expected) << vocab;
    }
}

TEST(SortPositionsByToken, RefusesTokensOutsideTheVocabulary) {
    const std::vector<int> high = {1, 10}, negative = {-1};
    std::vector<int> order(2);
    expect_contains(error_of([&] { sort_positions_by_token(high.data(), 2, 10, order.data()); }),
                    {"token 10", "position 1"});
    expect_contains(
        error_of([&] { sort_positions_by_token(negative.data(), 1, 10, order.data()); }),
        {"token -1"});
}

// llm.c#736: a token that the model does not have is found before training, wherever it is.
TEST(TokenDataset, CheckTokensFindsTheOutlierBeforeItIsRead) {
    test::TemporaryFolder folder;
    for (const size_t place : {size_t{0}, size_t{1500}, size_t{3000}}) {
        std::vector<uint16_t> tokens(3001, 7);
        test::write_tokens(folder.file("good.bin"), tokens);
        tokens[place] = 100;
        test::write_tokens(folder.file("bad.bin"), tokens);
        const std::vector<std::string> files = {folder.file("good.bin"), folder.file("bad.bin")};
        EXPECT_NO_THROW(TokenDataset(files, 16, 101, 1, true).check_tokens());
        try {
            TokenDataset(files, 16, 100, 1, true).check_tokens();
            FAIL() << "token 100 in a vocabulary of 100";
        } catch (const Error& error) {
            EXPECT_NE(std::string(error.what())
                          .find("bad.bin: token 100 at position " + std::to_string(place)),
                      std::string::npos)
                << error.what();
        }
    }
}

// Ranks on machines of their own had files of one name and length with other tokens, and trained.
TEST(TokenDataset, CheckTokensTellsContentsApart) {
    test::TemporaryFolder folder;
    const auto hash = [&](size_t place, size_t tokens) {
        std::vector<uint16_t> content(tokens, 7);
        if (place < tokens) content[place] = 8;
        test::write_tokens(folder.file("data.bin"), content);
        return TokenDataset({folder.file("data.bin")}, 16, 100, 1, true).check_tokens();
    };
    const uint64_t whole = hash(3001, 3001);
    EXPECT_EQ(hash(3001, 3001), whole);
    for (const size_t place : {0, 1500, 3000}) EXPECT_NE(hash(place, 3001), whole) << place;
    EXPECT_NE(hash(3000, 3000), whole);
}

// Of a data set too large to be read whole at start, the ends of each file are looked at.
TEST(TokenDataset, CheckTokensOfALargeSetLooksAtBothEnds) {
    test::TemporaryFolder folder;
    const int32_t count = (1 << 28) + 1;  // zeros, as a file with holes
    const std::string path = folder.file("large.bin");
    test::write_file(path, test::header_bytes({20240520, 1, count}));
    std::filesystem::resize_file(path, 1024 + 2 * static_cast<uint64_t>(count));
    EXPECT_NO_THROW(TokenDataset({path}, 16, 100, 1, true).check_tokens());
    for (const uint64_t place : {uint64_t{0}, static_cast<uint64_t>(count) - 1}) {
        std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
        const uint16_t bad = 200, good = 0;
        const auto write = [&](uint16_t token) {
            file.seekp(static_cast<std::streamoff>(1024 + 2 * place));
            file.write(reinterpret_cast<const char*>(&token), sizeof(token));
            file.flush();
        };
        write(bad);
        EXPECT_THROW(TokenDataset({path}, 16, 100, 1, true).check_tokens(), Error) << place;
        write(good);
    }
}

}  // namespace
}  // namespace llmc
