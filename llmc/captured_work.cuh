// Work that is queued on a stream again and again, launched as one CUDA graph (CUDA programming guide,
// "CUDA Graphs").
//
// The work in question is a micro-step: the forward and backward pass of one micro-batch, some 20
// kernels a layer. Launched one by one, each kernel costs the host a few microseconds and leaves a gap
// before the next one on the device. Instead a stream can be told to record what is queued on it (to
// capture it) without running it; the record is a graph, which one call launches as a whole, with
// shorter gaps. That counts where micro-batches are small. The same kernels run in the same order, so
// the bits are the same; only the memset nodes of kernels' counters become one (work_counters.h).
//
// A graph repeats its kernels with the arguments of the capture: the same pointers, sizes and numbers.
// What differs from one run to the next must be read from device memory (a micro-batch's tokens are
// copied to one place before each run), or belong to the key of the graph.
#pragma once

#include <map>

#include "llmc/cuda_common.h"
#include "llmc/work_counters.h"

namespace llmc {

// Flags for cudaStreamWaitEvent on `stream`, for an event that other streams record. While `stream` is
// capturing, the wait becomes a node of the graph, which waits for the event's newest record at each run.
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
// What `queue()` queues on `stream`, as a graph that is ready to run, with one memset node for the counters
// of all its kernels; nothing runs yet. Throws Error when a CUDA call fails, and what `queue` throws; the
// stream is no longer capturing then.
template <class Queue>
cudaGraphExec_t capture_graph(cudaStream_t stream, Queue&& queue) {
    // Other threads go on allocating page-locked memory and asking for events.
    cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t ready = nullptr;
    bool capturing = true;
    try {
        const size_t taken = work_counters().taken();
        queue();
        capturing = false;
        cuda_check(cudaStreamEndCapture(stream, &graph));
        zero_counters_once(graph, work_counters().taken() - taken);
        cuda_check(cudaGraphInstantiate(&ready, graph, 0));
    } catch (...) {
        // The first error counts: these calls only clean up, and fail when it was CUDA's.
        if (capturing) cudaStreamEndCapture(stream, &graph);
        if (graph != nullptr) cudaGraphDestroy(graph);
        cudaGetLastError();
        throw;
    }
    cuda_check(cudaGraphDestroy(graph));
    return ready;
}
#endif

// The graphs of a work that comes in several kinds, told apart by their keys: calls with equal keys queue
// the same work. Key is any type with operator<; for micro-steps it is GradientTarget (reduction.h), which
// says what a micro-step does to the gradients. Each key that has come twice has a graph, which is kept
// to the end: they must not become more and more.
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

    // Without, and on the CPU, run() does no more than to call `queue`.
    bool enabled = false;

    // Has the work of this key done on `stream` once. queue(key) queues it there:
    //
    //   first call with a key   queue(key) as it is: libraries choose and load their kernels now, and
    //                           memory is allocated
    //   second                  queue(key) is captured, and the graph launched
    //   all later ones          the graph is launched; `queue` is not called
    //
    // `queue` must queue the same work whenever it is called with this key, on `stream` alone, and must
    // not make the host wait or allocate device memory. For events of other streams it waits with
    // wait_flags. Throws Error when a CUDA call fails.
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
        if (enabled) graphs_[key] = nullptr;
#endif
        queue(key);
    }

  private:
#ifndef LLMC_CPU
    std::map<Key, cudaGraphExec_t> graphs_;  // null where a key has come once
#endif
};

}  // namespace llmc
