// Sizes, memory and weights of a GPT2: what happens once, before the first step.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "llmc/checkpoint.h"
#include "llmc/cpu/parallel.h"
#include "llmc/gpt2.h"
#include "llmc/hash.h"
#include "llmc/launchers.h"
#include "llmc/model_file.h"
#include "llmc/rng.h"
#include "llmc/sampler.h"
#include "llmc/step_state_init.h"
#include "llmc/work_counters.h"

namespace llmc {

// All layers of all tensors in the order in which the backward pass finishes them: the final
// LayerNorm, layers L-1 ... 0, wte and wpe.
inline std::vector<LayerTensor> gradient_order(const ModelConfig& config) {
    std::vector<LayerTensor> order = {{Param::lnfw, 0}, {Param::lnfb, 0}};
    for (int layer = config.num_layers - 1; layer >= 0; --layer) {
        for (const ParamInfo& info : param_table()) {
            if (info.per_layer) order.push_back({info.id, static_cast<size_t>(layer)});
        }
    }
    order.push_back({Param::wte, 0});
    order.push_back({Param::wpe, 0});
    return order;
}

// The same in the order in which the next forward pass reads them: wte and wpe, layers 0 ... L-1, the
// final LayerNorm.
inline std::vector<LayerTensor> update_order(const ModelConfig& config) {
    std::vector<LayerTensor> order = {{Param::wte, 0}, {Param::wpe, 0}};
    for (int layer = 0; layer < config.num_layers; ++layer) {
        for (const ParamInfo& info : param_table()) {
            if (info.per_layer) order.push_back({info.id, static_cast<size_t>(layer)});
        }
    }
    order.push_back({Param::lnfw, 0});
    order.push_back({Param::lnfb, 0});
    return order;
}

// The same as they lie in memory.
inline std::vector<LayerTensor> memory_order(const ParamLayout& layout) {
    std::vector<LayerTensor> order;
    layout.for_each_layer([&](const ParamInfo& info, size_t layer) {
        order.push_back({info.id, layer});
    });
    return order;
}

// Groups of the first two orders: its first two tensors, each layer's, its last two. max_count is a
// tensor's elements over `shards`.
inline std::vector<TensorGroup> tensor_groups(const GPT2& model,
                                              const std::vector<LayerTensor>& order,
                                              size_t shards) {
    const size_t per_layer = (order.size() - 4) / model.config.num_layers;
    std::vector<TensorGroup> groups = {{0, 2, 0}};
    for (int k = 0; k < model.config.num_layers; ++k) {
        groups.push_back({2 + k * per_layer, per_layer, 0});
    }
    groups.push_back({order.size() - 2, 2, 0});
    for (TensorGroup& group : groups) {
        for (size_t i = group.first; i < group.first + group.count; ++i) {
            group.max_count =
                std::max(group.max_count, model.layout.layer_elements(order[i].id) / shards);
        }
    }
    return groups;
}

namespace detail {

// Elements of the buffer of the logits, whose later guests are gradients (B,T,4C) and (B,T,3C).
inline size_t logits_elements(const GPT2& model) {
    const size_t rows = static_cast<size_t>(model.batch) * model.sequence;
    return rows * std::max<size_t>(model.config.padded_vocab_size, 4 * model.config.channels);
}

// Where the scratch of attention's backward pass begins in that buffer, in elements: behind dqkv
// (B,T,3C), 256-byte aligned; 0 when the rest is too short for it. cuDNN asks for (B,NH,T,T) elements.
inline size_t attention_scratch_in_logits(const GPT2& model) {
    constexpr size_t kAlignment = 256 / sizeof(floatX);
    const int B = model.batch, T = model.sequence, C = model.config.channels;
    const size_t dqkv = static_cast<size_t>(B) * T * 3 * C;
    const size_t begin = (dqkv + kAlignment - 1) / kAlignment * kAlignment;
    const size_t end =
        begin * sizeof(floatX) + attention_backward_scratch_bytes(B, T, C, model.config.num_heads);
    return end <= logits_elements(model) * sizeof(floatX) ? begin : 0;
}

inline void plan_activations(GPT2* model) {
    const size_t rows = static_cast<size_t>(model->batch) * model->sequence;
    const size_t C = model->config.channels, L = model->config.num_layers;
    const size_t per_head = rows * model->config.num_heads;
    const size_t kept_gelu = model->recompute >= 1 ? 1 : L;
    const size_t kept_norm = model->recompute >= 2 ? 1 : L;
    Activations& a = model->acts;
    MemoryPlan& memory = model->memory;
    const char* what = "activations";
    memory.add(what, "encoded", &a.encoded, rows * C);
    memory.add(what, "ln1", &a.ln1, kept_norm * rows * C);
    memory.add(what, "LayerNorm statistics", &a.ln1_mean, L * rows);
    memory.add(what, "LayerNorm statistics", &a.ln1_rstd, L * rows);
    memory.add(what, "LayerNorm statistics", &a.ln2_mean, L * rows);
    memory.add(what, "LayerNorm statistics", &a.ln2_rstd, L * rows);
    memory.add(what, "LayerNorm statistics", &a.lnf_mean, rows);
    memory.add(what, "LayerNorm statistics", &a.lnf_rstd, rows);
    memory.add(what, "qkv", &a.qkv, L * rows * 3 * C);
    memory.add(what, "atty", &a.atty, L * rows * C);
    memory.add(what, "att_lse", &a.att_lse, L * per_head);
    memory.add(what, "residual2", &a.residual2, L * rows * C);
    memory.add(what, "ln2", &a.ln2, kept_norm * rows * C);
    memory.add(what, "fch", &a.fch, L * rows * 4 * C);
    memory.add(what, "fch_gelu", &a.fch_gelu, kept_gelu * rows * 4 * C);
    memory.add(what, "residual3", &a.residual3, L * rows * C);
    memory.add(what, "lnf", &a.lnf, rows * C);
    memory.add(what, "logits and their gradient", &a.logits, logits_elements(*model));
    memory.add(what, "losses", &a.losses, rows);
    memory.add(what, "projection", &a.projection, rows * C);
    memory.add(what, "dresidual", &a.dresidual, rows * C);
}

// The largest scratch that a launcher asks for at this model's shapes, but for what lies elsewhere.
inline size_t scratch_bytes(const GPT2& model) {
    const int B = model.batch, T = model.sequence, C = model.config.channels;
    const int NH = model.config.num_heads, rows = B * T;
    const bool apart = attention_scratch_in_logits(model) == 0;
    size_t forward = attention_forward_scratch_bytes(B, T, C, NH);
    for (int used = 1; used <= std::min(model.longest_sample, T); used += kSampleStep) {
        const int padded = padded_sample_length(used, T);
        forward = std::max(forward, attention_forward_scratch_bytes(1, padded, C, NH));
    }
    return std::max({forward, encoder_backward_scratch_bytes(B, T, C),
                     layernorm_backward_scratch_bytes(rows, C),
                     matmul_backward_weight_scratch_bytes(rows, C, model.config.padded_vocab_size),
                     matmul_backward_weight_scratch_bytes(rows, C, 4 * C),
                     matmul_backward_weight_scratch_bytes(rows, 4 * C, C),
                     matmul_backward_weight_scratch_bytes(rows, C, 3 * C),
                     matmul_backward_weight_scratch_bytes(rows, C, C),
                     apart ? attention_backward_scratch_bytes(B, T, C, NH) : 0,
                     global_norm_chunks_scratch_bytes(model.num_chunks, model.max_chunk)});
}

// Chunks in (tensor, layer, k) order. Those of other ranks' shards are empty here: their sums are 0, and
// come from their owners.
inline void upload_norm_chunks(GPT2* model, const MultiGpuConfig& multi_gpu) {
    std::vector<NormChunk<gradX>> chunks;
    const size_t pieces = model->plan.chunks_per_tensor();
    const size_t of_rank = pieces / multi_gpu.num_processes;
    const auto add = [&](const ParamInfo& info, size_t layer, size_t k) {
        const ElementRange range = state_part(model->layout.layer_elements(info.id), k, pieces);
        const bool own = static_cast<int>(k / of_rank) == multi_gpu.process_rank;
        chunks.push_back({model->grads.at(info.id, layer) + range.begin, own ? range.count() : 0});
    };
    if (planted_fault() == Fault::rank_order_chunks) {
        for (size_t rank = 0; rank * of_rank < pieces; ++rank) {
            model->layout.for_each_layer([&](const ParamInfo& info, size_t layer) {
                for (size_t k = 0; k < of_rank; ++k) add(info, layer, rank * of_rank + k);
            });
        }
    } else {
        model->layout.for_each_layer([&](const ParamInfo& info, size_t layer) {
            for (size_t k = 0; k < pieces; ++k) add(info, layer, k);
        });
    }
    copy_to_device(model->norm_chunks, chunks.data(), chunks.size(), model->main_stream);
}

// In update_order().
inline void upload_adamw_segments(GPT2* model, const MultiGpuConfig& multi_gpu) {
    std::vector<AdamwSegment<floatX, gradX>> segments;
    for (const LayerTensor& t : model->update_order) {
        const ParamInfo& info = param_info(t.id);
        const ShardInfo shard =
            multi_gpu_get_shard_offset(model->layout.layer_elements(t.id), &multi_gpu, 1);
        segments.push_back({model->params.at(t.id, t.layer) + shard.offset,
                            model->use_master ? model->master.at(t.id, t.layer) : nullptr,
                            model->grads.at(t.id, t.layer) + shard.offset,
                            model->m.at(t.id, t.layer), model->v.at(t.id, t.layer), shard.size,
                            model->layout.model_offset(t.id, t.layer) + shard.offset,
                            info.weight_decay ? model->weight_decay : 0.0f});
    }
    copy_to_device(model->adamw_segments, segments.data(), segments.size(), model->main_stream);
}

}  // namespace detail

// The canonical reduction among N > 1 ranks, and its memory: the pieces of other ranks.
inline void gpt2_plan_exchange([[maybe_unused]] GPT2* model,
                               [[maybe_unused]] const MultiGpuConfig& multi_gpu) {
#ifdef MULTI_GPU
    if (multi_gpu.exchange == nullptr) return;
    const std::vector<LayerTensor>& order = model->gradient_order;
    std::vector<std::vector<size_t>> lists;
    for (const TensorGroup& group : model->groups) {
        lists.emplace_back();
        for (size_t i = group.first; i < group.first + group.count; ++i) {
            lists.back().push_back(model->layout.layer_elements(order[i].id));
        }
    }
    GradientExchange& exchange = *multi_gpu.exchange;
    plan_exchange_buffers(&exchange, lists, multi_gpu.num_processes);
    model->memory.add("gradients", "pieces of other ranks", &exchange.received,
                      2 * exchange.half_elements);
    model->memory.add("gradients", "pieces to send", &exchange.staging,
                      2 * exchange.staging_half_elements);
#endif
}

inline void gpt2_plan_memory(GPT2* model, const MultiGpuConfig& multi_gpu) {
    const int shards = multi_gpu.zero_stage >= 1 ? multi_gpu.num_processes : 1;
    model->layout = ParamLayout(model->config);
    model->state_layout = ParamLayout(model->config, shards);
    // In fp32 the weights are their own master copy.
    model->use_master = model->use_master && sizeof(floatX) < sizeof(float);
    model->memory_order = memory_order(model->layout);
    model->gradient_order = gradient_order(model->config);
    const size_t tensors = model->gradient_order.size();
    model->groups = tensor_groups(*model, model->gradient_order, 1);
    model->update_order = update_order(model->config);
    model->update_groups = tensor_groups(*model, model->update_order, shards);
    const size_t pieces = model->plan.chunks_per_tensor();
    model->num_segments = tensors;
    model->num_chunks = tensors * pieces;
    model->num_sums = model->plan.num_micro_batches + model->num_chunks + 1;
    model->max_segment = model->max_chunk = 0;
    model->layout.for_each_layer([&](const ParamInfo& info, size_t) {
        const size_t elements = model->layout.layer_elements(info.id);
        model->max_segment = std::max(model->max_segment, elements / shards);
        model->max_chunk = std::max(model->max_chunk, (elements + pieces - 1) / pieces);
    });

    MemoryPlan& memory = model->memory;
    const size_t whole = model->layout.buffer_elements();
    const size_t state = model->state_layout.buffer_elements();
    memory.add("weights", kPrecisionName, &model->params.base, whole);
    memory.add("gradients", "sum of the step", &model->grads.base, whole);
    static const char* kSpareNames[] = {"spare of tree level 0", "spare of tree level 1",
                                        "spare of tree level 2", "spare of tree level 3",
                                        "spare of tree level 4", "spare of tree level 5",
                                        "spare of tree level 6", "spare of tree level 7",
                                        "spare of tree level 8", "spare of tree level 9"};
    model->spares.resize(model->plan.num_spares());
    for (size_t level = 0; level < model->spares.size(); ++level) {
        memory.add("gradients", kSpareNames[level], &model->spares[level].base, whole);
    }
    gpt2_plan_exchange(model, multi_gpu);
    memory.add("optimizer", "m", &model->m.base, state);
    memory.add("optimizer", "v", &model->v.base, state);
    memory.add("optimizer", "master weights", &model->master.base, model->use_master ? state : 0);
    detail::plan_activations(model);
    memory.add("scratch", "of the kernels", &model->acts.scratch, detail::scratch_bytes(*model));
    matmul_plan_workspace(&memory);
    if (!kDeviceIsHost) work_counters().plan_memory(&memory);
    memory.add("step", "losses, norms, tables", &model->step_state, 1);
    memory.add("step", "losses, norms, tables", &model->own_sums, model->num_sums);
    if (multi_gpu.num_processes > 1) {
        memory.add("step", "losses, norms, tables", &model->step_sums, model->num_sums);
    }
    memory.add("step", "losses, norms, tables", &model->micro_loss, 1);
    memory.add("step", "losses, norms, tables", &model->adamw_segments, tensors);
    memory.add("step", "losses, norms, tables", &model->norm_chunks, model->num_chunks);
}

// Memory, streams, and what is the same for every run. Like everything here that fills memory, this uses
// main_stream, and has finished when it returns.
inline void gpt2_allocate(GPT2* model, const MultiGpuConfig& multi_gpu) {
    // LLMC_POISON fills memory with NaN first, so that a test can show that nothing is read unwritten.
    const bool poison = std::getenv("LLMC_POISON") != nullptr;
    model->memory.allocate(poison ? 0xff : -1);
    cuda_check(cudaStreamCreateWithFlags(&model->main_stream, cudaStreamNonBlocking));
    cuda_check(cudaStreamCreateWithFlags(&model->copy_stream, cudaStreamNonBlocking));
    const auto zero = [&](auto* from, size_t count) {
        cuda_check(cudaMemsetAsync(from, 0, count * sizeof(*from), model->main_stream));
    };
    Activations& acts = model->acts;
    const size_t in_logits = detail::attention_scratch_in_logits(*model);
    acts.attention_scratch =
        in_logits > 0 ? reinterpret_cast<unsigned char*>(acts.logits + in_logits) : acts.scratch;
    for (ParamTensors<float>* state : {&model->m, &model->v, &model->master}) {
        state->layout = &model->state_layout;
    }
    model->params.layout = &model->layout;
    model->grads.layout = &model->layout;
    for (ParamTensors<gradX>& spare : model->spares) spare.layout = &model->layout;

    // No kernel writes the rows of wpe past T, so their gradient must be +0 from the start.
    const size_t whole = model->layout.buffer_elements();
    zero(model->grads.base, whole);
    for (ParamTensors<gradX>& spare : model->spares) zero(spare.base, whole);
    const size_t state = model->state_layout.buffer_elements();
    zero(model->m.base, state);
    zero(model->v.base, state);

    detail::upload_norm_chunks(model, multi_gpu);
    if (multi_gpu.num_processes == 1) model->step_sums = model->own_sums;
    // The places of other ranks stay 0.
    zero(model->own_sums, model->num_sums);
    detail::upload_adamw_segments(model, multi_gpu);
    const StepState start = initial_step_state();
    copy_to_device(model->step_state, &start, 1, model->main_stream);

    cuda_check(cudaEventCreateWithFlags(&model->decided, cudaEventDisableTiming));
    cuda_check(cudaMallocHost(&model->host_state, sizeof(StepState)));
#ifdef MULTI_GPU
    if (multi_gpu.exchange != nullptr) multi_gpu.exchange->open();
#endif
    cuda_check(cudaMallocHost(&model->host_stop, 2 * sizeof(double)));
    model->host_stop[0] = model->host_stop[1] = 0.0;
    if (multi_gpu.num_processes > 1 && multi_gpu.zero_stage >= 1) {
        model->gathered.resize(model->update_groups.size());
        for (cudaEvent_t& event : model->gathered) {
            cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
            // The first graphs are captured, and wait for it, before the first gathering.
            cuda_check(cudaEventRecord(event, model->main_stream));
        }
    }
}

#ifdef LLMC_TEST_SWITCHES
// Overwrites what a step must not read of the one before: activations, spares, received pieces, and the
// gradients, but for those of wpe, whose rows past T stay 0.
inline void gpt2_spread_junk(GPT2* model, const MultiGpuConfig& multi_gpu) {
    const auto junk = [&](auto* from, size_t count) {
        cuda_check(cudaMemsetAsync(from, 0xc3, count * sizeof(*from), model->main_stream));
    };
    const size_t rows = static_cast<size_t>(model->batch) * model->sequence;
    junk(model->acts.logits, rows * model->config.padded_vocab_size);
    junk(model->acts.dresidual, rows * model->config.channels);
    junk(model->acts.encoded, rows * model->config.channels);
    junk(model->micro_loss, 1);
    std::vector<ParamTensors<gradX>> gradients = model->spares;
    gradients.push_back(model->grads);
    for (const ParamTensors<gradX>& each : gradients) {
        model->layout.for_each_layer([&](const ParamInfo& info, size_t layer) {
            if (info.id == Param::wpe) return;
            junk(each.at(info.id, layer), model->layout.layer_elements(info.id));
        });
    }
#ifdef MULTI_GPU
    if (multi_gpu.exchange != nullptr) {
        junk(multi_gpu.exchange->received, 2 * multi_gpu.exchange->half_elements);
        junk(multi_gpu.exchange->staging, 2 * multi_gpu.exchange->staging_half_elements);
    }
#endif
    (void)multi_gpu;
}
#endif

inline void gpt2_free(GPT2* model) {
    if (model->main_stream == nullptr) return;
    cudaDeviceSynchronize();
    cudaEventDestroy(model->decided);
    cudaStreamDestroy(model->main_stream);
    cudaStreamDestroy(model->copy_stream);
    cudaFreeHost(model->host_state);
    cudaFreeHost(model->host_stop);
    for (cudaEvent_t event : model->gathered) cudaEventDestroy(event);
    matmul_forget_workspace();
    work_counters().forget_memory();
    model->main_stream = nullptr;
}

// Sets weights and master weights from `values(info, layer, float* to)`, which fills one layer.
template <class Values>
void gpt2_set_weights(GPT2* model, const MultiGpuConfig& multi_gpu, Values&& values) {
    std::vector<float> wide;
    std::vector<floatX> narrow;
    model->layout.for_each_layer([&](const ParamInfo& info, size_t layer) {
        const size_t count = model->layout.layer_elements(info.id);
        wide.resize(count);
        narrow.resize(count);
        values(info, layer, wide.data());
        cpu::parallel_for(count, 1 << 16, [&](size_t begin, size_t end) {
            for (size_t i = begin; i < end; ++i) narrow[i] = from_float<floatX>(wide[i]);
        });
        copy_to_device(model->params.at(info.id, layer), narrow.data(), count, model->main_stream);
        if (!model->use_master) return;
        const ShardInfo shard = multi_gpu_get_shard_offset(count, &multi_gpu, 1);
        copy_to_device(model->master.at(info.id, layer), wide.data() + shard.offset, shard.size,
                       model->main_stream);
    });
}

inline void gpt2_init_random(GPT2* model, uint64_t seed, const MultiGpuConfig& multi_gpu) {
    const double residual_scale = 1.0 / std::sqrt(2.0 * model->config.num_layers);
    gpt2_set_weights(model, multi_gpu, [&](const ParamInfo& info, size_t layer, float* to) {
        const size_t count = model->layout.layer_elements(info.id);
        if (info.init == ParamInit::zeros || info.init == ParamInit::ones) {
            std::fill_n(to, count, info.init == ParamInit::ones ? 1.0f : 0.0f);
            return;
        }
        const double scale = info.init == ParamInit::normal_residual ? 0.02 * residual_scale : 0.02;
        const uint64_t first = model->layout.model_offset(info.id, layer);
        // Rows of wte that no token names stay 0.
        const size_t drawn = info.id == Param::wte ? static_cast<size_t>(model->config.vocab_size) *
                                                         model->config.channels
                                                   : count;
        std::fill(to + drawn, to + count, 0.0f);
        cpu::parallel_for(drawn, 1 << 16, [&](size_t begin, size_t end) {
            for (size_t i = begin; i < end;) {
                const uint64_t index = first + i;
                const Normal4 normal =
                    random_normal4(seed, RandomPurpose::kWeightInit, 0, index / 4);
                for (uint64_t lane = index % 4; lane < 4 && i < end; ++lane, ++i) {
                    to[i] = static_cast<float>(scale * normal.lane[lane]);
                }
            }
        });
    });
}

inline void gpt2_load_weights(GPT2* model, const std::string& path,
                              const MultiGpuConfig& multi_gpu) {
    const ModelFile file(path);
    if (file.config() != model->config) {
        throw Error(path + ": holds a model of another shape than this run's");
    }
    gpt2_set_weights(model, multi_gpu, [&](const ParamInfo& info, size_t layer, float* to) {
        file.read_layer(info.id, layer, to);
    });
}

// Calls use(info, layer, host_data) with every layer of `tensors` copied to the host, on `stream`. Waits for
// all streams first.
template <class T, class Use>
void for_each_host_layer(const ParamTensors<T>& tensors, cudaStream_t stream, Use&& use) {
    cuda_check(cudaDeviceSynchronize());
    std::vector<T> host;
    tensors.layout->for_each_layer([&](const ParamInfo& info, size_t layer) {
        host.resize(tensors.layout->part_elements(info.id));
        copy_to_host(host.data(), tensors.at(info.id, layer), host.size(), stream);
        use(info, layer, host.data());
    });
}

// Hash of one array of parameters; the hashes of the shards of N ranks add up to the whole's.
template <class T>
uint64_t hash_of_tensors(const ParamTensors<T>& tensors, const MultiGpuConfig& multi_gpu,
                         const ParamLayout& layout, cudaStream_t stream) {
    uint64_t hash = 0;
    for_each_host_layer(tensors, stream, [&](const ParamInfo& info, size_t layer, const T* data) {
        const size_t part = tensors.layout->part_elements(info.id);
        const size_t offset =
            part < layout.layer_elements(info.id) ? multi_gpu.process_rank * part : 0;
        hash += hash_elements(data, sizeof(T), part, layout.model_offset(info.id, layer) + offset);
    });
    return hash;
}

// Hash of an array of which every rank has hashed its shard.
inline uint64_t hash_of_all_shards(uint64_t own, const MultiGpuConfig& multi_gpu) {
    uint64_t sum = 0;
    for (const uint64_t each : multi_gpu_all_gather_host(multi_gpu, &own, 1, "hashes of shards")) {
        sum += each;
    }
    return sum;
}

}  // namespace llmc
