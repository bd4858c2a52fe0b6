// A port for a test that listens on it later, or never.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include "llmc/error.h"
#include "llmc/net.h"

namespace llmc::test {

// A free port of 127.0.0.1. While this lives the system gives it to no other process, and calls are
// refused until somebody listens.
class HeldPort {
  public:
    HeldPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
        // Bound this way it does not keep listen_on from the port, which sets the option, too.
        net::detail::set_option(socket_.fd(), SOL_SOCKET, SO_REUSEADDR, 1);
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        const auto* any = reinterpret_cast<const sockaddr*>(&address);
        if (::bind(socket_.fd(), any, sizeof(address)) != 0) throw Error("no port is free");
    }
    int number() const { return net::local_port(socket_); }

  private:
    const net::Socket socket_;
};

}  // namespace llmc::test
