#include <memory>

#include "llmc/cpu/tree.h"
#include "llmc/params.h"
#include "llmc/tree.cuh"
#include "test/gpu/gpu_checks.h"
#include "test/unit/bits.h"

namespace {

using namespace llmc;
using namespace llmc::test;

using Ranges = std::vector<TreeRange<gradX>>;

void launch(const Ranges& ranges) {
    tree_add(ranges.data(), 1, static_cast<int>(ranges.size()), nullptr);
    cuda_check(cudaDeviceSynchronize());
}

std::vector<gradX> twin_sum(const std::vector<gradX>& a, const std::vector<gradX>& b) {
    std::vector<gradX> sum(a.size());
    for (size_t i = 0; i < a.size(); ++i) sum[i] = cpu::tree_node(a[i], b[i]);
    return sum;
}

// Zeros, denormals, ties, extremes, infinities, NaN, in both signs, each with each.
TEST(GpuTree, EveryPairOfSpecialValuesHasTheTwinsBits) {
    std::vector<gradX> set;
    constexpr int kMantissaBits = sizeof(gradX) == 4 ? 23 : 7;
    constexpr unsigned kOnes = (1u << kMantissaBits) - 1;
    for (const unsigned exponent : {0, 1, 2, 7, 8, 9, 24, 120, 126, 127, 128, 135, 253, 254, 255}) {
        for (const unsigned mantissa :
             {0u, 1u, 2u, 3u, kOnes / 2, kOnes / 2 + 1, kOnes - 1, kOnes}) {
            for (const unsigned sign : {0u, 1u}) {
                const unsigned bits =
                    sign << (kMantissaBits + 8) | exponent << kMantissaBits | mantissa;
                set.push_back(from_bits<gradX>(static_cast<bits_t<gradX>>(bits)));
            }
        }
    }
    std::vector<gradX> a, b;
    for (const gradX x : set) {
        for (const gradX y : set) {
            a.push_back(x);
            b.push_back(y);
        }
    }
    const std::vector<gradX> expected = twin_sum(a, b);
    // Aligned, by vectors, and one element off, one by one.
    for (const size_t offset : {0, 1}) {
        DeviceGuarded<gradX> device_a(a, offset), device_b(b, offset), out(a.size(), offset);
        launch({{out.get(), device_a.get(), device_b.get(), a.size()}});
        EXPECT_EQ(count_different(out.download().data(), expected.data(), a.size()), 0u) << offset;
        out.expect_guards_intact("out");
    }
}

// The tree over `pieces` by one launch for each level, in place on the left child.
std::vector<gradX> gpu_tree(const std::vector<std::vector<gradX>>& pieces) {
    std::vector<std::unique_ptr<DeviceGuarded<gradX>>> device;
    for (const auto& piece : pieces) {
        device.push_back(std::make_unique<DeviceGuarded<gradX>>(piece));
    }
    for (size_t width = 1; width < pieces.size(); width *= 2) {
        Ranges level;
        for (size_t i = 0; i < pieces.size(); i += 2 * width) {
            level.push_back(
                {device[i]->get(), device[i]->get(), device[i + width]->get(), pieces[0].size()});
        }
        launch(level);
    }
    for (const auto& piece : device) piece->expect_guards_intact("piece");
    return device[0]->download();
}

std::vector<gradX> twin_tree(std::vector<std::vector<gradX>> pieces) {
    for (size_t width = 1; width < pieces.size(); width *= 2) {
        for (size_t i = 0; i < pieces.size(); i += 2 * width) {
            pieces[i] = twin_sum(pieces[i], pieces[i + width]);
        }
    }
    return pieces[0];
}

// An owner that adds in fp32 and rounds once, pairs other neighbours, or adds one after the other
// has other bits from four pieces on.
TEST(GpuTree, TwoFourAndEightPiecesHaveTheTwinsBits) {
    for (const size_t num_pieces : {2, 4, 8}) {
        std::vector<std::vector<gradX>> pieces;
        for (size_t i = 0; i < num_pieces; ++i) {
            pieces.push_back(normal_values<gradX>(40003, static_cast<uint32_t>(i + 1)));
        }
        const std::vector<gradX> expected = twin_tree(pieces);
        EXPECT_EQ(count_different(gpu_tree(pieces).data(), expected.data(), expected.size()), 0u);
        std::swap(pieces[0], pieces[num_pieces - 1]);
        if (num_pieces == 2) continue;
        EXPECT_GT(count_different(gpu_tree(pieces).data(), expected.data(), expected.size()), 100u)
            << "the data would not show a wrong tree";
    }
}

TEST(GpuTree, RangesOfAnyLengthAreAddedAndNothingElseIsTouched) {
    const std::vector<size_t> counts = {1, 0, 7, 2047, 2048, 2049, 4096, 32769, 100001, 0};
    std::vector<std::vector<gradX>> expected;
    std::vector<std::unique_ptr<DeviceGuarded<gradX>>> out, a, b;
    Ranges ranges;
    for (size_t i = 0; i < counts.size(); ++i) {
        const auto x = normal_values<gradX>(counts[i], 1), y = normal_values<gradX>(counts[i], 2);
        expected.push_back(twin_sum(x, y));
        // Every other range at an address that vectors cannot reach.
        a.push_back(std::make_unique<DeviceGuarded<gradX>>(x, i % 2));
        b.push_back(std::make_unique<DeviceGuarded<gradX>>(y, i % 4 / 2));
        out.push_back(std::make_unique<DeviceGuarded<gradX>>(counts[i]));
        ranges.push_back({out[i]->get(), a[i]->get(), b[i]->get(), counts[i]});
    }
    launch(ranges);
    for (size_t i = 0; i < counts.size(); ++i) {
        EXPECT_TRUE(same_bits(out[i]->download(), expected[i])) << counts[i];
        out[i]->expect_guards_intact("out");
    }
}

// In gaps of `gap` elements; the table may go at once.
void expect_many_ranges_have_the_twins_bits(size_t gap) {
    const size_t num_ranges = 3 * kTreeListRanges + 5, most = 4900, room = most + gap;
    const auto a = normal_values<gradX>(num_ranges * room, 1);
    const auto b = normal_values<gradX>(num_ranges * room, 2);
    const auto before = normal_values<gradX>(num_ranges * room, 3);
    DeviceGuarded<gradX> device_a(a), device_b(b), out(before);
    const std::vector<gradX> sums = twin_sum(a, b);
    std::vector<gradX> expected = before;
    Ranges ranges;
    size_t begin = 0;
    for (size_t i = 0; i < num_ranges; ++i) {
        const size_t count = i * 37 % most;
        ranges.push_back(
            {out.get() + begin, device_a.get() + begin, device_b.get() + begin, count});
        std::copy_n(&sums[begin], count, &expected[begin]);
        begin += count + gap;
    }
    tree_add(ranges.data(), 1, static_cast<int>(ranges.size()), nullptr);
    std::fill(ranges.begin(), ranges.end(), TreeRange<gradX>{});
    EXPECT_TRUE(same_bits(out.download(), expected)) << gap;
    out.expect_guards_intact("out");
}

// More than one launch takes, or one range, since each goes on where the last one ends.
TEST(GpuTree, ManyRangesHaveTheTwinsBits) {
    for (const size_t gap : {0, 1, 8}) expect_many_ranges_have_the_twins_bits(gap);
}

// Such ranges are not one: the operands lie the other way round.
TEST(GpuTree, RangesThatFollowEachOtherInTheirSumsAlone) {
    constexpr size_t kCount = 5000;
    const auto a = normal_values<gradX>(2 * kCount, 1), b = normal_values<gradX>(2 * kCount, 2);
    const auto swapped = [](const std::vector<gradX>& x) {
        std::vector<gradX> y(x.begin() + kCount, x.end());
        y.insert(y.end(), x.begin(), x.begin() + kCount);
        return y;
    };
    DeviceGuarded<gradX> device_a(a), device_b(b), out(a.size());
    const auto range = [&](size_t to, size_t left, size_t right) {
        return TreeRange<gradX>{out.get() + to, device_a.get() + left, device_b.get() + right,
                                kCount};
    };
    launch({range(0, kCount, 0), range(kCount, 0, kCount)});
    EXPECT_TRUE(same_bits(out.download(), twin_sum(swapped(a), b)));
    launch({range(0, 0, kCount), range(kCount, kCount, 0)});
    EXPECT_TRUE(same_bits(out.download(), twin_sum(a, swapped(b))));
    launch({range(kCount, 0, 0), range(0, kCount, kCount)});
    EXPECT_TRUE(same_bits(out.download(), swapped(twin_sum(a, b))));
    // Of two nodes the second only.
    const auto again = [&](size_t to, size_t left) {
        return TreeRange<gradX>{out.get() + to, device_a.get() + left, out.get() + to, kCount};
    };
    const Ranges row = {range(0, 0, 0), range(kCount, kCount, kCount), again(0, kCount),
                        again(kCount, 0)};
    tree_add(row.data(), 2, 2, nullptr);
    EXPECT_TRUE(same_bits(out.download(), twin_sum(swapped(a), twin_sum(a, b))));
}

// A row of the tree: the sum in the gradients goes on as an operand. In one of the nodes an operand may
// lie where vectors do not reach.
void expect_rows_have_the_twins_bits(size_t num_nodes, size_t odd_node) {
    const std::vector<size_t> lengths = {1, 4095, 4096, 12288, 40001, 0, 8};
    const size_t num_ranges = lengths.size() * (kTreeListRanges / lengths.size() + 1);
    std::vector<std::vector<gradX>> expected;
    std::vector<std::unique_ptr<DeviceGuarded<gradX>>> sums, spares;
    Ranges rows(num_nodes * num_ranges);
    for (size_t i = 0; i < num_ranges; ++i) {
        const size_t count = lengths[i % lengths.size()];
        expected.push_back(normal_values<gradX>(count, static_cast<uint32_t>(i + 1)));
        sums.push_back(std::make_unique<DeviceGuarded<gradX>>(expected[i]));
        for (size_t n = 0; n < num_nodes; ++n) {
            const auto spare = normal_values<gradX>(count, static_cast<uint32_t>(1000 * n + i + 1));
            spares.push_back(std::make_unique<DeviceGuarded<gradX>>(spare, n == odd_node));
            rows[n * num_ranges + i] = {sums[i]->get(), spares.back()->get(), sums[i]->get(),
                                        count};
            expected[i] = twin_sum(spare, expected[i]);
        }
    }
    tree_add(rows.data(), static_cast<int>(num_nodes), static_cast<int>(num_ranges), nullptr);
    std::fill(rows.begin(), rows.end(), TreeRange<gradX>{});
    for (size_t i = 0; i < num_ranges; ++i) {
        EXPECT_TRUE(same_bits(sums[i]->download(), expected[i]))
            << num_nodes << " nodes, " << expected[i].size() << " elements";
        sums[i]->expect_guards_intact("sums");
    }
}

TEST(GpuTree, ANodeReadsWhatTheOneBeforeLeft) {
    for (const size_t num_nodes : {1, 2, 3, 7}) {
        for (const size_t odd_node : {num_nodes, num_nodes / 2}) {
            expect_rows_have_the_twins_bits(num_nodes, odd_node);
        }
    }
}

TEST(GpuTree, OutMayBeEitherOperand) {
    const auto a = normal_values<gradX>(40000, 1), b = normal_values<gradX>(40000, 2);
    DeviceGuarded<gradX> plain_a(a), plain_b(b), into_a(a), into_b(b);
    launch({{into_a.get(), into_a.get(), plain_b.get(), a.size()},
            {into_b.get(), plain_a.get(), into_b.get(), a.size()}});
    EXPECT_TRUE(same_bits(into_a.download(), twin_sum(a, b)));
    EXPECT_TRUE(same_bits(into_b.download(), twin_sum(a, b)));
}

// More ranges than one launch takes, of many lengths, aligned or not.
TEST(GpuTree, CopiedRangesHaveTheirBitsAndNothingElseIsTouched) {
    const std::vector<size_t> counts = {1, 0, 7, 767, 768, 2047, 4096, 4097, 40001};
    const size_t num_ranges = 2 * kTreeListRanges + 3;
    std::vector<std::vector<gradX>> expected;
    std::vector<std::unique_ptr<DeviceGuarded<gradX>>> to, from;
    std::vector<CopyRange<gradX>> ranges;
    for (size_t i = 0; i < num_ranges; ++i) {
        expected.push_back(
            normal_values<gradX>(counts[i % counts.size()], static_cast<uint32_t>(i + 1)));
        from.push_back(std::make_unique<DeviceGuarded<gradX>>(expected[i], i % 2));
        to.push_back(std::make_unique<DeviceGuarded<gradX>>(expected[i].size(), i % 4 / 2));
        ranges.push_back({to[i]->get(), from[i]->get(), expected[i].size()});
    }
    copy_list(ranges.data(), static_cast<int>(num_ranges), nullptr);
    std::fill(ranges.begin(), ranges.end(), CopyRange<gradX>{});
    for (size_t i = 0; i < num_ranges; ++i) {
        EXPECT_TRUE(same_bits(to[i]->download(), expected[i])) << expected[i].size();
        to[i]->expect_guards_intact("to");
    }
}

TEST(GpuTree, PiecesAreNumberedThroughTheirRuns) {
    const std::vector<uint32_t> pieces = {0, 3, 0, 0, 1, 5, 0};
    std::vector<uint32_t> ends;
    std::vector<int> expected;
    for (size_t run = 0; run < pieces.size(); ++run) {
        expected.insert(expected.end(), pieces[run], static_cast<int>(run));
        ends.push_back(static_cast<uint32_t>(expected.size()));
    }
    for (uint32_t piece = 0; piece < expected.size(); ++piece) {
        EXPECT_EQ(run_of_piece(ends.data(), static_cast<int>(ends.size()), piece), expected[piece]);
    }
}

TEST(GpuTree, BadArgumentsAreRefused) {
    const TreeRange<gradX> range = {nullptr, nullptr, nullptr, 0};
    EXPECT_THROW(tree_add(&range, 1, -1, nullptr), Error);
    EXPECT_THROW(tree_add(&range, 0, 1, nullptr), Error);
    EXPECT_THROW(tree_add(&range, kTreeListRanges + 1, 1, nullptr), Error);
    EXPECT_THROW(tree_add(nullptr, 1, 1, nullptr), Error);
    EXPECT_NO_THROW(tree_add(nullptr, 1, 0, nullptr));
    const TreeRange<gradX> unlike[] = {{nullptr, nullptr, nullptr, 2},
                                       {nullptr, nullptr, nullptr, 1}};
    EXPECT_THROW(tree_add(unlike, 2, 1, nullptr), Error);
    EXPECT_THROW(copy_list(nullptr, 1, nullptr), Error);
    EXPECT_NO_THROW(copy_list(nullptr, 0, nullptr));
}

TEST(GpuTree, Bandwidth) {
    const ParamLayout layout(ModelConfig{});
    const size_t whole = layout.buffer_elements();
    const DeviceBuffer<gradX> a = device_values<gradX>(whole, 1),
                              b = device_values<gradX>(whole, 2);
    const DeviceBuffer<gradX> c = device_values<gradX>(whole, 3),
                              d = device_values<gradX>(whole, 4);
    gradX* const sum = d.get();
    const TreeRange<gradX> row[] = {
        {sum, a.get(), sum, whole}, {sum, b.get(), sum, whole}, {sum, c.get(), sum, whole}};
    for (const int nodes : {1, 2, 3}) {
        const std::string name = format("tree_add, d12's gradients, %d nodes", nodes);
        report_bandwidth(name.c_str(), (nodes + 2.0) * whole * sizeof(gradX),
                         [&](cudaStream_t stream, int) { tree_add(row, nodes, 1, stream); });
    }
}

}  // namespace
