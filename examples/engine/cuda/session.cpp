// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cuda/session.hpp"

#include "engine/cuda/linear_rows.hpp"
#include "engine/cuda/row_kernels.hpp"
#include "engine/model/estimator_pairs.hpp"

#include <uniprefill/core/exceptions.hpp>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <string>
#include <utility>

namespace engine::cuda {

using uniprefill::head_rows;
using uniprefill::memory_space;
using uniprefill::request_tag;

namespace {

std::size_t count_of(std::int64_t rows, std::int64_t columns) {
    return static_cast<std::size_t>(rows * columns);
}

/// An array of zeros: padding rows are computed with, and must be finite.
template <class T>
device_array<T> zeros(std::size_t count) {
    device_array<T> made(count);
    if (count > 0) check(cudaMemset(made.data(), 0, made.bytes()), "memory");
    return made;
}

template <class T>
device_array<T> uploaded(const std::vector<T>& values) {
    device_array<T> made(values.size());
    if (!values.empty()) made.set(values);
    return made;
}

void copy_back(void* to, const void* from, std::size_t bytes, cudaStream_t on) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, on), "copy to the host");
}

} // namespace

session::session(const cuda_model& model, session_options options)
    : model_(model)
    , config_(model.config())
    , pattern_(model.pattern())
    , options_(std::move(options))
    , most_rows_(std::max(options_.prompt, options_.following))
    , q_elements_(config_.heads * config_.head_dim)
    , kv_elements_(config_.kv_heads * config_.head_dim)
    , qkv_elements_(q_elements_ + 2 * kv_elements_)
    , linear_channels_((2 * pattern_.linear_k_heads + pattern_.linear_v_heads) * gated_delta_call::head_dim)
    , linear_elements_(linear_channels_ + pattern_.linear_v_heads * (gated_delta_call::head_dim + 2))
    , capacity_(options_.prompt + options_.following)
    , prompt_tokens_(static_cast<std::size_t>(options_.prompt))
    , counts_(static_cast<std::size_t>(config_.layers))
    , counted_pairs_(static_cast<std::size_t>(config_.layers))
    , counted_lengths_(static_cast<std::size_t>(config_.layers))
    , counted_spans_(count_of(config_.layers, span_bounds()))
    , likeliest_(static_cast<std::size_t>(std::max(options_.following, 1))) {
    if (options_.prompt < 1 || options_.following < 1) {
        throw error("prompt", "at least one token, and room for one after it",
                    std::to_string(options_.prompt));
    }
    const auto spans = static_cast<std::int32_t>(std::max<std::size_t>(options_.span_ends.size(), 1));
    if (options_.counts == counts_kind::budget && spans > 1) {
        throw error("--counts", "read where a prompt has several spans", "budget");
    }
    if (options_.row_multiple < 1) {
        throw error("rows of products", "a multiple of at least 1", std::to_string(options_.row_multiple));
    }
    check_rules(options_.selecting);

    uniprefill::limits bounds;
    bounds.max_requests = 1;
    bounds.max_segments = spans;
    bounds.max_rows = options_.prompt;
    bounds.num_layers = config_.layers;
    bounds.num_heads = config_.heads;
    bounds.num_kv_heads = config_.kv_heads;
    bounds.head_dim = config_.head_dim;
    bounds.block_rows = options_.block_rows;
    bounds.num_observations = options_.num_observations;
    bounds_ = bounds;
    if (!options_.selecting.empty() || options_.lists) {
        sparsity_ = make_sparsity(
            {bounds_, options_.selecting, options_.lists, options_.list_rules, options_.lists_by_kv_head});
    }
    bounds.max_rows = most_rows_;
    bounds.max_cached_tokens = capacity_;
    row_attention_ = make_row_attention(bounds, options_.list_means);
    if (options_.attention == attention_kind::cudnn) {
        dense_attention_ =
            std::make_unique<dense_attention>(config_.heads, config_.kv_heads, config_.head_dim);
    }

    const std::int64_t rows = most_rows_;
    angles_ = device_array<float2>(count_of(capacity_, config_.rope_dims / 2));
    make_rope_table(capacity_, config_.rope_dims, static_cast<double>(config_.rope_base), angles_.data(),
                    nullptr);
    if (pattern_.has(layer_kind::window)) {
        window_angles_ = device_array<float2>(angles_.size());
        make_rope_table(capacity_, config_.rope_dims, static_cast<double>(pattern_.window_rope_base),
                        window_angles_.data(), nullptr);
    }
    hidden_ = zeros<float>(count_of(rows, config_.hidden));
    normed_ = zeros<bfloat16>(count_of(rows, config_.hidden));
    const bool linear = pattern_.has(layer_kind::linear);
    const std::int32_t linear_out = pattern_.linear_v_heads * gated_delta_call::head_dim;
    qkv_ = zeros<bfloat16>(count_of(rows, std::max(qkv_elements_, linear ? linear_elements_ : 0)));
    attended_ = zeros<bfloat16>(count_of(rows, std::max(q_elements_, linear ? linear_out : 0)));
    gate_up_ = zeros<bfloat16>(count_of(rows, std::max({2 * config_.ffn, linear ? linear_channels_ : 0,
                                                        pattern_.output_gate ? q_elements_ : 0})));
    activated_ = zeros<bfloat16>(count_of(rows, config_.ffn));
    logits_ = zeros<float>(count_of(options_.following, config_.vocab));
    std::int64_t stretches = pattern_.has(layer_kind::window) ? 1 : 0; // the first is theirs
    for (std::int32_t layer = 0; layer < config_.layers; ++layer) {
        cache_of_.push_back(pattern_.kind(layer) == layer_kind::full ? stretches++ : 0);
    }
    k_ = zeros<bfloat16>(count_of(stretches * capacity_, kv_elements_));
    v_ = zeros<bfloat16>(count_of(stretches * capacity_, kv_elements_));
    if (linear) make_linear();
    if (dense_attention_ && pattern_.has(layer_kind::window)) find_windows();
    const auto layers = static_cast<std::size_t>(config_.layers);
    lengths_ = zeros<std::int32_t>(layers);
    entered_ = zeros<std::int32_t>(layers);
    prompt_lengths_ = zeros<std::int32_t>(layers);
    ones_ = uploaded(std::vector<std::int32_t>(layers, 1));
    decode_lengths_ = zeros<std::int32_t>(layers);
    pair_counts_ = zeros<pair_count>(layers);
    best_ = zeros<std::int32_t>(static_cast<std::size_t>(options_.following));
    outcomes_ = zeros<uniprefill::segment_outcome>(count_of(config_.layers, spans));
    note_decisions();
    if (options_.time_layers) {
        if (options_.counts != counts_kind::read)
            throw error("time of layers", "counts that are read", "others");
        layer_ends_.resize(layers);
    }
    prepare_prompt();
    check(cudaDeviceSynchronize(), "memory");
}

void session::check_rules(
    const std::vector<uniprefill::selecting_layer<uniprefill::selection_rule>>& all) const {
    for (const auto& one : all) {
        if (options_.counts == counts_kind::budget && one.rule.exact_rows() == 0) {
            throw error("--counts", "read where a layer's rule has no fixed budget", "budget");
        }
        if (pattern_.kind(one.layer) != layer_kind::full) {
            throw error("selecting layers", "such with full attention", std::to_string(one.layer));
        }
    }
}

void session::note_decisions() {
    decisions_.clear();
    for (const auto& one : options_.selecting) {
        decisions_.push_back(one.layer);
    }
    saved_before_.assign(decisions_.size() + 1, {});
}

void session::change(std::vector<uniprefill::selecting_layer<uniprefill::selection_rule>> selecting,
                     const std::optional<uniprefill::list_options<>>& lists, engine::list_rules rules,
                     const uniprefill::request_options& request) {
    if (options_.counts != counts_kind::read) {
        throw error("a session whose policy changes", "counts that are read", name_of(options_.counts));
    }
    check_rules(selecting);
    stream_.wait();
    if (sparsity_) {
        sparsity_->change(selecting, lists, rules);
    } else if (!selecting.empty() || lists) {
        sparsity_ = make_sparsity({bounds_, selecting, lists, rules, options_.lists_by_kv_head});
    }
    options_.selecting = std::move(selecting);
    options_.lists = lists;
    options_.list_rules = std::move(rules);
    options_.request = request;
    prompt_.options.set({request});
    note_decisions();
}

void session::leave_trail(device_trail* left) {
    if (left != nullptr && (pattern_.period > 1 || options_.counts != counts_kind::read)) {
        throw error("trail", "a model whose layers all read every key, and counts that are read", "another");
    }
    left_ = left;
    if (left_ != nullptr) left_->stops.resize(static_cast<std::size_t>(config_.layers));
}

void session::make_linear() {
    const std::int32_t heads = pattern_.linear_v_heads;
    decays_ = zeros<float>(count_of(most_rows_, heads));
    betas_ = zeros<float>(count_of(most_rows_, heads));
    state_ = zeros<float>(count_of(heads, gated_delta_call::head_dim * gated_delta_call::head_dim));
    delta_memory_ = device_array<std::byte>(gated_delta_bytes(most_rows_, 1, heads));
}

void session::find_windows() {
    const head_rows<const bfloat16> keys{k_.data(),       kv_elements_,     config_.head_dim,
                                         options_.prompt, config_.kv_heads, config_.head_dim};
    windows_by_cudnn_ = dense_attention_->can(
        queries(options_.prompt), keys, keys,
        {attended_.data(), q_elements_, config_.head_dim, options_.prompt, config_.heads, config_.head_dim},
        pattern_.window);
}

session::~session() {
    // Arrays go before the stream does.
    static_cast<void>(cudaStreamSynchronize(stream_));
}

void session::prepare_prompt() {
    const std::int32_t rows = options_.prompt;
    std::vector<std::int32_t> ascending(static_cast<std::size_t>(rows));
    std::iota(ascending.begin(), ascending.end(), 0);
    prompt_.tokens = device_array<std::int32_t>(ascending.size());
    prompt_.positions = uploaded(ascending);
    prompt_.tags = uploaded(std::vector<request_tag>{request_tag::prefill});
    prompt_.cu_seqlens = uploaded(std::vector<std::int32_t>{0, rows});
    prompt_.options = uploaded(std::vector<uniprefill::request_options>{options_.request});
    uniprefill::batch_view& view = prompt_.view;
    view.space = memory_space::device;
    view.num_requests = view.num_segments = 1;
    view.num_rows = rows;
    view.tags = prompt_.tags.data();
    view.cu_seqlens = prompt_.cu_seqlens.data();
    view.positions = prompt_.positions.data();
    view.options = prompt_.options.data();
    if (options_.span_ends.size() > 1) {
        std::vector<std::int32_t> begins{0};
        begins.insert(begins.end(), options_.span_ends.begin(), options_.span_ends.end());
        prompt_.cu_segments = uploaded(begins);
        prompt_.segment_request = uploaded(std::vector<std::int32_t>(options_.span_ends.size(), 0));
        view.num_segments = static_cast<std::int32_t>(options_.span_ends.size());
        view.cu_segments = prompt_.cu_segments.data();
        view.segment_request = prompt_.segment_request.data();
    }

    const auto most = static_cast<std::size_t>(options_.following);
    following_.tokens = device_array<std::int32_t>(most);
    following_.positions = device_array<std::int32_t>(most);
    following_.tags = device_array<request_tag>(1);
    following_.cu_seqlens = device_array<std::int32_t>(2);
    following_.view.space = memory_space::device;
    following_.view.num_requests = following_.view.num_segments = 1;
    following_.view.tags = following_.tags.data();
    following_.view.cu_seqlens = following_.cu_seqlens.data();
    following_.view.positions = following_.positions.data();
}

bool session::selects(std::int32_t layer) const {
    return of_prompt_ && sparsity_ && sparsity_->selects(layer);
}

/// Whether a prompt's rows that enter may have gaps between their positions.
bool session::dropped_before(std::int32_t layer) const {
    return !decisions_.empty() && decisions_.front() < layer;
}

/// Whether heads of a prompt's queries read block lists.
bool session::listed(std::int32_t layer) const {
    return of_prompt_ && sparsity_ && sparsity_->lists_at(layer) && pattern_.kind(layer) == layer_kind::full;
}

void session::mark(stage done) {
    if (by_stage_) clock_.mark(done, stream_);
}

/// Rows that are alive; the number is the host's.
uniprefill::batch_view session::alive() const {
    uniprefill::batch_view rows = !of_prompt_ ? following_.view
                                  : sparsity_ ? sparsity_->rows()
                                              : prompt_.view;
    rows.num_rows = rows_;
    return rows;
}

head_rows<const bfloat16> session::queries(std::int32_t rows) const {
    return {qkv_.data(), qkv_elements_, config_.head_dim, rows, config_.heads, config_.head_dim};
}

bfloat16* session::cache(const device_array<bfloat16>& all, std::int32_t layer) const {
    return all.data() + cache_of_[static_cast<std::size_t>(layer)] * capacity_ * kv_elements_;
}

// ---------------------------------------------------------------------------------------------------------------------
// The forward pass, kernel by kernel.

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

// ---------------------------------------------------------------------------------------------------------------------
// A prompt: stretches of kernels that end where a decision is taken.

void session::put_stretch(std::size_t index) {
    std::int32_t layer = 0;
    if (index == 0) {
        start_prompt();
    } else {
        layer = decisions_[index - 1];
        finish(layer++);
    }
    put_layers(layer, index);
}

/// A stretch from the entry of a layer to its end.
void session::put_layers(std::int32_t layer, std::size_t index) {
    const std::int32_t end = index < decisions_.size() ? decisions_[index] : config_.layers;
    for (; layer < end; ++layer) {
        enter(layer);
        decide(layer);
        finish(layer);
    }
    if (index < decisions_.size()) {
        enter(end);
        decide(end);
    } else {
        const uniprefill::batch_view rows = alive();
        put_logits(1, rows.cu_seqlens + 1);
    }
}

/// What enter() and finish() note of a stretch's layers, for one that is replayed.
void session::note_rows(std::size_t index) {
    const auto begin = static_cast<std::size_t>(index == 0 ? 0 : decisions_[index - 1]);
    const auto end = static_cast<std::size_t>(index < decisions_.size() ? decisions_[index] : config_.layers);
    std::fill(rows_kept_.begin() + static_cast<std::ptrdiff_t>(begin),
              rows_kept_.begin() + static_cast<std::ptrdiff_t>(end), rows_);
    const std::size_t last_in = std::min(end + 1, rows_in_.size());
    for (std::size_t layer = index == 0 ? 0 : begin + 1; layer < last_in; ++layer) {
        rows_in_[layer] = rows_;
    }
}

void session::run_stretch(std::size_t index, bool as_graph) {
    if (!as_graph) return put_stretch(index);
    piece& of = pieces_[{static_cast<std::int32_t>(index), rows_}];
    if (of.recorded) {
        of.recorded.launch(stream_);
        if (sparsity_) sparsity_->restore(index);
        before_ = saved_before_[index];
        note_rows(index);
        return;
    }
    if (of.seen) {
        of.recorded = graph(stream_, [&] { put_stretch(index); });
        of.recorded.launch(stream_);
    } else {
        put_stretch(index);
        of.seen = true;
    }
    if (sparsity_) sparsity_->save(index);
    saved_before_[index] = before_;
}

/// The one thing that the host waits for.
void session::read_count(std::size_t decision) {
    counted_.wait();
    ++times_.count_reads;
    const std::int32_t count = counts_[decision];
    if (count < 1 || count > rows_before_) {
        throw error("rows after layer " + std::to_string(decisions_[decision]),
                    "1 to " + std::to_string(rows_before_), std::to_string(count));
    }
    const std::int64_t multiple =
        options_.counts == counts_kind::buckets ? options_.bucket_rows : options_.row_multiple;
    rows_ = static_cast<std::int32_t>(
        std::min<std::int64_t>((count + multiple - 1) / multiple * multiple, rows_before_));
}

void session::run_by_counts(bool as_graphs, const device_trail* from, std::int32_t first) {
    rows_ = rows_before_ = options_.prompt;
    const auto begin =
        from == nullptr ? decisions_.begin() : std::lower_bound(decisions_.begin(), decisions_.end(), first);
    if (from != nullptr) begin_at(*from, first);
    for (auto index = static_cast<std::size_t>(begin - decisions_.begin()); index <= decisions_.size();
         ++index) {
        const std::int32_t entering = rows_;
        if (from != nullptr) {
            put_layers(first, index);
            from = nullptr;
        } else {
            run_stretch(index, as_graphs);
        }
        if (index == decisions_.size()) break;
        rows_before_ = entering;
        const bool reads = options_.counts != counts_kind::budget;
        if (reads) {
            counted_.record(stream_);
        } else {
            rows_ = budget_after(index, entering);
        }
        // The device knows which rows go on: it attends while the host waits for their number.
        attend(decisions_[index]);
        mark(stage::attention);
        if (reads) read_count(index);
    }
}

void session::run_prefill(bool by_stage, const device_trail* from, std::int32_t first) {
    by_stage_ = by_stage;
    if (by_stage) clock_.start(stream_);
    const bool plain =
        options_.counts == counts_kind::read || (options_.counts == counts_kind::budget && !warm_);
    if (by_stage || counts() || plain) {
        run_by_counts(false, from, first);
    } else if (options_.counts == counts_kind::buckets) {
        run_by_counts(true);
    } else {
        whole_.launch(stream_);
    }
    by_stage_ = false;
}

const prefill_times& session::time_prefill(const std::vector<std::int32_t>& tokens, bool by_stage,
                                           const device_trail* from, std::int32_t first) {
    if (tokens.size() != prompt_tokens_.size()) {
        throw error("prompt", std::to_string(prompt_tokens_.size()) + " tokens",
                    std::to_string(tokens.size()));
    }
    for (const std::int32_t token : tokens) {
        if (token < 0 || token >= config_.vocab) {
            throw error("token id", "0.." + std::to_string(config_.vocab - 1), std::to_string(token));
        }
    }
    stream_.wait();
    std::copy(tokens.begin(), tokens.end(), prompt_tokens_.data());
    rows_in_.resize(static_cast<std::size_t>(config_.layers));
    rows_kept_.resize(static_cast<std::size_t>(config_.layers));
    facts_.clear();
    times_ = {};
    // Recording is not part of a prefill that users wait for.
    if (!by_stage && !counts() && warm_ && options_.counts == counts_kind::budget && !whole_) {
        whole_ = graph(stream_, [&] { run_by_counts(false); });
    }
    const auto begin = std::chrono::steady_clock::now();
    started_.record(stream_);
    run_prefill(by_stage, from, first);
    stopped_.record(stream_);
    if (counts()) {
        copy_back(counted_pairs_.data(), pair_counts_.data(), pair_counts_.bytes(), stream_);
        copy_back(counted_lengths_.data(), lengths_.data(), lengths_.bytes(), stream_);
    }
    if (left_ != nullptr) leave_caches();
    stream_.wait();
    const auto end = std::chrono::steady_clock::now();
    times_.wall_ms = std::chrono::duration<double, std::milli>(end - begin).count();
    times_.device_ms = static_cast<double>(stopped_.since(started_));
    warm_ = true;
    if (counts()) collect_facts(first);
    if (left_ != nullptr && counts()) {
        for (std::size_t layer = 0; layer < facts_.size(); ++layer) {
            left_->stops[layer].facts = facts_[layer];
        }
    }
    of_prompt_ = true;
    logits_rows_ = 1;
    fed_ = options_.prompt;
    check(cudaMemcpyAsync(prompt_lengths_.data(), lengths_.data(), lengths_.bytes(), cudaMemcpyDeviceToDevice,
                          stream_),
          "lengths");
    return times_;
}

const prefill_times& session::prefill(const std::vector<std::int32_t>& tokens) {
    return time_prefill(tokens, false);
}

const prefill_times& session::prefill_by_stage(const std::vector<std::int32_t>& tokens) {
    return time_prefill(tokens, true);
}

const prefill_times& session::prefill_from(const device_trail& from, std::int32_t first,
                                           const std::vector<std::int32_t>& tokens) {
    const bool fits = from.begins_at(first) &&
                      from.entered.size() == static_cast<std::size_t>(config_.layers) &&
                      from.k.size() == count_of(std::int64_t{config_.layers} * options_.prompt, kv_elements_);
    if (!fits || options_.counts != counts_kind::read || (left_ != nullptr && left_ != &from)) {
        throw error("trail", "one that begins at layer " + std::to_string(first), "another");
    }
    return time_prefill(tokens, false, &from, first);
}

/// Everything that the layers before @p first left.
void session::begin_at(const device_trail& from, std::int32_t first) {
    const auto copy = [&](void* to, const void* source, std::size_t bytes) {
        check(cudaMemcpyAsync(to, source, bytes, cudaMemcpyDeviceToDevice, stream_), "trail");
    };
    start_counts();
    if (sparsity_) sparsity_->begin(prompt_.view, stream_);
    for (std::int32_t layer = 0; layer < first; ++layer) {
        const auto at = static_cast<std::size_t>(layer);
        const device_trail::stop& left = from.stops[at];
        if (!left.decided.identity) sparsity_->replay(left.decided, stream_);
        rows_in_[at] = left.rows;
        rows_kept_[at] = from.stops[at + 1].rows;
        if (counts()) facts_[at] = left.facts;
    }
    const device_trail::stop& there = from.stops[static_cast<std::size_t>(first)];
    rows_ = rows_before_ = there.rows;
    copy(hidden_.data(), there.hidden.data(), count_of(rows_, config_.hidden) * sizeof(float));
    copy(entered_.data(), from.entered.data(), static_cast<std::size_t>(first) * sizeof(std::int32_t));
    const std::size_t stretch = count_of(options_.prompt, kv_elements_) * sizeof(bfloat16);
    const std::size_t apart = count_of(capacity_, kv_elements_) * sizeof(bfloat16);
    for (const auto& [to, source] : {std::pair{&k_, &from.k}, std::pair{&v_, &from.v}}) {
        check(cudaMemcpy2DAsync(to->data(), apart, source->data(), stretch, stretch,
                                static_cast<std::size_t>(first), cudaMemcpyDeviceToDevice, stream_),
              "trail");
    }
}

/// Of rows that are about to enter a layer.
void session::leave_stop(std::int32_t layer) {
    device_trail::stop& into = left_->stops[static_cast<std::size_t>(layer)];
    into.rows = rows_;
    into.decided = {};
    into.begins = left_->may_begin.empty() || left_->may_begin[static_cast<std::size_t>(layer)];
    if (!into.begins) return;
    const std::size_t most = count_of(options_.prompt, config_.hidden);
    if (into.hidden.size() < most) into.hidden = device_array<float>(most);
    check(cudaMemcpyAsync(into.hidden.data(), hidden_.data(), count_of(rows_, config_.hidden) * sizeof(float),
                          cudaMemcpyDeviceToDevice, stream_),
          "trail");
}

/// Keys and values of a prompt, once all layers have written theirs.
void session::leave_caches() {
    const std::size_t all = count_of(std::int64_t{config_.layers} * options_.prompt, kv_elements_);
    if (left_->k.size() != all) {
        left_->k = device_array<bfloat16>(all);
        left_->v = device_array<bfloat16>(all);
        left_->entered = device_array<std::int32_t>(static_cast<std::size_t>(config_.layers));
    }
    const std::size_t stretch = count_of(options_.prompt, kv_elements_) * sizeof(bfloat16);
    const std::size_t apart = count_of(capacity_, kv_elements_) * sizeof(bfloat16);
    for (const auto& [to, source] : {std::pair{&left_->k, &k_}, std::pair{&left_->v, &v_}}) {
        check(cudaMemcpy2DAsync(to->data(), stretch, source->data(), apart, stretch,
                                static_cast<std::size_t>(config_.layers), cudaMemcpyDeviceToDevice, stream_),
              "trail");
    }
    check(cudaMemcpyAsync(left_->entered.data(), entered_.data(), entered_.bytes(), cudaMemcpyDeviceToDevice,
                          stream_),
          "trail");
}

std::size_t session::graphs() const {
    std::size_t recorded = whole_ ? 1 : 0;
    for (const auto& [key, of] : pieces_) {
        if (of.recorded) ++recorded;
    }
    return recorded;
}

// ---------------------------------------------------------------------------------------------------------------------
// What follows a prompt.

void session::feed(const std::vector<std::int32_t>& tokens) {
    const auto rows = static_cast<std::int32_t>(tokens.size());
    if (pattern_.period > 1) throw error("tokens after the prompt", "none of a hybrid", std::to_string(rows));
    if (rows < 1 || rows > options_.following || fed_ + rows > capacity_) {
        throw error("tokens after the prompt",
                    "1 to " + std::to_string(std::min(options_.following, capacity_ - fed_)),
                    std::to_string(rows));
    }
    for (const std::int32_t token : tokens) {
        if (token < 0 || token >= config_.vocab) {
            throw error("token id", "0.." + std::to_string(config_.vocab - 1), std::to_string(token));
        }
    }
    stream_.wait();
    std::vector<std::int32_t> positions(tokens.size());
    std::iota(positions.begin(), positions.end(), fed_);
    following_.tokens.set(tokens);
    following_.positions.set(positions);
    following_.tags.set({rows == 1 ? request_tag::decode : request_tag::verify});
    following_.cu_seqlens.set({0, rows});
    following_.view.num_rows = rows;

    of_prompt_ = false;
    rows_ = rows;
    if (rows == 1) { // the row reads its own token, too
        check(cudaMemcpyAsync(decode_lengths_.data(), lengths_.data(), lengths_.bytes(),
                              cudaMemcpyDeviceToDevice, stream_),
              "lengths");
        add_lengths(ones_.data(), config_.layers, decode_lengths_.data(), stream_);
    }
    embed(model_.embedding().weights.data(), config_.vocab, following_.tokens.data(), rows, config_.hidden,
          hidden_.data(), stream_);
    for (std::int32_t layer = 0; layer < config_.layers; ++layer) {
        enter(layer);
        finish(layer);
    }
    put_logits(rows, nullptr);
    stream_.wait();
    of_prompt_ = true;
    fed_ += rows;
}

void session::back_to_prompt() {
    check(cudaMemcpyAsync(lengths_.data(), prompt_lengths_.data(), lengths_.bytes(), cudaMemcpyDeviceToDevice,
                          stream_),
          "lengths");
    fed_ = options_.prompt;
}

std::vector<float> session::logits() const {
    return logits_.get(count_of(logits_rows_, config_.vocab));
}

std::vector<double> session::layer_ms() const {
    std::vector<double> all;
    const event* before = &started_;
    for (const event& end : layer_ends_) {
        all.push_back(static_cast<double>(end.since(*before)));
        before = &end;
    }
    return all;
}

std::vector<decision_record> session::decisions() const {
    std::vector<decision_record> all;
    if (decisions_.empty()) return all;
    const std::vector<uniprefill::segment_outcome> outcomes = outcomes_.get();
    const std::size_t spans = outcomes.size() / static_cast<std::size_t>(config_.layers);
    for (std::size_t i = 0; i < decisions_.size(); ++i) {
        const auto first = outcomes.begin() + static_cast<std::ptrdiff_t>(i * spans);
        all.push_back({decisions_[i], {first, first + static_cast<std::ptrdiff_t>(spans)}});
    }
    return all;
}

} // namespace engine::cuda
