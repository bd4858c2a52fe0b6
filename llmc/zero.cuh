// Processes, shards and collectives.
//
// This version trains in one process: every function has the meaning that it has among N, for N = 1.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <string>

#include "llmc/cuda_common.h"
#include "llmc/params.h"

namespace llmc {

struct MultiGpuConfig {
    int process_rank = 0;
    int num_processes = 1;
    int local_device_idx = 0;  // GPU of this process on its node
    int zero_stage = 0;        // 0: optimizer state whole on every rank; 1: a shard on each
    size_t shard_num_parameters = 0;
};

// Finds the other processes by `init_method`: mpi, tcp or fs. Throws Error when there should be more
// than this one, so that a job never becomes N lone runs in one folder.
inline MultiGpuConfig multi_gpu_config_init(int num_processes, int process_rank, int gpus_per_node,
                                            const std::string& server_ip,
                                            const std::string& fs_path,
                                            const std::string& init_method) {
    (void)gpus_per_node;
    (void)server_ip;
    (void)fs_path;
    for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
        const char* size = std::getenv(name);
        if (size != nullptr && std::atoi(size) > 1) {
            throw Error(
                format("-pi %s: started as one of %s processes (%s), but this build has no "
                       "multi-GPU support; run it without mpirun or srun",
                       init_method.c_str(), size, name));
        }
    }
    if (num_processes != 1) {
        throw Error(
            format("-pn %d: this build has no multi-GPU support; expected 1", num_processes));
    }
    if (process_rank != 0) {
        throw Error(
            format("-pr %d: must be below the number of processes, 1; expected 0", process_rank));
    }
    return {};
}

inline void multi_gpu_config_free(MultiGpuConfig* config) {
    *config = {};
}

// Returns when every process has called it.
inline void multi_gpu_barrier(const MultiGpuConfig* config) {
    (void)config;
}

// Waits on the host until the device has passed `event`. The one place where the host waits in a step.
inline void multi_gpu_wait_for(cudaEvent_t event, const MultiGpuConfig* config) {
    (void)config;
    cuda_check(cudaEventSynchronize(event));
}

// Sum of `value` over all processes.
inline float multi_gpu_cpu_float_sum(float value, MultiGpuConfig* config) {
    (void)config;
    return value;
}

struct ShardInfo {
    size_t offset;
    size_t size;
};

// This rank's elements of a tensor of `elements`: its shard when the ZeRO stage is at least
// `shard_at_stage`, else all. Throws Error when the shards would not be equal.
inline ShardInfo multi_gpu_get_shard_offset(size_t elements, const MultiGpuConfig* config,
                                            int shard_at_stage) {
    if (config->zero_stage < shard_at_stage) return {0, elements};
    if (elements % config->num_processes != 0) {
        throw Error(format("a tensor of %zu elements cannot be cut into %d equal shards", elements,
                           config->num_processes));
    }
    const size_t size = elements / config->num_processes;
    return {config->process_rank * size, size};
}

// Settles the ZeRO stage; returns the line to print when it is not the one asked for, else "".
inline std::string set_zero_configs(MultiGpuConfig* config, int zero_stage,
                                    const ParamLayout& layout) {
    const size_t total_parameters = layout.num_parameters();
    const size_t n = static_cast<size_t>(config->num_processes);
    config->zero_stage = 0;
    config->shard_num_parameters = total_parameters;
    if (zero_stage == 0) return "";
    if (zero_stage > 1) return format("ZeRO stage %d is not supported: using stage 0", zero_stage);
    bool divides = total_parameters % n == 0;
    layout.for_each_layer([&](const ParamInfo& info, size_t) {
        divides = divides && layout.layer_elements(info.id) % n == 0;
    });
    if (!divides) return "Can't equally partition parameters: using ZeRO stage 0";
    config->zero_stage = 1;
    config->shard_num_parameters = total_parameters / n;
    return "";
}

}  // namespace llmc
