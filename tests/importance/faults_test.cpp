// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Doubt is reported for the segment that it concerns, and for no other.

#include "caches.hpp"
#include "estimate.hpp"

#include <limits>

namespace up = uniprefill;
using namespace importance_test;

namespace {

const model shape{4, 2, 20, 16, 8};
const std::int64_t non_finite = up::fault_word(up::mass_fault::non_finite);

std::vector<request> three_requests() {
    return {{1, up::request_tag::prefill, 0, {120}},
            {2, up::request_tag::chunk, 50, {64, 70}},
            {3, up::request_tag::prefill, 0, {90}}};
}

/// What a segment with a fault looks like: the fault word, then nothing.
bool is_only_fault(const std::vector<std::int64_t>& segment, std::int64_t fault) {
    return segment[0] == fault &&
           std::all_of(segment.begin() + 1, segment.end(), [](std::int64_t mass) { return mass == 0; });
}

/// Runs a step and demands that the segments marked with 'x' are faulty and the others as in a clean run.
template <class T>
void require_faults(const step<T>& what, const caches<T>& cached, const std::string& marks) {
    const step<T> clean(what.shape(), what.requests());
    const caches<T> clean_cached(clean);
    masses expected = estimate(clean, clean_cached.contiguous(), {}, clean.tight_limits());
    masses got = estimate(what, cached.contiguous(), {}, what.tight_limits());
    for (std::int32_t segment = 0; segment < what.num_segments(); ++segment) {
        INFO("segment " << segment);
        const std::vector<std::int64_t> seen = of_segment(got, what.batch(), segment);
        if (marks[static_cast<std::size_t>(segment)] == 'x') {
            REQUIRE(is_only_fault(seen, non_finite));
        } else {
            REQUIRE(seen == of_segment(expected, clean.batch(), segment));
            REQUIRE(seen[0] == 0);
        }
    }
}

template <class T>
void require_faults(const step<T>& what, const std::string& marks) {
    require_faults(what, caches<T>(what), marks);
}

} // namespace

TEMPLATE_TEST_CASE("NaN and infinity in queries and keys", "[importance]", float, up::half, up::bfloat16) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    constexpr float values[] = {std::numeric_limits<float>::quiet_NaN(), infinity, -infinity};
    const float bad = values[GENERATE(0, 1, 2)];
    INFO("value " << bad);
    const auto query = [](std::int32_t row, std::int32_t head) {
        return static_cast<std::size_t>((row * shape.heads + head) * shape.head_dim + 7);
    };
    const auto key = [](std::int32_t row, std::int32_t head) {
        return static_cast<std::size_t>((row * shape.kv_heads + head) * shape.head_dim + 19);
    };
    const auto value = up::from_float<TestType>(bad);
    step<TestType> what(shape, three_requests());

    SECTION("an observing query, last head") {
        what.queries[query(119, 3)] = value;
        require_faults(what, "x...");
    }
    SECTION("a query that doesn't observe") {
        what.queries[query(20, 3)] = value;
        require_faults(what, "....");
    }
    SECTION("an observing query of the second segment of a request") {
        what.queries[query(120 + 64 + 69, 0)] = value;
        require_faults(what, "..x.");
    }
    SECTION("the first key of a request, its second head") {
        what.keys[key(0, 1)] = value;
        require_faults(what, "x...");
    }
    SECTION("a key in the middle of the last request") {
        what.keys[key(120 + 134 + 45, 0)] = value;
        require_faults(what, "...x");
    }
    SECTION("a key of the first segment is context of the second") {
        what.keys[key(120 + 10, 0)] = value;
        require_faults(what, ".xx.");
    }
    SECTION("a key of the second segment is nothing to the first") {
        what.keys[key(120 + 64 + 10, 0)] = value;
        require_faults(what, "..x.");
    }
    SECTION("the last key, which only one row sees") {
        what.keys[key(119, 0)] = value;
        require_faults(what, "x...");
    }
    SECTION("a cached key") {
        caches<TestType> cached(what);
        cached.contiguous_token(1, 49)[shape.head_dim] = value;
        require_faults(what, cached, ".xx.");
    }
}

TEST_CASE("a corrupt key that no observing row sees is doubt all the same", "[importance]") {
    std::vector<request> requests = three_requests();
    requests[0].observed = {{30, 40}};
    step<float> what(shape, requests);
    what.keys[static_cast<std::size_t>(100 * shape.kv_heads * shape.head_dim)] =
        std::numeric_limits<float>::quiet_NaN();
    require_faults(what, "x...");
}

TEST_CASE("finite values whose product overflows", "[importance]") {
    step<float> what(shape, three_requests());
    const auto last_query = static_cast<std::size_t>(119 * shape.heads * shape.head_dim);
    what.queries[last_query] = 1e30f;
    what.keys[0] = 1e30f;
    require_faults(what, "x...");
}

TEST_CASE("enormous finite scores are no fault", "[importance]") {
    request what{4, up::request_tag::prefill, 0, {100}};
    what.spread = 1e30f;
    const step<float> huge(shape, {what});
    masses got = estimate(huge);
    REQUIRE(got.view().faults[0] == 0);
    std::int64_t total = 0;
    for (std::int64_t block = 0; block < up::num_blocks(100, shape.block_rows); ++block) {
        total += got.view().free[block] + got.view().forced[block];
    }
    const double rows = shape.heads * shape.num_observations;
    REQUIRE(std::abs(got.view().format.to_double(total) - rows) < 1e-5 * rows);
}

TEST_CASE("a segment that is left alone reports nothing, whatever it holds", "[importance]") {
    std::vector<request> requests = three_requests();
    requests[0].tag = up::request_tag::decode;
    requests[1].options.enabled = 0;
    requests[2].options.min_length = 91;
    requests.push_back({5, up::request_tag::prefill, 0, {10}});
    requests.back().options = {1, 5, 5, 0}; // every row forced
    requests.push_back({6, up::request_tag::verify, 0, {4}});
    step<float> what(shape, requests);
    std::fill(what.keys.begin(), what.keys.end(), std::numeric_limits<float>::quiet_NaN());
    const caches<float> cached(what);
    masses got = estimate(what, cached.contiguous(), {}, what.tight_limits());
    for (std::int32_t segment = 0; segment < what.num_segments(); ++segment) {
        REQUIRE(is_only_fault(of_segment(got, what.batch(), segment), 0));
    }
}

TEST_CASE("observation rows that are all gone leave a segment unscored", "[importance]") {
    std::vector<request> requests = three_requests();
    requests[1].observed = {{0, 40},
                            {50 + 64 + 3, 50 + 64 + 5}}; // cached ones, and two of the second segment
    const step<float> what(shape, requests);
    const caches<float> cached(what);
    masses got = estimate(what, cached.contiguous(), {}, what.tight_limits());
    REQUIRE(got.view().faults[0] == 0);
    REQUIRE(is_only_fault(of_segment(got, what.batch(), 1), up::fault_word(up::mass_fault::unscored)));
    REQUIRE(got.view().faults[2] == 0);
    REQUIRE(got.view().faults[3] == 0);
}

TEST_CASE("a sink logit that isn't finite is doubt everywhere", "[importance]") {
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
        const std::vector<float> sinks{0.0f, 1.0f, 2.0f, bad};
        up::attention_params params;
        params.sink_logits = sinks.data();
        const step<float> what(
            shape, {{7, up::request_tag::prefill, 0, {100}}, {8, up::request_tag::decode, 0, {1}}});
        masses got = estimate(what, params);
        REQUIRE(is_only_fault(of_segment(got, what.batch(), 0), non_finite));
        REQUIRE(is_only_fault(of_segment(got, what.batch(), 1), 0));
    }
}
