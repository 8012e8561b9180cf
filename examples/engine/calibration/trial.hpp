// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/calibration/choice.hpp"
#include "engine/calibration/cost.hpp"
#include "engine/calibration/window_reader.hpp"

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

/// Runs choices on all windows of a reader, as many at once as it has workers. What a score is doesn't depend
/// on how many these are.
class trial {
  public:
    /// @param go_on  asked before each run of a window, on any of the workers' threads; false: stop
    trial(window_reader& reader, const cost_model& cost, std::function<bool()> go_on);

    /// The dense run of each window, which is the choice adopted then; @p layers as in adopt().
    /// @return whether it came to the end
    bool read_dense(const std::vector<bool>& layers);

    /// @return none where it was stopped
    std::optional<score> run(const choice& chosen);
    /// Choices run from here on are expected to differ from @p chosen in few layers, at those of @p layers.
    void adopt(const choice& chosen, const std::vector<bool>& layers);

  private:
    template <class Work>
    bool for_each_window(const Work& work);

    window_reader& reader_;
    cost_model cost_;
    std::function<bool()> go_on_;
};

} // namespace engine::calibration
