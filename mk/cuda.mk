# The CUDA build of the same train_gpt2.cu.

CUDA_CODE := $(wildcard llmc/matmul.cuh)
CUDA_PRECISION := $(or $(PRECISION),BF16)
CUDA_GRAD_FP32 := $(if $(filter BF16,$(CUDA_PRECISION)),$(filter FP32,$(GRAD_PRECISION)))

# cuDNN does attention in bf16 where it and its front-end are found; our own kernels do elsewhere.
CUDNN_FOUND := $(and $(CUDNN_LIB),$(CUDNN_FRONTEND_INC),$(wildcard llmc/cudnn_att.cpp))
# $(call with_cudnn,PRECISION)
with_cudnn = $(if $(USE_CUDNN),$(filter 1,$(USE_CUDNN)),$(if $(and $(CUDNN_FOUND),$(filter BF16,$(1))),1))
WITH_CUDNN := $(call with_cudnn,$(CUDA_PRECISION))

# $(call cuda_dir,PRECISION,GRAD_FP32)
cuda_dir = $(BUILD)/cuda-$(call lower,$(1))$(if $(2),-gradfp32)$(if $(call with_cudnn,$(1)),-cudnn)
CUDA_DIR := $(call cuda_dir,$(CUDA_PRECISION),$(CUDA_GRAD_FP32))$(if $(filter 1,$(SWITCHES)),-switches)

# The GPU at hand, else the two generations that this project is tuned for. Asked only in a recipe:
# nvidia-smi is slow, and prints what is wrong where it should print numbers.
detected_arch = $(or $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -xE '[0-9]+[.][0-9]' | sort -u),80 90)
CUDA_ARCHS = $(eval CUDA_ARCHS := $(subst .,,$(or $(GPU_ARCH),$(detected_arch))))$(CUDA_ARCHS)
CUDA_TOO_OLD = $(if $(filter BF16,$(CUDA_PRECISION)),$(filter 50 52 53 60 61 62 70 72 75,$(CUDA_ARCHS)))
# Stops with one line where the build cannot be made.
cuda_checks = $(if $(CUDA_TOO_OLD),$(error PRECISION=BF16 needs compute capability 8.0 or newer, sm_$(firstword $(CUDA_TOO_OLD)) has none: use PRECISION=FP32)) \
    $(if $(and $(WITH_CUDNN),$(filter FP32,$(CUDA_PRECISION))),$(error USE_CUDNN=1 needs PRECISION=BF16: cuDNN has no attention in FP32)) \
    $(if $(WITH_CUDNN),$(call need,cuDNN,CUDNN,CUDNN_PATH)$(if $(CUDNN_FRONTEND_INC),,$(error $(call missing,cuDNN front-end,CUDNN_FRONTEND,CUDNN_FRONTEND_PATH))))

# As lib in find.mk, for nvcc.
nvcc_lib = $(foreach d,$(filter-out $(LIB_DIRS),$($(1)_LIB)),-L$(d) -Xlinker -rpath,$(d))

# -O is the host code's; kernels are optimised as far as nvcc goes in any case. The host's compiler would
# take half of a build's time for -O3, and the host has little to compute; -Og, for the trainer's own code,
# takes two thirds of -O1's time. sm_90a is sm_90 with wgmma (llmc/wgmma.cuh).
CUDA_HOST_FLAGS = -std=c++17 -O1 -I. $(if $(WARNINGS_ARE_ERRORS),-Xcompiler -Werror) \
    -Xcompiler -Wall,-Wextra,-pthread,-ffp-contract=off -DLLMC_$(CUDA_PRECISION) \
    $(if $(CUDA_GRAD_FP32),-DLLMC_GRAD_FP32) $(if $(WITH_CUDNN),-DLLMC_CUDNN) \
    $(if $(filter 1,$(SWITCHES)),-DLLMC_TEST_SWITCHES)
CUDA_GPU_FLAGS = --threads $(words $(CUDA_ARCHS)) \
    $(foreach a,$(CUDA_ARCHS:90=90a),-gencode arch=compute_$(a),code=sm_$(a)) \
    $(if $(WARNINGS_ARE_ERRORS),-Werror all-warnings)
CUDA_FLAGS = $(CUDA_HOST_FLAGS) $(CUDA_GPU_FLAGS) $(CUDA_MULTI_FLAGS)
CUDA_LIBS = $(call nvcc_lib,CUDA) -lcublasLt $(CUDA_MULTI_LIBS) $(CUDA_CUDNN_LIBS) -ldl

CUDA_MULTI := $(and $(wildcard llmc/cpu/nccl.h),$(NCCL_LIB),$(filter-out x1,x$(NO_MULTI_GPU)))
CUDA_MPI := $(and $(CUDA_MULTI),$(OPENMPI_LIB),$(filter-out x1,x$(NO_USE_MPI)))
ifneq ($(CUDA_MULTI),)
CUDA_MULTI_FLAGS = -DMULTI_GPU $(call inc,NCCL)
CUDA_MULTI_LIBS = $(call nvcc_lib,NCCL) -lnccl
endif
ifneq ($(CUDA_MPI),)
CUDA_MULTI_FLAGS += -DUSE_MPI -DOMPI_SKIP_MPICXX=1 $(call inc,OPENMPI)
CUDA_MULTI_LIBS += $(call nvcc_lib,OPENMPI) -lmpi
endif

# The cuDNN front-end takes more than half a minute to compile: an object of its own, which depends
# on nothing that the rest is built with. It opens cuDNN and the driver at run time, so that the
# program starts without them; where cuDNN is must be known then.
ifneq ($(WITH_CUDNN),)
CUDNN_OBJECT := $(BUILD)/cudnn/cudnn_att.o
CUDA_CUDNN_LIBS = $(call nvcc_lib,CUDNN)
endif
CUDNN_COMPILE = $(NVCC) -std=c++17 -O1 -I. -Xcompiler -Wall,-Wextra -isystem $(CUDNN_FRONTEND_INC) \
    $(call inc,CUDNN) -DNV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING -DCUDNN_FRONTEND_SKIP_JSON_LIB

# The trainer's own code is C++, and the kernels are objects beside it, so that all of it is compiled at
# the same time. A launcher that launchers.h does not declare like its definition is refused.
CUDA_KERNELS_COMPILE = $(NVCC) $(CUDA_HOST_FLAGS) $(CUDA_GPU_FLAGS) -DLLMC_KERNELS_APART \
    -Xcompiler -Werror=missing-declarations
CUDA_KERNELS := $(patsubst llmc/%.cu,$(CUDA_DIR)/%.o,$(wildcard llmc/kernels_*.cu)) $(CUDNN_OBJECT)
CUDA_APART = $(NVCC) -x c++ $(CUDA_HOST_FLAGS) -Xcompiler -Og $(CUDA_MULTI_FLAGS) -DLLMC_KERNELS_APART
CUDA_TRAINER_COMPILE = $(CUDA_APART) -DLLMC_COMMIT='"$(COMMIT)"'
TUNE_BUILD = $(NVCC) $(CUDA_FLAGS)
GRADE_CUDA_BUILD = $(NVCC) $(CUDA_FLAGS) -DLLMC_TEST_SWITCHES
GPU_TEST_COMPILE = $(NVCC) $(CUDA_FLAGS) -x cu $(call inc,GTEST) $(call inc,OPENBLAS)
GPU_TEST_APART = $(CUDA_APART) -DLLMC_NO_MAIN $(call inc,GTEST)
GPU_TEST_LIBS = $(call nvcc_lib,GTEST) -lgtest_main -lgtest $(call nvcc_lib,OPENBLAS) -lopenblas

ifneq ($(and $(NVCC),$(CUDA_CODE)),)
$(eval $(call stamp,$(CUDA_DIR)/trainer.flags,$$(CUDA_TRAINER_COMPILE) $$(CUDA_LIBS)))
$(eval $(call stamp,$(CUDA_DIR)/kernels.flags,$$(CUDA_KERNELS_COMPILE)))
$(eval $(call stamp,$(CUDA_DIR)/tune.flags,$$(TUNE_BUILD)))
$(eval $(call stamp,$(CUDA_DIR)/grade.flags,$$(GRADE_CUDA_BUILD) $$(CUDA_LIBS)))
$(eval $(call stamp,$(CUDA_DIR)/gpu.flags,$$(GPU_TEST_COMPILE) $$(GPU_TEST_APART)))
$(eval $(call stamp,$(BUILD)/cudnn/cudnn.flags,$$(CUDNN_COMPILE)))

# What takes longest is first.
$(CUDA_DIR)/train_gpt2cu: $(CUDNN_OBJECT) $(CUDA_DIR)/train_gpt2.o $(CUDA_KERNELS)
	$(NVCC) $^ -o $@ $(CUDA_LIBS)

$(CUDA_DIR)/train_gpt2.o: train_gpt2.cu $(CUDA_DIR)/trainer.flags
	$(cuda_checks)
	@mkdir -p $(@D)
	$(CUDA_TRAINER_COMPILE) $(DEPFLAGS) -c $< -o $@

$(CUDA_DIR)/kernels_%.o: llmc/kernels_%.cu $(CUDA_DIR)/kernels.flags
	$(cuda_checks)
	@mkdir -p $(@D)
	$(CUDA_KERNELS_COMPILE) $(DEPFLAGS) -c $< -o $@

$(BUILD)/cudnn/cudnn_att.o: llmc/cudnn_att.cpp $(BUILD)/cudnn/cudnn.flags
	$(cuda_checks)
	$(CUDNN_COMPILE) $(DEPFLAGS) -c $< -o $@

# Measures cuBLASLt's algorithms and writes the table that the trainer is compiled with.
$(CUDA_DIR)/tune: dev/tune.cu $(CUDA_DIR)/tune.flags
	$(cuda_checks)
	$(TUNE_BUILD) $(DEPFLAGS) $< -o $@ $(call nvcc_lib,CUDA) -lcublasLt

# As in cpu.mk.
$(CUDA_DIR)/grade_checks: test/grade/checks.cu $(CUDNN_OBJECT) $(CUDA_DIR)/grade.flags
	$(cuda_checks)
	$(GRADE_CUDA_BUILD) $(DEPFLAGS) $< $(CUDNN_OBJECT) -o $@ $(CUDA_LIBS)

# Each launcher against its CPU twin, and the whole model against PyTorch's numbers.
GPU_TEST_OBJECTS := $(CUDA_DIR)/gpu/train_gpt2.o $(CUDA_DIR)/gpu/test_gpt2.o \
    $(patsubst test/gpu/%.cu,$(CUDA_DIR)/gpu/%.o,$(wildcard test/gpu/test_*.cu))

# $(call gpu_test_object,OBJECT,SOURCE,COMPILER)
define gpu_test_object
$(1): $(2) $(CUDA_DIR)/gpu.flags
	$$(cuda_checks)
	$$(call need,GoogleTest,GTEST,GTEST_PATH)
	$$(call need,OpenBLAS,OPENBLAS,OPENBLAS_PATH)
	@mkdir -p $$(@D)
	$$($(3)) $$(DEPFLAGS) -c $$< -o $$@
endef
$(eval $(call gpu_test_object,$(CUDA_DIR)/gpu/%.o,test/gpu/%.cu,GPU_TEST_COMPILE))
$(eval $(call gpu_test_object,$(CUDA_DIR)/gpu/test_gpt2.o,test/unit/test_gpt2.cpp,GPU_TEST_APART))
$(eval $(call gpu_test_object,$(CUDA_DIR)/gpu/train_gpt2.o,train_gpt2.cu,GPU_TEST_APART))

$(CUDA_DIR)/gpu_tests: $(GPU_TEST_OBJECTS) $(CUDA_KERNELS)
	$(NVCC) $^ -o $@ $(GPU_TEST_LIBS) $(CUDA_LIBS)

-include $(CUDA_DIR)/grade_checks.d
-include $(CUDA_DIR)/train_gpt2.o.d $(CUDA_KERNELS:=.d) $(CUDA_DIR)/tune.d $(GPU_TEST_OBJECTS:=.d)
else
$(CUDA_DIR)/train_gpt2cu $(CUDA_DIR)/grade_checks $(CUDA_DIR)/gpu_tests $(CUDA_DIR)/tune: FORCE
	@echo "error: $(if $(CUDA_CODE),$(call missing,nvcc,NVCC,CUDA_HOME),the CUDA kernels are not part of this version yet; make train_gpt2cpu builds the CPU one)" >&2; exit 1
endif
