// Causal attention in bf16 by cuDNN. Its front-end takes long to compile, so it is an object of its
// own; this header needs nothing of it.
//
// libcudnn and libcuda are opened at the first call, not at the program's start. One host thread at a
// time. Each function throws Error with cuDNN's version, the shape and the GPU when cuDNN refuses.
#pragma once

#include <cstddef>

#include "llmc/precision.h"

namespace llmc {

// The version of the library that was opened: "cuDNN 9.14".
const char* cudnn_name();

// Builds what a pass of this shape needs, and says how many bytes of device memory it must be given.
// A function of the shape, the GPU and the library; it does not grow later. On Hopper and older the
// deterministic backward pass may take as much as a (B,NH,T,T) tensor in bf16.
size_t cudnn_attention_forward_workspace_bytes(int B, int T, int NH, int HS);
size_t cudnn_attention_backward_workspace_bytes(int B, int T, int NH, int HS);

// Shapes and layouts as in launchers.h, HS = C / NH. lse is what cuDNN calls the softmax's
// statistics, largest + ln(sum of exp(score - largest)), hence the same number as our own.
// `workspace` has as many bytes as the pass asks for; it is not used where they are so few that they are a
// counter of work (work_counters.h).
void cudnn_attention_forward(bf16* out, float* lse, const bf16* qkv, void* workspace, int B, int T,
                             int NH, int HS, cudaStream_t stream);

// Deterministic.
void cudnn_attention_backward(bf16* dqkv, const bf16* dout, const bf16* qkv, const bf16* out,
                              const float* lse, void* workspace, int B, int T, int NH, int HS,
                              cudaStream_t stream);

}  // namespace llmc
