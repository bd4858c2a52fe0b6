// The CUDA runtime, real or stand-in, with every call checked where it is made.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

#include "llmc/error.h"

// Stands in front of each launcher's declaration (launchers.h, which says when which holds) and definition:
// an ordinary function of one object where kernels are objects of their own, else inline.
#ifdef LLMC_KERNELS_APART
#define LLMC_LAUNCHER
#else
#define LLMC_LAUNCHER inline
#endif

namespace llmc {

// Whether kernels run on the processor that the host code runs on.
#ifdef LLMC_CPU
constexpr bool kDeviceIsHost = true;
#else
constexpr bool kDeviceIsHost = false;
#endif

// Throws Error naming the call's place when a CUDA call did not succeed.
inline void cuda_check(cudaError_t status, const char* file = __builtin_FILE(),
                       int line = __builtin_LINE()) {
    if (status == cudaSuccess) return;
    throw Error(format("CUDA error %s (%s) at %s:%d", cudaGetErrorName(status),
                       cudaGetErrorString(status), file, line));
}

// What the next two have in common.
inline void copy_and_wait(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                          cudaStream_t stream, const char* file, int line) {
    if (bytes == 0) return;
    cuda_check(cudaMemcpyAsync(to, from, bytes, kind, stream), file, line);
    cuda_check(cudaStreamSynchronize(stream), file, line);
}

// Copies `count` elements between pageable host memory and the device, on `stream`, which is not the
// default stream. Both functions return once the copy is done, and do not wait for other streams. Throw
// Error naming the call's place when a CUDA call fails.
//
// A run calls neither cudaMemcpy nor cudaMemset, which use the default stream (`make check` refuses them). Once
// a process has made some 300 such calls, as the start of d12 used to, every kernel of every graph begins
// later after the one before, until the process ends: on an H200 with CUDA 13.0 and driver 580 by 0.14 us,
// 0.35 ms of the 57 ms that a step of d12 takes at -b 4 (dev/bench/README.md).
template <class T>
void copy_to_device(T* to, const T* from, size_t count, cudaStream_t stream,
                    const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    copy_and_wait(to, from, count * sizeof(T), cudaMemcpyHostToDevice, stream, file, line);
}
template <class T>
void copy_to_host(T* to, const T* from, size_t count, cudaStream_t stream,
                  const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    copy_and_wait(to, from, count * sizeof(T), cudaMemcpyDeviceToHost, stream, file, line);
}

// Owns a stream that does not wait for the default one.
class Stream {
  public:
    Stream() { cuda_check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    ~Stream() { cudaStreamDestroy(stream_); }
    cudaStream_t get() const { return stream_; }

  private:
    cudaStream_t stream_ = nullptr;
};

// Owns `count` elements of device memory, 256-byte aligned. Contents start undefined.
template <class T>
class DeviceBuffer {
  public:
    DeviceBuffer() = default;
    explicit DeviceBuffer(size_t count) : count_(count) {
        if (count == 0) return;
        const cudaError_t status = cudaMalloc(&data_, count * sizeof(T));
        if (status != cudaSuccess) {
            throw Error(format("cannot allocate %.1f MiB of device memory: %s",
                               static_cast<double>(count * sizeof(T)) / (1 << 20),
                               cudaGetErrorString(status)));
        }
    }
    DeviceBuffer(DeviceBuffer&& other) noexcept : data_(other.data_), count_(other.count_) {
        other.data_ = nullptr;
        other.count_ = 0;
    }
    DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
        return *this;
    }
    DeviceBuffer(const DeviceBuffer&) = delete;
    DeviceBuffer& operator=(const DeviceBuffer&) = delete;
    ~DeviceBuffer() {
        if (data_ != nullptr) cudaFree(data_);
    }
    T* get() const { return data_; }
    size_t count() const { return count_; }
    size_t bytes() const { return count_ * sizeof(T); }

  private:
    T* data_ = nullptr;
    size_t count_ = 0;
};

// Owns `count` elements of page-locked host memory, which asynchronous copies need.
template <class T>
class PinnedBuffer {
  public:
    PinnedBuffer() = default;
    explicit PinnedBuffer(size_t count) : count_(count) {
        if (count > 0) cuda_check(cudaMallocHost(&data_, count * sizeof(T)));
    }
    PinnedBuffer(PinnedBuffer&& other) noexcept : data_(other.data_), count_(other.count_) {
        other.data_ = nullptr;
        other.count_ = 0;
    }
    PinnedBuffer& operator=(PinnedBuffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
        return *this;
    }
    PinnedBuffer(const PinnedBuffer&) = delete;
    PinnedBuffer& operator=(const PinnedBuffer&) = delete;
    ~PinnedBuffer() {
        if (data_ != nullptr) cudaFreeHost(data_);
    }
    T* get() const { return data_; }
    size_t count() const { return count_; }
    T& operator[](size_t i) { return data_[i]; }
    const T& operator[](size_t i) const { return data_[i]; }

  private:
    T* data_ = nullptr;
    size_t count_ = 0;
};

}  // namespace llmc
