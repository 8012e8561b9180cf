// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Where the parts of a ledger lie in the caller's memory.
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/ledger/detail/position_sets.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Positions of a request: all of them, and the first of the dense tail. From dense_from on every set holds
/// every position and nothing is stored, so decode and prompts that keep everything cost O(1).
struct request_extent {
    std::int32_t num_tokens;
    std::int32_t dense_from;
};

/// `staged` is what an open step has made of `committed`; they are equal when none is open.
struct request_header {
    std::int32_t admitted;
    std::int32_t open; ///< an open step lists this request: 1, on CUDA the step's ticket
    request_tag tag;   ///< of its rows; prefill (0) when none is open
    std::int32_t reserved;
    request_extent committed;
    request_extent staged;

    /// Whether the open step's rows may be dropped.
    [[nodiscard]] UNIPREFILL_API bool droppable() const noexcept {
        return tag == request_tag::prefill || tag == request_tag::chunk;
    }
    /// The open step has come to its end.
    UNIPREFILL_API void close() noexcept {
        open = 0;
        tag = request_tag::prefill;
    }
};

/// The state of one request. `below[set]` counts the positions of the set before dense_from.
struct request_record {
    request_header* header = nullptr;
    std::int32_t* committed_below = nullptr; // [num_sets]
    std::int32_t* staged_below = nullptr;    // [num_sets]
    position_sets sets{};

    [[nodiscard]] UNIPREFILL_API std::int32_t length_before(std::int32_t set) const noexcept {
        return committed_below[set] + header->committed.num_tokens - header->committed.dense_from;
    }
    [[nodiscard]] UNIPREFILL_API std::int32_t length(std::int32_t set) const noexcept {
        return staged_below[set] + header->staged.num_tokens - header->staged.dense_from;
    }
    /// Whether no position is missing from row @p row of @p set on, rows of an open step included.
    [[nodiscard]] UNIPREFILL_API bool is_dense_from(std::int32_t set, std::int32_t row) const noexcept {
        return set == 0 || row >= staged_below[set];
    }
    [[nodiscard]] UNIPREFILL_API bool holds(std::int32_t set, std::int32_t position) const noexcept {
        return set == 0 || position >= header->staged.dense_from || sets.holds(set, position);
    }
    /// Positions that @p set holds before @p position, which is one of the request's or their end; rows of an
    /// open step count.
    [[nodiscard]] UNIPREFILL_API std::int32_t rows_below(std::int32_t set,
                                                         std::int32_t position) const noexcept {
        const request_extent& now = header->staged;
        return set == 0                     ? position
               : position >= now.dense_from ? staged_below[set] + position - now.dense_from
                                            : sets.rank(set, position);
    }
    UNIPREFILL_API void copy_below(std::int32_t* to, const std::int32_t* from) const noexcept {
        for (std::int32_t set = 0; set < sets.num_sets; ++set) {
            to[set] = from[set];
        }
    }
};

/// Whether @p set takes its rows from @p changed when an append brings those.
[[nodiscard]] inline UNIPREFILL_API bool set_follows(const std::int32_t* layer_sets,
                                                     const std::int32_t* first_layers, std::int32_t set,
                                                     std::int32_t changed) noexcept {
    while (set > changed) {
        const std::int32_t first = first_layers[set];
        set = first == 0 ? 0 : layer_sets[first - 1];
    }
    return set == changed;
}

/// The first layer of a set, num_layers where it has none.
[[nodiscard]] inline UNIPREFILL_API std::int32_t
first_layer_of(const std::int32_t* layer_sets, std::int32_t num_layers, std::int32_t set) noexcept {
    std::int32_t layer = 0;
    while (layer < num_layers && layer_sets[layer] != set) {
        ++layer;
    }
    return layer;
}

/// Whether a ledger's map from layers to sets is one.
[[nodiscard]] inline UNIPREFILL_HOST_API status check_layer_sets(const ledger_limits& bounds,
                                                                 const std::int32_t* layer_sets) noexcept {
    if (layer_sets == nullptr) {
        return failure(status_code::invalid_argument, "layer_sets", "an array, not a null pointer", 0);
    }
    std::int32_t used = 0; // the highest set so far
    for (std::int32_t layer = 0; layer < bounds.num_layers; ++layer) {
        const std::int32_t set = layer_sets[layer];
        if (set < 0 || set > used + 1 || set >= bounds.num_sets) {
            return failure(status_code::invalid_argument, "layer_sets",
                           "sets below num_sets, numbered from 1 in order of first use", set)
                .at_layer(layer);
        }
        if (bounds.relation == set_relation::nested && set < used) {
            return failure(status_code::invalid_argument, "layer_sets", "sets that never fall, when nested",
                           set)
                .at_layer(layer);
        }
        used = set > used ? set : used;
    }
    return used == bounds.num_sets - 1 ? success()
                                       : failure(status_code::invalid_argument, "layer_sets",
                                                 "num_sets - 1 as the highest set", used);
}

/// Sizes and offsets, all from the limits: the layer maps, then lengths of all requests, then their sets.
/// Lengths lie together because a decode step reads nothing else.
class ledger_layout {
  public:
    /// Parts start at multiples of this many bytes, so that requests don't share cache lines.
    static constexpr std::uint64_t part_alignment = 64;

    ledger_layout() noexcept = default;
    UNIPREFILL_API explicit ledger_layout(const ledger_limits& l) noexcept
        : num_sets_(l.num_sets)
        , num_layers_(l.num_layers)
        , num_planes_(count_planes(l.num_sets, l.relation))
        , relation_(l.relation)
        , num_words_(end_word(l.max_tokens))
        , num_counts_((std::int64_t{l.max_tokens} + rank_positions - 1) / rank_positions) {
        const std::uint64_t sets = size(num_sets_);
        map_bytes_ = round_up((size(num_layers_) + sets) * sizeof(std::int32_t));
        length_bytes_ = round_up(sizeof(request_header) + 2 * sets * sizeof(std::int32_t));
        counts_at_ = size(num_planes_) * size(num_words_) * sizeof(std::uint64_t);
        set_bytes_ = round_up(counts_at_ + (sets - 1) * size(num_counts_) * sizeof(std::uint32_t));
        sets_at_ = map_bytes_ + size(l.max_requests) * length_bytes_;
    }

    /// Bytes of the whole state; the largest size_t where they can't be addressed.
    [[nodiscard]] UNIPREFILL_API std::size_t bytes(std::int32_t max_requests) const noexcept {
        const std::uint64_t most = static_cast<std::size_t>(-1);
        const std::uint64_t requests = size(max_requests);
        const std::uint64_t request_bytes = length_bytes_ + set_bytes_;
        if (map_bytes_ > most || request_bytes > (most - map_bytes_) / requests) {
            return static_cast<std::size_t>(-1);
        }
        return static_cast<std::size_t>(map_bytes_ + requests * request_bytes);
    }

    /// The set of each layer.
    [[nodiscard]] UNIPREFILL_API std::int32_t* layer_sets(std::byte* memory) const noexcept {
        return reinterpret_cast<std::int32_t*>(memory); // [num_layers]
    }
    /// The first layer of each set; num_layers for a set 0 that no layer uses.
    [[nodiscard]] UNIPREFILL_API std::int32_t* first_layers(std::byte* memory) const noexcept {
        return layer_sets(memory) + num_layers_; // [num_sets]
    }
    [[nodiscard]] UNIPREFILL_API request_record record(std::byte* memory,
                                                       std::int32_t request) const noexcept {
        std::byte* const lengths = memory + map_bytes_ + size(request) * length_bytes_;
        std::byte* const sets = memory + sets_at_ + size(request) * set_bytes_;
        request_record made;
        made.header = reinterpret_cast<request_header*>(lengths);
        made.committed_below = reinterpret_cast<std::int32_t*>(lengths + sizeof(request_header));
        made.staged_below = made.committed_below + num_sets_;
        made.sets.planes = reinterpret_cast<std::uint64_t*>(sets);
        made.sets.counts = reinterpret_cast<std::uint32_t*>(sets + counts_at_);
        made.sets.num_words = num_words_;
        made.sets.num_counts = num_counts_;
        made.sets.num_planes = num_planes_;
        made.sets.num_sets = num_sets_;
        made.sets.relation = relation_;
        return made;
    }

  private:
    [[nodiscard]] static UNIPREFILL_API std::uint64_t size(std::int64_t value) noexcept {
        return static_cast<std::uint64_t>(value);
    }
    [[nodiscard]] static UNIPREFILL_API std::uint64_t round_up(std::uint64_t value) noexcept {
        return (value + part_alignment - 1) / part_alignment * part_alignment;
    }

    std::int32_t num_sets_ = 1;
    std::int32_t num_layers_ = 1;
    std::int32_t num_planes_ = 0;
    set_relation relation_ = set_relation::nested;
    std::int64_t num_words_ = 0;
    std::int64_t num_counts_ = 0;
    std::uint64_t map_bytes_ = 0;
    std::uint64_t length_bytes_ = 0; // of one request
    std::uint64_t set_bytes_ = 0;    // of one request
    std::uint64_t counts_at_ = 0;    // inside a request's sets
    std::uint64_t sets_at_ = 0;      // of the first request
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
