#include "llmc/tokenizer.h"

#include <gtest/gtest.h>

#include "test/unit/data_files.h"

namespace llmc {
namespace {

using test::error_of;
using test::expect_contains;
using test::header_bytes;
using test::TemporaryFolder;
using test::write_file;

std::string tokenizer_file(const std::vector<std::string>& entries, int end_of_text) {
    std::string bytes =
        header_bytes({20240328, 2, static_cast<int32_t>(entries.size()), end_of_text});
    for (const std::string& entry : entries) {
        bytes.push_back(static_cast<char>(entry.size()));
        bytes += entry;
    }
    return bytes;
}

const std::vector<std::string> kEntries = {
    "Hello", ", world", "\n", std::string(200, 'x'), "\xc3", "\xa9", "<|endoftext|>"};

TEST(Tokenizer, DecodesTokens) {
    TemporaryFolder folder;
    write_file(folder.file("t.bin"), tokenizer_file(kEntries, 6));
    const auto tokenizer = Tokenizer::load(folder.file("t.bin"));
    ASSERT_TRUE(tokenizer.has_value());
    EXPECT_EQ(tokenizer->vocab_size(), 7);
    EXPECT_EQ(tokenizer->end_of_text(), 6);
    const std::vector<int> tokens = {0, 1, 2, 4, 5, 3};
    EXPECT_EQ(tokenizer->decode(tokens.data(), tokens.size()),
              "Hello, world\n\xc3\xa9" + std::string(200, 'x'));
    EXPECT_EQ(tokenizer->decode(tokens.data(), 0), "");
}

TEST(Tokenizer, NumbersOutsideTheVocabularyAreShown) {
    TemporaryFolder folder;
    write_file(folder.file("t.bin"), tokenizer_file(kEntries, 6));
    const std::vector<int> tokens = {0, 7, -1};
    EXPECT_EQ(Tokenizer::load(folder.file("t.bin"))->decode(tokens.data(), 3), "Hello<7><-1>");
}

TEST(Tokenizer, MissingFileIsNoError) {
    TemporaryFolder folder;
    EXPECT_FALSE(Tokenizer::load(folder.file("none.bin")).has_value());
    EXPECT_FALSE(Tokenizer::load(folder.file("no/folder/none.bin")).has_value());
}

TEST(Tokenizer, ControlCharactersDoNotReachTheTerminal) {
    EXPECT_EQ(readable_text("a\tb\nc"), "a\tb\nc");
    EXPECT_EQ(readable_text("\x1b[31mred\x1b]0;title\x07"), "[31mred]0;title");
    EXPECT_EQ(readable_text(std::string("a\0b\r\x08\x7f", 6)), "ab");
    // The control sequence introducer as one character of UTF-8, and characters beside its range.
    EXPECT_EQ(readable_text("\xc2\x9b"
                            "31m\xc2\xa0\xc3\x9b\xe2\x82\x9b"),
              "31m\xc2\xa0\xc3\x9b\xe2\x82\x9b");
}

// A sample may end within a character, and a young model writes bytes that are none.
TEST(Tokenizer, BytesThatAreNoCharacterAreReplaced) {
    const std::string whole =
        "z\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80";  // U+007A U+00E4 U+20AC U+1F600
    EXPECT_EQ(readable_text(whole), whole);
    const std::string bad = "\xef\xbf\xbd";
    EXPECT_EQ(readable_text("a\xc3"), "a" + bad);
    EXPECT_EQ(readable_text("\xf0\x9f\x98"), bad);
    EXPECT_EQ(readable_text("\xf0\x9f\x98z"), bad + "z");
    EXPECT_EQ(readable_text("\xff\x80\xc2"), bad + bad + bad);
    EXPECT_EQ(readable_text("\xc0\xaf"), bad + bad);            // a long spelling of U+002F
    EXPECT_EQ(readable_text("\xe0\x80\xaf"), bad + bad + bad);  // likewise
    EXPECT_EQ(readable_text("\xed\xa0\x80"), bad + bad + bad);  // a surrogate
    EXPECT_EQ(readable_text("\xf4\x90\x80\x80"), bad + bad + bad + bad);  // above U+10FFFF
    EXPECT_EQ(readable_text("\xe2\x82\x1b[1m"), bad + "[1m");
}

TEST(Tokenizer, ControlCharacterSpreadOverTwoTokens) {
    TemporaryFolder folder;
    write_file(folder.file("t.bin"), tokenizer_file({"\xc2", "\x9b", "x"}, 2));
    const std::vector<int> tokens = {0, 1, 2};
    EXPECT_EQ(Tokenizer::load(folder.file("t.bin"))->decode(tokens.data(), 3), "x");
}

std::string error_of_file(const std::string& bytes) {
    TemporaryFolder folder;
    const std::string path = folder.file("t.bin");
    write_file(path, bytes);
    const std::string text = error_of([&] { Tokenizer::load(path); });
    expect_contains(text, {path});
    return text;
}

TEST(Tokenizer, CorruptFilesAreRefused) {
    const std::string good = tokenizer_file(kEntries, 6);
    expect_contains(error_of_file(""), {"empty"});
    expect_contains(error_of_file(header_bytes({20240520, 2, 7, 6}) + good.substr(1024)),
                    {"magic number 20240520", "20240328"});
    expect_contains(error_of_file(header_bytes({20240328, 1, 7, 6}) + good.substr(1024)),
                    {"version 1", "version 2"});
    expect_contains(error_of_file(header_bytes({20240328, 2, 0, 0}) + good.substr(1024)),
                    {"0 tokens"});
    expect_contains(error_of_file(header_bytes({20240328, 2, 1 << 30, 6}) + good.substr(1024)),
                    {"1073741824 tokens"});
    expect_contains(error_of_file(tokenizer_file(kEntries, 7)), {"end-of-text token 7", "0 to 6"});
    expect_contains(error_of_file(tokenizer_file(kEntries, -1)), {"end-of-text token -1"});
    expect_contains(error_of_file(tokenizer_file({"aa", "", "bb"}, 2)), {"token 1 is empty"});
    expect_contains(error_of_file(good.substr(0, good.size() - 1)), {"inside token 6"});
    expect_contains(error_of_file(good.substr(0, good.size() - 14)), {"before token 6"});
    expect_contains(error_of_file(good + "x"), {"1 bytes after"});
    TemporaryFolder folder;
    error_of([&] { Tokenizer::load(folder.path()); });
}

}  // namespace
}  // namespace llmc
