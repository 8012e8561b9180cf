// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/ledger/detail/cuda_keep.cuh>
#include <uniprefill/ledger/detail/cuda_ledger_kernels.cuh>
#include <uniprefill/ledger/detail/cuda_ledger_life.cuh>
#include <uniprefill/ledger/detail/cuda_ledger_pages.cuh>
#include <uniprefill/ledger/detail/cuda_logits.cuh>
#include <uniprefill/ledger/detail/cuda_saved.cuh>
#include <uniprefill/ledger/detail/cuda_signatures.cuh>
#include <uniprefill/ledger/detail/cuda_stage_rows.cuh>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Beyond these the offsets of a step's requests don't fit what thread blocks share.
inline constexpr std::int32_t ledger_most_requests = 8192;
static_assert((ledger_most_requests + 1 + ledger_most_requests / 32) * sizeof(std::int32_t) +
                      sizeof(set_writer::room) <=
                  48 * 1024,
              "every device gives a thread block as much");

/// Tells the steps that are open at the same time apart: each keeps an array of slots of its own. Only to
/// notice that a request is in another one.
[[nodiscard]] inline UNIPREFILL_HOST_API std::int32_t ticket_of(const std::int32_t* request_ids) noexcept {
    return static_cast<std::int32_t>(reinterpret_cast<std::uintptr_t>(request_ids) / sizeof(std::int32_t) %
                                     0x7fffffffu) +
           1;
}

[[nodiscard]] inline UNIPREFILL_HOST_API status require_ledger(bool good, const char* argument,
                                                               const char* expected,
                                                               std::int64_t came) noexcept {
    return good ? success() : failure(status_code::invalid_argument, argument, expected, came);
}
/// Buffers of saved requests.
[[nodiscard]] inline UNIPREFILL_HOST_API status check_saved(const void* buffers, std::size_t stride,
                                                            std::int32_t count) noexcept {
    UNIPREFILL_TRY(
        require_ledger(count == 0 || buffers != nullptr, "buffers", "an address, not a null pointer", 0));
    const std::uintptr_t over = (reinterpret_cast<std::uintptr_t>(buffers) | stride) % sizeof(std::uint64_t);
    return over == 0 ? success()
                     : failure(status_code::misaligned, "buffers",
                               "address and stride that are multiples of 8", over);
}
[[nodiscard]] inline UNIPREFILL_HOST_API unsigned ledger_grid(std::int64_t blocks) noexcept {
    return static_cast<unsigned>(blocks < 1 ? 1 : blocks);
}

} // namespace detail

inline std::size_t drop_ledger<backend::cuda>::state_bytes(const ledger_limits& bounds) noexcept {
    const std::size_t bytes = detail::ledger_layout(bounds).bytes(bounds.max_requests);
    const std::size_t most = static_cast<std::size_t>(-1);
    return bytes > most - workspace::alignment ? most : bytes + workspace::alignment; // the fault
}

inline const std::uint64_t* drop_ledger<backend::cuda>::fault() const noexcept {
    return reinterpret_cast<const std::uint64_t*>(memory_ + layout_.bytes(bounds_.max_requests));
}

inline detail::cuda_ledger_state drop_ledger<backend::cuda>::kernel_state() const noexcept {
    return {bounds_, layout_, memory_,
            reinterpret_cast<unsigned long long*>(memory_ + layout_.bytes(bounds_.max_requests))};
}

// Checks of what the host can see ---------------------------------------------------------------------------

inline status drop_ledger<backend::cuda>::check_bound() const noexcept {
    return memory_ != nullptr
               ? success()
               : failure(status_code::wrong_state, "ledger", "a ledger that is bound to memory", 0);
}

inline status drop_ledger<backend::cuda>::check_slots(const std::int32_t* requests,
                                                      std::int32_t count) const noexcept {
    UNIPREFILL_TRY(check_bound());
    return detail::require_ledger(count >= 0 && count <= bounds_.max_requests &&
                                      (count == 0 || requests != nullptr),
                                  "requests", "an array of at most max_requests slots", count);
}

inline status drop_ledger<backend::cuda>::check_step(const ledger_step& step) const noexcept {
    UNIPREFILL_TRY(check_bound());
    return step.open_ && step.ticket_ != 0
               ? success()
               : failure(status_code::wrong_state, "step", "a step that begin_step() opened", 0);
}

inline status drop_ledger<backend::cuda>::check_layer(std::int32_t layer) const noexcept {
    return layer >= 0 && layer < bounds_.num_layers
               ? success()
               : failure(status_code::out_of_range, "layer", "0..num_layers - 1", layer).at_layer(layer);
}

inline status drop_ledger<backend::cuda>::check_layers(const layer_list& layers) const noexcept {
    UNIPREFILL_TRY(detail::require_ledger(layers.count >= 0, "layers.count", ">= 0", layers.count));
    const bool inside =
        layers.layers != nullptr || (layers.first >= 0 && layers.count <= bounds_.num_layers - layers.first);
    return inside ? success()
                  : failure(status_code::out_of_range, "layers", "layers of the ledger", layers.first);
}

inline status drop_ledger<backend::cuda>::check_rows(const batch_view& rows,
                                                     bool positions_needed) const noexcept {
    if (rows.space != memory_space::device) {
        return failure(status_code::not_supported, "batch.space", "device memory", 0);
    }
    UNIPREFILL_TRY(detail::require_ledger(rows.num_requests >= 0 && rows.num_requests <= bounds_.max_requests,
                                          "batch.num_requests", "0..max_requests", rows.num_requests));
    UNIPREFILL_TRY(detail::require_ledger(rows.num_rows >= 0, "batch.num_rows", ">= 0", rows.num_rows));
    UNIPREFILL_TRY(detail::require_ledger(rows.num_requests == 0 || rows.cu_seqlens != nullptr,
                                          "batch.cu_seqlens", "an array, not a null pointer", 0));
    return detail::require_ledger(!positions_needed || rows.num_rows == 0 || rows.positions != nullptr,
                                  "entering.positions", "an array, not a null pointer", 0);
}

template <class Slots, class Index, class Slot>
inline status drop_ledger<backend::cuda>::check_wishes(const step_wishes<Slots, Index, Slot>& wishes,
                                                       std::int32_t num_requests) const noexcept {
    static_assert(detail::is_index<Index> && detail::is_index<Slot>, "indices are int32 or int64");
    const step_arrays<Index, Slot>& out = wishes.out;
    UNIPREFILL_TRY(check_layers(wishes.layers));
    UNIPREFILL_TRY(detail::check(out));
    const bool by_request = out.cached_lens != nullptr || out.seq_lens != nullptr ||
                            out.cu_seqlens != nullptr || out.num_pages != nullptr ||
                            out.partial_pages != nullptr;
    if (by_request && out.num_requests < num_requests) {
        return failure(status_code::out_of_range, "step_arrays.num_requests", "at least the step's",
                       out.num_requests);
    }
    return out.slots != nullptr ? wishes.slots.check() : success();
}

// Life of a ledger and its requests -------------------------------------------------------------------------

template <class>
inline status drop_ledger<backend::cuda>::bind(const ledger_limits& bounds, const std::int32_t* layer_sets,
                                               void* memory, std::size_t bytes, const cuda_device& device,
                                               stream on) noexcept {
    UNIPREFILL_TRY(validate(bounds));
    UNIPREFILL_TRY(detail::check_layer_sets(bounds, layer_sets));
    UNIPREFILL_TRY(detail::require_ledger(bounds.max_requests <= detail::ledger_most_requests,
                                          "ledger_limits.max_requests", "at most 8192 in device memory",
                                          bounds.max_requests));
    UNIPREFILL_TRY(detail::require_ledger(memory != nullptr, "memory", "an address, not a null pointer", 0));
    if (reinterpret_cast<std::uintptr_t>(memory) % workspace::alignment != 0) {
        return failure(status_code::misaligned, "memory", "an address that is a multiple of 256",
                       reinterpret_cast<std::uintptr_t>(memory) % workspace::alignment);
    }
    const std::size_t needed = state_bytes(bounds);
    if (bytes < needed || needed == static_cast<std::size_t>(-1)) {
        return failure(status_code::workspace_too_small, "bytes", "at least state_bytes(bounds)", bytes);
    }
    drop_ledger bound;
    bound.bounds_ = bounds;
    bound.layout_ = detail::ledger_layout(bounds);
    bound.memory_ = static_cast<std::byte*>(memory);
    bound.device_ = device;
    UNIPREFILL_TRY(cuda_result(cudaMemsetAsync(memory, 0, needed, on), "memory"));
    const auto number = [&](std::int32_t i) {
        return i < bounds.num_layers
                   ? layer_sets[i]
                   : detail::first_layer_of(layer_sets, bounds.num_layers, i - bounds.num_layers);
    };
    detail::ledger_maps maps{};
    for (const std::int32_t all = bounds.num_layers + bounds.num_sets; maps.first < all;
         maps.first += maps.count) {
        const std::int32_t left = all - maps.first;
        maps.count = left < detail::ledger_maps::most ? left : detail::ledger_maps::most;
        for (std::int32_t i = 0; i < maps.count; ++i) {
            maps.numbers[i] = number(maps.first + i);
        }
        UNIPREFILL_TRY(detail::launch(device, detail::map_kernel<>, 1, detail::ledger_threads, 0, on,
                                      bound.kernel_state(), maps));
    }
    *this = bound;
    return success();
}

inline status drop_ledger<backend::cuda>::clear_fault(stream on) noexcept {
    UNIPREFILL_TRY(check_bound());
    return cuda_result(cudaMemsetAsync(kernel_state().fault, 0xff, sizeof(std::uint64_t), on), "fault");
}

template <class>
inline status drop_ledger<backend::cuda>::admit(const std::int32_t* requests, std::int32_t count,
                                                stream on) noexcept {
    UNIPREFILL_TRY(check_slots(requests, count));
    return detail::launch(device_, detail::admit_kernel<>,
                          detail::ledger_grid(num_blocks(count, detail::ledger_threads)),
                          detail::ledger_threads, 0, on, kernel_state(), requests, count);
}

template <class>
inline status drop_ledger<backend::cuda>::release(const std::int32_t* requests, std::int32_t count,
                                                  stream on) noexcept {
    UNIPREFILL_TRY(check_slots(requests, count));
    const std::int32_t* const nothing = nullptr;
    return detail::launch(device_, detail::rollback_kernel<>, detail::ledger_grid(count),
                          detail::ledger_threads, 0, on, kernel_state(), requests, nothing, count);
}

template <class>
inline status drop_ledger<backend::cuda>::rollback(const std::int32_t* requests,
                                                   const std::int32_t* num_tokens, std::int32_t count,
                                                   stream on) noexcept {
    UNIPREFILL_TRY(check_slots(requests, count));
    UNIPREFILL_TRY(detail::require_ledger(count == 0 || num_tokens != nullptr, "num_tokens",
                                          "an array, not a null pointer", 0));
    if (count == 0) {
        return success(); // to the kernel, no numbers mean a release
    }
    return detail::launch(device_, detail::rollback_kernel<>, detail::ledger_grid(count),
                          detail::ledger_threads, 0, on, kernel_state(), requests, num_tokens, count);
}

template <class>
inline status drop_ledger<backend::cuda>::fork(const std::int32_t* requests, const std::int32_t* copies,
                                               std::int32_t count, stream on) noexcept {
    UNIPREFILL_TRY(check_slots(requests, count));
    UNIPREFILL_TRY(check_slots(copies, count));
    return detail::launch(device_, detail::fork_kernel<>, detail::ledger_grid(count), detail::ledger_threads,
                          0, on, kernel_state(), requests, copies, count);
}

template <class Index>
inline status drop_ledger<backend::cuda>::keep_only(const std::int32_t* request_ids, std::int32_t layer,
                                                    const batch_view& kept, Index* from_rows,
                                                    stream on) noexcept {
    static_assert(detail::is_index<Index>, "indices are int32 or int64");
    UNIPREFILL_TRY(check_slots(request_ids, kept.num_requests));
    UNIPREFILL_TRY(check_layer(layer));
    UNIPREFILL_TRY(check_rows(kept, true).at_layer(layer));
    detail::cuda_step what;
    what.request_ids = request_ids;
    what.num_requests = kept.num_requests;
    what.rows = kept;
    return detail::launch(device_, detail::keep_only_kernel<Index>, detail::ledger_grid(kept.num_requests),
                          detail::ledger_threads, 0, on, kernel_state(), what, layer, from_rows);
}

// Requests as flat buffers ----------------------------------------------------------------------------------

inline std::size_t drop_ledger<backend::cuda>::max_saved_bytes(const ledger_limits& bounds) noexcept {
    return drop_ledger<backend::host>::max_saved_bytes(bounds);
}

template <class>
inline status drop_ledger<backend::cuda>::save(const std::int32_t* requests, const std::int32_t* num_tokens,
                                               std::int32_t count, void* buffers, std::size_t stride,
                                               std::uint64_t* bytes, stream on) const noexcept {
    UNIPREFILL_TRY(check_slots(requests, count));
    UNIPREFILL_TRY(detail::check_saved(buffers, stride, count));
    const detail::cuda_save_task task{requests, num_tokens, count, static_cast<std::byte*>(buffers),
                                      stride,   bytes};
    return detail::launch(device_, detail::save_kernel<>, detail::ledger_grid(count), detail::ledger_threads,
                          0, on, kernel_state(), task);
}

template <class>
inline status drop_ledger<backend::cuda>::restore(const std::int32_t* requests, std::int32_t count,
                                                  const void* buffers, std::size_t stride,
                                                  const std::uint64_t* bytes, stream on) noexcept {
    UNIPREFILL_TRY(check_slots(requests, count));
    UNIPREFILL_TRY(detail::check_saved(buffers, stride, count));
    const detail::cuda_restore_task task{requests, nullptr, count, static_cast<const std::byte*>(buffers),
                                         stride,   bytes};
    return detail::launch(device_, detail::restore_kernel<>, detail::ledger_grid(count),
                          detail::ledger_threads, 0, on, kernel_state(), task);
}

// A step ----------------------------------------------------------------------------------------------------

inline detail::cuda_step drop_ledger<backend::cuda>::step_of(const ledger_step& step) const noexcept {
    detail::cuda_step made;
    made.request_ids = step.request_ids_;
    made.num_requests = step.num_requests_;
    made.ticket = step.ticket_;
    return made;
}

template <class Slots, class Index, class Slot>
inline status drop_ledger<backend::cuda>::begin_step(const batch_view& batch, const std::int32_t* request_ids,
                                                     ledger_step& step,
                                                     const step_wishes<Slots, Index, Slot>& wishes,
                                                     stream on) noexcept {
    UNIPREFILL_TRY(check_bound());
    if (step.open_) {
        return failure(status_code::wrong_state, "step", "a step that is closed", 1);
    }
    UNIPREFILL_TRY(check_rows(batch, false));
    UNIPREFILL_TRY(detail::require_ledger(batch.num_requests == 0 || batch.tags != nullptr, "batch.tags",
                                          "an array, not a null pointer", 0));
    UNIPREFILL_TRY(detail::require_ledger(batch.num_requests == 0 || request_ids != nullptr, "request_ids",
                                          "an array, not a null pointer", 0));
    UNIPREFILL_TRY(check_wishes(wishes, batch.num_requests));
    ledger_step opened;
    opened.request_ids_ = request_ids;
    opened.num_requests_ = batch.num_requests;
    opened.ticket_ = detail::ticket_of(request_ids);
    opened.open_ = true;
    detail::cuda_step what = step_of(opened);
    what.rows = batch;
    const std::int64_t blocks =
        std::int64_t{wishes.layers.count} * detail::stretches_of(wishes.out.num_rows) + 1;
    UNIPREFILL_TRY(detail::launch(device_, detail::begin_step_kernel<Slots, Index, Slot>,
                                  detail::ledger_grid(blocks), detail::ledger_threads,
                                  detail::ledger_shared_bytes(batch.num_requests, bounds_.max_requests), on,
                                  kernel_state(), what, wishes));
    step = opened;
    return success();
}

template <class Slots, class Index, class Slot>
inline status
drop_ledger<backend::cuda>::append(ledger_step& step, std::int32_t layer, const batch_view& entering,
                                   const step_wishes<Slots, Index, Slot>& wishes, stream on) noexcept {
    UNIPREFILL_TRY(check_step(step));
    UNIPREFILL_TRY(check_layer(layer));
    if (layer <= step.last_layer_) {
        return failure(status_code::wrong_state, "layer", "a layer above that of the last append", layer)
            .at_layer(layer);
    }
    UNIPREFILL_TRY(check_rows(entering, true).at_layer(layer));
    if (entering.num_requests != step.num_requests_) {
        return failure(status_code::invalid_argument, "entering.num_requests", "the requests of the step",
                       entering.num_requests)
            .at_layer(layer);
    }
    UNIPREFILL_TRY(check_wishes(wishes, step.num_requests_).at_layer(layer));
    detail::cuda_step what = step_of(step);
    what.rows = entering;
    const std::int32_t stagers = step.num_requests_ > 0 ? step.num_requests_ : 1;
    const std::int64_t blocks =
        std::int64_t{wishes.layers.count} * detail::stretches_of(wishes.out.num_rows) + stagers;
    UNIPREFILL_TRY(detail::launch(device_, detail::append_kernel<Slots, Index, Slot>,
                                  detail::ledger_grid(blocks), detail::ledger_threads,
                                  detail::ledger_shared_bytes(step.num_requests_, 0), on, kernel_state(),
                                  what, wishes, layer, stagers));
    step.last_layer_ = layer;
    return success();
}

template <class Slots, class Index, class Slot>
inline status drop_ledger<backend::cuda>::look_up(const ledger_step& step,
                                                  const step_wishes<Slots, Index, Slot>& wishes,
                                                  stream on) const noexcept {
    UNIPREFILL_TRY(check_step(step));
    UNIPREFILL_TRY(check_wishes(wishes, step.num_requests_));
    if (wishes.layers.count == 0) {
        return success();
    }
    return detail::launch(
        device_, detail::look_up_kernel<Slots, Index, Slot>,
        detail::ledger_grid(std::int64_t{wishes.layers.count} * detail::stretches_of(wishes.out.num_rows)),
        detail::ledger_threads, detail::ledger_shared_bytes(step.num_requests_, 0), on, kernel_state(),
        step_of(step), wishes);
}

template <class Index>
inline status drop_ledger<backend::cuda>::logits_rows(const ledger_step& step, std::int32_t layer,
                                                      const span_lists& wanted, std::int32_t max_spans,
                                                      Index* out, std::int32_t size, Index* offsets,
                                                      stream on) const noexcept {
    static_assert(detail::is_index<Index>, "indices are int32 or int64");
    UNIPREFILL_TRY(check_step(step));
    UNIPREFILL_TRY(check_layer(layer));
    UNIPREFILL_TRY(detail::require_ledger(size >= 0 && (size == 0 || out != nullptr), "out",
                                          "an array of size entries", size));
    UNIPREFILL_TRY(detail::require_ledger(wanted.offsets == nullptr || max_spans == 0 ||
                                              (max_spans > 0 && wanted.spans != nullptr),
                                          "wanted.spans", "an array of max_spans spans", max_spans));
    const detail::cuda_logits_task<Index> task{layer, wanted, max_spans, out, size, offsets};
    return detail::launch(device_, detail::logits_kernel<Index>, 1, detail::ledger_threads, 0, on,
                          kernel_state(), step_of(step), task);
}

template <class>
inline status drop_ledger<backend::cuda>::end_step(ledger_step& step, bool commits, stream on) noexcept {
    UNIPREFILL_TRY(check_step(step));
    UNIPREFILL_TRY(
        detail::launch(device_, detail::end_step_kernel<>,
                       detail::ledger_grid(num_blocks(step.num_requests_, detail::ledger_threads / 32)),
                       detail::ledger_threads, 0, on, kernel_state(), step_of(step), commits));
    step = ledger_step{};
    return success();
}
template <class>
inline status drop_ledger<backend::cuda>::commit_step(ledger_step& step, stream on) noexcept {
    return end_step(step, true, on);
}
template <class>
inline status drop_ledger<backend::cuda>::abort_step(ledger_step& step, stream on) noexcept {
    return end_step(step, false, on);
}

// Pages -----------------------------------------------------------------------------------------------------

template <class>
inline status drop_ledger<backend::cuda>::hand_back_pages(const std::int32_t* request_ids, std::int32_t count,
                                                          const layer_list& layers, const page_rule& rule,
                                                          const page_tables& tables, std::int32_t* pages,
                                                          std::int32_t capacity, std::int32_t* num_pages,
                                                          stream on) const noexcept {
    UNIPREFILL_TRY(check_slots(request_ids, count));
    UNIPREFILL_TRY(check_layers(layers));
    UNIPREFILL_TRY(rule.check());
    UNIPREFILL_TRY(detail::check_tables(tables));
    UNIPREFILL_TRY(detail::require_ledger(capacity >= 0 && (capacity == 0 || pages != nullptr), "pages",
                                          "an array of capacity pages", capacity));
    UNIPREFILL_TRY(
        detail::require_ledger(num_pages != nullptr, "num_pages", "an address, not a null pointer", 0));
    const detail::cuda_page_task task{request_ids, count, layers, rule, tables, pages, capacity, num_pages};
    return detail::launch(device_, detail::hand_back_kernel<>, 1, detail::ledger_threads, 0, on,
                          kernel_state(), task);
}

template <class Token>
inline status drop_ledger<backend::cuda>::sign_pages(const std::int32_t* requests, std::int32_t count,
                                                     const layer_list& layers, const page_signer& signer,
                                                     const request_texts<Token>& texts,
                                                     std::int32_t page_tokens, page_signature* signatures,
                                                     std::int32_t capacity, std::int32_t* num_pages,
                                                     stream on) const noexcept {
    static_assert(std::is_integral_v<Token> && sizeof(Token) >= 4, "tokens are int32, uint32 or int64");
    UNIPREFILL_TRY(check_slots(requests, count));
    UNIPREFILL_TRY(check_layers(layers));
    UNIPREFILL_TRY(detail::require_ledger(page_tokens >= 1, "page_tokens", ">= 1", page_tokens));
    UNIPREFILL_TRY(detail::require_ledger(texts.stride >= 0 && (texts.stride == 0 || texts.tokens != nullptr),
                                          "texts", "stride tokens for each request", texts.stride));
    UNIPREFILL_TRY(detail::require_ledger(capacity >= 0 && (capacity == 0 || signatures != nullptr),
                                          "signatures", "an array of capacity entries", capacity));
    const std::int64_t chains = std::int64_t{layers.count} * count;
    UNIPREFILL_TRY(detail::require_ledger(chains == 0 || num_pages != nullptr, "num_pages",
                                          "an array, not a null pointer", 0));
    const detail::cuda_signing_task<Token> task{requests,    count,      layers,   signer,   texts,
                                                page_tokens, signatures, capacity, num_pages};
    return detail::launch(device_, detail::sign_kernel<Token>,
                          detail::ledger_grid((chains + detail::signing_warps - 1) / detail::signing_warps),
                          detail::signing_warps * 32, 0, on, kernel_state(), task);
}

// Pipeline stages -------------------------------------------------------------------------------------------

template <class>
inline status drop_ledger<backend::cuda>::write_stage_rows(const batch_view& batch,
                                                           const std::int32_t* request_ids,
                                                           const batch_view& leaving, std::int32_t* words,
                                                           std::int64_t size, stream on) const noexcept {
    UNIPREFILL_TRY(check_bound());
    UNIPREFILL_TRY(detail::check_stage_rows(batch, request_ids, leaving, words, size, memory_space::device));
    const detail::stage_words what{batch.tags,        batch.cu_seqlens,   request_ids,    leaving.cu_seqlens,
                                   leaving.positions, batch.num_requests, batch.num_rows, leaving.num_rows};
    const std::int64_t blocks =
        (stage_rows_words(batch.num_requests, leaving.num_rows) + detail::ledger_threads - 1) /
        detail::ledger_threads;
    return detail::launch(device_, detail::write_stage_kernel<>, detail::ledger_grid(blocks),
                          detail::ledger_threads, 0, on, kernel_state(), what, words);
}

template <class>
inline status drop_ledger<backend::cuda>::read_stage_rows(std::int32_t* words, std::int64_t size,
                                                          std::int32_t num_requests, std::int32_t num_rows,
                                                          stage_rows& came, stream on) const noexcept {
    UNIPREFILL_TRY(check_bound());
    UNIPREFILL_TRY(
        detail::require_ledger(num_requests >= 0, "num_requests", "the requests of the step", num_requests));
    UNIPREFILL_TRY(detail::require_ledger(num_rows >= 0, "num_rows", ">= 0", num_rows));
    const std::int64_t room = size - stage_rows_words(num_requests, 0);
    UNIPREFILL_TRY(detail::require_ledger(words != nullptr && room >= 0, "size",
                                          "at least the words of so many requests", size));
    detail::stage_words what;
    what.num_requests = num_requests;
    what.num_rows = num_rows;
    what.num_leaving = room < num_rows ? static_cast<std::int32_t>(room) : num_rows;
    UNIPREFILL_TRY(
        detail::launch(device_, detail::check_stage_kernel<>, 1, 32, 0, on, kernel_state(), what, words));
    came = detail::view_stage_rows(words, num_requests, num_rows, what.num_leaving, memory_space::device);
    return success();
}

UNIPREFILL_END_NAMESPACE
