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

// Bytes of `text` from `at` on that are one character in UTF-8, or, where none is, the longest
// beginning of one, or a single byte (Unicode 15, table 3-7, and section 3.9 for what is replaced as
// one).
struct Utf8Piece {
    size_t length;
    bool whole;
};
inline Utf8Piece utf8_piece(const std::string& text, size_t at) {
    const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
    const unsigned char first = byte(at);
    if (first < 0x80) return {1, true};
    if (first < 0xc2 || first > 0xf4) return {1, false};
    const size_t length = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    // The second byte leaves out longer spellings, surrogates and what lies above U+10FFFF.
    unsigned char least = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
    unsigned char most = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
    for (size_t i = 1; i < length; ++i) {
        if (at + i == text.size() || byte(at + i) < least || byte(at + i) > most) return {i, false};
        least = 0x80, most = 0xbf;
    }
    return {length, true};
}

// `text` as UTF-8 that steers no terminal: without control characters (U+0000 ... U+001F other than
// newline and tab, U+007F ... U+009F), and with U+FFFD for bytes that are no character.
inline std::string readable_text(const std::string& text) {
    std::string safe;
    for (size_t i = 0; i < text.size();) {
        const auto [length, whole] = utf8_piece(text, i);
        const unsigned char c = static_cast<unsigned char>(text[i]);
        const bool control = length == 1
                                 ? (c < 0x20 && c != '\n' && c != '\t') || c == 0x7f
                                 : c == 0xc2 && static_cast<unsigned char>(text[i + 1]) < 0xa0;
        if (!whole) {
            safe += "\xef\xbf\xbd";
        } else if (!control) {
            safe.append(text, i, length);
        }
        i += length;
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

    // The text of `count` tokens, made safe by readable_text; a number outside the vocabulary
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
        return readable_text(text);
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
