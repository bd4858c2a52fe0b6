#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "guarded.h"
#include "llmc/cpu/layernorm.h"
#include "twin_checks.h"

using namespace llmc;
using namespace llmc::test;

namespace {

struct Shape {
    int rows, C;
};
const Shape kShapes[] = {{1, 2}, {3, 5}, {7, 36}, {4, 1600}, {1, 129}, {1100, 36}, {33, 257}};

// What a backward pass reads, on T, with statistics from the forward pass on T.
template <class T>
struct Inputs {
    Inputs(Shape s, double mean_of_inp = 0.3)
        : count(static_cast<size_t>(s.rows) * s.C),
          inp(count),
          dout(count),
          weight(s.C),
          bias(s.C),
          out(count),
          mean(s.rows),
          rstd(s.rows) {
        fill_normal(inp.data(), count, 1, 1.5, mean_of_inp);
        fill_normal(dout.data(), count, 2);
        fill_normal(weight.data(), s.C, 3, 0.5, 1.0);
        fill_normal(bias.data(), s.C, 4);
    }
    // The same numbers, widened.
    template <class U>
    explicit Inputs(const Inputs<U>& other)
        : count(other.count),
          inp(widened(other.inp.data(), count)),
          dout(widened(other.dout.data(), count)),
          weight(widened(other.weight.data(), other.weight.size())),
          bias(widened(other.bias.data(), other.bias.size())),
          out(count),
          mean(other.mean.size()),
          rstd(other.mean.size()) {}

    void forward(Shape s) {
        cpu::layernorm_forward(out.data(), mean.data(), rstd.data(), inp.data(), weight.data(),
                               bias.data(), s.rows, s.C, nullptr);
        cuda_check(cudaDeviceSynchronize());
    }
    template <class G>
    void backward(T* dinp, G* dweight, G* dbias, Shape s, bool add_to_dinp, bool accumulate,
                  G* dinp_sum = nullptr) {
        Guarded<char> scratch(cpu::layernorm_backward_scratch_bytes(s.rows, s.C));
        cpu::layernorm_backward(dinp, dweight, dbias, dinp_sum, dout.data(), inp.data(),
                                weight.data(), mean.data(), rstd.data(), scratch, s.rows, s.C,
                                add_to_dinp, accumulate, nullptr);
        cuda_check(cudaDeviceSynchronize());
        scratch.expect_guards_intact("scratch");
    }

    size_t count;
    std::vector<T> inp, dout, weight, bias, out;
    std::vector<accum_t<T>> mean, rstd;
};

template <class T>
void expect_forward_exact(Shape s, double mean_of_inp) {
    const Inputs<T> in(s, mean_of_inp);
    Guarded<T> out(in.count);
    Guarded<accum_t<T>> mean(s.rows), rstd(s.rows);
    cpu::layernorm_forward<T>(out, mean, rstd, in.inp.data(), in.weight.data(), in.bias.data(),
                              s.rows, s.C, nullptr);
    cuda_check(cudaDeviceSynchronize());
    std::vector<double> exact(in.count), means(s.rows), rstds(s.rows);
    for (int row = 0; row < s.rows; ++row) {
        const T* x = in.inp.data() + static_cast<size_t>(row) * s.C;
        double total = 0.0, squares = 0.0;
        for (int c = 0; c < s.C; ++c) total += load(x[c]);
        means[row] = total / s.C;
        for (int c = 0; c < s.C; ++c) squares += std::pow(load(x[c]) - means[row], 2.0);
        rstds[row] = 1.0 / std::sqrt(squares / s.C + 1e-5);
        for (int c = 0; c < s.C; ++c) {
            exact[static_cast<size_t>(row) * s.C + c] =
                (load(x[c]) - means[row]) * rstds[row] * load(in.weight[c]) + load(in.bias[c]);
        }
    }
    // Statistics are accum_t<T>, so that bf16 rounds nothing but the output.
    constexpr double kStatistics = std::is_same_v<T, double> ? 1e-12 : 1e-5;
    EXPECT_LT(relative_error(out.data(), exact.data(), in.count), kBound<T>)
        << s.rows << "x" << s.C;
    EXPECT_LT(relative_error(mean.data(), means.data(), s.rows), kStatistics);
    EXPECT_LT(relative_error(rstd.data(), rstds.data(), s.rows), kStatistics);
    out.expect_written("out");
    out.expect_guards_intact("out");
    mean.expect_guards_intact("mean");
    rstd.expect_guards_intact("rstd");
}

TEST(LayerNorm, ForwardMatchesFormula) {
    for (const Shape s : kShapes) {
        expect_forward_exact<float>(s, 0.3);
        expect_forward_exact<bf16>(s, 0.3);
        expect_forward_exact<double>(s, 0.3);
    }
}

// The average of the squares minus the square of the average has no correct digit left here.
TEST(LayerNorm, VarianceSurvivesALargeMean) {
    const Shape s{3, 1600};
    Inputs<float> in(s, 4096.0);
    in.forward(s);
    Inputs<double> wide(in);
    wide.forward(s);
    EXPECT_LT(relative_error(in.rstd.data(), wide.rstd.data(), s.rows), 1e-5);
}

// residual = a + b rounded to T, and the rest the bits of layernorm_forward on it, also in place.
template <class T>
void expect_fused_equals_two_steps() {
    for (const Shape s : kShapes) {
        Inputs<T> in(s);
        Guarded<T> residual(in.count), out(in.count);
        Guarded<accum_t<T>> mean(s.rows), rstd(s.rows);
        std::vector<T> a = in.inp;
        const std::vector<T>& b = in.dout;
        for (size_t i = 0; i < in.count; ++i) {
            in.inp[i] = rounded<T>(static_cast<double>(load(a[i])) + load(b[i]));
        }
        in.forward(s);
        for (const bool in_place : {false, true}) {
            T* const sum = in_place ? a.data() : residual.data();
            out.poison();
            cpu::fused_residual_layernorm_forward<T>(sum, out, mean, rstd, a.data(), b.data(),
                                                     in.weight.data(), in.bias.data(), s.rows, s.C,
                                                     nullptr);
            cuda_check(cudaDeviceSynchronize());
            EXPECT_TRUE(same_bits(sum, in.inp.data(), in.count)) << s.rows << "x" << s.C;
            EXPECT_TRUE(same_bits(out.data(), in.out.data(), in.count)) << s.rows << "x" << s.C;
            EXPECT_TRUE(same_bits(mean.data(), in.mean.data(), s.rows));
            EXPECT_TRUE(same_bits(rstd.data(), in.rstd.data(), s.rows));
        }
        residual.expect_guards_intact("residual");
        out.expect_guards_intact("out");
    }
}

TEST(LayerNorm, FusedResidualGivesTheBitsOfTwoSteps) {
    expect_fused_equals_two_steps<float>();
    expect_fused_equals_two_steps<bf16>();
    expect_fused_equals_two_steps<double>();
}

TEST(LayerNorm, BackwardMatchesFiniteDifferences) {
    for (const Shape s : {Shape{3, 5}, Shape{1, 36}, Shape{19, 17}}) {
        Inputs<double> in(s);
        in.forward(s);
        std::vector<double> dinp(in.count), dweight(s.C), dbias(s.C);
        in.backward(dinp.data(), dweight.data(), dbias.data(), s, false, false);
        const auto f = [&] {
            in.forward(s);
            double total = 0.0;
            for (size_t i = 0; i < in.count; ++i) total += in.out[i] * in.dout[i];
            return total;
        };
        const std::vector<double> inp_slopes = slopes(in.inp.data(), in.count, f);
        const std::vector<double> weight_slopes = slopes(in.weight.data(), s.C, f);
        const std::vector<double> bias_slopes = slopes(in.bias.data(), s.C, f);
        EXPECT_LT(relative_error(dinp.data(), inp_slopes.data(), in.count), 1e-7);
        EXPECT_LT(relative_error(dweight.data(), weight_slopes.data(), s.C), 1e-9);
        EXPECT_LT(relative_error(dbias.data(), bias_slopes.data(), s.C), 1e-9);
    }
}

// T and G against double on the same numbers; then added to what is there, with one rounding.
template <class T, class G>
void expect_backward_near_double() {
    for (const Shape s : kShapes) {
        if (s.C == 2) continue;  // dinp is then nothing but cancellation
        Inputs<T> in(s);
        in.forward(s);
        Inputs<double> wide(in);
        wide.forward(s);
        Guarded<T> dinp(in.count);
        Guarded<G> dweight(s.C), dbias(s.C);
        std::vector<double> exact(in.count), exact_weight(s.C), exact_bias(s.C);
        wide.backward(exact.data(), exact_weight.data(), exact_bias.data(), s, false, false);
        in.backward(dinp.data(), dweight.data(), dbias.data(), s, false, false);
        EXPECT_LT(relative_error(dinp.data(), exact.data(), in.count), kBound<T>) << s.C;
        EXPECT_LT(relative_error(dweight.data(), exact_weight.data(), s.C), kBound<G>) << s.C;
        EXPECT_LT(relative_error(dbias.data(), exact_bias.data(), s.C), kBound<G>) << s.C;

        Guarded<T> added(in.count);
        Guarded<G> added_weight(s.C), added_bias(s.C);
        fill_normal(added.data(), in.count, 5);
        fill_normal(added_weight.data(), s.C, 6);
        fill_normal(added_bias.data(), s.C, 7);
        for (size_t i = 0; i < in.count; ++i) exact[i] += load(added[i]);
        for (int c = 0; c < s.C; ++c) exact_weight[c] += load(added_weight[c]);
        for (int c = 0; c < s.C; ++c) exact_bias[c] += load(added_bias[c]);
        in.backward(added.data(), added_weight.data(), added_bias.data(), s, true, true);
        EXPECT_LT(relative_error(added.data(), exact.data(), in.count), kBound<T>) << s.C;
        EXPECT_LT(relative_error(added_weight.data(), exact_weight.data(), s.C), kBound<G>);
        EXPECT_LT(relative_error(added_bias.data(), exact_bias.data(), s.C), kBound<G>);
        added.expect_guards_intact("dinp");
        dweight.expect_guards_intact("dweight");
        dbias.expect_guards_intact("dbias");
    }
}

TEST(LayerNorm, BackwardMatchesDouble) {
    expect_backward_near_double<float, float>();
    expect_backward_near_double<bf16, bf16>();
    expect_backward_near_double<bf16, float>();
}

// By plain loops over what is stored, rounded; `old` (C) enters the sum. The rest is that of a call
// without dinp_sum.
template <class T, class G>
void expect_sum_of_dinp(Shape s, bool add_to_dinp, bool accumulate) {
    Inputs<T> in(s);
    in.forward(s);
    Guarded<T> dinp(in.count);
    Guarded<G> dweight(s.C), dbias(s.C), dinp_sum(s.C);
    fill_normal(dinp.data(), in.count, 5);
    fill_normal(dweight.data(), s.C, 6);
    fill_normal(dbias.data(), s.C, 7);
    if (accumulate) fill_normal(dinp_sum.data(), s.C, 8);
    std::vector<T> without(dinp.data(), dinp.data() + in.count);
    std::vector<G> weight_without(dweight.data(), dweight.data() + s.C);
    std::vector<G> bias_without(dbias.data(), dbias.data() + s.C);
    const std::vector<G> old(dinp_sum.data(), dinp_sum.data() + s.C);
    in.backward(without.data(), weight_without.data(), bias_without.data(), s, add_to_dinp,
                accumulate);
    in.backward(dinp.data(), dweight.data(), dbias.data(), s, add_to_dinp, accumulate,
                dinp_sum.data());
    EXPECT_TRUE(same_bits(dinp.data(), without.data(), in.count)) << s.C;
    EXPECT_TRUE(same_bits(dweight.data(), weight_without.data(), s.C)) << s.C;
    EXPECT_TRUE(same_bits(dbias.data(), bias_without.data(), s.C)) << s.C;
    for (int c = 0; c < s.C; ++c) {
        double sum = accumulate ? load(old[c]) : 0.0, size = std::abs(sum);
        for (int row = 0; row < s.rows; ++row) {
            const double value = load(dinp[static_cast<size_t>(row) * s.C + c]);
            sum += value;
            size += std::abs(value);
        }
        // One rounding of the sum; what comes before it is in double.
        const double near = std::is_same_v<G, bf16> ? 0x1p-8 : 0x1p-24;
        EXPECT_NEAR(load(dinp_sum[c]), sum, near * std::abs(sum) + 1e-14 * size)
            << s.C << ", " << c;
    }
    dinp_sum.expect_guards_intact("dinp_sum");
}

TEST(LayerNorm, SumOfDinpIsOfWhatIsStored) {
    for (const Shape s : kShapes) {
        for (const bool add_to_dinp : {false, true}) {
            for (const bool accumulate : {false, true}) {
                expect_sum_of_dinp<float, float>(s, add_to_dinp, accumulate);
                expect_sum_of_dinp<bf16, bf16>(s, add_to_dinp, accumulate);
                expect_sum_of_dinp<bf16, float>(s, add_to_dinp, accumulate);
            }
        }
    }
}

// The old gradient enters before the rounding. A bf16 twin whose result is rounded to bf16 first
// and added then differs in some elements; the same kernel with fp32 gradients shows the sum.
TEST(LayerNorm, AccumulateRoundsOnce) {
    const Shape s{50, 513};
    Inputs<bf16> in(s);
    in.forward(s);
    std::vector<bf16> dinp(in.count), dweight(s.C), dbias(s.C), dinp_sum(s.C);
    std::vector<float> sum_weight(s.C), sum_bias(s.C), sum_dinp(s.C);
    in.backward(dinp.data(), sum_weight.data(), sum_bias.data(), s, false, false, sum_dinp.data());
    fill_normal(dweight.data(), s.C, 6);
    fill_normal(dbias.data(), s.C, 7);
    fill_normal(dinp_sum.data(), s.C, 8);
    std::vector<bf16> once_weight(s.C), once_bias(s.C), once_dinp(s.C);
    size_t twice_differs = 0;
    for (int c = 0; c < s.C; ++c) {
        once_weight[c] = rounded<bf16>(double(load(dweight[c])) + sum_weight[c]);
        once_bias[c] = rounded<bf16>(double(load(dbias[c])) + sum_bias[c]);
        once_dinp[c] = rounded<bf16>(double(load(dinp_sum[c])) + sum_dinp[c]);
        const float twice = load(dbias[c]) + load(rounded<bf16>(sum_bias[c]));
        twice_differs += load(rounded<bf16>(twice)) != load(once_bias[c]);
    }
    ASSERT_GT(twice_differs, 0u);
    in.backward(dinp.data(), dweight.data(), dbias.data(), s, false, true, dinp_sum.data());
    EXPECT_TRUE(same_bits(dweight.data(), once_weight.data(), s.C));
    EXPECT_TRUE(same_bits(dbias.data(), once_bias.data(), s.C));
    EXPECT_TRUE(same_bits(dinp_sum.data(), once_dinp.data(), s.C));
}

TEST(LayerNorm, AddToDinpRoundsOnce) {
    // In fp32 the value comes out unrounded; in bf16 on the same numbers it is the same value.
    const Shape s{20, 129};
    Inputs<bf16> in(s);
    in.forward(s);
    Inputs<float> wide(s);
    for (size_t i = 0; i < in.count; ++i) {
        wide.inp[i] = load(in.inp[i]);
        wide.dout[i] = load(in.dout[i]);
    }
    for (int c = 0; c < s.C; ++c) wide.weight[c] = load(in.weight[c]);
    wide.forward(s);
    std::vector<float> value(in.count), dweight(s.C), dbias(s.C);
    wide.backward(value.data(), dweight.data(), dbias.data(), s, false, false);
    std::vector<bf16> dinp(in.count), once(in.count);
    fill_normal(dinp.data(), in.count, 5);
    for (size_t i = 0; i < in.count; ++i) once[i] = store<bf16>(load(dinp[i]) + value[i]);
    in.backward(dinp.data(), dweight.data(), dbias.data(), s, true, false);
    EXPECT_TRUE(same_bits(dinp.data(), once.data(), in.count));
}

// A sum over rows in one fp32 lane is off by 1e-4 here.
TEST(LayerNorm, ManyRowsKeepDweightAccurate) {
    const Shape s{200000, 4};
    Inputs<float> in(s);
    for (size_t i = 0; i < in.count; ++i) in.dout[i] = 1.0f + 0.1f * in.dout[i];
    in.forward(s);
    std::vector<float> dinp(in.count), dweight(s.C), dbias(s.C);
    in.backward(dinp.data(), dweight.data(), dbias.data(), s, false, false);
    for (int c = 0; c < s.C; ++c) {
        double exact = 0.0;
        for (int row = 0; row < s.rows; ++row) exact += in.dout[static_cast<size_t>(row) * s.C + c];
        EXPECT_NEAR(dbias[c] / exact, 1.0, 1e-7) << c;
    }
}

TEST(LayerNorm, RefusesEmptyShapes) {
    float x[4] = {};
    EXPECT_THROW(cpu::layernorm_forward(x, x, x, x, x, x, 0, 1, nullptr), Error);
    EXPECT_THROW(cpu::fused_residual_layernorm_forward(x, x, x, x, x, x, x, x, 1, 0, nullptr),
                 Error);
    EXPECT_THROW(
        cpu::layernorm_backward(x, x, x, x, x, x, x, x, x, nullptr, -1, 1, false, false, nullptr),
        Error);
}

template <class T>
void add_results(Hash& hash) {
    const Shape s{3001, 129};
    Inputs<T> in(s);
    in.forward(s);
    std::vector<T> dinp(in.count), dweight(s.C), dbias(s.C), dinp_sum(s.C);
    in.backward(dinp.data(), dweight.data(), dbias.data(), s, false, false, dinp_sum.data());
    hash.add(in.out.data(), in.count);
    hash.add(dinp.data(), in.count);
    hash.add(dweight.data(), dweight.size());
    hash.add(dbias.data(), dbias.size());
    hash.add(dinp_sum.data(), dinp_sum.size());
}

// In double too: fp32 results hide most changes in the order of a sum kept in double.
TEST(LayerNorm, SameBitsOnOneAndTwoCores) {
    expect_same_bits_on_one_and_two_cores([] {
        Hash hash;
        add_results<float>(hash);
        add_results<double>(hash);
        return hash.value();
    });
}

}  // namespace
