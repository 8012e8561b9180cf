// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Wrong arguments of attention on the device are named, and nothing is launched.

#include "gpu_contracts.cuh"

#include <functional>
#include <string>

using namespace attend_test;

namespace {

using bf16 = up::bfloat16;
using attention_type = attention_of<small_blocks>;
constexpr auto invalid = up::status_code::invalid_argument;
constexpr auto range = up::status_code::out_of_range;
constexpr auto unsupported = up::status_code::not_supported;
constexpr auto misaligned = up::status_code::misaligned;

/// A call that succeeds until something in it is spoilt.
struct device_call {
    scene<bf16> what = make_scene();
    caches<bf16> k = caches<bf16>(what.keys);
    device_caches<bf16> cached = device_caches<bf16>(k);
    device_scene<bf16> arrays = device_scene<bf16>(what);
    device_output<bf16> result = device_output<bf16>(what.keys.shape(), what.num_queries());
    up::limits bounds = what.keys.tight_limits();
    up::cuda_device device = importance_test::this_device();
    up::head_rows<const bf16> queries = arrays.query_rows();
    up::key_source<bf16, cache_of<small_blocks>> keys{arrays.key_rows(), cached.contiguous()};
    up::key_source<bf16, cache_of<small_blocks>> values{arrays.value_rows(), cached.contiguous()};
    up::attention_options options = arrays.options();
    up::batch_view batch = arrays.batch();
    up::selection kept = arrays.kept();
    up::block_lists lists = arrays.lists();
    up::head_rows<bf16> out = result.rows();
    std::size_t bytes = attention_type(bounds).workspace_bytes();
    std::size_t offset = 0;

    static scene<bf16> make_scene() {
        scene<bf16> made({4, 2, 64, 16, 8},
                         {{1, up::request_tag::prefill, 0, {100}}, {2, up::request_tag::chunk, 50, {64}}});
        made.set_window(90);
        made.list_blocks(4, 10, [](auto, auto, auto, int block) { return block % 2 == 0; });
        made.keep_rows([](auto, std::int32_t row) { return row % 2 == 0; });
        return made;
    }
    up::status run() {
        const device_array<unsigned char> memory(bytes + offset + 256);
        const up::status done = attention_type(bounds, device)
                                    .run(queries, keys, values, options, batch, kept, lists, out,
                                         result.lse(), up::workspace(memory.data() + offset, bytes), nullptr);
        if (!done.ok()) {
            static_cast<void>(result.get(0)); // nothing written
        }
        return done;
    }
};

void refuse(const std::string& argument, up::status_code code,
            const std::function<void(device_call&)>& spoil) {
    device_call spoilt;
    spoil(spoilt);
    const up::status done = spoilt.run();
    INFO(argument << ": " << message(done));
    REQUIRE(done.argument == argument);
    REQUIRE(done.code == code);
    REQUIRE(std::string(done.expected) != "");
}

} // namespace

TEST_CASE("device attention names the argument that is wrong", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    device_call good;
    REQUIRE(attention_type(good.bounds, good.device).prepare<bf16, cache_of<small_blocks>>().ok());
    REQUIRE(good.run().ok());
    device_call without_room; // no list names a block, so there is no array of them
    without_room.lists.capacity = 0;
    without_room.lists.blocks = nullptr;
    REQUIRE(without_room.run().ok());
    using call = device_call;
    refuse("limits.head_dim", invalid, [](call& c) { c.bounds.head_dim = 80; });
    refuse("limits.block_rows (G)", invalid, [](call& c) { c.bounds.block_rows = 32; });
    refuse("batch.space", unsupported, [](call& c) { c.batch.space = up::memory_space::host; });
    refuse("batch.num_requests", range, [](call& c) { c.batch.num_requests = 3; });
    refuse("batch.num_rows", range, [](call& c) { c.batch.num_rows = 165; });
    refuse("batch.cu_seqlens", invalid, [](call& c) { c.batch.cu_seqlens = nullptr; });
    refuse("batch.positions", invalid, [](call& c) { c.batch.positions = nullptr; });
    refuse("kept.space", unsupported, [](call& c) { c.kept.space = up::memory_space::host; });
    refuse("kept.num_requests", invalid, [](call& c) { c.kept.num_requests = 1; });
    refuse("kept.num_segments", invalid, [](call& c) { c.kept.num_segments = 1; });
    refuse("kept.num_rows", invalid, [](call& c) { c.kept.num_rows = 163; });
    refuse("kept.kept_bound", invalid, [](call& c) { c.kept.kept_bound = -1; });
    refuse("kept.kept_bound", invalid, [](call& c) { c.kept.identity = true; });
    refuse("kept.kept_to_old", invalid, [](call& c) { c.kept.kept_to_old = nullptr; });
    refuse("kept.cu_segments", invalid, [](call& c) { c.kept.cu_segments = nullptr; });
    refuse("queries", invalid, [](call& c) { c.queries.num_heads = 2; });
    refuse("queries", invalid, [](call& c) { c.queries.head_dim = 32; });
    refuse("queries", invalid, [](call& c) { c.queries.num_rows = 81; });
    refuse("queries", invalid, [](call& c) { c.queries.data = nullptr; });
    refuse("queries", misaligned, [](call& c) { ++c.queries.data; });
    refuse("queries", misaligned, [](call& c) { ++c.queries.row_stride; });
    refuse("queries", misaligned, [](call& c) { ++c.queries.head_stride; });
    refuse("keys.rows", invalid, [](call& c) { c.keys.rows.num_heads = 1; });
    refuse("keys.rows", invalid, [](call& c) { c.keys.rows.num_rows = 163; });
    refuse("keys.rows", misaligned, [](call& c) { ++c.keys.rows.data; });
    refuse("values.rows", invalid, [](call& c) { c.values.rows.head_dim = 63; });
    refuse("values.rows", invalid, [](call& c) { c.values.rows.data = nullptr; });
    refuse("values.rows", misaligned, [](call& c) { c.values.rows.row_stride += 4; });
    refuse("keys.cached.data", invalid, [](call& c) { c.keys.cached.data = nullptr; });
    refuse("keys.cached", misaligned, [](call& c) { ++c.keys.cached.token_stride; });
    refuse("values.cached", invalid, [](call& c) { c.values.cached.data = nullptr; });
    refuse("values.cached", misaligned, [](call& c) { ++c.values.cached.data; });
    refuse("params.scale", invalid, [](call& c) { c.options.params.scale = -1; });
    refuse("params.softcap", invalid, [](call& c) { c.options.params.softcap = NAN; });
    refuse("params.key_scales", unsupported, [](call& c) { c.options.params.key_scales = c.result.lse(); });
    refuse("options.window", invalid, [](call& c) { c.options.window = -1; });
    refuse("options.cached_positions_stride", invalid,
           [](call& c) { c.options.cached_positions_stride = -1; });
    refuse("lists.space", unsupported, [](call& c) { c.lists.space = up::memory_space::host; });
    refuse("lists.block_rows", invalid, [](call& c) { c.lists.block_rows = 32; });
    refuse("lists.window", invalid, [](call& c) { c.lists.window = -1; });
    refuse("lists.num_segments", invalid, [](call& c) { c.lists.num_segments = 1; });
    refuse("lists.num_heads", invalid, [](call& c) { c.lists.num_heads = 3; });
    refuse("lists.blocks", invalid, [](call& c) { c.lists.blocks = nullptr; });
    refuse("out", invalid, [](call& c) { c.out.num_heads = 2; });
    refuse("out", invalid, [](call& c) { c.out.num_rows = 81; });
    refuse("out", misaligned, [](call& c) { ++c.out.data; });
    refuse("workspace", up::status_code::workspace_too_small, [](call& c) { --c.bytes; });
    refuse("device", unsupported, [](call& c) { c.device.compute_capability = 75; });
    refuse("device.body", unsupported, [](call& c) {
        c.device.body = up::cuda_body::sm90;
        c.device.compute_capability = 80;
    });
}

TEST_CASE("device attention of nothing is a success", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    scene<bf16> what({4, 2, 64, 16, 8},
                     {{1, up::request_tag::prefill, 0, {0}}, {2, up::request_tag::chunk, 50, {0}}});
    for (const up::cuda_device& device : each_body<true>()) {
        REQUIRE(attend_there<small_blocks>(what, device).rows.empty());
    }
    scene<bf16> dropped({4, 2, 64, 16, 8}, {{1, up::request_tag::prefill, 0, {200}}});
    dropped.keep_rows([](auto, auto) { return false; });
    for (const up::cuda_device& device : each_body<true>()) {
        REQUIRE(attend_there<small_blocks>(dropped, device).rows.empty());
    }
}
