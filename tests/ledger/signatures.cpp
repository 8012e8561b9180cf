// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Prefix reuse: pages have one signature exactly where they hold the same, and a request that starts from
// another's pages goes on as if it had written them.

#include "ledger/refusals.hpp"

#include "property/random.hpp"

using namespace ledger_test;
using up::request_tag;
using up::set_relation;
using up::status_code;

namespace {

constexpr std::int32_t page = 4;
using tokens = std::vector<std::int32_t>;
using signatures = std::vector<up::page_signature>;

const up::page_signer signer{{0x1234, 0x5678}, 9};

signatures sign(owned_ledger& owner, std::int32_t request, std::int32_t layer, const tokens& text,
                const up::page_signer& by = signer, std::int32_t page_tokens = page) {
    signatures made(static_cast<std::size_t>(owner.rows(request, layer).pages(page_tokens)) + 1);
    std::int32_t count = -1;
    must(owner.ledger.sign_pages(request, layer, by, text.data(), page_tokens, made.data(),
                                 static_cast<std::int32_t>(made.size()), count));
    CHECK(made.back() == up::page_signature{});
    made.resize(static_cast<std::size_t>(count));
    return made;
}

/// How many pages two lists have in common before the first that differs; no page is the same after that.
std::size_t common(const signatures& a, const signatures& b) {
    std::size_t same = 0;
    while (same < a.size() && same < b.size() && a[same] == b[same]) {
        ++same;
    }
    for (std::size_t i = same; i < a.size() && i < b.size(); ++i) {
        CHECK(a[i] != b[i]);
    }
    return same;
}

/// A request whose layers hold the given positions from each of the layers on, for layers 0 to 4 with
/// selecting layers 0 and 2.
void prefill(owned_ledger& owner, std::int32_t id, std::int32_t length, const positions& first,
             const positions& second) {
    open_step step(owner, {{id, request_tag::chunk, range(0, length), first}}, 1);
    rows_batch entering;
    entering.add(id, request_tag::chunk, second);
    must(owner.ledger.append(step.step, 3, entering.view()));
    step.commit();
}

} // namespace

TEST_CASE("the hash is SipHash-2-4 with 128 bits", "[ledger]") {
    // Bytes 0, 1, 2, ... hashed with the key of bytes 0 to 15, as OpenSSL does.
    const auto hashed = [](std::uint64_t words) {
        up::detail::sip_hash hash(0x0706050403020100u, 0x0f0e0d0c0b0a0908u);
        for (std::uint64_t i = 0; i < words; ++i) {
            hash.absorb(0x0706050403020100u + i * 0x0808080808080808u);
        }
        up::page_signature made;
        hash.finish(made.low, made.high);
        return made;
    };
    CHECK(hashed(0) == up::page_signature{0xe6a825ba047f81a3u, 0x930255c71472f66du});
    CHECK(hashed(1) == up::page_signature{0x61f55862baa9623bu, 0xb49714f364e2830fu});
    CHECK(hashed(8) == up::page_signature{0x3fcdd4c07d07af1eu, 0x4ba75836384dad8cu});
}

TEST_CASE("a text has one signature", "[ledger]") {
    const tokens text{1, 2, 3, -1};
    const std::vector<std::int64_t> wide(text.begin(), text.end());
    const up::page_signature one = up::sign_text(signer, text.data(), 4);
    CHECK(up::sign_text(signer, wide.data(), 4) == one);
    CHECK(up::sign_text(signer, text.data(), 3) != one);
    CHECK(up::sign_text(signer, text.data() + 1, 3) != one);
    CHECK(up::sign_text({{0x1234, 0x5679}, 9}, text.data(), 4) != one);
    CHECK(up::sign_text({{0x1235, 0x5678}, 9}, text.data(), 4) != one);
    CHECK(up::sign_text({{0x1234, 0x5678}, 8}, text.data(), 4) != one);
    CHECK(up::sign_text(signer, text.data(), 0) == up::sign_text(signer, wide.data(), 0));
}

TEST_CASE("what a page's signature depends on, and what not", "[ledger]") {
    owned_ledger owner = make_ledger({0, 2}, 5, set_relation::nested);
    for (std::int32_t id = 0; id < 4; ++id) {
        must(owner.ledger.admit(id));
    }
    const tokens text(30, 7);
    prefill(owner, 0, 30, {0, 1, 2, 3, 10, 11, 12, 13, 20}, {0, 2, 10, 12, 13, 20});
    prefill(owner, 1, 30, {0, 1, 2, 3, 10, 11, 12, 13, 20}, {0, 2, 10, 12, 13, 20});
    for (std::int32_t layer = 0; layer < 5; ++layer) {
        const signatures all = sign(owner, 0, layer, text);
        CHECK(all.size() == static_cast<std::size_t>(owner.rows(0, layer).pages(page)));
        CHECK(sign(owner, 1, layer, text) == all);
        CHECK(common(sign(owner, 0, layer, text, {{1, 2}, 9}), all) == 0);
        CHECK(common(sign(owner, 0, layer, text, {{0x1234, 0x5678}, 10}), all) == 0);
        CHECK(common(sign(owner, 0, layer, text, signer, 5), all) == 0);
        for (std::int32_t other = 0; other < layer; ++other) {
            CHECK(common(sign(owner, 0, other, text), all) == 0);
        }
        tokens changed = text;
        changed[12] = 8; // the third page of layer 0, the second one of the others but the first of those
                         // with 2, 10, 12
        CHECK(common(sign(owner, 0, layer, changed), all) == (layer == 0 ? 3u : layer < 3 ? 1u : 0u));
        changed = text;
        changed[25] = 8; // behind all rows of the later layers
        CHECK(common(sign(owner, 0, layer, changed), all) == (layer == 0 ? 6u : all.size()));
    }
    // Other decisions after layer 2: only layers 3 and 4 hold something else.
    prefill(owner, 2, 30, {0, 1, 2, 3, 10, 11, 12, 13, 20}, {0, 2, 10, 12, 20});
    CHECK(sign(owner, 2, 1, text) == sign(owner, 0, 1, text));
    CHECK(common(sign(owner, 2, 3, text), sign(owner, 0, 3, text)) == 1);
    // Other decisions after layer 0: layers 3 and 4 hold the same positions, but their rows have seen others.
    prefill(owner, 3, 30, {0, 1, 2, 3, 10, 12, 13, 20}, {0, 2, 10, 12, 13, 20});
    CHECK(sign(owner, 3, 0, text) == sign(owner, 0, 0, text));
    CHECK(owner.held(3, 4) == owner.held(0, 4));
    CHECK(common(sign(owner, 3, 1, text), sign(owner, 0, 1, text)) == 1);
    CHECK(common(sign(owner, 3, 4, text), sign(owner, 0, 4, text)) == 0);
}

TEST_CASE("revived rows of a later layer follow from what layers before it held", "[ledger]") {
    owned_ledger owner = make_ledger({0, 2}, 4, set_relation::independent); // sets 0 1 0 2
    const tokens text(16, 7);
    for (std::int32_t id = 0; id < 2; ++id) {
        must(owner.ledger.admit(id));
        const positions kept = id == 0 ? positions{0, 1, 2, 3, 4, 9} : positions{0, 1, 2, 3, 5, 9};
        open_step(owner, {{id, request_tag::prefill, range(0, 16), kept}}, 1).commit();
    }
    CHECK(common(sign(owner, 0, 0, text), sign(owner, 1, 0, text)) == 4);
    CHECK(common(sign(owner, 0, 1, text), sign(owner, 1, 1, text)) == 1);
    CHECK(owner.held(0, 2) == owner.held(1, 2));
    CHECK(common(sign(owner, 0, 2, text), sign(owner, 1, 2, text)) == 1);
}

TEST_CASE("more sets than a word has bits", "[ledger]") {
    std::vector<std::int32_t> sets(100);
    std::iota(sets.begin(), sets.end(), 0);
    owned_ledger owner({2, 64, 100, 100, set_relation::independent}, sets);
    const tokens text(8, 7);
    for (std::int32_t id = 0; id < 2; ++id) {
        must(owner.ledger.admit(id));
        const positions rows = id == 0 ? positions{0, 1, 2, 3, 6, 7} : positions{0, 1, 2, 3, 5, 7};
        rows_batch batch;
        batch.add(id, request_tag::prefill, range(0, 8));
        up::ledger_step step;
        must(owner.ledger.begin_step(batch.view(), batch.ids.data(), step));
        rows_batch entering;
        entering.add(id, request_tag::prefill, rows);
        rows_batch all;
        all.add(id, request_tag::prefill, range(0, 8));
        must(owner.ledger.append(step, 80, entering.view()));
        must(owner.ledger.append(step, 81, all.view()));
        must(owner.ledger.commit_step(step));
    }
    CHECK(common(sign(owner, 0, 79, text), sign(owner, 1, 79, text)) == 2);
    CHECK(common(sign(owner, 0, 80, text), sign(owner, 1, 80, text)) == 1);
    CHECK(common(sign(owner, 0, 99, text), sign(owner, 1, 99, text)) == 1);
}

TEST_CASE("pages have one signature exactly where they hold the same", "[ledger]") {
    // Two tokens, few decisions: many pages are equal, and many differ in one thing only.
    for (const set_relation relation : {set_relation::nested, set_relation::independent}) {
        property::random_numbers random(property::base_seed());
        std::int64_t same = 0;
        std::int64_t different = 0;
        for (int round = property::scaled(40); round > 0; --round) {
            owned_ledger owner = make_ledger({0, 2}, 5, relation, 40, 6);
            std::vector<tokens> texts;
            for (std::int32_t id = 0; id < 6; ++id) {
                must(owner.ledger.admit(id));
                const std::int32_t length = random.between(1, 40);
                tokens text;
                positions first;
                positions second;
                for (std::int32_t position = 0; position < length; ++position) {
                    text.push_back(random.chance(0.97) ? 1 : 2);
                    const bool kept = position % 5 != 4 && random.chance(0.98);
                    if (kept) {
                        first.push_back(position);
                    }
                    if ((kept || relation == set_relation::independent) && position % 3 != 0 &&
                        random.chance(0.98)) {
                        second.push_back(position);
                    }
                }
                texts.push_back(text);
                prefill(owner, id, length, first, second);
            }
            const auto prefix = [](const positions& of, std::int32_t end) {
                return positions(of.begin(), std::lower_bound(of.begin(), of.end(), end));
            };
            for (std::int32_t layer = 0; layer < 5; ++layer) {
                for (std::int32_t a = 0; a < 6; ++a) {
                    const signatures of_a = sign(owner, a, layer, texts[static_cast<std::size_t>(a)]);
                    const positions held_a = owner.held(a, layer);
                    for (std::int32_t b = 0; b < a; ++b) {
                        const signatures of_b = sign(owner, b, layer, texts[static_cast<std::size_t>(b)]);
                        const positions held_b = owner.held(b, layer);
                        for (std::size_t i = 0; i < std::min(of_a.size(), of_b.size()); ++i) {
                            const std::size_t end_a = std::min(held_a.size(), (i + 1) * page);
                            const std::size_t end_b = std::min(held_b.size(), (i + 1) * page);
                            const std::int32_t last = held_a[end_a - 1];
                            bool equal = end_a == end_b && held_b[end_b - 1] == last;
                            for (std::int32_t position = 0; equal && position <= last; ++position) {
                                const auto at = static_cast<std::size_t>(position);
                                equal = texts[static_cast<std::size_t>(a)][at] ==
                                        texts[static_cast<std::size_t>(b)][at];
                            }
                            for (std::int32_t before = 0; equal && before <= layer; ++before) {
                                equal = prefix(owner.held(a, before), last + 1) ==
                                        prefix(owner.held(b, before), last + 1);
                            }
                            REQUIRE((of_a[i] == of_b[i]) == equal);
                            ++(equal ? same : different);
                        }
                    }
                }
            }
        }
        CHECK(same > 100);
        CHECK(different > 100);
    }
}

TEST_CASE("a request that begins as another did starts from its pages", "[ledger]") {
    owned_ledger owner = make_ledger({0, 2}, 5, set_relation::nested);
    for (std::int32_t id = 0; id < 3; ++id) {
        must(owner.ledger.admit(id));
    }
    tokens text(700);
    for (std::size_t i = 0; i < text.size(); ++i) {
        text[i] = static_cast<std::int32_t>(i * i % 97);
    }
    // Spans of 300: at 300 decisions are final.
    positions first;
    positions second;
    for (std::int32_t position = 0; position < 300; position += 3) {
        first.push_back(position);
        if (position % 2 == 0) {
            second.push_back(position);
        }
    }
    prefill(owner, 0, 300, first, second);
    open_step(owner, {{0, request_tag::chunk, range(300, 600), {310, 599}}}, 1).commit();

    // What a cache keeps of the first 300, also once the request has gone on.
    std::size_t bytes = 0;
    must(owner.ledger.saved_prefix_bytes(0, 300, bytes));
    std::vector<std::byte> saved(bytes);
    must(owner.ledger.save_prefix(0, 300, saved.data(), bytes));
    std::vector<signatures> cached;
    for (std::int32_t layer = 0; layer < 5; ++layer) {
        cached.push_back(sign(owner, 0, layer, text));
    }

    tokens other(text.begin(), text.begin() + 650);
    other[300] = -5; // another question about the same document
    must(owner.ledger.restore(1, saved.data(), bytes));
    for (std::int32_t layer = 0; layer < 5; ++layer) {
        const signatures own = sign(owner, 1, layer, other);
        const std::int32_t rows = owner.rows(1, layer).length();
        CHECK(rows == (layer == 0 ? 300 : layer < 3 ? 100 : 50));
        // Full pages are those of the other request; its last one has gone on, so it is no longer the same.
        CHECK(common(own, cached[static_cast<std::size_t>(layer)]) == static_cast<std::size_t>(rows / page));
        CHECK(owner.rows(1, layer).fork_pages({page, 0, 0}).copied == (rows % page != 0 ? rows / page : -1));
    }
    open_step step(owner, {{1, request_tag::chunk, range(300, 400), {301}}}, 1);
    CHECK(step.write_rows(4) == positions{50});
    step.commit();
    // A request that was rolled back there, and one that ran by itself, are the same.
    must(owner.ledger.rollback(0, 300));
    prefill(owner, 2, 300, first, second);
    for (std::int32_t layer = 0; layer < 5; ++layer) {
        CHECK(sign(owner, 2, layer, text) == sign(owner, 0, layer, text));
    }
    std::vector<std::byte> again(bytes);
    must(owner.ledger.save(0, again.data(), bytes));
    CHECK(again == saved);
    must(owner.ledger.save(2, again.data(), bytes));
    CHECK(again == saved);
}

TEST_CASE("signing and saving what isn't there", "[ledger]") {
    owned_ledger owner = make_ledger({0, 2}, 5, set_relation::nested);
    must(owner.ledger.admit(0));
    prefill(owner, 0, 9, range(0, 9), range(0, 9));
    const tokens text(9, 1);
    signatures out(3);
    std::int32_t count = -7;
    const auto refuse = [&](std::int32_t request, std::int32_t layer, const std::int32_t* of,
                            std::int32_t rows, up::page_signature* to, std::int32_t capacity,
                            status_code code, const std::string& argument) {
        check_refused(owner.ledger.sign_pages(request, layer, signer, of, rows, to, capacity, count), code,
                      argument, request, layer);
        CHECK(count == -7);
        CHECK(out == signatures(3));
    };
    const auto bad = status_code::invalid_argument;
    refuse(1, 0, text.data(), page, out.data(), 3, status_code::unknown_request, "request");
    refuse(0, 5, text.data(), page, out.data(), 3, status_code::out_of_range, "layer");
    refuse(0, 4, text.data(), 0, out.data(), 3, bad, "page_tokens");
    refuse(0, 4, text.data(), page, out.data(), 2, status_code::capacity_exceeded, "capacity");
    refuse(0, 4, nullptr, page, out.data(), 3, bad, "tokens");
    refuse(0, 4, text.data(), page, nullptr, 3, bad, "signatures");
    std::size_t bytes = 77;
    std::vector<std::byte> saved(1000);
    check_refused(owner.ledger.saved_prefix_bytes(0, 10, bytes), status_code::out_of_range, "num_tokens", 0);
    check_refused(owner.ledger.save_prefix(0, 10, saved.data(), 1000), status_code::out_of_range,
                  "num_tokens", 0);
    check_refused(owner.ledger.save_prefix(0, -1, saved.data(), 1000), status_code::out_of_range,
                  "num_tokens", 0);
    CHECK(bytes == 77);
    CHECK(saved == std::vector<std::byte>(1000));
}
