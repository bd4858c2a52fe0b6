// Bus bandwidth of the gradient reduction beside plain NCCL calls for the same bytes in the same run.
//
//   mpirun -np 2 build/cuda-bf16-cudnn/bench_comm [--option value] ... [-pi tcp ...]
//
// `make bench_comm` builds and starts it. What is reduced: the tensors of a model, listed and grouped as
// the backward pass finishes them, and one large buffer. Times are the device's, between events around
// the whole list; the slowest rank's counts. The streams are held until everything is queued, so that
// the host's part is not in them: it has a column of its own. Cases take turns, and medians are
// compared. Bus bandwidth as NVIDIA's nccl-tests define it (doc/PERFORMANCE.md there): bytes * (N-1)/N
// over the time of a reduce-scatter or an all-gather, twice that for an all-reduce.
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "llmc/atomic_file.h"
#include "llmc/model_name.h"
#include "llmc/options.h"
#include "llmc/run_info.h"
#include "llmc/zero.cuh"

#ifndef MULTI_GPU
#error "bench_comm measures communication: build without NO_MULTI_GPU, with NCCL (for a CPU: Gloo)"
#endif

namespace llmc {
namespace {

#ifdef LLMC_CPU
constexpr bool kIsStandIn = true;
#else
constexpr bool kIsStandIn = false;
#endif

// ---- what to measure ----

struct BenchOptions {
    std::vector<std::string> models;
    std::vector<size_t> one_mib, raw_mib, round_mib, pack, merge_mib;
    int repeats, max_ctas = 0, blocking = 0, strict = 0;
    std::string json;
    Options ranks;  // -pi and so on
};

const char* kHelp =
    "usage: bench_comm [--option value] ... [-pi -pn -pr -pg -ps -pp -pf as of the trainer]\n"
    "  --models d12,d48   models whose lists of gradients are reduced\n"
    "  --one 512          sizes of a single buffer, in MiB\n"
    "  --raw 64,1024      sizes in MiB of NCCL's own collectives, for the table of these\n"
    "  --rounds 32,64     rounds of the canonical exchange, in MiB that all peers send a rank\n"
    "  --pack 16,0        tensors up to 1/16 of a list's largest travel together; 0: none, 1: all\n"
    "  --merge 24,0       lists go together up to that many MiB; 0: each alone\n"
    "  --ctas 8           thread blocks of NCCL's kernels, at most; 0: NCCL's choice\n"
    "  --blocking 1       calls of NCCL return when they are done\n"
    "  --repeats 30       times that each case is measured\n"
    "  --json FILE        results, besides the tables\n"
    "  --strict 1         status 1 when a target is missed\n"
    "The first of --rounds, --pack and --merge are what the targets are held against; all are "
    "tried.\n";

size_t read_size(const std::string& option, const std::string& text) {
    char* end = nullptr;
    const long long value = std::strtoll(text.c_str(), &end, 10);
    if (text.empty() || *end != '\0' || value < 0 || value > (1 << 20)) {
        throw Error(format("%s %s: must be a whole number", option.c_str(), text.c_str()));
    }
    return static_cast<size_t>(value);
}

std::vector<std::string> split(const std::string& text) {
    std::vector<std::string> parts;
    for (size_t begin = 0; begin <= text.size();) {
        const size_t end = std::min(text.find(',', begin), text.size());
        if (end > begin) parts.push_back(text.substr(begin, end - begin));
        begin = end + 1;
    }
    return parts;
}

std::vector<size_t> read_sizes(const std::string& option, const std::string& text) {
    std::vector<size_t> sizes;
    for (const std::string& part : split(text)) sizes.push_back(read_size(option, part));
    return sizes;
}

BenchOptions read_options(int argc, char** argv) {
    constexpr size_t kMib = 1 << 20;
    BenchOptions o;
    o.models = split(kIsStandIn ? "custom:L2C256H4T256V2048" : "d12,d48");
    o.one_mib = {kIsStandIn ? 4u : 512u};
    o.raw_mib = kIsStandIn ? std::vector<size_t>{4} : std::vector<size_t>{64, 1024};
    o.repeats = kIsStandIn ? 5 : 30;
    o.round_mib = {GradientExchange::kRoundElements * sizeof(gradX) / kMib};
    o.pack = {GradientExchange::kPackRatio};
    o.merge_mib = {GradientExchange::kListElements * sizeof(gradX) / kMib};
    std::vector<std::string> of_trainer;
    for (int i = 1; i < argc; i += 2) {
        const std::string name = argv[i];
        if (name == "--help") {
            std::printf("%s", kHelp);
            std::exit(0);
        }
        if (i + 1 == argc) throw Error(name + ": has no value");
        const std::string value = argv[i + 1];
        if (name == "--models") {
            o.models = split(value);
        } else if (name == "--one") {
            o.one_mib = read_sizes(name, value);
        } else if (name == "--raw") {
            o.raw_mib = read_sizes(name, value);
        } else if (name == "--rounds") {
            o.round_mib = read_sizes(name, value);
        } else if (name == "--pack") {
            o.pack = read_sizes(name, value);
        } else if (name == "--merge") {
            o.merge_mib = read_sizes(name, value);
        } else if (name == "--repeats") {
            o.repeats = std::max<int>(1, static_cast<int>(read_size(name, value)));
        } else if (name == "--ctas") {
            o.max_ctas = static_cast<int>(read_size(name, value));
        } else if (name == "--blocking") {
            o.blocking = static_cast<int>(read_size(name, value));
        } else if (name == "--strict") {
            o.strict = static_cast<int>(read_size(name, value));
        } else if (name == "--json") {
            o.json = value;
        } else if (name.rfind("-p", 0) == 0) {
            of_trainer.insert(of_trainer.end(), {name, value});
        } else {
            throw Error(name + ": unknown; --help lists the options");
        }
    }
    if (o.round_mib.empty() || o.pack.empty() || o.merge_mib.empty()) {
        throw Error("--rounds, --pack, --merge: give at least one");
    }
    o.ranks = parse_options(of_trainer);
    return o;
}

// ---- what is reduced ----

// Tensors of a list, reduced together; lists in the order in which they are queued.
struct Payload {
    std::string name;
    std::vector<std::vector<size_t>> lists;
    size_t elements = 0;  // of all tensors
    DeviceBuffer<gradX> memory;
    std::vector<std::vector<gradX*>> tensors;

    double bytes() const { return static_cast<double>(elements) * sizeof(gradX); }

    void place() {
        constexpr size_t kAlign = ParamLayout::kAlignElements;
        size_t room = 0;
        std::vector<std::vector<size_t>> offsets;
        for (const std::vector<size_t>& sizes : lists) {
            offsets.emplace_back();
            for (const size_t size : sizes) {
                offsets.back().push_back(room);
                elements += size;
                room += (size + kAlign - 1) / kAlign * kAlign;
            }
        }
        memory = DeviceBuffer<gradX>(room);
        cuda_check(cudaMemset(memory.get(), 0, memory.bytes()));
        for (const std::vector<size_t>& list : offsets) {
            tensors.emplace_back();
            for (const size_t offset : list) tensors.back().push_back(memory.get() + offset);
        }
    }
};

// A model's gradients as the backward pass finishes them: final LayerNorm, layers from the last to the
// first, embeddings.
Payload model_payload(const std::string& name) {
    const std::optional<ModelConfig> config = parse_model_name(name);
    if (!config) throw Error("--models " + name + ": not the name of a model");
    const ParamLayout layout(*config);
    Payload payload;
    payload.name = name;
    std::vector<size_t> layer;
    for (const ParamInfo& info : param_table()) {
        if (info.per_layer) layer.push_back(layout.layer_elements(info.id));
    }
    payload.lists.push_back(
        {layout.layer_elements(Param::lnfw), layout.layer_elements(Param::lnfb)});
    for (int l = 0; l < config->num_layers; ++l) payload.lists.push_back(layer);
    payload.lists.push_back({layout.layer_elements(Param::wte), layout.layer_elements(Param::wpe)});
    payload.place();
    return payload;
}

Payload one_buffer(size_t mib) {
    Payload payload;
    payload.name = format("%zu MiB", mib);
    payload.lists = {{(mib << 20) / sizeof(gradX)}};
    payload.place();
    return payload;
}

// ---- the device and the host in turns ----

// Holds a stream until it is opened, or for a while: should the queue of work not take all that comes
// behind, the host would else wait for itself.
class Gate {
  public:
    void hold(cudaStream_t stream) {
        open_ = false;
        cuda_check(cudaLaunchHostFunc(
            stream, [](void* self) { static_cast<Gate*>(self)->wait(); }, this));
    }
    void open() {
        std::lock_guard<std::mutex> lock(mutex_);
        open_ = true;
        changed_.notify_all();
    }

  private:
    void wait() {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait_for(lock, std::chrono::milliseconds(100), [this] { return open_; });
    }
    std::mutex mutex_;
    std::condition_variable changed_;
    bool open_ = false;
};

struct Bench {
    MultiGpuConfig config;
    cudaStream_t compute = nullptr;
    cudaEvent_t start = nullptr, end = nullptr;
    DeviceBuffer<float> ready;
    Gate gate;

    bool is_main() const { return config.process_rank == 0; }

    void open(const BenchOptions& o) {
        CommunicatorOptions communicator;
        communicator.max_ctas = o.max_ctas;
        communicator.blocking = o.blocking != 0;
        config = multi_gpu_config_init(o.ranks.num_processes, o.ranks.process_rank,
                                       o.ranks.gpus_per_node, o.ranks.server_address,
                                       o.ranks.shared_folder, o.ranks.init_method, o.ranks.port,
                                       communicator);
        const int n = config.num_processes;
        if (n < 2 || (n & (n - 1)) != 0) {
            throw Error(format("%d processes: start 2, 4 or 8, such as mpirun -np 2", n));
        }
        cuda_check(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking));
        cuda_check(cudaEventCreateWithFlags(&start, cudaEventDefault));
        cuda_check(cudaEventCreateWithFlags(&end, cudaEventDefault));
        ready = DeviceBuffer<float>(1);
    }

    // The compute stream goes on when the NCCL stream has come as far as now.
    void compute_waits() {
        cuda_check(cudaEventRecord(config.compute_nccl_sync, config.nccl_stream));
        cuda_check(cudaStreamWaitEvent(compute, config.compute_nccl_sync, 0));
    }

    // Milliseconds of the device for what work() queues, from when all ranks are ready to when the
    // compute stream has come behind it; *host_us: microseconds that queueing took.
    double time(const std::function<void()>& work, bool held, double* host_us) {
        using Clock = std::chrono::steady_clock;
        if (held) gate.hold(config.nccl_stream);
        nccl_group(config, "start of a measurement", -1, [&] {
            nccl_check(config,
                       ncclAllReduce(ready.get(), ready.get(), 1, ncclFloat32, ncclMax,
                                     config.nccl_comm, config.nccl_stream),
                       "start of a measurement");
        });
        cuda_check(cudaEventRecord(start, config.nccl_stream));
        cuda_check(cudaStreamWaitEvent(compute, start, 0));
        const Clock::time_point begin = Clock::now();
        work();
        *host_us = std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
        cuda_check(cudaEventRecord(end, compute));
        gate.open();
        wait_for_stream(config, "a measurement", compute);
        float ms = 0.0f;
        cuda_check(cudaEventElapsedTime(&ms, start, end));
        return ms;
    }
};

// ---- cases ----

enum class Way { canonical, plain, reduce_scatter, all_reduce, all_gather, scatter_gather };

struct Case {
    std::string name;
    Way way;
    int zero_stage;
    double factor;  // of bytes * (N-1)/N that cross the bus
    size_t round_mib = 0, pack = 0, merge_mib = 0;
    bool as_one = false;  // NCCL's collective of the lists' bytes in one buffer
    std::shared_ptr<GradientExchange> exchange;
    DeviceBuffer<gradX> received, staging;
    std::vector<double> ms, host_us;  // of each repetition
    double median_ms = 0.0, bus = 0.0, median_host_us = 0.0;
};

template <size_t N>
void reduce_list(Bench& bench, const std::vector<gradX*>& tensors,
                 const std::vector<size_t>& sizes) {
    gradX* pointers[N];
    size_t counts[N];
    std::copy(tensors.begin(), tensors.end(), pointers);
    std::copy(sizes.begin(), sizes.end(), counts);
    multi_gpu_async_reduce_gradient(pointers, counts, &bench.config, bench.compute);
}

void queue_reduction(Bench& bench, const Payload& payload) {
    for (size_t i = 0; i < payload.lists.size(); ++i) {
        const auto& tensors = payload.tensors[i];
        const auto& sizes = payload.lists[i];
        if (sizes.size() == 1) {
            reduce_list<1>(bench, tensors, sizes);
        } else if (sizes.size() == 2) {
            reduce_list<2>(bench, tensors, sizes);
        } else {
            reduce_list<12>(bench, tensors, sizes);
        }
    }
    multi_gpu_finish_reduction(&bench.config, bench.compute);
}

// One of NCCL's collectives on a tensor, in place.
void queue_collective(const MultiGpuConfig& config, Way way, gradX* tensor, size_t size) {
    const size_t shard = size / config.num_processes;
    gradX* own = tensor + config.process_rank * shard;
    ncclResult_t result;
    if (way == Way::all_reduce) {
        result = ncclAllReduce(tensor, tensor, size, kNcclType<gradX>, ncclSum, config.nccl_comm,
                               config.nccl_stream);
    } else if (way == Way::reduce_scatter) {
        result = ncclReduceScatter(tensor, own, shard, kNcclType<gradX>, ncclSum, config.nccl_comm,
                                   config.nccl_stream);
    } else {
        result = ncclAllGather(own, tensor, shard, kNcclType<gradX>, config.nccl_comm,
                               config.nccl_stream);
    }
    nccl_check(config, result, "a raw collective");
}

void queue_raw(Bench& bench, const Case& c, const Payload& payload) {
    const MultiGpuConfig& config = bench.config;
    const auto group = [&](Way way, const std::vector<gradX*>& tensors,
                           const std::vector<size_t>& sizes) {
        nccl_group(config, "raw collectives", -1, [&] {
            for (size_t t = 0; t < tensors.size(); ++t) {
                queue_collective(config, way, tensors[t], sizes[t]);
            }
        });
    };
    const auto list = [&](const std::vector<gradX*>& tensors, const std::vector<size_t>& sizes) {
        if (c.way != Way::scatter_gather) return group(c.way, tensors, sizes);
        group(Way::reduce_scatter, tensors, sizes);
        group(Way::all_gather, tensors, sizes);
    };
    if (c.as_one) {
        list({payload.memory.get()}, {payload.elements});
    } else {
        for (size_t i = 0; i < payload.lists.size(); ++i) {
            list(payload.tensors[i], payload.lists[i]);
        }
    }
    bench.compute_waits();
}

void queue_case(Bench& bench, const Case& c, const Payload& payload) {
    bench.config.zero_stage = c.zero_stage;
    bench.config.exchange = c.exchange;
    if (c.way == Way::canonical || c.way == Way::plain) {
        queue_reduction(bench, payload);
    } else {
        queue_raw(bench, c, payload);
    }
}

// The canonical exchange with these rounds, ready to run.
void open_exchange(Bench& bench, Case* c, const Payload& payload) {
    bench.config.zero_stage = c->zero_stage;
    ReductionPlan plan;
    plan.num_processes = bench.config.num_processes;
    multi_gpu_plan_reduction(&bench.config, plan);
    c->exchange = bench.config.exchange;
    c->exchange->round_elements = std::max<size_t>(1, c->round_mib << 20) / sizeof(gradX);
    c->exchange->pack_ratio = c->pack;
    c->exchange->list_elements = (c->merge_mib << 20) / sizeof(gradX);
    plan_exchange_buffers(c->exchange.get(), payload.lists, bench.config.num_processes);
    c->received = DeviceBuffer<gradX>(2 * c->exchange->half_elements);
    c->staging = DeviceBuffer<gradX>(2 * c->exchange->staging_half_elements);
    c->exchange->received = c->received.get();
    c->exchange->staging = c->staging.get();
    c->exchange->open();
}

std::vector<Case> payload_cases(Bench& bench, const BenchOptions& o, const Payload& payload) {
    std::vector<Case> cases;
    const auto add = [&](const char* name, Way way, int zero_stage, double factor) -> Case& {
        cases.emplace_back();
        Case& c = cases.back();
        c.name = name, c.way = way, c.zero_stage = zero_stage, c.factor = factor;
        return c;
    };
    add("ncclReduceScatter", Way::reduce_scatter, 1, 1);
    if (payload.lists.size() > 1) {
        add("ncclReduceScatter, one buffer", Way::reduce_scatter, 1, 1).as_one = true;
    }
    add("ncclReduceScatter + AllGather", Way::scatter_gather, 0, 2);
    add("ncclAllReduce", Way::all_reduce, 0, 2);
    for (const int zero_stage : {1, 0}) {
        for (const size_t pack : o.pack) {
            for (const size_t round : o.round_mib) {
                for (const size_t merge : o.merge_mib) {
                    Case& c = add("canonical", Way::canonical, zero_stage, zero_stage == 1 ? 1 : 2);
                    c.name = format("ZeRO-%d canonical, %zu MiB, pack %zu, merge %zu", zero_stage,
                                    round, pack, merge);
                    c.round_mib = round, c.pack = pack, c.merge_mib = merge;
                    open_exchange(bench, &c, payload);
                }
            }
        }
        add(zero_stage == 1 ? "ZeRO-1 plain" : "ZeRO-0 plain", Way::plain, zero_stage,
            zero_stage == 1 ? 1 : 2);
    }
    return cases;
}

std::vector<Case> raw_cases() {
    std::vector<Case> cases(3);
    cases[0].name = "ncclAllReduce", cases[0].way = Way::all_reduce, cases[0].factor = 2;
    cases[1].name = "ncclReduceScatter", cases[1].way = Way::reduce_scatter, cases[1].factor = 1;
    cases[2].name = "ncclAllGather", cases[2].way = Way::all_gather, cases[2].factor = 1;
    for (Case& c : cases) c.zero_stage = 0;
    return cases;
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    const size_t n = values.size();
    return (values[(n - 1) / 2] + values[n / 2]) / 2;
}

// Measures all cases in turns.
void measure(Bench& bench, const BenchOptions& o, const Payload& payload,
             std::vector<Case>* cases) {
    constexpr int kWarmups = 3;  // the first connect ranks, which a held stream would block
    const int n = bench.config.num_processes;
    for (int repeat = -kWarmups; repeat < o.repeats; ++repeat) {
        for (Case& c : *cases) {
            double host_us = 0.0;
            const double ms =
                bench.time([&] { queue_case(bench, c, payload); }, repeat >= -1, &host_us);
            if (repeat < 0) continue;
            c.ms.push_back(ms);
            c.host_us.push_back(host_us);
        }
    }
    bench.config.exchange.reset();
    for (Case& c : *cases) {
        const std::vector<double> all =
            multi_gpu_all_gather_host(bench.config, c.ms.data(), c.ms.size(), "times of a case");
        std::vector<double> slowest(c.ms.size(), 0.0);
        for (size_t i = 0; i < all.size(); ++i) {
            slowest[i % slowest.size()] = std::max(slowest[i % slowest.size()], all[i]);
        }
        c.ms = slowest;
        c.median_ms = median(slowest);
        c.median_host_us = median(c.host_us);
        c.bus = c.factor * payload.bytes() * (n - 1) / n / c.median_ms * 1e-6;
    }
}

// ---- are the sums right? ----

// Small whole numbers, of which bf16 holds every sum over eight ranks and every eighth of it.
float test_value(int rank, size_t i) {
    return static_cast<float>((i + 3 * static_cast<size_t>(rank)) % 7);
}

// Runs one of our cases on known values. Throws Error on this rank when a sum is wrong.
void check_case(Bench& bench, const Case& c, const Payload& payload) {
    const int n = bench.config.num_processes, rank = bench.config.process_rank;
    std::vector<gradX> host(payload.memory.count());
    for (size_t i = 0; i < host.size(); ++i) host[i] = from_float<gradX>(test_value(rank, i));
    cuda_check(cudaMemcpy(payload.memory.get(), host.data(), payload.memory.bytes(),
                          cudaMemcpyHostToDevice));
    cuda_check(cudaDeviceSynchronize());
    double host_us;
    bench.time([&] { queue_case(bench, c, payload); }, false, &host_us);
    cuda_check(cudaDeviceSynchronize());
    cuda_check(cudaMemcpy(host.data(), payload.memory.get(), payload.memory.bytes(),
                          cudaMemcpyDeviceToHost));
    float sums[7];
    for (size_t i = 0; i < 7; ++i) {
        sums[i] = 0.0f;
        for (int r = 0; r < n; ++r) sums[i] += test_value(r, i);
        if (c.way == Way::plain) sums[i] /= static_cast<float>(n);
    }
    for (size_t list = 0; list < payload.lists.size(); ++list) {
        for (size_t t = 0; t < payload.lists[list].size(); ++t) {
            const ShardInfo part =
                multi_gpu_get_shard_offset(payload.lists[list][t], &bench.config, 1);
            const size_t first = payload.tensors[list][t] - payload.memory.get();
            for (size_t i = first + part.offset; i < first + part.offset + part.size; ++i) {
                if (to_float(host[i]) == sums[i % 7]) continue;
                throw Error(format("%s, %s: element %zu of tensor %zu of list %zu is %g, not %g",
                                   payload.name.c_str(), c.name.c_str(), i - first, t, list,
                                   to_float(host[i]), sums[i % 7]));
            }
        }
    }
}

void check_sums(Bench& bench, const Payload& payload, const std::vector<Case>& cases) {
    for (const Case& c : cases) {
        if (c.way != Way::canonical && c.way != Way::plain) continue;
        std::string error;
        try {
            check_case(bench, c, payload);
        } catch (const Error& wrong) {
            error = wrong.what();
        }
        bench.config.exchange.reset();
        multi_gpu_agree(bench.config, error);
    }
    cuda_check(cudaMemset(payload.memory.get(), 0, payload.memory.bytes()));
}

// ---- results ----

struct Target {
    std::string what;
    double value, least;
    bool met() const { return value >= least; }
};

struct Report {
    detail::JsonMembers payloads, raw;
    std::vector<Target> targets;
};

const Case& find_case(const std::vector<Case>& cases, Way way, int zero_stage,
                      bool as_one = false) {
    for (const Case& c : cases) {
        if (c.way == way && c.zero_stage == zero_stage && c.as_one == as_one) return c;
    }
    throw Error("no such case");
}

// The raw case of the same meaning: what a case's time is compared with.
const Case& raw_of(const std::vector<Case>& cases, const Case& c) {
    return c.factor == 1 ? find_case(cases, Way::reduce_scatter, 1)
                         : find_case(cases, Way::scatter_gather, 0);
}

std::string number(double value, const char* how) {
    return format(how, value);
}

std::string case_json(const Case& c) {
    detail::JsonMembers members = {
        {"median_ms", number(c.median_ms, "%.6f")},
        {"min_ms", number(*std::min_element(c.ms.begin(), c.ms.end()), "%.6f")},
        {"max_ms", number(*std::max_element(c.ms.begin(), c.ms.end()), "%.6f")},
        {"bus_gb_per_s", number(c.bus, "%.2f")},
        {"host_us", number(c.median_host_us, "%.1f")}};
    return detail::json_object(members, "    ");
}

void print_payload(const Payload& payload, const std::vector<Case>& cases, bool checked) {
    const double all_reduce = find_case(cases, Way::all_reduce, 0).median_ms;
    std::printf("\n%s: %.1f MB %s in %zu lists%s\n", payload.name.c_str(), payload.bytes() * 1e-6,
                sizeof(gradX) == 2 ? "bf16" : "fp32", payload.lists.size(),
                checked ? "; sums checked" : "");
    std::printf("%-38s %9s %9s %8s %8s %8s %9s\n", "", "ms", "min", "bus GB/s", "of raw", "of AR",
                "host us");
    for (const Case& c : cases) {
        const double of_raw = raw_of(cases, c).median_ms / c.median_ms;
        std::printf("%-38s %9.4f %9.4f %8.1f %8.3f %8s %9.1f\n", c.name.c_str(), c.median_ms,
                    *std::min_element(c.ms.begin(), c.ms.end()), c.bus, of_raw,
                    c.factor == 2 ? number(all_reduce / c.median_ms, "%.3f").c_str() : "",
                    c.median_host_us);
    }
}

// Targets for a payload: of ZeRO-1 against a raw reduce-scatter, of ZeRO-0 against that with an
// all-gather.
void add_targets(Report* report, const Payload& payload, const std::vector<Case>& cases,
                 double least) {
    const double raw = find_case(cases, Way::reduce_scatter, 1).median_ms;
    const double both = find_case(cases, Way::scatter_gather, 0).median_ms;
    const auto add = [&](const char* what, double value, double bound) {
        report->targets.push_back({payload.name + ": " + what, value, bound});
    };
    add("ZeRO-1 canonical of raw reduce-scatter",
        raw / find_case(cases, Way::canonical, 1).median_ms, least);
    add("ZeRO-1 plain of raw reduce-scatter", raw / find_case(cases, Way::plain, 1).median_ms,
        least);
    add("ZeRO-0 canonical of raw reduce-scatter + all-gather",
        both / find_case(cases, Way::canonical, 0).median_ms, 0.95);
}

void measure_payload(Bench& bench, const BenchOptions& o, Payload payload, Report* report) {
    constexpr double kMostToCheck = 1e9;  // bytes
    std::vector<Case> cases = payload_cases(bench, o, payload);
    measure(bench, o, payload, &cases);
    const bool check = payload.bytes() <= kMostToCheck;
    if (check) check_sums(bench, payload, cases);
    if (payload.name == "512 MiB") add_targets(report, payload, cases, 0.95);
    if (payload.name == "d12") add_targets(report, payload, cases, 0.90);
    if (bench.is_main()) print_payload(payload, cases, check);
    detail::JsonMembers members = {{"bytes", number(payload.bytes(), "%.0f")},
                                   {"lists", std::to_string(payload.lists.size())}};
    for (const Case& c : cases) members.emplace_back(c.name, case_json(c));
    report->payloads.emplace_back(payload.name, detail::json_object(members, "  "));
    cuda_check(cudaDeviceSynchronize());  // before memory goes
}

// What NCCL 2.28 reaches between two H200 over NVLink, bf16, in place, in GB/s: a run that is far below
// says nothing about us.
struct Known {
    size_t mib;
    double all_reduce, reduce_scatter, all_gather;
};
constexpr Known kKnown[] = {{64, 270, 202, 220}, {1024, 330, 268, 289}};
constexpr const char* kKnownGpu = "H200";

void measure_raw(Bench& bench, const BenchOptions& o, const std::string& gpu, Report* report) {
    if (bench.is_main() && !o.raw_mib.empty()) {
        std::printf("\nNCCL alone, in place%28s %9s %8s %8s\n", "ms", "min", "bus GB/s",
                    "of known");
    }
    for (const size_t mib : o.raw_mib) {
        const Payload payload = one_buffer(mib);
        std::vector<Case> cases = raw_cases();
        measure(bench, o, payload, &cases);
        for (const Case& c : cases) {
            double known = 0.0;
            for (const Known& k : kKnown) {
                if (k.mib != mib || bench.config.num_processes != 2 || sizeof(gradX) != 2) continue;
                if (gpu.find(kKnownGpu) == std::string::npos) continue;
                known = c.way == Way::all_reduce       ? k.all_reduce
                        : c.way == Way::reduce_scatter ? k.reduce_scatter
                                                       : k.all_gather;
            }
            const std::string name = format("%s %s", c.name.c_str(), payload.name.c_str());
            if (bench.is_main()) {
                std::printf("%-38s %9.4f %9.4f %8.1f %8s\n", name.c_str(), c.median_ms,
                            *std::min_element(c.ms.begin(), c.ms.end()), c.bus,
                            known > 0 ? number(c.bus / known, "%.3f").c_str() : "");
            }
            if (known > 0) {
                report->targets.push_back({name + " of the known bandwidth", c.bus / known, 0.95});
            }
            report->raw.emplace_back(name, case_json(c));
        }
        cuda_check(cudaDeviceSynchronize());
    }
}

std::string gpu_name(const MultiGpuConfig& config) {
    if (kIsStandIn) return "none: CPU stand-in, over Gloo";
#ifndef LLMC_CPU
    cudaDeviceProp properties{};
    cuda_check(cudaGetDeviceProperties(&properties, config.local_device_idx));
    return properties.name;
#else
    (void)config;
    return "";
#endif
}

std::string report_json(const Report& report, const Bench& bench, const std::string& gpu,
                        const std::string& command) {
    int nccl = 0;
    ncclGetVersion(&nccl);
    std::string targets = "[";
    for (const Target& t : report.targets) {
        targets += targets.size() > 1 ? ",\n  " : "\n  ";
        targets +=
            format("{\"what\": %s, \"value\": %.4f, \"least\": %.2f, \"met\": %s}",
                   json_string(t.what).c_str(), t.value, t.least, t.met() ? "true" : "false");
    }
    targets += report.targets.empty() ? "]" : "\n ]";
    detail::JsonMembers members = {{"date", json_string(detail::utc_time(std::time(nullptr)))},
                                   {"gpu", json_string(gpu)},
                                   {"processes", std::to_string(bench.config.num_processes)},
                                   {"commit", json_string(kCommit)},
                                   {"build", detail::build_json("  ")},
                                   {"nccl", std::to_string(nccl)},
                                   {"command", json_string(command)},
                                   {"raw", detail::json_object(report.raw, "  ")},
                                   {"payloads", detail::json_object(report.payloads, "  ")},
                                   {"targets", targets}};
    for (const char* name : {"NCCL_ALGO", "NCCL_NVLS_ENABLE", "NCCL_PROTO"}) {
        const char* value = std::getenv(name);
        if (value != nullptr) members.emplace_back(name, json_string(value));
    }
    return detail::json_object(members, "") + "\n";
}

int run_bench(int argc, char** argv) {
    const BenchOptions options = read_options(argc, argv);
    Bench bench;
    bench.open(options);
    const std::string gpu = gpu_name(bench.config);
    if (bench.is_main()) {
        std::printf(
            "%d processes, GPU %s; %d repetitions; NCCL's calls %s, thread blocks %s\n",
            bench.config.num_processes, gpu.c_str(), options.repeats,
            options.blocking ? "block" : "do not block",
            options.max_ctas > 0 ? std::to_string(options.max_ctas).c_str() : "as it likes");
        std::fflush(stdout);
    }
    Report report;
    measure_raw(bench, options, gpu, &report);
    for (const size_t mib : options.one_mib) {
        measure_payload(bench, options, one_buffer(mib), &report);
    }
    for (const std::string& model : options.models) {
        measure_payload(bench, options, model_payload(model), &report);
    }
    bool all_met = true;
    for (const Target& t : report.targets) all_met = all_met && t.met();
    if (bench.is_main()) {
        std::printf("\n");
        if (kIsStandIn) std::printf("CPU stand-in: no figure here says anything about a GPU\n");
        for (const Target& t : report.targets) {
            std::printf("%-8s %.3f, at least %.2f: %s\n", t.met() ? "met" : "NOT MET", t.value,
                        t.least, t.what.c_str());
        }
        if (!options.json.empty()) {
            std::string command;
            for (int i = 0; i < argc; ++i) command += (i > 0 ? " " : "") + std::string(argv[i]);
            AtomicFile file(options.json);
            file.write(report_json(report, bench, gpu, command));
            file.commit();
            std::printf("wrote %s\n", options.json.c_str());
        }
    }
    cudaEventDestroy(bench.start);
    cudaEventDestroy(bench.end);
    cudaStreamDestroy(bench.compute);
    multi_gpu_config_free(&bench.config);
    return options.strict && !all_met && !kIsStandIn ? 1 : 0;
}

}  // namespace
}  // namespace llmc

int main(int argc, char** argv) {
    try {
        return llmc::run_bench(argc, argv);
    } catch (const std::exception& error) {
        std::fflush(stdout);
        std::fprintf(stderr, "bench_comm: %s\n", error.what());
        std::_Exit(1);  // streams may hold work that never ends
    }
}
