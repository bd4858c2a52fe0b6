#include "llmc/schedulers.h"

#include <gtest/gtest.h>

#include <climits>
#include <cmath>
#include <string>

#include "test/unit/bits.h"

namespace {

using namespace llmc;
using llmc::test::bits_of;

constexpr ScheduleType kAll[] = {ScheduleType::cosine, ScheduleType::linear, ScheduleType::constant,
                                 ScheduleType::wsd};

TEST(Schedulers, WarmupRisesLinearlyToTheWholeRate) {
    for (const ScheduleType type : kAll) {
        const LearningRateScheduler schedule = {type, 6e-4f, 700, 20000, 0.1f};
        EXPECT_FLOAT_EQ(schedule.at(0), 6e-4f / 700);
        EXPECT_FLOAT_EQ(schedule.at(349), 3e-4f);
        EXPECT_EQ(schedule.at(699), 6e-4f);
        EXPECT_EQ(schedule.at(700), 6e-4f);
        for (int step = 1; step < 700; ++step) EXPECT_GT(schedule.at(step), schedule.at(step - 1));
    }
}

TEST(Schedulers, CosineFallsToTheFinalRateAtTheLastStep) {
    const LearningRateScheduler schedule = {ScheduleType::cosine, 6e-4f, 100, 1101, 0.1f};
    EXPECT_EQ(schedule.at(100), 6e-4f);
    EXPECT_FLOAT_EQ(schedule.at(600), 0.55f * 6e-4f);
    EXPECT_FLOAT_EQ(schedule.at(350), static_cast<float>(6e-4 * (0.1 + 0.9 * 0.85355339059)));
    EXPECT_FLOAT_EQ(schedule.at(1100), 6e-5f);
    for (int step = 101; step <= 1100; ++step) EXPECT_LT(schedule.at(step), schedule.at(step - 1));
}

TEST(Schedulers, LinearFallsToTheFinalRateAtTheLastStep) {
    const LearningRateScheduler schedule = {ScheduleType::linear, 1e-3f, 10, 111, 0.0f};
    EXPECT_EQ(schedule.at(10), 1e-3f);
    EXPECT_FLOAT_EQ(schedule.at(35), 7.5e-4f);
    EXPECT_FLOAT_EQ(schedule.at(85), 2.5e-4f);
    EXPECT_EQ(schedule.at(110), 0.0f);
}

TEST(Schedulers, ConstantStays) {
    const LearningRateScheduler schedule = {ScheduleType::constant, 1e-3f, 0, 100, 0.0f};
    for (const int step : {0, 50, 99, 1000}) EXPECT_EQ(schedule.at(step), 1e-3f);
}

TEST(Schedulers, WsdFallsOverTheLastFifthByTheRootOfProgress) {
    const LearningRateScheduler schedule = {ScheduleType::wsd, 1e-3f, 10, 505, 0.0f};
    for (const int step : {10, 200, 403, 404}) EXPECT_EQ(schedule.at(step), 1e-3f);
    EXPECT_FLOAT_EQ(schedule.at(405), 9e-4f);  // 1 - sqrt(1/100)
    EXPECT_FLOAT_EQ(schedule.at(429), 5e-4f);  // 1 - sqrt(25/100)
    EXPECT_EQ(schedule.at(504), 0.0f);
}

TEST(Schedulers, AFinalFractionOfOneIsConstantAfterTheWarmup) {
    for (const ScheduleType type : kAll) {
        const LearningRateScheduler schedule = {type, 3e-4f, 5, 50, 1.0f};
        for (int step = 4; step < 50; ++step) EXPECT_EQ(schedule.at(step), 3e-4f);
    }
}

// llm.c -x 1: no division by zero, whatever the lengths are.
TEST(Schedulers, RunsOfAnyLengthGiveRatesBetweenZeroAndTheWhole) {
    for (const ScheduleType type : kAll) {
        for (const int warmup : {0, 1, 2, 5, 100, INT_MAX}) {
            for (const int steps : {1, 2, 3, 4, 5, 6, 100, INT_MAX}) {
                const LearningRateScheduler schedule = {type, 1.0f, warmup, steps, 0.25f};
                for (const int step : {0, 1, 2, 3, 4, 5, 50, 99, 100, 101, INT_MAX - 1, INT_MAX}) {
                    const float rate = schedule.at(step);
                    ASSERT_TRUE(rate > 0.0f && rate <= 1.0f)
                        << rate << " " << warmup << " " << steps << " " << step;
                }
            }
        }
        const LearningRateScheduler one_step = {type, 0.5f, 0, 1, 0.0f};
        EXPECT_EQ(one_step.at(0), 0.5f);
    }
}

TEST(Schedulers, StepsPastTheEndHaveTheLastStepsRate) {
    for (const ScheduleType type : kAll) {
        const LearningRateScheduler schedule = {type, 1e-3f, 10, 100, 0.1f};
        EXPECT_EQ(schedule.at(100), schedule.at(99));
        EXPECT_EQ(schedule.at(5000), schedule.at(99));
    }
}

// The exact value, rounded to a float: what every machine must give.
TEST(Schedulers, EveryStepIsTheRoundedExactValue) {
    const long double pi = std::acos(-1.0L);
    const LearningRateScheduler cosine = {ScheduleType::cosine, 6e-4f, 60, 1200, 0.1f};
    const LearningRateScheduler wsd = {ScheduleType::wsd, 6e-4f, 60, 1200, 0.1f};
    const long double rate = 6e-4f, last = rate * static_cast<long double>(0.1f);
    for (int step = 60; step < 1200; ++step) {
        const long double p = (step - 60) / 1139.0L;
        const long double expected = last + (rate - last) * (1.0L + std::cos(pi * p)) / 2.0L;
        ASSERT_EQ(bits_of(cosine.at(step)), bits_of(static_cast<float>(expected))) << step;
        if (step < 960) continue;
        const long double q = (step - 960) / 239.0L;
        const long double falling = last + (rate - last) * (1.0L - std::sqrt(q));
        ASSERT_EQ(bits_of(wsd.at(step)), bits_of(static_cast<float>(falling))) << step;
    }
}

TEST(Schedulers, NamesAreParsedAndAWrongOneIsAnsweredWithTheValidOnes) {
    EXPECT_EQ(parse_schedule("cosine"), ScheduleType::cosine);
    EXPECT_EQ(parse_schedule("linear"), ScheduleType::linear);
    EXPECT_EQ(parse_schedule("constant"), ScheduleType::constant);
    EXPECT_EQ(parse_schedule("wsd"), ScheduleType::wsd);
    for (const char* wrong : {"", "Cosine", "cosin", "step"}) {
        try {
            parse_schedule(wrong);
            FAIL() << wrong;
        } catch (const Error& error) {
            const std::string text = error.what();
            EXPECT_NE(text.find("'" + std::string(wrong) + "'"), std::string::npos) << text;
            EXPECT_NE(text.find("cosine, linear, constant or wsd"), std::string::npos) << text;
        }
    }
}

}  // namespace
