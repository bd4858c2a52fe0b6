#include <cmath>
#include <limits>

#include "llmc/cpu/gelu.h"
#include "llmc/gelu.cuh"
#include "test/gpu/gpu_checks.h"

namespace {

using namespace llmc;
using namespace llmc::test;

// The CPU tests' counts, pieces of 8192 and 4096 elements and their neighbours, rows of d12 and
// d48.
const size_t kCounts[] = {1,    36,   255,  257,  1600,     40001,    4095,        4096,
                          4097, 8191, 8192, 8193, 7 * 3072, 3 * 6400, 3 * 3072 + 4};

TEST(GpuGelu, ForwardMatchesTwin) {
    for (const size_t count : kCounts) {
        const std::vector<floatX> inp = normal_values<floatX>(count, 1, 2.0);
        std::vector<double> exact(count);
        cpu::gelu_forward(exact.data(), widened(inp).data(), count, nullptr);
        DeviceGuarded<floatX> device_inp(inp), out(count);
        gelu_forward(out.get(), device_inp.get(), count, nullptr);
        const std::vector<floatX> apart = out.download();
        EXPECT_LT(relative_error(apart, exact), kBound<floatX>) << count;
        out.expect_guards_intact("out");
        gelu_forward(device_inp.get(), device_inp.get(), count, nullptr);
        EXPECT_TRUE(same_bits(device_inp.download(), apart)) << "in place, " << count;
    }
}

TEST(GpuGelu, BackwardMatchesTwinAndWorksInPlace) {
    for (const size_t count : kCounts) {
        const std::vector<floatX> inp = normal_values<floatX>(count, 1, 2.0);
        const std::vector<floatX> dout = normal_values<floatX>(count, 2);
        std::vector<double> exact(count);
        cpu::gelu_backward(exact.data(), widened(dout).data(), widened(inp).data(), count, nullptr);
        DeviceGuarded<floatX> device_inp(inp), device_dout(dout), dinp(count);
        gelu_backward(dinp.get(), device_dout.get(), device_inp.get(), count, nullptr);
        const std::vector<floatX> apart = dinp.download();
        EXPECT_LT(relative_error(apart, exact), kBound<floatX>) << count;
        dinp.expect_guards_intact("dinp");
        gelu_backward(device_dout.get(), device_dout.get(), device_inp.get(), count, nullptr);
        EXPECT_TRUE(same_bits(device_dout.download(), apart)) << "in place, " << count;
        device_dout.expect_guards_intact("dout");
    }
}

TEST(GpuGelu, BuffersThatAreNotAlignedGiveTheSameBits) {
    const size_t count = 20011;
    const std::vector<floatX> inp = normal_values<floatX>(count, 1, 2.0);
    std::vector<floatX> forward, backward;
    for (const size_t offset : {0, 1, 3}) {
        DeviceGuarded<floatX> device_inp(inp, offset), out(count, 2 * offset), dinp(count, offset);
        gelu_forward(out.get(), device_inp.get(), count, nullptr);
        gelu_backward(dinp.get(), out.get(), device_inp.get(), count, nullptr);
        out.expect_guards_intact("out");
        dinp.expect_guards_intact("dinp");
        if (offset == 0) {
            forward = out.download();
            backward = dinp.download();
        }
        EXPECT_TRUE(same_bits(out.download(), forward)) << offset;
        EXPECT_TRUE(same_bits(dinp.download(), backward)) << offset;
    }
}

TEST(GpuGelu, FarFromZeroAndNaN) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::vector<floatX> inp, dout(6, from_float<floatX>(1.0f));
    for (const float x : {0x1p13f, -0x1p13f, 0x1p100f, -0x1p100f, nan, 0.0f}) {
        inp.push_back(from_float<floatX>(x));
    }
    DeviceGuarded<floatX> device_inp(inp), device_dout(dout), out(6), dinp(6);
    gelu_forward(out.get(), device_inp.get(), 6, nullptr);
    gelu_backward(dinp.get(), device_dout.get(), device_inp.get(), 6, nullptr);
    const std::vector<floatX> y = out.download(), d = dinp.download();
    const float expected_out[4] = {0x1p13f, 0.0f, 0x1p100f, 0.0f}, expected_dinp[4] = {1, 0, 1, 0};
    for (int i = 0; i < 4; ++i) {
        EXPECT_EQ(to_float(y[i]), expected_out[i]) << i;
        EXPECT_EQ(to_float(d[i]), expected_dinp[i]) << i;
    }
    EXPECT_TRUE(std::isnan(to_float(y[4])) && std::isnan(to_float(d[4])));
    EXPECT_EQ(to_float(y[5]), 0.0f);
    EXPECT_EQ(to_float(d[5]), 0.5f);
}

TEST(GpuGelu, RefusesNothingToDo) {
    floatX* x = nullptr;
    EXPECT_THROW(gelu_forward(x, x, 0, nullptr), Error);
    EXPECT_THROW(gelu_backward(x, x, x, 0, nullptr), Error);
}

TEST(GpuGelu, Bandwidth) {
    const size_t count = size_t{64} * 1024 * 3072;
    const DeviceBuffer<floatX> a[2] = {device_values<floatX>(count, 1, 2.0),
                                       device_values<floatX>(count, 2, 2.0)};
    const DeviceBuffer<floatX> b[2] = {device_values<floatX>(count, 3),
                                       device_values<floatX>(count, 4)};
    report_bandwidth("gelu_forward d12 B 64", 2.0 * a[0].bytes(),
                     [&](cudaStream_t stream, int set) {
                         gelu_forward(b[set].get(), a[set].get(), count, stream);
                     });
    report_bandwidth("gelu_backward d12 B 64, in place", 3.0 * a[0].bytes(),
                     [&](cudaStream_t stream, int set) {
                         gelu_backward(b[set].get(), b[set].get(), a[set].get(), count, stream);
                     });
}

}  // namespace
