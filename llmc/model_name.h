// Names of models with random weights, as -e takes them: d12, gpt2:d24, gpt3:c768,
// custom:L2C64H2T64.
#pragma once

#include <sys/stat.h>

#include <charconv>
#include <optional>
#include <string>
#include <system_error>

#include "llmc/error.h"
#include "llmc/params.h"
#include "llmc/printable.h"

namespace llmc {

constexpr const char* kModelNames =
    "d6, d12, d24, d36, d48, d60 (with or without gpt2: before it), gpt3:c384, c768, c1024, c1536, "
    "c2048, c2560, c4096, c5120, c12288, or custom:L2C64H2T64 with V512 after it if wanted";

namespace detail {

struct NamedSize {
    const char* name;
    int num_layers, channels, num_heads;
};

// Radford et al. 2019, table 2: 12, 24, 36 and 48 layers; heads have 64 channels, and d6 and d60
// go on in that way.
constexpr NamedSize kGpt2Sizes[] = {
    {"d6", 6, 384, 6},     {"d12", 12, 768, 12},  {"d24", 24, 1024, 16},
    {"d36", 36, 1280, 20}, {"d48", 48, 1600, 25}, {"d60", 60, 1920, 30},
};

// Brown et al. 2020, table 2.1, and c384, which is smaller than any there. The table gives 1.3B 24
// heads of 128 in 2048 channels, which are 16; and 13B 40 heads of 128 in 5140, which are 5120.
constexpr NamedSize kGpt3Sizes[] = {
    {"c384", 6, 384, 6},     {"c768", 12, 768, 12},   {"c1024", 24, 1024, 16},
    {"c1536", 24, 1536, 16}, {"c2048", 24, 2048, 16}, {"c2560", 32, 2560, 32},
    {"c4096", 32, 4096, 32}, {"c5120", 40, 5120, 40}, {"c12288", 96, 12288, 96},
};

// Limits of a custom model: far above what anyone trains with this program, and far enough below
// overflow that sizes of tensors fit size_t and rows and columns fit int.
constexpr int kMaxLayers = 1024;
constexpr int kMaxChannels = 65536;
constexpr int kMaxPositions = 1 << 20;
constexpr int kMaxVocab = 65536;  // tokens are 16 bits in data files

[[noreturn]] inline void refuse_name(const std::string& name, const std::string& why) {
    throw Error("-e " + printable(name) + ": " + why);
}

template <size_t N>
std::optional<ModelConfig> named_config(const NamedSize (&sizes)[N], const std::string& size,
                                        int max_seq_len) {
    for (const NamedSize& entry : sizes) {
        if (size != entry.name) continue;
        ModelConfig config;
        config.max_seq_len = max_seq_len;
        config.num_layers = entry.num_layers;
        config.channels = entry.channels;
        config.num_heads = entry.num_heads;
        return config;
    }
    return std::nullopt;
}

// Reads "L2" and the like from `text` at `place`, and moves on behind it.
inline int read_field(const std::string& name, const std::string& text, size_t& place, char letter,
                      int max) {
    if (place >= text.size() || text[place] != letter) {
        refuse_name(name, format("%c and a number missing after '%s'; must be such as "
                                 "custom:L2C64H2T64 or custom:L2C64H2T64V512",
                                 letter, printable("custom:" + text.substr(0, place)).c_str()));
    }
    const char* begin = text.data() + place + 1;
    const char* end = text.data() + text.size();
    int value = 0;
    const std::from_chars_result result = std::from_chars(begin, end, value);
    if (result.ec != std::errc() || value < 1 || value > max) {
        refuse_name(name, format("%c must be from 1 to %d", letter, max));
    }
    place = static_cast<size_t>(result.ptr - text.data());
    return value;
}

inline ModelConfig custom_config(const std::string& name, const std::string& text) {
    ModelConfig config;
    size_t place = 0;
    config.num_layers = read_field(name, text, place, 'L', kMaxLayers);
    config.channels = read_field(name, text, place, 'C', kMaxChannels);
    config.num_heads = read_field(name, text, place, 'H', kMaxChannels);
    config.max_seq_len = read_field(name, text, place, 'T', kMaxPositions);
    if (place < text.size() && text[place] == 'V') {
        config.vocab_size = read_field(name, text, place, 'V', kMaxVocab);
        config.padded_vocab_size = (config.vocab_size + 127) / 128 * 128;
    }
    if (place < text.size()) {
        refuse_name(name, "'" + printable(text.substr(place)) +
                              "' does not belong there; must be "
                              "such as custom:L2C64H2T64 or custom:L2C64H2T64V512");
    }
    const int c = config.channels, h = config.num_heads;
    if (h > c) refuse_name(name, format("H must be at most C, %d", c));
    if (c % h != 0) {
        const int below = c / h * h;
        const std::string above =
            below + h <= kMaxChannels ? format(" or %d", below + h) : std::string();
        refuse_name(name, format("C = %d is not divisible by H = %d; nearest: C = %d%s", c, h,
                                 below, above.c_str()));
    }
    return config;
}

}  // namespace detail

// The model that a name stands for; nothing for a path: what has a '/' or a '.', or is a file.
// Error for anything else that is not a right name. (An empty name is the caller's to resolve.)
inline std::optional<ModelConfig> parse_model_name(const std::string& name) {
    struct stat state;
    if (::stat(name.c_str(), &state) == 0 && !S_ISDIR(state.st_mode)) return std::nullopt;
    const size_t colon = name.find(':');
    const std::string family = colon == std::string::npos ? "" : name.substr(0, colon);
    const std::string size = colon == std::string::npos ? name : name.substr(colon + 1);
    if (family == "custom") return detail::custom_config(name, size);
    const bool gpt2 = family == "gpt2", gpt3 = family == "gpt3";
    if (!gpt2 && !gpt3 && name.find_first_of("/.") != std::string::npos) return std::nullopt;

    std::optional<ModelConfig> config;
    if (gpt3) {
        config = detail::named_config(detail::kGpt3Sizes, size, 2048);
    } else if (gpt2 || colon == std::string::npos) {
        config = detail::named_config(detail::kGpt2Sizes, size, 1024);
    }
    if (config) return config;
    if (gpt3 && size == "c5140") {
        detail::refuse_name(name,
                            "the paper's 5140 channels do not divide by its 40 heads; must be "
                            "gpt3:c5120");
    }
    detail::refuse_name(name, std::string("no such file or model; must be one of ") + kModelNames);
}

}  // namespace llmc
