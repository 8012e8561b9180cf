// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Wrong arguments are named, and nothing is written.

#include "caches.hpp"
#include "estimate.hpp"

#include <functional>
#include <limits>

namespace up = uniprefill;
using namespace importance_test;

namespace {

/// A call that succeeds until something in it is spoilt.
struct call {
    step<float> what = step<float>(
        {4, 2, 20, 16, 8}, {{1, up::request_tag::prefill, 0, {100}}, {2, up::request_tag::chunk, 50, {64}}});
    caches<float> cached = caches<float>(what);
    up::limits bounds = what.tight_limits();
    masses result = masses(bounds);
    up::batch_view batch = what.batch();
    up::head_rows<const float> queries = what.query_rows();
    up::key_source<float, up::page_table_cache<float>> keys{what.key_rows(), cached.page_table()};
    up::attention_params params;
    up::mass_view out = result.view();
    up::head_mass_view per_head = result.head_view();
    std::size_t bytes = dynamic_estimator(bounds).workspace_bytes();
    std::size_t offset = 0;

    up::status run() {
        const guarded_buffer memory(bytes + offset);
        const up::status done =
            dynamic_estimator(bounds).run(queries, keys, params, batch, out, per_head,
                                          up::workspace(static_cast<char*>(memory.data()) + offset, bytes));
        REQUIRE(memory.is_intact());
        REQUIRE(memory.is_unwritten() != done.ok());
        REQUIRE(result.is_unwritten() != done.ok());
        return done;
    }
};

void require_refusal(const std::string& argument, up::status_code code,
                     const std::function<void(call&)>& spoil) {
    call spoilt;
    spoil(spoilt);
    const up::status done = spoilt.run();
    INFO(message(done));
    REQUIRE(done.argument == argument);
    REQUIRE(done.code == code);
    REQUIRE(std::string(done.expected) != "");
}

} // namespace

TEST_CASE("a good call is accepted", "[importance]") {
    call good;
    REQUIRE(good.run().ok());
}

TEST_CASE("wrong arguments are refused by name", "[importance]") {
    const auto invalid = up::status_code::invalid_argument;
    const auto range = up::status_code::out_of_range;

    require_refusal("queries", invalid, [](call& c) { c.queries.data = nullptr; });
    require_refusal("queries", invalid, [](call& c) { c.queries.num_heads = 2; });
    require_refusal("queries", invalid, [](call& c) { c.queries.head_dim = 21; });
    require_refusal("queries", invalid, [](call& c) { --c.queries.num_rows; });
    require_refusal("keys.rows", invalid, [](call& c) { c.keys.rows.data = nullptr; });
    require_refusal("keys.rows", invalid, [](call& c) { c.keys.rows.num_heads = 4; });
    require_refusal("keys.rows", invalid, [](call& c) { c.keys.rows.head_dim = 1; });
    require_refusal("keys.rows", invalid, [](call& c) { c.keys.rows.num_rows = 0; });
    require_refusal("keys.cached.data", invalid, [](call& c) { c.keys.cached.data = nullptr; });
    require_refusal("keys.cached.table", invalid, [](call& c) { c.keys.cached.table = nullptr; });
    require_refusal("keys.cached.page_tokens", invalid, [](call& c) { c.keys.cached.page_tokens = 0; });
    for (const float bad :
         {-1.0f, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        require_refusal("params.scale", invalid, [&](call& c) { c.params.scale = bad; });
        require_refusal("params.softcap", invalid, [&](call& c) { c.params.softcap = bad; });
    }
    require_refusal("batch.tags", invalid, [](call& c) { c.batch.tags = nullptr; });
    require_refusal("batch.positions", invalid, [](call& c) { c.batch.positions = nullptr; });
    require_refusal("batch.num_rows", range, [](call& c) { --c.bounds.max_rows; });
    require_refusal("out.free", invalid, [](call& c) { c.out.free = nullptr; });
    require_refusal("out.forced", invalid, [](call& c) { c.out.forced = nullptr; });
    require_refusal("out.faults", invalid, [](call& c) { c.out.faults = nullptr; });
    require_refusal("out.format", invalid, [](call& c) { ++c.out.format.fraction_bits; });
    require_refusal("out.num_blocks", range, [](call& c) { c.out.num_blocks = 10; });
    require_refusal("out.num_segments", range, [](call& c) { c.out.num_segments = 1; });
    require_refusal("out.space", up::status_code::not_supported,
                    [](call& c) { c.out.space = up::memory_space::device; });
    require_refusal("per_head.forced", invalid, [](call& c) { c.per_head.forced = nullptr; });
    require_refusal("per_head.num_heads", invalid, [](call& c) { c.per_head.num_heads = 3; });
    require_refusal("per_head.head_stride", range, [](call& c) { c.per_head.head_stride = 5; });
    require_refusal("limits.head_dim", invalid, [](call& c) { c.bounds.head_dim = 257; });
    require_refusal("workspace", up::status_code::workspace_too_small, [](call& c) { --c.bytes; });
    require_refusal("workspace", up::status_code::misaligned, [](call& c) { c.offset = 128; });
}

TEST_CASE("no memory is refused", "[importance]") {
    call good;
    const up::status done =
        dynamic_estimator(good.bounds)
            .run(good.queries, good.keys, good.params, good.batch, good.out, good.per_head, {});
    REQUIRE(done.code == up::status_code::invalid_argument);
    REQUIRE(std::string(done.argument) == "workspace");
    REQUIRE(good.result.is_unwritten());
}

TEST_CASE("cached keys without a cache are refused", "[importance]") {
    call good;
    const guarded_buffer memory(good.bytes);
    const up::status done =
        dynamic_estimator(good.bounds)
            .run(good.queries, up::key_source<float>{good.keys.rows, {}}, good.params, good.batch, good.out,
                 good.per_head, up::workspace(memory.data(), good.bytes));
    REQUIRE(std::string(done.argument) == "keys.cached");
    REQUIRE(done.request == 1);
    REQUIRE(good.result.is_unwritten());
}

TEST_CASE("every cache view is asked for its arrays", "[importance]") {
    const float value = 0;
    const std::int32_t entry = 0;
    const void* const page = &value;
    REQUIRE(up::detail::check_cache(up::contiguous_cache<float>{&value}).ok());
    REQUIRE_FALSE(up::detail::check_cache(up::contiguous_cache<float>{}).ok());
    REQUIRE(up::detail::check_cache(up::csr_page_cache<float>{&value, 1, 1, 1, &entry, &entry, 1}).ok());
    REQUIRE_FALSE(
        up::detail::check_cache(up::csr_page_cache<float>{nullptr, 1, 1, 1, &entry, &entry, 1}).ok());
    REQUIRE_FALSE(
        up::detail::check_cache(up::csr_page_cache<float>{&value, 1, 1, 1, nullptr, &entry, 1}).ok());
    REQUIRE_FALSE(
        up::detail::check_cache(up::csr_page_cache<float>{&value, 1, 1, 1, &entry, nullptr, 1}).ok());
    REQUIRE_FALSE(
        up::detail::check_cache(up::csr_page_cache<float>{&value, 1, 1, 1, &entry, &entry, 0}).ok());
    REQUIRE(up::detail::check_cache(up::token_slot_cache<float>{&value, 1, 1, &entry, 1}).ok());
    REQUIRE_FALSE(up::detail::check_cache(up::token_slot_cache<float>{nullptr, 1, 1, &entry, 1}).ok());
    REQUIRE_FALSE(up::detail::check_cache(up::token_slot_cache<float>{&value, 1, 1, nullptr, 1}).ok());
    REQUIRE(up::detail::check_cache(up::page_pointer_cache<float>{&page, 1, 0, 1, 1, 1}).ok());
    REQUIRE_FALSE(up::detail::check_cache(up::page_pointer_cache<float>{nullptr, 1, 0, 1, 1, 1}).ok());
    REQUIRE_FALSE(up::detail::check_cache(up::page_pointer_cache<float>{&page, 1, 0, 1, 1, 0}).ok());
}

TEST_CASE("limits must agree with the policy's constants", "[importance]") {
    up::limits bounds;
    REQUIRE(up::importance_estimator<>(bounds).check().ok());
    REQUIRE(up::importance_estimator<up::estimator_policy<64, up::dynamic>>(bounds).check().ok());
    const up::status wrong_g = up::importance_estimator<up::estimator_policy<32, 128>>(bounds).check();
    REQUIRE(std::string(wrong_g.argument) == "limits.block_rows (G)");
    const up::status wrong_n = up::importance_estimator<up::estimator_policy<64, 64>>(bounds).check();
    REQUIRE(std::string(wrong_n.argument) == "limits.num_observations (n)");
    REQUIRE(wrong_n.came == 128);
    REQUIRE(up::importance_estimator<up::estimator_policy<32, 128>>(bounds).workspace_bytes() == 0);
    bounds.num_kv_heads = 0;
    REQUIRE(std::string(up::importance_estimator<>(bounds).check().argument) == "limits.num_kv_heads");
    REQUIRE(up::importance_estimator<>(bounds).workspace_bytes() == 0);
}

TEST_CASE("head masses that aren't wanted aren't written", "[importance]") {
    call good;
    good.per_head = {};
    REQUIRE(good.run().ok());
    REQUIRE(std::all_of(good.result.heads.begin(), good.result.heads.end(),
                        [](std::int64_t value) { return value == masses::nonsense; }));
}
