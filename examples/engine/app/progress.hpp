// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <chrono>
#include <cstdio>
#include <string>

namespace engine {

/// A bar on one line of a terminal, for work long enough to wonder about: nothing is shown in the first half
/// second, nor where `out` isn't a terminal. The line is wiped when the bar goes.
class progress {
  public:
    /// `label`: what is going on, at most 40 columns.
    explicit progress(std::string label, std::FILE* out = stderr);
    ~progress();
    progress(const progress&) = delete;
    progress& operator=(const progress&) = delete;

    /// `done` of the work, 0 to 1; cheap enough to call often. A change of label is shown with the next
    /// redraw.
    void update(double done);
    void update(double done, const std::string& label);

  private:
    using clock = std::chrono::steady_clock;

    std::string label_;
    std::FILE* out_;
    bool terminal_;
    bool drawn_ = false;
    clock::time_point start_;
    clock::time_point last_;
};

/// The line that a bar shows, at most `columns` wide: "reading, dense  [#####.....]  50 %  12 s left".
std::string progress_line(const std::string& label, double done, double seconds, int columns);

} // namespace engine
