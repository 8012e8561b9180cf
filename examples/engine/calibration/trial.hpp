// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/calibration/choice.hpp"
#include "engine/calibration/cost.hpp"
#include "engine/calibration/windows.hpp"
#include "engine/model/machine.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace engine::calibration {

/// What a choice costs in answers and takes in work; work is averaged over windows.
struct score {
    double kl = 0;     ///< KL(dense || choice), mean over positions, then over windows
    double kl_max = 0; ///< largest of the windows
    std::vector<double> by_window;
    calibration::work work;
};

/// Runs choices on windows. The dense answers are read once; what a choice has in common with the one that
/// was adopted last isn't run again.
class trial {
  public:
    /// @param go_on   asked before each run of a window; false: stop
    /// @param memory  bytes that the trails of the adopted choice may take; windows beyond it run from the
    ///                beginning
    trial(const cpu_weights& weights, cpu_ops& ops, policy base, std::vector<window> windows,
          const cost_model& cost, std::function<bool()> go_on, std::size_t memory);

    /// The dense run of each window, which is the choice adopted then; @p layers as in adopt().
    /// @return whether it came to the end
    bool read_dense(const std::vector<bool>& layers);

    /// @return none where it was stopped
    std::optional<score> run(const choice& chosen);
    /// Choices run from here on are expected to differ from @p chosen in few layers, at those of @p layers.
    void adopt(const choice& chosen, const std::vector<bool>& layers);

    std::int64_t layers_run() const { return layers_run_; }
    std::int64_t layers_replayed() const { return layers_replayed_; }

  private:
    struct pass {
        std::vector<float> logits; ///< [1 + fed, vocab]
        std::vector<layer_record> layers;
    };
    pass read(std::size_t window, const choice& chosen, trail* left);

    const cpu_weights& weights_;
    cpu_ops& ops_;
    policy base_;
    std::vector<window> windows_;
    cost_model cost_;
    std::function<bool()> go_on_;
    std::size_t memory_;
    std::size_t memory_used_ = 0;
    std::vector<std::vector<float>> dense_; ///< logits by window
    choice adopted_;
    std::vector<trail> trails_; ///< of the adopted choice, by window
    std::int64_t layers_run_ = 0;
    std::int64_t layers_replayed_ = 0;
};

} // namespace engine::calibration
