// One matrix product with data of its own: what `make tune` times, and what it and the GPU tests hold
// against the heuristic's first algorithm.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "llmc/cuda_common.h"
#include "llmc/cuda_utils.cuh"
#include "llmc/matmul.cuh"
#include "llmc/rng.h"

namespace llmc::tuning {

using matmul_detail::CublasLt;
using matmul_detail::Epilogue;
using matmul_detail::Product;
using matmul_detail::ProductKey;

// ============================================================================
// kernels

constexpr int kThreads = 256;
constexpr int kBlocks = 2048;

// Normal values times `scale`, rounded to whole numbers with `whole`. Zeros, and other values with
// few bits set, would let the GPU run at a higher clock than training does.
template <class T>
__global__ void normal_kernel(T* out, size_t count, uint32_t stream, double scale, bool whole) {
    const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t group = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
         4 * group < count; group += stride) {
        const Normal4 normal = random_normal4(42, RandomPurpose::kTest, stream, group);
        for (size_t i = 4 * group; i < min(count, 4 * group + 4); ++i) {
            const float value = static_cast<float>(scale * normal.lane[i % 4]);
            out[i] = narrow<T>(whole ? rintf(value) : value);
        }
    }
}

// Leaves each block's sum, in a fixed order, in sums[blockIdx.x].
template <class S>
__device__ void block_sum(S* sums, const S& mine) {
    __shared__ S shared[kThreads];
    shared[threadIdx.x] = mine;
    __syncthreads();
    for (int half = kThreads / 2; half > 0; half /= 2) {
        if (static_cast<int>(threadIdx.x) < half) {
            shared[threadIdx.x].add(shared[threadIdx.x + half]);
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = shared[0];
}

// How far one result is from another.
struct Difference {
    unsigned long long other_bits;  // elements
    double squares, reference_squares;

    __host__ __device__ void add(const Difference& other) {
        other_bits += other.other_bits;
        squares += other.squares;
        reference_squares += other.reference_squares;
    }
    // Relative, of the root mean squares; NaN when there is one in a result.
    double error() const { return squares == 0.0 ? 0.0 : std::sqrt(squares / reference_squares); }
};

__device__ inline bool same_bits(float a, float b) {
    return __float_as_uint(a) == __float_as_uint(b);
}
__device__ inline bool same_bits(bf16 a, bf16 b) {
    return __bfloat16_as_ushort(a) == __bfloat16_as_ushort(b);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    difference_kernel(Difference* sums, const T* result, const T* reference, size_t count) {
    Difference mine{};
    const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
         i += stride) {
        const double y = widen(reference[i]), difference = widen(result[i]) - y;
        mine.add(
            {same_bits(result[i], reference[i]) ? 0ull : 1ull, difference * difference, y * y});
    }
    block_sum(sums, mine);
}

// Elements of a result that are not the exact sum rounded once, not the one with the product rounded
// before the old value is added, and neither of the two.
struct Roundings {
    unsigned long long not_once, not_twice, neither;

    __host__ __device__ void add(const Roundings& other) {
        not_once += other.not_once;
        not_twice += other.not_twice;
        neither += other.neither;
    }
};

// product (m,n) by columns, exact; bias (m) and old (m,n) may be null.
template <class T>
__global__ void __launch_bounds__(kThreads)
    roundings_kernel(Roundings* sums, const T* result, const float* product, const floatX* bias,
                     const T* old, size_t count, int m) {
    Roundings mine{};
    const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
         i += stride) {
        float more = bias != nullptr ? widen(bias[i % m]) : 0.0f;
        if (old != nullptr) more += widen(old[i]);
        const float value = widen(result[i]);
        const float once = widen(narrow<T>(product[i] + more));
        const float twice = widen(narrow<T>(widen(narrow<T>(product[i])) + more));
        const bool not_once = !(value == once), not_twice = !(value == twice);
        mine.add(
            {not_once ? 1ull : 0ull, not_twice ? 1ull : 0ull, not_once && not_twice ? 1ull : 0ull});
    }
    block_sum(sums, mine);
}

// ============================================================================
// launchers

template <class T>
void fill_normal(T* out, size_t count, uint32_t stream, double scale, bool whole) {
    if (count == 0) return;
    normal_kernel<<<kBlocks, kThreads>>>(out, count, stream, scale, whole);
    launch_check();
}

// The sum over the blocks of what `launch` leaves for each.
template <class S, class Launch>
S sum_blocks(Launch&& launch) {
    const DeviceBuffer<S> sums(kBlocks);
    launch(sums.get());
    launch_check();
    std::vector<S> each(kBlocks);
    cuda_check(cudaMemcpy(each.data(), sums.get(), sums.bytes(), cudaMemcpyDeviceToHost));
    S all{};
    for (const S& one : each) all.add(one);
    return all;
}

template <class T>
Difference difference(const T* result, const T* reference, size_t count) {
    return sum_blocks<Difference>([&](Difference* sums) {
        difference_kernel<<<kBlocks, kThreads>>>(sums, result, reference, count);
    });
}

// A product, its factors and results; `copies` of them, so that a repetition does not find in the
// cache what the one before it has left. Work goes to the default stream, but for launch_as_in_training's.
class Workbench {
  public:
    // What a product writes.
    struct Results {
        DeviceBuffer<unsigned char> d;
        DeviceBuffer<floatX> aux;
    };

    // Throws Error when memory does not suffice. product().status tells whether the library has any
    // algorithm.
    Workbench(CublasLt& lt, const ProductKey& key, int copies)
        : lt_(lt),
          key_(key),
          copies_(copies),
          a_(copies * factor_a(key)),
          b_(copies * factor_b(key)),
          bias_(key.bias ? key.m : 0),
          aux_(key.epilogue == Epilogue::kNone ? 0 : copies * elements(key)),
          old_(key.accumulate ? result_bytes(key) : 0),
          d_(copies * result_bytes(key)),
          workspace_(kWorkspaces * kWorkspaceStride) {
        if (lt.handle == nullptr) matmul_detail::open(lt);
        product_ = matmul_detail::make_product(lt, key, bias_.get(), aux_.get());
        std::vector<cublasLtMatmulHeuristicResult_t> found(1);
        if (matmul_detail::heuristic_algorithms(lt, key, product_, CublasLt::kWorkspaceBytes,
                                                &found) == CUBLAS_STATUS_SUCCESS) {
            first_ = found[0].algo;
        }
    }
    ~Workbench() { matmul_detail::destroy(&product_); }
    Workbench(const Workbench&) = delete;
    Workbench& operator=(const Workbench&) = delete;

    static size_t elements(const ProductKey& key) { return static_cast<size_t>(key.m) * key.n; }
    static size_t result_bytes(const ProductKey& key) {
        return elements(key) * (key.wide_result ? sizeof(float) : sizeof(floatX));
    }
    // Of one copy: factors, results, and what the epilogue reads or writes.
    static size_t bytes(const ProductKey& key) {
        const size_t aux = key.epilogue == Epilogue::kNone ? 0 : elements(key);
        return (factor_a(key) + factor_b(key) + aux) * sizeof(floatX) + result_bytes(key);
    }
    // All device memory with two Results and exact_product(), at the most.
    static size_t bytes_to_check(const ProductKey& key, int copies) {
        return bytes(key) * (copies + 3) + elements(key) * sizeof(float) +
               kWorkspaces * kWorkspaceStride;
    }

    const Product& product() const { return product_; }
    const ProductKey& key() const { return key_; }
    int copies() const { return copies_; }
    // The heuristic's first, whatever the table says.
    const cublasLtMatmulAlgo_t& first() const { return first_; }

    // Normal values of about 1 in the result, or whole numbers so small that every sum is exact in
    // fp32. Sets what is added to, too.
    void fill(bool whole) {
        const double k = key_.k;
        fill_normal(a_.get(), a_.count(), 1, whole ? kWhole : 1.0 / std::sqrt(k), whole);
        fill_normal(b_.get(), b_.count(), 2, whole ? kWhole : 1.0, whole);
        fill_normal(bias_.get(), bias_.count(), 3, whole ? kWhole : 1.0, whole);
        fill_normal(aux_.get(), aux_.count(), 4, 1.0, false);
        with_result([&](auto* type) {
            using D = std::remove_pointer_t<decltype(type)>;
            const double scale = whole ? kWhole * kWhole * std::sqrt(k) : 1.0;
            fill_normal(reinterpret_cast<D*>(old_.get()), old_.bytes() / sizeof(D), 5, scale,
                        whole);
        });
        for (int copy = 0; copy < copies_; ++copy) reset(copy);
        cuda_check(cudaDeviceSynchronize());
    }

    // Queues the product once, on one of the copies and with one of the two workspaces.
    cublasStatus_t launch(const cublasLtMatmulAlgo_t& algorithm, int copy, int workspace = 0) {
        return launch(algorithm, copy,
                      {workspace_.get() + workspace * kWorkspaceStride, CublasLt::kWorkspaceBytes},
                      nullptr);
    }

    // As the trainer queues it: an algorithm that needs so little workspace gets a counter of its own.
    cublasStatus_t launch_as_in_training(const cublasLtMatmulAlgo_t& algorithm,
                                         size_t needed_workspace, int copy, cudaStream_t stream) {
        product_.workspace_bytes = needed_workspace;
        return launch(algorithm, copy, matmul_detail::workspace_for(lt_, product_), stream);
    }

    // Queues the product once on `stream`, on one of the copies and with this workspace.
    cublasStatus_t launch(const cublasLtMatmulAlgo_t& algorithm, int copy,
                          matmul_detail::Workspace workspace, cudaStream_t stream) {
        using matmul_detail::set_attribute;
        const floatX* aux = aux_.get() + (aux_.count() > 0 ? copy * elements(key_) : 0);
        if (key_.bias) {
            const void* bias = bias_.get();
            set_attribute(product_.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
        }
        if (key_.epilogue != Epilogue::kNone) {
            set_attribute(product_.desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux);
        }
        const float alpha = 1.0f, beta = key_.accumulate ? 1.0f : 0.0f;
        unsigned char* d = d_.get() + copy * result_bytes(key_);
        return cublasLtMatmul(lt_.handle, product_.desc, &alpha, a_.get() + copy * factor_a(key_),
                              product_.a, b_.get() + copy * factor_b(key_), product_.b, &beta, d,
                              product_.d, d, product_.d, &algorithm, workspace.memory,
                              workspace.bytes, stream);
    }

    // The product on copy 0, with results and workspace full of NaN before it. Throws Error when it
    // does not run.
    void run(const cublasLtMatmulAlgo_t& algorithm, int workspace = 0) {
        reset(0);
        cuda_check(cudaMemset(workspace_.get(), 0xff, workspace_.bytes()));
        cublas_check(launch(algorithm, 0, workspace));
        cuda_check(cudaDeviceSynchronize());
    }

    // What run() has left.
    Results results() const {
        Results kept{DeviceBuffer<unsigned char>(result_bytes(key_)),
                     DeviceBuffer<floatX>(writes_aux() ? elements(key_) : 0)};
        keep(&kept);
        return kept;
    }
    void keep(Results* kept) const {
        copy(kept->d.get(), d_.get(), kept->d.bytes());
        copy(kept->aux.get(), aux_.get(), kept->aux.bytes());
    }
    // How far what run() has left is from other results: {elements with other bits, largest relative
    // error of the two}.
    std::pair<uint64_t, double> compare(const Results& other) const {
        const size_t count = elements(key_);
        Difference d{}, aux{};
        with_result([&](auto* type) {
            using D = std::remove_pointer_t<decltype(type)>;
            d = difference(reinterpret_cast<const D*>(d_.get()),
                           reinterpret_cast<const D*>(other.d.get()), count);
        });
        if (writes_aux()) aux = difference(aux_.get(), other.aux.get(), count);
        const double larger = aux.error() > d.error() ? aux.error() : d.error();
        const double error = std::isnan(aux.error()) ? aux.error() : larger;
        return {d.other_bits + aux.other_bits, error};
    }

    // Whether an algorithm leaves the same bits `runs` times, at two addresses of the workspace.
    bool reproduces(const cublasLtMatmulAlgo_t& algorithm, int runs, Results* kept) {
        run(algorithm);
        keep(kept);
        for (int i = 1; i < runs; ++i) {
            run(algorithm, i % kWorkspaces);
            if (compare(*kept).first != 0) return false;
        }
        return true;
    }

    // Elements (m,n) of op(a) op(b) in fp32, by the heuristic's first algorithm for that.
    DeviceBuffer<float> exact_product() {
        ProductKey key = key_;
        key.bias = key.accumulate = false;
        key.epilogue = Epilogue::kNone;
        key.wide_result = true;
        Product product = matmul_detail::make_product(lt_, key, nullptr, nullptr);
        DeviceBuffer<float> sums(elements(key));
        std::vector<cublasLtMatmulHeuristicResult_t> found(1);
        const float alpha = 1.0f, beta = 0.0f;
        cublasStatus_t status = matmul_detail::heuristic_algorithms(
            lt_, key, product, CublasLt::kWorkspaceBytes, &found);
        if (status == CUBLAS_STATUS_SUCCESS) {
            status = cublasLtMatmul(lt_.handle, product.desc, &alpha, a_.get(), product.a, b_.get(),
                                    product.b, &beta, sums.get(), product.d, sums.get(), product.d,
                                    &found[0].algo, workspace_.get(), CublasLt::kWorkspaceBytes,
                                    nullptr);
        }
        matmul_detail::destroy(&product);
        cublas_check(status);
        cuda_check(cudaDeviceSynchronize());
        return sums;
    }

    // After fill(true) and run(): how what was stored before gelu is rounded. All zero where gelu'
    // has been multiplied in, and nothing is exact.
    Roundings roundings(const DeviceBuffer<float>& exact) const {
        Roundings found{};
        if (key_.epilogue == Epilogue::kGeluGradient) return found;
        const auto count = [&](const auto* result, const auto* old) {
            found = sum_blocks<Roundings>([&](Roundings* sums) {
                roundings_kernel<<<kBlocks, kThreads>>>(sums, result, exact.get(), bias_.get(), old,
                                                        elements(key_), key_.m);
            });
        };
        if (writes_aux()) {
            const floatX* no_old = nullptr;
            count(static_cast<const floatX*>(aux_.get()), no_old);
        } else {
            with_result([&](auto* type) {
                using D = std::remove_pointer_t<decltype(type)>;
                count(reinterpret_cast<const D*>(d_.get()), reinterpret_cast<const D*>(old_.get()));
            });
        }
        return found;
    }

    // The largest error of a right algorithm against another: what rounding makes of sums in another
    // order.
    double bound() const { return !key_.wide_result ? 1e-2 : key_.tf32 ? 1e-3 : 1e-4; }

  private:
    static constexpr double kWhole = 3.0;
    static constexpr int kWorkspaces = 2;
    static constexpr size_t kWorkspaceStride = CublasLt::kWorkspaceBytes + 256;

    static size_t factor_a(const ProductKey& key) { return static_cast<size_t>(key.m) * key.k; }
    static size_t factor_b(const ProductKey& key) { return static_cast<size_t>(key.k) * key.n; }
    static void copy(void* to, const void* from, size_t size) {
        if (size > 0) cuda_check(cudaMemcpy(to, from, size, cudaMemcpyDeviceToDevice));
    }
    bool writes_aux() const { return key_.epilogue == Epilogue::kGelu; }

    // Calls f with a null pointer of the result's type.
    template <class F>
    void with_result(F&& f) const {
        if (key_.wide_result) {
            f(static_cast<float*>(nullptr));
        } else {
            f(static_cast<floatX*>(nullptr));
        }
    }

    void reset(int copy_index) {
        unsigned char* d = d_.get() + copy_index * result_bytes(key_);
        if (key_.accumulate) {
            copy(d, old_.get(), result_bytes(key_));
        } else {
            cuda_check(cudaMemset(d, 0xff, result_bytes(key_)));
        }
        if (!writes_aux()) return;
        cuda_check(cudaMemset(aux_.get() + copy_index * elements(key_), 0xff,
                              elements(key_) * sizeof(floatX)));
    }

    CublasLt& lt_;
    const ProductKey key_;
    const int copies_;
    DeviceBuffer<floatX> a_, b_, bias_, aux_;
    DeviceBuffer<unsigned char> old_, d_, workspace_;
    Product product_;
    cublasLtMatmulAlgo_t first_{};
};

}  // namespace llmc::tuning
