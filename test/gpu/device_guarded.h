// Device memory for kernel tests: outputs start as NaN, and a zone on either side shows writes out
// of bounds.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

#include "llmc/cuda_common.h"

namespace llmc::test {

// `count` elements between two guard zones, every byte 0xff at first: NaN in float, double and
// bf16, -1 in int. They start `offset` elements after a 256-byte boundary.
template <class T>
class DeviceGuarded {
  public:
    explicit DeviceGuarded(size_t count, size_t offset = 0)
        : count_(count),
          before_(kZone + offset * sizeof(T)),
          memory_(before_ + count * sizeof(T) + kZone) {
        cuda_check(cudaMemset(memory_.get(), kPattern, memory_.count()));
        poison();
    }
    explicit DeviceGuarded(const std::vector<T>& values, size_t offset = 0)
        : DeviceGuarded(values.size(), offset) {
        upload(values);
    }

    T* get() const { return reinterpret_cast<T*>(memory_.get() + before_); }
    size_t size() const { return count_; }

    void poison() {
        if (count_ > 0) cuda_check(cudaMemset(get(), 0xff, count_ * sizeof(T)));
        cuda_check(cudaDeviceSynchronize());
    }
    void upload(const std::vector<T>& values) {
        ASSERT_EQ(values.size(), count_);
        if (count_ == 0) return;
        cuda_check(cudaMemcpy(get(), values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
    }
    // Waits for the device.
    std::vector<T> download() const {
        std::vector<T> values(count_);
        cuda_check(cudaDeviceSynchronize());
        if (count_ == 0) return values;
        cuda_check(cudaMemcpy(values.data(), get(), count_ * sizeof(T), cudaMemcpyDeviceToHost));
        return values;
    }
    // Fails the test when a byte around the elements has changed.
    void expect_guards_intact(const char* name) const {
        std::vector<unsigned char> bytes(memory_.count());
        cuda_check(cudaDeviceSynchronize());
        cuda_check(cudaMemcpy(bytes.data(), memory_.get(), bytes.size(), cudaMemcpyDeviceToHost));
        size_t changed = 0;
        for (size_t i = 0; i < bytes.size(); ++i) {
            if (i == before_) i += count_ * sizeof(T);
            changed += bytes[i] != kPattern;
        }
        EXPECT_EQ(changed, 0u) << name << ": bytes written outside the buffer";
    }

  private:
    static constexpr size_t kZone = 4096;
    static constexpr unsigned char kPattern = 0xa5;

    size_t count_;
    size_t before_;  // bytes
    DeviceBuffer<unsigned char> memory_;
};

}  // namespace llmc::test
