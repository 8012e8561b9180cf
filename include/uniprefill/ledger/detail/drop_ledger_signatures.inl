// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// A token, and which of sets 1 to @p last hold its position, 64 to a word.
template <class Token>
UNIPREFILL_API void absorb_position(sip_hash& hash, const request_record& state, std::int32_t last,
                                    std::int32_t position, Token token) noexcept {
    hash.absorb(static_cast<std::uint64_t>(token));
    for (std::int32_t first = 1; first <= last; first += 64) {
        std::uint64_t held = 0;
        for (std::int32_t set = first; set <= last && set < first + 64; ++set) {
            held |= std::uint64_t{state.holds(set, position)} << (set - first);
        }
        hash.absorb(held);
    }
}

} // namespace detail

template <class Token>
inline status drop_ledger<backend::host>::sign_pages(std::int32_t request, std::int32_t layer,
                                                     const page_signer& signer, const Token* tokens,
                                                     std::int32_t page_tokens, page_signature* signatures,
                                                     std::int32_t capacity,
                                                     std::int32_t& num_pages) const noexcept {
    static_assert(std::is_integral_v<Token> && sizeof(Token) >= 4, "tokens are int32, uint32 or int64");
    held_rows held;
    UNIPREFILL_TRY(rows_of(request, layer, held));
    const auto refuse = [&](status_code code, const char* argument, const char* expected, std::int64_t came) {
        return failure(code, argument, expected, came).at_request(request).at_layer(layer);
    };
    if (page_tokens < 1) {
        return refuse(status_code::invalid_argument, "page_tokens", ">= 1", page_tokens);
    }
    const std::int32_t pages = held.pages(page_tokens);
    if (pages > capacity) {
        return refuse(status_code::capacity_exceeded, "capacity", "room for every page", pages);
    }
    if (pages > 0 && (tokens == nullptr || signatures == nullptr)) {
        return refuse(status_code::invalid_argument, tokens == nullptr ? "tokens" : "signatures",
                      "an array, not a null pointer", 0);
    }
    // The rows of this layer follow from what the layers before it hold: sets 1 to `last`.
    std::int32_t last = 0;
    for (std::int32_t before = 0; before <= layer; ++before) {
        last = layer_sets()[before] > last ? layer_sets()[before] : last;
    }
    const detail::request_record state = record(request);
    detail::sip_hash hash(signer.key[0], signer.key[1]);
    hash.absorb(signer.policy);
    hash.absorb(static_cast<std::uint64_t>(layer) << 32 | static_cast<std::uint32_t>(page_tokens));
    std::int32_t position = 0;
    for (std::int32_t page = 0; page < pages; ++page) {
        const std::int32_t rows =
            (page + 1) * std::int64_t{page_tokens} < held.length() ? (page + 1) * page_tokens : held.length();
        const std::int32_t end = held.position_of(rows - 1) + 1;
        for (; position < end; ++position) {
            detail::absorb_position(hash, state, last, position, tokens[position]);
        }
        hash.finish(signatures[page].low, signatures[page].high);
    }
    num_pages = pages;
    return success();
}

UNIPREFILL_END_NAMESPACE
