# The CPU build: train_gpt2.cu compiled as C++ over the twins and stand-ins in llmc/cpu, and the
# unit tests.

CPU_PRECISION := $(or $(PRECISION),FP32)
CPU_GRAD_FP32 := $(if $(filter BF16,$(CPU_PRECISION)),$(filter FP32,$(GRAD_PRECISION)))

# $(call cpu_dir,PRECISION,GRAD_FP32,SANITIZE)
cpu_dir = $(BUILD)/cpu-$(call lower,$(1))$(if $(2),-gradfp32)$(if $(3),-$(SANITIZER_$(3)))
SANITIZER_address := asan
SANITIZER_thread := tsan
CPU_DIR := $(call cpu_dir,$(CPU_PRECISION),$(CPU_GRAD_FP32),$(SANITIZE))$(if $(filter 1,$(SWITCHES)),-switches)

CPU_LIBS := $(call lib,OPENBLAS) -lopenblas
CPU_FLAGS := -std=c++17 -march=$(CPU_ARCH) -ffp-contract=off -Wall -Wextra $(WARNINGS_ARE_ERRORS) \
    -pthread -I. -Illmc/cpu $(call inc,OPENBLAS) -DLLMC_$(CPU_PRECISION) \
    $(if $(CPU_GRAD_FP32),-DLLMC_GRAD_FP32) $(if $(filter 1,$(SWITCHES)),-DLLMC_TEST_SWITCHES)

# Several processes: Gloo carries the collectives of llmc/cpu/nccl.h, MPI starts the ranks.
CPU_MULTI := $(and $(wildcard llmc/cpu/nccl.h),$(GLOO_LIB),$(filter-out x1,x$(NO_MULTI_GPU)))
CPU_MPI := $(and $(CPU_MULTI),$(OPENMPI_LIB),$(filter-out x1,x$(NO_USE_MPI)))
ifneq ($(CPU_MULTI),)
CPU_FLAGS += -DMULTI_GPU $(call inc,GLOO)
CPU_LIBS += $(call lib,GLOO) -lgloo
endif
ifneq ($(CPU_MPI),)
CPU_FLAGS += -DUSE_MPI -DOMPI_SKIP_MPICXX=1 $(call inc,OPENMPI)
CPU_LIBS += $(call lib,OPENMPI) -lmpi
endif

ifneq ($(SANITIZE),)
# gcc's flow analysis is unsure inside instrumented code, so that one warning is off. -g1: reports
# name functions and lines, which is all they need, in three quarters of the time to compile.
CPU_FLAGS += -g1 -fsanitize=$(if $(filter address,$(SANITIZE)),address$(comma)undefined,$(SANITIZE)) \
    -fno-sanitize-recover=all -Wno-maybe-uninitialized
endif
TRAINER_OPT := $(if $(SANITIZE),-O1,-O3)
# Instrumented code takes twice as long to compile at -O1 as at -O0, and gains little from it.
UNIT_OPT := $(if $(filter address,$(SANITIZE)),-O0,-O1)

# Part of each stamp: what else decides about the code. -march=native means another code on another
# processor, by its feature flags; another compiler under the same name (an upgrade) cannot use what this
# one has precompiled.
CPU_ID := $(shell $(CXX) --version 2>/dev/null | head -n 1) $(if $(filter native,$(CPU_ARCH)),$(shell grep -m1 -iE '^(flags|features)' /proc/cpuinfo | cksum))

TRAINER_BUILD = $(CXX) $(CPU_FLAGS) $(TRAINER_OPT) -DLLMC_COMMIT='"$(COMMIT)"'
UNIT_COMPILE = $(CXX) $(CPU_FLAGS) $(UNIT_OPT) $(call inc,GTEST)
# What every test includes takes a third of a small test's time to compile: it is precompiled, once
# for each build. Nothing else is, so that a test still needs all its other headers.
UNIT_HEADER := $(CPU_DIR)/unit/googletest.h
UNIT_INCLUDE := -include $(UNIT_HEADER)
UNIT_LINK = $(CXX) $(CPU_FLAGS) $(UNIT_OBJECTS) -o $(CPU_DIR)/unit_tests $(call lib,GTEST) \
    -lgtest_main -lgtest $(CPU_LIBS)
# The checks of ./grade have the switches in every build, so that they can name other hosts.
GRADE_BUILD = $(CXX) $(CPU_FLAGS) $(UNIT_OPT) -DLLMC_TEST_SWITCHES
# The tests, and the functions of train_gpt2.cu that some of them call. Kernels are templates that the
# FP32 build tests with every type, so the BF16 one has only the tests that name the build's own types.
UNIT_SOURCES := $(if $(filter BF16,$(CPU_PRECISION)),$(shell grep -lwE 'floatX|gradX|LLMC_BF16' \
    test/unit/test_*.cpp),$(wildcard test/unit/test_*.cpp))
UNIT_OBJECTS := $(patsubst test/unit/%.cpp,$(CPU_DIR)/unit/%.o,$(UNIT_SOURCES)) \
    $(CPU_DIR)/unit/train_gpt2.o

$(eval $(call stamp,$(CPU_DIR)/trainer.flags,$$(TRAINER_BUILD) $$(CPU_LIBS) # $$(CPU_ID)))
$(eval $(call stamp,$(CPU_DIR)/unit.flags,$$(UNIT_COMPILE) # $$(CPU_ID)))
$(eval $(call stamp,$(CPU_DIR)/unit_tests.flags,$$(UNIT_LINK)))
$(eval $(call stamp,$(CPU_DIR)/grade.flags,$$(GRADE_BUILD) $$(CPU_LIBS) # $$(CPU_ID)))

$(CPU_DIR)/train_gpt2cpu: train_gpt2.cu $(CPU_DIR)/trainer.flags
	$(call need,OpenBLAS,OPENBLAS,OPENBLAS_PATH)
	$(TRAINER_BUILD) $(DEPFLAGS) -x c++ $< -o $@ $(CPU_LIBS)

$(UNIT_HEADER).gch: $(CPU_DIR)/unit.flags
	$(call need,GoogleTest,GTEST,GTEST_PATH)
	@mkdir -p $(@D)
	@echo '#include <gtest/gtest.h>' >$(UNIT_HEADER)
	$(UNIT_COMPILE) $(DEPFLAGS) -x c++-header $(UNIT_HEADER) -o $@

$(CPU_DIR)/unit/test_%.o: test/unit/test_%.cpp $(UNIT_HEADER).gch $(CPU_DIR)/unit.flags
	$(call need,OpenBLAS,OPENBLAS,OPENBLAS_PATH)
	$(UNIT_COMPILE) $(UNIT_INCLUDE) $(DEPFLAGS) -c $< -o $@

# The one test that runs so long that -O1 pays in every build; private, so that the stamp, which this
# file needs too, keeps the flags of the others. A precompiled header is for one level only.
ifneq ($(UNIT_OPT),-O1)
$(CPU_DIR)/unit/test_matmul.o: private UNIT_OPT := -O1
$(CPU_DIR)/unit/test_matmul.o: private UNIT_INCLUDE :=
endif

$(CPU_DIR)/unit/train_gpt2.o: train_gpt2.cu $(CPU_DIR)/unit.flags
	$(call need,OpenBLAS,OPENBLAS,OPENBLAS_PATH)
	@mkdir -p $(@D)
	$(UNIT_COMPILE) $(DEPFLAGS) -DLLMC_NO_MAIN -x c++ -c $< -o $@

$(CPU_DIR)/unit_tests: $(UNIT_OBJECTS) $(CPU_DIR)/unit_tests.flags
	$(UNIT_LINK)

$(CPU_DIR)/grade_checks: test/grade/checks.cu $(CPU_DIR)/grade.flags
	$(call need,OpenBLAS,OPENBLAS,OPENBLAS_PATH)
	$(GRADE_BUILD) $(DEPFLAGS) -x c++ $< -o $@ $(CPU_LIBS)

-include $(CPU_DIR)/grade_checks.d $(CPU_DIR)/train_gpt2cpu.d $(UNIT_OBJECTS:=.d) $(UNIT_HEADER).gch.d
