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

/// The block lists of the layer that a step is at: masses by head, what the library lists, and where each
/// segment's keys begin among those that its layer holds.
class layer_lists {
  public:
    /// @param means whether blocks that aren't listed are met by their means
    layer_lists(const uniprefill::limits& bounds, bool means);

    /// Where the step's look writes masses by head (prefill_step::want_head_masses()).
    uniprefill::head_mass_view masses();

    /// Lists for a look that has just been taken, and means where they are wanted.
    /// @param faults [num_segments] of it
    /// @param rows   those that entered the layer, with their cached_lens
    /// @param keys   of these rows
    /// @param values of these rows
    void make(const std::int64_t* faults, const uniprefill::batch_view& rows,
              const uniprefill::list_options<>& options, const uniprefill::head_rows<const float>& keys,
              const uniprefill::head_rows<const float>& values);

    /// What the queries of a segment read.
    cpu::key_lists of_segment(std::int32_t segment) const;
    /// Keys of its request up to the segment's last row.
    std::int32_t keys_of_segment(std::int32_t segment) const {
        return ends_[static_cast<std::size_t>(segment)];
    }

  private:
    uniprefill::limits bounds_;
    std::vector<std::int64_t> masses_; // [free | forced][num_heads, max_blocks]
    library_memory list_memory_;
    library_memory scratch_;
    uniprefill::block_lists lists_;
    std::optional<library_memory> mean_memory_;
    uniprefill::block_means<float> means_;
    std::vector<std::int64_t> first_means_; // [num_segments] row of block 0 among the means
    std::vector<std::int64_t> begins_;      // [num_segments] the key that block 0 begins with
    std::vector<std::int32_t> ends_;        // [num_segments]
};

} // namespace engine
