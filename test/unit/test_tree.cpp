#include "llmc/cpu/tree.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "llmc/error.h"
#include "test/unit/bits.h"
#include "test/unit/guarded.h"
#include "test/unit/stream_gate.h"

namespace {

using namespace llmc;
using namespace llmc::test;

bf16 bf(uint16_t bits) {
    return from_bits<bf16>(bits);
}

uint16_t node_bits(uint16_t a, uint16_t b) {
    return bits_of(cpu::tree_node(bf(a), bf(b)));
}

TEST(TreeNode, Bf16IsTheExactSumRoundedOnce) {
    // Every pair of a set dense in ties, denormals and extremes; then random pairs.
    std::vector<uint16_t> set;
    for (const int exponent : {0, 1, 2, 7, 8, 9, 120, 126, 127, 128, 135, 136, 253, 254, 255}) {
        for (const int mantissa : {0, 1, 2, 3, 63, 64, 65, 126, 127}) {
            set.push_back(static_cast<uint16_t>(exponent << 7 | mantissa));
            set.push_back(static_cast<uint16_t>(0x8000 | exponent << 7 | mantissa));
        }
    }
    size_t wrong = 0;
    const auto check = [&](uint16_t a, uint16_t b) {
        const double exact =
            static_cast<double>(bf16_bits_to_float(a)) + static_cast<double>(bf16_bits_to_float(b));
        wrong += node_bits(a, b) != nearest_bf16_bits(exact);
    };
    for (const uint16_t a : set) {
        for (const uint16_t b : set) check(a, b);
    }
    for (uint32_t i = 0; i < 500000; ++i) {
        const uint32_t bits = random_bits32(1, RandomPurpose::kTest, 0, i);
        check(static_cast<uint16_t>(bits), static_cast<uint16_t>(bits >> 16));
    }
    EXPECT_EQ(wrong, 0u);
}

TEST(TreeNode, TiesGoToEven) {
    EXPECT_EQ(node_bits(0x3f80, 0x3b80), 0x3f80);  // 1 + 2^-8: halfway, down to the even one
    EXPECT_EQ(node_bits(0x3f81, 0x3b80), 0x3f82);  // 1 + 2^-7 + 2^-8: halfway, up to the even one
    EXPECT_EQ(node_bits(0x3f80, 0x3b81), 0x3f81);  // just above halfway
    EXPECT_EQ(node_bits(0xbf81, 0xbb80), 0xbf82);
}

TEST(TreeNode, DenormalsAndZerosAreExact) {
    EXPECT_EQ(node_bits(0x0001, 0x0001), 0x0002);
    EXPECT_EQ(node_bits(0x007f, 0x0001), 0x0080);
    EXPECT_EQ(node_bits(0x0080, 0x8001), 0x007f);
    EXPECT_EQ(node_bits(0x8000, 0x8000), 0x8000);  // -0 + -0 = -0
    EXPECT_EQ(node_bits(0x8000, 0x0000), 0x0000);
    EXPECT_EQ(node_bits(0x0000, 0x8000), 0x0000);
    EXPECT_EQ(node_bits(0x3f80, 0xbf80), 0x0000);  // 1 - 1 = +0
    EXPECT_EQ(bits_of(cpu::tree_node(-0.0f, -0.0f)), 0x80000000u);
    EXPECT_EQ(bits_of(cpu::tree_node(0x1p-149f, 0x1p-149f)), 2u);
}

TEST(TreeNode, OverflowAndNanHaveTheGpusBits) {
    EXPECT_EQ(node_bits(0x7f7f, 0x7f7f), 0x7f80);
    EXPECT_EQ(node_bits(0x7f80, 0xff80), 0x7fff);
    EXPECT_EQ(node_bits(0xffc1, 0x3f80), 0x7fff);
    const float inf = std::numeric_limits<float>::infinity();
    EXPECT_EQ(bits_of(cpu::tree_node(inf, -inf)), 0x7fffffffu);
    EXPECT_EQ(bits_of(cpu::tree_node(from_bits<float>(0xffc00001u), 1.0f)), 0x7fffffffu);
    EXPECT_EQ(bits_of(cpu::tree_node(1.0f, from_bits<float>(0xffc00001u))), 0x7fffffffu);
}

// The tree over `pieces` by launches of tree_add, all on one stream, in place on the left child.
template <class G>
std::vector<G> launch_tree(std::vector<std::vector<G>> pieces) {
    const size_t count = pieces[0].size();
    std::vector<TreeRange<G>> nodes;
    for (size_t width = 1; width < pieces.size(); width *= 2) {
        for (size_t i = 0; i < pieces.size(); i += 2 * width) {
            nodes.push_back({pieces[i].data(), pieces[i].data(), pieces[i + width].data(), count});
        }
    }
    for (const TreeRange<G>& node : nodes) cpu::tree_add(&node, 1, 1, nullptr);
    cudaDeviceSynchronize();
    return pieces[0];
}

// The same by recursion on single elements; `round` makes a G's value of an exact sum.
template <class Round>
double reference_tree(const std::vector<double>& leaves, size_t begin, size_t end, Round round) {
    if (end - begin == 1) return leaves[begin];
    const size_t middle = (begin + end) / 2;
    return round(reference_tree(leaves, begin, middle, round) +
                 reference_tree(leaves, middle, end, round));
}

template <class G>
std::vector<std::vector<G>> random_pieces(size_t num_pieces, size_t count) {
    std::vector<std::vector<G>> pieces(num_pieces, std::vector<G>(count));
    for (size_t i = 0; i < num_pieces; ++i) {
        fill_normal(pieces[i].data(), count, static_cast<uint32_t>(i + 1));
        // Ties, denormals and negative zeros among them.
        pieces[i][0] = store<G>(i == 0 ? 1.0f : 0x1p-8f);
        pieces[i][1] = store<G>(0x1p-133f * static_cast<float>(i + 1));
        pieces[i][2] = store<G>(-0.0f);
    }
    return pieces;
}

template <class G>
std::vector<double> leaves_of(const std::vector<std::vector<G>>& pieces, size_t k) {
    std::vector<double> leaves;
    for (const std::vector<G>& piece : pieces) leaves.push_back(load(piece[k]));
    return leaves;
}

TEST(TreeAdd, TwoFourAndEightBf16PiecesMatchTheReferenceTree) {
    const auto round = [](double x) {
        return static_cast<double>(bf16_bits_to_float(nearest_bf16_bits(x)));
    };
    for (const size_t num_pieces : {2, 4, 8}) {
        const auto pieces = random_pieces<bf16>(num_pieces, 5000);
        const std::vector<bf16> sum = launch_tree(pieces);
        for (size_t k = 0; k < sum.size(); ++k) {
            const double expected = reference_tree(leaves_of(pieces, k), 0, num_pieces, round);
            ASSERT_EQ(bits_of(sum[k]), nearest_bf16_bits(expected)) << num_pieces << " " << k;
        }
    }
}

TEST(TreeAdd, TwoFourAndEightFp32PiecesMatchTheReferenceTree) {
    const auto round = [](double x) { return static_cast<double>(static_cast<float>(x)); };
    for (const size_t num_pieces : {2, 4, 8}) {
        const auto pieces = random_pieces<float>(num_pieces, 5000);
        const std::vector<float> sum = launch_tree(pieces);
        for (size_t k = 0; k < sum.size(); ++k) {
            const double expected = reference_tree(leaves_of(pieces, k), 0, num_pieces, round);
            ASSERT_EQ(bits_of(sum[k]), bits_of(static_cast<float>(expected))) << num_pieces;
        }
    }
}

// An owner that adds in fp32 and rounds once, pairs other neighbours, or adds one after the other
// must not be able to pass: with this data each gives other bits, from four pieces on.
template <class G>
void expect_wrong_trees_show() {
    for (const size_t num_pieces : {4, 8}) {
        const auto pieces = random_pieces<G>(num_pieces, 5000);
        const std::vector<G> sum = launch_tree(pieces);
        auto swapped = pieces;
        std::swap(swapped[1], swapped[2]);
        EXPECT_GT(count_different(sum.data(), launch_tree(swapped).data(), sum.size()), 100u);

        size_t sequential = 0, once = 0;
        for (size_t k = 0; k < sum.size(); ++k) {
            G in_order = pieces[0][k];
            float wide = load(pieces[0][k]);
            for (size_t i = 1; i < num_pieces; ++i) {
                in_order = cpu::tree_node(in_order, pieces[i][k]);
                wide += load(pieces[i][k]);
            }
            sequential += bits_of(in_order) != bits_of(sum[k]);
            once += bits_of(store<G>(wide)) != bits_of(sum[k]);
        }
        EXPECT_GT(sequential, 100u);
        EXPECT_GT(once, 100u);
    }
}
TEST(TreeAdd, WrongTreesShowInBf16) {
    expect_wrong_trees_show<bf16>();
}
TEST(TreeAdd, WrongTreesShowInFp32) {
    expect_wrong_trees_show<float>();
}

TEST(TreeAdd, RangesOfAnyLengthAreAddedAndNothingElseIsTouched) {
    const std::vector<size_t> counts = {1, 0, 7, 32768, 32769, 100001};
    std::vector<std::unique_ptr<Guarded<bf16>>> out;
    std::vector<std::vector<bf16>> a, b;
    std::vector<TreeRange<bf16>> ranges;
    for (const size_t count : counts) {
        out.push_back(std::make_unique<Guarded<bf16>>(count));
        a.emplace_back(count);
        b.emplace_back(count);
        fill_normal(a.back().data(), count, 1);
        fill_normal(b.back().data(), count, 2);
        ranges.push_back({out.back()->data(), a.back().data(), b.back().data(), count});
    }
    cpu::tree_add(ranges.data(), 1, static_cast<int>(ranges.size()), nullptr);
    cudaDeviceSynchronize();
    for (size_t r = 0; r < counts.size(); ++r) {
        out[r]->expect_written("out");
        out[r]->expect_guards_intact("out");
        for (size_t k = 0; k < counts[r]; ++k) {
            ASSERT_EQ(bits_of((*out[r])[k]), bits_of(cpu::tree_node(a[r][k], b[r][k])));
        }
    }
}

TEST(TreeAdd, OutMayBeEitherOperand) {
    const size_t count = 40000;
    std::vector<float> a(count), b(count), expected(count);
    fill_normal(a.data(), count, 1);
    fill_normal(b.data(), count, 2);
    for (size_t k = 0; k < count; ++k) expected[k] = a[k] + b[k];
    std::vector<float> into_a = a, into_b = b;
    const TreeRange<float> ranges[] = {{into_a.data(), into_a.data(), b.data(), count},
                                       {into_b.data(), a.data(), into_b.data(), count}};
    cpu::tree_add(ranges, 1, 2, nullptr);
    cudaDeviceSynchronize();
    EXPECT_EQ(count_different(into_a.data(), expected.data(), count), 0u);
    EXPECT_EQ(count_different(into_b.data(), expected.data(), count), 0u);
}

TEST(TreeAdd, ANodeReadsWhatTheOneBeforeLeft) {
    const std::vector<size_t> counts = {1, 0, 32769, 100001};
    std::vector<TreeRange<bf16>> nodes[2];
    std::vector<std::vector<bf16>> a, b, c, expected;
    for (const size_t count : counts) {
        for (auto* each : {&a, &b, &c, &expected}) each->emplace_back(count);
        fill_normal(a.back().data(), count, 1);
        fill_normal(b.back().data(), count, 2);
        fill_normal(c.back().data(), count, 3);
        for (size_t k = 0; k < count; ++k) {
            const bf16 sum = cpu::tree_node(a.back()[k], c.back()[k]);
            expected.back()[k] = cpu::tree_node(b.back()[k], sum);
        }
        bf16* sum = c.back().data();
        nodes[0].push_back({sum, a.back().data(), sum, count});
        nodes[1].push_back({sum, b.back().data(), sum, count});
    }
    nodes[0].insert(nodes[0].end(), nodes[1].begin(), nodes[1].end());
    cpu::tree_add(nodes[0].data(), 2, static_cast<int>(counts.size()), nullptr);
    cudaDeviceSynchronize();
    for (size_t i = 0; i < counts.size(); ++i) {
        EXPECT_EQ(count_different(c[i].data(), expected[i].data(), counts[i]), 0u) << counts[i];
    }
}

TEST(TreeAdd, DoubleIsAddedInDouble) {
    const double a = 1.0, b = 0x1p-50;
    double out = 0.0;
    const TreeRange<double> range = {&out, &a, &b, 1};
    cpu::tree_add(&range, 1, 1, nullptr);
    cudaDeviceSynchronize();
    EXPECT_EQ(out, 1.0 + 0x1p-50);
}

TEST(TreeAdd, AListMayGoOnceItIsQueued) {
    const float a = 1.0f, b = 2.0f;
    float out = 0.0f;
    StreamGate gate;
    gate.close(nullptr);
    {
        TreeRange<float> range = {&out, &a, &b, 1};
        cpu::tree_add(&range, 1, 1, nullptr);
        range = {nullptr, nullptr, nullptr, 0};
    }
    gate.open();
    cudaDeviceSynchronize();
    EXPECT_EQ(out, 3.0f);
}

TEST(TreeAdd, BadArgumentsAreRefused) {
    const TreeRange<float> range = {nullptr, nullptr, nullptr, 0};
    EXPECT_THROW(cpu::tree_add(&range, 1, -1, nullptr), Error);
    EXPECT_THROW(cpu::tree_add(&range, 0, 1, nullptr), Error);
    EXPECT_THROW(cpu::tree_add(&range, 65, 1, nullptr), Error);
    EXPECT_THROW(cpu::tree_add<float>(nullptr, 1, 1, nullptr), Error);
    EXPECT_NO_THROW(cpu::tree_add<float>(nullptr, 1, 0, nullptr));
    float x[2] = {};
    const TreeRange<float> unlike[] = {{x, x, x, 2}, {x, x, x, 1}};
    EXPECT_THROW(cpu::tree_add(unlike, 2, 1, nullptr), Error);
    EXPECT_NO_THROW(cpu::tree_add(unlike, 1, 2, nullptr));
    cudaDeviceSynchronize();  // else it may write to x after this test has returned
    EXPECT_THROW(cpu::copy_list<float>(nullptr, 1, nullptr), Error);
    EXPECT_NO_THROW(cpu::copy_list<float>(nullptr, 0, nullptr));
}

TEST(CopyList, CopiesEachRangeAndNothingElse) {
    const float from[] = {1.0f, 2.0f, 3.0f, 4.0f};
    float to[] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    StreamGate gate;
    gate.close(nullptr);
    {
        CopyRange<float> ranges[] = {{to + 3, from, 1}, {to, from + 2, 2}, {to, from, 0}};
        cpu::copy_list(ranges, 3, nullptr);
        ranges[0] = {nullptr, nullptr, 1};
    }
    gate.open();
    cudaDeviceSynchronize();
    EXPECT_EQ((std::vector<float>(to, to + 5)), (std::vector<float>{3.0f, 4.0f, 0.0f, 1.0f, 0.0f}));
}

}  // namespace
