// Matrix products of a linear layer, through cuBLASLt, and the gradient of its bias.
//
//   forward   out (rows,OC)  = inp (rows,C) weight (OC,C)^T + bias      2 rows C OC flops
//   input     dinp (rows,C)  = dout (rows,OC) weight                    2 rows C OC flops
//   weight    dweight (OC,C) = dout^T inp, dbias (OC) = sum of rows     2 rows C OC flops
//
// The products are bound by the tensor cores' rate, the bias gradient by reading dout once. GELU
// behind the first product of an MLP, and its derivative behind the product that comes back to it,
// can be computed by the product itself while the sums are still in registers: GELU's input is then
// written once and not read again.
//
// cuBLASLt's matrices are stored by columns, and a matrix stored by rows is its transpose stored by
// columns. So each product is asked for transposed, with the factors the other way round: its m
// counts our columns. Descriptors, layouts and the algorithm are made once for each kind of product.
// The algorithm is the one of the table of measured algorithms (llmc/matmul_table.h) or, where that
// has none, the first that the library's heuristic names for a workspace of fixed size: it depends
// on shape, alignment, library and GPU, never on timing in this run or on free memory.
//
// All sums are in fp32 and rounded once to nearest even, with one exception. Where gradX is bf16 and
// dweight is added to, some of the library's kernels for sm_90 round the product to bf16 first and
// the sum with the old gradient a second time; others, among them those that cut the sum into parts,
// round once. Which one it is depends on what the choice of the algorithm depends on, so the bits
// are the same in every run.
#pragma once

#include <cublasLt.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/bias.cuh"
#include "llmc/cpu/shapes.h"
#include "llmc/cuda_common.h"
#include "llmc/cuda_utils.cuh"
#include "llmc/gelu.cuh"
#include "llmc/matmul_table.h"
#include "llmc/memory_plan.h"
#include "llmc/nvtx_range.cuh"
#include "llmc/precision.h"
#include "llmc/work_counters.h"

namespace llmc {

// Throws Error naming the call's place when a cuBLASLt call did not succeed.
inline void cublas_check(cublasStatus_t status, const char* file = __builtin_FILE(),
                         int line = __builtin_LINE()) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    throw Error(format("cuBLASLt error %s at %s:%d", cublasLtGetStatusString(status), file, line));
}

// ============================================================================
// kernels

namespace matmul_detail {

constexpr int kBiasRowsThreads = 256;

// out (rows,OC) = bias (OC) in every row.
template <class T>
__global__ void bias_rows_kernel(T* out, const T* bias, size_t count, int OC) {
    const size_t i = blockIdx.x * static_cast<size_t>(kBiasRowsThreads) + threadIdx.x;
    if (i < count) out[i] = bias[i % OC];
}

// ============================================================================
// cuBLASLt

template <class T>
constexpr cudaDataType_t data_type() {
    return sizeof(T) == 4 ? CUDA_R_32F : CUDA_R_16BF;
}

struct Product {
    cublasLtMatmulDesc_t desc = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;
    cublasLtMatmulAlgo_t algo{};
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;  // else the library has no algorithm
    bool tuned = false;                             // the algorithm is the table's
    size_t workspace_bytes = 0;                     // that the algorithm needs
};

// What lasts from product to product. The workspace serves one stream at a time.
struct CublasLt {
    static constexpr size_t kWorkspaceBytes = size_t{64} << 20;

    cublasLtHandle_t handle = nullptr;  // made for the first product
    std::string gpu;                    // its name, known with the handle
    const std::vector<TunedProduct>* table = &tuned_products();
    unsigned char* workspace = nullptr;  // where a memory plan has put it
    DeviceBuffer<unsigned char> own_workspace;
    bool tf32 = true;
    std::map<ProductKey, Product> products;
};

inline CublasLt& cublaslt() {
    static CublasLt* instance = new CublasLt;  // never deleted: at exit, CUDA may be gone before it
    return *instance;
}

template <class Value>
void set_attribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                   const Value& value) {
    cublas_check(cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof(value)));
}

// Fills `found` with algorithms that the library's heuristic names for this product, the one that it
// takes for the fastest first; it shrinks when there are fewer. They need at most this workspace.
inline cublasStatus_t heuristic_algorithms(CublasLt& lt, const ProductKey& key,
                                           const Product& product, size_t workspace_bytes,
                                           std::vector<cublasLtMatmulHeuristicResult_t>* found) {
    cublasLtMatmulPreference_t preference;
    cublas_check(cublasLtMatmulPreferenceCreate(&preference));
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
        cublas_check(
            cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
    // Parts of a sum are added in fp32: one rounding to the result, and no order left to chance.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    const uint32_t factors = key.aligned ? 16 : sizeof(floatX);
    const uint32_t result = key.aligned ? 16 : key.wide_result ? sizeof(float) : sizeof(floatX);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, factors);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, factors);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, result);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, result);
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        lt.handle, product.desc, product.a, product.b, product.d, product.d, preference,
        static_cast<int>(found->size()), found->data(), &count);
    cublas_check(cublasLtMatmulPreferenceDestroy(preference));
    found->resize(status == CUBLAS_STATUS_SUCCESS ? count : 0);
    const auto bad = [](const auto& result) { return result.state != CUBLAS_STATUS_SUCCESS; };
    found->erase(std::remove_if(found->begin(), found->end(), bad), found->end());
    const bool none = status == CUBLAS_STATUS_SUCCESS && found->empty();
    return none ? CUBLAS_STATUS_NOT_SUPPORTED : status;
}

// Bytes of workspace that an algorithm needs for a product; nothing when the library does not run it, or
// not in the workspace that there is.
inline std::optional<size_t> workspace_of(CublasLt& lt, const Product& product,
                                          const cublasLtMatmulAlgo_t& algo) {
    cublasLtMatmulHeuristicResult_t result{};
    const cublasStatus_t status = cublasLtMatmulAlgoCheck(
        lt.handle, product.desc, product.a, product.b, product.d, product.d, &algo, &result);
    if (status != CUBLAS_STATUS_SUCCESS || result.workspaceSize > CublasLt::kWorkspaceBytes) {
        return std::nullopt;
    }
    return result.workspaceSize;
}

// Takes the algorithm of a row. False when the library refuses it for this product.
inline bool take_tuned(CublasLt& lt, const TunedProduct& row, Product* product) {
    cublasLtMatmulAlgo_t algo;
    static_assert(sizeof(algo.data) == sizeof(row.algorithm), "another cublasLtMatmulAlgo_t");
    std::copy(row.algorithm.begin(), row.algorithm.end(), algo.data);
    const std::optional<size_t> workspace_bytes = workspace_of(lt, *product, algo);
    if (!workspace_bytes) return false;
    product->algo = algo;
    product->workspace_bytes = *workspace_bytes;
    product->tuned = true;
    return true;
}

inline void choose_algorithm(CublasLt& lt, const ProductKey& key, Product* product) {
    const TunedProduct* row =
        find_tuned(*lt.table, lt.gpu, cublasLtGetVersion(), product_name(key));
    if (row != nullptr && take_tuned(lt, *row, product)) return;
    std::vector<cublasLtMatmulHeuristicResult_t> found(1);
    product->status = heuristic_algorithms(lt, key, *product, CublasLt::kWorkspaceBytes, &found);
    if (product->status != CUBLAS_STATUS_SUCCESS) return;
    product->algo = found[0].algo;
    product->workspace_bytes = found[0].workspaceSize;
}

inline cublasLtEpilogue_t library_epilogue(const ProductKey& key) {
    if (key.epilogue == Epilogue::kGeluGradient) return CUBLASLT_EPILOGUE_DGELU;
    if (key.epilogue == Epilogue::kGelu) {
        return key.bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    }
    return key.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

// `bias` and `aux` are any pointers that are aligned like those to come: the heuristic looks at them.
inline Product make_product(CublasLt& lt, const ProductKey& key, const void* bias,
                            const void* aux) {
    Product product;
    const cublasComputeType_t compute =
        key.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    cublas_check(cublasLtMatmulDescCreate(&product.desc, compute, CUDA_R_32F));
    const cublasOperation_t transpose = CUBLAS_OP_T, plain = CUBLAS_OP_N;
    set_attribute(product.desc, CUBLASLT_MATMUL_DESC_TRANSA, key.transpose_a ? transpose : plain);
    set_attribute(product.desc, CUBLASLT_MATMUL_DESC_TRANSB, key.transpose_b ? transpose : plain);
    set_attribute(product.desc, CUBLASLT_MATMUL_DESC_EPILOGUE, library_epilogue(key));
    if (key.bias) {
        set_attribute(product.desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type<floatX>());
        set_attribute(product.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    }
    if (key.epilogue != Epilogue::kNone) {
        set_attribute(product.desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, int64_t{key.m});
        set_attribute(product.desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux);
    }
    // A matrix of `rows` by `columns` as cuBLASLt has them, without gaps.
    const auto layout = [](cudaDataType_t type, int rows, int columns) {
        cublasLtMatrixLayout_t made = nullptr;
        cublas_check(cublasLtMatrixLayoutCreate(&made, type, rows, columns, rows));
        return made;
    };
    const cudaDataType_t narrow = data_type<floatX>(), wide = data_type<float>();
    product.a = key.transpose_a ? layout(narrow, key.k, key.m) : layout(narrow, key.m, key.k);
    product.b = key.transpose_b ? layout(narrow, key.n, key.k) : layout(narrow, key.k, key.n);
    product.d = layout(key.wide_result ? wide : narrow, key.m, key.n);
    choose_algorithm(lt, key, &product);
    return product;
}

inline void destroy(Product* product) {
    cublas_check(cublasLtMatmulDescDestroy(product->desc));
    for (cublasLtMatrixLayout_t layout : {product->a, product->b, product->d}) {
        cublas_check(cublasLtMatrixLayoutDestroy(layout));
    }
}

inline void open(CublasLt& lt) {
    if (lt.handle != nullptr) return;
    int device = 0;
    cudaDeviceProp properties{};
    cuda_check(cudaGetDevice(&device));
    cuda_check(cudaGetDeviceProperties(&properties, device));
    lt.gpu = properties.name;
    cublas_check(cublasLtCreate(&lt.handle));
}

// The product of this key, made when it is first asked for.
inline const Product& find_product(CublasLt& lt, const ProductKey& key, const void* bias,
                                   const void* aux) {
    open(lt);
    auto place = lt.products.find(key);
    if (place == lt.products.end()) {
        place = lt.products.emplace(key, make_product(lt, key, bias, aux)).first;
    }
    return place->second;
}

// What follows from the types, the pointers and -f.
template <class D>
ProductKey complete(ProductKey key, bool bias, bool aligned) {
    key.bias = bias;
    key.wide_factors = sizeof(floatX) == sizeof(float);
    key.wide_result = sizeof(D) == sizeof(float);
    key.tf32 = sizeof(floatX) == sizeof(float) && cublaslt().tf32;
    key.aligned = aligned;
    return key;
}

struct Workspace {
    void* memory;
    size_t bytes;
};

// For one launch of a product: a counter of its own, where that is all it needs.
inline Workspace workspace_for(CublasLt& lt, const Product& product) {
    if (product.workspace_bytes > 0 && product.workspace_bytes <= WorkCounters::kMostFilled) {
        return {work_counters().take(), WorkCounters::kBytes};
    }
    if (lt.workspace != nullptr) return {lt.workspace, CublasLt::kWorkspaceBytes};
    if (lt.own_workspace.get() == nullptr) {
        lt.own_workspace = DeviceBuffer<unsigned char>(CublasLt::kWorkspaceBytes);
    }
    return {lt.own_workspace.get(), CublasLt::kWorkspaceBytes};
}

// d (m,n) = op(a) op(b) + bias (m), or d += op(a) op(b), as cuBLASLt has them, then key.epilogue,
// which writes or reads aux (m,n). bias may be null. Returns false, and nothing is done, when the
// library has no algorithm with this epilogue.
template <class D>
bool multiply(D* d, const floatX* a, const floatX* b, const floatX* bias, ProductKey key,
              cudaStream_t stream, const floatX* aux = nullptr) {
    CublasLt& lt = cublaslt();
    key = complete<D>(key, bias != nullptr, all_aligned(16, d, a, b, bias, aux));
    const Product& product = find_product(lt, key, bias, aux);
    if (product.status != CUBLAS_STATUS_SUCCESS) {
        if (key.epilogue != Epilogue::kNone) return false;
        throw Error(format("cuBLASLt %zu has no algorithm for m %d, n %d, k %d in %s (%s)",
                           cublasLtGetVersion(), key.m, key.n, key.k, kPrecisionName,
                           cublasLtGetStatusString(product.status)));
    }
    if (key.bias) set_attribute(product.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    if (key.epilogue != Epilogue::kNone) {
        set_attribute(product.desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux);
    }
    const float alpha = 1.0f, beta = key.accumulate ? 1.0f : 0.0f;
    const Workspace workspace = workspace_for(lt, product);
    cublas_check(cublasLtMatmul(lt.handle, product.desc, &alpha, a, product.a, b, product.b, &beta,
                                d, product.d, d, product.d, &product.algo, workspace.memory,
                                workspace.bytes, stream));
    return true;
}

// cuBLASLt's GELU wants the rows of what it stores or reads in multiples of 8. Where not all is a
// multiple of 16 bytes, its kernels are not trusted: see matmul_forward.
inline bool gelu_fits(int C, int OC) {
    return C % 8 == 0 && OC % 8 == 0;
}

// Whether the library has the product with this epilogue, for aligned memory.
inline bool has_product(ProductKey key, Epilogue epilogue) {
    const bool bias = epilogue == Epilogue::kGelu;
    key.epilogue = epilogue;
    if (!gelu_fits(key.m, key.k)) return false;
    const void* anywhere = reinterpret_cast<const void*>(uintptr_t{256});  // never read
    return find_product(cublaslt(), complete<floatX>(key, bias, true), bias ? anywhere : nullptr,
                        anywhere)
               .status == CUBLAS_STATUS_SUCCESS;
}

}  // namespace matmul_detail

// ============================================================================
// launchers

// Whether fp32 products may round their factors to TF32 (-f). True until this is called.
LLMC_LAUNCHER void matmul_allow_tf32(bool allow) {
    matmul_detail::cublaslt().tf32 = allow;
}

// Adds to a memory plan what cuBLASLt works in, which all products share that need more than a counter
// (work_counters.h). Without a plan, the first
// product allocates it. A plan's memory must not go before matmul_forget_workspace().
LLMC_LAUNCHER void matmul_plan_workspace(MemoryPlan* memory) {
    memory->add("scratch", "of cuBLASLt", &matmul_detail::cublaslt().workspace,
                matmul_detail::CublasLt::kWorkspaceBytes);
}
LLMC_LAUNCHER void matmul_forget_workspace() {
    matmul_detail::cublaslt().workspace = nullptr;
}

// Names and versions of what the choice of algorithms, hence the bits of products, follows from.
LLMC_LAUNCHER std::vector<std::pair<std::string, std::string>> matmul_versions() {
    const unsigned long long table = hash_tuned(tuned_products());
    return {{"cuBLASLt", std::to_string(cublasLtGetVersion())},
            {"cuBLASLt algorithms", format("%016llx", table)}};
}

// out (rows,OC) = inp (rows,C) * weight (OC,C)^T + bias (OC), which may be null. Sums in fp32, one
// rounding to floatX.
LLMC_LAUNCHER void matmul_forward(floatX* out, const floatX* inp, const floatX* weight,
                                  const floatX* bias, int rows, int C, int OC,
                                  cudaStream_t stream) {
    cpu::require_positive("matmul_forward", {{"rows", rows}, {"C", C}, {"OC", OC}});
    const LauncherRange range("matmul_forward", {{"rows", rows}, {"C", C}, {"OC", OC}},
                              bytes_of<floatX>(rows, C + OC) + bytes_of<floatX>(C, OC),
                              product_flops(rows, C, OC));
    matmul_detail::ProductKey key = matmul_detail::forward_key(rows, C, OC);
    // cuBLASLt adds a bias in passing where everything is a multiple of 16 bytes. Elsewhere its
    // heuristic may name kernels that fault on the bias, so the bias is there before the product.
    constexpr int kWidth = Packed128<floatX>::kSize;
    const bool passing =
        C % kWidth == 0 && OC % kWidth == 0 && all_aligned(16, out, inp, weight, bias);
    if (bias != nullptr && !passing) {
        const size_t count = static_cast<size_t>(rows) * OC;
        const unsigned blocks = ceil_div<size_t>(count, matmul_detail::kBiasRowsThreads);
        matmul_detail::bias_rows_kernel<<<blocks, matmul_detail::kBiasRowsThreads, 0, stream>>>(
            out, bias, count, OC);
        launch_check();
        bias = nullptr;
        key.accumulate = true;
    }
    matmul_detail::multiply(out, weight, inp, bias, key, stream);
}

// dinp (rows,C) = dout (rows,OC) * weight (OC,C), overwriting.
LLMC_LAUNCHER void matmul_backward_input(floatX* dinp, const floatX* dout, const floatX* weight,
                                         int rows, int C, int OC, cudaStream_t stream) {
    cpu::require_positive("matmul_backward_input", {{"rows", rows}, {"C", C}, {"OC", OC}});
    const LauncherRange range("matmul_backward_input", {{"rows", rows}, {"C", C}, {"OC", OC}},
                              bytes_of<floatX>(rows, C + OC) + bytes_of<floatX>(C, OC),
                              product_flops(rows, C, OC));
    const floatX* no_bias = nullptr;
    matmul_detail::multiply(dinp, weight, dout, no_bias, matmul_detail::input_key(rows, C, OC),
                            stream);
}

// The level of GELU fusion that -ge `asked` comes to for an MLP of `rows` positions, C channels and
// OC hidden ones: 1 forward, 2 backward as well, as far as the library has such products; -1 is what
// is fastest on this GPU. A function of the arguments, the precision, the GPU and the library.
LLMC_LAUNCHER int matmul_gelu_fusion(int asked, int rows, int C, int OC) {
    using namespace matmul_detail;
    cpu::require_positive("matmul_gelu_fusion", {{"rows", rows}, {"C", C}, {"OC", OC}});
    if (asked < 0) {
        const int generation = device_attribute(cudaDevAttrComputeCapabilityMajor);
        asked = sizeof(floatX) == 2 && generation >= 9 ? 1 : 0;
    }
    if (asked < 1 || !has_product(forward_key(rows, C, OC), Epilogue::kGelu)) return 0;
    if (asked < 2 || !has_product(input_key(rows, OC, C), Epilogue::kGeluGradient)) return 1;
    return 2;
}

// Who multiplies, for the plan that is printed: for how many of the products of a micro-batch of
// `rows` positions the table has an algorithm. Arguments as model_products'.
LLMC_LAUNCHER std::string matmul_backend(int rows, int layers, int C, int padded_vocab,
                                         int gelu_fusion) {
    matmul_detail::CublasLt& lt = matmul_detail::cublaslt();
    matmul_detail::open(lt);
    const ProductTypes types{sizeof(floatX) == 4, sizeof(gradX) == 4, lt.tf32};
    size_t all = 0, tuned = 0;
    for (const ModelProduct& product :
         model_products(types, rows, layers, C, padded_vocab, gelu_fusion)) {
        ++all;
        tuned += find_tuned(*lt.table, lt.gpu, cublasLtGetVersion(), product_name(product.key)) !=
                 nullptr;
    }
    return format("cuBLASLt, measured algorithms for %zu of %zu", tuned, all);
}

// pre (rows,OC) = inp (rows,C) * weight (OC,C)^T + bias (OC), which may be null; out (rows,OC) =
// gelu(pre). With `fuse` in one product where the library has it: GELU then sees the sum before it
// is rounded to pre. Else by matmul_forward and gelu_forward.
LLMC_LAUNCHER void matmul_gelu_forward(floatX* out, floatX* pre, const floatX* inp,
                                       const floatX* weight, const floatX* bias, int rows, int C,
                                       int OC, bool fuse, cudaStream_t stream) {
    using namespace matmul_detail;
    cpu::require_positive("matmul_gelu_forward", {{"rows", rows}, {"C", C}, {"OC", OC}});
    const LauncherRange range("matmul_gelu_forward", {{"rows", rows}, {"C", C}, {"OC", OC}},
                              bytes_of<floatX>(rows, C + 2 * OC) + bytes_of<floatX>(C, OC),
                              product_flops(rows, C, OC));
    if (fuse && gelu_fits(C, OC) && all_aligned(16, out, pre, inp, weight, bias)) {
        ProductKey key = forward_key(rows, C, OC);
        key.epilogue = Epilogue::kGelu;
        if (multiply(out, weight, inp, bias, key, stream, pre)) return;
    }
    matmul_forward(pre, inp, weight, bias, rows, C, OC, stream);
    gelu_forward(out, pre, static_cast<size_t>(rows) * OC, stream);
}

// dinp (rows,C) = gelu'(pre) * (dout (rows,OC) * weight (OC,C)), overwriting. With `fuse` in one
// product where the library has it: the product is then not rounded before it meets gelu'. Else by
// matmul_backward_input and gelu_backward.
LLMC_LAUNCHER void matmul_gelu_backward_input(floatX* dinp, const floatX* dout,
                                              const floatX* weight, const floatX* pre, int rows,
                                              int C, int OC, bool fuse, cudaStream_t stream) {
    using namespace matmul_detail;
    cpu::require_positive("matmul_gelu_backward_input", {{"rows", rows}, {"C", C}, {"OC", OC}});
    const LauncherRange range("matmul_gelu_backward_input", {{"rows", rows}, {"C", C}, {"OC", OC}},
                              bytes_of<floatX>(rows, 2 * C + OC) + bytes_of<floatX>(C, OC),
                              product_flops(rows, C, OC));
    if (fuse && gelu_fits(C, OC) && all_aligned(16, dinp, dout, weight, pre)) {
        ProductKey key = input_key(rows, C, OC);
        key.epilogue = Epilogue::kGeluGradient;
        const floatX* no_bias = nullptr;
        if (multiply(dinp, weight, dout, no_bias, key, stream, pre)) return;
    }
    matmul_backward_input(dinp, dout, weight, rows, C, OC, stream);
    gelu_backward(dinp, dinp, pre, static_cast<size_t>(rows) * C, stream);
}

LLMC_LAUNCHER size_t matmul_backward_weight_scratch_bytes(int rows, int, int OC) {
    return bias_scratch_bytes(rows, OC);
}

// dweight (OC,C) = dout (rows,OC)^T * inp (rows,C); dbias (OC) = the sum over the rows of dout, and
// may be null. With `accumulate` the old values enter the sums before their one rounding to gradX;
// dweight's product may have been rounded to gradX before that (see the top of this file).
LLMC_LAUNCHER void matmul_backward_weight(gradX* dweight, gradX* dbias, const floatX* dout,
                                          const floatX* inp, void* scratch, int rows, int C, int OC,
                                          bool accumulate, cudaStream_t stream) {
    using namespace matmul_detail;
    cpu::require_positive("matmul_backward_weight", {{"rows", rows}, {"C", C}, {"OC", OC}});
    // bias_backward has a range of its own.
    const LauncherRange range(
        "matmul_backward_weight", {{"rows", rows}, {"C", C}, {"OC", OC}},
        bytes_of<floatX>(rows, C + OC) + bytes_of<gradX>(C, OC, accumulate ? 2 : 1),
        product_flops(rows, C, OC));
    if (dbias != nullptr) bias_backward(dbias, dout, scratch, rows, OC, accumulate, stream);
    const floatX* no_bias = nullptr;
    multiply(dweight, inp, dout, no_bias, weight_key(rows, C, OC, accumulate), stream);
}

}  // namespace llmc
