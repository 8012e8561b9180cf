// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/model/list_rules.hpp"

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/block_lists.hpp>
#include <uniprefill/core/element.hpp>
#include <uniprefill/core/rows.hpp>
#include <uniprefill/core/selection.hpp>
#include <uniprefill/pipeline/policy.hpp>
#include <uniprefill/propagate/row_map.hpp>
#include <uniprefill/select/block_lister.hpp>
#include <uniprefill/select/rule.hpp>

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace engine::cuda {

using uniprefill::bfloat16;

/// What is dropped where, and which lists are made.
struct sparsity_options {
    uniprefill::limits bounds;
    std::vector<uniprefill::selecting_layer<uniprefill::selection_rule>> selecting;
    std::optional<uniprefill::list_options<>> lists; ///< at every layer
    /// Of layers that have their own.
    engine::list_rules list_rules;
    bool lists_by_kv_head = false; ///< a list for each KV head, else for each query head
};

/// The library's part of a prefill, behind an interface so that nvcc compiles it in one file. Nothing waits;
/// all calls of a step can be captured.
class sparsity {
  public:
    virtual ~sparsity() = default;

    /// Whether rows may be dropped at this layer.
    virtual bool selects(std::int32_t layer) const = 0;
    /// Whether look() has anything to do there.
    virtual bool looks(std::int32_t layer) const = 0;
    /// Whether heads read lists there.
    virtual bool lists_at(std::int32_t layer) const = 0;
    /// Other layers, rules and lists from the next begin() on. Throws as make_sparsity() does, and leaves
    /// what there was then. Memory is taken where more is needed than ever before.
    virtual void change(std::vector<uniprefill::selecting_layer<uniprefill::selection_rule>> selecting,
                        std::optional<uniprefill::list_options<>> lists, engine::list_rules rules) = 0;

    /// A step in which every row of @p batch is alive; its arrays stay the caller's.
    virtual void begin(const uniprefill::batch_view& batch, cudaStream_t on) = 0;
    /// Alive rows; the number in it is an upper bound.
    virtual uniprefill::batch_view rows() const = 0;

    /// Decides which rows go on and makes this layer's lists, from q and k of rows().
    /// @param kept_bound  no more rows than these are kept
    virtual void look(std::int32_t layer, const uniprefill::head_rows<const bfloat16>& q,
                      const uniprefill::head_rows<const bfloat16>& k, std::int32_t kept_bound,
                      cudaStream_t on) = 0;
    /// The last decision; the identity where the layer doesn't select.
    virtual const uniprefill::selection& decided() const = 0;
    /// The last lists; null offsets where none are made.
    virtual const uniprefill::block_lists& lists() const = 0;

    /// Carries the last decision out on the hidden rows, which go on, and the queries, which are about to
    /// read.
    virtual void leave(const uniprefill::byte_rows& hidden, const uniprefill::byte_rows& queries,
                       cudaStream_t on) = 0;

    /// Bytes of device memory for the last decision, kept for another step.
    virtual std::size_t decision_bytes() const = 0;
    /// Copies what leave() needs of the last decision to @p memory. @return the decision over there
    virtual uniprefill::selection keep_decision(std::byte* memory, cudaStream_t on) const = 0;
    /// Carries a kept decision out, on rows that nobody moves.
    virtual void replay(const uniprefill::selection& kept, cudaStream_t on) = 0;

    /// What the host knows of the step, to go on from there again: graphs that are replayed don't tell it.
    virtual void save(std::size_t place) = 0;
    virtual void restore(std::size_t place) = 0;

    /// Bytes of device memory.
    virtual std::size_t bytes() const = 0;
};

/// Throws `error` or `uniprefill::error` on options that are out of range.
std::unique_ptr<sparsity> make_sparsity(const sparsity_options& options);

} // namespace engine::cuda
