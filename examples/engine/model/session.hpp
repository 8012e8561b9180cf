// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/model/kv_store.hpp"
#include "engine/model/list_rules.hpp"
#include "engine/model/query_tails.hpp"
#include "engine/model/weights.hpp"

#include <uniprefill/core/exceptions.hpp>
#include <uniprefill/uniprefill.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace engine {

/// What a session is made for: the bounds of a step, and what is dropped where.
struct session_options {
    std::int32_t max_requests = 1;       ///< requests alive at once, and in one step
    std::int32_t max_segments = 1;       ///< spans of all requests in one step
    std::int32_t max_step_rows = 0;      ///< rows of one step
    std::int32_t max_tokens = 0;         ///< positions of one request, prompt and output together
    std::int32_t block_rows = 64;        ///< G
    std::int32_t num_observations = 128; ///< n
    uniprefill::propagation propagation = uniprefill::propagation::cumulative;
    std::vector<uniprefill::selecting_layer<uniprefill::selection_rule>> selecting; ///< empty: dense
    /// Which blocks of keys each query head reads at every layer, of a prefill's own rows; none: all of them.
    std::optional<uniprefill::list_options<>> lists;
    engine::list_rules list_rules; ///< of layers that have their own
    bool list_means = false;       ///< blocks that a head's list skips are met by their means
    /// Each block of so many query rows has lists of its own; none: a segment's rows share its lists.
    std::optional<uniprefill::query_sampling> list_sampling;
    /// Attends with every row and drops afterwards, as the published system does. For the test that kept rows
    /// come out the same; it costs the attention of the dropped rows.
    bool decide_after_attention = false;
    /// Drops nothing while a prompt is read, and keeps the queries that decide_at_end() (end_decision.hpp)
    /// needs.
    bool decide_at_end = false;
    uniprefill::metrics_observer observer{};
};

/// Aligned memory handed to the library.
class library_memory {
  public:
    explicit library_memory(std::size_t bytes)
        : data_(::operator new(bytes, alignment))
        , bytes_(bytes) {}
    void* data() const { return data_.get(); }
    std::size_t bytes() const { return bytes_; }
    uniprefill::workspace workspace() const { return {data_.get(), bytes_}; }

  private:
    static constexpr std::align_val_t alignment{uniprefill::workspace::alignment};
    struct release {
        void operator()(void* memory) const { ::operator delete(memory, alignment); }
    };
    std::unique_ptr<void, release> data_;
    std::size_t bytes_;
};

/// Everything that outlives a step: a model's weights, the cache, the ledger of what it holds, and the
/// policy. Steps are machines (machine.hpp) over it.
template <class Ops>
class basic_session {
  public:
    using sparsifier =
        uniprefill::prefill_sparsifier<uniprefill::default_policy<uniprefill::dynamic, uniprefill::dynamic>,
                                       typename Ops::backend>;
    using ledger = uniprefill::drop_ledger<typename Ops::backend>;

    /// `model` and `ops` must outlive the session. Throws `error` or `uniprefill::error` on options out of
    /// range.
    /// @param cache  where keys and values go; none: an array for each request and layer that grows
    basic_session(const basic_weights<Ops>& model, Ops& ops, session_options options,
                  std::unique_ptr<kv_store> cache = nullptr);

    const basic_weights<Ops>& model() const { return model_; }
    const session_options& options() const { return options_; }
    Ops& ops() { return ops_; }
    const typename Ops::rope_table& rope() const { return rope_; }
    kv_store& cache() { return *cache_; }
    ledger& drops() { return ledger_; }
    const ledger& drops() const { return ledger_; }
    const sparsifier& policy() const { return *sparsifier_; }
    /// Of the rows read so far, by selecting_index(); empty but for sessions that decide at the prompt's end.
    query_tails& last_queries() { return last_queries_; }
    /// The place of a selecting layer among them.
    std::size_t selecting_index(std::int32_t layer) const;

    /// A request takes slot `id`, 0 to max_requests - 1.
    void admit(std::int32_t id) { uniprefill::throw_if_failed(ledger_.admit(id)); }
    void release(std::int32_t id);

  private:
    const basic_weights<Ops>& model_;
    Ops& ops_;
    session_options options_;
    typename Ops::rope_table rope_; ///< of max_tokens positions: a file may claim any context length
    std::unique_ptr<kv_store> cache_;
    std::unique_ptr<sparsifier> sparsifier_;
    std::unique_ptr<library_memory> ledger_memory_;
    ledger ledger_;
    query_tails last_queries_;
};

using cpu_session = basic_session<cpu_ops>;

} // namespace engine
