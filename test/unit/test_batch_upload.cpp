#include "llmc/batch_upload.h"

#include <gtest/gtest.h>

#include <vector>

#include "test/unit/stream_gate.h"

namespace llmc {
namespace {

using test::StreamGate;

constexpr int kA = 3, kB = 2, kT = 5;
constexpr size_t kCount = kB * kT;

// A step whose numbers name it, the micro-batch, the array and the place.
PreparedStep prepared_step(int step) {
    PreparedStep prepared;
    prepared.micro_batches = PinnedBuffer<int>(kA * kMicroBatchArrays * kCount);
    for (size_t i = 0; i < prepared.micro_batches.count(); ++i) {
        prepared.micro_batches[i] = 1000 * step + static_cast<int>(i);
    }
    prepared.inputs = PinnedBuffer<StepInputs>(1);
    prepared.inputs[0] = {static_cast<uint32_t>(step), 0.5f};
    return prepared;
}

class Upload : public testing::Test {
  protected:
    Upload() {
        upload_.plan(&memory_, kA, kB, kT);
        memory_.allocate(0xff);
        upload_.open();
    }
    // What kernels on the main stream would read.
    void expect_at_hand(int step, int local) {
        int got[kMicroBatchArrays][kCount];
        const MicroBatch batch = upload_.at_hand();
        const int* arrays[] = {batch.inputs, batch.targets, batch.order};
        for (size_t array = 0; array < kMicroBatchArrays; ++array) {
            cuda_check(cudaMemcpyAsync(got[array], arrays[array], sizeof(got[array]),
                                       cudaMemcpyDeviceToHost, main_.get()));
        }
        cuda_check(cudaStreamSynchronize(main_.get()));
        const int first = 1000 * step + local * static_cast<int>(kMicroBatchArrays * kCount);
        for (size_t array = 0; array < kMicroBatchArrays; ++array) {
            for (size_t i = 0; i < kCount; ++i) {
                ASSERT_EQ(got[array][i], first + static_cast<int>(array * kCount + i))
                    << "step " << step << " micro-batch " << local << " array " << array;
            }
        }
    }

    MemoryPlan memory_;
    StepUpload upload_;
    Stream main_, copy_;
};

TEST_F(Upload, EachMicroBatchComesToTheSamePlace) {
    const MicroBatch place = upload_.at_hand();
    for (int step = 0; step < 4; ++step) {
        const PreparedStep prepared = prepared_step(step);
        const StepInputs* inputs = upload_.put(prepared, step, copy_.get(), main_.get());
        for (int local = 0; local < kA; ++local) {
            upload_.take(local, main_.get());
            expect_at_hand(step, local);
            const MicroBatch now = upload_.at_hand();
            EXPECT_EQ(now.inputs, place.inputs);
            EXPECT_EQ(now.targets, place.targets);
            EXPECT_EQ(now.order, place.order);
        }
        StepInputs got;
        cuda_check(cudaMemcpy(&got, inputs, sizeof(got), cudaMemcpyDeviceToHost));
        EXPECT_EQ(got.step, static_cast<uint32_t>(step));
    }
}

// AdamW of a step reads its inputs while the next step's are copied.
TEST_F(Upload, NextStepLeavesTheInputsOfTheOneBefore) {
    const PreparedStep first = prepared_step(0), second = prepared_step(1);
    const StepInputs* of_first = upload_.put(first, 0, copy_.get(), main_.get());
    upload_.put(second, 1, copy_.get(), main_.get());
    cuda_check(cudaDeviceSynchronize());
    StepInputs got;
    cuda_check(cudaMemcpy(&got, of_first, sizeof(got), cudaMemcpyDeviceToHost));
    EXPECT_EQ(got.step, 0u);
}

#ifdef LLMC_CPU
TEST_F(Upload, MainStreamWaitsForTheCopies) {
    StreamGate gate;
    gate.close(copy_.get());
    const PreparedStep prepared = prepared_step(0);
    upload_.put(prepared, 0, copy_.get(), main_.get());
    upload_.take(1, main_.get());
    EXPECT_EQ(cudaStreamQuery(main_.get()), cudaErrorNotReady);
    gate.open();
    expect_at_hand(0, 1);
}
#endif

}  // namespace
}  // namespace llmc
