// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Block masses by the definition, in double precision: one softmax row after the other.
#pragma once

#include "step.hpp"

#include <uniprefill/importance/importance.hpp>

#include <cmath>

namespace importance_test {

/// Masses of one segment.
struct naive_masses {
    bool scored = false;   ///< a decision is about this segment
    bool observed = false; ///< and some observation row is alive
    std::size_t blocks = 0;
    std::vector<double> free;   // [heads][blocks]
    std::vector<double> forced; // [heads][blocks]
};

/// A segment as the definition sees it: rows count from its first, keys from its request's first.
template <class T>
class naive_segment {
  public:
    naive_segment(const step<T>& from, std::int32_t segment, const up::attention_params& params)
        : shape_(from.shape())
        , request_(static_cast<std::size_t>(from.segment_request[static_cast<std::size_t>(segment)]))
        , what_(from.requests()[request_])
        , data_(from.data[request_])
        , params_(params)
        , scale_(params.scale > 0 ? static_cast<double>(params.scale) : 1.0 / std::sqrt(shape_.head_dim)) {
        const auto s = static_cast<std::size_t>(segment);
        before_ = from.cu_segments[s] - from.cu_seqlens[request_];
        rows_ = from.cu_segments[s + 1] - from.cu_segments[s];
        std::int64_t free_rows = 0;
        for (std::int64_t row = 0; row < rows_; ++row) {
            free_rows += is_forced(row) ? 0 : 1;
            if (what_.observed.empty() || within(what_.observed, row)) {
                observers_.push_back(row);
            }
        }
        const auto n = static_cast<std::size_t>(shape_.num_observations);
        if (observers_.size() > n) {
            observers_.erase(observers_.begin(), observers_.end() - static_cast<std::ptrdiff_t>(n));
        }
        const bool prompt = what_.tag == up::request_tag::prefill || what_.tag == up::request_tag::chunk;
        is_decided_ =
            prompt && what_.options.enabled != 0 && rows_ >= what_.options.min_length && free_rows > 0;
    }

    [[nodiscard]] std::int64_t rows() const { return rows_; }
    /// Keys before the segment's first row.
    [[nodiscard]] std::int64_t context() const { return what_.cached + before_; }
    /// Whether a decision is about it.
    [[nodiscard]] bool is_decided() const { return is_decided_; }
    [[nodiscard]] const std::vector<std::int64_t>& observers() const { return observers_; }
    [[nodiscard]] bool is_forced(std::int64_t row) const {
        return position(row) < what_.options.sink || row >= rows_ - what_.options.tail ||
               within(what_.forced, row);
    }

    /// q.k, scaled.
    [[nodiscard]] double product(std::int64_t head, std::int64_t row, std::int64_t key) const {
        const std::int64_t kv_head = head / (shape_.heads / shape_.kv_heads);
        const std::int64_t d = shape_.head_dim;
        double sum = 0;
        for (std::int64_t i = 0; i < d; ++i) {
            sum += static_cast<double>(
                       up::to_float(data_.queries[index(((before_ + row) * shape_.heads + head) * d + i)])) *
                   static_cast<double>(
                       up::to_float(data_.keys[index((key * shape_.kv_heads + kv_head) * d + i)]));
        }
        return sum * scale_;
    }
    /// The score that a product stands for.
    [[nodiscard]] double capped(double product) const {
        const auto cap = static_cast<double>(params_.softcap);
        return cap > 0 ? cap * std::tanh(product / cap) : product;
    }

  private:
    static std::size_t index(std::int64_t at) { return static_cast<std::size_t>(at); }
    [[nodiscard]] std::int32_t position(std::int64_t row) const {
        return data_.positions[index(before_ + row)];
    }
    [[nodiscard]] bool within(const std::vector<up::position_span>& spans, std::int64_t row) const {
        return std::any_of(spans.begin(), spans.end(), [&](const up::position_span& span) {
            return position(row) >= span.begin && position(row) < span.end;
        });
    }

    const model& shape_;
    std::size_t request_;
    const request& what_;
    const request_data<T>& data_;
    const up::attention_params& params_;
    double scale_;
    std::int64_t before_ = 0; ///< rows of the request before its own
    std::int64_t rows_ = 0;
    std::vector<std::int64_t> observers_;
    bool is_decided_ = false;
};

template <class T>
naive_masses naive(const step<T>& from, std::int32_t segment, const up::attention_params& params) {
    const model& shape = from.shape();
    const naive_segment<T> what(from, segment, params);
    naive_masses result;
    result.blocks = static_cast<std::size_t>((what.rows() + shape.block_rows - 1) / shape.block_rows);
    result.free.assign(result.blocks * static_cast<std::size_t>(shape.heads), 0.0);
    result.forced = result.free;
    result.scored = what.is_decided();
    result.observed = !what.observers().empty();
    if (!result.scored) {
        return result;
    }
    std::vector<bool> forced;
    for (std::int64_t row = 0; row < what.rows(); ++row) {
        forced.push_back(what.is_forced(row));
    }
    for (std::int64_t head = 0; head < shape.heads; ++head) {
        for (const std::int64_t row : what.observers()) {
            // Keys up to the row itself are visible.
            const std::int64_t visible = what.context() + row + 1;
            std::vector<double> scores(static_cast<std::size_t>(visible));
            double largest =
                params.sink_logits != nullptr ? static_cast<double>(params.sink_logits[head]) : -1e300;
            for (std::int64_t key = 0; key < visible; ++key) {
                scores[static_cast<std::size_t>(key)] = what.capped(what.product(head, row, key));
                largest = std::max(largest, scores[static_cast<std::size_t>(key)]);
            }
            double sum = params.sink_logits != nullptr
                             ? std::exp(static_cast<double>(params.sink_logits[head]) - largest)
                             : 0.0;
            for (const double score : scores) {
                sum += std::exp(score - largest);
            }
            for (std::int64_t own = 0; own <= row; ++own) {
                const auto block = static_cast<std::size_t>(own / shape.block_rows);
                auto& masses = forced[static_cast<std::size_t>(own)] ? result.forced : result.free;
                masses[static_cast<std::size_t>(head) * result.blocks + block] +=
                    std::exp(scores[static_cast<std::size_t>(what.context() + own)] - largest) / sum;
            }
        }
    }
    return result;
}

} // namespace importance_test
