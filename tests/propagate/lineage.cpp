// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Rows of a step over several selecting layers, against lists of original rows.

#include "support/catch.hpp"

#include "steps.hpp"
#include "tensors.hpp"

#include <uniprefill/propagate/policy.hpp>

using namespace propagate_test;

namespace {

/// Original rows that are current, request by request.
using alive_rows = std::vector<std::vector<std::int32_t>>;

alive_rows all_rows(const packed_step& step) {
    alive_rows alive(step.tags.size());
    for (std::size_t r = 0; r < alive.size(); ++r) {
        for (std::int32_t row = step.cu_seqlens[r]; row < step.cu_seqlens[r + 1]; ++row) {
            alive[r].push_back(row);
        }
    }
    return alive;
}

void drop(alive_rows& alive, const std::vector<bool>& keeps) {
    std::size_t row = 0;
    for (auto& request : alive) {
        std::vector<std::int32_t> left;
        for (const std::int32_t original : request) {
            if (keeps[row++]) {
                left.push_back(original);
            }
        }
        request = left;
    }
}

void check_current(const up::row_lineage<>& lineage, const packed_step& step, const alive_rows& alive) {
    const up::batch_view current = lineage.current();
    const up::row_map map = lineage.map();
    REQUIRE(current.tags == step.tags.data());
    REQUIRE(map.num_rows == step.rows());
    REQUIRE(map.num_kept == current.num_rows);
    REQUIRE(map.identity == lineage.holds_every_row());
    std::int32_t row = 0;
    for (std::size_t r = 0; r < alive.size(); ++r) {
        const auto request = static_cast<std::int32_t>(r);
        REQUIRE(current.cu_seqlens[r] == row);
        REQUIRE(current.segment_begin(request) == row);
        REQUIRE(current.segment_end(request) == row + static_cast<std::int32_t>(alive[r].size()));
        for (const std::int32_t original : alive[r]) {
            REQUIRE(current.positions[row] == step.positions[static_cast<std::size_t>(original)]);
            REQUIRE((map.identity ? row : map.kept_to_old[row]) == original);
            ++row;
        }
    }
    REQUIRE(current.num_rows == row);
    REQUIRE(up::validate(current, step.bounds).ok());
}

} // namespace

TEST_CASE("row_lineage: random drops and revivals") {
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()));
    for (std::int32_t i = 0; i < 400; ++i) {
        INFO("case " << i);
        const packed_step step(random, static_cast<std::int32_t>(random() % 5));
        const bool with_segments = random() % 2 == 0;
        up::row_lineage<> lineage(step.bounds);
        lineage_memory memory(lineage.state_bytes());
        REQUIRE(lineage.begin(step.view(with_segments), memory.memory, {}).ok());
        alive_rows alive = all_rows(step);
        check_current(lineage, step, alive);
        for (std::int32_t layer = 0; layer < 8; ++layer) {
            if (random() % 4 == 0) {
                REQUIRE(lineage.revive({}).ok());
                alive = all_rows(step);
            }
            const up::batch_view before = lineage.current();
            const up::row_map map_before = lineage.map();
            const std::vector<std::int32_t> offsets = offsets_of(before);
            const std::vector<std::int32_t> positions(before.positions, before.positions + before.num_rows);
            std::vector<std::int32_t> originals;
            if (!map_before.identity) {
                originals.assign(map_before.kept_to_old, map_before.kept_to_old + map_before.num_kept);
            }
            const auto keeps = random() % 6 == 0 ? std::vector<bool>(positions.size(), true)
                                                 : random_keeps(random, before.num_rows);
            const keep_set kept(keeps, offsets, static_cast<std::int32_t>(random() % 3));
            REQUIRE(lineage.apply(kept.view, {}).ok());
            drop(alive, keeps);
            check_current(lineage, step, alive);
            // The rows before the decision are still readable.
            REQUIRE(offsets_of(before) == offsets);
            REQUIRE(std::vector<std::int32_t>(before.positions, before.positions + before.num_rows) ==
                    positions);
            if (!map_before.identity) {
                REQUIRE(std::equal(originals.begin(), originals.end(), map_before.kept_to_old));
            }
        }
    }
}

TEST_CASE("row_lineage: keep all changes nothing") {
    std::mt19937 random(3);
    const packed_step step(random, 3);
    up::row_lineage<> lineage(step.bounds);
    lineage_memory memory(lineage.state_bytes());
    REQUIRE(lineage.begin(step.view(false), memory.memory, {}).ok());
    REQUIRE(lineage.apply(up::selection::keep_all(3, 3, step.rows(), up::memory_space::host), {}).ok());
    CHECK(lineage.holds_every_row());
    CHECK(lineage.current().positions == step.positions.data());
}

TEST_CASE("row_lineage: calls out of order and selections of other rows are refused, with nothing changed") {
    std::mt19937 random(4);
    packed_step step(random, 3);
    up::row_lineage<> lineage(step.bounds);
    lineage_memory memory(lineage.state_bytes());
    const auto all = up::selection::keep_all(3, 3, step.rows(), up::memory_space::host);
    CHECK(lineage.apply(all, {}).code == up::status_code::wrong_state);
    CHECK(lineage.revive({}).code == up::status_code::wrong_state);
    CHECK_FALSE(lineage.has_begun());

    const auto begin = [&](const up::batch_view& batch, up::workspace piece) {
        return lineage.begin(batch, piece, {}).code;
    };
    up::batch_view broken = step.view(false);
    broken.positions = nullptr;
    CHECK(begin(broken, memory.memory) == up::status_code::invalid_argument);
    CHECK(begin(step.view(false), {}) == up::status_code::invalid_argument);
    CHECK(begin(step.view(false), {memory.memory.data(), memory.memory.bytes() - 1}) ==
          up::status_code::workspace_too_small);
    CHECK_FALSE(lineage.has_begun());
    REQUIRE(begin(step.view(false), memory.memory) == up::status_code::ok);

    std::vector<bool> keeps(static_cast<std::size_t>(step.rows()), true);
    keeps[0] = false;
    const keep_set kept(keeps, step.cu_seqlens);
    auto spoiled = spoiled_selections(up::memory_space::device);
    spoiled.push_back({"decided", [](up::selection& s) {
                           static std::int32_t too_many[] = {0, 0, 0, INT32_MAX};
                           s.cu_seqlens = too_many;
                       }});
    for (const auto& [argument, spoil] : spoiled) {
        up::selection decided = kept.view;
        spoil(decided);
        const auto bytes = memory.bytes;
        const up::status result = lineage.apply(decided, {});
        CHECK_FALSE(result.ok());
        CHECK(result.argument == std::string(argument));
        CHECK(memory.bytes == bytes);
        CHECK(lineage.holds_every_row());
    }
    REQUIRE(lineage.apply(kept.view, {}).ok());
    const keep_set none(std::vector<bool>(keeps.size() - 1, false), offsets_of(lineage.current()));
    REQUIRE(lineage.apply(none.view, {}).ok()); // dropping every row is no error here
    CHECK(lineage.current().num_rows == 0);

    up::limits wrong = step.bounds;
    wrong.num_layers = 0;
    up::row_lineage<> unusable(wrong);
    CHECK(unusable.state_bytes() == 0);
    CHECK(unusable.begin(step.view(false), memory.memory, {}).argument == std::string("limits.num_layers"));
}

namespace {

/// Runs a model of 12 layers, of which every third selects, on rows moved by @p Policy, and the same on a
/// list of values by original row.
template <class Policy>
void run_model(unsigned seed) {
    std::mt19937 random(seed);
    const packed_step step(random, static_cast<std::int32_t>(1 + random() % 4));
    const auto rows = static_cast<std::size_t>(step.rows());
    up::row_lineage<> lineage(step.bounds);
    lineage_memory memory(lineage.state_bytes());
    REQUIRE(lineage.begin(step.view(false), memory.memory, {}).ok());

    std::vector<std::uint64_t> working(rows, 0);
    std::vector<std::uint64_t> full(rows, 0);
    std::vector<std::uint64_t> wanted(rows);
    for (std::size_t row = 0; row < rows; ++row) {
        wanted[row] = 1000 * row;
    }
    const up::row_tensor hidden{up::as_byte_rows(working.data(), step.rows(), 1),
                                Policy::revives ? up::as_byte_rows(full.data(), step.rows(), 1)
                                                : up::byte_rows{}};
    std::copy(wanted.begin(), wanted.end(),
              static_cast<std::uint64_t*>(Policy::rows_of(lineage, hidden).data));

    std::vector<bool> alive(rows, true);
    for (std::int32_t layer = 0; layer < 12; ++layer) {
        if (layer % 3 == 2) {
            REQUIRE(Policy::enter(lineage, &hidden, 1, {}).ok());
            if (Policy::revives) {
                alive.assign(rows, true);
            }
            const up::batch_view current = lineage.current();
            const auto keeps = random_keeps(random, current.num_rows);
            const keep_set kept(keeps, offsets_of(current));
            const bool identity = random() % 4 == 0;
            const up::selection decided =
                identity ? up::selection::keep_all(current.num_requests, current.num_segments,
                                                   current.num_rows, up::memory_space::host)
                         : kept.view;
            std::size_t place = 0;
            for (std::size_t row = 0; row < rows; ++row) {
                if (alive[row]) {
                    alive[row] = identity || keeps[place];
                    ++place;
                }
            }
            REQUIRE(Policy::leave(lineage, decided, &hidden, 1, {}).ok());
        }
        // Rows that are not alive sit this layer out.
        auto* values = static_cast<std::uint64_t*>(Policy::rows_of(lineage, hidden).data);
        for (std::int32_t row = 0; row < lineage.current().num_rows; ++row) {
            values[row] = layer_of(values[row], layer);
        }
        std::size_t place = 0;
        for (std::size_t row = 0; row < rows; ++row) {
            if (alive[row]) {
                wanted[row] = layer_of(wanted[row], layer);
                REQUIRE(values[place++] == wanted[row]);
            }
        }
        REQUIRE(place == static_cast<std::size_t>(lineage.current().num_rows));
    }
}

} // namespace

TEST_CASE("policies: rows carry what the layers that they met made of them") {
    for (unsigned i = 0; i < 200; ++i) {
        const auto seed = static_cast<unsigned>(uniprefill_test::seed()) + i;
        INFO("seed " << seed);
        run_model<up::cumulative>(seed);
        run_model<up::revive>(seed);
    }
}

TEST_CASE("policies: what can't be moved changes nothing") {
    std::mt19937 random(8);
    const packed_step step(random, 2);
    up::row_lineage<> lineage(step.bounds);
    lineage_memory memory(lineage.state_bytes());
    tensor full(step.rows(), 8, 8, 1);
    tensor working(step.rows(), 8, 8, 2);
    CHECK(up::cumulative::enter(lineage, nullptr, 0, {}).code == up::status_code::wrong_state);
    CHECK(up::revive::enter(lineage, nullptr, 0, {}).code == up::status_code::wrong_state);
    REQUIRE(lineage.begin(step.view(false), memory.memory, {}).ok());

    std::vector<bool> keeps(static_cast<std::size_t>(step.rows()), true);
    keeps[0] = false;
    const keep_set kept(keeps, step.cu_seqlens);
    const auto full_before = full.bytes;
    const auto working_before = working.bytes;
    const auto unchanged = [&] {
        return full.bytes == full_before && working.bytes == working_before && lineage.holds_every_row();
    };
    // The second tensor of two is too short: the first isn't moved either.
    up::row_tensor pair[2] = {{working.view(), full.view()}, {working.view(), full.view()}};
    pair[1].working.num_rows = 3;
    const up::status shorter = up::cumulative::leave(lineage, kept.view, pair, 2, {});
    CHECK(shorter.code == up::status_code::out_of_range);
    CHECK(shorter.request == 1);
    CHECK(unchanged());
    CHECK(up::revive::leave(lineage, kept.view, pair, 2, {}).request == 1);
    CHECK(unchanged());
    // Frozen rows need memory of their own.
    const up::row_tensor same{working.view(), working.view()};
    CHECK(up::revive::leave(lineage, kept.view, &same, 1, {}).code == up::status_code::invalid_argument);
    CHECK(unchanged());
    CHECK(up::revive::leave(lineage, kept.view, nullptr, 1, {}).argument == std::string("tensors"));
    CHECK(up::revive::leave(lineage, kept.view, pair, -1, {}).argument == std::string("count"));
    CHECK(unchanged());

    REQUIRE(up::revive::leave(lineage, kept.view, pair, 1, {}).ok());
    const keep_set again(std::vector<bool>(keeps.size() - 1, true), offsets_of(lineage.current()));
    CHECK(up::revive::leave(lineage, again.view, pair, 1, {}).code == up::status_code::wrong_state);
    up::row_tensor missing = pair[0];
    missing.full.num_rows = 1;
    const auto frozen = full.bytes;
    CHECK(up::revive::enter(lineage, &missing, 1, {}).code == up::status_code::out_of_range);
    CHECK(full.bytes == frozen);
    CHECK_FALSE(lineage.holds_every_row());
    CHECK(up::revive::enter(lineage, pair, 1, {}).ok());
    CHECK(lineage.holds_every_row());
}
