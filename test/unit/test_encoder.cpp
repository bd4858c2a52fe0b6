#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "guarded.h"
#include "llmc/cpu/encoder.h"
#include "twin_checks.h"

using namespace llmc;
using namespace llmc::test;

namespace {

struct Shape {
    int B, T, C;
};
const Shape kShapes[] = {{1, 1, 1},    {2, 3, 5},    {1, 67, 36},
                         {4, 1, 1600}, {3, 17, 129}, {5, 40, 257}};
constexpr int kVocab = 50;
constexpr int kMaxT = 70;

// Tokens 2 ... kVocab-3, so that some rows of wte are named by none, and their sorted order.
struct Batch {
    explicit Batch(Shape shape) : tokens(static_cast<size_t>(shape.B) * shape.T) {
        for (size_t i = 0; i < tokens.size(); ++i) {
            const uint32_t bits = random_bits32(7, RandomPurpose::kTest, 0, i);
            tokens[i] = 2 + static_cast<int>(bits % (kVocab - 4));
        }
        sort();
    }
    void sort() {
        order.resize(tokens.size());
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [this](int a, int b) { return tokens[a] < tokens[b]; });
    }
    bool names(int token) const {
        return std::find(tokens.begin(), tokens.end(), token) != tokens.end();
    }
    std::vector<int> tokens, order;
};

template <class T>
void expect_forward_rounded_once() {
    for (const Shape s : kShapes) {
        const Batch batch(s);
        const size_t C = s.C, rows = batch.tokens.size();
        Guarded<T> wte(kVocab * C), wpe(kMaxT * C), out(rows * C);
        fill_normal(wte.data(), wte.size(), 1);
        fill_normal(wpe.data(), wpe.size(), 2);
        cpu::encoder_forward<T>(out, batch.tokens.data(), wte, wpe, s.B, s.T, s.C, nullptr);
        cuda_check(cudaDeviceSynchronize());
        std::vector<T> expected(rows * C);
        for (size_t i = 0; i < rows * C; ++i) {
            const size_t t = i / C % s.T, token = batch.tokens[i / C], c = i % C;
            expected[i] = rounded<T>(double(load(wte[token * C + c])) + load(wpe[t * C + c]));
        }
        EXPECT_TRUE(same_bits(out.data(), expected.data(), rows * C)) << rows << " x " << C;
        out.expect_guards_intact("out");
    }
}

TEST(Encoder, ForwardIsRoundedOnce) {
    expect_forward_rounded_once<float>();
    expect_forward_rounded_once<bf16>();
    expect_forward_rounded_once<double>();
}

// The gradients that the contract asks for, element by element: a sum in the accumulator's type in
// ascending order of position, added to `old` in the same type, rounded once.
template <class T, class G>
void expected_gradients(std::vector<G>& dwte, std::vector<G>& dwpe, const T* dout, const Batch& in,
                        Shape s, bool accumulate) {
    const size_t C = s.C, length = s.T;
    for (size_t row = 0; row < static_cast<size_t>(kVocab); ++row) {
        if (!in.names(static_cast<int>(row))) continue;
        for (size_t c = 0; c < C; ++c) {
            volatile accum_t<T> total = 0;
            for (size_t i = 0; i < in.tokens.size(); ++i) {
                if (in.tokens[i] == static_cast<int>(row)) total = total + load(dout[i * C + c]);
            }
            dwte[row * C + c] = store<G>(load(dwte[row * C + c]) + total);
        }
    }
    for (size_t i = 0; i < length * C; ++i) {
        volatile accum_t<T> total = 0;
        for (int b = 0; b < s.B; ++b) total = total + load(dout[b * length * C + i]);
        dwpe[i] = store<G>(accumulate ? load(dwpe[i]) + total : total);
    }
}

// Rows that no token names, and rows of wpe from T on, are NaN before and must still be after.
template <class T, class G>
void expect_backward_exact(bool accumulate) {
    for (const Shape s : kShapes) {
        const Batch in(s);
        const size_t C = s.C, rows = in.tokens.size();
        Guarded<G> dwte(kVocab * C), dwpe(kMaxT * C);
        Guarded<T> dout(rows * C);
        Guarded<char> scratch(cpu::encoder_backward_scratch_bytes(s.B, s.T, s.C));
        fill_normal(dout.data(), dout.size(), 1);
        for (int row = 0; row < kVocab; ++row) {
            if (in.names(row)) fill_normal(dwte.data() + row * C, C, 100 + row);
        }
        if (accumulate) fill_normal(dwpe.data(), s.T * C, 2);
        std::vector<G> wte_expected(dwte.data(), dwte.data() + dwte.size());
        std::vector<G> wpe_expected(dwpe.data(), dwpe.data() + dwpe.size());
        expected_gradients(wte_expected, wpe_expected, dout.data(), in, s, accumulate);
        cpu::encoder_backward<T, G>(dwte, dwpe, dout, in.tokens.data(), in.order.data(), scratch,
                                    s.B, s.T, s.C, accumulate, nullptr);
        cuda_check(cudaDeviceSynchronize());
        EXPECT_TRUE(same_bits(dwte.data(), wte_expected.data(), dwte.size())) << rows << "x" << C;
        EXPECT_TRUE(same_bits(dwpe.data(), wpe_expected.data(), dwpe.size())) << rows << "x" << C;
        dwte.expect_guards_intact("dwte");
        dwpe.expect_guards_intact("dwpe");
    }
}

TEST(Encoder, BackwardBitsAndUntouchedRows) {
    for (bool accumulate : {false, true}) {
        expect_backward_exact<float, float>(accumulate);
        expect_backward_exact<bf16, bf16>(accumulate);
        expect_backward_exact<bf16, float>(accumulate);
        expect_backward_exact<double, double>(accumulate);
    }
}

TEST(Encoder, BackwardMatchesFiniteDifferences) {
    const Shape s{2, 5, 7};
    const Batch in(s);
    const size_t count = in.tokens.size() * s.C, wte_count = kVocab * s.C, wpe_count = kMaxT * s.C;
    std::vector<double> wte(wte_count), wpe(wpe_count), out(count), dout(count);
    std::vector<double> dwte(wte_count, 0.0), dwpe(wpe_count, 0.0);
    fill_normal(wte.data(), wte_count, 1);
    fill_normal(wpe.data(), wpe_count, 2);
    fill_normal(dout.data(), count, 3);
    cpu::encoder_backward(dwte.data(), dwpe.data(), dout.data(), in.tokens.data(), in.order.data(),
                          nullptr, s.B, s.T, s.C, false, nullptr);
    const auto f = [&] {
        cpu::encoder_forward(out.data(), in.tokens.data(), wte.data(), wpe.data(), s.B, s.T, s.C,
                             nullptr);
        cuda_check(cudaDeviceSynchronize());
        double total = 0.0;
        for (size_t i = 0; i < count; ++i) total += out[i] * dout[i];
        return total;
    };
    const std::vector<double> wte_slopes = slopes(wte.data(), wte_count, f);
    const std::vector<double> wpe_slopes = slopes(wpe.data(), wpe_count, f);
    EXPECT_LT(relative_error(dwte.data(), wte_slopes.data(), wte_count), 1e-9);
    EXPECT_LT(relative_error(dwpe.data(), wpe_slopes.data(), wpe_count), 1e-9);
}

// llm.c#442: a batch of nothing but one token took its slow path, and its atomics gave other bits
// each time.
TEST(Encoder, OneRepeatedTokenTwiceGivesTheSameBits_llmc442) {
    const Shape s{8, 64, 300};
    Batch in(s);
    std::fill(in.tokens.begin(), in.tokens.end(), 7);
    in.sort();
    std::vector<float> dout(in.tokens.size() * s.C);
    fill_normal(dout.data(), dout.size(), 1);
    std::vector<float> expected_wte(kVocab * s.C, 0.25f), expected_wpe(kMaxT * s.C, 0.0f);
    expected_gradients(expected_wte, expected_wpe, dout.data(), in, s, false);
    for (int run = 0; run < 2; ++run) {
        std::vector<float> dwte(kVocab * s.C, 0.25f), dwpe(kMaxT * s.C, 0.0f);
        cpu::encoder_backward(dwte.data(), dwpe.data(), dout.data(), in.tokens.data(),
                              in.order.data(), nullptr, s.B, s.T, s.C, false, nullptr);
        cuda_check(cudaDeviceSynchronize());
        EXPECT_TRUE(same_bits(dwte.data(), expected_wte.data(), dwte.size())) << "run " << run;
        EXPECT_TRUE(same_bits(dwpe.data(), expected_wpe.data(), dwpe.size())) << "run " << run;
    }
}

TEST(Encoder, RefusesEmptyShapes) {
    float x = 0.0f;
    const int zero = 0;
    EXPECT_THROW(cpu::encoder_forward(&x, &zero, &x, &x, 0, 1, 1, nullptr), Error);
    EXPECT_THROW(cpu::encoder_forward(&x, &zero, &x, &x, 1, -1, 1, nullptr), Error);
    EXPECT_THROW(cpu::encoder_backward(&x, &x, &x, &zero, &zero, nullptr, 1, 1, 0, false, nullptr),
                 Error);
}

TEST(Encoder, SameBitsOnOneAndTwoCores) {
    expect_same_bits_on_one_and_two_cores([] {
        const Shape s{4, 64, 600};
        const Batch in(s);
        const size_t count = in.tokens.size() * s.C;
        std::vector<float> wte(kVocab * s.C), wpe(kMaxT * s.C), out(count);
        fill_normal(wte.data(), wte.size(), 1);
        fill_normal(wpe.data(), wpe.size(), 2);
        cpu::encoder_forward(out.data(), in.tokens.data(), wte.data(), wpe.data(), s.B, s.T, s.C,
                             nullptr);
        cpu::encoder_backward(wte.data(), wpe.data(), out.data(), in.tokens.data(), in.order.data(),
                              nullptr, s.B, s.T, s.C, true, nullptr);
        cuda_check(cudaDeviceSynchronize());
        Hash hash;
        hash.add(out.data(), count);
        hash.add(wte.data(), wte.size());
        hash.add(wpe.data(), wpe.size());
        return hash.value();
    });
}

}  // namespace
