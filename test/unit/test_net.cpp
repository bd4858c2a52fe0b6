// llmc/net.h: sockets with deadlines, names and addresses as users give them.
#include "llmc/net.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/time.h>
#include <sys/wait.h>

#include <csignal>
#include <future>

namespace net = llmc::net;
using llmc::Error;
using net::Socket;

namespace {

// The address list of a name that the test makes up, in this order.
const char* const kTwoAddresses = "two-addresses.test";
const char* const kOwnName = "own-name.test";
const char* const kNoAnswer = "name-server-is-down.test";

using GetAddrInfo = int (*)(const char*, const char*, const addrinfo*, addrinfo**);

}  // namespace

// Stands in for the C library's, so that names do not depend on the machine.
extern "C" int getaddrinfo(const char* host, const char* port, const addrinfo* hints,
                           addrinfo** list) {
    static const auto real = reinterpret_cast<GetAddrInfo>(dlsym(RTLD_NEXT, "getaddrinfo"));
    const std::string name = host == nullptr ? "" : host;
    if (name == kNoAnswer) return EAI_AGAIN;
    if (name.find(".invalid") != std::string::npos) return EAI_NONAME;
    if (name != kTwoAddresses && name != kOwnName) return real(host, port, hints, list);
    addrinfo* second = nullptr;
    const std::string other = name == kOwnName ? net::own_addresses()[0] : "127.0.0.1";
    if (real("127.0.0.2", port, hints, list) != 0) return EAI_FAIL;
    if (real(other.c_str(), port, hints, &second) != 0) return EAI_FAIL;
    (*list)->ai_next = second;
    return 0;
}

namespace {

template <class Action>
std::string message(Action&& action) {
    try {
        action();
    } catch (const Error& error) {
        return error.what();
    }
    return "no error";
}

double seconds_since(net::Deadline start) {
    return std::chrono::duration<double>(net::Clock::now() - start).count();
}

struct Pair {
    Socket client, server;
};

Pair connected(const std::string& host = "127.0.0.1") {
    const Socket listener = net::listen_on(host, 0, "");
    Pair pair;
    pair.client = net::connect_to({host, net::local_port(listener)}, net::after(5));
    pair.server = net::accept_one(listener, net::after(5));
    EXPECT_TRUE(pair.client && pair.server);
    return pair;
}

TEST(Net, BytesArriveAsTheyWereSent) {
    const Pair pair = connected();
    std::string sent(3'000'000, 'x'), received(sent.size(), '?');
    for (size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<char>(i * i >> 3);
    auto sending = std::async(std::launch::async, [&] {
        return net::send_all(pair.client, sent.data(), sent.size(), net::after(10));
    });
    EXPECT_TRUE(net::receive_all(pair.server, received.data(), received.size(), net::after(10)));
    EXPECT_TRUE(sending.get());
    EXPECT_TRUE(sent == received);
}

TEST(Net, SocketsDoNotBlockAndAreNotInherited) {
    const Socket listener = net::listen_on("127.0.0.1", 0, "");
    const Pair pair = connected();
    for (const int fd : {listener.fd(), pair.client.fd(), pair.server.fd()}) {
        EXPECT_NE(fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
        EXPECT_NE(fcntl(fd, F_GETFL) & O_NONBLOCK, 0);
    }
}

TEST(Net, MovedSocketsHaveOneOwner) {
    Pair pair = connected();
    const int fd = pair.client.fd();
    Socket other = std::move(pair.client);
    EXPECT_FALSE(pair.client);
    EXPECT_EQ(other.fd(), fd);
    other = Socket();
    EXPECT_EQ(fcntl(fd, F_GETFD), -1);
    char byte;
    EXPECT_FALSE(net::receive_all(pair.server, &byte, 1, net::after(5)));
}

TEST(Net, EveryWaitEndsAtItsDeadline) {
    const Socket listener = net::listen_on("127.0.0.1", 0, "");
    const Pair pair = connected();
    char byte;
    const net::Deadline start = net::Clock::now();
    EXPECT_FALSE(net::accept_one(listener, net::after(0.05)));
    EXPECT_FALSE(net::receive_all(pair.server, &byte, 1, net::after(0.05)));
    const std::string much(64 << 20, 'x');
    EXPECT_FALSE(net::send_all(pair.client, much.data(), much.size(), net::after(0.05)));
    EXPECT_GE(seconds_since(start), 0.15);
    EXPECT_LT(seconds_since(start), 20);
    EXPECT_GT(net::after(1e300), net::after(1e6));
}

TEST(Net, SendingToAClosedConnectionIsNoSignal) {
    Pair pair = connected();
    pair.server.close();
    const std::string text(1 << 20, 'x');
    EXPECT_FALSE(net::send_all(pair.client, text.data(), text.size(), net::after(5)) &&
                 net::send_all(pair.client, text.data(), text.size(), net::after(5)));
}

TEST(Net, SignalsCutNoWaitShort) {
    struct sigaction action {
    }, old_action{};
    action.sa_handler = [](int) {};  // without SA_RESTART
    sigaction(SIGALRM, &action, &old_action);
    const itimerval often{{0, 2000}, {0, 2000}}, never{};
    const Socket listener = net::listen_on("127.0.0.1", 0, "");
    auto client = std::async(std::launch::async, [port = net::local_port(listener)] {
        std::this_thread::sleep_for(std::chrono::milliseconds(60));
        Socket socket = net::connect_to({"127.0.0.1", port}, net::after(5));
        std::this_thread::sleep_for(std::chrono::milliseconds(60));
        return net::send_all(socket, "ok", 2, net::after(5));
    });
    setitimer(ITIMER_REAL, &often, nullptr);
    const Socket socket = net::accept_one(listener, net::after(5));
    char text[2] = {};
    EXPECT_TRUE(socket);
    EXPECT_TRUE(net::receive_all(socket, text, 2, net::after(5)));
    setitimer(ITIMER_REAL, &never, nullptr);
    EXPECT_TRUE(client.get());
    sigaction(SIGALRM, &old_action, nullptr);
}

TEST(Net, ListensOnTheGivenAddressOnly) {
    const Socket listener = net::listen_on("127.0.0.1", 0, "");
    EXPECT_EQ(net::local_address(listener), "127.0.0.1");
    std::string reason;
    EXPECT_FALSE(net::connect_to({"127.0.0.2", net::local_port(listener)}, net::after(2), &reason));
    EXPECT_EQ(reason, "Connection refused");
}

TEST(Net, EmptyHostListensEverywhere) {
    const Socket listener = net::listen_on("", 0, "");
    for (const char* host : {"127.0.0.1", "127.0.0.2"}) {
        ASSERT_TRUE(net::connect_to({host, net::local_port(listener)}, net::after(2)));
        const Socket server = net::accept_one(listener, net::after(2));
        // Not ::ffff:127.0.0.1, though the listener may be one for IPv6.
        EXPECT_EQ(net::local_address(server), host);
        EXPECT_EQ(net::remote_address(server), "127.0.0.1");
    }
}

bool has_ipv6() {
    return message([] { net::listen_on("::1", 0, ""); }) == "no error";
}

TEST(Net, Ipv6WithAndWithoutBrackets) {
    if (!has_ipv6()) GTEST_SKIP() << "no IPv6 on this machine";
    for (const char* host : {"::1", "[::1]"}) {
        const Socket listener = net::listen_on(host, 0, "");
        EXPECT_EQ(net::local_address(listener), "::1");
        for (const char* other : {"::1", "[::1]", "0:0::1"}) {
            const int port = net::local_port(listener);
            EXPECT_TRUE(net::connect_to({other, port}, net::after(2))) << other;
        }
    }
}

TEST(Net, EndpointsReadAsUsersWriteThem) {
    EXPECT_EQ(net::endpoint_text({"node1", 17171}), "node1:17171");
    EXPECT_EQ(net::endpoint_text({"fd00::2", 17171}), "[fd00::2]:17171");
    EXPECT_EQ(net::endpoint_text({"[fd00::2]", 17171}), "[fd00::2]:17171");
    EXPECT_EQ(net::endpoint_text({"a\nb", 1}), "a?b:1");
    EXPECT_EQ(net::endpoint_text({"", 1}), "'':1");
}

TEST(Net, EveryAddressOfANameIsTried) {
    const Socket listener = net::listen_on("127.0.0.1", 0, "");
    const net::Endpoint endpoint{kTwoAddresses, net::local_port(listener)};
    EXPECT_TRUE(net::connect_to(endpoint, net::after(2)));
    // To listen on, the first one that is free: 127.0.0.2 at first.
    const Socket first = net::listen_on(kTwoAddresses, endpoint.port, "");
    EXPECT_EQ(net::local_address(first), "127.0.0.2");
    Socket none;
    EXPECT_EQ(message([&] { none = net::listen_on(kTwoAddresses, endpoint.port, "-pp", 0.2); }),
              llmc::format("-pp: port %d is in use on two-addresses.test, by another run or by a "
                           "second rank 0; choose another, the same "
                           "on all ranks",
                           endpoint.port));
}

TEST(Net, MachineThatCallsItselfLoopbackListensOnTheNetwork) {
    const Socket listener = net::listen_on(kOwnName, 0, "");
    EXPECT_EQ(net::local_address(listener), net::own_addresses()[0]);
}

TEST(Net, BadHostsAreNamed) {
    EXPECT_EQ(message([] { net::listen_on("nohost.invalid", 1234, "-ps nohost.invalid"); }),
              "-ps nohost.invalid: nohost.invalid cannot be resolved (Name or service not known); "
              "give rank 0's host name or address");
    EXPECT_EQ(message([] { net::listen_on("203.0.113.9", 0, "-ps 203.0.113.9"); }),
              "-ps 203.0.113.9: 203.0.113.9 is not an address of this machine; give the address of "
              "rank 0's machine");
    EXPECT_EQ(
        message([] { net::listen_on("", 70000, "-pp 70000"); }),
        "-pp 70000: port 70000 is not between 0 and 65535; give rank 0's host name or address");
    std::string reason;
    EXPECT_FALSE(net::connect_to({"", 1234}, net::after(1), &reason));
    EXPECT_EQ(reason, "the host's name is empty");
    EXPECT_FALSE(net::connect_to({"nohost.invalid", 1234}, net::after(1), &reason));
    EXPECT_EQ(reason, "nohost.invalid cannot be resolved (Name or service not known)");
    EXPECT_FALSE(net::resolve({"nohost.invalid", 1234}, false).temporary);
    EXPECT_TRUE(net::resolve({kNoAnswer, 1234}, false).temporary);
}

TEST(Net, PortOfAKilledProcessIsFreeAtOnce) {
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) {
        // A listener and a connection, as rank 0 has them.
        const Socket listener = net::listen_on("127.0.0.1", 0, "");
        const int port = net::local_port(listener);
        const Socket client = net::connect_to({"127.0.0.1", port}, net::after(5));
        const Socket server = net::accept_one(listener, net::after(5));
        if (write(ends[1], &port, sizeof(port)) == sizeof(port)) pause();
        _exit(1);
    }
    int port = 0;
    ASSERT_EQ(read(ends[0], &port, sizeof(port)), static_cast<ssize_t>(sizeof(port)));
    const Socket client = net::connect_to({"127.0.0.1", port}, net::after(5));
    EXPECT_TRUE(client);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    close(ends[0]);
    close(ends[1]);
    // At the first try.
    EXPECT_EQ(message([&] { net::listen_on("127.0.0.1", port, "", 0); }), "no error");
}

TEST(Net, PortThatIsFreedMeanwhileIsTaken) {
    Socket listener = net::listen_on("127.0.0.1", 0, "");
    const int port = net::local_port(listener);
    auto later = std::async(std::launch::async, [port] {
        return message([port] { net::listen_on("127.0.0.1", port, ""); });
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    listener.close();
    EXPECT_EQ(later.get(), "no error");
}

TEST(Net, SocketThatCalledItselfIsNotAServer) {
    // What a client does now and then that calls a local port where nobody listens yet.
    const Socket socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    net::detail::Address address;
    auto* v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
    v4->sin_family = AF_INET;
    v4->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(bind(socket.fd(), address.get(), sizeof(sockaddr_in)), 0);
    v4->sin_port = htons(static_cast<uint16_t>(net::local_port(socket)));
    ASSERT_EQ(connect(socket.fd(), address.get(), sizeof(sockaddr_in)), 0);
    EXPECT_TRUE(net::detail::is_connected_to_itself(socket));
    const Pair pair = connected();
    EXPECT_FALSE(net::detail::is_connected_to_itself(pair.client));
    EXPECT_FALSE(net::detail::is_connected_to_itself(pair.server));
}

TEST(Net, OwnAddressesAreListedLikelyOnesFirst) {
    const char* before = std::getenv("NCCL_SOCKET_IFNAME");
    const std::string kept = before == nullptr ? "" : before;
    unsetenv("NCCL_SOCKET_IFNAME");
    const std::vector<std::string> addresses = net::own_addresses();
    const auto is_loopback = [](const std::string& a) {
        return a == "::1" || a.compare(0, 4, "127.") == 0;
    };
    ASSERT_FALSE(addresses.empty());
    EXPECT_TRUE(is_loopback(addresses.back())) << addresses.back();
    EXPECT_TRUE(std::is_partitioned(addresses.begin(), addresses.end(),
                                    [&](const std::string& a) { return !is_loopback(a); }));
    const Socket listener = net::listen_on("", 0, "");
    for (const std::string& address : addresses) {
        EXPECT_EQ(address.find("fe80"), std::string::npos) << address;
        EXPECT_TRUE(net::connect_to({address, net::local_port(listener)}, net::after(2)))
            << address;
    }
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
    EXPECT_EQ(net::own_addresses().front(), "127.0.0.1");
    EXPECT_EQ(net::own_addresses().size(), addresses.size());
    if (before == nullptr) {
        unsetenv("NCCL_SOCKET_IFNAME");
    } else {
        setenv("NCCL_SOCKET_IFNAME", kept.c_str(), 1);
    }
}

TEST(Net, InterfacesAreOrderedAsNcclWasTold) {
    using net::detail::interface_order;
    EXPECT_EQ(interface_order("eth0", false, ""), 1);
    EXPECT_EQ(interface_order("docker0", false, ""), 2);
    EXPECT_EQ(interface_order("lo", true, ""), 3);
    EXPECT_EQ(interface_order("ib0", false, "ib,eth"), 0);
    EXPECT_EQ(interface_order("eth0", false, "ib,eth"), 0);
    EXPECT_EQ(interface_order("eth10", false, "=eth1"), 1);
    EXPECT_EQ(interface_order("eth1", false, "=eth0,eth1"), 0);
    EXPECT_EQ(interface_order("eth1", false, "^eth1,docker"), 2);
    EXPECT_EQ(interface_order("ib0", false, "^eth1,docker"), 1);
    EXPECT_EQ(interface_order("lo", true, "^docker"), 3);
    EXPECT_EQ(interface_order("docker0", false, "docker"), 0);
    EXPECT_EQ(interface_order("eth0", false, ","), 1);
}

}  // namespace
