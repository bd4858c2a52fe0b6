// Turns tokens back into text.
//
// File gpt2_tokenizer.bin: 256 int32 (magic 20240328, version 2, vocabulary, end-of-text token),
// then for each token a length byte and its bytes.
#pragma once

#include <sys/stat.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/input_file.h"

namespace llmc {

// `text` without what could steer a terminal: control characters other than newline and tab, in one
// byte (below 0x20, 0x7f) or in UTF-8's two (U+0080 ... U+009F). All other bytes stay.
inline std::string without_controls(const std::string& text) {
    std::string safe;
    for (size_t i = 0; i < text.size(); ++i) {
        const unsigned char c = static_cast<unsigned char>(text[i]);
        const unsigned char next =
            i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0;
        if (c == 0xc2 && next >= 0x80 && next <= 0x9f) {
            ++i;
        } else if ((c >= 0x20 && c != 0x7f) || c == '\n' || c == '\t') {
            safe.push_back(text[i]);
        }
    }
    return safe;
}

class Tokenizer {
  public:
    // Nothing when there is no such file: the caller prints token numbers instead. Error when it is
    // there but is not a whole tokenizer file.
    static std::optional<Tokenizer> load(const std::string& path) {
        struct stat status;
        if (::stat(path.c_str(), &status) != 0 && (errno == ENOENT || errno == ENOTDIR)) return {};
        return Tokenizer(InputFile(path));
    }

    int vocab_size() const { return static_cast<int>(entries_.size()); }
    int end_of_text() const { return end_of_text_; }

    // The text of `count` tokens, made safe by without_controls; a number outside the vocabulary
    // shows as <number>. A character may be spread over several tokens, so decode them together.
    std::string decode(const int* tokens, size_t count) const {
        std::string text;
        for (size_t i = 0; i < count; ++i) {
            if (tokens[i] >= 0 && tokens[i] < vocab_size()) {
                text += entries_[static_cast<size_t>(tokens[i])];
            } else {
                text += format("<%d>", tokens[i]);
            }
        }
        return without_controls(text);
    }

  private:
    static constexpr int32_t kMagic = 20240328;
    static constexpr int32_t kVersion = 2;

    explicit Tokenizer(const InputFile& file) {
        const char* path = file.path().c_str();
        const std::vector<int32_t> header = read_header(file, "a tokenizer file", kMagic, kVersion);
        const int32_t vocab_size = header[2];
        end_of_text_ = header[3];
        const size_t body = static_cast<size_t>(file.bytes() - kHeaderBytes);
        // Every token takes at least two bytes.
        if (vocab_size < 1 || static_cast<size_t>(vocab_size) > body / 2) {
            throw Error(format("%s: its header says %d tokens, but %zu bytes follow", path,
                               vocab_size, body));
        }
        if (end_of_text_ < 0 || end_of_text_ >= vocab_size) {
            throw Error(format("%s: end-of-text token %d, expected 0 to %d", path, end_of_text_,
                               vocab_size - 1));
        }
        std::string bytes(body, '\0');
        file.read(bytes.data(), body, kHeaderBytes);
        size_t at = 0;
        for (int32_t token = 0; token < vocab_size; ++token) {
            if (at >= body) throw Error(format("%s: ends before token %d", path, token));
            const size_t length = static_cast<unsigned char>(bytes[at++]);
            if (length == 0) throw Error(format("%s: token %d is empty", path, token));
            if (length > body - at) throw Error(format("%s: ends inside token %d", path, token));
            entries_.push_back(bytes.substr(at, length));
            at += length;
        }
        if (at != body) {
            throw Error(
                format("%s: %zu bytes after the last of %d tokens", path, body - at, vocab_size));
        }
    }

    int end_of_text_ = 0;
    std::vector<std::string> entries_;
};

}  // namespace llmc
