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

template <class T>
naive_masses naive(const step<T>& from, std::int32_t segment, const up::attention_params& params) {
    const model& shape = from.shape();
    const auto r = static_cast<std::size_t>(from.segment_request[static_cast<std::size_t>(segment)]);
    const request& what = from.requests()[r];
    const request_data<T>& data = from.data[r];
    const auto s = static_cast<std::size_t>(segment);
    const std::int64_t begin = from.cu_segments[s] - from.cu_seqlens[r]; // rows of the request
    const std::int64_t end = from.cu_segments[s + 1] - from.cu_seqlens[r];
    const auto position = [&](std::int64_t row) { return data.positions[static_cast<std::size_t>(row)]; };
    const auto within = [&](const std::vector<up::position_span>& spans, std::int64_t row) {
        return std::any_of(spans.begin(), spans.end(), [&](const up::position_span& span) {
            return position(row) >= span.begin && position(row) < span.end;
        });
    };
    const auto is_forced = [&](std::int64_t row) {
        return position(row) < what.options.sink || row >= end - what.options.tail ||
               within(what.forced, row);
    };

    naive_masses result;
    result.blocks = static_cast<std::size_t>((end - begin + shape.block_rows - 1) / shape.block_rows);
    result.free.assign(result.blocks * static_cast<std::size_t>(shape.heads), 0.0);
    result.forced = result.free;
    std::int64_t free_rows = 0;
    std::vector<std::int64_t> observers;
    for (std::int64_t row = begin; row < end; ++row) {
        free_rows += is_forced(row) ? 0 : 1;
        if (what.observed.empty() || within(what.observed, row)) {
            observers.push_back(row);
        }
    }
    const bool prompt = what.tag == up::request_tag::prefill || what.tag == up::request_tag::chunk;
    result.scored =
        prompt && what.options.enabled != 0 && end - begin >= what.options.min_length && free_rows > 0;
    const auto n = static_cast<std::size_t>(shape.num_observations);
    if (observers.size() > n) {
        observers.erase(observers.begin(), observers.end() - static_cast<std::ptrdiff_t>(n));
    }
    result.observed = !observers.empty();
    if (!result.scored) {
        return result;
    }

    const double scale =
        params.scale > 0 ? static_cast<double>(params.scale) : 1.0 / std::sqrt(shape.head_dim);
    const std::int64_t d = shape.head_dim;
    for (std::int64_t head = 0; head < shape.heads; ++head) {
        const std::int64_t kv_head = head / (shape.heads / shape.kv_heads);
        for (const std::int64_t row : observers) {
            // Keys are cached ones and rows in one list; those up to the row itself are visible.
            const std::int64_t visible = what.cached + row + 1;
            std::vector<double> scores(static_cast<std::size_t>(visible));
            double largest =
                params.sink_logits != nullptr ? static_cast<double>(params.sink_logits[head]) : -1e300;
            for (std::int64_t key = 0; key < visible; ++key) {
                double score = 0;
                for (std::int64_t i = 0; i < d; ++i) {
                    score +=
                        static_cast<double>(up::to_float(
                            data.queries[static_cast<std::size_t>((row * shape.heads + head) * d + i)])) *
                        static_cast<double>(up::to_float(
                            data.keys[static_cast<std::size_t>((key * shape.kv_heads + kv_head) * d + i)]));
                }
                score *= scale;
                if (params.softcap > 0) {
                    score = static_cast<double>(params.softcap) *
                            std::tanh(score / static_cast<double>(params.softcap));
                }
                scores[static_cast<std::size_t>(key)] = score;
                largest = std::max(largest, score);
            }
            double sum = params.sink_logits != nullptr
                             ? std::exp(static_cast<double>(params.sink_logits[head]) - largest)
                             : 0.0;
            for (const double score : scores) {
                sum += std::exp(score - largest);
            }
            for (std::int64_t key = what.cached + begin; key < visible; ++key) {
                const std::int64_t own = key - what.cached;
                const auto block = static_cast<std::size_t>((own - begin) / shape.block_rows);
                auto& masses = is_forced(own) ? result.forced : result.free;
                masses[static_cast<std::size_t>(head) * result.blocks + block] +=
                    std::exp(scores[static_cast<std::size_t>(key)] - largest) / sum;
            }
        }
    }
    return result;
}

} // namespace importance_test
