// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/app/serve_options.hpp"
#include "engine/model/paged_kv_store.hpp"
#include "engine/reading/reader.hpp"
#include "engine/serving/prefix_cache.hpp"
#include "engine/serving/request.hpp"

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

namespace engine {

/// What a server is made for.
struct server_options {
    std::int32_t slots = 8;      ///< requests running at once
    std::int32_t budget = 0;     ///< prompt rows of one step; decode rows come on top
    std::int32_t pages = 0;      ///< of the pool, each 16 rows of one layer
    std::int32_t max_tokens = 0; ///< of one request, prompt and output
    engine::preemption preemption = engine::preemption::recompute;
    bool prefix_cache = true;
};

/// What one step did.
struct step_outcome {
    struct emitted {
        std::int32_t request = 0;
        bool token = false; ///< false: the model said that its answer ends
        bool finished = false;
    };
    std::int32_t prompt_rows = 0;   ///< of prompts
    std::int32_t decode_rows = 0;   ///< one for each request that generates
    std::int32_t repeated_rows = 0; ///< generated tokens that a preempted request runs again
    std::vector<emitted> outputs;
};

/// Sums over the life of a server.
struct server_counts {
    std::int64_t steps = 0;
    std::int64_t mixed_steps = 0; ///< with prompt rows beside decode rows
    std::int64_t preemptions = 0;
    std::int64_t recomputed_rows = 0; ///< rows that preempted requests ran again
    std::int64_t swapped_pages = 0;   ///< written back
    std::int64_t prefix_hits = 0;     ///< starts and restarts that took a beginning over
    std::int64_t prefix_tokens = 0;
    std::int64_t prefix_evictions = 0;
    std::int64_t prefix_refusals = 0;
    std::int64_t copied_pages = 0;      ///< before a shared page would have been written
    std::int64_t pages_handed_back = 0; ///< of dropped positions, after the steps that dropped them
};

/// Continuous batching: every step packs the next rows of many requests, prompts span by span and generated
/// tokens one by one, over one pool of pages.
///
/// A step takes the rows of running requests first come first, then those of waiting ones: a row of each
/// request that generates, and whole spans of prompts while the budget lasts. A span is never cut, so
/// decisions don't depend on the budget. Pages are taken for every row of the step in every layer beforehand,
/// and those of rows that were dropped are handed back after it. Where the pool has too few, beginnings that
/// nobody uses are forgotten first, then the request that came last makes room and goes back to the head of
/// the queue. The request that came first always goes on.
///
/// A request's tokens don't depend on what runs beside it, on budget, pool, order of arrival or preemptions:
/// they are those of the request run alone.
class server {
  public:
    /// Throws `error` where the budget doesn't take a span.
    server(loaded_model& model, const policy& policy, const server_options& options);

    /// A request joins the queue. Throws `error` where it could never run. @return its number, from 0 on
    std::int32_t submit(const serving_request& asked);
    bool idle() const { return running_.empty() && waiting_.empty(); }
    /// @pre !idle()
    step_outcome step();

    const request_state& request(std::int32_t id) const { return requests_[static_cast<std::size_t>(id)]; }
    std::int32_t num_requests() const { return static_cast<std::int32_t>(requests_.size()); }
    std::int32_t num_running() const { return static_cast<std::int32_t>(running_.size()); }
    std::int32_t num_waiting() const { return static_cast<std::int32_t>(waiting_.size()); }
    server_counts counts() const;

    const page_pool& pool() const { return pages_->pool(); }
    std::int32_t page_rows() const { return pages_->page_tokens(); }
    std::size_t page_bytes() const { return pages_->page_bytes(); }
    /// Pages that only the prefix cache holds.
    std::int32_t cached_pages() const { return prefixes_ ? prefixes_->reclaimable() : 0; }
    /// Pages that the running requests would hold, had nothing been dropped.
    std::int64_t dense_pages() const;
    /// Forgets the prefix cache; when idle, the pool is all free then.
    void forget_prefixes();

  private:
    /// The rows of a request that a step runs.
    struct work {
        std::int32_t request = 0;
        std::int32_t rows = 0;
        uniprefill::request_tag tag = uniprefill::request_tag::decode;
        std::vector<std::int32_t> span_ends; ///< in rows of the step
        bool wants_logits = false;
    };

    server(loaded_model& model, const policy& policy, const server_options& options,
           std::unique_ptr<paged_kv_store> pages);

    request_state& at(std::int32_t id) { return requests_[static_cast<std::size_t>(id)]; }
    std::int32_t held(const request_state& of, std::int32_t layer) const;
    uniprefill::page_usage usage_of(const request_state& of) const;

    std::vector<work> schedule();
    std::optional<work> next_work(const request_state& of, std::int32_t budget) const;
    std::optional<work> start(std::int32_t id, std::int32_t budget);
    void note_start(request_state& starting);
    bool find_pages(std::int32_t pages);
    bool make_room(std::int32_t id, std::int32_t pages);
    std::int32_t pages_needed(const request_state& of, std::int32_t rows) const;
    void reserve(const request_state& of, std::int32_t rows);

    void preempt(std::int32_t id);
    void leave(request_state& leaving);
    void swap_out(request_state& leaving);
    void swap_in(request_state& back);

    void count(const work& done, step_outcome& into) const;
    void hand_back(const std::vector<work>& done);
    void note_prompt_end(request_state& of);
    void emit(request_state& of, const float* logits, step_outcome& into);

    loaded_model& model_;
    engine::policy policy_;
    server_options options_;
    std::int32_t layers_;
    paged_kv_store* pages_; ///< the session's
    cpu_session session_;
    std::optional<prefix_cache> prefixes_;
    std::vector<request_state> requests_; ///< by id
    std::vector<std::int32_t> running_;   ///< ids, ascending
    std::deque<std::int32_t> waiting_;    ///< ids, ascending
    std::vector<std::int32_t> free_slots_;
    server_counts counts_;
};

} // namespace engine
