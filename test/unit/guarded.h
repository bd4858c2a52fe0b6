// Memory for kernel tests: outputs start as NaN, and a zone on either side shows writes out of
// bounds.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "llmc/precision.h"
#include "llmc/rng.h"

namespace llmc::test {

// `count` elements between two guard zones, 256-byte aligned, every byte 0xff at first: NaN in
// float, double and bf16, -1 in int.
template <class T>
class Guarded {
  public:
    explicit Guarded(size_t count) : count_(count) {
        const size_t bytes = (count * sizeof(T) + 255) / 256 * 256 + 2 * kZone;
        base_ = static_cast<unsigned char*>(std::aligned_alloc(256, bytes));
        bytes_ = bytes;
        std::memset(base_, 0xff, bytes_);
        std::memset(base_, kPattern, kZone);
        std::memset(end(), kPattern, bytes_ - kZone - count_ * sizeof(T));
    }
    ~Guarded() { std::free(base_); }
    Guarded(const Guarded&) = delete;
    Guarded& operator=(const Guarded&) = delete;

    T* data() { return reinterpret_cast<T*>(base_ + kZone); }
    size_t size() const { return count_; }
    T& operator[](size_t i) { return data()[i]; }
    operator T*() { return data(); }

    void poison() { std::memset(base_ + kZone, 0xff, count_ * sizeof(T)); }
    // Fails the test when a byte around the elements has changed.
    void expect_guards_intact(const char* name) {
        size_t changed = 0;
        for (size_t i = 0; i < kZone; ++i) changed += base_[i] != kPattern;
        for (unsigned char* p = end(); p < base_ + bytes_; ++p) changed += *p != kPattern;
        EXPECT_EQ(changed, 0u) << name << ": bytes written outside the buffer";
    }
    // Fails the test when an element is still NaN.
    void expect_written(const char* name) {
        size_t left = 0;
        for (size_t i = 0; i < count_; ++i)
            left += std::isnan(static_cast<double>(load(data()[i])));
        EXPECT_EQ(left, 0u) << name << ": elements not written, or NaN";
    }

  private:
    static constexpr size_t kZone = 4096;
    static constexpr unsigned char kPattern = 0xa5;
    unsigned char* end() { return base_ + kZone + count_ * sizeof(T); }

    size_t count_;
    size_t bytes_;
    unsigned char* base_;
};

// Fills with normal(mean, scale), a function of the stream number and the index.
template <class T>
void fill_normal(T* data, size_t count, uint32_t stream, double scale = 1.0, double mean = 0.0) {
    for (size_t block = 0; block * 4 < count; ++block) {
        const Normal4 normal = random_normal4(42, RandomPurpose::kTest, stream, block);
        for (size_t i = block * 4; i < std::min(count, block * 4 + 4); ++i) {
            data[i] = store<T>(static_cast<accum_t<T>>(mean + scale * normal.lane[i % 4]));
        }
    }
}

// ||a - b|| / ||b||; NaN anywhere gives NaN, which no bound accepts.
template <class T, class U>
double relative_error(const T* a, const U* b, size_t count) {
    double difference = 0.0, size = 0.0;
    for (size_t i = 0; i < count; ++i) {
        const double x = static_cast<double>(load(a[i])), y = static_cast<double>(load(b[i]));
        difference += (x - y) * (x - y);
        size += y * y;
    }
    return size > 0.0 ? std::sqrt(difference / size) : std::sqrt(difference);
}

}  // namespace llmc::test
