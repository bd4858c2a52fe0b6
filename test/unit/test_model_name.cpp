// llmc/model_name.h: names, paths and what is neither.
#include "llmc/model_name.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

using llmc::ModelConfig;
using llmc::parse_model_name;

namespace {

struct Size {
    const char* name;
    int num_layers, channels, num_heads;
};

void expect_size(const std::string& name, const Size& size, int max_seq_len) {
    const auto config = parse_model_name(name);
    ASSERT_TRUE(config.has_value()) << name;
    EXPECT_EQ(config->num_layers, size.num_layers) << name;
    EXPECT_EQ(config->channels, size.channels) << name;
    EXPECT_EQ(config->num_heads, size.num_heads) << name;
    EXPECT_EQ(config->max_seq_len, max_seq_len) << name;
    EXPECT_EQ(config->vocab_size, 50257) << name;
    EXPECT_EQ(config->padded_vocab_size, 50304) << name;
    EXPECT_EQ(config->channels % config->num_heads, 0) << name;
}

std::string refusal(const std::string& name) {
    try {
        parse_model_name(name);
    } catch (const llmc::Error& error) {
        const std::string text = error.what();
        EXPECT_EQ(text.find('\n'), std::string::npos) << text;
        return text;
    }
    return "no error";
}

TEST(ModelName, Gpt2SizesWithAndWithoutTheFamily) {
    const Size sizes[] = {{"d6", 6, 384, 6},     {"d12", 12, 768, 12},  {"d24", 24, 1024, 16},
                          {"d36", 36, 1280, 20}, {"d48", 48, 1600, 25}, {"d60", 60, 1920, 30}};
    for (const Size& size : sizes) {
        expect_size(size.name, size, 1024);
        expect_size(std::string("gpt2:") + size.name, size, 1024);
    }
}

// The published parameter counts, with the padding rows of wte taken off.
TEST(ModelName, Gpt2SizesHaveTheKnownNumberOfParameters) {
    const std::pair<const char*, size_t> counts[] = {
        {"d12", 124439808}, {"d24", 354823168}, {"d36", 774030080}, {"d48", 1557611200}};
    for (const auto& [name, count] : counts) {
        const ModelConfig config = *parse_model_name(name);
        const size_t padding = size_t(config.padded_vocab_size - config.vocab_size);
        EXPECT_EQ(llmc::ParamLayout(config).num_parameters() - padding * config.channels, count)
            << name;
    }
}

TEST(ModelName, Gpt3SizesHave2048Positions) {
    const Size sizes[] = {
        {"c384", 6, 384, 6},     {"c768", 12, 768, 12},   {"c1024", 24, 1024, 16},
        {"c1536", 24, 1536, 16}, {"c2048", 24, 2048, 16}, {"c2560", 32, 2560, 32},
        {"c4096", 32, 4096, 32}, {"c5120", 40, 5120, 40}, {"c12288", 96, 12288, 96}};
    for (const Size& size : sizes) expect_size(std::string("gpt3:") + size.name, size, 2048);
}

TEST(ModelName, Gpt3SizeThatDoesNotDivideByItsHeadsIsExplained) {
    const std::string text = refusal("gpt3:c5140");
    EXPECT_NE(text.find("40 heads"), std::string::npos) << text;
    EXPECT_NE(text.find("must be gpt3:c5120"), std::string::npos) << text;
}

TEST(ModelName, Custom) {
    expect_size("custom:L2C64H2T64", {"", 2, 64, 2}, 64);
    expect_size("custom:L1C1H1T1", {"", 1, 1, 1}, 1);
    ModelConfig config = *parse_model_name("custom:L3C96H4T32V512");
    EXPECT_EQ(config.num_layers, 3);
    EXPECT_EQ(config.channels, 96);
    EXPECT_EQ(config.num_heads, 4);
    EXPECT_EQ(config.max_seq_len, 32);
    EXPECT_EQ(config.vocab_size, 512);
    EXPECT_EQ(config.padded_vocab_size, 512);
    EXPECT_EQ(parse_model_name("custom:L1C2H1T1V1")->padded_vocab_size, 128);
    EXPECT_EQ(parse_model_name("custom:L1C2H1T1V128")->padded_vocab_size, 128);
    EXPECT_EQ(parse_model_name("custom:L1C2H1T1V129")->padded_vocab_size, 256);
    EXPECT_EQ(parse_model_name("custom:L1C2H1T1V50257")->padded_vocab_size, 50304);
}

TEST(ModelName, LargestCustomModelDoesNotOverflow) {
    const auto config = parse_model_name("custom:L1024C65536H65536T1048576V65536");
    ASSERT_TRUE(config.has_value());
    const size_t c = 65536, l = 1024;
    EXPECT_EQ(llmc::ParamLayout(*config).num_parameters(),
              65536 * c + 1048576 * c + l * (12 * c * c + 13 * c) + 2 * c);
}

TEST(ModelName, BadCustomModelsSayWhatWouldBeRight) {
    const std::pair<const char*, const char*> cases[] = {
        {"custom:L0C64H2T64", "L must be from 1 to 1024"},
        {"custom:L1025C64H2T64", "L must be from 1 to 1024"},
        {"custom:L99999999999C64H2T64", "L must be from 1 to 1024"},
        {"custom:L-1C64H2T64", "L must be from 1 to 1024"},
        {"custom:LC64H2T64", "L must be from 1 to 1024"},
        {"custom:L 2C64H2T64", "L must be from 1 to 1024"},
        {"custom:L2C65537H2T64", "C must be from 1 to 65536"},
        {"custom:L2C64H0T64", "H must be from 1 to 65536"},
        {"custom:L2C64H2T0", "T must be from 1 to 1048576"},
        {"custom:L2C64H2T64V0", "V must be from 1 to 65536"},
        {"custom:L2C64H2T64V65537", "V must be from 1 to 65536"},
        {"custom:L2C64H3T64", "C = 64 is not divisible by H = 3; nearest: C = 63 or 66"},
        {"custom:L2C65536H60000T64", "C = 65536 is not divisible by H = 60000; nearest: C = 60000"},
        {"custom:L2C64H65T64", "H must be at most C, 64"},
        {"custom:", "L and a number missing after 'custom:'"},
        {"custom:C64L2H2T64", "L and a number missing after 'custom:'"},
        {"custom:L2H2C64T64", "C and a number missing after 'custom:L2'"},
        {"custom:L2C64T64", "H and a number missing after 'custom:L2C64'"},
        {"custom:L2C64H2", "T and a number missing after 'custom:L2C64H2'"},
        {"custom:L2.5C64H2T64", "C and a number missing after 'custom:L2'"},
        {"custom:l2c64h2t64", "L and a number missing after 'custom:'"},
        {"custom:L2C64H2T64x", "'x' does not belong there"},
        {"custom:L2C64H2T64V512V512", "'V512' does not belong there"},
        {"custom:L2C64H2T64 ", "' ' does not belong there"},
    };
    for (const auto& [name, right] : cases) {
        const std::string text = refusal(name);
        EXPECT_EQ(text.rfind(std::string("-e ") + name + ": ", 0), 0u) << text;
        EXPECT_NE(text.find(right), std::string::npos) << name << ": " << text;
    }
}

TEST(ModelName, WrongNamesAreAnsweredWithTheRightOnes) {
    for (const char* name : {"d13", "d", "D12", "gpt2", "gpt2:", "gpt2:c768", "gpt2:d12.5", "c768",
                             "gpt3:d12", "gpt3:c769", "gpt3:", "gpt4:d12", ":d12", "", "d12 ",
                             "gpt2:d12/x", "d012", "12", "a\nb"}) {
        const std::string text = refusal(name);
        EXPECT_NE(text.find(": no such file or model; must be one of d6, d12, d24, d36, d48, d60"),
                  std::string::npos)
            << name << ": " << text;
    }
}

TEST(ModelName, PathsAreLeftAlone) {
    for (const char* path : {"gpt2_124M_bf16.bin", "log/model_00000010.bin", "./d12", "/d12", ".",
                             "..", "no.such", "no/such"}) {
        EXPECT_EQ(parse_model_name(path), std::nullopt) << path;
    }
}

TEST(ModelName, ExistingFileWinsAndAFolderDoesNot) {
    namespace fs = std::filesystem;
    std::string name = (fs::temp_directory_path() / "model_name_XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    const fs::path before = fs::current_path();
    fs::current_path(name);
    std::ofstream("mymodel") << "x";
    std::ofstream("d24") << "x";
    fs::create_directory("d12");
    const auto file = parse_model_name("mymodel"), named_file = parse_model_name("d24");
    const auto folder = parse_model_name("d12");
    fs::current_path(before);
    fs::remove_all(name);
    EXPECT_EQ(file, std::nullopt);
    EXPECT_EQ(named_file, std::nullopt);
    ASSERT_TRUE(folder.has_value());
    EXPECT_EQ(folder->num_layers, 12);
}

}  // namespace
