// Many processes, one GPU each: how they find each other, what each of them owns (ZeRO; Rajbhandari
// et al. 2020, section 5), and the collectives of a step.
//
// With one process every function does what it means for N = 1 and nothing is communicated; so it is
// in a build without MULTI_GPU. zero_comm.cuh has the checked NCCL calls and the waits, and
// zero_exchange.cuh the reduction that gives the same bits on every number of GPUs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <string>
#include <utility>

#include "llmc/cuda_common.h"
#include "llmc/params.h"
#include "llmc/reduction.h"
#include "llmc/zero_comm.cuh"
#include "llmc/zero_exchange.cuh"
#ifdef MULTI_GPU
#include "llmc/zero_start.cuh"
#endif

namespace llmc {

// ---- start and end ----

namespace detail {

// How many processes a launcher has started together, by the variable `size_name`, and which of them
// this is. Without a launcher one.
struct Launched {
    int processes = 1;
    int rank = 0;
    const char* size_name = "";
};

inline Launched launched() {
    const std::pair<const char*, const char*> names[] = {
        {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
        {"PMI_SIZE", "PMI_RANK"},
        {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID"}};
    for (const auto& [size_name, rank_name] : names) {
        const char* size = std::getenv(size_name);
        const char* rank = std::getenv(rank_name);
        if (size == nullptr || std::atoi(size) < 2) continue;
        return {std::atoi(size), rank == nullptr ? 0 : std::atoi(rank), size_name};
    }
    return {};
}

// Throws Error when this process is one of several that a launcher started, although it would train
// alone: a job must never become N lone runs in one folder.
inline void refuse_lone_run(const std::string& why) {
    const Launched all = launched();
    if (all.processes == 1) return;
    throw Error(format("started as one of %d processes (%s), but %s", all.processes, all.size_name,
                       why.c_str()));
}

inline void check_ranks(int num_processes, int process_rank, int gpus_per_node) {
    if (num_processes < 1) {
        throw Error(format("-pn %d: must be 1 or more processes", num_processes));
    }
    if (process_rank < 0 || process_rank >= num_processes) {
        throw Error(
            format("-pr %d: must be 0 to %d, less than -pn", process_rank, num_processes - 1));
    }
    if (gpus_per_node < 1) throw Error(format("-pg %d: must be 1 or more", gpus_per_node));
}

}  // namespace detail

// mpirun ends all ranks when one fails, or ends without MPI_Init while others are in it; srun does not,
// unless it is told to.
inline bool started_by_mpirun() {
    return std::getenv("OMPI_COMM_WORLD_RANK") != nullptr;
}

// Throws Error when a number or a time limit of the environment is out of range, or when this one of
// several ranks has no GPU. multi_gpu_config_init does so, too; an error of this one comes before any
// other rank is looked for.
inline void multi_gpu_check_start(int num_processes, int process_rank, int gpus_per_node) {
    detail::check_ranks(num_processes, process_rank, gpus_per_node);
#ifdef MULTI_GPU
    detail::init_limit();
    detail::step_limit();
    if (num_processes > 1) detail::require_gpus();
#endif
}

#ifndef MULTI_GPU
inline void multi_gpu_decline(int, int, const std::string&, const std::string&, const std::string&,
                              int, const std::string&, bool = false) {}
inline void multi_gpu_decline_by_mpi(const std::string&) {}
#endif

// Finds the other processes by `init_method` and opens the communicator.
//
//   mpi  rank and size come from MPI, and the three numbers must not contradict it (0, or 1 process)
//   tcp  rank 0 listens on `server_ip` (its name, IPv4 or IPv6 address) and `server_port`
//   fs   rank 0 leaves a file in `fs_path`, a folder that all see
//
// For tcp and fs the GPU is process_rank % gpus_per_node. Waits for the others, at most
// LLMC_INIT_TIMEOUT_S seconds (300). Throws Error when a number is out of range, when ranks are
// missing then or decline, when there are fewer GPUs than ranks on a host, and when two ranks have one;
// UnmetError when this rank fails before it looks for the others, who have to be told.
inline MultiGpuConfig multi_gpu_config_init(int num_processes, int process_rank, int gpus_per_node,
                                            const std::string& server_ip,
                                            const std::string& fs_path,
                                            const std::string& init_method, int server_port = 17171,
                                            const CommunicatorOptions& communicator = {}) {
    multi_gpu_check_start(num_processes, process_rank, gpus_per_node);
    MultiGpuConfig config;
#ifdef MULTI_GPU
    ncclUniqueId id{};
    config.time_limit_s = detail::step_limit();
    if (init_method == "mpi") {
        id = detail::start_by_mpi(&config, num_processes);
    } else {
        config.num_processes = num_processes;
        config.process_rank = process_rank;
        config.local_device_idx = process_rank % gpus_per_node;
        if (num_processes == 1) {
            detail::refuse_lone_run("-pn is 1; give -pn and -pr to each");
        } else if (init_method == "tcp") {
            id = detail::start_by_tcp(&config, gpus_per_node, server_ip, server_port);
        } else if (init_method == "fs") {
            id = detail::start_by_fs(&config, gpus_per_node, fs_path);
        } else {
            throw Error(format("-pi %s: must be mpi, tcp or fs", init_method.c_str()));
        }
    }
    if (config.num_processes > 1) detail::open_communicator(&config, id, communicator);
#else
    (void)communicator;
    (void)server_ip;
    (void)fs_path;
    (void)init_method;
    (void)server_port;
    detail::refuse_lone_run(
        "this build is for one process; build without NO_MULTI_GPU, with NCCL (for a CPU: Gloo)");
    if (num_processes != 1) {
        throw Error(
            format("-pn %d: this build is for one process; build without NO_MULTI_GPU, "
                   "with NCCL (for a CPU: Gloo)",
                   num_processes));
    }
#endif
    return config;
}

// Closes the communicator in an orderly way; all ranks call it. Waits.
inline void multi_gpu_config_free(MultiGpuConfig* config) {
    if (planted_fault() == Fault::no_free) return;
#ifdef MULTI_GPU
    if (config->num_processes > 1) detail::close_communicator(config);
    detail::end_mpi(config);
#endif
    *config = {};
}

// ---- collectives on host values ----

// Sum of `value` over all ranks. Waits.
inline float multi_gpu_cpu_float_sum(float value, const MultiGpuConfig* config) {
#ifdef MULTI_GPU
    if (config->num_processes > 1 && planted_fault() != Fault::no_float_sum) {
        *config->unified_buffer = value;
        nccl_group(*config, "sum of a number", -1, [&] {
            nccl_check(*config,
                       ncclAllReduce(config->unified_buffer, config->unified_buffer, 1, ncclFloat32,
                                     ncclSum, config->nccl_comm, config->nccl_stream),
                       "sum of a number");
        });
        wait_for_stream(*config, "sum of a number", config->nccl_stream);
        return *config->unified_buffer;
    }
#endif
    (void)config;
    return value;
}

// Returns when every rank has called it.
inline void multi_gpu_barrier(const MultiGpuConfig* config) {
    if (planted_fault() == Fault::no_barrier) return;
    multi_gpu_cpu_float_sum(0.0f, config);
}

// ---- waits of the host ----

// Waits until the device has passed `event`. The one place where the host waits in a step.
inline void multi_gpu_wait_for(cudaEvent_t event, const MultiGpuConfig* config) {
#ifdef MULTI_GPU
    if (config->num_processes > 1) {
        wait_for_event(*config, "the step", event);
        config->watch->step_ends();
        return;
    }
#endif
    (void)config;
    cuda_check(cudaEventSynchronize(event));
}

// Waits until all that has been queued on `main_stream` and for communication is done.
inline void multi_gpu_drain(const MultiGpuConfig* config, cudaStream_t main_stream) {
#ifdef MULTI_GPU
    if (config->num_processes > 1) {
        wait_for_stream(*config, "the end of queued work", main_stream);
        wait_for_stream(*config, "the end of queued work", config->nccl_stream);
    }
#endif
    (void)config;
    (void)main_stream;
    cuda_check(cudaDeviceSynchronize());
}

// ---- shards ----

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
    if (planted_fault() == Fault::shard_offset) return {0, size};
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
    divides = divides || planted_fault() == Fault::zero_configs;
    if (!divides) return "Can't equally partition parameters: using ZeRO stage 0";
    config->zero_stage = 1;
    config->shard_num_parameters = total_parameters / n;
    return "";
}

// ---- gradients ----

// Makes ready for the reduction that `plan` names; call it once the ZeRO stage is settled.
inline void multi_gpu_plan_reduction(MultiGpuConfig* config, const ReductionPlan& plan) {
    (void)config;
    (void)plan;
#ifdef MULTI_GPU
    config->exchange.reset();
    if (config->num_processes == 1 || !plan.canonical) return;
    config->exchange = std::make_shared<GradientExchange>();
    config->exchange->stages = exchange_stages(config->nodes, config->process_rank);
    config->exchange->gather = config->zero_stage == 0 && planted_fault() != Fault::zero0_no_gather;
    if (planted_fault() == Fault::zero1_wrong_shard && config->zero_stage == 1) {
        for (ExchangeStage& stage : config->exchange->stages) {
            std::rotate(stage.shards.begin(), stage.shards.begin() + 1, stage.shards.end());
        }
    }
#endif
}

#ifdef MULTI_GPU
namespace detail {

// The plain path: NCCL adds, in an order of its own, and divides by N.
inline void reduce_by_nccl(const MultiGpuConfig& config, const GradientList& list) {
    const char* name = "reduction of gradients";
    nccl_group(config, name, -1, [&] {
        for (size_t i = 0; i < list.sizes.size(); ++i) {
            gradX* tensor = list.tensors[i];
            if (config.zero_stage == 0) {
                nccl_check(config,
                           ncclAllReduce(tensor, tensor, list.sizes[i], kNcclType<gradX>, ncclAvg,
                                         config.nccl_comm, config.nccl_stream),
                           name);
            } else {
                const ShardInfo shard = multi_gpu_get_shard_offset(list.sizes[i], &config, 1);
                nccl_check(
                    config,
                    ncclReduceScatter(tensor, tensor + shard.offset, shard.size, kNcclType<gradX>,
                                      ncclAvg, config.nccl_comm, config.nccl_stream),
                    name);
            }
        }
    });
}

}  // namespace detail
#endif

// Queues the reduction of N tensors of `sizes` elements, whose gradients are final where
// `compute_stream` stands now: by the canonical tree, or, when config->exchange is null, by NCCL as
// means. Afterwards ZeRO-0 has the result whole, ZeRO-1 this rank's shard of each tensor and rubbish
// elsewhere. The host does not wait; multi_gpu_finish_reduction makes a stream wait.
template <size_t N>
void multi_gpu_async_reduce_gradient(gradX* const (&pointers)[N], const size_t (&sizes)[N],
                                     MultiGpuConfig* config, cudaStream_t compute_stream) {
    if (config->num_processes == 1) return;
#ifdef MULTI_GPU
    const GradientList list = {{pointers, pointers + N}, {sizes, sizes + N}};
    if (planted_fault() == Fault::host_waits) cuda_check(cudaStreamSynchronize(compute_stream));
    if (planted_fault() != Fault::early_reduce) {
        nccl_waits_for(*config, compute_stream);
        if (config->exchange != nullptr) exchange_waits_for_gradients(*config);
    }
    if (config->exchange != nullptr) {
        exchange_gradients(*config, list);
    } else {
        detail::reduce_by_nccl(*config, list);
    }
#else
    (void)pointers;
    (void)sizes;
    (void)compute_stream;
#endif
}

// `stream` goes on when all reductions of the step are complete.
inline void multi_gpu_finish_reduction(const MultiGpuConfig* config, cudaStream_t stream) {
    if (config->num_processes == 1) return;
#ifdef MULTI_GPU
    if (config->exchange != nullptr) {
        finish_exchange(*config, stream);
    } else {
        cuda_check(cudaEventRecord(config->compute_nccl_sync, config->nccl_stream));
        cuda_check(cudaStreamWaitEvent(stream, config->compute_nccl_sync, 0));
    }
#endif
    (void)stream;
}

// ---- what the update needs of the others ----

// sums (count) = the sum over all ranks of own (count), where `stream` stands now, and `stream` goes on
// when it is there. With all but one rank's value 0, as here, the sum is that value exactly.
inline void multi_gpu_sum_doubles(double* sums, const double* own, size_t count,
                                  const MultiGpuConfig* config, cudaStream_t stream) {
#ifdef MULTI_GPU
    if (config->num_processes > 1) {
        const char* name = "exchange of losses and norms";
        nccl_waits_for(*config, stream);
        nccl_group(*config, name, -1, [&] {
            nccl_check(*config,
                       ncclAllReduce(own, sums, count, ncclFloat64, ncclSum, config->nccl_comm,
                                     config->nccl_stream),
                       name);
        });
        cuda_check(cudaEventRecord(config->compute_nccl_sync, config->nccl_stream));
        cuda_check(cudaStreamWaitEvent(stream, config->compute_nccl_sync, 0));
        return;
    }
#endif
    (void)sums;  // the same buffer as own
    (void)own;
    (void)count;
    (void)config;
    (void)stream;
}

// Queues the gathering of `tensors` of `sizes` elements, of which this rank has brought its shard up to
// date where `stream` stands now; `gathered` is recorded behind it. Call it under ZeRO-1 with N > 1.
inline void multi_gpu_gather_weights(floatX* const* tensors, const size_t* sizes, size_t count,
                                     int group, cudaEvent_t gathered, const MultiGpuConfig* config,
                                     cudaStream_t stream) {
#ifdef MULTI_GPU
    const char* name = "gathering of weights";
    if (planted_fault() != Fault::early_gather) nccl_waits_for(*config, stream);
    if (planted_fault() == Fault::no_weight_gather) count = 0;
    nccl_group(*config, name, group, [&] {
        for (size_t i = 0; i < count; ++i) {
            const ShardInfo shard = multi_gpu_get_shard_offset(sizes[i], config, 1);
            nccl_check(*config,
                       ncclAllGather(tensors[i] + shard.offset, tensors[i], shard.size,
                                     kNcclType<floatX>, config->nccl_comm, config->nccl_stream),
                       name);
        }
    });
    cuda_check(cudaEventRecord(gathered, config->nccl_stream));
#else
    (void)tensors;
    (void)sizes;
    (void)count;
    (void)group;
    (void)gathered;
    (void)config;
    (void)stream;
#endif
}

// Says to the other ranks what this one does for a while without them. `what` must be a string that lasts.
inline void multi_gpu_busy_with(const MultiGpuConfig* config, const char* what) {
#ifdef MULTI_GPU
    if (config->log != nullptr)
        config->peers->progress(config->log->step, config->log->count, what);
#endif
    (void)config;
    (void)what;
}

// From here on, until multi_gpu_wait_for returns, the host works on `step`; messages name it.
inline void multi_gpu_begin_step(const MultiGpuConfig* config, int step) {
#ifdef MULTI_GPU
    if (config->log != nullptr) {
        config->log->step = step;
        config->watch->step_begins();
    }
#endif
    (void)config;
    (void)step;
}

}  // namespace llmc
