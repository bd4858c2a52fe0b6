// The attention twins against a plain computation, finite differences, and against themselves.

#include "llmc/cpu/attention.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "test/unit/child_process.h"
#include "test/unit/guarded.h"

namespace {

using namespace llmc;
using llmc::test::fill_normal;
using llmc::test::Fingerprint;
using llmc::test::Guarded;
using llmc::test::relative_error;

struct Shape {
    int B, T, C, NH;
};

// One strip of queries, several, and edges; head sizes 1 to 64.
const Shape kShapes[] = {
    {1, 1, 1, 1},   {1, 1, 36, 3},   {2, 5, 36, 3},   {4, 64, 128, 4},
    {1, 65, 36, 4}, {3, 131, 10, 2}, {1, 63, 64, 64}, {1, 70, 1600, 25},
};

std::string name_of(const Shape& s) {
    return "B " + std::to_string(s.B) + " T " + std::to_string(s.T) + " C " + std::to_string(s.C) +
           " NH " + std::to_string(s.NH);
}

template <class X>
struct Case {
    using A = accum_t<X>;
    Shape shape;
    size_t B = shape.B, T = shape.T, C = shape.C, NH = shape.NH, HS = C / NH;
    Guarded<X> qkv{B * T * 3 * C}, out{B * T * C}, dout{B * T * C}, dqkv{B * T * 3 * C};
    Guarded<A> lse{B * NH * T};

    explicit Case(const Shape& s) : shape(s) {
        fill_normal<X>(qkv, qkv.size(), 1);
        fill_normal<X>(dout, dout.size(), 2);
    }
    void forward() {
        out.poison();
        lse.poison();
        cpu::attention_forward(out.data(), lse.data(), qkv.data(), nullptr, shape.B, shape.T,
                               shape.C, shape.NH, nullptr);
        cuda_check(cudaDeviceSynchronize());
    }
    void backward() {
        dqkv.poison();
        cpu::attention_backward(dqkv.data(), dout.data(), qkv.data(), out.data(), lse.data(),
                                nullptr, shape.B, shape.T, shape.C, shape.NH, nullptr);
        cuda_check(cudaDeviceSynchronize());
    }
    void expect_sound() {
        out.expect_written("out");
        lse.expect_written("lse");
        dqkv.expect_written("dqkv");
        out.expect_guards_intact("out");
        lse.expect_guards_intact("lse");
        dqkv.expect_guards_intact("dqkv");
    }
    // Place in qkv of an element of q (part 0), k (1) or v (2).
    size_t at(size_t b, size_t t, size_t part, size_t head, size_t i) const {
        return ((b * T + t) * 3 + part) * C + head * HS + i;
    }
};

// One row of probabilities after the other, in double. With `largest` subtracted no exp overflows.
struct Plain {
    std::vector<double> out, lse;

    template <class X>
    explicit Plain(Case<X>& c) : out(c.B * c.T * c.C), lse(c.B * c.NH * c.T) {
        for (size_t b = 0; b < c.B; ++b) {
            for (size_t h = 0; h < c.NH; ++h) {
                for (size_t t = 0; t < c.T; ++t) row(c, b, h, t);
            }
        }
    }
    template <class X>
    void row(Case<X>& c, size_t b, size_t h, size_t t) {
        std::vector<double> p(t + 1);
        double largest = -std::numeric_limits<double>::infinity(), total = 0.0;
        for (size_t j = 0; j <= t; ++j) {
            for (size_t i = 0; i < c.HS; ++i) {
                p[j] += static_cast<double>(load(c.qkv[c.at(b, t, 0, h, i)])) *
                        static_cast<double>(load(c.qkv[c.at(b, j, 1, h, i)]));
            }
            p[j] /= std::sqrt(static_cast<double>(c.HS));
            largest = std::max(largest, p[j]);
        }
        for (double& value : p) total += value = std::exp(value - largest);
        lse[(b * c.NH + h) * c.T + t] = largest + std::log(total);
        for (size_t j = 0; j <= t; ++j) {
            for (size_t i = 0; i < c.HS; ++i) {
                out[(b * c.T + t) * c.C + h * c.HS + i] +=
                    p[j] / total * static_cast<double>(load(c.qkv[c.at(b, j, 2, h, i)]));
            }
        }
    }
};

template <class X>
void compare_forward(double bound, double lse_bound) {
    for (const Shape& shape : kShapes) {
        SCOPED_TRACE(name_of(shape));
        Case<X> c(shape);
        const Plain plain(c);
        c.forward();
        c.backward();
        c.expect_sound();
        EXPECT_LT(relative_error(c.out.data(), plain.out.data(), plain.out.size()), bound);
        EXPECT_LT(relative_error(c.lse.data(), plain.lse.data(), plain.lse.size()), lse_bound);
    }
}

TEST(Attention, DoubleForwardEqualsPlainComputation) {
    compare_forward<double>(1e-13, 1e-13);
}
TEST(Attention, FloatForwardIsWithinRounding) {
    compare_forward<float>(2e-6, 2e-6);
}
TEST(Attention, Bf16ForwardIsWithinOneRounding) {
    compare_forward<bf16>(0x1.01p-8, 2e-6);
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

TEST(Attention, GradientEqualsFiniteDifferences) {
    for (const Shape& shape :
         {Shape{2, 5, 12, 2}, Shape{1, 1, 4, 1}, Shape{2, 67, 36, 3}, Shape{1, 130, 64, 1}}) {
        Case<double> c(shape);
        const auto loss = [&] {
            c.forward();
            return cpu::dot(c.out.data(), c.dout.data(), c.out.size());
        };
        c.forward();
        c.backward();
        for (size_t part = 0; part < 3; ++part) {
            SCOPED_TRACE(name_of(shape) + " part " + "qkv"[part]);
            std::vector<double> expected, actual;
            const size_t count = c.B * c.T * c.C;
            for (size_t n = 0; n < count; n += 1 + count / 120) {
                const size_t i = n / c.C * 3 * c.C + part * c.C + n % c.C;
                expected.push_back(central_difference(&c.qkv[i], loss));
                actual.push_back(c.dqkv[i]);
            }
            if (c.T == 1 && part < 2) {
                for (double value : actual) EXPECT_NEAR(value, 0.0, 1e-14);
            } else {
                EXPECT_LT(relative_error(actual.data(), expected.data(), actual.size()), 1e-9);
            }
        }
    }
}

// Error of dq, dk and dv of the type X against the double twin on the same numbers.
template <class X>
void compare_backward(double bound) {
    for (const Shape& shape : kShapes) {
        SCOPED_TRACE(name_of(shape));
        Case<X> c(shape);
        Case<double> exact(shape);
        for (size_t i = 0; i < c.qkv.size(); ++i) exact.qkv[i] = load(c.qkv[i]);
        for (size_t i = 0; i < c.dout.size(); ++i) exact.dout[i] = load(c.dout[i]);
        c.forward();
        c.backward();
        exact.forward();
        exact.backward();
        for (size_t part = shape.T == 1 ? 2 : 0; part < 3; ++part) {
            std::vector<double> a, b;
            for (size_t i = 0; i < c.dqkv.size(); ++i) {
                if (i / c.C % 3 != part) continue;
                a.push_back(load(c.dqkv[i]));
                b.push_back(exact.dqkv[i]);
            }
            EXPECT_LT(relative_error(a.data(), b.data(), a.size()), bound) << "qkv"[part];
        }
    }
}

TEST(Attention, FloatGradientIsNearDouble) {
    compare_backward<float>(5e-6);
}
TEST(Attention, Bf16GradientIsNearDouble) {
    compare_backward<bf16>(1e-2);
}

TEST(Attention, OneTokenSeesItself) {
    Case<float> c({2, 1, 36, 3});
    c.forward();
    c.backward();
    for (size_t b = 0; b < c.B; ++b) {
        for (size_t i = 0; i < c.C; ++i) {
            EXPECT_EQ(c.out[b * c.C + i], c.qkv[c.at(b, 0, 2, 0, i)]);
            EXPECT_EQ(c.dqkv[c.at(b, 0, 2, 0, i)], c.dout[b * c.C + i]);
        }
    }
}

TEST(Attention, ScoresWhoseExpOverflowsGiveFiniteResults) {
    for (const double scale : {40.0, 1e4}) {
        SCOPED_TRACE(scale);
        Case<double> c({1, 90, 24, 2});
        fill_normal<double>(c.qkv, c.qkv.size(), 3, scale);
        const Plain plain(c);
        c.forward();
        c.backward();
        c.expect_sound();
        EXPECT_LT(relative_error(c.out.data(), plain.out.data(), plain.out.size()), 1e-6);
        double largest = 0.0;
        for (double value : plain.lse) largest = std::max(largest, value);
        EXPECT_GT(largest, 710.0) << "the scores are too small for this test";

        Case<float> f({1, 90, 24, 2});
        for (size_t i = 0; i < f.qkv.size(); ++i) {
            const bool is_value = i / f.C % 3 == 2;
            f.qkv[i] = is_value ? 1.0f : static_cast<float>(c.qkv[i]);
        }
        f.forward();
        f.backward();
        f.expect_sound();
        for (size_t i = 0; i < f.out.size(); ++i) ASSERT_NEAR(f.out[i], 1.0f, 2e-6f);
    }
}

template <class X>
void change_later_tokens() {
    for (const size_t from : {1, 40, 64, 100, 140}) {
        Case<X> before({2, 141, 36, 3}), after({2, 141, 36, 3});
        for (size_t b = 0; b < after.B; ++b) {
            for (size_t i = from * 3 * after.C; i < after.T * 3 * after.C; ++i) {
                X& element = after.qkv[b * after.T * 3 * after.C + i];
                element = store<X>(load(element) * accum_t<X>(-3) + accum_t<X>(50));
            }
        }
        before.forward();
        after.forward();
        size_t changed_early = 0, changed_late = 0;
        for (size_t i = 0; i < before.out.size(); ++i) {
            const bool changed = std::memcmp(&before.out[i], &after.out[i], sizeof(X)) != 0;
            (i / before.C % before.T < from ? changed_early : changed_late) += changed;
        }
        for (size_t i = 0; i < before.lse.size(); ++i) {
            const bool changed =
                std::memcmp(&before.lse[i], &after.lse[i], sizeof(accum_t<X>)) != 0;
            (i % before.T < from ? changed_early : changed_late) += changed;
        }
        EXPECT_EQ(changed_early, 0u) << "from token " << from;
        EXPECT_GT(changed_late, 0u) << "from token " << from;
    }
}

TEST(Attention, LaterTokensChangeNoEarlierBit) {
    change_later_tokens<float>();
    change_later_tokens<bf16>();
    change_later_tokens<double>();
}

TEST(Attention, EarlierQueriesChangeNoLaterKeysGradient) {
    for (const size_t from : {1, 64, 100}) {
        Case<float> before({2, 141, 36, 3}), after({2, 141, 36, 3});
        for (size_t b = 0; b < after.B; ++b) {
            for (size_t i = 0; i < from * after.C; ++i) after.dout[b * after.T * after.C + i] *= -2;
        }
        before.forward();
        after.forward();
        before.backward();
        after.backward();
        size_t changed = 0;
        for (size_t i = 0; i < before.dqkv.size(); ++i) {
            const bool late = i / (3 * before.C) % before.T >= from;
            changed += late && std::memcmp(&before.dqkv[i], &after.dqkv[i], sizeof(float)) != 0;
        }
        EXPECT_EQ(changed, 0u) << "up to token " << from;
    }
}

TEST(Attention, HeadsAndBatchRowsDoNotMix) {
    Case<float> before({2, 70, 36, 3}), after({2, 70, 36, 3});
    for (size_t t = 0; t < after.T; ++t) {
        for (size_t part = 0; part < 3; ++part) {
            for (size_t i = 0; i < after.HS; ++i) after.qkv[after.at(1, t, part, 2, i)] += 1.0f;
        }
    }
    for (Case<float>* c : {&before, &after}) {
        c->forward();
        c->backward();
    }
    for (size_t i = 0; i < before.dqkv.size(); ++i) {
        const bool same_head = i / (before.T * 3 * before.C) == 1 && i % before.C / before.HS == 2;
        if (same_head) continue;
        ASSERT_EQ(before.dqkv[i], after.dqkv[i]) << i;
    }
}

TEST(Attention, NotANumberReachesTheOutput) {
    Case<float> c({1, 70, 8, 1});
    c.qkv[c.at(0, 3, 1, 0, 2)] = std::numeric_limits<float>::quiet_NaN();
    c.forward();
    for (size_t i = 0; i < 3 * c.C; ++i) EXPECT_FALSE(std::isnan(c.out[i]));
    for (size_t i = 3 * c.C; i < c.out.size(); ++i) ASSERT_TRUE(std::isnan(c.out[i])) << i;
}

TEST(Attention, RefusesShapesThatDoNotFit) {
    Case<float> c({1, 2, 36, 3});
    const auto forward = [&](int B, int T, int C, int NH) {
        cpu::attention_forward(c.out.data(), c.lse.data(), c.qkv.data(), nullptr, B, T, C, NH,
                               nullptr);
    };
    EXPECT_THROW(forward(1, 2, 36, 5), Error);
    EXPECT_THROW(forward(0, 2, 36, 3), Error);
    EXPECT_THROW(forward(1, -1, 36, 3), Error);
    EXPECT_THROW(forward(1, 2, 36, 0), Error);
    EXPECT_THROW(cpu::attention_backward(c.dqkv.data(), c.dout.data(), c.qkv.data(), c.out.data(),
                                         c.lse.data(), nullptr, 1, 2, 35, 3, nullptr),
                 Error);
}

template <class X>
void add_attention(Fingerprint& fingerprint) {
    for (const Shape& shape : {Shape{2, 141, 36, 3}, Shape{1, 64, 128, 4}}) {
        Case<X> c(shape);
        c.forward();
        c.backward();
        fingerprint.add(c.out.data(), c.out.size() * sizeof(X));
        fingerprint.add(c.lse.data(), c.lse.size() * sizeof(accum_t<X>));
        fingerprint.add(c.dqkv.data(), c.dqkv.size() * sizeof(X));
    }
}
std::string fingerprint_of_attention() {
    Fingerprint fingerprint;
    add_attention<float>(fingerprint);
    add_attention<bf16>(fingerprint);
    return std::to_string(cpu::usable_cores() == 1) + " " + fingerprint.text();
}
const test::ChildMode attention_mode("attention_bits", fingerprint_of_attention);

TEST(Attention, SameBitsRunToRun) {
    EXPECT_EQ(fingerprint_of_attention(), fingerprint_of_attention());
}

TEST(Attention, SameBitsOnOneCoreAndOnSeveral) {
    if (cpu::usable_cores() < 2) GTEST_SKIP() << "one core";
    const std::string several = fingerprint_of_attention();
    ASSERT_EQ(several[0], '0');
    EXPECT_EQ(test::run_again("attention_bits", {{}, true}), "1" + several.substr(1));
}

}  // namespace
