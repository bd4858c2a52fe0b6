// Stand-in for <nccl.h>, for builds without the CUDA toolkit: collectives between processes (or
// threads) over Gloo, on the streams of the stand-in cuda_runtime.h.
//
// Only what this project calls, with NCCL's names, values and semantics (NCCL 2.28 user guide):
// calls return before their work is done, only the stream orders that work, and all ranks issue the
// same collectives in the same order. A lost rank becomes the communicator's asynchronous error;
// what is queued behind is then skipped, so that the streams go on, and new calls return the error.
// There is no time limit: ncclCommAbort ends every wait.
//
// Environment: NCCL_SOCKET_IFNAME, as in NCCL, chooses the interface by which rank 0 is reached.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/cpu/gloo_mesh.h"
#include "llmc/cpu/gloo_store.h"
#include "llmc/cpu/nccl_collectives.h"
#include "llmc/error.h"

#define NCCL_MAJOR 2
#define NCCL_MINOR 28
#define NCCL_PATCH 9
#define NCCL_VERSION(x, y, z) ((x)*10000 + (y)*100 + (z))
#define NCCL_VERSION_CODE NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH)
#define NCCL_UNIQUE_ID_BYTES 128
#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_UNDEF_PTR nullptr
#define NCCL_CONFIG_INITIALIZER                                                     \
    {                                                                               \
        sizeof(ncclConfig_t), 0xcafebeef, NCCL_VERSION_CODE, NCCL_CONFIG_UNDEF_INT, \
            NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT,    \
            NCCL_CONFIG_UNDEF_PTR, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT     \
    }

struct ncclUniqueId {
    char internal[NCCL_UNIQUE_ID_BYTES];
};

// Of these only `blocking` means anything here; the others are checked and not used.
struct ncclConfig_t {
    size_t size;
    unsigned int magic;
    unsigned int version;
    int blocking;
    int cgaClusterSize;
    int minCTAs;
    int maxCTAs;
    const char* netName;
    int splitShare;
    int trafficClass;
};

struct ncclComm {
    ncclComm(int rank, int size, bool blocks)
        : mesh(rank, size), blocking(blocks), sent(size), received(size) {}
    ~ncclComm() { end_background(); }

    llmc::standin::Mesh mesh;
    const bool blocking;

    // The asynchronous error.
    ncclResult_t result() {
        const bool lost = !mesh.failure().empty();
        std::lock_guard<std::mutex> lock(mutex);
        if (state != ncclSuccess && state != ncclInProgress) return state;
        return lost ? ncclRemoteError : state;
    }
    std::string error() {
        const std::string failure = mesh.failure();
        std::lock_guard<std::mutex> lock(mutex);
        return !start_error.empty() ? start_error : failure;
    }

    // Connects to the other ranks, in a thread of its own.
    void start(const llmc::standin::StoreAddress& where) {
        background = std::thread([this, where] {
            ncclResult_t outcome = ncclSuccess;
            std::string reason;
            try {
                mesh.connect(where);
            } catch (const llmc::standin::Severed&) {
                outcome = ncclRemoteError;
            } catch (const llmc::standin::Refused& error) {
                outcome = ncclInvalidUsage;
                reason = error.what();
            } catch (const std::exception& error) {
                outcome = ncclSystemError;
                reason = llmc::standin::gloo_reason(error);
            }
            if (outcome != ncclSuccess) mesh.abort();
            set_state(outcome, reason);
        });
    }
    ncclResult_t wait_for_state() {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return state != ncclInProgress; });
        return state;
    }

    // Waits until the streams have done all that was issued, then tells the other ranks.
    void finish() {
        std::unique_lock<std::mutex> lock(mutex);
        const auto done = [this] { return queued == 0; };
        while (!changed.wait_for(lock, std::chrono::milliseconds(20), done)) {
            if (!mesh.works()) return;
        }
        lock.unlock();
        mesh.leave();
    }
    void finish_in_background() {
        end_background();
        set_state(ncclInProgress, "");
        background = std::thread([this] {
            finish();
            set_state(ncclSuccess, "");
        });
    }
    // Ends all waits. What is queued on a stream that does not run is skipped when it does.
    void abort() {
        mesh.abort();
        end_background();
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return running == 0; });
    }
    void end_background() {
        if (background.joinable()) background.join();
    }

    // What the thread of a stream does.
    void run(const std::vector<llmc::standin::Operation>& operations) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            ++running;
        }
        try {
            if (mesh.works()) llmc::standin::Collectives(mesh).run(operations);
        } catch (const llmc::standin::Severed&) {
            // The reason is recorded where it was found.
        } catch (const std::exception& error) {
            mesh.fail(error.what());
        }
        std::lock_guard<std::mutex> lock(mutex);
        --running;
        --queued;
        changed.notify_all();
    }

    void set_state(ncclResult_t value, const std::string& reason) {
        std::lock_guard<std::mutex> lock(mutex);
        state = value;
        start_error = reason;
        changed.notify_all();
    }

    std::mutex mutex;
    std::condition_variable changed;
    ncclResult_t state = ncclInProgress;  // of the start, and of ncclCommFinalize
    std::string start_error;
    bool finalized = false;
    size_t queued = 0;   // items issued to streams and not done
    size_t running = 0;  // of them, those that a stream's thread is in
    uint64_t collectives = 0;
    std::vector<uint64_t> sent, received;  // messages, by peer
    std::thread background;
};

using ncclComm_t = ncclComm*;

namespace llmc::standin {

// All communicators and stores of this process. At exit the communicators are aborted, so that no
// stream's thread keeps the process from ending.
class NcclProcess {
  public:
    static NcclProcess& get() {
        static NcclProcess instance;
        return instance;
    }
    ~NcclProcess() {
        for (auto& [handle, comm] : live_) comm->abort();
    }

    // The communicator of a handle; null for a handle that is none (any more).
    std::shared_ptr<ncclComm> find(ncclComm_t handle) {
        std::lock_guard<std::mutex> lock(mutex_);
        const auto it = live_.find(handle);
        return it != live_.end() ? it->second : nullptr;
    }
    void add(const std::shared_ptr<ncclComm>& comm) {
        std::lock_guard<std::mutex> lock(mutex_);
        live_[comm.get()] = comm;
    }
    std::shared_ptr<ncclComm> remove(ncclComm_t handle) {
        std::lock_guard<std::mutex> lock(mutex_);
        const auto it = live_.find(handle);
        if (it == live_.end()) return nullptr;
        std::shared_ptr<ncclComm> comm = it->second;
        live_.erase(it);
        return comm;
    }

    StoreAddress open_store() {
        std::lock_guard<std::mutex> lock(mutex_);
        stores_.remove_if([](const auto& store) { return store->finished(); });
        stores_.push_back(std::make_unique<StoreServer>());
        return stores_.back()->address();
    }

    // Keeps the text for ncclGetLastError and returns `result`.
    ncclResult_t report(ncclResult_t result, const std::string& text) {
        std::lock_guard<std::mutex> lock(mutex_);
        last_error_ = text;
        return result;
    }
    std::string last_error() {
        std::lock_guard<std::mutex> lock(mutex_);
        return last_error_;
    }

  private:
    NcclProcess() { device(); }  // outlives this, since streams may still need a communicator

    std::mutex mutex_;
    std::map<ncclComm_t, std::shared_ptr<ncclComm>> live_;
    std::list<std::unique_ptr<StoreServer>> stores_;
    std::string last_error_;
};

inline ncclResult_t nccl_error(ncclResult_t result, const std::string& text) {
    return NcclProcess::get().report(result, text);
}

// What one thread has called since its ncclGroupStart.
struct NcclGroup {
    using Call = std::pair<std::shared_ptr<ncclComm>, Operation>;

    int depth = 0;
    ncclResult_t result = ncclSuccess;  // the first error of its calls
    std::vector<Call> calls;
    std::vector<std::pair<std::shared_ptr<ncclComm>, ncclComm_t*>> starts;  // that block

    static NcclGroup& current() {
        thread_local NcclGroup group;
        return group;
    }
};

// Makes `later` wait for what is on `earlier` now.
inline void order_streams(Stream* earlier, Stream* later) {
    const auto event = std::make_shared<Event>();
    const uint64_t ticket = event->issue();
    earlier->enqueue([=] { event->complete(ticket); });
    later->enqueue([=] { event->wait(ticket); });
}

// Puts one communicator's part of a group on the stream of its first call, as one item. Other
// streams of the group wait for it and it for them.
inline void launch(const std::shared_ptr<ncclComm>& comm, std::vector<Operation> operations) {
    Stream* const stream = device().resolve(operations.front().stream);
    std::set<Stream*> others;
    {
        std::lock_guard<std::mutex> lock(comm->mutex);
        for (Operation& o : operations) {
            const bool sends = o.kind == Operation::kSend, receives = o.kind == Operation::kReceive;
            o.sequence = sends      ? comm->sent[o.peer]++
                         : receives ? comm->received[o.peer]++
                                    : comm->collectives++;
            others.insert(device().resolve(o.stream));
        }
        ++comm->queued;
    }
    others.erase(stream);
    for (Stream* other : others) order_streams(other, stream);
    stream->enqueue([comm, operations = std::move(operations)] { comm->run(operations); });
    for (Stream* other : others) order_streams(stream, other);
}

// A rank's messages to itself have both ends in one group.
inline bool own_messages_match(const std::vector<Operation>& operations, int rank) {
    std::vector<size_t> ends[2];
    for (const Operation& o : operations) {
        if (o.peer != rank) continue;
        const size_t bytes = o.count * element_bytes(o.type);
        if (o.kind == Operation::kSend) ends[0].push_back(bytes);
        if (o.kind == Operation::kReceive) ends[1].push_back(bytes);
    }
    return ends[0] == ends[1];
}

inline ncclResult_t launch_calls(const std::vector<NcclGroup::Call>& calls) {
    std::vector<std::pair<std::shared_ptr<ncclComm>, std::vector<Operation>>> parts;
    for (const auto& [comm, operation] : calls) {
        auto part = std::find_if(parts.begin(), parts.end(),
                                 [&c = comm](const auto& entry) { return entry.first == c; });
        if (part == parts.end()) part = parts.insert(parts.end(), {comm, {}});
        part->second.push_back(operation);
    }
    for (const auto& [comm, operations] : parts) {
        if (!own_messages_match(operations, comm->mesh.rank())) {
            return nccl_error(ncclInvalidUsage,
                              "a rank's send and receive to and from itself must be in one group "
                              "and of one size");
        }
    }
    for (auto& [comm, operations] : parts) launch(comm, std::move(operations));
    return ncclSuccess;
}

// The end of a blocking start: the communicator, or none and the error.
inline ncclResult_t finish_start(const std::shared_ptr<ncclComm>& comm, ncclComm_t* handle) {
    const ncclResult_t result = comm->wait_for_state();
    if (result == ncclSuccess) return result;
    const std::string reason = comm->error();
    *handle = nullptr;
    NcclProcess::get().remove(comm.get());
    comm->abort();
    return nccl_error(result, reason);
}

// Is the handle that of a communicator which takes calls? Else the error to return.
inline ncclResult_t ready(ncclComm_t handle, std::shared_ptr<ncclComm>* comm) {
    *comm = NcclProcess::get().find(handle);
    if (*comm == nullptr) return nccl_error(ncclInvalidArgument, "not a communicator");
    const ncclResult_t result = (*comm)->result();
    if (result == ncclInProgress) {
        return nccl_error(ncclInvalidArgument,
                          "the communicator has not finished its last call (ncclInProgress)");
    }
    return result == ncclSuccess ? result : nccl_error(result, (*comm)->error());
}

inline ncclResult_t check_call(const Operation& o, ncclComm_t handle,
                               std::shared_ptr<ncclComm>* comm) {
    const ncclResult_t result = ready(handle, comm);
    if (result != ncclSuccess) return result;
    if ((*comm)->finalized) return nccl_error(ncclInvalidUsage, "the communicator is finalized");
    if (element_bytes(o.type) == 0) {
        return nccl_error(ncclInvalidArgument, format("data type %d is not offered", o.type));
    }
    if (!is_offered(o.op)) {
        return nccl_error(ncclInvalidArgument, format("operation %d is not offered", o.op));
    }
    const int size = (*comm)->mesh.size();
    if (o.peer < 0 || o.peer >= size) {
        return nccl_error(ncclInvalidArgument, format("rank %d of %d", o.peer, size));
    }
    const bool sends = o.kind != Operation::kReceive &&
                       (o.kind != Operation::kBroadcast || o.peer == (*comm)->mesh.rank());
    const bool receives = o.kind != Operation::kSend;
    if (o.count > 0 && ((sends && o.send == nullptr) || (receives && o.receive == nullptr))) {
        return nccl_error(ncclInvalidArgument, "a buffer is null");
    }
    return ncclSuccess;
}

// Issues a call, now or with the group that is open.
inline ncclResult_t issue(ncclComm_t handle, const Operation& operation) {
    NcclGroup& group = NcclGroup::current();
    std::shared_ptr<ncclComm> comm;
    const ncclResult_t result = check_call(operation, handle, &comm);
    if (group.depth == 0) {
        return result == ncclSuccess ? launch_calls({{comm, operation}}) : result;
    }
    if (result != ncclSuccess && group.result == ncclSuccess) group.result = result;
    if (result == ncclSuccess) group.calls.emplace_back(comm, operation);
    return result;
}

}  // namespace llmc::standin

// ---- groups ----

inline ncclResult_t ncclGroupStart() {
    ++llmc::standin::NcclGroup::current().depth;
    return ncclSuccess;
}

// The end of the outermost group issues its calls; after an error in one of them it issues none and
// returns that error.
inline ncclResult_t ncclGroupEnd() {
    using llmc::standin::NcclGroup;
    NcclGroup& current = NcclGroup::current();
    if (current.depth == 0) {
        return llmc::standin::nccl_error(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    }
    if (--current.depth > 0) return ncclSuccess;
    const NcclGroup group = std::exchange(current, NcclGroup{});
    ncclResult_t result = group.result;
    for (const auto& [comm, handle] : group.starts) {
        const ncclResult_t started = llmc::standin::finish_start(comm, handle);
        if (result == ncclSuccess) result = started;
    }
    return result == ncclSuccess ? llmc::standin::launch_calls(group.calls) : result;
}

// ---- communicators ----

inline ncclResult_t ncclGetVersion(int* version) {
    if (version == nullptr) {
        return llmc::standin::nccl_error(ncclInvalidArgument, "version is null");
    }
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

// Starts a store in this process. The id serves one communicator.
inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    using namespace llmc::standin;
    static_assert(NCCL_UNIQUE_ID_BYTES == kIdBytes);
    if (id == nullptr) return nccl_error(ncclInvalidArgument, "the id is null");
    try {
        NcclProcess::get().open_store().pack(id->internal);
    } catch (const std::exception& error) {
        return nccl_error(ncclSystemError, error.what());
    }
    return ncclSuccess;
}

// With config->blocking = 0 it returns ncclInProgress while the ranks connect.
inline ncclResult_t ncclCommInitRankConfig(ncclComm_t* handle, int size, ncclUniqueId id, int rank,
                                           ncclConfig_t* config) {
    using namespace llmc::standin;
    if (handle == nullptr) return nccl_error(ncclInvalidArgument, "the communicator is null");
    *handle = nullptr;
    NcclGroup& group = NcclGroup::current();
    const auto refuse = [&](const std::string& reason) {
        if (group.depth > 0 && group.result == ncclSuccess) group.result = ncclInvalidArgument;
        return nccl_error(ncclInvalidArgument, reason);
    };
    StoreAddress address;
    if (size < 1 || rank < 0 || rank >= size) {
        return refuse(llmc::format("rank %d of %d is not possible", rank, size));
    }
    if (!address.unpack(id.internal)) return refuse("the id is not from ncclGetUniqueId");
    const ncclConfig_t standard = NCCL_CONFIG_INITIALIZER;
    const ncclConfig_t chosen = config != nullptr ? *config : standard;
    if (chosen.magic != standard.magic) return refuse("the config is not initialized");
    const auto unset_or = [](int value, int least, int most) {
        return value == NCCL_CONFIG_UNDEF_INT || (value >= least && value <= most);
    };
    if (!unset_or(chosen.blocking, 0, 1)) return refuse("config: blocking must be 0 or 1");
    if (!unset_or(chosen.minCTAs, 1, INT_MAX) || !unset_or(chosen.maxCTAs, 1, INT_MAX) ||
        (chosen.maxCTAs != NCCL_CONFIG_UNDEF_INT && chosen.minCTAs > chosen.maxCTAs)) {
        return refuse("config: minCTAs and maxCTAs must be positive and in order");
    }
    const auto comm = std::make_shared<ncclComm>(rank, size, chosen.blocking != 0);
    NcclProcess::get().add(comm);
    *handle = comm.get();
    comm->start(address);
    if (!comm->blocking) return ncclInProgress;
    if (group.depth == 0) return finish_start(comm, handle);
    group.starts.emplace_back(comm, handle);
    return ncclSuccess;
}

inline ncclResult_t ncclCommInitRank(ncclComm_t* handle, int size, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(handle, size, id, rank, nullptr);
}

// Completes what was issued and tells the other ranks that this one leaves. What remains is
// ncclCommDestroy.
inline ncclResult_t ncclCommFinalize(ncclComm_t handle) {
    std::shared_ptr<ncclComm> comm;
    const ncclResult_t result = llmc::standin::ready(handle, &comm);
    if (result != ncclSuccess) return result;
    if (std::exchange(comm->finalized, true)) {
        return llmc::standin::nccl_error(ncclInvalidArgument, "the communicator is finalized");
    }
    if (!comm->blocking) {
        comm->finish_in_background();
        return ncclInProgress;
    }
    comm->finish();
    return comm->result();
}

// Ends all waits of the communicator within about a second, whatever the other ranks do.
inline ncclResult_t ncclCommAbort(ncclComm_t handle) {
    const auto comm = llmc::standin::NcclProcess::get().remove(handle);
    if (comm == nullptr)
        return llmc::standin::nccl_error(ncclInvalidArgument, "not a communicator");
    comm->abort();
    return ncclSuccess;
}

// Completes what was issued first, unless the communicator has failed.
inline ncclResult_t ncclCommDestroy(ncclComm_t handle) {
    const auto comm = llmc::standin::NcclProcess::get().remove(handle);
    if (comm == nullptr)
        return llmc::standin::nccl_error(ncclInvalidArgument, "not a communicator");
    if (comm->finalized) comm->end_background();
    if (comm->result() == ncclSuccess) comm->finish();
    comm->abort();
    return ncclSuccess;
}

inline ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
    const auto comm = llmc::standin::NcclProcess::get().find(handle);
    if (comm == nullptr || error == nullptr) {
        return llmc::standin::nccl_error(ncclInvalidArgument, "not a communicator, or null");
    }
    *error = comm->result();
    return ncclSuccess;
}

inline ncclResult_t ncclCommCount(ncclComm_t handle, int* count) {
    std::shared_ptr<ncclComm> comm;
    const ncclResult_t result = llmc::standin::ready(handle, &comm);
    if (result != ncclSuccess) return result;
    if (count == nullptr) return llmc::standin::nccl_error(ncclInvalidArgument, "count is null");
    *count = comm->mesh.size();
    return ncclSuccess;
}

inline ncclResult_t ncclCommUserRank(ncclComm_t handle, int* rank) {
    std::shared_ptr<ncclComm> comm;
    const ncclResult_t result = llmc::standin::ready(handle, &comm);
    if (result != ncclSuccess) return result;
    if (rank == nullptr) return llmc::standin::nccl_error(ncclInvalidArgument, "rank is null");
    *rank = comm->mesh.rank();
    return ncclSuccess;
}

inline const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
        case ncclSuccess:
            return "no error";
        case ncclUnhandledCudaError:
            return "CUDA error";
        case ncclSystemError:
            return "system error";
        case ncclInternalError:
            return "internal error";
        case ncclInvalidArgument:
            return "invalid argument";
        case ncclInvalidUsage:
            return "invalid usage";
        case ncclRemoteError:
            return "another rank is lost";
        case ncclInProgress:
            return "in progress";
        case ncclNumResults:
            break;
    }
    return "unknown result code";
}

// The communicator's failure, or, without one or with null, the last error of a call in this
// process. Valid until this thread's next call of it.
inline const char* ncclGetLastError(ncclComm_t handle) {
    thread_local std::string text;
    const auto comm = llmc::standin::NcclProcess::get().find(handle);
    text = comm != nullptr ? comm->error() : "";
    if (text.empty()) text = llmc::standin::NcclProcess::get().last_error();
    return text.c_str();
}

// ---- collectives: `count` as NCCL has it, in elements ----

// receive[i] = the reduction of all ranks' send[i].
inline ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count,
                                  ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                  cudaStream_t stream) {
    using llmc::standin::Operation;
    return llmc::standin::issue(comm,
                                {Operation::kAllReduce, send, receive, count, type, op, 0, stream});
}

// Rank r gets elements [r * count, (r + 1) * count) of the reduction.
inline ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count,
                                      ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                      cudaStream_t stream) {
    using llmc::standin::Operation;
    return llmc::standin::issue(
        comm, {Operation::kReduceScatter, send, receive, count, type, op, 0, stream});
}

// Rank r's `count` elements go to receive[r * count] of all ranks.
inline ncclResult_t ncclAllGather(const void* send, void* receive, size_t count,
                                  ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    using llmc::standin::Operation;
    return llmc::standin::issue(
        comm, {Operation::kAllGather, send, receive, count, type, ncclSum, 0, stream});
}

inline ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count,
                                  ncclDataType_t type, int root, ncclComm_t comm,
                                  cudaStream_t stream) {
    using llmc::standin::Operation;
    return llmc::standin::issue(
        comm, {Operation::kBroadcast, send, receive, count, type, ncclSum, root, stream});
}

inline ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer,
                             ncclComm_t comm, cudaStream_t stream) {
    using llmc::standin::Operation;
    return llmc::standin::issue(
        comm, {Operation::kSend, send, nullptr, count, type, ncclSum, peer, stream});
}

inline ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer,
                             ncclComm_t comm, cudaStream_t stream) {
    using llmc::standin::Operation;
    return llmc::standin::issue(
        comm, {Operation::kReceive, nullptr, receive, count, type, ncclSum, peer, stream});
}
