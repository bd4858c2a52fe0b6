// Finding rank 0 through a folder that all ranks see: rank 0 writes where it listens, and the id, to
// FOLDER/ncclUniqueId.sync, and the other ranks poll for that file.
//
// A file may be an old one. Rank 0 of a killed run leaves its own behind, and a file system across
// machines (NFS) may show an old one for a while. Yet an id of a dead run is never taken: a rank
// believes a file only after it has found, at an address written in it, a process that is alive now
// and answers with the random server token of the same file; that process is the rank 0 that drew
// the token and the id, in this start. What answers with another token, or not at all, makes the
// rank read the file again, until the limit.
//
// Nor is half a file taken: rank 0 writes a temporary file, has it put on the disk and renames it
// within the folder, and a checksum covers all of it. Readers open the folder and the file anew each
// time, since it is at opening that NFS asks the server for news. Two runs with job tokens of their
// own may wait in one folder at the same time: rank 0 looks once a second and puts its file back
// when the other's is there. With the same token, or none, the later run is refused.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/atomic_file.h"
#include "llmc/error.h"
#include "llmc/handshake.h"
#include "llmc/hash.h"
#include "llmc/net.h"
#include "llmc/peers.h"
#include "llmc/printable.h"
#include "llmc/stop_signal.h"

namespace llmc {

// What rank 0 tells through the folder.
struct SharedId {
    uint64_t server_token = 0;
    std::vector<net::Endpoint> where;  // likely ones first
    std::array<unsigned char, kIdBytes> id{};
};

// The file, little-endian:
//
//   offset  bytes
//        0      8  magic
//        8      4  version
//       12      4  bytes of addresses
//       16     16  job token: a hash of the text
//       32      8  server token
//       40    128  id
//      168   1872  addresses, numeric, a "host port" a line; zeros behind them
//     2040      8  hash of all that comes before
namespace id_file {

constexpr uint64_t kMagic = 0x64696c63636e6d6cull;  // "lmnccl" + "id"
constexpr uint32_t kVersion = 1;
constexpr size_t kFileBytes = 2048;
constexpr size_t kIdOffset = 40;
constexpr size_t kAddressOffset = kIdOffset + kIdBytes;
constexpr size_t kHashOffset = kFileBytes - 8;
constexpr size_t kAddressBytes = kHashOffset - kAddressOffset;

inline std::vector<unsigned char> encode(const SharedId& shared, const std::string& job_token) {
    using handshake::detail::put;
    std::string addresses;
    for (const net::Endpoint& endpoint : shared.where) {
        const std::string line = endpoint.host + " " + std::to_string(endpoint.port) + "\n";
        // Those left out are the unlikely ones.
        if (addresses.size() + line.size() <= kAddressBytes) addresses += line;
    }
    const handshake::JobToken job = handshake::job_token_of(job_token);
    std::vector<unsigned char> bytes(kFileBytes, 0);
    put(&bytes[0], kMagic);
    put(&bytes[8], kVersion);
    put(&bytes[12], static_cast<uint32_t>(addresses.size()));
    put(&bytes[16], job.words[0]);
    put(&bytes[24], job.words[1]);
    put(&bytes[32], shared.server_token);
    std::copy(shared.id.begin(), shared.id.end(), bytes.begin() + kIdOffset);
    std::copy(addresses.begin(), addresses.end(), bytes.begin() + kAddressOffset);
    put(&bytes[kHashOffset], hash_bytes(bytes.data(), kHashOffset));
    return bytes;
}

namespace detail {

// "10.0.0.1 4711": an address in numbers and a port.
inline std::optional<net::Endpoint> parse_address(const std::string& line) {
    const size_t space = line.find(' ');
    if (space == 0 || space == std::string::npos) return std::nullopt;
    const std::string host = line.substr(0, space), port = line.substr(space + 1);
    const bool is_numeric = host.find_first_not_of("0123456789abcdefABCDEF.:") == std::string::npos;
    const bool has_port = !port.empty() && port.size() <= 5 &&
                          port.find_first_not_of("0123456789") == std::string::npos;
    if (!is_numeric || !has_port) return std::nullopt;
    const int number = std::stoi(port);
    if (number < 1 || number > 65535) return std::nullopt;
    return net::Endpoint{host, number};
}

}  // namespace detail

// What a file of `length` bytes says; nothing when it is not whole or not of this format. On
// return, `job` is the job token in it.
inline std::optional<SharedId> parse(const unsigned char* bytes, size_t length,
                                     handshake::JobToken* job) {
    using handshake::detail::get;
    if (length != kFileBytes || get<uint64_t>(bytes) != kMagic) return std::nullopt;
    if (get<uint32_t>(bytes + 8) != kVersion) return std::nullopt;
    if (get<uint64_t>(bytes + kHashOffset) != hash_bytes(bytes, kHashOffset)) return std::nullopt;
    const size_t address_bytes = get<uint32_t>(bytes + 12);
    if (address_bytes > kAddressBytes) return std::nullopt;
    SharedId shared;
    *job = {{get<uint64_t>(bytes + 16), get<uint64_t>(bytes + 24)}};
    shared.server_token = get<uint64_t>(bytes + 32);
    std::copy(bytes + kIdOffset, bytes + kIdOffset + kIdBytes, shared.id.begin());
    const unsigned char* text = bytes + kAddressOffset;
    const std::string addresses(text, text + address_bytes);
    for (size_t begin = 0; begin < addresses.size();) {
        const size_t end = std::min(addresses.find('\n', begin), addresses.size());
        const auto endpoint = detail::parse_address(addresses.substr(begin, end - begin));
        if (!endpoint) return std::nullopt;
        shared.where.push_back(*endpoint);
        begin = end + 1;
    }
    // 0 would mean any rank 0.
    if (shared.server_token == 0 || shared.where.empty()) return std::nullopt;
    return shared;
}

inline std::string path_in(const std::string& folder) {
    return (folder.empty() ? std::string(".") : folder) + "/ncclUniqueId.sync";
}

// The beginning of each message about the folder.
inline std::string flag(const std::string& folder) {
    return "-pf " + printable(folder);
}

// An open file.
struct Descriptor {
    const int fd;
    explicit operator bool() const { return fd >= 0; }
    ~Descriptor() {
        if (fd >= 0) ::close(fd);
    }
};

// What is in the folder now.
struct Reading {
    std::optional<SharedId> shared;  // a whole file of this job
    std::string problem;             // else why there is none
    bool has_folder = true;
};

inline Reading read(const std::string& folder, const std::string& job_token) {
    Reading reading;
    const std::string place = folder.empty() ? "." : folder;
    const Descriptor directory{::open(place.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
    if (!directory && errno != EACCES) {
        reading.has_folder = false;
        reading.problem = net::error_text(errno);
        return reading;
    }
    const Descriptor file{::open(path_in(folder).c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
    if (!file) {
        reading.problem = errno == ENOENT ? "no ncclUniqueId.sync appeared there"
                                          : "ncclUniqueId.sync: " + net::error_text(errno);
        return reading;
    }
    // One byte more than there may be.
    std::vector<unsigned char> bytes(kFileBytes + 1);
    size_t length = 0;
    while (length < bytes.size()) {
        const ssize_t n = ::read(file.fd, bytes.data() + length, bytes.size() - length);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        length += static_cast<size_t>(n);
    }
    handshake::JobToken job;
    reading.shared = parse(bytes.data(), length, &job);
    if (!reading.shared) {
        reading.problem = "ncclUniqueId.sync there is not a file of this program, or not whole";
    } else if (!(job == handshake::job_token_of(job_token))) {
        reading.shared.reset();
        reading.problem =
            "ncclUniqueId.sync there is of a job with another LLMC_JOB_TOKEN "
            "(where that is unset, SLURM_JOB_ID counts)";
    }
    return reading;
}

[[noreturn]] inline void fail_to_write(const std::string& folder, int number) {
    throw Error(flag(folder) + ": cannot write ncclUniqueId.sync there (" +
                net::error_text(number) +
                "); give an existing folder that all ranks see and rank "
                "0 may write in");
}

// Returns 0 or errno's number.
inline int write_durably(const std::string& path, const std::vector<unsigned char>& bytes) {
    // The id lets whoever has it into the run's collectives: no other user reads it.
    const Descriptor file{::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600)};
    if (!file) return errno;
    const int number = llmc::detail::write_all(
        [&](const char* data, size_t size) { return ::write(file.fd, data, size); },
        reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (number != 0) return number;
    return ::fsync(file.fd) == 0 ? 0 : errno;
}

// Does the rank 0 that wrote the file wait there now? Asks as a process that it has to refuse; one
// that declines gives up its place instead, and does not answer.
inline bool is_alive(const SharedId& shared, const std::string& job_token) {
    handshake::Message hello;
    hello.size = 1;
    hello.server_token = shared.server_token;
    hello.job_token = handshake::job_token_of(job_token);
    for (const net::Endpoint& endpoint : shared.where) {
        const net::Deadline deadline = net::after(1);
        const net::Socket socket = net::connect_to(endpoint, deadline);
        if (!socket) continue;
        handshake::MessageBytes bytes = handshake::encode(hello);
        handshake::Message answer;
        if (net::send_all(socket, bytes.data(), bytes.size(), deadline) &&
            net::receive_all(socket, bytes.data(), bytes.size(), deadline) &&
            handshake::parse_message(bytes.data(), bytes.size(), &answer) ==
                handshake::Parsed::kMessage &&
            answer.server_token == shared.server_token) {
            return true;
        }
    }
    return false;
}

[[noreturn]] inline void fail_as_second(const std::string& folder, const SharedId& shared) {
    throw Error(flag(folder) + ": another run's rank 0 waits in this folder, at " +
                net::endpoint_text(shared.where[0]) +
                "; give each run a folder, or an LLMC_JOB_TOKEN, of its own");
}

// A temporary file's name, which no other process uses.
inline std::string temporary_in(const std::string& folder, uint64_t server_token) {
    return path_in(folder) + format(".%016llx.tmp", static_cast<unsigned long long>(server_token));
}

}  // namespace id_file

// Rank 0: writes the file, or writes it anew; returns its path. Readers see the old one or the new
// one, whole. Error, naming -pf, when the folder is missing or may not be written in.
inline std::string publish_id(const std::string& folder, const std::string& job_token,
                              const PeerServer& server, const unsigned char (&id)[kIdBytes]) {
    SharedId shared;
    shared.server_token = server.token();
    shared.where = server.addresses();
    std::copy(id, id + kIdBytes, shared.id.begin());
    const std::vector<unsigned char> bytes = id_file::encode(shared, job_token);
    const std::string path = id_file::path_in(folder);
    const std::string temporary = id_file::temporary_in(folder, server.token());
    int number = id_file::write_durably(temporary, bytes);
    if (number == 0 && ::rename(temporary.c_str(), path.c_str()) != 0) number = errno;
    if (number != 0) {
        ::unlink(temporary.c_str());
        id_file::fail_to_write(folder, number);
    }
    return path;
}

// Whatever rank: the file as it is now, when it is whole and of this job.
inline std::optional<SharedId> read_id(const std::string& folder, const std::string& job_token) {
    return id_file::read(folder, job_token).shared;
}

// Rank 0: removes the file if it is this server's. Another run's stays.
inline void withdraw_id(const std::string& folder, const std::string& job_token,
                        const PeerServer& server) {
    const std::optional<SharedId> shared = read_id(folder, job_token);
    if (shared && shared->server_token == server.token()) {
        ::unlink(id_file::path_in(folder).c_str());
    }
}

namespace id_file {

// Publishes the id and calls wait(every_second), which serves those that come and calls its argument
// about once a second; removes the file afterwards, also on an Error and when a signal ends this
// process (within a second).
template <class Wait>
auto while_published(const PeerServer* server, const std::string& folder,
                     const std::string& job_token, const unsigned char (&id)[kIdBytes],
                     Wait&& wait) {
    struct Withdraw {
        const std::string& folder;
        const std::string& job_token;
        const PeerServer& server;
        ~Withdraw() { withdraw_id(folder, job_token, server); }
    };
    const std::optional<SharedId> older = read_id(folder, job_token);
    if (older && is_alive(*older, job_token)) fail_as_second(folder, *older);
    const HeldSignals signals;  // goes after the file
    publish_id(folder, job_token, *server, id);
    const Withdraw at_the_end{folder, job_token, *server};
    return wait([&] {
        if (signals.held() != 0) {
            throw Error(std::string(stop_signal_name(signals.held())) +
                        " came before the other ranks");
        }
        const std::optional<SharedId> shared = read_id(folder, job_token);
        if (shared && shared->server_token == server->token()) return;
        // Both started at the same moment, and neither saw the other.
        if (shared) fail_as_second(folder, *shared);
        // Another job's, or gone. The folder was writable: a failure now is worth another try.
        try {
            publish_id(folder, job_token, *server, id);
        } catch (const Error&) {
        }
    });
}

}  // namespace id_file

// Rank 0's whole part: publishes the id, waits as PeerServer::wait_for_all does, and removes the
// file, also on an Error and when a signal ends this process (within a second).
inline std::unique_ptr<Peers> serve_through_folder(PeerServer* server, const std::string& folder,
                                                   const std::string& job_token,
                                                   const PeerInfo& self,
                                                   const unsigned char (&id)[kIdBytes],
                                                   double limit_s) {
    return id_file::while_published(server, folder, job_token, id, [&](const auto& every_second) {
        return server->wait_for_all(self, id, limit_s, every_second);
    });
}

// Likewise for a rank 0 that cannot start: as PeerServer::decline_all. There is no id in the file.
inline void decline_all_through_folder(PeerServer* server, const std::string& folder,
                                       const std::string& job_token, int size,
                                       const std::string& text, double limit_s) {
    const unsigned char no_id[kIdBytes] = {};
    id_file::while_published(server, folder, job_token, no_id, [&](const auto& every_second) {
        server->decline_all(size, text, limit_s, every_second);
    });
}

// The part of all other ranks: polls for the file and joins the rank 0 that it tells of; fills `id`.
// Error, naming -pf, when the folder is missing or nothing valid appears in it within `limit_s`
// seconds; else as join_peers.
inline std::unique_ptr<Peers> join_through_folder(const std::string& folder,
                                                  const std::string& job_token,
                                                  const PeerInfo& self,
                                                  unsigned char (&id)[kIdBytes], double limit_s,
                                                  const StartTiming& timing = {}) {
    // Rank 0's machine may have made the folder a moment ago.
    const net::Deadline folder_deadline = net::after(std::min(limit_s / 2, 2.0));
    detail::Joining joining(job_token, self, limit_s, timing);
    detail::Pause pause;
    std::string problem;
    do {
        const id_file::Reading reading = id_file::read(folder, job_token);
        problem = reading.problem;
        if (!reading.has_folder && net::Clock::now() >= folder_deadline) {
            throw Error(id_file::flag(folder) + ": cannot be read (" + problem +
                        "); give an existing folder that all ranks see");
        }
        for (size_t i = 0; reading.shared && i < reading.shared->where.size(); ++i) {
            const net::Endpoint& endpoint = reading.shared->where[i];
            std::unique_ptr<Peers> peers =
                joining.attempt(endpoint, reading.shared->server_token, id);
            if (peers != nullptr) return peers;
            if (i > 0) continue;
            problem = "rank 0, which ncclUniqueId.sync says is at " + net::endpoint_text(endpoint) +
                      ", did not answer: " + joining.reason();
        }
        pause.wait(joining.deadline());
    } while (!joining.is_over());
    throw Error(id_file::flag(folder) + ": rank 0 was not found " + detail::within_limit(limit_s) +
                ": " + problem);
}

// As decline_peers, to the rank 0 that the file in the folder tells of. False also when there is no such
// folder.
inline bool decline_through_folder(const std::string& folder, const std::string& job_token,
                                   const PeerInfo& self, const std::string& text, double limit_s,
                                   const StartTiming& timing = {}) {
    detail::Joining joining(job_token, self, limit_s, timing);
    detail::Pause pause;
    do {
        const id_file::Reading reading = id_file::read(folder, job_token);
        if (!reading.has_folder) return false;
        const std::optional<SharedId>& shared = reading.shared;
        for (size_t i = 0; shared && i < shared->where.size(); ++i) {
            if (joining.decline(shared->where[i], shared->server_token, text)) return true;
        }
        pause.wait(joining.deadline());
    } while (!joining.is_over());
    return false;
}

}  // namespace llmc
