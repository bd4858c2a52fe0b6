#include <algorithm>
#include <numeric>

#include "llmc/cpu/encoder.h"
#include "llmc/encoder.cuh"
#include "test/gpu/gpu_checks.h"

namespace {

using namespace llmc;
using namespace llmc::test;

struct Shape {
    int B, T, C;
};
// The CPU tests', then d12's and d48's channels.
const Shape kShapes[] = {{1, 1, 1},    {2, 3, 5},     {1, 67, 36},   {4, 1, 1600},  {3, 17, 129},
                         {5, 40, 257}, {3, 320, 768}, {2, 65, 3072}, {2, 200, 1600}};
constexpr int kMaxT = 1030;

std::vector<int> sorted_order(const std::vector<int>& tokens) {
    std::vector<int> order(tokens.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return tokens[a] < tokens[b]; });
    return order;
}

// Of 2 ... vocab-3, so that some rows of wte are named by none.
std::vector<int> some_tokens(Shape s, int vocab) {
    std::vector<int> tokens(static_cast<size_t>(s.B) * s.T);
    for (size_t i = 0; i < tokens.size(); ++i) {
        const uint32_t bits = random_bits32(7, RandomPurpose::kTest, 0, i);
        tokens[i] = 2 + static_cast<int>(bits % static_cast<uint32_t>(vocab - 4));
    }
    return tokens;
}

TEST(GpuEncoder, ForwardHasTheTwinsBits) {
    const int vocab = 50;
    for (const Shape s : kShapes) {
        const std::vector<int> tokens = some_tokens(s, vocab);
        const size_t count = tokens.size() * s.C;
        const auto wte = normal_values<floatX>(static_cast<size_t>(vocab) * s.C, 1);
        const auto wpe = normal_values<floatX>(static_cast<size_t>(kMaxT) * s.C, 2);
        std::vector<floatX> expected(count);
        cpu::encoder_forward(expected.data(), tokens.data(), wte.data(), wpe.data(), s.B, s.T, s.C,
                             nullptr);
        for (const size_t offset : {0, 1}) {
            DeviceGuarded<floatX> device_wte(wte, offset), device_wpe(wpe, offset),
                out(count, offset);
            DeviceGuarded<int> device_tokens(tokens);
            encoder_forward(out.get(), device_tokens.get(), device_wte.get(), device_wpe.get(), s.B,
                            s.T, s.C, nullptr);
            EXPECT_TRUE(same_bits(out.download(), expected)) << s.B << " " << s.T << " " << s.C;
            out.expect_guards_intact("out");
        }
    }
}

// One backward pass on the GPU.
struct Gradients {
    Gradients(Shape s, const std::vector<int>& tokens, const std::vector<floatX>& dout,
              const std::vector<gradX>& old_wte, const std::vector<gradX>& old_wpe, bool accumulate,
              size_t offset = 0) {
        DeviceGuarded<gradX> dwte(old_wte, offset), dwpe(old_wpe, offset);
        DeviceGuarded<floatX> device_dout(dout, offset);
        DeviceGuarded<int> device_tokens(tokens), order(sorted_order(tokens));
        DeviceGuarded<float> scratch(encoder_backward_scratch_bytes(s.B, s.T, s.C) / sizeof(float));
        encoder_backward(dwte.get(), dwpe.get(), device_dout.get(), device_tokens.get(),
                         order.get(), scratch.get(), s.B, s.T, s.C, accumulate, nullptr);
        wte = dwte.download();
        wpe = dwpe.download();
        dwte.expect_guards_intact("dwte");
        dwpe.expect_guards_intact("dwpe");
        scratch.expect_guards_intact("scratch");
    }
    std::vector<gradX> wte, wpe;
};

// Rows that no token names, and rows of wpe from T on, are NaN before and must still be after.
void expect_backward_matches(Shape s, const std::vector<int>& tokens, int vocab, bool accumulate) {
    const size_t C = s.C, wte_count = vocab * C, wpe_count = kMaxT * C;
    const std::vector<floatX> dout = normal_values<floatX>(tokens.size() * C, 1);
    const gradX nan = from_float<gradX>(std::nanf(""));
    std::vector<gradX> old_wte(wte_count, nan), old_wpe(wpe_count, nan);
    for (const int token : tokens) fill_normal(old_wte.data() + token * C, C, 100 + token);
    if (accumulate) fill_normal(old_wpe.data(), s.T * C, 2);
    std::vector<gradX> wte = old_wte, wpe = old_wpe;
    cpu::encoder_backward(wte.data(), wpe.data(), dout.data(), tokens.data(),
                          sorted_order(tokens).data(), nullptr, s.B, s.T, s.C, accumulate, nullptr);
    const Gradients got(s, tokens, dout, old_wte, old_wpe, accumulate);
    for (const bool is_wte : {true, false}) {
        std::vector<gradX> result = is_wte ? got.wte : got.wpe, expected = is_wte ? wte : wpe;
        size_t touched = 0;
        for (size_t i = 0; i < result.size(); ++i) {
            const bool was_left = std::isnan(to_float(expected[i]));
            touched += was_left && !std::isnan(to_float(result[i]));
            if (was_left) result[i] = expected[i] = from_float<gradX>(0.0f);
        }
        EXPECT_EQ(touched, 0u) << (is_wte ? "dwte" : "dwpe");
        EXPECT_LT(relative_error(result, expected), kBound<gradX>)
            << (is_wte ? "dwte " : "dwpe ") << s.B << " " << s.T << " " << s.C;
    }
}

TEST(GpuEncoder, BackwardMatchesTwinAndLeavesOtherRows) {
    for (const Shape s : kShapes) {
        for (const bool accumulate : {false, true}) {
            expect_backward_matches(s, some_tokens(s, 50), 50, accumulate);
            expect_backward_matches(s, some_tokens(s, 3000), 3000, accumulate);
        }
    }
}

// Runs that end at, just before and just after the ends of pieces, and over several of them: pieces of
// 16, and, with so many rows, of 32.
TEST(GpuEncoder, RunsThatCrossPieces) {
    constexpr int kVocab = 150;
    const int many = static_cast<int>(kEncoderFewRows) / 1000 + 1;
    for (const std::vector<int>& lengths :
         {std::vector<int>{32, 32, 64, 1, 31, 840}, std::vector<int>{31, 2, 31, 1, 63, 872},
          std::vector<int>{1, 32, 32, 32, 903}, std::vector<int>{33, 95, 3, 29, 320, 520},
          std::vector<int>{16, 1, 15, 33, 47, 888}, std::vector<int>{1000}}) {
        for (const int copies : {1, many}) {
            const Shape s{copies, 1000, 40};
            std::vector<int> tokens;
            for (size_t run = 0; run < copies * lengths.size(); ++run) {
                const int length = lengths[run % lengths.size()];
                tokens.insert(tokens.end(), length, 2 + static_cast<int>(run));
            }
            ASSERT_EQ(tokens.size(), 1000u * copies);
            ASSERT_LT(tokens.back(), kVocab);
            expect_backward_matches(s, tokens, kVocab, false);
            // The same runs, with their positions all over the batch.
            for (size_t i = tokens.size() - 1; i > 0; --i) {
                std::swap(tokens[i],
                          tokens[random_bits32(3, RandomPurpose::kTest, 1, i) % (i + 1)]);
            }
            expect_backward_matches(s, tokens, kVocab, true);
        }
    }
}

// llm.c#442: a batch of nothing but one token took its slow path, and its atomics gave other bits
// each time.
TEST(GpuEncoder, OneRepeatedTokenTwiceGivesTheSameBits_llmc442) {
    const Shape s{16, 256, 768};
    const std::vector<int> tokens(static_cast<size_t>(s.B) * s.T, 3);
    expect_backward_matches(s, tokens, 10, false);
    const std::vector<floatX> dout = normal_values<floatX>(tokens.size() * s.C, 1);
    const std::vector<gradX> wte(10 * s.C, from_float<gradX>(0.25f)), wpe(s.T * s.C);
    const Gradients first(s, tokens, dout, wte, wpe, true);
    for (int run = 0; run < 3; ++run) {
        const Gradients again(s, tokens, dout, wte, wpe, true);
        EXPECT_TRUE(same_bits(again.wte, first.wte));
        EXPECT_TRUE(same_bits(again.wpe, first.wpe));
    }
}

TEST(GpuEncoder, BuffersThatAreNotAlignedGiveTheSameBits) {
    const Shape s{3, 50, 64};
    const std::vector<int> tokens = some_tokens(s, 12);
    const std::vector<floatX> dout = normal_values<floatX>(tokens.size() * s.C, 1);
    const auto wte = normal_values<gradX>(12 * s.C, 2), wpe = normal_values<gradX>(s.T * s.C, 3);
    const Gradients aligned(s, tokens, dout, wte, wpe, true);
    const Gradients moved(s, tokens, dout, wte, wpe, true, 1);
    EXPECT_TRUE(same_bits(moved.wte, aligned.wte));
    EXPECT_TRUE(same_bits(moved.wpe, aligned.wpe));
}

TEST(GpuEncoder, RefusesEmptyShapes) {
    floatX* x = nullptr;
    gradX* g = nullptr;
    int* tokens = nullptr;
    EXPECT_THROW(encoder_forward(x, tokens, x, x, 0, 1, 1, nullptr), Error);
    EXPECT_THROW(encoder_forward(x, tokens, x, x, 1, -1, 1, nullptr), Error);
    EXPECT_THROW(encoder_backward(g, g, x, tokens, tokens, nullptr, 1, 1, 0, false, nullptr),
                 Error);
    EXPECT_THROW(encoder_backward_scratch_bytes(1, 0, 1), Error);
}

TEST(GpuEncoder, Bandwidth) {
    const Shape s{64, 1024, 768};
    const int vocab = 50304;
    const size_t rows = static_cast<size_t>(s.B) * s.T, count = rows * s.C;
    // As skewed as text: token numbers with a density that falls like 1/x, some 15000 different
    // ones.
    std::vector<int> tokens(rows);
    for (size_t i = 0; i < rows; ++i) {
        const double u = random_uniform(7, RandomPurpose::kTest, 0, i);
        tokens[i] = static_cast<int>(std::pow(50257.0, u)) - 1;
    }
    std::vector<int> distinct = tokens;
    std::sort(distinct.begin(), distinct.end());
    const double used =
        static_cast<double>(std::unique(distinct.begin(), distinct.end()) - distinct.begin());
    const DeviceBuffer<floatX> wte = device_values<floatX>(static_cast<size_t>(vocab) * s.C, 1);
    const DeviceBuffer<floatX> wpe = device_values<floatX>(static_cast<size_t>(s.T) * s.C, 2);
    const DeviceBuffer<floatX> out[2] = {device_values<floatX>(count, 3),
                                         device_values<floatX>(count, 4)};
    const DeviceBuffer<gradX> dwte = device_values<gradX>(static_cast<size_t>(vocab) * s.C, 5);
    const DeviceBuffer<gradX> dwpe = device_values<gradX>(static_cast<size_t>(s.T) * s.C, 6);
    const DeviceBuffer<char> scratch(encoder_backward_scratch_bytes(s.B, s.T, s.C));
    const double row_bytes = static_cast<double>(s.C) * sizeof(floatX);
    const double grad_row_bytes = static_cast<double>(s.C) * sizeof(gradX);
    {
        const DeviceGuarded<int> device_tokens(tokens), order(sorted_order(tokens));
        report_bandwidth("encoder_forward d12 B 64", (rows + used) * row_bytes,
                         [&](cudaStream_t stream, int set) {
                             encoder_forward(out[set].get(), device_tokens.get(), wte.get(),
                                             wpe.get(), s.B, s.T, s.C, stream);
                         });
        report_bandwidth(
            "encoder_backward d12 B 64", 2 * rows * row_bytes + 2 * used * grad_row_bytes,
            [&](cudaStream_t stream, int set) {
                encoder_backward(dwte.get(), dwpe.get(), out[set].get(), device_tokens.get(),
                                 order.get(), scratch.get(), s.B, s.T, s.C, false, stream);
            });
    }
    {
        const int few = 4;
        const std::vector<int> first(tokens.begin(), tokens.begin() + few * s.T);
        const DeviceGuarded<int> device_tokens(first), order(sorted_order(first));
        report_bandwidth("encoder_backward d12 B 4", 2.0 * few * s.T * row_bytes,
                         [&](cudaStream_t stream, int set) {
                             encoder_backward(dwte.get(), dwpe.get(), out[set].get(),
                                              device_tokens.get(), order.get(), scratch.get(), few,
                                              s.T, s.C, false, stream);
                         });
    }
    const std::vector<int> same(rows, 220);
    const DeviceGuarded<int> device_tokens(same), order(sorted_order(same));
    report_bandwidth("encoder_backward d12 B 64, one token", 2 * rows * row_bytes,
                     [&](cudaStream_t stream, int set) {
                         encoder_backward(dwte.get(), dwpe.get(), out[set].get(),
                                          device_tokens.get(), order.get(), scratch.get(), s.B, s.T,
                                          s.C, false, stream);
                     });
}

}  // namespace
