// The GPU's attention against the CPU twin: our own kernels always, cuDNN's where it is built in.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "llmc/attention_backward.cuh"
#include "llmc/attention_forward.cuh"
#include "llmc/cpu/attention.h"
#include "test/gpu/device_guarded.h"
#include "test/gpu/gpu_checks.h"

namespace {

using namespace llmc;
using llmc::test::DeviceGuarded;
using llmc::test::kBound;
using llmc::test::normal_values;
using llmc::test::relative_error;
using llmc::test::same_bits;

constexpr bool kBf16 = std::is_same_v<floatX, bf16>;

struct Shape {
    int B, T, C, NH;
    int HS() const { return C / NH; }
};

std::string name_of(const Shape& s) {
    return format("B %d, T %d, C %d, NH %d", s.B, s.T, s.C, s.NH);
}

// One token; tiles that end inside a row block and exactly at one; head sizes below, at and above
// each size that the kernels pad to, odd ones among them.
const Shape kShapes[] = {
    {2, 16, 36, 2},
    {1, 1, 64, 1},
    {2, 64, 64, 4},
    {4, 128, 128, 2},
    {1, 257, 1600, 25},
    {1, 65, 15, 5},
    {1, 200, 160, 2},
    {2, 150, 256, 2},
    {1, 131, 33, 1},
    {1, 70, 402, 3},
    {1, 90, 512, 2},
    {2, 1024, 768, 12},
    // For Hopper's backward pass, whose items have 2 or 3 tiles of 64 rows: 1, 3, 4 and 5 tiles, more
    // heads than follow one another, and blocks that take three items or more.
    {3, 64, 128, 2},
    {2, 192, 192, 3},
    {1, 256, 64, 1},
    {2, 320, 128, 2},
    {5, 128, 960, 15},
    {40, 64, 768, 12},
    {8, 320, 1024, 16},
};

// Whose kernels a test runs.
struct Backend {
    std::string name;
    std::function<size_t(const Shape&)> forward_bytes, backward_bytes;  // of scratch
    std::function<void(floatX*, float*, const floatX*, void*, const Shape&)> forward;
    std::function<void(floatX*, const floatX*, const floatX*, const floatX*, const float*, void*,
                       const Shape&)>
        backward;
};

Backend own_backend() {
    return {
        "own", [](const Shape&) { return size_t{0}; },
        [](const Shape& s) { return own_attention_backward_scratch_bytes(s.B, s.T, s.C, s.NH); },
        [](floatX* out, float* lse, const floatX* qkv, void*, const Shape& s) {
            own_attention_forward(out, lse, qkv, s.B, s.T, s.C, s.NH, nullptr);
        },
        [](floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out, const float* lse,
           void* scratch, const Shape& s) {
            own_attention_backward(dqkv, dout, qkv, out, lse, scratch, s.B, s.T, s.C, s.NH,
                                   nullptr);
        }};
}

// What train_gpt2.cu calls.
Backend launchers(const Shape& shape) {
    return {attention_backend(shape.T, shape.HS()),
            [](const Shape& s) { return attention_forward_scratch_bytes(s.B, s.T, s.C, s.NH); },
            [](const Shape& s) { return attention_backward_scratch_bytes(s.B, s.T, s.C, s.NH); },
            [](floatX* out, float* lse, const floatX* qkv, void* scratch, const Shape& s) {
                attention_forward(out, lse, qkv, scratch, s.B, s.T, s.C, s.NH, nullptr);
            },
            [](floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
               const float* lse, void* scratch, const Shape& s) {
                attention_backward(dqkv, dout, qkv, out, lse, scratch, s.B, s.T, s.C, s.NH,
                                   nullptr);
            }};
}

#ifdef LLMC_CUDNN
Backend cudnn_backend() {
    return {cudnn_name(),
            [](const Shape& s) {
                return cudnn_attention_forward_workspace_bytes(s.B, s.T, s.NH, s.HS());
            },
            [](const Shape& s) {
                return cudnn_attention_backward_workspace_bytes(s.B, s.T, s.NH, s.HS());
            },
            [](floatX* out, float* lse, const floatX* qkv, void* scratch, const Shape& s) {
                cudnn_attention_forward(out, lse, qkv, scratch, s.B, s.T, s.NH, s.HS(), nullptr);
            },
            [](floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
               const float* lse, void* scratch, const Shape& s) {
                cudnn_attention_backward(dqkv, dout, qkv, out, lse, scratch, s.B, s.T, s.NH, s.HS(),
                                         nullptr);
            }};
}
#endif

// The launchers, and whose kernels they do not call at this shape: ours for every GPU, and cuDNN's.
std::vector<Backend> backends(const Shape& shape) {
    std::vector<Backend> all = {launchers(shape)};
    if (all[0].name != "own") all.push_back(own_backend());
#ifdef LLMC_CUDNN
    if (attention_detail::cudnn_takes(shape.T, shape.HS()) && all[0].name != cudnn_name()) {
        all.push_back(cudnn_backend());
    }
#endif
    return all;
}

struct Inputs {
    Shape shape;
    std::vector<floatX> qkv, dout;

    explicit Inputs(const Shape& s, double scale = 1.0) : shape(s) {
        const size_t count = static_cast<size_t>(s.B) * s.T * s.C;
        qkv = normal_values<floatX>(3 * count, 1, scale);
        dout = normal_values<floatX>(count, 2);
    }
};

struct Outputs {
    std::vector<floatX> out, dqkv;
    std::vector<float> lse;
};

Outputs run_twin(const Inputs& in) {
    const Shape& s = in.shape;
    Outputs result;
    result.out.resize(in.dout.size());
    result.dqkv.resize(in.qkv.size());
    result.lse.resize(static_cast<size_t>(s.B) * s.NH * s.T);
    cpu::attention_forward(result.out.data(), result.lse.data(), in.qkv.data(), nullptr, s.B, s.T,
                           s.C, s.NH, nullptr);
    cpu::attention_backward(result.dqkv.data(), in.dout.data(), in.qkv.data(), result.out.data(),
                            result.lse.data(), nullptr, s.B, s.T, s.C, s.NH, nullptr);
    return result;
}

template <class T>
void expect_written(const std::vector<T>& values, const char* name) {
    size_t left = 0;
    for (const T& value : values) left += std::isnan(load(value));
    EXPECT_EQ(left, 0u) << name << ": elements not written, or NaN";
}

Outputs run_gpu(const Backend& backend, const Inputs& in) {
    const Shape& s = in.shape;
    DeviceGuarded<floatX> qkv(in.qkv), dout(in.dout), out(in.dout.size()), dqkv(in.qkv.size());
    DeviceGuarded<float> lse(static_cast<size_t>(s.B) * s.NH * s.T);
    DeviceGuarded<unsigned char> forward_scratch(backend.forward_bytes(s));
    DeviceGuarded<unsigned char> scratch(backend.backward_bytes(s));
    backend.forward(out.get(), lse.get(), qkv.get(), forward_scratch.get(), s);
    backend.backward(dqkv.get(), dout.get(), qkv.get(), out.get(), lse.get(), scratch.get(), s);
    qkv.expect_guards_intact("qkv");
    dout.expect_guards_intact("dout");
    out.expect_guards_intact("out");
    lse.expect_guards_intact("lse");
    dqkv.expect_guards_intact("dqkv");
    forward_scratch.expect_guards_intact("scratch of the forward pass");
    scratch.expect_guards_intact("scratch");
    const Outputs result = {out.download(), dqkv.download(), lse.download()};
    expect_written(result.out, "out");
    expect_written(result.lse, "lse");
    expect_written(result.dqkv, "dqkv");
    return result;
}

// Elements of q (part 0), k (1) or v (2).
std::vector<floatX> part_of(const std::vector<floatX>& qkv, int part, int C) {
    std::vector<floatX> result;
    for (size_t i = 0; i < qkv.size(); ++i) {
        if (static_cast<int>(i / C % 3) == part) result.push_back(qkv[i]);
    }
    return result;
}

void expect_near(const Outputs& a, const Outputs& b, const Shape& shape, double lse_bound) {
    EXPECT_LT(relative_error(a.out, b.out), kBound<floatX>) << "out";
    EXPECT_LT(relative_error(a.lse, b.lse), lse_bound) << "lse";
    for (int part = 0; part < 3; ++part) {
        const std::vector<floatX> x = part_of(a.dqkv, part, shape.C);
        const std::vector<floatX> y = part_of(b.dqkv, part, shape.C);
        if (shape.T == 1 && part < 2) {  // exactly 0 but for rounding
            for (const floatX& value : x) EXPECT_NEAR(load(value), 0.0f, 1e-5f) << "qkv"[part];
        } else {
            EXPECT_LT(relative_error(x, y), kBound<floatX>) << "d"
                                                            << "qkv"[part];
        }
    }
}

TEST(GpuAttention, EqualsTwin) {
    for (const Shape& shape : kShapes) {
        const Inputs in(shape);
        const Outputs expected = run_twin(in);
        for (const Backend& backend : backends(shape)) {
            SCOPED_TRACE(name_of(shape) + ", " + backend.name);
            expect_near(run_gpu(backend, in), expected, shape, 1e-5);
        }
    }
}

TEST(GpuAttention, SameBitsRunToRun) {
    for (const Shape& shape : {Shape{2, 1024, 768, 12}, Shape{3, 257, 36, 2}}) {
        const Inputs in(shape);
        for (const Backend& backend : backends(shape)) {
            SCOPED_TRACE(name_of(shape) + ", " + backend.name);
            const Outputs first = run_gpu(backend, in);
            for (int repeat = 0; repeat < 10; ++repeat) {
                const Outputs again = run_gpu(backend, in);
                ASSERT_TRUE(same_bits(first.out, again.out));
                ASSERT_TRUE(same_bits(first.lse, again.lse));
                ASSERT_TRUE(same_bits(first.dqkv, again.dqkv));
            }
        }
    }
}

TEST(GpuAttention, CudnnAndOwnFollowOneAnother) {
#ifndef LLMC_CUDNN
    GTEST_SKIP() << "cuDNN is not built in";
#else
    const Shape shape{2, 1024, 768, 12};
    const Backend cudnn = cudnn_backend(), own = own_backend();
    const Inputs in(shape);
    const Outputs expected = run_gpu(own, in);
    // Either's backward pass reads what the other's forward pass wrote: lse means the same.
    Backend first = cudnn, second = own;
    first.backward_bytes = own.backward_bytes;
    first.backward = own.backward;
    second.backward_bytes = cudnn.backward_bytes;
    second.backward = cudnn.backward;
    for (const Backend& backend : {cudnn, first, second}) {
        expect_near(run_gpu(backend, in), expected, shape, 1e-5);
    }
#endif
}

void expect_later_tokens_change_nothing_earlier(const Shape& shape) {
    for (const Backend& backend : backends(shape)) {
        SCOPED_TRACE(name_of(shape) + ", " + backend.name);
        const Inputs before(shape);
        const Outputs expected = run_gpu(backend, before);
        for (const int from : {1, 40, 64, 100, 140}) {
            Inputs after(shape);
            const size_t row = static_cast<size_t>(3) * shape.C;
            for (size_t i = 0; i < after.qkv.size(); ++i) {
                if (static_cast<int>(i / row % shape.T) < from) continue;
                after.qkv[i] = from_float<floatX>(load(after.qkv[i]) * -3.0f + 5.0f);
            }
            const Outputs changed = run_gpu(backend, after);
            size_t early = 0, late = 0;
            for (size_t i = 0; i < changed.out.size(); ++i) {
                const bool differs =
                    std::memcmp(&changed.out[i], &expected.out[i], sizeof(floatX)) != 0;
                (static_cast<int>(i / shape.C % shape.T) < from ? early : late) += differs;
            }
            EXPECT_EQ(early, 0u) << "from token " << from;
            EXPECT_GT(late, 0u) << "from token " << from;
        }
    }
}

TEST(GpuAttention, LaterTokensChangeNoEarlierBit) {
    expect_later_tokens_change_nothing_earlier({2, 141, 128, 2});
    expect_later_tokens_change_nothing_earlier({2, 192, 128, 2});
}

// Where no loss depends on a token or a later one, neither they nor their values change a gradient.
TEST(GpuAttention, LaterTokensWithoutGradientsChangeNoEarlierGradient) {
    for (const Shape& shape : {Shape{2, 141, 128, 2}, Shape{2, 192, 128, 2}}) {
        for (const Backend& backend : backends(shape)) {
            SCOPED_TRACE(name_of(shape) + ", " + backend.name);
            for (const int from : {1, 64, 100}) {
                Inputs before(shape), after(shape);
                const auto is_later = [&](size_t i, size_t row) {
                    return static_cast<int>(i / row % shape.T) >= from;
                };
                const size_t row = static_cast<size_t>(3) * shape.C;
                for (size_t i = 0; i < after.qkv.size(); ++i) {
                    if (!is_later(i, row)) continue;
                    after.qkv[i] = from_float<floatX>(load(after.qkv[i]) * -3.0f + 5.0f);
                }
                for (size_t i = 0; i < after.dout.size(); ++i) {
                    if (is_later(i, shape.C))
                        before.dout[i] = after.dout[i] = from_float<floatX>(0);
                }
                const Outputs expected = run_gpu(backend, before),
                              changed = run_gpu(backend, after);
                size_t different = 0;
                for (size_t i = 0; i < changed.dqkv.size(); ++i) {
                    if (is_later(i, row)) continue;
                    different += load(changed.dqkv[i]) != load(expected.dqkv[i]);
                }
                EXPECT_EQ(different, 0u) << "from token " << from;
            }
        }
    }
}

TEST(GpuAttention, ScoresWhoseExpOverflowsGiveFiniteResults) {
    for (const double scale : {12.0, 100.0}) {
        for (const int T : {150, 192}) {
            const Shape shape{1, T, 128, 2};
            const Inputs in(shape, scale);
            for (const Backend& backend : backends(shape)) {
                SCOPED_TRACE(name_of(shape) + ", " + backend.name);
                const Outputs result = run_gpu(backend, in);  // fails on NaN
                size_t infinite = 0;
                for (const floatX value : result.out) infinite += std::isinf(load(value));
                for (const floatX value : result.dqkv) infinite += std::isinf(load(value));
                EXPECT_EQ(infinite, 0u);
                float largest = 0.0f;
                for (const float value : result.lse) largest = std::max(largest, value);
                EXPECT_LT(largest, INFINITY);
                EXPECT_GT(largest, 89.0f) << "the scores are too small for this test";
            }
        }
    }
}

TEST(GpuAttention, RefusesShapesThatDoNotFit) {
    const auto message = [](int B, int T, int C, int NH) -> std::string {
        try {
            attention_forward(nullptr, nullptr, nullptr, nullptr, B, T, C, NH, nullptr);
        } catch (const Error& error) {
            return error.what();
        }
        return "";
    };
    EXPECT_NE(message(1, 8, 514, 2).find("head size 257"), std::string::npos);
    EXPECT_NE(message(1, 8, 36, 5).find("C 36"), std::string::npos);
    EXPECT_NE(message(0, 8, 36, 3).find("B 0"), std::string::npos);
    EXPECT_NE(message(1, -1, 36, 3).find("T -1"), std::string::npos);
}

// Mean time of a call in ms.
double time_of(const std::function<void()>& call) {
    constexpr int kWarmUps = 3, kCalls = 20;
    cudaEvent_t start, stop;
    cuda_check(cudaEventCreate(&start));
    cuda_check(cudaEventCreate(&stop));
    for (int i = 0; i < kWarmUps; ++i) call();
    cuda_check(cudaEventRecord(start));
    for (int i = 0; i < kCalls; ++i) call();
    cuda_check(cudaEventRecord(stop));
    cuda_check(cudaEventSynchronize(stop));
    float total = 0.0f;
    cuda_check(cudaEventElapsedTime(&total, start, stop));
    cuda_check(cudaEventDestroy(start));
    cuda_check(cudaEventDestroy(stop));
    return static_cast<double>(total) / kCalls;
}

// A line with the time, the rate (the masked half not counted; 2 products forward, 5 backward,
// however many the kernels do), and the share of cuDNN 9.14's speed on an H200.
void print_speed(const std::string& backend, const char* pass, double ms, double flop,
                 double limit_ms) {
    std::printf("%-10s %-8s %8.3f ms %7.1f TFLOP/s", backend.c_str(), pass, ms, flop / ms * 1e-9);
    if (kBf16) std::printf("  %5.1f %% of the limit (%.3f ms)", 100.0 * limit_ms / ms, limit_ms);
    std::printf("\n");
}

// d12's shape at B 64, every sequence the same: each must come out as the first, wherever it lies.
TEST(GpuAttention, SpeedAtFullBatchWithEverySequenceAlike) {
    const Shape shape{kBf16 ? 64 : 16, 1024, 768, 12};
    const Inputs one({1, shape.T, shape.C, shape.NH});
    const auto repeated = [&](const std::vector<floatX>& values) {
        std::vector<floatX> all;
        for (int b = 0; b < shape.B; ++b) all.insert(all.end(), values.begin(), values.end());
        return all;
    };
    DeviceGuarded<floatX> qkv(repeated(one.qkv)), dout(repeated(one.dout));
    DeviceGuarded<floatX> out(dout.size()), dqkv(qkv.size());
    DeviceGuarded<float> lse(static_cast<size_t>(shape.B) * shape.NH * shape.T);
    const double flop = 2.0 * shape.B * shape.NH * shape.T * shape.T * shape.HS();
    for (const Backend& backend : backends(shape)) {
        SCOPED_TRACE(backend.name);
        DeviceGuarded<unsigned char> forward_scratch(backend.forward_bytes(shape));
        DeviceGuarded<unsigned char> scratch(backend.backward_bytes(shape));
        print_speed(backend.name, "forward", time_of([&] {
                        backend.forward(out.get(), lse.get(), qkv.get(), forward_scratch.get(),
                                        shape);
                    }),
                    flop, 0.341);
        print_speed(backend.name, "backward", time_of([&] {
                        backend.backward(dqkv.get(), dout.get(), qkv.get(), out.get(), lse.get(),
                                         scratch.get(), shape);
                    }),
                    2.5 * flop, 1.102);
        for (DeviceGuarded<floatX>* buffer : {&out, &dqkv}) {
            const std::vector<floatX> values = buffer->download();
            const size_t bytes = values.size() / shape.B * sizeof(floatX);
            size_t different = 0;
            for (int b = 1; b < shape.B; ++b) {
                const char* sequence = reinterpret_cast<const char*>(values.data()) + b * bytes;
                different += std::memcmp(values.data(), sequence, bytes) != 0;
            }
            EXPECT_EQ(different, 0u) << "sequences unlike the first";
        }
        out.expect_guards_intact("out");
        dqkv.expect_guards_intact("dqkv");
        forward_scratch.expect_guards_intact("scratch of the forward pass");
        scratch.expect_guards_intact("scratch");
        std::printf("%-10s scratch: forward %zu bytes, backward %.1f MiB\n", backend.name.c_str(),
                    forward_scratch.size(), static_cast<double>(scratch.size()) / (1 << 20));
    }
}

}  // namespace
