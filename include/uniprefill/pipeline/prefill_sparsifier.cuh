// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The composed facade on CUDA devices; prefill_sparsifier.hpp says what it does and in which order it is
/// called.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/importance/importance.cuh>
#include <uniprefill/pipeline/prefill_sparsifier.hpp>
#include <uniprefill/propagate/lineage.cuh>
#include <uniprefill/select/selector.cuh>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// What the host's does, with every array in device memory: the batch, q and k, rows, the rules of
/// selecting_layer::per_request and the decision. The list of selecting layers itself stays on the host.
///
/// The policy's G, N and D are constants: default_policy<64, 128, 128>. Call prepare() once for each device
/// and type. Thread-safe: immutable; any number of steps may run at once, each with a workspace and a stream
/// of its own. Deterministic, bit for bit, whatever is packed together, however many thread blocks run.
template <class Policy>
class prefill_sparsifier<Policy, backend::cuda> {
  public:
    /// What a layer's rule is.
    using rule = typename Policy::rule;
    /// A step of this facade.
    using step = prefill_step<Policy, backend::cuda>;

    /// Host only; allocates nothing. See check() for what is wrong with the arguments.
    /// @param device  filled by cuda_device::current(); without it the object can only say what it needs
    UNIPREFILL_HOST_API prefill_sparsifier(const limits& bounds, const sparsifier_options<rule>& options,
                                           const cuda_device& device = {}) noexcept
        : bounds_(bounds)
        , options_(options)
        , device_(device) {}

    /// Checks limits, layers (ascending, within limits::num_layers) and rules. O(selecting layers).
    /// @return invalid_argument or out_of_range, naming the field and layer; not_supported for an observer:
    ///         outcomes lie in device memory (selection::outcomes), to be copied when the engine likes.
    ///         Thread-safe, deterministic.
    [[nodiscard]] UNIPREFILL_HOST_API status check() const noexcept;

    /// Bytes of device memory that a step needs, 0 where check() fails. Pure, needs no device; monotone in
    /// rows, cached tokens, requests and segments. The estimator's is nearly all of it, and 24 bytes for each
    /// row and one rule for each (selecting layer, request) most of the rest.
    [[nodiscard]] UNIPREFILL_HOST_API std::size_t workspace_bytes() const noexcept;

    /// Allows the kernels that decide() launches for these types their shared memory, on the calling thread's
    /// current device. Thread-safe; not for the hot path, not for a capture. O(1), deterministic.
    /// @return what is wrong with the limits, not_supported, or an error of the runtime
    template <class Q, class T = Q, class Cache = no_cache<T>>
    [[nodiscard]] UNIPREFILL_HOST_API status prepare() const noexcept {
        return importance_estimator<typename Policy::estimator, backend::cuda>(bounds_, device_)
            .template prepare<Q, T, Cache>();
    }

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
    /// The device that it was made with.
    [[nodiscard]] UNIPREFILL_HOST_API const cuda_device& device() const noexcept { return device_; }

  private:
    limits bounds_;
    sparsifier_options<rule> options_;
    cuda_device device_;
};

/// One step of an engine through all layers, on a CUDA device. What the host's does, with these differences:
///
/// **Counts stay on the device.** rows().num_rows and the decisions' kept_bound are upper bounds that the
/// host knows; the numbers themselves are rows().cu_seqlens[num_requests]. Rows from there up to the bound
/// are padding (position 0); tensors keep in them what was there. An engine whose products take their row
/// count from the host copies that one number when it likes, or has fixed budgets and says their sum to
/// decide().
///
/// **Nothing is waited for.** Every call puts kernels onto its stream and returns; nothing is allocated or
/// read back. All calls of a step take the same stream, or streams that the engine orders.
///
/// **A step can be captured** into a CUDA graph, begin() and all, and replayed with other contents of the
/// same arrays: lengths, tags, options, spans, positions, q and k, rules of selecting_layer::per_request. The
/// host's part of it is frozen: upper bounds, addresses, selecting_layer::rule.
///
/// **What the host can't see** isn't refused but kept whole, with a fault in selection::outcomes: arrays that
/// make no sense, rules of per_request that aren't valid.
///
/// Statuses other than ok: those of the host, misaligned for rows that don't start at multiples of 16 bytes,
/// and backend_error for a launch that failed. Not thread-safe; different steps may run at the same time.
/// Deterministic: what it decides depends on each request alone, bit for bit, not on packing, the grid or the
/// run.
template <class Policy>
class prefill_step<Policy, backend::cuda> {
  public:
    /// The queue that operations take.
    using stream = backend::cuda::stream;
    /// The facade that steps are made by.
    using sparsifier = prefill_sparsifier<Policy, backend::cuda>;

    /// A step that hasn't begun; @p made_by must outlive it.
    UNIPREFILL_HOST_API explicit prefill_step(const sparsifier& made_by) noexcept
        : made_by_(&made_by)
        , lineage_(made_by.bounds(), made_by.device()) {}

    /// Starts a step: every row of @p batch is alive. One launch for each 2 KiB of rules that hold for all
    /// requests (selecting_layer without `per_request`), none where there are none. O(requests * selecting
    /// layers). On an error nothing has begun.
    /// @param batch   in device memory; its `cached_lens` are not read: decide() takes those of its layer
    /// @param memory  at least workspace_bytes() bytes of device memory, kept until the step ends
    [[nodiscard]] UNIPREFILL_HOST_API status begin(const batch_view& batch, workspace memory,
                                                   stream queue) noexcept;

    /// The rows that are alive now: cu_seqlens, segments and original positions.
    [[nodiscard]] UNIPREFILL_HOST_API batch_view rows() const noexcept { return lineage_.current(); }

    /// From rows of the batch that begin() took to rows().
    [[nodiscard]] UNIPREFILL_HOST_API row_map map() const noexcept { return lineage_.map(); }

    /// Which of a tensor's two buffers holds rows(): `working`, but under revival `full` while no row can be
    /// missing.
    [[nodiscard]] UNIPREFILL_HOST_API const byte_rows& rows_of(const row_tensor& tensor) const noexcept {
        return detail::rows_of(made_by_->options().mode, lineage_, tensor);
    }

    /// Before a layer reads its rows. Under revival, at a selecting layer, frozen rows become alive again, at
    /// the cost of one copy of the working rows: one launch for each eight tensors. Anything else does
    /// nothing. Fails where a tensor has too few rows, with nothing moved. O(bytes of the working rows).
    [[nodiscard]] UNIPREFILL_HOST_API status enter(std::int32_t layer, const row_tensor* tensors,
                                                   std::int32_t count, stream queue) noexcept {
        return detail::enter(made_by_->options().mode, made_by_->selects(layer), lineage_, tensors, count,
                             queue);
    }

    /// Asks for masses by head: from here on decide() writes those of its layer, whether that selects or not,
    /// with their fault words in masses(). For block lists (block_lister.cuh) and head policies. Where a
    /// layer doesn't select, no rank asks the others: the fault words are this rank's alone. A captured step
    /// writes where the capture said. O(1).
    /// @param per_head  [limits::num_heads, limits::max_blocks()] in device memory, the engine's own; null
    ///                  arrays: not wanted any more
    UNIPREFILL_HOST_API void want_head_masses(const head_mass_view& per_head) noexcept {
        per_head_ = per_head;
    }

    /// Decides which of rows() go on. They stay alive until leave(), since keys of all of them still take
    /// part.
    ///
    /// Five or six launches, and the reduction's. A layer that doesn't select, or where rows().num_rows is 0,
    /// answers with the identity and launches nothing but what want_head_masses() asked for, up to four. A
    /// step of decode rows alone costs the launches all the same, since tags are known to the device alone:
    /// an engine that knows needn't ask. On an error nothing has changed. Complexity and rounding:
    /// importance.cuh and selector.cuh.
    /// @param q            queries after RoPE (and QK norm), [rows().num_rows, num_heads, head_dim]
    /// @param keys         keys of rows() and, for chunks, those that this layer has cached
    /// @param attention    `sink_logits` and `key_scales` in device memory
    /// @param cached_lens  [num_requests] in device memory: keys cached in this layer before this step; null:
    ///                     none
    /// @param out          the decision; its arrays lie in the workspace and hold until the next decide()
    /// @param reduction    over rank buffers in device memory; it must not wait for the stream if the step is
    ///                     to be captured (nccl_reduction doesn't)
    template <class Q, class T, class Cache, class Reduction = no_reduction>
    [[nodiscard]] UNIPREFILL_HOST_API status decide(std::int32_t layer, const head_rows<const Q>& q,
                                                    const key_source<T, Cache>& keys,
                                                    const attention_params& attention,
                                                    const std::int32_t* cached_lens, selection& out,
                                                    stream queue, const Reduction& reduction = {}) noexcept {
        return decide(layer, q, keys, attention, cached_lens, lineage_.current().num_rows, out, queue,
                      reduction);
    }
    /// As above, with an upper bound of the rows that this decision keeps, which becomes rows().num_rows: the
    /// sum of fixed budgets, say. Should more be kept, those beyond are dropped and their segments say
    /// `rerun_dense`. Complexity and launches as above.
    /// @param kept_bound  0..limits.max_rows
    template <class Q, class T, class Cache, class Reduction = no_reduction>
    [[nodiscard]] UNIPREFILL_HOST_API status decide(std::int32_t layer, const head_rows<const Q>& q,
                                                    const key_source<T, Cache>& keys,
                                                    const attention_params& attention,
                                                    const std::int32_t* cached_lens, std::int32_t kept_bound,
                                                    selection& out, stream queue,
                                                    const Reduction& reduction = {}) noexcept;

    /// Carries a decision out: rows() are the kept ones from here on, and so are the rows of @p tensors. The
    /// identity moves nothing. What rows() pointed to before stays readable until the next leave(). One
    /// launch, and one or two for each eight tensors. Fails where a tensor has too few rows or the decision
    /// isn't about rows(), with nothing moved. O(bytes of kept rows).
    ///
    /// An engine that adds and normalises where rows are dropped calls compact_add_norm() on the decision
    /// first, with scratch(), and leaves those tensors out here.
    [[nodiscard]] UNIPREFILL_HOST_API status leave(const selection& decided, const row_tensor* tensors,
                                                   std::int32_t count, stream queue) noexcept {
        return detail::leave(made_by_->options().mode, lineage_, decided, tensors, count, queue);
    }

    /// in_place_scratch_bytes() bytes for the caller's own compact() and compact_add_norm() on the step's
    /// stream.
    [[nodiscard]] UNIPREFILL_HOST_API workspace scratch() const noexcept { return lineage_.scratch(); }

    /// Masses of the last decision that scored; valid until the next one. For reports and head policies.
    [[nodiscard]] UNIPREFILL_HOST_API const mass_view& masses() const noexcept { return masses_; }

  private:
    const sparsifier* made_by_;
    row_lineage<backend::cuda> lineage_;
    selection decided_{};
    mass_view masses_{};
    head_mass_view per_head_{};
    typename Policy::rule* rules_ = nullptr; // [num_selecting, max_requests] where a layer has one for all
    workspace scratch_{};                    ///< what is left of the caller's memory for each operation
};

UNIPREFILL_END_NAMESPACE

#include <uniprefill/pipeline/detail/cuda_prefill_sparsifier.inl>
