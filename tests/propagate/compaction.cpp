// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Rows arrive where the maps say, in and out of place, for any size and stride, and nothing else changes.

#include "support/catch.hpp"

#include "tensors.hpp"

#include <uniprefill/propagate/compaction.hpp>

#include <cstdlib>
#include <functional>
#if defined(_OPENMP)
#    include <omp.h>
#endif

using namespace propagate_test;

namespace {

struct shape {
    std::int64_t row_bytes;
    std::int64_t gap;
};

shape random_shape(std::mt19937& random) {
    constexpr std::int64_t sizes[] = {0, 1, 2, 3, 4, 17, 64, 1152};
    return {sizes[random() % 8], random() % 2 == 0 ? 0 : static_cast<std::int64_t>(random() % 70)};
}

} // namespace

TEST_CASE("compact: random keep sets, sizes and strides") {
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()));
    for (std::int32_t i = 0; i < 500; ++i) {
        const auto rows = static_cast<std::int32_t>(random() % 300);
        const keep_set kept(random_keeps(random, rows), {0, rows}, static_cast<std::int32_t>(random() % 4));
        const shape from = random_shape(random);
        const std::int64_t to_stride = from.row_bytes + random_shape(random).gap;
        INFO("case " << i << ": " << rows << " rows of " << from.row_bytes << " bytes");
        tensor source(rows + static_cast<std::int32_t>(random() % 3), from.row_bytes,
                      from.row_bytes + from.gap, random());
        tensor destination(kept.kept() + static_cast<std::int32_t>(random() % 3), from.row_bytes, to_stride,
                           random());

        tensor wanted = destination;
        for (std::int32_t j = 0; j < kept.kept(); ++j) {
            wanted.set_row(j, source.row(kept.kept_to_old[static_cast<std::size_t>(j)]));
        }
        const auto untouched = source.bytes;
        REQUIRE(up::compact(kept.view, source.view(), destination.view(), {}).ok());
        REQUIRE(destination.bytes == wanted.bytes);
        REQUIRE(source.bytes == untouched);

        // In place gives the same rows; what lies beyond the kept ones is left alone.
        tensor in_place = source;
        REQUIRE(up::compact(kept.view, in_place.view(), in_place.view(), {}).ok());
        for (std::int32_t j = 0; j < in_place.rows; ++j) {
            REQUIRE(in_place.row(j) == (j < kept.kept() ? wanted : source).row(j));
        }

        // And back: kept rows where they were, dropped rows as they are.
        tensor full(rows, from.row_bytes, from.row_bytes + 5, random());
        tensor back = full;
        for (std::int32_t row = 0; row < rows; ++row) {
            if (kept.old_to_kept[static_cast<std::size_t>(row)] >= 0) {
                back.set_row(row, source.row(row));
            }
        }
        REQUIRE(up::scatter(kept.view, destination.view(), full.view(), {}).ok());
        REQUIRE(full.bytes == back.bytes);
    }
}

TEST_CASE("compact: keep all does nothing in place and copies otherwise") {
    const auto all = up::selection::keep_all(1, 1, 50, up::memory_space::host);
    for (const std::int64_t gap : {0, 3}) {
        tensor source(50, 12, 12 + gap, 1);
        tensor destination(51, 12, 12, 2);
        const auto before = source.bytes;
        REQUIRE(up::compact(all, source.view(), source.view(), {}).ok());
        REQUIRE(up::scatter(all, source.view(), source.view(), {}).ok());
        CHECK(source.bytes == before);
        REQUIRE(up::compact(all, source.view(), destination.view(), {}).ok());
        tensor back(50, 12, 19, 3);
        REQUIRE(up::scatter(all, destination.view(), back.view(), {}).ok());
        for (std::int32_t row = 0; row < 50; ++row) {
            CHECK(destination.row(row) == source.row(row));
            CHECK(back.row(row) == source.row(row));
        }
    }
}

TEST_CASE("compact: many tensors of different rows at once, positions among them") {
    std::mt19937 random(5);
    const keep_set kept(random_keeps(random, 200), {0, 90, 200});
    tensor hidden(200, 256, 256, 6);
    tensor residual(200, 512, 600, 7);
    std::vector<std::int32_t> positions(200);
    for (std::int32_t row = 0; row < 200; ++row) {
        positions[static_cast<std::size_t>(row)] = 3 * row;
    }
    const tensor hidden_before = hidden;
    const tensor residual_before = residual;
    const up::byte_rows tensors[] = {hidden.view(), residual.view(),
                                     up::as_byte_rows(positions.data(), 200, 1)};
    REQUIRE(up::compact(kept.view, tensors, tensors, 3, {}).ok());
    for (std::int32_t j = 0; j < kept.kept(); ++j) {
        const std::int32_t old = kept.kept_to_old[static_cast<std::size_t>(j)];
        CHECK(hidden.row(j) == hidden_before.row(old));
        CHECK(residual.row(j) == residual_before.row(old));
        CHECK(positions[static_cast<std::size_t>(j)] == 3 * old);
    }
    CHECK(up::compact(kept.view, nullptr, nullptr, 0, {}).ok());
}

TEST_CASE("compact: columns of one buffer are apart although their addresses interleave") {
    const keep_set kept({true, false, true, true}, {0, 4});
    tensor both(4, 16, 16, 9);
    const up::byte_rows left{both.bytes.data(), 16, 8, 4};
    const up::byte_rows right{both.bytes.data() + 8, 16, 8, 4};
    const tensor before = both;
    REQUIRE(up::compact(kept.view, left, right, {}).ok());
    for (std::int32_t j = 0; j < 3; ++j) {
        const std::int32_t old = kept.kept_to_old[static_cast<std::size_t>(j)];
        CHECK(std::memcmp(both.bytes.data() + 16 * j + 8, before.bytes.data() + 16 * old, 8) == 0);
    }
    const up::byte_rows touching{both.bytes.data() + 7, 16, 8, 4};
    CHECK(up::compact(kept.view, left, touching, {}).code == up::status_code::invalid_argument);
}

TEST_CASE("compact: rows further apart than 2^31 bytes") {
    // Two rows 3 GiB apart in memory that only exists where it is written.
    const std::int64_t far = std::int64_t{3} << 30;
    auto* memory = static_cast<unsigned char*>(std::calloc(static_cast<std::size_t>(far + 64), 1));
    if (memory == nullptr) {
        uniprefill_test::skip("no 3 GiB of address space");
        return;
    }
    std::memset(memory, 1, 16);
    std::memset(memory + far, 2, 16);
    const keep_set kept({false, true}, {0, 2});
    const up::byte_rows rows{memory, far, 16, 2};
    CHECK(up::compact(kept.view, rows, rows, {}).ok());
    CHECK(memory[0] == 2);
    CHECK(memory[15] == 2);
    CHECK(memory[16] == 0);
    std::free(memory);
}

TEST_CASE("compact: large tensors give the same bytes for any number of threads") {
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()) + 3);
    constexpr std::int32_t rows = 6000;
    const keep_set kept(random_keeps(random, rows), {0, rows});
    tensor source(rows, 1152, 1152, 11);
    std::vector<unsigned char> first;
    std::vector<unsigned char> first_back;
    for (const int threads : {1, 2, 3, 7}) {
#if defined(_OPENMP)
        omp_set_num_threads(threads);
#endif
        tensor destination(rows, 1152, 1152, 12);
        tensor full(rows, 1152, 1160, 13);
        REQUIRE(up::compact(kept.view, source.view(), destination.view(), {}).ok());
        REQUIRE(up::scatter(kept.view, destination.view(), full.view(), {}).ok());
        for (std::int32_t j = 0; j < kept.kept(); ++j) {
            REQUIRE(destination.row(j) == source.row(kept.kept_to_old[static_cast<std::size_t>(j)]));
        }
        first = first.empty() ? destination.bytes : first;
        first_back = first_back.empty() ? full.bytes : first_back;
        REQUIRE(destination.bytes == first);
        REQUIRE(full.bytes == first_back);
        INFO(threads);
    }
}

TEST_CASE("compact and scatter: wrong arguments are named, with the tensor, and nothing moves") {
    struct call {
        keep_set kept{{false, true, true, false, true}, {0, 5}};
        tensor full_a{5, 8, 8, 1};
        tensor full_b{5, 8, 12, 2};
        tensor packed_a{3, 8, 8, 3};
        tensor packed_b{3, 8, 8, 4};
        up::row_map rows = kept.view;
        up::byte_rows full[2] = {full_a.view(), full_b.view()};
        up::byte_rows packed[2] = {packed_a.view(), packed_b.view()};
        std::int32_t count = 2;
    };
    const auto refuses = [](up::status_code code, const std::string& argument, std::int32_t which,
                            const std::function<void(call&)>& spoil, bool gather, bool back) {
        INFO(argument);
        for (const bool compacting : {true, false}) {
            if (compacting ? !gather : !back) {
                continue;
            }
            call c;
            spoil(c);
            const up::status result = compacting ? up::compact(c.rows, c.full, c.packed, c.count, {})
                                                 : up::scatter(c.rows, c.packed, c.full, c.count, {});
            CHECK(up::to_string(result.code) == std::string(up::to_string(code)));
            CHECK(result.argument == (argument == "full" ? std::string(compacting ? "source" : "destination")
                                      : argument == "packed"
                                          ? std::string(compacting ? "destination" : "source")
                                          : argument));
            CHECK(result.request == which);
            const call untouched;
            CHECK(c.full_a.bytes == untouched.full_a.bytes);
            CHECK(c.full_b.bytes == untouched.full_b.bytes);
            CHECK(c.packed_a.bytes == untouched.packed_a.bytes);
            CHECK(c.packed_b.bytes == untouched.packed_b.bytes);
        }
    };
    using code = up::status_code;
    refuses(
        code::not_supported, "rows.space", -1, [](call& c) { c.rows.space = up::memory_space::device; }, true,
        true);
    refuses(
        code::invalid_argument, "rows.num_kept", -1, [](call& c) { c.rows.num_kept = 6; }, true, true);
    refuses(
        code::invalid_argument, "rows.num_kept", -1, [](call& c) { c.rows.num_kept = -1; }, true, true);
    refuses(
        code::invalid_argument, "rows.num_kept", -1, [](call& c) { c.rows.identity = true; }, true, true);
    refuses(
        code::invalid_argument, "rows.kept_to_old", -1, [](call& c) { c.rows.kept_to_old = nullptr; }, true,
        true);
    refuses(
        code::invalid_argument, "count", -1, [](call& c) { c.count = -1; }, true, true);
    for (const std::int32_t t : {0, 1}) {
        refuses(
            code::out_of_range, "full", t, [t](call& c) { c.full[t].num_rows = 4; }, true, true);
        refuses(
            code::out_of_range, "packed", t, [t](call& c) { c.packed[t].num_rows = 2; }, true, true);
        refuses(
            code::invalid_argument, "full", t, [t](call& c) { c.full[t].data = nullptr; }, true, true);
        refuses(
            code::invalid_argument, "packed", t, [t](call& c) { c.packed[t].data = nullptr; }, true, true);
        refuses(
            code::invalid_argument, "full", t, [t](call& c) { c.full[t].row_stride_bytes = 7; }, true, true);
        refuses(
            code::invalid_argument, "full", t, [t](call& c) { c.full[t].row_stride_bytes = -8; }, true, true);
        refuses(
            code::invalid_argument, "packed", t, [t](call& c) { c.packed[t].row_bytes = -1; }, true, true);
        refuses(
            code::invalid_argument, "destination", t, [t](call& c) { c.packed[t].row_bytes = 4; }, true,
            true);
        // Shifted by a row, by half a row, and the same memory with another stride.
        refuses(
            code::invalid_argument, "destination", t,
            [t](call& c) {
                c.packed[t].data = static_cast<char*>(c.full[t].data) + c.full[t].row_stride_bytes;
            },
            true, true);
        refuses(
            code::invalid_argument, "destination", t,
            [t](call& c) { c.packed[t].data = static_cast<char*>(c.full[t].data) + 4; }, true, true);
        refuses(
            code::invalid_argument, "destination", t,
            [t](call& c) {
                c.packed[t].data = c.full[t].data;
                c.packed[t].row_stride_bytes = 9;
            },
            true, true);
        // In place there is nothing to scatter back from.
        refuses(
            code::invalid_argument, "destination", t, [t](call& c) { c.packed[t] = c.full[t]; }, false, true);
    }
    CHECK(up::compact(call().rows, nullptr, call().packed, 1, {}).argument == std::string("sources"));
    CHECK(up::scatter(call().rows, call().packed, nullptr, 1, {}).argument == std::string("destinations"));
}
