// Attention's launchers and kernels, an object of their own: see launchers_apart.h.
#include "llmc/attention.cuh"
#include "llmc/launchers_apart.h"

namespace llmc {

decltype(apart::attention_forward) apart::attention_forward = &llmc::attention_forward;
decltype(apart::attention_forward_scratch_bytes) apart::attention_forward_scratch_bytes =
    &llmc::attention_forward_scratch_bytes;
decltype(apart::attention_backward) apart::attention_backward = &llmc::attention_backward;
decltype(apart::attention_backward_scratch_bytes) apart::attention_backward_scratch_bytes =
    &llmc::attention_backward_scratch_bytes;
decltype(apart::attention_backend) apart::attention_backend = &llmc::attention_backend;

}  // namespace llmc
