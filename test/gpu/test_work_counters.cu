// The counters of kernels whose blocks share out their work, and what a graph does about them.
#include "llmc/work_counters.h"

#include <functional>
#include <type_traits>

#include "llmc/attention_backward.cuh"
#include "llmc/attention_forward.cuh"
#include "llmc/captured_work.cuh"
#include "llmc/cuda_utils.cuh"
#include "llmc/matmul.cuh"
#include "test/gpu/gpu_checks.h"

namespace {

using namespace llmc;
using namespace llmc::test;

// seen = the counter as the launch found it; leaves it at `left`.
__global__ void count_kernel(int* counter, int* seen, int left) {
    *seen = *counter;
    *counter = left;
}

class GpuWorkCounters : public testing::Test {
  protected:
    static constexpr int kLaunches = 5;

    GpuWorkCounters() {
        cuda_check(
            cudaMemset(work_counters().area(), 0xff, WorkCounters::kCount * WorkCounters::kBytes));
        forget();
    }

    void forget() {
        cuda_check(cudaMemset(seen_.get(), 0xff, seen_.bytes()));
        cuda_check(cudaDeviceSynchronize());
    }
    void fill(void* counter, int value = 0, size_t bytes = sizeof(int)) const {
        cuda_check(cudaMemsetAsync(counter, value, bytes, stream_.get()));
    }
    void count(void* counter, int launch, int left = 7) const {
        count_kernel<<<1, 1, 0, stream_.get()>>>(static_cast<int*>(counter), seen_.get() + launch,
                                                 left);
        launch_check();
    }
    // A launch with a counter of its own, as the library does it.
    void* launch(int number) const {
        void* counter = work_counters().take();
        fill(counter);
        count(counter, number);
        return counter;
    }

    cudaGraph_t captured(const std::function<void()>& queue) const {
        cudaGraph_t graph = nullptr;
        cuda_check(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal));
        queue();
        cuda_check(cudaStreamEndCapture(stream_.get(), &graph));
        return graph;
    }
    static size_t fills_in(cudaGraph_t graph) {
        const auto nodes = detail::graph_nodes([&](cudaGraphNode_t* all, size_t* count) {
            return cudaGraphGetNodes(graph, all, count);
        });
        size_t fills = 0;
        for (const cudaGraphNode_t node : nodes) {
            cudaGraphNodeType type;
            cuda_check(cudaGraphNodeGetType(node, &type));
            fills += type == cudaGraphNodeTypeMemset;
        }
        return fills;
    }
    // Runs the graph, and destroys it.
    std::vector<int> seen_by(cudaGraph_t graph, int runs = 1) {
        cudaGraphExec_t ready = nullptr;
        cuda_check(cudaGraphInstantiate(&ready, graph, 0));
        for (int run = 0; run < runs; ++run) {
            forget();
            cuda_check(cudaGraphLaunch(ready, stream_.get()));
        }
        std::vector<int> seen = download(seen_);
        cuda_check(cudaGraphExecDestroy(ready));
        cuda_check(cudaGraphDestroy(graph));
        return seen;
    }

    const std::vector<int> zeros_ = std::vector<int>(kLaunches, 0);
    Stream stream_;
    DeviceBuffer<int> seen_{kLaunches};
};

TEST_F(GpuWorkCounters, OneFillServesAllLaunchesOfAGraphInEachOfItsRuns) {
    const cudaGraph_t graph = captured([&] {
        for (int i = 0; i < kLaunches; ++i) launch(i);
    });
    ASSERT_EQ(fills_in(graph), size_t{kLaunches});
    EXPECT_EQ(zero_counters_once(graph, kLaunches), size_t{kLaunches});
    EXPECT_EQ(fills_in(graph), 1u);
    EXPECT_EQ(seen_by(graph, 3), zeros_);
}

// What stood before a fill must still be over when what stood behind it begins.
TEST_F(GpuWorkCounters, KernelsKeepTheirOrderWithoutTheFillBetweenThem) {
    DeviceBuffer<int> shared(1);
    const cudaGraph_t graph = captured([&] {
        for (int i = 0; i < kLaunches; ++i) {
            fill(work_counters().take());
            count(shared.get(), i, i + 1);  // sees what the one before it has left
        }
    });
    EXPECT_EQ(zero_counters_once(graph, kLaunches), size_t{kLaunches});
    const std::vector<int> seen = seen_by(graph, 2);
    EXPECT_EQ(seen, (std::vector<int>{kLaunches, 1, 2, 3, 4}));
}

TEST_F(GpuWorkCounters, FillsOfOtherMemoryAndWithOtherValuesStay) {
    DeviceBuffer<int> elsewhere(1);
    const cudaGraph_t graph = captured([&] {
        fill(elsewhere.get());
        fill(work_counters().take(), 1);
        fill(work_counters().take(), 0, 20);  // so much is no counter
    });
    EXPECT_EQ(zero_counters_once(graph, 1), 0u);
    EXPECT_EQ(fills_in(graph), 3u);
    cuda_check(cudaGraphDestroy(graph));
}

TEST_F(GpuWorkCounters, ACounterOfTwoLaunchesIsFilledBeforeEach) {
    const cudaGraph_t graph = captured([&] {
        void* counter = launch(0);
        for (int i = 1; i < kLaunches; ++i) {
            fill(counter);
            count(counter, i);
        }
    });
    EXPECT_EQ(zero_counters_once(graph, 1), 0u);
    EXPECT_EQ(fills_in(graph), size_t{kLaunches});
    EXPECT_EQ(seen_by(graph), zeros_);
}

// The second of them may be there because a kernel has written its bytes after the first.
TEST_F(GpuWorkCounters, FillsOfDifferentBytesOfOneCounterStay) {
    const cudaGraph_t graph = captured([&] {
        auto* counter = static_cast<int*>(work_counters().take());
        fill(counter);
        fill(counter + 1);
    });
    EXPECT_EQ(zero_counters_once(graph, 1), 0u);
    EXPECT_EQ(fills_in(graph), 2u);
    cuda_check(cudaGraphDestroy(graph));
}

// After that many calls a counter comes again: here that of a launch without a fill of its own, which
// leaves it at 7.
TEST_F(GpuWorkCounters, MoreLaunchesThanCountersKeepTheirFills) {
    const size_t before = work_counters().taken();
    const cudaGraph_t graph = captured([&] {
        count(work_counters().take(), 0);
        for (size_t i = 1; i < WorkCounters::kCount; ++i) work_counters().take();
        launch(1);
    });
    const size_t taken = work_counters().taken() - before;
    ASSERT_GT(taken, WorkCounters::kCount);
    EXPECT_EQ(zero_counters_once(graph, taken), 0u);
    EXPECT_EQ(fills_in(graph), 1u);
    EXPECT_EQ(seen_by(graph)[1], 0);
}

// The launches of a layer that have counters on Hopper, some of them in bf16 alone.
TEST_F(GpuWorkCounters, AGraphOfALayerLeavesTheBitsOfItsLaunches) {
    constexpr int B = 2, T = 1024, NH = 12, C = 64 * NH, rows = B * T;
    const auto inp = device_values<floatX>(rows * C, 1), dout = device_values<floatX>(rows * C, 2);
    const auto weight = device_values<floatX>(4 * C * C, 3, 0.02);
    DeviceBuffer<floatX> qkv(rows * 3 * C), atty(rows * C), dqkv(rows * 3 * C), out(rows * 4 * C);
    DeviceBuffer<float> lse(B * NH * T);
    DeviceBuffer<gradX> dweight(3 * C * C);
    DeviceBuffer<unsigned char> scratch(
        std::max({attention_forward_scratch_bytes(B, T, C, NH),
                  attention_backward_scratch_bytes(B, T, C, NH), size_t{256}}));
    const floatX* no_bias = nullptr;
    gradX* no_dbias = nullptr;
    const auto queue = [&](int) {
        cudaStream_t s = stream_.get();
        matmul_forward(qkv.get(), inp.get(), weight.get(), no_bias, rows, C, 3 * C, s);
        attention_forward(atty.get(), lse.get(), qkv.get(), scratch.get(), B, T, C, NH, s);
        attention_backward(dqkv.get(), dout.get(), qkv.get(), atty.get(), lse.get(), scratch.get(),
                           B, T, C, NH, s);
        matmul_backward_weight(dweight.get(), no_dbias, dqkv.get(), inp.get(), scratch.get(), rows,
                               C, 3 * C, false, s);
        matmul_forward(out.get(), atty.get(), weight.get(), no_bias, rows, C, 4 * C, s);
    };
    if (!attention_fits_graphs(T, C / NH)) GTEST_SKIP() << "cuDNN's backward pass";
    const auto results = [&] {
        cuda_check(cudaStreamSynchronize(stream_.get()));
        return std::make_tuple(download(qkv), download(atty), download(dqkv), download(out));
    };
    CapturedWork<int> work;
    work.enabled = true;
    work.run(0, stream_.get(), queue);
    const auto [qkv_first, atty_first, dqkv_first, out_first] = results();
    const std::vector<gradX> dweight_first = download(dweight);
    if (attention_hopper::takes<floatX>(T, C / NH)) {
        const size_t before = work_counters().taken();
        const cudaGraph_t graph = captured([&] { queue(0); });
        const size_t fills = fills_in(graph);
        const size_t gone = zero_counters_once(graph, work_counters().taken() - before);
        EXPECT_GE(gone, 1u) << "attention's own has not even one";
        EXPECT_EQ(fills_in(graph), fills - gone + 1);
        cuda_check(cudaGraphDestroy(graph));
    }
    for (int run = 0; run < 3; ++run) {
        for (auto* buffer : {&qkv, &atty, &dqkv, &out}) {
            cuda_check(cudaMemset(buffer->get(), 0xff, buffer->bytes()));
        }
        cuda_check(cudaMemset(dweight.get(), 0xff, dweight.bytes()));
        cuda_check(cudaDeviceSynchronize());
        work.run(0, stream_.get(), queue);
        const auto [qkv_now, atty_now, dqkv_now, out_now] = results();
        EXPECT_TRUE(same_bits(qkv_now, qkv_first)) << "run " << run;
        EXPECT_TRUE(same_bits(atty_now, atty_first)) << "run " << run;
        EXPECT_TRUE(same_bits(dqkv_now, dqkv_first)) << "run " << run;
        EXPECT_TRUE(same_bits(out_now, out_first)) << "run " << run;
        EXPECT_TRUE(same_bits(download(dweight), dweight_first)) << "run " << run;
    }
}

}  // namespace
