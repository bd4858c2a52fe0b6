// Which tokens a row of a micro-batch holds, and a thread that gets them ready ahead of time.
//
// Files are cut into windows of T+1 tokens with stride T. Row b of micro-batch j of step s is
// window (s * M + j) * B + b, a number that goes on across files and epochs: nothing here knows of
// ranks, and a resumed run only has to know its step.
#pragma once

#include <algorithm>
#include <atomic>
#include <climits>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/cuda_common.h"
#include "llmc/error.h"
#include "llmc/hash.h"
#include "llmc/permutation.h"
#include "llmc/step_state.h"
#include "llmc/test_switches.h"
#include "llmc/token_file.h"

namespace llmc {

// Tokens index * T ... index * T + T of `file`.
struct Window {
    uint64_t epoch;
    uint64_t place;  // in the epoch's order, 0 ... Q-1
    size_t file;
    uint64_t index;
};

// The windows of a list of token files and their order. Threads may share one.
class TokenDataset {
  public:
    // `files` in the order that counts (expand_pattern sorts them). `name` stands for the data set
    // in messages ("-i data/train_*.bin"); the file names if empty. A file shorter than one window
    // is left out, with a line on stderr if `warn`. Error when a file is not a token file, or when
    // there is no window at all.
    TokenDataset(const std::vector<std::string>& files, int T, int vocab_size, uint64_t seed,
                 bool shuffle, const std::string& name = "", bool warn = true)
        : files_(files),
          T_(static_cast<uint64_t>(T)),
          vocab_size_(vocab_size),
          seed_(seed),
          shuffle_(shuffle),
          name_(name) {
        if (name_.empty() && !files.empty()) name_ = files.front();
        if (name.empty() && files.size() > 1) name_ += format(" and %zu more", files.size() - 1);
        if (T < 1) throw Error(format("-t %d: expected at least 1 token", T));
        drop_short_files(warn);
        if (files_.size() == 0) {
            throw Error(format("%s: no file has the %d tokens of one window; use a smaller -t",
                               name_.c_str(), T + 1));
        }
        identity_ = make_order(0, false);
    }

    int T() const { return static_cast<int>(T_); }
    int vocab_size() const { return vocab_size_; }
    size_t num_files() const { return files_.size(); }
    const std::string& file_path(size_t file) const { return files_.path(file); }
    uint64_t file_windows(size_t file) const { return (files_.tokens(file) - 1) / T_; }
    // Q, the windows of one epoch.
    uint64_t num_windows() const { return identity_->first_place.back(); }

    // Error when there are fewer than B windows: a batch would repeat itself.
    void require_batch(int B) const {
        if (B >= 1 && static_cast<uint64_t>(B) <= num_windows()) return;
        throw Error(format(
            "-b %d -t %d: a batch needs %d windows of %d tokens, %s has %llu; the "
            "largest -b is %llu",
            B, T(), B, T() + 1, name_.c_str(), static_cast<unsigned long long>(num_windows()),
            static_cast<unsigned long long>(num_windows())));
    }

    // Looks for tokens outside the vocabulary before training starts: everywhere when the files are
    // small together (kScanTokens), else at the beginning and the end of each. What is not looked at
    // here is looked at when it is read. Returns a hash of the tokens looked at: two ranks whose files
    // differ in them do not train on the same data. Error as read_window's.
    uint64_t check_tokens() const {
        constexpr uint64_t kScanTokens = uint64_t{1} << 28, kEnds = uint64_t{1} << 20;
        uint64_t all = 0;
        for (size_t file = 0; file < files_.size(); ++file) all += files_.tokens(file);
        uint64_t hash = 0;
        for (size_t file = 0; file < files_.size(); ++file) {
            const uint64_t tokens = files_.tokens(file);
            if (all <= kScanTokens || tokens <= 2 * kEnds) {
                check_range(file, 0, tokens, &hash);
            } else {
                check_range(file, 0, kEnds, &hash);
                check_range(file, tokens - kEnds, tokens, &hash);
            }
        }
        return hash;
    }

    // The window in row 0 of micro-batch j of a step with M micro-batches of B rows.
    static uint64_t micro_batch(uint64_t step, int j, int M, int B) {
        return (step * static_cast<uint64_t>(M) + static_cast<uint64_t>(j)) *
               static_cast<uint64_t>(B);
    }

    // Where window number q of the endless sequence lies. An epoch takes the files one by one in
    // the order of (seed, epoch), and the windows of a file in that of (seed, epoch, file).
    Window window(uint64_t q) const {
        const uint64_t epoch = q / num_windows(), place = q % num_windows();
        if (!shuffle_) return locate(*identity_, epoch, place, false);
        return locate(*epoch_order(epoch), epoch, place, true);
    }

    // Reads the T+1 tokens of window q; out is int or uint16_t. Error naming the file, the position
    // in it and the token when one is not in the vocabulary.
    template <class Token>
    void read_window(uint64_t q, Token* out) const {
        std::vector<uint16_t> tokens(T_ + 1);
        read_checked(window(q), tokens.data());
        std::copy(tokens.begin(), tokens.end(), out);
    }

    // Reads windows first ... first+rows-1 as inputs (rows,T), tokens 0 ... T-1 of each, and
    // targets (rows,T), tokens 1 ... T.
    void read_rows(uint64_t first, int rows, int* inputs, int* targets) const {
        std::vector<uint16_t> tokens(T_ + 1);
        for (int row = 0; row < rows; ++row) {
            read_checked(window(first + static_cast<uint64_t>(row)), tokens.data());
            split(tokens, static_cast<size_t>(row), inputs, targets);
        }
    }

    // Validation: micro-batch j is windows j * B ... j * B + B-1 in the files' own order, shuffled
    // or not, for j below Q div B.
    uint64_t validation_micro_batches(int B) const {
        return num_windows() / static_cast<uint64_t>(std::max(B, 1));
    }
    void read_validation_micro_batch(uint64_t j, int B, int* inputs, int* targets) const {
        if (B < 1 || j >= validation_micro_batches(B)) {
            throw Error(format("%s: validation micro-batch %llu of %d windows, there are %llu",
                               name_.c_str(), static_cast<unsigned long long>(j), B,
                               static_cast<unsigned long long>(validation_micro_batches(B))));
        }
        std::vector<uint16_t> tokens(T_ + 1);
        for (int row = 0; row < B; ++row) {
            const uint64_t place = j * static_cast<uint64_t>(B) + static_cast<uint64_t>(row);
            read_checked(locate(*identity_, 0, place, false), tokens.data());
            split(tokens, static_cast<size_t>(row), inputs, targets);
        }
    }

    // Hash of the files' names without folders and their numbers of tokens: equal on two ranks, or
    // before and after a restart, when they see the same list of files. Contents are not read.
    uint64_t data_hash() const {
        std::string list;
        for (size_t file = 0; file < files_.size(); ++file) {
            const std::string& path = files_.path(file);
            list += format("%s %llu\n", path.c_str() + (path.rfind('/') + 1),
                           static_cast<unsigned long long>(files_.tokens(file)));
        }
        return hash_text(list);
    }

  private:
    // An epoch's order of the files.
    struct EpochOrder {
        uint64_t epoch;
        std::vector<size_t> files;          // (num_files)
        std::vector<uint64_t> first_place;  // (num_files + 1), the place of each one's first window
    };
    static constexpr uint32_t kOrderOfFiles = UINT32_MAX;

    void drop_short_files(bool warn) {
        for (const TokenFiles::File& file : files_.remove_shorter_than(T_ + 1)) {
            if (!warn) continue;
            std::fprintf(stderr,
                         "warning: %s: %llu tokens, fewer than the %llu of one window; skipped\n",
                         file.path.c_str(), static_cast<unsigned long long>(file.tokens),
                         static_cast<unsigned long long>(T_ + 1));
        }
    }

    std::shared_ptr<const EpochOrder> make_order(uint64_t epoch, bool shuffle) const {
        auto order = std::make_shared<EpochOrder>();
        order->epoch = epoch;
        order->first_place.push_back(0);
        const KeyedPermutation permutation(files_.size(), seed_, epoch, kOrderOfFiles);
        for (size_t i = 0; i < files_.size(); ++i) {
            const size_t file = shuffle ? static_cast<size_t>(permutation(i)) : i;
            order->files.push_back(file);
            order->first_place.push_back(order->first_place.back() + file_windows(file));
        }
        return order;
    }

    // The order of an epoch; the newest one asked for is kept.
    std::shared_ptr<const EpochOrder> epoch_order(uint64_t epoch) const {
        std::lock_guard<std::mutex> lock(mutex_);
        if (order_ == nullptr || order_->epoch != epoch) order_ = make_order(epoch, true);
        return order_;
    }

    Window locate(const EpochOrder& order, uint64_t epoch, uint64_t place, bool shuffle) const {
        const auto& first = order.first_place;
        const size_t i = static_cast<size_t>(std::upper_bound(first.begin(), first.end(), place) -
                                             first.begin() - 1);
        const size_t file = order.files[i];
        const uint64_t index = place - first[i];
        if (!shuffle) return {epoch, place, file, index};
        const KeyedPermutation inside(file_windows(file), seed_, epoch,
                                      static_cast<uint32_t>(file));
        return {epoch, place, file, inside(index)};
    }

    void read_checked(const Window& window, uint16_t* tokens) const {
        const uint64_t first = window.index * T_;
        files_.read(window.file, first, T_ + 1, tokens);
        check_vocabulary(window.file, first, tokens, T_ + 1);
    }

    // Goes on with `hash`.
    void check_range(size_t file, uint64_t begin, uint64_t end, uint64_t* hash) const {
        constexpr uint64_t kBlock = uint64_t{1} << 20;
        std::vector<uint16_t> tokens(std::min(kBlock, end - begin));
        for (uint64_t first = begin; first < end; first += kBlock) {
            const uint64_t count = std::min(kBlock, end - first);
            files_.read(file, first, count, tokens.data());
            check_vocabulary(file, first, tokens.data(), count);
            *hash = mix64(*hash ^ hash_bytes(tokens.data(), count * sizeof(uint16_t)));
        }
    }

    void check_vocabulary(size_t file, uint64_t first, const uint16_t* tokens,
                          uint64_t count) const {
        uint16_t largest = 0;
        for (uint64_t i = 0; i < count; ++i) largest = std::max(largest, tokens[i]);
        if (largest < vocab_size_) return;
        const uint16_t* wrong =
            std::find_if(tokens, tokens + count, [this](uint16_t t) { return t >= vocab_size_; });
        throw Error(
            format("%s: token %d at position %llu is not in the model's vocabulary of %d (0 to %d)",
                   files_.path(file).c_str(), static_cast<int>(*wrong),
                   static_cast<unsigned long long>(first + static_cast<uint64_t>(wrong - tokens)),
                   vocab_size_, vocab_size_ - 1));
    }

    void split(const std::vector<uint16_t>& tokens, size_t row, int* inputs, int* targets) const {
        std::copy(tokens.begin(), tokens.end() - 1, inputs + row * T_);
        std::copy(tokens.begin() + 1, tokens.end(), targets + row * T_);
    }

    TokenFiles files_;
    uint64_t T_;
    int vocab_size_;
    uint64_t seed_;
    bool shuffle_;
    std::string name_;
    std::shared_ptr<const EpochOrder> identity_;
    mutable std::mutex mutex_;
    mutable std::shared_ptr<const EpochOrder> order_;
};

// order (count): the positions 0 ... count-1 sorted by their token, equal tokens by position. What
// encoder_backward reads. Error when a token is not in 0 ... vocab_size-1. A counting sort.
inline void sort_positions_by_token(const int* tokens, int count, int vocab_size, int* order) {
    std::vector<int> next(static_cast<size_t>(vocab_size) + 1, 0);
    for (int i = 0; i < count; ++i) {
        if (tokens[i] < 0 || tokens[i] >= vocab_size) {
            throw Error(format("token %d at position %d is not in the vocabulary of %d", tokens[i],
                               i, vocab_size));
        }
        ++next[static_cast<size_t>(tokens[i]) + 1];
    }
    for (size_t token = 1; token < next.size(); ++token) next[token] += next[token - 1];
    for (int i = 0; i < count; ++i) order[next[static_cast<size_t>(tokens[i])]++] = i;
}

// What one rank needs for one step, in page-locked memory. A is its number of micro-batches.
struct PreparedStep {
    int step = 0;
    // (A,3,B*T): of each micro-batch its tokens, its targets, and sort_positions_by_token of its tokens.
    PinnedBuffer<int> micro_batches;
    PinnedBuffer<StepInputs> inputs;  // (1)
};
constexpr size_t kMicroBatchArrays = 3;

struct InputPipelineOptions {
    int B = 0;
    int micro_batches_per_step = 0;  // M, of all ranks
    int first_micro_batch = 0;       // this rank's are first ... first+count-1
    int micro_batches = 0;           // A
    int first_step = 0;              // more than 0 after a resume
    int end_step = INT_MAX;          // nothing is prepared for this step or a later one
    bool single_batch = false;       // every micro-batch of every step is the first one of step 0
};

// A thread that prepares steps in order, up to two of them ahead of release().
class InputPipeline {
  public:
    // `data` must live longer than the pipeline; learning_rate(step) is called from the thread.
    // Error when the data set has fewer than B windows, or M micro-batches do not hold this rank's.
    InputPipeline(const TokenDataset& data, const InputPipelineOptions& options,
                  std::function<float(int)> learning_rate)
        : data_(data), options_(options), learning_rate_(std::move(learning_rate)) {
        data.require_batch(options.B);
        if (options.first_micro_batch < 0 || options.micro_batches < 1 || options.first_step < 0 ||
            options.micro_batches > options.micro_batches_per_step - options.first_micro_batch) {
            throw Error(format("micro-batches %d to %d of a step that has %d",
                               options.first_micro_batch,
                               options.first_micro_batch + options.micro_batches - 1,
                               options.micro_batches_per_step));
        }
        const size_t count = static_cast<size_t>(options.micro_batches) * tokens_per_micro_batch();
        for (PreparedStep& slot : slots_) {
            slot.micro_batches = PinnedBuffer<int>(kMicroBatchArrays * count);
            slot.inputs = PinnedBuffer<StepInputs>(1);
        }
        thread_ = std::thread([this] { run(); });
    }
    // Stops after the row at hand, whatever is prepared or held.
    ~InputPipeline() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            closing_ = true;
        }
        changed_.notify_all();
        thread_.join();
    }
    InputPipeline(const InputPipeline&) = delete;
    InputPipeline& operator=(const InputPipeline&) = delete;

    // Waits until `step` is ready. Steps come in order, from first_step on, each once, and at most
    // two are held at a time; anything else is an Error, as is what went wrong in the thread. The
    // result stays as it is until its release().
    const PreparedStep& acquire(int step) {
        std::unique_lock<std::mutex> lock(mutex_);
        if (step - options_.first_step != acquired_ || step >= options_.end_step) {
            throw Error(format("input pipeline: step %d asked for, the next one is %d of %d", step,
                               options_.first_step + acquired_, options_.end_step));
        }
        if (acquired_ - released_ == kSlots) {
            throw Error(format("input pipeline: step %d asked for before step %d was released",
                               step, options_.first_step + released_));
        }
        changed_.wait(lock, [this] { return prepared_ > acquired_ || failed_; });
        if (prepared_ == acquired_) throw Error(failure_);
        return slots_[acquired_++ % kSlots];
    }

    // Gives back the step held for longest. Copies out of it must be complete by then.
    void release() {
        std::lock_guard<std::mutex> lock(mutex_);
        if (released_ == acquired_) throw Error("input pipeline: release without acquire");
        ++released_;
        changed_.notify_all();
    }

  private:
    static constexpr int kSlots = 2;

    size_t tokens_per_micro_batch() const {
        return static_cast<size_t>(options_.B) * static_cast<size_t>(data_.T());
    }

    void run() {
        try {
            for (int step = options_.first_step; step < options_.end_step; ++step) {
                {
                    std::unique_lock<std::mutex> lock(mutex_);
                    changed_.wait(lock,
                                  [this] { return closing_ || prepared_ - released_ < kSlots; });
                }
                if (!prepare(step, slots_[(step - options_.first_step) % kSlots])) return;
                std::lock_guard<std::mutex> lock(mutex_);
                ++prepared_;
                changed_.notify_all();
            }
        } catch (const std::exception& error) {
            std::lock_guard<std::mutex> lock(mutex_);
            failed_ = true;
            failure_ = error.what();
            changed_.notify_all();
        }
    }

    // Number in the step of this rank's micro-batch `a`.
    int micro_batch_in_step(int a) const {
        if (planted_fault() == Fault::round_robin) {
            const int rank = options_.first_micro_batch / options_.micro_batches;
            return a * (options_.micro_batches_per_step / options_.micro_batches) + rank;
        }
        return options_.first_micro_batch + a;
    }

    // False when the pipeline is closing.
    bool prepare(int step, PreparedStep& slot) {
        slot.step = step;
        for (int a = 0; a < options_.micro_batches; ++a) {
            const size_t count = tokens_per_micro_batch();
            int* tokens = slot.micro_batches.get() + kMicroBatchArrays * count * a;
            int* targets = tokens + count;
            int* order = targets + count;
            const uint64_t first =
                options_.single_batch
                    ? 0
                    : TokenDataset::micro_batch(static_cast<uint64_t>(step), micro_batch_in_step(a),
                                                options_.micro_batches_per_step, options_.B);
            for (int b = 0; b < options_.B; ++b) {
                if (closing_) return false;
                const size_t row = static_cast<size_t>(b) * static_cast<size_t>(data_.T());
                data_.read_rows(first + static_cast<uint64_t>(b), 1, tokens + row, targets + row);
            }
            sort_positions_by_token(tokens, static_cast<int>(count), data_.vocab_size(), order);
        }
        slot.inputs[0].step = static_cast<uint32_t>(step);
        slot.inputs[0].learning_rate = learning_rate_(step);
        return !closing_;
    }

    const TokenDataset& data_;
    const InputPipelineOptions options_;
    std::function<float(int)> learning_rate_;
    PreparedStep slots_[kSlots];
    std::mutex mutex_;
    std::condition_variable changed_;
    std::atomic<bool> closing_{false};
    // Steps since first_step; released_ <= acquired_ <= prepared_ <= released_ + kSlots.
    int prepared_ = 0;
    int acquired_ = 0;
    int released_ = 0;
    bool failed_ = false;
    std::string failure_;
    std::thread thread_;
};

}  // namespace llmc
