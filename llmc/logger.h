// main.log: one line an event, in llm.c's format, so that its plotting scripts read it.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "llmc/atomic_file.h"
#include "llmc/error.h"
#include "llmc/input_file.h"

namespace llmc {

// Appends to FOLDER/main.log. Every line goes to the kernel in one write before the call returns.
class Logger {
  public:
    // Logs nothing.
    Logger() = default;

    // Moves an earlier run's main.log out of the way, to main.1.log, main.2.log ...; returns that name,
    // or "" when there was nothing to keep.
    static std::string keep_earlier_log(const std::string& folder) {
        const std::string path = folder + "/main.log";
        struct stat state;
        if (::stat(path.c_str(), &state) != 0 || state.st_size == 0) return "";
        for (int number = 1;; ++number) {
            const std::string kept = format("%s/main.%d.log", folder.c_str(), number);
            if (::access(kept.c_str(), F_OK) == 0) continue;
            if (::rename(path.c_str(), kept.c_str()) != 0) {
                throw Error(path + ": cannot rename to " + kept + ": " +
                            std::system_category().message(errno));
            }
            return kept;
        }
    }

    // On rank 0, with a folder that exists: a new run starts an empty file; a run that resumes at
    // `resume_step` keeps the lines of the steps before it, and drops those that it will write
    // again and a last line that was cut short. Other ranks, and an empty folder name, log nothing.
    // Throws Error naming the file when it cannot be written.
    Logger(const std::string& folder, int rank, std::optional<int> resume_step = std::nullopt) {
        if (rank != 0 || folder.empty()) return;
        path_ = folder + "/main.log";
        if (resume_step) drop_from(*resume_step);
        const int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (resume_step ? 0 : O_TRUNC);
        do {
            fd_ = ::open(path_.c_str(), flags, 0666);
        } while (fd_ < 0 && errno == EINTR);
        if (fd_ < 0) fail("cannot open", errno);
    }
    ~Logger() {
        if (fd_ >= 0) ::close(fd_);
    }
    Logger(Logger&& other) noexcept
        : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}
    Logger& operator=(Logger&& other) noexcept {
        std::swap(path_, other.path_);
        std::swap(fd_, other.fd_);
        return *this;
    }
    Logger(const Logger&) = delete;
    Logger& operator=(const Logger&) = delete;

    // Validation loss.
    void log_validation(int step, double loss) { append(format("s:%d tel:%.4f\n", step, loss)); }
    // HellaSwag accuracy, 0 ... 1.
    void log_eval(int step, double accuracy) { append(format("s:%d eval:%.4f\n", step, accuracy)); }
    // Training loss of a step, with the learning rate and gradient norm it used.
    void log_train(int step, double loss, double learning_rate, double norm) {
        append(format("s:%d trl:%.4f lr:%.6f norm:%.2f\n", step, loss, learning_rate, norm));
    }

  private:
    // The step of a line "s:STEP ...", or nothing.
    static std::optional<long> step_of(std::string_view line) {
        if (line.substr(0, 2) != "s:") return std::nullopt;
        const std::string digits(line.substr(2, line.find(' ') - 2));
        char* end = nullptr;
        const long step = std::strtol(digits.c_str(), &end, 10);
        if (end == digits.c_str() || *end != '\0') return std::nullopt;
        return step;
    }

    void drop_from(int resume_step) {
        if (::access(path_.c_str(), F_OK) != 0) return;
        std::string old_text;
        {
            const InputFile file(path_);
            old_text.resize(file.bytes());
            file.read(old_text.data(), old_text.size(), 0);
        }
        std::string kept;
        for (size_t begin = 0, end; (end = old_text.find('\n', begin)) != std::string::npos;
             begin = end + 1) {
            const std::string_view line(old_text.data() + begin, end - begin);
            const std::optional<long> step = step_of(line);
            if (!step || *step < resume_step) kept.append(line).push_back('\n');
        }
        if (kept == old_text) return;
        AtomicFile file(path_);
        file.write(kept);
        file.commit();
    }

    void append(const std::string& line) {
        if (fd_ < 0) return;
        for (size_t done = 0; done < line.size();) {
            const ssize_t written = ::write(fd_, line.data() + done, line.size() - done);
            if (written < 0 && errno == EINTR) continue;
            if (written <= 0) fail("cannot write", written < 0 ? errno : EIO);
            done += static_cast<size_t>(written);
        }
    }

    [[noreturn]] void fail(const char* what, int number) const {
        throw Error(path_ + ": " + what + ": " + std::system_category().message(number));
    }

    std::string path_;
    int fd_ = -1;
};

}  // namespace llmc
