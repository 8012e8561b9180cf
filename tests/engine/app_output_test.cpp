// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "app_support.hpp"
#include "engine/app/host_info.hpp"
#include "engine/app/number_text.hpp"
#include "engine/app/output_folder.hpp"
#include "engine/app/progress.hpp"
#include "support/catch.hpp"

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <limits>
#include <set>
#include <string>
#include <sys/mman.h>
#include <sys/resource.h>
#include <thread>
#include <unistd.h>

namespace fs = std::filesystem;
using app_test::bytes_of;
using app_test::contains;
using app_test::refusal;

namespace {

std::set<std::string> names_in(const fs::path& folder) {
    std::set<std::string> out;
    for (const auto& entry : fs::directory_iterator(folder)) {
        out.insert(entry.path().filename().string());
    }
    return out;
}

/// Files can't grow beyond `bytes` while this lives: as good as a full disk.
class small_disk {
  public:
    explicit small_disk(rlim_t bytes) {
        handler_ = std::signal(SIGXFSZ, SIG_IGN);
        ::getrlimit(RLIMIT_FSIZE, &before_);
        rlimit limited = before_;
        limited.rlim_cur = bytes;
        ::setrlimit(RLIMIT_FSIZE, &limited);
    }
    ~small_disk() {
        ::setrlimit(RLIMIT_FSIZE, &before_);
        std::signal(SIGXFSZ, handler_);
    }
    small_disk(const small_disk&) = delete;
    small_disk& operator=(const small_disk&) = delete;

  private:
    rlimit before_{};
    void (*handler_)(int);
};

} // namespace

TEST_CASE("app: results are written and replaced, with nothing left beside them") {
    const app_test::scratch_folder scratch;
    const fs::path folder = scratch.path() / "a" / "b";
    {
        engine::output_folder out(folder.string());
        CHECK(names_in(folder).empty());
        out.write({{"x", "one"}, {"y", std::string("t\0wo", 4)}});
    }
    CHECK(bytes_of(folder / "x") == "one");
    CHECK(bytes_of(folder / "y") == std::string("t\0wo", 4));
    engine::output_folder(folder.string()).write({{"x", ""}, {"y", "new"}});
    CHECK(bytes_of(folder / "x").empty());
    CHECK(bytes_of(folder / "y") == "new");
    CHECK(names_in(folder) == std::set<std::string>{"x", "y"});
}

TEST_CASE("app: folders that were made for nothing go again") {
    const app_test::scratch_folder scratch;
    { const engine::output_folder out((scratch.path() / "a" / "b").string()); }
    CHECK(names_in(scratch.path()).empty());
    { const engine::output_folder out(scratch.path().string()); }
    CHECK(fs::exists(scratch.path()));
}

TEST_CASE("app: a full disk leaves nothing, and what was there before") {
    const app_test::scratch_folder scratch;
    engine::output_folder out(scratch.path().string());
    out.write({{"x", "old x"}, {"y", "old y"}});
    {
        const small_disk full(10000);
        const std::string line = refusal([&] { out.write({{"x", "new"}, {"y", std::string(100000, 'y')}}); });
        CHECK(contains(line, "expected room for the report, came File too large"));
        CHECK(!contains(line, "\n"));
    }
    CHECK(bytes_of(scratch.path() / "x") == "old x");
    CHECK(bytes_of(scratch.path() / "y") == "old y");
    CHECK(names_in(scratch.path()) == std::set<std::string>{"x", "y"});
    {
        const small_disk full(0);
        CHECK(!refusal([&] { engine::output_folder((scratch.path() / "new").string()); }).empty());
    }
    CHECK(names_in(scratch.path()) == std::set<std::string>{"x", "y"});
}

TEST_CASE("app: a file that can't be replaced undoes those before it") {
    const app_test::scratch_folder scratch;
    fs::create_directory(scratch.path() / "y");
    engine::output_folder out(scratch.path().string());
    CHECK(contains(refusal([&] { out.write({{"x", "new"}, {"y", "new"}}); }), "a file that can be replaced"));
    CHECK(names_in(scratch.path()) == std::set<std::string>{"y"});
    std::ofstream(scratch.path() / "x") << "old";
    CHECK(contains(refusal([&] { out.write({{"x", "new"}, {"y", "new"}}); }), "Is a directory"));
    CHECK(bytes_of(scratch.path() / "x") == "old");
    CHECK(names_in(scratch.path()) == std::set<std::string>{"x", "y"});
}

TEST_CASE("app: folders that can't be are refused early") {
    const app_test::scratch_folder scratch;
    std::ofstream(scratch.path() / "file") << "x";
    const std::string inside_file = (scratch.path() / "file" / "deep" / "er").string();
    CHECK(contains(refusal([&] { engine::output_folder out(inside_file); }),
                   "expected a folder that can be made"));
    const std::string on_file = (scratch.path() / "file").string();
    CHECK(
        contains(refusal([&] { engine::output_folder out(on_file); }), "expected a folder that can be made"));
    CHECK(names_in(scratch.path()) == std::set<std::string>{"file"});
    if (fs::is_directory("/proc/self")) {
        CHECK(!refusal([] { engine::output_folder out("/proc/self/report"); }).empty());
    }
}

TEST_CASE("app: the progress line fits and foretells") {
    using engine::progress_line;
    const std::string half = progress_line("reading", 0.5, 10, 80);
    CHECK(contains(half, "reading  [####################....................]  50 %  10 s left"));
    for (int columns = 1; columns < 120; ++columns) {
        CHECK(progress_line("reading the prompt", 0.25, 3, columns).size() <
              static_cast<std::size_t>(columns));
    }
    for (int columns = 50; columns < 120; ++columns) {
        CHECK(contains(progress_line("reading the prompt", 0.25, 3, columns), ".]  25 %  9 s left"));
    }
    CHECK(contains(progress_line("x", 2, 1, 80), "100 %"));
    CHECK(contains(progress_line("x", -1, 1, 80), "  0 %"));
    CHECK(contains(progress_line("x", std::numeric_limits<double>::quiet_NaN(), 1, 80), "  0 %"));
    CHECK(!contains(progress_line("a\x1b[2Jb\n", 0.1, 1, 80), "\x1b"));
}

TEST_CASE("app: no bar where there is no terminal") {
    const app_test::scratch_folder scratch;
    const std::string path = (scratch.path() / "log").string();
    std::FILE* file = std::fopen(path.c_str(), "w");
    REQUIRE(file != nullptr);
    {
        engine::progress bar("x", file);
        std::this_thread::sleep_for(std::chrono::milliseconds(600));
        bar.update(0.5);
        bar.update(1, "y");
    }
    std::fclose(file);
    CHECK(bytes_of(path).empty());
}

TEST_CASE("app: a bar on a terminal comes late and goes without a trace") {
    const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY);
    if (terminal < 0 || ::grantpt(terminal) != 0 || ::unlockpt(terminal) != 0) {
        if (terminal >= 0) ::close(terminal);
        uniprefill_test::skip("no pseudo-terminals here");
        return;
    }
    std::FILE* file = std::fopen(::ptsname(terminal), "w");
    REQUIRE(file != nullptr);
    ::fcntl(terminal, F_SETFL, O_NONBLOCK);
    const auto shown = [&] {
        char text[1000];
        const ssize_t count = ::read(terminal, text, sizeof(text));
        return std::string(text, count > 0 ? static_cast<std::size_t>(count) : 0);
    };
    {
        engine::progress bar("reading", file);
        bar.update(0.25);
        CHECK(shown().empty());
        std::this_thread::sleep_for(std::chrono::milliseconds(600));
        bar.update(0.5);
        CHECK(contains(shown(), "reading  [####"));
        bar.update(0.6); // too soon to be seen
        CHECK(shown().empty());
    }
    CHECK(shown() == "\r\x1b[K");
    std::fclose(file);
    ::close(terminal);
}

TEST_CASE("app: numbers in words") {
    CHECK(engine::with_commas(0) == "0");
    CHECK(engine::with_commas(999) == "999");
    CHECK(engine::with_commas(7639) == "7,639");
    CHECK(engine::with_commas(-1234567) == "-1,234,567");
    CHECK(engine::significant(0.0025149, 3) == "0.00251");
    CHECK(engine::significant(19.84, 3) == "19.8");
    CHECK(engine::significant(1234.5, 3) == "1234"); // never in powers of ten
    CHECK(engine::significant(0, 3) == "0");
    CHECK(engine::significant(std::numeric_limits<double>::quiet_NaN(), 3) == "-");
    CHECK(engine::percent(0.4812) == "48.1 %");
    CHECK(engine::duration_text(0.0124) == "12.4 ms");
    CHECK(engine::duration_text(8.1) == "8.10 s");
    CHECK(engine::duration_text(80.4) == "80.4 s");
    CHECK(engine::duration_text(125) == "2 min 5 s");
    CHECK(engine::memory_text(std::int64_t{812} << 20) == "812 MiB");
    CHECK(engine::memory_text(0) == "-");
    CHECK(engine::speed_text(2.449) == "2.45 times faster");
    CHECK(engine::speed_text(0.5) == "2.00 times slower");
    CHECK(engine::speed_text(1.001) == "as fast");
}

TEST_CASE("app: what the host says of itself") {
    CHECK(engine::usable_cores() >= 1);
    CHECK(!engine::cpu_name().empty());
    CHECK(engine::peak_memory_bytes() >= 0);
    if (engine::peak_memory_bytes() == 0) return;
    const std::int64_t before = engine::peak_memory_bytes();
    // Straight from the system, so that it goes straight back.
    constexpr std::size_t bytes = std::size_t{64} << 20;
    void* held = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(held != MAP_FAILED);
    std::memset(held, 1, bytes);
    const std::int64_t peak = engine::peak_memory_bytes();
    ::munmap(held, bytes);
    CHECK(peak > before + (std::int64_t{32} << 20));
    if (engine::reset_peak_memory()) CHECK(engine::peak_memory_bytes() < peak - (std::int64_t{32} << 20));
}
