// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/model/layer_lists.hpp"

#include <algorithm>

namespace engine {

namespace {

/// Blocks of lists by query block that there is room for, at most: 256 MiB. Lists beyond it read everything.
constexpr std::int64_t most_own_blocks = std::int64_t{1} << 26;

uniprefill::block_lists carve(uniprefill::workspace& memory, const uniprefill::limits& bounds,
                              const std::optional<uniprefill::query_sampling>& sampling) {
    constexpr auto host = uniprefill::memory_space::host;
    if (!sampling) return uniprefill::block_lists::carve(memory, bounds, bounds.num_heads, host);
    const std::int64_t most =
        uniprefill::block_lists::most_blocks(bounds, bounds.num_heads, sampling->query_rows);
    return uniprefill::block_lists::carve(memory, bounds, bounds.num_heads, host, sampling->query_rows,
                                          std::min(most, most_own_blocks));
}

std::size_t list_bytes(const uniprefill::limits& bounds,
                       const std::optional<uniprefill::query_sampling>& sampling) {
    uniprefill::workspace counting;
    static_cast<void>(carve(counting, bounds, sampling));
    return counting.bytes_used();
}

std::size_t scratch_bytes(const uniprefill::limits& bounds,
                          const std::optional<uniprefill::query_sampling>& sampling) {
    return sampling ? layer_lists::own_lister(bounds, *sampling).workspace_bytes()
                    : uniprefill::block_lister<>(bounds).workspace_bytes();
}

} // namespace

layer_lists::layer_lists(const uniprefill::limits& bounds, bool means,
                         const std::optional<uniprefill::query_sampling>& sampling)
    : bounds_(bounds)
    , masses_(sampling ? 0 : static_cast<std::size_t>(2 * bounds.num_heads * bounds.max_blocks()))
    , list_memory_(list_bytes(bounds, sampling))
    , scratch_(scratch_bytes(bounds, sampling)) {
    if (sampling) own_.emplace(bounds, *sampling);
    uniprefill::workspace pieces = list_memory_.workspace();
    lists_ = carve(pieces, bounds, sampling);
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
    note_keys(rows);
}

void layer_lists::make(const uniprefill::head_rows<const float>& queries, const key_rows& from,
                       const uniprefill::batch_view& rows, const uniprefill::selection& kept,
                       const uniprefill::list_options<>& options) {
    uniprefill::throw_if_failed(
        own_->run(queries, from, {}, rows, kept, options, lists_, scratch_.workspace()));
    note_keys(rows);
}

void layer_lists::note_keys(const uniprefill::batch_view& rows) {
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

cpu::key_lists layer_lists::of_query_block(std::int32_t segment, std::int32_t first, std::int32_t index) {
    const std::int64_t begin = begins_[static_cast<std::size_t>(segment)];
    const std::int64_t place =
        uniprefill::block_lists::query_block_place(segment, first, lists_.query_rows) + index;
    own_offsets_.assign(1, 0);
    own_blocks_.clear();
    bool any_list = false;
    for (std::int32_t head = 0; head < lists_.num_heads; ++head) {
        const uniprefill::block_lists::entries list = lists_.list(place * lists_.num_heads + head);
        any_list = any_list || !list.everything;
        if (list.everything) {
            const auto keys = static_cast<std::int32_t>(keys_of_segment(segment) - begin);
            for (std::int32_t block = 0; block < uniprefill::num_blocks(keys, lists_.block_rows); ++block) {
                own_blocks_.push_back(block);
            }
        } else {
            own_blocks_.insert(own_blocks_.end(), lists_.blocks + list.begin,
                               lists_.blocks + list.begin + list.count);
        }
        own_offsets_.push_back(static_cast<std::int64_t>(own_blocks_.size()));
    }
    if (!any_list) return {};
    return {own_offsets_.data(), own_blocks_.data(), begin, lists_.block_rows, lists_.window};
}

} // namespace engine
