// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Pipeline stages: what the next one has to know of a step, as one buffer that travels with the rows. Pure
/// functions: safe on any thread, deterministic.
///
/// Each stage has a ledger of its own layers (stage_layer_sets() says which share a set). The stage that ends
/// writes the step and the rows that leave it; the next one opens its step from that and appends them at its
/// first layer:
/// ```
/// write_stage_rows(batch, request_ids, leaving, buffer, size);                  // one stage
/// read_stage_rows(buffer, size, came);                                          // the next one
/// ledger.begin_step(came.batch, came.request_ids, step);
/// ledger.append(step, 0, came.entering);
/// ```
/// int32 words: format, num_requests R, num_rows, rows that enter, then request_ids [R], tags [R], cu_seqlens
/// [R + 1], cu_seqlens of the rows that enter [R + 1], their positions. No pointers; a buffer of a fixed
/// upper bound may be sent every time.
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/ledger/layer_sets.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// A step as the previous stage left it: views into the buffer that it was read from.
struct stage_rows {
    batch_view batch{};    ///< of the step: tags and cu_seqlens; positions are those that come next
    batch_view entering{}; ///< the rows that are still there: cu_seqlens and positions
    const std::int32_t* request_ids = nullptr; // [num_requests]
};

/// The first word of the buffer: the format's name and version.
inline constexpr std::int32_t stage_rows_format = 0x55505301;

/// Words that a step of @p num_requests requests takes of which @p num_rows rows go on. O(1).
[[nodiscard]] inline UNIPREFILL_API std::int64_t stage_rows_words(std::int32_t num_requests,
                                                                  std::int32_t num_rows) noexcept {
    return 6 + std::int64_t{4} * num_requests + num_rows;
}

/// Writes what the next stage needs. O(requests + rows).
/// @param batch       the step as it was begun: tags and cu_seqlens are read
/// @param request_ids [num_requests]
/// @param leaving     the rows that leave the stage: cu_seqlens and positions are read
/// @param[out] words  [size]
/// Fails where arrays are missing, the batches have other requests, or size is too small.
[[nodiscard]] inline UNIPREFILL_HOST_API status write_stage_rows(const batch_view& batch,
                                                                 const std::int32_t* request_ids,
                                                                 const batch_view& leaving,
                                                                 std::int32_t* words,
                                                                 std::int64_t size) noexcept;

/// Reads it: views into @p words, whose contents begin_step() and append() judge. O(1).
/// @param words     [size]
/// @param[out] came what the previous stage wrote
/// Fails where the buffer is of another format, or shorter than its numbers say.
[[nodiscard]] inline UNIPREFILL_HOST_API status read_stage_rows(const std::int32_t* words, std::int64_t size,
                                                                stage_rows& came) noexcept;

/// The map of a stage's layers, from that of the whole model: sets are renumbered in the order of their first
/// use in the stage. O(num_layers * layers of the stage).
/// @param model_sets       [first_layer + num_layers] the set of each of the model's layers
/// @param first_layer      of the stage
/// @param num_layers       of the stage
/// @param[out] layer_sets  [num_layers]
/// @param[out] num_sets    for ledger_limits::num_sets
/// Fails where there is no such stage, or a set is negative.
[[nodiscard]] inline UNIPREFILL_HOST_API status stage_layer_sets(const std::int32_t* model_sets,
                                                                 std::int32_t first_layer,
                                                                 std::int32_t num_layers,
                                                                 std::int32_t* layer_sets,
                                                                 std::int32_t& num_sets) noexcept {
    if (first_layer < 0 || num_layers < 1) {
        return failure(status_code::invalid_argument, "num_layers", "layers of the model", num_layers);
    }
    if (model_sets == nullptr || layer_sets == nullptr) {
        return failure(status_code::invalid_argument, "layer_sets", "an array, not a null pointer", 0);
    }
    for (std::int32_t layer = 0; layer < num_layers; ++layer) {
        if (model_sets[first_layer + layer] < 0) {
            return failure(status_code::invalid_argument, "model_sets", ">= 0",
                           model_sets[first_layer + layer])
                .at_layer(first_layer + layer);
        }
    }
    std::int32_t used = 0;
    for (std::int32_t layer = 0; layer < num_layers; ++layer) {
        const std::int32_t set = model_sets[first_layer + layer];
        std::int32_t same = 0;
        while (model_sets[first_layer + same] != set) {
            ++same;
        }
        layer_sets[layer] = set == 0 ? 0 : same < layer ? layer_sets[same] : ++used;
    }
    num_sets = used + 1;
    return success();
}

UNIPREFILL_END_NAMESPACE

#include <uniprefill/ledger/detail/stage_rows.inl>
