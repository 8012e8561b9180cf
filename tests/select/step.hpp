// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// Steps with masses and rules that own their arrays, written out or drawn at random.

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/mass.hpp>
#include <uniprefill/select/selector.hpp>

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace select_test {

namespace up = uniprefill;

/// splitmix64: the same numbers with every compiler and flag.
class generator {
  public:
    explicit generator(std::uint64_t seed)
        : state_(seed) {}
    std::uint64_t next() {
        std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    /// Uniform enough in [0, bound).
    std::int64_t below(std::int64_t bound) {
        return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(bound));
    }
    bool chance(std::int64_t one_in) { return below(one_in) == 0; }

  private:
    std::uint64_t state_;
};

/// Memory aligned as a workspace must be, filled with a pattern.
class memory {
  public:
    explicit memory(std::size_t bytes, unsigned char pattern = 0xab)
        : bytes_(bytes)
        , storage_(bytes + up::workspace::alignment, pattern) {}
    void* data() {
        const auto address = reinterpret_cast<std::uintptr_t>(storage_.data());
        const auto skip =
            (up::workspace::alignment - address % up::workspace::alignment) % up::workspace::alignment;
        return storage_.data() + skip;
    }
    up::workspace workspace() { return {data(), bytes_}; }
    const std::vector<unsigned char>& bytes() const { return storage_; }

  private:
    std::size_t bytes_;
    std::vector<unsigned char> storage_;
};

/// A step whose arrays it owns. Build with add_request() and add_segment(), then set masses.
struct step {
    up::limits bounds;
    std::vector<up::request_tag> tags;
    std::vector<up::request_options> options;
    std::vector<std::int32_t> cu_seqlens{0};
    std::vector<std::int32_t> cu_segments{0};
    std::vector<std::int32_t> segment_request;
    std::vector<std::int32_t> positions;
    std::vector<std::int32_t> span_offsets{0};
    std::vector<up::position_span> spans;
    std::vector<up::selection_rule> rules;
    std::vector<std::int64_t> rank_buffer;

    explicit step(std::int32_t block_rows) { bounds.block_rows = block_rows; }

    /// A request of one segment with positions 0, 1, 2, ...
    void add_request(std::int32_t rows, const up::request_options& wanted, const up::selection_rule& rule,
                     up::request_tag tag = up::request_tag::prefill) {
        std::vector<std::int32_t> where(static_cast<std::size_t>(rows));
        for (std::int32_t i = 0; i < rows; ++i) {
            where[static_cast<std::size_t>(i)] = i;
        }
        add_request({rows}, where, {}, wanted, rule, tag);
    }
    void add_request(const std::vector<std::int32_t>& segment_rows, const std::vector<std::int32_t>& where,
                     const std::vector<up::position_span>& forced, const up::request_options& wanted,
                     const up::selection_rule& rule, up::request_tag tag) {
        const auto request = static_cast<std::int32_t>(tags.size());
        for (const std::int32_t rows : segment_rows) {
            segment_request.push_back(request);
            cu_segments.push_back(cu_segments.back() + rows);
        }
        positions.insert(positions.end(), where.begin(), where.end());
        cu_seqlens.push_back(static_cast<std::int32_t>(positions.size()));
        spans.insert(spans.end(), forced.begin(), forced.end());
        span_offsets.push_back(static_cast<std::int32_t>(spans.size()));
        tags.push_back(tag);
        options.push_back(wanted);
        rules.push_back(rule);
    }
    /// Sizes the limits (with some room) and the masses. Call once all requests are there.
    void close(std::int32_t room = 0) {
        bounds.max_requests = num_requests() + room > 0 ? num_requests() + room : 1;
        bounds.max_segments =
            num_segments() + room > bounds.max_requests ? num_segments() + room : bounds.max_requests;
        bounds.max_rows = static_cast<std::int32_t>(positions.size()) + 7 * room;
        rank_buffer.assign(static_cast<std::size_t>(up::mass_view::rank_buffer_size(bounds)), 0);
    }

    std::int32_t num_requests() const { return static_cast<std::int32_t>(tags.size()); }
    std::int32_t num_segments() const { return static_cast<std::int32_t>(segment_request.size()); }
    std::int32_t rows_of(std::int32_t segment) const { return end(segment) - begin(segment); }
    std::int32_t begin(std::int32_t segment) const { return cu_segments[static_cast<std::size_t>(segment)]; }
    std::int32_t end(std::int32_t segment) const {
        return cu_segments[static_cast<std::size_t>(segment) + 1];
    }
    std::int32_t blocks_of(std::int32_t segment) const {
        return (rows_of(segment) + bounds.block_rows - 1) / bounds.block_rows;
    }

    up::batch_view batch() const {
        up::batch_view view;
        view.num_requests = num_requests();
        view.num_segments = num_segments();
        view.num_rows = static_cast<std::int32_t>(positions.size());
        view.tags = tags.data();
        view.cu_seqlens = cu_seqlens.data();
        view.positions = positions.data();
        view.options = options.data();
        if (num_segments() != num_requests()) {
            view.cu_segments = cu_segments.data();
            view.segment_request = segment_request.data();
        }
        view.forced = {span_offsets.data(), spans.data()};
        return view;
    }
    up::mass_view masses() { return up::mass_view::over(rank_buffer.data(), bounds, up::memory_space::host); }
    std::int64_t& free_mass(std::int32_t segment, std::int32_t block) {
        return masses().free[up::block_offset(segment, begin(segment), bounds.block_rows) + block];
    }
    std::int64_t& forced_mass(std::int32_t segment, std::int32_t block) {
        return masses().forced[up::block_offset(segment, begin(segment), bounds.block_rows) + block];
    }
    std::int64_t& fault(std::int32_t segment) { return masses().faults[segment]; }
    void set_free(std::int32_t segment, const std::vector<std::int64_t>& values) {
        for (std::size_t b = 0; b < values.size(); ++b) {
            free_mass(segment, static_cast<std::int32_t>(b)) = values[b];
        }
    }
};

/// A selection with its memory.
struct decision {
    memory arrays;
    up::selection out;
    up::status result;

    explicit decision(const up::limits& bounds)
        : arrays(bytes(bounds)) {
        auto pieces = arrays.workspace();
        out = up::selection::carve(pieces, bounds, up::memory_space::host);
    }
    static std::size_t bytes(const up::limits& bounds) {
        up::workspace counting;
        static_cast<void>(up::selection::carve(counting, bounds, up::memory_space::host));
        return counting.bytes_used();
    }
    bool keeps(std::int32_t row) const { return out.old_to_kept[row] >= 0; }
    const up::segment_outcome& outcome(std::int32_t segment = 0) const { return out.outcomes[segment]; }
    /// The kept rows of the step.
    std::vector<std::int32_t> rows() const {
        return {out.kept_to_old, out.kept_to_old + out.cu_seqlens[out.num_requests]};
    }
};

/// Runs a selector over a step with rules of any kind.
template <class Rule>
std::unique_ptr<decision> select(step& what, const std::vector<Rule>& rules) {
    auto made = std::make_unique<decision>(what.bounds);
    const up::block_selector<Rule> selector(what.bounds);
    memory scratch(selector.workspace_bytes(), 0xcd);
    made->result =
        selector.run(what.masses(), what.batch(), rules.data(), made->out, scratch.workspace(), {});
    return made;
}
inline std::unique_ptr<decision> select(step& what) {
    return select(what, what.rules);
}

inline up::selection_rule random_rule(generator& random, std::int32_t typical_rows) {
    // Shares that fall exactly on sums of small masses, and others.
    constexpr double shares[] = {1e-18, 0.001, 0.125, 0.25, 0.5, 0.75, 0.9, 0.98, 0.99, 0.999999, 1.0};
    const double share = shares[random.below(11)];
    up::selection_rule rule;
    switch (random.below(6)) {
    case 0:
        rule = up::selection_rule::fixed_ratio(share);
        break;
    case 1:
        rule = up::selection_rule::max_fraction(share);
        break;
    case 2:
        rule =
            up::selection_rule::fixed_budget(1 + static_cast<std::int32_t>(random.below(typical_rows + 2)));
        break;
    case 3:
        rule = up::selection_rule::published_top_p(share);
        break;
    default:
        rule = up::selection_rule::top_p(share);
        rule.crossing = random.chance(3) ? up::crossing::published : up::crossing::minimal;
    }
    if (random.chance(2)) {
        rule.scope = random.chance(2) ? up::mass_scope::free : up::mass_scope::all;
        rule.ties = random.chance(2) ? up::tie_order::lower_block_first : up::tie_order::higher_block_first;
    }
    if (rule.kind != up::rule_kind::fixed_budget && random.chance(2)) {
        const auto least = static_cast<std::int32_t>(random.below(typical_rows + 2));
        rule.min_kept_rows = random.chance(2) ? least : 0;
        rule.max_kept_rows =
            random.chance(2) ? INT32_MAX
                             : 1 + rule.min_kept_rows + static_cast<std::int32_t>(random.below(typical_rows));
    }
    return rule;
}

/// Fills one segment's masses in one of the ways that hurt: ties everywhere, all on one block, nothing, as
/// large as the format allows, anything; now and then a fault or an impossible number.
inline void randomise_masses(generator& random, step& what, std::int32_t segment) {
    const std::int32_t blocks = what.blocks_of(segment);
    const std::int64_t style = random.below(8);
    for (std::int32_t b = 0; b < blocks; ++b) {
        std::int64_t free_mass = 0;
        std::int64_t forced_mass = 0;
        switch (style) {
        case 0: // nothing
            break;
        case 1: // one block has it all
            free_mass = b == blocks / 2 ? (std::int64_t{1} << 62) - 1 : 0;
            break;
        case 2: // all equal
            free_mass = forced_mass = 1;
            break;
        case 3: // few values: many ties
            free_mass = random.below(3);
            forced_mass = random.below(3);
            break;
        case 4: // as large as a sum below 2^62 allows
            free_mass = ((std::int64_t{1} << 62) - 1) / (2 * blocks) - random.below(3);
            forced_mass = ((std::int64_t{1} << 62) - 1) / (2 * blocks) - random.below(3);
            break;
        default:
            free_mass = static_cast<std::int64_t>(random.next() >> 12) / blocks >> random.below(40);
            forced_mass = static_cast<std::int64_t>(random.next() >> 12) / blocks >> random.below(40);
        }
        what.free_mass(segment, b) = free_mass;
        what.forced_mass(segment, b) = forced_mass;
    }
    if (blocks > 0 && random.chance(40)) {
        what.free_mass(segment, static_cast<std::int32_t>(random.below(blocks))) =
            random.chance(2) ? -1 : INT64_MAX;
    }
    if (random.chance(20)) {
        what.fault(segment) =
            up::fault_word(static_cast<up::mass_fault>(random.below(4))) * (1 + random.below(8));
    }
}

/// A step of up to five requests.
inline step random_step(generator& random) {
    constexpr std::int32_t block_sizes[] = {8, 9, 16, 64, 256};
    step what(block_sizes[random.below(5)]);
    const std::int32_t g = what.bounds.block_rows;
    const auto length = [&] {
        const std::int32_t lengths[] = {
            0, 1, g - 1, g, g + 1, 2 * g, 3 * g + 5, 7 * g, static_cast<std::int32_t>(random.below(20 * g))};
        return lengths[random.below(9)];
    };
    const auto requests = random.below(6);
    for (std::int64_t r = 0; r < requests; ++r) {
        std::vector<std::int32_t> segments{length()};
        while (random.chance(4)) {
            segments.push_back(length());
        }
        std::vector<std::int32_t> where;
        auto position = static_cast<std::int32_t>(random.below(3) * random.below(100));
        for (const std::int32_t rows : segments) {
            for (std::int32_t i = 0; i < rows; ++i) {
                where.push_back(position);
                position += 1 + static_cast<std::int32_t>(random.chance(5) ? random.below(40) : 0);
            }
        }
        std::vector<up::position_span> forced;
        std::int32_t from = 0;
        while (random.chance(2)) {
            from += static_cast<std::int32_t>(random.below(position + 1));
            const auto to = from + static_cast<std::int32_t>(random.below(2 * g));
            forced.push_back({from, to});
            from = to;
        }
        up::request_options options;
        options.enabled = random.chance(12) ? 0 : 1;
        options.sink = static_cast<std::int32_t>(random.chance(2) ? 0 : random.below(2 * g));
        options.tail = static_cast<std::int32_t>(random.chance(2) ? 0 : random.below(2 * g));
        options.min_length = static_cast<std::int32_t>(random.chance(4) ? random.below(4 * g) : 0);
        const auto tag = random.chance(8) ? static_cast<up::request_tag>(2 + random.below(2))
                                          : static_cast<up::request_tag>(random.below(2));
        what.add_request(segments, where, forced, options,
                         random_rule(random, where.empty() ? 1 : static_cast<std::int32_t>(where.size())),
                         tag);
    }
    what.close(static_cast<std::int32_t>(random.below(3)));
    for (std::int32_t s = 0; s < what.num_segments(); ++s) {
        randomise_masses(random, what, s);
    }
    return what;
}

} // namespace select_test
