// `make tune`: measures which of cuBLASLt's algorithms is the fastest for each matrix product of the
// usual models, and writes the table that the trainer is compiled with (llmc/matmul_table.h).
//
// For each product the heuristic is asked for its candidates with the trainer's own limits, and their
// neighbours, which it does not name, are tried too. They run in turns on random data and in CUDA graphs,
// as in training, are dropped as they fall behind, and what is left is ordered by the median time.
// Training puts a GPU at its power limit, where the one that needs less energy runs at a higher clock: so
// the best ones run once more, each for a while without a pause, and those times decide. The fastest ones
// are checked: the same bits in every run, whatever the workspace holds and wherever it lies; the numbers
// of the heuristic's first; and on whole numbers, where every sum is exact, the one right rounding.
// Products go by their share of a training step, the longest first, and the table is written after each,
// so that a run that is stopped is worth what it has done.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "dev/tune_product.cuh"
#include "dev/tune_table.h"
#include "llmc/atomic_file.h"
#include "llmc/captured_work.cuh"
#include "llmc/model_name.h"

namespace llmc::tuning {
namespace {

constexpr const char* kUsage =
    "tune [--out FILE] [--seconds S] [--candidates N] [--model NAME:B[:T]] ...\n"
    "  --out FILE          the table to write (default llmc/matmul_algorithms.inc)\n"
    "  --seconds S         start no product after S seconds (default 600)\n"
    "  --candidates N      ask the heuristic for N algorithms (default 32)\n"
    "  --neighbours 0|1    try other settings of its algorithms, too (default 1)\n"
    "  --sustained MS      run the best ones of a product MS milliseconds each without a pause,\n"
    "                      as the GPU's power limit has it (default 300; 0: do not)\n"
    "  --model NAME:B[:T]  tune the products of this model at this batch, T tokens long (default\n"
    "                      1024); may be repeated (default d12:64 d12:4 d24:32 d48:16)\n"
    "  --missing           leave out the products that the table already has\n"
    "  --verbose           print both times of the best ones\n";

struct Arguments {
    std::string out = "llmc/matmul_algorithms.inc";
    double seconds = 600.0;
    int candidates = 32;
    bool neighbours = true;
    int sustained_ms = 300;
    bool verbose = false;
    std::vector<std::string> models;
    bool missing = false;
};

struct Model {
    std::string name;
    int rows;
    ModelConfig config;
};

// A product to measure, and what it takes of the time of the models' steps.
struct Work {
    std::string name;  // the first model's that has it
    ProductKey key;
    double share;
};

double now() {
    using Clock = std::chrono::steady_clock;
    static const Clock::time_point start = Clock::now();
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// ---- arguments ----

int whole_number(const std::string& what, const std::string& text, int least, int most) {
    char* end = nullptr;
    const long value = std::strtol(text.c_str(), &end, 10);
    if (text.empty() || *end != '\0' || value < least || value > most) {
        throw Error(format("%s %s: must be a whole number from %d to %d", what.c_str(),
                           text.c_str(), least, most));
    }
    return static_cast<int>(value);
}
int positive(const std::string& what, const std::string& text) {
    return whole_number(what, text, 1, 1 << 20);
}

Arguments parse_arguments(int argc, char** argv) {
    Arguments arguments;
    for (int i = 1; i < argc; ++i) {
        const std::string flag = argv[i];
        if (flag == "--help") {
            std::printf("%s", kUsage);
            std::exit(0);
        }
        if (flag == "--missing") {
            arguments.missing = true;
            continue;
        }
        if (flag == "--verbose") {
            arguments.verbose = true;
            continue;
        }
        if (i + 1 == argc) throw Error(flag + ": unknown, or its value is missing; see --help");
        const std::string value = argv[++i];
        if (flag == "--out") {
            arguments.out = value;
        } else if (flag == "--seconds") {
            arguments.seconds = positive(flag, value);
        } else if (flag == "--candidates") {
            arguments.candidates = positive(flag, value);
        } else if (flag == "--neighbours") {
            arguments.neighbours = whole_number(flag, value, 0, 1) == 1;
        } else if (flag == "--sustained") {
            arguments.sustained_ms = whole_number(flag, value, 0, 10000);
        } else if (flag == "--model") {
            arguments.models.push_back(value);
        } else {
            throw Error(flag + ": unknown; see --help");
        }
    }
    if (arguments.models.empty()) arguments.models = {"d12:64", "d12:4", "d24:32", "d48:16"};
    return arguments;
}

// NAME:B or NAME:B:T, where the name itself may have a colon in it (gpt2:d12).
Model parse_model(const std::string& text) {
    const std::string flag = "--model " + text;
    std::vector<std::string> words(1);
    for (const char c : text) {
        if (c == ':') {
            words.emplace_back();
        } else {
            words.back() += c;
        }
    }
    size_t names = words[0] == "gpt2" || words[0] == "gpt3" || words[0] == "custom" ? 2 : 1;
    if (words.size() != names + 1 && words.size() != names + 2) {
        throw Error(flag + ": must be such as d12:64 or d12:64:1024");
    }
    const std::string name = names == 2 ? words[0] + ":" + words[1] : words[0];
    std::optional<ModelConfig> config;
    try {
        config = parse_model_name(name);
    } catch (const Error&) {  // names -e, which is the trainer's
    }
    if (!config) throw Error(flag + ": no such model; must be one of " + kModelNames);
    const int batch = positive(flag + ":", words[names]);
    const int tokens = words.size() > names + 1 ? positive(flag + ":", words[names + 1]) : 1024;
    if (int64_t{batch} * tokens > 1 << 20) throw Error(flag + ": more than 1048576 positions");
    return {text, batch * tokens, *config};
}

// ---- what to measure ----

ProductTypes types() {
    return {sizeof(floatX) == 4, sizeof(gradX) == 4, true};
}

// With GELU in the forward product, as -ge does by default.
constexpr int kUsualGelu = 1;

std::vector<ModelProduct> products_of(const Model& model, int gelu_fusion) {
    const ModelConfig& c = model.config;
    return model_products(types(), model.rows, c.num_layers, c.channels, c.padded_vocab_size,
                          gelu_fusion);
}

bool usual(const ModelProduct& product) {
    return !product.key.accumulate;
}

double flops(const ProductKey& key) {
    return 2.0 * key.m * key.n * key.k;
}

// Every product of the models once, the one with the largest share of a step first. Those that a
// step of the default settings does not have (other levels of -ge) count for less, and so do those
// that only some micro-batches have.
std::vector<Work> collect(const std::vector<Model>& models) {
    std::map<ProductKey, Work> all;
    for (const Model& model : models) {
        double step = 0.0;
        for (const ModelProduct& product : products_of(model, kUsualGelu)) {
            if (usual(product)) step += flops(product.key) * product.calls;
        }
        for (const int gelu : {kUsualGelu, 0, 2}) {
            for (const ModelProduct& product : products_of(model, gelu)) {
                double share = flops(product.key) * product.calls / step;
                if (!usual(product)) share /= 4.0;
                if (gelu != kUsualGelu) share /= 8.0;
                Work& work = all[product.key];
                if (work.name.empty()) work = {model.name + " " + product.name, product.key, 0.0};
                work.share = std::max(work.share, share);
            }
        }
    }
    std::vector<Work> works;
    for (const auto& [key, work] : all) works.push_back(work);
    std::sort(works.begin(), works.end(),
              [](const Work& a, const Work& b) { return a.share > b.share; });
    return works;
}

// ---- times ----

// Keeps the GPU waiting while the host queues what comes next.
__global__ void wait_kernel(long long nanoseconds) {
    unsigned long long start = 0, time = 0;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    } while (static_cast<long long>(time - start) < nanoseconds);
}

struct Candidate {
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace;
    int number;  // in the heuristic's order, from 0
    bool running = true;
    std::vector<double> times{};      // microseconds
    std::vector<double> sustained{};  // microseconds, at the power limit; may be empty

    double median() const {
        std::vector<double> sorted = times;
        std::nth_element(sorted.begin(), sorted.begin() + sorted.size() / 2, sorted.end());
        return sorted[sorted.size() / 2];
    }
    // What decides: the mean of the sustained times, if there are any.
    double time() const {
        if (sustained.empty()) return median();
        return std::accumulate(sustained.begin(), sustained.end(), 0.0) / sustained.size();
    }
};

class Event {
  public:
    Event() { cuda_check(cudaEventCreate(&event_)); }
    Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
    ~Event() {
        if (event_ != nullptr) cudaEventDestroy(event_);
    }
    void record(cudaStream_t stream) const { cuda_check(cudaEventRecord(event_, stream)); }
    double microseconds_since(const Event& start) const {
        float ms = 0.0f;
        cuda_check(cudaEventElapsedTime(&ms, start.event_, event_));
        return 1e3 * ms;
    }

  private:
    cudaEvent_t event_ = nullptr;
};

// Several launches of a product, as the trainer has them: in a CUDA graph.
class ProductGraph {
  public:
    ProductGraph(Workbench& bench, const Candidate& candidate, int times, cudaStream_t stream)
        : graph_(capture_graph(stream, [&] {
              for (int i = 0; i < times; ++i) {
                  cublas_check(bench.launch_as_in_training(candidate.algorithm, candidate.workspace,
                                                           i % bench.copies(), stream));
              }
          })) {}
    ProductGraph(ProductGraph&& other) noexcept : graph_(std::exchange(other.graph_, nullptr)) {}
    ~ProductGraph() {
        if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
    }
    void launch(cudaStream_t stream) const { cuda_check(cudaGraphLaunch(graph_, stream)); }

  private:
    cudaGraphExec_t graph_;
};

class Stopwatch {
  public:
    Stopwatch(Workbench& bench, std::vector<Candidate>& candidates, double deadline)
        : bench_(bench),
          candidates_(candidates),
          deadline_(deadline),
          starts_(candidates.size()),
          ends_(candidates.size()) {}

    // Fills the candidates' times; the first of them is never dropped, and neither are those that take
    // up to `margin` longer than the fastest.
    void run(double margin) {
        screen();
        for (const Candidate& candidate : candidates_) {
            graphs_.emplace_back();
            if (candidate.running) graphs_.back().emplace(bench_, candidate, repeats_, stream());
        }
        constexpr int kRounds = 20, kLeastRounds = 3;
        for (int round = 1; round <= kRounds; ++round) {
            if (round > kLeastRounds && now() > deadline_) break;
            measure_all();
            if (round == 2) drop_slower_than(1.25);
            if (round == 5) drop_slower_than(1.03 + margin);
            if (round == 10) drop_slower_than(1.0 + margin);
        }
    }

    // Runs each of `candidates` for `ms` milliseconds without a pause, in turns, and adds to its
    // sustained times. The first third of such a run has no part in its time: until then the clock is
    // what the one before has left.
    void run_sustained(std::vector<Candidate*> candidates, int ms) {
        // Graphs so long that what lies between two of them does not count.
        constexpr double kGraphMicroseconds = 4000.0;
        constexpr int kMostLaunches = 256;
        std::shuffle(candidates.begin(), candidates.end(), shuffle_);
        if (!candidates.empty()) candidates.insert(candidates.begin(), candidates[0]);
        for (size_t i = 0; i < candidates.size(); ++i) {
            Candidate& candidate = *candidates[i];
            const double once = candidate.median();
            const int launches =
                std::clamp(static_cast<int>(kGraphMicroseconds / once), 1, kMostLaunches);
            const ProductGraph graph(bench_, candidate, launches, stream());
            const auto repeat_for = [&](double milliseconds) {
                const int times = static_cast<int>(1e3 * milliseconds / (launches * once)) + 1;
                for (int k = 0; k < times; ++k) graph.launch(stream());
                return times * launches;
            };
            repeat_for(ms / 3.0);
            starts_[0].record(stream());
            const int times = repeat_for(ms / 1.5);
            ends_[0].record(stream());
            cuda_check(cudaDeviceSynchronize());
            if (i == 0) continue;  // it only warmed the GPU up for the first
            candidate.sustained.push_back(ends_[0].microseconds_since(starts_[0]) / times);
        }
    }

  private:
    // Runs each once, which also loads its kernel, and then once with a clock. Those that do not run
    // or are far behind are out; so are those that the time does not suffice for.
    void screen() {
        const double begin = now();
        double fastest = 0.0;
        for (size_t i = 0; i < candidates_.size(); ++i) {
            Candidate& candidate = candidates_[i];
            candidate.running = i == 0 || now() < begin + 0.5 * (deadline_ - begin);
            if (!candidate.running) continue;
            const auto launch = [&] {
                return bench_.launch_as_in_training(candidate.algorithm, candidate.workspace, 0,
                                                    stream());
            };
            const cublasStatus_t status = launch();
            const cudaError_t error = cudaDeviceSynchronize();
            if (error != cudaSuccess) {
                throw Error(
                    format("candidate %d: %s", candidate.number, cudaGetErrorString(error)));
            }
            if (status != CUBLAS_STATUS_SUCCESS) {
                if (i == 0) cublas_check(status);
                candidate.running = false;
                continue;
            }
            starts_[i].record(stream());
            cublas_check(launch());
            ends_[i].record(stream());
            cuda_check(cudaDeviceSynchronize());
            const double time = ends_[i].microseconds_since(starts_[i]);
            if (i == 0 || time < fastest) fastest = time;
            // A short one's time is mostly the host's.
            candidate.running = i == 0 || time < 1.6 * fastest + 30.0;
        }
        // All copies in turn, and long enough that the memset node of a graph's counters does not count.
        constexpr double kLeastMicroseconds = 400.0;
        constexpr int kMostRepeats = 48;
        repeats_ = std::clamp(static_cast<int>(kLeastMicroseconds / fastest), bench_.copies(),
                              kMostRepeats);
        wait_ = fastest < 60.0;
    }

    void measure_all() {
        if (wait_) {
            int launches = 0;
            for (const Candidate& candidate : candidates_) launches += candidate.running;
            constexpr long long kNanosecondsToLaunch = 16000, kLongest = 5000000;
            wait_kernel<<<1, 1, 0, stream()>>>(std::min(kLongest, launches * kNanosecondsToLaunch));
            launch_check();
        }
        std::vector<size_t> order(candidates_.size());
        std::iota(order.begin(), order.end(), size_t{0});
        std::shuffle(order.begin(), order.end(), shuffle_);
        for (const size_t i : order) {
            if (!candidates_[i].running) continue;
            starts_[i].record(stream());
            graphs_[i]->launch(stream());
            ends_[i].record(stream());
        }
        cuda_check(cudaDeviceSynchronize());
        for (size_t i = 0; i < order.size(); ++i) {
            if (!candidates_[i].running) continue;
            candidates_[i].times.push_back(ends_[i].microseconds_since(starts_[i]) / repeats_);
        }
    }

    void drop_slower_than(double factor) {
        double fastest = 0.0;
        for (const Candidate& candidate : candidates_) {
            if (!candidate.running) continue;
            const double median = candidate.median();
            if (fastest == 0.0 || median < fastest) fastest = median;
        }
        for (size_t i = 1; i < candidates_.size(); ++i) {
            Candidate& candidate = candidates_[i];
            if (candidate.running && candidate.median() > factor * fastest) {
                candidate.running = false;
            }
        }
    }

    cudaStream_t stream() const { return stream_.get(); }

    Workbench& bench_;
    std::vector<Candidate>& candidates_;
    const double deadline_;
    Stream stream_;
    std::vector<Event> starts_, ends_;
    std::vector<std::optional<ProductGraph>> graphs_;  // of each candidate that is running
    int repeats_ = 1;
    bool wait_ = false;
    std::mt19937 shuffle_{42};  // the order of turns, so that nobody always follows the same one
};

// ---- candidates ----

bool same(const cublasLtMatmulAlgo_t& a, const cublasLtMatmulAlgo_t& b) {
    return std::equal(std::begin(a.data), std::end(a.data), std::begin(b.data));
}

template <class T>
T config_of(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute) {
    T value{};
    size_t written = 0;
    cublas_check(cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, sizeof(value),
                                                      &written));
    return value;
}

template <class T>
bool set_config(cublasLtMatmulAlgo_t* algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute,
                const T& value) {
    return cublasLtMatmulAlgoConfigSetAttribute(algorithm, attribute, &value, sizeof(value)) ==
           CUBLAS_STATUS_SUCCESS;
}

// Whether sums in parts, if there are any, are added up in fp32 and in a fixed order.
bool reduces_in_order(const cublasLtMatmulAlgo_t& algorithm) {
    const auto scheme = config_of<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME);
    return scheme == CUBLASLT_REDUCTION_SCHEME_NONE ||
           scheme == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
}

bool is_among(const std::vector<Candidate>& candidates, const cublasLtMatmulAlgo_t& algorithm) {
    return std::any_of(candidates.begin(), candidates.end(), [&](const Candidate& candidate) {
        return same(candidate.algorithm, algorithm);
    });
}

// The heuristic's first, then what it names for the trainer's workspace, then for none.
std::vector<Candidate> find_candidates(CublasLt& lt, const Workbench& bench, int count) {
    std::vector<Candidate> candidates;
    const auto ask = [&](int how_many, size_t workspace) {
        std::vector<cublasLtMatmulHeuristicResult_t> found(how_many);
        const cublasStatus_t status = matmul_detail::heuristic_algorithms(
            lt, bench.key(), bench.product(), workspace, &found);
        if (status != CUBLAS_STATUS_SUCCESS) return;
        for (const cublasLtMatmulHeuristicResult_t& result : found) {
            if (is_among(candidates, result.algo) || !reduces_in_order(result.algo)) continue;
            if (!candidates.empty() &&
                !matmul_detail::workspace_of(lt, bench.product(), result.algo)) {
                continue;
            }
            candidates.push_back(
                {result.algo, result.workspaceSize, static_cast<int>(candidates.size())});
        }
    };
    ask(1, CublasLt::kWorkspaceBytes);
    ask(count, CublasLt::kWorkspaceBytes);
    ask(count, 0);
    return candidates;
}

// Adds to the candidates what the library says runs, too, though the heuristic does not name it: those
// with another cluster or custom option. (With every tile there are ten times as many; they take ten
// seconds a product, and few of them win, by a percent.)
void add_neighbours(CublasLt& lt, const Workbench& bench, std::vector<Candidate>* candidates) {
    constexpr uint16_t kClusters[] = {CUBLASLT_CLUSTER_SHAPE_1x1x1, CUBLASLT_CLUSTER_SHAPE_2x1x1,
                                      CUBLASLT_CLUSTER_SHAPE_1x2x1, CUBLASLT_CLUSTER_SHAPE_2x2x1,
                                      CUBLASLT_CLUSTER_SHAPE_4x1x1, CUBLASLT_CLUSTER_SHAPE_1x4x1};
    constexpr uint32_t kMostOptions = 16;
    const size_t named = candidates->size();
    for (size_t i = 0; i < named; ++i) {
        const cublasLtMatmulAlgo_t base = (*candidates)[i].algorithm;
        if (config_of<uint16_t>(base, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID) ==
            CUBLASLT_CLUSTER_SHAPE_AUTO) {
            continue;  // of an older generation of GPUs
        }
        uint32_t most = 0;
        size_t written = 0;
        cublas_check(cublasLtMatmulAlgoCapGetAttribute(&base, CUBLASLT_ALGO_CAP_CUSTOM_OPTION_MAX,
                                                       &most, sizeof(most), &written));
        for (const uint16_t cluster : kClusters) {
            for (uint32_t option = 0; option <= std::min(most, kMostOptions - 1); ++option) {
                cublasLtMatmulAlgo_t other = base;
                if (!set_config(&other, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, cluster) ||
                    !set_config(&other, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, option) ||
                    is_among(*candidates, other)) {
                    continue;
                }
                const auto workspace = matmul_detail::workspace_of(lt, bench.product(), other);
                if (!workspace) continue;
                candidates->push_back({other, *workspace, static_cast<int>(candidates->size())});
            }
        }
    }
}

// ---- one product ----

// The fastest of the candidates that were timed to the end, and the first; what they compute is held
// against the first. Why one is not right goes to `notes`.
std::vector<Measured> check(Workbench& bench, const std::vector<Candidate*>& candidates,
                            std::string* notes) {
    constexpr int kRuns = 4;
    std::vector<Measured> measured;
    bench.fill(false);
    bench.run(bench.first());
    const Workbench::Results reference = bench.results();
    Workbench::Results kept = bench.results();
    const auto note = [&](const Candidate& candidate, const std::string& what) {
        *notes += format("    candidate %d: %s\n", candidate.number, what.c_str());
    };
    for (const Candidate* candidate : candidates) {
        Measured m{candidate->time(), true, true, candidate->number == 0};
        bench.run(candidate->algorithm);
        const double error = bench.compare(reference).second;
        if (!(error <= bench.bound())) {
            m.right = false;
            note(*candidate, format("error %.2e", error));
        } else if (!bench.reproduces(candidate->algorithm, kRuns, &kept)) {
            m.right = false;
            note(*candidate, "other bits in another run");
        }
        measured.push_back(m);
    }
    if (bench.key().epilogue == Epilogue::kGeluGradient) return measured;
    bench.fill(true);
    const DeviceBuffer<float> exact = bench.exact_product();
    for (size_t i = 0; i < candidates.size(); ++i) {
        if (!measured[i].right) continue;
        bench.run(candidates[i]->algorithm);
        const Roundings roundings = bench.roundings(exact);
        measured[i].rounds_once = roundings.not_once == 0;
        const bool right = bench.key().accumulate
                               ? roundings.not_once == 0 || roundings.not_twice == 0
                               : roundings.not_once == 0;
        if (right) continue;
        measured[i].right = false;
        note(*candidates[i], format("%llu sums are not rounded once, %llu not twice, %llu neither",
                                    roundings.not_once, roundings.not_twice, roundings.neither));
    }
    return measured;
}

struct Outcome {
    std::optional<TunedProduct> row;
    std::string text;   // of the printed table
    std::string notes;  // lines below it
};

// Copies of the data, so that together they are several times the cache.
int copies_of(const ProductKey& key) {
    const double cache = device_attribute(cudaDevAttrL2CacheSize);
    return std::clamp(static_cast<int>(4.0 * cache / Workbench::bytes(key)), 1, 8);
}

// Times the candidates; the first of them, whatever its time, and then the fastest, in order.
std::vector<Candidate*> fastest_of(Workbench& bench, std::vector<Candidate>& candidates,
                                   const Arguments& arguments, double deadline) {
    Stopwatch stopwatch(bench, candidates, deadline);
    const int ms = arguments.sustained_ms;
    stopwatch.run(ms > 0 ? 0.08 : 0.03);
    std::vector<Candidate*> running;
    for (Candidate& candidate : candidates) {
        if (candidate.running) running.push_back(&candidate);
    }
    const auto keep_fastest = [&](size_t most) {
        std::sort(running.begin() + 1, running.end(),
                  [](const Candidate* a, const Candidate* b) { return a->time() < b->time(); });
        if (running.size() > most) running.resize(most);
    };
    constexpr size_t kTried = 16, kFinalists = 6;
    keep_fastest(kTried);
    // Those of models too small to bring a GPU to its power limit.
    constexpr double kShortMicroseconds = 8.0;
    const double fastest = std::min(running[0]->median(), running[running.size() > 1]->median());
    if (ms == 0 || fastest < kShortMicroseconds) {
        keep_fastest(kFinalists);
        return running;
    }
    stopwatch.run_sustained(running, ms / 2);
    keep_fastest(kFinalists);
    for (Candidate* candidate : running) candidate->sustained.clear();
    for (int pass = 0; pass < 2; ++pass) stopwatch.run_sustained(running, ms);
    keep_fastest(kFinalists);
    return running;
}

Outcome tune(CublasLt& lt, const Work& work, const Arguments& arguments, double deadline) {
    Outcome outcome;
    const int copies = copies_of(work.key);
    size_t free_bytes = 0, total_bytes = 0;
    cuda_check(cudaMemGetInfo(&free_bytes, &total_bytes));
    if (Workbench::bytes_to_check(work.key, copies) + (size_t{1} << 30) > free_bytes) {
        outcome.text = "does not fit into this GPU's memory";
        return outcome;
    }
    Workbench bench(lt, work.key, copies);
    std::vector<Candidate> candidates = find_candidates(lt, bench, arguments.candidates);
    if (candidates.empty()) {
        outcome.text = "the library has no algorithm";
        return outcome;
    }
    if (arguments.neighbours) add_neighbours(lt, bench, &candidates);
    bench.fill(false);
    const std::vector<Candidate*> finalists = fastest_of(bench, candidates, arguments, deadline);
    if (arguments.verbose) {
        for (const Candidate* candidate : finalists) {
            outcome.notes += format("    candidate %3d: %8.1f us apart, %8.1f us without a pause\n",
                                    candidate->number, candidate->median(), candidate->time());
        }
    }
    const std::vector<Measured> measured = check(bench, finalists, &outcome.notes);
    const std::optional<size_t> chosen = choose(measured);
    if (!chosen) {
        outcome.text = "no algorithm is right";
        return outcome;
    }
    const Candidate& best = *finalists[*chosen];
    const double first = finalists[0]->time();
    TunedProduct row{lt.gpu, cublasLtGetVersion(), product_name(work.key),
                     {},     best.workspace,       best.time(),
                     first};
    std::copy(std::begin(best.algorithm.data), std::end(best.algorithm.data),
              row.algorithm.begin());
    outcome.row = row;
    const bool once = measured[*chosen].rounds_once, first_once = measured[0].rounds_once;
    outcome.text = format("%9.1f %9.1f %6.1f%% %8.0f  %2d of %2zu%s", first, best.time(),
                          100.0 * (first / best.time() - 1.0), flops(work.key) / best.time() * 1e-6,
                          best.number, candidates.size(), once ? "" : ", rounds twice");
    if (once != first_once) outcome.text += once ? " (the first: twice)" : " (the first: once)";
    return outcome;
}

// An error of one product does not end the others, unless it has broken the GPU's context.
Outcome tune_or_say_why(CublasLt& lt, const Work& work, const Arguments& arguments,
                        double deadline) {
    try {
        return tune(lt, work, arguments, deadline);
    } catch (const Error& error) {
        if (cudaDeviceSynchronize() != cudaSuccess) throw;
        cudaGetLastError();  // else the next launch would report it
        Outcome outcome;
        outcome.text = error.what();
        return outcome;
    }
}

// ---- all of it ----

void write_table(const std::string& path, const std::vector<TunedProduct>& rows) {
    AtomicFile file(path);
    file.write(table_text(rows));
    file.commit();
}

// What a micro-batch's products take together, with the heuristic's first and with the table.
void print_sums(CublasLt& lt, const std::vector<Model>& models,
                const std::vector<TunedProduct>& rows) {
    std::printf("\n%-12s %-24s %12s %12s %8s\n", "model", "one micro-batch, ms", "first", "table",
                "gain");
    for (const Model& model : models) {
        double first = 0.0, table = 0.0;
        int missing = 0;
        for (const ModelProduct& product : products_of(model, kUsualGelu)) {
            if (!usual(product)) continue;
            const TunedProduct* row =
                find_tuned(rows, lt.gpu, cublasLtGetVersion(), product_name(product.key));
            if (row == nullptr) {
                ++missing;
                continue;
            }
            first += 1e-3 * product.calls * row->first_microseconds;
            table += 1e-3 * product.calls * row->microseconds;
        }
        const std::string what =
            missing > 0 ? format("without %d products", missing) : "all products";
        std::printf("%-12s %-24s %12.3f %12.3f %7.1f%%\n", model.name.c_str(), what.c_str(), first,
                    table, table > 0.0 ? 100.0 * (first / table - 1.0) : 0.0);
    }
}

void run(const Arguments& arguments) {
    std::vector<Model> models;
    for (const std::string& text : arguments.models) models.push_back(parse_model(text));
    const std::vector<Work> works = collect(models);
    double shares = 0.0;
    for (const Work& work : works) shares += work.share;

    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        throw Error("no GPU was found: algorithms are measured where they will run");
    }
    now();
    CublasLt& lt = matmul_detail::cublaslt();
    matmul_detail::open(lt);
    std::vector<TunedProduct> rows = tuned_products();
    write_table(arguments.out, rows);  // a path that cannot be written is found out now
    std::printf("%s, cuBLASLt %zu, %zu products, none begun after %.0f s\n\n", lt.gpu.c_str(),
                cublasLtGetVersion(), works.size(), arguments.seconds);
    std::printf("%-24s %-44s %9s %9s %7s %8s  %s\n", "product", "", "first us", "best us", "gain",
                "TFLOP/s", "algorithm");
    size_t done = 0;
    for (const Work& work : works) {
        const std::string name = product_name(work.key);
        if (now() > arguments.seconds) break;
        ++done;
        if (arguments.missing && find_tuned(rows, lt.gpu, cublasLtGetVersion(), name) != nullptr) {
            continue;
        }
        std::printf("%-24s %-44s ", work.name.c_str(), name.c_str());
        std::fflush(stdout);
        constexpr double kLeastSeconds = 0.3;
        const double deadline =
            now() + std::max(kLeastSeconds, arguments.seconds * work.share / shares);
        const Outcome outcome = tune_or_say_why(lt, work, arguments, deadline);
        std::printf("%s\n%s", outcome.text.c_str(), outcome.notes.c_str());
        std::fflush(stdout);
        if (!outcome.row) continue;
        insert_row(rows, *outcome.row);
        write_table(arguments.out, rows);
    }
    print_sums(lt, models, rows);
    std::printf("\n%zu of %zu products in %.1f s; %s has %zu rows\n", done, works.size(), now(),
                arguments.out.c_str(), rows.size());
}

}  // namespace
}  // namespace llmc::tuning

int main(int argc, char** argv) {
    try {
        llmc::tuning::run(llmc::tuning::parse_arguments(argc, argv));
    } catch (const llmc::Error& error) {
        std::fflush(stdout);
        std::fprintf(stderr, "tune: %s\n", error.what());
        return 1;
    }
    return 0;
}
