// The whole surface between train_gpt2.cu and the kernels, on one page.
//
// Each launcher exists twice under one name and one list of arguments: in llmc/*.cuh for the GPU,
// on floatX and gradX, as declared here; and in llmc/cpu/*.h in namespace cpu, as a template on the
// types (T weights and activations, G gradients), which is what the GPU's is tested against. A
// program includes this header and calls llmc::NAME; what that is depends on how it is built:
//
//   the CPU build             the twin in llmc/cpu
//   -DLLMC_KERNELS_APART      declared here, defined in the object of one llmc/kernels_*.cu: the program
//                             itself is plain C++, as the trainer is
//   neither                   declared here and defined, inline, in the .cuh files that this header
//                             includes at its end: one translation unit for nvcc, as make tune,
//                             grade_checks and each test in test/gpu are
//
// LLMC_LAUNCHER in front of a declaration is `inline` in the last case and nothing in the second
// (cuda_common.h). A new launcher is declared here with its shapes, defined in a .cuh that one
// kernels_*.cu includes, and has its twin in llmc/cpu.
//
// A launcher checks its shapes, queues its work on `stream` and returns; a failed launch or a shape
// it cannot do throws llmc::Error. Pointers are device memory; a buffer whose size is not said
// below has the size of its shape. A parameter `scratch` is device memory of at least
// NAME_scratch_bytes(...) bytes that the launcher may leave in any state; launches on one stream may
// share it. Statistics are accum_t<T>: float, or double where T is double.
//
//   B batch, T sequence length, C channels, NH heads, HS = C / NH, V vocabulary, Vp padded
//   vocabulary, rows = B * T, OC output channels
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "llmc/cuda_common.h"
#include "llmc/memory_plan.h"
#include "llmc/precision.h"
#include "llmc/step_state.h"

#ifdef LLMC_CPU
#include "llmc/cpu/adamw.h"
#include "llmc/cpu/attention.h"
#include "llmc/cpu/bias.h"
#include "llmc/cpu/encoder.h"
#include "llmc/cpu/fused_classifier.h"
#include "llmc/cpu/gelu.h"
#include "llmc/cpu/global_norm.h"
#include "llmc/cpu/layernorm.h"
#include "llmc/cpu/matmul.h"
#include "llmc/cpu/tree.h"
namespace llmc {
using namespace cpu;
}
#else

namespace llmc {

// ---- encoder ----

// out (B,T,C), tokens (B,T), wte (Vp,C), wpe (maxT,C). out = wte[token] + wpe[t], rounded once.
LLMC_LAUNCHER void encoder_forward(floatX* out, const int* tokens, const floatX* wte,
                                   const floatX* wpe, int B, int T, int C, cudaStream_t stream);

// dwte (Vp,C), dwpe (maxT,C), dout (B,T,C), tokens (B,T), order (B*T).
// dwte[token] += the sum of its rows of dout, in ascending order of position: `order` holds the
// positions 0 ... B*T-1 sorted by token, ties ascending (sort_positions_by_token in dataloader.h).
// Always adds to dwte. dwpe[t] = sum over b, overwriting unless `accumulate`; rows >= T and rows of
// wte that no token names are not touched. Sums in fp32, one rounding into the gradient.
LLMC_LAUNCHER void encoder_backward(gradX* dwte, gradX* dwpe, const floatX* dout, const int* tokens,
                                    const int* order, void* scratch, int B, int T, int C,
                                    bool accumulate, cudaStream_t stream);
LLMC_LAUNCHER size_t encoder_backward_scratch_bytes(int B, int T, int C);

// ---- layernorm (Ba, Kiros, Hinton 2016; eps 1e-5) ----

// out and inp (rows,C), mean and rstd (rows), weight and bias (C).
LLMC_LAUNCHER void layernorm_forward(floatX* out, float* mean, float* rstd, const floatX* inp,
                                     const floatX* weight, const floatX* bias, int rows, int C,
                                     cudaStream_t stream);

// residual (rows,C) = a + b, rounded to floatX; the rest reads that rounded value, so that a later
// layernorm_forward on `residual` gives the same bits. residual may be a.
LLMC_LAUNCHER void fused_residual_layernorm_forward(floatX* residual, floatX* out, float* mean,
                                                    float* rstd, const floatX* a, const floatX* b,
                                                    const floatX* weight, const floatX* bias,
                                                    int rows, int C, cudaStream_t stream);

// dinp, dout and inp (rows,C); dweight, dbias and dinp_sum (C), of which dinp_sum may be null.
// dinp is added to (one rounding) when add_to_dinp, else overwritten. dinp_sum is the sum over the
// rows of dinp as stored: the bias gradient of the product whose result dinp is the gradient of.
// dweight, dbias and dinp_sum are summed in fp32 or wider; with `accumulate` the old gradient enters
// the sum before its one rounding, else they are overwritten.
LLMC_LAUNCHER void layernorm_backward(floatX* dinp, gradX* dweight, gradX* dbias, gradX* dinp_sum,
                                      const floatX* dout, const floatX* inp, const floatX* weight,
                                      const float* mean, const float* rstd, void* scratch, int rows,
                                      int C, bool add_to_dinp, bool accumulate,
                                      cudaStream_t stream);
LLMC_LAUNCHER size_t layernorm_backward_scratch_bytes(int rows, int C);

// ---- matmul ----
//
// Products and sums in fp32, one rounding to nearest even; with `accumulate` the old gradient enters
// the sum before that rounding. Only dweight, with `accumulate` on the GPU, may be
// round(old + round(product)), both to gradX and nearest even: the library decides by shape.

// out (rows,OC), inp (rows,C), weight (OC,C), bias (OC) or null.
LLMC_LAUNCHER void matmul_forward(floatX* out, const floatX* inp, const floatX* weight,
                                  const floatX* bias, int rows, int C, int OC, cudaStream_t stream);

// dinp (rows,C), dout (rows,OC), weight (OC,C).
LLMC_LAUNCHER void matmul_backward_input(floatX* dinp, const floatX* dout, const floatX* weight,
                                         int rows, int C, int OC, cudaStream_t stream);

// dweight (OC,C), dbias (OC) or null, dout (rows,OC), inp (rows,C).
LLMC_LAUNCHER void matmul_backward_weight(gradX* dweight, gradX* dbias, const floatX* dout,
                                          const floatX* inp, void* scratch, int rows, int C, int OC,
                                          bool accumulate, cudaStream_t stream);
LLMC_LAUNCHER size_t matmul_backward_weight_scratch_bytes(int rows, int C, int OC);

// pre (rows,OC) as matmul_forward's out, out (rows,OC) = gelu(pre). `fuse` asks, here and in the next
// one, for one product that does both, where the GPU's library has it: GELU and gelu' then meet the
// product before it is rounded. Without, and on the CPU, they meet the rounded one.
LLMC_LAUNCHER void matmul_gelu_forward(floatX* out, floatX* pre, const floatX* inp,
                                       const floatX* weight, const floatX* bias, int rows, int C,
                                       int OC, bool fuse, cudaStream_t stream);

// dinp (rows,C) as matmul_backward_input's, times gelu'(pre). dout (rows,OC), weight (OC,C), pre (rows,C).
LLMC_LAUNCHER void matmul_gelu_backward_input(floatX* dinp, const floatX* dout,
                                              const floatX* weight, const floatX* pre, int rows,
                                              int C, int OC, bool fuse, cudaStream_t stream);

// Not a launch: the level of -ge, 0 to 2, that `asked` comes to for an MLP of OC hidden channels.
LLMC_LAUNCHER int matmul_gelu_fusion(int asked, int rows, int C, int OC);

// Not a launch: who multiplies, in words for the plan.
LLMC_LAUNCHER std::string matmul_backend(int rows, int layers, int C, int padded_vocab,
                                         int gelu_fusion);

// Not launches: what the library behind the products may do, and the memory it works in. They do
// nothing on the CPU.
LLMC_LAUNCHER void matmul_allow_tf32(bool allow);
LLMC_LAUNCHER void matmul_plan_workspace(MemoryPlan* memory);
LLMC_LAUNCHER void matmul_forget_workspace();

// Not a launch, and with CUDA alone: names and versions of the library and of the table of measured
// algorithms.
LLMC_LAUNCHER std::vector<std::pair<std::string, std::string> > matmul_versions();

// ---- attention (causal, scale 1/sqrt(HS); qkv holds q, k, v of all heads in this order: (B,T,3,NH,HS)) ----

// out (B,T,C), lse (B,NH,T), qkv (B,T,3C). lse = log of the sum of exp of a row's scaled scores: what
// the backward pass needs instead of the (T,T) matrix, which never exists (Dao et al. 2022, section
// 3.1 and appendix B).
LLMC_LAUNCHER void attention_forward(floatX* out, float* lse, const floatX* qkv, void* scratch,
                                     int B, int T, int C, int NH, cudaStream_t stream);
LLMC_LAUNCHER size_t attention_forward_scratch_bytes(int B, int T, int C, int NH);

// dqkv (B,T,3C), dout (B,T,C).
LLMC_LAUNCHER void attention_backward(floatX* dqkv, const floatX* dout, const floatX* qkv,
                                      const floatX* out, const float* lse, void* scratch, int B,
                                      int T, int C, int NH, cudaStream_t stream);
LLMC_LAUNCHER size_t attention_backward_scratch_bytes(int B, int T, int C, int NH);

// Not a launch: whether attention_forward and attention_backward may be captured in a CUDA graph.
LLMC_LAUNCHER bool attention_fits_graphs(int T, int head_size);

// Not a launch: whose kernels these two are for a shape, such as "cuDNN 9.14, backward own for Hopper".
LLMC_LAUNCHER std::string attention_backend(int T, int head_size);

// ---- gelu (the tanh form, Hendrycks and Gimpel 2016, section 2) ----

LLMC_LAUNCHER void gelu_forward(floatX* out, const floatX* inp, size_t count, cudaStream_t stream);
// dinp may be dout.
LLMC_LAUNCHER void gelu_backward(floatX* dinp, const floatX* dout, const floatX* inp, size_t count,
                                 cudaStream_t stream);

// ---- bias gradients; scratch of bias_scratch_bytes(rows, OC) ----

// dbias (OC) = the sum over the rows of dout (rows,OC), in fp32; with `accumulate` the old gradient
// enters it.
LLMC_LAUNCHER void bias_backward(gradX* dbias, const floatX* dout, void* scratch, int rows, int OC,
                                 bool accumulate, cudaStream_t stream);

// gelu_backward on (rows,OC), and bias_backward of what it has stored, in one pass: the same bits.
LLMC_LAUNCHER void gelu_backward_bias(floatX* dinp, gradX* dbias, const floatX* dout,
                                      const floatX* inp, void* scratch, int rows, int OC,
                                      bool accumulate, cudaStream_t stream);
LLMC_LAUNCHER size_t bias_scratch_bytes(int rows, int OC);

// ---- fused classifier ----

// logits (rows,Vp), losses (rows), targets (rows).
// losses[row] = -log softmax(logits[row, 0:V])[target]; a target of -1 gives loss 0 and zero dlogits.
// With write_dlogits, logits become (softmax - onehot) * dloss, and columns V ... Vp-1 become 0
// whatever they held (NaN included); without, logits are not written.
LLMC_LAUNCHER void fused_classifier(floatX* logits, float* losses, const int* targets, float dloss,
                                    int rows, int V, int Vp, bool write_dlogits,
                                    cudaStream_t stream);

// out (1) = the average of losses (rows) in double, in an order that `rows` alone decides; rows
// without a target count as 0.
LLMC_LAUNCHER void mean_loss(double* out, const float* losses, int rows, cudaStream_t stream);

// ---- update ----

// out = round(a + b), each range; nodes of the reduction tree, one after the other. out may be a or b,
// and a node may read what an earlier one left in the same range. `ranges` (num_nodes, num_ranges) in
// host memory, which may go once the launcher returns.
LLMC_LAUNCHER void tree_add(const TreeRange<gradX>* ranges, int num_nodes, int num_ranges,
                            cudaStream_t stream);

// to = from, bit for bit, each range. The table in host memory, likewise.
LLMC_LAUNCHER void copy_list(const CopyRange<gradX>* ranges, int num_ranges, cudaStream_t stream);

// sums[i] = sum of squares of chunk i in double, split by the chunk's size alone. sums and chunks
// (num_chunks).
LLMC_LAUNCHER void global_norm_chunks(double* sums, const NormChunk<gradX>* chunks, int num_chunks,
                                      size_t max_count, void* scratch, cudaStream_t stream);
LLMC_LAUNCHER size_t global_norm_chunks_scratch_bytes(int num_chunks, size_t max_count);

// losses (num_losses), sums (num_sums). Averages the losses and adds the sums, each in index order in
// double; sets loss, norm, z-scores, grad_scale and skip in *state, and, unless the step is skipped,
// counts the update and multiplies the beta powers on. Values that are not finite do not enter the
// outlier windows.
LLMC_LAUNCHER void decide_step(StepState* state, const double* losses, int num_losses,
                               const double* sums, size_t num_sums, const StepRules& rules,
                               cudaStream_t stream);

// AdamW (Loshchilov and Hutter 2019, algorithm 2) on gradient * grad_scale, with learning rate and
// step from *inputs; nothing when state->skip is set. The new value is computed in fp32 from master,
// or from param where master is null; stored to master; and to param rounded stochastically by
// (seed, step, element index) when floatX is bf16.
LLMC_LAUNCHER void adamw_update(const AdamwSegment<floatX, gradX>* segments, int num_segments,
                                size_t max_count, const AdamwOptions& options,
                                const StepInputs* inputs, const StepState* state,
                                cudaStream_t stream);

// ---- the GPU itself, with CUDA alone ----

// Not a launch: whether this program has code for the current GPU.
LLMC_LAUNCHER bool device_has_code();

#ifdef LLMC_TEST_SWITCHES
// `stream` stands still for so long.
LLMC_LAUNCHER void delay_stream(int microseconds, cudaStream_t stream);
#endif

}  // namespace llmc

#ifndef LLMC_KERNELS_APART
#include "llmc/adamw.cuh"
#include "llmc/attention_backward.cuh"
#include "llmc/attention_forward.cuh"
#include "llmc/bias.cuh"
#include "llmc/device_code.cuh"
#include "llmc/encoder.cuh"
#include "llmc/fused_classifier.cuh"
#include "llmc/gelu.cuh"
#include "llmc/global_norm.cuh"
#include "llmc/layernorm.cuh"
#include "llmc/matmul.cuh"
#include "llmc/tree.cuh"
#endif

#endif
