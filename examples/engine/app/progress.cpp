// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/app/progress.hpp"

#include "engine/error.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <sys/ioctl.h>
#include <unistd.h>
#include <utility>

namespace engine {
namespace {

constexpr auto patience = std::chrono::milliseconds(500);
constexpr auto redraw_every = std::chrono::milliseconds(100);

bool can_redraw(std::FILE* out) {
    const int file = ::fileno(out);
    return file >= 0 && ::isatty(file) == 1;
}

int columns_of(std::FILE* out) {
    winsize size{};
    const bool known = ::ioctl(::fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    return known ? size.ws_col : 80;
}

} // namespace

std::string progress_line(const std::string& label, double done, double seconds, int columns) {
    done = done >= 0 ? std::min(done, 1.0) : 0; // NaN too
    std::string end = "  " + std::to_string(static_cast<int>(done * 100)) + " %";
    // The first percents foretell too little.
    if (done > 0.02 && done < 1 && std::isfinite(seconds)) {
        const double left = seconds / done * (1 - done);
        if (left < 1e6) end += "  " + std::to_string(static_cast<long>(std::ceil(left))) + " s left";
    }
    std::string line = printable(label, 40);
    // The last column stays free: filling it would move the cursor to the next line.
    const int room = columns - 1 - static_cast<int>(line.size() + end.size()) - 4;
    if (room >= 5) {
        const auto width = static_cast<std::size_t>(std::min(room, 40));
        const auto filled = static_cast<std::size_t>(done * static_cast<double>(width));
        line += "  [" + std::string(filled, '#') + std::string(width - filled, '.') + "]";
    }
    line += end;
    return line.substr(0, static_cast<std::size_t>(std::max(columns - 1, 0)));
}

progress::progress(std::string label, std::FILE* out)
    : label_(std::move(label))
    , out_(out)
    , terminal_(can_redraw(out))
    , start_(clock::now())
    , last_(start_ + patience - redraw_every) {}

progress::~progress() {
    if (!drawn_) return;
    std::fputs("\r\x1b[K", out_);
    std::fflush(out_);
}

void progress::update(double done) {
    if (!terminal_) return;
    const auto now = clock::now();
    if (now - last_ < redraw_every) return;
    last_ = now;
    drawn_ = true;
    const double seconds = std::chrono::duration<double>(now - start_).count();
    const std::string line = progress_line(label_, done, seconds, columns_of(out_));
    std::fprintf(out_, "\r%s\x1b[K", line.c_str());
    std::fflush(out_);
}

void progress::update(double done, const std::string& label) {
    if (!terminal_) return;
    label_ = label;
    update(done);
}

} // namespace engine
