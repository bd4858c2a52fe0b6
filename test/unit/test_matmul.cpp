// The matmul twins against plain loops, against finite differences, and against themselves.

#include "llmc/cpu/matmul.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "test/unit/child_process.h"
#include "test/unit/guarded.h"
#include "test/unit/twin_checks.h"

namespace {

using namespace llmc;
using llmc::test::Fingerprint;
using llmc::test::Guarded;
using llmc::test::relative_error;

struct Shape {
    int rows, C, OC;
};

// Uniform with mean 0 and this standard deviation.
template <class T>
void fill(Guarded<T>& data, uint32_t stream, double deviation = 1.0) {
    for (size_t block = 0; 4 * block < data.size(); ++block) {
        const Philox4 bits = philox(42, RandomPurpose::kTest, stream, block);
        for (size_t i = 4 * block; i < std::min(data.size(), 4 * block + 4); ++i) {
            const double x = (2.0 * uniform_from_bits(bits.lane[i % 4]) - 1.0) * std::sqrt(3.0);
            data[i] = store<T>(static_cast<accum_t<T>>(deviation * x));
        }
    }
}

// One block and several, with edges; sums that are cut (above 4096); chunks of widened bf16.
const Shape kShapes[] = {
    {1, 1, 1},       {5, 36, 7},      {64, 36, 108},  {3, 1600, 33},
    {300, 37, 1100}, {257, 128, 513}, {33, 40, 5003}, {9, 4201, 17},
    {4200, 24, 31},  {70, 1600, 129}, {16, 257, 300}, {520, 20, 4500},
};

std::string name_of(const Shape& s) {
    return "rows " + std::to_string(s.rows) + " C " + std::to_string(s.C) + " OC " +
           std::to_string(s.OC);
}

// The three products, run on memory with guards. Old gradients are normal numbers when `accumulate`
// is set, else NaN.
template <class T, class G = T>
struct Case {
    Shape shape;
    size_t rows = shape.rows, C = shape.C, OC = shape.OC;
    Guarded<T> inp{rows * C}, weight{OC * C}, bias{OC}, dout{rows * OC};
    Guarded<T> out{rows * OC}, dinp{rows * C};
    Guarded<G> dweight{OC * C}, dbias{OC}, old_dweight{OC * C}, old_dbias{OC};

    explicit Case(const Shape& s) : shape(s) {
        fill(inp, 1);
        fill(weight, 2, 0.3);
        fill(bias, 3);
        fill(dout, 4);
        fill(old_dweight, 5, std::sqrt(static_cast<double>(rows)));
        fill(old_dbias, 6, std::sqrt(static_cast<double>(rows)));
    }
    void forward(bool with_bias = true) {
        out.poison();
        cpu::matmul_forward(out.data(), inp.data(), weight.data(),
                            with_bias ? bias.data() : nullptr, shape.rows, shape.C, shape.OC,
                            nullptr);
        cuda_check(cudaDeviceSynchronize());
    }
    void backward(bool accumulate, bool with_bias = true) {
        dinp.poison();
        dweight.poison();
        dbias.poison();
        if (accumulate) {
            std::memcpy(dweight.data(), old_dweight.data(), OC * C * sizeof(G));
            std::memcpy(dbias.data(), old_dbias.data(), OC * sizeof(G));
        }
        cpu::matmul_backward_input(dinp.data(), dout.data(), weight.data(), shape.rows, shape.C,
                                   shape.OC, nullptr);
        cpu::matmul_backward_weight(dweight.data(), with_bias ? dbias.data() : nullptr, dout.data(),
                                    inp.data(), nullptr, shape.rows, shape.C, shape.OC, accumulate,
                                    nullptr);
        cuda_check(cudaDeviceSynchronize());
    }
    void expect_sound() {
        out.expect_written("out");
        dinp.expect_written("dinp");
        dweight.expect_written("dweight");
        dbias.expect_written("dbias");
        out.expect_guards_intact("out");
        dinp.expect_guards_intact("dinp");
        dweight.expect_guards_intact("dweight");
        dbias.expect_guards_intact("dbias");
    }
};

// Plain loops in double.
struct Plain {
    std::vector<double> out, dinp, dweight, dbias;

    template <class T, class G>
    Plain(Case<T, G>& c, bool with_bias, bool accumulate)
        : out(c.rows * c.OC), dinp(c.rows * c.C), dweight(c.OC * c.C), dbias(c.OC) {
        for (size_t o = 0; o < c.OC; ++o) {
            if (accumulate) dbias[o] = load(c.old_dbias[o]);
            for (size_t i = 0; i < c.C && accumulate; ++i) {
                dweight[o * c.C + i] = load(c.old_dweight[o * c.C + i]);
            }
        }
        for (size_t r = 0; r < c.rows; ++r) {
            for (size_t o = 0; o < c.OC; ++o) {
                const double d = load(c.dout[r * c.OC + o]);
                double sum = with_bias ? load(c.bias[o]) : 0.0;
                for (size_t i = 0; i < c.C; ++i) {
                    const double x = load(c.inp[r * c.C + i]), w = load(c.weight[o * c.C + i]);
                    sum += x * w;
                    dinp[r * c.C + i] += d * w;
                    dweight[o * c.C + i] += d * x;
                }
                out[r * c.OC + o] = sum;
                dbias[o] += d;
            }
        }
    }
};

template <class T, class G>
void compare_with_plain_loops(double bound) {
    for (const Shape& shape : kShapes) {
        for (const bool accumulate : {false, true}) {
            SCOPED_TRACE(name_of(shape) + (accumulate ? " accumulate" : " overwrite"));
            Case<T, G> c(shape);
            const Plain plain(c, !accumulate, accumulate);
            c.forward(!accumulate);
            c.backward(accumulate);
            c.expect_sound();
            EXPECT_LT(relative_error(c.out.data(), plain.out.data(), plain.out.size()), bound);
            EXPECT_LT(relative_error(c.dinp.data(), plain.dinp.data(), plain.dinp.size()), bound);
            EXPECT_LT(relative_error(c.dweight.data(), plain.dweight.data(), plain.dweight.size()),
                      bound);
            EXPECT_LT(relative_error(c.dbias.data(), plain.dbias.data(), plain.dbias.size()),
                      bound);
        }
    }
}

TEST(Matmul, DoubleEqualsPlainLoops) {
    compare_with_plain_loops<double, double>(1e-13);
}
TEST(Matmul, FloatIsWithinRounding) {
    compare_with_plain_loops<float, float>(2e-6);
}
TEST(Matmul, Bf16IsWithinOneRounding) {
    compare_with_plain_loops<bf16, bf16>(0x1.01p-8);  // half a unit in the last place
}
TEST(Matmul, Bf16WithFp32Gradients) {
    for (const Shape& shape : {Shape{64, 36, 108}, Shape{4200, 24, 31}, Shape{300, 300, 600}}) {
        for (const bool accumulate : {false, true}) {
            SCOPED_TRACE(name_of(shape));
            Case<bf16, float> c(shape);
            const Plain plain(c, true, accumulate);
            c.backward(accumulate);
            EXPECT_LT(relative_error(c.dweight.data(), plain.dweight.data(), plain.dweight.size()),
                      2e-6);
            EXPECT_LT(relative_error(c.dbias.data(), plain.dbias.data(), plain.dbias.size()), 2e-6);
        }
    }
}

// The derivative of f at *x, by differences of fourth order.
double central_difference(double* x, const std::function<double()>& f) {
    const double middle = *x, h = 1e-3;
    const auto at = [&](double offset) {
        *x = middle + offset;
        return f();
    };
    const double slope = (8.0 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12.0 * h);
    *x = middle;
    return slope;
}

// The loss is sum of dout * out^2 / 2, so that its gradient depends on the forward pass.
void check_gradient(Case<double>& c, Guarded<double>& input, const double* gradient, size_t count,
                    const std::vector<double>& coefficients) {
    const auto loss = [&] {
        c.forward();
        double total = 0.0;
        for (size_t i = 0; i < c.out.size(); ++i) {
            total += 0.5 * coefficients[i] * c.out[i] * c.out[i];
        }
        return total;
    };
    std::vector<double> expected, actual;
    for (size_t i = 0; i < count; i += 1 + count / 150) {
        expected.push_back(central_difference(&input[i], loss));
        actual.push_back(gradient[i]);
    }
    EXPECT_LT(relative_error(actual.data(), expected.data(), actual.size()), 1e-9);
}

TEST(Matmul, GradientsEqualFiniteDifferences) {
    for (const Shape& shape : {Shape{3, 5, 4}, Shape{7, 36, 19}, Shape{5, 3, 4100}}) {
        SCOPED_TRACE(name_of(shape));
        Case<double> c(shape);
        const std::vector<double> coefficients(c.dout.data(), c.dout.data() + c.dout.size());
        c.forward();
        for (size_t i = 0; i < c.out.size(); ++i) c.dout[i] = coefficients[i] * c.out[i];
        c.backward(false);
        check_gradient(c, c.inp, c.dinp, c.rows * c.C, coefficients);
        check_gradient(c, c.weight, c.dweight, c.OC * c.C, coefficients);
        check_gradient(c, c.bias, c.dbias, c.OC, coefficients);
    }
}

// Small integers: every product and sum is exact in fp32, so each output has one right value.
template <class T>
void fill_integers(Guarded<T>& data, uint32_t stream) {
    for (size_t i = 0; i < data.size(); ++i) {
        const uint32_t bits = random_bits32(7, RandomPurpose::kTest, stream, i);
        data[i] = store<T>(static_cast<accum_t<T>>(static_cast<int>(bits % 15) - 7));
    }
}

TEST(Matmul, Bf16RoundsTheExactSumOnce) {
    for (const Shape& shape : {Shape{200, 50, 70}, Shape{4200, 24, 31}, Shape{40, 700, 600}}) {
        SCOPED_TRACE(name_of(shape));
        Case<bf16> c(shape);
        fill_integers(c.inp, 11);
        fill_integers(c.weight, 12);
        fill_integers(c.bias, 13);
        fill_integers(c.dout, 14);
        for (size_t i = 0; i < c.old_dweight.size(); ++i) {
            c.old_dweight[i] = store<bf16>(static_cast<float>(static_cast<int>(i % 2001) - 1000));
        }
        for (size_t i = 0; i < c.old_dbias.size(); ++i) {
            c.old_dbias[i] = store<bf16>(static_cast<float>(static_cast<int>(37 * i % 255) - 127));
        }
        const Plain plain(c, true, true), fresh(c, false, false);
        c.forward();
        c.backward(true);
        size_t wrong = 0, shows = 0;
        const auto compare = [&](const bf16* actual, const std::vector<double>& exact) {
            for (size_t i = 0; i < exact.size(); ++i) {
                wrong += load(actual[i]) != load(store<bf16>(static_cast<float>(exact[i])));
            }
        };
        compare(c.out, plain.out);
        compare(c.dinp, plain.dinp);
        compare(c.dweight, plain.dweight);
        compare(c.dbias, plain.dbias);
        EXPECT_EQ(wrong, 0u);
        // Rounding the product before the old gradient is added would be seen.
        for (size_t i = 0; i < fresh.dweight.size(); ++i) {
            const float twice =
                load(store<bf16>(static_cast<float>(fresh.dweight[i]))) + load(c.old_dweight[i]);
            shows += load(store<bf16>(twice)) != load(c.dweight[i]);
        }
        EXPECT_GT(shows, 0u);
    }
}

TEST(Matmul, WithoutBias) {
    Case<float> c({70, 36, 90});
    c.forward(false);
    const Plain plain(c, false, false);
    EXPECT_LT(relative_error(c.out.data(), plain.out.data(), plain.out.size()), 2e-6);
    c.backward(false, false);
    c.dweight.expect_written("dweight");
    EXPECT_TRUE(std::isnan(c.dbias[0])) << "dbias was null but is written";
    // A literal null has no type to deduce from.
    cpu::matmul_forward(c.out.data(), c.inp.data(), c.weight.data(), nullptr, 70, 36, 90, nullptr);
    cuda_check(cudaDeviceSynchronize());
}

TEST(Matmul, BiasGradientOfManyRowsIsAccurate) {
    Case<float> c({40000, 1, 3});
    for (size_t i = 0; i < c.dout.size(); ++i) c.dout[i] = 0.1f;
    c.backward(false);
    for (size_t o = 0; o < 3; ++o) EXPECT_NEAR(c.dbias[o] / (0.1f * 40000.0f), 1.0f, 1e-5f);
}

TEST(Matmul, RefusesShapesThatAreNotPositive) {
    Case<float> c({2, 3, 4});
    EXPECT_THROW(cpu::matmul_forward(c.out.data(), c.inp.data(), c.weight.data(), c.bias.data(), 0,
                                     3, 4, nullptr),
                 Error);
    EXPECT_THROW(cpu::matmul_backward_input(c.dinp.data(), c.dout.data(), c.weight.data(), 2, -3, 4,
                                            nullptr),
                 Error);
    EXPECT_THROW(cpu::matmul_backward_weight(c.dweight.data(), c.dbias.data(), c.dout.data(),
                                             c.inp.data(), nullptr, 2, 3, 0, false, nullptr),
                 Error);
    EXPECT_THROW(cpu::matmul_gelu_forward(c.out.data(), c.out.data(), c.inp.data(), c.weight.data(),
                                          c.bias.data(), 2, 0, 4, true, nullptr),
                 Error);
    EXPECT_THROW(cpu::matmul_gelu_backward_input(c.dinp.data(), c.dout.data(), c.weight.data(),
                                                 c.inp.data(), 2, 3, -4, true, nullptr),
                 Error);
}

// GELU behind the product forward, its derivative behind the product backward.
template <class T>
struct GeluCase : Case<T> {
    Guarded<T> pre{this->rows * this->OC}, pre_of_dinp{this->rows * this->C};

    explicit GeluCase(const Shape& s) : Case<T>(s) { fill(pre_of_dinp, 7); }
    void forward(bool fuse) {
        this->out.poison();
        pre.poison();
        cpu::matmul_gelu_forward(this->out.data(), pre.data(), this->inp.data(),
                                 this->weight.data(), this->bias.data(), this->shape.rows,
                                 this->shape.C, this->shape.OC, fuse, nullptr);
        cuda_check(cudaDeviceSynchronize());
    }
    void backward(bool fuse) {
        this->dinp.poison();
        cpu::matmul_gelu_backward_input(this->dinp.data(), this->dout.data(), this->weight.data(),
                                        pre_of_dinp.data(), this->shape.rows, this->shape.C,
                                        this->shape.OC, fuse, nullptr);
        cuda_check(cudaDeviceSynchronize());
    }
};

template <class T>
void compare_gelu_with_plain_loops(double bound) {
    for (const Shape& shape : {Shape{1, 1, 1}, Shape{64, 36, 108}, Shape{257, 128, 513}}) {
        for (const bool fuse : {false, true}) {
            SCOPED_TRACE(name_of(shape));
            GeluCase<T> c(shape);
            Plain plain(c, true, false);
            c.forward(fuse);
            c.backward(fuse);
            c.out.expect_guards_intact("out");
            c.pre.expect_guards_intact("pre");
            c.dinp.expect_guards_intact("dinp");
            const size_t outputs = plain.out.size(), inputs = plain.dinp.size();
            EXPECT_LT(relative_error(c.pre.data(), plain.out.data(), outputs), bound);
            for (double& x : plain.out) x = cpu::gelu_value(x);
            EXPECT_LT(relative_error(c.out.data(), plain.out.data(), outputs), bound);
            for (size_t i = 0; i < inputs; ++i) {
                plain.dinp[i] *= cpu::gelu_derivative(static_cast<double>(load(c.pre_of_dinp[i])));
            }
            EXPECT_LT(relative_error(c.dinp.data(), plain.dinp.data(), inputs), bound);
        }
    }
}

TEST(Matmul, GeluBehindAProductEqualsPlainLoops) {
    compare_gelu_with_plain_loops<double>(1e-12);
    compare_gelu_with_plain_loops<float>(2e-6);
    compare_gelu_with_plain_loops<bf16>(1e-2);
}

TEST(Matmul, GeluBehindAProductSeesRoundedSums) {
    GeluCase<bf16> c({70, 40, 96});
    std::vector<bf16> apart(c.rows * c.OC);
    for (const bool fuse : {false, true}) {
        c.forward(fuse);
        Case<bf16>& product = c;
        const std::vector<bf16> out(c.out.data(), c.out.data() + c.out.size());
        product.forward();
        EXPECT_TRUE(test::same_bits(c.pre.data(), product.out.data(), out.size()));
        cpu::gelu_forward(apart.data(), c.pre.data(), apart.size(), nullptr);
        cuda_check(cudaDeviceSynchronize());
        EXPECT_TRUE(test::same_bits(out.data(), apart.data(), out.size()));
    }
    EXPECT_EQ(cpu::matmul_gelu_fusion(2, 70, 40, 96), 0);
}

// All bits of all products at shapes with several blocks and with cut sums.
template <class T>
void add_products(Fingerprint& fingerprint) {
    for (const Shape& shape : {Shape{300, 700, 1100}, Shape{8, 24, 40000}, Shape{4200, 130, 31}}) {
        Case<T> c(shape);
        c.forward();
        c.backward(true);
        fingerprint.add(c.out.data(), c.out.size() * sizeof(T));
        fingerprint.add(c.dinp.data(), c.dinp.size() * sizeof(T));
        fingerprint.add(c.dweight.data(), c.dweight.size() * sizeof(T));
        fingerprint.add(c.dbias.data(), c.dbias.size() * sizeof(T));
    }
}
std::string fingerprint_of_products() {
    Fingerprint fingerprint;
    add_products<float>(fingerprint);
    add_products<bf16>(fingerprint);
    return std::to_string(cpu::usable_cores() == 1) + " " + fingerprint.text();
}
const test::ChildMode products_mode("matmul_bits", fingerprint_of_products);

TEST(Matmul, SameBitsRunToRun) {
    EXPECT_EQ(fingerprint_of_products(), fingerprint_of_products());
}

TEST(Matmul, SameBitsOnOneCoreAndOnSeveral) {
    if (cpu::usable_cores() < 2) GTEST_SKIP() << "one core";
    const std::string several = fingerprint_of_products();
    ASSERT_EQ(several[0], '0');
    EXPECT_EQ(test::run_again("matmul_bits", {{}, true}), "1" + several.substr(1));
}

TEST(Matmul, BlocksAreManyEnoughForSeveralCores) {
    using cpu::matmul_detail::choose_blocking;
    EXPECT_GE(choose_blocking(256, 50304, 128).tiles(), 16u);
    EXPECT_GE(choose_blocking(256, 128, 50304).pieces, 16u);
    EXPECT_EQ(choose_blocking(256, 128, 128).pieces, 1u);
    EXPECT_GE(choose_blocking(256, 128, 128).tiles(), 2u);
    for (const Shape& s : kShapes) {
        const auto cut = choose_blocking(s.rows, s.OC, s.C);
        EXPECT_GE(cut.depth * cut.pieces, static_cast<size_t>(s.C));
        EXPECT_LT(cut.depth * (cut.pieces - 1), static_cast<size_t>(s.C));
    }
}

}  // namespace
