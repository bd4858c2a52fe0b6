// The command line. One table says everything about each flag; parsing, --help, range checks, run
// records and tests all go through it.
#pragma once

#include <algorithm>
#include <charconv>
#include <climits>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "llmc/error.h"
#include "llmc/precision.h"
#include "llmc/printable.h"

namespace llmc {

constexpr const char* kVersion = "0.1";
// The Makefile passes the git commit as a string literal.
#ifdef LLMC_COMMIT
constexpr const char* kCommit = LLMC_COMMIT;
#else
constexpr const char* kCommit = "unknown";
#endif

// What the user asked for. Defaults stand in the table below, and a new Options has them all.
struct Options {
    Options();

    std::string train_data;
    std::string val_data;
    std::string model;

    std::string output_dir;  // empty: nothing is written
    int log_gpu_every;       // -1: never
    int checkpoint_every;    // 0: never
    int checkpoints_kept;    // 0: all
    int major_checkpoint_every;
    bool resume;

    int batch_size;       // B, sequences in a micro-batch
    int seq_len;          // T
    int64_t total_batch;  // d in tokens, or -1: see resolve_batch
    int max_steps;        // -1: one epoch
    std::string schedule;
    double learning_rate;
    int warmup_steps;
    double final_lr_fraction;
    double weight_decay;
    double skip_loss_z;  // 0: never
    double skip_norm_z;
    bool overfit_single_batch;
    uint64_t seed;

    int val_every;     // 0: never
    int val_batches;   // micro-batches over all ranks
    int sample_every;  // 0: never
    int sample_tokens;
    bool hellaswag;

    bool tf32;
    bool master_weights;
    int gelu_fusion;  // -1: by GPU
    int recompute;
    bool cuda_graphs;

    int zero_stage;
    int reduction_width;
    int num_processes;
    int process_rank;
    int gpus_per_node;
    std::string init_method;
    std::string server_address;
    std::string shared_folder;
    int port;

    bool help;
    bool version;
    bool dry_run;
    bool hash;
    bool check_ranks;
};

// A flag's place in Options; its type says how the value is read.
using OptionMember = std::variant<bool Options::*, int Options::*, int64_t Options::*,
                                  uint64_t Options::*, double Options::*, std::string Options::*>;

struct Flag {
    const char* letters;  // as typed, with its dashes
    const char* name;     // in run records, and for the nearest flag to an unknown one
    OptionMember member;
    const char* fallback;  // the default, as it would be typed
    const char* help;
    int64_t min = INT64_MIN;  // whole numbers
    int64_t max = INT64_MAX;
    bool minus_one = false;  // -1 is right as well
    double real_min = 0;     // real numbers
    double real_max = 0;
    std::vector<const char*> choices = {};  // texts; empty: any
    bool takes_value = true;                // false: --name alone
    const char* group = "";
};

namespace detail {

inline Flag whole(const char* letters, const char* name, OptionMember member, const char* fallback,
                  int64_t min, int64_t max, const char* help) {
    Flag flag{letters, name, member, fallback, help};
    flag.min = min;
    flag.max = max;
    return flag;
}
// -1 turns it off, or leaves the value to the program.
inline Flag whole_or_minus_one(const char* letters, const char* name, OptionMember member,
                               const char* fallback, int64_t min, int64_t max, const char* help) {
    Flag flag = whole(letters, name, member, fallback, min, max, help);
    flag.minus_one = true;
    return flag;
}
inline Flag real(const char* letters, const char* name, double Options::*member,
                 const char* fallback, double min, double max, const char* help) {
    Flag flag{letters, name, member, fallback, help};
    flag.real_min = min;
    flag.real_max = max;
    return flag;
}
inline Flag text(const char* letters, const char* name, std::string Options::*member,
                 const char* fallback, const char* help, std::vector<const char*> choices = {}) {
    Flag flag{letters, name, member, fallback, help};
    flag.choices = std::move(choices);
    return flag;
}
inline Flag on_off(const char* letters, const char* name, bool Options::*member,
                   const char* fallback, const char* help) {
    return Flag{letters, name, member, fallback, help};
}
inline Flag alone(const char* letters, const char* name, bool Options::*member, const char* help) {
    Flag flag{letters, name, member, "0", help};
    flag.takes_value = false;
    return flag;
}

constexpr int64_t kIntMax = INT_MAX;
constexpr int64_t kTotalBatchMax = int64_t{1} << 40;  // far from overflow when B*T*N is added

inline std::vector<Flag> data_flags() {
    using O = Options;
    return {
        text("-i", "train_data", &O::train_data,
             "dev/data/tinyshakespeare/tiny_shakespeare_train.bin",
             "training tokens: a file, or a pattern such as dir/train_*.bin"),
        text("-j", "val_data", &O::val_data, "dev/data/tinyshakespeare/tiny_shakespeare_val.bin",
             "validation tokens, likewise"),
        text("-e", "model", &O::model, "",
             "model file, or a name for random weights: d12, gpt2:d24, gpt3:c768, "
             "custom:L2C64H2T64; empty: gpt2_124M_bf16.bin if it exists, else d12"),
    };
}

inline std::vector<Flag> output_flags() {
    using O = Options;
    return {
        text("-o", "output_dir", &O::output_dir, "",
             "folder for logs and checkpoints; empty: nothing is written"),
        whole("-n", "checkpoint_every", &O::checkpoint_every, "0", 0, kIntMax,
              "checkpoint every N steps and at the end; 0: only when a signal asks to stop"),
        whole("-nk", "checkpoints_kept", &O::checkpoints_kept, "0", 0, kIntMax,
              "newest checkpoints to keep, older minor ones are deleted; 0: keep all"),
        whole("-nm", "major_checkpoint_every", &O::major_checkpoint_every, "0", 0, kIntMax,
              "checkpoints of every N steps are major and never deleted; 0: none"),
        on_off("-y", "resume", &O::resume, "0",
               "1: resume from the newest complete checkpoint in -o"),
        whole_or_minus_one("-lg", "log_gpu_every", &O::log_gpu_every, "-1", 1, kIntMax,
                           "log the GPU's state every N steps; -1: never"),
    };
}

inline std::vector<Flag> training_flags() {
    using O = Options;
    return {
        whole("-b", "batch_size", &O::batch_size, "4", 1, kIntMax,
              "micro-batch B: sequences a process takes at a time"),
        whole("-t", "seq_len", &O::seq_len, "1024", 1, kIntMax, "sequence length T in tokens"),
        whole_or_minus_one("-d", "total_batch", &O::total_batch, "-1", 1, kTotalBatchMax,
                           "tokens in a step over all processes, a multiple of B*T*processes; "
                           "-1: B*T*processes. Keep it fixed to compare GPU counts"),
        whole_or_minus_one("-x", "max_steps", &O::max_steps, "-1", 0, kIntMax,
                           "steps to train; -1: one epoch"),
        text("-k", "schedule", &O::schedule, "cosine", "learning rate schedule",
             {"cosine", "linear", "constant", "wsd"}),
        real("-l", "learning_rate", &O::learning_rate, "3e-4", 0, 10, "learning rate"),
        whole("-u", "warmup_steps", &O::warmup_steps, "0", 0, kIntMax,
              "steps over which the learning rate rises to -l"),
        real("-q", "final_lr_fraction", &O::final_lr_fraction, "1.0", 0, 1,
             "learning rate at the end, as a fraction of -l"),
        real("-c", "weight_decay", &O::weight_decay, "0.0", 0, 10, "weight decay"),
        real("-sl", "skip_loss_z", &O::skip_loss_z, "0", 0, 1e6,
             "skip an update when the loss's z-score exceeds this; 0: never"),
        real("-sg", "skip_norm_z", &O::skip_norm_z, "0", 0, 1e6,
             "skip an update when the gradient norm's z-score exceeds this; 0: never"),
        on_off("-a", "overfit_single_batch", &O::overfit_single_batch, "0",
               "1: train on the first batch alone, over and over"),
        whole("-rs", "seed", &O::seed, "1337", 0, INT64_MAX,
              "seed of initial weights, data order, rounding and sampling"),
    };
}

inline std::vector<Flag> evaluation_flags() {
    using O = Options;
    return {
        whole("-v", "val_every", &O::val_every, "20", 0, kIntMax,
              "validation loss every N steps, before the first and at the end; 0: never"),
        whole("-m", "val_batches", &O::val_batches, "20", 1, kIntMax,
              "validation micro-batches, over all processes together"),
        whole("-s", "sample_every", &O::sample_every, "20", 0, kIntMax,
              "sample text every N steps and at the end; 0: never"),
        whole("-g", "sample_tokens", &O::sample_tokens, "64", 1, kIntMax, "tokens to sample"),
        on_off("-h", "hellaswag", &O::hellaswag, "0", "1: HellaSwag accuracy with validation"),
    };
}

inline std::vector<Flag> numerics_flags() {
    using O = Options;
    return {
        on_off("-f", "tf32", &O::tf32, "1", "1: TF32 in fp32 matrix products"),
        on_off("-w", "master_weights", &O::master_weights, "1", "1: fp32 master weights"),
        whole("-ge", "gelu_fusion", &O::gelu_fusion, "-1", -1, 2,
              "GELU inside the matrix product, on a GPU; 0: no, 1: forward, 2: forward and "
              "backward, as far as cuBLASLt has such products; -1: 1 in BF16 from compute "
              "capability 9.0 on, else 0. Above 0, -r changes bits"),
        whole("-r", "recompute", &O::recompute, "1", 0, 2,
              "recompute in the backward pass to save memory; 0: nothing, 1: GELU, "
              "2: GELU and LayerNorm. The bits are the same unless -ge is above 0"),
        on_off(
            "-cg", "cuda_graphs", &O::cuda_graphs, "1",
            "1: launch a micro-step as one CUDA graph, on a GPU; with several processes the last "
            "one's backward pass kernel by kernel, since NCCL's calls are among it. No graphs "
            "where cuDNN computes attention's backward pass. The bits are the same"),
    };
}

inline std::vector<Flag> multi_gpu_flags() {
    using O = Options;
    return {
        whole("-z", "zero_stage", &O::zero_stage, "0", 0, 3,
              "ZeRO stage; 1: each process keeps its share of the optimizer's state. 2 and 3 are "
              "not built and fall back to 0"),
        whole("-rw", "reduction_width", &O::reduction_width, "8", 1, 1024,
              "width of the gradient reduction tree, cut to a power of two: results are the same "
              "bits on every number of GPUs that divides it"),
        text("-pi", "init_method", &O::init_method, "mpi",
             "how processes find each other; tcp and fs need -pn, -pr and -pg",
             {"mpi", "tcp", "fs"}),
        whole("-pn", "num_processes", &O::num_processes, "1", 1, kIntMax, "number of processes"),
        whole("-pr", "process_rank", &O::process_rank, "0", 0, kIntMax - 1,
              "this process's rank, less than -pn"),
        whole("-pg", "gpus_per_node", &O::gpus_per_node, "8", 1, kIntMax, "GPUs per node"),
        text("-ps", "server_address", &O::server_address, "",
             "rank 0's host name or address, for -pi tcp"),
        whole("-pp", "port", &O::port, "17171", 1, 65535, "rank 0's port, for -pi tcp"),
        text("-pf", "shared_folder", &O::shared_folder, "",
             "a folder that all processes see, for -pi fs"),
    };
}

inline std::vector<Flag> other_flags() {
    using O = Options;
    return {
        alone("--help", "help", &O::help, "print this text"),
        alone("--version", "version", &O::version, "print version, precision and commit"),
        alone("--dry-run", "dry_run", &O::dry_run, "check flags and files, print the plan, stop"),
        alone("--check-ranks", "check_ranks", &O::check_ranks,
              "after loading and after every step, compare the weights of all processes"),
        alone("--hash", "hash", &O::hash,
              "print hashes of weights and optimizer state at the end, and the last loss and norm "
              "in bits"),
    };
}

inline void append_group(std::vector<Flag>& table, const char* group, std::vector<Flag> flags) {
    for (Flag& flag : flags) {
        flag.group = group;
        table.push_back(std::move(flag));
    }
}

}  // namespace detail

// All flags, those of a group together.
inline const std::vector<Flag>& flag_table() {
    static const std::vector<Flag> table = [] {
        std::vector<Flag> flags;
        detail::append_group(flags, "Data and model", detail::data_flags());
        detail::append_group(flags, "Output", detail::output_flags());
        detail::append_group(flags, "Training", detail::training_flags());
        detail::append_group(flags, "Evaluation", detail::evaluation_flags());
        detail::append_group(flags, "Numerics", detail::numerics_flags());
        detail::append_group(flags, "Several GPUs", detail::multi_gpu_flags());
        detail::append_group(flags, "Other", detail::other_flags());
        return flags;
    }();
    return table;
}

// The flag with these letters, or nullptr.
inline const Flag* find_flag(const std::string& letters) {
    for (const Flag& flag : flag_table()) {
        if (letters == flag.letters) return &flag;
    }
    return nullptr;
}

namespace detail {

inline bool is_real(const Flag& flag) {
    return std::holds_alternative<double Options::*>(flag.member);
}
inline bool is_text(const Flag& flag) {
    return std::holds_alternative<std::string Options::*>(flag.member);
}
inline bool is_bool(const Flag& flag) {
    return std::holds_alternative<bool Options::*>(flag.member);
}
inline bool is_seed(const Flag& flag) {
    return std::holds_alternative<uint64_t Options::*>(flag.member);
}

}  // namespace detail

// Right values in words: "at least 1", "from 0 to 3", "0 or 1", "one of mpi, tcp, fs".
inline std::string valid_values(const Flag& flag) {
    if (!flag.takes_value) return "";
    if (detail::is_bool(flag)) return "0 or 1";
    if (detail::is_text(flag)) {
        if (flag.choices.empty()) return *flag.fallback ? "a text, not empty" : "a text";
        std::string list = "one of ";
        for (size_t i = 0; i < flag.choices.size(); ++i) {
            list += (i > 0 ? ", " : "") + std::string(flag.choices[i]);
        }
        return list;
    }
    if (detail::is_real(flag)) return format("from %g to %g", flag.real_min, flag.real_max);
    if (detail::is_seed(flag)) {
        return format("from 0 to %llu", static_cast<unsigned long long>(UINT64_MAX));
    }
    const long long min = flag.min, max = flag.max;
    const char* minus_one = flag.minus_one ? "-1 or " : "";
    // Nobody needs to read the limit of the type.
    if (flag.max >= detail::kIntMax - 1) return format("%sat least %lld", minus_one, min);
    return format("%sfrom %lld to %lld", minus_one, min, max);
}

namespace detail {

[[noreturn]] inline void refuse(const Flag& flag, const std::string& value,
                                const std::string& why) {
    throw Error(format("%s %s: %s", flag.letters, printable(value).c_str(), why.c_str()));
}

enum class Reading { good, not_a_number, too_large };

// The whole text as one number, whatever the locale.
template <class T>
Reading read_number(const std::string& text, T& value) {
    const char* end = text.data() + text.size();
    const std::from_chars_result result = std::from_chars(text.data(), end, value);
    if (result.ec == std::errc::invalid_argument || result.ptr != end) return Reading::not_a_number;
    return result.ec == std::errc() ? Reading::good : Reading::too_large;
}

inline double read_real(const Flag& flag, const std::string& text) {
    double value = 0;
    const Reading reading = read_number(text, value);
    const std::string range = valid_values(flag);
    if (reading == Reading::too_large) {
        refuse(flag, text, "too large or too small for a double; must be " + range);
    }
    if (reading == Reading::not_a_number || !std::isfinite(value)) {
        refuse(flag, text, "must be a number " + range);
    }
    if (value < flag.real_min || value > flag.real_max) refuse(flag, text, "must be " + range);
    return value + 0.0;  // -0 becomes 0
}

inline int64_t read_whole(const Flag& flag, const std::string& text) {
    int64_t value = 0;
    const Reading reading = read_number(text, value);
    const std::string range = valid_values(flag);
    if (reading == Reading::not_a_number) {
        refuse(flag, text, "must be a whole number, " + range);
    }
    if (reading == Reading::good && value == -1 && flag.minus_one) return value;
    const bool negative = text[0] == '-';
    if (reading == Reading::too_large ? !negative : value > flag.max) {
        refuse(flag, text, format("must be at most %lld", static_cast<long long>(flag.max)));
    }
    if (reading == Reading::too_large || value < flag.min) refuse(flag, text, "must be " + range);
    return value;
}

inline uint64_t read_seed(const Flag& flag, const std::string& text) {
    uint64_t value = 0;
    if (read_number(text, value) != Reading::good) {
        refuse(flag, text, "must be a whole number " + valid_values(flag));
    }
    return value;
}

inline const std::string& read_text(const Flag& flag, const std::string& text) {
    if (flag.choices.empty()) {
        if (text.empty() && *flag.fallback) refuse(flag, text, "must not be empty");
        return text;
    }
    for (const char* choice : flag.choices) {
        if (text == choice) return text;
    }
    refuse(flag, text, "must be " + valid_values(flag));
}

inline void assign(Options& options, const Flag& flag, const std::string& text) {
    std::visit(
        [&](auto member) {
            using T = std::remove_reference_t<decltype(options.*member)>;
            if constexpr (std::is_same_v<T, bool>) {
                if (text != "0" && text != "1") refuse(flag, text, "must be 0 or 1");
                options.*member = text == "1";
            } else if constexpr (std::is_same_v<T, std::string>) {
                options.*member = read_text(flag, text);
            } else if constexpr (std::is_same_v<T, double>) {
                options.*member = read_real(flag, text);
            } else if constexpr (std::is_same_v<T, uint64_t>) {
                options.*member = read_seed(flag, text);
            } else {
                options.*member = static_cast<T>(read_whole(flag, text));
            }
        },
        flag.member);
}

// Levenshtein's distance, with a letter in the wrong case at half the price of a wrong letter.
inline int typing_distance(const std::string& a, const std::string& b) {
    const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? char(c - 'A' + 'a') : c; };
    std::vector<int> row(b.size() + 1);
    for (size_t j = 0; j < row.size(); ++j) row[j] = 2 * static_cast<int>(j);
    for (size_t i = 0; i < a.size(); ++i) {
        int diagonal = row[0];
        row[0] += 2;
        for (size_t j = 0; j < b.size(); ++j) {
            const int change = a[i] == b[j] ? 0 : lower(a[i]) == lower(b[j]) ? 1 : 2;
            const int best = std::min({diagonal + change, row[j] + 2, row[j + 1] + 2});
            diagonal = row[j + 1];
            row[j + 1] = best;
        }
    }
    return row.back();
}

// The flag that was probably meant, null when none is near: the one whose letters or name are nearest
// to what was typed, without a value that hangs on it (-b=4, -b4); at equal distance the one that
// begins like it, then the shorter one. One letter in three may be wrong, three at most; of a single
// letter no more than its case, since any other flag of one letter would be as near.
inline const Flag* nearest_flag(const std::string& argument) {
    const size_t value = argument.find_first_of("=0123456789");
    const std::string typed = argument.substr(0, value);
    const int most =
        typed.size() < 3 ? 1 : 2 * static_cast<int>(std::min<size_t>(typed.size() / 3, 3));
    const Flag* nearest = nullptr;
    int nearest_score = INT_MAX;
    for (const Flag& flag : flag_table()) {
        std::string name = std::string("--") + flag.name;
        for (char& c : name) c = c == '_' ? '-' : c;
        for (const std::string& known : {std::string(flag.letters), name}) {
            int prefix = 0;
            while (prefix < 4 && known[prefix] && known[prefix] == typed[prefix]) ++prefix;
            const int distance = typing_distance(typed, known);
            const int score = distance * 1000 - prefix * 100 +
                              static_cast<int>(std::min<size_t>(known.size(), 99));
            if (distance <= most && score < nearest_score) {
                nearest_score = score;
                nearest = &flag;
            }
        }
    }
    return nearest;
}

[[noreturn]] inline void refuse_unknown(const std::string& argument) {
    const std::string shown = printable(argument.substr(0, 200));
    if (argument.empty() || argument[0] != '-') {
        throw Error(
            format("%s: a flag must come here, such as -b 4; --help lists all", shown.c_str()));
    }
    std::string typed = argument.substr(0, 200);
    for (char& c : typed) c = c == '_' ? '-' : c;
    const Flag* nearest = nearest_flag(typed);
    if (nearest == nullptr) {
        throw Error(format("%s: unknown flag; --help lists all", shown.c_str()));
    }
    std::string name;
    if (nearest->takes_value) name = format(" (%s)", nearest->name);
    const char* more = nearest == find_flag("--help") ? "" : ", --help lists all";
    throw Error(format("%s: unknown flag; the nearest is %s%s%s", shown.c_str(), nearest->letters,
                       name.c_str(), more));
}

// Does it say where and as what a process meets the others?
inline bool is_meeting_flag(const Flag& flag) {
    const std::string letters = flag.letters;
    return letters.size() == 3 && letters[1] == 'p';
}

// What no flag can say alone.
inline void check_combinations(const Options& options) {
    if (options.process_rank >= options.num_processes) {
        throw Error(format("-pr %d: must be less than -pn, which is %d", options.process_rank,
                           options.num_processes));
    }
    if (options.resume && options.output_dir.empty()) {
        throw Error("-y 1: needs -o, the folder to resume from");
    }
    if (options.num_processes > 1 && options.init_method == "tcp" &&
        options.server_address.empty()) {
        throw Error("-pi tcp: needs -ps, the host name or address of rank 0");
    }
    if (options.num_processes > 1 && options.init_method == "fs" && options.shared_folder.empty()) {
        throw Error("-pi fs: needs -pf, a folder that all processes see");
    }
}

}  // namespace detail

inline Options::Options() {
    for (const Flag& flag : flag_table()) detail::assign(*this, flag, flag.fallback);
}

// A flag's value as it would be typed; reading it back gives the same bits.
inline std::string flag_value(const Options& options, const Flag& flag) {
    return std::visit(
        [&](auto member) -> std::string {
            const auto& value = options.*member;
            using T = std::remove_cv_t<std::remove_reference_t<decltype(value)>>;
            if constexpr (std::is_same_v<T, std::string>) {
                return value;
            } else if constexpr (std::is_same_v<T, double>) {
                char digits[32];
                const auto end = std::to_chars(digits, digits + sizeof(digits), value).ptr;
                return std::string(digits, end);
            } else {
                return std::to_string(value);
            }
        },
        flag.member);
}

// Reads the arguments that follow the program's name. Error on the first that is wrong, or on
// flags that contradict each other; with --help or --version the latter is not looked at.
inline Options parse_options(const std::vector<std::string>& arguments) {
    Options options;
    std::vector<std::pair<const Flag*, std::string>> seen;
    for (size_t i = 0; i < arguments.size(); ++i) {
        const Flag* flag = find_flag(arguments[i]);
        if (flag == nullptr) detail::refuse_unknown(arguments[i]);
        std::string value = "1";
        if (flag->takes_value) {
            // A forgotten value must not swallow the next flag.
            if (i + 1 == arguments.size() || find_flag(arguments[i + 1]) != nullptr) {
                const bool wants_help = std::string(flag->letters) == "-h";
                throw Error(format("%s: its value is missing; must be %s%s", flag->letters,
                                   valid_values(*flag).c_str(),
                                   wants_help ? " (--help prints all flags)" : ""));
            }
            value = arguments[++i];
        }
        for (const auto& [earlier, first] : seen) {
            if (earlier != flag) continue;
            if (!flag->takes_value) throw Error(format("%s: given twice", flag->letters));
            detail::refuse(
                *flag, value,
                "given twice, at first with " + printable(first) + "; must be given once");
        }
        detail::assign(options, *flag, value);
        seen.emplace_back(flag, value);
    }
    if (!options.help && !options.version) detail::check_combinations(options);
    return options;
}

inline Options parse_options(int argc, const char* const* argv) {
    return parse_options(std::vector<std::string>(argv + (argc > 0 ? 1 : 0), argv + argc));
}

// For a process whose other flags are wrong: the flags by which it would have found the others, all
// else left at its default. Nothing when it has no others, when they are found by mpirun, or when one
// of those flags is itself wrong.
inline std::optional<Options> read_meeting_flags(const std::vector<std::string>& arguments) {
    Options options;
    std::vector<const Flag*> seen;
    try {
        for (size_t i = 0; i + 1 < arguments.size(); ++i) {
            const Flag* flag = find_flag(arguments[i]);
            if (flag == nullptr || !flag->takes_value) continue;
            if (find_flag(arguments[i + 1]) != nullptr) continue;  // the value was forgotten
            ++i;
            if (!detail::is_meeting_flag(*flag)) continue;
            if (std::count(seen.begin(), seen.end(), flag) > 0) return std::nullopt;
            seen.push_back(flag);
            detail::assign(options, *flag, arguments[i]);
        }
        detail::check_combinations(options);
    } catch (const Error&) {
        return std::nullopt;
    }
    if (options.num_processes == 1 || options.init_method == "mpi") return std::nullopt;
    return options;
}

// For a process whose flags are wrong: does it find the others by MPI?
inline bool are_found_by_mpi(const std::vector<std::string>& arguments) {
    const auto way = std::find(arguments.begin(), arguments.end(), "-pi");
    return way == arguments.end() || way + 1 == arguments.end() ||
           (way[1] != "tcp" && way[1] != "fs");
}

namespace detail {

// `text` broken at spaces into lines of at most `width`, the later ones indented.
inline std::string wrapped(const std::string& text, size_t width, size_t indent) {
    std::string result;
    size_t column = indent, start = 0;
    while (start < text.size()) {
        size_t end = text.find(' ', start);
        if (end == std::string::npos) end = text.size();
        if (column > indent && column + 1 + end - start > width) {
            result += '\n' + std::string(indent, ' ');
            column = indent;
        } else if (column > indent) {
            result += ' ';
            ++column;
        }
        result.append(text, start, end - start);
        column += end - start;
        start = end + 1;
    }
    return result + '\n';
}

inline const char* value_word(const Flag& flag) {
    if (!flag.takes_value) return "";
    if (!flag.choices.empty()) return "WORD";
    if (is_text(flag)) return "TEXT";
    if (is_bool(flag)) return "0|1";
    return is_real(flag) ? "X" : "N";
}

}  // namespace detail

// --help: every flag with its meaning, right values and default, and examples.
inline std::string help_text(const std::string& program) {
    constexpr size_t kIndent = 18, kWidth = 100;
    std::string text = "Trains GPT-2.\n\nusage: " + program + " [flag value] ...\n";
    const char* group = "";
    for (const Flag& flag : flag_table()) {
        if (group != flag.group) {
            group = flag.group;
            text += format("\n%s\n", group);
        }
        std::string head = format("  %-4s%s", flag.letters, detail::value_word(flag));
        head.resize(std::max(head.size() + 1, kIndent), ' ');
        std::string line = flag.help;
        if (flag.takes_value) {
            const bool any = detail::is_text(flag) && flag.choices.empty();
            const std::string range = any ? "" : valid_values(flag) + "; ";
            const std::string fallback = *flag.fallback ? flag.fallback : "empty";
            line += " [" + range + "default " + fallback + "]";
        }
        text += head + detail::wrapped(line, kWidth, kIndent);
    }
    const char* p = program.c_str();
    text += format(
        "\nExamples\n"
        "  one GPU, 10 steps:          %s -d 32768 -b 4 -t 1024 -x 10\n"
        "  a small model, a CPU too:   %s -e custom:L2C64H2T64 -t 64 -x 100 -o log -n 50\n"
        "  the same, gone on with:     %s -e custom:L2C64H2T64 -t 64 -x 200 -o log -n 50 -y 1\n",
        p, p, p);
    return text;
}

// --version: name, version, precision, commit, on one line.
inline std::string version_text() {
    const bool wide_gradients = !std::is_same_v<gradX, floatX>;
    return format("%s %s, precision %s%s, commit %s\n", kProgramName, kVersion, kPrecisionName,
                  wide_gradients ? " with FP32 gradients" : "", kCommit);
}

// The batch of one step, in the terms of the reproducibility contract.
struct ResolvedBatch {
    int64_t total_tokens = 0;            // d
    int64_t micro_batches = 0;           // M = d / (B*T), over all ranks
    int64_t micro_batches_per_rank = 0;  // A = M / N
    int width = 0;                       // W, largest power of two <= -rw that divides M
};

// Error when a step does not split into whole micro-batches for each of num_processes ranks.
inline ResolvedBatch resolve_batch(const Options& options, int num_processes) {
    const int64_t b = options.batch_size, t = options.seq_len, n = num_processes;
    if (b * t > INT_MAX) {
        throw Error(
            format("-b %lld -t %lld: a micro-batch has at most %d tokens; -b must be at "
                   "most %lld",
                   static_cast<long long>(b), static_cast<long long>(t), INT_MAX,
                   static_cast<long long>(INT_MAX / t)));
    }
    const int64_t unit = b * t * n;
    ResolvedBatch batch;
    batch.total_tokens = options.total_batch == -1 ? unit : options.total_batch;
    if (batch.total_tokens % unit != 0) {
        const int64_t below = batch.total_tokens / unit * unit;
        std::string nearest = std::to_string(below + unit);
        if (below > 0) nearest = std::to_string(below) + " or " + nearest;
        throw Error(format("-d %lld: not divisible by B*T*N = %lld*%lld*%lld = %lld; nearest: %s",
                           static_cast<long long>(batch.total_tokens), static_cast<long long>(b),
                           static_cast<long long>(t), static_cast<long long>(n),
                           static_cast<long long>(unit), nearest.c_str()));
    }
    batch.micro_batches = batch.total_tokens / (b * t);
    // Far more than anybody needs, and far from overflow in what is computed from it.
    constexpr int64_t kMostMicroBatches = 1 << 20;
    if (batch.micro_batches > kMostMicroBatches) {
        const int64_t most = kMostMicroBatches / n * n * b * t;
        throw Error(format(
            "-d %lld: %lld micro-batches of B*T = %lld tokens in a step; must be at "
            "most %lld%s",
            static_cast<long long>(batch.total_tokens), static_cast<long long>(batch.micro_batches),
            static_cast<long long>(b * t), static_cast<long long>(kMostMicroBatches),
            most > 0 ? (", so -d at most " + std::to_string(most)).c_str() : ""));
    }
    batch.micro_batches_per_rank = batch.micro_batches / n;
    batch.width = 1;
    while (2 * batch.width <= options.reduction_width &&
           batch.micro_batches % (2 * batch.width) == 0) {
        batch.width *= 2;
    }
    return batch;
}

}  // namespace llmc
