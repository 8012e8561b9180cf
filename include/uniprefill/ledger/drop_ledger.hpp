// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Which original positions each layer of each request holds in its KV cache, and everything that an engine
/// derives from that: lengths, slots to write, positions, dropped ranges, pages in use.
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/workspace.hpp>
#include <uniprefill/ledger/detail/ledger_layout.hpp>
#include <uniprefill/ledger/detail/noted_slots.hpp>
#include <uniprefill/ledger/detail/saved_layout.hpp>
#include <uniprefill/ledger/held_rows.hpp>
#include <uniprefill/ledger/kv_slots.hpp>
#include <uniprefill/ledger/layer_list.hpp>
#include <uniprefill/ledger/layer_sets.hpp>
#include <uniprefill/ledger/page_signature.hpp>
#include <uniprefill/ledger/pages.hpp>
#include <uniprefill/ledger/saved_request.hpp>
#include <uniprefill/ledger/step_arrays.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// The drop ledger of one engine; the backend says where its state lives.
template <class Backend = backend::host>
class drop_ledger;

/// An engine step on its way through the layers, opened by drop_ledger::begin_step(). The engine keeps it,
/// and the request ids that it was opened with, until the step is committed or aborted. Several steps may be
/// open over different requests, so a prefill can be parked between two layers while others run.
class ledger_step {
  public:
    [[nodiscard]] UNIPREFILL_HOST_API bool open() const noexcept { return open_; }
    [[nodiscard]] UNIPREFILL_HOST_API std::int32_t num_requests() const noexcept { return num_requests_; }

  private:
    template <class Backend>
    friend class drop_ledger;

    const std::int32_t* request_ids_ = nullptr; // [num_requests]
    std::int32_t num_requests_ = 0;
    std::int32_t last_layer_ = -1; // of the last append
    std::int32_t ticket_ = 0;      // CUDA: tells this step from others
    bool open_ = false;
};

/// The ledger in host memory: exact, and what a device ledger is compared with.
///
/// A request is a slot, 0 to max_requests - 1, that the engine admits and releases. A step carries the next
/// rows of some requests through the layers:
/// ```
/// ledger.begin_step(batch, request_ids, step);            // every row enters every layer so far
/// for each layer:
///     ledger.append(step, layer, batch);                  // the rows that do enter it (batch as compacted)
///     ledger.slot_mapping(step, layer, block_table, slots, size);
/// ledger.commit_step(step);                               // or abort_step(): no trace
/// ```
/// A step that drops nothing (decode) takes three calls: begin_step(), look_up() for all layers at once,
/// commit_step().
///
/// An append holds for the layers after it too, until the next set starts, so a step that drops nothing needs
/// none and an engine may append only at the first layer of each set (set_of()). Rows written by a layer take
/// the cache rows behind those that the layer held before, in order of position: slots continue where the
/// last step ended, whatever that step dropped.
///
/// State: state_bytes(), that is for each request, with T = max_tokens, S = num_sets and P = ceil(log2 S)
/// (nested) or S - 1 (independent), `32 + 8 S` bytes of lengths and
/// `8 P ceil(T / 64) + 4 (S - 1) ceil(T / 512)` of sets, each rounded up to 64; and once
/// `4 (num_layers + S)`, rounded up to 64. 128K positions and 6 selecting layers: 54.1 KiB cumulative.
/// Lengths are O(1) for each set, and decode rows cost O(1) whatever the number of layers.
///
/// Statuses name the request's slot and the layer. A call that fails changes nothing, output arrays included.
/// Indices written are int32 or int64. Nothing is allocated; calls that tell slots take 34 KB of the stack.
///
/// Thread safety: calls that touch different requests may run at the same time (steps too), and so may any
/// calls that only read; everything else needs the caller's lock. Deterministic.
template <>
class drop_ledger<backend::host> {
  public:
    using stream = backend::host::stream;

    drop_ledger() noexcept = default; ///< unbound: every call but bind() fails

    /// Bytes of state. Pure, monotone in each extent; the largest size_t where no memory is that large.
    /// @pre validate(bounds).ok()
    [[nodiscard]] static UNIPREFILL_HOST_API std::size_t state_bytes(const ledger_limits& bounds) noexcept {
        return detail::ledger_layout(bounds).bytes(bounds.max_requests);
    }

    /// Takes the caller's memory and forgets what it holds: no request is admitted. O(bytes).
    /// @param bounds     what must fit
    /// @param layer_sets [num_layers] the set of each layer (layer_sets.hpp); copied
    /// @param memory     at least state_bytes(bounds) bytes, aligned to workspace::alignment, the ledger's
    ///                   until it is bound again or destroyed. A copied ledger shares it.
    /// @param bytes      of memory
    UNIPREFILL_HOST_API status bind(const ledger_limits& bounds, const std::int32_t* layer_sets, void* memory,
                                    std::size_t bytes) noexcept;

    [[nodiscard]] UNIPREFILL_HOST_API const ledger_limits& bounds() const noexcept { return bounds_; }
    /// The set of a layer, -1 where there is no such layer. Layers of one set have the same lengths, rows and
    /// positions (and slots, where they share block tables), so one array serves them all.
    [[nodiscard]] UNIPREFILL_HOST_API std::int32_t set_of(std::int32_t layer) const noexcept {
        return layer >= 0 && layer < bounds_.num_layers && memory_ != nullptr ? layer_sets()[layer] : -1;
    }
    /// Whether no layer before @p layer is of its set: where an append may bring other rows.
    [[nodiscard]] UNIPREFILL_HOST_API bool starts_set(std::int32_t layer) const noexcept {
        const std::int32_t set = set_of(layer);
        return set >= 0 && first_layers()[set] == layer;
    }

    /// A free slot becomes an empty request. O(1). Fails where the slot is taken.
    UNIPREFILL_HOST_API status admit(std::int32_t request) noexcept;
    /// The slot is free again and nothing of the request is left. O(tokens / 64). Fails in an open step.
    UNIPREFILL_HOST_API status release(std::int32_t request) noexcept;
    /// Every layer forgets the positions from @p num_tokens on: rejected speculative tokens, or a prefix to
    /// go back to. O(1) among decoded tokens, else O((tokens rolled back) / 64 + sets).
    /// Table entries behind the last row that is left aren't needed any more (hand_back_pages()); where
    /// requests share pages, hand them back before the next step writes them.
    /// Fails in an open step, or where the request has fewer positions.
    UNIPREFILL_HOST_API status rollback(std::int32_t request, std::int32_t num_tokens, stream = {}) noexcept;
    /// The same for several requests, all of them or none.
    /// @param request_ids [count] slots, or -1 for an empty place; none twice
    /// @param num_tokens  [count] that each keeps
    UNIPREFILL_HOST_API status rollback(const std::int32_t* request_ids, const std::int32_t* num_tokens,
                                        std::int32_t count, stream = {}) noexcept;
    /// The layers of a set give up positions that they hold, and keep these: what an engine does that decides
    /// when the prompt ends, after all layers have run on all rows. Other sets stay as they are; nested sets
    /// give up from the last one to the first. O(tokens / 64 * sets + count).
    /// @param layer           of the set, which isn't set 0
    /// @param positions       [count] ascending, held by the layer
    /// @param[out] from_rows  [count] the row of the layer's cache that becomes row i, never below i: a pass
    ///                        from the first to the last moves them in place. Null: not wanted. Pages that
    ///                        others share are to be copied first.
    /// Fails in an open step, or where the next nested set still holds a position that isn't kept.
    template <class Index>
    UNIPREFILL_HOST_API status keep_only(std::int32_t request, std::int32_t layer,
                                         const std::int32_t* positions, std::int32_t count, Index* from_rows,
                                         stream = {}) noexcept;
    /// A free slot becomes a copy of a request, as beams and several answers to one prompt take it. Which
    /// pages the two share says held_rows::fork_pages(), which page is to be copied before a step writes it
    /// step_arrays::partial_pages. O(tokens / 64 * sets). Fails in an open step, or where @p copy is taken.
    UNIPREFILL_HOST_API status fork(std::int32_t request, std::int32_t copy, stream = {}) noexcept;

    /// @name A request as a flat buffer (saved_request.hpp)
    /// Preemption by swapping is save(), release(), and later admit(), restore(), to any slot. Preemption by
    /// recomputing is release(), and later the request's rows again, in chunks of any length.
    /// @{

    /// Bytes that save() takes for any request that fits. Pure.
    /// @pre validate(bounds).ok()
    [[nodiscard]] static UNIPREFILL_HOST_API std::size_t
    max_saved_bytes(const ledger_limits& bounds) noexcept {
        return detail::saved_layout::of(bounds.num_layers, bounds.num_sets, bounds.relation,
                                        bounds.max_tokens)
            .size();
    }
    /// Bytes that save() takes for this request. O(1).
    UNIPREFILL_HOST_API status saved_bytes(std::int32_t request, std::size_t& bytes) const noexcept;
    /// Writes the request's state; the request stays. O(bytes). Fails in an open step.
    /// @param buffer  any alignment
    /// @param bytes   of it, at least saved_bytes(); what lies beyond stays as it is
    UNIPREFILL_HOST_API status save(std::int32_t request, void* buffer, std::size_t bytes,
                                    stream = {}) const noexcept;
    /// The same for the request's first @p num_tokens positions, as if it had been rolled back to them: what
    /// a prefix cache keeps (page_signature.hpp). Fails where the request has fewer positions.
    UNIPREFILL_HOST_API status saved_prefix_bytes(std::int32_t request, std::int32_t num_tokens,
                                                  std::size_t& bytes) const noexcept;
    /// Writes them. O(bytes). As save() otherwise.
    UNIPREFILL_HOST_API status save_prefix(std::int32_t request, std::int32_t num_tokens, void* buffer,
                                           std::size_t bytes, stream = {}) const noexcept;
    /// An empty request gets a saved one's state. O(bytes).
    /// @param buffer  hostile until checked
    /// @param bytes   exactly those that save() wrote
    /// Fails in an open step, where the request has positions, where the buffer is damaged, cut or of
    /// another version, where its layers have other sets, or more positions than fit here.
    UNIPREFILL_HOST_API status restore(std::int32_t request, const void* buffer, std::size_t bytes,
                                       stream = {}) noexcept;
    /// @}

    /// Opens a step: the rows of @p batch are the next positions of their requests, and enter every layer
    /// until append() says otherwise. O(rows + requests).
    /// @param batch       tags, cu_seqlens and positions are read. Positions go on from the request's last
    ///                    one without a gap; null: those positions.
    /// @param request_ids [num_requests] the slot of each request of the batch, or -1 for an empty place,
    ///                    which has no rows. None twice. Kept until the step is closed.
    /// @param[out] step   closed before
    /// Fails where a request is unknown or in an open step, a prefill isn't the first of its request, rows
    /// overlap or leave a gap, or exceed max_tokens.
    UNIPREFILL_HOST_API status begin_step(const batch_view& batch, const std::int32_t* request_ids,
                                          ledger_step& step, stream = {}) noexcept;

    /// Says which rows of the step enter @p layer (their keys are written there), and the layers after it
    /// until another append. O(rows + tokens of the step / 64 * sets).
    ///
    /// The rows are given by position, any ascending subset of the step's for each request: an engine that
    /// compacts its rows passes the batch as it stands at the layer's entry. Layers ascend; only a set's
    /// first layer may bring other rows than its set has. Decode and verify rows enter every layer.
    /// @param step     open
    /// @param layer    above that of the step's last append
    /// @param entering num_requests as in the step; cu_seqlens and positions are read
    UNIPREFILL_HOST_API status append(ledger_step& step, std::int32_t layer, const batch_view& entering,
                                      stream = {}) noexcept;

    /// The step's rows are held for good. O(requests * sets).
    UNIPREFILL_HOST_API status commit_step(ledger_step& step, stream = {}) noexcept;
    /// The step was never opened: the state is as before, byte for byte. O(tokens of the step / 64 * sets).
    UNIPREFILL_HOST_API status abort_step(ledger_step& step, stream = {}) noexcept;

    /// @name Of the open step, for one layer
    /// Arrays have @p size entries; those beyond the step's requests or rows are filled as engines pad.
    /// Rows are the rows that enter the layer, packed in order of the batch. Fails where size is too small.
    /// @{

    /// Rows that enter the layer, all requests together. O(requests).
    UNIPREFILL_HOST_API status num_rows(const ledger_step& step, std::int32_t layer,
                                        std::int32_t& rows) const noexcept;
    /// Keys that the layer held before the step (batch_view::cached_lens); padded with 0. O(size).
    template <class Index>
    UNIPREFILL_HOST_API status cached_lens(const ledger_step& step, std::int32_t layer, Index* out,
                                           std::int32_t size, stream = {}) const noexcept;
    /// Keys that the layer holds with the step's rows (seq_lens, seqused_k); padded with 0. O(size).
    template <class Index>
    UNIPREFILL_HOST_API status seq_lens(const ledger_step& step, std::int32_t layer, Index* out,
                                        std::int32_t size, stream = {}) const noexcept;
    /// First row of each request and the end; size >= num_requests + 1; padded with the end. O(size).
    template <class Index>
    UNIPREFILL_HOST_API status cu_seqlens(const ledger_step& step, std::int32_t layer, Index* out,
                                          std::int32_t size, stream = {}) const noexcept;
    /// Original position of each row (for RoPE and windows); padded with -1. O(size + tokens / 64).
    template <class Index>
    UNIPREFILL_HOST_API status row_positions(const ledger_step& step, std::int32_t layer, Index* out,
                                             std::int32_t size, stream = {}) const noexcept;
    /// Where in its request's cache each row goes; padded with -1. O(size).
    template <class Index>
    UNIPREFILL_HOST_API status write_rows(const ledger_step& step, std::int32_t layer, Index* out,
                                          std::int32_t size, stream = {}) const noexcept;
    /// The slot in the engine's pool that each row goes to; padded with -1. O(size).
    /// @param slots block_table_view, contiguous_slots, or another slot source (kv_slots.hpp)
    /// Fails where a row has no page, or a slot exceeds Index.
    template <class Slots, class Index>
    UNIPREFILL_HOST_API status slot_mapping(const ledger_step& step, std::int32_t layer, const Slots& slots,
                                            Index* out, std::int32_t size, stream = {}) const noexcept;
    /// Which of the layer's rows need logits: ask the last layer. By default the last row of each request
    /// that has rows, and every row of a verification; -1 for one that was dropped, and as padding.
    /// O(size + rows).
    /// @param wanted       offsets not null: the rows at these positions instead (prompt log-probabilities).
    ///                     Positions outside the step are left out, so one list serves all chunks of a
    ///                     prompt.
    /// @param[out] offsets [num_requests + 1] the first entry of each request and the end; null: not wanted
    template <class Index>
    UNIPREFILL_HOST_API status logits_rows(const ledger_step& step, std::int32_t layer,
                                           const span_lists& wanted, Index* out, std::int32_t size,
                                           Index* offsets = nullptr, stream = {}) const noexcept;
    /// @}

    /// All of that for several layers at once (step_arrays.hpp). Layers whose first append is yet to come
    /// count as if none came. O(layers * (requests + rows)); arrays of layers of one set that follow each
    /// other are worked out once.
    /// @param layers one entry for each part of the arrays: every layer, or the first one of each set
    /// @param slots  as in slot_mapping()
    template <class Slots, class Index, class Slot>
    UNIPREFILL_HOST_API status look_up(const ledger_step& step, const layer_list& layers, const Slots& slots,
                                       const step_arrays<Index, Slot>& out, stream = {}) const noexcept;
    /// The same where no slots are wanted: before there are pages for the step, say.
    template <class Index, class Slot>
    UNIPREFILL_HOST_API status look_up(const ledger_step& step, const layer_list& layers,
                                       const step_arrays<Index, Slot>& out, stream = {}) const noexcept;
    /// Every layer of the ledger.
    [[nodiscard]] UNIPREFILL_HOST_API layer_list every_layer() const noexcept {
        return {0, memory_ != nullptr ? bounds_.num_layers : 0, nullptr};
    }

    /// What a layer holds of a request, rows of an open step included. O(1).
    UNIPREFILL_HOST_API status rows_of(std::int32_t request, std::int32_t layer,
                                       held_rows& rows) const noexcept;

    /// @name Pages
    /// @{

    /// Takes the pages that no row needs any more out of block tables, and lists them: pages of positions
    /// that were dropped or rolled back, and pages that a layer's window has passed. Live pages stay where
    /// they are (held_rows::live_pages()), at most one of them partly filled in each layer of a request.
    ///
    /// May be called in an open step, after the append of a layer, too. An engine that shares pages between
    /// requests takes one from the count of each page listed. O(layers * requests + pages handed back).
    /// @param request_ids [count] slots, or -1 for an empty place; none twice
    /// @param layers      where the tables are shared by layers: those that share them, and what any of them
    ///                    needs stays
    /// @param rule        of these layers
    /// @param tables      `table` and `in_use` are changed
    /// @param[out] pages  [capacity] ids in order of layer, request and entry
    /// @param[out] num_pages  how many there are
    /// Fails where there are more than @p capacity, or an entry in use names no page.
    UNIPREFILL_HOST_API status hand_back_pages(const std::int32_t* request_ids, std::int32_t count,
                                               const layer_list& layers, const page_rule& rule,
                                               const page_tables& tables, std::int32_t* pages,
                                               std::int32_t capacity, std::int32_t& num_pages,
                                               stream = {}) const noexcept;
    /// The pages of a request in these layers, each with a table of its own, and those of a cache that drops
    /// nothing. O(layers).
    UNIPREFILL_HOST_API status pages_of(std::int32_t request, const layer_list& layers, const page_rule& rule,
                                        page_usage& usage) const noexcept;
    /// Signs the pages of a layer (page_signature.hpp), the last one with the rows that it has: pages with
    /// the same signature hold the same keys and values. O(tokens * sets). Rows of an open step
    /// count.
    /// @param signer      key and policy, the same for all that share pages
    /// @param tokens      [num_tokens] the request's text: int32, uint32 or int64
    /// @param page_tokens rows of a page
    /// @param[out] signatures [capacity]
    /// @param[out] num_pages  how many there are
    /// Fails where there are more than @p capacity.
    template <class Token>
    UNIPREFILL_HOST_API status sign_pages(std::int32_t request, std::int32_t layer, const page_signer& signer,
                                          const Token* tokens, std::int32_t page_tokens,
                                          page_signature* signatures, std::int32_t capacity,
                                          std::int32_t& num_pages) const noexcept;
    /// @}

  private:
    [[nodiscard]] UNIPREFILL_HOST_API const std::int32_t* layer_sets() const noexcept {
        return layout_.layer_sets(memory_);
    }
    [[nodiscard]] UNIPREFILL_HOST_API const std::int32_t* first_layers() const noexcept {
        return layout_.first_layers(memory_);
    }
    [[nodiscard]] UNIPREFILL_HOST_API detail::request_record record(std::int32_t request) const noexcept {
        return layout_.record(memory_, request);
    }
    [[nodiscard]] UNIPREFILL_HOST_API bool follows(std::int32_t set, std::int32_t changed) const noexcept;

    UNIPREFILL_HOST_API status check_request(std::int32_t request) const noexcept;
    UNIPREFILL_HOST_API status check_closed(std::int32_t request) const noexcept;
    UNIPREFILL_HOST_API status check_closed(const std::int32_t* request_ids,
                                            std::int32_t count) const noexcept;
    UNIPREFILL_HOST_API status check_free(std::int32_t request, const char* argument) const noexcept;
    UNIPREFILL_HOST_API status check_layer(std::int32_t layer) const noexcept;
    UNIPREFILL_HOST_API status check_layers(const layer_list& layers) const noexcept;
    UNIPREFILL_HOST_API status check_step(const ledger_step& step) const noexcept;
    UNIPREFILL_HOST_API status check_next_rows(const batch_view& batch, std::int32_t index,
                                               std::int32_t request) const noexcept;
    UNIPREFILL_HOST_API status check_entering(std::int32_t request, std::int32_t layer,
                                              const std::int32_t* positions,
                                              std::int32_t count) const noexcept;
    UNIPREFILL_HOST_API void stage_rows(const detail::request_record& state, std::int32_t set,
                                        const std::int32_t* positions, std::int32_t count) const noexcept;
    UNIPREFILL_HOST_API status check_kept(std::int32_t request, std::int32_t layer,
                                          const std::int32_t* positions, std::int32_t count) const noexcept;
    UNIPREFILL_HOST_API status check_rollback(std::int32_t request, std::int32_t num_tokens) const noexcept;
    UNIPREFILL_HOST_API void forget(std::int32_t request, std::int32_t num_tokens) const noexcept;
    UNIPREFILL_HOST_API status check_output(const ledger_step& step, std::int32_t layer, bool given,
                                            std::int32_t size, bool by_row) const noexcept;
    [[nodiscard]] UNIPREFILL_HOST_API std::int32_t count_rows(const ledger_step& step,
                                                              std::int32_t set) const noexcept;
    [[nodiscard]] UNIPREFILL_HOST_API std::int64_t count_chunks(const ledger_step& step, std::int32_t set,
                                                                std::int32_t chunk_rows) const noexcept;
    template <class Index, class Slot>
    UNIPREFILL_HOST_API void fill_layer(const ledger_step& step, std::int32_t set,
                                        step_arrays<Index, Slot> out) const noexcept;
    template <class Slots, class Slot>
    UNIPREFILL_HOST_API void fill_slots(const ledger_step& step, layer_list layers, std::int32_t first,
                                        std::int32_t end, Slots slots, Slot* out, std::int32_t size,
                                        Slot padding, detail::noted_slots& noted) const noexcept;
    template <class Slots>
    UNIPREFILL_HOST_API std::int32_t note_slots(const ledger_step& step, layer_list layers,
                                                std::int32_t first, std::int32_t end, Slots slots,
                                                detail::noted_slots& noted) const noexcept;
    template <class Slots>
    UNIPREFILL_HOST_API status misfit(const ledger_step& step, std::int32_t layer, const Slots& slots,
                                      std::int64_t most) const noexcept;
    template <class Visit>
    UNIPREFILL_HOST_API void for_each_table(const std::int32_t* request_ids, std::int32_t count,
                                            const layer_list& layers, const page_rule& rule,
                                            const page_tables& tables, Visit visit) const noexcept;
    /// Calls visit(batch index, slot, state) for each request of the step.
    template <class Visit>
    UNIPREFILL_HOST_API void for_each_request(const ledger_step& step, Visit visit) const noexcept;

    ledger_limits bounds_{};
    detail::ledger_layout layout_{};
    std::byte* memory_ = nullptr;
};

UNIPREFILL_END_NAMESPACE

#include <uniprefill/ledger/detail/drop_ledger_answers.inl>
#include <uniprefill/ledger/detail/drop_ledger_keep.inl>
#include <uniprefill/ledger/detail/drop_ledger_life.inl>
#include <uniprefill/ledger/detail/drop_ledger_pages.inl>
#include <uniprefill/ledger/detail/drop_ledger_saved.inl>
#include <uniprefill/ledger/detail/drop_ledger_signatures.inl>
#include <uniprefill/ledger/detail/drop_ledger_step.inl>
