// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "decode_step.hpp"
#include "support/scale.hpp"

#if defined(_OPENMP)
#    include <omp.h>
#endif

namespace up = uniprefill;
using namespace attend_test;

namespace {

template <class T>
decode_step<T> any_step(generator& random, std::uint64_t seed) {
    model shape;
    shape.kv_heads = random.among({1, 2, 3});
    shape.heads = shape.kv_heads * random.among({1, 3, 4, 5, 8, 65});
    shape.head_dim = shape.heads > 100 ? 16 : random.among({64, 80, 96, 128, 192, 256, 3, 50});
    std::vector<std::int32_t> cached;
    for (std::int32_t r = 1 + random.below(4); r > 0; --r) {
        cached.push_back(random.among({0, 1, 2, 63, 64, 65, 100, 300}));
    }
    decode_step<T> what(shape, cached, 1 + random.below(6), seed);
    what.draw_rows(random);
    what.params = random.any_params(shape, what.tokens.sinks);
    return what;
}

} // namespace

TEMPLATE_TEST_CASE("decode: random steps by every cache view", "[attend]", float, up::half, up::bfloat16) {
    for (const std::uint32_t number : uniprefill_test::spread_cases(40, 6)) {
        generator random(uniprefill_test::seed() * 1000 + 700 + number);
        const auto what = any_step<TestType>(random, number + 1);
        INFO("case " << number << ", seed " << uniprefill_test::seed() << ": " << what.shape().heads << '/'
                     << what.shape().kv_heads << " heads, d " << what.shape().head_dim);
        const output<TestType> first = decode(what, what.k.contiguous(), what.v.contiguous());
        check(what, first);
        REQUIRE(same_bits(first, decode(what, what.k.page_table(), what.v.page_table())));
        REQUIRE(same_bits(first, decode(what, what.k.csr_pages(), what.v.csr_pages())));
        REQUIRE(same_bits(first, decode(what, what.k.token_slots(), what.v.token_slots())));
        REQUIRE(same_bits(first, decode(what, what.k.page_pointers(), what.v.page_pointers())));
    }
}

TEST_CASE("decode: a long context, in runs", "[attend]") {
    decode_step<up::bfloat16> what({8, 2, 32, 64, 8}, {10000, 5000}, 3);
    what.first_keys = {0, 17, 4096};
    check(what, decode(what));
}

TEMPLATE_TEST_CASE("decode: a row is prefill attention's row", "[attend]", float, up::half) {
    const model shape{6, 2, 40, 16, 8};
    const std::vector<std::int32_t> lens{1, 64, 65, 200, 4500};
    for (const std::int32_t window : {0, 1, 100}) {
        std::vector<request> requests;
        for (const std::int32_t len : lens) {
            requests.push_back({1 + 100 * requests.size(), up::request_tag::decode, len - 1, {1}});
        }
        scene<TestType> rows(shape, requests);
        rows.set_window(window);
        decode_step<TestType> what(shape, lens, 5);
        what.queries = rows.keys.queries;
        for (std::size_t i = 0; i < lens.size(); ++i) {
            what.first_keys[i] = window > 0 ? std::max(0, lens[i] - window) : 0;
        }
        REQUIRE(same_bits(decode(what), attend(rows)));
    }
}

TEST_CASE("decode: other rows and threads don't matter", "[attend]") {
    const model shape{8, 2, 40, 16, 8};
    const decode_step<float> what(shape, {300, 41, 700, 3000}, 9);
    const output<float> together = decode(what);
    for (std::int32_t row = 0; row < what.rows; ++row) {
        decode_step<float> alone(shape, {300, 41, 700, 3000}, 1);
        alone.queries.assign(what.queries.begin() + row * 320, what.queries.begin() + (row + 1) * 320);
        alone.requests[0] = what.requests[static_cast<std::size_t>(row)];
        alone.lens[0] = what.lens[static_cast<std::size_t>(row)];
        REQUIRE(decode(alone).bits(0) == together.bits(row));
    }
#if defined(_OPENMP)
    const int before = omp_get_max_threads();
    for (const int threads : {1, 2, 5}) {
        omp_set_num_threads(threads);
        REQUIRE(same_bits(decode(what), together));
    }
    omp_set_num_threads(before);
#endif
}

TEST_CASE("decode: lengths of KV heads are each head's own", "[attend]") {
    const model shape{6, 3, 24, 16, 8};
    decode_step<float> uniform(shape, {120}, 2);
    decode_step<float> ragged(shape, {120}, 2);
    ragged.by_head = true;
    ragged.lens = {120, 0, 33, 64, 120, 1};
    ragged.first_keys = {7, 0, 0, 64, 0, 0};
    const output<float> got = decode(ragged);
    check(ragged, got);
    for (std::size_t i = 0; i < 6; ++i) {
        uniform.lens = {ragged.lens[i], ragged.lens[i]};
        uniform.first_keys = {ragged.first_keys[i], ragged.first_keys[i]};
        const output<float> all = decode(uniform);
        const auto row = static_cast<std::int32_t>(i / 3);
        const auto head = static_cast<std::int32_t>(i % 3) * 2;
        REQUIRE(std::memcmp(all.at(row, head), got.at(row, head), 2 * 24 * sizeof(float)) == 0);
    }
}

TEST_CASE("decode: defaults are request i of row i, and all of its tokens", "[attend]") {
    const model shape{2, 1, 24, 16, 8};
    const decode_step<float> what(shape, {70, 20}, 2);
    const up::decode_attention<up::decode_policy<24>> attention(what.bounds());
    const guarded_buffer memory(attention.workspace_bytes());
    up::decode_rows rows;
    rows.num_rows = 2;
    rows.lens = what.lens.data();
    std::vector<float> out(2 * 48);
    const up::head_rows<float> to{out.data(), 48, 24, 2, 2, 24};
    REQUIRE(attention
                .run(what.query_rows(), what.k.contiguous(), what.v.contiguous(), {}, rows, to, nullptr,
                     up::workspace(memory.data(), attention.workspace_bytes()))
                .ok());
    REQUIRE(out == decode(what).rows);
}

TEST_CASE("decode: nothing to read, nothing to do, nothing cached", "[attend]") {
    const model shape{2, 1, 24, 16, 8};
    decode_step<float> what(shape, {70, 0}, 2);
    what.first_keys = {70, 0};
    output<float> got = decode(what);
    REQUIRE(got.lse == std::vector<float>(4, -std::numeric_limits<float>::infinity()));
    REQUIRE(got.rows == std::vector<float>(96, 0.0f));
    REQUIRE(same_bits(got, decode(what, up::no_cache<float>{}, up::no_cache<float>{})));
    what.tokens.sinks = {2.0f, 3.0f};
    what.params.sink_logits = what.tokens.sinks.data();
    check(what, decode(what));
    decode_step<float> none(shape, {70}, 0);
    REQUIRE(decode(none).rows.empty());
}

TEST_CASE("decode: what isn't a number stays with the rows that read it", "[attend]") {
    const model shape{4, 2, 24, 16, 8};
    decode_step<float> what(shape, {200, 200}, 4);
    what.lens = {200, 200, 90, 200};
    what.first_keys = {0, 0, 0, 0};
    const output<float> good = decode(what, what.k.contiguous(), what.v.contiguous());
    for (auto* part : {&what.k, &what.v}) {
        float* token = part->contiguous_token(0, 150) + 24; // KV head 1
        const std::vector<float> before(token, token + 24);
        std::fill_n(token, 24, std::numeric_limits<float>::quiet_NaN());
        const output<float> got = decode(what, what.k.contiguous(), what.v.contiguous());
        std::copy(before.begin(), before.end(), token);
        for (std::int32_t row = 0; row < 4; ++row) {
            for (std::int32_t head = 0; head < 4; ++head) {
                const bool same = std::memcmp(got.at(row, head), good.at(row, head), 24 * sizeof(float)) == 0;
                REQUIRE(same == !(row == 0 && head >= 2));
            }
        }
        REQUIRE(std::isnan(got.at(0, 3)[5]));
    }
}
