// Tokens on their way to the device, from page-locked memory and without a wait of the host.
#pragma once

#include <algorithm>
#include <cstddef>

#include "llmc/cuda_common.h"
#include "llmc/dataloader.h"
#include "llmc/gpt2.h"
#include "llmc/memory_plan.h"
#include "llmc/zero.cuh"

namespace llmc {

// Training steps alternate between two sets of device buffers: while AdamW still reads one step's
// inputs, the next step's are copied. Kernels read the micro-batch at hand from one fixed place, so that
// a graph of them serves for every micro-batch (captured_work.cuh).
class StepUpload {
  public:
    StepUpload() = default;
    StepUpload(const StepUpload&) = delete;
    StepUpload& operator=(const StepUpload&) = delete;
    ~StepUpload() {
        if (uploaded_ != nullptr) cudaEventDestroy(uploaded_);
    }

    void plan(MemoryPlan* memory, int micro_batches, int B, int T) {
        per_micro_batch_ = static_cast<size_t>(B) * T;
        count_ = static_cast<size_t>(micro_batches) * kMicroBatchArrays * per_micro_batch_;
        for (Slot& slot : slots_) {
            memory->add("inputs", "tokens of two steps", &slot.micro_batches, count_);
            memory->add("inputs", "tokens of two steps", &slot.step_inputs, 1);
        }
        memory->add("inputs", "tokens of the micro-batch at hand", &at_hand_,
                    kMicroBatchArrays * per_micro_batch_);
    }
    // The page-locked memory of InputPipeline, which on a CPU is the device's own.
    void plan_host(MemoryPlan* memory) const {
        memory->reserve("inputs", "tokens being read", 2 * count_ * sizeof(int));
    }
    void open() { cuda_check(cudaEventCreateWithFlags(&uploaded_, cudaEventDisableTiming)); }

    // Queues the copies on `copy_stream`; `main_stream` waits for them. All work on step - 1 but its
    // AdamW must be complete, and `prepared` must stay until this step's is. Returns the step's
    // StepInputs in device memory.
    const StepInputs* put(const PreparedStep& prepared, int step, cudaStream_t copy_stream,
                          cudaStream_t main_stream) {
        const Slot& slot = slots_[step % 2];
        copy(slot.micro_batches, prepared.micro_batches.get(), count_, copy_stream);
        copy(slot.step_inputs, prepared.inputs.get(), 1, copy_stream);
        cuda_check(cudaEventRecord(uploaded_, copy_stream));
        cuda_check(cudaStreamWaitEvent(main_stream, uploaded_, 0));
        step_ = slot.micro_batches;
        return slot.step_inputs;
    }

    // Queues on the `main_stream` of the last put() that this rank's micro-batch number `local` of its
    // step, 0 ... A-1, becomes the one at hand.
    void take(int local, cudaStream_t main_stream) const {
        const size_t count = kMicroBatchArrays * per_micro_batch_;
        cuda_check(cudaMemcpyAsync(at_hand_, step_ + static_cast<size_t>(local) * count,
                                   count * sizeof(int), cudaMemcpyDeviceToDevice, main_stream));
    }
    // The same place for every micro-batch.
    MicroBatch at_hand() const {
        return {at_hand_, at_hand_ + per_micro_batch_, at_hand_ + 2 * per_micro_batch_};
    }

  private:
    struct Slot {
        int* micro_batches = nullptr;  // (A,3,B*T), as PreparedStep has them
        StepInputs* step_inputs = nullptr;
    };
    template <class T>
    static void copy(T* to, const T* from, size_t count, cudaStream_t stream) {
        cuda_check(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyHostToDevice, stream));
    }

    Slot slots_[2];
    int* at_hand_ = nullptr;      // (3,B*T)
    const int* step_ = nullptr;   // of the last put()
    size_t count_ = 0;            // A*3*B*T
    size_t per_micro_batch_ = 0;  // B*T
    cudaEvent_t uploaded_ = nullptr;
};

// One micro-batch at a time, for evaluation: the host fills the next while the device reads this one.
class BatchUpload {
  public:
    BatchUpload() = default;
    BatchUpload(const BatchUpload&) = delete;
    BatchUpload& operator=(const BatchUpload&) = delete;
    ~BatchUpload() {
        for (Slot& slot : slots_) {
            if (slot.copied != nullptr) cudaEventDestroy(slot.copied);
        }
    }

    void plan(MemoryPlan* memory, int B, int T) {
        count_ = static_cast<size_t>(B) * T;
        memory->add("inputs", "evaluation", &inputs_, count_);
        memory->add("inputs", "evaluation", &targets_, count_);
    }
    void plan_host(MemoryPlan* memory) const {
        memory->reserve("inputs", "evaluation, being read", 2 * 2 * count_ * sizeof(int));
    }
    // `multi_gpu` must live as long as this.
    void open(const MultiGpuConfig* multi_gpu) {
        multi_gpu_ = multi_gpu;
        for (Slot& slot : slots_) {
            slot.inputs = PinnedBuffer<int>(count_);
            slot.targets = PinnedBuffer<int>(count_);
            std::fill_n(slot.inputs.get(), count_, 0);
            std::fill_n(slot.targets.get(), count_, -1);
            cuda_check(cudaEventCreateWithFlags(&slot.copied, cudaEventDisableTiming));
        }
    }

    // fill(int* inputs (B,T), int* targets (B,T)) writes host memory; the copies are queued on
    // `stream` and ordered with the work there.
    template <class Fill>
    MicroBatch put(cudaStream_t stream, Fill&& fill) {
        Slot& slot = slots_[next_++ % 2];
        multi_gpu_wait_for(slot.copied, multi_gpu_);
        fill(slot.inputs.get(), slot.targets.get());
        const size_t bytes = count_ * sizeof(int);
        cuda_check(
            cudaMemcpyAsync(inputs_, slot.inputs.get(), bytes, cudaMemcpyHostToDevice, stream));
        cuda_check(
            cudaMemcpyAsync(targets_, slot.targets.get(), bytes, cudaMemcpyHostToDevice, stream));
        cuda_check(cudaEventRecord(slot.copied, stream));
        return {inputs_, targets_, nullptr};
    }

  private:
    struct Slot {
        PinnedBuffer<int> inputs;
        PinnedBuffer<int> targets;
        cudaEvent_t copied = nullptr;
    };
    Slot slots_[2];
    const MultiGpuConfig* multi_gpu_ = nullptr;  // the stream may wait for other ranks
    unsigned next_ = 0;
    size_t count_ = 0;
    int* inputs_ = nullptr;
    int* targets_ = nullptr;
};

}  // namespace llmc
