// Trains GPT-2: forward, backward, update, and the loop around them.
//
// This file says in which order things happen. How each is computed stands behind launchers.h, how a
// run is described in options.h and set up in run.h, which data a step sees in dataloader.h, how
// gradients are summed in reduction.h, and how several processes work on one step in zero.cuh.
#include <fcntl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "llmc/captured_work.cuh"
#include "llmc/dataloader.h"
#include "llmc/gpt2.h"
#include "llmc/gpt2_setup.h"
#include "llmc/launchers.h"
#include "llmc/mfu.h"
#include "llmc/nvtx_range.cuh"
#include "llmc/options.h"
#include "llmc/run.h"
#include "llmc/sampler.h"
#include "llmc/step_timer.h"
#include "llmc/stop_signal.h"
#include "llmc/zero.cuh"

#ifdef LLMC_CPU
#include "llmc/cpu/openblas_core.h"
#endif

namespace llmc {

// ------------------------------------------------------------------------------------------------
// The model: forward, backward, update

// Activations of layer l when `rows` = B * T positions are in use.
static Activations at_layer(const GPT2& model, int l, size_t rows) {
    const size_t layer = static_cast<size_t>(l) * rows;
    const size_t C = model.config.channels, NH = model.config.num_heads;
    Activations a = model.acts;
    if (model.recompute < 2) a.ln1 += layer * C;
    if (model.recompute < 2) a.ln2 += layer * C;
    if (model.recompute < 1) a.fch_gelu += layer * 4 * C;
    a.ln1_mean += layer;
    a.ln1_rstd += layer;
    a.qkv += layer * 3 * C;
    a.atty += layer * C;
    a.att_lse += layer * NH;
    a.residual2 += layer * C;
    a.ln2_mean += layer;
    a.ln2_rstd += layer;
    a.fch += layer * 4 * C;
    a.residual3 += layer * C;
    return a;
}

// The residual stream that enters layer l.
static floatX* residual_into(const GPT2& model, int l, size_t rows) {
    return l == 0 ? model.acts.encoded : at_layer(model, l - 1, rows).residual3;
}

// The main stream waits for the weights of an update group; they may still be on their way from the
// ranks that have updated them.
static void wait_for_weights(const GPT2& model, size_t group) {
    if (model.gathered.empty()) return;
    cuda_check(cudaStreamWaitEvent(model.main_stream, model.gathered[group],
                                   wait_flags(model.main_stream)));
}

void gpt2_forward(GPT2* model, const int* inputs, int B, int T) {
    const ProfileRange phase("forward");
    const int rows = B * T, C = model->config.channels, NH = model->config.num_heads;
    const ParamTensors<floatX>& w = model->params;
    cudaStream_t stream = model->main_stream;
    Activations& acts = model->acts;

    wait_for_weights(*model, 0);
    encoder_forward(acts.encoded, inputs, w.at(Param::wte), w.at(Param::wpe), B, T, C, stream);
    Activations a = at_layer(*model, 0, rows);
    wait_for_weights(*model, 1);
    layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, acts.encoded, w.at(Param::ln1w),
                      w.at(Param::ln1b), rows, C, stream);
    for (int l = 0; l < model->config.num_layers; ++l) {
        a = at_layer(*model, l, rows);
        matmul_forward(a.qkv, a.ln1, w.at(Param::qkvw, l), w.at(Param::qkvb, l), rows, C, 3 * C,
                       stream);
        attention_forward(a.atty, a.att_lse, a.qkv, acts.scratch, B, T, C, NH, stream);
        matmul_forward(acts.projection, a.atty, w.at(Param::attprojw, l), w.at(Param::attprojb, l),
                       rows, C, C, stream);
        fused_residual_layernorm_forward(
            a.residual2, a.ln2, a.ln2_mean, a.ln2_rstd, residual_into(*model, l, rows),
            acts.projection, w.at(Param::ln2w, l), w.at(Param::ln2b, l), rows, C, stream);
        matmul_gelu_forward(a.fch_gelu, a.fch, a.ln2, w.at(Param::fcw, l), w.at(Param::fcb, l),
                            rows, C, 4 * C, model->gelu_fusion >= 1, stream);
        matmul_forward(acts.projection, a.fch_gelu, w.at(Param::fcprojw, l),
                       w.at(Param::fcprojb, l), rows, 4 * C, C, stream);
        wait_for_weights(*model, l + 2);  // of the next layer, or the final LayerNorm
        if (l + 1 < model->config.num_layers) {
            const Activations next = at_layer(*model, l + 1, rows);
            fused_residual_layernorm_forward(a.residual3, next.ln1, next.ln1_mean, next.ln1_rstd,
                                             a.residual2, acts.projection, w.at(Param::ln1w, l + 1),
                                             w.at(Param::ln1b, l + 1), rows, C, stream);
        } else {
            fused_residual_layernorm_forward(a.residual3, acts.lnf, acts.lnf_mean, acts.lnf_rstd,
                                             a.residual2, acts.projection, w.at(Param::lnfw),
                                             w.at(Param::lnfb), rows, C, stream);
        }
    }
}

void gpt2_logits(GPT2* model, int first, int rows) {
    const int C = model->config.channels;
    const floatX* no_bias = nullptr;
    matmul_forward(model->acts.logits, model->acts.lnf + static_cast<size_t>(first) * C,
                   model->params.at(Param::wte), no_bias, rows, C, model->config.padded_vocab_size,
                   model->main_stream);
}

void gpt2_token_losses(GPT2* model, const MicroBatch& batch, int B, int T) {
    gpt2_logits(model, 0, B * T);
    fused_classifier(model->acts.logits, model->acts.losses, batch.targets, 0.0f, B * T,
                     model->config.vocab_size, model->config.padded_vocab_size, false,
                     model->main_stream);
}

void gpt2_loss(GPT2* model, const MicroBatch& batch, int B, int T, double* loss) {
    gpt2_token_losses(model, batch, B, T);
    mean_loss(loss, model->acts.losses, B * T, model->main_stream);
}

namespace {

// kGradients, or a spare by its number.
const ParamTensors<gradX>& gradient_buffer(const GPT2& model, int number) {
    return number == kGradients ? model.grads : model.spares[number];
}

// Fault::fused_leaf: a slot goes on adding to what spare 0 held, in place of the node.
void copy_gradients(GPT2* model, const ParamTensors<gradX>& to, const ParamTensors<gradX>& from) {
    cuda_check(cudaMemcpyAsync(to.base, from.base, model->layout.buffer_elements() * sizeof(gradX),
                               cudaMemcpyDeviceToDevice, model->main_stream));
}

// Adds up the tree's nodes for some tensors.
void add_tree_nodes(GPT2* model, const std::vector<TreeNode>& nodes, const LayerTensor* tensors,
                    size_t count) {
    std::vector<TreeRange<gradX>> ranges;
    int num_nodes = 0;
    for (const TreeNode& node : nodes) {
        if (planted_fault() == Fault::fused_leaf && node.left == 0) {
            if (node.out != kGradients) {
                copy_gradients(model, model->spares[node.out], model->grads);
            }
            continue;
        }
        const ParamTensors<gradX>& out = gradient_buffer(*model, node.out);
        const ParamTensors<gradX>& left = gradient_buffer(*model, node.left);
        const ParamTensors<gradX>& right = gradient_buffer(*model, node.right);
        for (size_t i = 0; i < count; ++i) {
            const auto [id, layer] = tensors[i];
            ranges.push_back({out.at(id, layer), left.at(id, layer), right.at(id, layer),
                              model->layout.layer_elements(id)});
        }
        ++num_nodes;
    }
    if (num_nodes == 0) return;
    tree_add(ranges.data(), num_nodes, static_cast<int>(count), model->main_stream);
}

// Queues the reduction across ranks of N tensors, from number `first` of gradient_order() on.
template <size_t N>
void reduce_tensors(GPT2* model, size_t first, MultiGpuConfig* multi_gpu) {
    gradX* tensors[N];
    size_t sizes[N];
    for (size_t i = 0; i < N; ++i) {
        const LayerTensor& t = model->gradient_order[first + i];
        tensors[i] = model->grads.at(t.id, t.layer);
        sizes[i] = model->layout.layer_elements(t.id);
    }
    multi_gpu_async_reduce_gradient(tensors, sizes, multi_gpu, model->main_stream);
}

// Whether groups of gradients go out to other ranks as they become final.
bool reduces_by_group(const GradientTarget& target, const MultiGpuConfig& multi_gpu) {
    return target.step_complete && multi_gpu.num_processes > 1;
}

// The gradients of a group are final on this rank for this micro-batch; after its last one they are
// reduced.
void finish_group(GPT2* model, const GradientTarget& target, const TensorGroup& group,
                  MultiGpuConfig* multi_gpu) {
    constexpr size_t kLayer = 12, kOther = 2;
    if (!reduces_by_group(target, *multi_gpu)) return;
    planted_delay("LLMC_DELAY_MAIN_US", model->main_stream);
    add_tree_nodes(model, target.nodes, &model->gradient_order[group.first], group.count);
    if (group.count == kLayer) {
        reduce_tensors<kLayer>(model, group.first, multi_gpu);
    } else {
        reduce_tensors<kOther>(model, group.first, multi_gpu);
    }
}

// attproj's and fcproj's results are added to the residual stream, so that their bias gradients are
// sums of dresidual's rows. The LayerNorm whose backward pass writes these rows gives the sums: ln2
// attproj's, and ln1, or the final LayerNorm, fcproj's of the layer below.

// Backward pass of the MLP: from the gradient of residual3, in acts.dresidual, to that of residual2.
void backward_mlp(GPT2* model, int l, int rows, const GradientTarget& target) {
    const int C = model->config.channels;
    const ParamTensors<floatX>& w = model->params;
    const ParamTensors<gradX>& g = gradient_buffer(*model, target.buffer);
    const bool accumulate = target.accumulate;
    cudaStream_t stream = model->main_stream;
    const Activations a = at_layer(*model, l, rows);
    floatX* dfch = a.logits;

    if (model->recompute >= 1) {
        gelu_forward(a.fch_gelu, a.fch, static_cast<size_t>(rows) * 4 * C, stream);
    }
    gradX* no_bias = nullptr;  // the LayerNorm above has given it
    matmul_backward_weight(g.at(Param::fcprojw, l), no_bias, a.dresidual, a.fch_gelu, a.scratch,
                           rows, 4 * C, C, accumulate, stream);
    gradX* fcb = g.at(Param::fcb, l);
    if (model->gelu_fusion >= 2) {
        matmul_gelu_backward_input(dfch, a.dresidual, w.at(Param::fcprojw, l), a.fch, rows, 4 * C,
                                   C, true, stream);
    } else {
        matmul_backward_input(dfch, a.dresidual, w.at(Param::fcprojw, l), rows, 4 * C, C, stream);
        gelu_backward_bias(dfch, fcb, dfch, a.fch, a.scratch, rows, 4 * C, accumulate, stream);
        fcb = nullptr;  // done
    }
    if (model->recompute >= 2) {
        layernorm_forward(a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, w.at(Param::ln2w, l),
                          w.at(Param::ln2b, l), rows, C, stream);
    }
    matmul_backward_weight(g.at(Param::fcw, l), fcb, dfch, a.ln2, a.scratch, rows, C, 4 * C,
                           accumulate, stream);
    matmul_backward_input(a.projection, dfch, w.at(Param::fcw, l), rows, C, 4 * C, stream);
    layernorm_backward(a.dresidual, g.at(Param::ln2w, l), g.at(Param::ln2b, l),
                       g.at(Param::attprojb, l), a.projection, a.residual2, w.at(Param::ln2w, l),
                       a.ln2_mean, a.ln2_rstd, a.scratch, rows, C, true, accumulate, stream);
}

// Backward pass of attention: from the gradient of residual2 to that of the layer's input.
void backward_attention(GPT2* model, int l, int B, int T, const GradientTarget& target) {
    const int rows = B * T, C = model->config.channels;
    const ParamTensors<floatX>& w = model->params;
    const ParamTensors<gradX>& g = gradient_buffer(*model, target.buffer);
    const bool accumulate = target.accumulate;
    cudaStream_t stream = model->main_stream;
    const Activations a = at_layer(*model, l, rows);
    const floatX* residual = residual_into(*model, l, rows);
    floatX* dqkv = a.logits;

    gradX* no_bias = nullptr;  // ln2 has given it
    matmul_backward_weight(g.at(Param::attprojw, l), no_bias, a.dresidual, a.atty, a.scratch, rows,
                           C, C, accumulate, stream);
    matmul_backward_input(a.projection, a.dresidual, w.at(Param::attprojw, l), rows, C, C, stream);
    attention_backward(dqkv, a.projection, a.qkv, a.atty, a.att_lse, a.attention_scratch, B, T, C,
                       model->config.num_heads, stream);
    if (model->recompute >= 2) {
        layernorm_forward(a.ln1, a.ln1_mean, a.ln1_rstd, residual, w.at(Param::ln1w, l),
                          w.at(Param::ln1b, l), rows, C, stream);
    }
    matmul_backward_weight(g.at(Param::qkvw, l), g.at(Param::qkvb, l), dqkv, a.ln1, a.scratch, rows,
                           C, 3 * C, accumulate, stream);
    matmul_backward_input(a.projection, dqkv, w.at(Param::qkvw, l), rows, C, 3 * C, stream);
    gradX* fcprojb_below = l > 0 ? g.at(Param::fcprojb, l - 1) : nullptr;
    layernorm_backward(a.dresidual, g.at(Param::ln1w, l), g.at(Param::ln1b, l), fcprojb_below,
                       a.projection, residual, w.at(Param::ln1w, l), a.ln1_mean, a.ln1_rstd,
                       a.scratch, rows, C, true, accumulate, stream);
}

}  // namespace

void gpt2_backward_and_reduce(GPT2* model, const MicroBatch& batch, const GradientTarget& target,
                              MultiGpuConfig* multi_gpu) {
    const ProfileRange phase("backward");
    const ReductionPlan& plan = model->plan;
    const int B = model->batch, T = model->sequence, rows = B * T;
    const int C = model->config.channels, Vp = model->config.padded_vocab_size;
    if (target.from_spare) copy_gradients(model, model->grads, model->spares[0]);
    const ParamTensors<gradX>& g = gradient_buffer(*model, target.buffer);
    const ParamTensors<floatX>& w = model->params;
    Activations& a = model->acts;
    cudaStream_t stream = model->main_stream;

    // Summed over the step, gradients must come out as the mean over its d tokens; on the plain path
    // ncclAvg divides by N, so only this rank's share is divided here.
    int summed = plan.canonical ? plan.num_micro_batches : plan.micro_per_rank();
    if (planted_fault() == Fault::divided_twice) summed *= plan.num_processes;
    const float dloss = 1.0f / (static_cast<float>(rows) * static_cast<float>(summed));
    gpt2_logits(model, 0, rows);
    fused_classifier(a.logits, a.losses, batch.targets, dloss, rows, model->config.vocab_size, Vp,
                     true, stream);
    mean_loss(model->micro_loss, a.losses, rows, stream);

    gradX* no_bias = nullptr;
    matmul_backward_weight(g.at(Param::wte), no_bias, a.logits, a.lnf, a.scratch, rows, C, Vp,
                           target.accumulate, stream);
    matmul_backward_input(a.projection, a.logits, w.at(Param::wte), rows, C, Vp, stream);
    const int layers = model->config.num_layers;
    layernorm_backward(a.dresidual, g.at(Param::lnfw), g.at(Param::lnfb),
                       g.at(Param::fcprojb, layers - 1), a.projection,
                       residual_into(*model, layers, rows), w.at(Param::lnfw), a.lnf_mean,
                       a.lnf_rstd, a.scratch, rows, C, false, target.accumulate, stream);
    finish_group(model, target, model->groups.front(), multi_gpu);
    for (int l = layers - 1; l >= 0; --l) {
        backward_mlp(model, l, rows, target);
        backward_attention(model, l, B, T, target);
        finish_group(model, target, model->groups[layers - l], multi_gpu);
    }
    encoder_backward(g.at(Param::wte), g.at(Param::wpe), a.dresidual, batch.inputs, batch.order,
                     a.scratch, B, T, C, target.accumulate, stream);
    finish_group(model, target, model->groups.back(), multi_gpu);

    if (!reduces_by_group(target, *multi_gpu)) {
        add_tree_nodes(model, target.nodes, model->memory_order.data(), model->memory_order.size());
    }
}

void gpt2_keep_loss(GPT2* model, int local, const MultiGpuConfig& multi_gpu) {
    const int index = multi_gpu.process_rank * model->plan.micro_per_rank() + local;
    cuda_check(cudaMemcpyAsync(model->own_loss(index), model->micro_loss, sizeof(double),
                               cudaMemcpyDeviceToDevice, model->main_stream));
}

namespace {

// AdamW of one update group, and the gathering of what it has made.
void update_group(GPT2* model, size_t number, const StepInputs* inputs,
                  const MultiGpuConfig& multi_gpu) {
    const TensorGroup& group = model->update_groups[number];
    planted_delay("LLMC_DELAY_MAIN_US", model->main_stream);
    adamw_update(model->adamw_segments + group.first, static_cast<int>(group.count),
                 group.max_count, model->adamw, inputs, model->step_state, model->main_stream);
    std::vector<floatX*> tensors;
    std::vector<size_t> sizes;
    for (size_t i = group.first; i < group.first + group.count; ++i) {
        const LayerTensor& t = model->update_order[i];
        tensors.push_back(model->params.at(t.id, t.layer));
        sizes.push_back(model->layout.layer_elements(t.id));
    }
    multi_gpu_gather_weights(tensors.data(), sizes.data(), tensors.size(), static_cast<int>(number),
                             model->gathered[number], &multi_gpu, model->main_stream);
}

}  // namespace

void gpt2_update(GPT2* model, const StepInputs* inputs, MultiGpuConfig* multi_gpu) {
    const ProfileRange phase("update");
    cudaStream_t stream = model->main_stream;
    multi_gpu_finish_reduction(multi_gpu, stream);
    global_norm_chunks(model->own_chunk_sums(), model->norm_chunks,
                       static_cast<int>(model->num_chunks), model->max_chunk, model->acts.scratch,
                       stream);
    cuda_check(cudaMemcpyAsync(model->own_stop(), model->host_stop, sizeof(double),
                               cudaMemcpyHostToDevice, stream));
    multi_gpu_sum_doubles(model->step_sums, model->own_sums, model->num_sums, multi_gpu, stream);
    decide_step(model->step_state, model->micro_losses(), model->plan.num_micro_batches,
                model->chunk_sums(), model->num_chunks, model->rules, stream);
    // The host learns of the decision beside AdamW, which does not wait for these copies.
    cuda_check(cudaEventRecord(model->decided, stream));
    cuda_check(cudaStreamWaitEvent(model->copy_stream, model->decided, 0));
    cuda_check(cudaMemcpyAsync(model->host_state, model->step_state, sizeof(StepState),
                               cudaMemcpyDeviceToHost, model->copy_stream));
    cuda_check(cudaMemcpyAsync(model->host_stop + 1, model->stop(), sizeof(double),
                               cudaMemcpyDeviceToHost, model->copy_stream));
    cuda_check(cudaEventRecord(model->decided, model->copy_stream));
    planted_delay("LLMC_DELAY_UPDATE_US", stream);
    if (model->gathered.empty()) {
        adamw_update(model->adamw_segments, static_cast<int>(model->num_segments),
                     model->max_segment, model->adamw, inputs, model->step_state, stream);
        return;
    }
    for (size_t number = 0; number < model->update_groups.size(); ++number) {
        update_group(model, number, inputs, *multi_gpu);
    }
}

#ifndef LLMC_NO_MAIN  // tests link the functions above with a main of their own

// ------------------------------------------------------------------------------------------------
// A run (llmc/run.h): evaluation, training, and the program around them

namespace {

// Whether a rank has been asked to stop; every rank calls this, and gets the same answer.
bool any_stop_requested(Run& run) {
    const float asked = stop_requested() != 0 ? 1.0f : 0.0f;
    run.stopping = run.stopping || multi_gpu_cpu_float_sum(asked, &run.multi_gpu) > 0.0f;
    return run.stopping;
}

// Whether to stop now, as all ranks know it: what one of them has been told since the step's end or the
// last evaluation counts at the next.
bool is_stopping(const Run& run) {
    return run.stopping || (run.multi_gpu.num_processes == 1 && stop_requested() != 0);
}

// ---- evaluation ----

// Mean loss of the validation micro-batches, added up in their order, whatever the number of ranks
// that share them; nothing when asked to stop.
std::optional<double> validate(Run& run) {
    const int B = run.options.batch_size, T = run.options.seq_len, count = run.val_batches();
    const int n = run.multi_gpu.num_processes, rank = run.multi_gpu.process_rank;
    GPT2* model = &run.model;
    for (int j = rank; j < count && !stop_requested(); j += n) {
        const MicroBatch batch = run.batch_upload.put(model->main_stream, [&](int* in, int* out) {
            run.val_data->read_validation_micro_batch(j, B, in, out);
        });
        gpt2_forward(model, batch.inputs, B, T);
        gpt2_loss(model, batch, B, T, run.val_losses + j / n);
    }
    const int each = (count + n - 1) / n;  // the last ranks may have one less
    std::vector<double> own(each);
    multi_gpu_drain(&run.multi_gpu, model->main_stream);
    copy_to_host(own.data(), run.val_losses, own.size(), model->main_stream);
    const std::vector<double> losses =
        multi_gpu_all_gather_host(run.multi_gpu, own.data(), own.size(), "validation losses");
    if (any_stop_requested(run)) return std::nullopt;
    double sum = 0.0;
    for (int j = 0; j < count; ++j) sum += losses[j % n * each + j / n];
    return sum / count;
}

// Number of HellaSwag examples answered right; nothing when asked to stop.
std::optional<int> evaluate_hellaswag(Run& run) {
    const int B = run.options.batch_size, T = run.options.seq_len;
    GPT2* model = &run.model;
    std::vector<float> losses(static_cast<size_t>(B) * T);
    int correct = 0;
    const int n = run.multi_gpu.num_processes;
    for (int i = run.multi_gpu.process_rank; i < run.hellaswag->num_batches(); i += n) {
        if (stop_requested()) break;
        const MicroBatch batch = run.batch_upload.put(
            model->main_stream, [&](int* in, int* out) { run.hellaswag->read_batch(i, in, out); });
        gpt2_forward(model, batch.inputs, B, T);
        gpt2_token_losses(model, batch, B, T);
        multi_gpu_drain(&run.multi_gpu, model->main_stream);
        copy_to_host(losses.data(), model->acts.losses, losses.size(), model->main_stream);
        correct += run.hellaswag->count_correct(i, losses.data());
    }
    // Exact: there are fewer examples than 2^24.
    correct =
        static_cast<int>(multi_gpu_cpu_float_sum(static_cast<float>(correct), &run.multi_gpu));
    if (any_stop_requested(run)) return std::nullopt;
    return correct;
}

// Text that starts at the end-of-text token, by full forward passes over the last T tokens.
std::vector<int> generate(Run& run, int step) {
    GPT2* model = &run.model;
    const int T = run.options.seq_len, V = model->config.vocab_size;
    std::vector<int> tokens = {run.tokenizer ? run.tokenizer->end_of_text() : V - 1};
    std::vector<floatX> row(model->config.padded_vocab_size);
    std::vector<float> logits(row.size());
    for (int i = 0; i < run.options.sample_tokens && !stop_requested(); ++i) {
        const int used = std::min<int>(static_cast<int>(tokens.size()), T);
        const int padded = padded_sample_length(used, T);
        const MicroBatch batch = run.batch_upload.put(model->main_stream, [&](int* in, int*) {
            std::fill_n(in, padded, 0);
            std::copy(tokens.end() - used, tokens.end(), in);
        });
        gpt2_forward(model, batch.inputs, 1, padded);
        gpt2_logits(model, used - 1, 1);
        multi_gpu_drain(&run.multi_gpu, model->main_stream);
        copy_to_host(row.data(), model->acts.logits, row.size(), model->main_stream);
        for (size_t v = 0; v < row.size(); ++v) logits[v] = to_float(row[v]);
        tokens.push_back(sample_token(logits.data(), V, run.options.seed,
                                      static_cast<uint32_t>(step), static_cast<uint64_t>(i)));
    }
    return tokens;
}

void print_sample(Run& run, int step) {
    multi_gpu_busy_with(&run.multi_gpu, "sampling");
    std::vector<int> tokens;
    try {
        tokens = generate(run, step);
    } catch (const NothingToSample& error) {  // training itself skips steps of NaN, and goes on
        print0(run, "%s\n", error.what());
        return;
    }
    if (stop_requested()) return;
    print0(run, "generating:\n---\n");
    if (run.tokenizer) {
        print0(run, "%s", run.tokenizer->decode(tokens.data() + 1, tokens.size() - 1).c_str());
    } else {
        for (size_t i = 1; i < tokens.size(); ++i) print0(run, "%d ", tokens[i]);
    }
    print0(run, "\n---\n");
}

// What comes before a step and is no part of training's time.
struct Pause {
    bool validation, hellaswag, sample, checkpoint;

    bool any() const { return validation || hellaswag || sample || checkpoint; }
};

// Whether there is a checkpoint to write, and a folder for it.
bool can_save(const Run& run, int step) {
    return !run.options.output_dir.empty() && step > run.first_step;
}

Pause pause_before(const Run& run, int step) {
    const Options& options = run.options;
    const auto is_due = [&](int every) {  // at the end, too
        return every > 0 && (step % every == 0 || step >= run.num_steps);
    };
    const bool evaluation = is_due(options.val_every);
    return {run.val_data && evaluation, run.hellaswag && evaluation,
            step > 0 && is_due(options.sample_every),
            can_save(run, step) && is_due(options.checkpoint_every)};
}

// Validation, HellaSwag and a sample, where due; cut short when asked to stop.
void evaluate(Run& run, int step, const Pause& due) {
    if (due.validation) {
        const std::optional<double> loss = validate(run);
        if (!loss) return;
        print0(run, "val loss %.6f\n", *loss);
        run.log.log_validation(step, *loss);
    }
    if (due.hellaswag) {
        const std::optional<int> correct = evaluate_hellaswag(run);
        if (!correct) return;
        const int all = run.hellaswag->num_examples();
        const double accuracy = static_cast<double>(*correct) / all;
        print0(run, "HellaSwag: %d/%d = %f\n", *correct, all, accuracy);
        run.log.log_eval(step, accuracy);
    }
    if (due.sample && run.is_main()) print_sample(run, step);
}

// ---- training ----

void save(Run& run, int step) {
    const Options& options = run.options;
    const StateHeader header =
        make_state_header(run.model, options, run.batch.total_tokens, run.train_data->data_hash());
    multi_gpu_drain(&run.multi_gpu, run.model.main_stream);
    print0(run, "writing checkpoint of step %d to %s\n", step, options.output_dir.c_str());
    multi_gpu_busy_with(&run.multi_gpu, "writing a checkpoint");
    gpt2_save_checkpoint(&run.model, run.multi_gpu, header, options.output_dir, step);
    multi_gpu_together(run.multi_gpu, [&] {
        if (!run.is_main()) return;
        prune_checkpoints(options.output_dir, options.checkpoints_kept,
                          options.major_checkpoint_every);
    });
}

// Forward and backward pass of micro-batch `local`, as a graph but for what NCCL has a part in.
void micro_step(Run& run, int local) {
    GPT2* model = &run.model;
    run.step_upload.take(local, model->main_stream);
    const MicroBatch batch = run.step_upload.at_hand();
    const GradientTarget of_this = gradient_target(model->plan, local);
    MultiGpuConfig* const multi_gpu = &run.multi_gpu;
    // Beside the target all is the same in every micro-step.
    run.micro_steps.run(of_this, model->main_stream, [=](const GradientTarget& target) {
        gpt2_forward(model, batch.inputs, model->batch, model->sequence);
        if (!reduces_by_group(target, *multi_gpu)) {
            gpt2_backward_and_reduce(model, batch, target, multi_gpu);
        }
    });
    if (reduces_by_group(of_this, *multi_gpu)) {
        gpt2_backward_and_reduce(model, batch, of_this, multi_gpu);
    }
    gpt2_keep_loss(model, local, run.multi_gpu);
}

void train_step(Run& run, int step) {
    GPT2* model = &run.model;
    multi_gpu_begin_step(&run.multi_gpu, step + 1);
#ifdef LLMC_TEST_SWITCHES
    if (junk_between_steps()) gpt2_spread_junk(model, run.multi_gpu);
#endif
    const PreparedStep& prepared = run.pipeline->acquire(step);
    const StepInputs* inputs =
        run.step_upload.put(prepared, step, model->copy_stream, model->main_stream);
    for (int local = 0; local < model->plan.micro_per_rank(); ++local) micro_step(run, local);
    model->host_stop[0] = stop_requested() != 0 ? 1.0 : 0.0;
    gpt2_update(model, inputs, &run.multi_gpu);
    planted_host_delay();
    multi_gpu_wait_for(model->decided, &run.multi_gpu);
    run.pipeline->release();
    run.stopping = run.stopping || model->host_stop[1] > 0.0;
}

std::string z_text(double z, double rule) {
    return rule > 0.0 && std::isfinite(z) ? format(" (%+.2fz)", z) : "";
}

void report_step(Run& run, int step, double ms, const StepTimer& timer) {
    const StepState& state = *run.model.host_state;
    const Options& options = run.options;
    const float rate = run.schedule.at(step);
    const double tokens_per_second =
        static_cast<double>(run.batch.total_tokens) / (timer.smoothed_ms() / 1000.0);
    const MatmulPrecision precision = sizeof(floatX) == 2        ? MatmulPrecision::bf16
                                      : kHasTf32 && options.tf32 ? MatmulPrecision::tf32
                                                                 : MatmulPrecision::fp32;
    const char* name = precision == MatmulPrecision::bf16   ? "bf16"
                       : precision == MatmulPrecision::tf32 ? "tf32"
                                                            : "fp32";
    const std::string utilisation =
        format_mfu(mfu(flops_per_token(run.model.config, options.seq_len), tokens_per_second,
                       run.multi_gpu.num_processes, run.device, precision));
    const double left = (run.num_steps - step - 1) * timer.smoothed_ms() / 1000.0;
    print0(run,
           "step %4d/%d | loss %.6f%s | norm %.4f%s | lr %.2e | %.2f ms | %s %s MFU | %.0f tok/s"
           " | %s left\n",
           step + 1, run.num_steps, state.loss, z_text(state.loss_z, options.skip_loss_z).c_str(),
           state.norm, z_text(state.norm_z, options.skip_norm_z).c_str(), rate, ms,
           utilisation.c_str(), name, tokens_per_second, duration_text(left).c_str());
    if (state.skip != SkipReason::none) {
        print0(run, "step %d: update skipped: %s\n", step + 1, skip_reason_text(state.skip));
    }
    run.log.log_train(step, state.loss, rate, state.norm);
    if (options.log_gpu_every > 0 && (step + 1) % options.log_gpu_every == 0) {
        print0(run, "step %d: %s\n", step + 1, device_status().c_str());
    }
}

unsigned long long bits_of(double value) {
    unsigned long long bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

// Throws Error on every rank when the weights are not the same bits on all.
void check_ranks(Run& run, int step) {
    multi_gpu_drain(&run.multi_gpu, run.model.main_stream);
    const uint64_t own =
        hash_of_tensors(run.model.params, run.multi_gpu, run.model.layout, run.model.main_stream);
    const std::string difference = difference_of_weights(run.multi_gpu, own);
    if (!difference.empty()) {
        throw AgreedError(format("--check-ranks: after step %d ", step) + difference);
    }
    std::string bits;
    if (step > run.first_step) {
        const StepState& state = *run.model.host_state;
        bits = format(", bits loss %016llx norm %016llx", bits_of(state.loss), bits_of(state.norm));
    }
    print0(run, "weights of step %d: %016llx on all ranks%s\n", step,
           static_cast<unsigned long long>(own), bits.c_str());
}

void print_hashes(Run& run) {
    const GPT2& model = run.model;
    multi_gpu_drain(&run.multi_gpu, model.main_stream);
    const auto hash = [&](const auto& tensors) -> unsigned long long {
        if (tensors.base == nullptr) return 0;
        const uint64_t own =
            hash_of_tensors(tensors, run.multi_gpu, model.layout, model.main_stream);
        const bool whole = tensors.layout == &model.layout || run.multi_gpu.zero_stage == 0;
        return whole ? own : hash_of_all_shards(own, run.multi_gpu);
    };
    StepState state;
    copy_to_host(&state, model.step_state, 1, model.main_stream);
    print0(run, "hash %016llx\n", hash(model.params));
    print0(run, "bits loss %016llx norm %016llx m %016llx v %016llx master %016llx\n",
           bits_of(state.loss), bits_of(state.norm), hash(model.m), hash(model.v),
           hash(model.master));
}

// Ends a run that a signal asked to stop; returns the exit status, which is the same on every rank.
int stop_early(Run& run, int step) {
    const int own = stop_requested();
    const std::vector<int> signals =
        multi_gpu_all_gather_host(run.multi_gpu, &own, 1, "exchange of signals");
    const auto first = std::find_if(signals.begin(), signals.end(), [](int s) { return s != 0; });
    std::string name = stop_signal_name(*first);
    if (signals.size() > 1) name += format(" to rank %td", first - signals.begin());
    if (run.options.output_dir.empty()) {
        print0(run, "%s: stopped after %d steps; nothing is saved without -o\n", name.c_str(),
               step);
        return 128 + *first;
    }
    if (can_save(run, step)) save(run, step);
    const char* next = step > 0 ? "-y 1 goes on from here" : "nothing to save yet";
    print0(run, "%s: stopped after %d steps; %s\n", name.c_str(), step, next);
    return 0;
}

int train(Run& run) {
    const Options& options = run.options;
    InputPipelineOptions input;
    input.B = options.batch_size;
    input.micro_batches_per_step = run.model.plan.num_micro_batches;
    input.micro_batches = run.model.plan.micro_per_rank();
    input.first_micro_batch = run.multi_gpu.process_rank * input.micro_batches;
    input.first_step = run.first_step;
    input.end_step = run.num_steps;
    input.single_batch = options.overfit_single_batch;
    run.pipeline = std::make_unique<InputPipeline>(*run.train_data, input,
                                                   [&](int step) { return run.schedule.at(step); });

    StepTimer timer;
    bool paused = true;
    for (int step = run.first_step;; ++step) {
        const bool last = step >= run.num_steps;
        const Pause due = pause_before(run, step);
        if (!is_stopping(run)) evaluate(run, step, due);
        const bool stops = is_stopping(run);
        if (stops && !last) return stop_early(run, step);
        // A signal saves, also one that comes in the last step.
        if (due.checkpoint || (stops && can_save(run, step))) save(run, step);
        if (last) break;
        if (paused) timer.restart();
        train_step(run, step);
        // The update runs on under the next step, and counts there; before a pause it counts here.
        const bool ends = step + 1 >= run.num_steps;
        paused = ends || options.check_ranks || pause_before(run, step + 1).any();
        if (paused) multi_gpu_drain(&run.multi_gpu, run.model.main_stream);
        const double ms = timer.lap();
        timer.add(ms);
        report_step(run, step, ms, timer);
        if (options.check_ranks) check_ranks(run, step + 1);
    }
    if (options.hash) print_hashes(run);
    return 0;
}

int set_up_and_train(Run& run) {
    set_up(run);
    if (run.options.dry_run) return 0;
    install_stop_signals();
    start(run);
    if (run.options.check_ranks) check_ranks(run, run.first_step);
    return train(run);
}

// An error that all ranks know of is printed by rank 0 alone. One that this rank alone has seen may find
// the others waiting for it: they are told, and the process ends without waiting for them.
int run_among_ranks(Run& run) {
    int status = 0;
    try {
        status = set_up_and_train(run);
    } catch (const AgreedError& error) {
        // mpirun ends the others when the first is gone: nobody goes before rank 0 has printed.
        std::fflush(stdout);
        if (run.is_main()) {
            std::fprintf(stderr, "%s: %s\n", kProgramName, error.what());
        } else if (!started_by_mpirun()) {  // where output is apart for each rank
            std::fprintf(stderr, "%s: rank %d: ended, rank 0 says why\n", kProgramName,
                         run.multi_gpu.process_rank);
        }
        multi_gpu_barrier(&run.multi_gpu);
        multi_gpu_config_free(&run.multi_gpu);
        return 1;
    } catch (const std::exception& error) {
        if (run.multi_gpu.num_processes > 1) multi_gpu_abandon(run.multi_gpu, error.what());
        throw;
    }
    multi_gpu_config_free(&run.multi_gpu);
    return status;
}

// An error that came before the ranks had met. mpirun gives all of them the same flags, so that all have
// the same error as a rule: rank 0 prints it, ends, and mpirun ends the others, a second later. A rank
// that is still there after three has an error of its own.
[[noreturn]] void fail_unmet(const std::string& error) {
    const int rank = started_by_mpirun() ? std::atoi(std::getenv("OMPI_COMM_WORLD_RANK")) : 0;
    if (rank == 0) throw Error(error);
    std::this_thread::sleep_for(std::chrono::seconds(3));
    const std::string begin = format("rank %d: ", rank);
    throw Error(error.compare(0, begin.size(), begin) == 0 ? error : begin + error);
}

// Prints an error of this rank alone that came before it looked for the others. Where no mpirun ends
// those, they are told, after the user. Returns the exit status.
int fail_before_meeting(const Run& run, const std::string& error) {
    if (started_by_mpirun()) fail_unmet(error);
    std::fprintf(stderr, "%s: %s\n", kProgramName, error.c_str());
    tell_other_ranks(run, ": " + error);
    return 1;
}

// Reads the flags; returns the exit status where the program ends with that.
std::optional<int> read_flags(Run& run, int argc, char** argv) {
    try {
        run.options = parse_options(argc, argv);
        if (run.options.help || run.options.version) {
            answer_instead_of_training(run);
            return 0;
        }
        check_meeting(run);
        return std::nullopt;
    } catch (const std::exception& error) {
        return fail_before_meeting(run, error.what());
    }
}

int run_program(int argc, char** argv) {
    Run run;
    run.command_line.assign(argv, argv + argc);
    try {
        const std::optional<int> status = read_flags(run, argc, argv);
        return status ? *status : run_among_ranks(run);
    } catch (const UnmetError& error) {
        return fail_before_meeting(run, error.what());
    } catch (const std::exception& error) {
        fail_unmet(error.what());
    }
}

}  // namespace

#endif  // LLMC_NO_MAIN

}  // namespace llmc

#ifndef LLMC_NO_MAIN
int main(int argc, char** argv) {
    // Closed standard streams would give their numbers to the first files opened, and take our text.
    for (int fd = 0; fd <= 2; ++fd) {
        if (::fcntl(fd, F_GETFD) == -1) ::open("/dev/null", O_RDWR);
    }
    // A file size limit then is a failed write, with a message, and not the end of the process.
    std::signal(SIGXFSZ, SIG_IGN);
    try {
#ifdef LLMC_CPU
        llmc::cpu::select_openblas_core(argv);
#endif
        const int status = llmc::run_program(argc, argv);
        if (std::fflush(stdout) != 0 || std::ferror(stdout))
            throw llmc::Error("standard output: cannot be written");
        return status;
    } catch (const std::exception& error) {
        std::fflush(stdout);
        std::fprintf(stderr, "%s: %s\n", llmc::kProgramName, error.what());
        return 1;
    }
}
#endif
