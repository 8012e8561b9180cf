// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The signatures of a layer's pages, each of which goes on from the one before it.
#pragma once

#include <uniprefill/ledger/held_rows.hpp>
#include <uniprefill/ledger/page_signature.hpp>

#include <cstdint>

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

/// Writes the signatures of @p pages pages, which are those that the layer holds of the request.
/// @param layer_sets the set of each layer
template <class Token>
UNIPREFILL_API void sign_chain(const request_record& state, const std::int32_t* layer_sets,
                               std::int32_t layer, const page_signer& signer, const Token* tokens,
                               std::int32_t page_tokens, std::int32_t pages,
                               page_signature* signatures) noexcept {
    static_assert(std::is_integral_v<Token> && sizeof(Token) >= 4, "tokens are int32, uint32 or int64");
    // The rows of this layer follow from what the layers before it hold: sets 1 to `last`.
    std::int32_t last = 0;
    for (std::int32_t before = 0; before <= layer; ++before) {
        last = layer_sets[before] > last ? layer_sets[before] : last;
    }
    const held_rows held = held_rows_maker::make(state, layer_sets[layer]);
    sip_hash hash(signer.key[0], signer.key[1]);
    hash.absorb(signer.policy);
    hash.absorb(static_cast<std::uint64_t>(layer) << 32 | static_cast<std::uint32_t>(page_tokens));
    std::int32_t position = 0;
    for (std::int32_t page = 0; page < pages; ++page) {
        const std::int32_t rows =
            (page + 1) * std::int64_t{page_tokens} < held.length() ? (page + 1) * page_tokens : held.length();
        const std::int32_t end = held.position_of(rows - 1) + 1;
        for (; position < end; ++position) {
            absorb_position(hash, state, last, position, tokens[position]);
        }
        hash.finish(signatures[page].low, signatures[page].high);
    }
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
