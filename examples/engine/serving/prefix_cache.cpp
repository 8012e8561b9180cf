// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/serving/prefix_cache.hpp"

#include <algorithm>
#include <random>
#include <utility>

namespace engine {

using uniprefill::throw_if_failed;

prefix_cache::prefix_cache(cpu_session& session, paged_kv_store& pages, std::int32_t spare_slot)
    : session_(session)
    , pages_(pages)
    , spare_slot_(spare_slot)
    , references_(static_cast<std::size_t>(pages.pool().size()), 0) {
    // Model and policy are the session's, so a signature need only tell texts and stored sets apart.
    std::random_device secret;
    for (std::uint64_t& half : signer_.key) {
        half = std::uint64_t{secret()} << 32 | secret();
    }
}

prefix_cache::beginning* prefix_cache::find(const std::vector<std::int32_t>& tokens, std::int32_t edge) {
    const auto at = kept_.find(uniprefill::sign_text(signer_, tokens.data(), edge));
    return at == kept_.end() ? nullptr : &at->second;
}

void prefix_cache::touch(const std::vector<std::int32_t>& tokens, const std::vector<std::int32_t>& edges,
                         std::int32_t edge) {
    ++uses_;
    for (const std::int32_t before : edges) {
        if (before > edge) break;
        if (beginning* const kept = find(tokens, before)) kept->last_use = uses_;
    }
}

std::vector<uniprefill::page_signature> prefix_cache::sign(std::int32_t slot, std::int32_t layer,
                                                           const std::vector<std::int32_t>& tokens) const {
    uniprefill::held_rows held;
    throw_if_failed(session_.drops().rows_of(slot, layer, held));
    std::vector<uniprefill::page_signature> signatures(
        static_cast<std::size_t>(held.pages(pages_.page_tokens())));
    std::int32_t count = 0;
    throw_if_failed(session_.drops().sign_pages(slot, layer, signer_, tokens.data(), pages_.page_tokens(),
                                                signatures.data(),
                                                static_cast<std::int32_t>(signatures.size()), count));
    return signatures;
}

std::int32_t prefix_cache::look_up(std::int32_t slot, const std::vector<std::int32_t>& tokens,
                                   const std::vector<std::int32_t>& edges) {
    for (std::size_t i = edges.size() - 1; i-- > 0;) {
        const beginning* const kept = find(tokens, edges[i]);
        if (kept == nullptr) continue;
        throw_if_failed(session_.drops().restore(slot, kept->ledger.data(), kept->ledger.size()));
        if (may_take(slot, tokens, *kept)) {
            for (std::size_t layer = 0; layer < kept->layers.size(); ++layer) {
                pages_.adopt(static_cast<std::int32_t>(layer), slot, kept->layers[layer].pages);
            }
            touch(tokens, edges, edges[i]);
            return edges[i];
        }
        ++refusals_;
        throw_if_failed(session_.drops().rollback(slot, 0));
    }
    return 0;
}

bool prefix_cache::may_take(std::int32_t slot, const std::vector<std::int32_t>& tokens,
                            const beginning& kept) {
    for (std::size_t layer = 0; layer < kept.layers.size(); ++layer) {
        if (sign(slot, static_cast<std::int32_t>(layer), tokens) != kept.layers[layer].signatures)
            return false;
    }
    return true;
}

void prefix_cache::keep(std::int32_t slot, const std::vector<std::int32_t>& tokens,
                        const std::vector<std::int32_t>& edges, std::int32_t from, std::int32_t computed) {
    for (std::size_t i = 0; i + 1 < edges.size(); ++i) {
        if (edges[i] <= from || edges[i] > computed) continue;
        if (find(tokens, edges[i]) == nullptr) {
            kept_.emplace(uniprefill::sign_text(signer_, tokens.data(), edges[i]),
                          take(slot, tokens, edges[i]));
        }
        touch(tokens, edges, edges[i]);
    }
}

prefix_cache::beginning prefix_cache::take(std::int32_t slot, const std::vector<std::int32_t>& tokens,
                                           std::int32_t edge) {
    auto& ledger = session_.drops();
    beginning made;
    made.tokens = edge;
    std::size_t bytes = 0;
    throw_if_failed(ledger.saved_prefix_bytes(slot, edge, bytes));
    made.ledger.resize(bytes);
    throw_if_failed(ledger.save_prefix(slot, edge, made.ledger.data(), bytes));
    // Signed as the requests that may take it will sign it: from the saved state alone.
    throw_if_failed(ledger.admit(spare_slot_));
    throw_if_failed(ledger.restore(spare_slot_, made.ledger.data(), bytes));
    for (std::int32_t layer = 0; layer < ledger.bounds().num_layers; ++layer) {
        kept_layer into;
        into.signatures = sign(spare_slot_, layer, tokens);
        into.pages = pages_.pages_of(layer, slot);
        into.pages.resize(into.signatures.size()); // rows beyond the edge come behind
        for (const std::int32_t page : into.pages) {
            pages_.pool().share(page);
            ++references_[static_cast<std::size_t>(page)];
        }
        made.layers.push_back(std::move(into));
    }
    throw_if_failed(ledger.release(spare_slot_));
    return made;
}

std::int32_t prefix_cache::reclaimable() const {
    std::int32_t pages = 0;
    for (std::int32_t page = 0; page < pages_.pool().size(); ++page) {
        const std::int32_t ours = references_[static_cast<std::size_t>(page)];
        if (ours > 0 && ours == pages_.pool().references(page)) ++pages;
    }
    return pages;
}

void prefix_cache::evict(std::int32_t pages) {
    // Of beginnings used at the same time, a longer one goes before the shorter one that it goes on from.
    const auto goes_first = [](const beginnings::value_type& a, const beginnings::value_type& b) {
        return a.second.last_use != b.second.last_use ? a.second.last_use < b.second.last_use
                                                      : a.second.tokens > b.second.tokens;
    };
    while (pages_.pool().num_free() < pages && !kept_.empty()) {
        forget(std::min_element(kept_.begin(), kept_.end(), goes_first));
        ++evictions_;
    }
}

void prefix_cache::forget(beginnings::iterator at) {
    for (const kept_layer& layer : at->second.layers) {
        for (const std::int32_t page : layer.pages) {
            pages_.pool().give_back(page);
            --references_[static_cast<std::size_t>(page)];
        }
    }
    kept_.erase(at);
}

} // namespace engine
