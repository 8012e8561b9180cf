// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The host's lists by query block against the definition, and what they promise.

#include "query_lists.hpp"
#include "support/scale.hpp"

#include <iostream>

#if defined(_OPENMP)
#    include <omp.h>
#endif

namespace up = uniprefill;
using namespace query_list_test;

namespace {

const std::vector<request>& some_requests() {
    static const std::vector<request> requests{{31, up::request_tag::prefill, 0, {333}},
                                               {32, up::request_tag::chunk, 77, {120, 0, 90}},
                                               {33, up::request_tag::decode, 200, {1}},
                                               {34, up::request_tag::prefill, 0, {9}},
                                               {35, up::request_tag::chunk, 150, {250}}};
    return requests;
}

recipe usual(std::int32_t heads) {
    recipe how;
    how.heads = heads;
    how.sampling = {32, 8};
    how.options.rule = up::selection_rule::top_p(0.8, up::mass_scope::all);
    how.options.sink = 10;
    how.options.window = 40;
    return how;
}

} // namespace

TEMPLATE_TEST_CASE("lists by query block of random steps", "[select]", float, up::half, up::bfloat16) {
    int near = 0;
    int lists = 0;
    for (const std::uint32_t number : uniprefill_test::spread_cases(80, 8)) {
        generator random(uniprefill_test::seed() * 1000 + number);
        recipe how;
        scene<TestType> what = any_scene<TestType>(random, number, how);
        INFO(described(what.keys.shape(), how, number));
        const auto counted = check_lists(what, how, list_there(what, how));
        near += counted.first;
        lists += counted.second;
    }
    std::cout << near << " blocks at a cut in " << lists << " lists" << std::endl;
    REQUIRE(lists > 0);
    REQUIRE(near * 20 <= lists);
}

TEST_CASE("lists by query block: keys before the segment count in the softmax, and aren't listed",
          "[select]") {
    for (const std::uint64_t seed : {61u, 62u, 63u}) {
        std::vector<request> requests{{seed, up::request_tag::chunk, 150, {130, 250}}};
        requests[0].spread = 5.0f; // rows differ in how much of their weight lies before the segment
        scene<float> what({8, 2, 16, 8, 8}, requests);
        for (const double p : {0.4, 0.8}) {
            recipe how;
            how.heads = 2;
            how.sampling = {32, 4};
            how.options.rule = up::selection_rule::top_p(p, up::mass_scope::all);
            how.options.sink = 0;
            how.options.window = 0;
            INFO("seed " << seed << ", p " << p);
            const auto counted = check_lists(what, how, list_there(what, how));
            REQUIRE(counted.second == 2 * (5 + 8));
        }
    }
}

TEST_CASE("lists by query block: any packing gives the same lists", "[select]") {
    const model shape{6, 2, 24, 16, 8};
    for (const std::int32_t heads : {2, 6}) {
        for (const bool drop : {false, true}) {
            const auto make = [&](const std::vector<request>& requests) {
                scene<float> what(shape, requests);
                what.set_window(drop ? 100 : 0);
                if (drop) {
                    what.keep_rows([](std::uint64_t seed, std::int32_t row) {
                        return coin(seed, 2, 0, static_cast<std::uint64_t>(row), 60);
                    });
                }
                return what;
            };
            const recipe how = usual(heads);
            scene<float> packed = make(some_requests());
            const own_lists all = list_there(packed, how);
            std::int32_t segment = 0;
            for (std::size_t i = 0; i < some_requests().size(); ++i) {
                scene<float> alone = make({some_requests()[i]});
                const own_lists own = list_there(alone, how);
                for (std::int32_t s = 0; s < alone.keys.num_segments(); ++s, ++segment) {
                    const auto there = right_lists(packed, how, segment);
                    const auto here = right_lists(alone, how, s);
                    REQUIRE(there.size() == here.size());
                    for (std::size_t k = 0; k < here.size(); ++k) {
                        CAPTURE(i, s, k, heads, drop);
                        REQUIRE(all.of(there[k].number) == own.of(here[k].number));
                    }
                }
            }
        }
    }
}

TEST_CASE("lists by query block: any number of threads gives the same lists", "[select]") {
    // What a thread is worth waking for: 2^22 products.
    REQUIRE(up::detail::useful_query_workers(0, 6, 24) == 1);
    REQUIRE(up::detail::useful_query_workers(29000, 6, 24) == 1);
    REQUIRE(up::detail::useful_query_workers(30000, 6, 24) == 2);
    REQUIRE(up::detail::useful_query_workers(std::int64_t{1} << 40, 128, 256) == (std::int64_t{1} << 33) + 1);
    REQUIRE(up::detail::useful_query_workers(std::int64_t{1500} * 1500 / 8, 6, 24) >= 7);
#if defined(_OPENMP)
    scene<float> what({6, 2, 24, 16, 8}, {{36, up::request_tag::prefill, 0, {1500}}});
    const int before = omp_get_max_threads();
    for (const std::int32_t heads : {2, 6}) {
        const recipe how = usual(heads);
        omp_set_num_threads(1);
        const own_lists expected = list_there(what, how);
        REQUIRE(expected.report.wanted > 0);
        for (const int threads : {2, 7}) {
            omp_set_num_threads(threads);
            for (int repeat = 0; repeat < 2; ++repeat) {
                const own_lists came = list_there(what, how);
                CAPTURE(heads, threads);
                REQUIRE(came.offsets == expected.offsets);
                REQUIRE(came.blocks == expected.blocks);
            }
        }
    }
    omp_set_num_threads(before);
#else
    uniprefill_test::skip("built without OpenMP");
#endif
}

TEST_CASE("lists by query block: a list doesn't hang on the query blocks beside it", "[select]") {
    // Head 0 looks at a key's first element and head 1 at its second. The two are the same but for keys of
    // block A, and those of block B, where they are swapped: which of the blocks weighs more follows from the
    // last bits of the heads' denominators.
    constexpr std::int32_t G = 8, A = 60, B = 140, window = 1000;
    generator random(uniprefill_test::seed() + 70);
    for (int number = 0; number < 24; ++number) {
        CAPTURE(number, uniprefill_test::seed());
        scene<float> what({2, 1, 2, G, 8}, {{1, up::request_tag::prefill, 0, {1400}}});
        what.options.params.scale = 1;
        what.set_window(window);
        const auto number_below = [&](std::int32_t most) {
            return static_cast<float>(random.below(most * 4096)) / 4096;
        };
        for (std::size_t row = 0; row < 1400; ++row) {
            float first = number_below(2);
            float second = first;
            if (row / G == A) {
                first = number_below(6);
            } else if (row / G == B) {
                first = what.keys.keys[2 * (row - (B - A) * G) + 1];
                second = what.keys.keys[2 * (row - (B - A) * G)];
            }
            what.keys.keys[2 * row] = first;
            what.keys.keys[2 * row + 1] = second;
            for (const std::size_t i : {0u, 1u, 2u, 3u}) {
                what.keys.queries[4 * row + i] = i == 0 || i == 3 ? 1.0f : 0.0f;
            }
        }
        recipe how;
        how.heads = 1;
        how.sampling = {32, 32};
        how.options.rule = up::selection_rule::fixed_budget(G);
        how.options.rule.scope = up::mass_scope::all;
        how.options.sink = 0;
        how.options.window = 0;
        std::vector<std::int32_t> first;
        for (const std::int32_t begin : {0, 1100, 1200, 1270}) {
            CAPTURE(begin);
            what.keep_rows([&](auto, std::int32_t row) {
                return (row >= begin && row < begin + 32) || (row >= 1350 && row < 1382);
            });
            const std::vector<std::int32_t> came = list_there(what, how).of(1);
            REQUIRE((came == std::vector<std::int32_t>{A} || came == std::vector<std::int32_t>{B}));
            REQUIRE((begin == 0 || came == first));
            first = came;
        }
    }
}

TEST_CASE("lists by query block: a report is for who wants it", "[select]") {
    scene<float> what({6, 2, 24, 16, 8}, some_requests());
    const recipe how = usual(2);
    const own_lists right = list_there(what, how);
    const own_lists silent = list_there(what, how, false);
    REQUIRE(silent.offsets == right.offsets);
    REQUIRE(silent.blocks == right.blocks);
    REQUIRE(silent.report.wanted == 0);
}

TEST_CASE("lists by query block: what doesn't fit reads everything", "[select]") {
    scene<float> what({6, 2, 24, 16, 8}, some_requests());
    recipe how = usual(6);
    const own_lists whole = list_there(what, how);
    const auto lists = static_cast<std::int64_t>(what.num_queries() / 32 + what.keys.num_segments()) * 6;
    REQUIRE(whole.report.wanted > 100);
    for (const std::int64_t capacity :
         {whole.report.wanted, whole.report.wanted - 1, std::int64_t{57}, std::int64_t{1}, std::int64_t{0}}) {
        CAPTURE(capacity);
        how.capacity = capacity;
        const own_lists less = list_there(what, how);
        REQUIRE(less.report.wanted == whole.report.wanted);
        REQUIRE(less.report.untrusted == 0);
        std::int64_t before = 0;
        std::int64_t unfitting = 0;
        for (std::int64_t number = 0; number < lists; ++number) {
            const std::vector<std::int32_t> right = whole.of(number);
            const bool names = !right.empty() && right[0] >= 0;
            before += names ? static_cast<std::int64_t>(right.size()) : 0;
            if (names && before > capacity) {
                REQUIRE(less.of(number) == std::vector<std::int32_t>{-1});
                ++unfitting;
            } else {
                REQUIRE(less.of(number) == right);
            }
        }
        REQUIRE(less.report.unfitting == unfitting);
        REQUIRE((unfitting == 0) == (capacity == whole.report.wanted));
        // Attention takes them as they are.
        what.lists = less.as_set();
        check(what, attend(what), 60);
    }
}

TEST_CASE("lists by query block: with every block attention is dense", "[select]") {
    scene<up::bfloat16> what({6, 2, 24, 16, 8}, some_requests());
    const auto dense = attend(what);
    for (const std::int32_t heads : {2, 6}) {
        recipe how = usual(heads);
        how.options.rule = up::selection_rule::top_p(1, up::mass_scope::all);
        how.options.window = 0;
        const own_lists all = list_there(what, how);
        REQUIRE(all.report.untrusted == 0);
        what.lists = all.as_set();
        REQUIRE(same_bits(attend(what), dense));
        how.options.rule = up::selection_rule::top_p(0.5, up::mass_scope::all);
        what.lists = list_there(what, how).as_set();
        REQUIRE(!same_bits(attend(what), dense));
        check(what, attend(what), 60);
    }
}

TEST_CASE("lists by query block: doubt reads everything", "[select]") {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const float infinity = std::numeric_limits<float>::infinity();
    for (const float bad : {nan, infinity, -infinity}) {
        scene<float> what({2, 2, 8, 16, 8}, {{1, up::request_tag::prefill, 0, {200}}});
        recipe how = usual(2);
        how.options.window = 0;
        const own_lists good = list_there(what, how);
        // Key 100 of KV head 1: query blocks 0 to 2, rows up to 95, don't see it.
        what.keys.keys[std::size_t{100} * 16 + 8 + 3] = bad;
        const own_lists came = list_there(what, how);
        std::int64_t untrusted = 0;
        for (std::int64_t number = 0; number < 14; ++number) {
            CAPTURE(bad, number);
            const bool sees = number % 2 == 1 && number / 2 >= 3;
            REQUIRE(came.of(number) == (sees ? std::vector<std::int32_t>{-1} : good.of(number)));
            untrusted += sees ? 1 : 0;
        }
        REQUIRE(came.report.untrusted == untrusted);
    }
    // No mass: all of it is in a sink logit.
    scene<float> what({2, 2, 8, 16, 8}, {{1, up::request_tag::prefill, 0, {200}}});
    what.sinks = {0.0f, 1e4f};
    what.options.params.sink_logits = what.sinks.data();
    recipe how = usual(2);
    const own_lists came = list_there(what, how);
    REQUIRE(came.report.untrusted > 0);
    for (std::int64_t number = 0; number < 14; ++number) {
        const bool is_read = came.of(number) == std::vector<std::int32_t>{-1};
        REQUIRE((is_read || number % 2 == 0));
    }
    // Switched off, or too short.
    for (request off : {request{1, up::request_tag::prefill, 0, {200}, {0, 4, 8, 0}},
                        request{1, up::request_tag::prefill, 0, {200}, {1, 4, 8, 201}},
                        request{1, up::request_tag::verify, 0, {200}}}) {
        scene<float> left({2, 2, 8, 16, 8}, {off});
        const own_lists all = list_there(left, usual(2));
        for (std::int64_t number = 0; number < 14; ++number) {
            REQUIRE(all.of(number) == std::vector<std::int32_t>{-1});
        }
        REQUIRE(all.report.untrusted == 0);
        REQUIRE(all.report.wanted == 0);
    }
}

TEST_CASE("lists by query block: other rules", "[select]") {
    scene<float> what({2, 1, 16, 16, 8}, {{1, up::request_tag::prefill, 0, {320}}});
    recipe how = usual(1);
    how.options.sink = 0;
    how.options.window = 0;
    for (const bool later : {false, true}) {
        how.options.rule = up::selection_rule::fixed_budget(48);
        how.options.rule.scope = up::mass_scope::all;
        how.options.rule.ties = later ? up::tie_order::higher_block_first : up::tie_order::lower_block_first;
        const own_lists came = list_there(what, how);
        for (const right_list& right : right_lists(what, how, 0)) {
            const std::vector<std::int32_t> list = came.of(right.number);
            REQUIRE(list.size() == std::min<std::size_t>(3, right.masses.size()));
            double lightest = 1e9;
            for (const std::int32_t block : list) {
                lightest = std::min(lightest, right.masses[static_cast<std::size_t>(block)]);
            }
            std::size_t heavier = 0;
            for (const double mass : right.masses) {
                heavier += mass > lightest + 1e-4 ? 1 : 0;
            }
            REQUIRE(heavier < list.size());
        }
    }
    // A ratio of the blocks, rounded up, and blocks that weigh a share of the heaviest.
    how.options.rule = up::selection_rule::fixed_ratio(0.3);
    how.options.rule.scope = up::mass_scope::all;
    const own_lists ratio = list_there(what, how);
    how.options.rule = up::selection_rule::max_fraction(0.7);
    how.options.rule.scope = up::mass_scope::all;
    const own_lists fraction = list_there(what, how);
    std::size_t listed = 0;
    std::size_t left_out = 0;
    for (const right_list& right : right_lists(what, how, 0)) {
        const std::vector<std::int32_t> heaviest = ratio.of(right.number);
        REQUIRE(heaviest.size() == (right.masses.size() * 3 + 9) / 10);
        const auto is_in = [](const std::vector<std::int32_t>& list, std::size_t block) {
            return std::find(list.begin(), list.end(), static_cast<std::int32_t>(block)) != list.end();
        };
        double lightest = 1e9;
        for (const std::int32_t block : heaviest) {
            lightest = std::min(lightest, right.masses[static_cast<std::size_t>(block)]);
        }
        const double cut = 0.7 * *std::max_element(right.masses.begin(), right.masses.end());
        for (std::size_t block = 0; block < right.masses.size(); ++block) {
            CAPTURE(right.number, block, right.masses[block], lightest, cut);
            REQUIRE((is_in(heaviest, block) || right.masses[block] <= lightest + 1e-4));
            const bool is_listed = is_in(fraction.of(right.number), block);
            REQUIRE((is_listed ? right.masses[block] >= cut - 1e-4 : right.masses[block] <= cut + 1e-4));
            (is_listed ? listed : left_out) += 1;
        }
    }
    CAPTURE(listed, left_out);
    REQUIRE((listed > 20 && left_out > 20));
    // Equal masses: all keys alike. All samples see blocks 0 to 17 whole, of which the first or the last go.
    std::fill(what.keys.keys.begin(), what.keys.keys.end(), 0.0f);
    how.options.rule = up::selection_rule::fixed_budget(48);
    how.options.rule.scope = up::mass_scope::all;
    REQUIRE(list_there(what, how).of(9) == std::vector<std::int32_t>{0, 1, 2});
    how.options.rule.ties = up::tie_order::higher_block_first;
    REQUIRE(list_there(what, how).of(9) == std::vector<std::int32_t>{15, 16, 17});
    how.options.rule.max_kept_rows = 48;
    how.options.rule.kind = up::rule_kind::fixed_ratio;
    how.options.rule.p = up::unit_fraction::from(0.5);
    REQUIRE(list_there(what, how).of(9).size() == 3);
}

namespace {

struct lister_call {
    scene<float> what = scene<float>(
        {4, 2, 20, 16, 8}, {{1, up::request_tag::prefill, 0, {100}}, {2, up::request_tag::chunk, 50, {64}}});
    caches<float> cached = caches<float>(what.keys);
    up::limits bounds = what.keys.tight_limits();
    up::batch_view batch = what.keys.batch();
    recipe how = usual(2);
    own_lists lists = make_room(what, how);
    std::vector<float> sinks = std::vector<float>(4);
    up::head_rows<const float> queries;
    up::key_source<float, up::page_table_cache<float>> keys{what.keys.key_rows(), cached.page_table()};
    up::selection kept;
    std::size_t bytes = 0;
    std::size_t offset = 0;

    lister_call() {
        what.set_window(90);
        what.keep_rows([](auto, std::int32_t row) { return row % 2 == 0; });
        what.options.params.sink_logits = sinks.data();
        queries = what.keys.query_rows();
        kept = what.kept.view(batch);
        bytes = dynamic_lister(bounds, how.sampling).workspace_bytes();
    }
    up::status run() {
        const guarded_buffer memory(bytes + offset);
        const auto offsets = lists.offsets;
        const auto blocks = lists.blocks;
        const up::status done = dynamic_lister(bounds, how.sampling)
                                    .run(queries, keys, what.options, batch, kept, how.options, lists.out,
                                         up::workspace(static_cast<char*>(memory.data()) + offset, bytes));
        REQUIRE(memory.is_intact());
        REQUIRE((done.ok() || memory.is_unwritten()));
        REQUIRE((offsets == lists.offsets && blocks == lists.blocks) != done.ok());
        return done;
    }
};

template <class Spoil>
void refuse(const std::string& argument, up::status_code code, Spoil spoil) {
    lister_call call;
    spoil(call);
    const up::status done = call.run();
    INFO(argument << ": " << message(done));
    REQUIRE(done.argument == argument);
    REQUIRE(done.code == code);
}

} // namespace

TEST_CASE("lists by query block: workspaces are as documented, and monotone", "[select]") {
    up::limits bounds;
    bounds.max_rows = 5000;
    bounds.max_cached_tokens = 700;
    bounds.max_segments = 3;
    bounds.num_heads = 12;
    bounds.num_kv_heads = 2;
    bounds.head_dim = 80;
    bounds.block_rows = 32;
    const up::query_sampling sampling{48, 5}; // 10 samples of 6 heads: 64 lanes
    const auto bytes = [&](const up::limits& of) {
        return static_cast<std::int64_t>(dynamic_lister(of, sampling).workspace_bytes());
    };
    const std::int64_t B = 5000 / 48 + 3, N = 157, M = 64, workers = 64, slots = 5700 / 32 + 3;
    const std::int64_t documented =
        B * 12 * (4 + 4 * 5) + 3 * 8 +
        workers * (M * (4 * 80 + 4 * slots + 28) + 4 * (32 + 8) * (80 + 64) + 32 * (N + 1));
    REQUIRE(bytes(bounds) >= documented);
    REQUIRE(bytes(bounds) <= documented + 256 * (4 + 17 * workers)); // rounded up by piece
    const auto grows = [&](std::int32_t up::limits::*member, std::int32_t by) {
        up::limits larger = bounds;
        larger.*member += by;
        return bytes(larger) >= bytes(bounds);
    };
    REQUIRE(grows(&up::limits::max_rows, 1));
    REQUIRE(grows(&up::limits::max_cached_tokens, 100));
    REQUIRE(grows(&up::limits::max_segments, 1));
    REQUIRE(grows(&up::limits::head_dim, 1));
    REQUIRE(grows(&up::limits::num_heads, 12));
}

TEST_CASE("lists by query block: wrong arguments are refused by name", "[select]") {
    constexpr auto invalid = up::status_code::invalid_argument;
    constexpr auto range = up::status_code::out_of_range;
    constexpr auto unsupported = up::status_code::not_supported;
    using call = lister_call;
    REQUIRE(lister_call().run().ok());
    refuse("queries", invalid, [](call& c) { c.queries.data = nullptr; });
    refuse("queries", invalid, [](call& c) { c.queries.num_rows = 81; });
    refuse("keys.rows", invalid, [](call& c) { c.keys.rows.data = nullptr; });
    refuse("keys.rows", invalid, [](call& c) { c.keys.rows.num_heads = 4; });
    refuse("keys.cached.table", invalid, [](call& c) { c.keys.cached.table = nullptr; });
    refuse("params.scale", invalid, [](call& c) { c.what.options.params.scale = -1; });
    refuse("params.sink_logits", invalid, [](call& c) { c.sinks[3] = 1 / 0.0f; });
    refuse("params.key_scales", unsupported,
           [](call& c) { c.what.options.params.key_scales = c.sinks.data(); });
    refuse("attention.window", invalid, [](call& c) { c.what.options.window = -1; });
    refuse("attention.cached_positions", invalid,
           [](call& c) { c.what.cached_positions[static_cast<std::size_t>(c.what.cached_stride) + 3] = -1; });
    refuse("attention.cached_positions_stride", invalid,
           [](call& c) { c.what.options.cached_positions_stride = -1; });
    refuse("options.window", invalid, [](call& c) { c.how.options.window = -1; });
    refuse("options.sink", invalid, [](call& c) { c.how.options.sink = -1; });
    refuse("rule.p", invalid, [](call& c) { c.how.options.rule.p = {0}; });
    refuse("kept.kept_bound", range, [](call& c) { c.kept.kept_bound = c.bounds.max_rows + 1; });
    refuse("kept.kept_bound", range, [](call& c) { c.kept.kept_bound = 1 << 30; });
    refuse("kept.cu_segments", invalid, [](call& c) { c.kept.cu_segments = nullptr; });
    refuse("batch.tags", invalid, [](call& c) { c.batch.tags = nullptr; });
    refuse("limits.head_dim", invalid, [](call& c) { c.bounds.head_dim = 257; });
    refuse("sampling.query_rows", invalid, [](call& c) { c.how.sampling.query_rows = 0; });
    refuse("sampling.sample", invalid, [](call& c) { c.how.sampling.sample = 0; });
    refuse("out.space", unsupported, [](call& c) { c.lists.out.space = up::memory_space::device; });
    refuse("out.block_rows", invalid, [](call& c) { c.lists.out.block_rows = 8; });
    refuse("out.num_heads", invalid, [](call& c) { c.lists.out.num_heads = 3; });
    refuse("out.query_rows", invalid, [](call& c) { c.lists.out.query_rows = 0; });
    refuse("out.query_rows", invalid, [](call& c) { c.lists.out.query_rows = 16; });
    refuse("out.max_query_blocks", range, [](call& c) { --c.lists.out.max_query_blocks; });
    refuse("out.capacity", invalid, [](call& c) { c.lists.out.capacity = -1; });
    refuse("out", invalid, [](call& c) { c.lists.out.offsets = nullptr; });
    refuse("out", invalid, [](call& c) { c.lists.out.blocks = nullptr; });
    refuse("workspace", up::status_code::workspace_too_small, [](call& c) { --c.bytes; });
    refuse("workspace", up::status_code::misaligned, [](call& c) { c.offset = 128; });
    const up::limits bounds;
    const up::query_block_lister<up::query_list_policy<64, 128>> wrong(bounds, {});
    REQUIRE(std::string(wrong.check().argument) == "limits.head_dim");
    REQUIRE(wrong.workspace_bytes() == 0);
}
