// What processes say to each other while they find and watch one another: messages of one size,
// their parser, and rank 0's judgement of a newcomer. Pure functions: nothing here opens a socket.
//
// Every message is kMessageBytes bytes, little-endian:
//
//   offset  bytes
//        0      8  magic                        the same in every version
//        8      4  protocol version             the same in every version
//       12      4  type
//       16      4  rank that it is about
//       20      4  number of ranks of the run
//       24      8  server token: which rank 0 (0 in a hello: any)
//       32     16  job token: a hash of the text
//       48      8  hash of the host's name
//       56      8  step
//       64      8  collective, counted
//       72      8  age in milliseconds: of a heartbeat, or of the process that says hello or declines
//       80      4  bytes of text
//       84    428  text (a device, a name, a message) or the id; zeros behind it
//
// Job and server tokens keep jobs apart that meet by mistake: an old run and its relaunch, two jobs
// on one port. They are no protection against an attacker, since nothing is encrypted. Whoever can
// reach rank 0's port while it waits, knows the job token's text and speaks this protocol can take
// the place of a rank that is missing, and gets the id, or ends the run, as that rank would; whoever
// can listen on the wire sees all of it. Anybody else can only occupy connections for a few seconds
// each: without a valid hello nobody learns the id, is counted, or keeps a rank out. Once all ranks
// are there, rank 0 no longer listens.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "llmc/error.h"
#include "llmc/hash.h"
#include "llmc/printable.h"

namespace llmc {

constexpr size_t kIdBytes = 128;  // of an ncclUniqueId

// What a rank tells about itself.
struct PeerInfo {
    int rank = 0;
    int size = 1;            // ranks of the run
    uint64_t host_hash = 0;  // of the host's name
    std::string device;      // the GPU's PCI address; "" for a CPU
};

namespace handshake {

constexpr uint64_t kMagic = 0x72656570636d6c6cull;  // "llmcpeer"
constexpr uint32_t kProtocolVersion = 1;
constexpr size_t kMessageBytes = 512;
constexpr size_t kTextOffset = 84;
constexpr size_t kTextBytes = kMessageBytes - kTextOffset;
constexpr int kMaxRanks = 1 << 16;
static_assert(kIdBytes <= kTextBytes);

enum class MessageType : uint32_t {
    kHello = 1,    // to rank 0: who I am; the text is the device
    kWaiting = 2,  // from rank 0: your hello is in order; the text names the ranks still missing
    kRefusal = 3,  // from rank 0: the run will not start with you, or at all; the text says why
    kPeer = 4,     // from rank 0: one row of the table of ranks; the text is the device
    kStart = 5,    // from rank 0, behind the table: all are here; holds the id
    kHeartbeat =
        6,         // to rank 0: step, collective, name; from rank 0: the same of rank, with its age
    kFailure = 7,  // a rank has died, ends with an error, or (in place of a hello) does not start;
                   // the text says so
    kBye = 8,      // this rank has ended in order
    kReceived = 9,  // answers kFailure and kBye: the sender may close the connection
};

struct JobToken {
    uint64_t words[2] = {0, 0};
    bool operator==(const JobToken& other) const {
        return words[0] == other.words[0] && words[1] == other.words[1];
    }
};

// 128 bits that stand for the text of a job token. See the top: against mix-ups, not attackers.
inline JobToken job_token_of(const std::string& text) {
    return {{hash_text("llmc job token, first half: " + text),
             hash_text("llmc job token, second half: " + text)}};
}

struct Message {
    MessageType type = MessageType::kHello;
    uint32_t version = kProtocolVersion;
    int rank = 0;
    int size = 0;
    uint64_t server_token = 0;
    JobToken job_token;
    uint64_t host_hash = 0;
    int64_t step = 0;
    uint64_t collective = 0;
    uint64_t age_ms = 0;
    std::string text;                          // not in kStart
    std::array<unsigned char, kIdBytes> id{};  // in kStart alone
};

using MessageBytes = std::array<unsigned char, kMessageBytes>;

namespace detail {

template <class T>
void put(unsigned char* at, T value) {
    for (size_t i = 0; i < sizeof(T); ++i) {
        at[i] = static_cast<unsigned char>(static_cast<uint64_t>(value) >> (8 * i));
    }
}

template <class T>
T get(const unsigned char* at) {
    uint64_t value = 0;
    for (size_t i = 0; i < sizeof(T); ++i) value |= static_cast<uint64_t>(at[i]) << (8 * i);
    return static_cast<T>(value);
}

inline bool is_known_type(uint32_t type) {
    return type >= static_cast<uint32_t>(MessageType::kHello) &&
           type <= static_cast<uint32_t>(MessageType::kReceived);
}

}  // namespace detail

// At most `bytes` bytes of a text: a longer one ends in "...", and not within a UTF-8 character.
inline std::string shortened(const std::string& text, size_t bytes) {
    const std::string dots = "...";
    if (text.size() <= bytes) return text;
    size_t length = bytes > dots.size() ? bytes - dots.size() : 0;
    while (length > 0 && (static_cast<unsigned char>(text[length]) & 0xc0) == 0x80) --length;
    return text.substr(0, length) + dots.substr(0, std::min(dots.size(), bytes));
}

// The message as it is sent. Text that is too long is shortened.
inline MessageBytes encode(const Message& message) {
    MessageBytes bytes{};
    unsigned char* at = bytes.data();
    detail::put(at, kMagic);
    detail::put(at + 8, message.version);
    detail::put(at + 12, static_cast<uint32_t>(message.type));
    detail::put(at + 16, static_cast<int32_t>(message.rank));
    detail::put(at + 20, static_cast<int32_t>(message.size));
    detail::put(at + 24, message.server_token);
    detail::put(at + 32, message.job_token.words[0]);
    detail::put(at + 40, message.job_token.words[1]);
    detail::put(at + 48, message.host_hash);
    detail::put(at + 56, message.step);
    detail::put(at + 64, message.collective);
    detail::put(at + 72, message.age_ms);
    const bool has_id = message.type == MessageType::kStart;
    const std::string text = has_id ? std::string(message.id.begin(), message.id.end())
                                    : shortened(message.text, kTextBytes);
    detail::put(at + 80, static_cast<uint32_t>(text.size()));
    std::copy(text.begin(), text.end(), bytes.begin() + kTextOffset);
    return bytes;
}

enum class Parsed {
    kMessage,       // whole and valid
    kIncomplete,    // so far it may become one
    kForeign,       // not of this protocol: no more bytes are needed to know
    kOtherVersion,  // of another version of it; Message::version says which
    kInvalid,       // of this version, but no message that it allows
};

// Reads one message from the first bytes of what a connection has brought. `bytes` may be anything.
// Ranks of a hello are not checked (judge_hello says what is wrong with them), those of all other
// messages are between 0 and size - 1. Control characters in the text become '?'.
inline Parsed parse_message(const unsigned char* bytes, size_t length, Message* message) {
    unsigned char magic[8];
    detail::put(magic, kMagic);
    const size_t compared = std::min(length, sizeof(magic));
    if (!std::equal(bytes, bytes + compared, magic)) return Parsed::kForeign;
    if (length < 12) return Parsed::kIncomplete;
    message->version = detail::get<uint32_t>(bytes + 8);
    if (message->version != kProtocolVersion) return Parsed::kOtherVersion;
    if (length < kMessageBytes) return Parsed::kIncomplete;

    const uint32_t type = detail::get<uint32_t>(bytes + 12);
    if (!detail::is_known_type(type)) return Parsed::kInvalid;
    message->type = static_cast<MessageType>(type);
    message->rank = detail::get<int32_t>(bytes + 16);
    message->size = detail::get<int32_t>(bytes + 20);
    message->server_token = detail::get<uint64_t>(bytes + 24);
    message->job_token = {{detail::get<uint64_t>(bytes + 32), detail::get<uint64_t>(bytes + 40)}};
    message->host_hash = detail::get<uint64_t>(bytes + 48);
    message->step = detail::get<int64_t>(bytes + 56);
    message->collective = detail::get<uint64_t>(bytes + 64);
    message->age_ms = detail::get<uint64_t>(bytes + 72);
    if (message->type != MessageType::kHello) {
        if (message->size < 1 || message->size > kMaxRanks) return Parsed::kInvalid;
        if (message->rank < 0 || message->rank >= message->size) return Parsed::kInvalid;
    }

    const size_t text_bytes = detail::get<uint32_t>(bytes + 80);
    if (text_bytes > kTextBytes) return Parsed::kInvalid;
    const unsigned char* text = bytes + kTextOffset;
    const auto is_zero = [](unsigned char c) { return c == 0; };
    if (!std::all_of(text + text_bytes, bytes + kMessageBytes, is_zero)) return Parsed::kInvalid;
    message->text.clear();
    message->id.fill(0);
    if (message->type == MessageType::kStart) {
        if (text_bytes != kIdBytes) return Parsed::kInvalid;
        std::copy(text, text + kIdBytes, message->id.begin());
    } else if (text_bytes > 0) {
        message->text = printable(std::string(text, text + text_bytes));
    }
    return Parsed::kMessage;
}

// "rank 2", "ranks 2 and 3", "ranks 2, 3 and 5-7". In ascending order, none twice.
inline std::string rank_list(const std::vector<int>& ranks) {
    std::vector<std::string> parts;
    for (size_t i = 0; i < ranks.size();) {
        size_t end = i + 1;
        while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
        // Two neighbours are no shorter as a range.
        if (end - i < 3) end = i + 1;
        parts.push_back(end - i == 1 ? std::to_string(ranks[i])
                                     : format("%d-%d", ranks[i], ranks[end - 1]));
        i = end;
    }
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    for (size_t i = 0; i < parts.size(); ++i) {
        if (i > 0) text += i + 1 == parts.size() ? " and " : ", ";
        text += parts[i];
    }
    return text;
}

// What rank 0 knows about itself when it judges a hello.
struct ServerIdentity {
    int size = 1;
    JobToken job_token;
    uint64_t server_token = 0;
};

// Told to a process of another protocol version.
inline std::string version_refusal(uint32_t version) {
    return format(
        "it speaks version %u of the protocol and rank 0 version %u; start the same "
        "program on all ranks",
        version, kProtocolVersion);
}

// "" when this hello belongs to the run, else what the newcomer is told, a clause about "it".
inline std::string judge_hello(const Message& hello, const ServerIdentity& server) {
    if (hello.server_token != 0 && hello.server_token != server.server_token) {
        return "it looks for rank 0 of another start of this program";
    }
    if (!(hello.job_token == server.job_token)) {
        return "its job token is not rank 0's; give all ranks of a run the same LLMC_JOB_TOKEN "
               "(where that is unset, SLURM_JOB_ID counts)";
    }
    if (hello.rank == 0) return "it is rank 0, too; give every process a rank of its own";
    if (hello.size != server.size) {
        return format(
            "it was started as one of %d ranks and rank 0 as one of %d; give all ranks "
            "the same number",
            hello.size, server.size);
    }
    if (hello.rank < 0 || hello.rank >= server.size) {
        return format("its rank %d must be between 1 and %d", hello.rank, server.size - 1);
    }
    return "";
}

// "" when every rank has a device to itself, else the line that says which do not. Ranks without a
// device (CPUs) share their host.
inline std::string shared_device(const std::vector<PeerInfo>& table) {
    std::vector<const PeerInfo*> rows;
    for (const PeerInfo& row : table) {
        if (!row.device.empty()) rows.push_back(&row);
    }
    std::stable_sort(rows.begin(), rows.end(), [](const PeerInfo* a, const PeerInfo* b) {
        if (a->host_hash != b->host_hash) return a->host_hash < b->host_hash;
        return a->device < b->device;
    });
    for (size_t i = 0; i < rows.size(); ++i) {
        std::vector<int> ranks;
        for (size_t j = i; j < rows.size() && rows[j]->host_hash == rows[i]->host_hash &&
                           rows[j]->device == rows[i]->device;
             ++j) {
            ranks.push_back(rows[j]->rank);
        }
        if (ranks.size() < 2) continue;
        std::sort(ranks.begin(), ranks.end());
        return rank_list(ranks) + " use the same GPU, " + rows[i]->device +
               ", on one host; start one rank for each GPU";
    }
    return "";
}

}  // namespace handshake
}  // namespace llmc
