#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "llmc/cpu/fused_classifier.h"
#include "llmc/fused_classifier.cuh"
#include "test/gpu/gpu_checks.h"

namespace {

using namespace llmc;
using namespace llmc::test;

struct Shape {
    int rows, V, Vp;
    size_t count() const { return static_cast<size_t>(rows) * Vp; }
};
// The CPU tests', among them GPT-2's; rows that end in the middle of a vector; rows of which shared
// memory holds many, two, one and none.
const Shape kShapes[] = {{1, 1, 1},         {3, 5, 8},           {7, 97, 128},      {4, 36, 37},
                         {5, 1600, 1600},   {3, 50257, 50304},   {2, 4096, 4096},   {2, 4100, 4104},
                         {3, 16385, 16500}, {2, 130001, 130048}, {2, 60003, 60003}, {2, 200, 4096},
                         {3, 60003, 60008}, {3, 30011, 30016}};

std::vector<int> some_targets(Shape s) {
    std::vector<int> targets(s.rows);
    for (int row = 0; row < s.rows; ++row) {
        const uint32_t bits = random_bits32(9, RandomPurpose::kTest, 0, row);
        targets[row] = static_cast<int>(bits % static_cast<uint32_t>(s.V));
    }
    targets[0] = s.V - 1;
    return targets;
}

// The twin's results in double on the same numbers.
struct Exact {
    Exact(const std::vector<floatX>& logits, const std::vector<int>& targets, double dloss, Shape s)
        : losses(s.rows), dlogits(widened(logits)) {
        cpu::fused_classifier(dlogits.data(), losses.data(), targets.data(), dloss, s.rows, s.V,
                              s.Vp, true, nullptr);
    }
    std::vector<double> losses, dlogits;
};

struct Result {
    Result(const std::vector<floatX>& values, const std::vector<int>& targets, float dloss, Shape s,
           bool write_dlogits, size_t offset = 0) {
        DeviceGuarded<floatX> device_logits(values, offset);
        DeviceGuarded<float> device_losses(s.rows);
        DeviceGuarded<int> device_targets(targets);
        fused_classifier(device_logits.get(), device_losses.get(), device_targets.get(), dloss,
                         s.rows, s.V, s.Vp, write_dlogits, nullptr);
        logits = device_logits.download();
        losses = device_losses.download();
        device_logits.expect_guards_intact("logits");
        device_losses.expect_guards_intact("losses");
    }
    std::vector<floatX> logits;
    std::vector<float> losses;
};

TEST(GpuFusedClassifier, MatchesTwin) {
    for (const Shape s : kShapes) {
        const std::vector<int> targets = some_targets(s);
        const std::vector<floatX> logits = normal_values<floatX>(s.count(), 1, 3.0);
        const float dloss = 1.0f / 512;
        const Exact exact(logits, targets, dloss, s);
        const Result forward(logits, targets, dloss, s, false);
        EXPECT_TRUE(same_bits(forward.logits, logits)) << "logits written, V " << s.V;
        const double loss_bound = s.V == 1 ? 1e-30 : 1e-6;
        EXPECT_LT(relative_error(forward.losses, exact.losses), loss_bound) << s.V;
        const Result got(logits, targets, dloss, s, true);
        EXPECT_TRUE(same_bits(got.losses, forward.losses)) << s.V;
        EXPECT_LT(relative_error(got.logits, exact.dlogits), kBound<floatX>) << s.V;
        for (const size_t offset : {0, 1}) {
            const Result again(logits, targets, dloss, s, true, offset);
            EXPECT_TRUE(same_bits(again.losses, got.losses)) << s.V << " offset " << offset;
            EXPECT_TRUE(same_bits(again.logits, got.logits)) << s.V << " offset " << offset;
        }
    }
}

TEST(GpuFusedClassifier, PaddingColumnsAreIgnoredAndZeroed) {
    const std::vector<int> targets = {96, -1, 3, 0};
    for (const Shape s : {Shape{4, 97, 128}, Shape{4, 97, 127}, Shape{4, 96, 104}}) {
        std::vector<int> some = targets;
        some[0] = s.V - 1;
        std::vector<Result> results;
        for (const double padding : {0.0, 1e4, std::nan("")}) {
            std::vector<floatX> logits = normal_values<floatX>(s.count(), 1, 3.0);
            for (size_t i = 0; i < s.count(); ++i) {
                if (i % s.Vp >= static_cast<size_t>(s.V)) logits[i] = rounded<floatX>(padding);
            }
            results.emplace_back(logits, some, 1.0f, s, true);
            const floatX zero = rounded<floatX>(0.0);
            for (size_t i = 0; i < s.count(); ++i) {
                if (i % s.Vp < static_cast<size_t>(s.V)) continue;
                ASSERT_TRUE(same_bits(&results.back().logits[i], &zero, 1)) << padding << " " << i;
            }
            EXPECT_TRUE(same_bits(results.back().logits, results[0].logits)) << padding;
            EXPECT_TRUE(same_bits(results.back().losses, results[0].losses)) << padding;
        }
    }
}

TEST(GpuFusedClassifier, TargetMinusOneGivesNoLossAndNoGradient) {
    const Shape s{3, 5, 8};
    const std::vector<int> targets = {2, -1, 4};
    std::vector<floatX> logits = normal_values<floatX>(24, 1);
    logits[8 + 1] = from_float<floatX>(std::nanf(""));  // a row without a target is not read
    const Result forward(logits, targets, 1.0f, s, false);
    EXPECT_EQ(forward.losses[1], 0.0f);
    EXPECT_TRUE(same_bits(forward.logits, logits));
    const Result got(logits, targets, 1.0f, s, true);
    EXPECT_EQ(got.losses[1], 0.0f);
    const std::vector<floatX> zeros(8, from_float<floatX>(0.0f));
    EXPECT_TRUE(same_bits(got.logits.data() + 8, zeros.data(), 8));
    EXPECT_GT(got.losses[0], 0.0f);
}

// Each element of a softmax whose smallest members are 1e-38, not only their norm: one that flushes
// early, or that scales before it takes the exponential, loses them.
TEST(GpuFusedClassifier, TailsDownTo1e38AreKept) {
    const Shape s{1, 87, 96};
    std::vector<floatX> logits(s.Vp);
    for (int i = 0; i < s.Vp; ++i) logits[i] = rounded<floatX>(-i);  // exact in bf16
    for (const float dloss : {1.0f, 0x1p-19f}) {
        const Exact exact(logits, {40}, dloss, s);
        const Result got(logits, {40}, dloss, s, true);
        ASSERT_LT(exact.dlogits[s.V - 1], 3e-38 * dloss);
        for (int i = 0; i < s.V; ++i) {
            // In denormals the last place is a larger part of the value.
            const double last_place = sizeof(floatX) == 4 ? 0x1p-149 : 0x1p-133;
            const double bound =
                std::fabs(exact.dlogits[i]) * (sizeof(floatX) == 4 ? 1e-5 : 0x1p-8);
            EXPECT_NEAR(to_float(got.logits[i]), exact.dlogits[i], bound + last_place) << i;
        }
        EXPECT_NEAR(got.losses[0], exact.losses[0], 1e-5);
    }
}

// One NaN or infinity must show in its row's loss, or a step that should be skipped is taken.
TEST(GpuFusedClassifier, NaNAndInfinityReachTheLoss) {
    for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
        for (const int place : {0, 3, 96}) {
            const Shape s{2, 97, 128};
            std::vector<floatX> logits = normal_values<floatX>(s.count(), 1);
            logits[128 + place] = from_float<floatX>(bad);
            const Result got(logits, {3, 3}, 1.0f, s, true);
            EXPECT_TRUE(std::isfinite(got.losses[0]));
            EXPECT_FALSE(std::isfinite(got.losses[1])) << bad << " at " << place;
            for (int i = 0; i < s.V; ++i) EXPECT_TRUE(std::isfinite(to_float(got.logits[i])));
            EXPECT_TRUE(std::isnan(to_float(got.logits[128 + place])));
        }
    }
}

TEST(GpuFusedClassifier, MinusInfinityIsProbabilityZero) {
    const Shape s{2, 97, 128};
    std::vector<floatX> logits = normal_values<floatX>(s.count(), 1);
    for (int i = 0; i < 97; ++i) {
        if (i != 50) logits[i] = from_float<floatX>(-std::numeric_limits<float>::infinity());
    }
    const Result got(logits, {50, 3}, 1.0f, s, true);
    EXPECT_EQ(got.losses[0], 0.0f);
    for (int i = 0; i < s.V; ++i) EXPECT_EQ(to_float(got.logits[i]), 0.0f) << i;
    EXPECT_TRUE(std::isfinite(got.losses[1]));
}

// A sum of 50257 exponentials in a few fp32 lanes drifts by 1e-5 and more.
TEST(GpuFusedClassifier, LongRowsKeepTheLossAccurate) {
    const Shape s{1, 50257, 50304};
    const std::vector<floatX> logits = normal_values<floatX>(s.count(), 1, 0.01);
    const Exact exact(logits, {17}, 1.0, s);
    const Result got(logits, {17}, 1.0f, s, false);
    EXPECT_NEAR(got.losses[0] / exact.losses[0], 1.0, 3e-7);
}

// ---- one row's bits, whichever block has it, with whichever rows before and after ----

// The ways to the gradient of aligned rows.
enum class Way { kBlockForEachRow, kRowToRow, kLauncher };
const char* name_of(Way way) {
    switch (way) {
        case Way::kBlockForEachRow:
            return "a block for each row";
        case Way::kRowToRow:
            return "blocks from row to row";
        default:
            return "launcher";
    }
}
std::vector<Way> ways_for(int V) {
    std::vector<Way> ways = {Way::kLauncher};
    const int fit = rows_in_shared_memory(cached_row_bytes<floatX>(V));
    if (fit >= 1) ways.push_back(Way::kBlockForEachRow);
    if (fit >= 1) ways.push_back(Way::kRowToRow);
    return ways;
}
void run(Way way, floatX* logits, float* losses, const int* targets, float dloss, Shape s,
         cudaStream_t stream = nullptr) {
    const Classifier<floatX> p = {logits, losses, targets, dloss, s.V, s.Vp, true};
    switch (way) {
        case Way::kBlockForEachRow:
            launch_fused_classifier<floatX, true, true>(p, s.rows, cached_row_bytes<floatX>(s.V),
                                                        stream);
            break;
        case Way::kRowToRow:
            launch_classify_rows<floatX>(p, s.rows, stream);
            break;
        default:
            fused_classifier(logits, losses, targets, dloss, s.rows, s.V, s.Vp, true, stream);
    }
}

// A few rows, each with a target, and what a block for each of them makes of it, or the launcher
// where no row fits in shared memory.
struct FewRows {
    static constexpr int kRows = 61;  // prime to all that is round
    static constexpr float kDloss = 1.0f / 4096;

    FewRows(int V, int Vp)
        : shape{kRows, V, Vp},
          targets(some_targets(shape)),
          logits(normal_values<floatX>(shape.count(), 1, 3.0)) {
        const DeviceGuarded<floatX> device_logits(logits);
        DeviceGuarded<float> device_losses(kRows);
        const DeviceGuarded<int> device_targets(targets);
        const bool fits = rows_in_shared_memory(cached_row_bytes<floatX>(V)) >= 1;
        run(fits ? Way::kBlockForEachRow : Way::kLauncher, device_logits.get(), device_losses.get(),
            device_targets.get(), kDloss, shape);
        dlogits = device_logits.download();
        losses = device_losses.download();
    }
    Shape shape;
    std::vector<int> targets;
    std::vector<floatX> logits, dlogits;
    std::vector<float> losses;
};

// Row r of a batch is row r % 61 of the few, or has no target where skipped[r] is true.
void expect_rows_of(const FewRows& few, const std::vector<bool>& skipped, Way way,
                    const char* what) {
    const int rows = static_cast<int>(skipped.size());
    const Shape s{rows, few.shape.V, few.shape.Vp};
    const size_t width = s.Vp;
    std::vector<floatX> logits(s.count());
    std::vector<int> targets(rows);
    for (int row = 0; row < rows; ++row) {
        const int source = row % FewRows::kRows;
        std::copy_n(few.logits.begin() + source * width, width, logits.begin() + row * width);
        targets[row] = skipped[row] ? -1 : few.targets[source];
    }
    const DeviceGuarded<floatX> device_logits(logits);
    DeviceGuarded<float> device_losses(rows);
    const DeviceGuarded<int> device_targets(targets);
    run(way, device_logits.get(), device_losses.get(), device_targets.get(), FewRows::kDloss, s);
    const std::vector<floatX> got = device_logits.download();
    const std::vector<float> losses = device_losses.download();
    device_logits.expect_guards_intact("logits");
    device_losses.expect_guards_intact("losses");
    const std::vector<floatX> zeros(width, from_float<floatX>(0.0f));
    const float no_loss = 0.0f;
    int wrong = 0, first_wrong = -1;
    for (int row = 0; row < rows; ++row) {
        const int source = row % FewRows::kRows;
        const floatX* wanted = skipped[row] ? zeros.data() : few.dlogits.data() + source * width;
        const float* loss = skipped[row] ? &no_loss : &few.losses[source];
        if (same_bits(got.data() + row * width, wanted, width) &&
            same_bits(&losses[row], loss, 1)) {
            continue;
        }
        if (wrong++ == 0) first_wrong = row;
    }
    EXPECT_EQ(wrong, 0) << what << ", " << name_of(way) << ", V " << s.V << ", " << rows
                        << " rows, first wrong one " << first_wrong;
}

TEST(GpuFusedClassifier, RowsHaveTheSameBitsInBatchesOfAnySize) {
    const int processors = device_attribute(cudaDevAttrMultiProcessorCount);
    for (const Shape s : {Shape{1, 1600, 1600}, Shape{1, 4100, 4104}, Shape{1, 16381, 16384}}) {
        const FewRows few(s.V, s.Vp);
        // Fewer rows than blocks, one row more or less, several rows for each;
        // of short rows also so many that blocks come in several rounds.
        for (const int rows :
             {1, 2, 3, processors - 1, processors, processors + 1, 2 * processors - 1,
              2 * processors, 2 * processors + 1, 3 * processors, 4 * processors + 1,
              9 * processors + 7, s.V < 2000 ? 140 * processors + 3 : 4}) {
            for (const Way way : ways_for(s.V)) {
                expect_rows_of(few, std::vector<bool>(rows), way, "all targets");
            }
        }
    }
}

TEST(GpuFusedClassifier, ThousandsOfGpt2RowsHaveTheBitsOfAFew) {
    const FewRows few(50257, 50304);
    for (const Way way : ways_for(50257)) {
        for (const char* what : {"first run", "second run"}) {
            expect_rows_of(few, std::vector<bool>(2111), way, what);
        }
    }
}

// A row without a target is not fetched: the next one has to be, and none may come in its place.
TEST(GpuFusedClassifier, RowsWithoutTargetsAnywhereLeaveTheOthersAlone) {
    const int processors = device_attribute(cudaDevAttrMultiProcessorCount);
    const FewRows few(4100, 4104);
    const int rows = 11 * processors + 5;
    std::vector<bool> none(rows), all(rows, true), ends(rows), alternate(rows), some(rows);
    std::vector<bool> first_half(rows), second_half(rows);
    for (int row = 0; row < rows; ++row) {
        ends[row] = row == 0 || row == rows - 1;
        // A block's rows are one or two times the number of multiprocessors apart, or more.
        alternate[row] = row / processors % 4 >= 2;
        some[row] = random_bits32(9, RandomPurpose::kTest, 1, row) % 3 == 0;
        first_half[row] = row < rows / 2;
        second_half[row] = row >= rows / 2;
    }
    for (const Way way : ways_for(4100)) {
        expect_rows_of(few, none, way, "all targets");
        expect_rows_of(few, all, way, "no targets");
        expect_rows_of(few, ends, way, "none at the ends");
        expect_rows_of(few, alternate, way, "none in every second step");
        expect_rows_of(few, some, way, "none in a third");
        expect_rows_of(few, first_half, way, "none in the first half");
        expect_rows_of(few, second_half, way, "none in the second half");
        expect_rows_of(few, {true}, way, "one row without");
        expect_rows_of(few, {true, false, true}, way, "the second of three");
    }
}

// What a row with a NaN leaves in shared memory must not reach the block's next ones.
TEST(GpuFusedClassifier, NaNStaysInItsRow) {
    const int processors = device_attribute(cudaDevAttrMultiProcessorCount);
    const FewRows few(4100, 4104);
    const Shape s{9 * processors, few.shape.V, few.shape.Vp};
    const size_t width = s.Vp;
    for (const Way way : ways_for(s.V)) {
        std::vector<floatX> logits(s.count());
        std::vector<int> targets(s.rows);
        for (int row = 0; row < s.rows; ++row) {
            const int source = row % FewRows::kRows;
            std::copy_n(few.logits.begin() + source * width, width, logits.begin() + row * width);
            targets[row] = few.targets[source];
            if (row % 5 == 2) {
                logits[row * width + row % s.V] = from_float<floatX>(std::nanf(""));
            }
        }
        const DeviceGuarded<floatX> device_logits(logits);
        DeviceGuarded<float> device_losses(s.rows);
        const DeviceGuarded<int> device_targets(targets);
        run(way, device_logits.get(), device_losses.get(), device_targets.get(), FewRows::kDloss,
            s);
        const std::vector<floatX> got = device_logits.download();
        const std::vector<float> losses = device_losses.download();
        for (int row = 0; row < s.rows; ++row) {
            if (row % 5 == 2) {
                ASSERT_TRUE(std::isnan(losses[row])) << name_of(way) << " row " << row;
                ASSERT_TRUE(std::isnan(to_float(got[row * width + (row + 1) % s.V]))) << row;
                continue;
            }
            const int source = row % FewRows::kRows;
            ASSERT_TRUE(same_bits(&losses[row], &few.losses[source], 1))
                << name_of(way) << " row " << row;
            ASSERT_TRUE(
                same_bits(got.data() + row * width, few.dlogits.data() + source * width, width))
                << name_of(way) << " row " << row;
        }
    }
}

// 3.3e9 logits: an index of 32 bits ends up in another row.
TEST(GpuFusedClassifier, MoreLogitsThan32BitsCountAreEachInTheirRow) {
    const Shape s{65536, 50257, 50304}, small{61, s.V, s.Vp};
    size_t free_bytes = 0, all_bytes = 0;
    cuda_check(cudaMemGetInfo(&free_bytes, &all_bytes));
    if (free_bytes < s.count() * sizeof(floatX) + (size_t{1} << 30)) {
        GTEST_SKIP() << "needs " << (s.count() * sizeof(floatX) >> 30) << " GiB of device memory";
    }
    // Row r of the large batch is row r % 61 of the small one, 61 being prime to all that is round.
    const std::vector<floatX> rows = normal_values<floatX>(small.count(), 1, 3.0);
    const std::vector<int> small_targets = some_targets(small);
    const Result expected(rows, small_targets, 1.0f / 65536, small, true);

    DeviceBuffer<floatX> logits(s.count());
    cuda_check(cudaMemcpy(logits.get(), rows.data(), rows.size() * sizeof(floatX),
                          cudaMemcpyHostToDevice));
    for (size_t filled = small.count(); filled < s.count();) {
        const size_t more = std::min(filled, s.count() - filled);
        cuda_check(cudaMemcpy(logits.get() + filled, logits.get(), more * sizeof(floatX),
                              cudaMemcpyDeviceToDevice));
        filled += more;
    }
    std::vector<int> targets(s.rows);
    for (int row = 0; row < s.rows; ++row) targets[row] = small_targets[row % small.rows];
    const DeviceGuarded<int> device_targets(targets);
    DeviceGuarded<float> device_losses(s.rows);
    fused_classifier(logits.get(), device_losses.get(), device_targets.get(), 1.0f / 65536, s.rows,
                     s.V, s.Vp, true, nullptr);
    const std::vector<float> losses = device_losses.download();
    size_t wrong = 0;
    for (int row = 0; row < s.rows; ++row) {
        wrong += !same_bits(&losses[row], &expected.losses[row % small.rows], 1);
    }
    EXPECT_EQ(wrong, 0u) << "losses";
    std::vector<floatX> got(s.Vp);
    // 2^31 and 2^32 elements lie in rows 42690 and 85380; 42689 to 42691 are around the first.
    for (const int row : {0, 1, 511, 21345, 42688, 42689, 42690, 42691, 60000, 65534, 65535}) {
        cuda_check(cudaMemcpy(got.data(), logits.get() + static_cast<size_t>(row) * s.Vp,
                              got.size() * sizeof(floatX), cudaMemcpyDeviceToHost));
        const floatX* wanted =
            expected.logits.data() + static_cast<size_t>(row % small.rows) * s.Vp;
        EXPECT_TRUE(same_bits(got.data(), wanted, got.size())) << "row " << row;
    }
    device_losses.expect_guards_intact("losses");
}

double mean_of(const std::vector<float>& losses) {
    DeviceGuarded<float> device_losses(losses);
    DeviceGuarded<double> mean(1);
    mean_loss(mean.get(), device_losses.get(), static_cast<int>(losses.size()), nullptr);
    mean.expect_guards_intact("out");
    return mean.download()[0];
}

TEST(GpuFusedClassifier, MeanLossAddsInDouble) {
    std::vector<float> losses(100001, 1.0f);
    losses[0] = 1e8f;  // an fp32 sum would lose every 1 after it
    EXPECT_EQ(mean_of(losses), (1e8 + 1e5) / 100001);
    EXPECT_EQ(mean_of({1.0f, 2.0f, 4.0f}), 7.0 / 3.0);
    for (const size_t rows : {1, 31, 1023, 1024, 1025, 65536}) {
        const std::vector<float> values = normal_values<float>(rows, 1, 0.5, 3.0);
        double expected = 0.0;
        cpu::mean_loss(&expected, values.data(), static_cast<int>(rows), nullptr);
        EXPECT_NEAR(mean_of(values) / expected, 1.0, 1e-14) << rows;
        EXPECT_EQ(mean_of(values), mean_of(values)) << rows;
    }
}

TEST(GpuFusedClassifier, RefusesBadShapes) {
    floatX* x = nullptr;
    float* losses = nullptr;
    double* mean = nullptr;
    int* target = nullptr;
    EXPECT_THROW(fused_classifier(x, losses, target, 1.0f, 0, 1, 1, true, nullptr), Error);
    EXPECT_THROW(fused_classifier(x, losses, target, 1.0f, 1, 0, 1, true, nullptr), Error);
    EXPECT_THROW(fused_classifier(x, losses, target, 1.0f, 1, 2, 1, true, nullptr), Error);
    EXPECT_THROW(mean_loss(mean, losses, 0, nullptr), Error);
}

TEST(GpuFusedClassifier, Bandwidth) {
    // 6 GiB in bf16, of which no cache holds a part worth mentioning: one buffer will do.
    const Shape s{65536, 50257, 50304};
    size_t free_bytes = 0, all_bytes = 0;
    cuda_check(cudaMemGetInfo(&free_bytes, &all_bytes));
    if (free_bytes < s.count() * sizeof(floatX) + (size_t{1} << 30)) {
        GTEST_SKIP() << "needs " << (s.count() * sizeof(floatX) >> 30) << " GiB of device memory";
    }
    const DeviceBuffer<floatX> logits = device_values<floatX>(s.count(), 1);
    const DeviceBuffer<float> losses = device_values<float>(s.rows, 3);
    const DeviceBuffer<double> mean(1);
    const DeviceGuarded<int> targets(some_targets(s));
    const double bytes = static_cast<double>(logits.bytes());
    for (const bool write : {false, true}) {
        report_bandwidth(write ? "fused_classifier d12 B 64, dlogits" : "fused_classifier d12 B 64",
                         (write ? 2 : 1) * bytes, [&](cudaStream_t stream, int) {
                             fused_classifier(logits.get(), losses.get(), targets.get(),
                                              1.0f / 65536, s.rows, s.V, s.Vp, write, stream);
                         });
    }
    for (const Way way : ways_for(s.V)) {
        if (way == Way::kLauncher) continue;
        const std::string name = std::string("  dlogits by ") + name_of(way);
        report_bandwidth(name.c_str(), 2 * bytes, [&](cudaStream_t stream, int) {
            run(way, logits.get(), losses.get(), targets.get(), 1.0f / 65536, s, stream);
        });
    }
    report_bandwidth("mean_loss, 65536 rows", 65536 * 4.0, [&](cudaStream_t stream, int) {
        mean_loss(mean.get(), losses.get(), 65536, stream);
    });
}

}  // namespace
