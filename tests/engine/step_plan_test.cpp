// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "support/catch.hpp"

#include "engine/error.hpp"
#include "engine/model/step_plan.hpp"

using engine::planned_request;
using engine::step_plan;

namespace {

planned_request request_of(std::int32_t id, std::int32_t first_position, std::int32_t rows) {
    planned_request request;
    request.id = id;
    request.first_position = first_position;
    request.tokens.assign(static_cast<std::size_t>(rows), 7);
    return request;
}

} // namespace

TEST_CASE("a plan packs requests row after row") {
    planned_request first = request_of(3, 0, 5);
    first.span_ends = {2, 5};
    first.forced = {{1, 3}};
    first.logits_rows = {0, 2, 4};
    planned_request second = request_of(1, 40, 1);
    second.tag = uniprefill::request_tag::decode;
    second.logits_rows = {0};
    const step_plan plan({first, second});
    const uniprefill::batch_view batch = plan.batch();

    uniprefill::limits bounds;
    bounds.max_requests = 2;
    bounds.max_segments = 3;
    bounds.max_rows = 6;
    REQUIRE(uniprefill::validate(batch, bounds).ok());
    CHECK(plan.ids() == std::vector<std::int32_t>{3, 1});
    CHECK(plan.logits_rows() == std::vector<std::int32_t>{0, 2, 4, 5});
    CHECK(batch.num_segments == 3);
    CHECK(batch.segment_end(0) == 2);
    CHECK(batch.request_of(2) == 1);
    CHECK(batch.positions[5] == 40);

    // Rows whose logits are wanted are forced, merged with the caller's spans: [0, 3) and [4, 5).
    REQUIRE(batch.forced.offsets[1] == 2);
    CHECK(batch.forced.spans[0].begin == 0);
    CHECK(batch.forced.spans[0].end == 3);
    CHECK(batch.forced.spans[1].begin == 4);
    CHECK(batch.forced.spans[1].end == 5);
}

TEST_CASE("a plan refuses what doesn't fit together") {
    CHECK_THROWS_AS(step_plan({request_of(0, 0, 0)}), engine::error);
    CHECK_THROWS_AS(step_plan({request_of(0, -1, 2)}), engine::error);
    planned_request short_spans = request_of(0, 0, 5);
    short_spans.span_ends = {2, 4};
    CHECK_THROWS_AS(step_plan({short_spans}), engine::error);
    planned_request unsorted = request_of(0, 0, 5);
    unsorted.span_ends = {3, 3, 5};
    CHECK_THROWS_AS(step_plan({unsorted}), engine::error);
    planned_request outside = request_of(0, 0, 5);
    outside.logits_rows = {5};
    CHECK_THROWS_AS(step_plan({outside}), engine::error);
}
