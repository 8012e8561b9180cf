// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Pipeline stages, each with a ledger of its own layers, against one ledger of all of them.

#include "ledger/refusals.hpp"

#include "property/random.hpp"

#include <uniprefill/ledger/stage_rows.hpp>

#include <algorithm>

using namespace ledger_test;
using up::request_tag;
using up::set_relation;
using up::status_code;

namespace {

using numbers = std::vector<std::int32_t>;

owned_ledger make_stage(const numbers& model, std::int32_t first, std::int32_t layers,
                        set_relation relation) {
    numbers sets(static_cast<std::size_t>(layers), -7);
    up::ledger_limits bounds{3, 400, layers, 0, relation};
    must(up::stage_layer_sets(model.data(), first, layers, sets.data(), bounds.num_sets));
    return {bounds, sets};
}

numbers sets_of(const numbers& model, std::int32_t first, std::int32_t layers) {
    numbers sets(static_cast<std::size_t>(layers), -7);
    std::int32_t count = -7;
    must(up::stage_layer_sets(model.data(), first, layers, sets.data(), count));
    CHECK(count == *std::max_element(sets.begin(), sets.end()) + 1);
    return sets;
}

} // namespace

TEST_CASE("the sets of a stage's layers", "[ledger]") {
    const numbers nested{0, 0, 1, 1, 2, 2, 3};
    CHECK(sets_of(nested, 0, 7) == nested);
    CHECK(sets_of(nested, 0, 3) == numbers{0, 0, 1});
    CHECK(sets_of(nested, 1, 3) == numbers{0, 1, 1});
    CHECK(sets_of(nested, 3, 4) == numbers{1, 2, 2, 3});
    CHECK(sets_of(nested, 6, 1) == numbers{1});
    CHECK(sets_of({0, 1, 0, 2, 2, 0, 3, 1}, 3, 5) == numbers{1, 1, 0, 2, 3});
    numbers sets(7, -7);
    std::int32_t count = -7;
    CHECK_FALSE(up::stage_layer_sets(nested.data(), -1, 3, sets.data(), count).ok());
    CHECK_FALSE(up::stage_layer_sets(nested.data(), 2, 0, sets.data(), count).ok());
    CHECK_FALSE(up::stage_layer_sets(nullptr, 0, 3, sets.data(), count).ok());
    CHECK_FALSE(up::stage_layer_sets(nested.data(), 0, 3, nullptr, count).ok());
    const numbers negative{0, -1, 1};
    check_refused(up::stage_layer_sets(negative.data(), 0, 3, sets.data(), count),
                  status_code::invalid_argument, "model_sets", -1, 1);
    CHECK((count == -7 && sets == numbers(7, -7)));
}

TEST_CASE("two stages hold what one ledger of all layers holds", "[ledger]") {
    property::random_numbers random(property::base_seed());
    for (const set_relation relation : {set_relation::nested, set_relation::independent}) {
        const numbers model =
            relation == set_relation::nested ? numbers{0, 0, 1, 1, 2, 2, 3} : numbers{0, 1, 0, 2, 2, 0, 3};
        for (std::int32_t cut = 1; cut < 7; ++cut) {
            owned_ledger whole({3, 400, 7, 4, relation}, model);
            owned_ledger first = make_stage(model, 0, cut, relation);
            owned_ledger second = make_stage(model, cut, 7 - cut, relation);
            numbers tokens(3);
            for (std::int32_t id = 0; id < 3; ++id) {
                for (owned_ledger* ledger : {&whole, &first, &second}) {
                    must(ledger->ledger.admit(id));
                }
            }
            for (int round = 0; round < 12; ++round) {
                rows_batch batch;
                for (std::int32_t id = 2; id >= 0; --id) {
                    const std::int32_t length = tokens[static_cast<std::size_t>(id)];
                    const bool decodes = random.chance(0.4);
                    const std::int32_t rows = decodes ? 1 : random.between(0, 30);
                    if (random.chance(0.2)) {
                        batch.add(-1, request_tag::decode, {});
                        continue;
                    }
                    batch.add(id, decodes ? request_tag::decode : request_tag::chunk,
                              range(length, length + rows));
                    tokens[static_cast<std::size_t>(id)] += rows;
                }
                up::ledger_step in_whole;
                up::ledger_step in_first;
                up::ledger_step in_second;
                must(whole.ledger.begin_step(batch.view(), batch.ids.data(), in_whole));
                must(first.ledger.begin_step(batch.view(), batch.ids.data(), in_first));
                rows_batch alive = batch;
                numbers buffer;
                up::stage_rows came;
                for (std::int32_t layer = 0; layer < 7; ++layer) {
                    if (model[static_cast<std::size_t>(layer)] == 0) {
                        alive = batch; // nothing dropped yet, or revived
                    } else if (whole.ledger.starts_set(layer)) {
                        rows_batch fewer;
                        for (std::size_t r = 0; r < alive.ids.size(); ++r) {
                            positions kept(alive.packed.begin() + alive.cu[r],
                                           alive.packed.begin() + alive.cu[r + 1]);
                            if (alive.tags[r] == request_tag::chunk) {
                                kept.erase(std::remove_if(kept.begin(), kept.end(),
                                                          [&](std::int32_t) { return random.chance(0.4); }),
                                           kept.end());
                            }
                            fewer.add(alive.ids[r], alive.tags[r], kept);
                        }
                        alive = fewer;
                    }
                    must(whole.ledger.append(in_whole, layer, alive.view()));
                    if (layer < cut) {
                        must(first.ledger.append(in_first, layer, alive.view()));
                        continue;
                    }
                    if (layer == cut) {
                        const std::int64_t words =
                            up::stage_rows_words(alive.view().num_requests, alive.view().num_rows);
                        buffer.assign(static_cast<std::size_t>(words) + 3, -7);
                        must(up::write_stage_rows(batch.view(), batch.ids.data(), alive.view(), buffer.data(),
                                                  words));
                        CHECK(buffer[static_cast<std::size_t>(words)] == -7);
                        must(up::read_stage_rows(buffer.data(), words + 3, came));
                        must(second.ledger.begin_step(came.batch, came.request_ids, in_second));
                        must(second.ledger.append(in_second, 0, came.entering));
                    } else {
                        must(second.ledger.append(in_second, layer - cut, alive.view()));
                    }
                }
                must(whole.ledger.commit_step(in_whole));
                must(first.ledger.commit_step(in_first));
                must(second.ledger.commit_step(in_second));
                for (std::int32_t id = 0; id < 3; ++id) {
                    for (std::int32_t layer = 0; layer < 7; ++layer) {
                        REQUIRE(whole.held(id, layer) ==
                                (layer < cut ? first.held(id, layer) : second.held(id, layer - cut)));
                    }
                }
            }
        }
    }
}

TEST_CASE("buffers between stages that are none", "[ledger]") {
    rows_batch batch;
    batch.add(0, request_tag::chunk, range(0, 9));
    batch.add(1, request_tag::decode, {4});
    rows_batch leaving;
    leaving.add(0, request_tag::chunk, {2, 3});
    leaving.add(1, request_tag::decode, {4});
    numbers words(17, -7);
    CHECK(up::stage_rows_words(2, 3) == 17);
    const auto refuse_write = [&](up::batch_view of, const std::int32_t* ids, up::batch_view rows,
                                  std::int64_t size, const std::string& argument) {
        CHECK(up::write_stage_rows(of, ids, rows, words.data(), size).argument == argument);
        CHECK(words == numbers(17, -7));
    };
    const up::batch_view good = batch.view();
    const up::batch_view left = leaving.view();
    up::batch_view wrong = left;
    wrong.num_requests = 1;
    refuse_write(good, batch.ids.data(), wrong, 17, "leaving.num_requests");
    wrong = left;
    wrong.positions = nullptr;
    refuse_write(good, batch.ids.data(), wrong, 17, "leaving.positions");
    wrong = left;
    wrong.space = up::memory_space::device;
    refuse_write(good, batch.ids.data(), wrong, 17, "batch.space");
    wrong = good;
    wrong.tags = nullptr;
    refuse_write(wrong, batch.ids.data(), left, 17, "batch");
    refuse_write(good, nullptr, left, 17, "batch");
    refuse_write(good, batch.ids.data(), left, 16, "size");
    must(up::write_stage_rows(good, batch.ids.data(), left, words.data(), 17));
    const auto refuse_read = [&](std::size_t at, std::int32_t value, std::int64_t size,
                                 const std::string& argument) {
        numbers changed = words;
        changed[at] = value;
        up::stage_rows came;
        CHECK(up::read_stage_rows(changed.data(), size, came).argument == argument);
        CHECK(came.request_ids == nullptr);
    };
    refuse_read(0, 7, 17, "words");
    refuse_read(0, words[0], 16, "size");
    refuse_read(0, words[0], 5, "size");
    refuse_read(1, 3, 17, "size");
    refuse_read(1, 2'147'483'647, 17, "size");
    refuse_read(1, -1, 17, "size");
    refuse_read(2, -1, 17, "size");
    refuse_read(3, 4, 17, "size");
    refuse_read(3, -1, 17, "size");
    up::stage_rows came;
    CHECK_FALSE(up::read_stage_rows(nullptr, 17, came).ok());
    // Whatever else is in it, begin_step() and append() refuse it.
    for (std::size_t at = 2; at < 17; ++at) {
        for (const std::int32_t value : {-2, 3, 11, 1 << 30}) {
            owned_ledger owner = make_ledger({0}, 2, set_relation::nested);
            must(owner.ledger.admit(0));
            must(owner.ledger.admit(1));
            open_step(owner, {{1, request_tag::chunk, range(0, 4), range(0, 4)}}, 1).commit();
            numbers changed = words;
            changed[at] = value;
            if (changed == words || !up::read_stage_rows(changed.data(), 17, came).ok()) {
                continue;
            }
            up::ledger_step step;
            if (owner.ledger.begin_step(came.batch, came.request_ids, step).ok()) {
                static_cast<void>(owner.ledger.append(step, 1, came.entering));
                must(owner.ledger.commit_step(step));
            }
            CHECK(owner.canaries_intact());
        }
    }
    up::batch_view nothing;
    numbers empty(6);
    must(up::write_stage_rows(nothing, nullptr, nothing, empty.data(), 6));
    must(up::read_stage_rows(empty.data(), 6, came));
    CHECK(came.batch.num_requests == 0);
}
