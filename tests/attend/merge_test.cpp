// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "decode_step.hpp"

#include <uniprefill/attend/merge.hpp>

namespace up = uniprefill;
using namespace attend_test;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

template <class T>
up::attention_state<T> state_of(const output<T>& part) {
    return {{part.rows.data(), std::int64_t{part.heads} * part.head_dim, part.head_dim,
             static_cast<std::int32_t>(part.lse.size()) / part.heads, part.heads, part.head_dim},
            part.lse.data()};
}

template <class T>
output<T> merge(const std::vector<output<T>>& parts) {
    output<T> result = parts.front();
    std::fill(result.rows.begin(), result.rows.end(), up::from_float<T>(77.0f));
    std::fill(result.lse.begin(), result.lse.end(), 77.0f);
    std::vector<up::attention_state<T>> states;
    for (const auto& part : parts) {
        states.push_back(state_of(part));
    }
    const auto count = static_cast<std::int32_t>(states.size());
    const up::head_rows<T> out{
        result.rows.data(), std::int64_t{result.heads} * result.head_dim,
        result.head_dim,    static_cast<std::int32_t>(result.lse.size()) / result.heads,
        result.heads,       result.head_dim};
    REQUIRE(up::merge_attention(states.data(), count, out, result.lse.data()).ok());
    return result;
}

/// A part of one row and one head.
output<float> part(std::vector<float> values, float lse) {
    output<float> made;
    made.heads = 1;
    made.head_dim = static_cast<std::int32_t>(values.size());
    made.rows = std::move(values);
    made.lse = {lse};
    return made;
}

/// A part's rows are within its own bound, and rounded to T; its lse is within its bound; the sum over parts
/// of share * magnitude is the whole's magnitude. So the bound of one row, twice, and one more rounding of
/// something no larger than the magnitude.
template <class T>
void check_merged(const decode_step<T>& whole, const output<T>& got) {
    for (std::int32_t row = 0; row < whole.rows; ++row) {
        for (std::int32_t head = 0; head < got.heads; ++head) {
            const oracle::attended_row right = decoded_row(whole, row, head);
            const std::size_t r = static_cast<std::size_t>(whole.requests[static_cast<std::size_t>(row)]);
            error_bound bound(right, whole.tokens.keys.cached_lens[r], false);
            bound.relative *= 2;
            INFO("row " << row << ", head " << head);
            const std::size_t at = static_cast<std::size_t>(row * got.heads + head);
            REQUIRE((std::isinf(right.lse)
                         ? got.lse[at] == -infinity
                         : std::abs(static_cast<double>(got.lse[at]) - right.lse) <= bound.of_lse(right)));
            for (std::size_t i = 0; i < right.out.size(); ++i) {
                const double came = static_cast<double>(up::to_float(got.at(row, head)[i]));
                REQUIRE(std::abs(came - right.out[i]) <=
                        bound.of_out<T>(right, i) + 2 * rounding<T>() * right.magnitude[i]);
            }
        }
    }
}

} // namespace

TEMPLATE_TEST_CASE("merge: parts of the keys make the whole", "[attend]", float, up::half, up::bfloat16) {
    const model shape{6, 2, 72, 16, 8};
    const decode_step<TestType> whole(shape, {500, 3, 64, 5000}, 7);
    for (const std::vector<std::int32_t>& cuts :
         {std::vector<std::int32_t>{}, {250}, {0}, {1, 2, 3}, {64, 128, 400, 4999}}) {
        std::vector<output<TestType>> parts;
        for (std::size_t i = 0; i <= cuts.size(); ++i) {
            decode_step<TestType> some = whole;
            for (std::size_t row = 0; row < 7; ++row) {
                some.first_keys[row] = i > 0 ? std::min(cuts[i - 1], whole.lens[row]) : 0;
                some.lens[row] = i < cuts.size() ? std::min(cuts[i], whole.lens[row]) : whole.lens[row];
            }
            parts.push_back(decode(some, whole.k.contiguous(), whole.v.contiguous()));
        }
        const output<TestType> merged = merge(parts);
        check_merged(whole, merged);
        if (cuts.empty() || cuts.back() == 0) {
            REQUIRE(same_bits(merged, parts.back()));
        }
    }
}

TEST_CASE("merge: a sink belongs to one part", "[attend]") {
    decode_step<float> whole({4, 2, 72, 16, 8}, {300}, 3);
    whole.tokens.sinks = {0.5f, 3.0f, -2.0f, 9.0f};
    decode_step<float> first = whole;
    decode_step<float> second = whole;
    whole.params.sink_logits = first.params.sink_logits = whole.tokens.sinks.data();
    first.lens = {100, 0, 300};
    second.first_keys = {100, 0, 300};
    check_merged(whole, merge<float>({decode(first), decode(second)}));
    check_merged(whole, merge<float>({decode(second), decode(first)}));
}

TEST_CASE("merge: block lists that share no block make their union", "[attend]") {
    const std::vector<request> requests{{1, up::request_tag::prefill, 0, {200}}};
    const auto of = [&](int which) {
        scene<float> what({3, 1, 40, 16, 8}, requests);
        what.list_blocks(3, 0, [&](auto, auto, std::int32_t head, int block) {
            return which == 2 ? block % 3 != 2 : (block + head) % 3 % 2 == which && block % 3 != 2;
        });
        return what;
    };
    auto left = of(0);
    auto right = of(1);
    auto both = of(2);
    const output<float> merged = merge<float>({attend(left), attend(right)});
    // In fp32 the merge's own rounding is far below the bound.
    check(both, merged);
}

TEST_CASE("merge: states that are empty, alone, far apart or not numbers", "[attend]") {
    const output<float> empty = part({8, 8}, -infinity);
    const output<float> some = part({1, -2}, 3.25f);
    output<float> got = merge<float>({empty, empty});
    REQUIRE(got.rows == std::vector<float>{0, 0});
    REQUIRE(got.lse[0] == -infinity);
    REQUIRE(same_bits(merge<float>({empty, some, empty}), some));
    REQUIRE(same_bits(merge<float>({some}), some));
    // Whatever an empty part holds isn't read.
    const float nan = std::numeric_limits<float>::quiet_NaN();
    REQUIRE(same_bits(merge<float>({some, part({nan, nan}, -infinity)}), some));
    REQUIRE(std::isnan(merge<float>({some, part({nan, 1}, 3)}).rows[0]));
    REQUIRE(std::isnan(merge<float>({some, part({1, 1}, nan)}).lse[0]));
    REQUIRE(std::isnan(merge<float>({part({1, 1}, nan), some}).rows[1]));
    // Shares 1/4 and 3/4.
    got = merge<float>({part({4, 0}, 10.0f), part({0, 8}, 10.0f + std::log(3.0f))});
    REQUIRE(std::abs(got.rows[0] - 1) < 1e-6f);
    REQUIRE(std::abs(got.rows[1] - 6) < 1e-5f);
    REQUIRE(std::abs(got.lse[0] - (10.0f + std::log(4.0f))) < 1e-6f);
    got = merge<float>({part({4, 0}, -3e38f), part({1, 1}, 3e38f)});
    REQUIRE(got.rows == std::vector<float>{1, 1});
    REQUIRE(got.lse[0] == 3e38f);
    got = merge<float>({part({4, 0}, -1e4f), part({0, 4}, -1e4f)});
    REQUIRE(got.rows == std::vector<float>{2, 2});
}

TEST_CASE("merge: no parts, no rows, lse not wanted, and in place", "[attend]") {
    std::vector<float> rows{5, 5};
    const up::head_rows<float> out{rows.data(), 2, 2, 1, 1, 2};
    float lse = 5;
    REQUIRE(up::merge_attention<float>(nullptr, 0, out, &lse).ok());
    REQUIRE(rows == std::vector<float>{0, 0});
    REQUIRE(lse == -infinity);
    REQUIRE(up::merge_attention<float>(nullptr, 0, {nullptr, 2, 2, 0, 1, 2}, nullptr).ok());

    output<float> a = part({1, 3}, 0.0f);
    const output<float> b = part({3, 5}, 0.0f);
    const up::attention_state<float> states[] = {state_of(a), state_of(b)};
    REQUIRE(up::merge_attention(states, 2, out, nullptr).ok());
    REQUIRE(rows == std::vector<float>{2, 4});
    REQUIRE(up::merge_attention(states, 2, {a.rows.data(), 2, 2, 1, 1, 2}, a.lse.data()).ok());
    REQUIRE(a.rows == rows);
    REQUIRE(std::abs(a.lse[0] - std::log(2.0f)) < 1e-6f);
}

TEST_CASE("merge: wrong arguments are refused by name", "[attend]") {
    const output<float> a = part({1, 3}, 0.0f);
    std::vector<float> rows{5, 5};
    float lse = 5;
    const auto refuse = [&](const std::string& argument, std::int32_t index, auto spoil) {
        up::attention_state<float> states[] = {state_of(a), state_of(a)};
        up::head_rows<float> out{rows.data(), 2, 2, 1, 1, 2};
        std::int32_t count = 2;
        spoil(states, out, count);
        const up::status done = up::merge_attention(states, count, out, &lse);
        INFO(message(done));
        REQUIRE(done.argument == argument);
        REQUIRE(done.code == up::status_code::invalid_argument);
        REQUIRE(done.request == index);
        REQUIRE(rows == std::vector<float>{5, 5});
        REQUIRE(lse == 5);
    };
    refuse("count", -1, [](auto&, auto&, auto& count) { count = -1; });
    refuse("out", -1, [](auto&, auto& out, auto&) { out.data = nullptr; });
    refuse("out", -1, [](auto&, auto& out, auto&) { out.head_dim = 257; });
    refuse("out", -1, [](auto&, auto& out, auto&) { out.num_heads = 0; });
    refuse("out", -1, [](auto&, auto& out, auto&) { out.num_rows = -1; });
    refuse("parts.out", 1, [](auto& parts, auto&, auto&) { parts[1].out.data = nullptr; });
    refuse("parts.out", 0, [](auto& parts, auto&, auto&) { parts[0].out.num_rows = 0; });
    refuse("parts.out", 1, [](auto& parts, auto&, auto&) { parts[1].out.num_heads = 2; });
    refuse("parts.out", 1, [](auto& parts, auto&, auto&) { parts[1].out.head_dim = 1; });
    refuse("parts.lse", 0, [](auto& parts, auto&, auto&) { parts[0].lse = nullptr; });
    const up::head_rows<float> out{rows.data(), 2, 2, 1, 1, 2};
    REQUIRE(std::string(up::merge_attention<float>(nullptr, 1, out, &lse).argument) == "parts");
}
