// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What a page's keys and values follow from, in 128 bits: how requests find pages that others have written.
///
/// The rows of a page of a layer follow from the text up to the page's last position, from what each layer
/// before held of that text, and from the model and its rules. drop_ledger::sign_pages() signs just that, so
/// * pages of layers before the first one that drops rows follow from the text alone;
/// * in later layers pages are the same only where the stored sets are;
/// * what comes after the page's last position, in the text or in decisions, doesn't matter.
/// Block lists (block_lister) break the first and the last: which keys a row reads hangs on the end of its
/// span. A cache of rows that were made with them takes a page over only with all text up to the end of the
/// page's span: it keeps pages under sign_text() of that, too. Lists by query block that find no room
/// (block_list_report::unfitting) read everything because of what else was in the step: rows that were made
/// in such a step follow from more than their text, and a cache takes none of their later layers' pages.
///
/// A prefix cache keeps, for a text that ends where decisions are final (a span's edge, where no later token
/// has a say in them), its signature by sign_text(), what drop_ledger::save_prefix() wrote, and the pages of
/// each layer by their signatures. A request that begins with that text is admitted, gets the saved state by
/// restore(), signs its pages from its own tokens, and takes those that it finds. Where one is missing, it
/// rolls back to an earlier edge. No page is taken over on a guess about decisions. Its first step asks for
/// copies of partly filled pages (step_arrays::partial_pages), so that shared pages are never written.
///
/// SipHash-2-4 with 128 bits (Aumasson, Bernstein: SipHash: a fast short-input PRF, 2012): without the key
/// nobody can make two texts with one signature. Pure functions: safe on any thread, deterministic, the same
/// on every machine.
#pragma once

#include <uniprefill/ledger/detail/sip_hash.hpp>

#include <cstdint>
#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

/// 128 bits that two different pages, or texts, don't have in common.
struct page_signature {
    std::uint64_t low = 0;
    std::uint64_t high = 0;

    friend UNIPREFILL_API bool operator==(const page_signature& a, const page_signature& b) noexcept {
        return a.low == b.low && a.high == b.high;
    }
    friend UNIPREFILL_API bool operator!=(const page_signature& a, const page_signature& b) noexcept {
        return !(a == b);
    }
};

/// What goes into every signature of a cache.
struct page_signer {
    std::uint64_t key[2] = {0, 0}; ///< a secret of all that share the cache; random
    /// A number for everything else that keys, values and decisions follow from: the model and its adapter,
    /// selection rules, spans, element types.
    std::uint64_t policy = 0;
};

/// The signature of a text: where to look for what others have made of it. O(count).
/// @param tokens [count] int32, uint32 or int64
template <class Token>
[[nodiscard]] UNIPREFILL_API page_signature sign_text(const page_signer& signer, const Token* tokens,
                                                      std::int32_t count) noexcept {
    static_assert(std::is_integral_v<Token> && sizeof(Token) >= 4, "tokens are int32, uint32 or int64");
    detail::sip_hash hash(signer.key[0], signer.key[1]);
    hash.absorb(signer.policy);
    for (std::int32_t i = 0; i < count; ++i) {
        hash.absorb(static_cast<std::uint64_t>(tokens[i]));
    }
    page_signature made;
    hash.finish(made.low, made.high);
    return made;
}

UNIPREFILL_END_NAMESPACE
