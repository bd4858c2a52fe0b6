// Multiple-choice evaluation: HellaSwag (Zellers et al. 2019).
//
// File: 256 int32 (magic 20240522, version 1, number of examples, bytes of the longest one), then
// uint16 for each example: 65535, bytes of the example, index, label, number of completions (4),
// context length, context, and for each completion its length and its tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/input_file.h"

namespace llmc {

// The examples of a file in numbered batches of B / 4 examples, four rows each. The model's answer
// is the completion with the lowest mean loss over its tokens, the first of equals: accuracy
// normalised by length, in tokens. Batches do not depend on the ranks that they are dealt out to,
// and their results are whole numbers, so their sum does not either.
class EvalDataset {
  public:
    static constexpr int kCompletions = 4;

    // Reads and checks the whole file. Error when it is not a whole evaluation file, when a token
    // is not in the vocabulary, or when B < 4.
    EvalDataset(const std::string& path, int B, int T, int vocab_size)
        : path_(path), B_(B), T_(T), vocab_size_(vocab_size) {
        if (B < kCompletions) {
            throw Error(
                format("-b %d: HellaSwag needs a row for each of %d completions, so -b of "
                       "at least %d (or -h 0)",
                       B, kCompletions, kCompletions));
        }
        if (T < 1) throw Error(format("-t %d: expected at least 1 token", T));
        const InputFile file(path);
        const std::vector<int32_t> header =
            read_header(file, "an evaluation file", kMagic, kVersion);
        const uint64_t body = file.bytes() - kHeaderBytes;
        if (header[2] <= 0) {
            throw Error(format("%s: its header says %d examples, expected at least 1", path.c_str(),
                               header[2]));
        }
        if (body % sizeof(uint16_t) != 0) {
            throw Error(format("%s: %llu bytes after the header, not a whole number of uint16",
                               path.c_str(), static_cast<unsigned long long>(body)));
        }
        values_.resize(body / sizeof(uint16_t));
        file.read(values_.data(), body, kHeaderBytes);
        size_t at = 0;
        for (int i = 0; i < header[2]; ++i) at = parse_example(i, at, header[3]);
        if (at != values_.size()) {
            throw Error(format("%s: %zu bytes after the last of %d examples", path.c_str(),
                               (values_.size() - at) * sizeof(uint16_t), header[2]));
        }
    }

    int num_examples() const { return static_cast<int>(examples_.size()); }
    int examples_per_batch() const { return B_ / kCompletions; }
    int num_batches() const {
        return (num_examples() + examples_per_batch() - 1) / examples_per_batch();
    }

    // Fills tokens (B,T) and targets (B,T). Row 4 e + c holds context and completion c of the
    // batch's example e; the target is the next token where that belongs to the completion, or -1.
    // What is left of a row, and rows without an example, are token 0 and target -1. Of a text
    // longer than T+1 tokens the last T+1 are kept: the context loses its beginning, and of a
    // completion longer than T only the last T tokens count.
    void read_batch(int batch, int* tokens, int* targets) const {
        check_batch(batch);
        const size_t T = static_cast<size_t>(T_);
        std::fill(tokens, tokens + static_cast<size_t>(B_) * T, 0);
        std::fill(targets, targets + static_cast<size_t>(B_) * T, -1);
        for_each_row(batch, [&](const Example& example, int c, size_t row) {
            const Span span = row_span(example, c);
            std::vector<int> text(
                values_.begin() + static_cast<ptrdiff_t>(example.context),
                values_.begin() + static_cast<ptrdiff_t>(example.context + example.context_length));
            const auto completion = values_.begin() + static_cast<ptrdiff_t>(example.completion[c]);
            text.insert(text.end(), completion,
                        completion + static_cast<ptrdiff_t>(example.completion_length[c]));
            text.erase(text.begin(), text.begin() + static_cast<ptrdiff_t>(span.dropped));
            std::copy(text.begin(), text.end() - 1, tokens + row * T);
            for (size_t t = span.begin; t < span.end; ++t) targets[row * T + t] = text[t + 1];
        });
    }

    // Number of the batch's examples answered right, given the losses (B,T) of read_batch's
    // targets. A mean that is not a number is never the lowest.
    int count_correct(int batch, const float* losses) const {
        check_batch(batch);
        int correct = 0, best = -1;
        double lowest = 0.0;
        for_each_row(batch, [&](const Example& example, int c, size_t row) {
            const Span span = row_span(example, c);
            double sum = 0.0;
            for (size_t t = span.begin; t < span.end; ++t) {
                sum += losses[row * static_cast<size_t>(T_) + t];
            }
            const double mean = sum / static_cast<double>(span.end - span.begin);
            if (c == 0) best = -1;
            if (!std::isnan(mean) && (best < 0 || mean < lowest)) {
                best = c;
                lowest = mean;
            }
            if (c == kCompletions - 1 && best == example.label) ++correct;
        });
        return correct;
    }

    // Examples in a batch: B / 4, or what is left for the last one.
    int examples_in_batch(int batch) const {
        check_batch(batch);
        return std::min(examples_per_batch(), num_examples() - batch * examples_per_batch());
    }

  private:
    static constexpr int32_t kMagic = 20240522;
    static constexpr int32_t kVersion = 1;
    static constexpr int kStartOfExample = 65535;

    // Places and lengths in values_.
    struct Example {
        int label = 0;
        size_t context = 0;
        size_t context_length = 0;
        size_t completion[kCompletions] = {};
        size_t completion_length[kCompletions] = {};
    };
    // Positions begin ... end-1 of a row predict the completion; `dropped` tokens of the text were
    // cut off in front.
    struct Span {
        size_t dropped, begin, end;
    };

    Span row_span(const Example& example, int c) const {
        const size_t length = example.context_length + example.completion_length[c];
        const size_t kept = std::min(length, static_cast<size_t>(T_) + 1);
        const size_t predicted = std::min(example.completion_length[c], kept - 1);
        return {length - kept, kept - 1 - predicted, kept - 1};
    }

    template <class Body>
    void for_each_row(int batch, Body&& body) const {
        for (int e = 0; e < examples_in_batch(batch); ++e) {
            const Example& example =
                examples_[static_cast<size_t>(batch * examples_per_batch() + e)];
            for (int c = 0; c < kCompletions; ++c) {
                body(example, c, static_cast<size_t>(e * kCompletions + c));
            }
        }
    }

    void check_batch(int batch) const {
        if (batch >= 0 && batch < num_batches()) return;
        throw Error(format("%s: batch %d, there are %d", path_.c_str(), batch, num_batches()));
    }

    // Checks example `number`, which starts at values_[at]; returns the place after it.
    size_t parse_example(int number, size_t at, int32_t longest_bytes) {
        const size_t start = at;
        const auto fail = [&](const std::string& what) {
            throw Error(format("%s: example %d: %s", path_.c_str(), number, what.c_str()));
        };
        const auto next = [&](const char* what) {
            if (at >= values_.size()) fail(std::string("the file ends before its ") + what);
            return static_cast<int>(values_[at++]);
        };
        const auto expect = [&](const char* what, int value, int expected) {
            if (value != expected) fail(format("%s %d, expected %d", what, value, expected));
        };
        const auto skip_tokens = [&](const char* what, size_t* first, size_t* length) {
            *length = static_cast<size_t>(next(what));
            *first = at;
            if (*length == 0) fail(std::string("no token in its ") + what);
            for (size_t i = 0; i < *length; ++i) {
                const int token = next(what);
                if (token < vocab_size_) continue;
                fail(format("token %d in its %s is not in the model's vocabulary of %d", token,
                            what, vocab_size_));
            }
        };

        expect("start marker", next("start marker"), kStartOfExample);
        const int bytes = next("size");
        // The index is 16 bits wide, a file may hold more examples.
        expect("index", next("index"), number & 0xffff);
        Example example;
        example.label = next("label");
        if (example.label >= kCompletions) {
            fail(format("label %d, expected 0 to %d", example.label, kCompletions - 1));
        }
        expect("number of completions", next("number of completions"), kCompletions);
        skip_tokens("context", &example.context, &example.context_length);
        for (int c = 0; c < kCompletions; ++c) {
            skip_tokens("completion", &example.completion[c], &example.completion_length[c]);
        }
        expect("size in bytes", bytes, static_cast<int>((at - start) * sizeof(uint16_t)));
        if (bytes > longest_bytes) {
            fail(format("%d bytes, but the header says at most %d", bytes, longest_bytes));
        }
        examples_.push_back(example);
        return at;
    }

    std::string path_;
    int B_;
    int T_;
    int vocab_size_;
    std::vector<uint16_t> values_;
    std::vector<Example> examples_;
};

}  // namespace llmc
