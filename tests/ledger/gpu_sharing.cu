// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// What requests share with each other, and pipeline stages: signatures of pages and the rows of a step, on
// the device as on the host.

#include "ledger/gpu_twins.cuh"

#include <uniprefill/ledger/stage_rows.hpp>

using namespace ledger_test;
using uniprefill_test::captured_graph;
using uniprefill_test::has_device;
using up::ledger_complaint;
using up::request_tag;
using up::set_relation;
using up::status_code;

namespace {

using numbers = std::vector<std::int32_t>;

const up::page_signer signer{{0x1234, 0x5678}, 9};

/// What sign_pages() is asked for, and room for its answers.
template <class Token>
struct signing {
    numbers ids;
    numbers layers; // empty: all
    std::int32_t page_tokens;
    std::int32_t capacity;
    std::int64_t stride; // of the texts
    up::request_index rows;
    std::vector<Token> texts;
};

/// Signs on both and compares. Where the host refuses pages of a request, the device does so for them alone.
template <class Token>
void compare_signatures(ledger_twins& twins, const signing<Token>& asked) {
    const auto count = static_cast<std::int32_t>(asked.ids.size());
    const up::layer_list layers =
        asked.layers.empty()
            ? twins.device.every_layer()
            : up::layer_list{0, static_cast<std::int32_t>(asked.layers.size()), asked.layers.data()};
    const std::size_t chains = asked.ids.size() * static_cast<std::size_t>(layers.count);
    const auto capacity = static_cast<std::size_t>(asked.capacity);
    std::vector<up::page_signature> expected(chains * capacity, up::page_signature{7, 7});
    numbers pages(chains, 0);
    const device_array<up::page_signature> signatures(expected);
    const device_array<std::int32_t> num_pages(numbers(chains, -77));
    const device_array<Token> texts(asked.texts);
    up::layer_list there = layers;
    there.layers = asked.layers.empty() ? nullptr : twins.upload(asked.layers);
    const std::int32_t* const ids = twins.upload(asked.ids);
    launches_only([&] {
        return twins.device.sign_pages(
            ids, count, there, signer, up::request_texts<Token>{texts.data(), asked.stride, asked.rows},
            asked.page_tokens, signatures.data(), asked.capacity, num_pages.data(), nullptr);
    });
    up::status first = up::success(); // by slot, then by layer, as a fault has it
    for (std::int32_t r = 0; r < count; ++r) {
        const std::int32_t id = asked.ids[static_cast<std::size_t>(r)];
        const Token* const text =
            asked.texts.data() + asked.stride * (asked.rows == up::request_index::batch ? r : id);
        for (std::int32_t i = 0; id != -1 && i < layers.count; ++i) {
            const std::size_t chain =
                static_cast<std::size_t>(i) * asked.ids.size() + static_cast<std::size_t>(r);
            std::int32_t signed_pages = 0;
            const up::status came =
                twins.host().sign_pages(id, layers.at(i), signer, text, asked.page_tokens,
                                        expected.data() + chain * capacity, asked.capacity, signed_pages);
            pages[chain] = signed_pages;
            if (!came.ok() && (first.ok() || came.request < first.request ||
                               (came.request == first.request && came.layer < first.layer))) {
                first = came;
            }
        }
    }
    twins.check_refusal(first);
    REQUIRE(num_pages.get() == pages);
    REQUIRE((signatures.get() == expected));
}

template <class Token>
std::vector<Token> random_texts(std::int64_t count, property::random_numbers& random) {
    std::vector<Token> made(static_cast<std::size_t>(count));
    for (Token& token : made) {
        token = static_cast<Token>(random.next());
    }
    return made;
}

template <class Token>
void sign_at_random(set_relation relation, const numbers& layer_sets, int rounds) {
    property::random_numbers random(property::base_seed());
    constexpr std::int32_t max_tokens = 700;
    const std::int32_t sets = *std::max_element(layer_sets.begin(), layer_sets.end()) + 1;
    for (int round = 0; round < rounds; ++round) {
        ledger_twins twins({6, max_tokens, static_cast<std::int32_t>(layer_sets.size()), sets, relation},
                           layer_sets);
        signing<Token> asked;
        rows_batch rows;
        for (std::int32_t id = 5; id >= 0; --id) {
            if (random.chance(0.2)) {
                asked.ids.push_back(-1);
                continue;
            }
            const std::int32_t tokens = twins.grow_at_random(id, 200, random);
            asked.ids.push_back(id);
            rows.add(id, request_tag::chunk, range(tokens, std::min(tokens + 13, max_tokens)));
        }
        asked.page_tokens = random.chance(0.5) ? 16 : random.between(1, 70);
        asked.capacity = max_tokens / asked.page_tokens + 1;
        asked.stride = max_tokens + random.between(0, 3);
        asked.rows = random.chance(0.5) ? up::request_index::batch : up::request_index::ledger;
        asked.texts = random_texts<Token>(6 * asked.stride, random);
        if (random.chance(0.5)) {
            asked.layers = {static_cast<std::int32_t>(layer_sets.size()) - 1, 0, 1};
        }
        compare_signatures(twins, asked);
        asked.capacity = random.between(0, 12); // too few for some
        compare_signatures(twins, asked);
        asked.capacity = max_tokens;
        twins.with_open_step(rows, [&] { compare_signatures(twins, asked); });
        twins.check_states();
    }
}

} // namespace

TEST_CASE("pages are signed on the device as on the host") {
    if (!has_device()) {
        return;
    }
    INFO("seed " << property::base_seed());
    const int rounds = property::scaled(12);
    sign_at_random<std::int32_t>(set_relation::nested, {0, 0, 1, 1, 2, 3}, rounds);
    sign_at_random<std::int64_t>(set_relation::independent, {0, 1, 1, 2, 0, 3}, rounds);
    numbers many(67); // more sets than a word has bits
    for (std::size_t layer = 0; layer < many.size(); ++layer) {
        many[layer] = static_cast<std::int32_t>(layer);
    }
    sign_at_random<std::uint32_t>(set_relation::nested, many, property::scaled(2));
}

TEST_CASE("signing on a device what isn't there") {
    if (!has_device()) {
        return;
    }
    ledger_twins twins({4, 100, 3, 2, set_relation::nested}, {0, 1, 1});
    twins.admit({0, 2});
    rows_batch rows, fewer;
    rows.add(0, request_tag::prefill, range(0, 40));
    rows.add(2, request_tag::prefill, range(0, 30));
    fewer.add(0, request_tag::prefill, every(2, 0, 40));
    fewer.add(2, request_tag::prefill, every(3, 0, 30));
    twins.run_step(rows, 1, fewer);
    signing<std::int32_t> asked{{0, 2}, {}, 16, 3, 40, up::request_index::batch, numbers(200, 5)};
    compare_signatures(twins, asked);
    asked.ids = {2, 1, 0}; // nobody has slot 1
    compare_signatures(twins, asked);
    asked.ids = {2, 99, -1};
    compare_signatures(twins, asked);

    const device_array<std::int32_t> text(numbers(200, 5));
    const device_array<up::page_signature> signatures(std::vector<up::page_signature>(18));
    const device_array<std::int32_t> pages(numbers(6, -77));
    const std::int32_t* const ids = twins.upload(numbers{0, 2});
    const auto sign = [&](const up::layer_list& layers, std::int64_t stride, std::int32_t page_tokens,
                          std::int32_t capacity) {
        return twins.device.sign_pages(ids, 2, layers, signer,
                                       up::request_texts<std::int32_t>{text.data(), stride}, page_tokens,
                                       signatures.data(), capacity, pages.data(), nullptr);
    };
    must(sign({0, 2, nullptr}, 39, 16, 3)); // one text is shorter than its request
    REQUIRE(pages.get() == numbers{0, 2, 0, 1, -77, -77});
    REQUIRE(twins.fault() == ledger_complaint::text);
    REQUIRE(twins.fault_status().request == 0);
    twins.forget_fault();
    must(sign({0, 2, twins.upload(numbers{3, 1})}, 40, 16, 3)); // no layer 3
    REQUIRE(pages.get() == numbers{0, 0, 2, 1, -77, -77});
    REQUIRE(twins.fault() == ledger_complaint::layer);
    twins.forget_fault();
    must(sign({0, 0, nullptr}, 40, 16, 3));
    REQUIRE(pages.get() == numbers{0, 0, 2, 1, -77, -77});
    REQUIRE(sign({0, 4, nullptr}, 40, 16, 3).code == status_code::out_of_range);
    REQUIRE(sign({0, -1, nullptr}, 40, 16, 3).code == status_code::invalid_argument);
    REQUIRE(sign({0, 1, nullptr}, 40, 0, 3).code == status_code::invalid_argument);
    REQUIRE(sign({0, 1, nullptr}, -1, 16, 3).code == status_code::invalid_argument);
    REQUIRE(sign({0, 1, nullptr}, 40, 16, -1).code == status_code::invalid_argument);
    REQUIRE(twins.fault() == ledger_complaint::none);
}

TEST_CASE("a pipeline stage on a device tells the next one what the host's would") {
    if (!has_device()) {
        return;
    }
    property::random_numbers random(property::base_seed());
    INFO("seed " << property::base_seed());
    constexpr std::int32_t requests = 5;
    for (const set_relation relation : {set_relation::nested, set_relation::independent}) {
        // The second stage has the last three layers; rows were dropped before them.
        ledger_twins twins({requests, 2000, 3, 3, relation}, {1, 1, 2});
        numbers tokens(requests, 0);
        twins.admit(range(0, requests));
        for (int round = 0; round < property::scaled(40, 4); ++round) {
            rows_batch batch, leaving;
            for (std::int32_t id = requests - 1; id >= 0; --id) {
                if (random.chance(0.2)) {
                    batch.add(-1, request_tag::decode, {});
                    leaving.add(-1, request_tag::decode, {});
                    continue;
                }
                std::int32_t& held = tokens[static_cast<std::size_t>(id)];
                const bool decodes = random.chance(0.4);
                const std::int32_t rows = decodes ? 1 : random.between(0, random.chance(0.2) ? 400 : 20);
                if (held + rows > 2000) {
                    must(twins.host().rollback(id, 0));
                    must(twins.device.rollback(twins.upload(numbers{id}), twins.upload(numbers{0}), 1,
                                               nullptr));
                    held = 0;
                }
                positions kept;
                for (std::int32_t position = held; position < held + rows; ++position) {
                    if (decodes || random.chance(0.6)) {
                        kept.push_back(position);
                    }
                }
                const request_tag tag = decodes ? request_tag::decode : request_tag::chunk;
                batch.add(id, tag, range(held, held + rows));
                leaving.add(id, tag, kept);
                held += rows;
            }
            const std::int64_t words = up::stage_rows_words(requests, leaving.view().num_rows);
            numbers expected(static_cast<std::size_t>(words) + 9, -77);
            must(
                up::write_stage_rows(batch.view(), batch.ids.data(), leaving.view(), expected.data(), words));
            // The device is told how many rows there may be.
            const device_array<std::int32_t> there(numbers(expected.size(), -77));
            up::batch_view batch_there = twins.view_of(batch, false);
            up::batch_view leaving_there = twins.view_of(leaving, true);
            batch_there.num_rows += random.between(0, 5);
            leaving_there.num_rows += random.between(0, 9);
            const std::int32_t* const ids = twins.upload(batch.ids);
            launches_only([&] {
                return twins.device.write_stage_rows(batch_there, ids, leaving_there, there.data(), words + 9,
                                                     nullptr);
            });
            REQUIRE(there.get() == expected);

            up::stage_rows on_host, on_device;
            must(up::read_stage_rows(expected.data(), words, on_host));
            launches_only([&] {
                return twins.device.read_stage_rows(there.data(), words + 9, requests, 2000 * requests,
                                                    on_device, nullptr);
            });
            REQUIRE(there.get() == expected);
            twins.run_step(on_host, on_device);
        }
        REQUIRE(twins.fault() == ledger_complaint::none);
    }
}

TEST_CASE("buffers between stages that are none, on a device") {
    if (!has_device()) {
        return;
    }
    ledger_twins twins({3, 100, 2, 2, set_relation::nested}, {0, 1});
    twins.admit({0, 1});
    rows_batch batch, leaving;
    batch.add(0, request_tag::chunk, range(0, 9));
    batch.add(1, request_tag::decode, {0});
    leaving.add(0, request_tag::chunk, {2, 3});
    leaving.add(1, request_tag::decode, {0});
    numbers words(17);
    must(up::write_stage_rows(batch.view(), batch.ids.data(), leaving.view(), words.data(), 17));
    const numbers written = words;
    const auto refuse_read = [&](std::size_t at, std::int32_t value, std::int32_t most_rows) {
        numbers changed = words;
        changed[at] = value;
        const device_array<std::int32_t> there(changed);
        up::stage_rows came;
        must(twins.device.read_stage_rows(there.data(), 17, 2, most_rows, came, nullptr));
        REQUIRE(twins.fault() == ledger_complaint::stage_words);
        up::ledger_step step;
        must(twins.device.begin_step(came.batch, came.request_ids, step, nullptr));
        must(twins.device.append(step, 1, came.entering, nullptr));
        must(twins.device.commit_step(step, nullptr));
        REQUIRE(twins.fault() == ledger_complaint::stage_words); // and no other
        twins.forget_fault();
        twins.check_states();
    };
    refuse_read(0, 7, 20);
    refuse_read(1, 3, 20);
    refuse_read(1, -1, 20);
    refuse_read(2, -1, 20);
    refuse_read(2, 21, 20);
    refuse_read(3, 4, 20); // than words behind it
    refuse_read(3, -1, 20);
    refuse_read(0, words[0], 9); // more rows than the engine has room for
    // Nothing that comes of it hides it.
    for (const std::int32_t value : {-1, 0, -2, 7}) {
        words.assign(17, value);
        refuse_read(0, value, 20);
    }
    words = written;
    // Whatever else is in it, begin_step() and append() judge it, and nothing is written out of bounds.
    for (std::size_t at = 4; at < 17; ++at) {
        for (const std::int32_t value : {-2, 2, 11, 1 << 30}) {
            numbers changed = words;
            changed[at] = value;
            const device_array<std::int32_t> there(changed);
            up::stage_rows came;
            must(twins.device.read_stage_rows(there.data(), 17, 2, 20, came, nullptr));
            up::ledger_step step;
            must(twins.device.begin_step(came.batch, came.request_ids, step, nullptr));
            must(twins.device.append(step, 1, came.entering, nullptr));
            must(twins.device.abort_step(step, nullptr));
            REQUIRE(twins.fault() != ledger_complaint::stage_words);
            twins.forget_fault();
            twins.check_states();
        }
    }
    // What can't be written is no buffer either.
    const device_array<std::int32_t> there(words);
    up::batch_view left = twins.view_of(leaving, true);
    const std::int32_t* const ids = twins.upload(batch.ids);
    for (const numbers& offsets : {numbers{0, 2, 4}, numbers{0, 2, -1}, numbers{0, 2, 1 << 30}}) {
        left.cu_seqlens = twins.upload(offsets);
        must(
            twins.device.write_stage_rows(twins.view_of(batch, false), ids, left, there.data(), 17, nullptr));
        REQUIRE(twins.fault() == ledger_complaint::offsets);
        twins.forget_fault();
        up::stage_rows came;
        must(twins.device.read_stage_rows(there.data(), 17, 2, 20, came, nullptr));
        REQUIRE(twins.fault() == ledger_complaint::stage_words);
        twins.forget_fault();
    }
    // What the host can see.
    const auto code = [](const up::status& came) { return came.code; };
    up::stage_rows came;
    REQUIRE(code(twins.device.write_stage_rows(batch.view(), ids, left, there.data(), 17, nullptr)) ==
            status_code::not_supported);
    REQUIRE(code(twins.device.write_stage_rows(twins.view_of(batch, false), ids, left, there.data(), 16,
                                               nullptr)) == status_code::out_of_range);
    REQUIRE(code(twins.device.read_stage_rows(there.data(), 13, 2, 20, came, nullptr)) ==
            status_code::invalid_argument);
    REQUIRE(code(twins.device.read_stage_rows(nullptr, 17, 2, 20, came, nullptr)) ==
            status_code::invalid_argument);
    REQUIRE(came.request_ids == nullptr);
    // A step of nothing.
    const device_array<std::int32_t> empty(numbers(6, -77));
    up::batch_view nothing;
    nothing.space = up::memory_space::device;
    must(twins.device.write_stage_rows(nothing, nullptr, nothing, empty.data(), 6, nullptr));
    REQUIRE(empty.get() == numbers{up::stage_rows_format, 0, 0, 0, 0, 0});
    must(twins.device.read_stage_rows(empty.data(), 6, 0, 0, came, nullptr));
    REQUIRE(twins.fault() == ledger_complaint::none);
}

TEST_CASE("signatures and a stage's rows come out of one graph") {
    if (!has_device()) {
        return;
    }
    ledger_twins twins({2, 300, 2, 2, set_relation::nested}, {0, 1});
    twins.admit({0, 1});
    rows_batch rows, fewer;
    rows.add(0, request_tag::chunk, range(0, 50));
    fewer.add(0, request_tag::chunk, every(2, 0, 50));
    twins.run_step(rows, 1, fewer);
    const std::int32_t most = 30;
    device_array<std::int32_t> ids(numbers{0}), cu(numbers{0, 1}), positions_there(numbers(most, 0));
    device_array<up::request_tag> tags(std::vector<request_tag>{request_tag::chunk});
    const numbers text(300, 3);
    const device_array<std::int32_t> texts(text);
    const device_array<up::page_signature> signatures(std::vector<up::page_signature>(40));
    const device_array<std::int32_t> pages(numbers(2, -77)), words(numbers(40, -77));
    up::batch_view batch;
    batch.space = up::memory_space::device;
    batch.num_requests = batch.num_segments = 1;
    batch.num_rows = most;
    batch.tags = tags.data();
    batch.cu_seqlens = cu.data();
    up::batch_view leaving = batch;
    leaving.positions = positions_there.data();
    captured_graph graph([&](cudaStream_t stream) {
        must(twins.device.write_stage_rows(batch, ids.data(), leaving, words.data(), 40, stream));
        up::stage_rows came;
        must(twins.device.read_stage_rows(words.data(), 40, 1, most, came, stream));
        up::ledger_step step;
        must(twins.device.begin_step(came.batch, came.request_ids, step, stream));
        must(twins.device.append(step, 1, came.entering, stream));
        must(twins.device.sign_pages(ids.data(), 1, twins.device.every_layer(), signer,
                                     up::request_texts<std::int32_t>{texts.data(), 300}, 16,
                                     signatures.data(), 20, pages.data(), stream));
        must(twins.device.commit_step(step, stream));
    });
    for (std::int32_t round = 0; round < 6; ++round) {
        const std::int32_t id = round % 2;
        const std::int32_t held = twins.held(id, 0).num_tokens();
        rows_batch arriving;
        arriving.add(id, request_tag::chunk, range(held, held + 5 * round));
        ids.set(arriving.ids);
        cu.set(arriving.cu);
        positions_there.set(arriving.packed);
        graph.replay();
        up::ledger_step step;
        must(twins.host().begin_step(arriving.view(), arriving.ids.data(), step));
        must(twins.host().commit_step(step));
        twins.check_states();
        std::vector<up::page_signature> expected(40);
        std::int32_t count = 0;
        const std::vector<up::page_signature> came = signatures.get();
        for (std::int32_t layer = 0; layer < 2; ++layer) {
            must(twins.host().sign_pages(id, layer, signer, text.data(), 16, expected.data(), 20, count));
            REQUIRE(pages.get()[static_cast<std::size_t>(layer)] == count);
            REQUIRE(std::equal(expected.begin(), expected.begin() + count, came.begin() + 20 * layer));
        }
    }
    REQUIRE(twins.fault() == ledger_complaint::none);
}
