// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cuda/model.hpp"
#include "engine/cuda/program.hpp"
#include "engine/cuda/session.hpp"

#include <chrono>
#include <cstddef>
#include <utility>

namespace engine {

namespace {

cuda::session_options options_under(const policy& policy, std::int32_t prompt, std::int32_t following) {
    if (policy.propagation != uniprefill::propagation::cumulative) {
        throw error("--propagation", "cumulative on a CUDA device", name_of(policy.propagation));
    }
    cuda::session_options options;
    options.prompt = prompt;
    options.following = following;
    for (const layer_rule& rule : policy.rules) {
        options.selecting.push_back({rule.layer, rule.rule, nullptr});
    }
    options.span_ends = span_ends(policy, prompt);
    options.request.sink = policy.sink;
    options.request.tail = policy.tail;
    options.request.min_length = policy.min_length;
    options.block_rows = policy.block_rows;
    options.num_observations = policy.num_observations;
    if (policy.list_sampling) {
        throw error("lists.query_rows", "none on a CUDA device",
                    std::to_string(policy.list_sampling->query_rows));
    }
    options.lists = policy.lists;
    options.time_layers = true;
    return options;
}

/// One prompt read on a CUDA device. It is read twice: once for the records, which also sets products and
/// graphs up, and once for the time.
class cuda_reader final : public prompt_reader {
  public:
    cuda_reader(const cuda::cuda_model& model, const policy& policy, std::int32_t prompt,
                std::int32_t following)
        : session_(model, options_under(policy, prompt, following)) {}

    void prefill(const std::vector<std::int32_t>& tokens, const progress_call& progress) override {
        session_.record(true);
        static_cast<void>(session_.prefill(tokens));
        note_layers(tokens.size());
        if (progress) progress(0.5);
        session_.record(false);
        seconds_ = session_.prefill(tokens).wall_ms / 1000;
        const std::vector<double> times = session_.layer_ms();
        for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
            layers_[layer].seconds = times[layer] / 1000;
        }
        logits_ = session_.logits();
    }
    void feed(const std::vector<std::int32_t>& tokens) override {
        session_.feed(tokens);
        logits_ = session_.logits();
    }
    void feed_one(std::int32_t token) override { feed({token}); }
    void back_to_prompt() override { session_.back_to_prompt(); }

    const std::vector<float>& logits() const override { return logits_; }
    double prefill_seconds() const override { return seconds_; }
    const std::vector<layer_record>& layers() const override { return layers_; }
    const std::vector<std::int32_t>& dropped_at() const override { return dropped_at_; }

  private:
    void note_layers(std::size_t tokens) {
        layers_.assign(session_.facts().size(), {});
        dropped_at_.assign(tokens, -1);
        std::vector<std::size_t> alive(tokens);
        for (std::size_t row = 0; row < tokens; ++row) {
            alive[row] = row;
        }
        for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
            const cuda::layer_facts& facts = session_.facts()[layer];
            layers_[layer].rows_in = facts.rows_in;
            layers_[layer].rows_kept = facts.rows_kept;
            layers_[layer].pairs = facts.pairs;
            if (facts.kept_to_old.empty()) continue;
            std::vector<std::size_t> kept;
            std::size_t next = 0;
            for (const std::int32_t old : facts.kept_to_old) {
                for (; next < static_cast<std::size_t>(old); ++next) {
                    dropped_at_[alive[next]] = static_cast<std::int32_t>(layer);
                }
                kept.push_back(alive[next++]);
            }
            for (; next < alive.size(); ++next) {
                dropped_at_[alive[next]] = static_cast<std::int32_t>(layer);
            }
            alive = std::move(kept);
        }
        for (const cuda::decision_record& decision : session_.decisions()) {
            layer_record& record = layers_[static_cast<std::size_t>(decision.layer)];
            record.selected = true;
            record.outcomes = decision.outcomes;
        }
        note_looks();
    }
    /// (query, key) pairs of the estimator, as the CPU engine counts them; segments that it leaves alone are
    /// counted all the same.
    void note_looks() {
        const bool listed = session_.options().lists.has_value();
        const std::int64_t n = session_.options().num_observations;
        for (layer_record& record : layers_) {
            if (!record.selected && !listed) continue;
            const std::int64_t rows = record.rows_in;
            const std::int64_t looking = rows < n ? rows : n;
            record.estimator_pairs = looking * rows - looking * (looking - 1) / 2;
        }
    }

    cuda::session session_;
    std::vector<float> logits_;
    std::vector<layer_record> layers_;
    std::vector<std::int32_t> dropped_at_;
    double seconds_ = 0;
};

class cuda_prompt_model final : public prompt_model {
  public:
    explicit cuda_prompt_model(const std::string& path)
        : file_(gguf::open(path))
        , words_(file_)
        , weights_(file_) {}

    const tokenizer& words() const override { return words_; }
    const llama_config& config() const override { return weights_.config(); }
    const std::string& name() const override { return weights_.name(); }
    std::string arithmetic() const override { return "bf16 on a CUDA device"; }
    std::unique_ptr<prompt_reader> reader_of(const policy& policy, std::int32_t prompt,
                                             std::int32_t following) override {
        return std::make_unique<cuda_reader>(weights_, policy, prompt, following);
    }

  private:
    gguf file_;
    tokenizer words_;
    cuda::cuda_model weights_;
};

} // namespace

std::unique_ptr<prompt_model> open_cuda_model(const std::string& path) {
    cuda::require_device();
    return std::make_unique<cuda_prompt_model>(path);
}

} // namespace engine
