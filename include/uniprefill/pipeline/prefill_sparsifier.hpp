// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The composed facade: estimate, reduce, select and compact, one call a layer.
#pragma once

#include <uniprefill/comm/reduction.hpp>
#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/kv_view.hpp>
#include <uniprefill/core/mass.hpp>
#include <uniprefill/core/rows.hpp>
#include <uniprefill/core/selection.hpp>
#include <uniprefill/core/workspace.hpp>
#include <uniprefill/importance/importance.hpp>
#include <uniprefill/pipeline/detail/layer_rules.hpp>
#include <uniprefill/pipeline/policy.hpp>
#include <uniprefill/propagate/policy.hpp>
#include <uniprefill/select/selector.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

template <class Policy = default_policy<>, class Backend = backend::host>
class prefill_step;

/// Decides, layer by layer, which rows of a prefill go on.
///
/// Owns no memory: it holds limits and the caller's list of selecting layers. One object serves any number of
/// concurrent steps, each with a workspace of its own.
///
/// @tparam Policy   block size, observation queries, head reduction and rule: see default_policy
/// @tparam Backend  backend::host, or backend::cuda (prefill_sparsifier.cuh)
///
/// An engine's loop:
/// @code
/// step.begin(batch, workspace);
/// for each layer:
///     step.enter(layer, &hidden, 1)            // revival: dropped rows come back; nothing otherwise
///     q, k, v = projections of step.rows_of(hidden), positions from step.rows()
///     write k, v                               // rows alive on entry are written, kept or not
///     step.decide(layer, q, k, ..., decided)
///     step.leave(decided, &hidden, 1)          // from here on step.rows() are the kept rows
///     compact(decided, q, q)
///     attention of the kept queries, output projection, MLP
/// @endcode
/// The decision needs q and k alone, so rows that it drops skip attention, output projection and MLP of the
/// selecting layer itself; the kept rows' results are the same as if it were taken afterwards.
template <class Policy = default_policy<>, class Backend = backend::host>
class prefill_sparsifier {
  public:
    /// What a layer's rule is.
    using rule = typename Policy::rule;
    /// A step of this facade.
    using step = prefill_step<Policy, Backend>;

    /// Host only; allocates nothing. See check() for what is wrong with the arguments.
    UNIPREFILL_HOST_API prefill_sparsifier(const limits& bounds,
                                           const sparsifier_options<rule>& options) noexcept
        : bounds_(bounds)
        , options_(options) {}

    /// Checks limits, layers (ascending, within limits::num_layers) and rules. O(selecting layers).
    /// @return invalid_argument or out_of_range, naming the field and layer. Thread-safe, deterministic.
    [[nodiscard]] UNIPREFILL_HOST_API status check() const noexcept;

    /// Bytes that a step needs, 0 where check() fails. Pure; monotone in rows, cached tokens, requests and
    /// segments; linear in rows and blocks.
    [[nodiscard]] UNIPREFILL_HOST_API std::size_t workspace_bytes() const noexcept;

    /// Whether @p layer takes decisions.
    [[nodiscard]] UNIPREFILL_HOST_API bool selects(std::int32_t layer) const noexcept {
        return detail::find_layer(options_, layer) >= 0;
    }

    /// The limits that it was made with.
    [[nodiscard]] UNIPREFILL_HOST_API const limits& bounds() const noexcept { return bounds_; }
    /// The options that it was made with.
    [[nodiscard]] UNIPREFILL_HOST_API const sparsifier_options<rule>& options() const noexcept {
        return options_;
    }

  private:
    limits bounds_;
    sparsifier_options<rule> options_;
};

/// One step of an engine through all layers: which rows are alive, and the arrays behind that.
///
/// A small object that borrows the sparsifier, the batch's arrays and the workspace until the step ends. Not
/// thread-safe; different steps may run at the same time. Deterministic: what it decides depends on each
/// request alone, bit for bit, not on packing or thread count. Statuses other than ok: invalid_argument,
/// out_of_range, workspace_too_small, misaligned, not_supported and wrong_state, naming the argument and,
/// where there is one, the layer.
template <class Policy, class Backend>
class prefill_step {
  public:
    /// The queue that operations take.
    using stream = typename Backend::stream;
    /// The facade that steps are made by.
    using sparsifier = prefill_sparsifier<Policy, Backend>;

    /// A step that hasn't begun; @p made_by must outlive it.
    UNIPREFILL_HOST_API explicit prefill_step(const sparsifier& made_by) noexcept
        : made_by_(&made_by)
        , lineage_(made_by.bounds()) {}

    /// Starts a step: every row of @p batch is alive. O(rows), to check the batch. On an error nothing has
    /// begun.
    /// @param batch   its `cached_lens` are not read: decide() takes those of its layer
    /// @param memory  at least workspace_bytes() bytes, kept until the step ends
    [[nodiscard]] UNIPREFILL_HOST_API status begin(const batch_view& batch, workspace memory,
                                                   stream queue = {}) noexcept;

    /// The rows that are alive now: cu_seqlens, segments and original positions.
    [[nodiscard]] UNIPREFILL_HOST_API batch_view rows() const noexcept { return lineage_.current(); }

    /// From rows of the batch that begin() took to rows().
    [[nodiscard]] UNIPREFILL_HOST_API row_map map() const noexcept { return lineage_.map(); }

    /// Which of a tensor's two buffers holds rows(): `working`, but under revival `full` while every row is
    /// alive.
    [[nodiscard]] UNIPREFILL_HOST_API const byte_rows& rows_of(const row_tensor& tensor) const noexcept {
        return detail::rows_of(made_by_->options().mode, lineage_, tensor);
    }

    /// Before a layer reads its rows. Under revival, at a selecting layer, frozen rows become alive again, at
    /// the cost of one copy of the working rows; anything else does nothing. Fails where a tensor has too few
    /// rows, with nothing moved. O(bytes of the working rows).
    [[nodiscard]] UNIPREFILL_HOST_API status enter(std::int32_t layer, const row_tensor* tensors,
                                                   std::int32_t count, stream queue = {}) noexcept;

    /// Asks for masses by head: from here on decide() writes those of its layer, whether that selects or not,
    /// with their fault words in masses(). For block lists (block_lister) and head policies. Where a layer
    /// doesn't select, no rank asks the others: the fault words are this rank's alone. O(1).
    /// @param per_head  [limits::num_heads, limits::max_blocks()]; null arrays: not wanted any more
    UNIPREFILL_HOST_API void want_head_masses(const head_mass_view& per_head) noexcept {
        per_head_ = per_head;
    }

    /// Decides which of rows() go on. They stay alive until leave(), since keys of all of them still take
    /// part.
    ///
    /// A layer that doesn't select, or a step in which nothing may be dropped, answers with the identity and
    /// does no work but for masses that want_head_masses() asked for. On an error nothing has changed.
    /// O(observation rows * keys * heads * head_dim), and O(rows + blocks log blocks) to select.
    /// @param q            queries after RoPE (and QK norm), [rows().num_rows, num_heads, head_dim]
    /// @param keys         keys of rows() and, for chunks, those that this layer has cached
    /// @param cached_lens  [num_requests] keys cached in this layer before this step; null: none
    /// @param out          the decision; its arrays lie in the workspace and hold until the next decide()
    template <class T, class Cache, class Reduction = no_reduction>
    [[nodiscard]] UNIPREFILL_HOST_API status decide(std::int32_t layer, const head_rows<const T>& q,
                                                    const key_source<T, Cache>& keys,
                                                    const attention_params& attention,
                                                    const std::int32_t* cached_lens, selection& out,
                                                    stream queue = {},
                                                    const Reduction& reduction = {}) noexcept;

    /// Carries a decision out: rows() are the kept ones from here on, and so are the rows of @p tensors. The
    /// identity moves nothing. What rows() pointed to before stays readable until the next leave(). Fails
    /// where a tensor has too few rows or the decision isn't about rows(), with nothing moved. O(bytes of
    /// kept rows).
    [[nodiscard]] UNIPREFILL_HOST_API status leave(const selection& decided, const row_tensor* tensors,
                                                   std::int32_t count, stream queue = {}) noexcept;

    /// Masses of the last decision that scored; valid until the next one. For reports and head policies.
    [[nodiscard]] UNIPREFILL_HOST_API const mass_view& masses() const noexcept { return masses_; }

  private:
    [[nodiscard]] UNIPREFILL_HOST_API bool may_drop(const batch_view& batch) const noexcept;
    UNIPREFILL_HOST_API void tell(std::int32_t layer, const batch_view& before, const selection& decided,
                                  double estimate_s, double select_s) const noexcept;

    const sparsifier* made_by_;
    row_lineage<Backend> lineage_;
    selection decided_{};
    mass_view masses_{};
    head_mass_view per_head_{};
    typename Policy::rule* rules_ = nullptr; // [max_requests]
    workspace scratch_{};                    ///< what is left of the caller's memory for each operation
};

UNIPREFILL_END_NAMESPACE

#include <uniprefill/pipeline/detail/prefill_sparsifier.inl>
