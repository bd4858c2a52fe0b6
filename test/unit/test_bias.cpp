#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "guarded.h"
#include "llmc/cpu/bias.h"
#include "twin_checks.h"

using namespace llmc;
using namespace llmc::test;

namespace {

struct Shape {
    int rows, OC;
};
const Shape kShapes[] = {{1, 1}, {3, 7}, {64, 36}, {65, 257}, {300, 600}};

// Sums by plain loops in double, over what memory holds.
template <class T>
std::vector<double> plain_sums(const T* rows_of, const std::vector<T>& old, const Shape& shape,
                               bool accumulate) {
    std::vector<double> sums(shape.OC);
    for (int c = 0; c < shape.OC; ++c) {
        if (accumulate) sums[c] = load(old[c]);
        for (int r = 0; r < shape.rows; ++r) sums[c] += load(rows_of[r * shape.OC + c]);
    }
    return sums;
}

template <class T>
void expect_sums(double bound) {
    for (const Shape& shape : kShapes) {
        for (const bool accumulate : {false, true}) {
            const size_t count = static_cast<size_t>(shape.rows) * shape.OC;
            Guarded<T> dout(count), inp(count), dinp(count), dbias(shape.OC);
            fill_normal(dout.data(), count, 1);
            fill_normal(inp.data(), count, 2, 2.0);
            fill_normal(dbias.data(), shape.OC, 3);
            const std::vector<T> old(dbias.data(), dbias.data() + shape.OC);
            const auto check = [&](const T* summed) {
                const std::vector<double> exact = plain_sums(summed, old, shape, accumulate);
                for (int c = 0; c < shape.OC; ++c) {
                    const double scale = std::sqrt(shape.rows) + std::abs(exact[c]);
                    ASSERT_NEAR(static_cast<double>(load(dbias[c])), exact[c], bound * scale);
                }
                dbias.expect_guards_intact("dbias");
            };
            cpu::bias_backward<T>(dbias.data(), dout.data(), nullptr, shape.rows, shape.OC,
                                  accumulate, nullptr);
            cuda_check(cudaDeviceSynchronize());
            check(dout.data());

            std::copy(old.begin(), old.end(), dbias.data());
            cpu::gelu_backward_bias<T>(dinp.data(), dbias.data(), dout.data(), inp.data(), nullptr,
                                       shape.rows, shape.OC, accumulate, nullptr);
            cuda_check(cudaDeviceSynchronize());
            dinp.expect_guards_intact("dinp");
            check(dinp.data());

            std::vector<T> apart(count);
            cpu::gelu_backward<T>(apart.data(), dout.data(), inp.data(), count, nullptr);
            cuda_check(cudaDeviceSynchronize());
            for (size_t i = 0; i < count; ++i) ASSERT_EQ(load(dinp[i]), load(apart[i]));
        }
    }
}

TEST(Bias, SumsOverRowsFp32) {
    expect_sums<float>(1e-6);
}
TEST(Bias, SumsOverRowsBf16) {
    expect_sums<bf16>(4e-3);
}

TEST(Bias, RefusesBadShapes) {
    float x = 0.0f;
    EXPECT_THROW(cpu::bias_backward(&x, &x, nullptr, 0, 1, false, nullptr), Error);
    EXPECT_THROW(cpu::gelu_backward_bias(&x, &x, &x, &x, nullptr, 1, -1, false, nullptr), Error);
}

}  // namespace
