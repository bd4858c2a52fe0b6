# Start with `make help`; `make demo` installs what is missing, builds, trains and draws the loss.
# mk/find.mk looks for libraries, mk/cpu.mk and mk/cuda.mk hold the two builds.

## FP32 or BF16, of weights and activations (empty: FP32 on CPU, BF16 with CUDA)
PRECISION ?=
## FP32: gradients, their sums and the wire in fp32 although PRECISION=BF16
GRAD_PRECISION ?=
## 1: build for one process only
NO_MULTI_GPU ?=
## 1: build without MPI (processes then find each other with -pi tcp or -pi fs)
NO_USE_MPI ?=
## 1 or 0: attention by cuDNN or by our own kernels (empty: cuDNN where it was found, and BF16)
USE_CUDNN ?=
## Processor to compile for, as g++ -march takes it
CPU_ARCH ?= native
## Compute capabilities, such as "80 90" (empty: the GPU at hand, else 80 90)
GPU_ARCH ?=
## address or thread: CPU build under that sanitizer
SANITIZE ?=
## 1: build with the faults and delays that tests plant (llmc/test_switches.h)
SWITCHES ?=
## 1 or 0: are warnings errors? (empty: up to g++ 12, since newer ones warn of more)
WERROR ?=
## Where the CUDA toolkit is (empty: nvcc on the PATH, or /usr/local/cuda)
CUDA_HOME ?=
## Where NCCL's include/ and lib/ are (empty, here and below: the usual places)
NCCL_PATH ?=
## Where OpenMPI is
OPENMPI_DIR ?=
## Where cuDNN is
CUDNN_PATH ?=
## Where the cuDNN front-end's headers are (.venv is looked at, too)
CUDNN_FRONTEND_PATH ?=
## Where OpenBLAS is
OPENBLAS_PATH ?=
## Where Gloo is
GLOO_PATH ?=
## Where CUPTI is, for `make profile`
CUPTI_PATH ?=
## Where GoogleTest is
GTEST_PATH ?=
## Arguments for pytest in the test targets, such as "-k resume"
PYTEST_ARGS ?=
## Compiler for `make fuzz`, with libFuzzer
FUZZ_CXX ?= clang++
## Runs of `make fuzz`
FUZZ_RUNS ?= 100000
## Arguments for `make tune`, such as "--model d12:32"; --help lists them
TUNE_ARGS ?=

.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules
comma := ,
lower = $(subst F,f,$(subst P,p,$(subst B,b,$(1))))

# For the shell.
quote = '$(subst ','\'',$(1))'

# A wrong value is one line, before anything is built.
one_of = $(if $(filter-out $(2),$($(1))),$(error $(1)=$($(1)) is not known: use $(3)))
$(call one_of,PRECISION,FP32 BF16,FP32 or BF16)
$(call one_of,GRAD_PRECISION,FP32,FP32 or leave it empty)
$(call one_of,SANITIZE,address thread,address or thread)
$(foreach v,NO_MULTI_GPU NO_USE_MPI USE_CUDNN SWITCHES WERROR,$(call one_of,$(v),0 1,0 or 1))

GXX_UP_TO_12 := $(filter 7 8 9 10 11 12,$(firstword $(subst ., ,$(shell $(CXX) -dumpversion 2>&1))))
WARNINGS_ARE_ERRORS := $(if $(filter 1,$(or $(WERROR),$(GXX_UP_TO_12:%=1))),-Werror)
# Every set of variables that changes the code has a folder of its own: build/cpu-fp32,
# build/cuda-bf16-gradfp32, build/x86-64-v3/cpu-bf16, build/single/cpu-fp32, ...
BUILD := build$(addprefix /,$(filter-out native,$(CPU_ARCH)))
BUILD := $(BUILD)$(if $(filter 1,$(NO_MULTI_GPU)),/single,$(if $(filter 1,$(NO_USE_MPI)),/nompi))
COMMIT = $(eval COMMIT := $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)$(shell \
    git diff --quiet HEAD -- train_gpt2.cu llmc 2>/dev/null || echo +changes))$(COMMIT)

# $(eval $(call stamp,FILE,TEXT)): FILE changes only when TEXT does. What is built with a command
# depends on such a file, so that a changed variable rebuilds it.
define stamp
$(1): FORCE | check-deps
	@mkdir -p $$(@D)
	@printf '%s\n' $$(call quote,$(2)) | cmp -s - $$@ || printf '%s\n' $$(call quote,$(2)) >$$@
endef
# $(call need,TITLE,NAME,PATH VARIABLE): stops with one line when the library, or the compiler that
# was asked where it is, is missing.
need = $(if $(INCLUDE_DIRS),,$(error the C++ compiler $(CXX) does not run: apt-get install g++, or \
    set CXX))$(if $($(2)_LIB),,$(error $(call missing,$(1),$(2),$(3))))
DEPFLAGS = -MMD -MP -MF $@.d -MT $@

ifneq ($(filter-out help clean distclean,$(or $(MAKECMDGOALS),all)),)
include mk/find.mk mk/cpu.mk mk/cuda.mk mk/bench.mk
endif

# ---- programs
# More than one job unless the caller has decided.
PARALLEL = $(if $(findstring jobserver,$(MAKEFLAGS))$(filter -j%,$(MAKEFLAGS)),,-j$(shell nproc))
SUB = +@$(MAKE) --no-print-directory $(PARALLEL) REPORT=0

# The objects of a CUDA program are compiled side by side although the user has not said -j: then a make
# of its own, in the recipe, builds FILES, else they are prerequisites. Which it is, make knows only
# when all makefiles are read.
.SECONDEXPANSION:
compiled = $(if $(call alone,$(1)),,$(1))
compile = $(if $(call alone,$(1)),$(cuda_checks)$(SUB) $(1))
alone = $(and $(NVCC),$(CUDA_CODE),$(1),$(PARALLEL))

TRAINER := $(if $(and $(NVCC),$(GPU),$(CUDA_CODE)),train_gpt2cu,train_gpt2cpu)

## The trainer for this machine: CUDA if it has nvcc and a GPU, else CPU
all: $(TRAINER)

# A hard link: rebuilding another precision does not change a program that somebody has started.
## The trainer on the CPU: ./train_gpt2cpu
train_gpt2cpu: $(CPU_DIR)/train_gpt2cpu
	@ln -f $< $@ 2>/dev/null || cp $< $@

## The trainer with CUDA: ./train_gpt2cu
train_gpt2cu: $$(call compiled,$(CUDA_DIR)/train_gpt2cu) | check-deps
	$(call compile,$(CUDA_DIR)/train_gpt2cu)
	@ln -f $(CUDA_DIR)/$@ $@ 2>/dev/null || cp $(CUDA_DIR)/$@ $@

## The unit tests of the CPU build, not run
unit_tests: $(CPU_DIR)/unit_tests

## The GPU tests, not run
gpu_tests: $$(call compiled,$(CUDA_DIR)/gpu_tests) | check-deps
	$(call compile,$(CUDA_DIR)/gpu_tests)

# For scripts: which one `all` is; what ./grade runs, with its checks of single functions.
print-trainer:
	@echo $(TRAINER)
print-grade-cpu:
	@echo $(CPU_DIR)/train_gpt2cpu $(CPU_DIR)/grade_checks
print-grade-gpu:
	@echo $(CUDA_DIR)/train_gpt2cu $(CUDA_DIR)/grade_checks

# ---- tests
PYTHON := $(or $(wildcard .venv/bin/python),python3)
# $(call unit_run,PRECISION,SANITIZE): how dev/run_tests.py is told of one build's unit tests.
unit_run = --unit $(notdir $(call cpu_dir,$(1),,$(2)))=$(call cpu_dir,$(1),,$(2))/unit_tests
UNIT_RUNS = $(call unit_run,FP32,$(1)) $(call unit_run,BF16,$(1))
ASAN_RUN = $(call unit_run,FP32,address)
# $(call gpu_run,PRECISION,GRAD_FP32): likewise of a CUDA build's.
gpu_run = --unit $(notdir $(call cuda_dir,$(1),$(2)))=$(call cuda_dir,$(1),$(2))/gpu_tests
GPU_RUNS = $(call gpu_run,FP32) $(call gpu_run,BF16) $(call gpu_run,BF16,FP32)
RUN_TESTS = .venv/bin/python dev/run_tests.py --skips test/skips.txt --out $(BUILD)/test
# Many tests start eight processes or wait for a limit of time: more of them at a time gain nothing.
TEST_JOBS = --jobs $(shell n=$$(nproc); echo $$((n < 4 ? n : 4)))

# One make for each set of variables, all of them from one pool of jobs, so that none waits for
# another's last file. Those with the longest files are first.
TEST_BUILDS := build_tests_fp32 build_tests_bf16 build_tests_switches build_tests_nompi build_tests_asan
build_tests: check-deps
	$(SUB) $(TEST_BUILDS)
build_tests_fp32:
	$(SUB) PRECISION=FP32 GRAD_PRECISION= SANITIZE= train_and_unit bench_forward
build_tests_bf16:
	$(SUB) PRECISION=BF16 GRAD_PRECISION= SANITIZE= train_and_unit grade_checks
# Trainers for tests alone are quick to compile, except in test_full.
TEST_OPT := -O1
build_tests_switches:
	$(SUB) PRECISION=BF16 GRAD_PRECISION= SANITIZE= SWITCHES=1 TRAINER_OPT=$(TEST_OPT) train_only
build_tests_nompi:
	$(SUB) PRECISION=FP32 GRAD_PRECISION= SANITIZE= NO_USE_MPI=1 TRAINER_OPT=$(TEST_OPT) train_only
build_tests_asan:
	$(SUB) PRECISION=FP32 GRAD_PRECISION= SANITIZE=address unit_tests
train_only: $(CPU_DIR)/train_gpt2cpu
grade_checks: $(CPU_DIR)/grade_checks
train_and_unit: train_only $(CPU_DIR)/unit_tests
bench_forward: $(CPU_DIR)/bench_forward

## All that needs no GPU and little time: unit tests, sanitizers, Python tests
test: setup
	$(SUB) build_tests
	@$(RUN_TESTS) $(TEST_JOBS) $(ASAN_RUN) $(call UNIT_RUNS) \
	    --pytest --build-dir $(BUILD) -m "not slow" $(PYTEST_ARGS) test

## Unit tests of the CPU build in FP32 and BF16 (GTEST_FILTER=... chooses)
test_unit: setup
	$(SUB) PRECISION=FP32 GRAD_PRECISION= unit_tests
	$(SUB) PRECISION=BF16 GRAD_PRECISION= unit_tests
	@$(RUN_TESTS) $(call UNIT_RUNS,$(SANITIZE))

## Unit tests under AddressSanitizer and UndefinedBehaviorSanitizer
test_sanitize: setup
	$(SUB) PRECISION=FP32 GRAD_PRECISION= SANITIZE=address unit_tests
	@$(RUN_TESTS) $(ASAN_RUN)

## As test, with the slow Python tests, and all trainers at -O3
test_full: setup
	$(SUB) TEST_OPT=-O3 build_tests
	@$(RUN_TESTS) $(TEST_JOBS) $(ASAN_RUN) $(call UNIT_RUNS) --pytest --build-dir $(BUILD) $(PYTEST_ARGS) test

# ---- fuzzing
FUZZ_DIR := $(BUILD)/fuzz
FUZZ_FLAGS := -std=c++17 -march=$(CPU_ARCH) -ffp-contract=off -Wall -Wextra -pthread -I. -Illmc/cpu \
    -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all

$(FUZZ_DIR)/handshake_fuzz: test/fuzz/handshake_fuzz.cpp
	@echo 'int LLVMFuzzerTestOneInput(void) { return 0; }' | \
	    $(FUZZ_CXX) -fsanitize=fuzzer -x c - -o /dev/null 2>/dev/null || { \
	    echo 'error: $(FUZZ_CXX) with libFuzzer is missing: apt-get install clang, or set FUZZ_CXX' >&2; \
	    exit 1; }
	@mkdir -p $(@D)
	$(FUZZ_CXX) $(FUZZ_FLAGS) $(DEPFLAGS) $< -o $@

## 100,000 runs of libFuzzer on the parsers of the rendezvous (needs clang)
fuzz: $(FUZZ_DIR)/handshake_fuzz
	@rm -rf $(FUZZ_DIR)/found && mkdir -p $(FUZZ_DIR)/found
	$< -runs=$(FUZZ_RUNS) -seed=1 -verbosity=0 -print_final_stats=1 -artifact_prefix=$(FUZZ_DIR)/ \
	    $(FUZZ_DIR)/found test/fuzz/corpus

-include $(FUZZ_DIR)/handshake_fuzz.d

## Each GPU kernel against its CPU twin, the model against PyTorch, many GPUs against one
test_gpu: check-deps
	$(SUB) PRECISION=FP32 GRAD_PRECISION= USE_CUDNN= gpu_tests cuda_trainer
	$(SUB) PRECISION=BF16 GRAD_PRECISION= gpu_tests cuda_trainer
	$(SUB) PRECISION=BF16 GRAD_PRECISION=FP32 gpu_tests
	$(SUB) PRECISION=BF16 GRAD_PRECISION= USE_CUDNN=0 cuda_trainer
	$(SUB) PRECISION=BF16 GRAD_PRECISION= SWITCHES=1 cuda_trainer
	@LLMC_BUILD_DIR=$(BUILD) $(PYTHON) dev/run_tests.py --skips test/skips.txt \
	    --out $(BUILD)/test $(GPU_RUNS) --unit many_gpus=test/test_many_gpus.py
cuda_trainer: $(CUDA_DIR)/train_gpt2cu

## 2, 4 and 8 ranks against one on the GPUs at hand, one GPU is enough (ARGS: see the script)
test_shared_gpu: $(if $(GPU),check-deps)
	$(need_gpu)
	$(SUB) PRECISION=BF16 GRAD_PRECISION= SWITCHES=1 cuda_trainer
	@LLMC_BUILD_DIR=$(BUILD) $(PYTHON) test/test_many_gpus.py --shared $(ARGS)

## Format, length of files and functions, forbidden words, Python warnings
check: setup
	@.venv/bin/python dev/check.py

# ---- use
## Install, build, get data, train a small model, sample, draw demo/loss.png
demo:
	@MAKE='$(MAKE)' dev/demo.sh

## Tiny Shakespeare as tokens, and the tokenizer
data: setup
	@.venv/bin/python dev/data/tinyshakespeare.py

## The table of speeds on the GPUs at hand, beside PyTorch (ARGS: see dev/bench/bench.py)
bench: $$(call compiled,$(BENCH_PROGRAMS)) | check-deps
	$(call compile,$(BENCH_PROGRAMS))
	@$(PYTHON) dev/bench/bench.py --trainer $(CUDA_DIR)/train_gpt2cu \
	    --forward-program $(CUDA_DIR)/bench_forward --comm-program $(CUDA_DIR)/bench_comm $(ARGS)

## Speed of the CPU build; ARGS="--compare FILE" for ratios to an earlier run on this machine
bench_cpu: check-deps
	$(SUB) PRECISION=FP32 GRAD_PRECISION= SANITIZE= bench_cpu_programs
	$(SUB) PRECISION=BF16 GRAD_PRECISION= SANITIZE= bench_cpu_programs
	@$(PYTHON) dev/bench/bench_cpu.py --build-dir $(BUILD) $(ARGS)
bench_cpu_programs: train_only $(CPU_DIR)/bench_launchers

## Measure cuBLASLt's algorithms on the GPU at hand, into llmc/matmul_algorithms.inc
tune: $(if $(GPU),$(CUDA_DIR)/tune)
	$(need_gpu)
	@$< $(TUNE_ARGS)

## Bandwidth of the gradient reduction beside NCCL's own (without a GPU: the CPU stand-in)
bench_comm: $(COMM_PROGRAM)
	@PROGRAM=$(COMM_PROGRAM) dev/bench/comm.sh $(ARGS)

## Time of a training step by kernel, on the GPU at hand (ARGS: see dev/bench/profile_step.py)
profile: $(if $(GPU),$(PROFILE_LIBRARY) train_gpt2cu)
	$(need_gpu)
	@$(PYTHON) dev/bench/profile_step.py --trainer ./train_gpt2cu --library $(PROFILE_LIBRARY) $(ARGS)

## Say what was found on this machine and what is missing
check-deps:
	@$(if $(filter 0,$(REPORT)),:,printf '%s\n' $(REPORT_LINES))

# A path given by the user means a library of the user's own, so no package replaces it.
PACKAGES := $(if $(OPENBLAS_LIB)$(OPENBLAS_PATH),,libopenblas-dev) \
    $(if $(GTEST_LIB)$(GTEST_PATH),,libgtest-dev)
OPTIONAL_PACKAGES := $(if $(wildcard llmc/cpu/nccl.h),$(if $(GLOO_LIB)$(GLOO_PATH),,libgloo-dev) \
    $(if $(OPENMPI_LIB)$(OPENMPI_DIR),,openmpi-bin libopenmpi-dev))

NEEDS_CUDNN_FRONTEND := $(and $(NVCC),$(CUDNN_LIB),$(if $(CUDNN_FRONTEND_INC)$(CUDNN_FRONTEND_PATH),,1))

## Install what is missing: Debian or Ubuntu packages, Python packages in .venv
setup:
	@CXX='$(CXX)' dev/setup.sh $(PACKAGES) $(addprefix --optional=,$(OPTIONAL_PACKAGES)) \
	    $(if $(NEEDS_CUDNN_FRONTEND),--python=dev/requirements-cuda.txt)

## Remove what was built
clean:
	rm -rf build train_gpt2cpu train_gpt2cu

## As clean, and remove .venv and demo/ too; data and logs stay
distclean: clean
	rm -rf .venv demo

## This list
help:
	@awk -f mk/help.awk Makefile

FORCE:
.PHONY: all train_gpt2cpu train_gpt2cu unit_tests gpu_tests build_tests $(TEST_BUILDS) train_only train_and_unit test test_unit \
    grade_checks print-grade-cpu print-grade-gpu test_sanitize test_full test_gpu test_shared_gpu fuzz check print-trainer demo data bench bench_cpu bench_cpu_programs bench_comm bench_forward profile cuda_trainer tune check-deps setup \
    clean distclean help FORCE
