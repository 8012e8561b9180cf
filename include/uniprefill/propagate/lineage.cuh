// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Which rows of a step are in the packed tensors now, kept on the device.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/propagate/compaction.cuh>
#include <uniprefill/propagate/lineage.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// On a device. What the host's does, with these differences:
///
/// Counts are known to the device alone: current().num_rows and map().num_kept are upper bounds, the numbers
/// themselves are current().cu_seqlens[num_requests]. Rows from there up to the bound are padding: original
/// row -1, position 0. A selection that isn't the identity counts as dropping something, whatever it holds,
/// so holds_every_row() is false after it. Its entries beyond the rows before become padding in the middle,
/// its offsets are clamped to the kept rows.
///
/// What the host decides (which of the two buffers, the bounds) follows from the calls alone: calls that were
/// captured into a graph are replayed with other contents of the same arrays.
///
/// Thread safety: one object serves one thread at a time. Deterministic.
template <>
class row_lineage<backend::cuda> {
  public:
    using stream = backend::cuda::stream;

    /// Keeps @p bounds, which begin() checks. Without @p device it can only say its state_bytes().
    explicit UNIPREFILL_HOST_API row_lineage(const limits& bounds, const cuda_device& device = {}) noexcept
        : bounds_(bounds)
        , device_(device) {}

    /// Bytes of the state: the host's, and in_place_scratch_bytes(). Pure; 0 where the limits are not valid.
    [[nodiscard]] UNIPREFILL_HOST_API std::size_t state_bytes() const noexcept;

    /// Starts a step with every row current. Of @p step, what the host can see is checked; its arrays must
    /// outlive the step. Launches nothing.
    /// @param memory state_bytes() bytes of device memory that stay untouched by others until the step's end
    /// @return what is wrong with the limits, the step or the memory; the step before goes on then. O(1).
    UNIPREFILL_HOST_API status begin(const batch_view& step, workspace memory, stream queue) noexcept;

    /// Drops what @p decided drops, in one launch. It must be about the current rows.
    /// @return wrong_state before begin(), invalid_argument, not_supported or backend_error; nothing has
    /// changed then. O(kept).
    UNIPREFILL_HOST_API status apply(const selection& decided, stream queue) noexcept;

    /// What apply(@p decided) would return (errors as there), launch apart; changes nothing. O(1).
    [[nodiscard]] UNIPREFILL_HOST_API status check(const selection& decided) const noexcept;

    /// Makes every row of the step current again. Launches nothing. @return wrong_state before begin(). O(1).
    UNIPREFILL_HOST_API status revive(stream queue) noexcept;

    /// The free compact() on this device, with scratch of the state, for policies: errors and complexity as
    /// there.
    [[nodiscard]] UNIPREFILL_HOST_API status compact(const row_map& rows, const byte_rows* sources,
                                                     const byte_rows* destinations, std::int32_t count,
                                                     stream queue) const noexcept {
        return uniprefill::compact(rows, sources, destinations, count, scratch_, device_, queue);
    }
    /// The free scatter() on this device, for policies: errors and complexity as there.
    [[nodiscard]] UNIPREFILL_HOST_API status scatter(const row_map& rows, const byte_rows* sources,
                                                     const byte_rows* destinations, std::int32_t count,
                                                     stream queue) const noexcept {
        return uniprefill::scatter(rows, sources, destinations, count, device_, queue);
    }
    /// The scratch of in_place_scratch_bytes() bytes that compact() uses; a compact_add_norm() on the same
    /// stream may use it too.
    [[nodiscard]] UNIPREFILL_HOST_API workspace scratch() const noexcept { return scratch_; }

    [[nodiscard]] UNIPREFILL_HOST_API bool has_begun() const noexcept { return begun_; }
    /// The step as begin() took it.
    [[nodiscard]] UNIPREFILL_HOST_API const batch_view& step() const noexcept { return step_; }
    /// The current rows: the step with its own tags, options and spans, and the offsets and positions of the
    /// rows that are left. `cached_lens` are the step's: an engine whose layers hold different keys replaces
    /// them.
    [[nodiscard]] UNIPREFILL_HOST_API batch_view current() const noexcept { return current_; }
    /// From rows of the step to current rows.
    [[nodiscard]] UNIPREFILL_HOST_API row_map map() const noexcept;
    /// Whether no row can be missing.
    [[nodiscard]] UNIPREFILL_HOST_API bool holds_every_row() const noexcept {
        return original_rows_ == nullptr;
    }
    /// The row of the step that each current row is, [current().num_rows]; null while no row can be missing.
    [[nodiscard]] UNIPREFILL_HOST_API const std::int32_t* original_rows() const noexcept {
        return original_rows_;
    }

  private:
    struct buffer {
        std::int32_t* original_rows = nullptr; // [max_rows]
        std::int32_t* positions = nullptr;     // [max_rows]
        std::int32_t* cu_seqlens = nullptr;    // [max_requests + 1]
        std::int32_t* cu_segments = nullptr;   // [max_segments + 1]
    };
    static UNIPREFILL_HOST_API buffer carve(workspace& memory, const limits& bounds) noexcept;

    limits bounds_;
    cuda_device device_;
    batch_view step_{};
    batch_view current_{};
    const std::int32_t* original_rows_ = nullptr;
    buffer buffers_[2];
    workspace scratch_;
    std::int32_t next_buffer_ = 0;
    bool begun_ = false;
};

UNIPREFILL_END_NAMESPACE

#include <uniprefill/propagate/detail/cuda_lineage.inl>
