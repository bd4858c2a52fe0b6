// Folders and small files for the tests of the data modules.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "llmc/error.h"

namespace llmc::test {

// A new folder, removed with all that is in it.
class TemporaryFolder {
  public:
    TemporaryFolder() {
        std::string name = (std::filesystem::temp_directory_path() / "llmc-test-XXXXXX").string();
        if (::mkdtemp(name.data()) == nullptr) throw Error("cannot create " + name);
        path_ = name;
    }
    ~TemporaryFolder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    TemporaryFolder(const TemporaryFolder&) = delete;
    TemporaryFolder& operator=(const TemporaryFolder&) = delete;
    std::string file(const std::string& name) const { return (path_ / name).string(); }
    std::string path() const { return path_.string(); }

  private:
    std::filesystem::path path_;
};

// A header of 256 int32: the numbers given, then zeros.
inline std::string header_bytes(std::vector<int32_t> numbers) {
    numbers.resize(256, 0);
    return {reinterpret_cast<const char*>(numbers.data()), 1024};
}

inline std::string uint16_bytes(const std::vector<uint16_t>& values) {
    return {reinterpret_cast<const char*>(values.data()), 2 * values.size()};
}

inline void write_file(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
    if (!std::filesystem::exists(path)) throw Error("cannot write " + path);
}

inline void write_tokens(const std::string& path, const std::vector<uint16_t>& tokens) {
    write_file(path, header_bytes({20240520, 1, static_cast<int32_t>(tokens.size())}) +
                         uint16_bytes(tokens));
}

// first, first+1, ...
inline std::vector<uint16_t> count_up(size_t first, size_t count) {
    std::vector<uint16_t> tokens(count);
    std::iota(tokens.begin(), tokens.end(), static_cast<uint16_t>(first));
    return tokens;
}

// The text of the Error that `body` throws; fails the test when it throws none.
template <class Body>
std::string error_of(Body&& body) {
    try {
        body();
    } catch (const Error& error) {
        const std::string text = error.what();
        EXPECT_EQ(text.find('\n'), std::string::npos) << "more than one line: " << text;
        return text;
    }
    ADD_FAILURE() << "no Error";
    return "";
}

inline void expect_contains(const std::string& text, const std::vector<std::string>& parts) {
    for (const std::string& part : parts) {
        EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' not in: " << text;
    }
}

}  // namespace llmc::test
