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
    size_t max_count = 0;
    for (const TreeRange<gradX>& range : ranges) max_count = std::max(max_count, range.count);
    const DeviceGuarded<TreeRange<gradX>> table(ranges);
    tree_add(table.get(), static_cast<int>(ranges.size()), max_count, nullptr);
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

// More ranges than one launch takes, of many lengths, aligned and not; the table may go at once.
TEST(GpuTree, TheListsLauncherHasTheTablesBits) {
    constexpr size_t kRanges = 3 * kTreeListRanges + 5, kRoom = 5000;
    std::vector<gradX> a(kRanges * kRoom), b(a.size());
    fill_normal(a.data(), a.size(), 1);
    fill_normal(b.data(), b.size(), 2);
    const DeviceGuarded<gradX> device_a(a), device_b(b);
    DeviceGuarded<gradX> by_list(a), by_table(a);
    const auto ranges_to = [&](gradX* out) {
        Ranges ranges;
        for (size_t i = 0; i < kRanges; ++i) {
            const size_t begin = i * kRoom + i % 3;
            ranges.push_back(
                {out + begin, device_a.get() + begin, device_b.get() + begin, i * 37 % 4900});
        }
        return ranges;
    };
    launch(ranges_to(by_table.get()));
    {
        Ranges list = ranges_to(by_list.get());
        tree_add_list(list.data(), static_cast<int>(list.size()), nullptr);
        std::fill(list.begin(), list.end(), TreeRange<gradX>{});
    }
    cuda_check(cudaDeviceSynchronize());
    EXPECT_EQ(count_different(by_list.download().data(), by_table.download().data(), a.size()), 0u);
    by_list.expect_guards_intact("out");
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

TEST(GpuTree, MoreRangesThanOneLaunchTakes) {
    const size_t num_ranges = 2 * kMaxRuns + 17, each = 3;
    const auto a = normal_values<gradX>(num_ranges * each, 1);
    const auto b = normal_values<gradX>(num_ranges * each, 2);
    DeviceGuarded<gradX> device_a(a), device_b(b), out(a.size());
    Ranges ranges;
    for (size_t i = 0; i < num_ranges; ++i) {
        ranges.push_back(
            {out.get() + i * each, device_a.get() + i * each, device_b.get() + i * each, each});
    }
    launch(ranges);
    EXPECT_TRUE(same_bits(out.download(), twin_sum(a, b)));
    out.expect_guards_intact("out");
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
    EXPECT_THROW(tree_add(&range, -1, 1, nullptr), Error);
    EXPECT_THROW(tree_add(nullptr, 1, 1, nullptr), Error);
    EXPECT_NO_THROW(tree_add(nullptr, 0, 0, nullptr));
    EXPECT_THROW(copy_list(nullptr, 1, nullptr), Error);
    EXPECT_NO_THROW(copy_list(nullptr, 0, nullptr));
}

TEST(GpuTree, Bandwidth) {
    const ParamLayout layout(ModelConfig{});
    const size_t whole = layout.buffer_elements();
    const DeviceBuffer<gradX> a = device_values<gradX>(whole, 1),
                              b = device_values<gradX>(whole, 2);
    Ranges ranges;
    size_t elements = 0, max_count = 0, begin = 0;
    layout.for_each_layer([&](const ParamInfo& info, size_t) {
        const size_t count = layout.layer_elements(info.id);
        ranges.push_back({a.get() + begin, a.get() + begin, b.get() + begin, count});
        begin += count / 128 * 128;
        elements += count;
        max_count = std::max(max_count, count);
    });
    const DeviceGuarded<TreeRange<gradX>> table(ranges);
    report_bandwidth("tree_add, d12's gradients", 3.0 * elements * sizeof(gradX), [&](int) {
        tree_add(table.get(), static_cast<int>(ranges.size()), max_count, nullptr);
    });
}

}  // namespace
