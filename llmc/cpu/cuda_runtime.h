// Stand-in for <cuda_runtime.h>, for builds without the CUDA toolkit.
//
// Only what this project calls, with the semantics that its correctness rests on: every stream is a
// queue with a thread of its own, nothing but events orders two streams, and "device" memory is
// plain host memory. A wait that train_gpt2.cu forgets is therefore a race here as it is on a GPU.
// The folder of this file is on the include path of CPU builds alone.
#pragma once

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <thread>
#include <utility>

#define LLMC_CPU 1
#define __host__
#define __device__

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorNotReady = 600,
};

enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault,
};

constexpr unsigned int cudaEventDefault = 0;
constexpr unsigned int cudaEventDisableTiming = 2;
constexpr unsigned int cudaStreamDefault = 0;
constexpr unsigned int cudaStreamNonBlocking = 1;
constexpr unsigned int cudaMemAttachGlobal = 1;

namespace llmc::standin {

// A point in one stream's queue. Each record is a ticket, pending until its stream's thread gets
// there; waiting means: until the ticket that was the newest when the wait was issued is no longer
// pending. An event never recorded is complete, as in CUDA. Records on two streams may complete in
// either order.
struct Event {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t recorded = 0;
    std::set<uint64_t> pending;
    std::chrono::steady_clock::time_point time{};  // of the newest record

    uint64_t issue() {
        std::lock_guard<std::mutex> lock(mutex);
        pending.insert(++recorded);
        return recorded;
    }
    uint64_t newest() {
        std::lock_guard<std::mutex> lock(mutex);
        return recorded;
    }
    void complete(uint64_t ticket) {
        std::lock_guard<std::mutex> lock(mutex);
        pending.erase(ticket);
        if (ticket == recorded) time = std::chrono::steady_clock::now();
        changed.notify_all();
    }
    void wait(uint64_t ticket) {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return pending.count(ticket) == 0; });
    }
    bool done(uint64_t ticket) {
        std::lock_guard<std::mutex> lock(mutex);
        return pending.count(ticket) == 0;
    }
};

class Stream {
  public:
    Stream() : worker_([this] { run(); }) {}
    ~Stream() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            closing_ = true;
        }
        changed_.notify_all();
        worker_.join();
    }
    void enqueue(std::function<void()> work) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            queue_.push_back(std::move(work));
        }
        changed_.notify_all();
    }
    void synchronize() {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return queue_.empty() && !busy_; });
    }
    bool idle() {
        std::lock_guard<std::mutex> lock(mutex_);
        return queue_.empty() && !busy_;
    }

  private:
    void run() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            changed_.wait(lock, [&] { return closing_ || !queue_.empty(); });
            if (queue_.empty()) return;
            std::function<void()> work = std::move(queue_.front());
            queue_.pop_front();
            busy_ = true;
            lock.unlock();
            work();
            work = nullptr;
            lock.lock();
            busy_ = false;
            if (queue_.empty()) changed_.notify_all();
        }
    }
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> queue_;
    bool busy_ = false;
    bool closing_ = false;
    std::thread worker_;
};

// All streams that exist, for cudaDeviceSynchronize; and the stream that `0` names.
struct Device {
    std::mutex mutex;
    std::set<Stream*> streams;
    Stream default_stream;

    Device() { streams.insert(&default_stream); }
    Stream* resolve(Stream* stream) { return stream != nullptr ? stream : &default_stream; }
};

inline Device& device() {
    static Device instance;
    return instance;
}

}  // namespace llmc::standin

using cudaStream_t = llmc::standin::Stream*;
// A recorded event outlives its handle until the streams that know it have passed it.
using cudaEvent_t = std::shared_ptr<llmc::standin::Event>*;
using cudaHostFn_t = void (*)(void* user_data);

inline const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess:
            return "cudaSuccess";
        case cudaErrorInvalidValue:
            return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation:
            return "cudaErrorMemoryAllocation";
        case cudaErrorNoDevice:
            return "cudaErrorNoDevice";
        case cudaErrorInvalidDevice:
            return "cudaErrorInvalidDevice";
        case cudaErrorNotReady:
            return "cudaErrorNotReady";
    }
    return "unknown";
}
inline const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess:
            return "no error";
        case cudaErrorInvalidValue:
            return "invalid argument";
        case cudaErrorMemoryAllocation:
            return "out of memory";
        case cudaErrorNoDevice:
            return "no CUDA-capable device is detected";
        case cudaErrorInvalidDevice:
            return "invalid device ordinal";
        case cudaErrorNotReady:
            return "not ready";
    }
    return "unknown";
}
inline cudaError_t cudaGetLastError() {
    return cudaSuccess;
}

// ---- memory: 256-byte aligned, as cudaMalloc's ----

inline cudaError_t cudaMalloc(void** pointer, size_t bytes) {
    constexpr size_t kAlign = 256;
    const size_t rounded = (bytes + kAlign - 1) / kAlign * kAlign;
    *pointer = rounded > 0 ? std::aligned_alloc(kAlign, rounded) : nullptr;
    return *pointer != nullptr || rounded == 0 ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline cudaError_t cudaFree(void* pointer) {
    std::free(pointer);
    return cudaSuccess;
}
inline cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
    return cudaMalloc(pointer, bytes);
}
inline cudaError_t cudaFreeHost(void* pointer) {
    return cudaFree(pointer);
}
inline cudaError_t cudaMallocManaged(void** pointer, size_t bytes,
                                     unsigned int = cudaMemAttachGlobal) {
    return cudaMalloc(pointer, bytes);
}
template <class T>
cudaError_t cudaMalloc(T** pointer, size_t bytes) {
    return cudaMalloc(reinterpret_cast<void**>(pointer), bytes);
}
template <class T>
cudaError_t cudaMallocHost(T** pointer, size_t bytes) {
    return cudaMallocHost(reinterpret_cast<void**>(pointer), bytes);
}
template <class T>
cudaError_t cudaMallocManaged(T** pointer, size_t bytes, unsigned int flags = cudaMemAttachGlobal) {
    return cudaMallocManaged(reinterpret_cast<void**>(pointer), bytes, flags);
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t stream = nullptr) {
    llmc::standin::device().resolve(stream)->enqueue([=] { std::memcpy(to, from, bytes); });
    return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes,
                                   cudaStream_t stream = nullptr) {
    llmc::standin::device().resolve(stream)->enqueue([=] { std::memset(to, value, bytes); });
    return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    llmc::standin::device().default_stream.synchronize();
    std::memcpy(to, from, bytes);
    return cudaSuccess;
}
inline cudaError_t cudaMemset(void* to, int value, size_t bytes) {
    llmc::standin::device().default_stream.synchronize();
    std::memset(to, value, bytes);
    return cudaSuccess;
}

// ---- streams ----

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
    auto& device = llmc::standin::device();
    *stream = new llmc::standin::Stream();
    std::lock_guard<std::mutex> lock(device.mutex);
    device.streams.insert(*stream);
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int flags, int) {
    return cudaStreamCreateWithFlags(stream, flags);
}
inline cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = *greatest = 0;
    return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    auto& device = llmc::standin::device();
    {
        std::lock_guard<std::mutex> lock(device.mutex);
        device.streams.erase(stream);
    }
    delete stream;
    return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    llmc::standin::device().resolve(stream)->synchronize();
    return cudaSuccess;
}
inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return llmc::standin::device().resolve(stream)->idle() ? cudaSuccess : cudaErrorNotReady;
}
inline cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* user_data) {
    llmc::standin::device().resolve(stream)->enqueue([=] { function(user_data); });
    return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() {
    auto& device = llmc::standin::device();
    std::lock_guard<std::mutex> lock(device.mutex);
    for (llmc::standin::Stream* stream : device.streams) stream->synchronize();
    return cudaSuccess;
}

// ---- events ----

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
    *event = new std::shared_ptr<llmc::standin::Event>(std::make_shared<llmc::standin::Event>());
    return cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t* event) {
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr) {
    std::shared_ptr<llmc::standin::Event> shared = *event;
    const uint64_t ticket = shared->issue();
    llmc::standin::device().resolve(stream)->enqueue([=] { shared->complete(ticket); });
    return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int = 0) {
    std::shared_ptr<llmc::standin::Event> shared = *event;
    const uint64_t ticket = shared->newest();
    llmc::standin::device().resolve(stream)->enqueue([=] { shared->wait(ticket); });
    return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    (*event)->wait((*event)->newest());
    return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
    return (*event)->done((*event)->newest()) ? cudaSuccess : cudaErrorNotReady;
}
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    if (cudaEventQuery(start) != cudaSuccess || cudaEventQuery(end) != cudaSuccess) {
        return cudaErrorNotReady;
    }
    *milliseconds = std::chrono::duration<float, std::milli>((*end)->time - (*start)->time).count();
    return cudaSuccess;
}

// ---- device: the host, once ----

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem;
    int multiProcessorCount;
    int major;
    int minor;
};
inline cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
    return device >= 0 ? cudaSuccess : cudaErrorInvalidDevice;
}
inline cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
