// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cuda/session.hpp"

#include "engine/cuda/row_kernels.hpp"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

namespace engine::cuda {

using uniprefill::head_rows;
using uniprefill::memory_space;
using uniprefill::request_tag;

namespace {

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

std::size_t session::graphs() const {
    std::size_t recorded = whole_ ? 1 : 0;
    for (const auto& [key, of] : pieces_) {
        if (of.recorded) ++recorded;
    }
    return recorded;
}

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
