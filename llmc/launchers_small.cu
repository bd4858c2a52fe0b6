// The launchers and kernels that take less long to compile, one object together: see
// launchers_apart.h.
#include "llmc/adamw.cuh"
#include "llmc/bias.cuh"
#include "llmc/device_code.cuh"
#include "llmc/encoder.cuh"
#include "llmc/fused_classifier.cuh"
#include "llmc/gelu.cuh"
#include "llmc/global_norm.cuh"
#include "llmc/launchers_apart.h"
#include "llmc/matmul.cuh"
#include "llmc/planted_delay.cuh"
#include "llmc/tree.cuh"

namespace llmc {

decltype(apart::encoder_forward) apart::encoder_forward = &llmc::encoder_forward;
decltype(apart::encoder_backward) apart::encoder_backward = &llmc::encoder_backward;
decltype(apart::encoder_backward_scratch_bytes) apart::encoder_backward_scratch_bytes =
    &llmc::encoder_backward_scratch_bytes;
decltype(apart::matmul_forward) apart::matmul_forward = &llmc::matmul_forward;
decltype(apart::matmul_backward_input) apart::matmul_backward_input = &llmc::matmul_backward_input;
decltype(apart::matmul_backward_weight) apart::matmul_backward_weight =
    &llmc::matmul_backward_weight;
decltype(apart::matmul_backward_weight_scratch_bytes) apart::matmul_backward_weight_scratch_bytes =
    &llmc::matmul_backward_weight_scratch_bytes;
decltype(apart::matmul_gelu_forward) apart::matmul_gelu_forward = &llmc::matmul_gelu_forward;
decltype(apart::matmul_gelu_backward_input) apart::matmul_gelu_backward_input =
    &llmc::matmul_gelu_backward_input;
decltype(apart::matmul_backend) apart::matmul_backend = &llmc::matmul_backend;
decltype(apart::matmul_gelu_fusion) apart::matmul_gelu_fusion = &llmc::matmul_gelu_fusion;
decltype(apart::matmul_allow_tf32) apart::matmul_allow_tf32 = &llmc::matmul_allow_tf32;
decltype(apart::matmul_plan_workspace) apart::matmul_plan_workspace = &llmc::matmul_plan_workspace;
decltype(apart::matmul_forget_workspace) apart::matmul_forget_workspace =
    &llmc::matmul_forget_workspace;
decltype(apart::gelu_forward) apart::gelu_forward = &llmc::gelu_forward;
decltype(apart::gelu_backward_bias) apart::gelu_backward_bias = &llmc::gelu_backward_bias;
decltype(apart::fused_classifier) apart::fused_classifier = &llmc::fused_classifier;
decltype(apart::mean_loss) apart::mean_loss = &llmc::mean_loss;
decltype(apart::device_has_code) apart::device_has_code = &llmc::device_has_code;
decltype(apart::matmul_library_version) apart::matmul_library_version =
    &llmc::matmul_library_version;
decltype(apart::tree_add) apart::tree_add = &llmc::tree_add;
decltype(apart::tree_add_list) apart::tree_add_list = &llmc::tree_add_list;
decltype(apart::copy_list) apart::copy_list = &llmc::copy_list;
decltype(apart::global_norm_chunks) apart::global_norm_chunks = &llmc::global_norm_chunks;
decltype(apart::global_norm_chunks_scratch_bytes) apart::global_norm_chunks_scratch_bytes =
    &llmc::global_norm_chunks_scratch_bytes;
decltype(apart::decide_step) apart::decide_step = &llmc::decide_step;
decltype(apart::adamw_update) apart::adamw_update = &llmc::adamw_update;
#ifdef LLMC_TEST_SWITCHES
decltype(apart::delay_stream) apart::delay_stream = &detail::delay_stream;
#endif

}  // namespace llmc
