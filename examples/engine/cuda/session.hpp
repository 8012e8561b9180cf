// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/app/prefill_options.hpp"
#include "engine/cuda/dense_attention.hpp"
#include "engine/cuda/gated_delta.hpp"
#include "engine/cuda/layer_facts.hpp"
#include "engine/cuda/model.hpp"
#include "engine/cuda/pair_counts.hpp"
#include "engine/cuda/row_attention.hpp"
#include "engine/cuda/sparsity.hpp"
#include "engine/cuda/stage_clock.hpp"
#include "engine/cuda/trail.hpp"
#include "engine/model/list_rules.hpp"

#include <uniprefill/core/batch.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace engine::cuda {

/// What a session is made for.
struct session_options {
    std::int32_t prompt = 0;    ///< rows of the prompt
    std::int32_t following = 1; ///< tokens that may be fed after it, at once or one by one
    std::vector<uniprefill::selecting_layer<uniprefill::selection_rule>> selecting; ///< empty: dense
    std::vector<std::int32_t> span_ends; ///< of the prompt, each decided alone; empty: one span
    uniprefill::request_options request{};
    std::int32_t block_rows = 64;
    std::int32_t num_observations = 128;
    std::optional<uniprefill::list_options<>> lists; ///< which blocks each head reads; none: all keys
    engine::list_rules list_rules;                   ///< of layers that have their own
    bool lists_by_kv_head = false;
    bool list_means = false; ///< blocks that lists skip are met by their means
    attention_kind attention = attention_kind::uniprefill;
    counts_kind counts = counts_kind::read;
    std::int32_t bucket_rows = 1024; ///< of counts_kind::buckets
    /// With counts_kind::read: products run over a multiple of it, so that few sizes ever occur.
    std::int32_t row_multiple = 1;
    bool time_layers = false; ///< with counts_kind::read: an event after each layer
};

/// A decision as the device reported it.
struct decision_record {
    std::int32_t layer = 0;
    std::vector<uniprefill::segment_outcome> outcomes; // [spans]
};

/// What the last prefill took.
struct prefill_times {
    double device_ms = 0;         ///< by events, from the copy of the tokens to the likeliest next token
    double wall_ms = 0;           ///< by the host's clock, the same with the last wait
    std::int32_t count_reads = 0; ///< row counts that the host waited for
};

/// One prompt on a CUDA device, and what follows it.
///
/// Rows are packed as the library has them (batch_view); a step holds one request. Hidden states are fp32:
/// products add to them in place, and sixty sums in bf16 would cost more of a small model's answers than
/// dropping does. It is 0.5 % of the traffic of a long prefill, the same in every mode. Everything else is
/// bf16. Each layer's cache is one stretch, its length on the device.
///
/// Where every query reads every key before it, attention is cuDNN's if asked for. That is exact after rows
/// were dropped, too: those that are alive read those that are alive. At a selecting layer itself kept
/// queries read keys of rows that are dropped there, and with lists each head reads its own: both are the
/// library's.
///
/// Of hybrids a session reads prompts alone. Linear layers run over the rows that are alive; window layers
/// see original positions, so they are the library's once rows were dropped. What nothing will read is not
/// kept: window layers share one stretch of cache, linear layers have none and leave their last states
/// nowhere.
class session {
  public:
    /// @p model must outlive the session. Throws `error` or `uniprefill::error` on options out of range.
    session(const cuda_model& model, session_options options);
    session(const session&) = delete;
    session& operator=(const session&) = delete;
    ~session();

    /// Reads the prompt, of exactly as many tokens as the session is for. With counts_kind::budget the first
    /// prompt runs kernel by kernel, all others as one graph; with buckets each new row count is run once,
    /// then recorded, then replayed.
    const prefill_times& prefill(const std::vector<std::int32_t>& tokens);
    /// The same kernel by kernel, timed by stage.
    const prefill_times& prefill_by_stage(const std::vector<std::int32_t>& tokens);
    /// The same from @p first on, kernel by kernel: layers before it are those that left @p from, of the same
    /// tokens, where the same was dropped and listed. The bits are those of a whole prefill. With
    /// counts_kind::read alone. Throws `error` where @p from can't begin there.
    const prefill_times& prefill_from(const device_trail& from, std::int32_t first,
                                      const std::vector<std::int32_t>& tokens);
    /// Prefills from here on that run kernel by kernel leave what others may begin with, in @p left, which
    /// may be what they go on from; null: none any more. Of models whose layers all attend to everything.
    void leave_trail(device_trail* left);
    /// Other layers, rules and lists, and request options, for the prompts to come; everything else is as it
    /// was. Takes device memory only where more is needed than ever before. Throws as the constructor does,
    /// and with counts that aren't read.
    void change(std::vector<uniprefill::selecting_layer<uniprefill::selection_rule>> selecting,
                const std::optional<uniprefill::list_options<>>& lists, engine::list_rules rules,
                const uniprefill::request_options& request);
    /// Feeds tokens after what there is; logits() has a row for each. One is a generated one (tag decode),
    /// several are known ones (tag verify).
    void feed(const std::vector<std::int32_t>& tokens);
    /// Forgets what came after the prompt.
    void back_to_prompt();

    /// Of the prompt's last row, or of the rows fed last.
    std::vector<float> logits() const;
    /// The likeliest token after the last row; -1 where its logits aren't finite.
    std::int32_t likeliest() const { return likeliest_[0]; }
    /// Rows that the prompt's layers read on entry, and rows that left attention.
    const std::vector<std::int32_t>& rows_in() const { return rows_in_; }
    const std::vector<std::int32_t>& rows_kept() const { return rows_kept_; }
    /// Of the last prompt, from the device. After prefill_from() those of the layers that ran alone are this
    /// prompt's; what an earlier one left stands in the others.
    std::vector<decision_record> decisions() const;
    /// Rows of each layer's cache, from the device.
    std::vector<std::int32_t> lengths() const { return lengths_.get(); }
    /// Milliseconds by stage of the last prefill_by_stage().
    std::array<double, stage_names.size()> stages() const { return clock_.milliseconds(); }
    /// Milliseconds of each layer of the last prefill(), with options().time_layers.
    std::vector<double> layer_ms() const;
    /// Kernels and copies of the graph that is the whole prefill; 0 without one.
    std::size_t graph_nodes() const { return whole_.nodes(); }
    /// Whether cuDNN reads the windows of prompts that nothing was dropped from.
    bool windows_by_cudnn() const { return windows_by_cudnn_; }
    /// Graphs recorded so far.
    std::size_t graphs() const;
    const session_options& options() const { return options_; }

    /// Whether prompts that run kernel by kernel count what each layer did: a small launch for each.
    void count(bool wanted) { counting_ = wanted; }
    /// The same, and which rows were kept; waits at each decision: for reports.
    void record(bool wanted) { recording_ = wanted; }
    /// By layer, of the last prompt where it was counted or recorded; empty otherwise.
    const std::vector<layer_facts>& facts() const { return facts_; }

    /// Logits of the prompt's last row, or of the rows fed last, in device memory: [rows, vocab]. On the
    /// session's stream, which has come to its end when its calls return.
    const float* device_logits() const { return logits_.data(); }
    cudaStream_t queue() const { return stream_; }

  private:
    /// The arrays of a batch_view.
    struct step_arrays {
        device_array<std::int32_t> tokens;
        device_array<std::int32_t> positions;
        device_array<uniprefill::request_tag> tags;
        device_array<std::int32_t> cu_seqlens;
        device_array<std::int32_t> cu_segments;
        device_array<std::int32_t> segment_request;
        device_array<uniprefill::request_options> options;
        uniprefill::batch_view view;
    };
    /// A recorded stretch: seen once, then a graph.
    struct piece {
        bool seen = false;
        graph recorded;
    };

    void prepare_prompt();
    const prefill_times& time_prefill(const std::vector<std::int32_t>& tokens, bool by_stage,
                                      const device_trail* from = nullptr, std::int32_t first = 0);
    void run_prefill(bool by_stage, const device_trail* from, std::int32_t first);
    void check_rules(const std::vector<uniprefill::selecting_layer<uniprefill::selection_rule>>& all) const;
    void note_decisions();
    bool counts() const { return counting_ || recording_; }
    /// Where spans begin, and the last one's end.
    std::int32_t span_bounds() const {
        return static_cast<std::int32_t>(std::max<std::size_t>(options_.span_ends.size(), 1)) + 1;
    }
    bool listed(std::int32_t layer) const;
    void run_by_counts(bool as_graphs, const device_trail* from = nullptr, std::int32_t first = 0);
    void begin_at(const device_trail& from, std::int32_t first);
    void put_layers(std::int32_t layer, std::size_t index);
    void leave_stop(std::int32_t layer);
    void leave_caches();
    void collect_facts(std::int32_t first);
    void start_counts();
    void note_rows(std::size_t index);
    void run_stretch(std::size_t index, bool as_graph);
    void put_stretch(std::size_t index);
    void read_count(std::size_t decision);
    void start_prompt();
    void enter(std::int32_t layer);
    void enter_linear(std::int32_t layer);
    void decide(std::int32_t layer);
    void finish(std::int32_t layer);
    void attend(std::int32_t layer);
    void attend_linear(std::int32_t layer);
    void gate_attended(std::int32_t layer);
    void add_to_hidden(const matrix& weights, const bfloat16* x, const device_array<float>& post_norm);
    void count_layer(std::int32_t layer, const attention_call& call);
    void put_logits(std::int32_t rows, const std::int32_t* ends);
    void mark(stage done);
    bool selects(std::int32_t layer) const;
    bool dropped_before(std::int32_t layer) const;
    std::int32_t budget_after(std::size_t decision, std::int32_t rows) const;
    uniprefill::batch_view alive() const;
    uniprefill::head_rows<const bfloat16> queries(std::int32_t rows) const;
    bfloat16* cache(const device_array<bfloat16>& all, std::int32_t layer) const;
    void make_linear();
    void find_windows();

    const cuda_model& model_;
    const llama_config& config_;
    const layer_pattern& pattern_;
    session_options options_;
    std::vector<std::int32_t> decisions_; ///< selecting layers
    std::int32_t most_rows_;
    std::int32_t q_elements_;
    std::int32_t kv_elements_;
    std::int32_t qkv_elements_;
    std::int32_t linear_channels_;       ///< of q, k and v of linear layers
    std::int32_t linear_elements_;       ///< all that they make of a row
    std::int32_t capacity_;              ///< rows of a layer's cache
    std::vector<std::int64_t> cache_of_; ///< [layers] which stretch of k_ and v_
    bool windows_by_cudnn_ = false;
    uniprefill::limits bounds_{}; ///< of a prompt

    stream stream_;
    products products_;
    std::unique_ptr<sparsity> sparsity_; ///< none where nothing is dropped or listed
    std::unique_ptr<row_attention> row_attention_;
    std::unique_ptr<dense_attention> dense_attention_;

    device_array<float2> angles_;
    device_array<float2> window_angles_;
    device_array<float> hidden_;         // [rows, hidden]
    device_array<bfloat16> normed_;      // [rows, hidden]
    device_array<bfloat16> qkv_;         // [rows, q | k | v], or all of a linear layer
    device_array<bfloat16> attended_;    // [rows, heads * head_dim]
    device_array<bfloat16> gate_up_;     // [rows, 2 * ffn]; before the FFN, what attention keeps for later
    device_array<bfloat16> activated_;   // [rows, ffn]
    device_array<float> logits_;         // [following, vocab]
    device_array<bfloat16> k_, v_;       // [stretches, capacity, kv_elements]
    device_array<float> decays_, betas_; // [rows, v_heads]
    device_array<float> state_;          // [v_heads, 128, 128]
    device_array<std::byte> delta_memory_;
    device_array<std::int32_t> lengths_; // [layers] rows of each cache before the step
    device_array<std::int32_t> entered_; // [layers] rows of the step
    device_array<std::int32_t> prompt_lengths_;
    device_array<std::int32_t> ones_;           // [layers]
    device_array<std::int32_t> decode_lengths_; // [layers] of each cache, the row's own token included
    device_array<pair_count> pair_counts_;      // [layers]
    device_array<std::int32_t> best_;           // [following]
    device_array<uniprefill::segment_outcome> outcomes_; // [decisions, spans]
    pinned_array<std::int32_t> prompt_tokens_;
    pinned_array<std::int32_t> counts_;          // [decisions], in a place for each layer
    pinned_array<pair_count> counted_pairs_;     // [layers]
    pinned_array<std::int32_t> counted_lengths_; // [layers]
    pinned_array<std::int32_t> counted_spans_;   // [layers, span_bounds()]
    pinned_array<std::int32_t> likeliest_;
    step_arrays prompt_;
    step_arrays following_;

    // Of the step that is being put onto the stream.
    bool of_prompt_ = true;
    std::int32_t rows_ = 0;           ///< that products run over
    std::int32_t rows_before_ = 0;    ///< the same before the last decision
    uniprefill::batch_view before_{}; ///< rows before the last decision
    std::vector<uniprefill::batch_view> saved_before_;
    std::vector<std::int32_t> rows_in_, rows_kept_;
    std::int32_t fed_ = 0; ///< positions so far
    std::int32_t logits_rows_ = 0;

    event started_, stopped_, counted_;
    std::vector<event> layer_ends_;
    prefill_times times_;
    stage_clock clock_;
    bool by_stage_ = false;
    bool warm_ = false;
    graph whole_;
    /// By stretch and the rows that its products run over, which are in its kernels. How many rows there were
    /// before the decision that it begins with is not: attention of the selecting layer runs before it.
    std::map<std::array<std::int32_t, 2>, piece> pieces_;
    bool counting_ = false;
    bool recording_ = false;
    device_trail* left_ = nullptr;
    std::vector<std::int32_t> lists_read_; ///< [layers] lists that a segment's queries read there
    std::vector<layer_facts> facts_;
};

} // namespace engine::cuda
