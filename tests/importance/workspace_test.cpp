// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "support/catch.hpp"

#include <uniprefill/importance/importance.hpp>

#include "estimate.hpp"

#include <algorithm>
#include <cstdint>

#if defined(__linux__)
#    include <sys/mman.h>
#endif

namespace up = uniprefill;
using namespace importance_test;

namespace {

std::int64_t up_to(std::int64_t value, std::int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

/// The formula of importance_estimator::workspace_bytes(), written down a second time.
std::size_t documented_bytes(const up::limits& l) {
    const std::int64_t rows = l.max_rows;
    const std::int64_t keys = rows + l.max_cached_tokens;
    const std::int64_t segments = l.max_segments;
    const std::int64_t n = l.num_observations;
    const std::int64_t lanes = up_to(l.num_heads / l.num_kv_heads * std::min(n, rows), 64);
    const std::int64_t slots = keys / l.block_rows + rows / l.block_rows + 3;
    const std::int64_t items = std::min<std::int64_t>(16, segments * l.num_kv_heads);
    const std::int64_t workers = std::min<std::int64_t>(64, keys / l.block_rows + 2);
    const std::int64_t partials =
        std::max(slots * lanes, std::min(items * slots * lanes, std::int64_t{1} << 21));
    std::int64_t sum = up_to(segments * 64, 256);
    sum += up_to(std::min(segments * n, rows) * 4, 256);
    sum += up_to(items * lanes * l.head_dim * 4, 256);
    sum += up_to(partials * 4, 256);
    sum += 2 * up_to(items * lanes * 4, 256);
    sum += up_to(workers * up_to(l.block_rows + 8, 16) * (l.head_dim + 64) * 4, 256);
    sum += up_to(workers * segments, 256);
    return static_cast<std::size_t>(sum);
}

up::limits any_limits(std::mt19937_64& random) {
    const auto below = [&](std::uint64_t bound) { return static_cast<std::int32_t>(random() % bound); };
    up::limits l;
    l.max_requests = 1 + below(40);
    l.max_segments = l.max_requests + below(40);
    l.max_rows = below(4) == 0 ? below(100) : below(3000000);
    l.max_cached_tokens = below(2) == 0 ? 0 : below(3000000);
    l.num_kv_heads = 1 + below(8);
    l.num_heads = l.num_kv_heads * (1 + below(8));
    l.head_dim = 1 + below(256);
    l.block_rows = 8 + below(249);
    l.num_observations = 1 + below(512);
    return l;
}

std::size_t bytes_of(const up::limits& l) {
    return dynamic_estimator(l).workspace_bytes();
}

} // namespace

TEST_CASE("workspace_bytes is the documented formula and monotone", "[importance]") {
    std::mt19937_64 random(uniprefill_test::seed());
    for (int i = 0; i < 2000; ++i) {
        const up::limits l = any_limits(random);
        const std::size_t bytes = bytes_of(l);
        REQUIRE(bytes == documented_bytes(l));
        const auto more = [&](std::int32_t up::limits::*member, std::int32_t by) {
            up::limits larger = l;
            larger.*member += by;
            return !dynamic_estimator(larger).check().ok() || bytes_of(larger) >= bytes;
        };
        const std::int32_t by = 1 + static_cast<std::int32_t>(random() % 100);
        REQUIRE(more(&up::limits::max_segments, by));
        REQUIRE(more(&up::limits::max_rows, by));
        REQUIRE(more(&up::limits::max_cached_tokens, by));
        REQUIRE(more(&up::limits::head_dim, by));
        REQUIRE(more(&up::limits::num_observations, by));
        REQUIRE(more(&up::limits::num_heads, l.num_kv_heads));
        REQUIRE(more(&up::limits::max_requests, 0));
    }
}

TEST_CASE("workspace grows with blocks, not with keys times observation rows", "[importance]") {
    up::limits l;
    l.num_heads = 32;
    l.num_kv_heads = 8;
    l.head_dim = 128;
    l.max_rows = 131072;
    const std::size_t at_128k = bytes_of(l);
    l.max_rows *= 2;
    const std::size_t at_256k = bytes_of(l);
    // Twice the rows are 2 * 2048 more numbers of 512 query rows, and nothing else.
    REQUIRE(at_256k - at_128k == std::size_t{2} * 2048 * 512 * 4);
    REQUIRE(at_256k < std::size_t{262144} * 128 * 4); // n x keys for a single head
}

TEST_CASE("the workspace of a call is used exactly", "[importance]") {
    // estimate() hands over workspace_bytes() bytes with guards around them; these shapes use all they may.
    for (const std::int32_t rows : {1, 8, 9, 100, 513}) {
        for (const std::int32_t cached : {0, 7, 64}) {
            std::vector<request> requests{{1, up::request_tag::chunk, cached, {rows}}};
            requests[0].options = {1, 0, 0, 0};
            const step<float> what({12, 2, 7, 8, 65}, requests);
            const std::vector<float> keys(static_cast<std::size_t>(std::max(cached, 1) * 14), 0.5f);
            const up::contiguous_cache<float> view{keys.data(), 0, 14, 7};
            masses got = estimate(what, view, {}, what.tight_limits());
            REQUIRE(got.view().faults[0] == 0);
        }
    }
}

TEST_CASE("strides beyond 2^31 elements", "[importance]") {
#if defined(__linux__)
    const step<float> what({2, 1, 8, 8, 4}, {{1, up::request_tag::prefill, 0, {24}}});
    masses expected = estimate(what);
    // Rows 2^28 elements apart: the last one starts beyond 2^32. Only the touched pages exist.
    const std::int64_t stride = std::int64_t{1} << 28;
    const std::size_t bytes = static_cast<std::size_t>(stride) * 24 * sizeof(float);
    void* space =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED) {
        uniprefill_test::skip("24 GiB of address space can't be had");
        return;
    }
    auto* const values = static_cast<float*>(space);
    for (std::int32_t row = 0; row < 24; ++row) {
        std::copy_n(what.queries.begin() + row * 16, 16, values + row * stride);
        std::copy_n(what.keys.begin() + row * 8, 8, values + row * stride + 16);
    }
    const up::limits bounds = what.tight_limits();
    const dynamic_estimator estimator(bounds);
    masses got(bounds);
    const guarded_buffer memory(estimator.workspace_bytes());
    REQUIRE(estimator
                .run(up::head_rows<const float>{values, stride, 8, 24, 2, 8},
                     up::key_source<float>{{values + 16, stride, 8, 24, 1, 8}, {}}, {}, what.batch(),
                     got.view(), got.head_view(), up::workspace(memory.data(), estimator.workspace_bytes()))
                .ok());
    REQUIRE(munmap(space, bytes) == 0);
    REQUIRE(got.buffer == expected.buffer);
#else
    uniprefill_test::skip("needs mmap");
#endif
}
