#include "llmc/mfu.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace {

using namespace llmc;
using P = MatmulPrecision;

double teraflops(const char* name, P precision) {
    return peak_flops(name, precision).value_or(0.0) / 1e12;
}

// llm.c prints MFU -100 % on an H200.
TEST(Mfu, OnAnH200AndOnAnUnknownGpu) {
    const auto h200 = mfu(8e8, 4e5, 1, "NVIDIA H200", P::bf16);
    ASSERT_TRUE(h200.has_value());
    EXPECT_NEAR(*h200, 8e8 * 4e5 / 989.4e12, 1e-9);
    EXPECT_EQ(format_mfu(h200), "32.3%");
    const auto unknown = mfu(8e8, 4e5, 1, "NVIDIA Q9000", P::bf16);
    EXPECT_FALSE(unknown.has_value());
    EXPECT_EQ(format_mfu(unknown), "n/a");
}

// Names as cudaGetDeviceProperties gives them.
TEST(Mfu, DatasheetPeaksByDeviceName) {
    EXPECT_EQ(teraflops("Tesla V100-SXM2-16GB", P::fp16), 125);
    EXPECT_EQ(teraflops("Tesla V100-SXM2-32GB", P::fp32), 15.7);
    EXPECT_EQ(teraflops("Tesla V100-PCIE-32GB", P::fp16), 112);
    EXPECT_EQ(teraflops("Tesla T4", P::fp16), 65);
    EXPECT_EQ(teraflops("NVIDIA A10", P::bf16), 125);
    EXPECT_EQ(teraflops("NVIDIA A10G", P::bf16), 70);
    EXPECT_EQ(teraflops("NVIDIA A30", P::bf16), 165);
    EXPECT_EQ(teraflops("NVIDIA A40", P::bf16), 149.7);
    EXPECT_EQ(teraflops("NVIDIA A100-SXM4-40GB", P::bf16), 312);
    EXPECT_EQ(teraflops("NVIDIA A100-SXM4-80GB", P::tf32), 156);
    EXPECT_EQ(teraflops("NVIDIA A100-PCIE-40GB", P::bf16), 312);
    EXPECT_EQ(teraflops("NVIDIA A100 80GB PCIe", P::fp32), 19.5);
    EXPECT_EQ(teraflops("A100-SXM4-40GB", P::bf16), 312);
    EXPECT_EQ(teraflops("NVIDIA A800-SXM4-80GB", P::bf16), 312);
    EXPECT_EQ(teraflops("NVIDIA RTX A6000", P::bf16), 154.8);
    EXPECT_EQ(teraflops("NVIDIA RTX 6000 Ada Generation", P::bf16), 364.2);
    EXPECT_EQ(teraflops("NVIDIA L4", P::bf16), 121);
    EXPECT_EQ(teraflops("NVIDIA L40", P::bf16), 181);
    EXPECT_EQ(teraflops("NVIDIA L40S", P::bf16), 362);
    EXPECT_EQ(teraflops("NVIDIA GeForce RTX 3090", P::bf16), 71.2);
    EXPECT_EQ(teraflops("NVIDIA GeForce RTX 3090 Ti", P::bf16), 80);
    EXPECT_EQ(teraflops("NVIDIA GeForce RTX 4090", P::tf32), 82.6);
    EXPECT_EQ(teraflops("NVIDIA GeForce RTX 4070 Ti SUPER", P::bf16), 88.2);
    EXPECT_EQ(teraflops("NVIDIA GeForce RTX 5090", P::bf16), 209.5);
    EXPECT_EQ(teraflops("NVIDIA H100 80GB HBM3", P::bf16), 989.4);
    EXPECT_EQ(teraflops("NVIDIA H100 PCIe", P::bf16), 756);
    EXPECT_EQ(teraflops("NVIDIA H100 NVL", P::bf16), 835.5);
    EXPECT_EQ(teraflops("NVIDIA H200 NVL", P::bf16), 835.5);
    EXPECT_EQ(teraflops("NVIDIA H200", P::tf32), 494.7);
    EXPECT_EQ(teraflops("NVIDIA GH200 480GB", P::bf16), 989.4);
    EXPECT_EQ(teraflops("NVIDIA GH200 144G HBM3e", P::bf16), 989.4);
    EXPECT_EQ(teraflops("NVIDIA H20", P::bf16), 148);
    EXPECT_EQ(teraflops("NVIDIA H800", P::bf16), 989.4);
    EXPECT_EQ(teraflops("NVIDIA B200", P::bf16), 2250);
    EXPECT_EQ(teraflops("NVIDIA GB200", P::bf16), 2500);
    EXPECT_EQ(teraflops("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", P::fp32), 126);
    EXPECT_EQ(teraflops("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", P::fp32), 110);
    EXPECT_EQ(teraflops("NVIDIA RTX PRO 6000 Blackwell Server Edition", P::fp32), 120);
}

TEST(Mfu, RelativesOfAKnownGpuAreUnknown) {
    for (const char* name :
         {"NVIDIA GeForce RTX 3080 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H2000",
          "NVIDIA RTX A5000 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA", "", "H100 MIG",
          "NVIDIA GeForce GTX 1080 Ti", "NVIDIA A100X", "80GB", "CPU"}) {
        EXPECT_FALSE(peak_flops(name, P::fp32).has_value()) << name;
    }
}

TEST(Mfu, APrecisionThatTheGpuLacksIsUnknown) {
    for (const char* name : {"Tesla V100-SXM2-16GB", "Tesla T4", "NVIDIA GeForce RTX 2080 Ti"}) {
        EXPECT_FALSE(peak_flops(name, P::bf16).has_value()) << name;
        EXPECT_FALSE(peak_flops(name, P::tf32).has_value()) << name;
        EXPECT_TRUE(peak_flops(name, P::fp16).has_value()) << name;
    }
}

// Catches slips in the table: no tensor core is slower than plain fp32, tf32 is half of bf16, and a
// name is spelt as name_words() gives it, once.
TEST(Mfu, TheTableIsConsistent) {
    using namespace llmc::mfu_detail;
    for (const GpuPeak& gpu : kGpuPeaks) {
        EXPECT_EQ(name_words(gpu.name), gpu.name);
        EXPECT_GT(gpu.fp32, 0.0) << gpu.name;
        EXPECT_GT(gpu.half, gpu.fp32) << gpu.name;
        if (gpu.tf32 > 0.0) {
            EXPECT_NEAR(gpu.tf32 / gpu.half, 0.5, 0.02) << gpu.name;
        }
        int same_name = 0;
        for (const GpuPeak& other : kGpuPeaks) same_name += std::string(other.name) == gpu.name;
        EXPECT_EQ(same_name, 1) << gpu.name;
    }
}

TEST(Mfu, FlopsPerTokenOfGpt2Small) {
    // 124,475,904 parameters with the padding rows of wte, less the 786,432 of wpe.
    const double expected = 6.0 * (124475904 - 786432) + 6.0 * 12 * 768 * 1024;
    EXPECT_EQ(flops_per_token(ModelConfig{}, 1024), expected);
    EXPECT_EQ(flops_per_token(ModelConfig{}, 512), expected - 6.0 * 12 * 768 * 512);
}

TEST(Mfu, IsAShareOfAllDevices) {
    const double one = mfu(8e8, 1e6, 1, "NVIDIA H100 80GB HBM3", P::bf16).value();
    EXPECT_NEAR(mfu(8e8, 1e6, 8, "NVIDIA H100 80GB HBM3", P::bf16).value(), one / 8, 1e-12);
}

TEST(Mfu, RatesThatAreNoRatesGiveNone) {
    for (const double rate : {0.0, -1.0, std::numeric_limits<double>::infinity(),
                              std::numeric_limits<double>::quiet_NaN()}) {
        EXPECT_FALSE(mfu(8e8, rate, 1, "NVIDIA H200", P::bf16).has_value());
    }
    EXPECT_FALSE(mfu(8e8, 1e6, 0, "NVIDIA H200", P::bf16).has_value());
}

}  // namespace
