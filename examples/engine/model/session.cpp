// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/model/session.hpp"

#include "engine/error.hpp"
#include "engine/model/layer_lists.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace engine {

namespace {

uniprefill::limits step_limits(const llama_config& config, const session_options& options) {
    uniprefill::limits bounds;
    bounds.max_requests = options.max_requests;
    bounds.max_segments = options.max_segments;
    // Decisions at the prompt's end are about all of its rows.
    bounds.max_rows =
        options.decide_at_end ? std::max(options.max_step_rows, options.max_tokens) : options.max_step_rows;
    bounds.max_cached_tokens = static_cast<std::int32_t>(std::min<std::int64_t>(
        std::int64_t{options.max_requests} * options.max_tokens, std::numeric_limits<std::int32_t>::max()));
    bounds.num_layers = config.layers;
    bounds.num_heads = config.heads;
    bounds.num_kv_heads = config.kv_heads;
    bounds.head_dim = config.head_dim;
    bounds.block_rows = options.block_rows;
    bounds.num_observations = options.num_observations;
    return bounds;
}

} // namespace

template <class Ops>
basic_session<Ops>::basic_session(const basic_weights<Ops>& model, Ops& ops, session_options options,
                                  std::unique_ptr<kv_store> cache)
    : model_(model)
    , ops_(ops)
    , options_(std::move(options))
    , rope_(options_.max_tokens, model.config().rope_dims, model.config().rope_base)
    , cache_(std::move(cache)) {
    using uniprefill::throw_if_failed;
    const llama_config& config = model.config();
    if (!cache_) {
        cache_ = std::make_unique<contiguous_kv_store>(config.layers, options_.max_requests, config.kv_heads,
                                                       config.head_dim);
    }
    if (options_.lists) {
        if (options_.decide_at_end) {
            throw error("lists", "none where decisions are taken when the prompt ends", "some");
        }
        throw_if_failed(uniprefill::validate(*options_.lists));
        if (options_.list_sampling) {
            throw_if_failed(
                layer_lists::own_lister(step_limits(config, options_), *options_.list_sampling).check());
        }
    }
    const auto num_selecting = static_cast<std::int32_t>(options_.selecting.size());
    sparsifier_ = std::make_unique<sparsifier>(
        step_limits(config, options_),
        uniprefill::sparsifier_options<uniprefill::selection_rule>{options_.selecting.data(), num_selecting,
                                                                   options_.propagation, options_.observer});
    throw_if_failed(sparsifier_->check());

    const bool nested = options_.propagation == uniprefill::propagation::cumulative;
    std::vector<std::int32_t> selecting;
    for (const auto& layer : options_.selecting) {
        selecting.push_back(layer.layer);
    }
    std::vector<std::int32_t> layer_sets(static_cast<std::size_t>(config.layers));
    uniprefill::ledger_limits bounds;
    bounds.max_requests = options_.max_requests;
    bounds.max_tokens = options_.max_tokens;
    bounds.num_layers = config.layers;
    bounds.relation = nested ? uniprefill::set_relation::nested : uniprefill::set_relation::independent;
    const auto assign_sets = nested ? uniprefill::cumulative_layer_sets : uniprefill::revived_layer_sets;
    throw_if_failed(
        assign_sets(selecting.data(), num_selecting, config.layers, layer_sets.data(), bounds.num_sets));
    throw_if_failed(uniprefill::validate(bounds));
    ledger_memory_ = std::make_unique<library_memory>(ledger::state_bytes(bounds));
    throw_if_failed(ledger_.bind(bounds, layer_sets.data(), ledger_memory_->data(), ledger_memory_->bytes()));
    if (options_.decide_at_end) {
        last_queries_ =
            query_tails(options_.selecting.size(), static_cast<std::size_t>(options_.max_requests),
                        options_.num_observations, std::int64_t{config.heads} * config.head_dim);
    }
}

template <class Ops>
std::size_t basic_session<Ops>::selecting_index(std::int32_t layer) const {
    std::size_t index = 0;
    while (options_.selecting[index].layer != layer) {
        ++index;
    }
    return index;
}

template <class Ops>
void basic_session<Ops>::release(std::int32_t id) {
    uniprefill::throw_if_failed(ledger_.release(id));
    cache_->release(id);
    if (options_.decide_at_end) last_queries_.forget(static_cast<std::size_t>(id));
}

template class basic_session<cpu_ops>;

} // namespace engine
