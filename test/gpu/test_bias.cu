#include "llmc/bias.cuh"
#include "llmc/cpu/bias.h"
#include "test/gpu/gpu_checks.h"

namespace {

using namespace llmc;
using namespace llmc::test;

struct Shape {
    int rows, OC;
};
// One part and many, whole vectors of columns and not, d12's and d48's hidden layers.
const Shape kShapes[] = {{1, 1},     {3, 7},      {64, 36},     {65, 256},   {129, 257},
                         {1000, 12}, {4096, 384}, {8192, 3072}, {2048, 6400}};

struct Case {
    int rows, OC;
    std::vector<floatX> dout, inp;
    std::vector<gradX> old;
    DeviceGuarded<unsigned char> scratch;

    explicit Case(const Shape& shape)
        : rows(shape.rows),
          OC(shape.OC),
          dout(normal_values<floatX>(static_cast<size_t>(rows) * OC, 1)),
          inp(normal_values<floatX>(dout.size(), 2, 2.0)),
          old(normal_values<gradX>(OC, 3)),
          scratch(bias_scratch_bytes(rows, OC)) {}
};

TEST(GpuBias, SumsMatchTheTwin) {
    for (const Shape& shape : kShapes) {
        for (const bool accumulate : {false, true}) {
            SCOPED_TRACE(format("%d x %d, accumulate %d", shape.rows, shape.OC, accumulate));
            Case c(shape);
            std::vector<double> exact(c.OC);
            for (int i = 0; i < c.OC; ++i) exact[i] = to_float(c.old[i]);
            const std::vector<double> wide = widened(c.dout);
            cpu::bias_backward(exact.data(), wide.data(), nullptr, c.rows, c.OC, accumulate,
                               nullptr);
            const DeviceGuarded<floatX> dout(c.dout);
            DeviceGuarded<gradX> dbias(c.old);
            bias_backward(dbias.get(), dout.get(), c.scratch.get(), c.rows, c.OC, accumulate,
                          nullptr);
            EXPECT_LT(relative_error(dbias.download(), exact), kBound<gradX>);
            dbias.expect_guards_intact("dbias");
            c.scratch.expect_guards_intact("scratch");
        }
    }
}

TEST(GpuBias, WithGeluTheBitsAreThoseOfTheTwoApart) {
    for (const Shape& shape : kShapes) {
        for (const size_t offset : {0, 1}) {
            for (const bool accumulate : {false, true}) {
                SCOPED_TRACE(format("%d x %d, offset %zu, accumulate %d", shape.rows, shape.OC,
                                    offset, accumulate));
                Case c(shape);
                const DeviceGuarded<floatX> inp(c.inp, offset);
                DeviceGuarded<floatX> together(c.dout, offset), apart(c.dout, offset);
                DeviceGuarded<gradX> dbias(c.old), dbias_apart(c.old);
                gelu_backward_bias(together.get(), dbias.get(), together.get(), inp.get(),
                                   c.scratch.get(), c.rows, c.OC, accumulate, nullptr);
                gelu_backward(apart.get(), apart.get(), inp.get(), c.dout.size(), nullptr);
                bias_backward(dbias_apart.get(), apart.get(), c.scratch.get(), c.rows, c.OC,
                              accumulate, nullptr);
                EXPECT_TRUE(same_bits(together.download(), apart.download()));
                EXPECT_TRUE(same_bits(dbias.download(), dbias_apart.download()));
                together.expect_guards_intact("dinp");
                dbias.expect_guards_intact("dbias");
            }
        }
    }
}

TEST(GpuBias, BadShapesAreRefused) {
    floatX* x = nullptr;
    gradX* g = nullptr;
    EXPECT_THROW(bias_backward(g, x, nullptr, 0, 4, false, nullptr), Error);
    EXPECT_THROW(gelu_backward_bias(x, g, x, x, nullptr, 4, -1, false, nullptr), Error);
}

TEST(GpuBias, Speed) {
    const int rows = 65536, OC = 3072;
    const size_t count = static_cast<size_t>(rows) * OC;
    const DeviceGuarded<floatX> inp(normal_values<floatX>(count, 1)),
        dout(normal_values<floatX>(count, 2));
    DeviceGuarded<floatX> dinp(count);
    DeviceGuarded<gradX> dbias(OC);
    DeviceGuarded<unsigned char> scratch(bias_scratch_bytes(rows, OC));
    const double bytes = static_cast<double>(count) * sizeof(floatX);
    report_bandwidth("bias_backward, 65536 x 3072", bytes, [&](cudaStream_t stream, int) {
        bias_backward(dbias.get(), dout.get(), scratch.get(), rows, OC, true, stream);
    });
    report_bandwidth("gelu_backward_bias, 65536 x 3072", 3.0 * bytes,
                     [&](cudaStream_t stream, int) {
                         gelu_backward_bias(dinp.get(), dbias.get(), dout.get(), inp.get(),
                                            scratch.get(), rows, OC, true, stream);
                     });
}

}  // namespace
