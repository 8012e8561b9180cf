// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/calibration/cost.hpp"

namespace engine::calibration {

namespace {

double causal_pairs(double tokens) {
    return tokens * (tokens + 1) / 2;
}

} // namespace

cost_model::cost_model(const llama_config& config, std::int32_t length)
    : length_(length) {
    const double hidden = config.hidden;
    const double queries = double{1} * config.heads * config.head_dim;
    const double keys_and_values = 2.0 * config.kv_heads * config.head_dim;
    of_entering_row_ = 2 * hidden * (queries + keys_and_values);
    of_kept_row_ = 2 * hidden * queries + 6 * hidden * config.ffn;
    of_pair_ = 4 * queries;
}

double cost_model::dense_layer() const {
    return length_ * (of_entering_row_ + of_kept_row_) + causal_pairs(length_) * of_pair_;
}

double cost_model::attention_share() const {
    return causal_pairs(length_) * of_pair_ / dense_layer();
}

work cost_model::of(const std::vector<layer_record>& records, std::int32_t tokens) const {
    const double layers = static_cast<double>(records.size());
    double entering = 0;
    double kept = 0;
    double pairs = 0;
    double looked = 0;
    for (const layer_record& record : records) {
        entering += static_cast<double>(record.rows_in);
        kept += static_cast<double>(record.rows_kept);
        pairs += static_cast<double>(record.pairs);
        looked += static_cast<double>(record.estimator_pairs);
    }
    work made;
    made.lin = kept / tokens / layers;
    made.att = pairs / causal_pairs(tokens) / layers;
    made.looks = looked / causal_pairs(tokens) / layers;
    const double rows =
        entering / tokens / layers * length_ * of_entering_row_ + made.lin * length_ * of_kept_row_;
    // A look multiplies queries by keys and no more, which is half of attention.
    const double looks = looked / tokens / layers * length_ * of_pair_ / 2;
    made.total = (rows + made.att * causal_pairs(length_) * of_pair_ + looks) / dense_layer();
    return made;
}

} // namespace engine::calibration
