// The control channel: every rank's connection to rank 0, kept for the whole run, over which ranks
// learn at once that one has died, and after a time limit which one is stuck. No data goes
// through it.
//
// Each process has one background thread. Ranks send a heartbeat to rank 0 every half second, and
// rank 0 sends all of them to everybody. A process that ends closes its connection, however it
// ends, so rank 0 sees that at once and tells the others; when rank 0 itself ends, all see it. A
// process that is stopped keeps its connection: that one is found by the age of its heartbeat.
#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/handshake.h"
#include "llmc/net.h"

namespace llmc {

// A connection that carries whole messages and never blocks.
class MessageLink {
  public:
    enum class State { kOpen, kClosed, kForeign, kOtherVersion };

    MessageLink() = default;
    explicit MessageLink(net::Socket socket) : socket_(std::move(socket)) {}

    bool is_open() const { return static_cast<bool>(socket_); }
    const net::Socket& socket() const { return socket_; }
    void close() { socket_.close(); }
    // Tells the other side that nothing more will come, after what is queued.
    void end_output() {
        flush();
        if (is_open()) ::shutdown(socket_.fd(), SHUT_WR);
    }

    void queue(const handshake::Message& message) {
        const handshake::MessageBytes bytes = handshake::encode(message);
        output_.insert(output_.end(), bytes.begin(), bytes.end());
    }
    // Is all that was queued in the system's hands?
    bool is_flushed() const { return output_.empty() || !is_open(); }

    // Sends what the connection takes now. When the other side has gone, what is queued is dropped;
    // receive() tells of it, once it has read what came before.
    void flush() {
        size_t sent = 0;
        while (is_open() && sent < output_.size()) {
            const ssize_t n = ::send(socket_.fd(), output_.data() + sent, output_.size() - sent,
                                     MSG_NOSIGNAL | MSG_DONTWAIT);
            if (n >= 0) {
                sent += static_cast<size_t>(n);
            } else if (errno != EINTR) {
                if (errno != EAGAIN) sent = output_.size();
                break;
            }
        }
        output_.erase(output_.begin(), output_.begin() + static_cast<std::ptrdiff_t>(sent));
    }

    // Appends the whole messages that are here to `messages`, at most `limit` of them. On anything
    // but kOpen no more will come; `version` is the other side's at kOtherVersion.
    State receive(std::vector<handshake::Message>* messages, size_t limit, uint32_t* version) {
        while (is_open() && limit > 0) {
            unsigned char* free_space = input_.data() + input_bytes_;
            const ssize_t n =
                ::recv(socket_.fd(), free_space, input_.size() - input_bytes_, MSG_DONTWAIT);
            if (n < 0 && errno == EINTR) continue;
            if (n < 0 && errno == EAGAIN) return State::kOpen;
            if (n <= 0) return State::kClosed;
            input_bytes_ += static_cast<size_t>(n);
            handshake::Message message;
            switch (handshake::parse_message(input_.data(), input_bytes_, &message)) {
                case handshake::Parsed::kIncomplete:
                    break;
                case handshake::Parsed::kMessage:
                    messages->push_back(std::move(message));
                    input_bytes_ = 0;
                    --limit;
                    break;
                case handshake::Parsed::kOtherVersion:
                    *version = message.version;
                    return State::kOtherVersion;
                case handshake::Parsed::kForeign:
                case handshake::Parsed::kInvalid:
                    return State::kForeign;
            }
        }
        return is_open() ? State::kOpen : State::kClosed;
    }

    // Has the other side closed the connection, as far as this machine knows? Reads nothing.
    bool looks_closed() const {
        char byte;
        const ssize_t n = ::recv(socket_.fd(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
        return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
    }

    // For poll(2).
    pollfd poll_entry() const {
        const int events = POLLIN | (output_.empty() ? 0 : POLLOUT);
        return {socket_.fd(), static_cast<short>(events), 0};
    }

  private:
    net::Socket socket_;
    std::vector<unsigned char> output_;
    // Never more than one message, since a read ends where one does.
    handshake::MessageBytes input_{};
    size_t input_bytes_ = 0;
};

// What one rank knows of all others. Made by PeerServer::wait_for_all and join_peers (peers.h).
// All functions may be called from any thread; progress() from one at a time.
class Peers {
  public:
    // How long an orderly end waits for the others, and how old a heartbeat may be.
    static constexpr double kCloseSeconds = 5;
    static constexpr double kTellSeconds = 2;
    static constexpr double kSilentSeconds = 3;
    static constexpr double kHeartbeatSeconds = 0.5;

    // `table` by rank; `links` by rank on rank 0 (its own unused), else rank 0's alone.
    Peers(int rank, std::vector<PeerInfo> table, std::vector<MessageLink> links);
    // Without close() before, the others see that this rank ended early.
    ~Peers();
    Peers(const Peers&) = delete;
    Peers& operator=(const Peers&) = delete;

    // One row for each rank.
    const std::vector<PeerInfo>& table() const { return table_; }

    // Notes how far this rank has come, for the others' messages. Costs a few atomic stores. Steps
    // count from 1; 0 is before the first one. `name`
    // says what the step is doing ("allgather of layer 4") and must live as long as the program: a
    // string literal, or one made at start. `collective` counts within the run or the step; among
    // ranks of one step a smaller one is behind.
    void progress(int64_t step, uint64_t collective, const char* name);

    // "" as long as all is well, else one line about the first failure that this rank heard of:
    // "rank 3 died, last heard of in step 12 (allgather of layer 4)", or "rank 2: " and that rank's own
    // message. Cheap while there is none.
    std::string failure() const;
    // Likewise, but waits up to `seconds` for a failure to be known: for a rank whose collective
    // has broken, which may learn of that sooner than of its cause.
    std::string wait_for_failure(double seconds) const;

    // For the message of a time limit of `limit_s` seconds: which ranks are silent or behind, and
    // where; one line, never "". A rank that stopped when the wait began is silent by then.
    std::string late(double limit_s = 1e9) const;

    // This rank ends with an error: sends `message` to the others, unless a failure is known
    // already. Returns when they have it, or after two seconds. The process may end then.
    void announce_failure(const std::string& message);

    // The orderly end of this rank: the others see no failure. Rank 0 waits up to five seconds for
    // theirs, since without it they do not hear of one another.
    void close();

  private:
    using Message = handshake::Message;
    using MessageType = handshake::MessageType;

    struct Position {
        int64_t step = 0;  // counted from 1
        uint64_t collective = 0;
        std::string name;
    };
    struct Row {
        Position position;
        net::Deadline seen;     // when it last gave a sign of life
        bool has_left = false;  // in order
    };

    bool is_server() const { return rank_ == 0; }
    Position own_position() const;
    static std::string position_text(const Position& position);
    static std::string are(const std::vector<int>& ranks, const char* one, const char* many);
    static std::string silent_text(const std::map<std::string, std::vector<int>>& silent);
    static std::string alive_text(const std::vector<Position>& positions,
                                  const std::vector<size_t>& alive);
    Message message_about(MessageType type, int rank) const;
    double relay_seconds() const;
    static double seconds_since(net::Deadline time);

    void wake() const;
    void run();
    void serve_until_stopped();
    void wait_for_events(net::Deadline deadline);
    void read(size_t link);
    void handle(size_t link, const Message& message);
    void lost(size_t link);
    void take_requests();
    void send_heartbeats();
    void queue_to_all(const Message& message);
    void fail(int rank, const std::string& text, bool tell);
    bool all_told() const;
    void leave(double seconds);

    const int rank_;
    const std::vector<PeerInfo> table_;

    // The background thread's alone.
    std::vector<MessageLink> links_;
    std::vector<int> unanswered_;  // by link: messages that the other side has yet to acknowledge
    int wake_fd_ = -1;

    // progress() writes them in turn, so that own_position() reads one that is at rest.
    struct OwnPosition {
        std::atomic<int64_t> step{0};
        std::atomic<uint64_t> collective{0};
        std::atomic<const char*> name{""};
    };
    static constexpr uint64_t kOwnPositions = 8;
    OwnPosition own_[kOwnPositions];
    std::atomic<uint64_t> own_count_{0};

    std::atomic<bool> has_failed_{false};
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    std::string failure_;
    std::vector<Row> rows_;
    std::vector<Message> requests_;  // for the background thread to send to all
    uint64_t rounds_ = 0;            // of the background thread, each of which reads all that came
    bool idle_ = true;               // nothing is on its way to the others
    bool stop_ = false;
    bool is_closed_ = false;
    std::thread thread_;
};

inline Peers::Peers(int rank, std::vector<PeerInfo> table, std::vector<MessageLink> links)
    : rank_(rank), table_(std::move(table)), links_(std::move(links)), rows_(table_.size()) {
    for (Row& row : rows_) row.seen = net::Clock::now();
    unanswered_.assign(links_.size(), 0);
    wake_fd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_fd_ < 0) throw Error("cannot make an eventfd: " + net::error_text(errno));
    // Signals are for the main thread.
    sigset_t all, before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        thread_ = std::thread([this] { run(); });
    } catch (const std::exception& error) {
        ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
        ::close(wake_fd_);
        throw Error(std::string("cannot start a thread: ") + error.what());
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

inline Peers::~Peers() {
    bool closed;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closed = is_closed_;
    }
    if (!closed) {
        const std::string where = position_text(own_position());
        fail(rank_, format("rank %d ended early %s", rank_, where.c_str()), true);
        leave(kTellSeconds);
    }
    ::close(wake_fd_);
}

inline void Peers::progress(int64_t step, uint64_t collective, const char* name) {
    const uint64_t count = own_count_.load(std::memory_order_relaxed) + 1;
    OwnPosition& place = own_[count % kOwnPositions];
    // Release: whoever reads one of these sees own_count_ at least as it was before.
    place.step.store(step, std::memory_order_release);
    place.collective.store(collective, std::memory_order_release);
    place.name.store(name, std::memory_order_release);
    own_count_.store(count, std::memory_order_release);
}

inline Peers::Position Peers::own_position() const {
    Position position;
    const char* name = "";
    uint64_t count, later;
    do {
        count = own_count_.load(std::memory_order_acquire);
        const OwnPosition& place = own_[count % kOwnPositions];
        position.step = place.step.load(std::memory_order_acquire);
        position.collective = place.collective.load(std::memory_order_acquire);
        name = place.name.load(std::memory_order_acquire);
        later = own_count_.load(std::memory_order_acquire);
        // The place is written again when the count has gone round, begun one earlier.
    } while (later - count >= kOwnPositions - 1);
    position.name = name;
    return position;
}

inline std::string Peers::position_text(const Position& position) {
    std::string text = position.step < 1
                           ? "before the first step"
                           : format("in step %lld", static_cast<long long>(position.step));
    if (!position.name.empty()) text += " (" + position.name + ")";
    return text;
}

inline Peers::Message Peers::message_about(MessageType type, int rank) const {
    Message message;
    message.type = type;
    message.rank = rank;
    message.size = static_cast<int>(table_.size());
    return message;
}

// Half a second up to 32 ranks. Rank 0 sends N rows to N ranks: with many, less often.
inline double Peers::relay_seconds() const {
    return std::max(kHeartbeatSeconds, static_cast<double>(table_.size()) / 64);
}

inline double Peers::seconds_since(net::Deadline time) {
    return std::chrono::duration<double>(net::Clock::now() - time).count();
}

inline std::string Peers::failure() const {
    if (!has_failed_.load(std::memory_order_acquire)) return "";
    const std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
}

inline std::string Peers::wait_for_failure(double seconds) const {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto is_known = [this] { return has_failed_.load(); };
    return changed_.wait_until(lock, net::after(seconds), is_known) ? failure_ : "";
}

inline std::string Peers::late(double limit_s) const {
    std::unique_lock<std::mutex> lock(mutex_);
    // This process may have been stopped, too: whatever came meanwhile counts before anybody is
    // called silent.
    const uint64_t wanted = rounds_ + 2;
    wake();
    changed_.wait_until(lock, net::after(1), [&] {
        if (rounds_ < wanted) wake();
        return rounds_ >= wanted || stop_;
    });

    const size_t self = static_cast<size_t>(rank_);
    std::vector<Position> positions;
    for (const Row& row : rows_) positions.push_back(row.position);
    positions[self] = own_position();
    // What rank 0 says of the others is news only as long as rank 0 speaks.
    const double silence = std::max(2 * kHeartbeatSeconds, std::min(kSilentSeconds, limit_s / 2));
    const double patience = std::max(silence, 3 * relay_seconds());
    const bool blind =
        !is_server() && !rows_[0].has_left && seconds_since(rows_[0].seen) > patience;
    std::map<std::string, std::vector<int>> silent;
    std::vector<int> gone;
    std::vector<size_t> alive;
    for (size_t rank = 0; rank < rows_.size(); ++rank) {
        const double age = seconds_since(rows_[rank].seen);
        if (rank != self && rank != 0 && blind) continue;
        if (rows_[rank].has_left) {
            gone.push_back(static_cast<int>(rank));
        } else if (rank == self || age <= (rank == 0 ? patience : silence)) {
            alive.push_back(rank);
        } else {
            silent[format("gave no sign of life for %.0f s, last heard of ", age) +
                   position_text(positions[rank])]
                .push_back(static_cast<int>(rank));
        }
    }
    return silent_text(silent) + (gone.empty() ? "" : are(gone, "has ended; ", "have ended; ")) +
           alive_text(positions, alive);
}

// "ranks 2 and 3 are", with the word that fits the number.
inline std::string Peers::are(const std::vector<int>& ranks, const char* one, const char* many) {
    return handshake::rank_list(ranks) + " " + (ranks.size() == 1 ? one : many);
}

inline std::string Peers::silent_text(const std::map<std::string, std::vector<int>>& silent) {
    std::string text;
    for (const auto& [state, ranks] : silent) {
        text += handshake::rank_list(ranks) + " " + state + "; ";
    }
    return text;
}

// Where the ranks in `alive` are: those behind first. All of one run of `positions`, by rank.
inline std::string Peers::alive_text(const std::vector<Position>& positions,
                                     const std::vector<size_t>& alive) {
    const auto before = [](const Position& a, const Position& b) {
        return a.step != b.step ? a.step < b.step : a.collective < b.collective;
    };
    Position front = positions[alive.front()];
    for (const size_t rank : alive) {
        if (before(front, positions[rank])) front = positions[rank];
    }
    std::map<std::string, std::vector<int>> behind;
    std::vector<int> in_front;
    for (const size_t rank : alive) {
        const bool late = before(positions[rank], front);
        std::vector<int>& group = late ? behind[position_text(positions[rank])] : in_front;
        group.push_back(static_cast<int>(rank));
    }
    std::string text;
    for (const auto& [where, ranks] : behind) {
        text += are(ranks, "is behind, ", "are behind, ") + where + "; ";
    }
    if (in_front.size() == positions.size()) {
        return text + "all ranks answer and are " + position_text(front);
    }
    return text + are(in_front, "is ", "are ") + position_text(front);
}

inline void Peers::announce_failure(const std::string& message) {
    fail(rank_, format("rank %d: ", rank_) + message, true);
    std::unique_lock<std::mutex> lock(mutex_);
    idle_ = false;
    wake();
    changed_.wait_until(lock, net::after(kTellSeconds), [this] { return idle_ || stop_; });
}

inline void Peers::close() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (is_closed_) return;
        is_closed_ = true;
        requests_.push_back(message_about(MessageType::kBye, rank_));
    }
    leave(kCloseSeconds);
}

// Ends the background thread, as soon as the others know what they should.
inline void Peers::leave(double seconds) {
    {
        std::unique_lock<std::mutex> lock(mutex_);
        idle_ = false;
        wake();
        changed_.wait_until(lock, net::after(seconds), [this] {
            if (stop_) return true;
            if (!idle_) return false;
            if (!is_closed_ || !is_server() || !failure_.empty()) return true;
            return std::all_of(rows_.begin() + 1, rows_.end(),
                               [](const Row& row) { return row.has_left; });
        });
        stop_ = true;
        wake();
    }
    thread_.join();
}

inline void Peers::wake() const {
    const uint64_t one = 1;
    // Fails only when the counter is full, and then the thread is awake.
    [[maybe_unused]] const ssize_t written = ::write(wake_fd_, &one, sizeof(one));
}

// Notes the first failure, and has it sent to the others if `tell`.
inline void Peers::fail(int rank, const std::string& text, bool tell) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_.empty()) return;
    failure_ = printable(handshake::shortened(text, handshake::kTextBytes));
    if (tell) {
        Message message = message_about(MessageType::kFailure, rank);
        message.text = failure_;
        requests_.push_back(message);
        idle_ = false;
    }
    wake();
}

// ---- the background thread

inline void Peers::run() {
    try {
        serve_until_stopped();
    } catch (const std::exception& error) {
        fail(rank_, format("rank %d: the control channel broke: ", rank_) + error.what(), false);
    }
    for (MessageLink& link : links_) {
        link.end_output();
        link.close();
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    has_failed_ = !failure_.empty();
    changed_.notify_all();
}

inline void Peers::serve_until_stopped() {
    net::Deadline next_heartbeats = net::Clock::now();
    for (;;) {
        wait_for_events(next_heartbeats);
        for (size_t link = 0; link < links_.size(); ++link) read(link);
        take_requests();
        if (net::Clock::now() >= next_heartbeats) {
            send_heartbeats();
            next_heartbeats = net::after(is_server() ? relay_seconds() : kHeartbeatSeconds);
        }
        for (MessageLink& link : links_) link.flush();
        const std::lock_guard<std::mutex> lock(mutex_);
        ++rounds_;
        idle_ = requests_.empty() && all_told();
        // Only now that the others' copies are out: this process may exit as soon as it knows.
        if (requests_.empty() && !failure_.empty()) has_failed_ = true;
        changed_.notify_all();
        if (stop_) return;
    }
}

inline void Peers::wait_for_events(net::Deadline deadline) {
    std::vector<pollfd> entries = {{wake_fd_, POLLIN, 0}};
    for (const MessageLink& link : links_) entries.push_back(link.poll_entry());
    ::poll(entries.data(), entries.size(), net::poll_ms(deadline));
    uint64_t count;
    [[maybe_unused]] const ssize_t n = ::read(wake_fd_, &count, sizeof(count));
}

inline void Peers::read(size_t link) {
    if (!links_[link].is_open()) return;
    constexpr size_t kMessagesARound = 4096;
    std::vector<Message> messages;
    uint32_t version = 0;
    const MessageLink::State state = links_[link].receive(&messages, kMessagesARound, &version);
    for (const Message& message : messages) handle(link, message);
    if (state != MessageLink::State::kOpen) lost(link);
}

// Links have their rank's number; on all ranks but 0 the only one is number 0, which is rank 0's.
inline void Peers::handle(size_t link, const Message& message) {
    if (message.size != static_cast<int>(table_.size())) return;
    const size_t rank = is_server() ? link : static_cast<size_t>(message.rank);
    const bool needs_answer =
        message.type == MessageType::kFailure || message.type == MessageType::kBye;
    if (needs_answer) links_[link].queue(message_about(MessageType::kReceived, rank_));
    bool relay_bye = false;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const net::Deadline now = net::Clock::now();
        if (message.type == MessageType::kHeartbeat) {
            rows_[rank].position = {message.step, message.collective, message.text};
            const uint64_t age_ms =
                is_server() ? 0 : std::min<uint64_t>(message.age_ms, 86'400'000);
            rows_[rank].seen = now - std::chrono::milliseconds(age_ms);
        } else if (message.type == MessageType::kBye) {
            relay_bye = is_server() && !rows_[rank].has_left;
            rows_[rank].has_left = true;
        } else if (message.type == MessageType::kReceived && unanswered_[link] > 0) {
            --unanswered_[link];
        }
        rows_[link].seen = now;
    }
    if (message.type == MessageType::kFailure) {
        fail(static_cast<int>(rank), message.text, is_server());
    }
    if (relay_bye) queue_to_all(message_about(MessageType::kBye, static_cast<int>(rank)));
}

// The connection has ended.
inline void Peers::lost(size_t link) {
    links_[link].close();
    Row row;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        row = rows_[link];
    }
    if (row.has_left) return;
    const int rank = static_cast<int>(link);
    // Where it was at its last heartbeat; it may have gone on since.
    fail(rank, format("rank %d died, last heard of ", rank) + position_text(row.position),
         is_server());
}

inline void Peers::take_requests() {
    std::vector<Message> requests;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        requests.swap(requests_);
    }
    for (const Message& message : requests) queue_to_all(message);
}

// To all but the rank that the message is about.
inline void Peers::queue_to_all(const Message& message) {
    for (size_t link = 0; link < links_.size(); ++link) {
        const bool is_subject = is_server() && static_cast<int>(link) == message.rank;
        if (!links_[link].is_open() || is_subject) continue;
        links_[link].queue(message);
        ++unanswered_[link];
    }
}

// To whoever has taken the last ones.
inline void Peers::send_heartbeats() {
    std::vector<Message> messages;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (int rank = 0; rank < static_cast<int>(rows_.size()); ++rank) {
            if (rank != rank_ && !is_server()) continue;
            const Row& row = rows_[static_cast<size_t>(rank)];
            const Position position = rank == rank_ ? own_position() : row.position;
            Message message = message_about(MessageType::kHeartbeat, rank);
            message.step = position.step;
            message.collective = position.collective;
            message.text = position.name;
            const double age = rank == rank_ ? 0 : std::max(0.0, seconds_since(row.seen));
            message.age_ms = static_cast<uint64_t>(1000 * age);
            messages.push_back(std::move(message));
        }
    }
    for (MessageLink& link : links_) {
        if (!link.is_open() || !link.is_flushed()) continue;
        for (const Message& message : messages) link.queue(message);
    }
}

inline bool Peers::all_told() const {
    for (size_t link = 0; link < links_.size(); ++link) {
        if (!links_[link].is_open()) continue;
        if (!links_[link].is_flushed() || unanswered_[link] > 0) return false;
    }
    return true;
}

}  // namespace llmc
