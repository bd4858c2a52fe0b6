// The launchers for code that is compiled apart from their kernels (-DLLMC_KERNELS_APART): pointers
// that launchers_*.cu set, each an object of its own. train_gpt2.cu is plain C++ then: it is not
// compiled a second time for the GPU, and the kernels are compiled beside it.
//
// What a launcher does, and its shapes, are in launchers.h; here are those that the trainer calls.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

#include "llmc/memory_plan.h"
#include "llmc/precision.h"
#include "llmc/step_state.h"

namespace llmc::apart {

using Stream = cudaStream_t;

// encoder
extern void (*const encoder_forward)(floatX* out, const int* tokens, const floatX* wte,
                                     const floatX* wpe, int B, int T, int C, Stream);
extern void (*const encoder_backward)(gradX* dwte, gradX* dwpe, const floatX* dout,
                                      const int* tokens, const int* order, void* scratch, int B,
                                      int T, int C, bool accumulate, Stream);
extern size_t (*const encoder_backward_scratch_bytes)(int B, int T, int C);

// layernorm
extern void (*const layernorm_forward)(floatX* out, float* mean, float* rstd, const floatX* inp,
                                       const floatX* weight, const floatX* bias, int rows, int C,
                                       Stream);
extern void (*const fused_residual_layernorm_forward)(floatX* residual, floatX* out, float* mean,
                                                      float* rstd, const floatX* a, const floatX* b,
                                                      const floatX* weight, const floatX* bias,
                                                      int rows, int C, Stream);
extern void (*const layernorm_backward)(floatX* dinp, gradX* dweight, gradX* dbias,
                                        const floatX* dout, const floatX* inp, const floatX* weight,
                                        const float* mean, const float* rstd, void* scratch,
                                        int rows, int C, bool add_to_dinp, bool accumulate, Stream);
extern size_t (*const layernorm_backward_scratch_bytes)(int rows, int C);

// matmul
extern void (*const matmul_forward)(floatX* out, const floatX* inp, const floatX* weight,
                                    const floatX* bias, int rows, int C, int OC, Stream);
extern void (*const matmul_backward_input)(floatX* dinp, const floatX* dout, const floatX* weight,
                                           int rows, int C, int OC, Stream);
extern void (*const matmul_backward_weight)(gradX* dweight, gradX* dbias, const floatX* dout,
                                            const floatX* inp, void* scratch, int rows, int C,
                                            int OC, bool accumulate, Stream);
extern size_t (*const matmul_backward_weight_scratch_bytes)(int rows, int C, int OC);
extern void (*const matmul_gelu_forward)(floatX* out, floatX* pre, const floatX* inp,
                                         const floatX* weight, const floatX* bias, int rows, int C,
                                         int OC, bool fuse, Stream);
extern void (*const matmul_gelu_backward_input)(floatX* dinp, const floatX* dout,
                                                const floatX* weight, const floatX* pre, int rows,
                                                int C, int OC, bool fuse, Stream);
extern std::string (*const matmul_backend)(int rows, int layers, int C, int Vp, int gelu_fusion);
extern int (*const matmul_gelu_fusion)(int asked, int rows, int C, int OC);
extern void (*const matmul_allow_tf32)(bool allow);
extern void (*const matmul_plan_workspace)(MemoryPlan* memory);
extern void (*const matmul_forget_workspace)();

// attention
extern void (*const attention_forward)(floatX* out, float* lse, const floatX* qkv, void* scratch,
                                       int B, int T, int C, int NH, Stream);
extern size_t (*const attention_forward_scratch_bytes)(int B, int T, int C, int NH);
extern void (*const attention_backward)(floatX* dqkv, const floatX* dout, const floatX* qkv,
                                        const floatX* out, const float* lse, void* scratch, int B,
                                        int T, int C, int NH, Stream);
extern size_t (*const attention_backward_scratch_bytes)(int B, int T, int C, int NH);
extern const char* (*const attention_backend)(int head_size);

// gelu and bias gradients
extern void (*const gelu_forward)(floatX* out, const floatX* inp, size_t count, Stream);
extern void (*const gelu_backward_bias)(floatX* dinp, gradX* dbias, const floatX* dout,
                                        const floatX* inp, void* scratch, int rows, int OC,
                                        bool accumulate, Stream);

// fused classifier
extern void (*const fused_classifier)(floatX* logits, float* losses, const int* targets,
                                      float dloss, int rows, int V, int Vp, bool write_dlogits,
                                      Stream);
extern void (*const mean_loss)(double* out, const float* losses, int rows, Stream);

// the GPU and its libraries
extern bool (*const device_has_code)();
extern size_t (*const matmul_library_version)();

#ifdef LLMC_TEST_SWITCHES
extern void (*const delay_stream)(int microseconds, Stream);
#endif

// update
extern void (*const tree_add)(const TreeRange<gradX>* ranges, int num_ranges, size_t max_count,
                              Stream);
extern void (*const tree_add_list)(const TreeRange<gradX>* ranges, int num_ranges, Stream);
extern void (*const copy_list)(const CopyRange<gradX>* ranges, int num_ranges, Stream);
extern void (*const global_norm_chunks)(double* sums, const NormChunk<gradX>* chunks,
                                        int num_chunks, size_t max_count, void* scratch, Stream);
extern size_t (*const global_norm_chunks_scratch_bytes)(int num_chunks, size_t max_count);
extern void (*const decide_step)(StepState* state, const double* losses, int num_losses,
                                 const double* sums, size_t num_sums, const StepRules& rules,
                                 Stream);
extern void (*const adamw_update)(const AdamwSegment<floatX, gradX>* segments, int num_segments,
                                  size_t max_count, const AdamwOptions& options,
                                  const StepInputs* inputs, const StepState* state, Stream);

}  // namespace llmc::apart
