# The CUDA build of the same train_gpt2.cu.

CUDA_CODE := $(wildcard llmc/matmul.cuh)
CUDA_PRECISION := $(or $(PRECISION),BF16)
CUDA_GRAD_FP32 := $(if $(filter BF16,$(CUDA_PRECISION)),$(filter FP32,$(GRAD_PRECISION)))
CUDA_DIR := $(BUILD)/cuda-$(call lower,$(CUDA_PRECISION))$(if $(CUDA_GRAD_FP32),-gradfp32)$(if $(filter 1,$(USE_CUDNN)),-cudnn)

# The GPU at hand, else the two generations that this project is tuned for. Asked only in a recipe:
# nvidia-smi is slow.
detected_arch = $(or $(subst .,,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -u)),80 90)
CUDA_ARCHS = $(eval CUDA_ARCHS := $(or $(GPU_ARCH),$(detected_arch)))$(CUDA_ARCHS)
CUDA_TOO_OLD = $(if $(filter BF16,$(CUDA_PRECISION)),$(filter 50 52 53 60 61 62 70 72 75,$(CUDA_ARCHS)))

CUDA_FLAGS = -std=c++17 -O3 -I. $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) \
    -Xcompiler -Wall,-Wextra,-ffp-contract=off -DLLMC_$(CUDA_PRECISION) \
    $(if $(CUDA_GRAD_FP32),-DLLMC_GRAD_FP32) $(CUDA_MULTI_FLAGS) $(CUDA_CUDNN_FLAGS)
CUDA_LIBS = -L$(CUDA_LIB) -lcublasLt -lcublas $(CUDA_MULTI_LIBS) $(CUDA_CUDNN_LIBS)
nvcc_lib = $(foreach d,$(filter-out $(LIB_DIRS),$($(1)_LIB)),-L$(d) -Xlinker -rpath,$(d))

CUDA_MULTI := $(and $(wildcard llmc/zero.cuh),$(NCCL_LIB),$(filter-out x1,x$(NO_MULTI_GPU)))
CUDA_MPI := $(and $(CUDA_MULTI),$(OPENMPI_LIB),$(filter-out x1,x$(NO_USE_MPI)))
ifneq ($(CUDA_MULTI),)
CUDA_MULTI_FLAGS = -DMULTI_GPU $(call inc,NCCL)
CUDA_MULTI_LIBS = $(call nvcc_lib,NCCL) -lnccl
endif
ifneq ($(CUDA_MPI),)
CUDA_MULTI_FLAGS += -DUSE_MPI -DOMPI_SKIP_MPICXX=1 $(call inc,OPENMPI)
CUDA_MULTI_LIBS += $(call nvcc_lib,OPENMPI) -lmpi
endif

# The cuDNN front-end takes more than a minute to compile: an object of its own. It opens the driver
# at run time, so that the program starts without one, and compiles kernels with nvrtc.
ifeq ($(USE_CUDNN),1)
CUDNN_OBJECT := $(CUDA_DIR)/cudnn_att.o
CUDA_CUDNN_FLAGS = -DUSE_CUDNN -DNV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING $(call inc,CUDNN)
CUDA_CUDNN_LIBS = $(call nvcc_lib,CUDNN) -lcudnn -lnvrtc -ldl
endif

CUDA_TRAINER_BUILD = $(NVCC) $(CUDA_FLAGS) -DLLMC_COMMIT='"$(COMMIT)"'
CUDNN_COMPILE = $(NVCC) $(CUDA_FLAGS) -DCUDNN_FRONTEND_SKIP_JSON_LIB -isystem $(CUDNN_FRONTEND_INC)

ifneq ($(and $(NVCC),$(CUDA_CODE)),)
$(eval $(call stamp,$(CUDA_DIR)/trainer.flags,$$(CUDA_TRAINER_BUILD) $$(CUDA_LIBS)))
$(eval $(call stamp,$(CUDA_DIR)/cudnn.flags,$$(CUDNN_COMPILE)))

$(CUDA_DIR)/train_gpt2cu: train_gpt2.cu $(CUDNN_OBJECT) $(CUDA_DIR)/trainer.flags
	$(if $(CUDA_TOO_OLD),$(error PRECISION=BF16 needs compute capability 8.0 or newer, sm_$(firstword $(CUDA_TOO_OLD)) has none: use PRECISION=FP32))
	$(CUDA_TRAINER_BUILD) $(NVCC_DEPFLAGS) $< $(CUDNN_OBJECT) -o $@ $(CUDA_LIBS)

$(CUDA_DIR)/cudnn_att.o: llmc/cudnn_att.cpp $(CUDA_DIR)/cudnn.flags
	$(call need,cuDNN,CUDNN,CUDNN_PATH)
	$(if $(CUDNN_FRONTEND_INC),,$(error $(call missing,cuDNN front-end,CUDNN_FRONTEND,CUDNN_FRONTEND_PATH)))
	$(CUDNN_COMPILE) $(NVCC_DEPFLAGS) -c $< -o $@

# Each launcher against its CPU twin.
GPU_TEST_OBJECTS := $(patsubst test/gpu/%.cu,$(CUDA_DIR)/gpu/%.o,$(wildcard test/gpu/test_*.cu))

$(CUDA_DIR)/gpu/%.o: test/gpu/%.cu $(CUDA_DIR)/trainer.flags
	$(call need,GoogleTest,GTEST,GTEST_PATH)
	@mkdir -p $(@D)
	$(NVCC) $(CUDA_FLAGS) $(call inc,GTEST) $(NVCC_DEPFLAGS) -c $< -o $@

$(CUDA_DIR)/gpu_tests: $(GPU_TEST_OBJECTS) $(CUDNN_OBJECT)
	$(NVCC) $^ -o $@ $(call nvcc_lib,GTEST) -lgtest_main -lgtest $(CUDA_LIBS)

-include $(CUDA_DIR)/train_gpt2cu.d $(CUDA_DIR)/cudnn_att.o.d $(GPU_TEST_OBJECTS:=.d)
else
$(CUDA_DIR)/train_gpt2cu $(CUDA_DIR)/gpu_tests: FORCE
	@echo "error: $(if $(CUDA_CODE),$(call missing,nvcc,NVCC,CUDA_HOME),the CUDA kernels are not part of this version yet; make train_gpt2cpu builds the CPU one)" >&2; exit 1
endif
