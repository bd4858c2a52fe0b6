#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "llmc/dataloader.h"
#include "test/unit/data_files.h"

namespace llmc {
namespace {

using test::count_up;
using test::error_of;
using test::expect_contains;
using test::TemporaryFolder;
using test::write_tokens;

constexpr int kT = 8;
constexpr int kB = 2;
constexpr int kM = 4;

// Two shards of 12 and 20 windows: with 8 rows a step, shards end inside steps and an epoch after
// every fourth.
class Pipeline : public testing::Test {
  protected:
    Pipeline() {
        write_tokens(folder_.file("a.bin"), random_tokens(0, 12 * kT + 3));
        write_tokens(folder_.file("b.bin"), random_tokens(1000, 20 * kT + 1));
        paths_ = {folder_.file("a.bin"), folder_.file("b.bin")};
        data_ = std::make_unique<TokenDataset>(paths_, kT, 2000, 1337, true);
    }
    static InputPipelineOptions options(int first_micro_batch, int micro_batches) {
        InputPipelineOptions result;
        result.B = kB;
        result.micro_batches_per_step = kM;
        result.first_micro_batch = first_micro_batch;
        result.micro_batches = micro_batches;
        return result;
    }
    static std::vector<uint16_t> random_tokens(uint64_t first, size_t count) {
        std::vector<uint16_t> tokens(count);
        for (uint16_t& token : tokens) {
            token =
                static_cast<uint16_t>(random_bits32(6, RandomPurpose::kTest, 0, first++) % 2000);
        }
        return tokens;
    }
    static float rate(int step) { return 0.5f * static_cast<float>(step) + 1.0f; }

    TemporaryFolder folder_;
    std::vector<std::string> paths_;
    std::unique_ptr<TokenDataset> data_;
};

enum { kTokens, kTargets, kOrder };

// One of the arrays of all micro-batches.
std::vector<int> copy_of(const PreparedStep& prepared, size_t array) {
    std::vector<int> all;
    constexpr size_t kCount = kB * kT;
    for (size_t at = 0; at < prepared.micro_batches.count(); at += kMicroBatchArrays * kCount) {
        const int* from = prepared.micro_batches.get() + at + array * kCount;
        all.insert(all.end(), from, from + kCount);
    }
    return all;
}

// What a step must hold, from the data set alone.
struct Expected {
    Expected(const TokenDataset& data, int step, int first_micro_batch, int micro_batches)
        : tokens(static_cast<size_t>(micro_batches * kB * kT)),
          targets(tokens.size()),
          order(tokens.size()) {
        for (int a = 0; a < micro_batches; ++a) {
            const size_t at = static_cast<size_t>(a * kB * kT);
            const uint64_t q = TokenDataset::micro_batch(static_cast<uint64_t>(step),
                                                         first_micro_batch + a, kM, kB);
            data.read_rows(q, kB, &tokens[at], &targets[at]);
            sort_positions_by_token(&tokens[at], kB * kT, 2000, &order[at]);
        }
    }
    std::vector<int> tokens, targets, order;
};

void expect_step(const PreparedStep& prepared, const Expected& expected, int step, float rate) {
    EXPECT_EQ(prepared.step, step);
    EXPECT_EQ(copy_of(prepared, kTokens), expected.tokens) << step;
    EXPECT_EQ(copy_of(prepared, kTargets), expected.targets) << step;
    EXPECT_EQ(copy_of(prepared, kOrder), expected.order) << step;
    EXPECT_EQ(prepared.inputs[0].step, static_cast<uint32_t>(step));
    EXPECT_EQ(prepared.inputs[0].learning_rate, rate);
}

TEST_F(Pipeline, HoldsTheStepsTokensTargetsOrderAndRate) {
    InputPipeline pipeline(*data_, options(1, 3), rate);
    for (int step = 0; step < 20; ++step) {
        expect_step(pipeline.acquire(step), Expected(*data_, step, 1, 3), step, rate(step));
        pipeline.release();
    }
}

// llm.c#792, through the pipeline: the ranks' pieces laid side by side are the step of one rank.
TEST_F(Pipeline, RanksTogetherHoldTheStepOfOneRank) {
    for (const int N : {1, 2, 4}) {
        const int A = kM / N;
        std::vector<std::unique_ptr<InputPipeline>> ranks;
        for (int r = 0; r < N; ++r) {
            ranks.push_back(std::make_unique<InputPipeline>(*data_, options(r * A, A), rate));
        }
        for (int step = 0; step < 10; ++step) {
            std::vector<int> tokens;
            for (auto& rank : ranks) {
                const std::vector<int> mine = copy_of(rank->acquire(step), kTokens);
                tokens.insert(tokens.end(), mine.begin(), mine.end());
                rank->release();
            }
            EXPECT_EQ(tokens, Expected(*data_, step, 0, kM).tokens) << N << " " << step;
        }
    }
}

// Megatron-Bridge#5257, nanoGPT#467: after a resume other samples came, above all at the end of a
// shard or of an epoch. Every step is tried as the first one.
TEST_F(Pipeline, ResumeAtAnyStepGivesTheSameSamples) {
    for (int first = 0; first < 10; ++first) {
        const TokenDataset again(paths_, kT, 2000, 1337, true);
        InputPipelineOptions resumed = options(0, kM);
        resumed.first_step = first;
        InputPipeline pipeline(again, resumed, rate);
        for (int step = first; step < first + 6; ++step) {
            expect_step(pipeline.acquire(step), Expected(*data_, step, 0, kM), step, rate(step));
            pipeline.release();
        }
    }
}

// -a: every micro-batch of every step, on every rank, is the same B rows.
TEST_F(Pipeline, SingleBatchRepeatsTheFirstMicroBatch) {
    InputPipelineOptions single = options(2, 2);
    single.single_batch = true;
    single.first_step = 3;
    const Expected first(*data_, 0, 0, 1);
    InputPipeline pipeline(*data_, single, rate);
    for (int step = 3; step < 9; ++step) {
        const PreparedStep& prepared = pipeline.acquire(step);
        const std::vector<int> tokens = copy_of(prepared, kTokens);
        const std::vector<int> targets = copy_of(prepared, kTargets);
        const std::vector<int> order = copy_of(prepared, kOrder);
        ASSERT_EQ(tokens.size(), 2u * kB * kT);
        for (size_t i = 0; i < tokens.size(); ++i) {
            ASSERT_EQ(tokens[i], first.tokens[i % (kB * kT)]);
            ASSERT_EQ(targets[i], first.targets[i % (kB * kT)]);
            ASSERT_EQ(order[i], first.order[i % (kB * kT)]);
        }
        EXPECT_EQ(prepared.inputs[0].step, static_cast<uint32_t>(step));
        EXPECT_EQ(prepared.inputs[0].learning_rate, rate(step));
        pipeline.release();
    }
}

TEST_F(Pipeline, HeldStepsAreNotOverwritten) {
    std::atomic<int> prepared{0};
    InputPipeline pipeline(*data_, options(0, kM), [&](int step) {
        ++prepared;
        return rate(step);
    });
    const PreparedStep& zero = pipeline.acquire(0);
    const PreparedStep& one = pipeline.acquire(1);
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    EXPECT_EQ(prepared, 2);
    expect_step(zero, Expected(*data_, 0, 0, kM), 0, rate(0));
    expect_step(one, Expected(*data_, 1, 0, kM), 1, rate(1));
    expect_contains(error_of([&] { pipeline.acquire(2); }), {"step 2", "step 0 was released"});
    pipeline.release();
    expect_step(pipeline.acquire(2), Expected(*data_, 2, 0, kM), 2, rate(2));
    expect_step(one, Expected(*data_, 1, 0, kM), 1, rate(1));
}

// The next step is prepared while one is held, so that reading hides behind computing.
TEST_F(Pipeline, PreparesTheNextStepWhileOneIsHeld) {
    std::atomic<int> prepared{0};
    InputPipeline pipeline(*data_, options(0, kM), [&](int step) {
        ++prepared;
        return rate(step);
    });
    pipeline.acquire(0);
    for (int wait = 0; wait < 2000 && prepared < 2; ++wait) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(prepared, 2);
}

TEST_F(Pipeline, StepsComeInOrderOnceAndUpToTheEnd) {
    InputPipelineOptions short_run = options(0, 1);
    short_run.first_step = 5;
    short_run.end_step = 7;
    std::atomic<int> latest{0};
    InputPipeline pipeline(*data_, short_run, [&](int step) {
        latest = step;
        return rate(step);
    });
    error_of([&] { pipeline.release(); });
    expect_contains(error_of([&] { pipeline.acquire(4); }), {"step 4", "next one is 5"});
    expect_contains(error_of([&] { pipeline.acquire(6); }), {"step 6", "next one is 5"});
    pipeline.acquire(5);
    error_of([&] { pipeline.acquire(5); });
    pipeline.acquire(6);
    pipeline.release();
    pipeline.release();
    error_of([&] { pipeline.release(); });
    expect_contains(error_of([&] { pipeline.acquire(7); }), {"step 7"});
    EXPECT_EQ(latest, 6);
}

TEST_F(Pipeline, BadTokenIsAnErrorAtItsStep) {
    const std::string path = folder_.file("bad.bin");
    std::vector<uint16_t> tokens = count_up(0, 40 * kT + 1);
    tokens[20 * kT + 1] = 5000;  // window 20: step 2, micro-batch 2
    write_tokens(path, tokens);
    const TokenDataset data({path}, kT, 2000, 1337, false);
    InputPipeline pipeline(data, options(0, kM), rate);
    for (int step = 0; step < 2; ++step) {
        expect_step(pipeline.acquire(step), Expected(data, step, 0, kM), step, rate(step));
        pipeline.release();
    }
    for (int attempt = 0; attempt < 2; ++attempt) {
        expect_contains(error_of([&] { pipeline.acquire(2); }), {path, "token 5000"});
    }
    // The rank that does not read the window goes on.
    InputPipeline other(data, options(0, 2), rate);
    for (int step = 0; step < 3; ++step) {
        other.acquire(step);
        other.release();
    }
}

TEST_F(Pipeline, AnythingThrownInTheThreadBecomesAnError) {
    InputPipeline pipeline(*data_, options(0, kM), [](int step) -> float {
        if (step == 1) throw std::runtime_error("no rate for this step");
        return 1.0f;
    });
    pipeline.acquire(0);
    pipeline.release();
    expect_contains(error_of([&] { pipeline.acquire(1); }), {"no rate for this step"});
}

TEST_F(Pipeline, CanEndAtAnyTime) {
    { InputPipeline untouched(*data_, options(0, kM), rate); }
    {
        InputPipeline held(*data_, options(0, kM), rate);
        held.acquire(0);
        held.acquire(1);
    }
    {
        InputPipelineOptions finished = options(0, kM);
        finished.end_step = 0;
        InputPipeline nothing(*data_, finished, rate);
    }
    for (int i = 0; i < 50; ++i) {
        InputPipeline racing(*data_, options(0, kM), rate);
        if (i % 2 == 1) racing.acquire(0);
    }
}

// A large step takes long to read; leaving must not wait for it. The rate is asked for last.
TEST_F(Pipeline, EndsWithoutFinishingTheStepAtHand) {
    const std::string path = folder_.file("long.bin");
    write_tokens(path, std::vector<uint16_t>(1000, 1));
    const TokenDataset data({path}, 1, 2, 1, true);
    InputPipelineOptions large;
    large.B = 1;
    large.micro_batches = large.micro_batches_per_step = 1000000;
    std::atomic<int> finished{0};
    {
        InputPipeline pipeline(data, large, [&](int) {
            ++finished;
            return 1.0f;
        });
    }
    EXPECT_EQ(finished, 0);
}

TEST_F(Pipeline, RefusesWhatDoesNotFit) {
    InputPipelineOptions wide = options(0, kM);
    wide.B = 33;
    expect_contains(error_of([&] { InputPipeline(*data_, wide, rate); }),
                    {"-b 33", "has 32", "largest -b is 32"});
    expect_contains(error_of([&] { InputPipeline(*data_, options(2, 3), rate); }),
                    {"2 to 4", "has 4"});
    error_of([&] { InputPipeline(*data_, options(-1, 1), rate); });
    error_of([&] { InputPipeline(*data_, options(0, 0), rate); });
}

}  // namespace
}  // namespace llmc
