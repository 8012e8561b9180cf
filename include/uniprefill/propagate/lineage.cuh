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
class row_lineage<backend::cuda> : public detail::lineage_base {
  public:
    using stream = backend::cuda::stream;

    /// Keeps @p bounds, which begin() checks. Without @p device it can only say its state_bytes().
    explicit UNIPREFILL_HOST_API row_lineage(const limits& bounds, const cuda_device& device = {}) noexcept
        : lineage_base(bounds)
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
    template <class = void>
    UNIPREFILL_HOST_API status apply(const selection& decided, stream queue) noexcept;

    /// What apply(@p decided) would return (errors as there), launch apart; changes nothing. O(1).
    [[nodiscard]] UNIPREFILL_HOST_API status check(const selection& decided) const noexcept;

    /// Makes every row of the step current again. Launches nothing. @return wrong_state before begin(). O(1).
    UNIPREFILL_HOST_API status revive(stream) noexcept { return restore(); }

    /// The free compact() on this device, with scratch of the state, for policies: errors and complexity as
    /// there.
    template <class = void>
    [[nodiscard]] UNIPREFILL_HOST_API status compact(const row_map& rows, const byte_rows* sources,
                                                     const byte_rows* destinations, std::int32_t count,
                                                     stream queue) const noexcept {
        return uniprefill::compact(rows, sources, destinations, count, scratch_, device_, queue);
    }
    /// The free scatter() on this device, for policies: errors and complexity as there.
    template <class = void>
    [[nodiscard]] UNIPREFILL_HOST_API status scatter(const row_map& rows, const byte_rows* sources,
                                                     const byte_rows* destinations, std::int32_t count,
                                                     stream queue) const noexcept {
        return uniprefill::scatter(rows, sources, destinations, count, device_, queue);
    }
    /// The scratch of in_place_scratch_bytes() bytes that compact() uses; a compact_add_norm() on the same
    /// stream may use it too.
    [[nodiscard]] UNIPREFILL_HOST_API workspace scratch() const noexcept { return scratch_; }

    /// From rows of the step to current rows.
    [[nodiscard]] UNIPREFILL_HOST_API row_map map() const noexcept;

  private:
    cuda_device device_;
    workspace scratch_;
};

UNIPREFILL_END_NAMESPACE

#include <uniprefill/propagate/detail/cuda_lineage.inl>
