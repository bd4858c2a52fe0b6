// A file that appears whole or not at all.
//
// Data goes to `path`.tmp; commit() makes it durable and renames it over `path`. Until then an older
// file of that name stays as it was, also across a crash, a full disk or a power cut. A .tmp file
// left by a killed process is overwritten by the next writer. A program that may meet a file size
// limit ignores SIGXFSZ, else the signal ends it before the Error.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "llmc/error.h"

namespace llmc {

namespace detail {

// Calls write_some(data, size), which is like write(2), until all is written. Returns 0 or errno.
// One call moves less than 2 GiB on Linux, and may move less than it was asked to.
template <class WriteSome>
int write_all(WriteSome&& write_some, const char* data, size_t bytes) {
    constexpr size_t kLargestWrite = size_t{1} << 30;
    while (bytes > 0) {
        const ssize_t written = write_some(data, std::min(bytes, kLargestWrite));
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return errno;
        if (written == 0) return EIO;
        data += written;
        bytes -= static_cast<size_t>(written);
    }
    return 0;
}

}  // namespace detail

class AtomicFile {
  public:
    // Creates `path`.tmp; the folder must exist. Error when that fails, or when another process is
    // writing the same file at this moment.
    explicit AtomicFile(std::string path) : path_(std::move(path)), temporary_(path_ + ".tmp") {
        open_temporary();
    }
    // Removes what was written, unless it was committed.
    ~AtomicFile() { discard(); }
    AtomicFile(const AtomicFile&) = delete;
    AtomicFile& operator=(const AtomicFile&) = delete;

    // Appends any number of bytes; unbuffered, so small pieces are better joined first. After an
    // Error (a full disk) the file is gone and cannot be committed.
    void write(const void* data, size_t bytes) {
        require_open();
        const int number = detail::write_all(
            [this](const char* piece, size_t size) { return ::write(fd_, piece, size); },
            static_cast<const char*>(data), bytes);
        if (number != 0) fail("cannot write", number);
        bytes_written_ += bytes;
    }
    void write(std::string_view text) { write(text.data(), text.size()); }

    // Bytes written so far.
    size_t bytes_written() const { return bytes_written_; }

    // Puts the file in its place: data on the disk, rename, the folder's entry on the disk. An Error
    // before the rename leaves the older file whole.
    void commit() {
        require_open();
        while (::fsync(fd_) != 0) {
            if (errno != EINTR) fail("cannot write", errno);
        }
        if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
            fail("cannot rename " + temporary_ + " to it", errno);
        }
        const int fd = std::exchange(fd_, -1);
        if (::close(fd) != 0 && errno != EINTR) fail("cannot close", errno);
        sync_folder();
    }

    const std::string& path() const { return path_; }

  private:
    // A lock keeps two processes out of one .tmp file. It belongs to the open file, so it also moves
    // with it in a rename: a file that is no longer at its name after locking is another writer's
    // finished one, and must not be touched.
    void open_temporary() {
        for (;;) {
            fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
            if (fd_ < 0 && errno == EINTR) continue;
            if (fd_ < 0) fail("cannot create " + temporary_, errno);
            // File systems without locks are used without them.
            if (::flock(fd_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
                ::close(std::exchange(fd_, -1));
                throw Error(path_ + ": another process is writing it; give each run a folder");
            }
            struct stat opened, named;
            if (::fstat(fd_, &opened) != 0) fail("cannot read the state of " + temporary_, errno);
            if (::stat(temporary_.c_str(), &named) == 0 && opened.st_dev == named.st_dev &&
                opened.st_ino == named.st_ino) {
                break;
            }
            ::close(std::exchange(fd_, -1));
        }
        if (::ftruncate(fd_, 0) != 0) fail("cannot empty " + temporary_, errno);
    }

    void sync_folder() {
        const size_t slash = path_.rfind('/');
        const std::string folder =
            slash == std::string::npos ? "." : path_.substr(0, std::max<size_t>(slash, 1));
        const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        // A folder that one may write in but not read cannot be synced; the file is in place.
        if (fd < 0) return;
        const int status = ::fsync(fd);
        const int number = errno;
        ::close(fd);
        if (status != 0 && number != EINVAL && number != ENOTSUP && number != EINTR) {
            fail("cannot sync its folder", number);
        }
    }

    void discard() {
        if (fd_ < 0) return;
        // Removed before the lock goes, so that the name cannot be another writer's file by then.
        ::unlink(temporary_.c_str());
        ::close(std::exchange(fd_, -1));
    }

    void require_open() const {
        if (fd_ < 0) throw Error(path_ + ": written to after it was closed");
    }

    [[noreturn]] void fail(const std::string& what, int number) {
        discard();
        throw Error(path_ + ": " + what + ": " + std::system_category().message(number));
    }

    std::string path_;
    std::string temporary_;
    int fd_ = -1;
    size_t bytes_written_ = 0;
};

}  // namespace llmc
