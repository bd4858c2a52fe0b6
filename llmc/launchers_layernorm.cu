// LayerNorm's launchers and kernels, an object of their own: see launchers_apart.h.
#include "llmc/launchers_apart.h"
#include "llmc/layernorm.cuh"

namespace llmc {

decltype(apart::layernorm_forward) apart::layernorm_forward = &llmc::layernorm_forward;
decltype(apart::fused_residual_layernorm_forward) apart::fused_residual_layernorm_forward =
    &llmc::fused_residual_layernorm_forward;
decltype(apart::layernorm_backward) apart::layernorm_backward = &llmc::layernorm_backward;
decltype(apart::layernorm_backward_scratch_bytes) apart::layernorm_backward_scratch_bytes =
    &llmc::layernorm_backward_scratch_bytes;

}  // namespace llmc
