// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Which rows of a step are in the packed tensors now, over all its selecting layers.
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/selection.hpp>
#include <uniprefill/core/workspace.hpp>
#include <uniprefill/propagate/compaction.hpp>
#include <uniprefill/propagate/detail/lineage_base.hpp>
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
class row_lineage<backend::host> : public detail::lineage_base {
  public:
    using stream = backend::host::stream;

    /// Keeps @p bounds, which begin() checks.
    explicit UNIPREFILL_HOST_API row_lineage(const limits& bounds) noexcept
        : lineage_base(bounds) {}

    /// Bytes of the state: two buffers of 8 * max_rows + 4 * (max_requests + max_segments + 2), rounded up by
    /// piece. Pure; 0 where the limits are not valid.
    [[nodiscard]] UNIPREFILL_HOST_API std::size_t state_bytes() const noexcept { return buffer_bytes(); }

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
    UNIPREFILL_HOST_API status revive(host_stream) noexcept { return restore(); }

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

    /// From rows of the step to current rows.
    [[nodiscard]] UNIPREFILL_HOST_API row_map map() const noexcept;
};

UNIPREFILL_END_NAMESPACE

#include <uniprefill/propagate/detail/lineage.inl>
