// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Random steps against the definition, by every cache view.

#include "check.hpp"
#include "support/scale.hpp"

namespace up = uniprefill;
using namespace attend_test;

namespace {

model any_shape(generator& random) {
    model shape;
    shape.kv_heads = random.among({1, 1, 2});
    shape.heads = shape.kv_heads * random.among({1, 3, 4, 5, 8});
    shape.head_dim = random.among({64, 80, 96, 128, 192, 256, 1, 7, 33, 100});
    shape.block_rows = random.among({8, 16, 23, 32, 64});
    return shape;
}

template <class T>
scene<T> any_scene(generator& random, std::uint64_t number) {
    const model shape = any_shape(random);
    scene<T> what = any_rows<T>(random, shape, number);
    if (random.chance(70)) {
        const std::int32_t heads = random.chance(60) ? shape.heads : shape.kv_heads;
        const auto percent = static_cast<std::uint32_t>(random.among({0, 10, 40, 80, 100}));
        const std::int32_t window = random.among({0, 0, 1, 20, 64, 1000000000});
        const auto of_query_block = [&](std::uint64_t seed, std::int32_t segment, std::int32_t head,
                                        std::int32_t query_block, int block) {
            const auto list = static_cast<std::uint64_t>((query_block * 1000 + segment) * 1000 + head);
            return block < 0 ? coin(seed + number, 3, list, 0, 85)
                             : coin(seed + number, 1, list, static_cast<std::uint64_t>(block), percent);
        };
        if (random.chance(50)) {
            what.list_own_blocks(heads, window, random.among({1, 5, 16, 40, 64, 1000}), of_query_block);
        } else {
            what.list_blocks(heads, window,
                             [&](std::uint64_t seed, std::int32_t segment, std::int32_t head, int block) {
                                 return of_query_block(seed, segment, head, 0, block);
                             });
        }
    }
    return what;
}

template <class T>
void describe(const scene<T>& what, std::uint64_t number) {
    const model& shape = what.keys.shape();
    UNSCOPED_INFO("case " << number << ", seed " << uniprefill_test::seed() << ": " << shape.heads << '/'
                          << shape.kv_heads << " heads, d " << shape.head_dim << ", G " << shape.block_rows
                          << ", window " << what.options.window << ", lists " << what.lists.heads << " of "
                          << what.lists.window << " by " << what.lists.query_rows << ", kept "
                          << what.num_queries() << '/' << what.keys.num_rows() << ", softcap "
                          << what.options.params.softcap);
}

/// Every cache view gives the same bits, and those are right.
template <class T, class Cached>
void check_views(scene<T>& what) {
    const caches<Cached> k(what.keys);
    const caches<Cached> v(what.values);
    const output<T> first = attend(what, k.contiguous(), v.contiguous());
    check(what, first, 24);
    REQUIRE(same_bits(first, attend(what, k.page_table(), v.page_table())));
    REQUIRE(same_bits(first, attend(what, k.csr_pages(), v.csr_pages())));
    REQUIRE(same_bits(first, attend(what, k.token_slots(), v.token_slots())));
    REQUIRE(same_bits(first, attend(what, k.page_pointers(), v.page_pointers())));
}

} // namespace

TEMPLATE_TEST_CASE("attention of random steps", "[attend]", float, up::half, up::bfloat16) {
    for (const std::uint32_t number : uniprefill_test::spread_cases(60, 8)) {
        generator random(uniprefill_test::seed() * 1000 + number);
        scene<TestType> what = any_scene<TestType>(random, number);
        describe(what, number);
        check_views<TestType, TestType>(what);
    }
}

TEST_CASE("attention without a cache", "[attend]") {
    for (const std::uint32_t number : uniprefill_test::spread_cases(20, 4)) {
        generator random(uniprefill_test::seed() * 1000 + 500 + number);
        const model shape = any_shape(random);
        scene<up::bfloat16> what(shape, {{number + 1, up::request_tag::prefill, 0, {90, 70}},
                                         {number + 2, up::request_tag::prefill, 0, {0}}});
        describe(what, number);
        const auto got = attend(what, up::no_cache<up::bfloat16>{}, up::no_cache<up::bfloat16>{});
        check(what, got, 30);
        REQUIRE(same_bits(got, attend(what)));
    }
}

TEST_CASE("attention over a cache of another element type", "[attend]") {
    // Numbers that both types hold exactly, so that one oracle does for both.
    for (const std::uint32_t number : uniprefill_test::spread_cases(8, 2)) {
        generator random(uniprefill_test::seed() * 1000 + 600 + number);
        scene<up::bfloat16> narrow = any_scene<up::bfloat16>(random, number);
        describe(narrow, number);
        check_views<up::bfloat16, float>(narrow);
    }
    scene<float> wide({4, 2, 72, 16, 8}, {{9, up::request_tag::chunk, 100, {130}}});
    for (step<float>* part : {&wide.keys, &wide.values}) {
        for (auto* values : {&part->keys, &part->data[0].keys}) {
            for (float& value : *values) {
                value = up::to_float(up::from_float<up::bfloat16>(value));
            }
        }
    }
    check_views<float, up::bfloat16>(wide);
}

TEST_CASE("attention at every head dimension and group of a model", "[attend]") {
    for (const std::int32_t head_dim : {1, 2, 63, 64, 80, 96, 128, 192, 255, 256}) {
        for (const std::int32_t group : {1, 3, 4, 5, 8, 70}) {
            if (group == 70 && head_dim != 64) {
                continue;
            }
            scene<float> what({group, 1, head_dim, 32, 8}, {{3, up::request_tag::chunk, 40, {75}}});
            INFO("d " << head_dim << ", group " << group);
            check(what, attend(what), 6);
        }
    }
}
