// Work that is queued again and again with the same arguments, as CUDA graphs.
//
// A micro-step is some 20 launches a layer. Launched one by one, each costs the host a few
// microseconds and leaves a gap between two kernels on the device; a graph is one launch with
// shorter gaps, which counts where micro-batches are small. What is computed, in which order and by
// which kernels stays the same, and so do the bits.
#pragma once

#include <cstddef>
#include <map>
#include <utility>

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

class CapturedWork {
  public:
    // Graphs that are kept at most; what comes beyond is launched kernel by kernel. One of a micro-step
    // of d12 takes about a megabyte.
    static constexpr size_t kMostGraphs = 128;

    CapturedWork() = default;
    CapturedWork(const CapturedWork&) = delete;
    CapturedWork& operator=(const CapturedWork&) = delete;
    ~CapturedWork() { clear(); }

    bool enabled = false;

    // Calls `queue()`, which queues work on `stream` alone and does the same each time it is called
    // with this `key`; or launches the graph of what it queued. The first time it runs as it is,
    // since libraries choose and load kernels then; the second time it is captured. `queue` must not
    // make the host wait, allocate, or touch other streams; of those it may wait for events with
    // wait_flags. Throws Error when a CUDA call fails. On the CPU build it
    // is always called.
    template <class Queue>
    void run(const std::pair<int, int>& key, cudaStream_t stream, Queue&& queue) {
#ifndef LLMC_CPU
        if (enabled && graphs_.count(key) == 0 && graphs_.size() < kMostGraphs) {
            graphs_[key] = nullptr;  // seen once
        } else if (enabled && graphs_.count(key) > 0) {
            cudaGraphExec_t& graph = graphs_[key];
            if (graph == nullptr) graph = capture(stream, queue);
            cuda_check(cudaGraphLaunch(graph, stream));
            return;
        }
#else
        (void)key;
        (void)stream;
#endif
        queue();
    }

    // Forgets all graphs; none of them may be running.
    void clear() {
#ifndef LLMC_CPU
        for (auto& [key, graph] : graphs_) {
            if (graph != nullptr) cudaGraphExecDestroy(graph);
        }
        graphs_.clear();
#endif
    }

  private:
#ifndef LLMC_CPU
    template <class Queue>
    static cudaGraphExec_t capture(cudaStream_t stream, Queue&& queue) {
        // Other threads go on allocating page-locked memory and asking for events.
        cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        queue();
        cudaGraph_t graph = nullptr;
        cuda_check(cudaStreamEndCapture(stream, &graph));
        cudaGraphExec_t ready = nullptr;
        const cudaError_t status = cudaGraphInstantiate(&ready, graph, 0);
        cuda_check(cudaGraphDestroy(graph));
        cuda_check(status);
        return ready;
    }

    std::map<std::pair<int, int>, cudaGraphExec_t> graphs_;
#endif
};

}  // namespace llmc
