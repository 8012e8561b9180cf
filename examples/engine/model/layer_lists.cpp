// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/model/layer_lists.hpp"

namespace engine {

namespace {

std::size_t list_bytes(const uniprefill::limits& bounds) {
    uniprefill::workspace counting;
    static_cast<void>(
        uniprefill::block_lists::carve(counting, bounds, bounds.num_heads, uniprefill::memory_space::host));
    return counting.bytes_used();
}

} // namespace

layer_lists::layer_lists(const uniprefill::limits& bounds, bool means)
    : bounds_(bounds)
    , masses_(static_cast<std::size_t>(2 * bounds.num_heads * bounds.max_blocks()))
    , list_memory_(list_bytes(bounds))
    , scratch_(uniprefill::block_lister<>(bounds).workspace_bytes()) {
    uniprefill::workspace pieces = list_memory_.workspace();
    lists_ = uniprefill::block_lists::carve(pieces, bounds, bounds.num_heads, uniprefill::memory_space::host);
    if (means) {
        uniprefill::workspace counting;
        static_cast<void>(uniprefill::block_means<float>::carve(counting, bounds));
        mean_memory_.emplace(counting.bytes_used());
        uniprefill::workspace memory = mean_memory_->workspace();
        means_ = uniprefill::block_means<float>::carve(memory, bounds);
    }
}

uniprefill::head_mass_view layer_lists::masses() {
    const std::int64_t blocks = bounds_.max_blocks();
    return {masses_.data(), masses_.data() + bounds_.num_heads * blocks, blocks, bounds_.num_heads};
}

void layer_lists::make(const std::int64_t* faults, const uniprefill::batch_view& rows,
                       const uniprefill::list_options<>& options,
                       const uniprefill::head_rows<const float>& keys,
                       const uniprefill::head_rows<const float>& values) {
    uniprefill::throw_if_failed(uniprefill::block_lister<>(bounds_).run(masses(), faults, rows, options,
                                                                        lists_, scratch_.workspace()));
    if (mean_memory_) {
        uniprefill::throw_if_failed(uniprefill::average_blocks(keys, values, rows, bounds_, means_));
    }
    first_means_.clear();
    begins_.clear();
    ends_.clear();
    for (std::int32_t s = 0; s < rows.num_segments; ++s) {
        const std::int32_t request = rows.request_of(s);
        const std::int32_t before = rows.cached_len(request) - rows.cu_seqlens[request];
        first_means_.push_back(uniprefill::block_offset(s, rows.segment_begin(s), bounds_.block_rows));
        begins_.push_back(before + rows.segment_begin(s));
        ends_.push_back(before + rows.segment_end(s));
    }
}

cpu::key_lists layer_lists::of_segment(std::int32_t segment) const {
    cpu::key_lists made{lists_.offsets + std::int64_t{segment} * lists_.num_heads, lists_.blocks,
                        begins_[static_cast<std::size_t>(segment)], lists_.block_rows, lists_.window};
    if (mean_memory_) {
        const std::int64_t first = first_means_[static_cast<std::size_t>(segment)];
        made.mean_keys = means_.keys.at(first, 0);
        made.mean_values = means_.values.at(first, 0);
    }
    return made;
}

} // namespace engine
