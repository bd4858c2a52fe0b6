// A full mesh of Gloo's TCP connections, over which the ranks of llmc/cpu/nccl.h exchange messages.
//
// Gloo's own waits end with a message, an error or a time limit, and a time limit closes every
// connection. A communicator needs waits without a limit that another thread can end, also while a
// message is half way through, where Gloo 0.5 does not tell the waiting side that its peer has died.
// So one thread a peer waits for a message that comes only at an orderly end: it sees every death,
// and ends the waits of all others.
#pragma once

#include <gloo/transport/context.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/cpu/gloo_store.h"
#include "llmc/error.h"
#include "llmc/hash.h"
#include "llmc/net.h"

namespace llmc::standin {

// Gloo's slot of one message: the same number on both sides, and on both sides another one for each
// message in flight. The size is in it: when two ranks disagree about it they wait for each other,
// where Gloo's own thread would end the process.
enum class Slot : uint64_t { kFarewell, kStart, kCollective, kPointToPoint };
inline uint64_t slot_number(Slot kind, uint64_t sequence, uint64_t part, uint64_t bytes) {
    uint64_t h = mix64(static_cast<uint64_t>(kind) + 1);
    for (const uint64_t value : {sequence, part, bytes}) h = mix64(h ^ mix64(value + 1));
    return h;
}

// Gloo writes to sockets whose other side may be gone; this thread then gets an error, not a signal.
// Threads started by this one inherit that.
inline void block_sigpipe() {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

// Gloo's reason without the place in its source that it begins with.
inline std::string gloo_reason(const std::exception& error) {
    const std::string text = error.what();
    const size_t end = text.find("] ");
    return !text.empty() && text[0] == '[' && end != std::string::npos ? text.substr(end + 2)
                                                                       : text;
}

// Connections to all other ranks. Threads: connect() by one, transfers by any, abort() by any.
class Mesh {
  public:
    Mesh(int rank, int size) : rank_(rank), size_(size) {}
    ~Mesh() {
        abort();
        join();
    }
    Mesh(const Mesh&) = delete;
    Mesh& operator=(const Mesh&) = delete;

    int rank() const { return rank_; }
    int size() const { return size_; }

    // Returns when all ranks have called it and are connected. Throws Error where that fails, and
    // Severed after abort().
    void connect(const StoreAddress& where) {
        block_sigpipe();
        StoreClient client(where, rank_, size_, stop_);
        std::vector<char> mine;
        if (size_ > 1) mine = listen(client.local_address());
        const std::vector<std::vector<char>> all = client.exchange(mine);
        for (int peer = 0; peer < size_; ++peer) {
            if (peer != rank_) connect_pair(peer, all[static_cast<size_t>(peer)], mine.size());
        }
        start_watching();
        meet();
    }

    // "" or why the communicator does not work any more; an abort is not a failure.
    std::string failure() {
        std::lock_guard<std::mutex> lock(mutex_);
        return failure_;
    }
    bool works() {
        std::lock_guard<std::mutex> lock(mutex_);
        return failure_.empty() && !cutting_;
    }

    // Records the first failure and cuts the mesh. Returns when no connection is left, so that the
    // memory of messages under way is free. The other ranks get a moment to see the same cause
    // before this rank's closed connections look like one.
    void fail(const std::string& reason) {
        std::unique_lock<std::mutex> lock(mutex_);
        if (leaving_) return;  // nothing is under way
        if (failure_.empty() && !cutting_) {
            failure_ = reason;
            changed_.wait_for(lock, kMomentForOthers, [this] { return cutting_; });
        } else {
            changed_.wait(lock, [this] { return cutting_; });
        }
        lock.unlock();
        cut();
    }

    // Ends every wait of every thread: at once, or at the end of a failure's moment for the others.
    void abort() {
        {
            std::unique_lock<std::mutex> lock(mutex_);
            if (!failure_.empty())
                changed_.wait_for(lock, kMomentForOthers, [this] { return cut_; });
        }
        cut();
    }

    // An orderly end, when no transfer is under way: tells the other ranks, which take the end of
    // these connections for what it is.
    void leave() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (leaving_ || cutting_ || !failure_.empty()) return;
            leaving_ = true;
        }
        std::thread([this] { say_farewell(); }).join();
        release();
    }

  private:
    friend class Transfer;
    using Buffer = std::unique_ptr<gloo::transport::UnboundBuffer>;

    static constexpr std::chrono::milliseconds kMomentForOthers{250};
    static constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365 * 10);

    void check() {
        if (stop_) throw Severed();
    }

    // Opens a port for each peer; returns their addresses, of one length, by rank.
    std::vector<char> listen(const std::string& local_address) {
        gloo::transport::tcp::attr attributes;
        attributes.hostname = local_address;
        device_ = gloo::transport::tcp::CreateDevice(attributes);
        std::lock_guard<std::mutex> lock(mutex_);
        check();
        context_ = device_->createContext(rank_, size_);
        context_->setTimeout(std::chrono::seconds(12));  // Gloo waits five times this to connect
        std::vector<std::vector<char>> addresses(static_cast<size_t>(size_));
        size_t length = 0;
        for (int peer = 0; peer < size_; ++peer) {
            if (peer == rank_) continue;
            std::vector<char>& address = addresses[static_cast<size_t>(peer)];
            address = context_->createPair(peer)->address().bytes();
            length = std::max(length, address.size());
        }
        std::vector<char> all;
        for (std::vector<char>& address : addresses) {
            address.resize(length);
            all.insert(all.end(), address.begin(), address.end());
        }
        return all;
    }

    void connect_pair(int peer, const std::vector<char>& theirs, size_t bytes) {
        check();
        if (theirs.size() != bytes) throw Error(format("rank %d uses another Gloo", peer));
        const size_t length = bytes / static_cast<size_t>(size_);
        const char* address = theirs.data() + length * static_cast<size_t>(rank_);
        try {
            context_->getPair(peer)->connect(std::vector<char>(address, address + length));
        } catch (const std::exception& error) {
            check();
            throw Error(format("no connection to rank %d: ", peer) + gloo_reason(error));
        }
        check();
    }

    void start_watching() {
        std::lock_guard<std::mutex> lock(mutex_);
        check();
        farewells_.resize(static_cast<size_t>(size_));
        for (int peer = 0; peer < size_; ++peer) {
            if (peer == rank_) continue;
            watched_.push_back(context_->createUnboundBuffer(&farewells_[peer], 1));
            gloo::transport::UnboundBuffer* const buffer = watched_.back().get();
            buffer->recv(peer, slot_number(Slot::kFarewell, 0, 0, 1));
            watchers_.emplace_back([this, peer, buffer] { watch(peer, buffer); });
        }
    }

    void watch(int peer, gloo::transport::UnboundBuffer* buffer) {
        try {
            buffer->waitRecv(kForever);  // a farewell, or the end of this mesh
        } catch (const std::exception& error) {
            fail(lost(peer, error));
        }
    }

    static std::string lost(int peer, const std::exception& error) {
        return format("lost rank %d: ", peer) + gloo_reason(error);
    }

    // Returns when all ranks are connected to all.
    void meet();

    void say_farewell() {
        block_sigpipe();
        char bye = 0;
        std::vector<Buffer> messages;
        for (int peer = 0; peer < size_; ++peer) {
            if (peer == rank_) continue;
            try {
                Buffer message = context_->createUnboundBuffer(&bye, 1);
                message->send(peer, slot_number(Slot::kFarewell, 0, 0, 1));
                messages.push_back(std::move(message));
            } catch (const std::exception&) {
                // That rank has left before.
            }
        }
        const net::Deadline limit = net::after(0.5);  // a stopped rank takes nothing
        for (const Buffer& message : messages) {
            try {
                message->waitSend(std::chrono::milliseconds(net::poll_ms(limit)));
            } catch (const std::exception&) {
            }
        }
    }

    // Closes the connections, then ends all waits. Returns when that is done.
    void cut() {
        std::unique_lock<std::mutex> lock(mutex_);
        if (cutting_) {
            changed_.wait(lock, [this] { return cut_; });
            return;
        }
        cutting_ = true;
        stop_ = true;
        changed_.notify_all();
        lock.unlock();
        for (int peer = 0; context_ != nullptr && peer < size_; ++peer) {
            auto& pair = context_->getPair(peer);
            if (pair != nullptr) pair->close();
        }
        lock.lock();
        for (gloo::transport::UnboundBuffer* buffer : in_flight_) {
            buffer->abortWaitRecv();
            buffer->abortWaitSend();
        }
        for (const Buffer& buffer : watched_) buffer->abortWaitRecv();
        cut_ = true;
        changed_.notify_all();
    }

    // Lets the connections go without a reset, so that what is under way arrives.
    void release() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = cutting_ = cut_ = true;
            for (const Buffer& buffer : watched_) buffer->abortWaitRecv();
            changed_.notify_all();
        }
        join();
        watched_.clear();
        context_.reset();
        device_.reset();
    }

    void join() {
        for (std::thread& watcher : watchers_) {
            if (watcher.joinable()) watcher.join();
        }
    }

    void enter(gloo::transport::UnboundBuffer* buffer) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (cutting_) throw Severed();
        in_flight_.insert(buffer);
    }
    void exit(gloo::transport::UnboundBuffer* buffer) {
        std::lock_guard<std::mutex> lock(mutex_);
        in_flight_.erase(buffer);
    }

    const int rank_, size_;
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable changed_;
    std::string failure_;
    bool leaving_ = false;
    bool cutting_ = false;
    bool cut_ = false;
    std::shared_ptr<gloo::transport::Device> device_;
    std::shared_ptr<gloo::transport::Context> context_;
    std::set<gloo::transport::UnboundBuffer*> in_flight_;
    std::vector<char> farewells_;
    std::vector<Buffer> watched_;
    std::vector<std::thread> watchers_;
};

// Messages that are under way together. Post all of them, then finish(). Every function throws
// Severed when a peer is lost or the mesh was aborted; the memory is then free to be reused.
class Transfer {
  public:
    explicit Transfer(Mesh& mesh) : mesh_(mesh) {
        thread_local const bool blocked = (block_sigpipe(), true);
        (void)blocked;
    }
    ~Transfer() {
        for (const Message& message : messages_) mesh_.exit(message.buffer.get());
    }
    Transfer(const Transfer&) = delete;
    Transfer& operator=(const Transfer&) = delete;

    // `slot` as the other side's; no bytes are no message.
    void receive(int peer, void* to, size_t bytes, uint64_t slot) {
        if (bytes > 0) post(peer, to, bytes, slot, false);
    }
    void send(int peer, const void* from, size_t bytes, uint64_t slot) {
        if (bytes > 0) post(peer, const_cast<void*>(from), bytes, slot, true);
    }
    void finish() {
        for (const Message& message : messages_) {
            bool arrived = false;
            guard(message.peer, [&] {
                arrived = message.sends ? message.buffer->waitSend(Mesh::kForever)
                                        : message.buffer->waitRecv(Mesh::kForever);
            });
            if (!arrived) throw Severed();
        }
    }

  private:
    struct Message {
        int peer;
        bool sends;
        Mesh::Buffer buffer;
    };
    template <class Function>
    void guard(int peer, const Function& function) {
        try {
            function();
        } catch (const std::exception& error) {
            mesh_.fail(Mesh::lost(peer, error));
            throw Severed();
        }
    }
    void post(int peer, void* data, size_t bytes, uint64_t slot, bool sends) {
        messages_.push_back({peer, sends, mesh_.context_->createUnboundBuffer(data, bytes)});
        gloo::transport::UnboundBuffer* const posted = messages_.back().buffer.get();
        mesh_.enter(posted);
        guard(peer, [&] { sends ? posted->send(peer, slot) : posted->recv(peer, slot); });
    }
    Mesh& mesh_;
    std::vector<Message> messages_;
};

inline void Mesh::meet() {
    const uint64_t slot = slot_number(Slot::kStart, 0, 0, 1);
    char out = 0;
    std::vector<char> in(static_cast<size_t>(size_));
    Transfer messages(*this);
    for (int peer = 0; peer < size_; ++peer) {
        if (peer != rank_) messages.receive(peer, &in[static_cast<size_t>(peer)], 1, slot);
    }
    for (int peer = 0; peer < size_; ++peer) {
        if (peer != rank_) messages.send(peer, &out, 1, slot);
    }
    messages.finish();
}

}  // namespace llmc::standin
