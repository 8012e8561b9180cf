// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/model/layer_record.hpp"
#include "engine/model_file/llama_config.hpp"

#include <cstdint>
#include <vector>

namespace engine::calibration {

/// What a prefill took, as shares of the dense one.
struct work {
    double lin = 1;   ///< rows entering output projection and MLP
    double att = 1;   ///< (query, key) pairs that attention scores
    double looks = 0; ///< pairs that the estimator scores
    double total = 1; ///< floating-point operations of all of it, at the length that is calibrated for
};

/// Operations of a prefill of @p length tokens, told from one of another length: shares of rows and pairs are
/// taken to be the same, looks to grow with the length. A multiply and an add are two; norms, rotations and
/// the one row of logits are left out.
class cost_model {
  public:
    cost_model(const llama_config& config, std::int32_t length);

    /// @param records  by layer, of a prompt of @p tokens
    work of(const std::vector<layer_record>& records, std::int32_t tokens) const;

    std::int32_t length() const { return length_; }
    /// Attention's part of the dense prefill.
    double attention_share() const;

  private:
    double dense_layer() const;

    std::int32_t length_;
    double of_entering_row_; ///< q, k and v
    double of_kept_row_;     ///< output projection and MLP
    double of_pair_;         ///< over all query heads
};

} // namespace engine::calibration
