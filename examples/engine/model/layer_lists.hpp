// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/cpu/attention.hpp"
#include "engine/model/session.hpp"

#include <uniprefill/uniprefill.hpp>

#include <cstdint>
#include <optional>
#include <vector>

namespace engine {

/// The block lists of the layer that a step is at: what the library lists, from masses by head or for each
/// query block from a sample of its rows, and where each segment's keys begin among those that its layer
/// holds.
class layer_lists {
  public:
    using own_lister = uniprefill::query_block_lister<
        uniprefill::query_list_policy<uniprefill::dynamic, uniprefill::dynamic>>;
    using key_rows = uniprefill::key_source<float, uniprefill::page_pointer_cache<float>>;

    /// @param means    whether blocks that aren't listed are met by their means; not with @p sampling
    /// @param sampling how query blocks get lists of their own; none: a segment's rows share its lists
    layer_lists(const uniprefill::limits& bounds, bool means,
                const std::optional<uniprefill::query_sampling>& sampling);

    /// Query rows of a list; 0: all of a segment.
    std::int32_t query_rows() const { return lists_.query_rows; }

    /// Where the step's look writes masses by head (prefill_step::want_head_masses()). Not with query_rows().
    uniprefill::head_mass_view masses();

    /// Lists for a look that has just been taken, and means where they are wanted.
    /// @param faults [num_segments] of it
    /// @param rows   those that entered the layer, with their cached_lens
    /// @param keys   of these rows
    /// @param values of these rows
    void make(const std::int64_t* faults, const uniprefill::batch_view& rows,
              const uniprefill::list_options<>& options, const uniprefill::head_rows<const float>& keys,
              const uniprefill::head_rows<const float>& values);

    /// Lists for query blocks of the rows that are kept.
    /// @param queries of these
    void make(const uniprefill::head_rows<const float>& queries, const key_rows& from,
              const uniprefill::batch_view& rows, const uniprefill::selection& kept,
              const uniprefill::list_options<>& options);

    /// What the queries of a segment read.
    cpu::key_lists of_segment(std::int32_t segment) const;
    /// What those of a query block read; valid until the next call.
    /// @param first the segment's first query, among those of the step
    /// @param index the query block's, in the segment
    cpu::key_lists of_query_block(std::int32_t segment, std::int32_t first, std::int32_t index);
    /// Keys of its request up to the segment's last row.
    std::int32_t keys_of_segment(std::int32_t segment) const {
        return ends_[static_cast<std::size_t>(segment)];
    }

  private:
    void note_keys(const uniprefill::batch_view& rows);

    uniprefill::limits bounds_;
    std::optional<own_lister> own_;
    std::vector<std::int64_t> masses_; // [free | forced][num_heads, max_blocks]
    library_memory list_memory_;
    library_memory scratch_;
    uniprefill::block_lists lists_;
    std::optional<library_memory> mean_memory_;
    uniprefill::block_means<float> means_;
    std::vector<std::int64_t> first_means_; // [num_segments] row of block 0 among the means
    std::vector<std::int64_t> begins_;      // [num_segments] the key that block 0 begins with
    std::vector<std::int32_t> ends_;        // [num_segments]
    std::vector<std::int64_t> own_offsets_; // of a query block, as attention has them
    std::vector<std::int32_t> own_blocks_;
};

} // namespace engine
