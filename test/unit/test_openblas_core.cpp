// Which core OpenBLAS computes with, and that the program starts itself again at most once for it.

#include "llmc/cpu/openblas_core.h"

#include <gtest/gtest.h>

#include <cstdio>

#include "test/unit/child_process.h"

namespace {

using namespace llmc::cpu;
using llmc::test::ChildMode;
using llmc::test::run_again;

std::string environment(const char* name) {
    const char* value = std::getenv(name);
    return value != nullptr ? value : "unset";
}

// The state that main would find after select_openblas_core. With FORGET_CORETYPE the first of the
// two processes has a core that came from OPENBLAS_CORETYPE but looks like OpenBLAS's own choice.
std::string report_core() {
    if (std::getenv("FORGET_CORETYPE") != nullptr) {
        unsetenv("FORGET_CORETYPE");
        unsetenv("OPENBLAS_CORETYPE");
    }
    char name[] = "/some/where/trainer", flag[] = "-x";
    char* argv[] = {name, flag, nullptr};
    select_openblas_core(argv);
    char process[17] = {};
    prctl(PR_GET_NAME, process, 0, 0, 0);
    return std::string(openblas_core_name()) + " threads " + environment("OPENBLAS_NUM_THREADS") +
           " coretype " + environment("OPENBLAS_CORETYPE") + " process " + process;
}
const ChildMode core_mode("report_core", report_core);

// Runs report_core in a process with these changes to the environment, and none of ours.
std::string report(std::vector<std::string> environment) {
    environment.insert(environment.begin(), "LLMC_STARTED_AGAIN_FOR_OPENBLAS");
    return run_again("report_core", {environment, false});
}

bool starts_with(const std::string& text, const std::string& start) {
    return text.compare(0, start.size(), start) == 0;
}

TEST(OpenblasCore, ChoosesByFeatures) {
    EXPECT_STREQ(best_openblas_core({false, true, true}), "SKYLAKEX");
    EXPECT_STREQ(best_openblas_core({true, true, true}), "SKYLAKEX");
    EXPECT_STREQ(best_openblas_core({false, true, false}), "HASWELL");
    EXPECT_STREQ(best_openblas_core({true, true, false}), "ZEN");
    EXPECT_EQ(best_openblas_core({false, false, false}), nullptr);
    EXPECT_EQ(best_openblas_core({true, false, false}), nullptr);
}

TEST(OpenblasCore, LevelsOfNames) {
    for (const char* old : {"Prescott", "Nehalem", "SandyBridge", "Steamroller", "unknown"}) {
        EXPECT_EQ(openblas_core_level(old), 0) << old;
    }
    for (const char* name : {"Haswell", "HASWELL", "Zen", "Excavator"}) {
        EXPECT_EQ(openblas_core_level(name), 1) << name;
    }
    for (const char* name : {"SkylakeX", "skylakex", "Cooperlake", "SapphireRapids", "Zen7"}) {
        EXPECT_EQ(openblas_core_level(name), 2) << name;
    }
}

TEST(OpenblasCore, FeaturesAgreeWithTheKernelsList) {
    std::FILE* file = std::fopen("/proc/cpuinfo", "r");
    if (file == nullptr) GTEST_SKIP() << "no /proc/cpuinfo";
    std::string flags, line;
    for (int c; (c = std::fgetc(file)) != EOF;) {
        line += c == '\n' ? ' ' : static_cast<char>(c);
        if (c != '\n') continue;
        if (starts_with(line, "flags")) flags = line;
        line.clear();
    }
    std::fclose(file);
    if (flags.empty()) GTEST_SKIP() << "no flags in /proc/cpuinfo";
    const auto has = [&](const char* flag) {
        return flags.find(std::string(" ") + flag + " ") != std::string::npos;
    };
    EXPECT_EQ(cpu_features().avx2, has("avx2") && has("fma"));
    EXPECT_EQ(cpu_features().avx512, has("avx512f") && has("avx512bw") && has("avx512dq") &&
                                         has("avx512vl") && has("avx512cd"));
}

// The name of the core that OpenBLAS reports when it is asked for `core`.
std::string forced(const char* core) {
    const std::string text = report({std::string("OPENBLAS_CORETYPE=") + core, "FORGET_CORETYPE"});
    return text.substr(0, text.find(' '));
}

TEST(OpenblasCore, ReplacesAnOldCoreBySettingTheEnvironmentAndStartingAgain) {
    const char* best = best_openblas_core(cpu_features());
    if (best == nullptr) GTEST_SKIP() << "a processor without AVX2";
    ASSERT_EQ(forced("PRESCOTT"), "Prescott") << "an OpenBLAS without a choice of cores";
    EXPECT_EQ(report({"OPENBLAS_CORETYPE=PRESCOTT", "FORGET_CORETYPE=1", "OPENBLAS_NUM_THREADS"}),
              forced(best) + " threads 1 coretype " + best + " process trainer");
}

TEST(OpenblasCore, KeepsTheUsersNumberOfThreadsWhenStartingAgain) {
    if (best_openblas_core(cpu_features()) == nullptr) GTEST_SKIP() << "a processor without AVX2";
    const std::string text =
        report({"OPENBLAS_CORETYPE=PRESCOTT", "FORGET_CORETYPE=1", "OPENBLAS_NUM_THREADS=2"});
    EXPECT_NE(text.find(" threads 2 "), std::string::npos) << text;
}

TEST(OpenblasCore, KeepsTheUsersCore) {
    const std::string text = report({"OPENBLAS_CORETYPE=PRESCOTT", "FORGET_CORETYPE"});
    EXPECT_TRUE(starts_with(text, "Prescott ")) << text;
}

TEST(OpenblasCore, StartsAgainOnlyOnce) {
    const std::string text = run_again(
        "report_core",
        {{"OPENBLAS_CORETYPE=PRESCOTT", "FORGET_CORETYPE=1", "LLMC_STARTED_AGAIN_FOR_OPENBLAS=1"},
         false});
    EXPECT_TRUE(starts_with(text, "Prescott ")) << text;
    EXPECT_NE(text.find(" coretype unset "), std::string::npos) << text;
}

TEST(OpenblasCore, DoesNothingWhenTheCoreIsGoodEnough) {
    const char* best = best_openblas_core(cpu_features());
    if (best == nullptr) GTEST_SKIP() << "a processor without AVX2";
    const std::string text =
        report({std::string("OPENBLAS_CORETYPE=") + best, "FORGET_CORETYPE=1"});
    EXPECT_TRUE(starts_with(text, forced(best))) << text;
    EXPECT_NE(text.find(" coretype unset "), std::string::npos) << text;
}

TEST(OpenblasCore, NameIsNotEmpty) {
    EXPECT_GT(std::strlen(openblas_core_name()), 0u);
}

}  // namespace
