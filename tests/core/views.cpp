// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Addresses of cached rows and of activations, beyond 2^31 elements too. Nothing is read through them: base
// addresses are made up, and compared as integers.

#include "support/catch.hpp"

#include <uniprefill/core/element.hpp>
#include <uniprefill/core/extent.hpp>
#include <uniprefill/core/kv_view.hpp>
#include <uniprefill/core/rows.hpp>

namespace up = uniprefill;

namespace {

constexpr std::uintptr_t base = 0x100000000000u;

template <class T>
const T* made_up(std::uintptr_t address) {
    return reinterpret_cast<const T*>(address);
}
std::uintptr_t address(const void* pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer);
}

constexpr std::int64_t distant = std::int64_t{3} << 32; // elements

} // namespace

TEST_CASE("contiguous_cache: three strides of 64 bits") {
    up::contiguous_cache<up::half> cache{made_up<up::half>(base), distant, 1 << 20, 128};
    CHECK(address(cache.row(0, 0, 0)) == base);
    CHECK(address(cache.row(1, 0, 0)) == base + 2 * distant);
    CHECK(address(cache.row(3, 4095, 7)) == base + 2 * (3 * distant + (std::int64_t{4095} << 20) + 7 * 128));
    // HND: heads outside tokens.
    cache.token_stride = 64;
    cache.head_stride = distant / 8;
    CHECK(address(cache.row(0, 2000000, 7)) == base + 2 * (std::int64_t{64} * 2000000 + 7 * (distant / 8)));
}

TEST_CASE("page_table_cache: padded tables, pages in any order") {
    const std::int32_t table[] = {5, 2147483647, -1, 3, 0, -1};
    up::page_table_cache<up::bfloat16> cache{made_up<up::bfloat16>(base), 16384, 1024, 64, table, 3, 16};
    CHECK(address(cache.row(0, 0, 0)) == base + 2 * (5 * 16384));
    CHECK(address(cache.row(0, 15, 1)) == base + 2 * (5 * 16384 + 15 * 1024 + 64));
    CHECK(address(cache.row(0, 16, 0)) == base + 2 * (std::int64_t{2147483647} * 16384));
    CHECK(address(cache.row(1, 17, 3)) == base + 2 * (0 * 16384 + 1024 + 3 * 64));
}

TEST_CASE("page_table_cache: the table of a late request lies beyond 2^31 entries") {
    // The table's base is such that the entry asked for is the one that exists.
    const std::int32_t entry = 9;
    const std::int64_t stride = std::int64_t{1} << 31;
    const auto* table = reinterpret_cast<const std::int32_t*>(
        address(&entry) - static_cast<std::uintptr_t>((5 * stride + 2) * 4));
    up::page_table_cache<float> cache{made_up<float>(base), 256, 16, 4, table, stride, 16};
    CHECK(address(cache.row(5, 33, 1)) == base + 4 * (9 * 256 + 16 + 4));
}

TEST_CASE("csr_page_cache: lists of any length") {
    const std::int32_t indptr[] = {0, 2, 2, 3};
    const std::int32_t indices[] = {7, 4, 2000000000};
    up::csr_page_cache<float> cache{made_up<float>(base), 8192, 64, 512, indptr, indices, 8};
    CHECK(address(cache.row(0, 7, 0)) == base + 4 * (7 * 8192 + 7 * 64));
    CHECK(address(cache.row(0, 8, 2)) == base + 4 * (4 * 8192 + 2 * 512));
    CHECK(address(cache.row(2, 1, 0)) == base + 4 * (std::int64_t{2000000000} * 8192 + 64));
}

TEST_CASE("token_slot_cache: 32- and 64-bit slots") {
    const std::int32_t narrow[] = {3, 2147483647, 0, 1};
    up::token_slot_cache<up::half> cache{made_up<up::half>(base), 1024, 128, narrow, 2};
    CHECK(address(cache.row(0, 1, 7)) == base + 2 * (std::int64_t{2147483647} * 1024 + 7 * 128));
    CHECK(address(cache.row(1, 1, 0)) == base + 2 * 1024);
    const std::int64_t wide[] = {0, std::int64_t{1} << 33};
    up::token_slot_cache<float, std::int64_t> large{made_up<float>(base), 64, 16, wide, 2};
    CHECK(address(large.row(0, 1, 3)) == base + 4 * ((std::int64_t{1} << 33) * 64 + 3 * 16));
}

TEST_CASE("page_pointer_cache: pages by address") {
    const void* pages[] = {made_up<void>(base), made_up<void>(base + 0x40000000000u),
                           made_up<void>(base + 4096), nullptr};
    up::page_pointer_cache<up::bfloat16> cache{pages, 2, (std::int64_t{1} << 32) + 64, 512, 64, 32};
    const std::uintptr_t offset = (std::uintptr_t{1} << 32) + 64;
    CHECK(address(cache.row(0, 31, 1)) == base + offset + 2 * (31 * 512 + 64));
    CHECK(address(cache.row(0, 32, 0)) == base + 0x40000000000u + offset);
    CHECK(address(cache.row(1, 1, 2)) == base + 4096 + offset + 2 * (512 + 128));
}

TEST_CASE("no_cache: no row") {
    CHECK(up::no_cache<float>{}.row(1, 2, 3) == nullptr);
}

TEST_CASE("head_rows: more than 2^31 elements") {
    const up::head_rows<const float> rows{made_up<float>(base), 4096, 128, 2000000, 32, 128};
    CHECK(address(rows.at(1999999, 31)) == base + 4 * (std::int64_t{1999999} * 4096 + 31 * 128));
    const up::head_rows<const float> columns{made_up<float>(base), 128, distant, 16, 4, 128};
    CHECK(address(columns.at(3, 3)) == base + 4 * (3 * 128 + 3 * distant));
}

TEST_CASE("as_byte_rows: contiguous") {
    double values[6] = {};
    const up::byte_rows rows = up::as_byte_rows(values, 2, 3);
    CHECK(rows.data == values);
    CHECK(rows.num_rows == 2);
    CHECK(rows.row_bytes == 24);
    CHECK(rows.row_stride_bytes == 24);
    const up::byte_rows large = up::as_byte_rows(values, 2, distant);
    CHECK(large.row_bytes == 8 * distant);
}

TEST_CASE("extent: a constant takes no value, a run-time extent carries one") {
    static_assert(up::extent<64>::is_static && up::extent<64>::value() == 64);
    static_assert(up::extent<64>{7}.value() == 64);
    static_assert(!up::extent<up::dynamic>::is_static);
    static_assert(up::extent<up::dynamic>{7}.value() == 7);
    CHECK(up::extent<up::dynamic>{}.value() == 0);
}
