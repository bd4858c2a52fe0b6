#include "llmc/bias.cuh"
#include "llmc/captured_work.cuh"
#include "llmc/dependent_launch.cuh"
#include "llmc/layernorm.cuh"
#include "test/gpu/gpu_checks.h"

namespace {

using namespace llmc;
using namespace llmc::test;

constexpr int kThreads = 128, kBlocks = 8, kCount = kThreads * kBlocks;

// Lets the second kernel start long before it writes.
__global__ void late_kernel(int* late, const int* start) {
    let_next_kernel_start();
    const long long begin = clock64();
    while (clock64() - begin < 200000) {
    }
    const int i = blockIdx.x * kThreads + threadIdx.x;
    late[i] = *start + i;
}
__global__ void second_kernel(int* second, const int* late) {
    wait_for_first_kernel();
    const int i = blockIdx.x * kThreads + threadIdx.x;
    second[i] = 3 * late[kCount - 1 - i];
}
__global__ void next_kernel(int* next, const int* late, const int* second) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    next[i] = late[i] - second[i];
}

// Two rounds of the three, so that the first of the second round writes over what the first round's
// second and third read.
struct Rounds {
    DeviceBuffer<int> start{2}, late{kCount}, second{kCount}, next{2 * kCount};

    void queue(cudaStream_t stream) const {
        for (const int round : {0, 1}) {
            late_kernel<<<kBlocks, kThreads, 0, stream>>>(late.get(), start.get() + round);
            launch_check();
            launch_second_kernel(second_kernel, kBlocks, kThreads, stream, second.get(),
                                 late.get());
            launch_check();
            next_kernel<<<kBlocks, kThreads, 0, stream>>>(next.get() + round * kCount, late.get(),
                                                          second.get());
            launch_check();
        }
    }
    void set(int value) const {
        const int starts[] = {value, 7 * value};
        cuda_check(cudaMemcpy(start.get(), starts, sizeof(starts), cudaMemcpyHostToDevice));
        cuda_check(cudaDeviceSynchronize());
    }
    void expect(int value) const {
        const std::vector<int> got = download(next);
        size_t wrong = 0;
        for (int i = 0; i < 2 * kCount; ++i) {
            const int from = i < kCount ? value : 7 * value, place = i % kCount;
            wrong += got[i] != from + place - 3 * (from + kCount - 1 - place);
        }
        EXPECT_EQ(wrong, 0u) << "value " << value;
    }
};

TEST(GpuDependentLaunch, SecondKernelSeesWhatALateFirstOneWrites) {
    const Stream stream;
    const Rounds rounds;
    for (int value = 1; value <= 20; ++value) {
        rounds.set(1000 * value);
        rounds.queue(stream.get());
        rounds.expect(1000 * value);
    }
}

TEST(GpuDependentLaunch, SoItDoesInAGraph) {
    const Stream stream;
    const Rounds rounds;
    rounds.set(0);
    rounds.queue(stream.get());
    const cudaGraphExec_t graph = capture_graph(stream.get(), [&] { rounds.queue(stream.get()); });
    for (int value = 1; value <= 20; ++value) {
        rounds.set(1000 * value);
        cuda_check(cudaGraphLaunch(graph, stream.get()));
        rounds.expect(1000 * value);
    }
    cuda_check(cudaGraphExecDestroy(graph));
}

// The launchers with a second kernel, one after the other, on one scratch.
struct Launchers {
    int rows, C;
    DeviceBuffer<floatX> inp, dout, weight, dinp;
    DeviceBuffer<float> mean, rstd;
    DeviceBuffer<gradX> sums;  // (9,C)
    DeviceBuffer<char> scratch;

    Launchers(int rows, int C)
        : rows(rows),
          C(C),
          inp(device_values<floatX>(size_t{2} * rows * C, 1)),
          dout(device_values<floatX>(size_t{2} * rows * C, 2)),
          weight(device_values<floatX>(C, 3)),
          dinp(size_t{2} * rows * C),
          mean(device_values<float>(rows, 4)),
          rstd(device_values<float>(rows, 5)),
          sums(size_t{9} * C),
          scratch(
              std::max(layernorm_backward_scratch_bytes(rows, C), bias_scratch_bytes(rows, C))) {}

    template <class After>
    void queue(cudaStream_t stream, After&& after) const {
        const size_t half = static_cast<size_t>(rows) * C;
        gradX* out = sums.get();
        layernorm_backward(dinp.get(), out, out + C, out + 2 * C, dout.get(), inp.get(),
                           weight.get(), mean.get(), rstd.get(), scratch.get(), rows, C, false,
                           false, stream);
        after();
        bias_backward(out + 3 * C, dinp.get(), scratch.get(), rows, C, false, stream);
        after();
        gelu_backward_bias(dinp.get() + half, out + 4 * C, dout.get() + half, inp.get() + half,
                           scratch.get(), rows, C, false, stream);
        after();
        layernorm_backward(dinp.get() + half, out + 5 * C, out + 6 * C, out + 7 * C,
                           dout.get() + half, dinp.get(), weight.get(), mean.get(), rstd.get(),
                           scratch.get(), rows, C, true, false, stream);
        after();
        bias_backward(out + 8 * C, dinp.get() + half, scratch.get(), rows, C, false, stream);
        after();
    }
    void clear() const {
        cuda_check(cudaMemset(dinp.get(), 0xff, dinp.bytes()));
        cuda_check(cudaMemset(sums.get(), 0xff, sums.bytes()));
        cuda_check(cudaMemset(scratch.get(), 0xff, scratch.bytes()));
        cuda_check(cudaDeviceSynchronize());
    }
};

TEST(GpuDependentLaunch, LaunchersInTurnGiveTheBitsOfOneAtATime) {
    const Stream stream;
    for (const int C : {256, 768, 1600}) {
        SCOPED_TRACE(C);
        const Launchers launchers(1000, C);
        launchers.clear();
        launchers.queue(stream.get(), [] { cuda_check(cudaDeviceSynchronize()); });
        const std::vector<floatX> dinp = download(launchers.dinp);
        const std::vector<gradX> sums = download(launchers.sums);
        const auto nothing = [] {};
        const cudaGraphExec_t graph =
            capture_graph(stream.get(), [&] { launchers.queue(stream.get(), nothing); });
        for (int run = 0; run < 20; ++run) {
            launchers.clear();
            if (run % 2 == 0) {
                launchers.queue(stream.get(), nothing);
            } else {
                cuda_check(cudaGraphLaunch(graph, stream.get()));
            }
            EXPECT_TRUE(same_bits(download(launchers.dinp), dinp)) << "run " << run;
            EXPECT_TRUE(same_bits(download(launchers.sums), sums)) << "run " << run;
        }
        cuda_check(cudaGraphExecDestroy(graph));
    }
}

}  // namespace
