// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/app/policy.hpp"
#include "engine/model/machine.hpp"
#include "engine/model_file/llama_config.hpp"
#include "engine/model_file/tokenizer.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace engine {

/// One prompt read under one policy on some device, and what follows it.
class prompt_reader {
  public:
    /// Called on the way with the share of the layers that are done.
    using progress_call = std::function<void(double)>;

    virtual ~prompt_reader() = default;
    /// Reads the prompt; the logits of its last row are in logits().
    virtual void prefill(const std::vector<std::int32_t>& tokens, const progress_call& progress = {}) = 0;
    /// Feeds tokens at once; logits() has a row for each.
    virtual void feed(const std::vector<std::int32_t>& tokens) = 0;
    /// Feeds tokens as generated ones are, one step each; logits() has the last one's row.
    virtual void feed_one(std::int32_t token) = 0;
    /// Forgets what came after the prompt.
    virtual void back_to_prompt() = 0;

    virtual const std::vector<float>& logits() const = 0;
    /// From tokens in to the first logits.
    virtual double prefill_seconds() const = 0;
    /// Of the prefill.
    virtual const std::vector<layer_record>& layers() const = 0;
    /// By prompt token: the last layer that dropped it, -1 where none did.
    virtual const std::vector<std::int32_t>& dropped_at() const = 0;
    /// Rows that layers hold now, averaged, as a share of the positions read.
    virtual double held_share() const = 0;
};

/// A model on some device.
class prompt_model {
  public:
    virtual ~prompt_model() = default;
    virtual const tokenizer& words() const = 0;
    virtual const llama_config& config() const = 0;
    virtual const std::string& name() const = 0;
    /// What products compute in, for reports.
    virtual std::string arithmetic() const = 0;
    /// What it runs on, for reports: a processor's name, or a device's with its driver.
    virtual std::string device() const = 0;
    /// @param following  tokens that may be fed after the prompt
    virtual std::unique_ptr<prompt_reader> reader_of(const policy& policy, std::int32_t prompt,
                                                     std::int32_t following) = 0;

    model_identity identity() const { return {name(), config().layers, config().hidden}; }
};

} // namespace engine
