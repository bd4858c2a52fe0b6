// Attention as graphs of cuDNN's front-end, one for each pass and shape, built once and kept.
//
// Compile with CUDNN_FRONTEND_SKIP_JSON_LIB and NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING; with the
// latter the front-end looks up every function of cuDNN, the CUDA runtime and the driver by name, so
// that nothing of them is linked for its sake and the program starts on a machine without a driver.
#include "llmc/cudnn_att.h"

#include <cudnn_frontend.h>
#include <dlfcn.h>

#include <cctype>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>

#include "llmc/cuda_common.h"
#include "llmc/work_counters.h"

#ifndef NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#error "compile with -DNV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING"
#endif

namespace cudnn_frontend {
// Where the front-end finds cuDNN; its user sets it.
void* cudnn_dlhandle = nullptr;
}  // namespace cudnn_frontend

namespace llmc {

namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

struct Shape {
    int64_t B, T, NH, HS;

    bool operator<(const Shape& other) const {
        return std::tie(B, T, NH, HS) < std::tie(other.B, other.T, other.NH, other.HS);
    }
    float scale() const { return 1.0f / std::sqrt(static_cast<float>(HS)); }
};

enum TensorId : int64_t { kQ = 1, kK, kV, kOut, kLse, kDOut, kDQ, kDK, kDV };

enum class Pass { kForward, kBackward };

struct Plan {
    fe::graph::Graph graph;
    size_t workspace_bytes = 0;
};

// The front-end's graphs, and cuDNN's handle. Never destroyed: when the program ends, the driver may
// have gone before.
struct Library {
    cudnnHandle_t handle = nullptr;
    std::map<std::pair<Pass, Shape>, std::unique_ptr<Plan>> plans;
};

void open_cudnn() {
    if (fe::cudnn_dlhandle != nullptr) return;
    fe::cudnn_dlhandle = dlopen("libcudnn.so.9", RTLD_NOW);
    if (fe::cudnn_dlhandle != nullptr) return;
    throw Error(
        format("cuDNN: cannot open libcudnn.so.9 (%s); install cuDNN 9, add its folder to "
               "LD_LIBRARY_PATH, or build with USE_CUDNN=0",
               dlerror()));
}

Library& library() {
    static Library& only = *new Library;
    if (only.handle == nullptr) {
        open_cudnn();
        const cudnnStatus_t status = fe::detail::create_handle(&only.handle);
        if (status != CUDNN_STATUS_SUCCESS) {
            throw Error(
                format("%s: no handle: %s", cudnn_name(), fe::detail::get_error_string(status)));
        }
    }
    return only;
}

std::string compute_capability() {
    int device = 0, major = 0, minor = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
        return "unknown";
    }
    return format("%d.%d", major, minor);
}

[[noreturn]] void refuse(Pass pass, const Shape& shape, const char* message) {
    throw Error(format(
        "%s refuses the %s pass of attention in bf16 with B %d, T %d, %d heads of size %d on "
        "a GPU of compute capability %s: %s (build with USE_CUDNN=0 for our own kernels)",
        cudnn_name(), pass == Pass::kForward ? "forward" : "backward", static_cast<int>(shape.B),
        static_cast<int>(shape.T), static_cast<int>(shape.NH), static_cast<int>(shape.HS),
        compute_capability().c_str(), message));
}

// Calls something of the front-end's that returns an error_t; it may throw as well.
template <class Call>
void check(Pass pass, const Shape& shape, Call&& call) {
    std::string message;
    try {
        fe::error_t status = call();
        if (!status.is_bad()) return;
        message = status.get_message();
    } catch (const std::exception& error) {
        message = error.what();
    }
    refuse(pass, shape, message.c_str());
}

// A (B,NH,T,HS) view of memory whose positions are `row` elements apart.
fe::graph::Tensor_attributes heads(TensorId id, const char* name, const Shape& shape, int64_t row) {
    return fe::graph::Tensor_attributes()
        .set_name(name)
        .set_uid(id)
        .set_dim({shape.B, shape.NH, shape.T, shape.HS})
        .set_stride({shape.T * row, shape.HS, row, 1});
}

fe::graph::Tensor_attributes statistics(const Shape& shape) {
    return fe::graph::Tensor_attributes()
        .set_name("lse")
        .set_uid(kLse)
        .set_dim({shape.B, shape.NH, shape.T, 1})
        .set_stride({shape.NH * shape.T, shape.T, 1, 1})
        .set_data_type(fe::DataType_t::FLOAT);
}

// Gives an output of the graph the attributes that `heads` or `statistics` made.
void set_output(const Tensor& tensor, const fe::graph::Tensor_attributes& like) {
    tensor->set_output(true)
        .set_uid(like.get_uid())
        .set_dim(like.get_dim())
        .set_stride(like.get_stride());
}

void add_forward(fe::graph::Graph& graph, const Shape& shape) {
    const int64_t C = shape.NH * shape.HS;
    const Tensor q = graph.tensor(heads(kQ, "q", shape, 3 * C));
    const Tensor k = graph.tensor(heads(kK, "k", shape, 3 * C));
    const Tensor v = graph.tensor(heads(kV, "v", shape, 3 * C));
    auto options = fe::graph::SDPA_attributes().set_name("attention_forward");
    options.set_generate_stats(true).set_causal_mask(true).set_attn_scale(shape.scale());
    const auto [out, lse] = graph.sdpa(q, k, v, options);
    set_output(out, heads(kOut, "out", shape, C));
    set_output(lse, statistics(shape));
    lse->set_data_type(fe::DataType_t::FLOAT);
}

void add_backward(fe::graph::Graph& graph, const Shape& shape) {
    const int64_t C = shape.NH * shape.HS;
    const Tensor q = graph.tensor(heads(kQ, "q", shape, 3 * C));
    const Tensor k = graph.tensor(heads(kK, "k", shape, 3 * C));
    const Tensor v = graph.tensor(heads(kV, "v", shape, 3 * C));
    const Tensor out = graph.tensor(heads(kOut, "out", shape, C));
    const Tensor dout = graph.tensor(heads(kDOut, "dout", shape, C));
    const Tensor lse = graph.tensor(statistics(shape));
    auto options = fe::graph::SDPA_backward_attributes().set_name("attention_backward");
    options.set_deterministic_algorithm(true).set_causal_mask(true).set_attn_scale(shape.scale());
    const auto [dq, dk, dv] = graph.sdpa_backward(q, k, v, out, dout, lse, options);
    set_output(dq, heads(kDQ, "dq", shape, 3 * C));
    set_output(dk, heads(kDK, "dk", shape, 3 * C));
    set_output(dv, heads(kDV, "dv", shape, 3 * C));
}

// Whether the heuristic's first forward kernel is known to be slower than another on its list, whose
// name says k24=7: on an H200, for heads of 64, cuDNN 9.14's first takes 0.322 ms and that one, its
// second, 0.297 (B 64, T 1024, 12 heads). 9.19 has it first.
bool prefers_k24_7(Pass pass, const Shape& shape) {
    return pass == Pass::kForward && shape.HS == 64 && compute_capability() == "9.0";
}

// Nothing is timed, so that each rank and run takes the same kernel.
fe::error_t choose_kernel(fe::graph::Graph& graph, Pass pass, const Shape& shape) {
    const cudnnHandle_t handle = library().handle;
    fe::error_t status = graph.validate();
    if (status.is_good()) status = graph.build_operation_graph(handle);
    if (status.is_good()) status = graph.create_execution_plans({fe::HeurMode_t::A});
    if (status.is_bad()) return status;
    const int64_t count = prefers_k24_7(pass, shape) ? graph.get_execution_plan_count() : 0;
    for (int64_t i = 0; i < count; ++i) {
        std::string name;
        if (graph.get_plan_name_at_index(i, name).is_bad()) continue;
        const size_t knob = name.find("k24=7");
        if (knob == std::string::npos || isdigit(name.c_str()[knob + 5]) != 0) continue;
        if (graph.build_plan_at_index(handle, i).is_good()) return {};
    }
    return graph.build_plans(handle);
}

Plan& find_plan(Pass pass, const Shape& shape) {
    Library& cudnn = library();
    std::unique_ptr<Plan>& kept = cudnn.plans[{pass, shape}];
    if (kept != nullptr) return *kept;
    auto plan = std::make_unique<Plan>();
    plan->graph.set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    int64_t bytes = 0;
    check(pass, shape, [&] {
        pass == Pass::kForward ? add_forward(plan->graph, shape) : add_backward(plan->graph, shape);
        return choose_kernel(plan->graph, pass, shape);
    });
    check(pass, shape, [&] { return plan->graph.get_workspace_size(bytes); });
    plan->workspace_bytes = static_cast<size_t>(bytes);
    kept = std::move(plan);
    return *kept;
}

void execute(Plan& plan, Pass pass, const Shape& shape, std::unordered_map<int64_t, void*> pointers,
             void* workspace, cudaStream_t stream) {
    // On Hopper the forward pass has one counter, of 4 bytes somewhere in a workspace hardly larger.
    const bool counts = pass == Pass::kForward && plan.workspace_bytes > 0 &&
                        plan.workspace_bytes <= WorkCounters::kBytes;
    if (counts) workspace = work_counters().take();
    const cudnnHandle_t handle = library().handle;
    const cudnnStatus_t status = fe::detail::set_stream(handle, stream);
    if (status != CUDNN_STATUS_SUCCESS) {
        refuse(pass, shape, fe::detail::get_error_string(status));
    }
    check(pass, shape, [&] { return plan.graph.execute(handle, pointers, workspace); });
}

// cuDNN takes all pointers as void*, also those it only reads.
template <class T>
void* address(const T* pointer) {
    return const_cast<T*>(pointer);
}

}  // namespace

const char* cudnn_name() {
    static const std::string name = [] {
        open_cudnn();
        const size_t version = fe::detail::get_backend_version();
        return format("cuDNN %zu.%zu", version / 10000, version / 100 % 100);
    }();
    return name.c_str();
}

size_t cudnn_attention_forward_workspace_bytes(int B, int T, int NH, int HS) {
    return find_plan(Pass::kForward, {B, T, NH, HS}).workspace_bytes;
}

size_t cudnn_attention_backward_workspace_bytes(int B, int T, int NH, int HS) {
    return find_plan(Pass::kBackward, {B, T, NH, HS}).workspace_bytes;
}

void cudnn_attention_forward(bf16* out, float* lse, const bf16* qkv, void* workspace, int B, int T,
                             int NH, int HS, cudaStream_t stream) {
    const Shape shape{B, T, NH, HS};
    const int64_t C = shape.NH * shape.HS;
    Plan& plan = find_plan(Pass::kForward, shape);
    execute(plan, Pass::kForward, shape,
            {{kQ, address(qkv)},
             {kK, address(qkv + C)},
             {kV, address(qkv + 2 * C)},
             {kOut, out},
             {kLse, lse}},
            workspace, stream);
}

void cudnn_attention_backward(bf16* dqkv, const bf16* dout, const bf16* qkv, const bf16* out,
                              const float* lse, void* workspace, int B, int T, int NH, int HS,
                              cudaStream_t stream) {
    const Shape shape{B, T, NH, HS};
    const int64_t C = shape.NH * shape.HS;
    Plan& plan = find_plan(Pass::kBackward, shape);
    execute(plan, Pass::kBackward, shape,
            {{kQ, address(qkv)},
             {kK, address(qkv + C)},
             {kV, address(qkv + 2 * C)},
             {kOut, address(out)},
             {kDOut, address(dout)},
             {kLse, address(lse)},
             {kDQ, dqkv},
             {kDK, dqkv + C},
             {kDV, dqkv + 2 * C}},
            workspace, stream);
}

}  // namespace llmc
