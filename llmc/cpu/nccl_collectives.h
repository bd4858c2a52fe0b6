// NCCL's result codes, types and operations with its numbers, and the collectives themselves, which
// the thread of a stream runs. Plain algorithms: every rank sends to every other, an owner adds up.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "llmc/cpu/gloo_mesh.h"
#include "llmc/precision.h"

enum ncclResult_t {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
    ncclNumResults = 8,
};

enum ncclRedOp_t {
    ncclSum = 0,
    ncclMax = 2,
    ncclMin = 3,
    ncclAvg = 4,
};

enum ncclDataType_t {
    ncclInt8 = 0,
    ncclChar = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclInt = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat32 = 7,
    ncclFloat = 7,
    ncclFloat64 = 8,
    ncclDouble = 8,
    ncclBfloat16 = 9,
};

namespace llmc::standin {

// Bytes of one element; 0 for a type that is not offered.
inline size_t element_bytes(ncclDataType_t type) {
    switch (type) {
        case ncclInt8:
        case ncclUint8:
            return 1;
        case ncclBfloat16:
            return 2;
        case ncclInt32:
        case ncclUint32:
        case ncclFloat32:
            return 4;
        case ncclInt64:
        case ncclUint64:
        case ncclFloat64:
            return 8;
    }
    return 0;
}

inline bool is_offered(ncclRedOp_t op) {
    return op == ncclSum || op == ncclMax || op == ncclMin || op == ncclAvg;
}

// What elements are added up in: 64 bits for integers, fp32 for bf16.
template <class T>
using wide_t = std::conditional_t<
    std::is_same_v<T, bf16>, float,
    std::conditional_t<std::is_floating_point_v<T>, T,
                       std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>>;

template <class T>
wide_t<T> widen(T value) {
    if constexpr (std::is_same_v<T, bf16>) return to_float(value);
    if constexpr (!std::is_same_v<T, bf16>) return value;
}
// Rounds to nearest even; integers keep their low bits.
template <class T>
T narrow(wide_t<T> value) {
    if constexpr (std::is_same_v<T, bf16>) return from_float<bf16>(value);
    if constexpr (!std::is_same_v<T, bf16>) return static_cast<T>(value);
}

template <class W>
W combine(ncclRedOp_t op, W a, W b) {
    if constexpr (std::is_floating_point_v<W>) {
        if (op == ncclMax) return std::fmax(a, b);
        if (op == ncclMin) return std::fmin(a, b);
        return a + b;
    } else {
        if (op == ncclMax) return std::max(a, b);
        if (op == ncclMin) return std::min(a, b);
        return static_cast<W>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
    }
}

// out[i] = the reduction of inputs[r][i] over r, in that order, rounded once at the end. `out` may
// be one of the inputs.
template <class T>
void reduce(ncclRedOp_t op, T* out, const std::vector<const void*>& inputs, size_t count) {
    using W = wide_t<T>;
    constexpr size_t kBlock = 1024;
    W sums[kBlock];
    for (size_t begin = 0; begin < count; begin += kBlock) {
        const size_t n = std::min(kBlock, count - begin);
        const auto input = [&](size_t r) { return static_cast<const T*>(inputs[r]) + begin; };
        for (size_t i = 0; i < n; ++i) sums[i] = widen(input(0)[i]);
        for (size_t r = 1; r < inputs.size(); ++r) {
            const T* const values = input(r);
            for (size_t i = 0; i < n; ++i) sums[i] = combine(op, sums[i], widen(values[i]));
        }
        const W divisor = op == ncclAvg ? static_cast<W>(inputs.size()) : W{1};
        for (size_t i = 0; i < n; ++i) out[begin + i] = narrow<T>(sums[i] / divisor);
    }
}

inline void reduce(ncclDataType_t type, ncclRedOp_t op, void* out,
                   const std::vector<const void*>& inputs, size_t count) {
    const auto as = [&](auto* typed) { reduce(op, typed, inputs, count); };
    switch (type) {
        case ncclInt8:
            return as(static_cast<int8_t*>(out));
        case ncclUint8:
            return as(static_cast<uint8_t*>(out));
        case ncclInt32:
            return as(static_cast<int32_t*>(out));
        case ncclUint32:
            return as(static_cast<uint32_t*>(out));
        case ncclInt64:
            return as(static_cast<int64_t*>(out));
        case ncclUint64:
            return as(static_cast<uint64_t*>(out));
        case ncclFloat32:
            return as(static_cast<float*>(out));
        case ncclFloat64:
            return as(static_cast<double*>(out));
        case ncclBfloat16:
            return as(static_cast<bf16*>(out));
    }
}

// One call of a collective, a send or a receive.
struct Operation {
    enum Kind { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kSend, kReceive };
    Kind kind;
    const void* send;
    void* receive;
    size_t count;  // as in the call
    ncclDataType_t type;
    ncclRedOp_t op;
    int peer;  // or root
    cudaStream_t stream;
    uint64_t sequence = 0;  // the n-th collective, or the n-th message to or from this peer
};

// The collectives, each run by the stream's thread. `sequence` numbers them, equal on all ranks.
class Collectives {
  public:
    explicit Collectives(Mesh& mesh) : mesh_(mesh), rank_(mesh.rank()), size_(mesh.size()) {}

    // Runs them in order; messages between two ranks all at once. Throws Severed.
    void run(const std::vector<Operation>& operations) {
        Transfer messages(mesh_);
        start_messages(messages, operations);
        for (const Operation& o : operations) {
            if (o.kind == Operation::kAllReduce) all_reduce(o);
            if (o.kind == Operation::kReduceScatter) reduce_scatter(o);
            if (o.kind == Operation::kAllGather) all_gather(o);
            if (o.kind == Operation::kBroadcast) broadcast(o);
        }
        messages.finish();
    }

  private:
    // Reductions go in rounds of this many bytes a rank, which bounds the memory they need.
    static constexpr size_t kRoundBytes = size_t{4} << 20;

    static const char* bytes(const void* p) { return static_cast<const char*>(p); }
    static char* bytes(void* p) { return static_cast<char*>(p); }
    static void copy(void* to, const void* from, size_t bytes) {
        if (to != from && bytes > 0) std::memcpy(to, from, bytes);
    }

    // The other ranks, each rank beginning with another one.
    template <class Function>
    void for_each_peer(const Function& function) {
        for (int distance = 1; distance < size_; ++distance) function((rank_ + distance) % size_);
    }

    void start_messages(Transfer& messages, const std::vector<Operation>& operations) {
        std::vector<const Operation*> own;
        for (const Operation& o : operations) {
            const size_t size = o.count * element_bytes(o.type);
            const uint64_t slot = slot_number(Slot::kPointToPoint, o.sequence, 0, size);
            if (o.kind == Operation::kReceive && o.peer != rank_) {
                messages.receive(o.peer, o.receive, size, slot);
            }
            if (o.kind == Operation::kReceive && o.peer == rank_) own.push_back(&o);
        }
        size_t next = 0;
        for (const Operation& o : operations) {
            const size_t size = o.count * element_bytes(o.type);
            const uint64_t slot = slot_number(Slot::kPointToPoint, o.sequence, 0, size);
            if (o.kind == Operation::kSend && o.peer != rank_) {
                messages.send(o.peer, o.send, size, slot);
            }
            if (o.kind == Operation::kSend && o.peer == rank_) {
                copy(own[next++]->receive, o.send, size);
            }
        }
    }

    // Rank r's part of o.send is elements [bounds[r], bounds[r + 1]): adds up this rank's part of
    // all ranks, in rank order, into `out`, which may be the same part of o.send.
    void reduce_parts(const Operation& o, const std::vector<size_t>& bounds, char* out) {
        const size_t element = element_bytes(o.type);
        const size_t round = kRoundBytes / element;
        const auto part = [&](int rank, size_t begin) {
            const size_t length = bounds[rank + 1] - bounds[rank];
            return begin < length ? std::min(round, length - begin) : 0;
        };
        size_t longest = 0;
        for (int r = 0; r < size_; ++r) longest = std::max(longest, bounds[r + 1] - bounds[r]);
        const size_t stride = part(rank_, 0) * element;
        // Kept by the stream's thread from one call to the next.
        thread_local std::vector<char> staging;
        if (staging.size() < stride * size_) staging.resize(stride * size_);
        uint64_t number = 0;
        for (size_t begin = 0; begin < longest; begin += round, ++number) {
            const auto slot = [&](size_t elements) {
                return slot_number(Slot::kCollective, o.sequence, number, elements * element);
            };
            const size_t mine = part(rank_, begin);
            Transfer messages(mesh_);
            for_each_peer([&](int peer) {
                messages.receive(peer, staging.data() + stride * peer, mine * element, slot(mine));
            });
            for_each_peer([&](int peer) {
                const size_t theirs = part(peer, begin);
                messages.send(peer, bytes(o.send) + (bounds[peer] + begin) * element,
                              theirs * element, slot(theirs));
            });
            messages.finish();
            std::vector<const void*> inputs;
            for (int r = 0; r < size_; ++r) inputs.push_back(staging.data() + stride * r);
            inputs[rank_] = bytes(o.send) + (bounds[rank_] + begin) * element;
            reduce(o.type, o.op, out + begin * element, inputs, mine);
        }
    }

    // Rank r's elements [bounds[r], bounds[r + 1]) of `data` to all ranks.
    void gather_parts(const Operation& o, const std::vector<size_t>& bounds, char* data) {
        const size_t element = element_bytes(o.type);
        constexpr uint64_t kPart = ~uint64_t{0};  // apart from reduce_parts' rounds
        const auto size = [&](int rank) { return (bounds[rank + 1] - bounds[rank]) * element; };
        const auto slot = [&](int rank) {
            return slot_number(Slot::kCollective, o.sequence, kPart, size(rank));
        };
        Transfer messages(mesh_);
        for_each_peer([&](int peer) {
            messages.receive(peer, data + bounds[peer] * element, size(peer), slot(peer));
        });
        for_each_peer([&](int peer) {
            messages.send(peer, data + bounds[rank_] * element, size(rank_), slot(rank_));
        });
        messages.finish();
    }

    std::vector<size_t> even_bounds(size_t count_each) const {
        std::vector<size_t> bounds;
        for (int r = 0; r <= size_; ++r) bounds.push_back(count_each * r);
        return bounds;
    }

    void all_reduce(const Operation& o) {
        if (size_ == 1) return copy(o.receive, o.send, o.count * element_bytes(o.type));
        const size_t each = o.count / size_, rest = o.count % size_;
        std::vector<size_t> bounds;
        for (size_t r = 0; r <= static_cast<size_t>(size_); ++r) {
            bounds.push_back(each * r + std::min(r, rest));
        }
        char* const data = bytes(o.receive);
        reduce_parts(o, bounds, data + bounds[rank_] * element_bytes(o.type));
        gather_parts(o, bounds, data);
    }

    void reduce_scatter(const Operation& o) {
        if (size_ == 1) return copy(o.receive, o.send, o.count * element_bytes(o.type));
        reduce_parts(o, even_bounds(o.count), bytes(o.receive));
    }

    void all_gather(const Operation& o) {
        const size_t size = o.count * element_bytes(o.type);
        copy(bytes(o.receive) + size * rank_, o.send, size);
        gather_parts(o, even_bounds(o.count), bytes(o.receive));
    }

    void broadcast(const Operation& o) {
        const size_t size = o.count * element_bytes(o.type);
        const uint64_t slot = slot_number(Slot::kCollective, o.sequence, 0, size);
        Transfer messages(mesh_);
        if (rank_ != o.peer) {
            messages.receive(o.peer, o.receive, size, slot);
        } else {
            for_each_peer([&](int peer) { messages.send(peer, o.send, size, slot); });
            copy(o.receive, o.send, size);
        }
        messages.finish();
    }

    Mesh& mesh_;
    const int rank_, size_;
};

}  // namespace llmc::standin
