// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/model/paged_kv_store.hpp"
#include "engine/model/session.hpp"

#include <uniprefill/ledger/page_signature.hpp>

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace engine {

/// Beginnings of prompts that requests have computed, kept for others: for a text that ends at a span's edge,
/// what the ledger knows of it and the pages of every layer.
///
/// Decisions are final at a span's edge if another span follows, so a beginning serves every prompt that
/// begins with the same text and has an edge there too. A request takes one over only if the pages, signed
/// from its own tokens, have the signatures that they had when they were kept.
class prefix_cache {
  public:
    /// @param spare_slot  of the session, that no request has
    prefix_cache(cpu_session& session, paged_kv_store& pages, std::int32_t spare_slot);

    /// Gives an admitted request without positions the longest beginning that it may take.
    /// @param edges  ends of the prompt's spans; the last one is the prompt's and doesn't count
    /// @return positions that the request has now
    std::int32_t look_up(std::int32_t slot, const std::vector<std::int32_t>& tokens,
                         const std::vector<std::int32_t>& edges);
    /// Keeps the beginnings up to those edges that the request has passed in its last step.
    /// @param from  positions that it had before the step
    void keep(std::int32_t slot, const std::vector<std::int32_t>& tokens,
              const std::vector<std::int32_t>& edges, std::int32_t from, std::int32_t computed);

    /// Pages that would be free if the cache were empty.
    std::int32_t reclaimable() const;
    /// Forgets beginnings, the one not used for longest first, until the pool has @p pages free ones or
    /// nothing is left.
    void evict(std::int32_t pages);

    std::int64_t evictions() const { return evictions_; }
    /// Beginnings whose text was the same, but a page's signature wasn't.
    std::int64_t refusals() const { return refusals_; }

  private:
    struct kept_layer {
        std::vector<uniprefill::page_signature> signatures;
        std::vector<std::int32_t> pages;
    };
    struct beginning {
        std::int32_t tokens = 0;
        std::uint64_t last_use = 0;
        std::vector<std::byte> ledger;
        std::vector<kept_layer> layers;
    };
    struct hash_of {
        std::size_t operator()(const uniprefill::page_signature& signature) const {
            return static_cast<std::size_t>(signature.low);
        }
    };
    using beginnings = std::unordered_map<uniprefill::page_signature, beginning, hash_of>;

    beginning* find(const std::vector<std::int32_t>& tokens, std::int32_t edge);
    /// Marks the beginnings up to an edge as used.
    void touch(const std::vector<std::int32_t>& tokens, const std::vector<std::int32_t>& edges,
               std::int32_t edge);
    beginning take(std::int32_t slot, const std::vector<std::int32_t>& tokens, std::int32_t edge);
    bool may_take(std::int32_t slot, const std::vector<std::int32_t>& tokens, const beginning& kept);
    std::vector<uniprefill::page_signature> sign(std::int32_t slot, std::int32_t layer,
                                                 const std::vector<std::int32_t>& tokens) const;
    void forget(beginnings::iterator at);

    cpu_session& session_;
    paged_kv_store& pages_;
    std::int32_t spare_slot_;
    uniprefill::page_signer signer_;
    beginnings kept_;
    std::vector<std::int32_t> references_; ///< [pages] how often the cache holds each
    std::uint64_t uses_ = 0;
    std::int64_t evictions_ = 0;
    std::int64_t refusals_ = 0;
};

} // namespace engine
