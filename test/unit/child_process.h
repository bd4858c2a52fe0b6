// Tests that need a process of their own: other environment variables, fewer cores.
//
// A file registers a function with ChildMode; run_again starts the same program once more, which
// calls that function before main, prints what it returns, and ends.
#pragma once

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace llmc::test {

constexpr const char* kModeVariable = "LLMC_TEST_CHILD_MODE";

struct ChildMode {
    ChildMode(const char* name, std::string (*body)()) {
        const char* mode = std::getenv(kModeVariable);
        if (mode == nullptr || std::string(mode) != name) return;
        std::fputs(body().c_str(), stdout);
        std::fflush(stdout);
        _exit(0);
    }
};

struct ChildOptions {
    std::vector<std::string> environment;  // "NAME=value", or "NAME" to remove it
    bool one_core = false;
};

// What the child printed, and behind it "exit status N" or "signal N" where it failed.
inline std::string run_again(const std::string& mode, const ChildOptions& options = {}) {
    std::vector<std::string> variables;
    std::vector<std::string> changes = options.environment;
    changes.push_back(std::string(kModeVariable) + "=" + mode);
    const auto name_of = [](const std::string& s) { return s.substr(0, s.find('=')); };
    for (char** entry = environ; *entry != nullptr; ++entry) {
        bool changed = false;
        for (const std::string& change : changes) changed |= name_of(change) == name_of(*entry);
        if (!changed) variables.push_back(*entry);
    }
    for (const std::string& change : changes) {
        if (change.find('=') != std::string::npos) variables.push_back(change);
    }
    std::vector<char*> envp;
    for (std::string& variable : variables) envp.push_back(variable.data());
    envp.push_back(nullptr);
    char program[] = "/proc/self/exe";
    char* argv[] = {program, nullptr};
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);

    int ends[2];
    if (pipe(ends) != 0) return "no pipe";
    const pid_t child = fork();
    if (child < 0) return "no fork";
    if (child == 0) {
        dup2(ends[1], STDOUT_FILENO);
        close(ends[0]);
        close(ends[1]);
        if (options.one_core && sched_setaffinity(0, sizeof(one), &one) != 0) _exit(126);
        execve(program, argv, envp.data());
        _exit(127);
    }
    close(ends[1]);
    std::string output;
    char buffer[4096];
    for (ssize_t n; (n = read(ends[0], buffer, sizeof(buffer))) > 0;) output.append(buffer, n);
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status)) return output + "signal " + std::to_string(WTERMSIG(status));
    if (WEXITSTATUS(status) == 0) return output;
    return output + "exit status " + std::to_string(WEXITSTATUS(status));
}

// A hash of bytes (FNV-1a, 64 bits), to compare two processes' results bit for bit.
class Fingerprint {
  public:
    void add(const void* data, size_t bytes) {
        const unsigned char* p = static_cast<const unsigned char*>(data);
        for (size_t i = 0; i < bytes; ++i) hash_ = (hash_ ^ p[i]) * 0x100000001b3ull;
    }
    std::string text() const { return std::to_string(hash_); }

  private:
    unsigned long long hash_ = 0xcbf29ce484222325ull;
};

}  // namespace llmc::test
