// Threads of the CPU build. Work is cut into blocks whose number and bounds depend on the shapes
// alone; the threads only share out who does which block, so the bits do not depend on them.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/cuda_common.h"

namespace llmc::cpu {

// Cores that this process may use (its affinity mask, which mpirun's binding narrows).
inline int usable_cores() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
    return std::max(1, CPU_COUNT(&set));
}

// A fixed set of threads that all streams share.
class ThreadPool {
  public:
    explicit ThreadPool(int num_threads) {
        for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this] { run(); });
    }
    ~ThreadPool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            closing_ = true;
        }
        work_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    // Calls body(0) ... body(count-1), each once, on the caller and idle threads; returns when all
    // have returned. Callable from several threads at once, but not from inside a body.
    void for_each(size_t count, const std::function<void(size_t)>& body) {
        if (count == 0) return;
        if (threads_.empty() || count == 1) {
            for (size_t i = 0; i < count; ++i) body(i);
            return;
        }
        auto job = std::make_shared<Job>(count, body);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            jobs_.push_back(job);
        }
        work_.notify_all();
        job->help();
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [&] { return job->finished == job->count; });
        jobs_.erase(std::find(jobs_.begin(), jobs_.end(), job));
    }

  private:
    struct Job {
        Job(size_t count, const std::function<void(size_t)>& body) : count(count), body(body) {}
        // Takes blocks until none is left; returns how many this thread did.
        void help() {
            size_t mine = 0;
            for (size_t i = next++; i < count; i = next++) {
                body(i);
                ++mine;
            }
            finished += mine;
        }
        bool open() const { return next < count; }
        const size_t count;
        const std::function<void(size_t)>& body;
        std::atomic<size_t> next{0};
        std::atomic<size_t> finished{0};
    };

    void run() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            std::shared_ptr<Job> job;
            work_.wait(lock, [&] {
                for (const auto& candidate : jobs_) {
                    if (candidate->open()) {
                        job = candidate;
                        return true;
                    }
                }
                return closing_;
            });
            if (job == nullptr) return;
            lock.unlock();
            job->help();
            lock.lock();
            done_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable work_;
    std::condition_variable done_;
    std::deque<std::shared_ptr<Job>> jobs_;
    bool closing_ = false;
    std::vector<std::thread> threads_;
};

inline ThreadPool& thread_pool() {
    static ThreadPool pool(usable_cores());
    return pool;
}

// Calls body(begin, end) over [0, count) in blocks of `block` elements (the last may be shorter).
template <class Body>
void parallel_for(size_t count, size_t block, Body&& body) {
    const size_t blocks = (count + block - 1) / block;
    thread_pool().for_each(blocks,
                           [&](size_t i) { body(i * block, std::min(count, (i + 1) * block)); });
}

// Runs `work` at its place in the stream. Under the real CUDA runtime, where tests call the twins
// on host memory beside the GPU's launchers, it runs at once and the stream is ignored.
template <class Work>
void enqueue(cudaStream_t stream, Work&& work) {
#ifdef LLMC_CPU
    standin::device().resolve(stream)->enqueue(std::forward<Work>(work));
#else
    (void)stream;
    work();
#endif
}

}  // namespace llmc::cpu
