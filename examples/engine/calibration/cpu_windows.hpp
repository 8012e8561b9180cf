// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/calibration/window_reader.hpp"
#include "engine/calibration/windows.hpp"
#include "engine/model/machine.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace engine::calibration {

/// Windows read on the CPU, one after the other.
class cpu_windows final : public window_reader {
  public:
    /// @param memory  bytes that the trails of adopted choices may take; windows beyond it run from the
    ///                beginning
    cpu_windows(const cpu_weights& weights, cpu_ops& ops, policy base, std::vector<window> windows,
                std::size_t memory);

    std::size_t windows() const override { return windows_.size(); }
    std::int32_t prompt_tokens(std::size_t window) const override;
    std::int32_t layers() const override { return weights_.config().layers; }
    void read_dense(std::size_t window, const std::vector<bool>& layers, std::int32_t worker) override;
    answer read(std::size_t window, const choice& chosen, std::int32_t worker) override;
    void adopt(std::size_t window, const choice& chosen, const std::vector<bool>& layers,
               std::int32_t worker) override;
    void forget(std::size_t window) override;
    std::int64_t layers_run() const override { return layers_run_; }
    std::int64_t layers_replayed() const override { return layers_replayed_; }

  private:
    struct pass {
        std::vector<float> logits; ///< [1 + fed, vocab]
        std::vector<layer_record> layers;
    };
    pass run(std::size_t window, const choice& chosen, trail* left);
    void keep(std::size_t window, const choice& chosen, trail left);

    const cpu_weights& weights_;
    cpu_ops& ops_;
    policy base_;
    std::vector<window> windows_;
    std::size_t memory_;
    std::size_t memory_used_ = 0;
    std::vector<std::vector<float>> dense_; ///< logits by window
    std::vector<choice> adopted_;           ///< by window
    std::vector<trail> trails_;             ///< of the adopted choices
    std::int64_t layers_run_ = 0;
    std::int64_t layers_replayed_ = 0;
};

} // namespace engine::calibration
