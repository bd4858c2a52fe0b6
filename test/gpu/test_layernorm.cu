#include <cmath>

#include "llmc/cpu/layernorm.h"
#include "llmc/layernorm.cuh"
#include "test/gpu/gpu_checks.h"

namespace {

using namespace llmc;
using namespace llmc::test;

struct Shape {
    int rows, C;
};
// The CPU tests', d12's to d48's, the widest that each kernel takes and one more, and rows for several
// rounds of the blocks.
const Shape kShapes[] = {{1, 2},     {3, 5},      {7, 36},     {4, 1600},   {1, 129},  {1100, 36},
                         {33, 257},  {37, 768},   {5, 3072},   {3, 256},    {2, 264},  {9, 769},
                         {2, 1024},  {5, 1032},   {3, 2048},   {3, 2056},   {2, 3073}, {3, 3080},
                         {2, 12288}, {1, 12001},  {13000, 24}, {1101, 800}, {1, 776},  {5, 1024},
                         {3, 1280},  {2135, 1600}};

struct Inputs {
    explicit Inputs(Shape s, double mean_of_inp = 0.3)
        : inp(normal_values<floatX>(static_cast<size_t>(s.rows) * s.C, 1, 1.5, mean_of_inp)),
          dout(normal_values<floatX>(inp.size(), 2)),
          weight(normal_values<floatX>(s.C, 3, 0.5, 1.0)),
          bias(normal_values<floatX>(s.C, 4)) {}
    std::vector<floatX> inp, dout, weight, bias;
};

// The twin's results in double on the same numbers.
struct Exact {
    Exact(Shape s, const Inputs& in)
        : inp(widened(in.inp)),
          dout(widened(in.dout)),
          weight(widened(in.weight)),
          out(inp.size()),
          mean(s.rows),
          rstd(s.rows),
          dinp(inp.size()),
          dweight(s.C),
          dbias(s.C),
          dinp_sum(s.C) {
        cpu::layernorm_forward(out.data(), mean.data(), rstd.data(), inp.data(), weight.data(),
                               widened(in.bias).data(), s.rows, s.C, nullptr);
    }
    void backward(Shape s) {
        std::vector<double> scratch(cpu::layernorm_backward_scratch_bytes(s.rows, s.C) /
                                    sizeof(double));
        cpu::layernorm_backward(dinp.data(), dweight.data(), dbias.data(), dinp_sum.data(),
                                dout.data(), inp.data(), weight.data(), mean.data(), rstd.data(),
                                scratch.data(), s.rows, s.C, false, false, nullptr);
    }
    std::vector<double> inp, dout, weight, out, mean, rstd, dinp, dweight, dbias, dinp_sum;
};

struct Forward {
    Forward(Shape s, const Inputs& in, size_t offset = 0) {
        DeviceGuarded<floatX> device_out(in.inp.size(), offset), inp(in.inp, offset),
            weight(in.weight, offset), bias(in.bias, offset);
        DeviceGuarded<float> device_mean(s.rows), device_rstd(s.rows);
        layernorm_forward(device_out.get(), device_mean.get(), device_rstd.get(), inp.get(),
                          weight.get(), bias.get(), s.rows, s.C, nullptr);
        out = device_out.download();
        mean = device_mean.download();
        rstd = device_rstd.download();
        device_out.expect_guards_intact("out");
        device_mean.expect_guards_intact("mean");
        device_rstd.expect_guards_intact("rstd");
    }
    bool operator==(const Forward& other) const {
        return same_bits(out, other.out) && same_bits(mean, other.mean) &&
               same_bits(rstd, other.rstd);
    }
    std::vector<floatX> out;
    std::vector<float> mean, rstd;
};

TEST(GpuLayernorm, ForwardMatchesTwin) {
    for (const Shape s : kShapes) {
        const Inputs in(s);
        const Exact exact(s, in);
        const Forward got(s, in);
        EXPECT_LT(relative_error(got.out, exact.out), kBound<floatX>) << s.rows << "x" << s.C;
        EXPECT_LT(relative_error(got.mean, exact.mean), 1e-5) << s.rows << "x" << s.C;
        EXPECT_LT(relative_error(got.rstd, exact.rstd), 1e-5) << s.rows << "x" << s.C;
        EXPECT_TRUE(Forward(s, in) == got) << "another run, " << s.rows << "x" << s.C;
        EXPECT_TRUE(Forward(s, in, 1) == got) << "not aligned, " << s.rows << "x" << s.C;
    }
}

// The average of the squares minus the square of the average has no correct digit left here.
TEST(GpuLayernorm, VarianceSurvivesALargeMean) {
    const Shape s{3, 1600};
    const Inputs in(s, 4096.0);
    EXPECT_LT(relative_error(Forward(s, in).rstd, Exact(s, in).rstd), 1e-5);
}

// residual = a + b has the twin's bits, and the rest those of layernorm_forward on it, also in
// place.
TEST(GpuLayernorm, FusedResidualGivesTheBitsOfTwoSteps) {
    for (const Shape s : kShapes) {
        Inputs in(s);
        const std::vector<floatX> a = in.inp, &b = in.dout;
        for (size_t i = 0; i < a.size(); ++i) {
            in.inp[i] = rounded<floatX>(double(load(a[i])) + load(b[i]));
        }
        const Forward expected(s, in);
        for (const size_t offset : {0, 1}) {
            for (const bool in_place : {false, true}) {
                DeviceGuarded<floatX> device_a(a, offset), device_b(b, offset),
                    weight(in.weight, offset), bias(in.bias, offset), out(a.size(), offset),
                    apart(a.size(), offset);
                DeviceGuarded<float> mean(s.rows), rstd(s.rows);
                const DeviceGuarded<floatX>& residual = in_place ? device_a : apart;
                fused_residual_layernorm_forward(residual.get(), out.get(), mean.get(), rstd.get(),
                                                 device_a.get(), device_b.get(), weight.get(),
                                                 bias.get(), s.rows, s.C, nullptr);
                EXPECT_TRUE(same_bits(residual.download(), in.inp)) << s.rows << "x" << s.C;
                EXPECT_TRUE(same_bits(out.download(), expected.out)) << s.rows << "x" << s.C;
                EXPECT_TRUE(same_bits(mean.download(), expected.mean)) << s.rows << "x" << s.C;
                EXPECT_TRUE(same_bits(rstd.download(), expected.rstd)) << s.rows << "x" << s.C;
                residual.expect_guards_intact("residual");
                out.expect_guards_intact("out");
            }
        }
    }
}

struct Backward {
    Backward(Shape s, const Inputs& in, const std::vector<float>& mean,
             const std::vector<float>& rstd, bool add_to_dinp, bool accumulate, size_t offset = 0,
             bool with_sum = true)
        : dinp(add_to_dinp ? old_dinp(s) : std::vector<floatX>()),
          dweight(old_gradient(s, 6)),
          dbias(old_gradient(s, 7)),
          dinp_sum(old_gradient(s, 8)) {
        DeviceGuarded<floatX> device_dinp(in.inp.size(), offset), dout(in.dout, offset),
            inp(in.inp, offset), weight(in.weight, offset);
        DeviceGuarded<gradX> device_dweight(s.C, offset), device_dbias(s.C, offset),
            device_dinp_sum(s.C, offset);
        DeviceGuarded<float> device_mean(mean), device_rstd(rstd);
        DeviceGuarded<char> scratch(layernorm_backward_scratch_bytes(s.rows, s.C));
        if (add_to_dinp) device_dinp.upload(dinp);
        if (accumulate) device_dweight.upload(dweight);
        if (accumulate) device_dbias.upload(dbias);
        if (accumulate) device_dinp_sum.upload(dinp_sum);
        layernorm_backward(device_dinp.get(), device_dweight.get(), device_dbias.get(),
                           with_sum ? device_dinp_sum.get() : nullptr, dout.get(), inp.get(),
                           weight.get(), device_mean.get(), device_rstd.get(), scratch.get(),
                           s.rows, s.C, add_to_dinp, accumulate, nullptr);
        dinp = device_dinp.download();
        dweight = device_dweight.download();
        dbias = device_dbias.download();
        dinp_sum = device_dinp_sum.download();
        device_dinp.expect_guards_intact("dinp");
        device_dweight.expect_guards_intact("dweight");
        device_dbias.expect_guards_intact("dbias");
        device_dinp_sum.expect_guards_intact("dinp_sum");
        scratch.expect_guards_intact("scratch");
    }
    static std::vector<floatX> old_dinp(Shape s) {
        return normal_values<floatX>(static_cast<size_t>(s.rows) * s.C, 5);
    }
    static std::vector<gradX> old_gradient(Shape s, uint32_t stream) {
        return normal_values<gradX>(s.C, stream);
    }
    bool operator==(const Backward& other) const {
        return same_but_for_sum(other) && same_bits(dinp_sum, other.dinp_sum);
    }
    bool same_but_for_sum(const Backward& other) const {
        return same_bits(dinp, other.dinp) && same_bits(dweight, other.dweight) &&
               same_bits(dbias, other.dbias);
    }
    std::vector<floatX> dinp;
    std::vector<gradX> dweight, dbias, dinp_sum;
};

template <class T>
void add_to(std::vector<double>& sum, const std::vector<T>& old) {
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += load(old[i]);
}

TEST(GpuLayernorm, BackwardMatchesTwin) {
    for (const Shape s : kShapes) {
        if (s.C == 2) continue;  // dinp is then nothing but cancellation
        const Inputs in(s);
        const Forward forward(s, in);
        Exact exact(s, in);
        exact.backward(s);
        const Backward plain(s, in, forward.mean, forward.rstd, false, false);
        EXPECT_LT(relative_error(plain.dinp, exact.dinp), kBound<floatX>) << s.rows << "x" << s.C;
        EXPECT_LT(relative_error(plain.dweight, exact.dweight), kBound<gradX>) << s.C;
        EXPECT_LT(relative_error(plain.dbias, exact.dbias), kBound<gradX>) << s.C;
        add_to(exact.dinp, Backward::old_dinp(s));
        add_to(exact.dweight, Backward::old_gradient(s, 6));
        add_to(exact.dbias, Backward::old_gradient(s, 7));
        const Backward added(s, in, forward.mean, forward.rstd, true, true);
        EXPECT_LT(relative_error(added.dinp, exact.dinp), kBound<floatX>) << s.rows << "x" << s.C;
        EXPECT_LT(relative_error(added.dweight, exact.dweight), kBound<gradX>) << s.C;
        EXPECT_LT(relative_error(added.dbias, exact.dbias), kBound<gradX>) << s.C;
    }
}

// The sum over rows of what was stored, and `old` if given, in double.
struct ExactSum {
    ExactSum(Shape s, const std::vector<floatX>& dinp, const std::vector<gradX>* old = nullptr)
        : sum(s.C), size(s.C) {
        for (int c = 0; c < s.C; ++c) {
            if (old != nullptr) sum[c] = to_float((*old)[c]);
            size[c] = std::abs(sum[c]);
            for (int row = 0; row < s.rows; ++row) {
                const double value = to_float(dinp[static_cast<size_t>(row) * s.C + c]);
                sum[c] += value;
                size[c] += std::abs(value);
            }
        }
    }
    // The sums may cancel: the error of adding grows with what is added, that of rounding does not.
    void expect_near(const std::vector<gradX>& got) const {
        const double rounding = sizeof(gradX) == 4 ? 0x1p-23 : 0x1p-8;
        size_t wrong = 0;
        for (size_t c = 0; c < sum.size(); ++c) {
            const double bound = rounding * std::abs(sum[c]) + 1e-6 * size[c];
            wrong += !(std::abs(to_float(got[c]) - sum[c]) <= bound);
        }
        EXPECT_EQ(wrong, 0u) << "of " << sum.size() << " columns";
    }
    std::vector<double> sum, size;
};

TEST(GpuLayernorm, SumOfDinpIsOfWhatIsStored) {
    for (const Shape s : kShapes) {
        SCOPED_TRACE(format("%d x %d", s.rows, s.C));
        const Inputs in(s);
        const Forward forward(s, in);
        const std::vector<gradX> old = Backward::old_gradient(s, 8);
        const Backward plain(s, in, forward.mean, forward.rstd, false, false);
        ExactSum(s, plain.dinp).expect_near(plain.dinp_sum);
        const Backward added(s, in, forward.mean, forward.rstd, true, true);
        ExactSum(s, added.dinp, &old).expect_near(added.dinp_sum);
        if (s.C == 2) continue;  // dinp is then nothing but cancellation
        Exact exact(s, in);
        exact.backward(s);
        add_to(exact.dinp_sum, old);
        const std::vector<floatX> old_dinp = Backward::old_dinp(s);
        for (int c = 0; c < s.C; ++c) {
            for (int row = 0; row < s.rows; ++row) {
                exact.dinp_sum[c] += to_float(old_dinp[static_cast<size_t>(row) * s.C + c]);
            }
        }
        EXPECT_LT(relative_error(added.dinp_sum, exact.dinp_sum), kBound<floatX>);
    }
}

TEST(GpuLayernorm, WithoutSumOfDinpTheRestIsTheSame) {
    for (const Shape s : kShapes) {
        SCOPED_TRACE(format("%d x %d", s.rows, s.C));
        const Inputs in(s);
        const Forward forward(s, in);
        for (const bool add : {false, true}) {
            const Backward with(s, in, forward.mean, forward.rstd, add, add);
            const Backward without(s, in, forward.mean, forward.rstd, add, add, 0, false);
            EXPECT_TRUE(without.same_but_for_sum(with));
            std::vector<gradX> untouched = Backward::old_gradient(s, 8);
            if (!add) untouched = DeviceGuarded<gradX>(s.C).download();  // poison
            EXPECT_TRUE(same_bits(without.dinp_sum, untouched));
        }
    }
}

TEST(GpuLayernorm, BackwardGivesTheSameBitsAgainAndWhenNotAligned) {
    for (const Shape s : {Shape{3000, 768}, Shape{37, 24}, Shape{700, 1600}, Shape{3, 12288}}) {
        const Inputs in(s);
        const Forward forward(s, in);
        const Backward first(s, in, forward.mean, forward.rstd, true, true);
        EXPECT_TRUE(Backward(s, in, forward.mean, forward.rstd, true, true) == first) << s.C;
        EXPECT_TRUE(Backward(s, in, forward.mean, forward.rstd, true, true, 1) == first) << s.C;
    }
}

// Aligned rows come to shared memory ahead of time, others do not; neither the number of rounds nor
// what is missing in the last may show. The widths have teams of 1 to 12 warps.
TEST(GpuLayernorm, RowsFetchedAheadGiveTheBitsOfRowsThatAreNot) {
    for (const int C : {256, 264, 768, 776, 1280, 1600, 2048, 3072}) {
        const int round =
            layernorm_backward_parts(1 << 20, C) * layernorm_backward_teams(C) * kLayernormRows;
        const int many = 2 * round + 3;
        for (const int rows : {1, 3, 5, many}) {
            const Shape s{rows, C};
            const Inputs in(s);
            const Forward forward(s, in);
            for (const bool add : {false, true}) {
                for (const bool accumulate : {false, true}) {
                    if (rows == many && add != accumulate) continue;
                    SCOPED_TRACE(format("%d x %d, %d %d", rows, C, add, accumulate));
                    const auto run = [&](size_t offset, bool with_sum) {
                        return Backward(s, in, forward.mean, forward.rstd, add, accumulate, offset,
                                        with_sum);
                    };
                    const Backward first = run(0, true);
                    EXPECT_TRUE(run(0, true) == first) << "another run";
                    EXPECT_TRUE(run(1, true) == first) << "not aligned";
                    EXPECT_TRUE(run(0, false).same_but_for_sum(first)) << "without the sum";
                }
            }
        }
    }
}

// A sum over rows in one fp32 lane is off by 1e-4 here.
TEST(GpuLayernorm, ManyRowsKeepDbiasAccurate) {
    const Shape s{200000, 4};
    Inputs in(s);
    for (floatX& d : in.dout) d = from_float<floatX>(1.0f + 0.1f * to_float(d));
    const Forward forward(s, in);
    const Backward got(s, in, forward.mean, forward.rstd, false, false);
    for (int c = 0; c < s.C; ++c) {
        double exact = 0.0;
        for (int row = 0; row < s.rows; ++row) {
            exact += to_float(in.dout[static_cast<size_t>(row) * s.C + c]);
        }
        EXPECT_NEAR(to_float(got.dbias[c]) / exact, 1.0, sizeof(gradX) == 4 ? 1e-6 : 0x1p-8) << c;
    }
}

TEST(GpuLayernorm, RefusesShapesThatItCannotDo) {
    floatX* x = nullptr;
    float* f = nullptr;
    gradX* g = nullptr;
    EXPECT_THROW(layernorm_forward(x, f, f, x, x, x, 0, 1, nullptr), Error);
    EXPECT_THROW(fused_residual_layernorm_forward(x, x, f, f, x, x, x, x, 1, 0, nullptr), Error);
    EXPECT_THROW(
        layernorm_backward(x, g, g, g, x, x, x, f, f, nullptr, -1, 1, false, false, nullptr),
        Error);
    EXPECT_THROW(layernorm_forward(x, f, f, x, x, x, 1, 12289, nullptr), Error);
    EXPECT_THROW(layernorm_backward_scratch_bytes(1, 12289), Error);
}

void report(const char* size, Shape s) {
    const size_t count = static_cast<size_t>(s.rows) * s.C;
    const DeviceBuffer<floatX> a[2] = {device_values<floatX>(count, 1),
                                       device_values<floatX>(count, 2)};
    const DeviceBuffer<floatX> b[2] = {device_values<floatX>(count, 3),
                                       device_values<floatX>(count, 4)};
    const DeviceBuffer<floatX> c[2] = {device_values<floatX>(count, 5),
                                       device_values<floatX>(count, 6)};
    const DeviceBuffer<floatX> weight = device_values<floatX>(s.C, 7);
    const DeviceBuffer<floatX> residual(count);
    const DeviceBuffer<float> mean(s.rows), rstd(s.rows);
    const DeviceBuffer<gradX> dweight(s.C), dbias(s.C), dinp_sum(s.C);
    const DeviceBuffer<char> scratch(layernorm_backward_scratch_bytes(s.rows, s.C));
    const double bytes = static_cast<double>(a[0].bytes());
    report_bandwidth(format("layernorm_forward %s", size).c_str(), 2 * bytes,
                     [&](cudaStream_t stream, int set) {
                         layernorm_forward(b[set].get(), mean.get(), rstd.get(), a[set].get(),
                                           weight.get(), weight.get(), s.rows, s.C, stream);
                     });
    report_bandwidth(format("fused_residual_layernorm_forward %s", size).c_str(), 4 * bytes,
                     [&](cudaStream_t stream, int set) {
                         fused_residual_layernorm_forward(
                             residual.get(), c[set].get(), mean.get(), rstd.get(), a[set].get(),
                             b[set].get(), weight.get(), weight.get(), s.rows, s.C, stream);
                     });
    report_bandwidth(format("layernorm_backward, adding, %s", size).c_str(), 4 * bytes,
                     [&](cudaStream_t stream, int set) {
                         layernorm_backward(c[set].get(), dweight.get(), dbias.get(),
                                            dinp_sum.get(), b[set].get(), a[set].get(),
                                            weight.get(), mean.get(), rstd.get(), scratch.get(),
                                            s.rows, s.C, true, false, stream);
                     });
}

TEST(GpuLayernorm, Bandwidth) {
    report("d12 B 64", {65536, 768});
    report("d24 B 32", {32768, 1024});
    report("d36 B 16", {16384, 1280});
    report("d48 B 16", {16384, 1600});
    report("d12 B 4", {4096, 768});
    report("d48 B 4", {4096, 1600});
}

}  // namespace
