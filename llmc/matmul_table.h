// The matrix products of the model by shape, and the table of algorithms that were measured for them.
//
// Picking the first algorithm that cuBLASLt's heuristic names costs up to a quarter of a product.
// `make tune` times the others on the GPU at hand and writes llmc/matmul_algorithms.inc. That table
// is compiled in, so that one binary means one choice: it depends on the GPU's name, the library's
// version and the product alone, and is the same on all ranks and in all runs. What the table does
// not have takes the heuristic's first.
//
// A row keeps an algorithm as the library's own eight words, which NVIDIA documents may be stored
// and restored with the same version of the library (cuBLAS documentation, cublasLtMatmulAlgo_t).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "llmc/error.h"
#include "llmc/hash.h"

namespace llmc {

namespace matmul_detail {

// What becomes of a product's sums before they are stored.
enum class Epilogue {
    kNone,
    kGelu,          // stored as they are, too
    kGeluGradient,  // times gelu' of stored values
};

// Everything that a product's descriptors and algorithm depend on; m, n and k as cuBLASLt has them.
struct ProductKey {
    int m, n, k;
    bool transpose_a, transpose_b;
    bool bias, accumulate;
    Epilogue epilogue;
    bool wide_factors;  // fp32, else bf16
    bool wide_result;   // fp32, whatever the factors are
    bool tf32;
    bool aligned;  // every pointer is a multiple of 16 bytes

    auto tie() const {
        return std::tie(m, n, k, transpose_a, transpose_b, bias, accumulate, epilogue, wide_factors,
                        wide_result, tf32, aligned);
    }
    bool operator<(const ProductKey& other) const { return tie() < other.tie(); }
    bool operator==(const ProductKey& other) const { return tie() == other.tie(); }
};

// out (rows,OC) = inp (rows,C) weight (OC,C)^T
inline ProductKey forward_key(int rows, int C, int OC) {
    ProductKey key{};
    key.m = OC;
    key.n = rows;
    key.k = C;
    key.transpose_a = true;
    return key;
}
// dinp (rows,C) = dout (rows,OC) weight (OC,C)
inline ProductKey input_key(int rows, int C, int OC) {
    ProductKey key{};
    key.m = C;
    key.n = rows;
    key.k = OC;
    return key;
}
// dweight (OC,C) = dout (rows,OC)^T inp (rows,C)
inline ProductKey weight_key(int rows, int C, int OC, bool accumulate) {
    ProductKey key{};
    key.m = C;
    key.n = OC;
    key.k = rows;
    key.transpose_b = true;
    key.accumulate = accumulate;
    return key;
}

}  // namespace matmul_detail

// ---- names of products, as they stand in the table ----

// Such as "bf16 m2304 n65536 k768 tn bias": the factors' type, sizes and transposes as cuBLASLt has
// them (t or n for a, then for b), then what else there is of: fp32-result, bias, accumulate, gelu,
// gelu-gradient, unaligned. One to one with the keys whose tf32 goes with fp32 factors.
inline std::string product_name(const matmul_detail::ProductKey& key) {
    using matmul_detail::Epilogue;
    std::string name =
        format("%s m%d n%d k%d %c%c",
               !key.wide_factors ? "bf16"
               : key.tf32        ? "tf32"
                                 : "fp32",
               key.m, key.n, key.k, key.transpose_a ? 't' : 'n', key.transpose_b ? 't' : 'n');
    if (key.wide_result && !key.wide_factors) name += " fp32-result";
    if (key.bias) name += " bias";
    if (key.accumulate) name += " accumulate";
    if (key.epilogue == Epilogue::kGelu) name += " gelu";
    if (key.epilogue == Epilogue::kGeluGradient) name += " gelu-gradient";
    if (!key.aligned) name += " unaligned";
    return name;
}

// The product of a name; nothing when it is not one that product_name gives.
inline std::optional<matmul_detail::ProductKey> parse_product(const std::string& name) {
    using matmul_detail::Epilogue;
    matmul_detail::ProductKey key{};
    char type[8] = "", a = 0, b = 0;
    if (std::sscanf(name.c_str(), "%7s m%9d n%9d k%9d %c%c", type, &key.m, &key.n, &key.k, &a,
                    &b) != 6) {
        return std::nullopt;
    }
    key.wide_factors = key.wide_result = type != std::string("bf16");
    key.tf32 = type == std::string("tf32");
    key.transpose_a = a == 't';
    key.transpose_b = b == 't';
    key.aligned = true;
    std::istringstream words(name);
    for (std::string word; words >> word;) {
        if (word == "fp32-result") key.wide_result = true;
        if (word == "bias") key.bias = true;
        if (word == "accumulate") key.accumulate = true;
        if (word == "gelu") key.epilogue = Epilogue::kGelu;
        if (word == "gelu-gradient") key.epilogue = Epilogue::kGeluGradient;
        if (word == "unaligned") key.aligned = false;
    }
    // Whatever was read past comes out here.
    return product_name(key) == name ? std::optional(key) : std::nullopt;
}

// ---- the table ----

struct TunedProduct {
    std::string gpu;                          // as the CUDA runtime names it
    size_t library;                           // cublasLtGetVersion()
    std::string product;                      // product_name
    std::array<uint64_t, 8> algorithm;        // cublasLtMatmulAlgo_t
    size_t workspace;                         // bytes that it needs
    double microseconds, first_microseconds;  // its time, and that of the heuristic's first
};

// The table that is compiled in, in the order of row_before.
inline const std::vector<TunedProduct>& tuned_products() {
    static const std::vector<TunedProduct> rows = {
#include "llmc/matmul_algorithms.inc"
    };
    return rows;
}

// The row for a product on this GPU with this version of cuBLASLt, or null.
inline const TunedProduct* find_tuned(const std::vector<TunedProduct>& rows, const std::string& gpu,
                                      size_t library, const std::string& product) {
    for (const TunedProduct& row : rows) {
        if (row.library == library && row.product == product && row.gpu == gpu) return &row;
    }
    return nullptr;
}

// Hash of all that choices follow from; measured times are left out.
inline uint64_t hash_tuned(const std::vector<TunedProduct>& rows) {
    std::string text;
    for (const TunedProduct& row : rows) {
        text += format("%s\n%zu\n%s\n", row.gpu.c_str(), row.library, row.product.c_str());
        for (const uint64_t word : row.algorithm) {
            text += format("%llx ", static_cast<unsigned long long>(word));
        }
        text += format("%zu\n", row.workspace);
    }
    return hash_text(text);
}

// ---- the products of a model ----

struct ProductTypes {
    bool wide_factors, wide_gradients, tf32;  // fp32 weights and activations; fp32 gradients
};

struct ModelProduct {
    std::string name;  // such as "fc dweight"
    matmul_detail::ProductKey key;
    int calls;  // in a micro-batch
};

// The products of a micro-batch of `rows` positions, forward and backward, with GELU fused as far as
// gelu_fusion says (matmul_gelu_fusion). Those of the weight gradients stand there twice: the first
// micro-batch of a slot overwrites, the others accumulate.
inline std::vector<ModelProduct> model_products(const ProductTypes& types, int rows, int layers,
                                                int C, int padded_vocab, int gelu_fusion) {
    using namespace matmul_detail;
    std::vector<ModelProduct> products;
    const auto add = [&](const std::string& name, ProductKey key, int calls, bool gradient) {
        key.wide_factors = types.wide_factors;
        key.wide_result = gradient ? types.wide_gradients : types.wide_factors;
        key.tf32 = types.wide_factors && types.tf32;
        key.aligned = true;
        products.push_back({name, key, calls});
    };
    const auto linear = [&](const std::string& name, int in, int out, int calls, bool bias,
                            Epilogue forward, Epilogue backward) {
        ProductKey key = forward_key(rows, in, out);
        key.bias = bias;
        key.epilogue = forward;
        add(name + " forward", key, calls, false);
        key = input_key(rows, in, out);
        key.epilogue = backward;
        add(name + " dinp", key, calls, false);
        add(name + " dweight", weight_key(rows, in, out, false), calls, true);
        add(name + " dweight+", weight_key(rows, in, out, true), calls, true);
    };
    const Epilogue none = Epilogue::kNone;
    linear("qkv", C, 3 * C, layers, true, none, none);
    linear("attproj", C, C, layers, true, none, none);
    linear("fc", C, 4 * C, layers, true, gelu_fusion >= 1 ? Epilogue::kGelu : none, none);
    linear("fcproj", 4 * C, C, layers, true, none,
           gelu_fusion >= 2 ? Epilogue::kGeluGradient : none);
    linear("LM head", C, padded_vocab, 1, false, none, none);
    return products;
}

}  // namespace llmc
