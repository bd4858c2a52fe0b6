// What the tests of the GPU's launchers share: comparisons with the twins, and bandwidth.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "llmc/cuda_common.h"
#include "llmc/precision.h"
#include "test/gpu/device_guarded.h"
#include "test/unit/guarded.h"
#include "test/unit/twin_checks.h"

namespace llmc::test {

template <class T>
std::vector<T> normal_values(size_t count, uint32_t stream, double scale = 1.0, double mean = 0.0) {
    std::vector<T> values(count);
    fill_normal(values.data(), count, stream, scale, mean);
    return values;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && same_bits(a.data(), b.data(), a.size());
}

template <class T, class U>
double relative_error(const std::vector<T>& a, const std::vector<U>& b) {
    return relative_error(a.data(), b.data(), a.size());
}

// The same numbers in double, for a twin's most exact version.
template <class T>
std::vector<double> widened(const std::vector<T>& values) {
    return widened(values.data(), values.size());
}

// Device memory full of normal values; a million of them over and over, since making them takes the
// host longer than the GPU's whole test.
template <class T>
DeviceBuffer<T> device_values(size_t count, uint32_t stream, double scale = 1.0) {
    DeviceBuffer<T> buffer(count);
    const std::vector<T> values = normal_values<T>(std::min<size_t>(count, 1 << 20), stream, scale);
    size_t filled = values.size();
    cuda_check(cudaMemcpy(buffer.get(), values.data(), filled * sizeof(T), cudaMemcpyHostToDevice));
    while (filled < count) {
        const size_t more = std::min(filled, count - filled);
        cuda_check(cudaMemcpy(buffer.get() + filled, buffer.get(), more * sizeof(T),
                              cudaMemcpyDeviceToDevice));
        filled += more;
    }
    return buffer;
}

template <class T>
std::vector<T> download(const DeviceBuffer<T>& buffer) {
    std::vector<T> values(buffer.count());
    cuda_check(cudaDeviceSynchronize());
    cuda_check(cudaMemcpy(values.data(), buffer.get(), buffer.bytes(), cudaMemcpyDeviceToHost));
    return values;
}

// Times launch(stream, 0), launch(stream, 1), launch(stream, 0), ... and prints the bytes a second that
// the median makes of `bytes`, which is what a launch has to read and write at the least. The two
// should work on memory of their own, so that the cache serves neither; 4.2 TB/s is what a copy moves on
// an H200. The launches are a graph, as in a training step: by itself between two events, any of them
// takes 4 to 6 us more, a plain copy, too.
template <class Launch>
void report_bandwidth(const char* name, double bytes, Launch&& launch) {
    constexpr int kRuns = 9, kLaunches = 10;
    cudaStream_t stream;
    cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaEvent_t start, stop;
    cuda_check(cudaEventCreate(&start));
    cuda_check(cudaEventCreate(&stop));
    cuda_check(cudaDeviceSynchronize());  // what fills the buffers is on another stream
    cudaGraph_t graph;
    cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kLaunches; ++i) launch(stream, i & 1);
    cuda_check(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t launches;
    cuda_check(cudaGraphInstantiate(&launches, graph, 0));
    std::vector<double> times;
    for (int run = -1; run < kRuns; ++run) {
        cuda_check(cudaEventRecord(start, stream));
        cuda_check(cudaGraphLaunch(launches, stream));
        cuda_check(cudaEventRecord(stop, stream));
        cuda_check(cudaEventSynchronize(stop));
        float ms = 0.0f;
        cuda_check(cudaEventElapsedTime(&ms, start, stop));
        if (run >= 0) times.push_back(ms / kLaunches);
    }
    cuda_check(cudaGraphExecDestroy(launches));
    cuda_check(cudaGraphDestroy(graph));
    cuda_check(cudaEventDestroy(start));
    cuda_check(cudaEventDestroy(stop));
    cuda_check(cudaStreamDestroy(stream));
    std::sort(times.begin(), times.end());
    const double median = times[kRuns / 2];
    const double bandwidth = bytes / median / 1e6;
    std::printf("%-40s %8.4f ms %7.0f GB/s %5.1f %% of 4.2 TB/s\n", name, median, bandwidth,
                bandwidth / 42.0);
    std::fflush(stdout);
}

}  // namespace llmc::test
