// One exception type for everything a user can put right: a flag, a file, the machine.
//
// Library code throws; main catches, prints one line and exits with status 1. Programming errors
// and failed system calls go the same way, so that a run never ends in an assert or a stack trace.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace llmc {

constexpr const char* kProgramName = "train_gpt2";  // before every message

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// printf into a std::string of whatever length it takes.
__attribute__((format(printf, 1, 2))) inline std::string format(const char* fmt, ...) {
    va_list args, again;
    va_start(args, fmt);
    va_copy(again, args);
    const int length = std::vsnprintf(nullptr, 0, fmt, args);
    va_end(args);
    std::string text(length > 0 ? static_cast<size_t>(length) : 0, '\0');
    if (length > 0) std::vsnprintf(text.data(), text.size() + 1, fmt, again);
    va_end(again);
    return text;
}

}  // namespace llmc
