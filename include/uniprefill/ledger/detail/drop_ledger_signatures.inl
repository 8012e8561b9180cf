// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/ledger/detail/page_chain.hpp>

UNIPREFILL_BEGIN_NAMESPACE

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
    detail::sign_chain(record(request), layer_sets(), layer, signer, tokens, page_tokens, pages, signatures);
    num_pages = pages;
    return success();
}

UNIPREFILL_END_NAMESPACE
