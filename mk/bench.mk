# Programs of `make bench` and its relatives: communication (dev/bench/comm.cu), the forward pass alone
# (forward.cu), launchers of the CPU build (launchers.cpp); the profile of a step.

$(CPU_DIR)/bench_comm: dev/bench/comm.cu $(CPU_DIR)/trainer.flags
	$(call need,OpenBLAS,OPENBLAS,OPENBLAS_PATH)
	$(call need,Gloo,GLOO,GLOO_PATH)
	$(TRAINER_BUILD) $(DEPFLAGS) -x c++ $< -o $@ $(CPU_LIBS)

-include $(CPU_DIR)/bench_comm.d

ifneq ($(and $(NVCC),$(CUDA_CODE)),)
# As the trainer: C++, linked with the kernels.
$(CUDA_DIR)/bench/comm.o: dev/bench/comm.cu $(CUDA_DIR)/trainer.flags
	$(cuda_checks)
	$(call need,NCCL,NCCL,NCCL_PATH)
	@mkdir -p $(@D)
	$(CUDA_TRAINER_COMPILE) $(DEPFLAGS) -c $< -o $@

$(CUDA_DIR)/bench_comm: $(CUDA_DIR)/bench/comm.o $(CUDA_KERNELS)
	$(NVCC) $^ -o $@ $(CUDA_LIBS)

-include $(CUDA_DIR)/bench/comm.o.d
endif

COMM_PROGRAM := $(if $(and $(NVCC),$(GPU),$(CUDA_CODE)),$(CUDA_DIR),$(CPU_DIR))/bench_comm

# ---- make bench, make bench_cpu
# On the CPU this is for tests: quick to build, with the train_gpt2.o of the unit tests.
$(CPU_DIR)/bench_forward: dev/bench/forward.cu $(CPU_DIR)/unit/train_gpt2.o $(CPU_DIR)/unit.flags
	$(UNIT_COMPILE) -O0 $(DEPFLAGS) -x c++ $< -x none $(CPU_DIR)/unit/train_gpt2.o -o $@ $(CPU_LIBS)

$(CPU_DIR)/bench_launchers: dev/bench/launchers.cpp $(CPU_DIR)/trainer.flags
	$(call need,OpenBLAS,OPENBLAS,OPENBLAS_PATH)
	$(TRAINER_BUILD) $(DEPFLAGS) $< -o $@ $(CPU_LIBS)

-include $(CPU_DIR)/bench_forward.d $(CPU_DIR)/bench_launchers.d

ifneq ($(and $(NVCC),$(CUDA_CODE)),)
$(CUDA_DIR)/bench/forward.o: dev/bench/forward.cu train_gpt2.cu $(CUDA_DIR)/trainer.flags
	$(cuda_checks)
	@mkdir -p $(@D)
	$(CUDA_TRAINER_COMPILE) $(DEPFLAGS) -DLLMC_NO_MAIN -include train_gpt2.cu -c $< -o $@

$(CUDA_DIR)/bench_forward: $(CUDA_DIR)/bench/forward.o $(CUDA_KERNELS)
	$(NVCC) $^ -o $@ $(CUDA_LIBS)

-include $(CUDA_DIR)/bench/forward.o.d
endif

# Without a GPU nothing is built for `make bench`, which says so; communication needs two.
BENCH_COMM := $(if $(word 2,$(wildcard /dev/nvidia[0-9]*)),$(if $(CUDA_MULTI),$(CUDA_DIR)/bench_comm))
BENCH_PROGRAMS := $(if $(and $(NVCC),$(GPU),$(CUDA_CODE)),$(CUDA_DIR)/train_gpt2cu \
    $(CUDA_DIR)/bench_forward $(BENCH_COMM))

# ---- make profile: a library for the CUDA trainer to load. CUPTI comes with the toolkit, in a
# folder of its own in extras/, or as the Python package nvidia-cuda-cupti, without libcupti.so.
PROFILE_LIBRARY := $(BUILD)/profile/libprofile.so
PYTHON_NVIDIA = $(wildcard $(addsuffix /nvidia/cu[0-9]*,$(PYTHON_PACKAGES)) \
    $(addsuffix /nvidia/cuda_cupti,$(PYTHON_PACKAGES)))
PYTHON_PACKAGES = $(shell $(PYTHON) -c 'import sys; print(*sys.path[1:])' 2>/dev/null)
CUPTI_DIRS = $(or $(CUPTI_PATH),$(CUDA_ROOT) $(CUDA_ROOT)/extras/CUPTI $(PYTHON_NVIDIA))
CUPTI_INC = $(call holds,cupti.h,$(call inc_under,$(CUPTI_DIRS) $(CUDA_ROOT)))
CUPTI_LIB = $(firstword $(wildcard $(addsuffix /libcupti.so,$(call lib_under,$(CUPTI_DIRS))) \
    $(addsuffix /libcupti.so.1[0-9],$(call lib_under,$(CUPTI_DIRS)))))
HINT_CUPTI = $(PYTHON) -m pip install nvidia-cuda-cupti, or set CUPTI_PATH
PROFILE_BUILD = $(CXX) -std=c++17 -O2 -Wall -Wextra -fPIC -shared -fvisibility=hidden \
    $(addprefix -isystem ,$(CUPTI_INC) $(CUDA_INC_DIRS))

$(PROFILE_LIBRARY): dev/profile.cpp mk/bench.mk
	$(if $(NVCC),,$(error $(call missing,nvcc,NVCC,CUDA_HOME)))
	$(if $(and $(CUPTI_INC),$(CUPTI_LIB)),,$(error $(call missing,CUPTI,CUPTI,CUPTI_PATH)))
	@mkdir -p $(@D)
	$(PROFILE_BUILD) $(DEPFLAGS) $< -o $@ $(CUPTI_LIB) -Wl,-rpath,$(dir $(CUPTI_LIB))

-include $(PROFILE_LIBRARY).d
