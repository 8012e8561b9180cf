// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The forward pass, kernel by kernel.

#include "engine/cuda/session.hpp"

#include "engine/cuda/linear_rows.hpp"
#include "engine/cuda/row_kernels.hpp"
#include "engine/model/estimator_pairs.hpp"

#include <algorithm>

namespace engine::cuda {

using uniprefill::head_rows;
using uniprefill::memory_space;

void session::start_counts() {
    check(cudaMemsetAsync(lengths_.data(), 0, lengths_.bytes(), stream_), "lengths");
    if (!counts()) return;
    const auto layers = static_cast<std::size_t>(config_.layers);
    facts_.assign(layers, {});
    lists_read_.assign(layers, 1);
    check(cudaMemsetAsync(pair_counts_.data(), 0, pair_counts_.bytes(), stream_), "counts");
}

void session::start_prompt() {
    of_prompt_ = true;
    rows_ = options_.prompt;
    check(cudaMemcpyAsync(prompt_.tokens.data(), prompt_tokens_.data(), prompt_.tokens.bytes(),
                          cudaMemcpyHostToDevice, stream_),
          "copy to the device");
    start_counts();
    if (sparsity_) sparsity_->begin(prompt_.view, stream_);
    embed(model_.embedding().weights.data(), config_.vocab, prompt_.tokens.data(), rows_, config_.hidden,
          hidden_.data(), stream_);
}

/// Norm, q, k and v of the rows that enter a layer; keys and values go to its cache.
void session::enter(std::int32_t layer) {
    const layer_weights& weights = model_.layers()[static_cast<std::size_t>(layer)];
    const uniprefill::batch_view rows = alive();
    if (of_prompt_) rows_in_[static_cast<std::size_t>(layer)] = rows_;
    if (of_prompt_ && left_ != nullptr) leave_stop(layer);
    rms_norm(hidden_.data(), weights.attention_norm.data(), config_.rms_epsilon, rows_, config_.hidden,
             nullptr, normed_.data(), stream_);
    mark(stage::rest);
    if (pattern_.kind(layer) == layer_kind::linear) return enter_linear(layer);
    products_.multiply(weights.qkv, normed_.data(), rows_, qkv_.data(), stream_);
    mark(stage::products);
    rope_call call;
    call.qkv = qkv_.data();
    call.rows = rows_;
    call.q_elements = q_elements_;
    call.kv_elements = kv_elements_;
    call.head_dim = config_.head_dim;
    call.rope_dims = config_.rope_dims;
    call.positions = rows.positions;
    call.table = (pattern_.kind(layer) == layer_kind::window ? window_angles_ : angles_).data();
    call.table_positions = capacity_;
    call.k_cache = cache(k_, layer);
    call.v_cache = cache(v_, layer);
    call.capacity = capacity_;
    call.cached_len = lengths_.data() + layer;
    call.alive = rows.cu_seqlens + rows.num_requests;
    call.entered = entered_.data() + layer;
    call.keys_in_place = !of_prompt_;
    call.q_norm = weights.q_norm.data();
    call.k_norm = weights.k_norm.data();
    call.norm_epsilon = config_.rms_epsilon;
    rope_and_store(call, stream_);
    mark(stage::rest);
}

/// The same of a linear layer: q, k and v go to where the FFN's rows come later.
void session::enter_linear(std::int32_t layer) {
    const linear_weights& weights = model_.layers()[static_cast<std::size_t>(layer)].linear;
    const uniprefill::batch_view rows = alive();
    const std::int32_t heads = pattern_.linear_v_heads;
    products_.multiply(weights.in, normed_.data(), rows_, qkv_.data(), stream_);
    mark(stage::products);
    short_convolution_call call;
    call.in = qkv_.data();
    call.in_stride = linear_elements_;
    call.weights = weights.convolution.data();
    call.channels = linear_channels_;
    call.unit_channels = 2 * pattern_.linear_k_heads * gated_delta_call::head_dim;
    call.cu_seqlens = rows.cu_seqlens;
    call.requests = rows.num_requests;
    call.rows = rows_;
    call.out = gate_up_.data();
    short_convolution(call, stream_);
    delta_gates(qkv_.data() + linear_elements_ - 2 * heads, linear_elements_, weights.rate.data(),
                weights.bias.data(), rows_, heads, betas_.data(), decays_.data(), stream_);
    mark(stage::linear);
}

/// Which rows go on, and which blocks each head reads.
void session::decide(std::int32_t layer) {
    if (pattern_.kind(layer) != layer_kind::full) return;
    if (!of_prompt_ || !sparsity_ || !sparsity_->looks(layer)) return;
    const std::int32_t bound = sparsity_->rows().num_rows;
    const head_rows<const bfloat16> keys{cache(k_, layer), kv_elements_,    config_.head_dim, bound,
                                         config_.kv_heads, config_.head_dim};
    std::int32_t kept_bound = bound;
    const auto decision =
        static_cast<std::size_t>(std::find(decisions_.begin(), decisions_.end(), layer) - decisions_.begin());
    const bool decides = decision < decisions_.size();
    if (decides && options_.counts == counts_kind::budget) kept_bound = budget_after(decision, rows_);
    before_ = sparsity_->rows();
    if (counts()) {
        copy_back(counted_spans_.data() + count_of(layer, span_bounds()),
                  before_.cu_segments != nullptr ? before_.cu_segments : before_.cu_seqlens,
                  count_of(span_bounds(), sizeof(std::int32_t)), stream_);
    }
    sparsity_->look(layer, queries(bound), keys, kept_bound, stream_);
    if (decides) {
        const std::size_t spans = outcomes_.size() / static_cast<std::size_t>(config_.layers);
        if (left_ != nullptr) {
            device_trail::stop& into = left_->stops[static_cast<std::size_t>(layer)];
            const std::size_t bytes = sparsity_->decision_bytes();
            if (into.memory.size() < bytes) into.memory = device_array<std::byte>(bytes);
            into.decided = sparsity_->keep_decision(into.memory.data(), stream_);
        }
        check(cudaMemcpyAsync(outcomes_.data() + decision * spans, sparsity_->decided().outcomes,
                              spans * sizeof(uniprefill::segment_outcome), cudaMemcpyDeviceToDevice, stream_),
              "outcomes");
        sparsity_->leave(
            uniprefill::as_byte_rows(hidden_.data(), most_rows_, config_.hidden),
            {qkv_.data(), std::int64_t{qkv_elements_} * 2, std::int64_t{q_elements_} * 2, most_rows_},
            stream_);
        if (options_.counts != counts_kind::budget) {
            const uniprefill::batch_view rows = sparsity_->rows();
            copy_back(counts_.data() + decision, rows.cu_seqlens + rows.num_requests, sizeof(std::int32_t),
                      stream_);
        }
    }
    mark(stage::look);
}

/// Rows after a decision by a fixed budget: the bound that the library is told, and the number.
std::int32_t session::budget_after(std::size_t decision, std::int32_t rows) const {
    return std::min(rows, options_.selecting[decision].rule.exact_rows());
}

void session::attend(std::int32_t layer) {
    const bool windowed = pattern_.kind(layer) == layer_kind::window;
    const bool here = selects(layer);
    const std::int32_t key_rows = here ? rows_before_ : rows_;
    bfloat16* const k = cache(k_, layer);
    bfloat16* const v = cache(v_, layer);
    attention_call call;
    call.queries = queries(rows_);
    call.out = {attended_.data(), q_elements_, config_.head_dim, rows_, config_.heads, config_.head_dim};
    if (of_prompt_) { // a prompt's rows are the first of its cache
        call.keys = {k, kv_elements_, config_.head_dim, key_rows, config_.kv_heads, config_.head_dim};
        call.values = {v, kv_elements_, config_.head_dim, key_rows, config_.kv_heads, config_.head_dim};
    } else {
        const bfloat16* const rows = qkv_.data() + q_elements_;
        call.keys = {rows, qkv_elements_, config_.head_dim, key_rows, config_.kv_heads, config_.head_dim};
        call.values = {rows + kv_elements_, qkv_elements_,   config_.head_dim, key_rows,
                       config_.kv_heads,    config_.head_dim};
        call.cached_k = k;
        call.cached_v = v;
    }
    call.window = windowed ? pattern_.window : 0;
    const bool baseline = dense_attention_ && (!windowed || (windows_by_cudnn_ && !dropped_before(layer)));
    call.batch = here ? before_ : alive();
    call.batch.num_rows = key_rows;
    call.batch.cached_lens = of_prompt_ ? nullptr : lengths_.data() + layer;
    if (here) {
        call.kept = sparsity_->decided();
        call.kept.num_rows = key_rows;
        call.kept.kept_bound = rows_;
    } else {
        call.kept =
            uniprefill::selection::keep_all(1, call.batch.num_segments, key_rows, memory_space::device);
    }
    if (listed(layer)) {
        call.lists = sparsity_->lists();
        call.means = options_.list_means;
    }
    if (!of_prompt_ && rows_ == 1) call.decode_len = decode_lengths_.data() + layer;
    if (of_prompt_ && !here && !listed(layer) && baseline) {
        dense_attention_->run(call.queries, call.keys, call.values, call.out, call.window, stream_);
    } else {
        row_attention_->run(call, stream_);
    }
    if (of_prompt_ && counts()) count_layer(layer, call);
}

/// The gated delta rule, over the rows that are alive.
void session::attend_linear(std::int32_t layer) {
    const linear_weights& weights = model_.layers()[static_cast<std::size_t>(layer)].linear;
    const uniprefill::batch_view rows = alive();
    const std::int64_t k_elements = std::int64_t{pattern_.linear_k_heads} * gated_delta_call::head_dim;
    gated_delta_call call;
    call.q = gate_up_.data();
    call.k = call.q + k_elements;
    call.v = call.k + k_elements;
    call.q_stride = call.k_stride = call.v_stride = linear_channels_;
    call.log_decay = decays_.data();
    call.beta = betas_.data();
    call.k_heads = pattern_.linear_k_heads;
    call.v_heads = pattern_.linear_v_heads;
    call.cu_seqlens = rows.cu_seqlens;
    call.requests = rows.num_requests;
    call.rows = rows_;
    call.state = state_.data();
    call.out = attended_.data();
    call.out_stride = std::int64_t{call.v_heads} * gated_delta_call::head_dim;
    gated_delta(call, delta_memory_.data(), delta_memory_.bytes(), stream_);
    gated_norm(attended_.data(), qkv_.data() + linear_channels_, linear_elements_, weights.norm.data(),
               config_.rms_epsilon, rows_, call.v_heads, stream_);
    mark(stage::linear);
}

/// Of kept rows alone: where rows were dropped, the normed ones are those that entered.
void session::gate_attended(std::int32_t layer) {
    const layer_weights& weights = model_.layers()[static_cast<std::size_t>(layer)];
    if (selects(layer)) {
        rms_norm(hidden_.data(), weights.attention_norm.data(), config_.rms_epsilon, rows_, config_.hidden,
                 nullptr, normed_.data(), stream_);
        mark(stage::rest);
    }
    products_.multiply(weights.output_gate, normed_.data(), rows_, gate_up_.data(), stream_);
    mark(stage::products);
    multiply_by_sigmoid(attended_.data(), gate_up_.data(), rows_, q_elements_, stream_);
    mark(stage::rest);
}

void session::add_to_hidden(const matrix& weights, const bfloat16* x, const device_array<float>& post_norm) {
    if (post_norm.size() == 0) {
        products_.multiply_add(weights, x, rows_, hidden_.data(), stream_);
        return mark(stage::products);
    }
    products_.multiply(weights, x, rows_, normed_.data(), stream_);
    mark(stage::products);
    add_norm(normed_.data(), post_norm.data(), config_.rms_epsilon, rows_, config_.hidden, hidden_.data(),
             stream_);
    mark(stage::rest);
}

/// What a layer of a prompt reads, added up on the device.
void session::count_layer(std::int32_t layer, const attention_call& call) {
    const uniprefill::batch_view& batch = call.batch;
    pair_count_call counted;
    counted.rows = call.queries.num_rows;
    counted.alive = (call.kept.identity ? batch.cu_seqlens : call.kept.cu_seqlens) + batch.num_requests;
    counted.kept_to_old = call.kept.identity ? nullptr : call.kept.kept_to_old;
    counted.positions = batch.positions;
    counted.window = call.window;
    if (call.lists.offsets != nullptr) {
        counted.bounds = batch.cu_segments != nullptr ? batch.cu_segments : batch.cu_seqlens;
        counted.segments = batch.num_segments;
        counted.offsets = call.lists.offsets;
        counted.blocks = call.lists.blocks;
        counted.heads = call.lists.num_heads;
        counted.block_rows = call.lists.block_rows;
        counted.window = call.lists.window;
        counted.means = call.means;
        lists_read_[static_cast<std::size_t>(layer)] = counted.heads;
    }
    count_pairs(counted, pair_counts_.data() + layer, stream_);
    if (!recording_ || call.kept.identity) return;
    std::vector<std::int32_t>& kept = facts_[static_cast<std::size_t>(layer)].kept_to_old;
    kept.resize(static_cast<std::size_t>(counted.rows));
    copy_back(kept.data(), counted.kept_to_old, kept.size() * sizeof(std::int32_t), stream_);
    stream_.wait();
    kept.erase(std::find(kept.begin(), kept.end(), -1), kept.end()); // rows that pad
}

/// Once a prompt has come to its end.
void session::collect_facts(std::int32_t first) {
    for (std::int32_t layer = first; layer < config_.layers; ++layer) {
        const auto at = static_cast<std::size_t>(layer);
        layer_facts& facts = facts_[at];
        if (pattern_.kind(layer) == layer_kind::linear) {
            facts.rows_in = rows_in_[at];
            facts.rows_kept = rows_kept_[at];
            continue;
        }
        facts.rows_in = counted_lengths_[at];
        facts.rows_kept = static_cast<std::int32_t>(counted_pairs_[at].queries);
        facts.pairs = static_cast<std::int64_t>(counted_pairs_[at].pairs) / lists_read_[at];
        if (pattern_.kind(layer) != layer_kind::full || !sparsity_ || !sparsity_->looks(layer)) continue;
        const std::int32_t* const bounds = counted_spans_.data() + count_of(layer, span_bounds());
        facts.estimator_pairs =
            pairs_of_look({bounds, bounds + span_bounds()}, options_.request, options_.num_observations);
    }
}

/// Attention of the rows that go on (of a selecting layer that is behind us), output projection and MLP.
void session::finish(std::int32_t layer) {
    const layer_weights& weights = model_.layers()[static_cast<std::size_t>(layer)];
    if (of_prompt_) rows_kept_[static_cast<std::size_t>(layer)] = rows_;
    if (pattern_.kind(layer) == layer_kind::linear) {
        attend_linear(layer);
    } else {
        if (!selects(layer)) {
            attend(layer);
            mark(stage::attention);
        }
        if (pattern_.output_gate) gate_attended(layer);
    }
    add_to_hidden(weights.output, attended_.data(), weights.attention_post_norm);
    rms_norm(hidden_.data(), weights.ffn_norm.data(), config_.rms_epsilon, rows_, config_.hidden, nullptr,
             normed_.data(), stream_);
    mark(stage::rest);
    products_.multiply(weights.gate_up, normed_.data(), rows_, gate_up_.data(), stream_);
    mark(stage::products);
    (pattern_.gelu ? geglu : swiglu)(gate_up_.data(), rows_, config_.ffn, activated_.data(), stream_);
    mark(stage::rest);
    add_to_hidden(weights.down, activated_.data(), weights.ffn_post_norm);
    if (of_prompt_ && !layer_ends_.empty()) layer_ends_[static_cast<std::size_t>(layer)].record(stream_);
}

void session::put_logits(std::int32_t rows, const std::int32_t* ends) {
    rms_norm(hidden_.data(), model_.output_norm().data(), config_.rms_epsilon, rows, config_.hidden, ends,
             normed_.data(), stream_);
    products_.multiply(model_.head(), normed_.data(), rows, logits_.data(), stream_);
    argmax(logits_.data(), rows, config_.vocab, best_.data(), stream_);
    copy_back(likeliest_.data(), best_.data() + rows - 1, sizeof(std::int32_t), stream_);
    add_lengths(entered_.data(), config_.layers, lengths_.data(), stream_);
    logits_rows_ = rows;
    mark(stage::rest);
}

} // namespace engine::cuda
