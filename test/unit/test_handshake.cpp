// llmc/handshake.h: the messages between ranks, their parser, and whom rank 0 takes.
#include "llmc/handshake.h"

#include <gtest/gtest.h>

namespace hs = llmc::handshake;
using hs::Message;
using hs::MessageBytes;
using hs::MessageType;
using hs::Parsed;

namespace {

Message full_message(MessageType type) {
    Message message;
    message.type = type;
    message.rank = 2;
    message.size = 4;
    message.server_token = 0x0123456789abcdefull;
    message.job_token = hs::job_token_of("job");
    message.host_hash = 0xfedcba9876543210ull;
    message.step = -5;
    message.collective = 1ull << 63;
    message.age_ms = 12345;
    if (type == MessageType::kStart) {
        for (size_t i = 0; i < message.id.size(); ++i) message.id[i] = static_cast<uint8_t>(3 * i);
    } else {
        message.text = "allgather of layer 4";
    }
    return message;
}

Parsed parse(const MessageBytes& bytes, Message* message) {
    return hs::parse_message(bytes.data(), bytes.size(), message);
}

Parsed parse(const MessageBytes& bytes) {
    Message message;
    return parse(bytes, &message);
}

TEST(Handshake, EveryMessageIsReadAsItWasWritten) {
    for (uint32_t type = 1; type <= 9; ++type) {
        const Message sent = full_message(static_cast<MessageType>(type));
        Message received;
        ASSERT_EQ(parse(hs::encode(sent), &received), Parsed::kMessage) << type;
        EXPECT_EQ(received.type, sent.type);
        EXPECT_EQ(received.version, hs::kProtocolVersion);
        EXPECT_EQ(received.rank, sent.rank);
        EXPECT_EQ(received.size, sent.size);
        EXPECT_EQ(received.server_token, sent.server_token);
        EXPECT_TRUE(received.job_token == sent.job_token);
        EXPECT_EQ(received.host_hash, sent.host_hash);
        EXPECT_EQ(received.step, sent.step);
        EXPECT_EQ(received.collective, sent.collective);
        EXPECT_EQ(received.age_ms, sent.age_ms);
        EXPECT_EQ(received.text, sent.text);
        EXPECT_EQ(received.id, sent.id);
    }
}

TEST(Handshake, LayoutIsTheDocumentedOne) {
    const MessageBytes bytes = hs::encode(full_message(MessageType::kFailure));
    EXPECT_EQ(bytes.size(), 512u);
    EXPECT_EQ(std::string(bytes.begin(), bytes.begin() + 8), "llmcpeer");
    const unsigned char after_magic[] = {1,    0,    0,    0,    7,    0,    0,    0,
                                         2,    0,    0,    0,    4,    0,    0,    0,
                                         0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 0x01};
    EXPECT_TRUE(std::equal(after_magic, after_magic + 24, bytes.begin() + 8));
    EXPECT_EQ(bytes[48], 0x10);
    EXPECT_EQ(bytes[56], 0xfb);
    EXPECT_EQ(bytes[63], 0xff);
    EXPECT_EQ(bytes[71], 0x80);
    EXPECT_EQ(bytes[72], 12345 % 256);
    EXPECT_EQ(bytes[80], 20);
    EXPECT_EQ(std::string(bytes.begin() + 84, bytes.begin() + 104), "allgather of layer 4");
}

TEST(Handshake, PartsOfAMessageAreIncomplete) {
    const MessageBytes bytes = hs::encode(full_message(MessageType::kHello));
    Message message;
    for (size_t length = 0; length < bytes.size(); ++length) {
        // A copy of its own, so that reading behind it is seen.
        const std::vector<unsigned char> part(bytes.begin(), bytes.begin() + length);
        EXPECT_EQ(hs::parse_message(part.data(), length, &message), Parsed::kIncomplete) << length;
    }
    std::vector<unsigned char> more(bytes.begin(), bytes.end());
    more.push_back('x');
    EXPECT_EQ(hs::parse_message(more.data(), more.size(), &message), Parsed::kMessage);
}

TEST(Handshake, ForeignBytesAreKnownFromTheFirstOnes) {
    Message message;
    const MessageBytes good = hs::encode(full_message(MessageType::kHello));
    for (size_t i = 0; i < 8; ++i) {
        MessageBytes bytes = good;
        bytes[i] ^= 0x20;
        EXPECT_EQ(hs::parse_message(bytes.data(), i + 1, &message), Parsed::kForeign) << i;
        EXPECT_EQ(parse(bytes), Parsed::kForeign) << i;
    }
    const std::string request = "GET / HTTP/1.1\r\n\r\n";
    const auto* bytes = reinterpret_cast<const unsigned char*>(request.data());
    EXPECT_EQ(hs::parse_message(bytes, 1, &message), Parsed::kForeign);
}

TEST(Handshake, OtherVersionsAreTold) {
    Message other = full_message(MessageType::kHello);
    other.version = 7;
    const MessageBytes bytes = hs::encode(other);
    Message message;
    // Before the rest of it is there, since that may be of another length.
    EXPECT_EQ(hs::parse_message(bytes.data(), 12, &message), Parsed::kOtherVersion);
    EXPECT_EQ(message.version, 7u);
    EXPECT_EQ(hs::version_refusal(7),
              "it speaks version 7 of the protocol and rank 0 version 1; start the same program on "
              "all ranks");
}

// A message with one field overwritten.
template <class T>
Parsed with(MessageType type, size_t offset, T value) {
    MessageBytes bytes = hs::encode(full_message(type));
    hs::detail::put(&bytes[offset], value);
    return parse(bytes);
}

TEST(Handshake, InvalidFieldsAreRefused) {
    const MessageType beat = MessageType::kHeartbeat, start = MessageType::kStart;
    EXPECT_EQ(with<uint32_t>(beat, 12, 6), Parsed::kMessage);
    EXPECT_EQ(with<uint32_t>(beat, 12, 0), Parsed::kInvalid);
    EXPECT_EQ(with<uint32_t>(beat, 12, 10), Parsed::kInvalid);
    EXPECT_EQ(with<uint32_t>(beat, 12, 0x106), Parsed::kInvalid);
    EXPECT_EQ(with<int32_t>(beat, 16, 0), Parsed::kMessage);
    EXPECT_EQ(with<int32_t>(beat, 16, 3), Parsed::kMessage);
    EXPECT_EQ(with<int32_t>(beat, 16, 4), Parsed::kInvalid);
    EXPECT_EQ(with<int32_t>(beat, 16, -1), Parsed::kInvalid);
    EXPECT_EQ(with<int32_t>(beat, 20, 2), Parsed::kInvalid);
    EXPECT_EQ(with<int32_t>(beat, 20, 0), Parsed::kInvalid);
    EXPECT_EQ(with<int32_t>(beat, 20, hs::kMaxRanks), Parsed::kMessage);
    EXPECT_EQ(with<int32_t>(beat, 20, hs::kMaxRanks + 1), Parsed::kInvalid);
    // A hello's ranks are judged, so that the process can be told.
    EXPECT_EQ(with<int32_t>(MessageType::kHello, 16, -1), Parsed::kMessage);
    EXPECT_EQ(with<int32_t>(MessageType::kHello, 20, -1), Parsed::kMessage);
    // Lengths of the text.
    EXPECT_EQ(with<uint32_t>(beat, 80, 19), Parsed::kInvalid);
    EXPECT_EQ(with<uint32_t>(beat, 80, 428), Parsed::kMessage);
    EXPECT_EQ(with<uint32_t>(beat, 80, 429), Parsed::kInvalid);
    EXPECT_EQ(with<uint32_t>(beat, 80, 0xffffffff), Parsed::kInvalid);
    EXPECT_EQ(with<unsigned char>(beat, 511, 1), Parsed::kInvalid);
    EXPECT_EQ(with<uint32_t>(start, 80, 127), Parsed::kInvalid);
    EXPECT_EQ(with<uint32_t>(start, 80, 129), Parsed::kInvalid);
}

TEST(Handshake, TextIsOnePrintableLineOfBoundedLength) {
    Message message = full_message(MessageType::kFailure);
    message.text = std::string("a\nb\033[31m\0c\177", 11);
    Message received;
    ASSERT_EQ(parse(hs::encode(message), &received), Parsed::kMessage);
    EXPECT_EQ(received.text, "a?b?[31m?c?");
    message.text = std::string(1000, 'x');
    ASSERT_EQ(parse(hs::encode(message), &received), Parsed::kMessage);
    EXPECT_EQ(received.text, std::string(425, 'x') + "...");
    message.text = "";
    ASSERT_EQ(parse(hs::encode(message), &received), Parsed::kMessage);
    EXPECT_EQ(received.text, "");
}

TEST(Handshake, ShortenedTextEndsBetweenCharacters) {
    EXPECT_EQ(hs::shortened("abcdef", 6), "abcdef");
    EXPECT_EQ(hs::shortened("abcdefg", 6), "abc...");
    EXPECT_EQ(hs::shortened("ab\xc3\xa4xyz", 6), "ab...");
    EXPECT_EQ(hs::shortened("a\xc3\xa4xyzu", 6), "a\xc3\xa4...");
    EXPECT_EQ(hs::shortened("\x80\x80\x80\x80\x80\x80\x80", 6), "...");
    EXPECT_EQ(hs::shortened("abcd", 2), "..");
    EXPECT_EQ(hs::shortened("", 0), "");
}

TEST(Handshake, RankListsAreShort) {
    EXPECT_EQ(hs::rank_list({2}), "rank 2");
    EXPECT_EQ(hs::rank_list({2, 3}), "ranks 2 and 3");
    EXPECT_EQ(hs::rank_list({2, 3, 4}), "ranks 2-4");
    EXPECT_EQ(hs::rank_list({2, 3, 5, 6, 7}), "ranks 2, 3 and 5-7");
    EXPECT_EQ(hs::rank_list({1, 3, 4, 5, 9}), "ranks 1, 3-5 and 9");
    EXPECT_EQ(hs::rank_list({1, 2, 3, 5, 6, 7}), "ranks 1-3 and 5-7");
}

TEST(Handshake, JobTokensDiffer) {
    const std::vector<std::string> texts = {"",    "0",    "1",       "job",
                                            "Job", "job ", "1234567", "12345678"};
    for (const std::string& a : texts) {
        for (const std::string& b : texts) {
            const hs::JobToken one = hs::job_token_of(a), two = hs::job_token_of(b);
            EXPECT_EQ(one == two, a == b) << a << "|" << b;
            EXPECT_EQ(one.words[0] == two.words[0], a == b);
            EXPECT_EQ(one.words[1] == two.words[1], a == b);
        }
    }
}

TEST(Handshake, RankZeroTakesOnlyRanksOfItsRun) {
    const hs::ServerIdentity server{4, hs::job_token_of("job"), 99};
    Message good;
    good.rank = 3;
    good.size = 4;
    good.job_token = server.job_token;
    EXPECT_EQ(hs::judge_hello(good, server), "");
    good.server_token = 99;
    EXPECT_EQ(hs::judge_hello(good, server), "");

    const auto refusal = [&](auto change) {
        Message hello = good;
        change(hello);
        return hs::judge_hello(hello, server);
    };
    EXPECT_EQ(refusal([](Message& m) { m.server_token = 98; }),
              "it looks for rank 0 of another start of this program");
    EXPECT_EQ(refusal([](Message& m) { m.job_token = hs::job_token_of("other"); }),
              "its job token is not rank 0's; give all ranks of a run the same LLMC_JOB_TOKEN "
              "(where that is unset, SLURM_JOB_ID counts)");
    EXPECT_EQ(refusal([](Message& m) { m.job_token.words[1] ^= 1; }).substr(0, 20),
              "its job token is not");
    EXPECT_EQ(refusal([](Message& m) { m.size = 8; }),
              "it was started as one of 8 ranks and rank 0 as one of 4; give all ranks the same "
              "number");
    EXPECT_EQ(refusal([](Message& m) { m.rank = 0; }),
              "it is rank 0, too; give every process a rank of its own");
    EXPECT_EQ(refusal([](Message& m) { m.rank = 4; }), "its rank 4 must be between 1 and 3");
    EXPECT_EQ(refusal([](Message& m) { m.rank = -1; }), "its rank -1 must be between 1 and 3");
}

TEST(Handshake, TwoRanksOnOneGpuAreNamed) {
    const auto row = [](int rank, uint64_t host, const std::string& device) {
        return llmc::PeerInfo{rank, 5, host, device};
    };
    const std::string a = "0000:3b:00.0", b = "0000:5e:00.0";
    EXPECT_EQ(hs::shared_device({row(0, 1, a), row(1, 1, b), row(2, 2, a), row(3, 2, b)}), "");
    EXPECT_EQ(hs::shared_device({row(0, 1, ""), row(1, 1, ""), row(2, 1, "")}), "");
    EXPECT_EQ(hs::shared_device({row(0, 1, a), row(1, 2, b), row(2, 1, b), row(3, 2, b)}),
              "ranks 1 and 3 use the same GPU, 0000:5e:00.0, on one host; start one rank for each "
              "GPU");
    EXPECT_EQ(hs::shared_device({row(0, 1, a), row(1, 1, a), row(2, 1, a)}).substr(0, 9),
              "ranks 0-2");
}

}  // namespace
