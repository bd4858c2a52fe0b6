// Model flops utilisation: the flops that the model needs, over those that the GPU could do.
#pragma once

#include <cctype>
#include <cmath>
#include <cstddef>
#include <optional>
#include <string>

#include "llmc/error.h"
#include "llmc/params.h"

namespace llmc {

// What the matrix products multiply in; sums are fp32.
enum class MatmulPrecision { bf16, fp16, tf32, fp32 };

namespace mfu_detail {

// Dense peaks in teraflops, from the vendor's datasheets and architecture white papers: tensor cores
// on 16-bit operands with fp32 sums, tensor cores on tf32, and plain fp32. Datasheets that print
// figures with structured sparsity are halved. 0: the GPU cannot (V100 and Turing have neither bf16
// nor tf32). GeForce parts do fp32 sums at half the advertised fp16 rate.
struct GpuPeak {
    const char* name;  // the device's name, less what name_words() leaves out
    double half;
    double tf32;
    double fp32;
};

inline constexpr GpuPeak kGpuPeaks[] = {
    // Volta, Turing
    {"V100", 125, 0, 15.7},
    {"V100 PCIE", 112, 0, 14.0},
    {"V100S PCIE", 130, 0, 16.4},
    {"T4", 65, 0, 8.1},
    {"RTX 2080 TI", 53.8, 0, 13.4},
    // Ampere
    {"A100", 312, 156, 19.5},
    {"A100 PCIE", 312, 156, 19.5},
    {"A800", 312, 156, 19.5},
    {"A800 PCIE", 312, 156, 19.5},
    {"A10", 125, 62.5, 31.2},
    {"A10G", 70, 35, 31.5},
    {"A30", 165, 82, 10.3},
    {"A40", 149.7, 74.8, 37.4},
    {"RTX A4000", 76.7, 38.3, 19.2},
    {"RTX A4500", 94.6, 47.3, 23.7},
    {"RTX A5000", 111.1, 55.6, 27.8},
    {"RTX A5500", 136.4, 68.2, 34.1},
    {"RTX A6000", 154.8, 77.4, 38.7},
    {"RTX 3070", 40.6, 20.3, 20.3},
    {"RTX 3070 TI", 43.5, 21.7, 21.7},
    {"RTX 3080", 59.5, 29.8, 29.8},
    {"RTX 3080 TI", 68.2, 34.1, 34.1},
    {"RTX 3090", 71.2, 35.6, 35.6},
    {"RTX 3090 TI", 80.0, 40.0, 40.0},
    // Ada
    {"L4", 121, 60, 30.3},
    {"L40", 181, 90.5, 90.5},
    {"L40S", 362, 183, 91.6},
    {"RTX 6000 ADA", 364.2, 182.1, 91.1},
    {"RTX 4070", 58.3, 29.1, 29.1},
    {"RTX 4070 SUPER", 71.0, 35.5, 35.5},
    {"RTX 4070 TI", 80.2, 40.1, 40.1},
    {"RTX 4070 TI SUPER", 88.2, 44.1, 44.1},
    {"RTX 4080", 97.5, 48.7, 48.7},
    {"RTX 4080 SUPER", 104.4, 52.2, 52.2},
    {"RTX 4090", 165.2, 82.6, 82.6},
    // Hopper
    {"H100", 989.4, 494.7, 66.9},
    {"H100 PCIE", 756, 378, 51.2},
    {"H100 NVL", 835.5, 417.5, 60},
    {"H200", 989.4, 494.7, 66.9},
    {"H200 NVL", 835.5, 417.5, 60},
    {"GH200", 989.4, 494.7, 66.9},
    {"H800", 989.4, 494.7, 66.9},
    {"H800 PCIE", 756, 378, 51.2},
    {"H20", 148, 74, 44},
    // Blackwell
    {"B100", 1750, 900, 60},
    {"B200", 2250, 1125, 75},
    {"GB200", 2500, 1250, 80},
    {"RTX 5080", 112.6, 56.3, 56.3},
    {"RTX 5090", 209.5, 104.8, 104.8},
    {"RTX PRO 6000 BLACKWELL WORKSTATION", 503.8, 251.9, 126},
    {"RTX PRO 6000 BLACKWELL MAX Q WORKSTATION", 438.9, 219.5, 110},
    {"RTX PRO 6000 BLACKWELL SERVER", 500, 250, 120},
};

// True for words that do not change the speed: makers' names, and memory sizes such as 80GB.
inline bool is_ignored(const std::string& word) {
    for (const char* ignored : {"NVIDIA", "TESLA", "GEFORCE", "GENERATION", "EDITION", "SXM",
                                "SXM2", "SXM3", "SXM4", "SXM5", "SXM6", "HBM3", "HBM3E"}) {
        if (word == ignored) return true;
    }
    const size_t digits = word.find_first_not_of("0123456789");
    return digits != 0 && digits != std::string::npos &&
           (word.substr(digits) == "GB" || word.substr(digits) == "G");
}

// "NVIDIA H100 80GB HBM3" becomes "H100". What is left must match a row as a whole, so that a
// laptop's "RTX 3080 Laptop GPU" or a slice "A100 MIG 1g.5gb" is unknown, not its big brother.
inline std::string name_words(const std::string& device_name) {
    std::string result, word;
    const auto finish = [&] {
        if (!word.empty() && !is_ignored(word)) result += (result.empty() ? "" : " ") + word;
        word.clear();
    };
    for (const char c : device_name) {
        if (c == ' ' || c == '-') {
            finish();
        } else {
            word += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
        }
    }
    finish();
    return result;
}

}  // namespace mfu_detail

// Dense peak in flops per second of the GPU that cudaDeviceProp calls `device_name`; none when it is
// not in the table or does not have the precision.
inline std::optional<double> peak_flops(const std::string& device_name, MatmulPrecision precision) {
    const std::string words = mfu_detail::name_words(device_name);
    for (const mfu_detail::GpuPeak& gpu : mfu_detail::kGpuPeaks) {
        if (words != gpu.name) continue;
        double teraflops = gpu.fp32;
        if (precision == MatmulPrecision::fp16) teraflops = gpu.half;
        if (precision == MatmulPrecision::bf16) teraflops = gpu.tf32 > 0.0 ? gpu.half : 0.0;
        if (precision == MatmulPrecision::tf32) teraflops = gpu.tf32;
        if (teraflops <= 0.0) return std::nullopt;
        return teraflops * 1e12;
    }
    return std::nullopt;
}

// Flops that training needs for one token at sequence length T: 6 N + 6 L C T, after Chowdhery et
// al. 2022 (PaLM), appendix B.
//
// N are the parameters that enter a matrix product for each token: all but wpe, which is only looked
// up; wte counts once, for the LM head, with its padding rows. Attention is counted as causal: a
// query meets T/2 keys on average, so 6 L C T is half of the paper's 12 L C T. Recomputed activations
// are not counted.
inline double flops_per_token(const ModelConfig& config, int T) {
    const ParamLayout layout(config);
    const double parameters =
        static_cast<double>(layout.num_parameters() - layout.elements(Param::wpe));
    return 6.0 * parameters + 6.0 * config.num_layers * config.channels * static_cast<double>(T);
}

// Share of the peak of `num_devices` GPUs of one kind, at `tokens_per_second` over all of them. None
// when the peak is not known or the rate is not a positive number.
inline std::optional<double> mfu(double flops_per_token, double tokens_per_second, int num_devices,
                                 const std::string& device_name, MatmulPrecision precision) {
    const std::optional<double> peak = peak_flops(device_name, precision);
    if (!peak || num_devices < 1 || !std::isfinite(tokens_per_second) || tokens_per_second <= 0.0) {
        return std::nullopt;
    }
    return flops_per_token * tokens_per_second / (*peak * num_devices);
}

// "41.3%", or "n/a".
inline std::string format_mfu(const std::optional<double>& utilisation) {
    return utilisation ? format("%.1f%%", *utilisation * 100.0) : "n/a";
}

}  // namespace llmc
