// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/model/end_decision.hpp"

#include "engine/error.hpp"

#include <algorithm>
#include <string>
#include <vector>

namespace engine {

using uniprefill::throw_if_failed;

namespace {

/// One prompt's decisions, layer after layer, and what comes of them.
template <class Ops>
class end_decision {
  public:
    end_decision(basic_session<Ops>& session, const planned_request& prompt)
        : session_(session)
        , id_(prompt.id)
        , config_(session.model().config())
        , q_elements_(std::int64_t{config_.heads} * config_.head_dim)
        , kv_elements_(std::int64_t{config_.kv_heads} * config_.head_dim)
        , plan_({prompt})
        , step_(session.policy())
        , scratch_(session.policy().workspace_bytes())
        , q_(static_cast<std::size_t>(plan_.num_rows() * q_elements_))
        , k_(static_cast<std::size_t>(plan_.num_rows() * kv_elements_))
        , entering_(static_cast<std::size_t>(config_.layers)) {
        throw_if_failed(step_.begin(plan_.batch(), scratch_.workspace()));
    }

    void decide() {
        for (std::int32_t layer = 0; layer < config_.layers; ++layer) {
            throw_if_failed(step_.enter(layer, nullptr, 0));
            if (session_.drops().starts_set(layer)) {
                const uniprefill::batch_view rows = step_.rows();
                entering_[static_cast<std::size_t>(layer)].assign(rows.positions,
                                                                  rows.positions + rows.num_rows);
            }
            if (session_.policy().selects(layer)) decide(layer);
        }
    }

    /// From the last set to the first, since a nested set holds no position that the one before gave up.
    void give_up() {
        const auto& ledger = session_.drops();
        for (std::int32_t layer = config_.layers; layer-- > 1;) {
            if (ledger.starts_set(layer) && ledger.set_of(layer) > 0) {
                give_up(layer, entering_[static_cast<std::size_t>(layer)]);
            }
        }
    }

  private:
    void decide(std::int32_t layer) {
        const uniprefill::batch_view rows = step_.rows();
        put_queries(layer, rows.num_rows);
        put_keys(layer, rows);
        const uniprefill::head_rows<const float> q{q_.data(),     q_elements_,   config_.head_dim,
                                                   rows.num_rows, config_.heads, config_.head_dim};
        const uniprefill::head_rows<const float> k{k_.data(),     kv_elements_,     config_.head_dim,
                                                   rows.num_rows, config_.kv_heads, config_.head_dim};
        uniprefill::selection decided{};
        throw_if_failed(step_.decide(layer, q, uniprefill::key_source<float>{k},
                                     uniprefill::attention_params{}, nullptr, decided));
        if (!decided.identity) throw_if_failed(step_.leave(decided, nullptr, 0));
    }

    /// The last rows alone, which are never dropped and the only ones that are looked at.
    void put_queries(std::int32_t layer, std::int64_t rows) {
        const std::vector<float>& tail =
            session_.last_queries().of(session_.selecting_index(layer), static_cast<std::size_t>(id_));
        const std::int64_t wanted =
            std::min<std::int64_t>(plan_.num_rows(), session_.options().num_observations);
        if (static_cast<std::int64_t>(tail.size()) != wanted * q_elements_) {
            throw error("decisions at the prompt's end",
                        "the last " + std::to_string(wanted) + " queries of layer " + std::to_string(layer),
                        std::to_string(static_cast<std::int64_t>(tail.size()) / q_elements_));
        }
        std::copy(tail.begin(), tail.end(),
                  q_.begin() + std::max<std::int64_t>(0, rows - wanted) * q_elements_);
    }

    /// Row i of a layer that has given up nothing yet is position i.
    void put_keys(std::int32_t layer, const uniprefill::batch_view& rows) {
        const kv_sequence held = session_.cache().rows(layer, id_);
        const std::int32_t page = session_.cache().page_tokens();
        for (std::int32_t row = 0; row < rows.num_rows; ++row) {
            const std::int64_t slot = held.slot_of(rows.positions[row], page);
            std::copy_n(held.k + slot * held.row_stride, kv_elements_, k_.data() + row * kv_elements_);
        }
    }

    void give_up(std::int32_t first, std::vector<std::int32_t>& kept) {
        auto& ledger = session_.drops();
        uniprefill::held_rows held;
        throw_if_failed(ledger.rows_of(id_, first, held));
        for (std::int32_t position = plan_.num_rows(); position < held.num_tokens(); ++position) {
            kept.push_back(position); // generated meanwhile
        }
        const auto count = static_cast<std::int32_t>(kept.size());
        std::vector<std::int32_t> from(kept.size());
        throw_if_failed(ledger.keep_only(id_, first, kept.data(), count, from.data()));
        for (std::int32_t layer = first; layer < config_.layers; ++layer) {
            if (ledger.set_of(layer) == ledger.set_of(first)) {
                session_.cache().keep(layer, id_, from.data(), count);
            }
        }
    }

    basic_session<Ops>& session_;
    std::int32_t id_;
    const llama_config& config_;
    std::int64_t q_elements_;
    std::int64_t kv_elements_;
    step_plan plan_;
    typename basic_session<Ops>::sparsifier::step step_;
    library_memory scratch_;
    std::vector<float> q_;                            // [prompt, heads, head_dim]
    std::vector<float> k_;                            // [prompt, kv_heads, head_dim]
    std::vector<std::vector<std::int32_t>> entering_; ///< positions that enter each layer that starts a set
};

} // namespace

template <class Ops>
void decide_at_end(basic_session<Ops>& session, const planned_request& prompt) {
    if (!session.options().decide_at_end) {
        throw error("decisions at the prompt's end", "a session made with decide_at_end", "another one");
    }
    end_decision<Ops> decision(session, prompt);
    decision.decide();
    decision.give_up();
}

template void decide_at_end(basic_session<cpu_ops>& session, const planned_request& prompt);

} // namespace engine
