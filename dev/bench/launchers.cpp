// `make bench_cpu`: milliseconds of single launchers of the CPU build, at the shapes of a layer of 256
// channels. Prints NAME MS lines, each the median of the runs.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

#include "llmc/gpt2.h"
#include "llmc/launchers.h"

namespace llmc {
namespace {

constexpr int kB = 4, kT = 128, kC = 256, kHeads = 4, kVocab = 50304, kLossRows = 128;
constexpr int kRows = kB * kT, kRuns = 15;

// Values around 0 that are all different enough: no speed here depends on which.
template <class T>
std::vector<T> numbers(size_t count) {
    std::vector<T> values(count);
    for (size_t i = 0; i < count; ++i) {
        values[i] = from_float<T>(static_cast<float>(i * 2654435761u % 1024) / 512.0f - 1.0f);
    }
    return values;
}

void measure(const char* name, const std::function<void()>& launch) {
    using Clock = std::chrono::steady_clock;
    std::vector<double> times;
    for (int run = 0; run < kRuns + 2; ++run) {
        const Clock::time_point begin = Clock::now();
        launch();
        cuda_check(cudaDeviceSynchronize());
        times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
    }
    times.erase(times.begin(), times.begin() + 2);  // threads and memory were new
    std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
    std::printf("%s %.4f\n", name, times[kRuns / 2]);
}

void measure_all() {
    const size_t rows = kRows, C = kC;
    const auto x = numbers<floatX>(rows * C), weight = numbers<floatX>(4 * C * C);
    const auto qkv = numbers<floatX>(rows * 3 * C), bias = numbers<floatX>(4 * C);
    const auto table = numbers<floatX>(static_cast<size_t>(kVocab) * C);
    std::vector<floatX> wide(rows * 4 * C), out(rows * C), dqkv(rows * 3 * C);
    std::vector<floatX> logits(static_cast<size_t>(kLossRows) * kVocab);
    std::vector<gradX> dweight(4 * C * C);
    std::vector<float> lse(static_cast<size_t>(kB) * kHeads * kT), mean(rows), rstd(rows);
    std::vector<unsigned char> scratch(
        std::max({attention_forward_scratch_bytes(kB, kT, kC, kHeads),
                  attention_backward_scratch_bytes(kB, kT, kC, kHeads),
                  matmul_backward_weight_scratch_bytes(kRows, kC, 4 * kC), size_t{1}}));
    const floatX* no_bias = nullptr;
    gradX* no_dbias = nullptr;
    measure("matmul_forward", [&] {
        matmul_forward(wide.data(), x.data(), weight.data(), bias.data(), kRows, kC, 4 * kC,
                       nullptr);
    });
    measure("matmul_backward_weight", [&] {
        matmul_backward_weight(dweight.data(), no_dbias, wide.data(), x.data(), scratch.data(),
                               kRows, kC, 4 * kC, false, nullptr);
    });
    measure("matmul_forward_logits", [&] {
        matmul_forward(logits.data(), x.data(), table.data(), no_bias, kLossRows, kC, kVocab,
                       nullptr);
    });
    measure("attention_forward", [&] {
        attention_forward(out.data(), lse.data(), qkv.data(), scratch.data(), kB, kT, kC, kHeads,
                          nullptr);
    });
    measure("attention_backward", [&] {
        attention_backward(dqkv.data(), x.data(), qkv.data(), out.data(), lse.data(),
                           scratch.data(), kB, kT, kC, kHeads, nullptr);
    });
    measure("layernorm_forward", [&] {
        layernorm_forward(out.data(), mean.data(), rstd.data(), x.data(), bias.data(), bias.data(),
                          kRows, kC, nullptr);
    });
    measure("gelu_forward", [&] { gelu_forward(dqkv.data(), qkv.data(), qkv.size(), nullptr); });
}

}  // namespace
}  // namespace llmc

int main() {
    try {
        llmc::measure_all();
    } catch (const std::exception& error) {
        std::fprintf(stderr, "bench_launchers: %s\n", error.what());
        return 1;
    }
}
