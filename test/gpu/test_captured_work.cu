#include "llmc/captured_work.cuh"

#include <string>

#include "llmc/cuda_utils.cuh"
#include "test/gpu/gpu_checks.h"

namespace {

using namespace llmc;
using namespace llmc::test;

__global__ void add_kernel(int* sum, int value) {
    *sum += value;
}
void add(int* sum, int value, cudaStream_t stream) {
    add_kernel<<<1, 1, 0, stream>>>(sum, value);
    launch_check();
}

class GpuCapturedWork : public testing::Test {
  protected:
    GpuCapturedWork() {
        cuda_check(cudaMemset(sum_.get(), 0, sum_.bytes()));
        cuda_check(cudaDeviceSynchronize());
    }
    int sum() const { return download(sum_)[0]; }
    bool is_capturing() const {
        cudaStreamCaptureStatus status;
        cuda_check(cudaStreamIsCapturing(stream_.get(), &status));
        return status != cudaStreamCaptureStatusNone;
    }
    // What capture_graph says of `queue`, which fails.
    template <class Queue>
    std::string error_of_capture(Queue&& queue) const {
        try {
            capture_graph(stream_.get(), queue);
        } catch (const Error& error) {
            return error.what();
        }
        return "no error";
    }

    Stream stream_;
    DeviceBuffer<int> sum_{1};
};

TEST_F(GpuCapturedWork, IsQueuedTwiceAndThenRunsAsAGraphOfItsKey) {
    CapturedWork<int> work;
    work.enabled = true;
    int queued[] = {0, 0, 0};
    for (int round = 0; round < 5; ++round) {
        for (const int key : {1, 2}) {
            work.run(key, stream_.get(), [&](int value) {
                ++queued[value];
                add(sum_.get(), value, stream_.get());
            });
        }
    }
    EXPECT_EQ(sum(), 5 * (1 + 2));
    EXPECT_EQ(queued[1], 2);
    EXPECT_EQ(queued[2], 2);
}

TEST_F(GpuCapturedWork, IsQueuedEachTimeUnlessEnabled) {
    CapturedWork<int> work;
    int queued = 0;
    for (int round = 0; round < 5; ++round) {
        work.run(7, stream_.get(), [&](int value) {
            ++queued;
            add(sum_.get(), value, stream_.get());
        });
    }
    EXPECT_EQ(sum(), 5 * 7);
    EXPECT_EQ(queued, 5);
}

// The stream stayed in capture, so that whatever was done to end the run in order failed, too.
TEST_F(GpuCapturedWork, ErrorWhileCapturingEndsTheCapture) {
    const std::string error = error_of_capture([&] {
        add(sum_.get(), 1, stream_.get());
        throw Error("planted");
    });
    EXPECT_EQ(error, "planted");
    EXPECT_FALSE(is_capturing());
    add(sum_.get(), 2, stream_.get());
    EXPECT_EQ(sum(), 2) << "what was captured has run";
}

TEST_F(GpuCapturedWork, CallThatBreaksTheCaptureIsTheErrorThatIsSeen) {
    const std::string error = error_of_capture([&] {
        add(sum_.get(), 1, stream_.get());
        cuda_check(cudaStreamSynchronize(stream_.get()));
    });
    EXPECT_NE(error.find("cudaErrorStreamCaptureUnsupported"), std::string::npos) << error;
    EXPECT_FALSE(is_capturing());
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    const cudaGraphExec_t graph =
        capture_graph(stream_.get(), [&] { add(sum_.get(), 3, stream_.get()); });
    cuda_check(cudaGraphLaunch(graph, stream_.get()));
    EXPECT_EQ(sum(), 3);
    cuda_check(cudaGraphExecDestroy(graph));
}

}  // namespace
