// Token files: 256 int32 (magic 20240520, version 1, number of tokens), then uint16 tokens.
#pragma once

#include <glob.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/input_file.h"
#include "llmc/printable.h"

namespace llmc {

constexpr int32_t kTokenFileMagic = 20240520;
constexpr int32_t kTokenFileVersion = 1;

// Files that match `pattern` (glob(3): * ? [...]), sorted by the bytes of their names whatever the
// locale. A file whose own name is the pattern counts too, brackets and all. `flag` ("-i") is named
// in the Error when there is none, or a folder.
inline std::vector<std::string> expand_pattern(const std::string& pattern,
                                               const std::string& flag) {
    glob_t found{};
    const int status = ::glob(pattern.c_str(), GLOB_NOSORT, nullptr, &found);
    std::vector<std::string> files;
    if (status == 0) files.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    ::globfree(&found);
    if (status == GLOB_NOMATCH && ::access(pattern.c_str(), F_OK) == 0) files.push_back(pattern);
    if (files.empty()) {
        throw Error(
            format("%s %s: no such file; expected a token file or a pattern such as "
                   "'data/train_*.bin'",
                   flag.c_str(), printable(pattern).c_str()));
    }
    std::sort(files.begin(), files.end(), [](const std::string& a, const std::string& b) {
        return std::strcmp(a.c_str(), b.c_str()) < 0;
    });
    const auto folder = std::find_if(files.begin(), files.end(), is_folder);
    if (folder != files.end()) {
        throw Error(format("%s %s: %s is a folder; expected token files", flag.c_str(),
                           printable(pattern).c_str(), printable(*folder).c_str()));
    }
    return files;
}

// Number of tokens in a token file. Error when magic, version or size are not what they should be,
// or when there is no token in it.
inline uint64_t token_count(const InputFile& file) {
    const std::vector<int32_t> header =
        read_header(file, "a token file", kTokenFileMagic, kTokenFileVersion);
    const int64_t count = header[2];
    const uint64_t body = file.bytes() - kHeaderBytes;
    if (count <= 0) {
        throw Error(format("%s: its header says %lld tokens, expected at least 1",
                           file.path().c_str(), static_cast<long long>(count)));
    }
    if (body != static_cast<uint64_t>(count) * sizeof(uint16_t)) {
        throw Error(
            format("%s: its header says %lld tokens of 2 bytes, but %llu bytes follow "
                   "instead of %lld",
                   file.path().c_str(), static_cast<long long>(count),
                   static_cast<unsigned long long>(body), static_cast<long long>(count) * 2));
    }
    return static_cast<uint64_t>(count);
}

// A list of token files, read at any place, with at most `max_open` of them open at once. Threads
// may share one.
class TokenFiles {
  public:
    struct File {
        std::string path;
        uint64_t tokens;
    };

    // Opens and checks every file. Error as token_count.
    explicit TokenFiles(const std::vector<std::string>& paths, size_t max_open = 16)
        : max_open_(std::max<size_t>(max_open, 1)) {
        for (const std::string& path : paths)
            files_.push_back({path, token_count(InputFile(path))});
    }

    size_t size() const { return files_.size(); }
    const std::string& path(size_t file) const { return files_[file].path; }
    uint64_t tokens(size_t file) const { return files_[file].tokens; }
    size_t open_descriptors() const {
        std::lock_guard<std::mutex> lock(mutex_);
        return open_.size();
    }

    // Takes files out of the list; the others move up. Returns those taken out.
    std::vector<File> remove_shorter_than(uint64_t tokens) {
        const auto removed =
            std::stable_partition(files_.begin(), files_.end(),
                                  [tokens](const File& file) { return file.tokens >= tokens; });
        std::vector<File> short_files(removed, files_.end());
        files_.erase(removed, files_.end());
        std::lock_guard<std::mutex> lock(mutex_);
        open_.clear();
        return short_files;
    }

    // Reads tokens first ... first+count-1 of a file. Error when the file has become another one
    // since it was checked.
    void read(size_t file, uint64_t first, size_t count, uint16_t* out) const {
        descriptor(file)->read(out, count * sizeof(uint16_t),
                               kHeaderBytes + first * sizeof(uint16_t));
    }

  private:
    struct Open {
        size_t file;
        std::shared_ptr<InputFile> input;
    };

    // The file, opened if need be in place of the one not used for longest. A reader keeps what it
    // was given even when the cache lets go of it.
    std::shared_ptr<InputFile> descriptor(size_t file) const {
        std::lock_guard<std::mutex> lock(mutex_);
        const auto found = std::find_if(open_.begin(), open_.end(),
                                        [file](const Open& open) { return open.file == file; });
        if (found != open_.end()) {
            std::rotate(found, found + 1, open_.end());
            return open_.back().input;
        }
        if (open_.size() >= max_open_) open_.erase(open_.begin());
        auto input = std::make_shared<InputFile>(files_[file].path);
        if (token_count(*input) != files_[file].tokens) {
            throw Error(files_[file].path + ": changed since the start of the run");
        }
        open_.push_back({file, std::move(input)});
        return open_.back().input;
    }

    std::vector<File> files_;
    size_t max_open_;
    mutable std::mutex mutex_;
    mutable std::vector<Open> open_;  // the one used last at the end
};

}  // namespace llmc
