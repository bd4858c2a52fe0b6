// How the processes of a run come together: rank 0 listens, every other rank connects, says who it
// is, and keeps the connection as its control channel (control_channel.h). When all are there, rank
// 0 tells each the table of ranks and the id that NCCL starts from. A rank that cannot start, for
// example over a wrong flag, may come all the same to say why, so that the others do not wait for
// it. See handshake.h for what is said, and for what a stranger on the port can and cannot do.
#pragma once

#include <poll.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/control_channel.h"
#include "llmc/error.h"
#include "llmc/handshake.h"
#include "llmc/net.h"
#include "llmc/printable.h"

namespace llmc {

// How long a process that knows that there will be no run waits for ranks that have yet to hear of it.
// `briefly`: no launcher says that there are others, and a person may be waiting for the prompt.
inline double decline_seconds(bool briefly = false) {
    double seconds = 10;
#ifdef LLMC_TEST_SWITCHES
    if (const char* value = std::getenv("LLMC_DECLINE_S")) seconds = std::atof(value);
#endif
    return briefly ? std::min(seconds, 2.0) : seconds;
}

// The processes of one start begin within this time. A rank's word that it declines is not for a
// process that began later: that one belongs to the next start.
constexpr double kOneStartSeconds = 5;

namespace detail {

inline const net::Deadline kProgramBegan = net::Clock::now();

}  // namespace detail

// Tests set these; the program leaves them as they are.
struct StartTiming {
    net::Deadline began = detail::kProgramBegan;  // this process
    double decline_s = decline_seconds();
};

namespace detail {

inline uint64_t milliseconds_since(net::Deadline time) {
    const auto age =
        std::chrono::duration_cast<std::chrono::milliseconds>(net::Clock::now() - time);
    return static_cast<uint64_t>(std::max<int64_t>(0, age.count()));
}

// When the sender of a hello or of a word that declines began, by this process's clock.
inline net::Deadline sender_began(const handshake::Message& message) {
    constexpr uint64_t kMost = 4'000'000'000;  // 46 days, far from overflow
    return net::Clock::now() - std::chrono::milliseconds(std::min(message.age_ms, kMost));
}

inline bool is_of_later_start(net::Deadline one, net::Deadline other) {
    return std::chrono::duration<double>(one - other).count() > kOneStartSeconds;
}

// "within 300 s (LLMC_INIT_TIMEOUT_S)"
inline std::string within_limit(double limit_s) {
    return format("within %g s (LLMC_INIT_TIMEOUT_S)", limit_s);
}

inline uint64_t random_token() {
    uint64_t token = 0;
    while (token == 0) {
        if (::getrandom(&token, sizeof(token), 0) != sizeof(token) && errno != EINTR) {
            throw Error("cannot draw random bytes: " + net::error_text(errno));
        }
    }
    return token;
}

// Listens for ranks. Where a rank 0 of an earlier start still has the port, to tell ranks why it
// declined, it is asked to give it up. The arguments are PeerServer's.
inline net::Socket listen_for_ranks(const std::string& host, int port, const std::string& job_token,
                                    const std::string& what) {
    if (port == 0) return net::listen_on(host, port, what);
    try {
        return net::listen_on(host, port, what, 0);
    } catch (const Error&) {  // as a rule the port is in use; the second try says what is wrong
    }
    handshake::Message hello;
    hello.size = 1;
    hello.job_token = handshake::job_token_of(job_token);
    handshake::MessageBytes bytes = handshake::encode(hello);
    const net::Deadline deadline = net::after(1);
    const net::Socket socket = net::connect_to({host.empty() ? "localhost" : host, port}, deadline);
    if (socket && net::send_all(socket, bytes.data(), bytes.size(), deadline)) {
        net::receive_all(socket, bytes.data(), bytes.size(), deadline);  // until it hangs up
    }
    return net::listen_on(host, port, what);
}

}  // namespace detail

// Rank 0's side.
class PeerServer {
  public:
    // Listens on an address or name of this machine, "" for all its interfaces; port 0 is any free
    // one. Ranks that come early wait in the system's queue. `what` begins the message of an Error
    // ("-ps node1 -pp 17171"). A port that is in use gets some seconds to become free.
    PeerServer(const std::string& host, int port, const std::string& job_token,
               const std::string& what, const StartTiming& timing = {})
        : timing_(timing),
          listener_(detail::listen_for_ranks(host, port, job_token, what)),
          server_{1, handshake::job_token_of(job_token), detail::random_token()} {
        std::vector<std::string> hosts = {net::local_address(listener_)};
        if (host.empty()) hosts = net::own_addresses();
        const int own_port = net::local_port(listener_);
        for (const std::string& one : hosts) addresses_.push_back({one, own_port});
    }

    int port() const { return addresses_.front().port; }
    // A random number that is this object's alone. A client that knows it takes no other rank 0.
    uint64_t token() const { return server_.server_token; }
    // Where clients may reach it, likely ones first.
    const std::vector<net::Endpoint>& addresses() const { return addresses_; }

    // Serves until all other ranks are here, tells each the table and `id`, and stops listening.
    // Whoever says nothing, or nothing sensible, is dropped after a few seconds without harm to
    // the others, who are served meanwhile; a process that does not belong here is told why. After
    // `limit_s` seconds, or when two ranks use one GPU, an Error, which those present get, too; when a
    // rank declines, one that all get who come within decline_seconds(). `every_second` is called
    // about that often. For one call.
    std::unique_ptr<Peers> wait_for_all(const PeerInfo& self, const unsigned char (&id)[kIdBytes],
                                        double limit_s,
                                        const std::function<void()>& every_second = {});

    // For a rank 0 that cannot start: tells each of the other size - 1 ranks `text`, instead of serving
    // them. Returns when all have heard it, when the rank 0 of a later start comes, or after `limit_s`
    // seconds. Ranks of a later start are not told. For one call.
    void decline_all(int size, const std::string& text, double limit_s,
                     const std::function<void()>& every_second = {});

  private:
    using Message = handshake::Message;
    using MessageType = handshake::MessageType;

    // Connections that have yet to say who they are, or have been sent away and may still read why.
    // More of them push out the oldest; a rank says its hello at once.
    static constexpr size_t kMostNewcomers = 256;
    static constexpr size_t kMostAcceptedAtOnce = 64;
    static constexpr double kHelloSeconds = 5;

    struct Newcomer {
        MessageLink link;
        net::Deadline deadline;
        std::string from;
        bool is_dismissed = false;
    };

    void begin(int size);
    Message message(MessageType type, int rank, const std::string& text) const;
    std::vector<int> missing() const;
    bool all_have_heard() const;
    std::string limit_message(double limit_s) const;
    void wait_for_events(net::Deadline deadline);
    void accept_newcomers();
    void hear_newcomers();
    void hear(Newcomer* newcomer);
    std::string judge(const Message& newcomer) const;
    void admit(Newcomer* newcomer, const Message& hello);
    void hear_decline(Newcomer* newcomer, const Message& word);
    bool is_for_next_start(const Message& newcomer);
    void dismiss(Newcomer* newcomer, const std::string& who, const std::string& why);
    void hear_arrived();
    void refuse(MessageLink* link);
    void refuse_until_all_have_heard(net::Deadline deadline,
                                     const std::function<void()>& every_second);
    void tell_who_is_missing();
    [[noreturn]] void give_up(const std::string& text);
    std::unique_ptr<Peers> start(const unsigned char (&id)[kIdBytes]);

    const StartTiming timing_;
    net::Socket listener_;
    handshake::ServerIdentity server_;
    std::vector<net::Endpoint> addresses_;
    std::list<Newcomer> newcomers_;
    std::vector<MessageLink> arrived_;  // by rank, closed where it is not here; rank 0 unused
    std::vector<PeerInfo> table_;       // by rank
    std::vector<bool> has_come_;        // by rank, also of those that have left again
    std::string last_refusal_;
    std::string why_not_;       // "": as far as is known the run will start
    bool is_refusing_ = false;  // all are told why_not_
    bool has_yielded_ = false;  // to the rank 0 of the next start
};

inline PeerServer::Message PeerServer::message(MessageType type, int rank,
                                               const std::string& text) const {
    Message message;
    message.type = type;
    message.rank = rank;
    message.size = server_.size;
    message.server_token = server_.server_token;
    message.text = text;
    return message;
}

inline std::vector<int> PeerServer::missing() const {
    std::vector<int> ranks;
    for (int rank = 1; rank < server_.size; ++rank) {
        if (!arrived_[static_cast<size_t>(rank)].is_open()) ranks.push_back(rank);
    }
    return ranks;
}

inline std::string PeerServer::limit_message(double limit_s) const {
    std::vector<int> absent, left;
    for (const int rank : missing()) {
        (has_come_[static_cast<size_t>(rank)] ? left : absent).push_back(rank);
    }
    std::string text;
    if (!absent.empty()) {
        text = handshake::rank_list(absent) + format(" of %d did not arrive ", server_.size);
    }
    if (!left.empty()) {
        if (!absent.empty()) text += "and ";
        text += handshake::rank_list(left) +
                (absent.empty() ? format(" of %d", server_.size) : "") + " came and left again ";
    }
    text += detail::within_limit(limit_s) + "; rank 0 waited at " +
            net::endpoint_text(addresses_.front());
    if (!last_refusal_.empty()) text += "; the last process refused was " + last_refusal_;
    return text;
}

inline std::unique_ptr<Peers> PeerServer::wait_for_all(const PeerInfo& self,
                                                       const unsigned char (&id)[kIdBytes],
                                                       double limit_s,
                                                       const std::function<void()>& every_second) {
    begin(self.size);
    const net::Deadline deadline = net::after(limit_s);
    table_[0] = self;
    net::Deadline next_second = net::Clock::now();
    while (!missing().empty()) {
        const net::Deadline now = net::Clock::now();
        if (now >= deadline) give_up(limit_message(limit_s));
        if (now >= next_second) {
            tell_who_is_missing();
            if (every_second) every_second();
            next_second = net::after(1);
        }
        wait_for_events(std::min(deadline, next_second));
        accept_newcomers();
        hear_newcomers();
        hear_arrived();
        if (why_not_.empty()) continue;
        refuse_until_all_have_heard(std::min(deadline, net::after(timing_.decline_s)),
                                    every_second);
        throw Error(why_not_);
    }
    const std::string shared = handshake::shared_device(table_);
    if (!shared.empty()) give_up(shared);
    return start(id);
}

inline void PeerServer::begin(int size) {
    if (size < 1 || size > handshake::kMaxRanks) {
        throw Error(format("-pn %d: must be between 1 and %d", size, handshake::kMaxRanks));
    }
    server_.size = size;
    arrived_ = std::vector<MessageLink>(static_cast<size_t>(size));
    table_ = std::vector<PeerInfo>(static_cast<size_t>(size));
    has_come_.assign(static_cast<size_t>(size), false);
}

inline void PeerServer::decline_all(int size, const std::string& text, double limit_s,
                                    const std::function<void()>& every_second) {
    begin(size);
    why_not_ = text;
    refuse_until_all_have_heard(net::after(limit_s), every_second);
}

// Every rank has come once, and each has closed its connection: it has read what it was told.
inline bool PeerServer::all_have_heard() const {
    const auto is_open = [](const MessageLink& link) { return link.is_open(); };
    return std::none_of(arrived_.begin(), arrived_.end(), is_open) &&
           std::all_of(has_come_.begin() + 1, has_come_.end(),
                       [](bool has_come) { return has_come; });
}

inline void PeerServer::refuse(MessageLink* link) {
    link->queue(message(MessageType::kRefusal, 0, why_not_));
    link->end_output();
}

inline void PeerServer::refuse_until_all_have_heard(net::Deadline deadline,
                                                    const std::function<void()>& every_second) {
    is_refusing_ = true;
    for (MessageLink& link : arrived_) {
        if (link.is_open()) refuse(&link);
    }
    net::Deadline next_second = net::Clock::now();
    while (!has_yielded_ && !all_have_heard() && net::Clock::now() < deadline) {
        if (every_second && net::Clock::now() >= next_second) {
            every_second();
            next_second = net::after(1);
        }
        wait_for_events(every_second ? std::min(deadline, next_second) : deadline);
        accept_newcomers();
        hear_newcomers();
        hear_arrived();
    }
}

inline void PeerServer::wait_for_events(net::Deadline deadline) {
    std::vector<pollfd> entries = {{listener_.fd(), POLLIN, 0}};
    for (const Newcomer& newcomer : newcomers_) {
        entries.push_back(newcomer.link.poll_entry());
        deadline = std::min(deadline, newcomer.deadline);
    }
    for (const MessageLink& link : arrived_) entries.push_back(link.poll_entry());
    ::poll(entries.data(), entries.size(), net::poll_ms(deadline));
}

inline void PeerServer::accept_newcomers() {
    for (size_t i = 0; i < kMostAcceptedAtOnce; ++i) {
        bool exhausted = false;
        net::Socket socket = net::try_accept(listener_, &exhausted);
        if (!socket && !exhausted) return;
        if (exhausted && newcomers_.empty()) {
            // Not by strangers. The connection stays in the queue, so poll would not wait.
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            return;
        }
        if (exhausted || newcomers_.size() == kMostNewcomers) newcomers_.pop_front();
        if (!socket) continue;
        std::string from = net::remote_address(socket);
        newcomers_.push_back(
            {MessageLink(std::move(socket)), net::after(kHelloSeconds), std::move(from), false});
    }
}

inline void PeerServer::hear_newcomers() {
    const net::Deadline now = net::Clock::now();
    for (auto newcomer = newcomers_.begin(); newcomer != newcomers_.end();) {
        hear(&*newcomer);
        const bool stays = newcomer->link.is_open() && now < newcomer->deadline;
        newcomer = stays ? std::next(newcomer) : newcomers_.erase(newcomer);
    }
}

// Afterwards the newcomer is among those that have arrived, still a newcomer, or closed.
inline void PeerServer::hear(Newcomer* newcomer) {
    std::vector<Message> messages;
    uint32_t version = 0;
    const MessageLink::State state = newcomer->link.receive(&messages, 1, &version);
    newcomer->link.flush();
    if (newcomer->is_dismissed) {
        if (state != MessageLink::State::kOpen) newcomer->link.close();
    } else if (state == MessageLink::State::kOtherVersion) {
        dismiss(newcomer, "a process", handshake::version_refusal(version));
    } else if (messages.empty()) {
        if (state != MessageLink::State::kOpen) newcomer->link.close();
    } else if (is_for_next_start(messages[0])) {
        newcomer->link.close();
    } else if (messages[0].type == MessageType::kHello) {
        admit(newcomer, messages[0]);
    } else if (messages[0].type == MessageType::kFailure && !messages[0].text.empty()) {
        hear_decline(newcomer, messages[0]);
    } else {
        newcomer->link.close();
    }
}

// While this start is being ended: does the newcomer belong to the next one? It gets no answer then,
// and tries again. When it is the rank 0 of that start, which needs the place, this one gives it up.
inline bool PeerServer::is_for_next_start(const Message& newcomer) {
    if (!is_refusing_ || !(newcomer.job_token == server_.job_token)) return false;
    if (newcomer.rank == 0) has_yielded_ = true;
    return newcomer.rank == 0 ||
           detail::is_of_later_start(detail::sender_began(newcomer), timing_.began);
}

// "" when the newcomer is a rank of this run that is not here yet, else what it is told.
inline std::string PeerServer::judge(const Message& newcomer) const {
    const std::string why = handshake::judge_hello(newcomer, server_);
    if (!why.empty()) return why;
    const MessageLink& place = arrived_[static_cast<size_t>(newcomer.rank)];
    // A rank that was killed and started anew takes its old place.
    if (!place.is_open() || place.looks_closed()) return "";
    return format("rank %d is here already, from ", newcomer.rank) +
           net::remote_address(place.socket()) + "; give every process a rank of its own";
}

// A rank that cannot start says why, in place of a hello. It stays for the answer.
inline void PeerServer::hear_decline(Newcomer* newcomer, const Message& word) {
    std::string why = judge(word);
    if (why.empty() && detail::is_of_later_start(timing_.began, detail::sender_began(word))) {
        why = "it is of an earlier start of this program";
    }
    if (!why.empty()) {
        dismiss(newcomer, format("rank %d", word.rank), why);
        return;
    }
    const size_t rank = static_cast<size_t>(word.rank);
    has_come_[rank] = true;
    arrived_[rank] = std::move(newcomer->link);
    newcomer->link = MessageLink();
    if (why_not_.empty()) why_not_ = word.text;
    if (is_refusing_) refuse(&arrived_[rank]);
}

inline void PeerServer::admit(Newcomer* newcomer, const Message& hello) {
    const std::string why = judge(hello);
    if (!why.empty()) {
        dismiss(newcomer, format("rank %d", hello.rank), why);
        return;
    }
    const size_t rank = static_cast<size_t>(hello.rank);
    table_[rank] = {hello.rank, hello.size, hello.host_hash, hello.text};
    has_come_[rank] = true;
    arrived_[rank] = std::move(newcomer->link);
    newcomer->link = MessageLink();
    if (is_refusing_) {
        refuse(&arrived_[rank]);
        return;
    }
    const std::vector<int> others = missing();
    const std::string text = others.empty() ? "" : handshake::rank_list(others);
    arrived_[rank].queue(message(MessageType::kWaiting, 0, text));
    arrived_[rank].flush();
}

// Says why, and leaves the connection open for the newcomer to read it: closing it right away could
// destroy the message on its way.
inline void PeerServer::dismiss(Newcomer* newcomer, const std::string& who,
                                const std::string& why) {
    newcomer->link.queue(
        message(MessageType::kRefusal, 0,
                "rank 0 refused this process, " + who + " from " + newcomer->from + ": " + why));
    newcomer->link.end_output();
    newcomer->is_dismissed = true;
    last_refusal_ = who + " from " + newcomer->from + ": " + why;
}

inline void PeerServer::hear_arrived() {
    for (MessageLink& link : arrived_) {
        if (!link.is_open()) continue;
        // Before the start a rank that is here has nothing to say.
        std::vector<Message> messages;
        uint32_t version = 0;
        const MessageLink::State state = link.receive(&messages, 1, &version);
        link.flush();
        if (state != MessageLink::State::kOpen || !messages.empty()) link.close();
    }
}

inline void PeerServer::tell_who_is_missing() {
    const std::vector<int> ranks = missing();
    if (ranks.empty()) return;
    const Message news = message(MessageType::kWaiting, 0, handshake::rank_list(ranks));
    for (MessageLink& link : arrived_) {
        if (!link.is_open() || !link.is_flushed()) continue;
        link.queue(news);
        link.flush();
    }
}

// Tells all that are here, gives them a second to read it, and throws.
inline void PeerServer::give_up(const std::string& text) {
    listener_.close();
    newcomers_.clear();
    for (MessageLink& link : arrived_) {
        if (!link.is_open()) continue;
        link.queue(message(MessageType::kRefusal, 0, text));
        link.end_output();
    }
    const net::Deadline deadline = net::after(1);
    const auto is_open = [](const MessageLink& link) { return link.is_open(); };
    while (std::any_of(arrived_.begin(), arrived_.end(), is_open) && net::Clock::now() < deadline) {
        wait_for_events(deadline);
        hear_arrived();
    }
    arrived_.clear();
    throw Error(text);
}

inline std::unique_ptr<Peers> PeerServer::start(const unsigned char (&id)[kIdBytes]) {
    listener_.close();
    newcomers_.clear();
    std::vector<Message> messages;
    for (const PeerInfo& row : table_) {
        Message peer = message(MessageType::kPeer, row.rank, row.device);
        peer.host_hash = row.host_hash;
        messages.push_back(std::move(peer));
    }
    messages.push_back(message(MessageType::kStart, 0, ""));
    std::copy(id, id + kIdBytes, messages.back().id.begin());
    for (MessageLink& link : arrived_) {
        if (!link.is_open()) continue;
        for (const Message& one : messages) link.queue(one);
        link.flush();
    }
    return std::make_unique<Peers>(0, table_, std::move(arrived_));
}

namespace detail {

// What a rank that joins says, and how far it has come.
class Joining {
  public:
    Joining(const std::string& job_token, const PeerInfo& self, double limit_s,
            const StartTiming& timing)
        : job_token_(handshake::job_token_of(job_token)),
          self_(self),
          began_(timing.began),
          limit_s_(limit_s),
          deadline_(net::after(limit_s)) {}

    bool is_over() const { return net::Clock::now() >= deadline_; }
    net::Deadline deadline() const { return deadline_; }
    double limit_s() const { return limit_s_; }
    // Why the last attempt failed.
    const std::string& reason() const { return reason_; }
    // The last attempt was taken by something that did not behave as rank 0 does.
    bool met_stranger() const { return met_stranger_; }

    // Connects to one endpoint and stays until the start. `server_token` 0 takes any rank 0. Returns
    // nothing when rank 0 is not there (yet), or not there any more. Error when rank 0 refuses, or
    // at the limit while other ranks are missing.
    std::unique_ptr<Peers> attempt(const net::Endpoint& endpoint, uint64_t server_token,
                                   unsigned char (&id)[kIdBytes]) {
        where_ = net::endpoint_text(endpoint);
        missing_.clear();
        table_.clear();
        is_known_ = false;
        net::Socket socket =
            net::connect_to(endpoint, std::min(deadline_, net::after(kConnectSeconds)), &reason_);
        met_stranger_ = static_cast<bool>(socket);
        if (!socket) return nullptr;
        MessageLink link(std::move(socket));
        link.queue(hello(server_token));
        const net::Deadline answer_by = std::min(deadline_, net::after(kAnswerSeconds));
        for (;;) {
            link.flush();
            // Rank 0 has the same limit, but may have begun a little later: it has the last word.
            const net::Deadline patience = deadline_ + std::chrono::seconds(kGraceSeconds);
            const net::Deadline until = is_known_ ? patience : answer_by;
            if (net::Clock::now() >= until) {
                if (is_known_) fail_at_limit();
                reason_ = "it does not answer";
                return nullptr;
            }
            pollfd entry = link.poll_entry();
            ::poll(&entry, 1, net::poll_ms(until));
            // One message at a time: what comes behind the start is for Peers.
            std::vector<handshake::Message> messages;
            uint32_t version = 0;
            const MessageLink::State state = link.receive(&messages, 1, &version);
            for (const handshake::Message& message : messages) {
                if (server_token != 0 && message.server_token != server_token) {
                    reason_ = "rank 0 of another run answers there";
                    return nullptr;
                }
                if (!understand(message)) return nullptr;
                if (message.type == handshake::MessageType::kStart) {
                    std::copy(message.id.begin(), message.id.end(), id);
                    std::vector<MessageLink> links;
                    links.push_back(std::move(link));
                    return std::make_unique<Peers>(self_.rank, table_, std::move(links));
                }
            }
            if (state == MessageLink::State::kOtherVersion) fail_over_version(version);
            if (state == MessageLink::State::kForeign) reason_ = "another program answers there";
            if (state == MessageLink::State::kClosed) reason_ = "it closed the connection";
            if (state != MessageLink::State::kOpen) return nullptr;
        }
    }

    // Connects to one endpoint and says there that this rank will not come, and why: one line that
    // names the rank. True when rank 0 has heard it.
    bool decline(const net::Endpoint& endpoint, uint64_t server_token, const std::string& text) {
        net::Socket socket =
            net::connect_to(endpoint, std::min(deadline_, net::after(kConnectSeconds)), &reason_);
        if (!socket) return false;
        MessageLink link(std::move(socket));
        handshake::Message word = hello(server_token);
        word.type = handshake::MessageType::kFailure;
        word.text = text;
        link.queue(word);
        for (;;) {
            link.flush();
            if (is_over()) return false;
            pollfd entry = link.poll_entry();
            ::poll(&entry, 1, net::poll_ms(deadline_));
            std::vector<handshake::Message> messages;
            uint32_t version = 0;
            const MessageLink::State state = link.receive(&messages, 1, &version);
            for (const handshake::Message& message : messages) {
                if (server_token != 0 && message.server_token != server_token) return false;
                if (message.type == handshake::MessageType::kRefusal) return true;
            }
            if (state != MessageLink::State::kOpen) return false;
        }
    }

  private:
    static constexpr double kConnectSeconds = 3;
    static constexpr double kAnswerSeconds = 5;
    static constexpr int kGraceSeconds = 3;
    static constexpr double kSilentSeconds = 3;

    handshake::Message hello(uint64_t server_token) const {
        handshake::Message message;
        message.type = handshake::MessageType::kHello;
        message.rank = self_.rank;
        message.size = self_.size;
        message.server_token = server_token;
        message.job_token = job_token_;
        message.host_hash = self_.host_hash;
        message.age_ms = milliseconds_since(began_);
        message.text = self_.device;
        return message;
    }

    // Takes a message in; false when it is not one that rank 0 sends now.
    bool understand(const handshake::Message& message) {
        using handshake::MessageType;
        heard_ = net::Clock::now();
        if (message.type == MessageType::kRefusal) throw Error(message.text);
        bool expected = message.size == self_.size;
        if (message.type == MessageType::kWaiting) {
            is_known_ = true;
            met_stranger_ = false;
            missing_ = message.text;
        } else if (message.type == MessageType::kPeer) {
            expected = expected && static_cast<size_t>(message.rank) == table_.size();
            table_.push_back({message.rank, message.size, message.host_hash, message.text});
        } else {
            expected = expected && message.type == MessageType::kStart &&
                       table_.size() == static_cast<size_t>(self_.size);
        }
        if (!expected) reason_ = "it says what rank 0 would not";
        return expected;
    }

    [[noreturn]] void fail_at_limit() const {
        // Rank 0 says every second who is missing.
        const double silence = std::chrono::duration<double>(net::Clock::now() - heard_).count();
        if (silence > kSilentSeconds) {
            throw Error(
                "rank 0 at " + where_ +
                format(" answered, but then gave no sign of life for %.0f s: it is stopped, or "
                       "cannot be reached any more",
                       silence));
        }
        if (missing_.empty()) {
            throw Error("rank 0 at " + where_ + " answered but did not start the run " +
                        within_limit(limit_s_));
        }
        throw Error(missing_ + format(" of %d did not arrive ", self_.size) +
                    within_limit(limit_s_) + "; rank 0 waits at " + where_);
    }
    [[noreturn]] void fail_over_version(uint32_t version) const {
        throw Error("rank 0 at " + where_ +
                    format(" speaks version %u of the protocol and this process version %u; start "
                           "the same program on all ranks",
                           version, handshake::kProtocolVersion));
    }

    const handshake::JobToken job_token_;
    const PeerInfo self_;
    const net::Deadline began_;
    const double limit_s_;
    const net::Deadline deadline_;
    std::string where_;
    std::string reason_;
    std::string missing_;    // as rank 0 told last
    net::Deadline heard_;    // when rank 0 spoke last
    bool is_known_ = false;  // rank 0 has taken the hello
    bool met_stranger_ = false;
    std::vector<PeerInfo> table_;
};

// Throws when a host's name means nothing. A name server that does not answer gets ten seconds.
inline void require_known_hosts(const std::vector<net::Endpoint>& where, double limit_s,
                                const std::string& begin) {
    const net::Deadline patience = net::after(std::min(limit_s, 10.0));
    for (const net::Endpoint& endpoint : where) {
        for (;;) {
            const net::Resolved found = net::resolve(endpoint, false);
            if (!found.addresses.empty()) break;
            if (!found.temporary || net::Clock::now() >= patience) {
                throw Error(begin + found.error + "; give rank 0's host name or address");
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(200));
        }
    }
}

// Waits between two attempts: longer each time, up to a second.
class Pause {
  public:
    void wait(net::Deadline deadline) {
        std::this_thread::sleep_until(std::min(deadline, net::after(seconds_)));
        seconds_ = std::min(1.0, 1.5 * seconds_);
    }

  private:
    double seconds_ = 0.02;
};

}  // namespace detail

// The side of all other ranks: connects to rank 0 at one of the endpoints `where` and waits until
// all ranks are there; fills `id`. Rank 0 may start later: a refused connection is tried again until
// `limit_s` seconds have passed. With a `server_token`, PeerServer::token(), nobody but that rank 0
// will do. Error, which begins with `what` where flags are to blame, when a host is unknown, rank 0
// refuses this process, or rank 0 or others do not come.
inline std::unique_ptr<Peers> join_peers(const std::vector<net::Endpoint>& where,
                                         const std::string& job_token, const PeerInfo& self,
                                         unsigned char (&id)[kIdBytes], double limit_s,
                                         const std::string& what, uint64_t server_token = 0,
                                         const StartTiming& timing = {}) {
    const std::string begin = what.empty() ? "" : what + ": ";
    detail::Joining joining(job_token, self, limit_s, timing);
    detail::require_known_hosts(where, limit_s, begin);
    detail::Pause pause;
    std::string places, reason;
    for (const net::Endpoint& endpoint : where) {
        places += (places.empty() ? "" : ", ") + net::endpoint_text(endpoint);
    }
    do {
        for (size_t i = 0; i < where.size(); ++i) {
            std::unique_ptr<Peers> peers = joining.attempt(where[i], server_token, id);
            if (peers != nullptr) return peers;
            // The likeliest address has the most to tell.
            if (i == 0) reason = joining.reason();
        }
        pause.wait(joining.deadline());
    } while (!joining.is_over());
    // With a server token the port is one that rank 0 was given by its system.
    if (joining.met_stranger() && server_token == 0) {
        reason +=
            "; another program may be listening there (ss -ltnp shows it; then give all ranks "
            "another port, -pp), or rank 0 is stopped";
    }
    throw Error(begin + "rank 0 did not answer at " + places + " " + detail::within_limit(limit_s) +
                ": " + reason);
}

// For a rank other than 0 that cannot start: tells the rank 0 that is, or within `limit_s` seconds will
// be, at one of the endpoints `where` that this rank will not come, and why: one line that names it,
// not empty. Returns whether a rank 0 has answered; that of a later start does not act on it. The
// arguments are join_peers'. Error when a host is unknown.
inline bool decline_peers(const std::vector<net::Endpoint>& where, const std::string& job_token,
                          const PeerInfo& self, const std::string& text, double limit_s,
                          const StartTiming& timing = {}) {
    detail::Joining joining(job_token, self, limit_s, timing);
    detail::require_known_hosts(where, limit_s, "");
    detail::Pause pause;
    do {
        for (const net::Endpoint& endpoint : where) {
            if (joining.decline(endpoint, 0, text)) return true;
        }
        pause.wait(joining.deadline());
    } while (!joining.is_over());
    return false;
}

}  // namespace llmc
