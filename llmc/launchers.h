// The whole surface between train_gpt2.cu and the kernels, on one page.
//
// Each launcher exists twice under one name and one list of arguments: in llmc/*.cuh for the GPU,
// on floatX and gradX, and in llmc/cpu/*.h in namespace cpu, as a template on the types (T weights
// and activations, G gradients), which is what the GPU's is tested against. This header makes one
// of the two visible as llmc::NAME.
//
// A launcher checks its shapes, queues its work on `stream` and returns; a failed launch or a shape
// it cannot do throws llmc::Error. Pointers are device memory; a buffer whose size is not said
// below has the size of its shape. A parameter `scratch` is device memory of at least
// NAME_scratch_bytes(…) bytes that the launcher may leave in any state; launches on one stream may
// share it. Statistics are accum_t<T>: float, or double where T is double.
//
//   B batch, T sequence length, C channels, NH heads, HS = C / NH, V vocabulary, Vp padded
//   vocabulary, rows = B * T, OC output channels
//
// encoder
//   encoder_forward(out (B,T,C), tokens int (B,T), wte (Vp,C), wpe (maxT,C), B, T, C, stream)
//       out = wte[token] + wpe[t], rounded once.
//   encoder_backward(dwte (Vp,C), dwpe (maxT,C), dout (B,T,C), tokens (B,T), order int (B*T),
//                    scratch, B, T, C, accumulate, stream)
//       dwte[token] += the sum of its rows of dout, in ascending order of position: `order` holds
//       the positions 0 … B*T-1 sorted by token, ties ascending (sort_positions_by_token in
//       dataloader.h). Always adds to dwte. dwpe[t] = sum over b, overwriting unless `accumulate`;
//       rows >= T and rows of wte that no token names are not touched. Sums in fp32, one rounding
//       into the gradient.
//
// layernorm (Ba, Kiros, Hinton 2016; eps 1e-5)
//   layernorm_forward(out (rows,C), mean (rows), rstd (rows), inp (rows,C), weight (C), bias (C),
//                     rows, C, stream)
//   fused_residual_layernorm_forward(residual (rows,C), out, mean, rstd, a (rows,C), b (rows,C),
//                                    weight, bias, rows, C, stream)
//       residual = a + b, rounded to T; the rest reads that rounded value, so that a later
//       layernorm_forward on `residual` gives the same bits. residual may be a.
//   layernorm_backward(dinp (rows,C), dweight (C), dbias (C), dinp_sum (C) or null, dout (rows,C),
//                      inp (rows,C), weight, mean, rstd, scratch, rows, C, add_to_dinp, accumulate,
//                      stream)
//       dinp is added to (one rounding) when add_to_dinp, else overwritten. dinp_sum is the sum over
//       the rows of dinp as stored: the bias gradient of the product whose result dinp is the
//       gradient of. dweight, dbias and dinp_sum are summed in fp32 or wider; with `accumulate` the
//       old gradient enters the sum before its one rounding, else they are overwritten.
//
// matmul
//   matmul_forward(out (rows,OC), inp (rows,C), weight (OC,C), bias (OC) or null,
//                  rows, C, OC, stream)
//   matmul_backward_input(dinp (rows,C), dout (rows,OC), weight (OC,C), rows, C, OC, stream)
//   matmul_backward_weight(dweight (OC,C), dbias (OC) or null, dout (rows,OC), inp (rows,C),
//                          scratch, rows, C, OC, accumulate, stream)
//       Products and sums in fp32, one rounding to nearest even; with `accumulate` the old gradient
//       enters the sum before that rounding. Only dweight, with `accumulate` on the GPU, may be
//       round(old + round(product)), both to G and nearest even: the library decides by shape.
//   matmul_gelu_forward(out (rows,OC), pre (rows,OC), inp (rows,C), weight (OC,C), bias or null,
//                       rows, C, OC, fuse, stream)
//       pre as matmul_forward's out, out = gelu(pre).
//   matmul_gelu_backward_input(dinp (rows,C), dout (rows,OC), weight (OC,C), pre (rows,C),
//                              rows, C, OC, fuse, stream)
//       dinp as matmul_backward_input's, times gelu'(pre).
//       `fuse` asks for one product that does both, where the GPU's library has it: GELU and gelu'
//       then meet the product before it is rounded. Without, and on the CPU, they meet the rounded
//       one.
//   matmul_gelu_fusion(asked, rows, C, OC)
//       Not a launch: the level of -ge, 0 to 2, that `asked` comes to for an MLP of OC hidden channels.
//   matmul_backend(rows, layers, C, Vp, gelu_fusion)
//       Not a launch: who multiplies, in words for the plan.
//   matmul_allow_tf32(allow), matmul_plan_workspace(memory), matmul_forget_workspace()
//       Not launches: what the library behind the products may do, and the memory it works in. They
//       do nothing on the CPU.
//
// attention (causal, scale 1/sqrt(HS); qkv holds q, k, v of all heads in this order: (B,T,3,NH,HS))
//   attention_forward(out (B,T,C), lse (B,NH,T), qkv (B,T,3C), scratch, B, T, C, NH, stream)
//       lse = log of the sum of exp of a row's scaled scores: what the backward pass needs instead
//       of the (T,T) matrix, which never exists (Dao et al. 2022, section 3.1 and appendix B).
//   attention_backward(dqkv (B,T,3C), dout (B,T,C), qkv, out, lse, scratch, B, T, C, NH, stream)
//   attention_backend(head_size)
//       Not a launch: whose kernels these two are, "cuDNN 9.14" or "own".
//
// gelu (the tanh form, Hendrycks and Gimpel 2016, section 2)
//   gelu_forward(out, inp, count, stream)
//   gelu_backward(dinp, dout, inp, count, stream)     dinp may be dout
//
// bias gradients; scratch of bias_scratch_bytes(rows, OC)
//   bias_backward(dbias (OC), dout (rows,OC), scratch, rows, OC, accumulate, stream)
//       the sum over the rows, in fp32; with `accumulate` the old gradient enters it.
//   gelu_backward_bias(dinp (rows,OC), dbias (OC), dout, inp, scratch, rows, OC, accumulate, stream)
//       gelu_backward, and bias_backward of what it has stored, in one pass: the same bits.
//
// fused classifier
//   fused_classifier(logits (rows,Vp), losses (rows), targets int (rows), dloss, rows, V, Vp,
//                    write_dlogits, stream)
//       losses[row] = -log softmax(logits[row, 0:V])[target]; a target of -1 gives loss 0 and zero
//       dlogits. With write_dlogits, logits become (softmax - onehot) * dloss, and columns V … Vp-1
//       become 0 whatever they held (NaN included); without, logits are not written.
//   mean_loss(out double (1), losses (rows), rows, stream)
//       in double, in an order that depends on `rows` alone; rows without a target count as 0.
//
// update
//   tree_add(ranges, num_ranges, max_count, stream)
//       out = round(a + b), each range; the node of the reduction tree. out may be a or b. Ranges
//       is TreeRange<G>[num_ranges] in device memory; max_count its largest count.
//   tree_add_list(ranges, num_ranges, stream)
//       The same with a table in host memory, which may go once the launcher returns.
//   copy_list(ranges, num_ranges, stream)
//       to = from, bit for bit, each range. CopyRange<G>[num_ranges] in host memory, likewise.
//   global_norm_chunks(sums double (num_chunks), chunks, num_chunks, max_count, scratch, stream)
//       sums[i] = sum of squares of chunk i in double, split by the chunk's size alone.
//   decide_step(state, losses double (num_losses), num_losses, sums double (num_sums), num_sums,
//               rules, stream)
//       Averages the losses and adds the sums, each in index order in double; sets loss, norm,
//       z-scores, grad_scale and skip in *state, and, unless the step is skipped, counts the update
//       and multiplies the beta powers on. Values that are not finite do not enter the outlier
//       windows.
//   adamw_update(segments, num_segments, max_count, options, inputs, state, stream)
//       AdamW (Loshchilov and Hutter 2019, algorithm 2) on gradient * grad_scale, with learning
//       rate and step from *inputs; nothing when state->skip is set. The new value is computed in
//       fp32 from master, or from param where master is null; stored to master; and to param
//       rounded stochastically by (seed, step, element index) when T is bf16.
#pragma once

#include <cuda_runtime.h>

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
#include "llmc/adamw.cuh"
#include "llmc/attention.cuh"
#include "llmc/bias.cuh"
#include "llmc/encoder.cuh"
#include "llmc/fused_classifier.cuh"
#include "llmc/gelu.cuh"
#include "llmc/global_norm.cuh"
#include "llmc/layernorm.cuh"
#include "llmc/matmul.cuh"
#include "llmc/tree.cuh"
#endif
