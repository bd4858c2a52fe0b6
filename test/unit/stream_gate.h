// Holds a stream up until the test lets it go on.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

namespace llmc::test {

class StreamGate {
  public:
    StreamGate() : state_(std::make_shared<State>()) {}
    ~StreamGate() { open(); }
    StreamGate(const StreamGate&) = delete;
    StreamGate& operator=(const StreamGate&) = delete;

    // Work queued on `stream` after this waits for open(), though no longer than a minute, so that a
    // broken test ends.
    void close(cudaStream_t stream) {
        cudaLaunchHostFunc(stream, wait, new std::shared_ptr<State>(state_));
    }
    void open() {
        std::lock_guard<std::mutex> lock(state_->mutex);
        state_->open = true;
        state_->changed.notify_all();
    }

  private:
    // Outlives the gate until every stream has passed it.
    struct State {
        std::mutex mutex;
        std::condition_variable changed;
        bool open = false;
    };
    static void wait(void* shared) {
        const std::unique_ptr<std::shared_ptr<State>> owner(
            static_cast<std::shared_ptr<State>*>(shared));
        State& state = **owner;
        std::unique_lock<std::mutex> lock(state.mutex);
        state.changed.wait_for(lock, std::chrono::minutes(1), [&] { return state.open; });
        lock.unlock();
    }
    std::shared_ptr<State> state_;
};

}  // namespace llmc::test
