// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "support/catch.hpp"

#include <uniprefill/core/batch.hpp>

#include <functional>
#include <random>
#include <vector>

namespace up = uniprefill;

TEST_CASE("block_offset: the blocks of different segments never meet, and all fit") {
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()));
    for (std::int32_t i = 0; i < 20000; ++i) {
        const auto g = static_cast<std::int32_t>(8 + random() % 249);
        const auto segments = static_cast<std::int32_t>(1 + random() % 12);
        std::int32_t start = 0;
        std::int64_t end_before = 0;
        for (std::int32_t s = 0; s < segments; ++s) {
            const std::int32_t lengths[] = {0, 1,     g - 1,
                                            g, g + 1, static_cast<std::int32_t>(random() % 3000)};
            const std::int32_t length = lengths[random() % 6];
            const std::int64_t begin = up::block_offset(s, start, g);
            INFO("case " << i << ", segment " << s << ", G " << g << ", start " << start << ", rows "
                         << length);
            REQUIRE(begin >= end_before);
            REQUIRE(up::num_blocks(length, g) == (length + g - 1) / g);
            end_before = begin + up::num_blocks(length, g);
            start += length;
        }
        up::limits bounds;
        bounds.block_rows = g;
        bounds.max_segments = segments;
        bounds.max_rows = start;
        REQUIRE(end_before <= bounds.max_blocks());
    }
    CHECK(up::block_offset(7, INT32_MAX, 8) == (std::int64_t{INT32_MAX} / 8) + 7);
    CHECK(up::num_blocks(INT32_MAX, 256) == 1 << 23);
}

namespace {

/// Two requests: 5 rows in two segments, and 3 cached + 4 rows in one.
struct sound_batch {
    std::vector<up::request_tag> tags{up::request_tag::prefill, up::request_tag::chunk};
    std::vector<std::int32_t> cu_seqlens{0, 5, 9};
    std::vector<std::int32_t> positions{0, 1, 4, 6, 7, 3, 4, 5, 9};
    std::vector<std::int32_t> cached{0, 3};
    std::vector<up::request_options> options{{1, 2, 1, 0}, {1, 0, 0, 0}};
    std::vector<std::int32_t> cu_segments{0, 3, 5, 9};
    std::vector<std::int32_t> segment_request{0, 0, 1};
    std::vector<std::int32_t> offsets{0, 2, 3};
    std::vector<up::position_span> spans{{1, 2}, {4, 6}, {5, 100}};
    up::batch_view view;
    up::limits bounds;

    sound_batch() {
        bounds.max_requests = 2;
        bounds.max_segments = 3;
        bounds.max_rows = 9;
        bounds.max_cached_tokens = 3;
        view.num_requests = 2;
        view.num_segments = 3;
        view.num_rows = 9;
        view.tags = tags.data();
        view.cu_seqlens = cu_seqlens.data();
        view.positions = positions.data();
        view.cached_lens = cached.data();
        view.options = options.data();
        view.cu_segments = cu_segments.data();
        view.segment_request = segment_request.data();
        view.forced = {offsets.data(), spans.data()};
        view.observed = {offsets.data(), spans.data()};
    }
    sound_batch(const sound_batch&) = delete;
    sound_batch& operator=(const sound_batch&) = delete;
};

void refuses(up::status_code code, const std::string& argument, std::int32_t request,
             const std::function<void(sound_batch&)>& spoil) {
    INFO(argument);
    sound_batch batch;
    REQUIRE(up::validate(batch.view, batch.bounds).ok());
    spoil(batch);
    const up::status result = up::validate(batch.view, batch.bounds);
    CHECK(up::to_string(result.code) == std::string(up::to_string(code)));
    CHECK(result.argument == argument);
    CHECK(result.request == request);
    CHECK(std::string(result.expected) != "");
}

} // namespace

TEST_CASE("validate(batch): each thing that can be wrong") {
    using code = up::status_code;
    using batch = sound_batch;
    refuses(code::not_supported, "batch.space", -1,
            [](batch& b) { b.view.space = up::memory_space::device; });
    refuses(code::out_of_range, "batch.num_requests", -1, [](batch& b) { b.bounds.max_requests = 1; });
    refuses(code::out_of_range, "batch.num_requests", -1, [](batch& b) { b.view.num_requests = -1; });
    refuses(code::out_of_range, "batch.num_segments", -1, [](batch& b) { b.bounds.max_segments = 2; });
    refuses(code::out_of_range, "batch.num_segments", -1, [](batch& b) { b.view.num_segments = -1; });
    refuses(code::out_of_range, "batch.num_rows", -1, [](batch& b) { b.bounds.max_rows = 8; });
    refuses(code::out_of_range, "batch.num_rows", -1, [](batch& b) { b.view.num_rows = -1; });
    refuses(code::invalid_argument, "batch.num_rows", -1, [](batch& b) { b.view.num_requests = 0; });
    refuses(code::invalid_argument, "batch.tags", -1, [](batch& b) { b.view.tags = nullptr; });
    refuses(code::invalid_argument, "batch.cu_seqlens", -1, [](batch& b) { b.view.cu_seqlens = nullptr; });
    refuses(code::invalid_argument, "batch.positions", -1, [](batch& b) { b.view.positions = nullptr; });

    refuses(code::invalid_argument, "batch.cu_seqlens", -1, [](batch& b) { b.cu_seqlens[0] = 1; });
    refuses(code::invalid_argument, "batch.cu_seqlens", 0, [](batch& b) { b.cu_seqlens[1] = -1; });
    refuses(code::invalid_argument, "batch.cu_seqlens", 0, [](batch& b) { b.cu_seqlens[1] = 10; });
    refuses(code::invalid_argument, "batch.cu_seqlens", 1, [](batch& b) { b.cu_seqlens[2] = 4; });
    refuses(code::invalid_argument, "batch.cu_seqlens", 1, [](batch& b) { b.cu_seqlens[2] = 10; });
    refuses(code::invalid_argument, "batch.cu_seqlens", -1, [](batch& b) { b.cu_seqlens[2] = 8; });
    refuses(code::invalid_argument, "batch.tags", 1,
            [](batch& b) { b.tags[1] = static_cast<up::request_tag>(4); });
    refuses(code::invalid_argument, "batch.tags", 0,
            [](batch& b) { b.tags[0] = static_cast<up::request_tag>(-1); });
    refuses(code::invalid_argument, "batch.cached_lens", 1, [](batch& b) { b.cached[1] = -1; });
    refuses(code::invalid_argument, "batch.cached_lens", 0, [](batch& b) { b.cached[0] = 1; });
    refuses(code::out_of_range, "batch.cached_lens", -1, [](batch& b) { b.cached[1] = 4; });
    refuses(code::out_of_range, "batch.cached_lens", -1, [](batch& b) {
        b.tags[0] = up::request_tag::chunk;
        b.cached[0] = b.cached[1] = INT32_MAX; // the sum doesn't fit 32 bits
    });
    refuses(code::invalid_argument, "batch.options", 0, [](batch& b) { b.options[0].sink = -1; });
    refuses(code::invalid_argument, "batch.options", 1, [](batch& b) { b.options[1].tail = -1; });
    refuses(code::invalid_argument, "batch.options", 1, [](batch& b) { b.options[1].min_length = -1; });
    refuses(code::invalid_argument, "batch.positions", 0, [](batch& b) { b.positions[0] = -1; });
    refuses(code::invalid_argument, "batch.positions", 0, [](batch& b) { b.positions[2] = 1; });
    refuses(code::invalid_argument, "batch.positions", 1, [](batch& b) { b.positions[8] = 5; });

    refuses(code::invalid_argument, "batch.cu_segments", -1, [](batch& b) { b.view.cu_segments = nullptr; });
    refuses(code::invalid_argument, "batch.cu_segments", -1,
            [](batch& b) { b.view.segment_request = nullptr; });
    refuses(code::invalid_argument, "batch.num_segments", -1, [](batch& b) {
        b.view.cu_segments = nullptr;
        b.view.segment_request = nullptr;
    });
    refuses(code::invalid_argument, "batch.cu_segments", 0, [](batch& b) { b.cu_segments[0] = 1; });
    refuses(code::invalid_argument, "batch.cu_segments", 0, [](batch& b) { b.cu_segments[1] = 6; });
    refuses(code::invalid_argument, "batch.cu_segments", 0, [](batch& b) { b.cu_segments[2] = 4; });
    refuses(code::invalid_argument, "batch.cu_segments", 1, [](batch& b) { b.cu_segments[3] = 8; });
    refuses(code::invalid_argument, "batch.cu_segments", 0, [](batch& b) { b.segment_request[1] = 1; });
    refuses(code::invalid_argument, "batch.cu_segments", 0, [](batch& b) { b.segment_request[0] = 1; });
    refuses(code::invalid_argument, "batch.cu_segments", 1, [](batch& b) { b.segment_request[2] = 2; });
    refuses(code::invalid_argument, "batch.cu_segments", 1, [](batch& b) { b.view.num_segments = 2; });
    refuses(code::invalid_argument, "batch.segment_request", -1, [](batch& b) {
        b.view.num_requests = 1;
        b.view.num_rows = 5;
    });

    for (const bool forced : {true, false}) {
        const auto lists = [forced](batch& b) -> up::span_lists& {
            return forced ? b.view.forced : b.view.observed;
        };
        const std::string name = forced ? "batch.forced" : "batch.observed";
        // Give the other list arrays of its own, so that only one is wrong.
        const auto apart = [&](const std::function<void(batch&)>& spoil) {
            return [&, spoil](batch& b) {
                (forced ? b.view.observed : b.view.forced) = {};
                spoil(b);
            };
        };
        refuses(code::invalid_argument, name, -1, apart([](batch& b) { b.offsets[0] = 1; }));
        refuses(code::invalid_argument, name, 0, apart([](batch& b) { b.offsets[1] = -1; }));
        refuses(code::invalid_argument, name, 1, apart([](batch& b) { b.offsets[2] = 1; }));
        refuses(code::invalid_argument, name, 0, [&](batch& b) { lists(b).spans = nullptr; });
        refuses(code::invalid_argument, name, 0, apart([](batch& b) { b.spans[0].begin = -1; }));
        refuses(code::invalid_argument, name, 0, apart([](batch& b) { b.spans[0].end = 0; }));
        refuses(code::invalid_argument, name, 0, apart([](batch& b) { b.spans[0].end = 5; }));
        refuses(code::invalid_argument, name, 1, apart([](batch& b) { b.spans[2] = {4, 3}; }));
    }
}

TEST_CASE("validate(batch): what may be left out, and what may be empty") {
    sound_batch b;
    b.view.cu_segments = nullptr;
    b.view.segment_request = nullptr;
    b.view.num_segments = 2;
    b.view.options = nullptr;
    b.view.forced = {};
    b.view.observed = {};
    CHECK(up::validate(b.view, b.bounds).ok());
    b.tags[1] = up::request_tag::prefill;
    b.view.cached_lens = nullptr;
    CHECK(up::validate(b.view, b.bounds).ok());
    CHECK(b.view.options_of(1).sink == 128);
    CHECK(b.view.cached_len(1) == 0);

    CHECK(up::validate(up::batch_view{}, up::limits{}).ok());

    const std::int32_t zeros[] = {0, 0};
    const up::request_tag tag = up::request_tag::decode;
    up::batch_view empty;
    empty.num_requests = empty.num_segments = 1;
    empty.tags = &tag;
    empty.cu_seqlens = zeros;
    CHECK(up::validate(empty, up::limits{}).ok());
}

TEST_CASE("is_forced_row: sink by position, tail by row, spans by position") {
    sound_batch b;
    const auto forced = [&](std::int32_t segment, std::int32_t row) {
        return up::is_forced_row(b.view, segment, row);
    };
    // Segment 0: positions 0, 1, 4; sink 2, tail 1, spans [1, 2) and [4, 6).
    CHECK(forced(0, 0));
    CHECK(forced(0, 1));
    CHECK(forced(0, 2));
    // Segment 1: positions 6, 7. The tail is the segment's.
    CHECK_FALSE(forced(1, 3));
    CHECK(forced(1, 4));
    // Segment 2: positions 3, 4, 5, 9; span [5, 100).
    CHECK_FALSE(forced(2, 5));
    CHECK_FALSE(forced(2, 6));
    CHECK(forced(2, 7));
    CHECK(forced(2, 8));
    b.options[0] = {1, 0, 0, 0};
    b.spans[1] = {5, 6};
    CHECK_FALSE(forced(0, 0));
    CHECK(forced(0, 1));
    CHECK_FALSE(forced(0, 2));
}

TEST_CASE("validate(limits): each field") {
    const auto refused = [](const std::function<void(up::limits&)>& spoil) {
        up::limits bounds;
        REQUIRE(up::validate(bounds).ok());
        spoil(bounds);
        const up::status result = up::validate(bounds);
        CHECK(result.code == up::status_code::invalid_argument);
        return std::string(result.argument);
    };
    using limits = up::limits;
    CHECK(refused([](limits& l) { l.max_requests = 0; }) == "limits.max_requests");
    CHECK(refused([](limits& l) { l.max_requests = 2; }) == "limits.max_segments");
    CHECK(refused([](limits& l) { l.max_rows = -1; }) == "limits.max_rows");
    CHECK(refused([](limits& l) { l.max_rows = INT32_MAX - 1024; }) == "limits.max_rows");
    CHECK(refused([](limits& l) { l.max_cached_tokens = -1; }) == "limits.max_cached_tokens");
    CHECK(refused([](limits& l) { l.num_layers = 0; }) == "limits.num_layers");
    CHECK(refused([](limits& l) { l.num_kv_heads = 0; }) == "limits.num_kv_heads");
    CHECK(refused([](limits& l) { l.num_heads = 0; }) == "limits.num_heads");
    CHECK(refused([](limits& l) { l.num_kv_heads = 2; }) == "limits.num_heads");
    for (const std::int32_t wrong : {-1, 0, 257}) {
        CHECK(refused([&](limits& l) { l.head_dim = wrong; }) == "limits.head_dim");
    }
    for (const std::int32_t wrong : {-1, 0, 7, 257}) {
        CHECK(refused([&](limits& l) { l.block_rows = wrong; }) == "limits.block_rows (G)");
    }
    for (const std::int32_t wrong : {-1, 0, 513}) {
        CHECK(refused([&](limits& l) { l.num_observations = wrong; }) == "limits.num_observations (n)");
    }
    CHECK(refused([](limits& l) { l.num_heads = l.num_global_heads = 4, l.num_global_heads = 3; }) ==
          "limits.num_global_heads");
    CHECK(refused([](limits& l) { l.num_global_heads = -1; }) == "limits.num_global_heads");
}
