// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cuda/session.hpp"

#include "engine/cuda/linear_rows.hpp"
#include "engine/cuda/row_kernels.hpp"

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
    , counts_(options_.selecting.size() + 1)
    , likeliest_(static_cast<std::size_t>(std::max(options_.following, 1))) {
    if (options_.prompt < 1 || options_.following < 1) {
        throw error("prompt", "at least one token, and room for one after it",
                    std::to_string(options_.prompt));
    }
    const auto spans = static_cast<std::int32_t>(std::max<std::size_t>(options_.span_ends.size(), 1));
    if (options_.counts == counts_kind::budget && spans > 1) {
        throw error("--counts", "read where a prompt has several spans", "budget");
    }
    for (const auto& one : options_.selecting) {
        if (options_.counts == counts_kind::budget && one.rule.exact_rows() == 0) {
            throw error("--counts", "read where a layer's rule has no fixed budget", "budget");
        }
        if (pattern_.kind(one.layer) != layer_kind::full) {
            throw error("selecting layers", "such with full attention", std::to_string(one.layer));
        }
        decisions_.push_back(one.layer);
    }

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
    if (!options_.selecting.empty() || options_.lists) {
        sparsity_ = make_sparsity({bounds, options_.selecting, options_.lists, options_.lists_by_kv_head});
    }
    bounds.max_rows = most_rows_;
    bounds.max_cached_tokens = capacity_;
    row_attention_ = make_row_attention(bounds, options_.lists && options_.list_means);
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
    best_ = zeros<std::int32_t>(static_cast<std::size_t>(options_.following));
    outcomes_ =
        zeros<uniprefill::segment_outcome>(count_of(static_cast<std::int64_t>(decisions_.size()), spans));
    saved_before_.resize(decisions_.size() + 1);
    if (options_.time_layers) {
        if (options_.counts != counts_kind::read)
            throw error("time of layers", "counts that are read", "others");
        layer_ends_.resize(layers);
    }
    prepare_prompt();
    check(cudaDeviceSynchronize(), "memory");
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

void session::start_prompt() {
    of_prompt_ = true;
    rows_ = options_.prompt;
    check(cudaMemcpyAsync(prompt_.tokens.data(), prompt_tokens_.data(), prompt_.tokens.bytes(),
                          cudaMemcpyHostToDevice, stream_),
          "copy to the device");
    check(cudaMemsetAsync(lengths_.data(), 0, lengths_.bytes(), stream_), "lengths");
    if (sparsity_) sparsity_->begin(prompt_.view, stream_);
    embed(model_.embedding().weights.data(), config_.vocab, prompt_.tokens.data(), rows_, config_.hidden,
          hidden_.data(), stream_);
}

/// Norm, q, k and v of the rows that enter a layer; keys and values go to its cache.
void session::enter(std::int32_t layer) {
    const layer_weights& weights = model_.layers()[static_cast<std::size_t>(layer)];
    const uniprefill::batch_view rows = alive();
    if (of_prompt_) rows_in_[static_cast<std::size_t>(layer)] = rows_;
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
    sparsity_->look(layer, queries(bound), keys, kept_bound, stream_);
    if (decides) {
        const std::size_t spans = outcomes_.size() / decisions_.size();
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
    const bool listed = of_prompt_ && sparsity_ && options_.lists.has_value() && !windowed;
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
    if (of_prompt_ && !here && !listed && baseline) {
        dense_attention_->run(call.queries, call.keys, call.values, call.out, call.window, stream_);
        if (recording_) record_layer(call);
        return;
    }
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
    if (listed) {
        call.lists = sparsity_->lists();
        call.means = options_.list_means;
    }
    row_attention_->run(call, stream_);
    if (recording_ && of_prompt_) record_layer(call);
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

/// What a layer of a prompt read. Waits: only for runs that nobody times.
void session::record_layer(const attention_call& call) {
    const auto fetch = [&](const std::int32_t* from, std::int32_t count) {
        std::vector<std::int32_t> values(static_cast<std::size_t>(count));
        copy_back(values.data(), from, values.size() * sizeof(std::int32_t), stream_);
        stream_.wait();
        return values;
    };
    layer_facts facts;
    facts.rows_in = call.keys.num_rows;
    facts.rows_kept = call.queries.num_rows;
    std::vector<std::int32_t> queries(static_cast<std::size_t>(facts.rows_kept));
    std::iota(queries.begin(), queries.end(), 0);
    if (call.batch.num_rows > 0 && !call.kept.identity) {
        queries = fetch(call.kept.kept_to_old, facts.rows_kept);
        facts.kept_to_old = queries;
    }
    if (call.lists.offsets != nullptr) {
        facts.pairs = listed_pairs(call, queries);
    } else {
        for (const std::int32_t row : queries) {
            facts.pairs += row + 1;
        }
    }
    facts_.push_back(std::move(facts));
}

/// Pairs of these query rows under block lists, by the words of block_lists.hpp; a mean is a key.
std::int64_t session::listed_pairs(const attention_call& call,
                                   const std::vector<std::int32_t>& queries) const {
    const auto fetch = [&](auto& values, const void* from) {
        copy_back(values.data(), from, values.size() * sizeof(values[0]), stream_);
        stream_.wait();
    };
    const uniprefill::block_lists& lists = call.lists;
    const std::int32_t segments = call.batch.num_segments;
    std::vector<std::int32_t> positions(static_cast<std::size_t>(call.keys.num_rows));
    std::vector<std::int32_t> bounds(static_cast<std::size_t>(segments) + 1);
    std::vector<std::int64_t> offsets(count_of(segments, lists.num_heads) + 1);
    fetch(positions, call.batch.positions);
    fetch(bounds, call.batch.cu_segments != nullptr ? call.batch.cu_segments : call.batch.cu_seqlens);
    fetch(offsets, lists.offsets);
    std::vector<std::int32_t> blocks(static_cast<std::size_t>(offsets.back()));
    fetch(blocks, lists.blocks);
    std::int64_t pairs = 0;
    auto query = queries.begin();
    for (std::int32_t s = 0; s < segments; ++s) {
        const std::int32_t first = bounds[static_cast<std::size_t>(s)];
        const std::int32_t end = bounds[static_cast<std::size_t>(s) + 1];
        const auto stop = std::lower_bound(query, queries.end(), end);
        for (std::int32_t head = 0; head < lists.num_heads; ++head) {
            std::vector<std::int64_t> listed(static_cast<std::size_t>(end - first) +
                                             1); // listed rows before each
            const std::size_t list = count_of(s, lists.num_heads) + static_cast<std::size_t>(head);
            for (std::int64_t i = offsets[list]; i < offsets[list + 1]; ++i) {
                const std::int32_t begin = blocks[static_cast<std::size_t>(i)] * lists.block_rows;
                for (std::int32_t row = begin; row < std::min(begin + lists.block_rows, end - first); ++row) {
                    listed[static_cast<std::size_t>(row) + 1] = 1;
                }
            }
            std::partial_sum(listed.begin(), listed.end(), listed.begin());
            std::int32_t nearest = first; // the first row inside the query's window
            for (auto at = query; at != stop; ++at) {
                const std::int32_t row = *at;
                const std::int32_t oldest = positions[static_cast<std::size_t>(row)] - lists.window + 1;
                while (nearest <= row && positions[static_cast<std::size_t>(nearest)] < oldest) {
                    ++nearest;
                }
                const std::int32_t window = (nearest - first) / lists.block_rows * lists.block_rows;
                const std::int32_t from = nearest > row ? row + 1 - first : window;
                pairs += first + listed[static_cast<std::size_t>(from)] + (row - first + 1 - from);
                if (call.means) {
                    const std::int32_t met = std::min(from, row - first) / lists.block_rows;
                    pairs +=
                        met - listed[static_cast<std::size_t>(met * lists.block_rows)] / lists.block_rows;
                }
            }
        }
        query = stop;
    }
    return pairs / lists.num_heads;
}

/// Attention of the rows that go on, output projection and MLP.
void session::finish(std::int32_t layer) {
    const layer_weights& weights = model_.layers()[static_cast<std::size_t>(layer)];
    if (of_prompt_) rows_kept_[static_cast<std::size_t>(layer)] = rows_;
    if (pattern_.kind(layer) == layer_kind::linear) {
        attend_linear(layer);
    } else {
        attend(layer);
        mark(stage::attention);
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
    piece& of = pieces_[{static_cast<std::int32_t>(index), rows_before_, rows_}];
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
    counted_.record(stream_);
    counted_.wait();
    ++times_.count_reads;
    const std::int32_t count = counts_[decision];
    if (count < 1 || count > rows_before_) {
        throw error("rows after layer " + std::to_string(decisions_[decision]),
                    "1 to " + std::to_string(rows_before_), std::to_string(count));
    }
    rows_ = count;
    if (options_.counts == counts_kind::buckets) {
        const std::int64_t multiple = options_.bucket_rows;
        rows_ = static_cast<std::int32_t>(
            std::min<std::int64_t>((count + multiple - 1) / multiple * multiple, rows_before_));
    }
}

void session::run_by_counts(bool as_graphs) {
    rows_ = rows_before_ = options_.prompt;
    for (std::size_t index = 0; index <= decisions_.size(); ++index) {
        const std::int32_t entering = rows_;
        run_stretch(index, as_graphs);
        if (index == decisions_.size()) break;
        rows_before_ = entering;
        if (options_.counts == counts_kind::budget) {
            rows_ = budget_after(index, entering);
        } else {
            read_count(index);
        }
    }
}

void session::run_prefill(bool by_stage) {
    by_stage_ = by_stage;
    if (by_stage) clock_.start(stream_);
    const bool plain =
        options_.counts == counts_kind::read || (options_.counts == counts_kind::budget && !warm_);
    if (by_stage || recording_ || plain) {
        run_by_counts(false);
    } else if (options_.counts == counts_kind::buckets) {
        run_by_counts(true);
    } else {
        whole_.launch(stream_);
    }
    by_stage_ = false;
}

const prefill_times& session::time_prefill(const std::vector<std::int32_t>& tokens, bool by_stage) {
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
    if (!by_stage && !recording_ && warm_ && options_.counts == counts_kind::budget && !whole_) {
        whole_ = graph(stream_, [&] { run_by_counts(false); });
    }
    const auto begin = std::chrono::steady_clock::now();
    started_.record(stream_);
    run_prefill(by_stage);
    stopped_.record(stream_);
    stream_.wait();
    const auto end = std::chrono::steady_clock::now();
    times_.wall_ms = std::chrono::duration<double, std::milli>(end - begin).count();
    times_.device_ms = static_cast<double>(stopped_.since(started_));
    warm_ = true;
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
    const std::size_t spans = outcomes.size() / decisions_.size();
    for (std::size_t i = 0; i < decisions_.size(); ++i) {
        const auto first = outcomes.begin() + static_cast<std::ptrdiff_t>(i * spans);
        all.push_back({decisions_[i], {first, first + static_cast<std::ptrdiff_t>(spans)}});
    }
    return all;
}

} // namespace engine::cuda
