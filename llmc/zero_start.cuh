// How processes find each other and open a communicator: by MPI, over TCP, or through a shared folder.
//
// Each way tells a process two things, the NCCL id and where rank 0 listens. From there all go on alike:
// every rank shakes hands with rank 0 (peers.h), which refuses what does not fit before NCCL starts, and
// keeps that connection as the channel on which ranks learn of each other's end.
#pragma once

#ifdef MULTI_GPU

#include <limits.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "llmc/hash.h"
#include "llmc/peers.h"
#include "llmc/shared_id_file.h"
#include "llmc/zero_comm.cuh"

#ifdef USE_MPI
#include <mpi.h>
#endif

namespace llmc {

namespace detail {

inline double init_limit() {
    return seconds_from_environment("LLMC_INIT_TIMEOUT_S", 300.0);
}

inline double step_limit() {
    return seconds_from_environment("LLMC_COMM_TIMEOUT_S", 600.0);
}

// What tells this job's processes from another's: LLMC_JOB_TOKEN, else the Slurm job's number, else "".
inline std::string job_token() {
    for (const char* name : {"LLMC_JOB_TOKEN", "SLURM_JOB_ID"}) {
        const char* value = std::getenv(name);
        if (value != nullptr && *value != '\0') return value;
    }
    return "";
}

// The host's name up to the first dot, by which processes of one host know each other.
inline std::string short_host_name() {
    char own[HOST_NAME_MAX + 1] = {};
    if (::gethostname(own, sizeof(own) - 1) != 0) return "unknown";
    std::string name = own;
#ifdef LLMC_TEST_SWITCHES
    if (const char* other = std::getenv("LLMC_HOST")) name = other;
#endif
    return name.substr(0, name.find('.'));
}

inline uint64_t host_hash() {
    const std::string name = short_host_name();
    return hash_elements(name.data(), 1, name.size(), 0) | 1u;
}

// GPUs of this host. Throws UnmetError without any, with CUDA's reason when it has one.
inline int require_gpus() {
    int count = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
#ifdef LLMC_TEST_SWITCHES
    if (const char* number = std::getenv("LLMC_NO_GPU")) {
        count = 0;
        status = static_cast<cudaError_t>(std::atoi(number));
    }
#endif
    if (status == cudaSuccess && count > 0) return count;
    std::string why;
    if (status != cudaSuccess && status != cudaErrorNoDevice) {
        why = format(": %s", cudaGetErrorString(status));
    }
    throw UnmetError("no GPU on " + short_host_name() + why);
}

// Settles which GPU this process uses. Throws UnmetError without a GPU; returns what is wrong when the host
// has fewer GPUs than ranks, for the other ranks to hear of, too.
inline std::string choose_device(MultiGpuConfig* config) {
    const int count = require_gpus();
    // Where a launcher shows each process one GPU, that is the first; whether it is the process's own is
    // seen by its address when the ranks meet.
    if (count == 1) config->local_device_idx = 0;
    if (config->local_device_idx < count) return "";
    return format(
        "the host %s has %d GPUs and at least %d ranks; start at most %d there (-pn, -pg, mpirun "
        "-np)",
        short_host_name().c_str(), count, config->local_device_idx + 1, count);
}

// Ends a start in which this rank has a problem: the others, who have met it by now, hear of it.
inline void refuse_start(const MultiGpuConfig& config, const std::string& problem) {
    if (problem.empty()) return;
    config.peers->announce_failure(problem);
    throw Error(format("rank %d: %s", config.process_rank, problem.c_str()));
}

// The GPU's address on its host; "" for a CPU, which any number of ranks may share.
inline std::string device_address([[maybe_unused]] const MultiGpuConfig& config) {
#ifdef LLMC_CPU
    return "";
#else
    char pci[32] = {};
    int count = 0;
    cuda_check(cudaGetDeviceCount(&count));
    if (config.local_device_idx >= count) return "";
    cuda_check(cudaDeviceGetPCIBusId(pci, sizeof(pci), config.local_device_idx));
    return pci;
#endif
}

inline PeerInfo describe_self(const MultiGpuConfig& config) {
    if (planted_fault() == Fault::no_address) throw Error("no address of the GPU (planted)");
    return {config.process_rank, config.num_processes, host_hash(), device_address(config)};
}

inline ncclUniqueId new_nccl_id() {
    ncclUniqueId id;
    static_assert(sizeof(id.internal) == kIdBytes);
    ncclResult_t result = ncclGetUniqueId(&id);
    if (planted_fault() == Fault::no_id) result = ncclSystemError;
    if (result != ncclSuccess) {
        throw Error(format("NCCL: no id: %s", ncclGetErrorString(result)));
    }
    return id;
}

inline void copy_id(ncclUniqueId* to, const unsigned char (&from)[kIdBytes]) {
    std::memcpy(to->internal, from, kIdBytes);
}

// What a rank must have before it meets the others.
struct StartData {
    PeerInfo self;
    ncclUniqueId id{};  // rank 0's
};

// What can fail on this rank alone comes before the meeting: an Error of `work` becomes UnmetError.
template <class Work>
auto before_meeting(Work&& work) {
    try {
        return work();
    } catch (const Error& error) {
        throw UnmetError(error.what());
    }
}

inline StartData make_start_data(const MultiGpuConfig& config) {
    return before_meeting([&] {
        StartData own;
        own.self = describe_self(config);
        if (config.process_rank == 0) own.id = new_nccl_id();
        return own;
    });
}

// Node of each rank by its host, numbered in order of appearance.
inline std::vector<int> nodes_by_host(const std::vector<PeerInfo>& table) {
    std::vector<int> nodes;
    std::vector<uint64_t> hosts;
    for (const PeerInfo& peer : table) {
        const auto found = std::find(hosts.begin(), hosts.end(), peer.host_hash);
        nodes.push_back(static_cast<int>(found - hosts.begin()));
        if (found == hosts.end()) hosts.push_back(peer.host_hash);
    }
    return nodes;
}

inline std::vector<int> nodes_by_rank(int num_processes, int gpus_per_node) {
    std::vector<int> nodes;
    for (int rank = 0; rank < num_processes; ++rank) nodes.push_back(rank / gpus_per_node);
    return nodes;
}

// Calls `action` on a thread of its own once it has lived for so many seconds.
class AfterSeconds {
  public:
    AfterSeconds(double seconds, std::function<void()> action)
        : watch_([this, seconds, action = std::move(action)] {
              std::unique_lock<std::mutex> lock(mutex_);
              const auto is_done = [this] { return is_done_; };
              if (!done_.wait_for(lock, std::chrono::duration<double>(seconds), is_done)) action();
          }) {}
    AfterSeconds(const AfterSeconds&) = delete;
    AfterSeconds& operator=(const AfterSeconds&) = delete;
    ~AfterSeconds() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            is_done_ = true;
        }
        done_.notify_all();
        watch_.join();
    }

  private:
    std::mutex mutex_;
    std::condition_variable done_;
    bool is_done_ = false;
    std::thread watch_;  // last: it reads the others
};

// While one of these lives, its process looks for the others by tcp or fs. Says so on stderr after half a
// minute: a process that is rank 0 because -pr was forgotten would else wait without a word.
class StartNotice {
  public:
    StartNotice(const MultiGpuConfig& config, const std::string& where, double limit_s)
        : notice_(
              kSeconds, [rank = config.process_rank, size = config.num_processes, where, limit_s] {
                  const std::string others = rank == 0 ? "the others" : "rank 0";
                  std::fprintf(
                      stderr,
                      "note: this process is rank %d of %d (-pr, -pn) and waits for %s at %s, up "
                      "to %g s (LLMC_INIT_TIMEOUT_S)\n",
                      rank, size, others.c_str(), where.c_str(), limit_s);
              }) {}

  private:
    static constexpr double kSeconds = 30;
    AfterSeconds notice_;
};

}  // namespace detail

// Waits for all other ranks, and sends them `id`; `self` describes rank 0. Throws Error naming those that
// did not come.
inline std::shared_ptr<Peers> send_nccl_id_to_clients(const ncclUniqueId& id, PeerServer* server,
                                                      const PeerInfo& self, double limit_s) {
    unsigned char bytes[kIdBytes];
    std::memcpy(bytes, id.internal, kIdBytes);
    return server->wait_for_all(self, bytes, limit_s);
}

// The id that rank 0 makes, over TCP: rank 0 listens on `server_ip` and `port`, the others connect.
// Sets config->peers. Throws Error naming the address, or the ranks that did not come; UnmetError when
// this rank fails before it looks for them.
inline ncclUniqueId get_nccl_id_via_tcp(MultiGpuConfig* config, const std::string& server_ip,
                                        int port) {
    const double limit = detail::init_limit();
    const std::string what = format("-ps %s -pp %d", server_ip.c_str(), port);
    const detail::StartData own = detail::make_start_data(*config);
    const detail::StartNotice notice(*config, what, limit);
    ncclUniqueId id = own.id;
    if (config->process_rank == 0) {
        PeerServer server(server_ip, port, detail::job_token(), what);
        config->peers = send_nccl_id_to_clients(id, &server, own.self, limit);
    } else {
        unsigned char bytes[kIdBytes];
        config->peers =
            join_peers({{server_ip, port}}, detail::job_token(), own.self, bytes, limit, what);
        detail::copy_id(&id, bytes);
        if (planted_fault() == Fault::tcp_id) id.internal[0] ^= 1;
    }
    return id;
}

// The id that rank 0 makes, through the file ncclUniqueId.sync in `fs_path`. Sets config->peers. Throws
// as get_nccl_id_via_tcp.
inline ncclUniqueId get_nccl_id_via_fs(MultiGpuConfig* config, const std::string& fs_path) {
    const double limit = detail::init_limit();
    const detail::StartData own = detail::make_start_data(*config);
    const detail::StartNotice notice(*config, id_file::flag(fs_path), limit);
    ncclUniqueId id = own.id;
    unsigned char bytes[kIdBytes];
    if (config->process_rank == 0) {
        PeerServer server("", 0, detail::job_token(), "-pi fs");
        std::memcpy(bytes, id.internal, kIdBytes);
        config->peers =
            serve_through_folder(&server, fs_path, detail::job_token(), own.self, bytes, limit);
    } else {
        config->peers = join_through_folder(fs_path, detail::job_token(), own.self, bytes, limit);
        detail::copy_id(&id, bytes);
        if (planted_fault() == Fault::fs_id) id.internal[0] ^= 1;
    }
    return id;
}

namespace detail {

// How long this rank may stay to tell the others that there will be no run.
inline double decline_limit(bool briefly = false) {
    try {
        return std::min(decline_seconds(briefly), init_limit());
    } catch (const Error&) {  // the limit may be what is wrong
        return decline_seconds(briefly);
    }
}

}  // namespace detail

// For a rank of tcp or fs that cannot start: says so to the others where they wait for it, or will in a
// moment, with `text`, one line that names this rank and why. Takes at most decline_seconds(briefly);
// returns early when they have heard it. Does nothing where they cannot be reached.
inline void multi_gpu_decline(int num_processes, int process_rank, const std::string& server_ip,
                              const std::string& fs_path, const std::string& init_method,
                              int server_port, const std::string& text, bool briefly = false) {
    const PeerInfo self = {process_rank, num_processes, detail::host_hash(), ""};
    const std::string token = detail::job_token();
    const double limit = detail::decline_limit(briefly);
    try {
        if (init_method == "tcp" && process_rank == 0) {
            PeerServer(server_ip, server_port, token, "").decline_all(num_processes, text, limit);
        } else if (init_method == "tcp") {
            decline_peers({{server_ip, server_port}}, token, self, text, limit);
        } else if (init_method == "fs" && process_rank == 0) {
            PeerServer server("", 0, token, "");
            decline_all_through_folder(&server, fs_path, token, num_processes, text, limit);
        } else if (init_method == "fs") {
            decline_through_folder(fs_path, token, self, text, limit);
        }
    } catch (const Error&) {
        // The others cannot be told: they have their limit.
    }
}

#ifdef USE_MPI

namespace detail {

inline void mpi_check(int status, const char* what) {
    if (status == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = {};
    int length = 0;
    MPI_Error_string(status, text, &length);
    throw Error(format("%s: %s", what, text));
}

// MPI has no time limits. While one of these lives, the process ends after `limit_s` with status 1, and
// without a word when `what` is empty.
class MpiLimit {
  public:
    MpiLimit(double limit_s, std::string what)
        : limit_(limit_s, [limit_s, what = std::move(what)] {
              std::fflush(stdout);
              if (what.empty()) std::_Exit(1);
              std::fprintf(stderr,
                           "%s: %s took more than %g s (LLMC_INIT_TIMEOUT_S): a rank is "
                           "missing or does not answer\n",
                           kProgramName, what.c_str(), limit_s);
              std::_Exit(1);
          }) {}

  private:
    AfterSeconds limit_;
};

// Whether a launcher that speaks MPI has started this process. Without one MPI_Init would start a
// daemon for a lone run.
inline bool has_mpi_launcher() {
    for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK"}) {
        if (std::getenv(name) != nullptr) return true;
    }
    return false;
}

// Throws Error, the same on every rank, when some ranks cannot train, which the others would wait for.
// `not_training` is why this one cannot: what follows "rank 2" in a message (": -b 0: must be ..."), or "".
inline void agree_to_train(const MultiGpuConfig& config, const std::string& not_training) {
    constexpr size_t kBytes = 512;
    const std::string shown = handshake::shortened(not_training, kBytes - 1);
    char own[kBytes] = {};
    shown.copy(own, kBytes - 1);
    std::vector<char> all(kBytes * static_cast<size_t>(config.num_processes));
    mpi_check(MPI_Allgather(own, kBytes, MPI_CHAR, all.data(), kBytes, MPI_CHAR, MPI_COMM_WORLD),
              "MPI_Allgather");
    int odd = -1;  // the first rank that does not train
    bool agree = true;
    for (int rank = 0; rank < config.num_processes; ++rank) {
        const char* why = &all[kBytes * static_cast<size_t>(rank)];
        if (odd < 0 && *why != '\0') odd = rank;
        agree = agree && std::strcmp(why, &all[0]) == 0;
    }
    if (!agree) {
        throw Error(format("rank %d", odd) + &all[kBytes * static_cast<size_t>(odd)]);
    }
}

// Starts MPI, learns rank and size from it, and agrees with the other ranks to train.
inline void open_mpi(MultiGpuConfig* config, const std::string& not_training) {
    mpi_check(MPI_Init(nullptr, nullptr), "MPI_Init");
    config->started_by_mpi = true;
    mpi_check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN),
              "MPI_Comm_set_errhandler");
    mpi_check(MPI_Comm_rank(MPI_COMM_WORLD, &config->process_rank), "MPI_Comm_rank");
    mpi_check(MPI_Comm_size(MPI_COMM_WORLD, &config->num_processes), "MPI_Comm_size");
    agree_to_train(*config, not_training);
}

}  // namespace detail

// The number of lower ranks on this rank's host, which is its GPU there. All ranks call it.
inline int multi_gpu_get_local_device_idx(int process_rank, int num_processes) {
    const uint64_t mine = detail::host_hash();
    std::vector<uint64_t> hashes(num_processes);
    detail::mpi_check(
        MPI_Allgather(&mine, 1, MPI_UINT64_T, hashes.data(), 1, MPI_UINT64_T, MPI_COMM_WORLD),
        "MPI_Allgather");
    if (planted_fault() == Fault::local_index) return process_rank;
    return static_cast<int>(std::count(hashes.begin(), hashes.begin() + process_rank, mine));
}

#endif  // USE_MPI

namespace detail {

#ifdef USE_MPI

// What rank 0 tells the others through MPI.
struct MpiGreeting {
    ncclUniqueId id;
    int port;
    uint64_t server_token;
    char addresses[1024];  // separated by spaces
};

// `guard` covers what MPI does; the rest has limits that can name who is missing.
inline void join_by_mpi(MultiGpuConfig* config, ncclUniqueId* id, double limit,
                        std::unique_ptr<MpiLimit> guard) {
    const StartData own = make_start_data(*config);
    MpiGreeting greeting{};
    std::unique_ptr<PeerServer> server;
    if (config->process_rank == 0) {
        server = before_meeting(
            [] { return std::make_unique<PeerServer>("", 0, job_token(), "-pi mpi"); });
        greeting.id = own.id;
        greeting.port = server->port();
        greeting.server_token = server->token();
        std::string addresses;
        for (const net::Endpoint& address : server->addresses()) {
            const std::string more = addresses + (addresses.empty() ? "" : " ") + address.host;
            if (more.size() < sizeof(greeting.addresses)) addresses = more;
        }
        std::memcpy(greeting.addresses, addresses.data(), addresses.size());
    }
    mpi_check(MPI_Bcast(&greeting, sizeof(greeting), MPI_BYTE, 0, MPI_COMM_WORLD), "MPI_Bcast");
    guard.reset();
    *id = greeting.id;
    if (server != nullptr) {
        config->peers = send_nccl_id_to_clients(*id, server.get(), own.self, limit);
        return;
    }
    std::vector<net::Endpoint> where;
    const std::string addresses = greeting.addresses;
    for (size_t begin = 0; begin < addresses.size();) {
        const size_t end = std::min(addresses.find(' ', begin), addresses.size());
        where.push_back({addresses.substr(begin, end - begin), greeting.port});
        begin = end + 1;
    }
    unsigned char bytes[kIdBytes];
    config->peers =
        join_peers(where, job_token(), own.self, bytes, limit, "-pi mpi", greeting.server_token);
}

#endif  // USE_MPI

inline void refuse_lone_run(const std::string& why);  // zero.cuh

// Each of the three returns the id of the communicator to open; with one process none is needed.
inline ncclUniqueId start_by_mpi(MultiGpuConfig* config, [[maybe_unused]] int num_processes) {
    ncclUniqueId id{};
#ifdef USE_MPI
    if (!has_mpi_launcher()) {
        refuse_lone_run("MPI does not see the others; start with mpirun, or give -pi tcp or fs");
        if (num_processes > 1) {
            throw Error(
                format("-pn %d: -pi mpi takes the number of processes from mpirun; start "
                       "with mpirun -np %d, or give -pi tcp or fs",
                       num_processes, num_processes));
        }
        return id;
    }
    const double limit = init_limit();
    auto guard = std::make_unique<MpiLimit>(limit, "the start of MPI");
    open_mpi(config, "");
    if (num_processes > 1 && num_processes != config->num_processes) {
        throw Error(format("-pn %d: mpirun has started %d; leave out -pn, or give both the same",
                           num_processes, config->num_processes));
    }
    if (config->num_processes == 1) {
        refuse_lone_run(
            "MPI sees only this one; use an mpirun of the same MPI, srun --mpi=pmix, or -pi tcp");
        return id;
    }
    config->local_device_idx =
        multi_gpu_get_local_device_idx(config->process_rank, config->num_processes);
    const std::string problem = choose_device(config);
    join_by_mpi(config, &id, limit, std::move(guard));
    refuse_start(*config, problem);
    config->nodes = nodes_by_host(config->peers->table());
    if (planted_fault() == Fault::mpi_rank) {
        config->process_rank = config->num_processes - 1 - config->process_rank;
    }
#else
    const char* no_mpi = "this build has no MPI; give -pi tcp or -pi fs, or build with OpenMPI";
    (void)config;
    refuse_lone_run(std::string("-pi mpi: ") + no_mpi);
    if (num_processes > 1) throw Error(format("-pi mpi: %s", no_mpi));
#endif
    return id;
}

inline ncclUniqueId start_by_tcp(MultiGpuConfig* config, int gpus_per_node,
                                 const std::string& server_ip, int server_port) {
    const std::string problem = choose_device(config);
    const ncclUniqueId id = get_nccl_id_via_tcp(config, server_ip, server_port);
    refuse_start(*config, problem);
    config->nodes = nodes_by_rank(config->num_processes, gpus_per_node);
    return id;
}

inline ncclUniqueId start_by_fs(MultiGpuConfig* config, int gpus_per_node,
                                const std::string& fs_path) {
    const std::string problem = choose_device(config);
    const ncclUniqueId id = get_nccl_id_via_fs(config, fs_path);
    refuse_start(*config, problem);
    config->nodes = nodes_by_rank(config->num_processes, gpus_per_node);
    return id;
}

inline void open_communicator(MultiGpuConfig* config, const ncclUniqueId& id,
                              const CommunicatorOptions& communicator) {
    const double step_limit_s = config->time_limit_s;
    config->time_limit_s = init_limit();
    cuda_check(cudaSetDevice(config->local_device_idx));
    ncclConfig_t options = NCCL_CONFIG_INITIALIZER;
    options.blocking = communicator.blocking ? 1 : 0;
    if (communicator.max_ctas > 0) options.maxCTAs = communicator.max_ctas;
    const ncclResult_t result = ncclCommInitRankConfig(&config->nccl_comm, config->num_processes,
                                                       id, config->process_rank, &options);
    nccl_check(*config, result, "the start of NCCL");
    int least = 0, greatest = 0;
    cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cuda_check(cudaStreamCreateWithPriority(&config->nccl_stream, cudaStreamNonBlocking, greatest));
    cuda_check(cudaEventCreateWithFlags(&config->compute_nccl_sync, cudaEventDisableTiming));
    cuda_check(cudaEventCreateWithFlags(&config->host_wait, cudaEventDisableTiming));
    cuda_check(cudaMallocManaged(&config->unified_buffer, sizeof(float)));
    config->log = std::make_shared<CollectiveLog>();
    config->time_limit_s = step_limit_s;
    config->watch = std::make_shared<HostWatch>(*config);
}

inline void close_communicator(MultiGpuConfig* config) {
    wait_for_stream(*config, "the end of the run", config->nccl_stream);
    nccl_check(*config, ncclCommFinalize(config->nccl_comm), "the end of NCCL");
    ncclCommDestroy(config->nccl_comm);
    config->watch.reset();
    config->exchange.reset();
    config->log.reset();
    cudaEventDestroy(config->compute_nccl_sync);
    cudaEventDestroy(config->host_wait);
    cudaStreamDestroy(config->nccl_stream);
    cudaFree(config->unified_buffer);
    config->peers->close();
    config->peers.reset();
}

inline void end_mpi([[maybe_unused]] MultiGpuConfig* config) {
#ifdef USE_MPI
    if (!config->started_by_mpi) return;
    MpiLimit guard(init_limit(), "the end of MPI");
    mpi_check(MPI_Finalize(), "MPI_Finalize");
#endif
}

}  // namespace detail

// For a rank of -pi mpi that cannot start, where the launcher (srun) does not end the others when one
// fails: tells them `why` (": -b 0: must be ...") when they come within decline_seconds(), or ends them
// when MPI runs already. Without MPI it does nothing.
inline void multi_gpu_decline_by_mpi([[maybe_unused]] const std::string& why) {
#ifdef USE_MPI
    if (!detail::has_mpi_launcher()) return;
    int is_running = 0;
    MPI_Initialized(&is_running);
    std::fflush(stdout);
    if (is_running != 0) MPI_Abort(MPI_COMM_WORLD, 1);
    MultiGpuConfig config;
    const detail::MpiLimit guard(detail::decline_limit(), "");
    try {
        detail::open_mpi(&config, why);
        detail::end_mpi(&config);
    } catch (const Error&) {  // the others have it, too
    }
#endif
}

}  // namespace llmc

#endif  // MULTI_GPU
