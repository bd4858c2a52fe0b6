// Every device allocation of a run, named before the first one is made: one list gives the table that
// is printed, the answer to "does it fit", and the allocations themselves.
#pragma once

#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "llmc/cuda_common.h"

namespace llmc {

class MemoryPlan {
  public:
    // `*pointer` gets `count` elements of device memory, 256-byte aligned, when allocate() is called.
    // Neighbours with one category and name are shown as one row. A count of 0 leaves it null.
    template <class T>
    void add(const char* category, const char* name, T** pointer, size_t count) {
        entries_.push_back({category, name, count * sizeof(T),
                            [pointer](void* memory) { *pointer = static_cast<T*>(memory); }});
    }

    // Memory that somebody else allocates and that counts all the same: on a CPU, host buffers.
    void reserve(const char* category, const char* name, size_t bytes) {
        entries_.push_back({category, name, bytes, nullptr});
    }

    size_t total_bytes() const {
        size_t total = 0;
        for (const Entry& entry : entries_) total += entry.bytes;
        return total;
    }

    // One row a name with its size, then the sum. Rows of no bytes are left out.
    void print(std::FILE* out) const {
        std::fprintf(out, "| %-27s | %-47s | %12s |\n", "memory", "what", "MiB");
        for (const auto& [category, name, bytes] : rows()) {
            if (bytes == 0) continue;
            std::fprintf(out, "| %-27s | %-47s | %12.2f |\n", category, name, mebibytes(bytes));
        }
        std::fprintf(out, "| %-27s | %-47s | %12.2f |\n", "sum", "", mebibytes(total_bytes()));
    }

    // Allocates everything. With `fill` >= 0 each byte of it is set to that value first, so that a
    // test can show that nothing is read before it is written.
    void allocate(int fill) {
        for (Entry& entry : entries_) {
            if (entry.assign == nullptr) continue;
            DeviceBuffer<unsigned char> buffer(entry.bytes);
            entry.assign(buffer.get());
            buffers_.push_back(std::move(buffer));
        }
        if (fill < 0) return;
        const Stream stream;
        for (const DeviceBuffer<unsigned char>& buffer : buffers_) {
            if (buffer.count() == 0) continue;
            cuda_check(cudaMemsetAsync(buffer.get(), fill, buffer.bytes(), stream.get()));
        }
        cuda_check(cudaStreamSynchronize(stream.get()));
    }

  private:
    struct Entry {
        const char* category;
        const char* name;
        size_t bytes;
        std::function<void(void*)> assign;
    };
    struct Row {
        const char* category;
        const char* name;
        size_t bytes;
    };

    static double mebibytes(size_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

    std::vector<Row> rows() const {
        std::vector<Row> rows;
        for (const Entry& entry : entries_) {
            if (!rows.empty() && rows.back().category == std::string(entry.category) &&
                rows.back().name == std::string(entry.name)) {
                rows.back().bytes += entry.bytes;
            } else {
                rows.push_back({entry.category, entry.name, entry.bytes});
            }
        }
        return rows;
    }

    std::vector<Entry> entries_;
    std::vector<DeviceBuffer<unsigned char>> buffers_;
};

}  // namespace llmc
