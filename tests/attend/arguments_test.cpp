// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Wrong arguments are named, and nothing is written.

#include "decode_step.hpp"

#include <functional>

namespace up = uniprefill;
using namespace attend_test;

namespace {

constexpr auto invalid = up::status_code::invalid_argument;
constexpr auto range = up::status_code::out_of_range;
constexpr auto unsupported = up::status_code::not_supported;

/// A call that succeeds until something in it is spoilt.
struct prefill_call {
    scene<float> what = scene<float>(
        {4, 2, 20, 16, 8}, {{1, up::request_tag::prefill, 0, {100}}, {2, up::request_tag::chunk, 50, {64}}});
    caches<float> cached = caches<float>(what.keys);
    up::limits bounds = what.keys.tight_limits();
    up::batch_view batch = what.keys.batch();
    std::vector<float> rows = std::vector<float>(std::size_t{164} * 80, 77.0f);
    std::vector<float> lse = std::vector<float>(std::size_t{164} * 4, 77.0f);
    std::vector<float> sinks = std::vector<float>(4);
    up::head_rows<const float> queries;
    up::head_rows<float> out;
    up::key_source<float, up::page_table_cache<float>> keys{what.keys.key_rows(), cached.page_table()};
    up::key_source<float, up::page_table_cache<float>> values{what.values.key_rows(), cached.page_table()};
    up::selection kept;
    up::block_lists lists;
    std::size_t bytes = 0;
    std::size_t offset = 0;

    prefill_call() {
        what.set_window(90);
        what.list_blocks(4, 10, [](auto, auto, auto, int block) { return block % 2 == 0; });
        what.keep_rows([](auto, std::int32_t row) { return row % 2 == 0; });
        what.options.params.sink_logits = sinks.data();
        queries = what.keys.query_rows();
        out = {rows.data(), 80, 20, 82, 4, 20};
        kept = what.kept.view(batch);
        lists = what.lists.view(16, 2);
        bytes = up::prefill_attention<dynamic_policy>(bounds).workspace_bytes();
    }

    up::status run() {
        const guarded_buffer memory(bytes + offset);
        const up::status done = up::prefill_attention<dynamic_policy>(bounds).run(
            queries, keys, values, what.options, batch, kept, lists, out, lse.data(),
            up::workspace(static_cast<char*>(memory.data()) + offset, bytes));
        const auto untouched = [](float value) { return value == 77.0f; };
        REQUIRE(memory.is_intact());
        REQUIRE(memory.is_unwritten() != done.ok());
        REQUIRE(std::all_of(rows.begin(), rows.end(), untouched) != done.ok());
        REQUIRE(std::all_of(lse.begin(), lse.end(), untouched) != done.ok());
        return done;
    }
};

struct decode_call {
    decode_step<float> what = decode_step<float>({4, 2, 20, 16, 8}, {100, 50}, 3);
    up::limits bounds = what.bounds();
    std::vector<float> rows = std::vector<float>(std::size_t{3} * 80, 77.0f);
    std::vector<float> lse = std::vector<float>(std::size_t{3} * 4, 77.0f);
    up::head_rows<const float> queries = what.query_rows();
    up::head_rows<float> out{rows.data(), 80, 20, 3, 4, 20};
    up::page_table_cache<float> keys = what.k.page_table();
    up::page_table_cache<float> values = what.v.page_table();
    up::attention_params params;
    up::decode_rows view = what.view();
    std::size_t bytes = up::decode_attention<>(bounds).workspace_bytes();
    std::size_t offset = 0;

    up::status run() {
        const guarded_buffer memory(bytes + offset);
        const up::status done = up::decode_attention<>(bounds).run(
            queries, keys, values, params, view, out, lse.data(),
            up::workspace(static_cast<char*>(memory.data()) + offset, bytes));
        const auto untouched = [](float value) { return value == 77.0f; };
        REQUIRE(memory.is_intact());
        REQUIRE(memory.is_unwritten() != done.ok());
        REQUIRE(std::all_of(rows.begin(), rows.end(), untouched) != done.ok());
        REQUIRE(std::all_of(lse.begin(), lse.end(), untouched) != done.ok());
        return done;
    }
};

/// @param index the request, segment or row that the refusal names, or -1
template <class Call>
void require_refusal(const std::string& argument, up::status_code code, std::int32_t index,
                     const std::function<void(Call&)>& spoil) {
    Call spoilt;
    spoil(spoilt);
    const up::status done = spoilt.run();
    INFO(message(done));
    REQUIRE(done.argument == argument);
    REQUIRE(done.code == code);
    REQUIRE(done.request == index);
    REQUIRE(std::string(done.expected) != "");
}
const auto refuse = require_refusal<prefill_call>;
const auto refuse_decode = require_refusal<decode_call>;

} // namespace

TEST_CASE("attention: good calls are accepted", "[attend]") {
    REQUIRE(prefill_call().run().ok());
    REQUIRE(decode_call().run().ok());
}

TEST_CASE("attention: wrong arguments are refused by name", "[attend]") {
    using call = prefill_call;
    refuse("queries", invalid, -1, [](call& c) { c.queries.data = nullptr; });
    refuse("queries", invalid, -1, [](call& c) { c.queries.num_heads = 2; });
    refuse("queries", invalid, -1, [](call& c) { c.queries.head_dim = 21; });
    refuse("queries", invalid, -1, [](call& c) { c.queries.num_rows = 81; });
    refuse("out", invalid, -1, [](call& c) { c.out.data = nullptr; });
    refuse("out", invalid, -1, [](call& c) { c.out.num_heads = 2; });
    refuse("out", invalid, -1, [](call& c) { c.out.head_dim = 21; });
    refuse("out", invalid, -1, [](call& c) { c.out.num_rows = 81; });
    refuse("keys.rows", invalid, -1, [](call& c) { c.keys.rows.data = nullptr; });
    refuse("keys.rows", invalid, -1, [](call& c) { c.keys.rows.num_heads = 4; });
    refuse("values.rows", invalid, -1, [](call& c) { c.values.rows.head_dim = 1; });
    refuse("values.rows", invalid, -1, [](call& c) { c.values.rows.num_rows = 163; });
    refuse("keys.cached.data", invalid, 1, [](call& c) { c.keys.cached.data = nullptr; });
    refuse("keys.cached.table", invalid, 1, [](call& c) { c.keys.cached.table = nullptr; });
    refuse("keys.cached.page_tokens", invalid, 1, [](call& c) { c.keys.cached.page_tokens = 0; });
    refuse("values.cached", invalid, 1, [](call& c) { c.values.cached.table = nullptr; });
    for (const float bad :
         {-1.0f, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        refuse("params.scale", invalid, -1, [&](call& c) { c.what.options.params.scale = bad; });
        refuse("params.softcap", invalid, -1, [&](call& c) { c.what.options.params.softcap = bad; });
    }
    refuse("params.sink_logits", invalid, -1,
           [](call& c) { c.sinks[3] = std::numeric_limits<float>::infinity(); });
    refuse("params.key_scales", unsupported, -1,
           [](call& c) { c.what.options.params.key_scales = c.sinks.data(); });
    refuse("options.window", invalid, -1, [](call& c) { c.what.options.window = -1; });
    refuse("options.cached_positions", invalid, 1, [](call& c) { c.what.cached_positions[50 + 3] = 2; });
    refuse("options.cached_positions", invalid, 1, [](call& c) { c.what.cached_positions[50] = -1; });
    refuse("options.cached_positions", invalid, 1, [](call& c) { c.what.cached_positions[99] = 50; });
    refuse("options.cached_positions", invalid, 1, [](call& c) {
        c.what.options.cached_positions = nullptr;
        for (std::size_t row = 100; row < 164; ++row) {
            --c.what.keys.positions[row];
        }
    });
    refuse("batch.tags", invalid, -1, [](call& c) { c.batch.tags = nullptr; });
    refuse("batch.num_rows", range, -1, [](call& c) { --c.bounds.max_rows; });
    refuse("limits.head_dim", invalid, -1, [](call& c) { c.bounds.head_dim = 257; });
    refuse("workspace", up::status_code::workspace_too_small, -1, [](call& c) { --c.bytes; });
    refuse("workspace", up::status_code::misaligned, -1, [](call& c) { c.offset = 128; });
}

TEST_CASE("attention: wrong kept rows are refused", "[attend]") {
    using call = prefill_call;
    refuse("kept.space", unsupported, -1, [](call& c) { c.kept.space = up::memory_space::device; });
    refuse("kept.num_requests", invalid, -1, [](call& c) { c.kept.num_requests = 1; });
    refuse("kept.num_segments", invalid, -1, [](call& c) { c.kept.num_segments = 1; });
    refuse("kept.num_rows", invalid, -1, [](call& c) { c.kept.num_rows = 163; });
    refuse("kept.kept_bound", invalid, -1, [](call& c) { c.kept.kept_bound = -1; });
    refuse("kept.kept_bound", invalid, -1, [](call& c) { c.kept.identity = true; });
    refuse("kept.kept_to_old", invalid, -1, [](call& c) { c.kept.kept_to_old = nullptr; });
    refuse("kept.cu_segments", invalid, -1, [](call& c) { c.kept.cu_segments = nullptr; });
    refuse("kept.cu_segments", invalid, -1, [](call& c) { c.kept.cu_segments[0] = 1; });
    refuse("kept.cu_segments", invalid, 0, [](call& c) { c.kept.cu_segments[1] = 83; });
    refuse("kept.cu_segments", invalid, 1, [](call& c) { c.kept.cu_segments[2] = 49; });
    refuse("kept.kept_to_old", invalid, 0, [](call& c) { c.kept.kept_to_old[1] = 0; });
    refuse("kept.kept_to_old", invalid, 0, [](call& c) { c.kept.kept_to_old[0] = -1; });
    refuse("kept.kept_to_old", invalid, 0, [](call& c) { c.kept.kept_to_old[49] = 100; });
    refuse("kept.kept_to_old", invalid, 1, [](call& c) { c.kept.kept_to_old[50] = 99; });
    refuse("kept.kept_to_old", invalid, 1, [](call& c) { c.kept.kept_to_old[81] = 164; });
}

TEST_CASE("attention: wrong lists are refused", "[attend]") {
    using call = prefill_call;
    refuse("lists.space", unsupported, -1, [](call& c) { c.lists.space = up::memory_space::device; });
    refuse("lists.block_rows", invalid, -1, [](call& c) { c.lists.block_rows = 8; });
    refuse("lists.window", invalid, -1, [](call& c) { c.lists.window = -1; });
    refuse("lists.num_segments", invalid, -1, [](call& c) { c.lists.num_segments = 1; });
    refuse("lists.num_heads", invalid, -1, [](call& c) { c.lists.num_heads = 3; });
    refuse("lists.offsets", invalid, -1, [](call& c) { c.lists.offsets[0] = -1; });
    refuse("lists.offsets", invalid, 0, [](call& c) { c.lists.offsets[2] = 3; });
    refuse("lists.offsets", invalid, 1, [](call& c) { --c.lists.capacity; });
    refuse("lists.blocks", invalid, -1, [](call& c) { c.lists.blocks = nullptr; });
    refuse("lists.blocks", invalid, 0, [](call& c) { c.lists.blocks[0] = -1; });
    refuse("lists.blocks", invalid, 0, [](call& c) { c.lists.blocks[1] = 0; });
    refuse("lists.blocks", invalid, 0, [](call& c) { std::swap(c.lists.blocks[0], c.lists.blocks[1]); });
    refuse("lists.blocks", invalid, 0, [](call& c) { c.lists.blocks[3] = 7; }); // 100 rows: blocks 0 to 6
    refuse("lists.blocks", invalid, 1, [](call& c) { c.lists.blocks[17] = 4; });
}

TEST_CASE("attention: wrong lists by query block are refused", "[attend]") {
    using call = prefill_call;
    const auto by_query_block = [](call& c) { // 50 and 32 queries: blocks 0 to 3 and 4 to 6, at 4 heads
        c.what.list_own_blocks(4, 10, 16, [](auto, auto, auto, std::int32_t query_block, int block) {
            return block < 0 ? query_block != 1 : block % 2 == 0;
        });
        c.lists = c.what.lists.view(16, 2);
    };
    {
        call good;
        by_query_block(good);
        REQUIRE(good.run().ok());
    }
    const auto refuse_lists = [&](const std::string& argument, std::int32_t index, auto spoil) {
        refuse(argument, invalid, index, [&](call& c) {
            by_query_block(c);
            spoil(c);
        });
    };
    refuse_lists("lists.query_rows", -1, [](call& c) { c.lists.query_rows = -1; });
    refuse_lists("lists.offsets", 0, [](call& c) { c.lists.query_rows = 0; }); // no `~` in lists of segments
    refuse_lists("lists.max_query_blocks", -1, [](call& c) { --c.lists.max_query_blocks; });
    refuse_lists("lists.offsets", 0, [](call& c) { c.lists.offsets[2] = 3; });
    refuse_lists("lists.offsets", 0, [](call& c) { c.lists.offsets[4] = ~std::int64_t{5}; });
    refuse_lists("lists.offsets", 1, [](call& c) { --c.lists.capacity; });
    refuse_lists("lists.blocks", -1, [](call& c) { c.lists.blocks = nullptr; });
    refuse_lists("lists.blocks", 0, [](call& c) { c.lists.blocks[3] = 7; });
    refuse_lists("lists.blocks", 0, [](call& c) { std::swap(c.lists.blocks[0], c.lists.blocks[1]); });
}

TEST_CASE("attention: cached keys without a cache are refused", "[attend]") {
    prefill_call good;
    const guarded_buffer memory(good.bytes);
    const up::status done =
        up::prefill_attention<dynamic_policy>(good.bounds)
            .run(good.queries, up::key_source<float>{good.keys.rows, {}},
                 up::key_source<float>{good.values.rows, {}}, good.what.options, good.batch, good.kept,
                 good.lists, good.out, good.lse.data(), up::workspace(memory.data(), good.bytes));
    REQUIRE(std::string(done.argument) == "keys.cached");
    REQUIRE(done.request == 1);
    REQUIRE(memory.is_unwritten());
}

TEST_CASE("decode: wrong arguments are refused by name", "[attend]") {
    using call = decode_call;
    refuse_decode("rows.space", unsupported, -1, [](call& c) { c.view.space = up::memory_space::device; });
    refuse_decode("rows.num_rows", range, -1, [](call& c) { c.view.num_rows = 4; });
    refuse_decode("rows.num_rows", range, -1, [](call& c) { c.view.num_rows = -1; });
    refuse_decode("rows.lens", invalid, -1, [](call& c) { c.view.lens = nullptr; });
    refuse_decode("rows.lens", invalid, 1, [](call& c) { c.what.lens[1] = -1; });
    refuse_decode("rows.lens", range, 2, [](call& c) { c.what.lens[2] = 151; });
    refuse_decode("rows.requests", range, 1, [](call& c) { c.what.requests[1] = 2; });
    refuse_decode("rows.requests", range, 2, [](call& c) { c.view.requests = nullptr; });
    refuse_decode("rows.requests", range, 0, [](call& c) { c.what.requests[0] = -1; });
    refuse_decode("rows.first_keys", invalid, 0, [](call& c) { c.what.first_keys[0] = -1; });
    refuse_decode("rows.first_keys", invalid, 1, [](call& c) { c.what.first_keys[1] = 51; });
    refuse_decode("queries", invalid, -1, [](call& c) { c.queries.num_rows = 2; });
    refuse_decode("queries", invalid, -1, [](call& c) { c.queries.data = nullptr; });
    refuse_decode("out", invalid, -1, [](call& c) { c.out.num_heads = 2; });
    refuse_decode("out", invalid, -1, [](call& c) { c.out.data = nullptr; });
    refuse_decode("keys.cached.data", invalid, -1, [](call& c) { c.keys.data = nullptr; });
    refuse_decode("values.cached", invalid, -1, [](call& c) { c.values.page_tokens = -1; });
    refuse_decode("params.scale", invalid, -1, [](call& c) { c.params.scale = -1; });
    refuse_decode("params.key_scales", unsupported, -1, [](call& c) { c.params.key_scales = c.lse.data(); });
    refuse_decode("limits.num_kv_heads", invalid, -1, [](call& c) { c.bounds.num_kv_heads = 0; });
    refuse_decode("workspace", up::status_code::workspace_too_small, -1, [](call& c) { --c.bytes; });
    refuse_decode("workspace", up::status_code::misaligned, -1, [](call& c) { c.offset = 64; });
}

TEST_CASE("attention: limits must agree with the policy's constants", "[attend]") {
    up::limits bounds;
    REQUIRE(up::prefill_attention<>(bounds).check().ok());
    REQUIRE(up::prefill_attention<up::attention_policy<up::dynamic, 64>>(bounds).check().ok());
    REQUIRE(std::string(up::prefill_attention<up::attention_policy<32>>(bounds).check().argument) ==
            "limits.block_rows (G)");
    const up::prefill_attention<up::attention_policy<64, 128>> wrong(bounds);
    REQUIRE(std::string(wrong.check().argument) == "limits.head_dim");
    REQUIRE(wrong.check().came == 64);
    REQUIRE(wrong.workspace_bytes() == 0);
    REQUIRE(wrong.bounds().head_dim == 64);
    const up::decode_attention<up::decode_policy<128>> wrong_decode(bounds);
    REQUIRE(std::string(wrong_decode.check().argument) == "limits.head_dim");
    REQUIRE(wrong_decode.workspace_bytes() == 0);
    REQUIRE(up::decode_attention<>(bounds).workspace_bytes() > 0);
}

TEST_CASE("attention: workspaces are as documented, and monotone", "[attend]") {
    up::limits bounds;
    bounds.max_rows = 1000;
    bounds.max_segments = 3;
    bounds.num_heads = 4;
    bounds.num_kv_heads = 2;
    bounds.head_dim = 80;
    const auto prefill = [](const up::limits& l) { return up::prefill_attention<>(l).workspace_bytes(); };
    const auto decode = [](const up::limits& l) { return up::decode_attention<>(l).workspace_bytes(); };
    const std::size_t worker = (328 * 80 + 5128 + 15) / 16 * 16 * 4;
    const auto aligned = [](std::size_t bytes) { return (bytes + 255) / 256 * 256; };
    REQUIRE(prefill(bounds) == 256 + 256 + aligned(64 * worker)); // 4 * (15 + 3) units: 64 threads at most
    bounds.max_rows = 100;
    REQUIRE(prefill(bounds) == 256 + 256 + aligned(4 * (1 + 3) * worker));
    bounds.max_rows = 5;
    REQUIRE(decode(bounds) == aligned(10 * worker));
    for (std::int32_t up::limits::*field :
         {&up::limits::max_rows, &up::limits::max_segments, &up::limits::num_heads, &up::limits::head_dim}) {
        up::limits more = bounds;
        for (int i = 0; i < 40; ++i) {
            const std::size_t before[] = {prefill(more), decode(more)};
            more.*field += field == &up::limits::num_heads ? 2 : 1;
            REQUIRE(prefill(more) >= before[0]);
            REQUIRE(decode(more) >= before[1]);
        }
    }
}
