// Model files, as llm.c writes and reads them: a header and the 16 tensors, fp32 (version 3) or
// bf16 (version 5).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "llmc/atomic_file.h"
#include "llmc/input_file.h"
#include "llmc/params.h"
#include "llmc/precision.h"

namespace llmc {

constexpr int32_t kModelMagic = 20240326;
constexpr int32_t kModelVersionFp32 = 3;
constexpr int32_t kModelVersionBf16 = 5;

template <class T>
constexpr int32_t model_version() {
    return sizeof(T) == 4 ? kModelVersionFp32 : kModelVersionBf16;
}

// Throws Error naming `source` when the numbers cannot be a model.
inline void check_model_config(const ModelConfig& c, const std::string& source) {
    const auto in_range = [&](const char* name, int value, int low, int high) {
        if (value < low || value > high) {
            throw Error(
                format("%s: %s is %d, expected %d to %d", source.c_str(), name, value, low, high));
        }
    };
    in_range("max_seq_len", c.max_seq_len, 1, 1 << 20);
    in_range("vocab_size", c.vocab_size, 1, 65536);
    in_range("padded_vocab_size", c.padded_vocab_size, c.vocab_size, 65536 + 127);
    in_range("num_layers", c.num_layers, 1, 1024);
    in_range("channels", c.channels, 1, 1 << 17);
    in_range("num_heads", c.num_heads, 1, c.channels);
    if (c.channels % c.num_heads != 0) {
        throw Error(format("%s: %d channels cannot be cut into %d heads", source.c_str(),
                           c.channels, c.num_heads));
    }
}

class ModelFile {
  public:
    // Opens a model file; Error when its header or its size is not right.
    explicit ModelFile(const std::string& path) : file_(path) {
        const std::vector<int32_t> header = read_header(file_, "a model file", kModelMagic);
        version_ = header[1];
        if (version_ != kModelVersionFp32 && version_ != kModelVersionBf16) {
            throw Error(format("%s: version %d, expected %d (fp32) or %d (bf16)", path.c_str(),
                               version_, kModelVersionFp32, kModelVersionBf16));
        }
        config_.max_seq_len = header[2];
        config_.vocab_size = header[3];
        config_.num_layers = header[4];
        config_.num_heads = header[5];
        config_.channels = header[6];
        config_.padded_vocab_size = header[7];
        check_model_config(config_, path);
        layout_ = ParamLayout(config_);
        const uint64_t expected = kHeaderBytes + layout_.num_parameters() * element_bytes();
        if (file_.bytes() != expected) {
            throw Error(format("%s: %llu bytes, but its header describes %llu", path.c_str(),
                               static_cast<unsigned long long>(file_.bytes()),
                               static_cast<unsigned long long>(expected)));
        }
    }

    const ModelConfig& config() const { return config_; }
    bool is_bf16() const { return version_ == kModelVersionBf16; }

    // One layer of one tensor as fp32 (exact when the file is bf16): layer_elements(id) numbers.
    void read_layer(Param id, size_t layer, float* to) const {
        const size_t count = layout_.layer_elements(id);
        const uint64_t offset = kHeaderBytes + layout_.model_offset(id, layer) * element_bytes();
        if (!is_bf16()) {
            file_.read(to, count * sizeof(float), offset);
            return;
        }
        std::vector<uint16_t> bits(count);
        file_.read(bits.data(), count * sizeof(uint16_t), offset);
        for (size_t i = 0; i < count; ++i) to[i] = bf16_bits_to_float(bits[i]);
    }

  private:
    size_t element_bytes() const { return is_bf16() ? 2 : 4; }

    InputFile file_;
    int32_t version_ = 0;
    ModelConfig config_;
    ParamLayout layout_;
};

// Writes a model file of T (float or bf16) whole or not at all. `layer_data(id, layer)` returns host
// memory with the layer's elements, valid until the next call.
template <class T, class LayerData>
void write_model_file(const std::string& path, const ModelConfig& config, LayerData&& layer_data) {
    const ParamLayout layout(config);
    std::vector<int32_t> header(kHeaderInts);
    header[0] = kModelMagic;
    header[1] = model_version<T>();
    header[2] = config.max_seq_len;
    header[3] = config.vocab_size;
    header[4] = config.num_layers;
    header[5] = config.num_heads;
    header[6] = config.channels;
    header[7] = config.padded_vocab_size;
    AtomicFile file(path);
    file.write(header.data(), kHeaderBytes);
    layout.for_each_layer([&](const ParamInfo& info, size_t layer) {
        const T* data = layer_data(info.id, layer);
        file.write(data, layout.layer_elements(info.id) * sizeof(T));
    });
    file.commit();
}

}  // namespace llmc
