// The model as train_gpt2.cu holds it in memory, and the functions of that file. What happens once,
// before the first step (sizes, allocation, initial weights), is in gpt2_setup.h.
//
// Shapes: B batch, T sequence length, C channels, L layers, NH heads, V vocabulary, Vp padded
// vocabulary. "Micro-batch" is B * T tokens.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "llmc/cuda_common.h"
#include "llmc/memory_plan.h"
#include "llmc/params.h"
#include "llmc/precision.h"
#include "llmc/reduction.h"
#include "llmc/step_state.h"
#include "llmc/zero.cuh"

namespace llmc {

// What one micro-batch leaves behind for its backward pass. `-r` 1 keeps no fch_gelu, `-r` 2 no ln1
// and ln2 either: those then hold one layer at a time and are computed again when needed.
struct Activations {
    floatX* encoded;     // (B,T,C)     the residual stream that enters layer 0
    floatX* ln1;         // (L,B,T,C), or (B,T,C)
    float* ln1_mean;     // (L,B,T)
    float* ln1_rstd;     // (L,B,T)
    floatX* qkv;         // (L,B,T,3C)
    floatX* atty;        // (L,B,T,C)   attention's output before its projection
    float* att_lse;      // (L,B,NH,T)  log of the softmax's denominators
    floatX* residual2;   // (L,B,T,C)   the stream after attention
    floatX* ln2;         // (L,B,T,C), or (B,T,C)
    float* ln2_mean;     // (L,B,T)
    float* ln2_rstd;     // (L,B,T)
    floatX* fch;         // (L,B,T,4C)  before GELU
    floatX* fch_gelu;    // (L,B,T,4C), or (B,T,4C)
    floatX* residual3;   // (L,B,T,C)   the stream after the MLP
    floatX* lnf;         // (B,T,C)
    float* lnf_mean;     // (B,T)
    float* lnf_rstd;     // (B,T)
    floatX* logits;      // (B,T,Vp)    later the gradient of the logits, later dfch, dqkv (B,T,4C)
    float* losses;       // (B,T)
    floatX* projection;  // (B,T,C)     forward: a projection's output; backward: a gradient
    floatX* dresidual;   // (B,T,C)     gradient of the residual stream
    unsigned char* scratch;  // of the launchers
    // Of attention's backward pass: in logits, behind dqkv, or scratch.
    unsigned char* attention_scratch;
};

// Tokens of one micro-batch in device memory.
struct MicroBatch {
    const int* inputs;   // (B,T)
    const int* targets;  // (B,T), -1: no loss here
    const int* order;    // (B*T), positions sorted by input token; needed by the backward pass only
};

// One layer of a tensor, or the whole of one that has no layers.
struct LayerTensor {
    Param id;
    size_t layer;
};

// Tensors that are reduced, or updated, together.
struct TensorGroup {
    size_t first;  // in GPT2::gradient_order or update_order
    size_t count;
    size_t max_count;  // largest number of elements among them
};

struct GPT2 {
    ModelConfig config;
    ParamLayout layout;
    ParamLayout state_layout;  // of m, v and master: this rank's shard under ZeRO-1
    int batch = 0;             // B, the largest that the activations hold
    int sequence = 0;          // T, likewise
    int recompute = 1;
    int gelu_fusion = 0;     // 1: GELU in its forward product, 2: in the backward one, too
    int longest_sample = 0;  // tokens that forward passes of B = 1 see at most
    bool use_master = true;
    ReductionPlan plan;
    // As the backward pass finishes them: final LayerNorm, layers L-1 ... 0, embeddings.
    std::vector<LayerTensor> gradient_order;
    std::vector<TensorGroup> groups;
    // As the forward pass reads them: embeddings, layers 0 ... L-1, final LayerNorm.
    std::vector<LayerTensor> update_order;
    std::vector<TensorGroup> update_groups;
    std::vector<LayerTensor> memory_order;  // as they lie in memory
    StepRules rules;
    AdamwOptions adamw;
    float weight_decay = 0.0f;

    MemoryPlan memory;
    ParamTensors<floatX> params;
    ParamTensors<gradX> grads;                // the sum of the step ends up here
    std::vector<ParamTensors<gradX>> spares;  // of the reduction tree, by level
    ParamTensors<float> m, v, master;         // Adam's moments; fp32 weights or null
    Activations acts{};

    // One step's arithmetic that stays on the device.
    StepState* step_state = nullptr;
    // One block of doubles, micro_losses (M), chunk_sums (norm chunks), stop (1): what this rank has
    // found, 0 in the places of others, and the sum of that over all ranks. One buffer at N = 1.
    double* own_sums = nullptr;
    double* step_sums = nullptr;
    size_t num_sums = 0;
    double* micro_loss = nullptr;  // of the micro-batch at hand
    AdamwSegment<floatX, gradX>* adamw_segments = nullptr;
    NormChunk<gradX>* norm_chunks = nullptr;
    size_t num_segments = 0, max_segment = 0;
    size_t num_chunks = 0, max_chunk = 0;

    cudaStream_t main_stream = nullptr;
    cudaStream_t copy_stream = nullptr;
    cudaEvent_t decided = nullptr;    // loss, norm and skip of the step are in host_state
    StepState* host_state = nullptr;  // page-locked
    double* host_stop = nullptr;  // likewise: [0] this rank is asked to stop, [1] ranks that are
    std::vector<cudaEvent_t>
        gathered;  // by update group: its weights are whole again (ZeRO-1, N > 1)

    double* own_loss(int micro_batch) const { return own_sums + micro_batch; }
    double* own_chunk_sums() const { return own_sums + plan.num_micro_batches; }
    double* own_stop() const { return own_sums + num_sums - 1; }
    const double* micro_losses() const { return step_sums; }
    const double* chunk_sums() const { return step_sums + plan.num_micro_batches; }
    const double* stop() const { return step_sums + num_sums - 1; }
};

// Forward pass of (B,T) tokens up to the final LayerNorm (acts.lnf).
void gpt2_forward(GPT2* model, const int* inputs, int B, int T);
// acts.logits (rows,Vp) of `rows` positions of acts.lnf from position `first` on.
void gpt2_logits(GPT2* model, int first, int rows);
// Losses of the micro-batch that gpt2_forward has just seen, into acts.losses (B,T); the logits are
// lost.
void gpt2_token_losses(GPT2* model, const MicroBatch& batch, int B, int T);
// Their mean, into *loss.
void gpt2_loss(GPT2* model, const MicroBatch& batch, int B, int T, double* loss);

// Backward pass of the micro-batch whose forward pass came just before, and its loss, into micro_loss.
// Adds up gradients as `target` says and, as each layer's become final, reduces them.
void gpt2_backward_and_reduce(GPT2* model, const MicroBatch& batch, const GradientTarget& target,
                              MultiGpuConfig* multi_gpu);
// Puts micro_loss where the step finds it: it is the loss of micro-batch `local` (0 ... A-1) of this rank.
void gpt2_keep_loss(GPT2* model, int local, const MultiGpuConfig& multi_gpu);
// Norm, decision and AdamW of one step, of this rank's shards under ZeRO-1, whose weights are then
// gathered while the next forward pass starts. `inputs` is in device memory.
void gpt2_update(GPT2* model, const StepInputs* inputs, MultiGpuConfig* multi_gpu);

}  // namespace llmc
