// Checks of single functions of zero.cuh, run by one of N processes. ./grade starts the processes and
// judges what they print; the right answers stand in test/grade/components.py.
//
//   grade_checks about
//   grade_checks --way mpi|tcp|fs --ranks N --rank R [--port P] [--folder F] [--channels C] CHECK ...
//   grade_checks --hosts NAME,NAME,... local          (under mpirun)
//
// A result is one line, fields separated by tabs: the check, the part, and key=value of what was seen.
// "CHECK done" follows the last result of a check. All but local, ids and shards need start before
// them, and nothing but ids and start may follow free.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "llmc/zero.cuh"

namespace llmc {

namespace {

struct Settings {
    std::string way = "mpi", folder, server = "127.0.0.1";
    int ranks = 1, rank = 0, port = 0, channels = 40;
    std::vector<std::string> hosts;  // comma-separated names, one list a round
    std::vector<std::string> checks;
};

// One line of results. `more` is key=value fields.
void report(const std::string& check, const std::string& part, const std::string& more) {
    std::printf("%s\t%s\t%s\n", check.c_str(), part.c_str(), more.c_str());
    std::fflush(stdout);
}

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// ---- pure functions ----

ModelConfig small_model(int channels, int max_seq_len) {
    ModelConfig config;
    config.max_seq_len = max_seq_len;
    config.vocab_size = 250;
    config.padded_vocab_size = 256;
    config.num_layers = 2;
    config.num_heads = 2;
    config.channels = channels;
    return config;
}

void check_shards() {
    for (const int n : {1, 2, 4, 8}) {
        for (int rank = 0; rank < n; ++rank) {
            for (const int stage : {0, 1}) {
                MultiGpuConfig config;
                config.num_processes = n;
                config.process_rank = rank;
                config.zero_stage = stage;
                const size_t elements = size_t{3} << 32;  // does not fit into 32 bits
                const ShardInfo shard = multi_gpu_get_shard_offset(elements, &config, 1);
                report("shards", "offset",
                       format("n=%d\trank=%d\tstage=%d\telements=%zu\toffset=%zu\tsize=%zu", n,
                              rank, stage, elements, shard.offset, shard.size));
            }
        }
    }
    MultiGpuConfig config;
    config.num_processes = 4;
    config.zero_stage = 1;
    bool refused = false;
    try {
        multi_gpu_get_shard_offset(42, &config, 1);
    } catch (const Error&) {
        refused = true;
    }
    report("shards", "uneven", format("refused=%d", refused));
    // With 3 ranks and 24 positions the sum of all parameters does not divide; with 25 it does, and
    // single tensors do not.
    for (const int n : {1, 3, 4}) {
        for (const int positions : {24, 25}) {
            const ParamLayout layout(small_model(40, positions));
            for (int asked = 0; asked <= 3; ++asked) {
                MultiGpuConfig chosen;
                chosen.num_processes = n;
                const std::string message = set_zero_configs(&chosen, asked, layout);
                report("shards", "zero",
                       format("n=%d\tpositions=%d\tasked=%d\ttotal=%zu\tstage=%d\tshard=%zu\t"
                              "message=%s",
                              n, positions, asked, layout.num_parameters(), chosen.zero_stage,
                              chosen.shard_num_parameters, message.c_str()));
            }
        }
    }
}

#ifdef MULTI_GPU

// ---- start and end ----

#ifdef USE_MPI
void check_local(const Settings& settings) {
    detail::mpi_check(MPI_Init(nullptr, nullptr), "MPI_Init");
    int rank = 0, size = 0;
    detail::mpi_check(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
    detail::mpi_check(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
    report("local", "own",
           format("rank=%d\tindex=%d", rank, multi_gpu_get_local_device_idx(rank, size)));
    for (const std::string& names : settings.hosts) {
        std::string own = names;
        for (int i = 0; i < rank; ++i) own = own.substr(own.find(',') + 1);
        own = own.substr(0, own.find(','));
        setenv("LLMC_HOST", own.c_str(), 1);
        report("local", "hosts",
               format("rank=%d\tnames=%s\tindex=%d", rank, names.c_str(),
                      multi_gpu_get_local_device_idx(rank, size)));
    }
    detail::mpi_check(MPI_Finalize(), "MPI_Finalize");
}
#else
void check_local(const Settings&) {
    throw Error("this build has no MPI");
}
#endif

// The id alone, without NCCL: each rank gets it, and how long that takes once the device is awake.
void check_ids(const Settings& settings) {
    MultiGpuConfig config;
    config.num_processes = settings.ranks;
    config.process_rank = settings.rank;
    config.local_device_idx = settings.rank;
    const std::string problem = detail::choose_device(&config);
    if (!problem.empty()) throw Error(problem);
    cuda_check(cudaSetDevice(config.local_device_idx));
    cuda_check(cudaFree(nullptr));  // the first call on a device takes long
    const int64_t start = now_ns();
    const ncclUniqueId id = settings.way == "tcp"
                                ? get_nccl_id_via_tcp(&config, settings.server, settings.port)
                                : get_nccl_id_via_fs(&config, settings.folder);
    const double seconds = static_cast<double>(now_ns() - start) / 1e9;
    const std::string zeros(sizeof(id.internal), '\0');
    report("ids", "id",
           format("hash=%016llx\tempty=%d\tseconds=%.6f",
                  static_cast<unsigned long long>(
                      hash_elements(id.internal, 1, sizeof(id.internal), 0)),
                  std::memcmp(id.internal, zeros.data(), zeros.size()) == 0, seconds));
    config.peers->close();
}

// The ranks by number, as one all-gather over the communicator brings them together.
std::string gathered_ranks(const MultiGpuConfig& config) {
    const size_t n = static_cast<size_t>(config.num_processes);
    DeviceBuffer<int> own(1), all(n);
    cuda_check(cudaMemset(all.get(), 0xff, all.bytes()));
    cuda_check(cudaMemcpy(own.get(), &config.process_rank, sizeof(int), cudaMemcpyHostToDevice));
    cuda_check(cudaDeviceSynchronize());
    nccl_group(config, "ranks", -1, [&] {
        nccl_check(
            config,
            ncclAllGather(own.get(), all.get(), 1, ncclInt32, config.nccl_comm, config.nccl_stream),
            "ranks");
    });
    wait_for_stream(config, "ranks", config.nccl_stream);
    std::vector<int> ranks(n);
    cuda_check(cudaMemcpy(ranks.data(), all.get(), all.bytes(), cudaMemcpyDeviceToHost));
    std::string text;
    for (const int rank : ranks) text += (text.empty() ? "" : ",") + std::to_string(rank);
    return text;
}

MultiGpuConfig start(const Settings& settings) {
    const bool mpi = settings.way == "mpi";
    return multi_gpu_config_init(mpi ? 1 : settings.ranks, mpi ? 0 : settings.rank, 8,
                                 settings.server, settings.folder, settings.way, settings.port);
}

void check_start(const Settings& settings, MultiGpuConfig* config) {
    *config = start(settings);
    // Where ./grade notes when it started this process.
    const char* began = std::getenv("GRADE_BEGAN_NS");
    const double seconds =
        began != nullptr ? static_cast<double>(now_ns() - std::atoll(began)) / 1e9 : 0.0;
    int communicator_rank = -1, communicator_size = -1, current = -1;
    nccl_check(*config, ncclCommUserRank(config->nccl_comm, &communicator_rank), "rank");
    nccl_check(*config, ncclCommCount(config->nccl_comm, &communicator_size), "size");
    cuda_check(cudaGetDevice(&current));
    report(
        "start", "config",
        format("rank=%d\tsize=%d\tdevice=%d\tcurrent=%d\tcommunicator_rank=%d\t"
               "communicator_size=%d\tstream=%d\tevent=%d\tbuffer=%d\tseconds=%.6f",
               config->process_rank, config->num_processes, config->local_device_idx, current,
               communicator_rank, communicator_size, config->nccl_stream != nullptr,
               config->compute_nccl_sync != nullptr, config->unified_buffer != nullptr, seconds));
    report("start", "gather", format("ranks=%s", gathered_ranks(*config).c_str()));
}

bool is_reset(const MultiGpuConfig& config) {
    return config.num_processes == 1 && config.process_rank == 0 && config.nccl_comm == nullptr &&
           config.nccl_stream == nullptr && config.compute_nccl_sync == nullptr &&
           config.unified_buffer == nullptr && config.peers == nullptr;
}

// Ends the communicator; tcp and fs then start again at the same place and end that, too.
void check_free(const Settings& settings, MultiGpuConfig* config) {
    multi_gpu_config_free(config);
    report("free", "reset", format("reset=%d", is_reset(*config)));
#ifdef USE_MPI
    int ended = 0;
    MPI_Finalized(&ended);
    if (settings.way == "mpi") report("free", "mpi", format("finalized=%d", ended));
#endif
    if (!is_reset(*config)) {
        // To the others this process's end will look like a death: they shall have their results.
        std::this_thread::sleep_for(std::chrono::milliseconds(500));
        return;
    }
    if (settings.way == "mpi") return;
    *config = start(settings);
    const std::string ranks = gathered_ranks(*config);
    multi_gpu_config_free(config);
    report("free", "again", format("ranks=%s", ranks.c_str()));
}

// ---- barrier and sum ----

// In each round another rank is late.
void check_barrier(const MultiGpuConfig& config) {
    multi_gpu_barrier(&config);
    for (int late = 0; late < config.num_processes; ++late) {
        if (config.process_rank == late) std::this_thread::sleep_for(std::chrono::milliseconds(50));
        const int64_t enter = now_ns();
        multi_gpu_barrier(&config);
        report("barrier", "round",
               format("late=%d\tenter=%lld\tleave=%lld", late, static_cast<long long>(enter),
                      static_cast<long long>(now_ns())));
    }
}

void check_sum(const MultiGpuConfig& config) {
    const float rank = static_cast<float>(config.process_rank);
    const float values[] = {rank + 0.25f, -1.5f * rank, 1048576.0f};
    for (int i = 0; i < 3; ++i) {
        const float sum = multi_gpu_cpu_float_sum(values[i], &config);
        report("sum", "all", format("call=%d\tsum=%.9g", i, sum));
    }
    const MultiGpuConfig alone;
    report("sum", "alone", format("sum=%.9g", multi_gpu_cpu_float_sum(2.75f, &alone)));
}

// ---- tensors ----

// Bits without pattern, by number (the mixing of SplitMix64: Steele, Lea and Flood 2014, figure 14).
uint64_t mixed(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// Of either sign and many magnitudes: the order of additions shows in their sums' bits.
float uneven_value(uint64_t key) {
    const uint64_t bits = mixed(key);
    const float size = 1.0f + static_cast<float>(bits & 0xff) / 256.0f;
    const int exponent = static_cast<int>((bits >> 8) % 9) - 4;
    return ((bits >> 16) & 1 ? -size : size) * std::ldexp(1.0f, exponent);
}

// Small whole numbers: sums and means of up to 8 are exact in every type and order.
float whole_value(uint64_t key) {
    return static_cast<float>(mixed(key) % 15) - 7.0f;
}

struct Tensor {
    Param id;
    size_t layer;
};
using TensorList = std::vector<Tensor>;

// All tensors in lists of 2 and 12, in the order in which a backward pass completes them.
std::vector<TensorList> lists_of(const ParamLayout& layout) {
    std::vector<TensorList> lists = {{{Param::lnfw, 0}, {Param::lnfb, 0}}};
    for (size_t layer = layout.layers(Param::qkvw); layer-- > 0;) {
        lists.emplace_back();
        for (const ParamInfo& info : param_table()) {
            if (info.per_layer) lists.back().push_back({info.id, layer});
        }
    }
    lists.push_back({{Param::wte, 0}, {Param::wpe, 0}});
    return lists;
}

constexpr unsigned char kUntouched = 0x42;  // in every byte that nothing has written: finite values

// Parameters or gradients in device memory, and the stream that computes them.
template <class T>
struct Tensors {
    explicit Tensors(const ParamLayout& layout)
        : layout(layout), memory(layout.buffer_elements()), all{memory.get(), &layout} {
        forget();
    }
    void forget() {
        cuda_check(cudaMemset(memory.get(), kUntouched, memory.bytes()));
        cuda_check(cudaDeviceSynchronize());
    }
    std::vector<T> download() const {
        std::vector<T> host(memory.count());
        cuda_check(cudaMemcpy(host.data(), memory.get(), memory.bytes(), cudaMemcpyDeviceToHost));
        return host;
    }
    // value(tensor, element) everywhere.
    template <class Value>
    void fill(Value&& value) {
        std::vector<T> host(memory.count());
        std::memset(static_cast<void*>(host.data()), kUntouched, memory.bytes());
        layout.for_each_layer([&](const ParamInfo& info, size_t layer) {
            T* tensor = host.data() + layout.buffer_offset(info.id, layer);
            for (size_t i = 0; i < layout.layer_elements(info.id); ++i) {
                tensor[i] = from_float<T>(value(layout.model_offset(info.id, layer) + i));
            }
        });
        cuda_check(cudaMemcpy(memory.get(), host.data(), memory.bytes(), cudaMemcpyHostToDevice));
        cuda_check(cudaDeviceSynchronize());
    }

    const ParamLayout& layout;
    DeviceBuffer<T> memory;
    ParamTensors<T> all;
};

// Keeps a stream waiting until the host has queued all that follows, and for a moment more: whatever
// does not wait for the stream comes too early. A host that waits for the stream meanwhile is seen.
class Gate {
  public:
    void hold(cudaStream_t stream) {
        cuda_check(cudaLaunchHostFunc(
            stream,
            [](void* self) {
                Gate* gate = static_cast<Gate*>(self);
                std::unique_lock<std::mutex> lock(gate->mutex_);
                gate->host_waited_ = !gate->opened_.wait_for(lock, std::chrono::seconds(1),
                                                             [gate] { return gate->is_open_; });
                lock.unlock();
                std::this_thread::sleep_for(std::chrono::milliseconds(100));
            },
            this));
    }
    void open() {
        std::lock_guard<std::mutex> lock(mutex_);
        is_open_ = true;
        opened_.notify_all();
    }
    bool host_waited() const { return host_waited_; }  // once the stream has passed

  private:
    std::mutex mutex_;
    std::condition_variable opened_;
    bool is_open_ = false;
    bool host_waited_ = false;
};

// Calls work(&gate), which queues work behind the gate; true when the host waited for that. A host that
// is merely slow, on a busy machine, gets a second chance. All ranks call this.
template <class Work>
bool host_waits(const MultiGpuConfig& config, Work&& work) {
    for (int attempt = 0; attempt < 2; ++attempt) {
        Gate gate;
        work(&gate);
        const int waited = gate.host_waited();
        const std::vector<int> all = multi_gpu_all_gather_host(config, &waited, 1, "waits");
        if (std::count(all.begin(), all.end(), 1) == 0) return false;
    }
    return true;
}

// ---- reduction of gradients ----

enum class Reduction { tree, two_levels, mean };

const char* name_of(Reduction reduction) {
    return reduction == Reduction::tree         ? "tree"
           : reduction == Reduction::two_levels ? "two_levels"
                                                : "mean";
}

// The sum of the ranks' values by the tree over neighbours, each node rounded to gradX.
gradX tree_of(std::vector<float> values) {
    for (size_t count = values.size() / 2; count >= 1; count /= 2) {
        for (size_t i = 0; i < count; ++i) {
            values[i] = to_float(from_float<gradX>(values[2 * i] + values[2 * i + 1]));
        }
    }
    return from_float<gradX>(values[0]);
}

float gradient(Reduction reduction, int rank, uint64_t element) {
    const uint64_t key = element * 8 + static_cast<uint64_t>(rank);
    return reduction == Reduction::mean ? whole_value(key) : uneven_value(key);
}

gradX right_sum(Reduction reduction, int n, uint64_t element) {
    std::vector<float> values;
    for (int rank = 0; rank < n; ++rank) {
        values.push_back(to_float(from_float<gradX>(gradient(reduction, rank, element))));
    }
    if (reduction != Reduction::mean) return tree_of(values);
    float sum = 0.0f;
    for (const float value : values) sum += value;
    return from_float<gradX>(sum / static_cast<float>(n));
}

template <size_t N>
void reduce(const ParamTensors<gradX>& grads, const TensorList& list, MultiGpuConfig* config,
            cudaStream_t stream) {
    gradX* tensors[N];
    size_t sizes[N];
    for (size_t i = 0; i < N; ++i) {
        tensors[i] = grads.at(list[i].id, list[i].layer);
        sizes[i] = grads.layout->layer_elements(list[i].id);
    }
    multi_gpu_async_reduce_gradient(tensors, sizes, config, stream);
}

// One step's reductions of gradients that a stream writes just before, a slow one where there is a gate.
void reduce_all(Tensors<gradX>* grads, const Tensors<gradX>& source, Tensors<gradX>* result,
                MultiGpuConfig* config, const Stream& stream, Gate* gate) {
    if (gate != nullptr) gate->hold(stream.get());
    for (const TensorList& list : lists_of(grads->layout)) {
        for (const Tensor& tensor : list) {
            cuda_check(cudaMemcpyAsync(grads->all.at(tensor.id, tensor.layer),
                                       source.all.at(tensor.id, tensor.layer),
                                       grads->layout.layer_elements(tensor.id) * sizeof(gradX),
                                       cudaMemcpyDeviceToDevice, stream.get()));
        }
        if (list.size() == 12) {
            reduce<12>(grads->all, list, config, stream.get());
        } else {
            reduce<2>(grads->all, list, config, stream.get());
        }
    }
    multi_gpu_finish_reduction(config, stream.get());
    cuda_check(cudaMemcpyAsync(result->memory.get(), grads->memory.get(), grads->memory.bytes(),
                               cudaMemcpyDeviceToDevice, stream.get()));
    if (gate != nullptr) gate->open();
    multi_gpu_drain(config, stream.get());
}

// Compares each tensor's part that belongs to this rank with right(element), and what lies between
// tensors with what was there before.
template <class T, class Right>
std::string compare(const Tensors<T>& tensors, size_t parts, size_t part, Right&& right) {
    const std::vector<T> host = tensors.download();
    const ParamLayout& layout = tensors.layout;
    std::vector<bool> inside(host.size());
    size_t wrong = 0, compared = 0, spilt = 0;
    std::string first;
    layout.for_each_layer([&](const ParamInfo& info, size_t layer) {
        const size_t size = layout.layer_elements(info.id), begin = part * (size / parts);
        const size_t offset = layout.buffer_offset(info.id, layer);
        std::fill_n(inside.begin() + offset, size, true);
        for (size_t i = begin; i < begin + size / parts; ++i, ++compared) {
            const T expected = right(layout.model_offset(info.id, layer) + i);
            if (std::memcmp(&expected, &host[offset + i], sizeof(T)) == 0) continue;
            if (wrong++ > 0) continue;
            first = format("%s[%zu] of layer %zu: %g instead of %g", info.name, i, layer,
                           to_float(host[offset + i]), to_float(expected));
        }
    });
    T untouched;
    std::memset(static_cast<void*>(&untouched), kUntouched, sizeof(T));
    for (size_t i = 0; i < host.size(); ++i) {
        spilt += !inside[i] && std::memcmp(&untouched, &host[i], sizeof(T)) != 0;
    }
    return format("compared=%zu\twrong=%zu\tspilt=%zu\tfirst=%s", compared, wrong, spilt,
                  first.c_str());
}

// What a training allocates for the exchange.
struct ExchangeMemory {
    DeviceBuffer<gradX> received, staging;
};

// As set up for a training, but with room for so little in a round that there are many.
void plan_exchange(const ParamLayout& layout, Reduction reduction, MultiGpuConfig* config,
                   ExchangeMemory* memory) {
    const int n = config->num_processes;
    ReductionPlan plan = make_reduction_plan(8, n, 8, layout);
    plan.canonical = reduction != Reduction::mean;
    for (int rank = 0; rank < n; ++rank) {
        config->nodes[rank] = reduction == Reduction::two_levels ? rank / (n / 2) : 0;
    }
    multi_gpu_plan_reduction(config, plan);
    if (config->exchange == nullptr) return;
    GradientExchange& exchange = *config->exchange;
    exchange.round_elements = GradientExchange::kAlign * 3 * (n - 1);
    std::vector<std::vector<size_t>> sizes;
    for (const TensorList& list : lists_of(layout)) {
        sizes.emplace_back();
        for (const Tensor& tensor : list) sizes.back().push_back(layout.layer_elements(tensor.id));
    }
    plan_exchange_buffers(&exchange, sizes, n);
    memory->received = DeviceBuffer<gradX>(2 * exchange.half_elements);
    memory->staging = DeviceBuffer<gradX>(2 * exchange.staging_half_elements);
    for (const DeviceBuffer<gradX>* buffer : {&memory->received, &memory->staging}) {
        if (buffer->count() > 0) cuda_check(cudaMemset(buffer->get(), 0xff, buffer->bytes()));
    }
    exchange.received = memory->received.get();
    exchange.staging = memory->staging.get();
    exchange.open();
}

void check_reduction(const char* check, int stage, const Settings& settings,
                     MultiGpuConfig* config) {
    const int n = config->num_processes, rank = config->process_rank;
    const ParamLayout layout(small_model(settings.channels, 24));
    const std::vector<int> nodes = config->nodes;
    config->zero_stage = stage;
    for (const Reduction reduction : {Reduction::tree, Reduction::two_levels, Reduction::mean}) {
        if (reduction == Reduction::two_levels && n < 4) continue;
        ExchangeMemory memory;
        plan_exchange(layout, reduction, config, &memory);
        Tensors<gradX> grads(layout), source(layout), result(layout);
        source.fill([&](uint64_t element) { return gradient(reduction, rank, element); });
        const Stream stream;
        // What happens once, such as connecting to a peer, may wait for all streams.
        reduce_all(&grads, source, &result, config, stream, nullptr);
        const bool waited = host_waits(*config, [&](Gate* gate) {
            grads.forget();
            reduce_all(&grads, source, &result, config, stream, gate);
        });
        const std::string found =
            compare(result, stage == 0 ? 1 : n, stage == 0 ? 0 : rank,
                    [&](uint64_t element) { return right_sum(reduction, n, element); });
        report(check, name_of(reduction), format("host_waited=%d\t%s", waited, found.c_str()));
        config->exchange.reset();
    }
    config->zero_stage = 0;
    config->nodes = nodes;
}

// ---- gathering of weights ----

float weight(uint64_t element) {
    return uneven_value(element + (uint64_t{1} << 40));
}

// Each rank writes its shard of every tensor just before, slowly where there is a gate.
void gather_all(Tensors<floatX>* weights, const Tensors<floatX>& source, Tensors<floatX>* result,
                const MultiGpuConfig& config, const Stream& stream, Gate* gate) {
    const size_t n = static_cast<size_t>(config.num_processes);
    const size_t rank = static_cast<size_t>(config.process_rank);
    cudaEvent_t gathered;
    cuda_check(cudaEventCreateWithFlags(&gathered, cudaEventDisableTiming));
    if (gate != nullptr) gate->hold(stream.get());
    int group = 0;
    for (const TensorList& list : lists_of(weights->layout)) {
        std::vector<floatX*> tensors;
        std::vector<size_t> sizes;
        for (const Tensor& tensor : list) {
            tensors.push_back(weights->all.at(tensor.id, tensor.layer));
            sizes.push_back(weights->layout.layer_elements(tensor.id));
            const size_t shard = sizes.back() / n;
            cuda_check(cudaMemcpyAsync(tensors.back() + rank * shard,
                                       source.all.at(tensor.id, tensor.layer) + rank * shard,
                                       shard * sizeof(floatX), cudaMemcpyDeviceToDevice,
                                       stream.get()));
        }
        multi_gpu_gather_weights(tensors.data(), sizes.data(), tensors.size(), group++, gathered,
                                 &config, stream.get());
    }
    cuda_check(cudaStreamWaitEvent(stream.get(), gathered, 0));
    cuda_check(cudaMemcpyAsync(result->memory.get(), weights->memory.get(), weights->memory.bytes(),
                               cudaMemcpyDeviceToDevice, stream.get()));
    if (gate != nullptr) gate->open();
    multi_gpu_drain(&config, stream.get());
    cuda_check(cudaEventDestroy(gathered));
}

void check_gather(const Settings& settings, MultiGpuConfig* config) {
    const ParamLayout layout(small_model(settings.channels, 24));
    config->zero_stage = 1;
    Tensors<floatX> weights(layout), source(layout), result(layout);
    source.fill(weight);
    const Stream stream;
    gather_all(&weights, source, &result, *config, stream, nullptr);
    const bool waited = host_waits(*config, [&](Gate* gate) {
        weights.forget();
        gather_all(&weights, source, &result, *config, stream, gate);
    });
    const std::string found =
        compare(result, 1, 0, [](uint64_t element) { return from_float<floatX>(weight(element)); });
    report("gather", "weights", format("host_waited=%d\t%s", waited, found.c_str()));
    config->zero_stage = 0;
}

#endif  // MULTI_GPU

// ---- the program ----

void run_check(const std::string& check, [[maybe_unused]] const Settings& settings,
               [[maybe_unused]] MultiGpuConfig* config) {
    if (check == "shards") {
        check_shards();
#ifdef MULTI_GPU
    } else if (check == "local") {
        check_local(settings);
    } else if (check == "ids") {
        check_ids(settings);
    } else if (check == "start") {
        check_start(settings, config);
    } else if (check == "barrier") {
        check_barrier(*config);
    } else if (check == "sum") {
        check_sum(*config);
    } else if (check == "zero0") {
        check_reduction("zero0", 0, settings, config);
    } else if (check == "zero1") {
        check_reduction("zero1", 1, settings, config);
    } else if (check == "gather") {
        check_gather(settings, config);
    } else if (check == "free") {
        check_free(settings, config);
#endif
    } else {
        throw Error(format("%s: no such check in this build", check.c_str()));
    }
    std::printf("%s\tdone\n", check.c_str());
    std::fflush(stdout);
}

// What this build is, and what the machine has.
void print_about() {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess) devices = 0;
    bool multi = false, mpi = false, cpu = false;
#ifdef MULTI_GPU
    multi = true;
#endif
#ifdef USE_MPI
    mpi = true;
#endif
#ifdef LLMC_CPU
    cpu = true;
#endif
    report("about", "build",
           format("backend=%s\tmulti=%d\tmpi=%d\tdevices=%d\tprecision=%s", cpu ? "cpu" : "gpu",
                  multi, mpi, devices, kPrecisionName));
}

Settings parse(int argc, char** argv) {
    Settings settings;
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        if (word.rfind("--", 0) != 0) {
            settings.checks.push_back(word);
            continue;
        }
        if (i + 1 == argc) throw Error(format("%s: needs a value", argv[i]));
        const std::string value = argv[++i];
        if (word == "--way") {
            settings.way = value;
        } else if (word == "--folder") {
            settings.folder = value;
        } else if (word == "--hosts") {
            settings.hosts.push_back(value);
        } else if (word == "--ranks") {
            settings.ranks = std::atoi(value.c_str());
        } else if (word == "--rank") {
            settings.rank = std::atoi(value.c_str());
        } else if (word == "--port") {
            settings.port = std::atoi(value.c_str());
        } else if (word == "--channels") {
            settings.channels = std::atoi(value.c_str());
        } else {
            throw Error(format("%s: unknown", word.c_str()));
        }
    }
    if (settings.checks.empty()) throw Error("which checks?");
    return settings;
}

int run_program(int argc, char** argv) {
    const Settings settings = parse(argc, argv);
    if (settings.checks[0] == "about") {
        print_about();
        return 0;
    }
    MultiGpuConfig config;
    for (const std::string& check : settings.checks) {
        try {
            run_check(check, settings, &config);
        } catch (const std::exception& error) {
            const std::string text = check + ": " + error.what();
#ifdef MULTI_GPU
            if (config.peers != nullptr) multi_gpu_abandon(config, text);
#endif
            throw Error(text);
        }
    }
    return 0;
}

}  // namespace

}  // namespace llmc

int main(int argc, char** argv) {
    try {
        return llmc::run_program(argc, argv);
    } catch (const std::exception& error) {
        std::fflush(stdout);
        std::fprintf(stderr, "%s: %s\n", llmc::kProgramName, error.what());
        return 1;
    }
}
