// The model's shape and its 16 parameter tensors: names, shapes and places, in one table.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "llmc/error.h"

namespace llmc {

struct ModelConfig {
    int max_seq_len = 1024;         // longest sequence, rows of wpe
    int vocab_size = 50257;         // V
    int padded_vocab_size = 50304;  // Vp, V rounded up to a multiple of 128
    int num_layers = 12;            // L
    int num_heads = 12;             // NH
    int channels = 768;             // C, a multiple of NH

    int head_size() const { return channels / num_heads; }
};

inline bool operator==(const ModelConfig& a, const ModelConfig& b) {
    return a.max_seq_len == b.max_seq_len && a.vocab_size == b.vocab_size &&
           a.padded_vocab_size == b.padded_vocab_size && a.num_layers == b.num_layers &&
           a.num_heads == b.num_heads && a.channels == b.channels;
}
inline bool operator!=(const ModelConfig& a, const ModelConfig& b) {
    return !(a == b);
}

// In the order of the model file. Weights are stored (out, in).
enum class Param : int {
    wte,
    wpe,
    ln1w,
    ln1b,
    qkvw,
    qkvb,
    attprojw,
    attprojb,
    ln2w,
    ln2b,
    fcw,
    fcb,
    fcprojw,
    fcprojb,
    lnfw,
    lnfb,
};
constexpr int kNumParams = 16;

// Initial value of a tensor's elements (Radford et al. 2019, section 2.3, for the scaled one).
enum class ParamInit {
    zeros,
    ones,
    normal,           // normal(0, 0.02)
    normal_residual,  // normal(0, 0.02 / sqrt(2 L)): projections that end in the residual stream
};

struct ParamInfo {
    Param id;
    const char* name;
    bool per_layer;     // (L, rows, cols), else (rows, cols)
    bool weight_decay;  // AdamW's decay: matrices yes, vectors no
    ParamInit init;
    size_t (*rows)(const ModelConfig&);  // of one layer
    size_t (*cols)(const ModelConfig&);
};

namespace detail {
inline size_t one(const ModelConfig&) {
    return 1;
}
inline size_t padded_vocab(const ModelConfig& c) {
    return c.padded_vocab_size;
}
inline size_t positions(const ModelConfig& c) {
    return c.max_seq_len;
}
inline size_t c1(const ModelConfig& c) {
    return c.channels;
}
inline size_t c3(const ModelConfig& c) {
    return 3 * static_cast<size_t>(c.channels);
}
inline size_t c4(const ModelConfig& c) {
    return 4 * static_cast<size_t>(c.channels);
}
}  // namespace detail

inline const std::array<ParamInfo, kNumParams>& param_table() {
    using namespace detail;
    using I = ParamInit;
    static const std::array<ParamInfo, kNumParams> table = {{
        // id, name, per layer, decay, init, rows, cols
        {Param::wte, "wte", false, true, I::normal, padded_vocab, c1},  // padding rows are 0
        {Param::wpe, "wpe", false, true, I::normal, positions, c1},
        {Param::ln1w, "ln1w", true, false, I::ones, one, c1},
        {Param::ln1b, "ln1b", true, false, I::zeros, one, c1},
        {Param::qkvw, "qkvw", true, true, I::normal, c3, c1},
        {Param::qkvb, "qkvb", true, false, I::zeros, one, c3},
        {Param::attprojw, "attprojw", true, true, I::normal_residual, c1, c1},
        {Param::attprojb, "attprojb", true, false, I::zeros, one, c1},
        {Param::ln2w, "ln2w", true, false, I::ones, one, c1},
        {Param::ln2b, "ln2b", true, false, I::zeros, one, c1},
        {Param::fcw, "fcw", true, true, I::normal, c4, c1},
        {Param::fcb, "fcb", true, false, I::zeros, one, c4},
        {Param::fcprojw, "fcprojw", true, true, I::normal_residual, c1, c4},
        {Param::fcprojb, "fcprojb", true, false, I::zeros, one, c1},
        {Param::lnfw, "lnfw", false, false, I::ones, one, c1},
        {Param::lnfb, "lnfb", false, false, I::zeros, one, c1},
    }};
    return table;
}

inline const ParamInfo& param_info(Param id) {
    return param_table()[static_cast<size_t>(id)];
}

// Where each layer of each tensor lies, in a device buffer and in the whole model.
//
// In the model (files, random numbers) tensors follow each other without gaps. In a buffer every
// layer of every tensor starts at a multiple of kAlignElements, so that kernels may use wide loads
// and a layer's place does not depend on the type of its elements.
class ParamLayout {
  public:
    static constexpr size_t kAlignElements = 128;  // 256 bytes of bf16, 512 of fp32

    ParamLayout() = default;
    // With parts > 1 the buffer holds one of `parts` equal pieces of every layer of every tensor:
    // one rank's shard. parts divides every layer's elements, or Error.
    explicit ParamLayout(const ModelConfig& config, size_t parts = 1) {
        for (const ParamInfo& info : param_table()) {
            Entry& entry = entries_[static_cast<size_t>(info.id)];
            entry.layers = info.per_layer ? static_cast<size_t>(config.num_layers) : 1;
            entry.layer_elements = info.rows(config) * info.cols(config);
            if (entry.layer_elements % parts != 0) {
                throw Error(format("%s has %zu elements, which %zu does not divide", info.name,
                                   entry.layer_elements, parts));
            }
            entry.part_elements = entry.layer_elements / parts;
            entry.stride =
                (entry.part_elements + kAlignElements - 1) / kAlignElements * kAlignElements;
            entry.buffer_offset = buffer_elements_;
            entry.model_offset = num_parameters_;
            buffer_elements_ += entry.layers * entry.stride;
            num_parameters_ += entry.layers * entry.layer_elements;
        }
    }

    // Layers that a tensor has: L, or 1 for wte, wpe, lnfw and lnfb.
    size_t layers(Param id) const { return at(id).layers; }
    // Elements of one layer of a tensor.
    size_t layer_elements(Param id) const { return at(id).layer_elements; }
    // Elements of one layer that the buffer holds: all of them, or a shard's.
    size_t part_elements(Param id) const { return at(id).part_elements; }
    // Elements of all layers.
    size_t elements(Param id) const { return at(id).layers * at(id).layer_elements; }
    // First element of a layer in a buffer.
    size_t buffer_offset(Param id, size_t layer) const {
        return at(id).buffer_offset + layer * at(id).stride;
    }
    // First element of a layer in the whole model: the index that random numbers are keyed by.
    uint64_t model_offset(Param id, size_t layer) const {
        return at(id).model_offset + layer * at(id).layer_elements;
    }
    // Elements to allocate for one copy of the parameters, gaps included.
    size_t buffer_elements() const { return buffer_elements_; }
    // Parameters of the model, padding rows of wte included.
    size_t num_parameters() const { return num_parameters_; }

    // Calls visit(info, layer) for every layer of every tensor, in the order of the model file.
    template <class Visit>
    void for_each_layer(Visit&& visit) const {
        for (const ParamInfo& info : param_table()) {
            for (size_t layer = 0; layer < layers(info.id); ++layer) visit(info, layer);
        }
    }

  private:
    struct Entry {
        size_t layers = 0;
        size_t layer_elements = 0;
        size_t part_elements = 0;
        size_t stride = 0;
        size_t buffer_offset = 0;
        uint64_t model_offset = 0;
    };
    const Entry& at(Param id) const { return entries_[static_cast<size_t>(id)]; }

    std::array<Entry, kNumParams> entries_{};
    size_t buffer_elements_ = 0;
    size_t num_parameters_ = 0;
};

// One copy of the parameters, or of their gradients, in device memory.
template <class T>
struct ParamTensors {
    T* base = nullptr;
    const ParamLayout* layout = nullptr;

    T* at(Param id, size_t layer = 0) const { return base + layout->buffer_offset(id, layer); }
};

}  // namespace llmc
