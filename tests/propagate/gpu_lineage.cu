// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The lineage on a device tells what the host's tells, layer after layer, and the policies move rows on it as
// they do on the host.

#include "device_tensors.cuh"
#include "steps.hpp"
#include "support/cuda_calls.hpp"

#include <uniprefill/propagate/lineage.cuh>
#include <uniprefill/propagate/policy.hpp>

#include <functional>
#include <memory>

using namespace propagate_test;
using uniprefill_test::captured_graph;
using uniprefill_test::device_array;
using uniprefill_test::has_device;

namespace {

/// A step of random requests, on the host and on a device.
struct two_steps : packed_step {
    device_array<up::request_tag> on_tags;
    device_array<std::int32_t> on_cu_seqlens, on_positions, on_segment_request;

    two_steps(std::mt19937& random, std::int32_t requests, std::uint32_t longest)
        : packed_step(random, requests, longest)
        , on_tags(tags)
        , on_cu_seqlens(cu_seqlens)
        , on_positions(positions)
        , on_segment_request(segment_request) {
        bounds.max_rows += 10;
    }
    [[nodiscard]] up::batch_view device_view(bool with_segments) const {
        up::batch_view batch = view(with_segments);
        batch.space = up::memory_space::device;
        batch.tags = on_tags.data();
        batch.cu_seqlens = on_cu_seqlens.data();
        batch.positions = on_positions.data();
        if (with_segments) {
            batch.cu_segments = batch.cu_seqlens;
            batch.segment_request = on_segment_request.data();
        }
        return batch;
    }
};

/// Lineages of both backends over one step, and their memory.
struct two_lineages {
    two_steps step;
    bool with_segments;
    up::row_lineage<> host;
    up::row_lineage<up::backend::cuda> device;
    lineage_memory host_memory;
    device_array<unsigned char> device_bytes;

    two_lineages(std::mt19937& random, std::int32_t requests, std::uint32_t longest, bool segments,
                 std::int32_t max_ctas)
        : step(random, requests, longest)
        , with_segments(segments)
        , host(step.bounds)
        , device(step.bounds, current_device(max_ctas))
        , host_memory(host.state_bytes())
        , device_bytes(device.state_bytes()) {
        begin();
    }
    void begin() {
        check_ok(host.begin(step.view(with_segments), host_memory.memory, {}));
        check_ok(device.begin(step.device_view(with_segments), {device_bytes.data(), device_bytes.size()},
                              nullptr));
    }
    [[nodiscard]] std::vector<std::int32_t> offsets() const { return offsets_of(host.current()); }
    /// Keeps of the current rows as a selection of the device's bound.
    [[nodiscard]] std::unique_ptr<device_keep_set> on_device(const keep_set& kept) const {
        auto made = std::make_unique<device_keep_set>(device.current().num_rows, host.current().num_requests);
        made->set(kept);
        return made;
    }
    void compare() const {
        const up::batch_view want = host.current();
        const up::batch_view got = device.current();
        const auto fetch = [](const std::int32_t* values, std::size_t count) {
            uniprefill_test::check_cuda(cudaDeviceSynchronize(), "synchronize");
            std::vector<std::int32_t> copy(count);
            uniprefill_test::check_cuda(
                cudaMemcpy(copy.data(), values, count * sizeof(std::int32_t), cudaMemcpyDeviceToHost),
                "fetch");
            return copy;
        };
        const auto requests = static_cast<std::size_t>(want.num_requests);
        const auto rows = static_cast<std::size_t>(want.num_rows);
        const auto bound = static_cast<std::size_t>(got.num_rows);
        REQUIRE(got.space == up::memory_space::device);
        REQUIRE(bound >= rows);
        REQUIRE(got.tags == step.on_tags.data());
        REQUIRE(fetch(got.cu_seqlens, requests + 1) == offsets());
        REQUIRE((got.cu_segments != nullptr) == with_segments);
        if (with_segments) {
            REQUIRE(fetch(got.cu_segments, requests + 1) == offsets());
        }
        std::vector<std::int32_t> positions(want.positions, want.positions + rows);
        std::vector<std::int32_t> originals;
        for (std::size_t row = 0; row < rows; ++row) {
            originals.push_back(host.original_rows() != nullptr ? host.original_rows()[row]
                                                                : static_cast<std::int32_t>(row));
        }
        const up::row_map map = device.map();
        REQUIRE(map.space == up::memory_space::device);
        REQUIRE(map.num_rows == step.rows());
        REQUIRE(map.num_kept == got.num_rows);
        REQUIRE(map.identity == device.holds_every_row());
        if (!map.identity) {
            positions.resize(bound, 0);
            originals.resize(bound, -1);
            REQUIRE(fetch(map.kept_to_old, bound) == originals);
            REQUIRE(fetch(map.kept_count, 1)[0] == want.num_rows);
        }
        REQUIRE(fetch(got.positions, bound) == positions);
    }
};

} // namespace

TEST_CASE("row_lineage on a device: random drops and revivals") {
    if (!has_device()) {
        return;
    }
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()));
    for (const std::uint32_t i : spread_cases(60, 3)) {
        two_lineages both(random, static_cast<std::int32_t>(1 + random() % 6), i % 5 == 0 ? 3000 : 100,
                          i % 2 == 0, static_cast<std::int32_t>(i % 3));
        INFO("case " << i << ": " << both.step.rows() << " rows");
        both.compare();
        std::vector<std::unique_ptr<device_keep_set>> alive; // kernels read them when they run
        for (std::uint32_t layer = 0; layer < 8; ++layer) {
            if (random() % 4 == 0) {
                check_ok(both.host.revive({}));
                check_ok(both.device.revive(nullptr));
                both.compare();
            }
            const keep_set kept(
                keeps_of_kind(random, both.host.current().num_rows, static_cast<std::uint32_t>(random())),
                both.offsets());
            if (random() % 6 == 0) {
                const up::batch_view now = both.device.current();
                check_ok(both.device.apply(up::selection::keep_all(now.num_requests, now.num_segments,
                                                                   now.num_rows, up::memory_space::device),
                                           nullptr));
            } else {
                alive.push_back(both.on_device(kept));
                check_ok(both.device.apply(alive.back()->view, nullptr));
                check_ok(both.host.apply(kept.view, {}));
            }
            both.compare();
        }
    }
}

TEST_CASE("row_lineage on a device: offsets and entries that make no sense") {
    if (!has_device()) {
        return;
    }
    std::mt19937 random(3);
    two_lineages both(random, 3, 50, true, 0);
    const std::int32_t rows = both.step.rows();
    device_keep_set hostile(rows, 3);
    std::vector<std::int32_t> map(static_cast<std::size_t>(rows), INT32_MAX);
    map[0] = -3;
    hostile.set_raw(map, {INT32_MIN, INT32_MAX, -1, INT32_MAX});
    const uniprefill_test::cuda_calls before = uniprefill_test::cuda_calls::now();
    check_ok(both.device.apply(hostile.view, nullptr));
    CHECK(before.since().empty());
    const up::batch_view now = both.device.current();
    uniprefill_test::check_cuda(cudaDeviceSynchronize(), "synchronize");
    std::vector<std::int32_t> offsets(4), originals(static_cast<std::size_t>(rows));
    cudaMemcpy(offsets.data(), now.cu_seqlens, 16, cudaMemcpyDeviceToHost);
    cudaMemcpy(originals.data(), both.device.original_rows(), originals.size() * 4, cudaMemcpyDeviceToHost);
    CHECK(offsets == std::vector<std::int32_t>{0, rows, 0, rows});
    CHECK(originals == std::vector<std::int32_t>(static_cast<std::size_t>(rows), -1));
}

TEST_CASE("row_lineage on a device: calls out of order and selections of other rows are refused") {
    if (!has_device()) {
        return;
    }
    std::mt19937 random(4);
    two_lineages both(random, 3, 50, false, 0);
    const std::int32_t rows = both.step.rows();
    up::row_lineage<up::backend::cuda> fresh(both.step.bounds, current_device());
    const auto all = up::selection::keep_all(3, 3, rows, up::memory_space::device);
    CHECK(fresh.apply(all, nullptr).code == up::status_code::wrong_state);
    CHECK(fresh.revive(nullptr).code == up::status_code::wrong_state);
    const up::workspace memory{both.device_bytes.data(), both.device_bytes.size()};
    const auto begin = [&](const std::string& argument, const std::function<void(up::batch_view&)>& spoil) {
        up::batch_view step = both.step.device_view(true);
        spoil(step);
        CHECK(fresh.begin(step, memory, nullptr).argument == argument);
        CHECK_FALSE(fresh.has_begun());
    };
    begin("batch.space", [](up::batch_view& b) { b.space = up::memory_space::host; });
    begin("batch.num_requests", [](up::batch_view& b) { b.num_requests = 4; });
    begin("batch.num_requests", [](up::batch_view& b) { b.num_requests = -1; });
    begin("batch.num_segments", [](up::batch_view& b) { b.num_segments = 4; });
    begin("batch.num_rows", [](up::batch_view& b) { b.num_rows += 11; });
    begin("batch.tags", [](up::batch_view& b) { b.tags = nullptr; });
    begin("batch.cu_seqlens", [](up::batch_view& b) { b.cu_seqlens = nullptr; });
    begin("batch.positions", [](up::batch_view& b) { b.positions = nullptr; });
    begin("batch.cu_segments", [](up::batch_view& b) { b.segment_request = nullptr; });
    begin("batch.num_segments", [](up::batch_view& b) {
        b.cu_segments = b.segment_request = nullptr;
        b.num_segments = 2;
    });
    CHECK(fresh.begin(both.step.device_view(true), {memory.data(), 100}, nullptr).code ==
          up::status_code::workspace_too_small);
    const device_keep_set kept(
        keep_set(std::vector<bool>(static_cast<std::size_t>(rows), true), both.step.cu_seqlens));
    auto spoiled = spoiled_selections(up::memory_space::host);
    spoiled.push_back({"decided", [](up::selection& s) { s.kept_bound = -1; }});
    for (const auto& [argument, spoil] : spoiled) {
        up::selection decided = kept.view;
        spoil(decided);
        CHECK(both.device.apply(decided, nullptr).argument == std::string(argument));
        CHECK(both.device.holds_every_row());
    }
    up::limits wrong = both.step.bounds;
    wrong.num_layers = 0;
    CHECK((up::row_lineage<up::backend::cuda>(wrong).state_bytes() == 0));
}

namespace {

__global__ void run_layer(std::uint64_t* values, const std::int32_t* count, std::int32_t layer) {
    for (std::int32_t row = static_cast<std::int32_t>(threadIdx.x); row < *count;
         row += static_cast<std::int32_t>(blockDim.x)) {
        values[row] = layer_of(values[row], layer);
    }
}

/// Runs a model of 12 layers, of which every third selects, on both backends, and compares the rows that
/// live.
template <class Policy>
void run_model(std::mt19937& random) {
    two_lineages both(random, static_cast<std::int32_t>(1 + random() % 4), 900, false, 0);
    const std::int32_t rows = both.step.rows();
    std::vector<std::uint64_t> working(static_cast<std::size_t>(rows)), full(working.size());
    for (std::size_t row = 0; row < working.size(); ++row) {
        working[row] = full[row] = 1000 * row;
    }
    device_array<std::uint64_t> on_working(working), on_full(full);
    const auto tensor_of = [&](std::uint64_t* now, std::uint64_t* frozen) {
        return up::row_tensor{up::as_byte_rows(now, rows, 1),
                              Policy::revives ? up::as_byte_rows(frozen, rows, 1) : up::byte_rows{}};
    };
    // Two tensors, the second without rows worth moving: the policies hand over lists.
    const up::row_tensor host[] = {tensor_of(working.data(), full.data()),
                                   {{nullptr, 0, 0, rows}, {nullptr, 0, 0, rows}}};
    const up::row_tensor device[] = {tensor_of(on_working.data(), on_full.data()),
                                     {{nullptr, 0, 0, rows}, {nullptr, 0, 0, rows}}};
    std::vector<std::unique_ptr<device_keep_set>> alive;
    for (std::int32_t layer = 0; layer < 12; ++layer) {
        if (layer % 3 == 2) {
            check_ok(Policy::enter(both.host, host, 2, {}));
            check_ok(Policy::enter(both.device, device, 2, nullptr));
            const keep_set kept(random_keeps(random, both.host.current().num_rows), both.offsets());
            alive.push_back(both.on_device(kept));
            check_ok(Policy::leave(both.host, kept.view, host, 2, {}));
            check_ok(Policy::leave(both.device, alive.back()->view, device, 2, nullptr));
        }
        auto* values = static_cast<std::uint64_t*>(Policy::rows_of(both.host, host[0]).data);
        for (std::int32_t row = 0; row < both.host.current().num_rows; ++row) {
            values[row] = layer_of(values[row], layer);
        }
        auto* on_values = static_cast<std::uint64_t*>(Policy::rows_of(both.device, device[0]).data);
        const up::batch_view now = both.device.current();
        run_layer<<<1, 256>>>(on_values, now.cu_seqlens + now.num_requests, layer);
        both.compare();
        const auto count = static_cast<std::size_t>(both.host.current().num_rows);
        std::vector<std::uint64_t> got(count);
        uniprefill_test::check_cuda(
            cudaMemcpy(got.data(), on_values, count * sizeof(std::uint64_t), cudaMemcpyDeviceToHost),
            "fetch");
        REQUIRE(got == std::vector<std::uint64_t>(values, values + count));
    }
}

} // namespace

TEST_CASE("policies on a device: rows carry what the layers that they met made of them") {
    if (!has_device()) {
        return;
    }
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()) + 1);
    for (const std::uint32_t i : spread_cases(30, 3)) {
        INFO("model " << i);
        run_model<up::cumulative>(random);
        run_model<up::revive>(random);
    }
}

TEST_CASE("policies on a device: two selecting layers captured once, replayed with other decisions") {
    if (!has_device()) {
        return;
    }
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()) + 2);
    two_lineages both(random, 2, 2000, true, 0);
    const std::int32_t rows = both.step.rows();
    const tensor initial(rows, 4096, 4096, 9);
    device_tensor on_device(initial);
    device_keep_set first(rows, 2), second(rows, 2);
    const up::row_tensor moved{on_device.view(), {}};
    captured_graph graph([&](cudaStream_t stream) {
        check_ok(up::cumulative::leave(both.device, first.view, &moved, 1, stream));
        check_ok(up::cumulative::leave(both.device, second.view, &moved, 1, stream));
    });
    for (const std::uint32_t i : spread_cases(16, 3)) {
        tensor values = initial;
        on_device.set(values.bytes);
        check_ok(both.host.revive({}));
        const up::row_tensor on_host{values.view(), {}};
        const keep_set one(keeps_of_kind(random, rows, i), both.offsets());
        first.set(one);
        check_ok(up::cumulative::leave(both.host, one.view, &on_host, 1, {}));
        const keep_set two(keeps_of_kind(random, both.host.current().num_rows, i / 2), both.offsets());
        second.set(two);
        check_ok(up::cumulative::leave(both.host, two.view, &on_host, 1, {}));
        graph.replay();
        INFO("replay " << i);
        both.compare();
        REQUIRE(on_device.bytes() == values.bytes);
    }
}
