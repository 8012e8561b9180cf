// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <uniprefill/core/batch.hpp>

#include <cstdint>
#include <vector>

namespace engine {

/// What one request does in a step.
struct planned_request {
    std::int32_t id = 0; ///< its slot in the ledger and in the KV store
    uniprefill::request_tag tag = uniprefill::request_tag::prefill;
    std::int32_t first_position = 0; ///< original position of tokens[0]
    std::vector<std::int32_t> tokens;
    std::vector<std::int32_t> span_ends; ///< ends of the spans, in rows of this step; empty: one span
    uniprefill::request_options options{};
    std::vector<uniprefill::position_span> forced; ///< positions never to drop
    std::vector<uniprefill::position_span>
        observed;                          ///< positions that observe; empty: the span's last n rows
    std::vector<std::int32_t> logits_rows; ///< rows of this step whose logits are wanted, ascending
};

/// A step of many requests, packed row after row: the arrays that the library and the operators read.
/// Rows whose logits are wanted are forced, so that they are still there after the last layer.
class step_plan {
  public:
    /// Throws `error` where a request has no tokens, or spans or logits rows outside its rows.
    explicit step_plan(std::vector<planned_request> requests);

    const std::vector<planned_request>& requests() const { return requests_; }
    std::int32_t num_rows() const { return cu_seqlens_.back(); }
    const std::vector<std::int32_t>& tokens() const { return tokens_; }
    const std::vector<std::int32_t>& ids() const { return ids_; }
    /// Packed rows whose logits are wanted, ascending.
    const std::vector<std::int32_t>& logits_rows() const { return logits_rows_; }
    /// The view that the library takes; valid as long as this plan.
    uniprefill::batch_view batch() const;

  private:
    struct span_arrays {
        std::vector<std::int32_t> offsets{0};
        std::vector<uniprefill::position_span> spans;
        void append(const std::vector<uniprefill::position_span>& list);
        uniprefill::span_lists view() const { return {offsets.data(), spans.data()}; }
    };

    std::vector<planned_request> requests_;
    std::vector<std::int32_t> ids_;
    std::vector<uniprefill::request_tag> tags_;
    std::vector<uniprefill::request_options> options_;
    std::vector<std::int32_t> tokens_;
    std::vector<std::int32_t> positions_;
    std::vector<std::int32_t> cu_seqlens_{0};
    std::vector<std::int32_t> cu_segments_{0};
    std::vector<std::int32_t> segment_request_;
    std::vector<std::int32_t> logits_rows_;
    span_arrays forced_;
    span_arrays observed_;
};

} // namespace engine
