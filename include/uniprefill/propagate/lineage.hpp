// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Which rows of a step are in the packed tensors now, over all its selecting layers.
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/selection.hpp>
#include <uniprefill/core/workspace.hpp>
#include <uniprefill/propagate/compaction.hpp>
#include <uniprefill/propagate/row_map.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// Follows the packed rows of one step: each selection is composed with those before it, so that a row's
/// place in the step is known at any layer, with the offsets and original positions of the rows that are
/// left.
///
/// Calls: begin() once for a step, then apply() after each decision and, where dropped rows return, revive()
/// before the next one. State lives in the caller's memory until the next begin(). Two buffers take turns:
/// what current() and map() gave before an apply() or revive() stays readable until the apply() after that,
/// since a selecting layer needs the rows before its decision (keys) and those after it (queries). A call
/// that fails changes nothing. Nothing is allocated.
template <class Backend = backend::host>
class row_lineage;

/// On the host. Thread safety: one object serves one thread at a time. Deterministic.
template <>
class row_lineage<backend::host> {
  public:
    using stream = backend::host::stream;

    /// Keeps @p bounds, which begin() checks.
    explicit UNIPREFILL_HOST_API row_lineage(const limits& bounds) noexcept
        : bounds_(bounds) {}

    /// Bytes of the state: two buffers of 8 * max_rows + 4 * (max_requests + max_segments + 2), rounded up by
    /// piece. Pure; 0 where the limits are not valid.
    [[nodiscard]] UNIPREFILL_HOST_API std::size_t state_bytes() const noexcept;

    /// Starts a step with every row current. @p step is checked in full, and its arrays must outlive the
    /// step.
    /// @param memory state_bytes() bytes that stay untouched by others until the step's end
    /// @return what is wrong with the limits, the step or the memory; the step before goes on then. O(rows).
    UNIPREFILL_HOST_API status begin(const batch_view& step, workspace memory, host_stream stream) noexcept;

    /// Drops what @p decided drops. It must be about the current rows.
    /// @return wrong_state before begin(), invalid_argument or not_supported; nothing has changed then.
    /// O(kept).
    UNIPREFILL_HOST_API status apply(const selection& decided, host_stream stream) noexcept;

    /// What apply(@p decided) would return (errors as there); changes nothing. O(1).
    [[nodiscard]] UNIPREFILL_HOST_API status check(const selection& decided) const noexcept;

    /// Makes every row of the step current again. @return wrong_state before begin(). O(1).
    UNIPREFILL_HOST_API status revive(host_stream stream) noexcept;

    /// The free compact() on this backend, for policies: errors and complexity as there.
    [[nodiscard]] UNIPREFILL_HOST_API status compact(const row_map& rows, const byte_rows* sources,
                                                     const byte_rows* destinations, std::int32_t count,
                                                     host_stream queue) const noexcept {
        return uniprefill::compact(rows, sources, destinations, count, queue);
    }
    /// The free scatter() on this backend, for policies: errors and complexity as there.
    [[nodiscard]] UNIPREFILL_HOST_API status scatter(const row_map& rows, const byte_rows* sources,
                                                     const byte_rows* destinations, std::int32_t count,
                                                     host_stream queue) const noexcept {
        return uniprefill::scatter(rows, sources, destinations, count, queue);
    }

    [[nodiscard]] UNIPREFILL_HOST_API bool has_begun() const noexcept { return begun_; }
    /// The step as begin() took it.
    [[nodiscard]] UNIPREFILL_HOST_API const batch_view& step() const noexcept { return step_; }
    /// The current rows: the step with its own tags, options and spans, and the offsets and positions of the
    /// rows that are left. `cached_lens` are the step's: an engine whose layers hold different keys replaces
    /// them.
    [[nodiscard]] UNIPREFILL_HOST_API batch_view current() const noexcept { return current_; }
    /// From rows of the step to current rows.
    [[nodiscard]] UNIPREFILL_HOST_API row_map map() const noexcept;
    /// Whether no row is missing.
    [[nodiscard]] UNIPREFILL_HOST_API bool holds_every_row() const noexcept {
        return original_rows_ == nullptr;
    }
    /// The row of the step that each current row is, [current().num_rows]; null while no row is missing.
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
    batch_view step_{};
    batch_view current_{};
    const std::int32_t* original_rows_ = nullptr;
    buffer buffers_[2];
    std::int32_t next_buffer_ = 0;
    bool begun_ = false;
};

UNIPREFILL_END_NAMESPACE

#include <uniprefill/propagate/detail/lineage.inl>
