// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/app/host_info.hpp"
#include "engine/app/policy.hpp"
#include "engine/model/machine.hpp"
#include "engine/model/session.hpp"
#include "engine/model_file/tokenizer.hpp"
#include "engine/reading/prompt_reader.hpp"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace engine {

/// A model file opened, checked and packed for the CPU.
class loaded_model final : public prompt_model {
  public:
    loaded_model(const std::string& path, cpu_ops::arithmetic kind)
        : file_(gguf::open(path))
        , words_(file_)
        , ops_(kind)
        , weights_(file_, ops_.kind()) {}

    const tokenizer& words() const override { return words_; }
    const cpu_weights& weights() const { return weights_; }
    const llama_config& config() const override { return weights_.config(); }
    const std::string& name() const override { return weights_.name(); }
    std::string arithmetic() const override { return cpu::name(ops_.kind()); }
    std::string device() const override { return cpu_name(); }
    cpu_ops& ops() { return ops_; }
    std::unique_ptr<prompt_reader> reader_of(const policy& policy, std::int32_t prompt,
                                             std::int32_t following) override;

  private:
    gguf file_;
    tokenizer words_;
    cpu_ops ops_;
    cpu_weights weights_;
};

/// What a policy says of a session, and of each of its requests. The bounds are the caller's.
session_options session_under(const policy& policy);
uniprefill::request_options request_under(const policy& policy);

/// How a prompt is read.
struct reading_options {
    /// Each span in a step of its own, as servers read that bound their steps. The bits are the same.
    bool in_chunks = false;
    /// Nothing is dropped before the prompt ends (end_decision.hpp); spans are the chunks then, no more.
    bool decide_at_end = false;
};

/// One prompt read on the CPU.
class reader final : public prompt_reader {
  public:
    /// @param following  tokens that may be fed after the prompt
    reader(loaded_model& model, const policy& policy, std::int32_t prompt, std::int32_t following,
           const reading_options& reading = {});

    void prefill(const std::vector<std::int32_t>& tokens, const progress_call& progress = {}) override;
    void feed(const std::vector<std::int32_t>& tokens) override;
    void feed_one(std::int32_t token) override;
    void back_to_prompt() override;

    const std::vector<float>& logits() const override { return logits_; }
    double prefill_seconds() const override { return prefill_seconds_; }
    /// Of the decisions at the prompt's end, after the first logits.
    double decision_seconds() const { return decision_seconds_; }
    /// Of the prefill, all steps together; without outcomes and blocks where it took several.
    const std::vector<layer_record>& layers() const override { return layers_; }
    const std::vector<std::int32_t>& dropped_at() const override { return dropped_at_; }
    double held_share() const override;
    cpu_session& session() { return session_; }

  private:
    planned_request planned(uniprefill::request_tag tag, const std::vector<std::int32_t>& tokens) const;
    void run(planned_request request, const progress_call& progress);
    void feed_all(uniprefill::request_tag tag, const std::vector<std::int32_t>& tokens);
    void note_layers(const cpu_machine& pass);

    policy policy_;
    reading_options reading_;
    std::int32_t prompt_;
    std::int32_t length_ = 0; ///< positions fed so far
    cpu_session session_;
    std::vector<float> logits_;
    std::vector<layer_record> layers_;
    std::vector<std::int32_t> dropped_at_;
    double prefill_seconds_ = 0;
    double decision_seconds_ = 0;
};

/// Rows entering output projection and MLP, averaged over layers, as a share of `tokens`.
double share_of_rows(const std::vector<layer_record>& layers, std::int32_t tokens);
/// (query, key) pairs that attention scored, averaged over layers, as a share of those of a dense prefill.
double share_of_pairs(const std::vector<layer_record>& layers, std::int32_t tokens);
/// Pairs that the estimator scored, as a share of the same.
double share_of_estimator_pairs(const std::vector<layer_record>& layers, std::int32_t tokens);

} // namespace engine
