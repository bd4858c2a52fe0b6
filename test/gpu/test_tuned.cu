// The table of measured algorithms on the GPU: that its rows are taken, and that they are right.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "dev/tune_product.cuh"

namespace llmc {
namespace {

using matmul_detail::CublasLt;
using matmul_detail::Epilogue;
using matmul_detail::Product;
using matmul_detail::ProductKey;
using tuning::Roundings;
using tuning::Workbench;

bool same_algorithm(const cublasLtMatmulAlgo_t& a, const std::array<uint64_t, 8>& b) {
    return std::equal(b.begin(), b.end(), a.data);
}

// A handle of its own, with this table.
struct Library {
    std::vector<TunedProduct> rows;
    CublasLt lt;

    Library() {
        lt.table = &rows;
        matmul_detail::open(lt);
    }
    ~Library() { cublasLtDestroy(lt.handle); }
};

ProductKey small_product() {
    ProductKey key = matmul_detail::forward_key(512, 768, 256);
    key.wide_factors = key.wide_result = sizeof(floatX) == sizeof(float);
    key.aligned = true;
    return key;
}

TunedProduct row_for(const CublasLt& lt, const ProductKey& key, const cublasLtMatmulAlgo_t& algo) {
    TunedProduct row{lt.gpu, cublasLtGetVersion(), product_name(key), {}, 0, 1.0, 1.0};
    std::copy(std::begin(algo.data), std::end(algo.data), row.algorithm.begin());
    return row;
}

// Up to `most` algorithms of the heuristic, its favourite first. (The favourite of eight need not be
// the one that it names when asked for one: seen in fp32.)
std::vector<cublasLtMatmulHeuristicResult_t> heuristic(CublasLt& lt, const ProductKey& key,
                                                       size_t most = 8) {
    Product product = matmul_detail::make_product(lt, key, nullptr, nullptr);
    std::vector<cublasLtMatmulHeuristicResult_t> found(most);
    matmul_detail::heuristic_algorithms(lt, key, product, CublasLt::kWorkspaceBytes, &found);
    matmul_detail::destroy(&product);
    return found;
}

TEST(GpuTuned, TheTableDecidesAndElseTheHeuristic) {
    Library library;
    const ProductKey key = small_product();
    const auto favourite = heuristic(library.lt, key, 1);
    ASSERT_EQ(favourite.size(), 1u);
    const cublasLtMatmulAlgo_t first = favourite[0].algo;
    const auto is_another = [&](const cublasLtMatmulHeuristicResult_t& result) {
        return !std::equal(std::begin(first.data), std::end(first.data), result.algo.data);
    };
    const auto all = heuristic(library.lt, key);
    const auto other_one = std::find_if(all.begin(), all.end(), is_another);
    ASSERT_NE(other_one, all.end());
    const TunedProduct second = row_for(library.lt, key, other_one->algo);
    const auto expect = [&](const cublasLtMatmulAlgo_t& algo, bool tuned) {
        Product product = matmul_detail::make_product(library.lt, key, nullptr, nullptr);
        EXPECT_EQ(product.status, CUBLAS_STATUS_SUCCESS);
        EXPECT_EQ(product.tuned, tuned);
        EXPECT_TRUE(std::equal(std::begin(algo.data), std::end(algo.data), product.algo.data));
        matmul_detail::destroy(&product);
    };
    expect(first, false);
    library.rows = {second};
    expect(other_one->algo, true);
    library.rows[0].gpu += " of another kind";
    expect(first, false);
    library.rows = {second};
    ++library.rows[0].library;
    expect(first, false);
    ProductKey other = key;
    other.accumulate = true;
    library.rows = {second};
    library.rows[0].product = product_name(other);
    expect(first, false);
}

// A row that the library refuses would otherwise end the run at the first product. It does not refuse
// all that is broken (it takes the number -1), so several are tried.
TEST(GpuTuned, ARowThatTheLibraryRefusesIsLeftOut) {
    Library library;
    const ProductKey key = small_product();
    const auto found = heuristic(library.lt, key);
    ASSERT_GE(found.size(), 1u);
    int refused = 0;
    for (size_t word = 0; word < 8; ++word) {
        for (const uint64_t bits : {uint64_t{0}, ~uint64_t{0}, uint64_t{0xdeadbeefdeadbeef}}) {
            library.rows = {row_for(library.lt, key, found[0].algo)};
            library.rows[0].algorithm[word] = bits;
            Product product = matmul_detail::make_product(library.lt, key, nullptr, nullptr);
            EXPECT_EQ(product.status, CUBLAS_STATUS_SUCCESS);
            refused += !product.tuned;
            matmul_detail::destroy(&product);
        }
    }
    std::printf("%d of 24 broken rows refused\n", refused);
    EXPECT_GT(refused, 0);
}

// What the checks below, and those of `make tune`, rest on.
TEST(GpuTuned, TheChecksSeeWrongNumbersOtherBitsAndTwoRoundings) {
    Library library;
    ProductKey key = small_product();
    key.accumulate = true;
    Workbench bench(library.lt, key, 2);
    bench.fill(true);
    bench.run(bench.first());
    const DeviceBuffer<float> exact = bench.exact_product();
    const Roundings good = bench.roundings(exact);
    EXPECT_TRUE(good.not_once == 0 || good.not_twice == 0) << good.neither;
    const Workbench::Results sums = bench.results();
    EXPECT_EQ(bench.compare(sums).first, 0u);
    EXPECT_EQ(bench.compare(sums).second, 0.0);

    // One bit of one element.
    unsigned char byte = 0;
    cuda_check(cudaMemcpy(&byte, sums.d.get() + 40, 1, cudaMemcpyDeviceToHost));
    byte ^= 1;
    cuda_check(cudaMemcpy(sums.d.get() + 40, &byte, 1, cudaMemcpyHostToDevice));
    EXPECT_EQ(bench.compare(sums).first, 1u);
    EXPECT_GT(bench.compare(sums).second, 0.0);

    // Sums of another product: nearly none of them is rounded right.
    bench.fill(false);
    bench.run(bench.first());
    EXPECT_GT(bench.roundings(exact).neither, exact.count() / 2);
    EXPECT_GT(bench.compare(sums).second, bench.bound());
    // And a result that was not written at all.
    cuda_check(cudaMemset(sums.d.get(), 0xff, 4));
    EXPECT_FALSE(bench.compare(sums).second <= bench.bound());
}

TEST(GpuTuned, EveryRowForThisGpuIsRightAndReproduces) {
    CublasLt& lt = matmul_detail::cublaslt();
    matmul_detail::open(lt);
    size_t tested = 0, others = 0;
    for (const TunedProduct& row : tuned_products()) {
        const std::optional<ProductKey> key = parse_product(row.product);
        ASSERT_TRUE(key.has_value()) << row.product;
        if (row.gpu != lt.gpu || row.library != cublasLtGetVersion() ||
            key->wide_factors != (sizeof(floatX) == sizeof(float))) {
            ++others;
            continue;
        }
        SCOPED_TRACE(row.product);
        size_t free_bytes = 0, total_bytes = 0;
        cuda_check(cudaMemGetInfo(&free_bytes, &total_bytes));
        if (Workbench::bytes_to_check(*key, 1) + (size_t{1} << 30) > free_bytes) {
            std::printf("%s: does not fit into this GPU's free memory\n", row.product.c_str());
            continue;
        }
        Workbench bench(lt, *key, 1);
        const Product& product = bench.product();
        EXPECT_TRUE(product.tuned);
        EXPECT_TRUE(same_algorithm(product.algo, row.algorithm));
        EXPECT_LE(row.workspace, CublasLt::kWorkspaceBytes);
        bench.fill(false);
        bench.run(bench.first());
        const Workbench::Results reference = bench.results();
        Workbench::Results kept = bench.results();
        EXPECT_TRUE(bench.reproduces(product.algo, 3, &kept));
        EXPECT_LE(bench.compare(reference).second, bench.bound());
        if (key->epilogue != Epilogue::kGeluGradient) {
            bench.fill(true);
            const DeviceBuffer<float> exact = bench.exact_product();
            bench.run(product.algo);
            const Roundings found = bench.roundings(exact);
            if (key->accumulate) {
                EXPECT_TRUE(found.not_once == 0 || found.not_twice == 0) << found.neither;
            } else {
                EXPECT_EQ(found.not_once, 0u);
            }
        }
        ++tested;
    }
    std::printf("%zu rows tested, %zu are for another GPU, library or precision\n", tested, others);
}

}  // namespace
}  // namespace llmc
