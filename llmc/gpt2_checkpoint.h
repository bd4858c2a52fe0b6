// Saving a run and taking it up again.
#pragma once

#include <algorithm>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "llmc/checkpoint.h"
#include "llmc/gpt2_setup.h"
#include "llmc/model_file.h"
#include "llmc/options.h"

namespace llmc {

// Flags that change what a run computes without being in the header by themselves.
inline const std::vector<std::string>& numeric_flags() {
    static const std::vector<std::string> flags = {"-l", "-k",  "-q",  "-u", "-x",
                                                   "-c", "-sl", "-sg", "-f", "-a"};
    return flags;
}

// "-l 3e-04 -k cosine ...": numeric_flags() with their values.
inline std::string numeric_options_text(const Options& options) {
    std::string text;
    for (const std::string& letters : numeric_flags()) {
        text += letters + " " + flag_value(options, *find_flag(letters)) + " ";
    }
    return text;
}

// What identifies a run in its checkpoints: a resumed run must agree with it.
inline StateHeader make_state_header(const GPT2& model, const Options& options, int64_t total_batch,
                                     uint64_t data_hash) {
    StateHeader header{};
    header.magic = kStateMagic;
    header.version = kStateVersion;
    header.total_batch = total_batch;
    header.seed = options.seed;
    header.data_hash = data_hash;
    header.config = model.config;
    header.batch = options.batch_size;
    header.sequence = options.seq_len;
    header.max_width = options.reduction_width;
    header.weight_bytes = sizeof(floatX);
    header.gradient_bytes = sizeof(gradX);
    header.has_master = model.use_master;
    std::string text = numeric_options_text(options);
    // What -ge has come to; -r changes no bits unless GELU is in a product.
    text += format("-ge %d ", model.gelu_fusion);
    if (model.gelu_fusion > 0) text += format("-r %d ", model.recompute);
    std::memcpy(header.options, text.data(), std::min(text.size(), sizeof(header.options) - 1));
    return header;
}

// Throws Error when a run with header `mine` cannot go on from the checkpoint; returns a line for
// each difference that changes results but not their sense.
inline std::vector<std::string> compare_state_headers(const StateHeader& mine,
                                                      const StateHeader& saved,
                                                      const std::string& path) {
    const auto same = [&](const char* flag, long long here, long long there) {
        if (here == there) return;
        throw Error(
            format("%s %lld: the checkpoint %s was made with %s %lld; resume with the same, "
                   "or start anew in another folder",
                   flag, here, path.c_str(), flag, there));
    };
    if (mine.config != saved.config) {
        const ModelConfig& a = mine.config;
        const ModelConfig& b = saved.config;
        throw Error(
            format("-e: a model with %d layers, %d channels, %d heads, vocabulary %d, "
                   "sequence %d, but the checkpoint %s has %d, %d, %d, %d, %d; give another "
                   "folder, or no -e",
                   a.num_layers, a.channels, a.num_heads, a.vocab_size, a.max_seq_len, path.c_str(),
                   b.num_layers, b.channels, b.num_heads, b.vocab_size, b.max_seq_len));
    }
    same("-b", mine.batch, saved.batch);
    same("-t", mine.sequence, saved.sequence);
    same("-d", mine.total_batch, saved.total_batch);
    if (mine.seed != saved.seed) {
        throw Error(
            format("-rs %llu: the checkpoint %s was made with -rs %llu; resume with the same, "
                   "or start anew in another folder",
                   static_cast<unsigned long long>(mine.seed), path.c_str(),
                   static_cast<unsigned long long>(saved.seed)));
    }
    if (mine.weight_bytes != saved.weight_bytes) {
        throw Error(
            format("%s: made by a build with %s weights, this one has %s; use the other build",
                   path.c_str(), saved.weight_bytes == 2 ? "BF16" : "FP32",
                   mine.weight_bytes == 2 ? "BF16" : "FP32"));
    }
    std::vector<std::string> notes;
    if (mine.max_width != saved.max_width) {
        notes.push_back(
            format("-rw %d: the checkpoint was made with -rw %d, so the bits may differ "
                   "from a run without the restart",
                   mine.max_width, saved.max_width));
    }
    if (mine.gradient_bytes != saved.gradient_bytes) {
        notes.push_back(
            "GRAD_PRECISION differs from the checkpoint's, so the bits will differ from "
            "a run without the restart");
    }
    if (mine.has_master != saved.has_master) {
        notes.push_back(mine.has_master
                            ? "-w 1: the checkpoint has no master weights, so they start "
                              "from the rounded weights"
                            : "-w 0: the checkpoint's master weights are left out");
    }
    std::istringstream here(mine.options), there(saved.options);
    std::string flag, value, other_flag, other_value;
    bool constant = false;
    while (here >> flag >> value && there >> other_flag >> other_value) {
        if (flag == "-k") constant = value == "constant" && other_value == value;
        if (flag == "-x" && constant) continue;  // how far to go, and nothing else
        if (flag == other_flag && value != other_value) {
            notes.push_back(flag + " " + value + ": the checkpoint was made with " + other_value);
        }
    }
    if (mine.data_hash != saved.data_hash) {
        notes.push_back(
            "-i: the training files are not those that the checkpoint was made with, so "
            "the order of the data starts anew from this step's position");
    }
    return notes;
}

// Writes the checkpoint of `step` steps done; `header` is make_state_header's. All ranks call it; an
// error of one is an error of all, and leaves the checkpoint without its DONE file. Throws AgreedError,
// before anything is written, when ranks have come apart: nobody could resume from their files.
inline void gpt2_save_checkpoint(GPT2* model, const MultiGpuConfig& multi_gpu, StateHeader header,
                                 const std::string& folder, int step) {
    header.step = step;
    header.num_files = multi_gpu.num_processes;
    header.file_index = multi_gpu.process_rank;
    header.weights_hash =
        hash_of_tensors(model->params, MultiGpuConfig{}, model->layout, model->main_stream);
    const std::string difference = difference_of_weights(multi_gpu, header.weights_hash);
    if (!difference.empty()) {
        throw AgreedError(format(
            "the checkpoint of step %d is not written: %s; -y 1 goes on from an earlier one, "
            "--check-ranks compares them after every step",
            step, difference.c_str()));
    }

    std::vector<float> host;
    const auto part_of_array = [&](StateArray which, Param id, size_t layer) {
        const ParamTensors<float>& tensors = which == StateArray::m   ? model->m
                                             : which == StateArray::v ? model->v
                                                                      : model->master;
        const ElementRange part =
            state_part(model->layout.layer_elements(id), header.file_index, header.num_files);
        const size_t offset = multi_gpu.zero_stage >= 1 ? 0 : part.begin;
        multi_gpu_end_with_others(multi_gpu);
        host.resize(part.count());
        copy_to_host(host.data(), tensors.at(id, layer) + offset, host.size(), model->main_stream);
        return host.data();
    };
    const auto write_files = [&] {
        StepState state;
        copy_to_host(&state, model->step_state, 1, model->main_stream);
        write_state_file(state_path(folder, step, header.file_index), header, state, part_of_array);
        if (multi_gpu.process_rank != 0) return;
        std::vector<floatX> weights;
        write_model_file<floatX>(model_path(folder, step), model->config,
                                 [&](Param id, size_t layer) {
                                     multi_gpu_end_with_others(multi_gpu);
                                     weights.resize(model->layout.layer_elements(id));
                                     copy_to_host(weights.data(), model->params.at(id, layer),
                                                  weights.size(), model->main_stream);
                                     return weights.data();
                                 });
    };
    // The checkpoint counts once every rank has written its part.
    multi_gpu_together(multi_gpu, write_files);
    multi_gpu_together(multi_gpu, [&] {
        if (multi_gpu.process_rank == 0) write_done_file(folder, step);
    });
}

// Sets weights and optimizer state from a checkpoint whose header has been compared.
inline void gpt2_load_checkpoint(GPT2* model, const MultiGpuConfig& multi_gpu,
                                 const CheckpointState& checkpoint, const std::string& folder) {
    const StateHeader& header = checkpoint.header();
    for (int i = multi_gpu.process_rank; i < header.num_files; i += multi_gpu.num_processes) {
        checkpoint.verify_checksum(i);
    }
    const std::string weights = model_path(folder, static_cast<int>(header.step));
    gpt2_load_weights(model, weights, multi_gpu);
    if (hash_of_tensors(model->params, MultiGpuConfig{}, model->layout, model->main_stream) !=
        header.weights_hash) {
        throw Error(format(
            "%s: damaged, or not the model of %s; remove DONE_%08lld to resume from an "
            "earlier checkpoint",
            weights.c_str(), checkpoint.path().c_str(), static_cast<long long>(header.step)));
    }
    std::vector<float> host;
    const auto load_array = [&](StateArray which, const ParamTensors<float>& tensors) {
        model->layout.for_each_layer([&](const ParamInfo& info, size_t layer) {
            const ShardInfo shard =
                multi_gpu_get_shard_offset(model->layout.layer_elements(info.id), &multi_gpu, 1);
            host.resize(shard.size);
            checkpoint.read(which, info.id, layer, {shard.offset, shard.offset + shard.size},
                            host.data());
            copy_to_device(tensors.at(info.id, layer), host.data(), host.size(),
                           model->main_stream);
        });
    };
    load_array(StateArray::m, model->m);
    load_array(StateArray::v, model->v);
    if (model->use_master && header.has_master) load_array(StateArray::master, model->master);
    const StepState& state = checkpoint.step_state();
    copy_to_device(model->step_state, &state, 1, model->main_stream);
}

}  // namespace llmc
