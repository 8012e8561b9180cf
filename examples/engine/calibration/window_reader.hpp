// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/calibration/choice.hpp"
#include "engine/model/layer_record.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace engine::calibration {

/// Runs choices on windows, on some device. It keeps each window's dense answers, and what runs may begin
/// with: a choice has in common with the one adopted last what it doesn't run again.
class window_reader {
  public:
    /// What a choice came to on a window.
    struct answer {
        double kl = 0;                    ///< KL(dense || choice), nats, mean over positions
        std::vector<layer_record> layers; ///< rows and pairs of the prompt
    };

    virtual ~window_reader() = default;
    virtual std::size_t windows() const = 0;
    virtual std::int32_t prompt_tokens(std::size_t window) const = 0;
    /// Layers of the model.
    virtual std::int32_t layers() const = 0;
    /// Windows that may be read at once, each by a worker of its own, on a thread of its own.
    virtual std::int32_t workers() const { return 1; }

    /// The dense run, which is the choice adopted then; @p layers as in adopt(). Comes first.
    virtual void read_dense(std::size_t window, const std::vector<bool>& layers, std::int32_t worker) = 0;
    /// Throws `error` where logits aren't finite.
    virtual answer read(std::size_t window, const choice& chosen, std::int32_t worker) = 0;
    /// Choices read from here on are expected to differ from @p chosen in few layers, at those of @p layers.
    /// Costs a run; where there is no memory for what it leaves, later ones begin at the beginning.
    virtual void adopt(std::size_t window, const choice& chosen, const std::vector<bool>& layers,
                       std::int32_t worker) = 0;
    /// Forgets what was adopted: reads begin at the beginning.
    virtual void forget(std::size_t window) = 0;

    /// Layers that were run, and that were not, as another run had left them.
    virtual std::int64_t layers_run() const = 0;
    virtual std::int64_t layers_replayed() const = 0;
};

} // namespace engine::calibration
