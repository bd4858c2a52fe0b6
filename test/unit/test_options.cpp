// llmc/options.h: every flag through the table, then what several flags say together.
#include "llmc/options.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <set>
#include <sstream>

using llmc::Error;
using llmc::Flag;
using llmc::flag_table;
using llmc::flag_value;
using llmc::Options;
using llmc::parse_options;

namespace {

std::string message(const std::function<void()>& action) {
    try {
        action();
    } catch (const Error& error) {
        return error.what();
    }
    return "no error";
}

std::string parse_error(const std::vector<std::string>& arguments) {
    return message([&] { parse_options(arguments); });
}

// One flag with what it needs beside it.
std::vector<std::string> arguments_for(const Flag& flag, const std::string& value) {
    std::vector<std::string> arguments = {flag.letters};
    if (flag.takes_value) arguments.push_back(value);
    const std::string letters = flag.letters;
    if (letters == "-pr") arguments.insert(arguments.end(), {"-pn", "2147483647"});
    if (letters == "-y") arguments.insert(arguments.end(), {"-o", "log"});
    return arguments;
}

std::string value_after(const Flag& flag, const std::string& value) {
    return flag_value(parse_options(arguments_for(flag, value)), flag);
}

// The refusal begins with the flag and the value, and says what would be right, on one line.
void expect_refused(const Flag& flag, const std::string& value) {
    const std::string text = parse_error(arguments_for(flag, value));
    const std::string shown = llmc::printable(value);
    EXPECT_EQ(text.rfind(std::string(flag.letters) + " " + shown + ": ", 0), 0u) << text;
    EXPECT_NE(text.find("must "), std::string::npos) << text;
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
}

bool is_whole(const Flag& flag) {
    return std::holds_alternative<int Options::*>(flag.member) ||
           std::holds_alternative<int64_t Options::*>(flag.member);
}

TEST(FlagTable, HasExactlyTheFlagsDefaultsAndRangesOfTheManual) {
    using DefaultAndRange = std::pair<std::string, std::string>;
    const std::map<std::string, DefaultAndRange> expected = {
        {"-i", {"dev/data/tinyshakespeare/tiny_shakespeare_train.bin", "a text, not empty"}},
        {"-j", {"dev/data/tinyshakespeare/tiny_shakespeare_val.bin", "a text, not empty"}},
        {"-e", {"", "a text"}},
        {"-o", {"", "a text"}},
        {"-n", {"0", "at least 0"}},
        {"-nk", {"0", "at least 0"}},
        {"-nm", {"0", "at least 0"}},
        {"-y", {"0", "0 or 1"}},
        {"-lg", {"-1", "-1 or at least 1"}},
        {"-b", {"4", "at least 1"}},
        {"-t", {"1024", "at least 1"}},
        {"-d", {"-1", "-1 or at least 1"}},
        {"-x", {"-1", "-1 or at least 0"}},
        {"-k", {"cosine", "one of cosine, linear, constant, wsd"}},
        {"-l", {"3e-4", "from 0 to 10"}},
        {"-u", {"0", "at least 0"}},
        {"-q", {"1.0", "from 0 to 1"}},
        {"-c", {"0.0", "from 0 to 10"}},
        {"-sl", {"0", "from 0 to 1e+06"}},
        {"-sg", {"0", "from 0 to 1e+06"}},
        {"-a", {"0", "0 or 1"}},
        {"-rs", {"1337", "from 0 to 18446744073709551615"}},
        {"-v", {"20", "at least 0"}},
        {"-m", {"20", "at least 1"}},
        {"-s", {"20", "at least 0"}},
        {"-g", {"64", "at least 1"}},
        {"-h", {"0", "0 or 1"}},
        {"-f", {"1", "0 or 1"}},
        {"-w", {"1", "0 or 1"}},
        {"-ge", {"-1", "from -1 to 2"}},
        {"-r", {"1", "from 0 to 2"}},
        {"-cg", {"1", "0 or 1"}},
        {"-z", {"0", "from 0 to 3"}},
        {"-rw", {"8", "from 1 to 1024"}},
        {"-pi", {"mpi", "one of mpi, tcp, fs"}},
        {"-pn", {"1", "at least 1"}},
        {"-pr", {"0", "at least 0"}},
        {"-pg", {"8", "at least 1"}},
        {"-ps", {"", "a text"}},
        {"-pp", {"17171", "from 1 to 65535"}},
        {"-pf", {"", "a text"}},
        {"--help", {"0", ""}},
        {"--version", {"0", ""}},
        {"--check-ranks", {"0", ""}},
        {"--dry-run", {"0", ""}},
        {"--hash", {"0", ""}},
    };
    std::map<std::string, DefaultAndRange> table;
    std::set<std::string> names;
    for (const Flag& flag : flag_table()) {
        const DefaultAndRange entry(flag.fallback, llmc::valid_values(flag));
        EXPECT_TRUE(table.emplace(flag.letters, entry).second) << flag.letters;
        EXPECT_TRUE(names.insert(flag.name).second) << flag.name;
    }
    EXPECT_EQ(table, expected);
}

TEST(FlagTable, NoTwoFlagsShareAMember) {
    for (const Flag& a : flag_table()) {
        for (const Flag& b : flag_table()) {
            EXPECT_EQ(a.member == b.member, &a == &b) << a.letters << " " << b.letters;
        }
    }
}

TEST(EveryFlag, HasItsDefault) {
    const Options options = parse_options(std::vector<std::string>{});
    for (const Flag& flag : flag_table()) {
        SCOPED_TRACE(flag.letters);
        if (!flag.takes_value) {
            EXPECT_EQ(flag_value(options, flag), "0");
            continue;
        }
        EXPECT_EQ(flag_value(options, flag), value_after(flag, flag.fallback));
    }
}

TEST(EveryFlag, GoesIntoTheRightMember) {
    const Options o = parse_options(
        {"-i",  "1.bin", "-j",    "2.bin",     "-e",    "d24",  "-o",  "out",  "-lg", "5",   "-n",
         "6",   "-nk",   "7",     "-nm",       "8",     "-y",   "1",   "-b",   "9",   "-t",  "10",
         "-d",  "11",    "-x",    "12",        "-k",    "wsd",  "-l",  "0.25", "-u",  "13",  "-q",
         "0.5", "-c",    "0.125", "-sl",       "3.5",   "-sg",  "4.5", "-v",   "14",  "-m",  "15",
         "-s",  "16",    "-g",    "17",        "-h",    "1",    "-a",  "1",    "-f",  "0",   "-w",
         "0",   "-ge",   "2",     "-r",        "0",     "-z",   "1",   "-pn",  "18",  "-pr", "3",
         "-pg", "4",     "-pi",   "tcp",       "-ps",   "host", "-pf", "dir",  "-pp", "19",  "-rw",
         "20",  "-rs",   "21",    "--dry-run", "--hash"});
    EXPECT_EQ(o.train_data, "1.bin");
    EXPECT_EQ(o.val_data, "2.bin");
    EXPECT_EQ(o.model, "d24");
    EXPECT_EQ(o.output_dir, "out");
    EXPECT_EQ(o.log_gpu_every, 5);
    EXPECT_EQ(o.checkpoint_every, 6);
    EXPECT_EQ(o.checkpoints_kept, 7);
    EXPECT_EQ(o.major_checkpoint_every, 8);
    EXPECT_TRUE(o.resume);
    EXPECT_EQ(o.batch_size, 9);
    EXPECT_EQ(o.seq_len, 10);
    EXPECT_EQ(o.total_batch, 11);
    EXPECT_EQ(o.max_steps, 12);
    EXPECT_EQ(o.schedule, "wsd");
    EXPECT_EQ(o.learning_rate, 0.25);
    EXPECT_EQ(o.warmup_steps, 13);
    EXPECT_EQ(o.final_lr_fraction, 0.5);
    EXPECT_EQ(o.weight_decay, 0.125);
    EXPECT_EQ(o.skip_loss_z, 3.5);
    EXPECT_EQ(o.skip_norm_z, 4.5);
    EXPECT_EQ(o.val_every, 14);
    EXPECT_EQ(o.val_batches, 15);
    EXPECT_EQ(o.sample_every, 16);
    EXPECT_EQ(o.sample_tokens, 17);
    EXPECT_TRUE(o.hellaswag && o.overfit_single_batch);
    EXPECT_FALSE(o.tf32 || o.master_weights);
    EXPECT_EQ(o.gelu_fusion, 2);
    EXPECT_EQ(o.recompute, 0);
    EXPECT_EQ(o.zero_stage, 1);
    EXPECT_EQ(o.num_processes, 18);
    EXPECT_EQ(o.process_rank, 3);
    EXPECT_EQ(o.gpus_per_node, 4);
    EXPECT_EQ(o.init_method, "tcp");
    EXPECT_EQ(o.server_address, "host");
    EXPECT_EQ(o.shared_folder, "dir");
    EXPECT_EQ(o.port, 19);
    EXPECT_EQ(o.reduction_width, 20);
    EXPECT_EQ(o.seed, 21u);
    EXPECT_TRUE(o.dry_run && o.hash);
    EXPECT_FALSE(o.help || o.version);
}

TEST(EveryFlag, TakesItsLimitsAndNothingBeyond) {
    for (const Flag& flag : flag_table()) {
        SCOPED_TRACE(flag.letters);
        if (is_whole(flag)) {
            for (const int64_t value : {flag.min, flag.max}) {
                EXPECT_EQ(value_after(flag, std::to_string(value)), std::to_string(value));
            }
            const bool minus_one_is_right = flag.minus_one && flag.min == 0;
            expect_refused(flag, std::to_string(flag.min - (minus_one_is_right ? 2 : 1)));
            expect_refused(flag, std::to_string(flag.max + 1));
            if (flag.minus_one) {
                EXPECT_EQ(value_after(flag, "-1"), "-1");
            }
            expect_refused(flag, "99999999999999999999");
            expect_refused(flag, "-99999999999999999999");
        } else if (llmc::detail::is_seed(flag)) {
            EXPECT_EQ(value_after(flag, "0"), "0");
            EXPECT_EQ(value_after(flag, "18446744073709551615"), "18446744073709551615");
            expect_refused(flag, "-1");
            expect_refused(flag, "18446744073709551616");
        } else if (llmc::detail::is_real(flag)) {
            for (const double value : {flag.real_min, flag.real_max}) {
                EXPECT_EQ(std::stod(value_after(flag, llmc::format("%.17g", value))), value);
            }
            expect_refused(flag, "-1e-9");
            expect_refused(flag, llmc::format("%.17g", std::nextafter(flag.real_max, 1e300)));
            expect_refused(flag, "1e999");
            expect_refused(flag, "1e-999");
        }
    }
}

TEST(EveryFlag, RefusesGarbage) {
    const std::vector<std::string> garbage = {
        "",    " ",   "x",   "1x",   "1 ", " 1",  "+1",  "1,5", "0x10", "--", "-",
        "nan", "NaN", "inf", "-inf", "1e", "1\t", "one", "1 2", "\xff", "on", "true"};
    for (const Flag& flag : flag_table()) {
        SCOPED_TRACE(flag.letters);
        if (!flag.takes_value) continue;
        if (llmc::detail::is_text(flag)) {
            if (*flag.fallback) expect_refused(flag, "");
            if (!flag.choices.empty()) {
                for (const std::string& value : garbage) {
                    expect_refused(flag, value);
                }
            }
            continue;
        }
        for (const std::string& value : garbage) {
            expect_refused(flag, value);
        }
        if (!llmc::detail::is_real(flag)) expect_refused(flag, "1.0");
        if (!llmc::detail::is_real(flag)) expect_refused(flag, "1e0");
        if (llmc::detail::is_bool(flag)) expect_refused(flag, "2");
    }
}

TEST(EveryFlag, TakesEachOfItsWordsAsWritten) {
    for (const Flag& flag : flag_table()) {
        for (const std::string word : flag.choices) {
            EXPECT_EQ(value_after(flag, word), word);
            std::string upper = word;
            upper[0] = static_cast<char>(std::toupper(upper[0]));
            expect_refused(flag, upper);
            expect_refused(flag, word + "x");
        }
    }
}

TEST(EveryFlag, IsRefusedTwice) {
    for (const Flag& flag : flag_table()) {
        const std::string value = *flag.fallback ? flag.fallback : "text";
        std::vector<std::string> arguments = arguments_for(flag, value);
        const std::vector<std::string> once = arguments;
        arguments.insert(arguments.end(), once.begin(), once.begin() + (flag.takes_value ? 2 : 1));
        const std::string text = parse_error(arguments);
        EXPECT_EQ(text.rfind(flag.letters, 0), 0u) << text;
        EXPECT_NE(text.find("given twice"), std::string::npos) << text;
    }
}

TEST(EveryFlag, NamesItselfWhenItsValueIsMissing) {
    for (const Flag& flag : flag_table()) {
        if (!flag.takes_value) continue;
        const std::vector<std::vector<std::string>> cases = {
            {flag.letters}, {flag.letters, "-b", "8"}, {flag.letters, "--hash"}};
        for (const auto& arguments : cases) {
            const std::string text = parse_error(arguments);
            const std::string begin = std::string(flag.letters) + ": its value is missing; must be";
            EXPECT_EQ(text.rfind(begin, 0), 0u) << text;
        }
    }
}

TEST(EveryFlag, ReadsItsOwnValueBack) {
    const Flag& rate = *llmc::find_flag("-l");
    for (const char* value : {"0.1", "3e-4", "0.30000000000000004", "1e-300", "6.02e-2"}) {
        const Options options = parse_options({"-l", value});
        EXPECT_EQ(parse_options({"-l", flag_value(options, rate)}).learning_rate,
                  options.learning_rate);
    }
    EXPECT_EQ(parse_options({"-l", "0.1"}).learning_rate, 0.1);
    EXPECT_FALSE(std::signbit(parse_options({"-l", "-0"}).learning_rate));
}

TEST(Refusals, ReadAsTheManualSays) {
    EXPECT_EQ(parse_error({"-b", "0"}), "-b 0: must be at least 1");
    EXPECT_EQ(parse_error({"-b", "4x"}), "-b 4x: must be a whole number, at least 1");
    EXPECT_EQ(parse_error({"-b", "2147483648"}), "-b 2147483648: must be at most 2147483647");
    EXPECT_EQ(parse_error({"-d", "0"}), "-d 0: must be -1 or at least 1");
    EXPECT_EQ(parse_error({"-z", "-1"}), "-z -1: must be from 0 to 3");
    EXPECT_EQ(parse_error({"-q", "1.5"}), "-q 1.5: must be from 0 to 1");
    EXPECT_EQ(parse_error({"-l", "nan"}), "-l nan: must be a number from 0 to 10");
    EXPECT_EQ(parse_error({"-pi", "nccl"}), "-pi nccl: must be one of mpi, tcp, fs");
    EXPECT_EQ(parse_error({"-i", ""}), "-i '': must not be empty");
    EXPECT_EQ(parse_error({"-b", "1\n2"}), "-b 1?2: must be a whole number, at least 1");
    EXPECT_EQ(parse_error({"-b", "8", "-b", "4"}),
              "-b 4: given twice, at first with 8; must be given once");
}

TEST(UnknownFlag, IsAnsweredWithTheNearest) {
    const std::map<std::string, std::string> nearest = {
        {"-zz", "-z (zero_stage)"},
        {"--zero-stage", "-z (zero_stage)"},
        {"--zero_stage", "-z (zero_stage)"},
        {"-B", "-b (batch_size)"},
        {"-b=4", "-b (batch_size)"},
        {"--batch-size", "-b (batch_size)"},
        {"--learning_rate=1", "-l (learning_rate)"},
        {"-help", "--help"},
        {"--hlep", "--help"},
        {"--dryrun", "--dry-run"},
        {"-w1", "-w (master_weights)"},
        {"-d32768", "-d (total_batch)"},
        {"-pg8", "-pg (gpus_per_node)"},
        {"--reduction-with", "-rw (reduction_width)"},
        {"--chekc-rank", "--check-ranks"},
    };
    for (const auto& [typed, flag] : nearest) {
        const std::string begin = typed + ": unknown flag; the nearest is " + flag;
        const std::string text = parse_error({typed, "1"});
        EXPECT_EQ(text.rfind(begin, 0), 0u) << text;
    }
    EXPECT_NE(parse_error({std::string(100000, '-')}), "no error");
    EXPECT_NE(parse_error({"-"}).find("unknown flag"), std::string::npos);
}

TEST(UnknownFlag, WasToldOfAFlagThatIsNotNear) {
    for (const char* typed : {"-bogus", "-", "--", "-?", "-4", "-p", "-xyz", "--epochs", "--foo=1",
                              "--gradient-accumulation"}) {
        EXPECT_EQ(parse_error({typed, "1"}),
                  std::string(typed) + ": unknown flag; --help lists all");
    }
}

// ---- the flags by which processes meet

TEST(MeetingFlags, AreTheseSeven) {
    std::string found;
    for (const llmc::Flag& flag : llmc::flag_table()) {
        if (llmc::detail::is_meeting_flag(flag)) found += std::string(flag.letters) + " ";
    }
    EXPECT_EQ(found, "-pi -pn -pr -pg -ps -pp -pf ");
}

TEST(MeetingFlags, SayWhetherTheOthersAreFoundByMpi) {
    using llmc::are_found_by_mpi;
    EXPECT_TRUE(are_found_by_mpi({}));
    EXPECT_TRUE(are_found_by_mpi({"-b", "0", "-pi", "mpi"}));
    EXPECT_TRUE(are_found_by_mpi({"-b", "0", "-pi"}));
    EXPECT_FALSE(are_found_by_mpi({"-pi", "tcp", "-pn"}));
    EXPECT_FALSE(are_found_by_mpi({"-b", "-pi", "fs"}));
}

std::string meeting(const std::vector<std::string>& arguments) {
    const std::optional<Options> options = llmc::read_meeting_flags(arguments);
    if (!options) return "";
    return options->init_method + " " + std::to_string(options->process_rank) + " of " +
           std::to_string(options->num_processes) + " at " + options->server_address + ":" +
           std::to_string(options->port) + options->shared_folder;
}

TEST(ReadMeetingFlags, ReadsThemBesideFlagsThatAreWrong) {
    using Arguments = std::vector<std::string>;
    const Arguments tcp = {"-pi", "tcp", "-pn", "4", "-pr", "2", "-ps", "node1", "-pp", "99"};
    const auto beside = [&](Arguments before, Arguments after = {}) {
        before.insert(before.end(), tcp.begin(), tcp.end());
        before.insert(before.end(), after.begin(), after.end());
        return meeting(before);
    };
    const std::string place = "tcp 2 of 4 at node1:99";
    EXPECT_EQ(beside({}), place);
    EXPECT_EQ(beside({"-b", "0"}), place);
    EXPECT_EQ(beside({"-b"}), place);
    EXPECT_EQ(beside({"-bogus", "7", "--help"}, {"-l", "x", "-t"}), place);
    EXPECT_EQ(beside({"-b", "1", "-b", "2"}, {"loose"}), place);
    EXPECT_EQ(beside({"-o", "-x"}), place);
    EXPECT_EQ(meeting({"-pi", "fs", "-pn", "2", "-pf", "/d"}), "fs 0 of 2 at :17171/d");
}

TEST(ReadMeetingFlags, FindsNothingWhereOneOfThemIsWrong) {
    for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
             {},
             {"-pn", "4"},
             {"-pi", "tcp", "-ps", "node1"},
             {"-pi", "tcp", "-pn", "1", "-ps", "node1"},
             {"-pi", "tcp", "-pn", "4"},
             {"-pi", "fs", "-pn", "4"},
             {"-pi", "udp", "-pn", "4", "-ps", "node1", "-pf", "/d"},
             {"-pi", "tcp", "-pn", "4", "-pr", "4", "-ps", "node1"},
             {"-pi", "tcp", "-pn", "4", "-pr", "one", "-ps", "node1"},
             {"-pi", "tcp", "-pn", "4", "-pg", "0", "-ps", "node1"},
             {"-pi", "tcp", "-pn", "4", "-pp", "70000", "-ps", "node1"},
             {"-pi", "tcp", "-pn", "4", "-pr", "1", "-pr", "2", "-ps", "node1"},
         }) {
        EXPECT_EQ(meeting(arguments), "") << arguments.size();
    }
}

TEST(UnknownFlag, LooseValueIsNotOne) {
    EXPECT_EQ(parse_error({"train.bin"}),
              "train.bin: a flag must come here, such as -b 4; --help lists all");
    EXPECT_EQ(parse_error({"-b", "4", "8"}),
              "8: a flag must come here, such as -b 4; --help lists all");
    EXPECT_EQ(parse_error({""}), "'': a flag must come here, such as -b 4; --help lists all");
}

TEST(ParseOptions, SkipsTheProgramsName) {
    const char* arguments[] = {"-b", "-t", "64"};
    EXPECT_EQ(parse_options(3, arguments).seq_len, 64);
    EXPECT_EQ(parse_options(0, nullptr).seq_len, 1024);
}

TEST(Combinations, AreChecked) {
    EXPECT_EQ(parse_error({"-pn", "4", "-pr", "4"}), "-pr 4: must be less than -pn, which is 4");
    EXPECT_EQ(parse_error({"-pr", "3", "-pn", "4"}), "no error");
    EXPECT_EQ(parse_error({"-y", "1"}), "-y 1: needs -o, the folder to resume from");
    EXPECT_EQ(parse_error({"-y", "1", "-o", "log"}), "no error");
    EXPECT_EQ(parse_error({"-pi", "tcp", "-pn", "2", "-ps", ""}),
              "-pi tcp: needs -ps, the host name or address of rank 0");
    EXPECT_EQ(parse_error({"-pi", "tcp", "-pn", "2", "-ps", "::1"}), "no error");
    EXPECT_EQ(parse_error({"-pi", "fs", "-pn", "2"}),
              "-pi fs: needs -pf, a folder that all processes see");
    EXPECT_EQ(parse_error({"-pi", "fs", "-pn", "2", "-pf", "d"}), "no error");
    EXPECT_EQ(parse_error({"-y", "1", "--help"}), "no error");
    EXPECT_EQ(parse_error({"--version", "-pr", "1"}), "no error");
}

TEST(Help, ShowsEveryFlagOnceAlignedWithItsDefault) {
    std::istringstream help(llmc::help_text("./train_gpt2cu"));
    std::string line, text;
    std::vector<std::string> order;
    bool examples = false;
    while (std::getline(help, line)) {
        EXPECT_LE(line.size(), 100u) << line;
        EXPECT_TRUE(line.empty() || line.back() != ' ') << line;
        text += line + ' ';
        examples = examples || line == "Examples";
        if (examples || line.rfind("  ", 0) != 0) continue;
        ASSERT_GT(line.size(), 18u) << line;
        EXPECT_EQ(line[17], ' ') << line;
        EXPECT_NE(line[18], ' ') << line;
        if (line[2] == '-') order.push_back(line.substr(2, line.find(' ', 2) - 2));
    }
    EXPECT_TRUE(examples);
    std::vector<std::string> expected;
    for (const Flag& flag : flag_table()) expected.push_back(flag.letters);
    EXPECT_EQ(order, expected);
    // Words alone, since lines break between them.
    std::istringstream words(text);
    std::string word, joined;
    while (words >> word) joined += word + ' ';
    for (const char* part :
         {"[at least 1; default 4]", "[from 0 to 3; default 0]", "[0 or 1; default 1]",
          "[one of cosine, linear, constant, wsd; default cosine]", "[from 0 to 10; default 3e-4]",
          "[default dev/data/tinyshakespeare/tiny_shakespeare_train.bin]", "[default empty]",
          "[-1 or at least 1; default -1]", " Several GPUs -z ", "Trains GPT-2. usage:"}) {
        EXPECT_NE(joined.find(part), std::string::npos) << part;
    }
}

TEST(Help, ExamplesAreCommandsThatWork) {
    std::istringstream help(llmc::help_text("PROGRAM"));
    std::string line;
    int examples = 0;
    while (std::getline(help, line)) {
        const size_t program = line.find("PROGRAM ");
        if (program == std::string::npos || line.find(':') == std::string::npos) continue;
        if (line.rfind("usage", 0) == 0) continue;
        std::istringstream words(line.substr(program + 8));
        std::vector<std::string> arguments;
        for (std::string word; words >> word;) arguments.push_back(word == "R" ? "1" : word);
        EXPECT_EQ(message([&] {
                      const int mpi = line.find("-np 4") != std::string::npos ? 4 : 1;
                      const Options options = parse_options(arguments);
                      llmc::resolve_batch(options, std::max(options.num_processes, mpi));
                  }),
                  "no error")
            << line;
        ++examples;
    }
    EXPECT_EQ(examples, 3);
}

TEST(Version, NamesProgramPrecisionAndCommit) {
    EXPECT_EQ(llmc::version_text(),
              std::string("train_gpt2 0.1, precision ") + llmc::kPrecisionName +
                  (std::is_same_v<llmc::gradX, llmc::floatX> ? "" : " with FP32 gradients") +
                  ", commit " + llmc::kCommit + "\n");
#ifndef LLMC_COMMIT
    EXPECT_STREQ(llmc::kCommit, "unknown");
#endif
}

llmc::ResolvedBatch resolve(const std::vector<std::string>& arguments, int num_processes) {
    return llmc::resolve_batch(parse_options(arguments), num_processes);
}

TEST(ResolveBatch, DefaultIsOneMicroBatchARank) {
    const llmc::ResolvedBatch batch = resolve({"-b", "4", "-t", "64"}, 3);
    EXPECT_EQ(batch.total_tokens, 768);
    EXPECT_EQ(batch.micro_batches, 3);
    EXPECT_EQ(batch.micro_batches_per_rank, 1);
    EXPECT_EQ(batch.width, 1);
}

TEST(ResolveBatch, WidthIsTheLargestPowerOfTwoInBoth) {
    struct Case {
        int micro_batches;
        const char* rw;
        int width;
    };
    const Case cases[] = {{8, "8", 8},  {8, "4", 4},  {8, "7", 4},         {8, "1", 1},
                          {12, "8", 4}, {16, "8", 8}, {16, "1024", 16},    {7, "8", 1},
                          {6, "8", 2},  {1, "8", 1},  {2048, "1024", 1024}};
    for (const Case& c : cases) {
        const std::string d = std::to_string(c.micro_batches * 2 * 16);
        // The width must not depend on the number of ranks.
        for (int n = 1; n <= c.micro_batches; ++n) {
            if (c.micro_batches % n != 0) continue;
            const auto batch = resolve({"-b", "2", "-t", "16", "-d", d, "-rw", c.rw}, n);
            EXPECT_EQ(batch.width, c.width) << c.micro_batches << " " << c.rw << " " << n;
            EXPECT_EQ(batch.micro_batches, c.micro_batches);
            EXPECT_EQ(batch.micro_batches_per_rank, c.micro_batches / n);
        }
    }
}

// nanochat#533, llm.c#551: the error left the user to guess.
TEST(ResolveBatch, IndivisibleTotalBatchNamesTheNearestValidOnes) {
    EXPECT_EQ(message([] {
                  resolve({"-d", "500000", "-b", "4", "-t", "1024"}, 3);
              }),
              "-d 500000: not divisible by B*T*N = 4*1024*3 = 12288; nearest: 491520 or 503808");
    EXPECT_EQ(message([] {
                  resolve({"-d", "100", "-b", "4", "-t", "64"}, 1);
              }),
              "-d 100: not divisible by B*T*N = 4*64*1 = 256; nearest: 256");
    EXPECT_EQ(message([] { resolve({"-d", "491520", "-b", "4", "-t", "1024"}, 3); }), "no error");
    EXPECT_EQ(message([] { resolve({"-d", "503808", "-b", "4", "-t", "1024"}, 3); }), "no error");
}

TEST(ResolveBatch, LargestValuesDoNotOverflow) {
    EXPECT_EQ(message([] {
                  resolve({"-b", "2147483647", "-t", "2147483647"}, 1);
              }),
              "-b 2147483647 -t 2147483647: a micro-batch has at most 2147483647 tokens; -b must "
              "be at most 1");
    // As many micro-batches as there are processes are too many as well.
    EXPECT_EQ(message([] {
                  resolve({"-b", "2147483647", "-t", "1"}, 2147483647);
              }),
              "-d 4611686014132420609: 2147483647 micro-batches of B*T = 2147483647 tokens in a "
              "step; must be at most 1048576");
    EXPECT_EQ(message([] {
                  resolve({"-b", "1", "-t", "1", "-d", "1099511627776"}, 1);
              }),
              "-d 1099511627776: 1099511627776 micro-batches of B*T = 1 tokens in a step; must be "
              "at most 1048576, so -d at most 1048576");
    const auto batch = resolve({"-b", "1048576", "-t", "1", "-d", "1099511627776"}, 1);
    EXPECT_EQ(batch.micro_batches, int64_t{1} << 20);
    EXPECT_EQ(batch.width, 8);
}

}  // namespace
