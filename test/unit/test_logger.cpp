#include "llmc/logger.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>

namespace {

using namespace llmc;
namespace fs = std::filesystem;

class LoggerTest : public testing::Test {
  protected:
    void SetUp() override {
        std::string name = (fs::temp_directory_path() / "logger_XXXXXX").string();
        ASSERT_NE(mkdtemp(name.data()), nullptr);
        folder_ = name;
        file_ = folder_ + "/main.log";
    }
    void TearDown() override { fs::remove_all(folder_); }

    std::string text() const {
        std::ifstream in(file_, std::ios::binary);
        std::stringstream all;
        all << in.rdbuf();
        return all.str();
    }
    void put(const std::string& content) const {
        std::ofstream(file_, std::ios::binary) << content;
    }
    std::string folder_, file_;
};

TEST_F(LoggerTest, LinesHaveLlmcsFormat) {
    Logger logger(folder_, 0);
    logger.log_validation(0, 11.00894);
    logger.log_eval(250, 0.29436);
    logger.log_train(1, 7.6122791, 6e-4f, 12.3456);
    logger.log_train(2, std::nan(""), 0.0, 0.005);
    EXPECT_EQ(text(),
              "s:0 tel:11.0089\n"
              "s:250 eval:0.2944\n"
              "s:1 trl:7.6123 lr:0.000600 norm:12.35\n"
              "s:2 trl:nan lr:0.000000 norm:0.01\n");
}

TEST_F(LoggerTest, EveryLineIsInTheFileWhenTheCallReturns) {
    Logger logger(folder_, 0);
    for (int step = 0; step < 100; ++step) {
        logger.log_validation(step, 1.0);
        const std::string line = format("s:%d tel:1.0000\n", step);
        const std::string now = text();
        ASSERT_GE(now.size(), line.size());
        ASSERT_EQ(now.substr(now.size() - line.size()), line);
    }
}

TEST_F(LoggerTest, OnlyRankZeroWrites) {
    put("s:1 tel:1.0000\n");
    Logger other(folder_, 1);
    other.log_validation(0, 1.0);
    Logger none;
    none.log_validation(0, 1.0);
    Logger no_folder("", 0);
    no_folder.log_validation(0, 1.0);
    EXPECT_EQ(text(), "s:1 tel:1.0000\n");
    EXPECT_FALSE(fs::exists("/main.log"));
}

TEST_F(LoggerTest, ANewRunStartsAnEmptyFile) {
    put("s:1 tel:1.0000\n");
    Logger logger(folder_, 0);
    EXPECT_EQ(text(), "");
    EXPECT_TRUE(fs::exists(file_));
}

TEST_F(LoggerTest, AResumedRunDropsTheStepsItWillWriteAgain) {
    put("s:0 tel:11.0000\ns:0 trl:11.0000 lr:0.000100 norm:1.00\ns:9 trl:9.0000 lr:0.000100 "
        "norm:1.00\ns:10 tel:8.5000\ns:10 trl:8.4000 lr:0.000100 norm:1.00\ns:11 trl:8.3000 "
        "lr:0.000100 norm:1.00\ns:100 eval:0.2500\n");
    Logger logger(folder_, 0, 10);
    logger.log_validation(10, 8.5);
    EXPECT_EQ(text(),
              "s:0 tel:11.0000\ns:0 trl:11.0000 lr:0.000100 norm:1.00\n"
              "s:9 trl:9.0000 lr:0.000100 norm:1.00\ns:10 tel:8.5000\n");
    EXPECT_FALSE(fs::exists(file_ + ".tmp"));
}

TEST_F(LoggerTest, AResumedRunDropsALineCutShort) {
    for (const char* torn :
         {"s", "s:", "s:4", "s:4 trl:9.0", "s:4 trl:9.0000 lr:0.000100 norm:1.00"}) {
        put(std::string("s:3 tel:9.5000\n") + torn);
        Logger logger(folder_, 0, 10);
        logger.log_validation(10, 8.5);
        EXPECT_EQ(text(), "s:3 tel:9.5000\ns:10 tel:8.5000\n") << torn;
    }
}

TEST_F(LoggerTest, AResumedRunKeepsWholeLinesItDoesNotKnow) {
    put("# moved here from another machine\ns:3 tel:9.5000\n\ns:x\ns:12 tel:1.0000\n");
    Logger logger(folder_, 0, 10);
    EXPECT_EQ(text(), "# moved here from another machine\ns:3 tel:9.5000\n\ns:x\n");
}

TEST_F(LoggerTest, AResumedRunWithoutALogStartsOne) {
    Logger logger(folder_, 0, 10);
    logger.log_validation(10, 8.5);
    EXPECT_EQ(text(), "s:10 tel:8.5000\n");
}

TEST_F(LoggerTest, AMovedLoggerGoesOn) {
    Logger logger;
    logger = Logger(folder_, 0);
    logger.log_validation(1, 1.0);
    Logger moved(std::move(logger));
    moved.log_validation(2, 1.0);
    EXPECT_EQ(text(), "s:1 tel:1.0000\ns:2 tel:1.0000\n");
}

std::string error_of(const std::function<void()>& action) {
    try {
        action();
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

TEST_F(LoggerTest, AFullDiskIsAnErrorThatNamesTheFile) {
    fs::create_symlink("/dev/full", file_);
    Logger logger(folder_, 0);
    const std::string error = error_of([&] { logger.log_validation(0, 1.0); });
    EXPECT_NE(error.find(file_), std::string::npos) << error;
    EXPECT_NE(error.find("No space left"), std::string::npos) << error;
}

TEST_F(LoggerTest, AFolderThatIsNotThereIsAnErrorThatNamesTheFile) {
    const std::string error = error_of([&] { Logger logger(folder_ + "/missing", 0); });
    EXPECT_NE(error.find(folder_ + "/missing/main.log"), std::string::npos) << error;
    fs::create_directory(file_);
    EXPECT_NE(error_of([&] { Logger logger(folder_, 0); }).find(file_), std::string::npos);
    EXPECT_NE(error_of([&] { Logger logger(folder_, 0, 5); }).find(file_), std::string::npos);
}

}  // namespace
