// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

/// @file
/// The plainest ledger there is: for each (request, layer) the list of positions that it holds.

#include "ledger/ledger_fixture.hpp"

#include <map>

namespace ledger_test {

/// A step in the plain ledger: for each layer and each request of the batch, the positions that enter.
struct naive_step {
    rows_batch batch;
    std::vector<std::vector<positions>> entering; // [layer][request of the batch]
};

class naive_ledger {
  public:
    explicit naive_ledger(const std::vector<std::int32_t>& layer_sets)
        : layer_sets_(layer_sets) {}

    std::int32_t num_layers() const { return static_cast<std::int32_t>(layer_sets_.size()); }
    bool admitted(std::int32_t id) const { return tokens_.count(id) != 0; }
    std::int32_t tokens(std::int32_t id) const { return tokens_.at(id); }
    const positions& held(std::int32_t id, std::int32_t layer) { return lists_[{id, layer}]; }

    void admit(std::int32_t id) { tokens_[id] = 0; }
    void release(std::int32_t id) {
        rollback(id, 0);
        tokens_.erase(id);
    }
    void rollback(std::int32_t id, std::int32_t num_tokens) {
        for (std::int32_t layer = 0; layer < num_layers(); ++layer) {
            positions left;
            for (const std::int32_t position : held(id, layer)) {
                if (position < num_tokens) {
                    left.push_back(position);
                }
            }
            lists_[{id, layer}] = left;
        }
        tokens_[id] = num_tokens;
    }

    /// What enters each layer when these appends (by layer) have been made and no others.
    std::vector<std::vector<positions>>
    entering(const rows_batch& batch, const std::map<std::int32_t, std::vector<positions>>& appends) const {
        std::vector<positions> every;
        for (std::size_t r = 0; r < batch.ids.size(); ++r) {
            every.emplace_back(batch.packed.begin() + batch.cu[r], batch.packed.begin() + batch.cu[r + 1]);
        }
        std::vector<std::vector<positions>> made;
        for (std::int32_t layer = 0; layer < num_layers(); ++layer) {
            const std::int32_t first = first_of_set(layer);
            if (layer_sets_[static_cast<std::size_t>(layer)] == 0) {
                made.push_back(every);
            } else if (first < layer) {
                made.push_back(made[static_cast<std::size_t>(first)]);
            } else if (appends.count(layer) != 0) {
                made.push_back(appends.at(layer));
            } else {
                made.push_back(layer == 0 ? every : made.back());
            }
        }
        return made;
    }

    std::int32_t first_of_set(std::int32_t layer) const {
        std::int32_t first = 0;
        while (layer_sets_[static_cast<std::size_t>(first)] != layer_sets_[static_cast<std::size_t>(layer)]) {
            ++first;
        }
        return first;
    }
    std::int32_t set_of(std::int32_t layer) const { return layer_sets_[static_cast<std::size_t>(layer)]; }

    void commit(const naive_step& step) {
        for (std::size_t r = 0; r < step.batch.ids.size(); ++r) {
            const std::int32_t id = step.batch.ids[r];
            if (id < 0) {
                continue;
            }
            for (std::int32_t layer = 0; layer < num_layers(); ++layer) {
                const positions& rows = step.entering[static_cast<std::size_t>(layer)][r];
                positions& list = lists_[{id, layer}];
                list.insert(list.end(), rows.begin(), rows.end());
            }
            tokens_[id] += step.batch.cu[r + 1] - step.batch.cu[r];
        }
    }

  private:
    std::vector<std::int32_t> layer_sets_;
    std::map<std::int32_t, std::int32_t> tokens_;
    std::map<std::pair<std::int32_t, std::int32_t>, positions> lists_;
};

} // namespace ledger_test
