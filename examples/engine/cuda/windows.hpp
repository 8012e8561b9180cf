// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/calibration/window_reader.hpp"
#include "engine/calibration/windows.hpp"
#include "engine/cuda/session.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace engine::cuda {

/// Windows read on a CUDA device by several sessions at once, compared there. Dense answers and trails stay
/// on the device. All windows have the same length.
class cuda_windows final : public calibration::window_reader {
  public:
    /// @param workers  sessions
    /// @param spare    bytes of device memory that trails leave free
    cuda_windows(const cuda_model& model, policy base, std::vector<calibration::window> windows,
                 std::int32_t workers, std::size_t spare);

    std::size_t windows() const override { return windows_.size(); }
    std::int32_t prompt_tokens(std::size_t window) const override;
    std::int32_t layers() const override { return model_.config().layers; }
    std::int32_t workers() const override { return static_cast<std::int32_t>(desks_.size()); }
    void read_dense(std::size_t window, const std::vector<bool>& layers, std::int32_t worker) override;
    answer read(std::size_t window, const calibration::choice& chosen, std::int32_t worker) override;
    void adopt(std::size_t window, const calibration::choice& chosen, const std::vector<bool>& layers,
               std::int32_t worker) override;
    void forget(std::size_t window) override;
    std::int64_t layers_run() const override { return layers_run_; }
    std::int64_t layers_replayed() const override { return layers_replayed_; }

    /// Logits of a window under a choice, [65, vocab]: what read() compares.
    std::vector<float> logits(std::size_t window, const calibration::choice& chosen, std::int32_t worker);

  private:
    struct desk {
        desk(const cuda_model& model, const session_options& options, std::int32_t rows);
        cuda::session session;
        device_array<double> divergences; // [65]
        pinned_array<double> divergences_here;
        calibration::choice now; ///< whose policy the session has
    };
    struct place {
        device_array<float> dense; // [65, vocab]
        device_trail left;
        calibration::choice adopted;
        bool keeps = false; ///< whether there is a trail
    };
    /// The prefill; @p left: the window's trail is made anew.
    void prefill(std::size_t window, const calibration::choice& chosen, desk& by, bool left);
    /// Bytes that a trail takes beside what the window's own has taken before.
    std::size_t bytes_wanted(const place& at, const std::vector<bool>& layers) const;
    /// Room for a window's trail, set aside while it lives: workers ask at the same time.
    class room {
      public:
        room(cuda_windows& of, std::size_t wanted);
        ~room();
        room(const room&) = delete;
        room& operator=(const room&) = delete;
        bool is_there() const { return is_there_; }

      private:
        cuda_windows& of_;
        std::size_t bytes_;
        bool is_there_ = true;
    };

    const cuda_model& model_;
    policy base_;
    std::vector<calibration::window> windows_;
    std::size_t spare_;
    std::vector<std::unique_ptr<desk>> desks_; ///< a worker each
    std::vector<place> places_;
    std::mutex rooms_;
    std::size_t set_aside_ = 0; ///< bytes of the rooms that there are
    std::atomic<std::int64_t> layers_run_{0};
    std::atomic<std::int64_t> layers_replayed_{0};
};

} // namespace engine::cuda
