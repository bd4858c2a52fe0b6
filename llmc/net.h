// TCP sockets with deadlines: what processes need to find each other, on Linux, IPv4 and IPv6.
//
// Every socket is non-blocking and closed on exec, and every wait ends at a deadline. A peer that
// has gone never raises SIGPIPE, and a signal never cuts a wait short. Nothing here is encrypted.
#pragma once

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/printable.h"

namespace llmc::net {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

// The time `seconds` from now; a year at most, so that no sum overflows.
inline Deadline after(double seconds) {
    const double bounded = std::clamp(seconds, 0.0, 365.0 * 86400.0);
    return Clock::now() +
           std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded));
}

// Where a process listens. `host` is a name or an address; IPv6 with or without brackets.
struct Endpoint {
    std::string host;
    int port = 0;
};

// The host without the brackets that an IPv6 address may be written in.
inline std::string without_brackets(const std::string& host) {
    const bool has_them = host.size() > 2 && host.front() == '[' && host.back() == ']';
    return has_them ? host.substr(1, host.size() - 2) : host;
}

// "host:port", with brackets around an IPv6 address.
inline std::string endpoint_text(const Endpoint& endpoint) {
    const std::string host = without_brackets(endpoint.host);
    const bool is_v6 = host.find(':') != std::string::npos;
    return (is_v6 ? "[" + host + "]" : printable(host)) + ":" + std::to_string(endpoint.port);
}

// An open socket, or none. Owns the descriptor.
class Socket {
  public:
    Socket() = default;
    explicit Socket(int fd) : fd_(fd) {}
    Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Socket& operator=(Socket&& other) noexcept {
        if (this != &other) {
            close();
            fd_ = std::exchange(other.fd_, -1);
        }
        return *this;
    }
    Socket(const Socket&) = delete;
    Socket& operator=(const Socket&) = delete;
    ~Socket() { close(); }

    explicit operator bool() const { return fd_ >= 0; }
    // The descriptor, -1 for none.
    int fd() const { return fd_; }
    void close() {
        if (fd_ >= 0) ::close(std::exchange(fd_, -1));
    }

  private:
    int fd_ = -1;
};

inline std::string error_text(int number) {
    return std::system_category().message(number);
}

namespace detail {

struct Address {
    sockaddr_storage storage{};
    socklen_t length = 0;

    const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
    sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

inline bool is_loopback(const sockaddr* address) {
    if (address->sa_family == AF_INET) {
        const auto* v4 = reinterpret_cast<const sockaddr_in*>(address);
        return (ntohl(v4->sin_addr.s_addr) >> 24) == 127;
    }
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

// Without the port. IPv4 behind a dual-stack socket (::ffff:10.0.0.1) reads as IPv4.
inline std::string numeric(const sockaddr* address, socklen_t length) {
    char text[NI_MAXHOST] = "";
    if (::getnameinfo(address, length, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) != 0) {
        return "unknown address";
    }
    const std::string host = text;
    const std::string mapped = "::ffff:";
    const bool is_mapped =
        host.compare(0, mapped.size(), mapped) == 0 && host.find('.') != std::string::npos;
    return is_mapped ? host.substr(mapped.size()) : host;
}

inline int port_of(const Address& address) {
    if (address.storage.ss_family == AF_INET6) {
        return ntohs(reinterpret_cast<const sockaddr_in6&>(address.storage).sin6_port);
    }
    return ntohs(reinterpret_cast<const sockaddr_in&>(address.storage).sin_port);
}

inline void set_option(int fd, int level, int option, int value) {
    ::setsockopt(fd, level, option, &value, sizeof(value));
}

// Small messages go out at once; a host that has vanished is noticed some day.
inline void set_connection_options(int fd) {
    set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
}

inline Address address_of(const Socket& socket, int (*query)(int, sockaddr*, socklen_t*)) {
    Address address;
    address.length = sizeof(address.storage);
    if (query(socket.fd(), address.get(), &address.length) != 0) address = Address{};
    return address;
}

inline int local_name(int fd, sockaddr* address, socklen_t* length) {
    return ::getsockname(fd, address, length);
}
inline int remote_name(int fd, sockaddr* address, socklen_t* length) {
    return ::getpeername(fd, address, length);
}

}  // namespace detail

// Milliseconds until the deadline for poll(2), rounded up; 0 when it has passed.
inline int poll_ms(Deadline deadline) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    return static_cast<int>(std::clamp<long long>(left.count(), 0, INT_MAX));
}

// Waits until one of `events` (POLLIN, POLLOUT), an error or the end of the connection is there.
// False at the deadline.
inline bool wait_for(const Socket& socket, short events, Deadline deadline) {
    pollfd entry{socket.fd(), events, 0};
    for (;;) {
        const int ready = ::poll(&entry, 1, poll_ms(deadline));
        if (ready > 0) return true;
        if (ready < 0 && errno != EINTR) return false;
        if (ready == 0 && Clock::now() >= deadline) return false;
    }
}

// The addresses of a name, or why there are none.
struct Resolved {
    std::vector<detail::Address> addresses;
    std::string error;
    bool temporary = false;  // the name server did not answer: it may later
};

// Looks a name or an address up; an empty host gives the wildcard addresses of this machine, to
// listen on. May take as long as the system's name lookup does.
inline Resolved resolve(const Endpoint& endpoint, bool to_listen) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV | (to_listen ? AI_PASSIVE : 0);
    const std::string host = without_brackets(endpoint.host);
    Resolved result;
    if (host.empty() && !to_listen) {
        result.error = "the host's name is empty";
        return result;
    }
    if (endpoint.port < 0 || endpoint.port > 65535) {
        result.error = format("port %d is not between 0 and 65535", endpoint.port);
        return result;
    }
    addrinfo* list = nullptr;
    const int status = ::getaddrinfo(host.empty() ? nullptr : host.c_str(),
                                     std::to_string(endpoint.port).c_str(), &hints, &list);
    if (status != 0) {
        const std::string why = status == EAI_SYSTEM ? error_text(errno) : ::gai_strerror(status);
        result.error = printable(host) + " cannot be resolved (" + why + ")";
        result.temporary = status == EAI_AGAIN;
        return result;
    }
    for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
        if (entry->ai_addrlen > sizeof(sockaddr_storage)) continue;
        detail::Address address;
        std::memcpy(&address.storage, entry->ai_addr, entry->ai_addrlen);
        address.length = entry->ai_addrlen;
        result.addresses.push_back(address);
    }
    ::freeaddrinfo(list);
    if (result.addresses.empty()) result.error = printable(host) + " has no IPv4 or IPv6 address";
    return result;
}

namespace detail {

// Binds and listens; an empty Socket and errno's number on failure.
inline Socket listen_at(const Address& address, int* number) {
    Socket socket(
        ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!socket) {
        *number = errno;
        return {};
    }
    // Connections of a killed run may still be dying on this port.
    set_option(socket.fd(), SOL_SOCKET, SO_REUSEADDR, 1);
    if (address.storage.ss_family == AF_INET6) {
        set_option(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
    }
    if (::bind(socket.fd(), address.get(), address.length) != 0 ||
        ::listen(socket.fd(), SOMAXCONN) != 0) {
        *number = errno;
        return {};
    }
    return socket;
}

inline std::string listen_advice(const std::string& host, int port, int number) {
    const std::string where = host.empty() ? "this machine" : printable(host);
    if (number == EADDRINUSE) {
        return format(
            "port %d is in use on %s, by another run or by a second rank 0; choose another, the "
            "same on all ranks",
            port, where.c_str());
    }
    if (number == EADDRNOTAVAIL) {
        return where + " is not an address of this machine; give the address of rank 0's machine";
    }
    if (number == EACCES) {
        return format("port %d may not be used by this user; choose one above 1023", port);
    }
    return format("cannot listen on port %d of %s: ", port, where.c_str()) + error_text(number);
}

}  // namespace detail

// Listens on one address: the first of `host`'s that can be bound, loopback addresses last, since
// a machine's own name may stand for one. Host "" is all interfaces, IPv4 and IPv6; port 0 is any
// free one. A port in use is tried for `patience_s` seconds, since a killed run may still be on its
// way out. Throws Error, a line that begins with `what` (the flags that the values came from).
inline Socket listen_on(const std::string& host, int port, const std::string& what,
                        double patience_s = 3) {
    const Deadline give_up = after(patience_s);
    const std::string begin = what.empty() ? "" : what + ": ";
    Resolved found = resolve({host, port}, true);
    if (found.addresses.empty()) {
        throw Error(begin + found.error + "; give rank 0's host name or address");
    }
    const bool any = host.empty();
    std::stable_sort(found.addresses.begin(), found.addresses.end(), [&](auto& a, auto& b) {
        // All interfaces: IPv6 takes IPv4 connections, too.
        if (any) return a.storage.ss_family == AF_INET6 && b.storage.ss_family != AF_INET6;
        return !detail::is_loopback(a.get()) && detail::is_loopback(b.get());
    });
    for (;;) {
        int number = 0;
        for (const detail::Address& address : found.addresses) {
            int this_number = 0;
            Socket socket = detail::listen_at(address, &this_number);
            if (socket) return socket;
            if (number != EADDRINUSE) number = this_number;
        }
        if (number != EADDRINUSE || port == 0 || Clock::now() >= give_up) {
            throw Error(begin + detail::listen_advice(host, port, number));
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
}

// The port that a socket is bound to, 0 when it is not.
inline int local_port(const Socket& socket) {
    return detail::port_of(detail::address_of(socket, detail::local_name));
}

// Its own address, or the other side's, in numbers.
inline std::string local_address(const Socket& socket) {
    const detail::Address address = detail::address_of(socket, detail::local_name);
    return detail::numeric(address.get(), address.length);
}
inline std::string remote_address(const Socket& socket) {
    const detail::Address address = detail::address_of(socket, detail::remote_name);
    return detail::numeric(address.get(), address.length);
}

// A connection that is waiting, or an empty Socket: there is none, or (`exhausted`) this process or
// machine has no descriptor or memory left for it. Error when the listener does not work.
inline Socket try_accept(const Socket& listener, bool* exhausted = nullptr) {
    if (exhausted != nullptr) *exhausted = false;
    for (;;) {
        Socket socket(::accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
        if (socket) {
            detail::set_connection_options(socket.fd());
            return socket;
        }
        switch (errno) {
            case EAGAIN:
                return {};
            case EMFILE:
            case ENFILE:
            case ENOBUFS:
            case ENOMEM:
                if (exhausted != nullptr) *exhausted = true;
                return {};
            case EBADF:
            case EINVAL:
            case ENOTSOCK:
            case EOPNOTSUPP:
                throw Error("cannot accept connections: " + error_text(errno));
            default:  // EINTR, or a connection that ended before it was accepted
                break;
        }
    }
}

// The next connection, or an empty Socket at the deadline.
inline Socket accept_one(const Socket& listener, Deadline deadline) {
    while (wait_for(listener, POLLIN, deadline)) {
        bool exhausted = false;
        Socket socket = try_accept(listener, &exhausted);
        if (socket) return socket;
        if (Clock::now() >= deadline) break;
        if (exhausted) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return {};
}

namespace detail {

// A TCP socket that calls a port of its own machine from that same port, where nobody listens, is
// connected to itself. It would also keep rank 0 from listening there.
inline bool is_connected_to_itself(const Socket& socket) {
    const Address local = address_of(socket, local_name);
    const Address remote = address_of(socket, remote_name);
    return port_of(local) == port_of(remote) &&
           numeric(local.get(), local.length) == numeric(remote.get(), remote.length);
}

inline Socket connect_address(const Address& address, Deadline deadline, std::string* reason) {
    Socket socket(
        ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!socket) {
        *reason = error_text(errno);
        return {};
    }
    int number = ::connect(socket.fd(), address.get(), address.length) == 0 ? 0 : errno;
    // An interrupted connect goes on in the background, as one that is in progress does.
    if (number == EINPROGRESS || number == EINTR) {
        socklen_t length = sizeof(number);
        if (!wait_for(socket, POLLOUT, deadline)) {
            number = ETIMEDOUT;
        } else if (::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &number, &length) != 0) {
            number = errno;
        }
    }
    if (number == 0 && is_connected_to_itself(socket)) number = ECONNREFUSED;
    if (number != 0) {
        *reason = error_text(number);
        return {};
    }
    set_connection_options(socket.fd());
    return socket;
}

}  // namespace detail

// Connects: tries every address of the host once, sharing the time to the deadline among them. An
// empty Socket when none took it, with the last one's `reason` ("Connection refused").
inline Socket connect_to(const Endpoint& endpoint, Deadline deadline,
                         std::string* reason = nullptr) {
    std::string text;
    const Resolved found = resolve(endpoint, false);
    if (found.addresses.empty()) text = found.error;
    size_t left = found.addresses.size();
    for (const detail::Address& address : found.addresses) {
        const Deadline::duration time = deadline - Clock::now();
        const Deadline part = Clock::now() + time / static_cast<Deadline::duration::rep>(left--);
        Socket socket = detail::connect_address(address, part, &text);
        if (socket) return socket;
    }
    if (reason != nullptr) *reason = text;
    return {};
}

// Sends `bytes` bytes. False when the other side has gone or the deadline passed; some may have
// been sent then.
inline bool send_all(const Socket& socket, const void* data, size_t bytes, Deadline deadline) {
    const char* next = static_cast<const char*>(data);
    while (bytes > 0) {
        const ssize_t sent = ::send(socket.fd(), next, bytes, MSG_NOSIGNAL);
        if (sent >= 0) {
            next += sent;
            bytes -= static_cast<size_t>(sent);
        } else if (errno == EAGAIN) {
            if (!wait_for(socket, POLLOUT, deadline)) return false;
        } else if (errno != EINTR) {
            return false;
        }
    }
    return true;
}

// Receives exactly `bytes` bytes. False when the connection ended before or the deadline passed.
inline bool receive_all(const Socket& socket, void* data, size_t bytes, Deadline deadline) {
    char* next = static_cast<char*>(data);
    while (bytes > 0) {
        const ssize_t received = ::recv(socket.fd(), next, bytes, 0);
        if (received > 0) {
            next += received;
            bytes -= static_cast<size_t>(received);
        } else if (received == 0) {
            return false;
        } else if (errno == EAGAIN) {
            if (!wait_for(socket, POLLIN, deadline)) return false;
        } else if (errno != EINTR) {
            return false;
        }
    }
    return true;
}

namespace detail {

// Does NCCL_SOCKET_IFNAME's list name this interface? Entries are beginnings of names, or whole
// names behind "=" (NCCL's documentation of that variable).
inline bool names_interface(std::string list, const std::string& name) {
    const bool whole = !list.empty() && list[0] == '=';
    if (whole) list.erase(0, 1);
    for (size_t begin = 0; begin <= list.size();) {
        const size_t end = std::min(list.find(',', begin), list.size());
        const std::string entry = list.substr(begin, end - begin);
        if (!entry.empty() && (whole ? name == entry : name.compare(0, entry.size(), entry) == 0)) {
            return true;
        }
        begin = end + 1;
    }
    return false;
}

// Which interface to try first: what NCCL_SOCKET_IFNAME names, then networks, then what is likely
// known on this machine alone, loopback last.
inline int interface_order(const std::string& name, bool loopback, const std::string& choice) {
    const bool excludes = !choice.empty() && choice[0] == '^';
    const bool named = names_interface(excludes ? choice.substr(1) : choice, name);
    if (named && !excludes) return 0;
    if (loopback) return 3;
    return named || names_interface("docker,virbr,veth,br-,cni,podman", name) ? 2 : 1;
}

}  // namespace detail

// Addresses, in numbers, under which this machine may be reached, likely ones first: of all
// interfaces that are up, without IPv6's link-local ones, which mean nothing elsewhere.
inline std::vector<std::string> own_addresses() {
    ifaddrs* list = nullptr;
    if (::getifaddrs(&list) != 0) return {"127.0.0.1"};
    const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, ::freeifaddrs);
    const char* choice = std::getenv("NCCL_SOCKET_IFNAME");
    std::vector<std::pair<int, std::string>> found;
    for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
        const sockaddr* address = entry->ifa_addr;
        if (address == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
        const bool v6 = address->sa_family == AF_INET6;
        if (!v6 && address->sa_family != AF_INET) continue;
        if (v6) {
            const auto* whole = reinterpret_cast<const sockaddr_in6*>(address);
            if (IN6_IS_ADDR_LINKLOCAL(&whole->sin6_addr)) continue;
        }
        const bool loopback = detail::is_loopback(address);
        const int order = detail::interface_order(entry->ifa_name, loopback, choice ? choice : "");
        found.emplace_back(
            2 * order + (v6 ? 1 : 0),
            detail::numeric(address, v6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in)));
    }
    std::stable_sort(found.begin(), found.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<std::string> addresses;
    for (auto& [order, text] : found) addresses.push_back(std::move(text));
    if (addresses.empty()) addresses.push_back("127.0.0.1");
    return addresses;
}

}  // namespace llmc::net
