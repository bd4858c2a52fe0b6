#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "guarded.h"
#include "llmc/cpu/gelu.h"
#include "twin_checks.h"

using namespace llmc;
using namespace llmc::test;

namespace {

const size_t kCounts[] = {1, 36, 255, 257, 1600, 40001};

double plain_gelu(double x) {
    return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
}

template <class T>
void expect_forward_exact() {
    for (size_t count : kCounts) {
        Guarded<T> inp(count), out(count);
        fill_normal(inp.data(), count, 1, 2.0);
        cpu::gelu_forward<T>(out, inp, count, nullptr);
        cuda_check(cudaDeviceSynchronize());
        std::vector<double> exact(count);
        for (size_t i = 0; i < count; ++i) exact[i] = plain_gelu(load(inp[i]));
        EXPECT_LT(relative_error(out.data(), exact.data(), count), kBound<T>) << count;
        out.expect_written("out");
        out.expect_guards_intact("out");
    }
}

TEST(Gelu, ForwardMatchesFormula) {
    expect_forward_exact<float>();
    expect_forward_exact<bf16>();
    expect_forward_exact<double>();
}

// dinp on T against the double twin on the same (rounded) numbers.
template <class T>
void expect_backward_near_double() {
    for (size_t count : kCounts) {
        Guarded<T> inp(count), dout(count), dinp(count);
        fill_normal(inp.data(), count, 1, 2.0);
        fill_normal(dout.data(), count, 2);
        std::vector<double> wide_inp = widened(inp.data(), count);
        std::vector<double> wide_dout = widened(dout.data(), count), exact(count);
        cpu::gelu_backward<T>(dinp, dout, inp, count, nullptr);
        cpu::gelu_backward(exact.data(), wide_dout.data(), wide_inp.data(), count, nullptr);
        cuda_check(cudaDeviceSynchronize());
        EXPECT_LT(relative_error(dinp.data(), exact.data(), count), kBound<T>) << count;
        dinp.expect_written("dinp");
        dinp.expect_guards_intact("dinp");
        std::vector<T> apart(dinp.data(), dinp.data() + count);
        cpu::gelu_backward<T>(dout, dout, inp, count, nullptr);
        cuda_check(cudaDeviceSynchronize());
        EXPECT_TRUE(same_bits(dout.data(), apart.data(), count)) << "in place, " << count;
    }
}

TEST(Gelu, BackwardMatchesDoubleAndWorksInPlace) {
    expect_backward_near_double<float>();
    expect_backward_near_double<bf16>();
}

TEST(Gelu, BackwardMatchesFiniteDifferences) {
    const size_t count = 301;
    std::vector<double> inp(count), out(count), dout(count), dinp(count);
    fill_normal(inp.data(), count, 1, 2.0);
    fill_normal(dout.data(), count, 2);
    cpu::gelu_backward(dinp.data(), dout.data(), inp.data(), count, nullptr);
    cuda_check(cudaDeviceSynchronize());
    const std::vector<double> expected = slopes(inp.data(), count, [&] {
        cpu::gelu_forward(out.data(), inp.data(), count, nullptr);
        cuda_check(cudaDeviceSynchronize());
        double total = 0.0;
        for (size_t i = 0; i < count; ++i) total += out[i] * dout[i];
        return total;
    });
    EXPECT_LT(relative_error(dinp.data(), expected.data(), count), 1e-9);
}

TEST(Gelu, FarFromZeroAndNaN) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    float inp[6] = {1e4f, -1e4f, 1e30f, -1e30f, nan, 0.0f}, out[6], dinp[6];
    const float dout[6] = {1, 1, 1, 1, 1, 1};
    cpu::gelu_forward(out, inp, 6, nullptr);
    cpu::gelu_backward(dinp, dout, inp, 6, nullptr);
    cuda_check(cudaDeviceSynchronize());
    const float expected_out[4] = {1e4f, 0.0f, 1e30f, 0.0f}, expected_dinp[4] = {1, 0, 1, 0};
    for (int i = 0; i < 4; ++i) {
        EXPECT_EQ(out[i], expected_out[i]) << inp[i];
        EXPECT_EQ(dinp[i], expected_dinp[i]) << inp[i];
    }
    EXPECT_TRUE(std::isnan(out[4]) && std::isnan(dinp[4]));
    EXPECT_EQ(out[5], 0.0f);
    EXPECT_EQ(dinp[5], 0.5f);
}

TEST(Gelu, RefusesNothingToDo) {
    float x = 0.0f;
    EXPECT_THROW(cpu::gelu_forward(&x, &x, 0, nullptr), Error);
    EXPECT_THROW(cpu::gelu_backward(&x, &x, &x, 0, nullptr), Error);
}

TEST(Gelu, SameBitsOnOneAndTwoCores) {
    expect_same_bits_on_one_and_two_cores([] {
        const size_t count = 100003;
        std::vector<float> inp(count), out(count), dinp(count);
        fill_normal(inp.data(), count, 1, 2.0);
        cpu::gelu_forward(out.data(), inp.data(), count, nullptr);
        cpu::gelu_backward(dinp.data(), out.data(), inp.data(), count, nullptr);
        cuda_check(cudaDeviceSynchronize());
        Hash hash;
        hash.add(out.data(), count);
        hash.add(dinp.data(), count);
        return hash.value();
    });
}

}  // namespace
