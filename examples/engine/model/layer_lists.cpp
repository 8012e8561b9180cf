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

layer_lists::layer_lists(const uniprefill::limits& bounds)
    : bounds_(bounds)
    , masses_(static_cast<std::size_t>(2 * bounds.num_heads * bounds.max_blocks()))
    , list_memory_(list_bytes(bounds))
    , scratch_(uniprefill::block_lister<>(bounds).workspace_bytes()) {
    uniprefill::workspace pieces = list_memory_.workspace();
    lists_ = uniprefill::block_lists::carve(pieces, bounds, bounds.num_heads, uniprefill::memory_space::host);
}

uniprefill::head_mass_view layer_lists::masses() {
    const std::int64_t blocks = bounds_.max_blocks();
    return {masses_.data(), masses_.data() + bounds_.num_heads * blocks, blocks, bounds_.num_heads};
}

void layer_lists::make(const std::int64_t* faults, const uniprefill::batch_view& rows,
                       const uniprefill::list_options<>& options) {
    uniprefill::throw_if_failed(uniprefill::block_lister<>(bounds_).run(masses(), faults, rows, options,
                                                                        lists_, scratch_.workspace()));
    begins_.clear();
    ends_.clear();
    for (std::int32_t s = 0; s < rows.num_segments; ++s) {
        const std::int32_t request = rows.request_of(s);
        const std::int32_t before = rows.cached_len(request) - rows.cu_seqlens[request];
        begins_.push_back(before + rows.segment_begin(s));
        ends_.push_back(before + rows.segment_end(s));
    }
}

cpu::key_lists layer_lists::of_segment(std::int32_t segment) const {
    return {lists_.offsets + std::int64_t{segment} * lists_.num_heads, lists_.blocks,
            begins_[static_cast<std::size_t>(segment)], lists_.block_rows, lists_.window};
}

} // namespace engine
