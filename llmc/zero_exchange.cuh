// The canonical reduction across ranks: every rank's gradients, summed by the tree of reduction.h.
//
// Shard p of a tensor belongs to rank p. Each rank sends shard p of its own sum to rank p, and the
// owner adds what it receives by the tree over neighbours: the same bytes on the wire as a ring's
// reduce-scatter, and bits that no ring, tree or switch of NCCL has a say in. Where every node holds
// the same power of two of consecutive ranks, it goes in two levels, inside the node and then across,
// so that each sum crosses the slow wires once: the lower levels of the tree are then those of a node.
// ZeRO-0 gathers the shards afterwards.
//
// Bound by the wire. A list of tensors goes in rounds of a fixed size: while the pieces of one round
// are added on a stream of their own, the next round's are on their way. What comes after the first
// exchange (the second level, the gathering) is queued behind the next list's first exchange, so that
// the wire does not wait for additions. A message costs a few microseconds however short it is, and
// those to one rank go one after the other: the shards of a list's tensors therefore travel together,
// copied into one place for each rank. An exchange costs some 15 us beside its bytes, so that short
// lists wait for the next one and go with it.
#pragma once

#ifdef MULTI_GPU

#include <algorithm>
#include <array>
#include <cstddef>
#include <deque>
#include <numeric>
#include <utility>
#include <vector>

#include "llmc/launchers.h"
#include "llmc/reduction.h"
#include "llmc/zero_comm.cuh"

namespace llmc {

// One exchange among some ranks, after which each of them holds the sum of its own shards over all.
struct ExchangeStage {
    std::vector<int> ranks;                   // ascending, a power of two of them
    size_t self = 0;                          // this rank's place among them
    std::vector<std::vector<size_t>> shards;  // by place: the shards that become that rank's
    const char* name = "";
};

// Ranks on each node when the two-level exchange may be used, else 0: every node holds the same power
// of two of consecutive ranks, and there is more than one of both.
inline int ranks_per_node(const std::vector<int>& nodes) {
    const size_t n = nodes.size();
    size_t first = 1;
    while (first < n && nodes[first] == nodes[0]) ++first;
    const bool power_of_two = (first & (first - 1)) == 0;
    if (first == 1 || first == n || n % first != 0 || !power_of_two) return 0;
    for (size_t rank = 0; rank < n; ++rank) {
        if (nodes[rank] != nodes[rank / first * first]) return 0;
        for (size_t other = 0; other < rank / first * first; other += first) {
            if (nodes[other] == nodes[rank]) return 0;
        }
    }
    return static_cast<int>(first);
}

// The exchanges, one after the other, by which rank `self` comes to the sum of its shard.
inline std::vector<ExchangeStage> exchange_stages(const std::vector<int>& nodes, int self) {
    const int n = static_cast<int>(nodes.size()), per_node = ranks_per_node(nodes);
    ExchangeStage all;
    all.name = "reduction of gradients";
    if (per_node == 0) {
        all.self = self;
        for (int rank = 0; rank < n; ++rank) {
            all.ranks.push_back(rank);
            all.shards.push_back({static_cast<size_t>(rank)});
        }
        return {all};
    }
    ExchangeStage inside, across;
    inside.name = "reduction of gradients inside the node";
    across.name = "reduction of gradients across nodes";
    inside.self = self % per_node;
    across.self = self / per_node;
    for (int place = 0; place < per_node; ++place) {
        inside.ranks.push_back(self / per_node * per_node + place);
        inside.shards.emplace_back();
        for (int rank = place; rank < n; rank += per_node) inside.shards.back().push_back(rank);
    }
    for (int rank = self % per_node; rank < n; rank += per_node) {
        across.ranks.push_back(rank);
        across.shards.push_back({static_cast<size_t>(rank)});
    }
    return {inside, across};
}

// Gradients that are exchanged together.
struct GradientList {
    std::vector<gradX*> tensors;
    std::vector<size_t> sizes;  // elements of each, which the number of ranks divides

    size_t elements() const { return std::accumulate(sizes.begin(), sizes.end(), size_t{0}); }
    void append(const GradientList& other) {
        tensors.insert(tensors.end(), other.tensors.begin(), other.tensors.end());
        sizes.insert(sizes.end(), other.sizes.begin(), other.sizes.end());
    }
};

struct GradientExchange {
    // 128 MiB of bf16. A round costs some 40 us of the wire on an H200, so that few large ones are best:
    // even the embeddings of 1558M then take one.
    static constexpr size_t kRoundElements = size_t{64} << 20;
    static constexpr size_t kPackRatio = 1;
    static constexpr size_t kListElements = size_t{12} << 20;  // 24 MiB of bf16
    static constexpr size_t kLeastLists = 8;
    static constexpr size_t kAlign = ParamLayout::kAlignElements;

    // A list on its way: `phase` exchanges are queued.
    struct InFlight {
        GradientList list;
        int group;  // number in the step
        size_t phase = 0;
        cudaEvent_t summed = nullptr;  // the newest exchange's sums are there
    };

    // All three are a matter of speed alone and change no bit; set them before plan_exchange_buffers.
    size_t round_elements = kRoundElements;  // that all peers send to a rank in one round, at most
    size_t pack_ratio = kPackRatio;          // tensors of at most 1/pack_ratio of a list's largest
                                             // travel together; 0: none
    size_t list_elements = kListElements;    // lists are put together until they have that many

    std::vector<ExchangeStage> stages;
    GradientList held;               // final, but too short yet for an exchange
    std::deque<InFlight> in_flight;  // newest first
    int next_group = 0;              // of the step
    bool gather = false;             // ZeRO-0: everybody gets every shard

    gradX* received = nullptr;  // two halves, for two rounds
    size_t half_elements = 0;
    gradX* staging = nullptr;  // likewise, of what this rank sends together
    size_t staging_half_elements = 0;
    unsigned next_half = 0;
    cudaStream_t add_stream = nullptr;
    cudaStream_t pack_stream = nullptr;
    cudaEvent_t arrived = nullptr, packed = nullptr;
    std::array<cudaEvent_t, 2> half_free{}, staging_free{};
    std::vector<cudaEvent_t> unused_events;

    GradientExchange() = default;
    GradientExchange(const GradientExchange&) = delete;
    GradientExchange& operator=(const GradientExchange&) = delete;
    ~GradientExchange() {
        if (add_stream == nullptr) return;
        cudaEventDestroy(arrived);
        cudaEventDestroy(packed);
        for (cudaEvent_t event : half_free) cudaEventDestroy(event);
        for (cudaEvent_t event : staging_free) cudaEventDestroy(event);
        for (cudaEvent_t event : unused_events) cudaEventDestroy(event);
        cudaStreamDestroy(add_stream);
        cudaStreamDestroy(pack_stream);
    }

    void open() {
        int least = 0, greatest = 0;
        cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest));
        cuda_check(cudaStreamCreateWithPriority(&add_stream, cudaStreamNonBlocking, greatest));
        cuda_check(cudaStreamCreateWithPriority(&pack_stream, cudaStreamNonBlocking, greatest));
        for (cudaEvent_t* event : {&arrived, &packed, &half_free[0], &half_free[1],
                                   &staging_free[0], &staging_free[1]}) {
            cuda_check(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
        }
        for (size_t i = 0; i < stages.size() + 2; ++i) {
            cudaEvent_t event;
            cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
            unused_events.push_back(event);
        }
    }
};

// Which tensors of a list travel together; none when it would be one alone.
inline std::vector<bool> packed_tensors(const std::vector<size_t>& sizes, size_t ratio) {
    size_t largest = 0;
    for (const size_t size : sizes) largest = std::max(largest, size);
    std::vector<bool> packed;
    for (const size_t size : sizes) packed.push_back(ratio > 0 && size * ratio <= largest);
    if (std::count(packed.begin(), packed.end(), true) < 2) packed.assign(sizes.size(), false);
    return packed;
}

// The lists of tensor sizes that exchange_gradients makes of a step's.
inline std::vector<std::vector<size_t>> merged_lists(const std::vector<std::vector<size_t>>& lists,
                                                     size_t least) {
    std::vector<std::vector<size_t>> merged;
    GradientList held;
    for (const std::vector<size_t>& sizes : lists) {
        held.append({{}, sizes});
        if (held.elements() < least) continue;
        merged.push_back(std::move(held.sizes));
        held = {};
    }
    if (!held.sizes.empty()) merged.push_back(std::move(held.sizes));
    return merged;
}

// Sizes the buffers, and settles which of the step's `lists` of tensor sizes go together: there are
// to be several exchanges, however small the model, so that all but the last have the backward pass to
// hide behind. Half of the buffer for received pieces holds what N-1 ranks send of the largest list,
// but no more than one round; half of that for what is sent together, the largest such part of a list.
inline void plan_exchange_buffers(GradientExchange* exchange,
                                  const std::vector<std::vector<size_t>>& lists, int n) {
    constexpr size_t kAlign = GradientExchange::kAlign;
    size_t total = 0, most = 0, most_packed = 0;
    for (const std::vector<size_t>& sizes : lists) total += GradientList{{}, sizes}.elements();
    exchange->list_elements =
        std::min(exchange->list_elements, total / GradientExchange::kLeastLists);
    for (const std::vector<size_t>& sizes : merged_lists(lists, exchange->list_elements)) {
        const std::vector<bool> is_packed = packed_tensors(sizes, exchange->pack_ratio);
        size_t shard = 0, packed = 0;
        for (size_t i = 0; i < sizes.size(); ++i) {
            const size_t aligned = (sizes[i] / n + kAlign - 1) / kAlign * kAlign;
            shard += aligned;
            if (is_packed[i]) packed += aligned;
        }
        most = std::max(most, shard * (n - 1));
        most_packed = std::max(most_packed, packed * (n - 1));
    }
    // A round holds at least one aligned piece of each rank, however many there are.
    const size_t least = kAlign * static_cast<size_t>(n - 1);
    exchange->half_elements = std::max(least, std::min(most, exchange->round_elements));
    exchange->staging_half_elements = std::min(most_packed, exchange->half_elements);
}

namespace detail {

// Part of a shard that goes in one round.
struct Piece {
    size_t tensor, shard;  // shard: its number among a rank's own
    size_t begin, count;
    size_t at;  // where in the space that a peer's pieces have
};

// The buffers that hold piece `piece` of every rank of the stage, this rank's own among them.
inline std::vector<gradX*> piece_buffers(const ExchangeStage& stage, const GradientList& list,
                                         const Piece& piece, gradX* received, size_t room, int n) {
    std::vector<gradX*> buffers;
    const size_t shard_size = list.sizes[piece.tensor] / n;
    size_t slot = 0;
    for (size_t place = 0; place < stage.ranks.size(); ++place) {
        if (place == stage.self) {
            buffers.push_back(list.tensors[piece.tensor] +
                              stage.shards[place][piece.shard] * shard_size + piece.begin);
        } else {
            buffers.push_back(received + slot++ * room + piece.at);
        }
    }
    return buffers;
}

#ifdef LLMC_TEST_SWITCHES
// Fault::owner_fp32 in place of add_pieces.
inline void add_pieces_in_fp32(const std::vector<std::vector<gradX*>>& buffers,
                               const std::vector<Piece>& pieces, size_t self, cudaStream_t stream) {
    auto* work = new std::function<void()>([=] {
        for (size_t i = 0; i < pieces.size(); ++i) {
            for (size_t k = 0; k < pieces[i].count; ++k) {
                float sum = 0.0f;
                for (const gradX* buffer : buffers[i]) sum += to_float(buffer[k]);
                buffers[i][self][k] = from_float<gradX>(sum);
            }
        }
    });
    cuda_check(cudaLaunchHostFunc(
        stream,
        [](void* pointer) {
            auto* todo = static_cast<std::function<void()>*>(pointer);
            (*todo)();
            delete todo;
        },
        work));
}
#endif

// Adds every rank's buffers of each piece by the tree, level by level; the sum ends up in this rank's.
inline void add_pieces(std::vector<std::vector<gradX*>> buffers, const std::vector<Piece>& pieces,
                       size_t self, cudaStream_t stream) {
#ifdef LLMC_TEST_SWITCHES
    if (planted_fault() == Fault::owner_fp32) {
        return add_pieces_in_fp32(buffers, pieces, self, stream);
    }
    if (planted_fault() == Fault::swapped_children && buffers.front().size() > 2) {
        for (std::vector<gradX*>& each : buffers) std::swap(each[1], each[2]);
        if (self == 1 || self == 2) self = 3 - self;
    }
#endif
    const size_t n = buffers.front().size();
    for (size_t step = 1; step < n; step *= 2) {
        std::vector<TreeRange<gradX>> nodes;
        for (size_t i = 0; i < pieces.size(); ++i) {
            for (size_t left = 0; left < n; left += 2 * step) {
                gradX* a = buffers[i][left];
                gradX* b = buffers[i][left + step];
                // The node that this rank's own part is in stays in its buffer.
                gradX* out = self / (2 * step) == left / (2 * step) ? buffers[i][self] : a;
                nodes.push_back({out, a, b, pieces[i].count});
                buffers[i][left] = out;
            }
        }
        tree_add(nodes.data(), 1, static_cast<int>(nodes.size()), stream);
    }
}

// One exchange between two ranks: `count` elements each way.
struct Message {
    const gradX* send;
    gradX* receive;
    size_t count;
    int peer;
};

// Where a rank's piece for the rank at `place` comes from.
inline const gradX* piece_source(const ExchangeStage& stage, const GradientList& list,
                                 const Piece& piece, size_t place, int n) {
    const size_t shard_size = list.sizes[piece.tensor] / n;
    return list.tensors[piece.tensor] + stage.shards[place][piece.shard] * shard_size + piece.begin;
}

// Copies the first `num_packed` pieces for each peer into the staging buffer's half `half`, where they
// lie as the peer receives them; the NCCL stream waits for that.
inline void pack_pieces(const MultiGpuConfig& config, const ExchangeStage& stage,
                        const GradientList& list, const std::vector<Piece>& pieces,
                        size_t num_packed, unsigned half, size_t room) {
    GradientExchange& exchange = *config.exchange;
    std::vector<CopyRange<gradX>> ranges;
    gradX* to = exchange.staging + half * exchange.staging_half_elements;
    for (size_t place = 0; place < stage.ranks.size(); ++place) {
        if (place == stage.self) continue;
        for (size_t i = 0; i < num_packed; ++i) {
            ranges.push_back({to + pieces[i].at,
                              piece_source(stage, list, pieces[i], place, config.num_processes),
                              pieces[i].count});
        }
        to += room;
    }
    planted_delay("LLMC_DELAY_NCCL_US", exchange.pack_stream);
    cuda_check(cudaStreamWaitEvent(exchange.pack_stream, exchange.staging_free[half], 0));
    copy_list(ranges.data(), static_cast<int>(ranges.size()), exchange.pack_stream);
    cuda_check(cudaEventRecord(exchange.packed, exchange.pack_stream));
    cuda_check(cudaStreamWaitEvent(config.nccl_stream, exchange.packed, 0));
}

// What one round sends and receives: the first `num_packed` pieces in one message for each peer.
inline std::vector<Message> round_messages(const MultiGpuConfig& config, const ExchangeStage& stage,
                                           const GradientList& list,
                                           const std::vector<Piece>& pieces, size_t num_packed,
                                           unsigned half, size_t room, size_t staging_room) {
    const GradientExchange& exchange = *config.exchange;
    const gradX* staging = exchange.staging + half * exchange.staging_half_elements;
    gradX* received = exchange.received + half * exchange.half_elements;
    std::vector<Message> messages;
    for (size_t place = 0; place < stage.ranks.size(); ++place) {
        if (place == stage.self) continue;
        const int peer = stage.ranks[place];
        if (num_packed > 0) {
            const Piece& last = pieces[num_packed - 1];
            messages.push_back({staging, received, last.at + last.count, peer});
        }
        for (size_t i = num_packed; i < pieces.size(); ++i) {
            messages.push_back({piece_source(stage, list, pieces[i], place, config.num_processes),
                                received + pieces[i].at, pieces[i].count, peer});
        }
        staging += staging_room;
        received += room;
    }
    return messages;
}

// Sends and receives one round's pieces, of which the first `num_packed` travel together, and queues
// their sums. `room` and `staging_room`: elements for each peer in either buffer's half.
inline void exchange_round(const MultiGpuConfig& config, const ExchangeStage& stage,
                           const GradientList& list, int group, const std::vector<Piece>& pieces,
                           size_t num_packed, size_t room, size_t staging_room) {
    GradientExchange& exchange = *config.exchange;
    const unsigned half = exchange.next_half++ % 2;
    gradX* received = exchange.received + half * exchange.half_elements;
    if (num_packed > 0) {
        pack_pieces(config, stage, list, pieces, num_packed, half, staging_room);
    }
    cuda_check(cudaStreamWaitEvent(config.nccl_stream, exchange.half_free[half], 0));
    nccl_group(config, stage.name, group, [&] {
        for (const Message& m :
             round_messages(config, stage, list, pieces, num_packed, half, room, staging_room)) {
            nccl_check(config,
                       ncclSend(m.send, m.count, kNcclType<gradX>, m.peer, config.nccl_comm,
                                config.nccl_stream),
                       stage.name);
            nccl_check(config,
                       ncclRecv(m.receive, m.count, kNcclType<gradX>, m.peer, config.nccl_comm,
                                config.nccl_stream),
                       stage.name);
        }
    });
    if (num_packed > 0)
        cuda_check(cudaEventRecord(exchange.staging_free[half], config.nccl_stream));
    std::vector<std::vector<gradX*>> buffers;
    for (const Piece& piece : pieces) {
        buffers.push_back(piece_buffers(stage, list, piece, received, room, config.num_processes));
    }
    cuda_check(cudaEventRecord(exchange.arrived, config.nccl_stream));
    cuda_check(cudaStreamWaitEvent(exchange.add_stream, exchange.arrived, 0));
    planted_delay("LLMC_DELAY_NCCL_US", exchange.add_stream);
    add_pieces(std::move(buffers), pieces, stage.self, exchange.add_stream);
    cuda_check(cudaEventRecord(exchange.half_free[half], exchange.add_stream));
}

// All rounds of one exchange of a list.
inline void exchange_stage(const MultiGpuConfig& config, const ExchangeStage& stage,
                           const GradientList& list, int group) {
    constexpr size_t kAlign = GradientExchange::kAlign;
    const size_t peers = stage.ranks.size() - 1;
    const size_t room = config.exchange->half_elements / peers / kAlign * kAlign;
    const size_t staging_room = config.exchange->staging_half_elements / peers / kAlign * kAlign;
    const std::vector<bool> is_packed = packed_tensors(list.sizes, config.exchange->pack_ratio);
    std::vector<Piece> pieces;
    size_t used = 0, num_packed = 0;
    const auto flush = [&] {
        if (pieces.empty()) return;
        exchange_round(config, stage, list, group, pieces, num_packed, room, staging_room);
        pieces.clear();
        used = num_packed = 0;
    };
    const auto add = [&](size_t tensor, size_t shard) {
        const size_t shard_size = list.sizes[tensor] / config.num_processes;
        for (size_t begin = 0; begin < shard_size;) {
            const size_t count = std::min(shard_size - begin, room - used);
            pieces.push_back({tensor, shard, begin, count, used});
            if (is_packed[tensor]) ++num_packed;
            used = (used + count + kAlign - 1) / kAlign * kAlign;
            begin += count;
            if (used == room) flush();
        }
    };
    for (const bool packed : {true, false}) {
        for (size_t tensor = 0; tensor < list.sizes.size(); ++tensor) {
            if (is_packed[tensor] != packed) continue;
            for (size_t shard = 0; shard < stage.shards[stage.self].size(); ++shard) {
                add(tensor, shard);
            }
        }
    }
    flush();
}

// Gives every rank every shard of a list.
inline void gather_list(const MultiGpuConfig& config, const GradientList& list, int group) {
    const char* name = "gathering of gradients";
    nccl_group(config, name, group, [&] {
        for (size_t i = 0; i < list.sizes.size(); ++i) {
            const size_t shard_size = list.sizes[i] / config.num_processes;
            nccl_check(
                config,
                ncclAllGather(list.tensors[i] + config.process_rank * shard_size, list.tensors[i],
                              shard_size, kNcclType<gradX>, config.nccl_comm, config.nccl_stream),
                name);
        }
    });
}

// Queues what comes next for every list on its way, newest first.
inline void advance_lists(const MultiGpuConfig& config) {
    GradientExchange& exchange = *config.exchange;
    for (GradientExchange::InFlight& each : exchange.in_flight) {
        // What this rank sends now may be a sum that its other stream has still to make.
        if (each.phase > 0) {
            cuda_check(cudaStreamWaitEvent(config.nccl_stream, each.summed, 0));
            cuda_check(cudaStreamWaitEvent(exchange.pack_stream, each.summed, 0));
        }
        if (each.phase < exchange.stages.size()) {
            exchange_stage(config, exchange.stages[each.phase], each.list, each.group);
            cuda_check(cudaEventRecord(each.summed, exchange.add_stream));
        } else {
            gather_list(config, each.list, each.group);
        }
        ++each.phase;
    }
    const size_t phases = exchange.stages.size() + exchange.gather;
    while (!exchange.in_flight.empty() && exchange.in_flight.back().phase == phases) {
        exchange.unused_events.push_back(exchange.in_flight.back().summed);
        exchange.in_flight.pop_back();
    }
}

}  // namespace detail

// The streams of the exchange go on when the compute stream has come to where compute_nccl_sync was
// recorded last.
inline void exchange_waits_for_gradients(const MultiGpuConfig& config) {
    cuda_check(cudaStreamWaitEvent(config.exchange->pack_stream, config.compute_nccl_sync, 0));
}

// Queues the exchange of all that is held back.
inline void exchange_held(const MultiGpuConfig& config) {
    GradientExchange& exchange = *config.exchange;
    if (exchange.held.sizes.empty()) return;
    GradientExchange::InFlight next;
    next.list = std::exchange(exchange.held, {});
    next.group = exchange.next_group++;
    next.summed = exchange.unused_events.back();
    exchange.unused_events.pop_back();
    exchange.in_flight.push_front(std::move(next));
    detail::advance_lists(config);
}

// Queues the reduction of a list whose gradients the streams of the exchange may read now, or holds it
// back until more have come.
inline void exchange_gradients(const MultiGpuConfig& config, const GradientList& list) {
    GradientExchange& exchange = *config.exchange;
    exchange.held.append(list);
    if (exchange.held.elements() >= exchange.list_elements) exchange_held(config);
}

// Queues what the lists still need; `stream` then waits for all sums of the step.
inline void finish_exchange(const MultiGpuConfig& config, cudaStream_t stream) {
    GradientExchange& exchange = *config.exchange;
    exchange_held(config);
    while (!exchange.in_flight.empty()) detail::advance_lists(config);
    exchange.next_group = 0;
    cuda_check(cudaEventRecord(exchange.arrived, exchange.add_stream));
    cuda_check(cudaStreamWaitEvent(config.nccl_stream, exchange.arrived, 0));
    cuda_check(cudaEventRecord(exchange.arrived, config.nccl_stream));
    cuda_check(cudaStreamWaitEvent(stream, exchange.arrived, 0));
}

}  // namespace llmc

#endif  // MULTI_GPU
