// libFuzzer target: whatever bytes a connection or an id file brings, the parsers neither read beyond
// them nor pass on what they promise to refuse. `make fuzz` builds and runs it.
#include <sys/socket.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "llmc/control_channel.h"
#include "llmc/handshake.h"
#include "llmc/shared_id_file.h"

namespace hs = llmc::handshake;
using Bytes = std::vector<unsigned char>;

namespace {

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "fuzz: %s\n", what);
    std::abort();
}

bool is_printable(const std::string& text) {
    return std::all_of(text.begin(), text.end(), [](char c) {
        const unsigned char byte = static_cast<unsigned char>(c);
        return byte >= 0x20 && byte != 0x7f;
    });
}

void check_message(const hs::Message& message) {
    require(message.text.size() <= hs::kTextBytes, "text is too long");
    require(is_printable(message.text), "text is not printable");
    if (message.type != hs::MessageType::kHello) {
        require(message.rank >= 0 && message.rank < message.size, "rank is out of range");
        require(message.size <= hs::kMaxRanks, "too many ranks");
    }
    // What was understood is what is sent again.
    const hs::MessageBytes bytes = hs::encode(message);
    hs::Message again;
    require(hs::parse_message(bytes.data(), bytes.size(), &again) == hs::Parsed::kMessage,
            "an encoded message is not read");
    require(hs::encode(again) == bytes, "an encoded message reads differently");
    // A hello that is taken is of this run, whatever else it says.
    hs::ServerIdentity server{4, hs::job_token_of("job"), 17};
    if (hs::judge_hello(message, server).empty()) {
        require(message.job_token == server.job_token, "another job's hello is taken");
        require(message.size == 4 && message.rank > 0 && message.rank < 4, "a bad rank is taken");
    }
}

void parse(const Bytes& bytes) {
    hs::Message message;
    const hs::Parsed result = hs::parse_message(bytes.data(), bytes.size(), &message);
    if (result == hs::Parsed::kMessage) check_message(message);
    require(result != hs::Parsed::kIncomplete || bytes.size() < hs::kMessageBytes,
            "a whole message is incomplete");
    // Less of the same is either incomplete, or foreign or of another version as the whole is.
    const Bytes part(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(bytes.size() / 2));
    const hs::Parsed of_part = hs::parse_message(part.data(), part.size(), &message);
    if (part.size() < hs::kMessageBytes) {
        require(of_part == hs::Parsed::kIncomplete || of_part == result, "a part reads otherwise");
    }
}

// Through a connection, in pieces of `step` bytes.
void receive(const Bytes& bytes, size_t step) {
    int ends[2];
    require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "no socket pair");
    const llmc::net::Socket sender(ends[0]);
    llmc::MessageLink link{llmc::net::Socket(ends[1])};
    std::vector<hs::Message> messages;
    uint32_t version = 0;
    auto state = llmc::MessageLink::State::kOpen;
    for (size_t sent = 0; sent < bytes.size() && state == llmc::MessageLink::State::kOpen;) {
        const size_t count = std::min(step, bytes.size() - sent);
        if (::send(sender.fd(), bytes.data() + sent, count, MSG_DONTWAIT) < 0) break;
        sent += count;
        state = link.receive(&messages, SIZE_MAX, &version);
    }
    require(messages.size() <= bytes.size() / hs::kMessageBytes, "more messages than bytes");
    for (const hs::Message& message : messages) check_message(message);
}

void parse_id_file(const Bytes& bytes) {
    hs::JobToken job;
    const auto shared = llmc::id_file::parse(bytes.data(), bytes.size(), &job);
    if (!shared) return;
    require(bytes.size() == llmc::id_file::kFileBytes, "a file of another length is taken");
    require(shared->server_token != 0 && !shared->where.empty(), "an empty id file is taken");
    for (const llmc::net::Endpoint& endpoint : shared->where) {
        require(!endpoint.host.empty() && is_printable(endpoint.host), "a bad host is taken");
        require(endpoint.port > 0 && endpoint.port < 65536, "a bad port is taken");
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const Bytes bytes(data, data + size);
    parse(bytes);
    receive(bytes, 1 + size / 3);
    parse_id_file(bytes);

    // The same with a right beginning, behind which the rest of the parser is.
    Bytes message(hs::kMessageBytes, 0);
    std::copy_n(bytes.begin(), std::min(size, message.size()), message.begin());
    hs::detail::put(&message[0], hs::kMagic);
    hs::detail::put(&message[8], hs::kProtocolVersion);
    parse(message);
    Bytes file(llmc::id_file::kFileBytes, 0);
    std::copy_n(bytes.begin(), std::min(size, file.size()), file.begin());
    hs::detail::put(&file[0], llmc::id_file::kMagic);
    hs::detail::put(&file[8], llmc::id_file::kVersion);
    const size_t hash_at = llmc::id_file::kHashOffset;
    hs::detail::put(&file[hash_at], llmc::hash_bytes(file.data(), hash_at));
    parse_id_file(file);
    return 0;
}
