// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/cuda/runtime.hpp"

#include <array>
#include <cstddef>
#include <vector>

namespace engine::cuda {

/// What a forward pass spends time on.
enum class stage : std::size_t { products, attention, look, rest };
inline constexpr std::array<const char*, 4> stage_names = {"products", "attention", "look_and_select",
                                                           "rest"};

/// Events between the stages of a pass that is put onto a stream kernel by kernel. Waits between kernels
/// count toward the stage that comes after them.
class stage_clock {
  public:
    void start(cudaStream_t on) {
        used_ = 0;
        stages_.clear();
        next().record(on);
    }
    /// All since the mark before was @p done.
    void mark(stage done, cudaStream_t on) {
        stages_.push_back(done);
        next().record(on);
    }
    /// Milliseconds by stage; once the pass is done.
    std::array<double, stage_names.size()> milliseconds() const {
        std::array<double, stage_names.size()> sums{};
        for (std::size_t i = 0; i < stages_.size(); ++i) {
            sums[static_cast<std::size_t>(stages_[i])] +=
                static_cast<double>(events_[i + 1].since(events_[i]));
        }
        return sums;
    }

  private:
    const event& next() {
        if (used_ == events_.size()) events_.emplace_back();
        return events_[used_++];
    }
    std::vector<event> events_;
    std::vector<stage> stages_;
    std::size_t used_ = 0;
};

} // namespace engine::cuda
