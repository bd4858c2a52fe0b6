// The table of measured algorithms: names of products, look-up, and what `make tune` writes.

#include "llmc/matmul_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "dev/tune_table.h"

namespace {

using namespace llmc;
using matmul_detail::Epilogue;
using matmul_detail::ProductKey;
using tuning::Measured;

// d12 at B 64 and T 1024, in bf16.
std::vector<ModelProduct> d12(int gelu_fusion, ProductTypes types = {false, false, true}) {
    return model_products(types, 65536, 12, 768, 50304, gelu_fusion);
}

std::string name_in(const std::vector<ModelProduct>& products, const std::string& name) {
    for (const ModelProduct& product : products) {
        if (product.name == name) return product_name(product.key);
    }
    return "no " + name;
}

TEST(MatmulTable, ProductsHaveNamesOfTheirOwn) {
    EXPECT_EQ(name_in(d12(1), "qkv forward"), "bf16 m2304 n65536 k768 tn bias");
    EXPECT_EQ(name_in(d12(1), "fc forward"), "bf16 m3072 n65536 k768 tn bias gelu");
    EXPECT_EQ(name_in(d12(0), "fc forward"), "bf16 m3072 n65536 k768 tn bias");
    EXPECT_EQ(name_in(d12(1), "fcproj dinp"), "bf16 m3072 n65536 k768 nn");
    EXPECT_EQ(name_in(d12(2), "fcproj dinp"), "bf16 m3072 n65536 k768 nn gelu-gradient");
    EXPECT_EQ(name_in(d12(1), "LM head forward"), "bf16 m50304 n65536 k768 tn");
    EXPECT_EQ(name_in(d12(1), "LM head dweight"), "bf16 m768 n50304 k65536 nt");
    EXPECT_EQ(name_in(d12(1), "fcproj dweight+"), "bf16 m3072 n768 k65536 nt accumulate");
    EXPECT_EQ(name_in(d12(1, {false, true, true}), "fcproj dweight+"),
              "bf16 m3072 n768 k65536 nt fp32-result accumulate");
    EXPECT_EQ(name_in(d12(1, {true, true, true}), "LM head dinp"), "tf32 m768 n65536 k50304 nn");
    EXPECT_EQ(name_in(d12(1, {true, true, false}), "LM head dinp"), "fp32 m768 n65536 k50304 nn");
}

// Two products with one name would take one another's algorithms.
TEST(MatmulTable, EveryKeyComesBackFromItsName) {
    std::set<std::string> names;
    size_t keys = 0;
    for (int bits = 0; bits < 1 << 8; ++bits) {
        const auto bit = [&](int i) { return (bits >> i & 1) != 0; };
        for (const Epilogue epilogue :
             {Epilogue::kNone, Epilogue::kGelu, Epilogue::kGeluGradient}) {
            const ProductKey key{17,     8,        100663296, bit(0), bit(1), bit(2),
                                 bit(3), epilogue, bit(4),    bit(5), bit(6), bit(7)};
            // fp32 factors have fp32 results, and bf16 ones are never rounded to TF32.
            if (key.wide_factors ? !key.wide_result : key.tf32) continue;
            const std::optional<ProductKey> back = parse_product(product_name(key));
            ASSERT_TRUE(back.has_value()) << product_name(key);
            EXPECT_TRUE(*back == key) << product_name(key);
            names.insert(product_name(key));
            ++keys;
        }
    }
    EXPECT_EQ(names.size(), keys);
    EXPECT_EQ(keys, 3u * 32u * 4u);
}

TEST(MatmulTable, OtherTextsAreNoNames) {
    for (const char* text :
         {"", "bf16", "bf16 m1 n2 k3", "bf16 m1 n2 k3 tx", "bf16 m1 n2 k3 tn bia",
          "bf16  m1 n2 k3 tn", "bf16 m1 n2 k3 tn accumulate bias", "bf16 m01 n2 k3 tn",
          "fp16 m1 n2 k3 tn", "bf16 m1 n2 k3 tn ", "fp32 m1 n2 k3 tn fp32-result",
          "bf16 m99999999999 n2 k3 tn"}) {
        EXPECT_FALSE(parse_product(text).has_value()) << text;
    }
}

// qkv, attproj, fc, fcproj and the LM head; forward, dinp and the two of dweight.
TEST(MatmulTable, AModelHasTwentyKindsOfProducts) {
    const std::vector<ModelProduct> products = d12(1);
    ASSERT_EQ(products.size(), 20u);
    std::set<ProductKey> keys;
    double flops = 0.0;
    for (const ModelProduct& product : products) {
        keys.insert(product.key);
        if (!product.key.accumulate) {
            flops += 2.0 * product.key.m * product.key.n * product.key.k * product.calls;
        }
    }
    EXPECT_EQ(keys.size(), products.size());
    // 6 flops for each weight of a matrix and each position (Kaplan et al. 2020, section 2.1).
    const double weights = 12.0 * 12 * 768 * 768 + 50304.0 * 768;
    EXPECT_EQ(flops, 6.0 * 65536 * weights);
}

TunedProduct row(const std::string& gpu, size_t library, const std::string& product,
                 uint64_t word = 1) {
    return {gpu, library, product, {word, 0, 0, 0, 0, 0, 0, ~uint64_t{0}}, 4096, 10.04, 12.0};
}

TEST(MatmulTable, ARowIsForOneGpuOneLibraryAndOneProduct) {
    const std::vector<TunedProduct> rows = {row("A", 1, "p", 1), row("A", 2, "p", 2),
                                            row("B", 1, "p", 3), row("A", 1, "p bias", 4)};
    const auto found = [&](const char* gpu, size_t library, const char* product) {
        const TunedProduct* one = find_tuned(rows, gpu, library, product);
        return one == nullptr ? 0 : one->algorithm[0];
    };
    EXPECT_EQ(found("A", 1, "p"), 1u);
    EXPECT_EQ(found("A", 2, "p"), 2u);
    EXPECT_EQ(found("B", 1, "p"), 3u);
    EXPECT_EQ(found("A", 1, "p bias"), 4u);
    EXPECT_EQ(found("B", 2, "p"), 0u);
    EXPECT_EQ(found("A", 1, "p accumulate"), 0u);
    EXPECT_EQ(found("a", 1, "p"), 0u);
}

TEST(MatmulTable, TheHashSeesWhateverAChoiceFollowsFrom) {
    const std::vector<TunedProduct> rows = {row("A", 1, "p"), row("A", 1, "q")};
    std::set<uint64_t> hashes = {hash_tuned({}), hash_tuned(rows), hash_tuned({rows[0]})};
    size_t changes = 3;
    const auto change = [&](auto&& edit) {
        std::vector<TunedProduct> other = rows;
        edit(other[1]);
        hashes.insert(hash_tuned(other));
        ++changes;
    };
    change([](TunedProduct& r) { r.gpu = "B"; });
    change([](TunedProduct& r) { r.library = 2; });
    change([](TunedProduct& r) { r.product = "r"; });
    change([](TunedProduct& r) { r.algorithm[7] = 5; });
    change([](TunedProduct& r) { r.workspace = 0; });
    EXPECT_EQ(hashes.size(), changes);
    std::vector<TunedProduct> again = rows;
    again[0].microseconds = 11.0;
    EXPECT_EQ(hash_tuned(again), hash_tuned(rows));
}

// ---- the choice ----

size_t chosen(const std::vector<Measured>& measured) {
    return tuning::choose(measured).value_or(99);
}

TEST(MatmulTable, TheFastestRightAlgorithmIsTaken) {
    EXPECT_EQ(chosen({{100, true, true, true}, {90, true, true, false}, {95, true, true, false}}),
              1u);
    EXPECT_EQ(chosen({{100, true, true, true}, {90, false, true, false}, {95, true, true, false}}),
              2u);
    EXPECT_EQ(chosen({{100, false, true, true}, {120, true, true, false}}), 1u);
    EXPECT_FALSE(tuning::choose({{100, false, true, true}, {90, false, true, false}}).has_value());
    EXPECT_FALSE(tuning::choose({}).has_value());
}

TEST(MatmulTable, TheHeuristicsFirstStaysForAGainUnderOnePercent) {
    EXPECT_EQ(chosen({{100.9, true, true, true}, {100, true, true, false}}), 0u);
    EXPECT_EQ(chosen({{101.1, true, true, true}, {100, true, true, false}}), 1u);
    // What is wrong does not make the others slow.
    EXPECT_EQ(chosen({{100, true, true, true}, {50, false, true, false}}), 0u);
}

TEST(MatmulTable, OneRoundingIsWorthOnePercent) {
    EXPECT_EQ(chosen({{100, true, false, true}, {100.9, true, true, false}}), 1u);
    EXPECT_EQ(chosen({{100, true, false, true}, {101.1, true, true, false}}), 0u);
    EXPECT_EQ(
        chosen({{120, true, true, true}, {100, true, false, false}, {100.5, true, true, false}}),
        2u);
    EXPECT_EQ(chosen({{100.5, true, true, true}, {100.2, true, true, false}}), 0u);
}

// ---- the file ----

TEST(MatmulTable, NewRowsTakeThePlaceOfOlderOnes) {
    const std::string small = "bf16 m8 n8 k8 tn", large = "bf16 m16 n8 k8 tn";
    std::vector<TunedProduct> rows;
    tuning::insert_row(rows, row("B", 1, small, 1));
    tuning::insert_row(rows, row("A", 2, small, 2));
    tuning::insert_row(rows, row("A", 1, large, 3));
    tuning::insert_row(rows, row("A", 1, small, 4));
    tuning::insert_row(rows, row("A", 2, small, 5));
    std::vector<uint64_t> words;
    for (const TunedProduct& r : rows) words.push_back(r.algorithm[0]);
    EXPECT_EQ(words, (std::vector<uint64_t>{4, 3, 5, 1}));
    EXPECT_THROW(tuning::insert_row(rows, row("A", 1, "large")), Error);
}

TEST(MatmulTable, TextOfARow) {
    EXPECT_EQ(tuning::table_text({row("NVIDIA H200", 130100, "bf16 m8 n8 k8 tn", 0x1f)}),
              tuning::table_text({}) +
                  "{\"NVIDIA H200\", 130100, \"bf16 m8 n8 k8 tn\",\n"
                  " {0x1f, 0x0, 0x0, 0x0,\n"
                  "  0x0, 0x0, 0x0, 0xffffffffffffffff},\n"
                  " 4096, 10.0, 12.0},\n");
}

// Editing it by hand, or a merge of two branches, must leave what `make tune` would write.
TEST(MatmulTable, TheTableOfThisVersionIsInOrder) {
    const std::vector<TunedProduct>& rows = tuned_products();
    for (size_t i = 0; i < rows.size(); ++i) {
        SCOPED_TRACE(rows[i].product);
        const std::optional<ProductKey> key = parse_product(rows[i].product);
        ASSERT_TRUE(key.has_value());
        EXPECT_TRUE(key->aligned);
        EXPECT_GT(rows[i].library, 0u);
        EXPECT_GT(rows[i].microseconds, 0.0);
        EXPECT_GT(rows[i].first_microseconds, 0.0);
        if (i == 0) continue;
        EXPECT_TRUE(tuning::row_before(rows[i - 1], rows[i]));
    }
    const std::string here = __FILE__;
    const size_t folder = here.rfind("test/unit/");
    ASSERT_NE(folder, std::string::npos);
    std::ifstream file(here.substr(0, folder) + "llmc/matmul_algorithms.inc");
    ASSERT_TRUE(file.is_open());
    std::stringstream text;
    text << file.rdbuf();
    EXPECT_EQ(text.str(), tuning::table_text(rows));
}

}  // namespace
