// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The drop ledger in device memory: the host ledger's answers (drop_ledger.hpp) without the host.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/ledger/detail/cuda_ledger_state.cuh>
#include <uniprefill/ledger/drop_ledger.hpp>
#include <uniprefill/ledger/ledger_fault.hpp>
#include <uniprefill/ledger/request_texts.hpp>
#include <uniprefill/ledger/stage_rows.hpp>
#include <uniprefill/ledger/step_wishes.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// The ledger on CUDA devices. Its state lies in the caller's device memory, laid out as the host ledger's,
/// and every array here is in device memory: request ids, batches, tables, what is written.
///
/// A step is two launches, begin_step() and commit_step(), and one append() for each layer from which on rows
/// were dropped. Begin and append tell of the layers that their rows enter:
/// @code
///   using wishes = step_wishes<block_table_view>;
///   ledger.begin_step(batch, ids, step, wishes{layers, tables, arrays}, stream); // decode: of all layers
///   ledger.append(step, layer, compacted, wishes{later_layers, tables, more_arrays}, stream);
///   ledger.commit_step(step, stream);
/// @endcode
/// Nothing is read back, nothing allocated. Capture-safe: a graph that was captured with one batch serves any
/// that fits (request ids -1 for empty places, cu_seqlens up to num_rows), while requests come and go and
/// lengths grow. A ledger_step that was captured stands for the step of each replay.
///
/// **Faults.** What only the device can see to be wrong is left in fault(): the status that the host's ledger
/// would have returned, of the smallest slot if there are several. A step that can't begin isn't opened, and
/// tells of no rows (void where a step of the same array is open); a request whose append is refused keeps
/// all its rows, and what was told of that append is void; a row without a page gets `no_slot`; a request
/// that can't be rolled back, forked, admitted, released, saved or restored is left as it is, and the others
/// go on. Nothing is written out of bounds.
///
/// Deterministic. Thread safety: any number of ledgers at once; calls on one ledger, one after another, whose
/// launches are ordered by one stream or by events.
template <>
class drop_ledger<backend::cuda> {
  public:
    using stream = backend::cuda::stream;

    drop_ledger() noexcept = default; ///< unbound: every call but bind() fails

    /// Bytes of device memory. Pure, monotone in each extent; the largest size_t where no memory is that
    /// large.
    /// @pre validate(bounds).ok()
    [[nodiscard]] static UNIPREFILL_HOST_API std::size_t state_bytes(const ledger_limits& bounds) noexcept;

    /// Takes the caller's device memory and forgets what it holds, as the host's does. O(bytes): a memset and
    /// a launch for each 480 layers and sets; capture-safe.
    /// @param layer_sets [num_layers] in host memory; copied
    /// @param memory     device memory, otherwise as the host's
    /// Refused beyond what thread blocks can share: max_requests above 8,192.
    template <class = void>
    UNIPREFILL_HOST_API status bind(const ledger_limits& bounds, const std::int32_t* layer_sets, void* memory,
                                    std::size_t bytes, const cuda_device& device, stream) noexcept;

    [[nodiscard]] UNIPREFILL_HOST_API const ledger_limits& bounds() const noexcept { return bounds_; }
    /// Every layer of the ledger.
    [[nodiscard]] UNIPREFILL_HOST_API layer_list every_layer() const noexcept {
        return {0, memory_ != nullptr ? bounds_.num_layers : 0, nullptr};
    }

    /// @name Requests
    /// Arrays of @p count slots; -1 is an empty place, none twice. One launch each.
    /// @{

    /// Free slots become empty requests. O(count).
    template <class = void>
    UNIPREFILL_HOST_API status admit(const std::int32_t* requests, std::int32_t count, stream) noexcept;
    /// The slots are free again. O(count * tokens / 64).
    template <class = void>
    UNIPREFILL_HOST_API status release(const std::int32_t* requests, std::int32_t count, stream) noexcept;
    /// Every layer forgets positions. O(count) among decoded tokens, else O((tokens rolled back) / 64 + sets)
    /// for each.
    /// @param num_tokens [count] positions that each keeps
    template <class = void>
    UNIPREFILL_HOST_API status rollback(const std::int32_t* requests, const std::int32_t* num_tokens,
                                        std::int32_t count, stream) noexcept;
    /// Free slots become copies. O(count * tokens / 64 * sets).
    /// @param copies [count] free slots
    template <class = void>
    UNIPREFILL_HOST_API status fork(const std::int32_t* requests, const std::int32_t* copies,
                                    std::int32_t count, stream) noexcept;
    /// Layers of a set give up positions after the prompt, as the host's keep_only() has it.
    /// O(rows + requests * sets * tokens / 64).
    /// @param kept what the layer keeps of each request: num_requests as request_ids, cu_seqlens, positions
    /// @param[out] from_rows [kept.num_rows] as the host's, at the place of each position; null: not wanted
    template <class Index>
    UNIPREFILL_HOST_API status keep_only(const std::int32_t* request_ids, std::int32_t layer,
                                         const batch_view& kept, Index* from_rows, stream) noexcept;
    /// @}

    /// @name Requests as flat buffers (saved_request.hpp)
    /// The host's buffers byte for byte: what one saves the other restores. Buffer i of a call begins
    /// i * stride bytes behind the first one; buffers and stride are multiples of 8. Copy them wherever it
    /// suits, and any bytes beyond those saved may be left out. One launch each, a thread block for a
    /// request.
    /// @{

    /// A stride that is enough for any request that fits, max_saved_bytes() of the host's ledger. Pure.
    /// @pre validate(bounds).ok()
    [[nodiscard]] static UNIPREFILL_HOST_API std::size_t
    max_saved_bytes(const ledger_limits& bounds) noexcept;
    /// Writes the state of requests in no open step, which stay. O(count * bytes). A fault, and no bytes, for
    /// one that takes more than @p stride.
    /// @param requests    [count] slots, or -1 for an empty place
    /// @param num_tokens  [count] positions of each to write, as save_prefix() of the host's ledger; null:
    /// all
    /// @param[out] buffers [count, stride]
    /// @param[out] bytes  [count] written; 0 for an empty place, or one that was refused. Null: not wanted
    ///                    (saved_header::bytes says it, too; where nothing is written, of what was there
    ///                    before: give restore() this array where buffers are used again)
    template <class = void>
    UNIPREFILL_HOST_API status save(const std::int32_t* requests, const std::int32_t* num_tokens,
                                    std::int32_t count, void* buffers, std::size_t stride,
                                    std::uint64_t* bytes, stream) const noexcept;
    /// Empty requests get the state of saved ones, as the host's do: buffers are hostile until checked.
    /// O(count * (bytes + sets * tokens / 64)). A fault for each that is refused; nothing is changed there.
    /// @param requests [count] slots, or -1 for an empty place; none twice
    /// @param buffers  [count, stride]
    /// @param bytes    [count] that save() wrote of each; null: those that each buffer says
    template <class = void>
    UNIPREFILL_HOST_API status restore(const std::int32_t* requests, std::int32_t count, const void* buffers,
                                       std::size_t stride, const std::uint64_t* bytes, stream) noexcept;
    /// @}

    /// As the host's. One launch, of one thread block more than @p wishes needs: O(layers * (rows * log
    /// requests + requests)). Each thread block looks at all positions of the batch: without them, which says
    /// the same, many rows cost less.
    /// @param batch       num_rows at least the last of cu_seqlens; positions may be null
    /// @param request_ids [num_requests] used until the step ends
    template <class Slots = contiguous_slots, class Index = std::int32_t, class Slot = std::int64_t>
    UNIPREFILL_HOST_API status begin_step(const batch_view& batch, const std::int32_t* request_ids,
                                          ledger_step& step, const step_wishes<Slots, Index, Slot>& wishes,
                                          stream) noexcept;
    /// The same without telling anything. O(rows + requests).
    template <class = void>
    UNIPREFILL_HOST_API status begin_step(const batch_view& batch, const std::int32_t* request_ids,
                                          ledger_step& step, stream on) noexcept {
        return begin_step(batch, request_ids, step, step_wishes<>{}, on);
    }

    /// As the host's. One launch: a thread block for each request beside those that @p wishes needs. O(rows +
    /// tokens of the step / 64 * sets), and for @p wishes as begin_step().
    /// @param wishes of layers that these rows enter: from @p layer on, up to the next append
    template <class Slots = contiguous_slots, class Index = std::int32_t, class Slot = std::int64_t>
    UNIPREFILL_HOST_API status append(ledger_step& step, std::int32_t layer, const batch_view& entering,
                                      const step_wishes<Slots, Index, Slot>& wishes, stream) noexcept;
    /// The same without telling anything. O(rows + tokens of the step / 64 * sets).
    template <class = void>
    UNIPREFILL_HOST_API status append(ledger_step& step, std::int32_t layer, const batch_view& entering,
                                      stream on) noexcept {
        return append(step, layer, entering, step_wishes<>{}, on);
    }

    /// Tells of any layers of an open step, from the state. One launch, O(layers * (rows * log tokens +
    /// requests)).
    template <class Slots, class Index, class Slot>
    UNIPREFILL_HOST_API status look_up(const ledger_step& step, const step_wishes<Slots, Index, Slot>& wishes,
                                       stream) const noexcept;
    /// As the host's. One launch, of one thread block. O(size + rows).
    /// @param max_spans that the last of wanted.offsets may name
    template <class Index>
    UNIPREFILL_HOST_API status logits_rows(const ledger_step& step, std::int32_t layer,
                                           const span_lists& wanted, std::int32_t max_spans, Index* out,
                                           std::int32_t size, Index* offsets, stream) const noexcept;

    /// The step's rows are held for good. One launch, O(requests * sets).
    template <class = void>
    UNIPREFILL_HOST_API status commit_step(ledger_step& step, stream) noexcept;
    /// The step was never opened. One launch, O(tokens of the step / 64 * sets).
    template <class = void>
    UNIPREFILL_HOST_API status abort_step(ledger_step& step, stream) noexcept;

    /// As the host's; none are handed back where it would have failed. One launch, of one thread block.
    /// O(layers * requests + pages handed back).
    /// @param[out] num_pages [1]
    template <class = void>
    UNIPREFILL_HOST_API status hand_back_pages(const std::int32_t* request_ids, std::int32_t count,
                                               const layer_list& layers, const page_rule& rule,
                                               const page_tables& tables, std::int32_t* pages,
                                               std::int32_t capacity, std::int32_t* num_pages,
                                               stream) const noexcept;

    /// Signs pages as the host's: of each of several requests in each of several layers. One launch, a warp
    /// for each of these: O(tokens * sets), one after another, as a signature goes on from that of
    /// the page before. Rows of an open step count.
    /// @param requests [count] slots, or -1 for an empty place
    /// @param signer   read by the host: a graph keeps key and policy
    /// @param texts    int32, uint32 or int64 tokens; a fault for a request of more positions than the stride
    /// @param page_tokens rows of a page
    /// @param[out] signatures [layers, count, capacity]; entries behind a request's pages stay as they are
    /// @param capacity  a fault for a request that has more pages in a layer
    /// @param[out] num_pages [layers, count] signed; 0 for an empty place, or one that was refused
    template <class Token>
    UNIPREFILL_HOST_API status sign_pages(const std::int32_t* requests, std::int32_t count,
                                          const layer_list& layers, const page_signer& signer,
                                          const request_texts<Token>& texts, std::int32_t page_tokens,
                                          page_signature* signatures, std::int32_t capacity,
                                          std::int32_t* num_pages, stream) const noexcept;

    /// @name What a pipeline stage tells the next one (stage_rows.hpp)
    /// The host's words: a buffer written by one may be read by the other. One launch each.
    /// @{

    /// Writes what the next stage needs. O(requests + rows). Where offsets make no sense: a fault, and a
    /// buffer that the next stage refuses.
    /// @param batch       of the step: tags and cu_seqlens are read; num_rows at least the last of cu_seqlens
    /// @param request_ids [num_requests]
    /// @param leaving     rows that leave the stage: cu_seqlens and positions are read; num_rows at least the
    ///                    last of cu_seqlens
    /// @param[out] words  [size], size at least stage_rows_words() for leaving.num_rows
    template <class = void>
    UNIPREFILL_HOST_API status write_stage_rows(const batch_view& batch, const std::int32_t* request_ids,
                                                const batch_view& leaving, std::int32_t* words,
                                                std::int64_t size, stream) const noexcept;
    /// Views into @p words, for begin_step() and append(), which judge them. O(1). Where the buffer isn't of
    /// this format, or of other numbers: a fault, and an offset in it that begin_step() refuses.
    /// @param num_requests that the step has, empty places included
    /// @param num_rows     that it has at most
    template <class = void>
    UNIPREFILL_HOST_API status read_stage_rows(std::int32_t* words, std::int64_t size,
                                               std::int32_t num_requests, std::int32_t num_rows,
                                               stage_rows& came, stream) const noexcept;
    /// @}

    /// The word that ledger_fault reads, in device memory; copy it whenever it suits.
    [[nodiscard]] UNIPREFILL_HOST_API const std::uint64_t* fault() const noexcept;
    /// Forgets a fault. O(1).
    UNIPREFILL_HOST_API status clear_fault(stream) noexcept;

    /// The state, laid out as the host's: for tests, and for engines that move it.
    [[nodiscard]] UNIPREFILL_HOST_API const void* state() const noexcept { return memory_; }

  private:
    [[nodiscard]] UNIPREFILL_HOST_API detail::cuda_ledger_state kernel_state() const noexcept;
    UNIPREFILL_HOST_API status check_bound() const noexcept;
    UNIPREFILL_HOST_API status check_slots(const std::int32_t* requests, std::int32_t count) const noexcept;
    UNIPREFILL_HOST_API status check_step(const ledger_step& step) const noexcept;
    UNIPREFILL_HOST_API status check_layer(std::int32_t layer) const noexcept;
    UNIPREFILL_HOST_API status check_layers(const layer_list& layers) const noexcept;
    UNIPREFILL_HOST_API status check_rows(const batch_view& rows, bool positions_needed) const noexcept;
    template <class Slots, class Index, class Slot>
    UNIPREFILL_HOST_API status check_wishes(const step_wishes<Slots, Index, Slot>& wishes,
                                            std::int32_t num_requests) const noexcept;
    template <class = void>
    UNIPREFILL_HOST_API status end_step(ledger_step& step, bool commits, stream) noexcept;
    [[nodiscard]] UNIPREFILL_HOST_API detail::cuda_step step_of(const ledger_step& step) const noexcept;

    ledger_limits bounds_{};
    detail::ledger_layout layout_{};
    std::byte* memory_ = nullptr;
    cuda_device device_{};
};

UNIPREFILL_END_NAMESPACE

#include <uniprefill/ledger/detail/cuda_ledger.inl>
