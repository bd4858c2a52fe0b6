// Faults and delays that tests plant, to show that the equality tests would find them. Only a build
// with -DLLMC_TEST_SWITCHES (make SWITCHES=1) has them; elsewhere every function here is a constant.
//
//   LLMC_FAULT            what is done wrong: see kFaults
//   LLMC_DELAY_MAIN_US    before a group's gradients are final, and before its update, up to so many
//                         microseconds on the main stream
//   LLMC_DELAY_NCCL_US    likewise on the streams that communicate
//   LLMC_DELAY_UPDATE_US  before AdamW, once the host knows of the step's loss
//   LLMC_DELAY_HOST_US    the host stands still, exactly so long, before it waits for a step
//   LLMC_JUNK=1           junk in what a step must not read of the one before
//   LLMC_HOST             stands for the host's name
//   LLMC_NO_GPU           this process is one of several and finds no GPU, by CUDA's error of this number
//   LLMC_DECLINE_S        how long a rank that does not start stays to tell the others
#pragma once

#ifdef LLMC_TEST_SWITCHES
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "llmc/error.h"
#endif

namespace llmc {

enum class Fault {
    none,
    owner_fp32,         // an owner adds its pieces in fp32 and rounds once
    swapped_children,   // an owner's tree takes its second and third piece the other way round
    fused_leaf,         // a slot's gradients are added to the spare without rounding them first
    round_robin,        // micro-batches are dealt in turn
    rank_order_chunks,  // sums of squares are added rank by rank
    rank_seed,          // stochastic rounding depends on the rank
    early_reduce,       // a reduction starts before its gradients are final
    early_gather,       // an all-gather starts before its update
    mpi_rank,           // ranks are numbered the other way round than MPI does
    fs_id,              // all but rank 0 get another NCCL id from the shared folder
    tcp_id,             // likewise over TCP
    local_index,        // lower ranks of other hosts count
    no_free,            // the communicator is not closed
    no_barrier,         // a barrier does not wait
    no_float_sum,       // a sum of host values is this rank's value
    shard_offset,       // every rank's shard is the first one
    zero_configs,       // ZeRO-1 although the parameters do not divide
    host_waits,         // the host waits for the gradients before it queues their reduction
    zero0_no_gather,    // the shards' sums stay with their owners
    zero1_wrong_shard,  // a rank sums its neighbour's shard
    no_weight_gather,   // updated weights stay with their owners
    divided_twice,      // the mean over ranks is divided by their number once more
    no_id,              // NCCL gives rank 0 no id
    no_address,         // a rank does not learn its GPU's address
};

#ifdef LLMC_TEST_SWITCHES

constexpr std::array<const char*, 25> kFaults = {"",
                                                 "owner_fp32",
                                                 "swapped_children",
                                                 "fused_leaf",
                                                 "round_robin",
                                                 "rank_order_chunks",
                                                 "rank_seed",
                                                 "early_reduce",
                                                 "early_gather",
                                                 "mpi_rank",
                                                 "fs_id",
                                                 "tcp_id",
                                                 "local_index",
                                                 "no_free",
                                                 "no_barrier",
                                                 "no_float_sum",
                                                 "shard_offset",
                                                 "zero_configs",
                                                 "host_waits",
                                                 "zero0_no_gather",
                                                 "zero1_wrong_shard",
                                                 "no_weight_gather",
                                                 "divided_twice",
                                                 "no_id",
                                                 "no_address"};

inline Fault planted_fault() {
    static const Fault fault = [] {
        const char* name = std::getenv("LLMC_FAULT");
        if (name == nullptr) return Fault::none;
        const auto found = std::find(kFaults.begin(), kFaults.end(), std::string(name));
        if (found == kFaults.end()) throw Error(std::string("LLMC_FAULT=") + name + ": unknown");
        return static_cast<Fault>(found - kFaults.begin());
    }();
    return fault;
}

inline int switch_value(const char* name) {
    const char* value = std::getenv(name);
    return value != nullptr ? std::atoi(value) : 0;
}

// A pseudo-random part of `most`.
inline int random_part(int most) {
    static thread_local uint32_t state =
        static_cast<uint32_t>(std::chrono::steady_clock::now().time_since_epoch().count()) | 1u;
    state = state * 1664525u + 1013904223u;
    return most > 0 ? static_cast<int>((state >> 8) % static_cast<uint32_t>(most)) : 0;
}

inline bool junk_between_steps() {
    return switch_value("LLMC_JUNK") != 0;
}

#else

constexpr Fault planted_fault() {
    return Fault::none;
}
constexpr bool junk_between_steps() {
    return false;
}

#endif

}  // namespace llmc
