// What the tests of the CPU's kernels share: slopes by finite differences, bounds for each type,
// and the comparison of bits between runs on one and on two cores.
#pragma once

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <vector>

#include "llmc/cpu/parallel.h"
#include "llmc/precision.h"

namespace llmc::test {

// Largest ||result - exact|| / ||exact|| that a kernel on T may show.
template <class T>
constexpr double kBound = std::is_same_v<T, double>  ? 1e-12
                          : std::is_same_v<T, float> ? 1e-5
                                                     : 1e-2;

// df/dx at x, `f` taking no argument and reading x; the five-point rule.
template <class F>
double slope(double& x, F&& f) {
    const double centre = x, h = 1e-3;
    const auto at = [&](double value) {
        x = value;
        return f();
    };
    const double near = at(centre + h) - at(centre - h);
    const double far = at(centre + 2 * h) - at(centre - 2 * h);
    x = centre;
    return (8.0 * near - far) / (12.0 * h);
}

template <class F>
std::vector<double> slopes(double* x, size_t count, F&& f) {
    std::vector<double> result(count);
    for (size_t i = 0; i < count; ++i) result[i] = slope(x[i], f);
    return result;
}

// Widens to double.
template <class T>
std::vector<double> widened(const T* data, size_t count) {
    std::vector<double> result(count);
    for (size_t i = 0; i < count; ++i) result[i] = static_cast<double>(load(data[i]));
    return result;
}

// Rounds to T, as a kernel's last step does.
template <class T>
T rounded(double value) {
    return store<T>(static_cast<accum_t<T>>(value));
}

template <class T>
bool same_bits(const T* a, const T* b, size_t count) {
    return std::memcmp(a, b, count * sizeof(T)) == 0;
}

// FNV-1a over buffers.
class Hash {
  public:
    template <class T>
    void add(const T* data, size_t count) {
        const unsigned char* bytes = reinterpret_cast<const unsigned char*>(data);
        for (size_t i = 0; i < count * sizeof(T); ++i) {
            value_ = (value_ ^ bytes[i]) * 0x100000001b3ull;
        }
    }
    uint64_t value() const { return value_; }

  private:
    uint64_t value_ = 0xcbf29ce484222325ull;
};

constexpr const char* kPrintBits = "LLMC_TEST_PRINT_BITS";

// Runs the current test alone in a new process on `cores` of this process's cores, and returns the
// line it prints. A new process, because the pool takes its size from the mask it starts with.
inline std::string bits_printed_on(int cores) {
    cpu_set_t all, some;
    sched_getaffinity(0, sizeof(all), &all);
    CPU_ZERO(&some);
    for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&some) < cores; ++cpu) {
        if (CPU_ISSET(cpu, &all)) CPU_SET(cpu, &some);
    }
    char self[4096] = {};
    if (readlink("/proc/self/exe", self, sizeof(self) - 1) < 0) return "cannot find this program";
    const testing::TestInfo* info = testing::UnitTest::GetInstance()->current_test_info();
    const std::string command = std::string(kPrintBits) + "=1 '" + self +
                                "' --gtest_filter=" + info->test_suite_name() + "." + info->name();
    sched_setaffinity(0, sizeof(some), &some);
    FILE* child = popen(command.c_str(), "r");
    sched_setaffinity(0, sizeof(all), &all);
    std::string found;
    char line[512];
    while (child != nullptr && std::fgets(line, sizeof(line), child) != nullptr) {
        if (std::string(line).rfind("bits ", 0) == 0) found = line;
    }
    if (child != nullptr) pclose(child);
    return found;
}

// Fails the test when compute(), which returns a hash of a kernel's results, differs between a
// process that may use one core and one that may use two.
template <class Compute>
void expect_same_bits_on_one_and_two_cores(Compute&& compute) {
    if (std::getenv(kPrintBits) != nullptr) {
        std::printf("\nbits %016" PRIx64 " cores %d\n", static_cast<uint64_t>(compute()),
                    cpu::usable_cores());
        return;
    }
    if (cpu::usable_cores() < 2) GTEST_SKIP() << "needs two cores";
    const std::string one = bits_printed_on(1), two = bits_printed_on(2);
    ASSERT_NE(one.find(" cores 1"), std::string::npos) << one;
    ASSERT_NE(two.find(" cores 2"), std::string::npos) << two;
    EXPECT_EQ(one.substr(0, one.find(" cores")), two.substr(0, two.find(" cores")));
}

}  // namespace llmc::test
