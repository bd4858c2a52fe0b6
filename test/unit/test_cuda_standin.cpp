#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "test/unit/stream_gate.h"

namespace {

using llmc::test::StreamGate;

struct Streams {
    Streams() {
        cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking);
        cudaStreamCreateWithPriority(&b, cudaStreamNonBlocking, 0);
        cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    }
    ~Streams() {
        cudaDeviceSynchronize();
        cudaStreamDestroy(a);
        cudaStreamDestroy(b);
        if (event != nullptr) cudaEventDestroy(event);
    }
    cudaStream_t a, b;
    cudaEvent_t event;
};

void copy_int(int* to, const int* from, cudaStream_t stream) {
    cudaMemcpyAsync(to, from, sizeof(int), cudaMemcpyDefault, stream);
}

// How long a test waits to see that something does not happen. What must happen is waited for
// without a limit, so a slow machine can make these tests miss a fault, never report one.
void give_time() {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
}

TEST(CudaStandin, AStreamRunsInOrder) {
    Streams s;
    std::vector<int> values(1000), out(1000, -1);
    int last = -1;
    for (int i = 0; i < 1000; ++i) {
        values[static_cast<size_t>(i)] = i;
        copy_int(&last, &values[static_cast<size_t>(i)], s.a);
        copy_int(&out[static_cast<size_t>(i)], &last, s.a);
    }
    cudaStreamSynchronize(s.a);
    EXPECT_EQ(out, values);
}

TEST(CudaStandin, AMissingWaitIsSeen) {
    Streams s;
    const int fresh = 1;
    int produced = 0, consumed = -1;
    StreamGate gate;
    gate.close(s.a);
    copy_int(&produced, &fresh, s.a);
    cudaEventRecord(s.event, s.a);
    // The wait for s.event is missing here.
    copy_int(&consumed, &produced, s.b);
    cudaStreamSynchronize(s.b);
    EXPECT_EQ(consumed, 0);
    EXPECT_EQ(cudaStreamQuery(s.a), cudaErrorNotReady);
    gate.open();
    cudaStreamSynchronize(s.a);
    EXPECT_EQ(produced, 1);
}

TEST(CudaStandin, TheDefaultStreamWaitsForNoOther) {
    Streams s;
    const int fresh = 1;
    int value = 0;
    StreamGate gate;
    gate.close(s.a);
    copy_int(&value, &fresh, nullptr);
    cudaStreamSynchronize(nullptr);
    EXPECT_EQ(value, 1);
    gate.open();
}

TEST(CudaStandin, AnEventOrdersTwoStreams) {
    Streams s;
    const int fresh = 1;
    int produced = 0, consumed = -1;
    StreamGate gate;
    gate.close(s.a);
    copy_int(&produced, &fresh, s.a);
    cudaEventRecord(s.event, s.a);
    cudaStreamWaitEvent(s.b, s.event);
    copy_int(&consumed, &produced, s.b);
    give_time();
    EXPECT_EQ(consumed, -1);
    EXPECT_EQ(cudaStreamQuery(s.b), cudaErrorNotReady);
    EXPECT_EQ(cudaEventQuery(s.event), cudaErrorNotReady);
    gate.open();
    cudaStreamSynchronize(s.b);
    EXPECT_EQ(consumed, 1);
    EXPECT_EQ(cudaEventQuery(s.event), cudaSuccess);
}

TEST(CudaStandin, WorkQueuedAfterTheRecordIsNotWaitedFor) {
    Streams s;
    StreamGate gate;
    cudaEventRecord(s.event, s.a);
    gate.close(s.a);
    cudaStreamWaitEvent(s.b, s.event);
    EXPECT_EQ(cudaStreamSynchronize(s.b), cudaSuccess);
    EXPECT_EQ(cudaEventSynchronize(s.event), cudaSuccess);
    gate.open();
}

TEST(CudaStandin, AnEventNeverRecordedHoldsNothingUp) {
    Streams s;
    cudaStreamWaitEvent(s.b, s.event);
    EXPECT_EQ(cudaStreamSynchronize(s.b), cudaSuccess);
    EXPECT_EQ(cudaEventQuery(s.event), cudaSuccess);
    EXPECT_EQ(cudaEventSynchronize(s.event), cudaSuccess);
}

TEST(CudaStandin, AWaitIsForTheNewestRecordAtItsIssue) {
    Streams s;
    StreamGate first, second;
    first.close(s.a);
    cudaEventRecord(s.event, s.a);
    cudaStreamWaitEvent(s.b, s.event);  // for the first record
    second.close(s.a);
    cudaEventRecord(s.event, s.a);
    give_time();
    EXPECT_EQ(cudaStreamQuery(s.b), cudaErrorNotReady);
    first.open();
    cudaStreamSynchronize(s.b);  // does not need the second
    EXPECT_EQ(cudaEventQuery(s.event), cudaErrorNotReady);
    cudaStreamWaitEvent(s.b, s.event);  // for the second
    give_time();
    EXPECT_EQ(cudaStreamQuery(s.b), cudaErrorNotReady);
    second.open();
    cudaStreamSynchronize(s.b);
    EXPECT_EQ(cudaEventQuery(s.event), cudaSuccess);
}

// An event recorded again on another stream, which gets there first: the older record, when it is
// reached at last, must not undo the newer, nor the newer stand for the older.
TEST(CudaStandin, RecordsOnTwoStreamsAreKeptApart) {
    Streams s;
    cudaStream_t c;
    cudaStreamCreate(&c);
    {
        StreamGate gate;
        gate.close(s.a);
        cudaEventRecord(s.event, s.a);
        cudaStreamWaitEvent(c, s.event);  // for the record on a
        cudaEventRecord(s.event, s.b);
        cudaStreamSynchronize(s.b);
        EXPECT_EQ(cudaEventQuery(s.event), cudaSuccess);
        give_time();
        EXPECT_EQ(cudaStreamQuery(c), cudaErrorNotReady);
        gate.open();
        cudaStreamSynchronize(s.a);
        EXPECT_EQ(cudaEventQuery(s.event), cudaSuccess);
        cudaStreamSynchronize(c);
    }
    cudaStreamDestroy(c);
}

TEST(CudaStandin, AnEventMayBeDestroyedWhileStreamsWaitForIt) {
    Streams s;
    const int fresh = 1;
    int produced = 0, consumed = -1;
    StreamGate gate;
    gate.close(s.a);
    copy_int(&produced, &fresh, s.a);
    cudaEventRecord(s.event, s.a);
    cudaStreamWaitEvent(s.b, s.event);
    copy_int(&consumed, &produced, s.b);
    cudaEventDestroy(s.event);
    s.event = nullptr;
    give_time();
    EXPECT_EQ(consumed, -1);
    gate.open();
    cudaStreamSynchronize(s.b);
    EXPECT_EQ(consumed, 1);
}

TEST(CudaStandin, DeviceSynchronizeWaitsForEveryStream) {
    Streams s;
    for (const cudaStream_t held : {s.a, s.b, cudaStream_t{nullptr}}) {
        const int fresh = 1;
        int value = 0;
        StreamGate gate;
        gate.close(held);
        copy_int(&value, &fresh, held);
        std::atomic<bool> returned{false};
        std::thread waiter([&] {
            cudaDeviceSynchronize();
            returned = true;
        });
        give_time();
        EXPECT_FALSE(returned);
        gate.open();
        waiter.join();
        EXPECT_EQ(value, 1);
    }
}

TEST(CudaStandin, DestroyingAStreamFinishesItsWork) {
    const int fresh = 1;
    int value = 0;
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    for (int i = 0; i < 100; ++i) copy_int(&value, &fresh, stream);
    cudaStreamDestroy(stream);
    EXPECT_EQ(value, 1);
}

TEST(CudaStandin, EventsMeasureTheTimeBetweenThem) {
    Streams s;
    cudaEvent_t start, end;
    cudaEventCreate(&start);
    cudaEventCreate(&end);
    StreamGate gate;
    cudaEventRecord(start, s.a);
    cudaEventSynchronize(start);
    gate.close(s.a);
    cudaEventRecord(end, s.a);
    float milliseconds = -1.0f;
    EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, end), cudaErrorNotReady);
    give_time();
    gate.open();
    cudaEventSynchronize(end);
    EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, end), cudaSuccess);
    EXPECT_GE(milliseconds, 20.0f);
    cudaEventDestroy(start);
    cudaEventDestroy(end);
}

TEST(CudaStandin, MemoryIsAlignedAndZeroBytesAreNoError) {
    for (const size_t bytes : {1, 255, 257, 100000}) {
        void* pointer = nullptr;
        ASSERT_EQ(cudaMalloc(&pointer, bytes), cudaSuccess);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(pointer) % 256, 0u);
        EXPECT_EQ(cudaFree(pointer), cudaSuccess);
    }
    void* nothing = &nothing;
    EXPECT_EQ(cudaMalloc(&nothing, 0), cudaSuccess);
    EXPECT_EQ(nothing, nullptr);
    EXPECT_EQ(cudaFree(nullptr), cudaSuccess);
}

TEST(CudaStandin, MoreMemoryThanThereIsIsAnError) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "a sanitizer ends the program instead";
#endif
    void* pointer = nullptr;
    EXPECT_EQ(cudaMalloc(&pointer, size_t{1} << 60), cudaErrorMemoryAllocation);
    EXPECT_STREQ(cudaGetErrorName(cudaErrorMemoryAllocation), "cudaErrorMemoryAllocation");
}

}  // namespace
