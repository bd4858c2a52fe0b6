// Counters by which the blocks of a kernel share out its work, and how a graph sets them to zero.
//
// A kernel with more tiles than the GPU has multiprocessors may have its blocks stay, and each take its
// next tile by adding 1 to an integer in device memory, which must be 0 when the kernel begins. Our
// attention for Hopper does so, and so do kernels of cuBLASLt, whose 4 bytes of workspace are that integer,
// and cuDNN's forward pass. A memset in front of each launch sets it to zero, and that is what costs: on an
// H200 two kernels follow one another within half a microsecond, with a memset of four bytes between them
// within six.
//
// So each launch is given a counter that no other launch uses for a long while. A CUDA graph can then do
// with one memset node for all counters, before everything else in it: zero_counters_once() takes the
// others out. Where a counter lies decides nothing but which memory is counted in. All launches with
// counters must be on one stream: each graph zeroes the counters of all.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "llmc/cuda_common.h"
#include "llmc/memory_plan.h"

namespace llmc {

class WorkCounters {
  public:
    // Of one counter: 256-byte aligned, as libraries want their workspaces.
    static constexpr size_t kBytes = 256;
    // Fourteen launches a layer can have one, so that this suffices for 73 layers; the graph of a deeper
    // model's micro-step keeps its memset nodes.
    static constexpr size_t kCount = 1024;
    // A memset of more bytes sets something else.
    static constexpr size_t kMostFilled = 16;

    // The next counter, not zeroed. It comes again after kCount calls. The first call allocates device
    // memory where no plan has, and may therefore not be in a capture; throws Error when there is none.
    void* take() { return area() + taken_++ % kCount * kBytes; }

    // How often take() was called.
    size_t taken() const { return taken_; }

    // The counter that has the `bytes` bytes from `pointer` on, all of them; else null.
    const void* counter_with(const void* pointer, size_t bytes) const {
        const auto* area = planned_ != nullptr ? planned_ : own_.get();
        const auto place = reinterpret_cast<uintptr_t>(pointer);
        const auto begin = reinterpret_cast<uintptr_t>(area);
        if (area == nullptr || place < begin || place >= begin + kCount * kBytes) return nullptr;
        const size_t within = (place - begin) % kBytes;
        const bool fits = bytes <= kMostFilled && within + bytes <= kBytes;
        return fits ? area + (place - begin - within) : nullptr;
    }

    // All counters, kCount * kBytes bytes of device memory. Throws Error as take().
    unsigned char* area() {
        if (planned_ != nullptr) return planned_;
        if (own_.get() == nullptr) own_ = DeviceBuffer<unsigned char>(kCount * kBytes);
        return own_.get();
    }

    // Has the plan allocate the memory, which must not go before forget_memory(): one model at a time.
    void plan_memory(MemoryPlan* memory) {
        memory->add("scratch", "counters of kernels", &planned_, kCount * kBytes);
    }
    void forget_memory() { planned_ = nullptr; }

  private:
    unsigned char* planned_ = nullptr;
    DeviceBuffer<unsigned char> own_;
    size_t taken_ = 0;
};

inline WorkCounters& work_counters() {
    static WorkCounters* instance = new WorkCounters;  // never deleted: CUDA may be gone before it
    return *instance;
}

#ifndef LLMC_CPU
namespace detail {

// What a query that fills `nodes` (size `count`) gives; called once for the number.
template <class Query>
std::vector<cudaGraphNode_t> graph_nodes(Query&& query) {
    size_t count = 0;
    cuda_check(query(nullptr, &count));
    std::vector<cudaGraphNode_t> nodes(count);
    if (count > 0) cuda_check(query(nodes.data(), &count));
    return nodes;
}

// The neighbours of a node by `query`, cudaGraphNodeGetDependencies or cudaGraphNodeGetDependentNodes. CUDA 13
// has the data of edges among the arguments; those of memset nodes have none.
template <class Query>
std::vector<cudaGraphNode_t> neighbours(Query* query, cudaGraphNode_t node) {
    return graph_nodes([&](cudaGraphNode_t* nodes, size_t* count) {
#if CUDART_VERSION >= 13000
        return query(node, nodes, nullptr, count);
#else
        return query(node, nodes, count);
#endif
    });
}
inline void add_edge(cudaGraph_t graph, cudaGraphNode_t from, cudaGraphNode_t to) {
#if CUDART_VERSION >= 13000
    cuda_check(cudaGraphAddDependencies(graph, &from, &to, nullptr, 1));
#else
    cuda_check(cudaGraphAddDependencies(graph, &from, &to, 1));
#endif
}

// The counter that a node sets to zero, or null when it does something else.
inline const void* counter_zeroed_by(cudaGraphNode_t node) {
    cudaGraphNodeType type;
    cuda_check(cudaGraphNodeGetType(node, &type));
    if (type != cudaGraphNodeTypeMemset) return nullptr;
    cudaMemsetParams fill{};
    cuda_check(cudaGraphMemsetNodeGetParams(node, &fill));
    if (fill.value != 0 || fill.height != 1) return nullptr;
    return work_counters().counter_with(fill.dst, fill.width * fill.elementSize);
}

}  // namespace detail

// Takes the memset nodes of counters out of `graph`, which was captured from one stream, and has one memset
// node of all counters come before everything else. `taken`: how many counters were taken meanwhile.
// Returns how many nodes are gone; 0, and nothing is done, when some launches had to share a counter.
// Throws Error when a CUDA call fails.
inline size_t zero_counters_once(cudaGraph_t graph, size_t taken) {
    if (taken > WorkCounters::kCount) return 0;
    const auto all = detail::graph_nodes([&](cudaGraphNode_t* nodes, size_t* count) {
        return cudaGraphGetNodes(graph, nodes, count);
    });
    std::vector<cudaGraphNode_t> fills;
    std::vector<const void*> counters;
    for (const cudaGraphNode_t node : all) {
        if (const void* counter = detail::counter_zeroed_by(node)) {
            fills.push_back(node);
            counters.push_back(counter);
        }
    }
    std::sort(counters.begin(), counters.end());
    const bool twice = std::adjacent_find(counters.begin(), counters.end()) != counters.end();
    if (fills.empty() || twice) return 0;
    for (const cudaGraphNode_t fill : fills) {
        for (const cudaGraphNode_t before :
             detail::neighbours(cudaGraphNodeGetDependencies, fill)) {
            for (const cudaGraphNode_t after :
                 detail::neighbours(cudaGraphNodeGetDependentNodes, fill)) {
                detail::add_edge(graph, before, after);
            }
        }
        cuda_check(cudaGraphDestroyNode(fill));
    }
    const auto roots = detail::graph_nodes([&](cudaGraphNode_t* nodes, size_t* count) {
        return cudaGraphGetRootNodes(graph, nodes, count);
    });
    cudaMemsetParams everything{};
    everything.dst = work_counters().area();
    everything.elementSize = sizeof(unsigned);
    everything.width = WorkCounters::kCount * WorkCounters::kBytes / sizeof(unsigned);
    everything.height = 1;
    cudaGraphNode_t fill = nullptr;
    cuda_check(cudaGraphAddMemsetNode(&fill, graph, nullptr, 0, &everything));
    for (const cudaGraphNode_t root : roots) detail::add_edge(graph, fill, root);
    return fills.size();
}
#endif

}  // namespace llmc
