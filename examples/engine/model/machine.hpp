// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/cpu/huge_pages.hpp"
#include "engine/model/layer_lists.hpp"
#include "engine/model/layer_record.hpp"
#include "engine/model/session.hpp"
#include "engine/model/step_plan.hpp"
#include "engine/model/trail.hpp"

#include <cstdint>
#include <vector>

namespace engine {

/// The pieces that a step advances by. Between two of them a step may be parked, or another one run.
enum class segment {
    project_qkv,    ///< norm, q, k and v of the rows that enter the layer, RoPE, keys and values written
    decide,         ///< at selecting layers: which rows go on
    attend,         ///< the rows that go on
    project_output, ///< and residual
    gate_up,        ///< norm, gate and up, activation
    down,           ///< and residual
    logits,         ///< of the rows that the plan asks for
    done,
};

/// A step through the model: one forward pass over the rows of a plan, advanced by its caller segment by
/// segment.
///
/// The ledger's step is open from construction to the last segment; a machine that is destroyed before leaves
/// the ledger as it was.
template <class Ops>
class basic_machine {
  public:
    /// Throws `error` or `uniprefill::error` where the plan doesn't fit the session; nothing has changed
    /// then.
    basic_machine(basic_session<Ops>& session, const step_plan& plan);
    ~basic_machine();
    basic_machine(const basic_machine&) = delete;
    basic_machine& operator=(const basic_machine&) = delete;

    /// Leaves at each layer what another step needs to begin there. For a plan of one request that reads a
    /// whole prompt, before the first segment; @p left must outlive the step.
    void record_into(trail& left);
    /// Begins at @p layer as the step did that left @p from, which read the same tokens and dropped the same
    /// in the layers before: their decisions are taken again, from the queries and keys that it left, and
    /// nothing else. After record_into(), before the first segment; propagation cumulative. Throws `error`
    /// where @p from has no such beginning.
    void begin_at(std::int32_t layer, const trail& from);

    segment next() const { return next_; }
    std::int32_t layer() const { return layer_; }
    /// Runs one segment. @return false when there is none left
    bool advance();
    void run() {
        while (advance()) {
        }
    }

    /// Logits of plan.logits_rows(), dense [rows, vocab]; after the last segment.
    const std::vector<float>& logits() const { return logits_; }
    const std::vector<layer_record>& layers() const { return records_; }
    /// By row of the plan: the last layer that dropped it, -1 where it is alive.
    const std::vector<std::int32_t>& dropped_at() const { return dropped_at_; }
    double seconds() const { return seconds_; }
    /// By block and head, of the layer whose decide segment ran last; only where the session has lists
    /// and no list_sampling.
    uniprefill::head_mass_view head_masses() { return lists_->masses(); }

  private:
    void project_qkv();
    void decide();
    layer_lists::key_rows entered_keys();
    void look(const layer_lists::key_rows& keys);
    void list_by_query_block(const uniprefill::list_options<>& listing, const layer_lists::key_rows& keys,
                             const uniprefill::batch_view& entered, const uniprefill::selection& kept);
    void replay(const trail::stop& left);
    void leave_trail();
    void note_queries();
    void keep_queries();
    void attend();
    void attend_rows(std::int32_t request, std::int64_t first, std::int64_t end, std::int32_t keys,
                     const typename Ops::key_lists& lists);
    void project_output();
    void gate_up();
    void down();
    void project_logits();
    void leave(const uniprefill::selection& decided);
    void record(const uniprefill::selection& decided, const uniprefill::batch_view& before);
    void count_look(const uniprefill::batch_view& before);
    /// @return the segment's mass
    double record_blocks(std::int32_t segment, const uniprefill::batch_view& before,
                         const uniprefill::selection& decided);
    const std::int64_t* slots_of(const kv_sequence& kv, std::int32_t rows);
    std::int64_t num_rows() const { return step_.rows().num_rows; }
    float* hidden() const { return static_cast<float*>(step_.rows_of(hidden_rows_).data); }
    layer_record& now() { return records_[static_cast<std::size_t>(layer_)]; }

    basic_session<Ops>& session_;
    const step_plan& plan_;
    const llama_config& config_;
    uniprefill::prefill_step<uniprefill::default_policy<uniprefill::dynamic, uniprefill::dynamic>,
                             typename Ops::backend>
        step_;
    library_memory scratch_; ///< of its own, so that several steps can be on their way
    uniprefill::ledger_step ledger_step_;
    std::int32_t layer_ = 0;
    segment next_ = segment::project_qkv;
    uniprefill::selection decided_{};  ///< of this layer, where it is carried out after attention
    std::optional<layer_lists> lists_; ///< where the session asks for them
    bool listed_ = false;              ///< whether this layer's heads read lists

    std::int64_t q_elements_;
    std::int64_t kv_elements_;
    std::int64_t qkv_elements_;
    cpu::activations working_; // [rows, hidden]
    cpu::activations full_;    // [rows, hidden] under revival
    uniprefill::row_tensor hidden_rows_{};
    cpu::activations normed_;    // [rows, hidden]
    cpu::activations qkv_;       // [rows, q | k | v]
    cpu::activations attended_;  // [rows, heads * head_dim]
    cpu::activations gate_up_;   // [rows, 2 * ffn]
    cpu::activations activated_; // [rows, ffn]
    std::vector<std::int32_t> cached_lens_;
    std::vector<std::int32_t> key_positions_;
    std::vector<std::int64_t> key_slots_;
    std::vector<const void*> pages_; ///< of entered_keys()

    trail* left_ = nullptr;    ///< where one is recorded
    query_tails last_queries_; ///< of this step by request of the plan, the session's when it ends

    std::vector<layer_record> records_;
    std::vector<std::int32_t> dropped_at_;
    std::vector<float> logits_;
    double seconds_ = 0;
};

using cpu_machine = basic_machine<cpu_ops>;

} // namespace engine
