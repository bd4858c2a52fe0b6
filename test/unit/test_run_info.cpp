// llmc/run_info.h: run.json is right JSON, complete, and never loses an earlier start.
#include "llmc/run_info.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace fs = std::filesystem;
using llmc::json_string;
using llmc::RunInfo;

namespace {

std::string contents(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

class RunInfoTest : public ::testing::Test {
  protected:
    void SetUp() override {
        std::string name = (fs::temp_directory_path() / "run_info_XXXXXX").string();
        ASSERT_NE(mkdtemp(name.data()), nullptr);
        folder_ = name;
    }
    void TearDown() override { fs::remove_all(folder_); }

    std::string folder_;
};

RunInfo example() {
    RunInfo info;
    info.command_line = {"./train_gpt2cu", "-l", "1e-4", "-o", "a \"b\"\\c\n\x01\xff\xc3\xa9"};
    info.options = llmc::parse_options(
        {"-l", "1e-4", "-o", "a \"b\"", "-rs", "18446744073709551615", "-h", "1"});
    info.options_in_use = info.options;
    info.options_in_use.zero_stage = 1;
    info.plan = {{"attention", "cuDNN \"9\""}, {"steps", "8"}};
    info.num_processes = 4;
    info.device = "Some \"GPU\"";
    info.libraries = {{"NCCL", "2.28.9"}, {"cuBLASLt", "13.0"}};
    info.start_time = 1709210096;
    return info;
}

TEST(JsonString, EscapesWhatJsonDemands) {
    EXPECT_EQ(json_string(""), "\"\"");
    EXPECT_EQ(json_string("plain / text"), "\"plain / text\"");
    EXPECT_EQ(json_string("a\"b\\c"), "\"a\\\"b\\\\c\"");
    EXPECT_EQ(json_string("\n\t\r\b"), "\"\\n\\t\\u000d\\u0008\"");
    EXPECT_EQ(json_string(std::string("\0\x1f\x7f", 3)), "\"\\u0000\\u001f\\u007f\"");
}

TEST(JsonString, KeepsUtf8) {
    for (const char* text : {"\xc2\x80", "\xc3\xa9", "\xdf\xbf", "\xe0\xa0\x80", "\xe2\x82\xac",
                             "\xed\x9f\xbf", "\xee\x80\x80", "\xef\xbf\xbf", "\xf0\x90\x80\x80",
                             "\xf0\x9f\x98\x80", "\xf4\x8f\xbf\xbf"}) {
        EXPECT_EQ(json_string(text), std::string("\"") + text + "\"");
    }
}

TEST(JsonString, ReplacesBytesThatAreNotUtf8) {
    const std::pair<const char*, int> cases[] = {
        {"\x80", 1},              // a tail without a head
        {"\xff", 1},              // never in UTF-8
        {"\xc3", 1},              // cut short
        {"\xc0\xaf", 2},          // '/' in two bytes
        {"\xe0\x9f\xbf", 3},      // long form
        {"\xed\xa0\x80", 3},      // surrogate
        {"\xf0\x8f\xbf\xbf", 4},  // long form
        {"\xf4\x90\x80\x80", 4},  // above U+10FFFF
        {"\xf5\x80\x80\x80", 4},
        {"\xe2\x82", 2},  // cut short
        {"\xf0\x9f\x98", 3},
    };
    for (const auto& [text, bytes] : cases) {
        std::string expected = "\"x";
        for (int i = 0; i < bytes; ++i) expected += "\\ufffd";
        EXPECT_EQ(json_string(std::string("x") + text + "y"), expected + "y\"");
    }
}

TEST_F(RunInfoTest, HasEveryOptionUnderItsName) {
    const std::string json = llmc::run_json(example());
    for (const llmc::Flag& flag : llmc::flag_table()) {
        EXPECT_NE(json.find(llmc::format("\n    \"%s\": ", flag.name)), std::string::npos)
            << flag.name;
    }
    for (const char* line :
         {"\"batch_size\": 4,", "\"learning_rate\": 1e-04,", "\"output_dir\": \"a \\\"b\\\"\",",
          "\"seed\": 18446744073709551615,", "\"hellaswag\": true,", "\"tf32\": true,",
          "\"resume\": false,", "\"schedule\": \"cosine\",", "\"total_batch\": -1,"}) {
        EXPECT_NE(json.find(line), std::string::npos) << line;
    }
}

TEST_F(RunInfoTest, SaysWhatRanWhereAndWhen) {
    const std::string json = llmc::run_json(example());
    char host[256] = {};
    ASSERT_EQ(gethostname(host, sizeof(host) - 1), 0);
    for (const std::string& line :
         {std::string("\"command_line\": [\"./train_gpt2cu\", \"-l\", \"1e-4\", \"-o\", "
                      "\"a \\\"b\\\"\\\\c\\n\\u0001\\ufffd\xc3\xa9\"],"),
          std::string("\"start_time\": \"2024-02-29T12:34:56Z\","),
          "\"host\": " + json_string(host) + ",", std::string("\"device\": \"Some \\\"GPU\\\"\","),
          std::string("\"num_processes\": 4,"), std::string("\"NCCL\": \"2.28.9\","),
          std::string("\"cuBLASLt\": \"13.0\"\n"),
          std::string("\"options_in_use\": {\n    \"zero_stage\": 1\n  },"),
          std::string(
              "\"plan\": {\n    \"attention\": \"cuDNN \\\"9\\\"\",\n    \"steps\": \"8\"\n  }\n}"),
          std::string("\"program\": \"train_gpt2\","), std::string("\"version\": \"0.1\","),
          "\"commit\": " + json_string(llmc::kCommit) + ",",
          "\"precision\": " + json_string(llmc::kPrecisionName) + ",",
          std::string("\"compiler\": \"")}) {
        EXPECT_NE(json.find(line), std::string::npos) << line;
    }
#ifdef MULTI_GPU
    EXPECT_NE(json.find("\"multi_gpu\": true"), std::string::npos);
#else
    EXPECT_NE(json.find("\"multi_gpu\": false"), std::string::npos);
#endif
}

TEST_F(RunInfoTest, StartTimeIsNowByDefault) {
    const std::time_t before = std::time(nullptr);
    const RunInfo info;
    EXPECT_GE(info.start_time, before);
    EXPECT_LE(info.start_time, std::time(nullptr));
}

TEST_F(RunInfoTest, EachStartKeepsItsOwnFile) {
    RunInfo info = example();
    for (int start = 0; start < 4; ++start) {
        info.num_processes = start + 1;
        const std::string expected =
            folder_ + (start == 0 ? "/run.json" : "/run." + std::to_string(start) + ".json");
        EXPECT_EQ(llmc::write_run_json(folder_, info), expected);
        info.num_processes = 1;
        EXPECT_NE(contents(folder_ + "/run.json").find("\"num_processes\": 1,"), std::string::npos);
        EXPECT_NE(contents(expected).find("\"num_processes\": " + std::to_string(start + 1)),
                  std::string::npos);
    }
    EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 4);
}

TEST_F(RunInfoTest, MissingFolderIsAnErrorThatNamesTheFile) {
    try {
        llmc::write_run_json(folder_ + "/missing", RunInfo());
        FAIL() << "no error";
    } catch (const llmc::Error& error) {
        EXPECT_NE(std::string(error.what()).find(folder_ + "/missing/run.json"), std::string::npos);
    }
}

// Somebody else's parser has the last word.
TEST_F(RunInfoTest, PythonReadsItBack) {
    if (std::system("python3 -c pass >/dev/null 2>&1") != 0) GTEST_SKIP() << "no python3";
    const std::string path = llmc::write_run_json(folder_, example());
    const std::string script = folder_ + "/check.py";
    std::ofstream(script) << R"(
import json, sys
with open(sys.argv[1], encoding="utf-8") as file:
    run = json.load(file)
assert run["command_line"][4] == 'a "b"\\c\n\x01\ufffd\u00e9', run["command_line"]
assert run["options"]["learning_rate"] == 1e-4
assert run["options"]["seed"] == 2**64 - 1
assert run["options"]["hellaswag"] is True
assert run["options"]["output_dir"] == 'a "b"'
assert run["libraries"] == {"NCCL": "2.28.9", "cuBLASLt": "13.0"}
assert isinstance(run["build"]["multi_gpu"], bool)
)";
    EXPECT_EQ(std::system(("python3 " + script + " " + path).c_str()), 0);
}

TEST_F(RunInfoTest, EmptyListsAreRightJsonToo) {
    const std::string json = llmc::run_json(RunInfo());
    EXPECT_NE(json.find("\"command_line\": [],"), std::string::npos);
    EXPECT_NE(json.find("\"libraries\": {},"), std::string::npos);
}

}  // namespace
