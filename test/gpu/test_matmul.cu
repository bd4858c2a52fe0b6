// The matrix products on the GPU against their CPU twins, and how fast they are.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "llmc/cpu/matmul.h"
#include "llmc/matmul.cuh"
#include "test/gpu/gpu_checks.h"

namespace llmc {
namespace {

using test::DeviceGuarded;
using test::relative_error;
using test::same_bits;

struct Shape {
    int rows, C, OC;
};

// The twin's own shapes: one and many tiles, every remainder; channels that are no multiple of 16
// bytes (36 and 18 in bf16); then aligned ones.
const Shape kSmallShapes[] = {
    {1, 1, 1},       {5, 36, 7},     {64, 36, 108},   {64, 18, 54},    {3, 1600, 33},
    {300, 37, 1100}, {33, 40, 5003}, {9, 4201, 17},   {257, 128, 513}, {4200, 24, 31},
    {70, 1600, 129}, {16, 257, 300}, {520, 20, 4500}, {128, 64, 192},  {1, 768, 50304},
};
// d12's and d48's products at 4096 positions: qkv, attproj, fc, fcproj and the LM head.
const Shape kRealShapes[] = {
    {4096, 768, 2304},  {4096, 768, 768},    {4096, 768, 3072},  {4096, 3072, 768},
    {4096, 768, 50304}, {4096, 1600, 4800},  {4096, 1600, 1600}, {4096, 1600, 6400},
    {4096, 6400, 1600}, {4096, 1600, 50304},
};

std::string name_of(const Shape& s) {
    return "rows " + std::to_string(s.rows) + " C " + std::to_string(s.C) + " OC " +
           std::to_string(s.OC);
}

// Uniform with mean 0 and this standard deviation.
template <class T>
std::vector<T> random_values(size_t count, uint32_t stream, double deviation = 1.0) {
    std::vector<T> values(count);
    cpu::parallel_for(count, 1 << 16, [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; i += 4) {
            const Philox4 bits = philox(42, RandomPurpose::kTest, stream, i / 4);
            for (size_t k = i; k < std::min(end, i + 4); ++k) {
                const double x = (2.0 * uniform_from_bits(bits.lane[k % 4]) - 1.0) * std::sqrt(3.0);
                values[k] = from_float<T>(static_cast<float>(deviation * x));
            }
        }
    });
    return values;
}

// Whole numbers from -7 to 7: every product and sum of a few thousand is exact in fp32.
template <class T>
std::vector<T> random_integers(size_t count, uint32_t stream) {
    std::vector<T> values(count);
    for (size_t i = 0; i < count; ++i) {
        const uint32_t bits = random_bits32(7, RandomPurpose::kTest, stream, i);
        values[i] = from_float<T>(static_cast<float>(static_cast<int>(bits % 15) - 7));
    }
    return values;
}

#if defined(LLMC_BF16) && !defined(LLMC_GRAD_FP32)
std::vector<float> widen_all(const std::vector<floatX>& values) {
    std::vector<float> wide(values.size());
    for (size_t i = 0; i < values.size(); ++i) wide[i] = to_float(values[i]);
    return wide;
}

uint32_t float_bits(float value) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

// The bf16 of these bits.
floatX from_bits16(uint32_t bits) {
    const auto low = static_cast<uint16_t>(bits);
    floatX value;
    std::memcpy(static_cast<void*>(&value), &low, sizeof(low));
    return value;
}
#endif

// One result, in device memory between guards, and what it should be.
template <class T>
struct Result {
    const char* name;
    DeviceGuarded<T> device;
    std::vector<T> twin;

    Result(const char* name, size_t count, size_t offset)
        : name(name), device(count, offset), twin(count) {}
    // Makes both NaN, or `old`.
    void reset(const std::vector<T>* old) {
        device.poison();
        std::memset(static_cast<void*>(twin.data()), 0xff, twin.size() * sizeof(T));
        if (old == nullptr) return;
        device.upload(*old);
        twin = *old;
    }
    void expect_near() {
        device.expect_guards_intact(name);
        EXPECT_LE(relative_error(device.download(), twin), test::kBound<T>) << name;
    }
    void expect_same_bits(const std::vector<T>& expected) {
        device.expect_guards_intact(name);
        EXPECT_TRUE(same_bits(device.download(), expected)) << name;
    }
};

// All products of one shape, on the GPU and by the twins.
struct Case {
    Shape shape;
    size_t rows = shape.rows, C = shape.C, OC = shape.OC;
    std::vector<floatX> inp, weight, bias, dout;
    std::vector<gradX> old_dweight, old_dbias;
    DeviceGuarded<floatX> device_inp, device_weight, device_bias, device_dout;
    DeviceGuarded<unsigned char> scratch;
    Result<floatX> out, dinp;
    Result<gradX> dweight, dbias;

    // Device memory starts `offset` elements after a multiple of 256 bytes.
    explicit Case(const Shape& s, bool integers = false, size_t offset = 0)
        : shape(s),
          device_inp(rows * C, offset),
          device_weight(OC * C, offset),
          device_bias(OC, offset),
          device_dout(rows * OC, offset),
          scratch(matmul_backward_weight_scratch_bytes(s.rows, s.C, s.OC)),
          out("out", rows * OC, offset),
          dinp("dinp", rows * C, offset),
          dweight("dweight", OC * C, offset),
          dbias("dbias", OC, offset) {
        const double sum = std::sqrt(static_cast<double>(rows));
        const auto fill = [&](auto& values, size_t count, uint32_t stream, double deviation) {
            using T = typename std::decay_t<decltype(values)>::value_type;
            values = integers ? random_integers<T>(count, stream)
                              : random_values<T>(count, stream, deviation);
        };
        fill(inp, rows * C, 1, 1.0);
        fill(weight, OC * C, 2, 0.3);
        fill(bias, OC, 3, 1.0);
        fill(dout, rows * OC, 4, 1.0);
        fill(old_dweight, OC * C, 5, sum);
        fill(old_dbias, OC, 6, sum);
        device_inp.upload(inp);
        device_weight.upload(weight);
        device_bias.upload(bias);
        device_dout.upload(dout);
    }

    // The GPU's three products.
    void run(bool with_bias, bool accumulate) {
        out.reset(nullptr);
        dinp.reset(nullptr);
        dweight.reset(accumulate ? &old_dweight : nullptr);
        dbias.reset(accumulate ? &old_dbias : nullptr);
        scratch.poison();
        matmul_forward(out.device.get(), device_inp.get(), device_weight.get(),
                       with_bias ? device_bias.get() : nullptr, shape.rows, shape.C, shape.OC,
                       nullptr);
        matmul_backward_input(dinp.device.get(), device_dout.get(), device_weight.get(), shape.rows,
                              shape.C, shape.OC, nullptr);
        matmul_backward_weight(dweight.device.get(), dbias.device.get(), device_dout.get(),
                               device_inp.get(), scratch.get(), shape.rows, shape.C, shape.OC,
                               accumulate, nullptr);
        cuda_check(cudaDeviceSynchronize());
        scratch.expect_guards_intact("scratch");
    }
    // The twins', after run().
    void run_twins(bool with_bias, bool accumulate) {
        cpu::matmul_forward(out.twin.data(), inp.data(), weight.data(),
                            with_bias ? bias.data() : nullptr, shape.rows, shape.C, shape.OC,
                            nullptr);
        cpu::matmul_backward_input(dinp.twin.data(), dout.data(), weight.data(), shape.rows,
                                   shape.C, shape.OC, nullptr);
        cpu::matmul_backward_weight(dweight.twin.data(), dbias.twin.data(), dout.data(), inp.data(),
                                    nullptr, shape.rows, shape.C, shape.OC, accumulate, nullptr);
    }
};

class GpuMatmul : public testing::Test {
  protected:
    void SetUp() override { matmul_allow_tf32(false); }
    void TearDown() override { matmul_allow_tf32(false); }
};

TEST_F(GpuMatmul, EqualsItsTwinAtSmallShapes) {
    for (const Shape& shape : kSmallShapes) {
        Case c(shape);
        for (const bool accumulate : {false, true}) {
            SCOPED_TRACE(name_of(shape) + (accumulate ? " accumulate" : " overwrite"));
            c.run(!accumulate, accumulate);
            c.run_twins(!accumulate, accumulate);
            c.out.expect_near();
            c.dinp.expect_near();
            c.dweight.expect_near();
            c.dbias.expect_near();
        }
    }
}

TEST_F(GpuMatmul, EqualsItsTwinWherePointersAreNotAligned) {
    for (const size_t offset : {1, 3}) {
        for (const Shape& shape : {Shape{64, 36, 108}, Shape{128, 64, 192}, Shape{300, 96, 768}}) {
            SCOPED_TRACE(name_of(shape) + " offset " + std::to_string(offset));
            Case c(shape, false, offset);
            c.run(true, true);
            c.run_twins(true, true);
            c.out.expect_near();
            c.dinp.expect_near();
            c.dweight.expect_near();
            c.dbias.expect_near();
        }
    }
}

TEST_F(GpuMatmul, EqualsItsTwinAtRealShapes) {
    for (const Shape& shape : kRealShapes) {
        SCOPED_TRACE(name_of(shape));
        Case c(shape);
        c.run(true, true);
        c.run_twins(true, true);
        c.out.expect_near();
        c.dinp.expect_near();
        c.dweight.expect_near();
        c.dbias.expect_near();
    }
}

// With exact sums the right values are known to the bit.
const Shape kExactShapes[] = {
    {200, 48, 72}, {200, 50, 70}, {4200, 24, 31}, {40, 700, 600}, {2048, 64, 256},
};

// dweight after accumulation: the old gradient and the exact product, rounded once, or the product
// rounded to gradX before. `once` is the twin's result, `product` the twin's without accumulation.
struct AccumulatedValues {
    std::vector<gradX> once, twice;

    AccumulatedValues(std::vector<gradX> once, const std::vector<gradX>& old,
                      const std::vector<gradX>& product)
        : once(std::move(once)), twice(old.size()) {
        for (size_t i = 0; i < old.size(); ++i) {
            twice[i] = from_float<gradX>(to_float(old[i]) + to_float(product[i]));
        }
    }
    // How many elements are neither of the two.
    size_t wrong(const std::vector<gradX>& values) const {
        size_t count = values.size() == once.size() ? 0 : 1;
        for (size_t i = 0; i < std::min(values.size(), once.size()); ++i) {
            count += !same_bits(&values[i], &once[i], 1) && !same_bits(&values[i], &twice[i], 1);
        }
        return count;
    }
};

// A second rounding, or a bias or an old gradient added after the first, would miss the one right
// value; accumulated weight gradients have two.
TEST_F(GpuMatmul, RoundsTheExactSumOnce) {
    for (const Shape& shape : kExactShapes) {
        SCOPED_TRACE(name_of(shape));
        Case c(shape, true);
        c.run(true, false);
        c.run_twins(true, false);
        const std::vector<gradX> product = c.dweight.twin;
        c.out.expect_same_bits(c.out.twin);
        c.dinp.expect_same_bits(c.dinp.twin);
        c.dweight.expect_same_bits(product);
        c.dbias.expect_same_bits(c.dbias.twin);
        c.run(true, true);
        c.run_twins(true, true);
        c.dbias.expect_same_bits(c.dbias.twin);
        c.dweight.device.expect_guards_intact("dweight");
        const AccumulatedValues right(c.dweight.twin, c.old_dweight, product);
        EXPECT_EQ(right.wrong(c.dweight.device.download()), 0u) << "of " << product.size();
    }
}

#if defined(LLMC_BF16) && !defined(LLMC_GRAD_FP32)
// What the test above accepts leaves no room for other roundings of the same sums.
TEST_F(GpuMatmul, TheTwoRightSumsAreNeitherTruncatedNorStochastic) {
    for (const Shape& shape : kExactShapes) {
        SCOPED_TRACE(name_of(shape));
        const size_t rows = shape.rows, C = shape.C, OC = shape.OC;
        const auto inp = random_integers<floatX>(rows * C, 1);
        const auto dout = random_integers<floatX>(rows * OC, 4);
        const auto old = random_integers<gradX>(OC * C, 5);
        std::vector<gradX> product(OC * C), once = old;
        std::vector<float> exact(OC * C);
        gradX* no_bias = nullptr;
        float* no_wide_bias = nullptr;
        cpu::matmul_backward_weight(product.data(), no_bias, dout.data(), inp.data(), nullptr,
                                    shape.rows, shape.C, shape.OC, false, nullptr);
        cpu::matmul_backward_weight(once.data(), no_bias, dout.data(), inp.data(), nullptr,
                                    shape.rows, shape.C, shape.OC, true, nullptr);
        const std::vector<float> wide_inp(widen_all(inp)), wide_dout(widen_all(dout));
        cpu::matmul_backward_weight(exact.data(), no_wide_bias, wide_dout.data(), wide_inp.data(),
                                    nullptr, shape.rows, shape.C, shape.OC, false, nullptr);
        const AccumulatedValues right(once, old, product);
        std::vector<gradX> truncated(OC * C), stochastic(OC * C);
        for (size_t i = 0; i < exact.size(); ++i) {
            const float sum = exact[i] + to_float(old[i]);
            truncated[i] = from_bits16(float_bits(sum) >> 16);
            const uint32_t noise = random_bits32(9, RandomPurpose::kTest, 0, i) & 0xffff;
            stochastic[i] = from_bits16((float_bits(sum) + noise) >> 16);
        }
        EXPECT_EQ(right.wrong(right.once), 0u);
        EXPECT_EQ(right.wrong(right.twice), 0u);
        EXPECT_GT(right.wrong(truncated), exact.size() / 1000);
        EXPECT_GT(right.wrong(stochastic), exact.size() / 1000);
        std::vector<gradX> one_wrong = once;
        one_wrong.back() = from_float<gradX>(to_float(once.back()) + 1000.0f);
        EXPECT_EQ(right.wrong(one_wrong), 1u);
    }
}
#endif

TEST_F(GpuMatmul, TwoRunsGiveTheSameBits) {
    // Small outputs with long sums are what a library may cut and add up in any order.
    for (const Shape& shape : {Shape{64, 18, 54}, Shape{16384, 64, 64}, Shape{4096, 768, 2304},
                               Shape{8192, 768, 768}, Shape{300, 37, 1100}}) {
        SCOPED_TRACE(name_of(shape));
        Case c(shape);
        c.run(true, true);
        const auto out = c.out.device.download(), dinp = c.dinp.device.download();
        const auto dweight = c.dweight.device.download(), dbias = c.dbias.device.download();
        for (int repeat = 0; repeat < 3; ++repeat) {
            c.run(true, true);
            c.out.expect_same_bits(out);
            c.dinp.expect_same_bits(dinp);
            c.dweight.expect_same_bits(dweight);
            c.dbias.expect_same_bits(dbias);
        }
    }
}

#ifdef LLMC_FP32
TEST_F(GpuMatmul, Tf32IsUsedOnlyWhenAllowed) {
    Case c({512, 256, 384});
    c.run(true, false);
    const std::vector<floatX> exact = c.out.device.download();
    matmul_allow_tf32(true);
    c.run(true, false);
    const std::vector<floatX> rounded = c.out.device.download();
    const double error = relative_error(rounded.data(), exact.data(), exact.size());
    EXPECT_GT(error, 1e-5);
    EXPECT_LT(error, 2e-3);
}
#endif

TEST_F(GpuMatmul, BiasGradientOfManyRowsIsAccurate) {
    const Shape shape{40000, 1, 3};
    Case c(shape);
    c.device_dout.upload(std::vector<floatX>(c.rows * c.OC, from_float<floatX>(0.125f)));
    c.run(true, false);
    const float right = to_float(from_float<gradX>(5000.0f));  // 4992 in bf16
    for (const gradX sum : c.dbias.device.download()) EXPECT_EQ(to_float(sum), right);
}

TEST_F(GpuMatmul, NoBiasGradientIsWrittenForANullPointer) {
    Case c({70, 40, 96});
    c.run(true, false);
    c.dbias.reset(nullptr);
    gradX* no_bias = nullptr;
    matmul_backward_weight(c.dweight.device.get(), no_bias, c.device_dout.get(), c.device_inp.get(),
                           c.scratch.get(), 70, 40, 96, false, nullptr);
    cuda_check(cudaDeviceSynchronize());
    for (const gradX value : c.dbias.device.download()) EXPECT_TRUE(std::isnan(to_float(value)));
}

TEST_F(GpuMatmul, RefusesShapesThatAreNotPositive) {
    Case c({2, 3, 4});
    EXPECT_THROW(matmul_forward(c.out.device.get(), c.device_inp.get(), c.device_weight.get(),
                                c.device_bias.get(), 0, 3, 4, nullptr),
                 Error);
    EXPECT_THROW(matmul_backward_input(c.dinp.device.get(), c.device_dout.get(),
                                       c.device_weight.get(), 2, -3, 4, nullptr),
                 Error);
    EXPECT_THROW(
        matmul_backward_weight(c.dweight.device.get(), c.dbias.device.get(), c.device_dout.get(),
                               c.device_inp.get(), c.scratch.get(), 2, 3, 0, false, nullptr),
        Error);
}

// ------------------------------------------------------------------------------------------------
// Speed, in bf16
#if defined(LLMC_BF16) && !defined(LLMC_GRAD_FP32)

// Random values make the tensor cores draw the power, and reach the clock, that training does.
__global__ void random_kernel(floatX* out, size_t count, uint32_t seed) {
    const size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
    if (i >= count) return;
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u ^ seed;
    x = (x ^ (x >> 16)) * 0x45d9f3bu;
    x = (x ^ (x >> 16)) * 0x45d9f3bu;
    out[i] = narrow<floatX>(static_cast<float>(x >> 8) * 0x1p-23f - 1.0f);
}

DeviceBuffer<floatX> random_buffer(size_t count, uint32_t seed) {
    DeviceBuffer<floatX> buffer(count);
    random_kernel<<<static_cast<unsigned>((count + 255) / 256), 256>>>(buffer.get(), count, seed);
    cuda_check(cudaGetLastError());
    return buffer;
}

// Milliseconds of one call, the mean of 20 after 5.
template <class Call>
double time_of(Call&& call) {
    cudaEvent_t start, end;
    cuda_check(cudaEventCreate(&start));
    cuda_check(cudaEventCreate(&end));
    constexpr int kWarmUp = 5, kCalls = 20;
    for (int i = 0; i < kWarmUp; ++i) call();
    cuda_check(cudaEventRecord(start));
    for (int i = 0; i < kCalls; ++i) call();
    cuda_check(cudaEventRecord(end));
    cuda_check(cudaEventSynchronize(end));
    float ms = 0.0f;
    cuda_check(cudaEventElapsedTime(&ms, start, end));
    cudaEventDestroy(start);
    cudaEventDestroy(end);
    return ms / kCalls;
}

// A product of a model, and the times in ms of cuBLASLt's fastest algorithm for it on an H200 (best
// of 8 by timing, 64 MB workspace): forward with bias (d48 fc with GELU, too), dinp, dweight.
struct TimedProduct {
    const char* name;
    Shape shape;
    bool bias;
    double forward, dinp, dweight;
};
const TimedProduct kTimedProducts[] = {
    {"d12 qkv", {65536, 768, 2304}, true, 0.344, 0.318, 0.344},
    {"d12 attproj", {65536, 768, 768}, true, 0.121, 0.114, 0.114},
    {"d12 fc", {65536, 768, 3072}, true, 0.453, 0.403, 0.389},
    {"d12 fcproj", {65536, 3072, 768}, true, 0.406, 0.397, 0.430},
    {"d12 LM head", {65536, 768, 50304}, false, 7.133, 6.236, 7.050},
    {"d48 qkv", {16384, 1600, 4800}, true, 0.413, 0.378, 0.412},
    {"d48 attproj", {16384, 1600, 1600}, true, 0.135, 0.136, 0.118},
    {"d48 fc", {16384, 1600, 6400}, true, 0.515, 0.466, 0.426},
    {"d48 fcproj", {16384, 6400, 1600}, true, 0.479, 0.483, 0.445},
    {"d48 LM head", {16384, 1600, 50304}, false, 3.722, 3.227, 3.373},
};

TEST_F(GpuMatmul, SpeedTable) {
    constexpr double kPeak = 990.0;  // TFLOP/s, dense bf16: H100 and H200 SXM data sheet
    std::printf("%-12s %-8s %8s %8s %9s %7s\n", "product", "pass", "ms", "best ms", "TFLOP/s",
                "of 990");
    for (const TimedProduct& product : kTimedProducts) {
        const int rows = product.shape.rows, C = product.shape.C, OC = product.shape.OC;
        const size_t inputs = static_cast<size_t>(rows) * C, weights = static_cast<size_t>(OC) * C;
        const size_t outputs = static_cast<size_t>(rows) * OC;
        size_t free_bytes = 0, total_bytes = 0;
        cuda_check(cudaMemGetInfo(&free_bytes, &total_bytes));
        if ((2 * inputs + 2 * weights + outputs) * sizeof(floatX) + (size_t{1} << 28) >
            free_bytes) {
            std::printf("%-12s does not fit into this GPU's memory\n", product.name);
            continue;
        }
        const DeviceBuffer<floatX> inp = random_buffer(inputs, 1),
                                   weight = random_buffer(weights, 2);
        const DeviceBuffer<floatX> bias = random_buffer(OC, 3), out = random_buffer(outputs, 4);
        const DeviceBuffer<floatX> dinp(inputs);
        const DeviceBuffer<gradX> dweight(weights), dbias(OC);
        const DeviceBuffer<unsigned char> scratch(
            matmul_backward_weight_scratch_bytes(rows, C, OC));
        const auto print = [&](const char* pass, double ms, double best) {
            const double rate = 2.0 * rows * C * OC / ms * 1e-9;
            std::printf("%-12s %-8s %8.3f %8.3f %9.1f %6.1f%%\n", product.name, pass, ms, best,
                        rate, 100.0 * rate / kPeak);
            EXPECT_GT(ms, 0.0);
        };
        // out is the gradient first, then overwritten.
        print("dinp", time_of([&] {
                  matmul_backward_input(dinp.get(), out.get(), weight.get(), rows, C, OC, nullptr);
              }),
              product.dinp);
        const auto backward_weight = [&](gradX* to_dbias) {
            matmul_backward_weight(dweight.get(), to_dbias, out.get(), inp.get(), scratch.get(),
                                   rows, C, OC, false, nullptr);
        };
        const double alone = time_of([&] { backward_weight(nullptr); });
        print("dweight", alone, product.dweight);
        if (product.bias) {
            const double both = time_of([&] { backward_weight(dbias.get()); });
            std::printf("%-12s %-8s %8.3f %17.0f GB/s\n", product.name, "dbias", both - alone,
                        static_cast<double>(outputs * sizeof(floatX)) / (both - alone) * 1e-6);
        }
        print("forward", time_of([&] {
                  matmul_forward(out.get(), inp.get(), weight.get(),
                                 product.bias ? bias.get() : nullptr, rows, C, OC, nullptr);
              }),
              product.forward);
    }
}

#endif

}  // namespace
}  // namespace llmc
