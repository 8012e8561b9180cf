// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// Steps with masses by head, and lists that own their arrays.

#include "step.hpp"

#include <uniprefill/select/block_lister.hpp>

#include <utility>
#include <vector>

namespace select_test {

using list_options = up::list_options<>;

/// A step with masses by head.
struct head_step {
    step what;
    std::int64_t stride;
    std::vector<std::int64_t> free, forced, faults;

    head_step(step from, std::int32_t kv_heads, std::int32_t group)
        : what(std::move(from)) {
        what.bounds.num_kv_heads = kv_heads;
        what.bounds.num_heads = kv_heads * group;
        stride = what.bounds.max_blocks() + 3;
        free.assign(static_cast<std::size_t>(stride * what.bounds.num_heads), 0);
        forced = free;
        faults.assign(static_cast<std::size_t>(what.bounds.max_segments), 0);
    }
    std::size_t at(std::int32_t head, std::int32_t segment, std::int32_t block) const {
        return static_cast<std::size_t>(
            head * stride + up::block_offset(segment, what.begin(segment), what.bounds.block_rows) + block);
    }
    up::head_mass_view masses() { return {free.data(), forced.data(), stride, what.bounds.num_heads}; }
};

/// Every head of @p what gets masses of its own in one of the ways of randomise_masses().
inline head_step with_heads(generator& random, step what, std::int32_t kv_heads, std::int32_t group) {
    head_step made(std::move(what), kv_heads, group);
    for (std::int32_t s = 0; s < made.what.num_segments(); ++s) {
        for (std::int32_t head = 0; head < made.what.bounds.num_heads; ++head) {
            randomise_masses(random, made.what, s);
            for (std::int32_t b = 0; b < made.what.blocks_of(s); ++b) {
                made.free[made.at(head, s, b)] = made.what.free_mass(s, b);
                made.forced[made.at(head, s, b)] = made.what.forced_mass(s, b);
            }
            if (made.what.blocks_of(s) > 0 && random.chance(60)) {
                const auto b = static_cast<std::int32_t>(random.below(made.what.blocks_of(s)));
                made.forced[made.at(head, s, b)] = random.chance(2) ? -1 : INT64_MAX;
            }
        }
        made.faults[static_cast<std::size_t>(s)] = made.what.fault(s);
    }
    return made;
}

inline head_step random_head_step(generator& random) {
    step what = random_step(random);
    const auto kv_heads = static_cast<std::int32_t>(1 + random.below(3));
    return with_heads(random, std::move(what), kv_heads, static_cast<std::int32_t>(1 + random.below(4)));
}

inline list_options random_list_options(generator& random) {
    list_options made;
    made.rule = random_rule(random, 200);
    made.sink = static_cast<std::int32_t>(random.below(3) * random.below(100));
    made.window = static_cast<std::int32_t>(random.below(2) * random.below(600));
    return made;
}

/// Lists with their memory.
struct lists {
    memory arrays;
    up::block_lists out;

    lists(const up::limits& bounds, std::int32_t heads)
        : arrays(bytes(bounds, heads)) {
        auto pieces = arrays.workspace();
        out = up::block_lists::carve(pieces, bounds, heads, up::memory_space::host);
    }
    static std::size_t bytes(const up::limits& bounds, std::int32_t heads) {
        up::workspace counting;
        static_cast<void>(up::block_lists::carve(counting, bounds, heads, up::memory_space::host));
        return counting.bytes_used();
    }
    std::vector<std::int32_t> of(std::int32_t segment, std::int32_t head) const {
        const std::int64_t* const from = out.offsets + std::int64_t{segment} * out.num_heads + head;
        return {out.blocks + from[0], out.blocks + from[1]};
    }
};

template <class Rule>
up::status run(head_step& from, const up::list_options<Rule>& how, lists& into) {
    const up::block_lister<Rule> lister(from.what.bounds);
    memory scratch(lister.workspace_bytes(), 0xcd);
    return lister.run(from.masses(), from.faults.data(), from.what.batch(), how, into.out,
                      scratch.workspace());
}

} // namespace select_test
