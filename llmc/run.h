// A run: a model with its data, and where its results go. Set-up: flags, files and memory are checked
// before anything is written; then memory, weights and the output folder.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "llmc/batch_upload.h"
#include "llmc/captured_work.cuh"
#include "llmc/dataloader.h"
#include "llmc/device_info.h"
#include "llmc/eval_loader.h"
#include "llmc/gpt2.h"
#include "llmc/gpt2_checkpoint.h"
#include "llmc/gpt2_setup.h"
#include "llmc/logger.h"
#include "llmc/model_name.h"
#include "llmc/options.h"
#include "llmc/printable.h"
#include "llmc/run_info.h"
#include "llmc/schedulers.h"
#include "llmc/tokenizer.h"
#include "llmc/zero.cuh"

namespace llmc {

struct Run {
    Options options;
    std::vector<std::string> command_line;
    MultiGpuConfig multi_gpu;
    std::string device;  // its name
    ResolvedBatch batch;
    LearningRateScheduler schedule;
    int num_steps = 0;
    int first_step = 0;

    std::unique_ptr<TokenDataset> train_data;
    std::unique_ptr<TokenDataset> val_data;
    uint64_t train_tokens = 0, val_tokens = 0;  // hashes of the tokens that were looked at
    std::unique_ptr<EvalDataset> hellaswag;
    std::optional<Tokenizer> tokenizer;
    std::unique_ptr<CheckpointState> checkpoint;  // to resume from; gone once it is loaded
    FolderLock folder_lock;

    GPT2 model;
    std::unique_ptr<InputPipeline> pipeline;
    StepUpload step_upload;  // a training step's tokens in device memory, two sets in turn
    CapturedWork<GradientTarget> micro_steps;
    BatchUpload batch_upload;  // one micro-batch for evaluation
    double* val_losses = nullptr;
    Logger log;
    bool stopping = false;  // a rank has been asked to stop, and all know

    // An error may come while the streams still work on what is about to go.
    ~Run() { gpt2_free(&model); }
    bool is_main() const { return multi_gpu.process_rank == 0; }
    int val_batches() const {
        return static_cast<int>(std::min<uint64_t>(
            options.val_batches, val_data->validation_micro_batches(options.batch_size)));
    }
};

// printf on rank 0 alone.
__attribute__((format(printf, 2, 3))) inline void print0(const Run& run, const char* text, ...) {
    if (!run.is_main()) return;
    va_list args;
    va_start(args, text);
    std::vprintf(text, args);
    va_end(args);
    std::fflush(stdout);
}

constexpr const char* kDefaultModel = "gpt2_124M_bf16.bin";
constexpr const char* kHellaswagFile = "dev/data/hellaswag/hellaswag_val.bin";
constexpr const char* kTokenizerFile = "gpt2_tokenizer.bin";

inline bool is_file(const std::string& path) {
    return ::access(path.c_str(), F_OK) == 0;
}

// ---- set-up: flags, files and memory are checked here, before anything is written ----

// The model's shape: from the checkpoint, -e, or the default.
inline ModelConfig choose_model(Run& run) {
    Options& options = run.options;
    if (options.model.empty() && run.checkpoint) return run.checkpoint->header().config;
    if (options.model.empty()) {
        options.model = is_file(kDefaultModel) ? kDefaultModel : "d12";
        if (options.model == "d12") {
            print0(run, "no -e and no %s: a d12 (124M) from random weights\n", kDefaultModel);
        }
    }
    const std::optional<ModelConfig> named = parse_model_name(options.model);
    if (!named && (!is_file(options.model) || is_folder(options.model))) {
        throw Error("-e " + printable(options.model) +
                    (is_file(options.model) ? ": a folder" : ": no such file") +
                    "; expected a model file, or a model such as d12");
    }
    return named ? *named : ModelFile(options.model).config();
}

inline void find_checkpoint(Run& run) {
    const Options& options = run.options;
    if (options.output_dir.empty()) return;
    check_output_folder(options.output_dir);
    const std::vector<int> steps = complete_checkpoints(options.output_dir);
    if (!options.resume) {
        if (steps.empty()) return;
        throw Error(
            format("-o %s: holds checkpoints of an earlier run (step %d); add -y 1 to go on "
                   "from it, or name another folder",
                   options.output_dir.c_str(), steps.back()));
    }
    if (steps.empty()) {
        print0(run, "no checkpoint in %s: starting anew\n", options.output_dir.c_str());
        return;
    }
    const int step = steps.back();
    try {
        run.checkpoint = std::make_unique<CheckpointState>(options.output_dir, step);
        const ModelFile model(model_path(options.output_dir, step));
        if (model.config() != run.checkpoint->header().config) {
            throw Error(model_path(options.output_dir, step) + ": not the model of " +
                        run.checkpoint->path());
        }
    } catch (const Error& error) {
        throw Error(format("%s (to resume from an earlier checkpoint, remove %s)", error.what(),
                           done_path(options.output_dir, step).c_str()));
    }
    run.first_step = step;
}

inline void open_data(Run& run) {
    const Options& options = run.options;
    const ModelConfig& config = run.model.config;
    if (options.seq_len > config.max_seq_len) {
        throw Error(format("-t %d: the model's longest sequence is %d", options.seq_len,
                           config.max_seq_len));
    }
    run.train_data = std::make_unique<TokenDataset>(
        expand_pattern(options.train_data, "-i"), options.seq_len, config.vocab_size, options.seed,
        !options.overfit_single_batch, "-i " + options.train_data, run.is_main());
    run.train_data->require_batch(options.batch_size);
    run.train_tokens = run.train_data->check_tokens();
    if (options.val_every > 0) {
        run.val_data = std::make_unique<TokenDataset>(
            expand_pattern(options.val_data, "-j"), options.seq_len, config.vocab_size,
            options.seed, false, "-j " + options.val_data, run.is_main());
        run.val_data->require_batch(options.batch_size);
        run.val_tokens = run.val_data->check_tokens();
    }
    if (options.hellaswag) {
        if (options.val_every == 0) {
            throw Error("-h 1: comes with validation, which -v 0 turns off; give -v, or -h 0");
        }
        if (!is_file(kHellaswagFile)) {
            throw Error(
                format("-h 1: %s is missing; dev/data/hellaswag.py makes it", kHellaswagFile));
        }
        run.hellaswag = std::make_unique<EvalDataset>(kHellaswagFile, options.batch_size,
                                                      options.seq_len, config.vocab_size);
    }
    if (options.sample_every > 0) {
        run.tokenizer = Tokenizer::load(kTokenizerFile);
        if (run.tokenizer && run.tokenizer->vocab_size() != config.vocab_size) {
            run.tokenizer.reset();
        }
        if (!run.tokenizer) {
            print0(run,
                   "no %s here for this vocabulary (make data writes it): samples are token "
                   "numbers\n",
                   kTokenizerFile);
        }
    }
    const uint64_t per_step =
        static_cast<uint64_t>(run.batch.micro_batches) * static_cast<uint64_t>(options.batch_size);
    const uint64_t epoch = std::max<uint64_t>(1, run.train_data->num_windows() / per_step);
    run.num_steps = options.max_steps >= 0 ? options.max_steps
                                           : static_cast<int>(std::min<uint64_t>(epoch, INT_MAX));
}

// Sets everything that sizes depend on; plan is for `batch` sequences and level `recompute`.
inline void describe_model(GPT2* model, const Run& run, int batch, int recompute) {
    const Options& options = run.options;
    model->config = run.model.config;
    model->layout = ParamLayout(model->config);
    model->batch = batch;
    model->sequence = options.seq_len;
    model->recompute = recompute;
    model->longest_sample = options.sample_every > 0 ? options.sample_tokens : 0;
    model->use_master = options.master_weights;
    model->weight_decay = static_cast<float>(options.weight_decay);
    const int64_t micro_batches = options.total_batch == -1
                                      ? run.batch.micro_batches
                                      : run.batch.total_tokens / (int64_t{batch} * options.seq_len);
    model->plan = make_reduction_plan(static_cast<int>(micro_batches), run.multi_gpu.num_processes,
                                      options.reduction_width, model->layout);
    model->rules.skip_loss_z = options.skip_loss_z;
    model->rules.skip_norm_z = options.skip_norm_z;
    model->adamw.beta1 = model->rules.beta1;
    model->adamw.beta2 = model->rules.beta2;
    model->adamw.seed = options.seed;
    if (planted_fault() == Fault::rank_seed) model->adamw.seed += run.multi_gpu.process_rank;
}

// Settles how gradients are reduced among the ranks.
inline void settle_reduction(Run& run) {
    GPT2 model;
    describe_model(&model, run, run.options.batch_size, run.options.recompute);
    multi_gpu_plan_reduction(&run.multi_gpu, model.plan);
}

// Everything that the run allocates, for `batch` sequences and level `recompute`.
inline void plan_memory(const Run& run, int batch, int recompute, GPT2* model,
                        StepUpload* step_upload, BatchUpload* batch_upload, double** val_losses) {
    describe_model(model, run, batch, recompute);
    gpt2_plan_memory(model, run.multi_gpu);
    step_upload->plan(&model->memory, model->plan.micro_per_rank(), batch, run.options.seq_len);
    batch_upload->plan(&model->memory, batch, run.options.seq_len);
    if (run.val_data) model->memory.add("inputs", "evaluation", val_losses, run.val_batches());
    if (kDeviceIsHost) {
        step_upload->plan_host(&model->memory);
        batch_upload->plan_host(&model->memory);
    }
}

// Throws Error with the nearest setting that fits when the plan does not fit into memory.
inline void check_memory(const Run& run) {
    const size_t available = available_memory(), needed = run.model.memory.total_bytes();
    if (needed <= available) return;
    const auto bytes_with = [&](int batch, int recompute) {
        GPT2 other;
        StepUpload step_upload;
        BatchUpload batch_upload;
        double* val_losses;
        plan_memory(run, batch, recompute, &other, &step_upload, &batch_upload, &val_losses);
        return other.memory.total_bytes();
    };
    std::string remedy = "no -b fits: use a smaller model, a shorter -t, or more memory";
    for (int halvings = 0; run.options.batch_size >> halvings >= 1; ++halvings) {
        const int batch = run.options.batch_size >> halvings;
        const int64_t unit = int64_t{batch} * run.options.seq_len * run.multi_gpu.num_processes;
        if (run.batch.total_tokens % unit != 0) continue;
        const bool as_it_is = bytes_with(batch, run.options.recompute) <= available;
        if (!as_it_is && bytes_with(batch, 2) > available) continue;
        remedy = format("-b %d -r %d would fit", batch, as_it_is ? run.options.recompute : 2);
        break;
    }
    throw Error(format("-b %d -t %d: the run needs %.0f MiB of memory, %.0f MiB are available; %s",
                       run.options.batch_size, run.options.seq_len,
                       static_cast<double>(needed) / (1 << 20),
                       static_cast<double>(available) / (1 << 20), remedy.c_str()));
}

inline void print_row(const Run& run, const std::string& name, const std::string& value) {
    print0(run, "| %-27s | %-62s |\n", name.c_str(), value.c_str());
}

inline const char* gelu_fusion_text(int level) {
    if (level == 0) return "apart from the matrix products";
    return level == 1 ? "in the forward product" : "in the forward and in the backward product";
}

// Whether micro-steps become CUDA graphs: where -cg wants it and attention can be part of one.
inline bool uses_graphs(const Run& run) {
    const ModelConfig& config = run.model.config;
    return run.options.cuda_graphs &&
           attention_fits_graphs(run.options.seq_len, config.channels / config.num_heads);
}

// The options as the run uses them, which need not be what was asked for.
inline Options options_in_use(const Run& run) {
    Options used = run.options;
    used.num_processes = run.multi_gpu.num_processes;  // -pn's, or mpirun's
    used.zero_stage = run.multi_gpu.zero_stage;
    if (used.gelu_fusion >= 0) used.gelu_fusion = run.model.gelu_fusion;
    used.cuda_graphs = uses_graphs(run);
    return used;
}

// The table's rows on what runs, as (name, text).
inline NamedTexts plan_rows(const Run& run) {
    const Options& options = run.options;
    const ModelConfig& config = run.model.config;
    const ReductionPlan& plan = run.model.plan;
    NamedTexts rows = {
        {"device", run.device},
        {"precision",
         format("%s, gradients %s", kPrecisionName, sizeof(gradX) == 4 ? "FP32" : "BF16")},
        {"model",
         format("%d layers, %d channels, %d heads, vocabulary %d in %d", config.num_layers,
                config.channels, config.num_heads, config.vocab_size, config.padded_vocab_size)},
        {"attention", attention_backend(options.seq_len, config.channels / config.num_heads)},
        {"matrix products",
         matmul_backend(options.batch_size * options.seq_len, config.num_layers, config.channels,
                        config.padded_vocab_size, run.model.gelu_fusion)},
        {"GELU", gelu_fusion_text(run.model.gelu_fusion)},
        {"parameters", format("%zu", run.model.layout.num_parameters())},
        {"training windows",
         format("%llu of %d tokens", static_cast<unsigned long long>(run.train_data->num_windows()),
                options.seq_len)}};
    if (run.val_data) {
        rows.emplace_back("validation windows",
                          format("%llu, %d micro-batches used",
                                 static_cast<unsigned long long>(run.val_data->num_windows()),
                                 run.val_batches()));
    }
    rows.emplace_back("tokens in a step",
                      format("%lld", static_cast<long long>(run.batch.total_tokens)));
    rows.emplace_back("micro-batches in a step",
                      plan.canonical ? format("%d, width %d of at most %d, %d slots a process",
                                              plan.num_micro_batches, plan.width,
                                              options.reduction_width, plan.slots_per_rank())
                                     : format("%d, one slot", plan.num_micro_batches));
    if (!plan.canonical) rows.emplace_back("no tree", plan.why_not);
    rows.emplace_back("processes", format("%d, ZeRO stage %d", run.multi_gpu.num_processes,
                                          run.multi_gpu.zero_stage));
    rows.emplace_back("steps", format("%d", run.num_steps));
    return rows;
}

inline void print_plan(const Run& run) {
    const std::string rule = "+" + std::string(29, '-') + "+" + std::string(64, '-') + "+\n";
    print0(run, "%s", rule.c_str());
    Options asked = run.options;
    asked.num_processes = run.multi_gpu.num_processes;
    const Options used = options_in_use(run);
    for (const Flag& flag : flag_table()) {
        if (!flag.takes_value) continue;
        const std::string value = flag_value(used, flag), wish = flag_value(asked, flag);
        print_row(run, std::string(flag.letters) + " " + flag.name,
                  value == wish ? value : value + " (" + wish + " asked)");
    }
    print0(run, "%s", rule.c_str());
    for (const auto& [name, text] : plan_rows(run)) print_row(run, name, text);
    print0(run, "%s", rule.c_str());
    if (run.is_main()) run.model.memory.print(stdout);
    print0(run, "%s", rule.c_str());
}

// Decides how far GELU is computed inside matrix products.
inline void settle_gelu(Run& run) {
    const Options& options = run.options;
    matmul_allow_tf32(options.tf32);  // decides which products there are
    const int C = run.model.config.channels;
    run.model.gelu_fusion =
        matmul_gelu_fusion(options.gelu_fusion, options.batch_size * options.seq_len, C, 4 * C);
    if (run.model.gelu_fusion >= options.gelu_fusion) return;
    print0(run, "-ge %d: there is no such matrix product here, so as -ge %d\n", options.gelu_fusion,
           run.model.gelu_fusion);
}

// Reads and checks flags, files and memory of this rank; writes nothing, and does not communicate.
inline void prepare(Run& run) {
    const Options& options = run.options;
    run.batch = resolve_batch(options, run.multi_gpu.num_processes);
    find_checkpoint(run);
    run.model.config = choose_model(run);
    check_model_config(run.model.config, "-e " + options.model);
    const std::string zero_note =
        set_zero_configs(&run.multi_gpu, options.zero_stage, ParamLayout(run.model.config));
    if (!zero_note.empty()) print0(run, "%s\n", zero_note.c_str());
    open_data(run);
    require_device(run.multi_gpu.local_device_idx);
    run.device = device_name();
    settle_reduction(run);
    settle_gelu(run);
    run.schedule = {parse_schedule(options.schedule), static_cast<float>(options.learning_rate),
                    options.warmup_steps, run.num_steps,
                    static_cast<float>(options.final_lr_fraction)};
    plan_memory(run, options.batch_size, options.recompute, &run.model, &run.step_upload,
                &run.batch_upload, &run.val_losses);
    if (run.checkpoint) {
        const StateHeader mine = make_state_header(run.model, options, run.batch.total_tokens,
                                                   run.train_data->data_hash());
        for (const std::string& note :
             compare_state_headers(mine, run.checkpoint->header(), run.checkpoint->path())) {
            print0(run, "note: %s\n", note.c_str());
        }
    }
}

// What must be the same on all ranks for their results to be: a line each, NAME VALUE.
inline std::string common_facts(const Run& run) {
    std::string facts;
    const auto add = [&facts](const std::string& name, const std::string& value) {
        facts += name + "\t" + value + "\n";
    };
    for (const Flag& flag : flag_table()) {
        const std::string letters = flag.letters;
        // Rank 0 may know itself, and the shared folder, by other names.
        if (letters == "-pr" || letters == "-ps" || letters == "-pf") continue;
        add(letters, flag_value(run.options, flag));
    }
    add("program", version_text());
    add("device", run.device.substr(0, run.device.rfind(", ")));  // a CPU's threads may differ
    for (const auto& [name, version] : library_versions()) add(name, version);
    const auto number = [](uint64_t value) {
        return format("%016llx", static_cast<unsigned long long>(value));
    };
    add("hash of the training files (-i)", number(run.train_data->data_hash()));
    add("hash of tokens in the training files (-i)", number(run.train_tokens));
    if (run.val_data) {
        add("hash of the validation files (-j)", number(run.val_data->data_hash()));
        add("hash of tokens in the validation files (-j)", number(run.val_tokens));
    }
    add("step to resume from", format("%d", run.first_step));
    return facts;
}

// Throws Error on every rank when one differs from rank 0 in what must be the same.
inline void compare_ranks(const Run& run) {
    const std::vector<std::string> all = multi_gpu_all_gather_text(
        run.multi_gpu, common_facts(run), "comparison of flags and libraries");
    for (size_t rank = 1; rank < all.size(); ++rank) {
        std::istringstream here(all[rank]), there(all[0]);
        std::string line, line0;
        while (std::getline(here, line) && std::getline(there, line0)) {
            if (line == line0) continue;
            const size_t tab = line.find('\t'), tab0 = line0.find('\t');
            throw AgreedError(
                format("rank %zu has %s %s, rank 0 has %s: all ranks must have the same", rank,
                       line.substr(0, tab).c_str(), line.substr(tab + 1).c_str(),
                       line0.substr(tab0 + 1).c_str()));
        }
        if (all[rank].size() == all[0].size()) continue;
        throw AgreedError(format("rank %zu: its validation files differ from rank 0's", rank));
    }
}

// Throws Error when the other processes cannot be found with these flags, before any is asked for.
inline void check_meeting(const Run& run) {
    const Options& options = run.options;
    const std::vector<std::string>& arguments = run.command_line;
    const auto is_given = [&](const char* flag) {
        return std::count(arguments.begin(), arguments.end(), flag) > 0;
    };
    if (options.init_method != "mpi" && !is_given("-pn")) {
        throw Error(format("-pi %s: needs -pn, the number of processes, and -pr, this one's rank",
                           options.init_method.c_str()));
    }
#if defined(MULTI_GPU) && !defined(USE_MPI)
    // mpi is the default, with which a lone process runs; who asks for it does not mean that.
    if (options.init_method == "mpi" && is_given("-pi")) {
        throw Error("-pi mpi: this build has no MPI; give -pi tcp or fs, or build with OpenMPI");
    }
#endif
    multi_gpu_check_start(options.num_processes, options.process_rank, options.gpus_per_node);
}

// Tells the other ranks that this one does not come, as far as its flags say where they wait: `what`
// follows "rank 2". Takes seconds where they do not come, either, two of them when `briefly`.
inline void tell_other_ranks(const Run& run, const std::string& what, bool briefly = false) {
    std::vector<std::string> arguments = run.command_line;
    if (!arguments.empty()) arguments.erase(arguments.begin());
    const std::optional<Options> place = read_meeting_flags(arguments);
    if (place) {
        multi_gpu_decline(place->num_processes, place->process_rank, place->server_address,
                          place->shared_folder, place->init_method, place->port,
                          format("rank %d", place->process_rank) + what, briefly);
    } else if (detail::launched().processes > 1 && are_found_by_mpi(arguments)) {
        multi_gpu_decline_by_mpi(what);
    }
}

// Answers --help or --version, once for all ranks of -pi mpi. Ranks of tcp and fs that are to train are
// told not to wait for this one. mpirun itself ends those that wait in MPI_Init when a rank ends without
// it; they get two seconds to come there. This rank does not use MPI: that starts once in a process
// that mpirun knows, and its shell may run the program again, to train.
inline void answer_instead_of_training(const Run& run) {
    const Options& options = run.options;
    const bool by_mpi = options.init_method == "mpi";
    const detail::Launched all = detail::launched();
    if (!by_mpi || all.rank == 0) {
        std::fputs((options.help ? help_text(run.command_line[0]) : version_text()).c_str(),
                   stdout);
        std::fflush(stdout);
    }
    if (by_mpi) {
        if (started_by_mpirun() && all.processes > 1) {
            std::this_thread::sleep_for(std::chrono::seconds(2));
        }
        return;
    }
    tell_other_ranks(run, std::string(" was asked for ") + (options.help ? "--help" : "--version"),
                     all.processes == 1);
}

// Finds the other processes, then reads and checks; writes nothing. An error of one rank is an error of
// all.
inline void set_up(Run& run) {
    const Options& options = run.options;
    run.multi_gpu = multi_gpu_config_init(options.num_processes, options.process_rank,
                                          options.gpus_per_node, options.server_address,
                                          options.shared_folder, options.init_method, options.port);
    multi_gpu_together(run.multi_gpu, [&] { prepare(run); });
    compare_ranks(run);
    print_plan(run);
    if (run.multi_gpu.num_processes > 1 && !run.model.plan.canonical) {
        print0(run, "bit equality across GPU counts is off: %s\n", run.model.plan.why_not.c_str());
    }
    if (options.checkpoint_every > 0 && options.output_dir.empty()) {
        print0(run, "note: -n %d: without -o nothing is saved\n", options.checkpoint_every);
    }
    if (options.warmup_steps > run.num_steps) {
        print0(run,
               "note: -u %d: the run ends at step %d, before the learning rate has reached -l\n",
               options.warmup_steps, run.num_steps);
    }
    multi_gpu_together(run.multi_gpu, [&] { check_memory(run); });
}

#ifdef MULTI_GPU
// Throws Error on every rank when one does not see what rank 0 writes into the output folder: a checkpoint
// without that rank's part could not be resumed.
inline void check_folder_is_shared(const Run& run) {
    const std::string& folder = run.options.output_dir;
    std::string mark;
    std::optional<AtomicFile> written;  // its unfinished file is the mark, and goes with it
    multi_gpu_together(run.multi_gpu, [&] {
        if (!run.is_main()) return;
        mark = format("%s/run.%08x", folder.c_str(), std::random_device()());
        written.emplace(mark);
        mark += ".tmp";
    });
    mark = multi_gpu_all_gather_text(run.multi_gpu, mark, "exchange of a file's name").front();
    multi_gpu_together(run.multi_gpu, [&] {
        // A network file system may show new files after a minute.
        const net::Deadline give_up = net::after(std::min(90.0, run.multi_gpu.time_limit_s / 4));
        while (!is_file(mark)) {
            if (net::Clock::now() > give_up) {
                throw Error(
                    format("-o %s: what rank 0 has written there does not appear here; the "
                           "folder must be one that all ranks share",
                           folder.c_str()));
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
    });
}
#endif

// Makes the output folder and takes it for this run alone, whose ranks must all have it. Throws Error on
// every rank.
inline void take_output_folder(Run& run) {
    const std::string& folder = run.options.output_dir;
    [[maybe_unused]] const bool is_new = !is_file(folder);
    multi_gpu_together(run.multi_gpu, [&] {
        if (!run.is_main()) return;
        make_output_folder(folder);
        run.folder_lock = FolderLock(folder);
    });
#ifdef MULTI_GPU
    if (run.multi_gpu.num_processes == 1) return;
    try {
        check_folder_is_shared(run);
    } catch (...) {
        if (run.is_main() && is_new) ::rmdir(folder.c_str());
        throw;
    }
#endif
}

// Records the start in the output folder.
inline void open_output(Run& run) {
    const std::string& folder = run.options.output_dir;
    const std::vector<int> steps = complete_checkpoints(folder);
    if ((steps.empty() ? 0 : steps.back()) != run.first_step) {
        throw Error(format("-o %s: another run has written in it meanwhile", folder.c_str()));
    }
    delete_unfinished_files(folder);
    if (run.checkpoint) {
        run.log = Logger(folder, 0, run.first_step);
    } else {
        const std::string kept = Logger::keep_earlier_log(folder);
        if (!kept.empty()) print0(run, "an earlier run's log is kept as %s\n", kept.c_str());
        run.log = Logger(folder, 0);
    }
    RunInfo info;
    info.command_line = run.command_line;
    info.options = run.options;
    info.options_in_use = options_in_use(run);
    info.plan = plan_rows(run);
    info.num_processes = run.multi_gpu.num_processes;
    info.device = run.device;
    info.libraries = library_versions();
    write_run_json(folder, info);
    if (run.options.checkpoint_every == 0) {
        print0(run, "note: without -n no checkpoint is written unless a signal asks to stop\n");
    }
}

// Sets the weights: from the checkpoint, at random, or from a file.
inline void set_weights(Run& run) {
    const Options& options = run.options;
    if (run.checkpoint) {
        gpt2_load_checkpoint(&run.model, run.multi_gpu, *run.checkpoint, options.output_dir);
        print0(run, "resuming at step %d from %s\n", run.first_step,
               run.checkpoint->path().c_str());
        if (run.first_step >= run.num_steps) {
            print0(run, "nothing left to do: -x is %d\n", run.num_steps);
        }
    } else if (parse_model_name(options.model)) {
        gpt2_init_random(&run.model, options.seed, run.multi_gpu);
    } else {
        gpt2_load_weights(&run.model, options.model, run.multi_gpu);
    }
    cuda_check(cudaDeviceSynchronize());
}

// Throws Error on every rank when one has read other weights than rank 0: its file is another.
inline void compare_weights(const Run& run) {
    if (run.multi_gpu.num_processes == 1) return;
    const uint64_t own = hash_of_tensors(run.model.params, MultiGpuConfig{}, run.model.layout,
                                         run.model.main_stream);
    const std::vector<uint64_t> hashes =
        multi_gpu_all_gather_host(run.multi_gpu, &own, 1, "comparison of weights");
    if (const size_t rank = first_unlike_rank_0(hashes)) {
        throw AgreedError(
            format("rank %zu starts from other weights than rank 0: its %s is another file", rank,
                   run.checkpoint ? "checkpoint" : ("-e " + run.options.model).c_str()));
    }
}

// Memory, weights and the output folder. An error of one rank is an error of all.
inline void start(Run& run) {
    multi_gpu_together(run.multi_gpu, [&] {
        gpt2_allocate(&run.model, run.multi_gpu);
        run.step_upload.open();
        run.micro_steps.enabled = uses_graphs(run);
        run.batch_upload.open(&run.multi_gpu);
        set_weights(run);
    });
    compare_weights(run);
    if (!run.options.output_dir.empty()) {
        take_output_folder(run);
        multi_gpu_together(run.multi_gpu, [&] {
            if (run.is_main()) open_output(run);
        });
    }
    run.checkpoint.reset();
}

}  // namespace llmc
