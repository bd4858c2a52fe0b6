#include "llmc/eval_loader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "llmc/rng.h"
#include "test/unit/data_files.h"

namespace llmc {
namespace {

using test::error_of;
using test::expect_contains;
using test::header_bytes;
using test::TemporaryFolder;
using test::uint16_bytes;
using test::write_file;

constexpr int kVocab = 500;
using Tokens = std::vector<uint16_t>;

struct Example {
    Tokens context;
    std::vector<Tokens> completions;
    uint16_t label = 0;
};

Tokens encode(const Example& example, size_t index) {
    Tokens values = {65535,
                     0,
                     static_cast<uint16_t>(index),
                     example.label,
                     static_cast<uint16_t>(example.completions.size()),
                     static_cast<uint16_t>(example.context.size())};
    values.insert(values.end(), example.context.begin(), example.context.end());
    for (const Tokens& completion : example.completions) {
        values.push_back(static_cast<uint16_t>(completion.size()));
        values.insert(values.end(), completion.begin(), completion.end());
    }
    values[1] = static_cast<uint16_t>(2 * values.size());
    return values;
}

std::string eval_file(const std::vector<Example>& examples) {
    std::string body;
    size_t longest = 0;
    for (size_t i = 0; i < examples.size(); ++i) {
        const std::string bytes = uint16_bytes(encode(examples[i], i));
        longest = std::max(longest, bytes.size());
        body += bytes;
    }
    return header_bytes({20240522, 1, static_cast<int32_t>(examples.size()),
                         static_cast<int32_t>(longest)}) +
           body;
}

// Examples with contexts of 3 to 12 tokens and completions of 1 to 6, tokens below kVocab.
std::vector<Example> random_examples(size_t count) {
    uint64_t draw = 0;
    const auto below = [&draw](uint32_t n) {
        return static_cast<uint16_t>(random_bits32(9, RandomPurpose::kTest, 1, draw++) % n);
    };
    const auto tokens = [&](size_t length) {
        Tokens result(length);
        for (uint16_t& token : result) token = below(kVocab);
        return result;
    };
    std::vector<Example> examples(count);
    for (Example& example : examples) {
        example.context = tokens(3u + below(10));
        for (int c = 0; c < 4; ++c) example.completions.push_back(tokens(1u + below(6)));
        example.label = below(4);
    }
    return examples;
}

// Stands in for a model: the loss of predicting `next` after `token`.
float pair_loss(int token, int next) {
    return static_cast<float>(
        random_uniform(4, RandomPurpose::kTest, 2,
                       static_cast<uint64_t>(token) * kVocab + static_cast<uint64_t>(next)));
}

// Losses of one batch, 0 where the target is -1.
std::vector<float> losses_of(const std::vector<int>& tokens, const std::vector<int>& targets) {
    std::vector<float> losses(tokens.size(), 0.0f);
    for (size_t i = 0; i < tokens.size(); ++i) {
        if (targets[i] >= 0) losses[i] = pair_loss(tokens[i], targets[i]);
    }
    return losses;
}

int correct_in_batch(const EvalDataset& data, int batch, int B, int T) {
    std::vector<int> tokens(static_cast<size_t>(B * T)), targets(tokens.size());
    data.read_batch(batch, tokens.data(), targets.data());
    return data.count_correct(batch, losses_of(tokens, targets).data());
}

// The same from the examples themselves.
int correct_of(const std::vector<Example>& examples) {
    int correct = 0;
    for (const Example& example : examples) {
        std::vector<double> means;
        for (const Tokens& completion : example.completions) {
            double sum = 0.0;
            int last = example.context.back();
            for (const uint16_t token : completion) {
                sum += pair_loss(last, token);
                last = token;
            }
            means.push_back(sum / static_cast<double>(completion.size()));
        }
        const auto best = std::min_element(means.begin(), means.end()) - means.begin();
        correct += best == example.label;
    }
    return correct;
}

const Example kSmall = {{10, 11, 12}, {{20, 21}, {30}, {40, 41, 42}, {50}}, 2};

TEST(EvalDataset, RowsHoldContextAndCompletionAndOnlyTheCompletionCounts) {
    TemporaryFolder folder;
    write_file(folder.file("e.bin"), eval_file({kSmall}));
    const EvalDataset data(folder.file("e.bin"), 6, 7, kVocab);
    ASSERT_EQ(data.num_examples(), 1);
    ASSERT_EQ(data.examples_per_batch(), 1);
    ASSERT_EQ(data.num_batches(), 1);
    std::vector<int> tokens(6 * 7, 777), targets(6 * 7, 777);
    data.read_batch(0, tokens.data(), targets.data());
    EXPECT_EQ(tokens, (std::vector<int>{
                          10, 11, 12, 20, 0,  0, 0,  //
                          10, 11, 12, 0,  0,  0, 0,  //
                          10, 11, 12, 40, 41, 0, 0,  //
                          10, 11, 12, 0,  0,  0, 0,  //
                          0,  0,  0,  0,  0,  0, 0,  //
                          0,  0,  0,  0,  0,  0, 0,
                      }));
    EXPECT_EQ(targets, (std::vector<int>{
                           -1, -1, 20, 21, -1, -1, -1,  //
                           -1, -1, 30, -1, -1, -1, -1,  //
                           -1, -1, 40, 41, 42, -1, -1,  //
                           -1, -1, 50, -1, -1, -1, -1,  //
                           -1, -1, -1, -1, -1, -1, -1,  //
                           -1, -1, -1, -1, -1, -1, -1,
                       }));
}

TEST(EvalDataset, TextLongerThanTheModelSeesLosesItsBeginning) {
    TemporaryFolder folder;
    write_file(folder.file("e.bin"), eval_file({kSmall}));
    std::vector<int> tokens(4 * 4), targets(4 * 4);
    EvalDataset(folder.file("e.bin"), 4, 4, kVocab).read_batch(0, tokens.data(), targets.data());
    // Six tokens, the last five kept.
    EXPECT_EQ(std::vector<int>(&tokens[8], &tokens[12]), (std::vector<int>{11, 12, 40, 41}));
    EXPECT_EQ(std::vector<int>(&targets[8], &targets[12]), (std::vector<int>{-1, 40, 41, 42}));
    // Five tokens fit.
    EXPECT_EQ(std::vector<int>(&tokens[0], &tokens[4]), (std::vector<int>{10, 11, 12, 20}));

    // A completion of three tokens at T = 2: only its last two are predicted.
    const EvalDataset tiny(folder.file("e.bin"), 4, 2, kVocab);
    tiny.read_batch(0, tokens.data(), targets.data());
    EXPECT_EQ(std::vector<int>(&tokens[4], &tokens[6]), (std::vector<int>{40, 41}));
    EXPECT_EQ(std::vector<int>(&targets[4], &targets[6]), (std::vector<int>{41, 42}));
    EXPECT_EQ(tiny.count_correct(0, std::vector<float>{2, 2, 0, 2, 1, 1.5, 0, 2}.data()), 1);
}

TEST(EvalDataset, LowestMeanWinsNotLowestSum) {
    TemporaryFolder folder;
    write_file(folder.file("e.bin"), eval_file({kSmall}));
    const EvalDataset data(folder.file("e.bin"), 4, 6, kVocab);
    std::vector<float> losses(4 * 6, 1000.0f);  // what is no completion must not count
    const auto set = [&](size_t row, std::vector<float> values) {
        std::copy(values.begin(), values.end(), &losses[row * 6 + 2]);
    };
    set(0, {2.0f, 2.0f});
    set(1, {1.5f});
    set(2, {1.0f, 1.5f, 1.25f});
    set(3, {1.5f});
    EXPECT_EQ(data.count_correct(0, losses.data()), 1);
    // The first of equals: completion 1 before 2.
    set(1, {1.25f});
    EXPECT_EQ(data.count_correct(0, losses.data()), 0);
    set(1, {std::numeric_limits<float>::quiet_NaN()});
    EXPECT_EQ(data.count_correct(0, losses.data()), 1);
    set(2, {1.0f, std::numeric_limits<float>::quiet_NaN(), 1.0f});
    EXPECT_EQ(data.count_correct(0, losses.data()), 0);
    set(2, {1.0f, 1.5f, 1.25f});
    set(0, {std::numeric_limits<float>::quiet_NaN(), 1.0f});
    EXPECT_EQ(data.count_correct(0, losses.data()), 1);
}

TEST(EvalDataset, LossesThatAreNoNumbersAnswerNothing) {
    TemporaryFolder folder;
    const std::vector<float> nans(4 * 6, std::numeric_limits<float>::quiet_NaN());
    for (uint16_t label = 0; label < 4; ++label) {
        Example example = kSmall;
        example.label = label;
        write_file(folder.file("e.bin"), eval_file({example}));
        EXPECT_EQ(EvalDataset(folder.file("e.bin"), 4, 6, kVocab).count_correct(0, nans.data()), 0);
    }
}

// llm.c#584: 5 examples on 8 ranks gave another accuracy than on one.
TEST(EvalDataset, AccuracyIsTheSameForAnyNumberOfRanksAndAnyBatch) {
    TemporaryFolder folder;
    for (const size_t count : {5u, 61u}) {
        const std::vector<Example> examples = random_examples(count);
        const int expected = correct_of(examples);
        EXPECT_GT(expected, 0);
        EXPECT_LT(expected, static_cast<int>(count));
        const std::string path = folder.file("e.bin");
        write_file(path, eval_file(examples));
        for (const int B : {4, 7, 8, 16, 64}) {
            for (const int ranks : {1, 2, 3, 8}) {
                int correct = 0, seen = 0;
                for (int rank = 0; rank < ranks; ++rank) {
                    const EvalDataset data(path, B, 32, kVocab);
                    for (int batch = rank; batch < data.num_batches(); batch += ranks) {
                        correct += correct_in_batch(data, batch, B, 32);
                        seen += data.examples_in_batch(batch);
                    }
                }
                EXPECT_EQ(correct, expected) << B << " " << ranks;
                EXPECT_EQ(seen, static_cast<int>(count)) << B << " " << ranks;
            }
        }
    }
}

TEST(EvalDataset, LastBatchIsPaddedWithIgnoredRows) {
    TemporaryFolder folder;
    write_file(folder.file("e.bin"), eval_file(random_examples(5)));
    const EvalDataset data(folder.file("e.bin"), 12, 20, kVocab);
    ASSERT_EQ(data.num_batches(), 2);
    EXPECT_EQ(data.examples_in_batch(0), 3);
    EXPECT_EQ(data.examples_in_batch(1), 2);
    std::vector<int> tokens(12 * 20, 777), targets(12 * 20, 777);
    data.read_batch(1, tokens.data(), targets.data());
    for (size_t i = 0; i < tokens.size(); ++i) {
        ASSERT_LT(tokens[i], kVocab);
        ASSERT_LT(targets[i], kVocab);
        if (i < 8 * 20) continue;
        ASSERT_EQ(tokens[i], 0);
        ASSERT_EQ(targets[i], -1);
    }
    error_of([&] { data.read_batch(2, tokens.data(), targets.data()); });
    error_of([&] { data.count_correct(-1, nullptr); });
}

TEST(EvalDataset, BatchOfFewerThanFourRowsNamesTheFlag) {
    TemporaryFolder folder;
    write_file(folder.file("e.bin"), eval_file({kSmall}));
    expect_contains(error_of([&] { EvalDataset(folder.file("e.bin"), 3, 8, kVocab); }),
                    {"-b 3", "at least 4"});
    error_of([&] { EvalDataset(folder.file("e.bin"), 4, 0, kVocab); });
}

std::string error_of_file(const std::string& bytes) {
    TemporaryFolder folder;
    const std::string path = folder.file("e.bin");
    write_file(path, bytes);
    const std::string text = error_of([&] { EvalDataset(path, 4, 32, kVocab); });
    expect_contains(text, {path});
    return text;
}

TEST(EvalDataset, RefusesWhatIsNotAnEvaluationFile) {
    const std::string good = eval_file({kSmall, kSmall});
    expect_contains(error_of_file(""), {"empty"});
    expect_contains(error_of_file(header_bytes({20240520, 1, 2, 60}) + good.substr(1024)),
                    {"20240520", "20240522"});
    expect_contains(error_of_file(header_bytes({20240522, 3, 2, 60}) + good.substr(1024)),
                    {"version 3"});
    expect_contains(error_of_file(header_bytes({20240522, 1, 0, 60}) + good.substr(1024)),
                    {"0 examples"});
    expect_contains(error_of_file(header_bytes({20240522, 1, 1, 60}) + good.substr(1024)),
                    {"40 bytes after the last of 1 examples"});
    expect_contains(error_of_file(header_bytes({20240522, 1, 3, 60}) + good.substr(1024)),
                    {"example 2", "the file ends before its start marker"});
    expect_contains(error_of_file(header_bytes({20240522, 1, 2, 39}) + good.substr(1024)),
                    {"example 0", "40 bytes", "at most 39"});
    expect_contains(error_of_file(good + "x"), {"whole number of uint16"});
    expect_contains(error_of_file(good.substr(0, good.size() - 2)),
                    {"example 1", "the file ends before its completion"});
}

// Changes one value of a single example: [0] marker, [1] bytes, [2] index, [3] label,
// [4] completions, [5] context length, [9] length of the first completion.
std::string error_with(size_t place, uint16_t value) {
    Tokens values = encode(kSmall, 0);
    values[place] = value;
    return error_of_file(header_bytes({20240522, 1, 1, 1000}) + uint16_bytes(values));
}

TEST(EvalDataset, RefusesDamagedExamples) {
    expect_contains(error_with(0, 65534), {"example 0", "start marker 65534", "65535"});
    expect_contains(error_with(1, 38), {"size in bytes 38", "40"});
    expect_contains(error_with(2, 1), {"index 1", "expected 0"});
    expect_contains(error_with(3, 4), {"label 4", "0 to 3"});
    expect_contains(error_with(4, 5), {"number of completions 5", "expected 4"});
    expect_contains(error_with(5, 0), {"no token in its context"});
    expect_contains(error_with(5, 60000), {"the file ends before its context"});
    expect_contains(error_with(9, 0), {"no token in its completion"});
    expect_contains(error_with(6, kVocab), {"token 500", "context", "vocabulary of 500"});
    expect_contains(error_with(10, kVocab), {"token 500", "completion"});
}

}  // namespace
}  // namespace llmc
