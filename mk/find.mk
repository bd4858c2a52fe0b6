# What this machine has. A library counts as found when its header and the library file itself lie
# where the compiler and the linker look, or under the path given for it; no list of packages is
# asked, since a package's name proves nothing. All of it costs two short compiler calls.
#
# For each NAME below: NAME_INC, the folder of its header, and NAME_LIB, the folder of its library,
# both empty unless both were found.

MULTIARCH := $(shell $(CXX) -print-multiarch 2>/dev/null)
INCLUDE_DIRS := $(shell $(CXX) -E -v -x c++ /dev/null 2>&1 | sed -n 's/^ \(\/.*\)/\1/p')
LIB_DIRS := $(subst :, ,$(shell $(CXX) -print-search-dirs 2>/dev/null | sed -n 's/^libraries: =//p')) \
    /usr/local/lib
LIB_DIRS := $(abspath $(LIB_DIRS))

# Folders under a path that the user gave.
inc_under = $(foreach p,$(1),$(p)/include $(p)/include/$(MULTIARCH) $(p))
lib_under = $(foreach p,$(1),$(p)/lib64 $(p)/lib $(p)/lib/$(MULTIARCH) \
    $(p)/targets/$(firstword $(subst -, ,$(MULTIARCH)))-linux/lib $(p))

# $(call holds,FILES,DIRS): the first of DIRS that holds one of FILES.
holds = $(firstword $(foreach d,$(2),$(if $(wildcard $(addprefix $(d)/,$(1))),$(d))))

# $(eval $(call look,NAME,HEADER,LIBRARY,PATH,INCLUDE DIRS,LIB DIRS)): the folders of HEADER and
# libLIBRARY.so or .a; under PATH alone when it is not empty.
define look
$(1)_INC := $$(call holds,$(2),$(if $(4),$(call inc_under,$(4)),$(5)))
$(1)_LIB := $$(call holds,lib$(3).so lib$(3).a,$(if $(4),$(call lib_under,$(4)),$(6)))
ifeq ($$(and $$($(1)_INC),$$($(1)_LIB)),)
$(1)_INC :=
$(1)_LIB :=
endif
endef

# ---- the CUDA toolkit
NVCC := $(firstword $(wildcard $(if $(CUDA_HOME),$(CUDA_HOME)/bin/nvcc, \
    $(addsuffix /nvcc,$(subst :, ,$(PATH))) /usr/local/cuda/bin/nvcc)))
CUDA_ROOT := $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
CUDA_INC_DIRS := $(if $(CUDA_ROOT),$(call inc_under,$(CUDA_ROOT)))
CUDA_LIB_DIRS := $(if $(CUDA_ROOT),$(call lib_under,$(CUDA_ROOT)))
CUDA_LIB := $(call holds,libcublasLt.so libcublasLt_static.a,$(CUDA_LIB_DIRS) $(LIB_DIRS))
# A GPU that the driver has announced; nvidia-smi would take up to a second.
GPU := $(firstword $(wildcard /dev/nvidia[0-9]* /dev/dxg))
# First in the recipe of what only measures; its programs are prerequisites only where this is no error.
need_gpu = $(if $(GPU),,$(error make $@ needs a GPU, and there is none here))

# ---- libraries
SYSTEM_MPI_INC := $(addsuffix /openmpi/include,$(LIB_DIRS)) /usr/include/openmpi-$(firstword \
    $(subst -, ,$(MULTIARCH)))
SYSTEM_MPI_LIB := $(LIB_DIRS) $(addsuffix /openmpi/lib,$(LIB_DIRS))
FRONTEND_DIRS := $(if $(CUDNN_FRONTEND_PATH),$(call inc_under,$(CUDNN_FRONTEND_PATH)), \
    $(wildcard .venv/lib/python3*/site-packages/include) $(INCLUDE_DIRS))

$(eval $(call look,NCCL,nccl.h,nccl,$(NCCL_PATH),$(CUDA_INC_DIRS) $(INCLUDE_DIRS),$(CUDA_LIB_DIRS) $(LIB_DIRS)))
$(eval $(call look,CUDNN,cudnn.h,cudnn,$(CUDNN_PATH),$(CUDA_INC_DIRS) $(INCLUDE_DIRS),$(CUDA_LIB_DIRS) $(LIB_DIRS)))
$(eval $(call look,OPENMPI,mpi.h,mpi,$(OPENMPI_DIR),$(INCLUDE_DIRS) $(SYSTEM_MPI_INC),$(SYSTEM_MPI_LIB)))
$(eval $(call look,OPENBLAS,cblas.h,openblas,$(OPENBLAS_PATH),$(INCLUDE_DIRS) /usr/include/openblas,$(LIB_DIRS)))
$(eval $(call look,GLOO,gloo/context.h,gloo,$(GLOO_PATH),$(INCLUDE_DIRS),$(LIB_DIRS)))
$(eval $(call look,GTEST,gtest/gtest.h,gtest,$(GTEST_PATH),$(INCLUDE_DIRS),$(LIB_DIRS)))
CUDNN_FRONTEND_INC := $(call holds,cudnn_frontend.h,$(FRONTEND_DIRS))

# $(call inc,NAME) and $(call lib,NAME): compiler and linker options for a folder that is not
# searched anyway. Headers of others raise no warnings, hence -isystem.
inc = $(addprefix -isystem ,$(filter-out $(INCLUDE_DIRS),$($(1)_INC)))
lib = $(foreach d,$(filter-out $(LIB_DIRS),$($(1)_LIB)),-L$(d) -Wl$(comma)-rpath$(comma)$(d))

# ---- the report
HINT_NVCC := the CUDA toolkit (developer.nvidia.com/cuda-downloads), or set CUDA_HOME
HINT_NCCL := libnccl2 and libnccl-dev from NVIDIA's repository, or set NCCL_PATH
HINT_CUDNN := libcudnn9-dev-cuda-13 (or your CUDA version's) from NVIDIA's repository, or set CUDNN_PATH
HINT_CUDNN_FRONTEND := make setup, or set CUDNN_FRONTEND_PATH
HINT_OPENMPI := apt-get install openmpi-bin libopenmpi-dev, or set OPENMPI_DIR
HINT_OPENBLAS := apt-get install libopenblas-dev, or set OPENBLAS_PATH
HINT_GLOO := apt-get install libgloo-dev, or set GLOO_PATH
HINT_GTEST := apt-get install libgtest-dev, or set GTEST_PATH

# $(call missing,TITLE,NAME,PATH VARIABLE): what was not found, where, and what would help.
missing = $(1): not found$(if $($(3)), in $(3)=$($(3))); to get it: $(HINT_$(2))
# $(call line,TITLE,NAME,WHERE IT WAS FOUND,PATH VARIABLE): one line, quoted for the shell.
line = $(call quote,$(if $(3),✓ $(1) ($(3)),✗ $(call missing,$(1),$(2),$(4))))
REPORT_LINES = $(call line,nvcc,NVCC,$(NVCC),CUDA_HOME) \
    $(call line,NCCL,NCCL,$(NCCL_LIB),NCCL_PATH) \
    $(call line,OpenMPI,OPENMPI,$(OPENMPI_LIB),OPENMPI_DIR) \
    $(call line,cuDNN,CUDNN,$(CUDNN_LIB),CUDNN_PATH) \
    $(call line,cuDNN front-end,CUDNN_FRONTEND,$(CUDNN_FRONTEND_INC),CUDNN_FRONTEND_PATH) \
    $(call line,OpenBLAS,OPENBLAS,$(OPENBLAS_LIB),OPENBLAS_PATH) \
    $(call line,Gloo,GLOO,$(GLOO_LIB),GLOO_PATH) \
    $(call line,GoogleTest,GTEST,$(GTEST_LIB),GTEST_PATH)
