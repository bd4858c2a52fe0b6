// Work that is queued again and again with the same arguments, as CUDA graphs.
//
// A micro-step is some 20 launches a layer. Launched one by one, each costs the host a few
// microseconds and leaves a gap between two kernels on the device; a graph is one launch with
// shorter gaps, which counts where micro-batches are small. What is computed, in which order and by
// which kernels stays the same, and so do the bits.
#pragma once

#include <map>

#include "llmc/cuda_common.h"

namespace llmc {

// What cudaStreamWaitEvent needs on `stream` for an event that is recorded outside the work that may be
// being captured there.
inline unsigned wait_flags([[maybe_unused]] cudaStream_t stream) {
#ifdef LLMC_CPU
    return 0;
#else
    cudaStreamCaptureStatus status;
    cuda_check(cudaStreamIsCapturing(stream, &status));
    return status == cudaStreamCaptureStatusActive ? cudaEventWaitExternal : cudaEventWaitDefault;
#endif
}

#ifndef LLMC_CPU
// What `queue()` queues on `stream`, as a graph that is ready to run; nothing runs yet. Throws Error when a
// CUDA call fails, and what `queue` throws; the stream is no longer capturing then.
template <class Queue>
cudaGraphExec_t capture_graph(cudaStream_t stream, Queue&& queue) {
    // Other threads go on allocating page-locked memory and asking for events.
    cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    cudaGraph_t graph = nullptr;
    try {
        queue();
    } catch (...) {
        // The first error counts: these calls only clean up, and fail when it was CUDA's.
        cudaStreamEndCapture(stream, &graph);
        if (graph != nullptr) cudaGraphDestroy(graph);
        cudaGetLastError();
        throw;
    }
    cuda_check(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t ready = nullptr;
    const cudaError_t status = cudaGraphInstantiate(&ready, graph, 0);
    cuda_check(cudaGraphDestroy(graph));
    cuda_check(status);
    return ready;
}
#endif

// Key is what the work may depend on from one call to the next, with operator<. A graph is kept for each
// that has come twice: there must be few, as there are of GradientTarget.
template <class Key>
class CapturedWork {
  public:
    CapturedWork() = default;
    CapturedWork(const CapturedWork&) = delete;
    CapturedWork& operator=(const CapturedWork&) = delete;
    // None of the graphs may be running.
    ~CapturedWork() {
#ifndef LLMC_CPU
        for (auto& [key, graph] : graphs_) {
            if (graph != nullptr) cudaGraphExecDestroy(graph);
        }
#endif
    }

    bool enabled = false;

    // Calls `queue(key)`, which queues work on `stream` alone and does the same each time it is called
    // with this `key`; or launches the graph of what it queued. The first time it runs as it is,
    // since libraries choose and load kernels then; the second time it is captured. `queue` must not
    // make the host wait, allocate, or touch other streams; of those it may wait for events with
    // wait_flags. Throws Error when a CUDA call fails. On the CPU build it is always called.
    template <class Queue>
    void run(const Key& key, [[maybe_unused]] cudaStream_t stream, Queue&& queue) {
#ifndef LLMC_CPU
        const auto known = graphs_.find(key);
        if (enabled && known != graphs_.end()) {
            cudaGraphExec_t& graph = known->second;
            if (graph == nullptr) graph = capture_graph(stream, [&] { queue(key); });
            cuda_check(cudaGraphLaunch(graph, stream));
            return;
        }
        if (enabled) graphs_[key] = nullptr;  // seen once
#endif
        queue(key);
    }

  private:
#ifndef LLMC_CPU
    std::map<Key, cudaGraphExec_t> graphs_;
#endif
};

}  // namespace llmc
