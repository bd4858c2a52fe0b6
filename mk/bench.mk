# The benchmark of communication, dev/bench/comm.cu, in either build.

$(CPU_DIR)/bench_comm: dev/bench/comm.cu $(CPU_DIR)/trainer.flags
	$(call need,OpenBLAS,OPENBLAS,OPENBLAS_PATH)
	$(call need,Gloo,GLOO,GLOO_PATH)
	$(TRAINER_BUILD) $(DEPFLAGS) -x c++ $< -o $@ $(CPU_LIBS)

-include $(CPU_DIR)/bench_comm.d

ifneq ($(and $(NVCC),$(CUDA_CODE)),)
$(CUDA_DIR)/bench_comm: dev/bench/comm.cu $(CUDA_DIR)/trainer.flags
	$(cuda_checks)
	$(call need,NCCL,NCCL,NCCL_PATH)
	$(CUDA_TRAINER_BUILD) $(DEPFLAGS) $< -o $@ $(CUDA_LIBS)

-include $(CUDA_DIR)/bench_comm.d
endif

COMM_PROGRAM := $(if $(and $(NVCC),$(GPU),$(CUDA_CODE)),$(CUDA_DIR),$(CPU_DIR))/bench_comm
