// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// A saved request word by word, as one thread or several write and judge it.
#pragma once

#include <uniprefill/ledger/detail/ledger_layout.hpp>
#include <uniprefill/ledger/detail/saved_layout.hpp>
#include <uniprefill/ledger/ledger_fault.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// The header's words.
inline constexpr std::uint64_t header_words = sizeof(saved_header) / sizeof(std::uint64_t);
static_assert(sizeof(saved_header) % sizeof(std::uint64_t) == 0);

/// A word of a buffer, which is aligned in device memory.
[[nodiscard]] inline UNIPREFILL_API std::uint64_t load_word(const std::byte* buffer,
                                                            std::uint64_t index) noexcept {
#if defined(__CUDA_ARCH__)
    return reinterpret_cast<const std::uint64_t*>(buffer)[index];
#else
    std::uint64_t word = 0;
    std::memcpy(&word, buffer + index * sizeof word, sizeof word);
    return word;
#endif
}
inline UNIPREFILL_API void store_word(std::byte* buffer, std::uint64_t index, std::uint64_t word) noexcept {
#if defined(__CUDA_ARCH__)
    reinterpret_cast<std::uint64_t*>(buffer)[index] = word;
#else
    std::memcpy(buffer + index * sizeof word, &word, sizeof word);
#endif
}

/// The header's part of the checksum.
[[nodiscard]] inline UNIPREFILL_API std::uint64_t header_checksum(saved_header header) noexcept {
    header.checksum = 0;
    std::uint64_t words[header_words];
    std::memcpy(words, &header, sizeof header);
    std::uint64_t sum = 0;
    for (std::uint64_t i = 0; i < header_words; ++i) {
        sum += checksum_part(words[i], i);
    }
    return sum;
}

/// Writes the first positions of a request that is in no open step.
class request_writer {
  public:
    /// @param num_tokens positions to write, no more than the request has
    UNIPREFILL_API request_writer(const ledger_limits& bounds, const std::int32_t* layer_sets,
                                  const request_record& state, std::int32_t num_tokens) noexcept
        : state_(state)
        , layer_sets_(layer_sets) {
        const std::int32_t stored = state.header->committed.dense_from;
        header_.num_tokens = num_tokens;
        header_.dense_from = stored < num_tokens ? stored : num_tokens;
        header_.num_layers = bounds.num_layers;
        header_.num_sets = bounds.num_sets;
        header_.relation = static_cast<std::int32_t>(bounds.relation);
        layout_ = saved_layout::of(bounds.num_layers, bounds.num_sets, bounds.relation, header_.dense_from);
        header_.bytes = layout_.bytes;
    }

    [[nodiscard]] UNIPREFILL_API std::uint64_t bytes() const noexcept { return layout_.bytes; }

    /// Writes a thread's share of what follows the header. @return its part of the checksum
    [[nodiscard]] UNIPREFILL_API std::uint64_t write_body(std::byte* out, thread_share mine) const noexcept {
        std::uint64_t sum = 0;
        const auto put = [&](std::uint64_t index, std::uint64_t word) {
            store_word(out, index, word);
            sum += checksum_part(word, index);
        };
        const std::uint64_t planes = layout_.planes / sizeof(std::uint64_t);
        for (std::int64_t pair = mine.thread; header_words + static_cast<std::uint64_t>(pair) < planes;
             pair += mine.step) {
            const std::int32_t numbers[2] = {number(2 * pair), number(2 * pair + 1)};
            std::uint64_t word = 0;
            std::memcpy(&word, numbers, sizeof word);
            put(header_words + static_cast<std::uint64_t>(pair), word);
        }
        const std::int64_t words = end_word(header_.dense_from);
        for (std::int32_t p = 0; p < state_.sets.num_planes; ++p) {
            for (std::int64_t w = mine.thread; w < words; w += mine.step) {
                put(planes + static_cast<std::uint64_t>(p * words + w),
                    state_.sets.plane(p, w) & range_mask(w, 0, header_.dense_from));
            }
        }
        return sum;
    }
    /// Writes the header. @param body the checksum of what follows it
    UNIPREFILL_API void write_header(std::byte* out, std::uint64_t body) const noexcept {
        saved_header header = header_;
        header.checksum = header_checksum(header) + body;
        std::uint64_t words[header_words];
        std::memcpy(words, &header, sizeof header);
        for (std::uint64_t i = 0; i < header_words; ++i) {
            store_word(out, i, words[i]);
        }
    }

  private:
    /// The set of each layer, then the positions of each set before dense_from, then padding.
    [[nodiscard]] UNIPREFILL_API std::int32_t number(std::int64_t index) const noexcept {
        if (index < header_.num_layers) {
            return layer_sets_[index];
        }
        const std::int64_t set = index - header_.num_layers;
        return set < header_.num_sets ? state_.rows_below(static_cast<std::int32_t>(set), header_.dense_from)
                                      : 0;
    }

    request_record state_;
    const std::int32_t* layer_sets_;
    saved_header header_{};
    saved_layout layout_{};
};

/// Why a buffer is no request of this ledger.
struct saved_flaw {
    ledger_complaint what = ledger_complaint::none;
    std::int64_t came = 0;
    std::int32_t layer = -1;

    [[nodiscard]] UNIPREFILL_API bool any() const noexcept { return what != ledger_complaint::none; }
};

/// Judges a buffer, in the order of its functions, and takes it over.
class request_reader {
  public:
    /// @param header what the buffer begins with
    /// @param bytes  of the buffer
    UNIPREFILL_API request_reader(const ledger_limits& bounds, const std::int32_t* layer_sets,
                                  const saved_header& header, const std::byte* in,
                                  std::uint64_t bytes) noexcept
        : bounds_(bounds)
        , layer_sets_(layer_sets)
        , in_(in)
        , bytes_(bytes)
        , header_(header)
        , layout_(saved_layout::of(bounds.num_layers, bounds.num_sets, bounds.relation,
                                   header.dense_from < 0 ? 0 : header.dense_from)) {}

    [[nodiscard]] UNIPREFILL_API const saved_header& header() const noexcept { return header_; }

    /// Whether it is a buffer of this format, which is what the checksum is about.
    [[nodiscard]] UNIPREFILL_API saved_flaw judge_format() const noexcept {
        if (header_.magic != saved_header::magic_number) {
            return {ledger_complaint::saved_magic, static_cast<std::int64_t>(header_.magic)};
        }
        if (header_.version != saved_request_version) {
            return {ledger_complaint::saved_version, header_.version};
        }
        return header_.bytes == bytes_ && bytes_ % sizeof(std::uint64_t) == 0
                   ? saved_flaw{}
                   : saved_flaw{ledger_complaint::saved_bytes, static_cast<std::int64_t>(bytes_)};
    }
    /// A thread's part of the checksum of what follows the header.
    [[nodiscard]] UNIPREFILL_API std::uint64_t body_checksum(thread_share mine) const noexcept {
        std::uint64_t sum = 0;
        for (std::uint64_t i = header_words + static_cast<std::uint64_t>(mine.thread);
             i < bytes_ / sizeof(std::uint64_t); i += static_cast<std::uint64_t>(mine.step)) {
            sum += checksum_part(load_word(in_, i), i);
        }
        return sum;
    }
    /// Whether it is undamaged, and of such a ledger as this. It may be forged still.
    [[nodiscard]] UNIPREFILL_API saved_flaw judge_header(std::uint64_t body) const noexcept {
        if (header_checksum(header_) + body != header_.checksum) {
            return {ledger_complaint::saved_checksum, static_cast<std::int64_t>(header_.checksum)};
        }
        if (header_.num_layers != bounds_.num_layers) {
            return {ledger_complaint::saved_num_layers, header_.num_layers};
        }
        if (header_.num_sets != bounds_.num_sets) {
            return {ledger_complaint::saved_num_sets, header_.num_sets};
        }
        if (header_.relation != static_cast<std::int32_t>(bounds_.relation)) {
            return {ledger_complaint::saved_relation, header_.relation};
        }
        if (header_.num_tokens < 0 || header_.num_tokens > bounds_.max_tokens) {
            return {ledger_complaint::saved_num_tokens, header_.num_tokens};
        }
        if (header_.dense_from < 0 || header_.dense_from > header_.num_tokens) {
            return {ledger_complaint::saved_dense_from, header_.dense_from};
        }
        return layout_.bytes == bytes_
                   ? saved_flaw{}
                   : saved_flaw{ledger_complaint::saved_length, static_cast<std::int64_t>(bytes_)};
    }
    /// Whether a layer has the set that it has here.
    [[nodiscard]] UNIPREFILL_API saved_flaw judge_layer(std::int32_t layer) const noexcept {
        const std::int32_t set = number_at(layer);
        return set == layer_sets_[layer] ? saved_flaw{}
                                         : saved_flaw{ledger_complaint::saved_layer_sets, set, layer};
    }
    /// A thread's share of the planes, to the sets of an empty request. position_sets::well_formed() judges
    /// them there, and give_back() undoes it.
    UNIPREFILL_API void take_planes(const position_sets& to, thread_share mine) const noexcept {
        const std::int64_t words = end_word(header_.dense_from);
        for (std::int32_t p = 0; p < to.num_planes; ++p) {
            for (std::int64_t w = mine.thread; w < words; w += mine.step) {
                to.plane(p, w) = load_word(in_, layout_.planes / sizeof(std::uint64_t) +
                                                    static_cast<std::uint64_t>(p * words + w));
            }
        }
    }
    UNIPREFILL_API void give_back(const position_sets& from, thread_share mine) const noexcept {
        from.clear(0, end_word(header_.dense_from) * word_positions, mine);
    }
    /// Whether the planes hold as many positions of a set as the buffer says.
    [[nodiscard]] UNIPREFILL_API bool agrees(std::int32_t set, std::int32_t counted) const noexcept {
        return number_at(std::int64_t{header_.num_layers} + set) == counted;
    }

  private:
    /// Of the numbers that follow the header.
    [[nodiscard]] UNIPREFILL_API std::int32_t number_at(std::int64_t index) const noexcept {
        const std::uint64_t word = load_word(in_, header_words + static_cast<std::uint64_t>(index / 2));
        std::int32_t numbers[2];
        std::memcpy(numbers, &word, sizeof word);
        return numbers[index % 2];
    }

    const ledger_limits& bounds_;
    const std::int32_t* layer_sets_;
    const std::byte* in_;
    std::uint64_t bytes_;
    saved_header header_;
    saved_layout layout_;
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
