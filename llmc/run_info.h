// run.json: what ran, with which options, libraries and machine, so that a run can be repeated.
#pragma once

#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "llmc/atomic_file.h"
#include "llmc/error.h"
#include "llmc/options.h"

namespace llmc {

namespace detail {

// Bytes of the UTF-8 character that `text` begins with, or 0 when it is not one (Unicode 15,
// table 3-7).
inline size_t utf8_length(std::string_view text) {
    const auto byte = [&](size_t i) -> unsigned {
        return i < text.size() ? static_cast<unsigned char>(text[i]) : 0;
    };
    const auto is_tail = [&](size_t i) { return (byte(i) & 0xc0) == 0x80; };
    const unsigned first = byte(0), second = byte(1);
    if (first < 0x80) return 1;
    if (first < 0xc2 || first > 0xf4 || !is_tail(1)) return 0;
    if (first < 0xe0) return 2;
    if (first < 0xf0) {
        // No long forms of short characters, no surrogates.
        if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f)) return 0;
        return is_tail(2) ? 3 : 0;
    }
    if ((first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f)) return 0;
    return is_tail(2) && is_tail(3) ? 4 : 0;
}

}  // namespace detail

// `text` as a JSON string with its quotes (RFC 8259, section 7). Bytes that are not UTF-8, as file
// names may have them, become U+FFFD.
inline std::string json_string(std::string_view text) {
    std::string json = "\"";
    while (!text.empty()) {
        const size_t length = detail::utf8_length(text);
        const unsigned char c = static_cast<unsigned char>(text[0]);
        if (length == 0) {
            json += "\\ufffd";
        } else if (c == '"' || c == '\\') {
            json += {'\\', text[0]};
        } else if (c == '\n') {
            json += "\\n";
        } else if (c == '\t') {
            json += "\\t";
        } else if (c < 0x20 || c == 0x7f) {
            json += format("\\u%04x", c);
        } else {
            json.append(text.substr(0, length));
        }
        text.remove_prefix(length > 0 ? length : 1);
    }
    return json + '"';
}

using NamedTexts = std::vector<std::pair<std::string, std::string>>;  // name, text

// One start of the program.
struct RunInfo {
    std::vector<std::string> command_line;  // argv, the program's name first
    Options options;                        // as asked for
    Options options_in_use;                 // and as the run takes them
    NamedTexts plan;                        // what runs, as the table says
    int num_processes = 1;
    std::string device;    // the GPU's name, or the CPU's
    NamedTexts libraries;  // with their versions
    std::time_t start_time = std::time(nullptr);
};

namespace detail {

// UTC, ISO 8601.
inline std::string utc_time(std::time_t time) {
    std::tm parts{};
    gmtime_r(&time, &parts);
    char text[64];
    return std::string(text, std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &parts));
}

inline std::string host_name() {
    char name[HOST_NAME_MAX + 1] = {};
    if (::gethostname(name, sizeof(name)) != 0) return "unknown";
    name[HOST_NAME_MAX] = '\0';
    return name;
}

inline std::string compiler_name() {
    std::string name;
#ifdef __CUDACC_VER_MAJOR__
    name = format("nvcc %d.%d with ", __CUDACC_VER_MAJOR__, __CUDACC_VER_MINOR__);
#endif
#ifdef __clang__
    return name + __VERSION__;
#else
    return name + "g++ " + __VERSION__;
#endif
}

// Members of one JSON object: a name and a value that is JSON already.
using JsonMembers = std::vector<std::pair<std::string, std::string>>;

inline std::string json_object(const JsonMembers& members, const std::string& indent) {
    if (members.empty()) return "{}";
    std::string json = "{\n";
    for (size_t i = 0; i < members.size(); ++i) {
        json += indent + "  " + json_string(members[i].first) + ": " + members[i].second;
        json += i + 1 < members.size() ? ",\n" : "\n";
    }
    return json + indent + "}";
}

inline std::string option_json(const Options& options, const Flag& flag) {
    const std::string value = flag_value(options, flag);
    if (is_bool(flag)) return value == "1" ? "true" : "false";
    return is_text(flag) ? json_string(value) : value;
}

inline JsonMembers option_members(const Options& options) {
    JsonMembers members;
    for (const Flag& flag : flag_table()) {
        members.emplace_back(flag.name, option_json(options, flag));
    }
    return members;
}

// The members of `members` that are not in `others`.
inline JsonMembers members_unlike(const JsonMembers& members, const JsonMembers& others) {
    JsonMembers unlike;
    for (const auto& member : members) {
        if (std::find(others.begin(), others.end(), member) == others.end()) {
            unlike.push_back(member);
        }
    }
    return unlike;
}

// As members whose values are text.
inline JsonMembers text_members(const NamedTexts& texts) {
    JsonMembers members;
    for (const auto& [name, text] : texts) members.emplace_back(name, json_string(text));
    return members;
}

inline std::string build_json(const std::string& indent) {
    bool multi_gpu = false, use_mpi = false;
#ifdef MULTI_GPU
    multi_gpu = true;
#endif
#ifdef USE_MPI
    use_mpi = true;
#endif
    const bool wide_gradients = std::is_same_v<gradX, float>;
    return json_object({{"compiler", json_string(compiler_name())},
                        {"precision", json_string(kPrecisionName)},
                        {"gradient_precision", json_string(wide_gradients ? "FP32" : "BF16")},
                        {"multi_gpu", multi_gpu ? "true" : "false"},
                        {"mpi", use_mpi ? "true" : "false"}},
                       indent);
}

}  // namespace detail

// The text of run.json, one JSON object. Options have the names of the flag table; options_in_use has
// those that the run takes otherwise than they were asked for.
inline std::string run_json(const RunInfo& info) {
    using namespace detail;
    std::string command = "[";
    for (size_t i = 0; i < info.command_line.size(); ++i) {
        command += (i > 0 ? ", " : "") + json_string(info.command_line[i]);
    }
    command += "]";
    const JsonMembers asked = option_members(info.options);
    const JsonMembers others = members_unlike(option_members(info.options_in_use), asked);
    return json_object({{"program", json_string(kProgramName)},
                        {"version", json_string(kVersion)},
                        {"commit", json_string(kCommit)},
                        {"command_line", command},
                        {"start_time", json_string(utc_time(info.start_time))},
                        {"host", json_string(host_name())},
                        {"device", json_string(info.device)},
                        {"num_processes", std::to_string(info.num_processes)},
                        {"build", build_json("  ")},
                        {"libraries", json_object(text_members(info.libraries), "  ")},
                        {"options", json_object(asked, "  ")},
                        {"options_in_use", json_object(others, "  ")},
                        {"plan", json_object(text_members(info.plan), "  ")}},
                       "") +
           "\n";
}

// Writes run.json into an existing folder, or run.1.json, run.2.json ... when earlier starts are
// recorded there already; returns the path. For one process of a run. Error as AtomicFile's.
inline std::string write_run_json(const std::string& folder, const RunInfo& info) {
    std::string path = folder + "/run.json";
    struct stat state;
    for (int start = 1; ::lstat(path.c_str(), &state) == 0; ++start) {
        path = format("%s/run.%d.json", folder.c_str(), start);
    }
    AtomicFile file(path);
    file.write(run_json(info));
    file.commit();
    return path;
}

}  // namespace llmc
