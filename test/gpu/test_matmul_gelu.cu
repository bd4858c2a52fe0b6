// GELU behind matrix products on the GPU, inside them and apart: against the CPU twins, what cuBLASLt's
// GELU is and what it is computed from, and how fast it is.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "llmc/cpu/matmul.h"
#include "llmc/matmul.cuh"
#include "test/gpu/gpu_checks.h"

namespace {

using namespace llmc;
using namespace llmc::test;

// The first product of an MLP goes from C to OC channels; the product that comes back to GELU's
// output, in the backward pass, does too.
struct Shape {
    int rows, C, OC;
};

std::string name_of(const Shape& s) {
    return format("rows %d C %d OC %d", s.rows, s.C, s.OC);
}

// Channels that are no multiples of 8 (36, 18, 33) or of 16 bytes, few rows, and d12's and d48's MLP.
const Shape kShapes[] = {
    {1, 8, 8},     {5, 36, 144},    {64, 18, 72},   {3, 1600, 33},     {128, 64, 256},
    {37, 24, 520}, {300, 768, 200}, {1, 768, 3072}, {2048, 768, 3072}, {1024, 1600, 6400},
};

struct Case {
    Shape shape;
    size_t rows = shape.rows, C = shape.C, OC = shape.OC;
    std::vector<floatX> inp, weight, bias, dout, weight_back, before;
    DeviceGuarded<floatX> device_inp, device_weight, device_bias, device_dout, device_weight_back,
        device_before;
    DeviceGuarded<floatX> out, pre, dinp;

    explicit Case(const Shape& s, size_t offset = 0)
        : shape(s),
          inp(normal_values<floatX>(rows * C, 1)),
          weight(normal_values<floatX>(OC * C, 2, 1.0 / std::sqrt(static_cast<double>(C)))),
          bias(normal_values<floatX>(OC, 3)),
          dout(normal_values<floatX>(rows * C, 4)),
          weight_back(normal_values<floatX>(C * OC, 5, 0.3)),
          before(normal_values<floatX>(rows * OC, 6, 2.0)),
          device_inp(inp, offset),
          device_weight(weight, offset),
          device_bias(bias, offset),
          device_dout(dout, offset),
          device_weight_back(weight_back, offset),
          device_before(before, offset),
          out(rows * OC, offset),
          pre(rows * OC, offset),
          dinp(rows * OC, offset) {}

    void upload() {
        device_inp.upload(inp);
        device_weight.upload(weight);
        device_bias.upload(bias);
        device_dout.upload(dout);
        device_weight_back.upload(weight_back);
        device_before.upload(before);
    }
    void run(bool fuse, bool with_bias = true) {
        out.poison();
        pre.poison();
        dinp.poison();
        matmul_gelu_forward(out.get(), pre.get(), device_inp.get(), device_weight.get(),
                            with_bias ? device_bias.get() : nullptr, shape.rows, shape.C, shape.OC,
                            fuse, nullptr);
        matmul_gelu_backward_input(dinp.get(), device_dout.get(), device_weight_back.get(),
                                   device_before.get(), shape.rows, shape.OC, shape.C, fuse,
                                   nullptr);
        cuda_check(cudaDeviceSynchronize());
        out.expect_guards_intact("out");
        pre.expect_guards_intact("pre");
        dinp.expect_guards_intact("dinp");
        device_before.expect_guards_intact("pre of the backward pass");
    }
};

class GpuMatmulGelu : public testing::Test {
  protected:
    void SetUp() override { matmul_allow_tf32(false); }
};

void expect_near_twin(Case& c, bool with_bias) {
    const Shape& s = c.shape;
    std::vector<floatX> out(c.rows * c.OC), pre(c.rows * c.OC), dinp(c.rows * c.OC);
    cpu::matmul_gelu_forward(out.data(), pre.data(), c.inp.data(), c.weight.data(),
                             with_bias ? c.bias.data() : nullptr, s.rows, s.C, s.OC, false,
                             nullptr);
    cpu::matmul_gelu_backward_input(dinp.data(), c.dout.data(), c.weight_back.data(),
                                    c.before.data(), s.rows, s.OC, s.C, false, nullptr);
    for (const bool fuse : {false, true}) {
        SCOPED_TRACE(name_of(s) + (fuse ? " inside" : " apart"));
        c.run(fuse, with_bias);
        EXPECT_LE(relative_error(c.pre.download(), pre), kBound<floatX>) << "pre";
        EXPECT_LE(relative_error(c.out.download(), out), kBound<floatX>) << "out";
        EXPECT_LE(relative_error(c.dinp.download(), dinp), kBound<floatX>) << "dinp";
    }
}

TEST_F(GpuMatmulGelu, EqualsItsTwin) {
    for (const Shape& shape : kShapes) {
        Case c(shape);
        expect_near_twin(c, shape.rows != 37);
    }
}

TEST_F(GpuMatmulGelu, EqualsItsTwinWherePointersAreNotAligned) {
    for (const size_t offset : {1, 3}) {
        Case c({128, 64, 256}, offset);
        expect_near_twin(c, true);
    }
}

TEST_F(GpuMatmulGelu, TwoRunsGiveTheSameBits) {
    for (const Shape& shape : {Shape{2048, 768, 3072}, Shape{300, 768, 200}, Shape{64, 4096, 64}}) {
        SCOPED_TRACE(name_of(shape));
        Case c(shape);
        c.run(true);
        const auto out = c.out.download(), pre = c.pre.download(), dinp = c.dinp.download();
        for (int repeat = 0; repeat < 3; ++repeat) {
            c.run(true);
            EXPECT_TRUE(same_bits(c.out.download(), out));
            EXPECT_TRUE(same_bits(c.pre.download(), pre));
            EXPECT_TRUE(same_bits(c.dinp.download(), dinp));
        }
    }
}

// -ge -1 counts on it from compute capability 9.0 on. What -ge 2 and fp32 come to is printed.
TEST_F(GpuMatmulGelu, TheLibraryHasTheProductsThatTheDefaultUses) {
    for (const Shape& shape : {Shape{65536, 768, 3072}, Shape{4096, 768, 3072},
                               Shape{16384, 1600, 6400}, Shape{128, 64, 256}}) {
        const auto level = [&](int asked) {
            return matmul_gelu_fusion(asked, shape.rows, shape.C, shape.OC);
        };
        std::printf("%s, %s: -ge -1 comes to %d, -ge 1 to %d, -ge 2 to %d\n",
                    name_of(shape).c_str(), kPrecisionName, level(-1), level(1), level(2));
        const bool new_enough = device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
        EXPECT_EQ(level(-1), sizeof(floatX) == 2 && new_enough ? 1 : 0);
        EXPECT_EQ(level(0), 0);
        EXPECT_LE(level(1), 1);
    }
    EXPECT_EQ(matmul_gelu_fusion(2, 64, 36, 144), 0) << "36 is no multiple of 8";
    EXPECT_THROW(matmul_gelu_fusion(1, 64, 0, 144), Error);
}

// Row r of the product is the number x(r) in every column, without any rounding.
void set_rows(Case* c, const std::function<double(size_t)>& x) {
    for (floatX& value : c->inp) value = from_float<floatX>(0.0f);
    for (floatX& value : c->weight) value = from_float<floatX>(0.0f);
    for (floatX& value : c->bias) value = from_float<floatX>(0.0f);
    for (size_t r = 0; r < c->rows; ++r) {
        c->inp[r * c->C] = from_float<floatX>(static_cast<float>(x(r)));
    }
    for (size_t o = 0; o < c->OC; ++o) c->weight[o * c->C] = from_float<floatX>(1.0f);
    c->upload();
}

// Two forms of GELU are in use, which differ by up to 5e-4. Below 0 its values are small, and bf16
// is fine enough to tell one from the other.
TEST_F(GpuMatmulGelu, IsTheTanhForm) {
    Case c({129, 64, 64});
    const auto x = [](size_t row) { return -static_cast<double>(row) / 32.0; };
    set_rows(&c, x);
    std::vector<double> with_tanh, with_erf;
    for (size_t r = 0; r < c.rows; ++r) {
        for (size_t o = 0; o < c.OC; ++o) {
            with_tanh.push_back(cpu::gelu_value(x(r)));
            with_erf.push_back(0.5 * x(r) * (1.0 + std::erf(x(r) / std::sqrt(2.0))));
        }
    }
    for (const bool fuse : {false, true}) {
        c.run(fuse);
        const std::vector<double> out = widened(c.out.download());
        const double tanh_form = relative_error(out, with_tanh);
        const double erf_form = relative_error(out, with_erf);
        double largest = 0.0;
        for (size_t i = 0; i < out.size(); ++i) {
            largest = std::max(largest, std::abs(out[i] - with_tanh[i]) / (1.0 + std::abs(out[i])));
        }
        std::printf(
            "GELU %s the product: %.2e from the tanh form, %.2e from the erf form, largest "
            "single difference %.2e\n",
            fuse ? "inside" : "apart from", tanh_form, erf_form, largest);
        EXPECT_LT(tanh_form, erf_form);
        // The library's tanh is the GPU's approximation, in fp32 as well.
        const bool exact = sizeof(floatX) == 4 && !fuse;
        EXPECT_LT(tanh_form, exact ? kBound<floatX> : 1e-2);
        EXPECT_LT(largest, exact ? 1e-5 : 1e-3);
    }
}

TEST_F(GpuMatmulGelu, FarFromZeroAndNaN) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const float values[8] = {0x1p13f, -0x1p13f, 64.0f, -64.0f, 16.0f, -16.0f, 0.0f, nan};
    Case c({8, 64, 64});
    set_rows(&c, [&](size_t row) { return static_cast<double>(values[row]); });
    // NaN times the zeros of other columns would be NaN too: only the last row has one.
    for (floatX& value : c.dout) value = from_float<floatX>(1.0f);
    for (size_t i = 0; i < c.weight_back.size(); ++i) {
        c.weight_back[i] = from_float<floatX>(i < c.OC ? 1.0f : 0.0f);
    }
    for (size_t i = 0; i < c.before.size(); ++i) c.before[i] = from_float<floatX>(values[i / c.OC]);
    c.upload();
    for (const bool fuse : {false, true}) {
        SCOPED_TRACE(fuse ? "inside" : "apart");
        c.run(fuse);
        const std::vector<floatX> out = c.out.download(), dinp = c.dinp.download();
        for (size_t i = 0; i < out.size(); ++i) {
            const float x = values[i / c.OC], y = to_float(out[i]), d = to_float(dinp[i]);
            if (std::isnan(x)) {
                ASSERT_TRUE(std::isnan(y) && std::isnan(d)) << "a NaN must reach the loss";
                continue;
            }
            ASSERT_NEAR(y, std::max(x, 0.0f), 1e-6f * std::abs(x)) << x;
            ASSERT_NEAR(d, x > 0.0f ? 1.0f : x < 0.0f ? 0.0f : 0.5f, 1e-5f) << x;
        }
    }
}

#if defined(LLMC_BF16) && !defined(LLMC_GRAD_FP32)
// The part of the way from `rounded` to `exact` that `values` have gone: 1 where they were computed
// from unrounded sums, 0 where from rounded ones, whatever their own rounding.
double share_of_exact(const std::vector<double>& values, const std::vector<double>& exact,
                      const std::vector<double>& rounded) {
    double along = 0.0, whole = 0.0;
    for (size_t i = 0; i < values.size(); ++i) {
        const double way = exact[i] - rounded[i];
        along += (values[i] - rounded[i]) * way;
        whole += way * way;
    }
    return along / whole;
}

// Multiples of 1/32 up to 7/32: sums of a few thousand products are exact in fp32, not in bf16.
void fill_exact(std::vector<floatX>* values, uint32_t stream) {
    for (size_t i = 0; i < values->size(); ++i) {
        const uint32_t bits = random_bits32(7, RandomPurpose::kTest, stream, i);
        const float number = static_cast<float>(static_cast<int>(bits % 15) - 7);
        (*values)[i] = from_float<floatX>(number / 32.0f);
    }
}

std::vector<float> widen_all(const std::vector<floatX>& values) {
    std::vector<float> wide;
    for (const floatX value : values) wide.push_back(to_float(value));
    return wide;
}

double to_bf16_and_back(double x) {
    return static_cast<double>(to_float(from_float<floatX>(static_cast<float>(x))));
}

// What docs/reproducibility.md says of -ge and -r rests on this.
TEST_F(GpuMatmulGelu, InsideTheProductItMeetsSumsBeforeTheyAreRounded) {
    Case c({256, 4096, 256});
    fill_exact(&c.inp, 11);
    fill_exact(&c.weight, 12);
    fill_exact(&c.bias, 13);
    fill_exact(&c.dout, 14);
    fill_exact(&c.weight_back, 15);
    c.upload();
    const Shape& s = c.shape;
    const size_t count = c.rows * c.OC;
    std::vector<float> sums(count), sums_back(count);
    const std::vector<float> bias = widen_all(c.bias);
    cpu::matmul_forward(sums.data(), widen_all(c.inp).data(), widen_all(c.weight).data(),
                        bias.data(), s.rows, s.C, s.OC, nullptr);
    cpu::matmul_backward_input(sums_back.data(), widen_all(c.dout).data(),
                               widen_all(c.weight_back).data(), s.rows, s.OC, s.C, nullptr);
    std::vector<floatX> pre;
    std::vector<double> out_exact, out_rounded, dinp_exact, dinp_rounded;
    for (size_t i = 0; i < count; ++i) {
        const double sum = sums[i], back = sums_back[i];
        const double slope = cpu::gelu_derivative(static_cast<double>(to_float(c.before[i])));
        pre.push_back(from_float<floatX>(sums[i]));
        out_exact.push_back(cpu::gelu_value(sum));
        out_rounded.push_back(cpu::gelu_value(to_bf16_and_back(sum)));
        dinp_exact.push_back(back * slope);
        dinp_rounded.push_back(to_bf16_and_back(back) * slope);
    }
    for (const bool fuse : {false, true}) {
        c.run(fuse);
        const double forward = share_of_exact(widened(c.out.download()), out_exact, out_rounded);
        const double backward =
            share_of_exact(widened(c.dinp.download()), dinp_exact, dinp_rounded);
        std::printf(
            "%s the product: GELU is computed from sums that are %.2f unrounded, gelu' "
            "meets sums that are %.2f unrounded\n",
            fuse ? "inside" : "apart from", forward, backward);
        const int level = fuse ? matmul_gelu_fusion(1, s.rows, s.C, s.OC) : 0;
        EXPECT_TRUE(same_bits(c.pre.download(), pre)) << "pre is the sum, rounded once";
        EXPECT_NEAR(forward, level >= 1 ? 1.0 : 0.0, 0.1);
        EXPECT_NEAR(backward, 0.0, 0.1);
    }
}
#endif

#ifdef LLMC_BF16
// Milliseconds of a call: the median of 20.
double time_of(const std::function<void()>& call) {
    constexpr int kWarmUp = 5, kCalls = 20;
    cudaEvent_t start, end;
    cuda_check(cudaEventCreate(&start));
    cuda_check(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < kWarmUp + kCalls; ++i) {
        cuda_check(cudaEventRecord(start));
        call();
        cuda_check(cudaEventRecord(end));
        cuda_check(cudaEventSynchronize(end));
        float ms = 0.0f;
        cuda_check(cudaEventElapsedTime(&ms, start, end));
        if (i >= kWarmUp) times.push_back(ms);
    }
    cudaEventDestroy(start);
    cudaEventDestroy(end);
    std::sort(times.begin(), times.end());
    return static_cast<double>(times[kCalls / 2]);
}

TEST_F(GpuMatmulGelu, SpeedTable) {
    std::printf("%-10s %-9s %9s %9s %9s\n", "MLP", "pass", "apart ms", "inside ms", "product ms");
    for (const Shape& s :
         {Shape{65536, 768, 3072}, Shape{4096, 768, 3072}, Shape{16384, 1600, 6400}}) {
        const size_t rows = s.rows, C = s.C, OC = s.OC;
        const auto narrow_rows = device_values<floatX>(rows * C, 1);
        const auto weight = device_values<floatX>(OC * C, 2, 0.05);
        const auto bias = device_values<floatX>(OC, 3);
        const auto before = device_values<floatX>(rows * OC, 4);
        const DeviceBuffer<floatX> out(rows * OC), pre(rows * OC);
        const auto forward = [&](bool fuse) {
            return time_of([&] {
                matmul_gelu_forward(out.get(), pre.get(), narrow_rows.get(), weight.get(),
                                    bias.get(), s.rows, s.C, s.OC, fuse, nullptr);
            });
        };
        const auto backward = [&](bool fuse) {
            return time_of([&] {
                matmul_gelu_backward_input(out.get(), narrow_rows.get(), weight.get(), before.get(),
                                           s.rows, s.OC, s.C, fuse, nullptr);
            });
        };
        const double product_forward = time_of([&] {
            matmul_forward(pre.get(), narrow_rows.get(), weight.get(), bias.get(), s.rows, s.C,
                           s.OC, nullptr);
        });
        const double product_backward = time_of([&] {
            matmul_backward_input(out.get(), narrow_rows.get(), weight.get(), s.rows, s.OC, s.C,
                                  nullptr);
        });
        const int level = matmul_gelu_fusion(2, s.rows, s.C, s.OC);
        const std::string name = format("%d %s", s.rows, s.C == 768 ? "d12" : "d48");
        std::printf("%-10s %-9s %9.3f %9.3f %9.3f\n", name.c_str(), "forward", forward(false),
                    level >= 1 ? forward(true) : 0.0, product_forward);
        std::printf("%-10s %-9s %9.3f %9.3f %9.3f\n", name.c_str(), "backward", backward(false),
                    level >= 2 ? backward(true) : 0.0, product_backward);
        EXPECT_GT(product_forward, 0.0);
    }
}
#endif

}  // namespace
