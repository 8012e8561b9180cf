// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The device's block lists against the host's, all of them and nothing beyond.

#include "gpu_step.cuh"
#include "head_step.hpp"

#include <uniprefill/select/block_lister.cuh>

#include <functional>
#include <optional>

namespace listing_stranger {

/// The k heaviest blocks, or exactly so many rows.
struct heaviest : uniprefill::rule_base {
    std::int32_t k = 1;
    std::int32_t exact = 0;
    __host__ __device__ std::int32_t exact_rows() const noexcept { return exact; }
    __host__ __device__ std::int32_t keep_count(const uniprefill::ranked_blocks& ranked) const noexcept {
        return ranked.sums[ranked.count - 1] == ranked.total ? k : -1;
    }
};

} // namespace listing_stranger

using namespace select_test;
using listing_stranger::heaviest;

namespace {

using arrays = host_arrays<up::selection_rule>;

/// Device memory for steps within some limits with masses by head, and for their lists. Arrays always lie at
/// the same places, so a graph can be replayed.
class device_lister {
  public:
    explicit device_lister(const up::limits& bounds, std::int32_t heads)
        : bounds_(bounds)
        , stride_(bounds.max_blocks() + 3)
        , step_(bounds)
        , free_(static_cast<std::size_t>(stride_ * bounds.num_heads))
        , forced_(free_.size())
        , faults_(static_cast<std::size_t>(bounds.max_segments))
        , bytes_(lists::bytes(bounds, heads))
        , output_(bytes_ + guard) {
        up::workspace pieces(output_.data(), bytes_);
        out = up::block_lists::carve(pieces, bounds, heads, up::memory_space::device);
    }

    /// Uploads @p from, whose arrays @p spoiled replaces, and forgets what was written before.
    void upload(const head_step& from, const arrays& spoiled) {
        with_segments_ = !spoiled.cu_segments.empty();
        step_.upload(spoiled, with_segments_);
        free_.set(from.free);
        forced_.set(from.forced);
        faults_.set(from.faults);
        check_cuda(cudaMemset(output_.data(), 0xa5, output_.size()), "cudaMemset");
    }
    void upload(const head_step& from) { upload(from, arrays(from.what, from.what.rules)); }

    template <class Rule>
    up::status run(const up::list_options<Rule>& how, const head_step& from, std::int32_t rows,
                   const up::cuda_device& device, cudaStream_t stream) {
        const up::block_lister<Rule, up::backend::cuda> lister(bounds_, device);
        if (scratch_.size() < lister.workspace_bytes()) {
            scratch_ = device_array<unsigned char>(lister.workspace_bytes());
        }
        return lister.run({free_.data(), forced_.data(), stride_, bounds_.num_heads}, faults_.data(),
                          step_.batch(from.what.num_requests(), from.what.num_segments(), rows), how, out,
                          {scratch_.data(), lister.workspace_bytes()}, stream);
    }
    /// What was written, in host memory.
    lists download() const {
        lists made(bounds_, out.num_heads);
        const std::vector<unsigned char> written = output_.get();
        for (std::size_t i = bytes_; i < written.size(); ++i) {
            REQUIRE(written[i] == 0xa5); // nothing beyond the lists
        }
        std::memcpy(made.arrays.data(), written.data(), bytes_);
        made.out.num_segments = out.num_segments;
        made.out.window = out.window;
        return made;
    }

    up::block_lists out;

  private:
    static constexpr std::size_t guard = 4096;

    up::limits bounds_;
    std::int64_t stride_;
    device_step<up::selection_rule> step_;
    device_array<std::int64_t> free_, forced_, faults_;
    std::size_t bytes_;
    device_array<unsigned char> output_, scratch_;
    bool with_segments_ = false;
};

/// Lists of @p came against the host's, and that nobody wrote behind the last one.
void check_alike(const head_step& from, const lists& wanted, const lists& came) {
    REQUIRE(came.out.num_segments == from.what.num_segments());
    REQUIRE(came.out.window == wanted.out.window);
    const std::int32_t heads = came.out.num_heads;
    const std::int64_t all = std::int64_t{from.what.num_segments()} * heads;
    for (std::int64_t list = 0; list <= all; ++list) {
        if (came.out.offsets[list] != wanted.out.offsets[list]) {
            FAIL("list " << list - 1 << " of " << heads << " a segment ends at " << came.out.offsets[list]
                         << ", wanted " << wanted.out.offsets[list]);
        }
    }
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < wanted.out.offsets[all]; ++i) {
        wrong += came.out.blocks[i] != wanted.out.blocks[i] ? 1 : 0;
    }
    CHECK(wrong == 0);
    std::int64_t written = 0;
    for (std::int64_t i = wanted.out.offsets[all]; i < came.out.capacity; ++i) {
        written += static_cast<std::uint32_t>(came.out.blocks[i]) != 0xa5a5a5a5u ? 1 : 0;
    }
    REQUIRE(written == 0);
    REQUIRE(wrong == 0);
}

/// Any grid: of one thread block, of a few, of as many as fit.
up::cuda_device some_grid(std::int32_t i) {
    constexpr std::int32_t grids[] = {0, 1, 2, 7, 16, 0, 33};
    up::cuda_device device = this_device();
    device.max_ctas = grids[i % 7];
    return device;
}

void require_ok(const up::status& done) {
    INFO(done.argument << ": " << done.expected << " " << done.came);
    REQUIRE(done.ok());
}

template <class Rule>
void check_run(device_lister& memory, head_step& from, const up::list_options<Rule>& how,
               const up::cuda_device& device) {
    lists wanted(from.what.bounds, memory.out.num_heads);
    require_ok(run(from, how, wanted));
    memory.upload(from);
    require_ok(memory.run(how, from, static_cast<std::int32_t>(from.what.positions.size()), device, nullptr));
    check_alike(from, wanted, memory.download());
}
template <class Rule>
void check_run(head_step& from, const up::list_options<Rule>& how, std::int32_t heads,
               const up::cuda_device& device) {
    device_lister memory(from.what.bounds, heads);
    check_run(memory, from, how, device);
}

up::list_options<heaviest> with_own_rule(generator& random, const list_options& from) {
    heaviest rule;
    static_cast<up::rule_base&>(rule) = from.rule;
    rule.k = static_cast<std::int32_t>(random.below(12)) - 1;
    rule.exact = random.chance(5) ? 1 + static_cast<std::int32_t>(random.below(100)) : 0;
    return {rule, from.sink, from.window};
}

/// A step of one request with @p heads heads that each have masses of their own kind: random ones, few
/// values, one value.
head_step long_step(generator& random, std::int32_t blocks, std::int32_t heads, std::int32_t kv_heads) {
    step what(16);
    what.add_request(blocks * 16 - 5, {1, 128, 128, 0}, {});
    what.close();
    head_step made(std::move(what), kv_heads, heads / kv_heads);
    for (std::int32_t head = 0; head < heads; ++head) {
        for (std::int32_t b = 0; b < blocks; ++b) {
            made.free[made.at(head, 0, b)] =
                head % 3 == 0   ? static_cast<std::int64_t>(random.next() >> 22 >> random.below(30))
                : head % 3 == 1 ? random.below(4)
                                : 3;
            made.forced[made.at(head, 0, b)] = b < 8 ? 1000 : 0;
        }
    }
    return made;
}

} // namespace

TEST_CASE("gpu lists: random steps come out as on the host") {
    if (!has_device()) {
        return;
    }
    generator random(uniprefill_test::seed() + 50);
    for (std::int32_t i = 0; i < scaled(4000); ++i) {
        head_step from = random_head_step(random);
        from.what.bounds.max_forced_spans = 1 << 12;
        const list_options how = random_list_options(random);
        INFO("case " << i);
        for (const std::int32_t heads : {from.what.bounds.num_heads, from.what.bounds.num_kv_heads}) {
            check_run(from, how, heads, some_grid(i));
        }
    }
}

TEST_CASE("gpu lists: a rule of one's own is asked as by the host") {
    if (!has_device()) {
        return;
    }
    generator random(uniprefill_test::seed() + 51);
    for (std::int32_t i = 0; i < scaled(1000); ++i) {
        head_step from = random_head_step(random);
        from.what.bounds.max_forced_spans = 1 << 12;
        const auto how = with_own_rule(random, random_list_options(random));
        INFO("case " << i);
        check_run(from, how, i % 2 == 0 ? from.what.bounds.num_heads : from.what.bounds.num_kv_heads,
                  some_grid(i));
    }
    const std::int32_t blocks = scaled(20000, 3000);
    head_step from = long_step(random, blocks, 6, 3);
    heaviest rule;
    rule.k = blocks / 3;
    for (const std::int32_t heads : {6, 3}) {
        check_run(from, up::list_options<heaviest>{rule, 40, 0}, heads, this_device());
    }
}

TEST_CASE("gpu lists: a few thousand blocks, rules of each kind, each scope and order of ties") {
    if (!has_device()) {
        return;
    }
    generator random(uniprefill_test::seed() + 52);
    for (const std::int32_t blocks : {513, 2048, 2049, 9000}) {
        if (uniprefill_test::is_scaled_down() && blocks != 2049) {
            continue;
        }
        head_step from = long_step(random, blocks, 8, 2);
        std::vector<up::selection_rule> rules{
            up::selection_rule::top_p(0.99),       up::selection_rule::top_p(1),
            up::selection_rule::fixed_ratio(0.3),  up::selection_rule::fixed_budget(16 * (blocks / 5)),
            up::selection_rule::max_fraction(0.5), up::selection_rule::published_top_p(0.75)};
        rules.push_back(up::selection_rule::top_p(0.9));
        rules.back().min_kept_rows = 16 * (blocks - 100);
        rules.push_back(up::selection_rule::top_p(0.9));
        rules.back().max_kept_rows = 16 * 50;
        for (std::size_t i = 0; i < rules.size(); ++i) {
            for (const auto scope : {up::mass_scope::free, up::mass_scope::all}) {
                list_options how;
                how.rule = rules[i];
                how.rule.scope = scope;
                how.rule.ties =
                    i % 2 == 0 ? up::tie_order::lower_block_first : up::tie_order::higher_block_first;
                for (const std::int32_t heads : {8, 2}) {
                    INFO(blocks << " blocks, rule " << i << ", " << heads << " lists");
                    check_run(from, how, heads, some_grid(static_cast<std::int32_t>(i)));
                }
            }
        }
    }
}

TEST_CASE("gpu lists: thousands of lists, of short segments and of some hundred blocks") {
    if (!has_device()) {
        return;
    }
    generator random(uniprefill_test::seed() + 53);
    for (const std::int32_t blocks : {20, 200}) {
        head_step from =
            with_heads(random, many_requests(random, scaled(blocks == 20 ? 512 : 64, 30), blocks, 16), 4, 2);
        for (std::int32_t i = 0; i < 4; ++i) {
            const list_options how = random_list_options(random);
            INFO(blocks << " blocks, case " << i);
            check_run(from, how, i % 2 == 0 ? 8 : 4, some_grid(i));
        }
    }
}

TEST_CASE("gpu lists: a segment of 262144 blocks") {
    if (!has_device()) {
        return;
    }
    generator random(uniprefill_test::seed() + 54);
    head_step from = long_step(random, scaled(262144, 20000), 4, 2);
    for (const auto scope : {up::mass_scope::all, up::mass_scope::free}) {
        list_options how;
        how.rule.scope = scope;
        for (const std::int32_t heads : {4, 2}) {
            INFO(heads << " lists");
            check_run(from, how, heads, this_device());
        }
    }
}

TEST_CASE("gpu lists: a graph replayed with other lengths and options and spans and masses") {
    if (!has_device()) {
        return;
    }
    generator random(uniprefill_test::seed() + 55);
    constexpr std::int32_t requests = 17;
    constexpr std::int32_t rows = requests * 2 * 30 * 16;
    up::limits bounds = many_requests(random, requests, 30, 16).bounds;
    bounds.max_rows = rows;
    const auto draw = [&] {
        step what = many_requests(random, requests, 30, 16);
        what.bounds = bounds;
        // Masses lie where the graph's limits put them.
        what.rank_buffer.assign(static_cast<std::size_t>(up::mass_view::rank_buffer_size(bounds)), 0);
        return with_heads(random, std::move(what), 2, 3);
    };
    for (const std::int32_t heads : {6, 2}) {
        list_options how;
        how.rule = up::selection_rule::top_p(0.8);
        head_step first = draw();
        device_lister memory(first.what.bounds, heads);
        // Once before, so that nothing is loaded for the first time while a graph is captured.
        memory.upload(first);
        require_ok(memory.run(how, first, rows, this_device(), nullptr));
        check_cuda(cudaDeviceSynchronize(), "first run");
        captured_graph graph(
            [&](cudaStream_t stream) { require_ok(memory.run(how, first, rows, this_device(), stream)); });
        for (std::int32_t i = 0; i < scaled(50, 3); ++i) {
            head_step from = draw();
            lists wanted(from.what.bounds, heads);
            require_ok(run(from, how, wanted));
            memory.upload(from);
            graph.replay();
            INFO("replay " << i);
            check_alike(from, wanted, memory.download());
        }
    }
}

TEST_CASE("gpu lists: segments in no order have every block of the rows that they name, within what fits") {
    if (!has_device()) {
        return;
    }
    const auto check_all = [&](const std::function<void(arrays&)>& spoil) {
        step what(8);
        for (std::int32_t r = 0; r < 4; ++r) {
            what.add_request(100, {1, 5, 9, 0}, {});
        }
        what.close();
        generator random(7);
        head_step from = with_heads(random, std::move(what), 2, 1);
        std::fill(from.faults.begin(), from.faults.end(), 0);
        arrays spoiled(from.what, from.what.rules);
        spoil(spoiled);
        const auto& offsets = spoiled.cu_segments.empty() ? spoiled.cu_seqlens : spoiled.cu_segments;
        for (std::int32_t i = 0; i < 3; ++i) {
            device_lister memory(from.what.bounds, 2);
            memory.upload(from, spoiled);
            require_ok(memory.run(list_options{}, from, 400, some_grid(i), nullptr));
            const lists came = memory.download();
            std::int64_t next = 0;
            for (std::size_t list = 0; list < 8; ++list) {
                const std::int32_t begin = std::min(std::max(offsets[list / 2], 0), 400);
                const std::int32_t end = std::min(std::max(offsets[list / 2 + 1], begin), 400);
                next = std::min(next + up::num_blocks(end - begin, 8), came.out.capacity);
                REQUIRE(came.out.offsets[list + 1] == next);
                for (std::int64_t b = came.out.offsets[list]; b < next; ++b) {
                    REQUIRE(came.out.blocks[b] == b - came.out.offsets[list]);
                }
            }
        }
    };
    check_all([](arrays& a) { a.cu_seqlens = {0, 100, 50, 300, 400}; });
    check_all([](arrays& a) { a.cu_seqlens = {0, 100, 200, 300, 401}; });
    check_all([](arrays& a) { a.cu_seqlens = {7, 100, 200, 300, 400}; });
    check_all([](arrays& a) { a.cu_seqlens = {0, 400, 0, 400, 0}; });
    check_all([](arrays& a) { a.cu_seqlens = {0, -100, INT32_MAX, INT32_MIN, 400}; });
    const auto segments = [](arrays& a, std::vector<std::int32_t> offsets,
                             std::vector<std::int32_t> requests) {
        a.cu_segments = offsets;
        a.segment_request = requests;
    };
    check_all([&](arrays& a) { segments(a, {0, 100, 200, 300, 400}, {0, 2, 2, 3}); });
    check_all([&](arrays& a) { segments(a, {0, 100, 220, 300, 400}, {0, 1, 2, 3}); });
    check_all([&](arrays& a) { segments(a, {0, 100, 200, 300, 400}, {0, 1, 2, 99999999}); });
}

TEST_CASE("gpu lists: rubbish everywhere makes lists of blocks that exist, and touches nothing else") {
    if (!has_device()) {
        return;
    }
    generator random(uniprefill_test::seed() + 56);
    for (std::int32_t i = 0; i < scaled(150, 10); ++i) {
        INFO("case " << i);
        step what(8);
        for (std::int32_t r = 0; r < 5; ++r) {
            what.add_request(200, {1, 5, 9, 0}, {});
        }
        what.close();
        what.bounds.max_forced_spans = 16;
        head_step from = with_heads(random, std::move(what), 2, 2);
        arrays spoiled(from.what, from.what.rules);
        const auto spoil = [&](auto& values, std::int32_t one_in) {
            auto* words = reinterpret_cast<std::uint32_t*>(values.data());
            for (std::size_t w = 0; w < values.size() * sizeof(values[0]) / 4; ++w) {
                if (random.chance(one_in)) {
                    words[w] = static_cast<std::uint32_t>(random.next() >> random.below(64));
                }
            }
        };
        spoiled.spans.resize(16);
        for (std::int32_t s = 0; s < 16; ++s) {
            spoiled.spans[static_cast<std::size_t>(s)] = {12 * s, 12 * s + 5};
        }
        spoiled.span_offsets = {0, 4, 4, 9, 16, 16};
        spoil(spoiled.positions, 1 + i % 3);
        spoil(spoiled.spans, i % 2 == 0 ? 1000 : 4);
        spoil(spoiled.span_offsets, i % 2 == 0 ? 1000 : 4);
        spoil(spoiled.options, 6);
        spoil(spoiled.tags, 30);
        spoil(from.free, i % 4 == 0 ? 3 : 1000);
        spoil(from.forced, i % 4 == 1 ? 3 : 1000);
        if (i % 5 == 0) {
            spoil(spoiled.cu_seqlens, 3);
        }
        const list_options how = random_list_options(random);
        std::optional<lists> first;
        for (std::int32_t grid = 0; grid < 3; ++grid) {
            device_lister memory(from.what.bounds, i % 2 == 0 ? 4 : 2);
            memory.upload(from, spoiled);
            require_ok(memory.run(how, from, 1000, some_grid(grid), nullptr));
            lists came = memory.download();
            const std::int32_t all = 5 * came.out.num_heads;
            REQUIRE(came.out.offsets[0] == 0);
            REQUIRE(std::is_sorted(came.out.offsets, came.out.offsets + all + 1));
            REQUIRE(came.out.offsets[all] <= came.out.capacity);
            for (std::int32_t list = 0; list < all; ++list) {
                std::int32_t last = -1;
                for (std::int64_t b = came.out.offsets[list]; b < came.out.offsets[list + 1]; ++b) {
                    REQUIRE(came.out.blocks[b] > last);
                    last = came.out.blocks[b];
                }
                REQUIRE(last < 125);
            }
            if (!first) {
                first.emplace(std::move(came));
                continue;
            }
            REQUIRE(std::equal(came.out.offsets, came.out.offsets + all + 1, first->out.offsets));
            REQUIRE(std::equal(came.out.blocks, came.out.blocks + came.out.offsets[all], first->out.blocks));
        }
    }
}

TEST_CASE("gpu lists: nothing in a step, and segments without rows") {
    if (!has_device()) {
        return;
    }
    for (const std::int32_t requests : {0, 1, 40}) {
        step what(8);
        for (std::int32_t r = 0; r < requests; ++r) {
            what.add_request(r % 3 == 1 ? 300 : 0, {1, 1, 1, 0}, {});
        }
        what.close(2);
        generator random(uniprefill_test::seed() + 57);
        head_step from = with_heads(random, std::move(what), 2, 2);
        for (const std::int32_t heads : {4, 2}) {
            check_run(from, list_options{}, heads, this_device());
        }
    }
}

TEST_CASE("gpu lists: wrong arguments are named and nothing is launched") {
    using code = up::status_code;
    struct call {
        std::optional<head_step> from;
        up::limits bounds;
        up::batch_view batch;
        up::head_mass_view masses;
        const std::int64_t* faults = nullptr;
        list_options how;
        std::optional<lists> made;
        std::size_t scratch_less = 0;

        call() {
            step what(8);
            what.add_request(20, {1, 2, 2, 0}, up::selection_rule::top_p(0.5));
            what.close();
            from.emplace(what, 2, 3);
            bounds = from->what.bounds;
            batch = from->what.batch();
            batch.space = up::memory_space::device;
            masses = from->masses();
            faults = from->faults.data();
            made.emplace(bounds, 6);
            made->out.space = up::memory_space::device;
        }
        up::status run() { // whatever is right is never launched: no device is needed
            const up::block_lister<up::selection_rule, up::backend::cuda> lister(bounds, up::cuda_device{});
            memory scratch(lister.workspace_bytes());
            const up::workspace whole = scratch.workspace();
            return lister.run(masses, faults, batch, how, made->out,
                              up::workspace(whole.data(), whole.bytes() - scratch_less), nullptr);
        }
    };
    const auto refuses = [](code expected, const std::string& argument,
                            const std::function<void(call&)>& spoil) {
        INFO(argument);
        call spoiled;
        spoil(spoiled);
        const auto before = spoiled.made->arrays.bytes();
        const up::status came = spoiled.run();
        CHECK(up::to_string(came.code) == std::string(up::to_string(expected)));
        CHECK(came.argument == argument);
        CHECK(std::string(came.expected) != "");
        CHECK(spoiled.made->arrays.bytes() == before);
        CHECK(spoiled.made->out.num_segments == 0);
    };
    refuses(code::invalid_argument, "limits.block_rows (G)", [](call& c) { c.bounds.block_rows = 7; });
    refuses(code::not_supported, "batch.space", [](call& c) { c.batch.space = up::memory_space::host; });
    refuses(code::out_of_range, "batch.num_rows", [](call& c) { c.bounds.max_rows = 19; });
    refuses(code::invalid_argument, "batch.num_requests",
            [](call& c) { c.batch.num_requests = c.batch.num_segments = 0; });
    refuses(code::invalid_argument, "batch.positions", [](call& c) { c.batch.positions = nullptr; });
    refuses(code::invalid_argument, "rule.p", [](call& c) { c.how.rule.p.value = 0; });
    refuses(code::invalid_argument, "options.sink", [](call& c) { c.how.sink = -1; });
    refuses(code::invalid_argument, "options.window", [](call& c) { c.how.window = -1; });
    refuses(code::not_supported, "out.space", [](call& c) { c.made->out.space = up::memory_space::host; });
    refuses(code::invalid_argument, "out.block_rows", [](call& c) { c.made->out.block_rows = 16; });
    refuses(code::invalid_argument, "out.num_heads", [](call& c) { c.made->out.num_heads = 3; });
    refuses(code::out_of_range, "out.max_segments", [](call& c) { --c.made->out.max_segments; });
    refuses(code::out_of_range, "out.capacity", [](call& c) { --c.made->out.capacity; });
    refuses(code::invalid_argument, "out", [](call& c) { c.made->out.blocks = nullptr; });
    refuses(code::invalid_argument, "per_head.free", [](call& c) { c.masses.free = nullptr; });
    refuses(code::invalid_argument, "per_head.forced", [](call& c) { c.masses.forced = nullptr; });
    refuses(code::invalid_argument, "per_head.num_heads", [](call& c) { c.masses.num_heads = 5; });
    refuses(code::out_of_range, "per_head.head_stride", [](call& c) { c.masses.head_stride = 2; });
    refuses(code::invalid_argument, "faults", [](call& c) { c.faults = nullptr; });
    refuses(code::workspace_too_small, "workspace", [](call& c) { c.scratch_less = 1; });

    // A rule of one's own needs more; limits that aren't valid need nothing.
    const up::limits bounds = call().bounds;
    const up::cuda_device none;
    const std::size_t bytes =
        up::block_lister<up::selection_rule, up::backend::cuda>(bounds, none).workspace_bytes();
    CHECK(bytes > 0);
    CHECK(up::block_lister<heaviest, up::backend::cuda>(bounds, none).workspace_bytes() > bytes);
    CHECK(up::block_lister<up::selection_rule, up::backend::cuda>({0}, none).workspace_bytes() == 0);
}
