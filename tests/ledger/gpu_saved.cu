// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Requests as flat buffers on the device: the host's bytes, restored by either, and every buffer that is
// none.

#include "ledger/forged.hpp"
#include "ledger/gpu_twins.cuh"

using namespace ledger_test;
using uniprefill_test::captured_graph;
using uniprefill_test::has_device;
using up::ledger_complaint;
using up::request_tag;
using up::set_relation;
using up::status_code;

namespace {

using numbers = std::vector<std::int32_t>;

/// Buffers in device memory at equal distances, behind which nothing may be written.
class saved_buffers {
  public:
    saved_buffers(std::size_t count, std::size_t stride)
        : stride_(stride)
        , content_(count * stride + 8, std::byte{0x5a})
        , there_(content_)
        , written_(std::vector<std::uint64_t>(count, 77)) {}

    std::byte* data() const { return there_.data(); }
    std::uint64_t* sizes() const { return written_.data(); }
    std::size_t stride() const { return stride_; }

    /// Puts @p saved into place @p index, as far as there is room.
    void fill(std::size_t index, const bytes& saved) {
        std::copy_n(saved.begin(), std::min(saved.size(), stride_),
                    content_.begin() + static_cast<std::ptrdiff_t>(index * stride_));
        sizes_.resize(std::max(sizes_.size(), index + 1));
        sizes_[index] = saved.size();
    }
    void upload() {
        there_.set(content_);
        written_.set(sizes_);
    }
    /// What the device wrote is just these; empty ones are places where it wrote nothing.
    void check(const std::vector<bytes>& expected) {
        for (std::size_t i = 0; i < expected.size(); ++i) {
            fill(i, expected[i]);
        }
        REQUIRE(written_.get() == sizes_);
        check_content();
    }
    void check_content() const { REQUIRE((there_.get() == content_)); }

  private:
    std::size_t stride_;
    bytes content_;
    std::vector<std::uint64_t> sizes_;
    device_array<std::byte> there_;
    device_array<std::uint64_t> written_;
};

struct saved_shape {
    const char* name;
    set_relation relation;
    numbers layer_sets;
    std::int32_t max_tokens;
};
const saved_shape shapes[] = {
    {"nested", set_relation::nested, {0, 0, 1, 1, 2, 3}, 1500},
    {"independent", set_relation::independent, {0, 1, 1, 2, 0}, 1500},
    {"one set", set_relation::nested, {0, 0}, 300},
    {"long", set_relation::nested, {0, 1, 2}, 150'000}, // more counts than a thread block has threads
    {"long and independent", set_relation::independent, {1, 0, 2}, 150'000},
};

up::ledger_limits bounds_of(const saved_shape& shape, std::int32_t max_requests) {
    return {max_requests, shape.max_tokens, static_cast<std::int32_t>(shape.layer_sets.size()),
            *std::max_element(shape.layer_sets.begin(), shape.layer_sets.end()) + 1, shape.relation};
}

bytes save_on_host(ledger_twins& twins, std::int32_t id, std::int32_t num_tokens) {
    std::size_t size = 0;
    must(twins.host().saved_prefix_bytes(id, num_tokens, size));
    REQUIRE(size <= up::drop_ledger<backend_cuda>::max_saved_bytes(twins.bounds()));
    bytes saved(size);
    must(twins.host().save_prefix(id, num_tokens, saved.data(), size));
    return saved;
}

/// Layers 0 to 4, of which 0 and 2 select. Request 0: 700 positions, the first 600 with drops.
ledger_twins make_server(set_relation relation, std::int32_t max_requests) {
    const numbers sets = relation == set_relation::nested ? numbers{0, 1, 1, 2, 2} : numbers{0, 1, 0, 2, 0};
    ledger_twins twins({max_requests, 1000, 5, 3, relation}, sets);
    twins.admit({0});
    rows_batch prompt, fewer, fewest, more;
    prompt.add(0, request_tag::chunk, range(0, 300));
    fewer.add(0, request_tag::chunk, every(3, 0, 300));
    twins.run_step(prompt, 1, fewer);
    prompt = {};
    prompt.add(0, request_tag::chunk, range(300, 600));
    fewest.add(0, request_tag::chunk, every(6, 300, 600));
    twins.run_step(prompt, 3, fewest);
    more.add(0, request_tag::verify, range(600, 700));
    twins.run_step(more, 1, more);
    return twins;
}

} // namespace

TEST_CASE("a request saved on the device is what the host saves, and either restores it") {
    if (!has_device()) {
        return;
    }
    property::random_numbers random(property::base_seed());
    for (const saved_shape& shape : shapes) {
        INFO(shape.name << ", seed " << property::base_seed());
        const bool is_long = shape.max_tokens > 10'000;
        const std::int32_t requests = is_long ? 3 : 9;
        for (int round = 0; round < property::scaled(is_long ? 4 : 40); ++round) {
            ledger_twins twins(bounds_of(shape, requests), shape.layer_sets);
            ledger_twins others(bounds_of(shape, requests), shape.layer_sets);
            numbers ids, left;
            for (std::int32_t id = 0; id < requests; ++id) {
                if (random.chance(0.8)) {
                    const std::int32_t tokens = twins.grow_at_random(id, is_long ? 50'000 : 400, random);
                    ids.push_back(id);
                    left.push_back(random.chance(0.5) ? tokens : random.between(0, tokens));
                } else {
                    ids.push_back(-1);
                    left.push_back(9);
                }
            }
            const auto count = static_cast<std::int32_t>(ids.size());
            std::size_t longest = 48; // no more room than the longest needs
            std::vector<bytes> expected;
            for (std::size_t i = 0; i < ids.size(); ++i) {
                expected.push_back(ids[i] < 0 ? bytes() : save_on_host(twins, ids[i], left[i]));
                longest = std::max(longest, expected.back().size());
            }
            saved_buffers saved(ids.size(), longest);
            const std::int32_t* const ids_there = twins.upload(ids);
            const std::int32_t* const left_there = twins.upload(left);
            launches_only([&] {
                return twins.device.save(ids_there, left_there, count, saved.data(), saved.stride(),
                                         saved.sizes(), nullptr);
            });
            saved.check(expected);
            twins.check_states();

            // To other slots of another ledger.
            numbers to(ids);
            for (std::int32_t& id : to) {
                id = id < 0 ? -1 : requests - 1 - id;
            }
            others.admit(to);
            const std::int32_t* const to_there = others.upload(to);
            launches_only([&] {
                return others.device.restore(to_there, count, saved.data(), saved.stride(),
                                             random.chance(0.5) ? saved.sizes() : nullptr, nullptr);
            });
            for (std::size_t i = 0; i < ids.size(); ++i) {
                if (to[i] >= 0) {
                    must(others.host().restore(to[i], expected[i].data(), expected[i].size()));
                }
            }
            others.check_states();
            REQUIRE(twins.fault() == ledger_complaint::none);
            REQUIRE(others.fault() == ledger_complaint::none);

            // All of them, and nobody wants to know how many bytes.
            std::vector<bytes> whole;
            for (const std::int32_t id : ids) {
                whole.push_back(id < 0 ? bytes() : save_on_host(twins, id, twins.held(id, 0).num_tokens()));
            }
            const std::size_t most = up::drop_ledger<backend_cuda>::max_saved_bytes(twins.bounds());
            saved_buffers again(ids.size(), (most + 7) / 8 * 8);
            must(
                twins.device.save(ids_there, nullptr, count, again.data(), again.stride(), nullptr, nullptr));
            for (std::size_t i = 0; i < ids.size(); ++i) {
                again.fill(i, whole[i]);
            }
            again.check_content();
        }
    }
}

TEST_CASE("a device refuses damaged, cut and foreign buffers as the host does, and changes nothing") {
    if (!has_device()) {
        return;
    }
    for (const set_relation relation : {set_relation::nested, set_relation::independent}) {
        constexpr std::int32_t slots = 65; // slot 0 has the good one
        ledger_twins twins = make_server(relation, slots);
        numbers empty;
        for (std::int32_t id = 1; id < slots; ++id) {
            empty.push_back(id);
        }
        twins.admit(empty);
        const bytes good = save_on_host(twins, 0, 700);
        const std::size_t planes = 48 + 5 * 4 + 3 * 4;
        REQUIRE(good.size() == planes + 2 * 8 * 10);
        std::vector<bytes> cases{good};
        const auto forge = [&](std::size_t at, auto value) {
            bytes forged = good;
            put(forged, at, value);
            sign(forged);
            cases.push_back(forged);
        };
        forge(0, std::uint64_t{0x5055504650475244}); // the other byte order
        forge(24, std::uint32_t{2});
        forge(8, std::uint64_t{good.size() + 8});
        forge(8, ~std::uint64_t{0});
        for (const std::int32_t layers : {4, 6, -1, 2'147'483'647}) {
            forge(36, layers);
        }
        for (const std::int32_t sets : {0, 2, 4, -1, 2'147'483'647}) {
            forge(40, sets);
        }
        forge(44, 1 - static_cast<std::int32_t>(relation));
        forge(44, -1);
        for (const std::int32_t tokens : {1001, -1, 599, 2'147'483'647}) {
            forge(28, tokens);
        }
        for (const std::int32_t stored : {-64, -1, 700, 0, 599, 640, 641, 2'147'483'647}) {
            forge(32, stored);
        }
        for (std::size_t layer = 0; layer < 5; ++layer) {
            forge(48 + 4 * layer, 3);
        }
        for (std::size_t set = 0; set < 3; ++set) {
            forge(48 + 5 * 4 + 4 * set, 101);
        }
        forge(planes, std::uint64_t{0});
        forge(planes + 9 * 8, ~std::uint64_t{0}); // positions behind dense_from
        bytes third = good;                       // nested: the number 3, of three sets
        put(third, planes, ~std::uint64_t{0});
        put(third, planes + 80, ~std::uint64_t{0});
        sign(third);
        cases.push_back(third);
        bytes swapped = good;
        std::swap_ranges(swapped.end() - 8, swapped.end(), swapped.end() - 32);
        cases.push_back(swapped);
        for (std::size_t size = 0; size < good.size(); size += 5) { // cut anywhere
            cases.emplace_back(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size));
        }
        cases.push_back(good);
        cases.back().resize(good.size() + 8);
        for (std::size_t bit = 0; bit < 8 * good.size(); bit += 7) { // one bit anywhere
            cases.push_back(good);
            cases.back()[bit / 8] ^= std::byte{1} << (bit % 8);
        }
        property::random_numbers random(property::base_seed());
        for (int i = 0; i < property::scaled(4000, 100); ++i) {
            cases.push_back(forge_at_random(good, random));
        }

        // Alone, so that each complaint is seen; then the last ones side by side.
        std::size_t taken = 0;
        std::size_t refused = 0;
        const std::size_t alone = std::min<std::size_t>(cases.size(), 420);
        for (std::size_t first = 0; first < cases.size();) {
            const std::size_t together = first < alone ? 1 : std::min<std::size_t>(64, cases.size() - first);
            saved_buffers buffers(together, (good.size() + 8 + 15) / 8 * 8);
            up::status worst = up::success();
            for (std::size_t i = 0; i < together; ++i) {
                const bytes& saved = cases[first + i];
                buffers.fill(i, saved);
                const std::byte* const address = saved.empty() ? good.data() : saved.data();
                const up::status came =
                    twins.host().restore(static_cast<std::int32_t>(i) + 1, address, saved.size());
                (came.ok() ? taken : refused) += 1;
                worst = worst.ok() ? came : worst;
            }
            buffers.upload();
            must(twins.device.restore(twins.upload(empty), static_cast<std::int32_t>(together),
                                      buffers.data(), buffers.stride(), buffers.sizes(), nullptr));
            twins.check_refusal(worst);
            twins.check_states();
            if (taken > 0) {
                must(twins.host().rollback(empty.data(), numbers(64).data(), 64));
                must(twins.device.rollback(twins.upload(empty), twins.upload(numbers(64)), 64, nullptr));
                twins.check_states();
            }
            twins.forget_uploads();
            first += together;
        }
        REQUIRE(taken > 1);
        REQUIRE(refused > 100);
    }
}

TEST_CASE("saving and restoring on a device at the wrong time") {
    if (!has_device()) {
        return;
    }
    ledger_twins twins = make_server(set_relation::nested, 6);
    twins.admit({1, 2, 4, 5});
    const bytes good = save_on_host(twins, 0, 700);
    saved_buffers buffers(1, good.size() + 8);
    const auto save = [&](std::int32_t id, const std::int32_t* num_tokens, std::size_t stride) {
        must(twins.device.save(twins.upload(numbers{id}), num_tokens, 1, buffers.data(), stride,
                               buffers.sizes(), nullptr));
    };
    const auto untouched = [&](const up::status& expected) {
        REQUIRE_FALSE(expected.ok());
        twins.check_refusal(expected);
        twins.check_states();
        buffers.check({bytes()});
    };
    bytes room(good.size());
    save(3, nullptr, buffers.stride());
    untouched(twins.host().save(3, room.data(), room.size()));
    save(99, nullptr, buffers.stride());
    untouched(twins.host().save(99, room.data(), room.size()));
    save(0, nullptr, good.size() - 8);
    untouched(twins.host().save(0, room.data(), room.size() - 8));
    for (const std::int32_t tokens : {701, -1}) {
        save(0, twins.upload(numbers{tokens}), buffers.stride());
        untouched(twins.host().save_prefix(0, tokens, room.data(), room.size()));
    }

    buffers.fill(0, good);
    buffers.upload();
    const auto restore = [&](std::int32_t id) {
        must(twins.device.restore(twins.upload(numbers{id}), 1, buffers.data(), buffers.stride(),
                                  buffers.sizes(), nullptr));
    };
    const auto refused = [&](std::int32_t id) {
        restore(id);
        twins.check_refusal(twins.host().restore(id, good.data(), good.size()));
        twins.check_states();
    };
    refused(0);  // has positions
    refused(3);  // not admitted
    refused(99); // no slot
    // In an open step.
    rows_batch batch;
    batch.add(0, request_tag::decode, {700});
    batch.add(1, request_tag::prefill, {0});
    twins.with_open_step(batch, [&] {
        save(0, nullptr, buffers.stride());
        twins.check_refusal(twins.host().save(0, room.data(), room.size()));
        restore(1);
        twins.check_refusal(twins.host().restore(1, good.data(), good.size()));
    });
    twins.check_states();

    // The others go on; a slot listed twice is restored once.
    saved_buffers several(4, good.size());
    bytes damaged = good;
    damaged[100] ^= std::byte{1};
    several.fill(0, good);
    several.fill(1, damaged);
    several.fill(2, good);
    several.fill(3, good);
    several.upload();
    must(twins.device.restore(twins.upload(numbers{1, 2, -1, 4}), 4, several.data(), several.stride(),
                              several.sizes(), nullptr));
    must(twins.host().restore(1, good.data(), good.size()));
    must(twins.host().restore(4, good.data(), good.size()));
    twins.check_refusal(twins.host().restore(2, damaged.data(), damaged.size()));
    twins.check_states();
    several.fill(1, good);
    several.upload();
    must(twins.device.restore(twins.upload(numbers{2, 2}), 2, several.data(), several.stride(),
                              several.sizes(), nullptr));
    must(twins.host().restore(2, good.data(), good.size()));
    REQUIRE(twins.fault_status().code == status_code::wrong_state);
    REQUIRE(twins.fault_status().request == 2);
    twins.forget_fault();
    twins.check_states();

    // More bytes than a buffer has room for, by the array or by the buffer itself.
    saved_buffers small(1, good.size());
    bytes longer = good;
    put(longer, 8, std::uint64_t{good.size() + 8});
    for (const bytes& saved : {good, longer}) {
        small.fill(0, saved);
        small.upload();
        const std::uint64_t* const sizes = twins.upload(std::vector<std::uint64_t>{good.size() + 8});
        must(twins.device.restore(twins.upload(numbers{5}), 1, small.data(), small.stride(),
                                  saved == good ? sizes : nullptr, nullptr));
        REQUIRE(twins.fault() == ledger_complaint::saved_bytes);
        REQUIRE(twins.fault_status().request == 5);
        twins.forget_fault();
        twins.check_states();
    }

    // A buffer that is no saved request, and nobody knows how long it was.
    for (const std::byte value : {std::byte{0}, std::byte{0x5a}, std::byte{0xff}}) {
        const bytes foreign(good.size(), value);
        small.fill(0, foreign);
        small.upload();
        must(twins.device.restore(twins.upload(numbers{5}), 1, small.data(), small.stride(), nullptr,
                                  nullptr));
        twins.check_refusal(twins.host().restore(5, foreign.data(), foreign.size()));
        twins.check_states();
    }

    // What the host can see.
    const std::int32_t* const ids = twins.upload(numbers{0, 1});
    const auto code = [](const up::status& came) { return came.code; };
    REQUIRE(code(twins.device.save(ids, nullptr, 1, nullptr, 800, nullptr, nullptr)) ==
            status_code::invalid_argument);
    REQUIRE(code(twins.device.save(ids, nullptr, 1, buffers.data() + 4, 800, nullptr, nullptr)) ==
            status_code::misaligned);
    REQUIRE(code(twins.device.save(ids, nullptr, 2, buffers.data(), 804, nullptr, nullptr)) ==
            status_code::misaligned);
    REQUIRE(code(twins.device.save(nullptr, nullptr, 1, buffers.data(), 800, nullptr, nullptr)) ==
            status_code::invalid_argument);
    REQUIRE(code(twins.device.save(ids, nullptr, 7, buffers.data(), 800, nullptr, nullptr)) ==
            status_code::invalid_argument);
    REQUIRE(code(twins.device.restore(ids, 1, nullptr, 800, nullptr, nullptr)) ==
            status_code::invalid_argument);
    REQUIRE(code(twins.device.restore(ids, 1, buffers.data(), 44, nullptr, nullptr)) ==
            status_code::misaligned);
    up::drop_ledger<backend_cuda> unbound;
    REQUIRE(code(unbound.save(ids, nullptr, 1, buffers.data(), 800, nullptr, nullptr)) ==
            status_code::wrong_state);
    must(twins.device.save(nullptr, nullptr, 0, nullptr, 0, nullptr, nullptr));
    must(twins.device.restore(nullptr, 0, nullptr, 0, nullptr, nullptr));
    REQUIRE(twins.fault() == ledger_complaint::none);
    twins.check_states();
}

TEST_CASE("requests are swapped out and in by one graph") {
    if (!has_device()) {
        return;
    }
    ledger_twins twins = make_server(set_relation::independent, 4);
    const std::size_t stride = up::drop_ledger<backend_cuda>::max_saved_bytes(twins.bounds()) / 8 * 8 + 8;
    saved_buffers buffers(2, stride);
    device_array<std::int32_t> from(numbers{-1, -1}), to(numbers{-1, -1});
    captured_graph graph([&](cudaStream_t stream) {
        must(twins.device.save(from.data(), nullptr, 2, buffers.data(), stride, buffers.sizes(), stream));
        must(twins.device.release(from.data(), 2, stream));
        must(twins.device.admit(to.data(), 2, stream));
        must(twins.device.restore(to.data(), 2, buffers.data(), stride, nullptr, stream));
    });
    graph.replay();
    twins.check_states();
    property::random_numbers random(property::base_seed());
    std::int32_t held = 0;
    for (int round = 0; round < property::scaled(12); ++round) {
        const std::int32_t next = (held + 1) % 4;
        if (round % 2 == 0) {
            rows_batch rows, fewer;
            const std::int32_t tokens = twins.held(held, 0).num_tokens();
            rows.add(held, request_tag::chunk, range(tokens, tokens + 20));
            fewer.add(held, request_tag::chunk, every(2, tokens, tokens + 20));
            twins.run_step(rows, 1, fewer);
        }
        const bytes saved = save_on_host(twins, held, twins.held(held, 0).num_tokens());
        must(twins.host().release(held));
        must(twins.host().admit(next));
        must(twins.host().restore(next, saved.data(), saved.size()));
        const bool first = random.chance(0.5);
        from.set(first ? numbers{held, -1} : numbers{-1, held});
        to.set(first ? numbers{next, -1} : numbers{-1, next});
        graph.replay();
        twins.check_states();
        held = next;
    }
    REQUIRE(twins.fault() == ledger_complaint::none);
}
