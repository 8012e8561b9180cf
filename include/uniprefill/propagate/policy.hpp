// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What becomes of dropped rows: gone for the rest of the step, or back at the next selecting layer.
///
/// Errors of a policy's functions are those of compact(), scatter() and row_lineage::apply(): wrong_state,
/// invalid_argument, out_of_range or not_supported, found before anything is moved, with the tensor's index
/// in `request`. Complexity: O(bytes of the rows that move). Thread safety: one lineage and its tensors serve
/// one thread at a time. Deterministic. They work on whatever backend the lineage is of; on a device
/// everything is launched onto the stream, in order, and nothing is waited for.
#pragma once

#include <uniprefill/core/rows.hpp>
#include <uniprefill/core/selection.hpp>
#include <uniprefill/core/status.hpp>
#include <uniprefill/propagate/compaction.hpp>
#include <uniprefill/propagate/lineage.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// One kind of row that travels through the layers (hidden states, residuals).
struct row_tensor {
    byte_rows working{}; ///< the rows that layers work on once some are dropped
    byte_rows
        full{}; ///< every row of the step, frozen where dropped; only `revive` needs it, apart from working
};

/// A dropped row never returns (what the released implementation does). Rows live in `working`, from the
/// step's first layer on, and are compacted in place.
///
/// A policy is a struct of these static functions; an engine's own may stand in for it.
struct cumulative {
    static constexpr bool revives = false;

    /// The rows of @p tensor that are current.
    template <class Lineage>
    [[nodiscard]] static UNIPREFILL_HOST_API const byte_rows& rows_of(const Lineage&,
                                                                      const row_tensor& tensor) noexcept {
        return tensor.working;
    }
    /// Before a selecting layer reads its rows.
    template <class Lineage>
    [[nodiscard]] static UNIPREFILL_HOST_API status enter(Lineage& lineage, const row_tensor*, std::int32_t,
                                                          typename Lineage::stream) noexcept {
        return lineage.has_begun()
                   ? success()
                   : failure(status_code::wrong_state, "lineage", "begin() before enter()", 0);
    }
    /// After the decision of a selecting layer: only the kept rows are current, and together.
    template <class Lineage>
    [[nodiscard]] static UNIPREFILL_HOST_API status leave(Lineage& lineage, const selection& decided,
                                                          const row_tensor* tensors, std::int32_t count,
                                                          typename Lineage::stream stream) noexcept;
};

/// A dropped row keeps its state and re-enters at the next selecting layer, where it is scored again
/// (UniPrefill, arXiv 2605.06221, equation of H^(b+1,0)). Rows live in `full` while all of them are current,
/// in `working` otherwise: rows_of() tells which. `full` and `working` share no memory.
struct revive {
    static constexpr bool revives = true;

    /// The rows of @p tensor that are current.
    template <class Lineage>
    [[nodiscard]] static UNIPREFILL_HOST_API const byte_rows& rows_of(const Lineage& lineage,
                                                                      const row_tensor& tensor) noexcept {
        return lineage.holds_every_row() ? tensor.full : tensor.working;
    }
    /// Before a selecting layer reads its rows: working rows go back among the frozen ones, and every row of
    /// the step is current, in `full`.
    template <class Lineage>
    [[nodiscard]] static UNIPREFILL_HOST_API status enter(Lineage& lineage, const row_tensor* tensors,
                                                          std::int32_t count,
                                                          typename Lineage::stream stream) noexcept;
    /// After the decision: kept rows are gathered from `full` into `working`; nothing moves where all are
    /// kept.
    template <class Lineage>
    [[nodiscard]] static UNIPREFILL_HOST_API status leave(Lineage& lineage, const selection& decided,
                                                          const row_tensor* tensors, std::int32_t count,
                                                          typename Lineage::stream stream) noexcept;
};

UNIPREFILL_END_NAMESPACE

#include <uniprefill/propagate/detail/policy.inl>
