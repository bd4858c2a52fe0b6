// A library that `make profile` has the trainer load: it writes down what ran on the GPU, and from
// which range of llmc/nvtx_range.cuh it was queued.
//
// NVTX loads it (NVTX_INJECTION64_PATH) with the first range and hands it the ranges of each
// thread. CUPTI tells of kernels, copies and fills when they have run, each with the number of the
// call that queued it, and of that number's range, which it is told by the "external correlation"
// of its activity API. Work of a CUDA graph belongs to the range in which it was captured: CUPTI
// calls back for each node that is made or copied.
//
// LLMC_PROFILE names the file, written when the process ends. One record a line, fields separated
// by tabs, times in ns:
//
//   range   id  parent  text                                      id from 1, parent 0: outermost
//   name    number  demangled kernel name
//   kernel  start  end  stream  range  call  in a graph (0, 1)  number of its name
//   copy    start  end  stream  range  call  in a graph (0, 1)  bytes
//   set     start  end  stream  range  call  in a graph (0, 1)  bytes
//   lost    records that CUPTI had to drop, or that have no times
//   end
//
// The call's number is the same for all work of one launch of a graph. Errors go to stderr, and the
// trainer runs on.
#include <cupti.h>
#include <cxxabi.h>
#include <nvtx3/nvToolsExt.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

constexpr auto kRangeKind = CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0;
constexpr size_t kBufferBytes = size_t{8} << 20;

struct RangeRecord {
    uint64_t parent;
    std::string text;
};

struct WorkRecord {
    const char* kind;
    uint64_t start, end;
    uint32_t stream, call;
    uint64_t graph_node;  // 0: not in a graph
    uint64_t detail;      // bytes, or the number of the kernel's name
};

// Two locks: CUPTI calls us from threads of its own as well, and is itself called under work_mutex.
struct Recorder {
    bool running = false;
    std::mutex range_mutex;
    std::vector<RangeRecord> ranges;  // id - 1 is the index
    std::unordered_map<uint64_t, uint64_t> range_of_node;
    std::mutex work_mutex;
    std::vector<WorkRecord> work;
    std::map<std::string, uint64_t> names;
    std::unordered_map<uint32_t, uint64_t> range_of_call;
    size_t lost = 0;
};

Recorder& recorder() {
    static Recorder* instance = new Recorder;  // never deleted: it is read when the process ends
    return *instance;
}

struct OpenRange {
    uint64_t id;
    bool told;  // CUPTI knows of it
};
thread_local std::vector<OpenRange> open_ranges;

bool check(CUptiResult result, const char* call) {
    if (result == CUPTI_SUCCESS) return true;
    static std::atomic<int> errors{0};
    if (++errors > 20) return false;  // those of each range would be many
    const char* text = "unknown error";
    cuptiGetResultString(result, &text);
    std::fprintf(stderr, "profile: %s: %s\n", call, text);
    return false;
}

// ---- what CUPTI tells ----

void CUPTIAPI give_buffer(uint8_t** buffer, size_t* size, size_t* most_records) {
    *buffer = static_cast<uint8_t*>(std::aligned_alloc(64, kBufferBytes));
    *size = *buffer == nullptr ? 0 : kBufferBytes;
    *most_records = 0;  // as many as fit
}

template <class Activity>
void add_work(Recorder& r, const char* kind, const Activity& a, uint64_t detail) {
    if (a.start == 0 || a.end == 0) {
        ++r.lost;
        return;
    }
    r.work.push_back({kind, a.start, a.end, a.streamId, a.correlationId, a.graphNodeId, detail});
}

// The versions of records that CUDA 12 and 13 share: later ones only have more at the end.
void add_record(Recorder& r, const CUpti_Activity* record) {
    switch (record->kind) {
        case CUPTI_ACTIVITY_KIND_KERNEL:
        case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
            const auto& kernel = *reinterpret_cast<const CUpti_ActivityKernel9*>(record);
            const char* name = kernel.name == nullptr ? "unknown" : kernel.name;
            const uint64_t number = r.names.emplace(name, r.names.size()).first->second;
            add_work(r, "kernel", kernel, number);
            break;
        }
        case CUPTI_ACTIVITY_KIND_MEMCPY: {
            const auto& copy = *reinterpret_cast<const CUpti_ActivityMemcpy5*>(record);
            add_work(r, "copy", copy, copy.bytes);
            break;
        }
        case CUPTI_ACTIVITY_KIND_MEMSET: {
            const auto& set = *reinterpret_cast<const CUpti_ActivityMemset4*>(record);
            add_work(r, "set", set, set.bytes);
            break;
        }
        case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: {
            const auto& link = *reinterpret_cast<const CUpti_ActivityExternalCorrelation*>(record);
            if (link.externalKind == kRangeKind) {
                r.range_of_call[link.correlationId] = link.externalId;
            }
            break;
        }
        default:  // the calls themselves, which external correlation needs
            break;
    }
}

void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t* buffer, size_t,
                          size_t valid) {
    Recorder& r = recorder();
    const std::lock_guard<std::mutex> lock(r.work_mutex);
    CUpti_Activity* record = nullptr;
    while (valid > 0) {
        const CUptiResult result = cuptiActivityGetNextRecord(buffer, valid, &record);
        if (result == CUPTI_ERROR_MAX_LIMIT_REACHED) break;
        if (!check(result, "cuptiActivityGetNextRecord")) break;
        add_record(r, record);
    }
    size_t dropped = 0;
    if (check(cuptiActivityGetNumDroppedRecords(context, stream, &dropped),
              "cuptiActivityGetNumDroppedRecords")) {
        r.lost += dropped;
    }
    std::free(buffer);
}

// Nodes of graphs: made while a stream is captured, in the range that is open then; copied when the
// graph is made ready to run. Kernels name the copy.
void CUPTIAPI on_graph_node(void*, CUpti_CallbackDomain domain, CUpti_CallbackId id,
                            const void* data) {
    if (domain != CUPTI_CB_DOMAIN_RESOURCE || data == nullptr) return;
    const auto* graph = static_cast<const CUpti_GraphData*>(
        static_cast<const CUpti_ResourceData*>(data)->resourceDescriptor);
    uint64_t node = 0, original = 0;
    if (graph == nullptr || graph->node == nullptr ||
        !check(cuptiGetGraphNodeId(graph->node, &node), "cuptiGetGraphNodeId")) {
        return;
    }
    Recorder& r = recorder();
    if (id == CUPTI_CBID_RESOURCE_GRAPHNODE_CREATED && !open_ranges.empty()) {
        const std::lock_guard<std::mutex> lock(r.range_mutex);
        r.range_of_node.emplace(node, open_ranges.back().id);
    } else if (id == CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED && graph->originalNode != nullptr &&
               check(cuptiGetGraphNodeId(graph->originalNode, &original), "cuptiGetGraphNodeId")) {
        const std::lock_guard<std::mutex> lock(r.range_mutex);
        const auto place = r.range_of_node.find(original);
        if (place != r.range_of_node.end()) r.range_of_node[node] = place->second;
    }
}

// ---- the file ----

std::string demangled(const std::string& name) {
    int status = 0;
    char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
    std::string result = status == 0 && text != nullptr ? text : name;
    std::free(text);
    return result;
}

uint64_t range_of(const Recorder& r, const WorkRecord& work) {
    if (work.graph_node != 0) {
        const auto node = r.range_of_node.find(work.graph_node);
        if (node != r.range_of_node.end()) return node->second;
    }
    const auto call = r.range_of_call.find(work.call);
    return call == r.range_of_call.end() ? 0 : call->second;
}

void write_file(const char* path) {
    Recorder& r = recorder();
    const std::lock_guard<std::mutex> range_lock(r.range_mutex);
    const std::lock_guard<std::mutex> work_lock(r.work_mutex);
    std::FILE* file = std::fopen(path, "w");
    if (file == nullptr) {
        std::fprintf(stderr, "profile: %s: cannot be written\n", path);
        return;
    }
    for (size_t i = 0; i < r.ranges.size(); ++i) {
        std::fprintf(file, "range\t%zu\t%llu\t%s\n", i + 1,
                     static_cast<unsigned long long>(r.ranges[i].parent), r.ranges[i].text.c_str());
    }
    for (const auto& [name, number] : r.names) {
        std::fprintf(file, "name\t%llu\t%s\n", static_cast<unsigned long long>(number),
                     demangled(name).c_str());
    }
    for (const WorkRecord& work : r.work) {
        std::fprintf(file, "%s\t%llu\t%llu\t%u\t%llu\t%u\t%d\t%llu\n", work.kind,
                     static_cast<unsigned long long>(work.start),
                     static_cast<unsigned long long>(work.end), work.stream,
                     static_cast<unsigned long long>(range_of(r, work)), work.call,
                     work.graph_node != 0 ? 1 : 0, static_cast<unsigned long long>(work.detail));
    }
    std::fprintf(file, "lost\t%zu\nend\n", r.lost);
    if (std::ferror(file) != 0 || std::fclose(file) != 0) {
        std::fprintf(stderr, "profile: %s: cannot be written\n", path);
    }
}

void finish() {
    if (recorder().running) {
        check(cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "cuptiActivityFlushAll");
    }
    if (const char* path = std::getenv("LLMC_PROFILE")) write_file(path);
}

// ---- the start ----

void start() {
    std::atexit(finish);
    bool good = check(cuptiActivityRegisterCallbacks(give_buffer, take_buffer),
                      "cuptiActivityRegisterCallbacks");
    const auto enable = [&](CUpti_ActivityKind kind, const char* what) {
        good = good && check(cuptiActivityEnable(kind), what);
    };
    enable(CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION, "cuptiActivityEnable, ranges");
    enable(CUPTI_ACTIVITY_KIND_RUNTIME, "cuptiActivityEnable, runtime calls");
    enable(CUPTI_ACTIVITY_KIND_DRIVER, "cuptiActivityEnable, driver calls");
    enable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, "cuptiActivityEnable, kernels");
    enable(CUPTI_ACTIVITY_KIND_MEMCPY, "cuptiActivityEnable, copies");
    enable(CUPTI_ACTIVITY_KIND_MEMSET, "cuptiActivityEnable, fills");
    if (!good) return;
    // Asked in a loop while ranks wait: records of no use.
    check(cuptiActivityEnableRuntimeApi(CUPTI_RUNTIME_TRACE_CBID_cudaEventQuery_v3020, 0),
          "cuptiActivityEnableRuntimeApi");
    check(cuptiActivityEnableRuntimeApi(CUPTI_RUNTIME_TRACE_CBID_cudaStreamQuery_v3020, 0),
          "cuptiActivityEnableRuntimeApi");
    check(cuptiActivityEnableDriverApi(CUPTI_DRIVER_TRACE_CBID_cuEventQuery, 0),
          "cuptiActivityEnableDriverApi");
    check(cuptiActivityEnableDriverApi(CUPTI_DRIVER_TRACE_CBID_cuStreamQuery, 0),
          "cuptiActivityEnableDriverApi");
    // Without these only the work of graphs has no range.
    CUpti_SubscriberHandle subscriber;
    if (check(cuptiSubscribe(&subscriber, on_graph_node, nullptr), "cuptiSubscribe")) {
        for (const CUpti_CallbackId id :
             {CUPTI_CBID_RESOURCE_GRAPHNODE_CREATED, CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED}) {
            check(cuptiEnableCallback(1, subscriber, CUPTI_CB_DOMAIN_RESOURCE, id),
                  "cuptiEnableCallback");
        }
    }
    recorder().running = true;
}

// ---- what NVTX tells ----

int NVTX_API push_range(const char* text) {
    Recorder& r = recorder();
    const uint64_t parent = open_ranges.empty() ? 0 : open_ranges.back().id;
    uint64_t id = 0;
    {
        const std::lock_guard<std::mutex> lock(r.range_mutex);
        r.ranges.push_back({parent, text == nullptr ? "" : text});
        id = r.ranges.size();
    }
    const bool told = r.running && check(cuptiActivityPushExternalCorrelationId(kRangeKind, id),
                                         "cuptiActivityPushExternalCorrelationId");
    open_ranges.push_back({id, told});
    return static_cast<int>(open_ranges.size()) - 1;
}

int NVTX_API pop_range() {
    if (open_ranges.empty()) return -1;
    if (open_ranges.back().told) {
        uint64_t last = 0;
        check(cuptiActivityPopExternalCorrelationId(kRangeKind, &last),
              "cuptiActivityPopExternalCorrelationId");
    }
    open_ranges.pop_back();
    return static_cast<int>(open_ranges.size());
}

template <class Function>
NvtxFunctionPointer as_nvtx(Function* function) {
    return reinterpret_cast<NvtxFunctionPointer>(function);
}

}  // namespace

// NVTX calls this once for each program and library that names ranges.
extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(
    NvtxGetExportTableFunc_t get_table) {
    const auto* tables =
        static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
    NvtxFunctionTable table = nullptr;
    unsigned size = 0;
    if (tables == nullptr || tables->struct_size < sizeof(NvtxExportTableCallbacks) ||
        tables->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size) == 0 ||
        size <= NVTX_CBID_CORE_RangePop) {
        std::fprintf(stderr, "profile: this version of NVTX is not known\n");
        return 0;
    }
    static std::once_flag once;
    std::call_once(once, start);
    *table[NVTX_CBID_CORE_RangePushA] = as_nvtx(push_range);
    *table[NVTX_CBID_CORE_RangePop] = as_nvtx(pop_range);
    return 1;
}
