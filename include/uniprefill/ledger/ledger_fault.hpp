// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What a ledger in device memory refused. The device can't return a status: it leaves a word that says what
/// the status of the host's ledger would be.
#pragma once

#include <uniprefill/core/status.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// Why something was refused. Of two complaints about one slot and layer, the first in this order stays.
enum class ledger_complaint : std::int32_t {
    none,
    stage_words,         ///< a buffer that no pipeline stage wrote, or one of other requests
    offsets,             ///< cu_seqlens that don't start at 0, fall, or don't end at num_rows
    tag,                 ///< no request_tag
    empty_place,         ///< rows for slot -1
    unknown_request,     ///< a slot that isn't admitted
    busy_request,        ///< in an open step, or listed twice
    second_prefill,      ///< a prefill of a request that has positions
    too_many_tokens,     ///< more positions than max_tokens
    gap,                 ///< positions that don't go on from the last one
    not_in_step,         ///< a request that isn't in the open step
    entering_count,      ///< fewer rows than must enter the layer
    entering_order,      ///< positions that don't ascend, or aren't of this step
    entering_dropped,    ///< rows that didn't enter the layer before
    layer,               ///< a list of layers that names one which isn't there
    wanted,              ///< offsets of spans that fall, or are beyond the spans
    too_few_entries,     ///< more rows enter a layer than step_arrays::num_rows
    too_few_chunks,      ///< and more chunks than step_arrays::num_chunks
    no_page,             ///< a row without a page
    slot_too_large,      ///< a slot that the index type can't hold
    whole_layer,         ///< a layer of set 0 gives up nothing
    kept_position,       ///< positions that don't ascend, or that the layer doesn't hold
    kept_by_next_set,    ///< the next nested set holds a position that isn't kept
    rollback,            ///< more positions than there are
    slot,                ///< a slot that the ledger doesn't have can't be filled
    taken,               ///< nor one that isn't free
    table_span,          ///< entries in use that a table doesn't have
    table_page,          ///< an entry in use that names no page
    too_many_pages,      ///< more pages than there is room for
    too_many_logits,     ///< more rows need logits than there is room for
    text,                ///< a text shorter than the request
    too_many_signatures, ///< more pages to sign than there is room for
    has_positions,       ///< a request that isn't empty can't be restored
    saved_room,          ///< less room than a saved request takes
    saved_bytes,         ///< fewer or more bytes than were saved
    saved_magic,         ///< no saved request, or one of another byte order
    saved_version,       ///< of another version
    saved_checksum,      ///< damaged
    saved_num_layers,    ///< of a ledger of other layers
    saved_num_sets,      ///< or other sets
    saved_relation,      ///< or another relation of these
    saved_num_tokens,    ///< more positions than max_tokens
    saved_dense_from,    ///< stored positions that the request doesn't have
    saved_length,        ///< other bytes than so many positions take
    saved_layer_sets,    ///< a layer of another set
    saved_planes,        ///< sets that don't exist, or positions behind the last one stored
    saved_below,         ///< lengths that the stored positions don't have
};

/// The first refusal, by slot and layer, of those since the word was cleared: 64 bits, the smallest of which
/// stays; requests that aren't in a step, as it was refused, come last. Slots beyond 65,534 and layers beyond
/// 510 are reported as these.
class ledger_fault {
  public:
    UNIPREFILL_HIDDEN static constexpr std::uint64_t no_fault = ~std::uint64_t{0};

    ledger_fault() noexcept = default;
    /// What the device left.
    explicit UNIPREFILL_API ledger_fault(std::uint64_t word) noexcept
        : word_(word) {}
    /// What a device leaves; slot and layer -1 where none is concerned.
    UNIPREFILL_API ledger_fault(ledger_complaint what, std::int32_t request, std::int32_t layer,
                                std::int64_t came) noexcept
        : word_(follows(what) << 63 | at_most(request, 65534) << 47 | at_most(layer, 510) << 38 |
                static_cast<std::uint64_t>(what) << 32 | static_cast<std::uint32_t>(came)) {}

    [[nodiscard]] UNIPREFILL_API std::uint64_t word() const noexcept { return word_; }
    [[nodiscard]] UNIPREFILL_API ledger_complaint what() const noexcept {
        return word_ == no_fault ? ledger_complaint::none
                                 : static_cast<ledger_complaint>(word_ >> 32 & 0x3fu);
    }
    [[nodiscard]] UNIPREFILL_API std::int32_t request() const noexcept {
        return below_one(word_ >> 47 & 0xffffu);
    }
    [[nodiscard]] UNIPREFILL_API std::int32_t layer() const noexcept {
        return below_one(word_ >> 38 & 0x1ffu);
    }
    [[nodiscard]] UNIPREFILL_API std::int32_t came() const noexcept {
        return static_cast<std::int32_t>(static_cast<std::uint32_t>(word_));
    }

    /// As the host's ledger says it. O(1), pure: safe on any thread, deterministic.
    [[nodiscard]] UNIPREFILL_HOST_API status to_status() const noexcept {
        return status_of(what(), request(), layer(), came());
    }
    /// The same of a refusal that was never a word, so that all of @p came is left. O(1), pure: safe on
    /// any thread, deterministic.
    [[nodiscard]] static UNIPREFILL_HOST_API status status_of(ledger_complaint what, std::int32_t request,
                                                              std::int32_t layer, double came) noexcept {
        const auto bad = [&](status_code code, const char* argument, const char* expected) {
            return failure(code, argument, expected, came).at_request(request).at_layer(layer);
        };
        constexpr auto invalid = status_code::invalid_argument;
        switch (what) {
        case ledger_complaint::none:
            return success();
        case ledger_complaint::offsets:
            return bad(invalid, "batch.cu_seqlens", "0 first, offsets that don't fall, num_rows last");
        case ledger_complaint::tag:
            return bad(invalid, "batch.tags", "prefill, chunk, decode or verify");
        case ledger_complaint::empty_place:
            return bad(invalid, "batch.cu_seqlens", "no rows in an empty place of the batch");
        case ledger_complaint::unknown_request:
            return bad(status_code::unknown_request, "request", "a request that is admitted");
        case ledger_complaint::busy_request:
            return bad(status_code::wrong_state, "request", "a request in no open step, listed once");
        case ledger_complaint::second_prefill:
            return bad(invalid, "batch.tags", "chunk, decode or verify for a request that has positions");
        case ledger_complaint::too_many_tokens:
            return bad(status_code::capacity_exceeded, "batch.cu_seqlens",
                       "rows within the request's max_tokens");
        case ledger_complaint::gap:
            return bad(invalid, "batch.positions",
                       "positions that go on from the request's last one, without overlap or gap");
        case ledger_complaint::not_in_step:
            return bad(status_code::wrong_state, "step", "requests that are in this open step");
        case ledger_complaint::entering_count:
            return bad(invalid, "entering.cu_seqlens", "every row that has to enter the layer");
        case ledger_complaint::entering_order:
            return bad(invalid, "entering.positions", "ascending positions of this step's rows");
        case ledger_complaint::entering_dropped:
            return bad(invalid, "entering.positions", "rows that entered the layer before");
        case ledger_complaint::layer:
            return bad(status_code::out_of_range, "layers", "layers of the ledger");
        case ledger_complaint::wanted:
            return bad(invalid, "wanted.offsets", "offsets from 0 that don't fall, up to max_spans");
        case ledger_complaint::too_few_entries:
            return bad(status_code::out_of_range, "step_arrays.num_rows",
                       "at least the rows that enter each layer");
        case ledger_complaint::too_few_chunks:
            return bad(status_code::out_of_range, "step_arrays.num_chunks",
                       "at least the chunks of the rows that enter each layer");
        case ledger_complaint::no_page:
            return bad(status_code::capacity_exceeded, "slots", "a page for each row of the request");
        case ledger_complaint::slot_too_large:
            return bad(status_code::out_of_range, "slots", "slots that fit the index type");
        case ledger_complaint::whole_layer:
            return bad(invalid, "layer", "a layer that doesn't hold everything (set 0)");
        case ledger_complaint::kept_position:
            return bad(invalid, "positions", "ascending positions that the layer holds");
        case ledger_complaint::kept_by_next_set:
            return bad(invalid, "positions", "every position that the next nested set holds");
        case ledger_complaint::rollback:
            return bad(status_code::out_of_range, "num_tokens", "0..the positions that the request has");
        case ledger_complaint::slot:
            return bad(status_code::out_of_range, "request", "0..max_requests - 1");
        case ledger_complaint::taken:
            return bad(status_code::wrong_state, "request", "a free slot");
        case ledger_complaint::table_span:
            return bad(invalid, "page_tables.in_use",
                       "entries below max_pages, the end not before the begin");
        case ledger_complaint::table_page:
            return bad(invalid, "page_tables.table", "a page in each entry in use");
        case ledger_complaint::too_many_pages:
            return bad(status_code::capacity_exceeded, "capacity", "room for every page handed back");
        case ledger_complaint::too_many_logits:
            return bad(status_code::out_of_range, "size", "at least the rows that need logits");
        case ledger_complaint::text:
            return bad(status_code::out_of_range, "texts.stride", "at least the positions of each request");
        case ledger_complaint::too_many_signatures:
            return bad(status_code::capacity_exceeded, "capacity", "room for every page");
        case ledger_complaint::stage_words:
            return bad(invalid, "words",
                       "what write_stage_rows() of this version wrote of the same requests");
        case ledger_complaint::has_positions:
            return bad(status_code::wrong_state, "request", "a request without positions");
        case ledger_complaint::saved_room:
            return bad(status_code::workspace_too_small, "bytes", "at least the bytes to be saved");
        case ledger_complaint::saved_bytes:
            return bad(invalid, "bytes", "the bytes that save() wrote");
        case ledger_complaint::saved_magic:
            return bad(invalid, "saved.magic", "a request saved on a machine of this byte order");
        case ledger_complaint::saved_version:
            return bad(status_code::not_supported, "saved.version", "saved_request_version");
        case ledger_complaint::saved_checksum:
            return bad(invalid, "saved.checksum", "that of the buffer as it was saved");
        case ledger_complaint::saved_num_layers:
            return bad(invalid, "saved.num_layers", "the layers of this ledger");
        case ledger_complaint::saved_num_sets:
            return bad(invalid, "saved.num_sets", "the sets of this ledger");
        case ledger_complaint::saved_relation:
            return bad(invalid, "saved.relation", "the relation of this ledger's sets");
        case ledger_complaint::saved_num_tokens:
            return bad(status_code::capacity_exceeded, "saved.num_tokens", "0..max_tokens");
        case ledger_complaint::saved_dense_from:
            return bad(invalid, "saved.dense_from", "0..saved.num_tokens");
        case ledger_complaint::saved_length:
            return bad(invalid, "saved.bytes", "the bytes of so many positions");
        case ledger_complaint::saved_layer_sets:
            return bad(invalid, "saved.layer_sets", "the set of each layer of this ledger");
        case ledger_complaint::saved_planes:
            return bad(invalid, "saved.planes", "sets of this ledger, and nothing behind dense_from");
        case ledger_complaint::saved_below:
            return bad(invalid, "saved.below", "the positions of each set that the planes hold");
        }
        return bad(invalid, "ledger_fault", "a word that a ledger wrote");
    }

  private:
    /// What comes of an earlier refusal doesn't hide it: 1 makes the word a large one.
    [[nodiscard]] static UNIPREFILL_API std::uint64_t follows(ledger_complaint what) noexcept {
        return what == ledger_complaint::not_in_step ? 1 : 0;
    }
    /// One more than the value, so that -1 has a code too.
    [[nodiscard]] static UNIPREFILL_API std::uint64_t at_most(std::int32_t value,
                                                              std::int32_t most) noexcept {
        const std::int32_t bounded = value < -1 ? -1 : value > most ? most : value;
        return static_cast<std::uint64_t>(std::int64_t{bounded} + 1);
    }
    [[nodiscard]] static UNIPREFILL_API std::int32_t below_one(std::uint64_t code) noexcept {
        return static_cast<std::int32_t>(code) - 1;
    }

    std::uint64_t word_ = no_fault;
};

UNIPREFILL_END_NAMESPACE
