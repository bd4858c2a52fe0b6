// How the ranks of llmc/cpu/nccl.h learn each other's addresses: a small store over TCP in the
// process that made the ncclUniqueId, and its clients.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <iterator>
#include <list>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/net.h"

namespace llmc::standin {

// Thrown where a wait has been ended, because of a failure or an abort that is already recorded.
struct Severed : Error {
    Severed() : Error("the communicator has been cut off") {}
};

// What the store answers a rank that does not fit: two of one number, or another count of ranks.
struct Refused : Error {
    using Error::Error;
};

constexpr size_t kIdBytes = 128;

// Where a store listens, and the proof that it is the right one. Travels as the 128 bytes of an
// ncclUniqueId: mark, port, cookie, and as many of the addresses as fit, each ended by a zero byte.
struct StoreAddress {
    static constexpr uint32_t kMark = 0x4c474c31;
    using Cookie = std::array<unsigned char, 16>;

    Cookie cookie{};
    uint32_t port = 0;
    std::vector<std::string> hosts;

    void pack(char (&id)[kIdBytes]) const {
        std::memset(id, 0, kIdBytes);
        size_t at = 0;
        const auto put = [&](const void* data, size_t bytes) {
            std::memcpy(id + at, data, bytes);
            at += bytes;
        };
        put(&kMark, sizeof(kMark));
        put(&port, sizeof(port));
        put(cookie.data(), cookie.size());
        for (const std::string& host : hosts) {
            if (at + host.size() + 1 < kIdBytes) put(host.c_str(), host.size() + 1);
        }
    }
    // False when the bytes are no id.
    bool unpack(const char (&id)[kIdBytes]) {
        uint32_t mark = 0;
        size_t at = 0;
        const auto take = [&](void* data, size_t bytes) {
            std::memcpy(data, id + at, bytes);
            at += bytes;
        };
        take(&mark, sizeof(mark));
        take(&port, sizeof(port));
        take(cookie.data(), cookie.size());
        hosts.clear();
        while (at < kIdBytes && id[at] != '\0') {
            const size_t length = ::strnlen(id + at, kIdBytes - at);
            hosts.emplace_back(id + at, length);
            at += length + 1;
        }
        return mark == kMark && port > 0 && port <= 65535 && !hosts.empty();
    }
};

namespace store {

struct Hello {
    uint32_t mark;
    int32_t rank, size;
    StoreAddress::Cookie cookie;
};
struct Answer {
    uint32_t refused;  // then a text of `bytes` bytes follows
    uint32_t bytes;
};
constexpr int kMaxRanks = 4096;
constexpr uint32_t kMaxBytes = 1 << 20;  // of one rank's addresses

inline bool send_answer(const net::Socket& socket, bool refused, const void* data, size_t bytes) {
    const Answer answer{refused ? 1u : 0u, static_cast<uint32_t>(bytes)};
    const net::Deadline limit = net::after(5);
    return net::send_all(socket, &answer, sizeof(answer), limit) &&
           net::send_all(socket, data, bytes, limit);
}

}  // namespace store

// Serves one communicator: collects each rank's bytes and, when all are there, tells all of them
// to each. Whoever does not know the cookie is dropped. A rank that leaves before may come again.
class StoreServer {
  public:
    StoreServer() : listener_(net::listen_on("", 0, "ncclGetUniqueId")) {
        std::random_device random;
        for (unsigned char& byte : address_.cookie) byte = static_cast<unsigned char>(random());
        address_.port = static_cast<uint32_t>(net::local_port(listener_));
        address_.hosts = net::own_addresses();
        thread_ = std::thread([this] { serve(); });
    }
    ~StoreServer() {
        stop_ = true;
        thread_.join();
    }
    const StoreAddress& address() const { return address_; }
    bool finished() const { return finished_; }

  private:
    struct Client {
        net::Socket socket;
        net::Deadline patience;  // for those who have not said who they are
        std::vector<char> received;
        int rank = -1;
        bool complete = false;
    };

    void serve() {
        try {
            while (!stop_ && !all_here()) {
                std::vector<pollfd> entries{{listener_.fd(), POLLIN, 0}};
                for (const Client& client : clients_) {
                    entries.push_back({client.socket.fd(), POLLIN, 0});
                }
                ::poll(entries.data(), entries.size(), kTickMs);
                if (net::Socket socket = net::try_accept(listener_)) {
                    clients_.push_back({std::move(socket), net::after(10), {}});
                }
                for (auto client = clients_.begin(); client != clients_.end();) {
                    client = read(*client) ? std::next(client) : clients_.erase(client);
                }
            }
            if (!stop_) answer_all();
        } catch (const std::exception&) {
            // The ranks that wait see their connection end, and say so.
        }
        clients_.clear();
        listener_.close();
        finished_ = true;
    }
    bool all_here() const {
        const auto complete = [](const Client& c) { return c.complete; };
        return size_ > 0 && std::count_if(clients_.begin(), clients_.end(), complete) == size_;
    }
    void answer_all() {
        std::vector<std::vector<char>> by_rank(static_cast<size_t>(size_));
        for (const Client& client : clients_) {
            if (client.complete) by_rank[static_cast<size_t>(client.rank)] = client.received;
        }
        std::vector<char> all;
        for (const auto& bytes : by_rank) all.insert(all.end(), bytes.begin(), bytes.end());
        for (const Client& client : clients_) {
            if (client.complete) store::send_answer(client.socket, false, all.data(), all.size());
        }
    }
    // Takes what has come. False when the client is to be dropped.
    bool read(Client& client) {
        char buffer[4096];
        for (;;) {
            const ssize_t n = ::recv(client.socket.fd(), buffer, sizeof(buffer), 0);
            if (n > 0) {
                client.received.insert(client.received.end(), buffer, buffer + n);
                if (client.received.size() > sizeof(uint32_t) + store::kMaxBytes) return false;
            } else if (n == 0) {
                return false;
            } else if (errno == EAGAIN) {
                break;
            } else if (errno != EINTR) {
                return false;
            }
        }
        if (client.rank < 0) {
            if (client.received.size() < sizeof(store::Hello)) {
                return net::Clock::now() < client.patience;
            }
            if (!greet(client)) return false;
        }
        uint32_t bytes = 0;
        if (client.complete || client.received.size() < sizeof(bytes)) return true;
        std::memcpy(&bytes, client.received.data(), sizeof(bytes));
        if (bytes > store::kMaxBytes) return false;
        client.complete = client.received.size() == sizeof(bytes) + bytes;
        return true;
    }
    bool greet(Client& client) {
        store::Hello hello;
        std::memcpy(&hello, client.received.data(), sizeof(hello));
        if (hello.mark != StoreAddress::kMark || hello.cookie != address_.cookie) return false;
        client.received.erase(client.received.begin(), client.received.begin() + sizeof(hello));
        std::string problem;
        if (hello.size < 1 || hello.size > store::kMaxRanks || hello.rank < 0 ||
            hello.rank >= hello.size) {
            problem = format("rank %d of %d is not possible", hello.rank, hello.size);
        } else if (size_ != 0 && hello.size != size_) {
            problem = format("rank %d expects %d ranks, the others expect %d", hello.rank,
                             hello.size, size_);
        }
        for (const Client& other : clients_) {
            if (&other != &client && other.rank == hello.rank) {
                problem = format("there are two ranks %d", hello.rank);
            }
        }
        if (!store::send_answer(client.socket, !problem.empty(), problem.data(), problem.size()) ||
            !problem.empty()) {
            return false;
        }
        client.rank = hello.rank;
        size_ = hello.size;
        return true;
    }

    static constexpr int kTickMs = 50;
    net::Socket listener_;
    StoreAddress address_;
    std::list<Client> clients_;
    int size_ = 0;  // as the first rank has it; 0 before
    std::atomic<bool> stop_{false};
    std::atomic<bool> finished_{false};
    std::thread thread_;
};

// A rank's side of the store. `stop` ends every wait with Severed.
class StoreClient {
  public:
    // Throws Error when nobody answers at any of the addresses, Refused with the store's reason.
    StoreClient(const StoreAddress& address, int rank, int size, const std::atomic<bool>& stop)
        : size_(size), stop_(stop) {
        const store::Hello hello{StoreAddress::kMark, rank, size, address.cookie};
        const net::Deadline give_up = net::after(2);
        std::string reason;
        do {
            for (const std::string& host : address.hosts) {
                if (stop_) throw Severed();
                const net::Endpoint where{host, static_cast<int>(address.port)};
                socket_ = net::connect_to(where, net::after(2), &reason);
                if (!socket_) {
                    reason = net::endpoint_text(where) + ": " + reason;
                    continue;
                }
                // Another machine's process may listen there: only the right one answers.
                if (net::send_all(socket_, &hello, sizeof(hello), net::after(1)) &&
                    answer(net::after(5)).has_value()) {
                    return;
                }
                reason = net::endpoint_text(where) + " does not know this id";
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
        } while (net::Clock::now() < give_up);
        throw Error("the process that made the unique id does not answer; last tried " + reason);
    }
    // This machine's address on the network by which the store is reached.
    std::string local_address() const { return net::local_address(socket_); }

    // Gives `mine` and returns everybody's, by rank, once all ranks have given theirs.
    std::vector<std::vector<char>> exchange(const std::vector<char>& mine) {
        const uint32_t bytes = static_cast<uint32_t>(mine.size());
        std::optional<std::vector<char>> all;
        if (net::send_all(socket_, &bytes, sizeof(bytes), net::after(5)) &&
            net::send_all(socket_, mine.data(), mine.size(), net::after(5))) {
            all = answer(net::after(1e9));
        }
        if (!all) throw Error("the process that made the unique id ended during the start");
        std::vector<std::vector<char>> by_rank;
        const char* next = all->data();
        size_t left = all->size();
        for (int rank = 0; rank < size_; ++rank) {
            uint32_t length = 0;
            if (left >= sizeof(length)) std::memcpy(&length, next, sizeof(length));
            if (left < sizeof(length) + length) throw Error("the store's answer is too short");
            by_rank.emplace_back(next + sizeof(length), next + sizeof(length) + length);
            next += sizeof(length) + length;
            left -= sizeof(length) + length;
        }
        return by_rank;
    }

  private:
    std::optional<std::vector<char>> answer(net::Deadline deadline) {
        store::Answer head{};
        if (!receive(&head, sizeof(head), deadline)) return std::nullopt;
        if (head.bytes > uint64_t{store::kMaxRanks} * store::kMaxBytes) return std::nullopt;
        std::vector<char> data(head.bytes);
        if (!receive(data.data(), data.size(), deadline)) return std::nullopt;
        if (head.refused != 0) throw Refused(std::string(data.begin(), data.end()));
        return data;
    }
    bool receive(void* data, size_t bytes, net::Deadline deadline) {
        char* next = static_cast<char*>(data);
        while (bytes > 0) {
            if (stop_) throw Severed();
            if (net::Clock::now() >= deadline) return false;
            if (!net::wait_for(socket_, POLLIN, net::after(0.05))) continue;
            const ssize_t n = ::recv(socket_.fd(), next, bytes, 0);
            if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return false;
            if (n < 0) continue;
            next += n;
            bytes -= static_cast<size_t>(n);
        }
        return true;
    }
    const int size_;
    const std::atomic<bool>& stop_;
    net::Socket socket_;
};

}  // namespace llmc::standin
