// Checkpoints: model_%08d.bin, one state_%08d_%05d.bin a process, and DONE_%08d, written last.
//
// A state file, all little endian: StateHeader (1024 bytes), StepState, then for every layer of
// every tensor, in the model file's order, this file's part of m, of v and, if kept, of the fp32
// master weights; last a 64-bit checksum of all before it. Part p of n elements in a checkpoint of N
// files is [p*n/N, (p+1)*n/N), whatever the ZeRO stage was, so that any number of processes can read
// what any other number wrote.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "llmc/atomic_file.h"
#include "llmc/hash.h"
#include "llmc/input_file.h"
#include "llmc/model_file.h"
#include "llmc/params.h"
#include "llmc/step_state.h"

namespace llmc {

constexpr int32_t kStateMagic = 20261129;
constexpr int32_t kStateVersion = 1;

struct StateHeader {
    int32_t magic;
    int32_t version;
    int32_t num_files;      // N: how many state files make up the checkpoint
    int32_t file_index;     // which of them this is
    int64_t step;           // steps done
    int64_t total_batch;    // -d
    uint64_t seed;          // -rs
    uint64_t data_hash;     // of the training files: names, sizes
    uint64_t weights_hash;  // of the model file's weights
    ModelConfig config;
    int32_t batch;           // -b
    int32_t sequence;        // -t
    int32_t max_width;       // -rw
    int32_t weight_bytes;    // 4 or 2: precision
    int32_t gradient_bytes;  // 4 or 2
    int32_t has_master;      // fp32 master weights follow v
    char options[512];       // other flags that change results: numeric_options_text
    unsigned char reserved[1024 - 104 - 512];
};
static_assert(sizeof(StateHeader) == 1024);
static_assert(sizeof(StepState) % sizeof(float) == 0);

// The arrays of a state file, in their order.
enum class StateArray : int { m = 0, v = 1, master = 2 };

inline std::string model_path(const std::string& folder, int step) {
    return format("%s/model_%08d.bin", folder.c_str(), step);
}
inline std::string state_path(const std::string& folder, int step, int file_index) {
    return format("%s/state_%08d_%05d.bin", folder.c_str(), step, file_index);
}
inline std::string done_path(const std::string& folder, int step) {
    return format("%s/DONE_%08d", folder.c_str(), step);
}

// A part of a layer's elements.
struct ElementRange {
    size_t begin;
    size_t end;
    size_t count() const { return end - begin; }
};
inline ElementRange state_part(size_t elements, size_t part, size_t num_parts) {
    return {elements * part / num_parts, elements * (part + 1) / num_parts};
}

// Puts the names in a folder into *names, as many as can be read. Returns 0 or errno.
inline int read_names(const std::string& folder, std::vector<std::string>* names) {
    DIR* dir = ::opendir(folder.c_str());
    if (dir == nullptr) return errno;
    for (errno = 0; const dirent* entry = ::readdir(dir); errno = 0) {
        names->push_back(entry->d_name);
    }
    const int number = errno;
    ::closedir(dir);
    return number;
}

// Steps of the complete checkpoints in a folder, ascending; none when there is no folder. Error when
// it cannot be read.
inline std::vector<int> complete_checkpoints(const std::string& folder) {
    std::vector<std::string> names;
    const int number = read_names(folder, &names);
    if (number != 0 && number != ENOENT) {
        throw Error(format("-o %s: cannot be read: %s", folder.c_str(), std::strerror(number)));
    }
    std::vector<int> steps;
    for (const std::string& name : names) {
        int step = 0, length = 0;
        if (std::sscanf(name.c_str(), "DONE_%8d%n", &step, &length) == 1 && length == 13 &&
            name.size() == 13) {
            steps.push_back(step);
        }
    }
    std::sort(steps.begin(), steps.end());
    return steps;
}

// Error unless the folder is one that can be written in, or can be made.
inline void check_output_folder(const std::string& folder) {
    struct stat info;
    const int number = ::stat(folder.c_str(), &info) == 0 ? 0 : errno;
    if (number == 0) {
        if (!S_ISDIR(info.st_mode)) throw Error(format("-o %s: not a folder", folder.c_str()));
        if (::access(folder.c_str(), W_OK | X_OK) != 0) {
            throw Error(format("-o %s: no permission to write in it", folder.c_str()));
        }
        return;
    }
    const auto fail = [&](const std::string& why) {
        throw Error(format("-o %s: cannot make the folder: %s", folder.c_str(), why.c_str()));
    };
    if (number != ENOENT) fail(std::strerror(number));
    std::string parent = folder;
    while (parent.size() > 1 && parent.back() == '/') parent.pop_back();
    const size_t slash = parent.rfind('/');
    parent = slash == std::string::npos ? "." : parent.substr(0, std::max<size_t>(slash, 1));
    if (::access(parent.c_str(), F_OK) != 0) fail(parent + " is not there; make it first");
    if (::access(parent.c_str(), W_OK | X_OK) != 0) fail(std::strerror(errno));
}

// Makes the folder if it is not there. Error as check_output_folder's.
inline void make_output_folder(const std::string& folder) {
    if (::mkdir(folder.c_str(), 0777) != 0 && errno != EEXIST) {
        throw Error(
            format("-o %s: cannot make the folder: %s", folder.c_str(), std::strerror(errno)));
    }
    check_output_folder(folder);
}

// Holds a folder for one run: a second run in it gets an Error. The lock is the kernel's and goes with
// the process; file systems without locks do without.
class FolderLock {
  public:
    FolderLock() = default;
    explicit FolderLock(const std::string& folder) {
        fd_ = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd_ < 0 || ::flock(fd_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
        ::close(fd_);
        throw Error(format("-o %s: another run is writing in it; give each run a folder of its own",
                           folder.c_str()));
    }
    ~FolderLock() {
        if (fd_ >= 0) ::close(fd_);
    }
    FolderLock(FolderLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    FolderLock& operator=(FolderLock&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }

  private:
    int fd_ = -1;
};

// Deletes what a killed writer left in a folder that no other run writes in: files of our names that
// end in .tmp.
inline void delete_unfinished_files(const std::string& folder) {
    std::vector<std::string> names;
    read_names(folder, &names);
    for (const std::string& name : names) {
        const bool ours = name.rfind("model_", 0) == 0 || name.rfind("state_", 0) == 0 ||
                          name.rfind("DONE_", 0) == 0 || name.rfind("run.", 0) == 0 ||
                          name.rfind("main.log", 0) == 0;
        const size_t dot = name.rfind('.');
        if (ours && dot != std::string::npos && name.substr(dot) == ".tmp") {
            ::unlink((folder + "/" + name).c_str());
        }
    }
}

// Writes one state file whole or not at all. `array(which, id, layer)` returns host memory with this
// file's part of a layer, valid until the next call.
template <class ArrayData>
void write_state_file(const std::string& path, const StateHeader& header, const StepState& state,
                      ArrayData&& array) {
    AtomicFile file(path);
    uint64_t checksum = 0, words = 0;
    const auto put = [&](const void* data, size_t bytes) {
        file.write(data, bytes);
        checksum += hash_elements(data, sizeof(uint32_t), bytes / sizeof(uint32_t), words);
        words += bytes / sizeof(uint32_t);
    };
    put(&header, sizeof(header));
    put(&state, sizeof(state));
    const ParamLayout layout(header.config);
    layout.for_each_layer([&](const ParamInfo& info, size_t layer) {
        const ElementRange part =
            state_part(layout.layer_elements(info.id), header.file_index, header.num_files);
        for (int which = 0; which < (header.has_master ? 3 : 2); ++which) {
            put(array(static_cast<StateArray>(which), info.id, layer),
                part.count() * sizeof(float));
        }
    });
    file.write(&checksum, sizeof(checksum));
    file.commit();
}

// Marks a checkpoint complete; all its files must be in place.
inline void write_done_file(const std::string& folder, int step) {
    AtomicFile file(done_path(folder, step));
    file.commit();
}

// Deletes one checkpoint: its mark first, so that a half-deleted one never looks complete.
inline void delete_checkpoint(const std::string& folder, int step) {
    ::unlink(done_path(folder, step).c_str());
    const std::string model = format("model_%08d.bin", step);
    const std::string state = format("state_%08d_", step);
    std::vector<std::string> names;
    read_names(folder, &names);
    for (const std::string& name : names) {
        if (name == model || name.compare(0, state.size(), state) == 0) {
            ::unlink((folder + "/" + name).c_str());
        }
    }
}

// Steps of which there are files but no mark, once for each file: a writer was killed, or could not go
// on. `complete` are those with a mark, ascending.
inline std::vector<int> incomplete_checkpoints(const std::string& folder,
                                               const std::vector<int>& complete) {
    std::vector<std::string> names;
    read_names(folder, &names);
    std::vector<int> steps;
    for (const std::string& name : names) {
        int step = 0;
        if ((std::sscanf(name.c_str(), "model_%8d.bin", &step) == 1 ||
             std::sscanf(name.c_str(), "state_%8d_", &step) == 1) &&
            !std::binary_search(complete.begin(), complete.end(), step)) {
            steps.push_back(step);
        }
    }
    return steps;
}

// Deletes all but the newest `keep` checkpoints that are not major ones (steps that `major_every`
// divides; 0: none is major), keep 0 keeps all; and incomplete ones older than the newest.
inline void prune_checkpoints(const std::string& folder, int keep, int major_every) {
    const std::vector<int> complete = complete_checkpoints(folder);
    for (const int step : incomplete_checkpoints(folder, complete)) {
        if (!complete.empty() && step < complete.back()) delete_checkpoint(folder, step);
    }
    if (keep <= 0) return;
    std::vector<int> minor;
    for (int step : complete) {
        if (major_every <= 0 || step % major_every != 0) minor.push_back(step);
    }
    for (size_t i = 0; i + static_cast<size_t>(keep) < minor.size(); ++i) {
        delete_checkpoint(folder, minor[i]);
    }
}

// The state files of one checkpoint, read as if they were one.
class CheckpointState {
  public:
    // Opens all state files of the checkpoint; Error naming the file when one is missing, of another
    // size than its header says, or of another checkpoint.
    CheckpointState(const std::string& folder, int step) {
        files_.emplace_back(state_path(folder, step, 0));
        header_ = read_state_header(files_[0], step, 0);
        for (int i = 1; i < header_.num_files; ++i) {
            files_.emplace_back(state_path(folder, step, i));
            const StateHeader other = read_state_header(files_.back(), step, i);
            if (other.num_files != header_.num_files ||
                other.weights_hash != header_.weights_hash) {
                throw Error(files_.back().path() + ": belongs to another checkpoint than " +
                            files_[0].path());
            }
        }
        layout_ = ParamLayout(header_.config);
        for (size_t i = 0; i < files_.size(); ++i) check_size(i);
        files_[0].read(&state_, sizeof(state_), sizeof(StateHeader));
    }

    const StateHeader& header() const { return header_; }
    const StepState& step_state() const { return state_; }
    const std::string& path() const { return files_[0].path(); }

    // Reads file `index` whole; Error when its checksum is not that of its contents.
    void verify_checksum(int index) const {
        const InputFile& file = files_[static_cast<size_t>(index)];
        uint64_t checksum = 0, stored = 0;
        const uint64_t body = file.bytes() - sizeof(stored);
        std::vector<uint32_t> block(1 << 20);
        for (uint64_t at = 0; at < body;) {
            const size_t bytes = std::min<uint64_t>(body - at, block.size() * sizeof(uint32_t));
            file.read(block.data(), bytes, at);
            checksum += hash_elements(block.data(), sizeof(uint32_t), bytes / sizeof(uint32_t),
                                      at / sizeof(uint32_t));
            at += bytes;
        }
        file.read(&stored, sizeof(stored), body);
        if (checksum != stored) {
            throw Error(
                format("%s: damaged: its checksum is wrong; remove its DONE_%08lld to resume "
                       "from an earlier checkpoint",
                       file.path().c_str(), static_cast<long long>(header_.step)));
        }
    }

    // Elements [range) of one layer of an array, out of whichever files hold them.
    void read(StateArray which, Param id, size_t layer, ElementRange range, float* to) const {
        for (size_t i = 0; i < files_.size(); ++i) {
            const ElementRange part = state_part(layout_.layer_elements(id), i, files_.size());
            const size_t begin = std::max(part.begin, range.begin);
            const size_t end = std::min(part.end, range.end);
            if (begin >= end) continue;
            const uint64_t offset = layer_offset(i, id, layer) +
                                    static_cast<uint64_t>(which) * part.count() * sizeof(float) +
                                    (begin - part.begin) * sizeof(float);
            files_[i].read(to + (begin - range.begin), (end - begin) * sizeof(float), offset);
        }
    }

  private:
    static StateHeader read_state_header(const InputFile& file, int step, int index) {
        const std::vector<int32_t> raw =
            llmc::read_header(file, "a state file", kStateMagic, kStateVersion);
        StateHeader header;
        std::memcpy(static_cast<void*>(&header), raw.data(), sizeof(header));
        check_model_config(header.config, file.path());
        if (header.step != step || header.file_index != index || header.num_files < 1 ||
            header.num_files > 99999) {
            throw Error(format("%s: its header says step %lld, file %d of %d", file.path().c_str(),
                               static_cast<long long>(header.step), header.file_index,
                               header.num_files));
        }
        return header;
    }

    size_t num_arrays() const { return header_.has_master ? 3 : 2; }

    // Where a layer's arrays start in file `index`; past the last tensor: where the checksum is.
    uint64_t layer_offset(size_t index, Param id, size_t wanted) const {
        uint64_t offset = sizeof(StateHeader) + sizeof(StepState);
        for (const ParamInfo& info : param_table()) {
            const uint64_t bytes =
                state_part(layout_.layer_elements(info.id), index, files_.size()).count() *
                num_arrays() * sizeof(float);
            if (info.id == id) return offset + wanted * bytes;
            offset += layout_.layers(info.id) * bytes;
        }
        return offset;
    }

    void check_size(size_t index) const {
        const uint64_t expected =
            layer_offset(index, Param::lnfb, layout_.layers(Param::lnfb)) + sizeof(uint64_t);
        if (files_[index].bytes() != expected) {
            throw Error(format("%s: %llu bytes, but its header describes %llu",
                               files_[index].path().c_str(),
                               static_cast<unsigned long long>(files_[index].bytes()),
                               static_cast<unsigned long long>(expected)));
        }
    }

    std::deque<InputFile> files_;
    StateHeader header_{};
    StepState state_{};
    ParamLayout layout_;
};

}  // namespace llmc
