// Reading binary files: any offset, whole or not at all, with an Error that names the file.
//
// All files of this project start with 256 int32 whose first two are a magic number and a version.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "llmc/error.h"

namespace llmc {

// Reads `bytes` bytes from `offset` on with pread(buffer, bytes, offset), which may return less
// than it was asked for and may be interrupted. Returns what was read, less than `bytes` only at
// the end of the file, or -1 with errno set.
template <class Pread>
ssize_t pread_all(Pread&& pread, void* out, size_t bytes, uint64_t offset) {
    // One call moves less than 2 GiB on Linux.
    constexpr size_t kLargestRead = size_t{1} << 30;
    size_t done = 0;
    while (done < bytes) {
        const ssize_t got =
            pread(static_cast<char*>(out) + done, std::min(bytes - done, kLargestRead),
                  static_cast<off_t>(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -1;
        if (got == 0) break;
        done += static_cast<size_t>(got);
    }
    return static_cast<ssize_t>(done);
}

inline bool is_folder(const std::string& path) {
    struct stat status;
    return ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

// A regular file open for reading. Reads do not move a file position, so threads may share one.
class InputFile {
  public:
    // Error when the file cannot be opened or is not a regular file.
    explicit InputFile(std::string path) : path_(std::move(path)) {
        // A named pipe would otherwise wait here for its writer.
        do {
            fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        } while (fd_ < 0 && errno == EINTR);
        if (fd_ < 0) throw Error(path_ + ": cannot open: " + errno_text());
        struct stat status;
        const bool known = ::fstat(fd_, &status) == 0;
        if (!known || !S_ISREG(status.st_mode)) {
            const std::string reason = known ? "not a regular file" : errno_text();
            ::close(fd_);
            throw Error(path_ + ": cannot read: " + reason);
        }
        bytes_ = static_cast<uint64_t>(status.st_size);
    }
    ~InputFile() { ::close(fd_); }
    InputFile(const InputFile&) = delete;
    InputFile& operator=(const InputFile&) = delete;

    const std::string& path() const { return path_; }
    // Size in bytes when it was opened.
    uint64_t bytes() const { return bytes_; }

    // Reads exactly `bytes` bytes; Error when the file ends before.
    void read(void* out, size_t bytes, uint64_t offset) const {
        const auto pread = [this](void* to, size_t n, off_t at) { return ::pread(fd_, to, n, at); };
        const ssize_t got = pread_all(pread, out, bytes, offset);
        if (got < 0) throw Error(path_ + ": cannot read: " + errno_text());
        if (static_cast<size_t>(got) < bytes) {
            throw Error(
                format("%s: ends at byte %llu, %llu bytes before what is to be read from it",
                       path_.c_str(), static_cast<unsigned long long>(offset + got),
                       static_cast<unsigned long long>(bytes - got)));
        }
    }

  private:
    static std::string errno_text() { return std::system_category().message(errno); }

    std::string path_;
    int fd_ = -1;
    uint64_t bytes_ = 0;
};

constexpr size_t kHeaderInts = 256;
constexpr size_t kHeaderBytes = kHeaderInts * sizeof(int32_t);

// The header's 256 numbers, magic checked. `kind` ("a token file") is for the Error.
inline std::vector<int32_t> read_header(const InputFile& file, const char* kind, int32_t magic) {
    if (file.bytes() == 0) throw Error(format("%s: empty file", file.path().c_str()));
    if (file.bytes() < kHeaderBytes) {
        throw Error(format("%s: not %s: %llu bytes, shorter than the header of %zu",
                           file.path().c_str(), kind, static_cast<unsigned long long>(file.bytes()),
                           kHeaderBytes));
    }
    std::vector<int32_t> header(kHeaderInts);
    file.read(header.data(), kHeaderBytes, 0);
    if (header[0] != magic) {
        throw Error(format("%s: not %s: magic number %d, expected %d", file.path().c_str(), kind,
                           header[0], magic));
    }
    return header;
}

// The same, and the version must be `version`.
inline std::vector<int32_t> read_header(const InputFile& file, const char* kind, int32_t magic,
                                        int32_t version) {
    std::vector<int32_t> header = read_header(file, kind, magic);
    if (header[1] != version) {
        throw Error(format("%s: version %d of %s, expected version %d", file.path().c_str(),
                           header[1], kind, version));
    }
    return header;
}

}  // namespace llmc
