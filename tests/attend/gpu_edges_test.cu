// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Where attention on the device has few keys or none, numbers are extreme, something isn't a number, or
// arrays make no sense.

#include "gpu_contracts.cuh"

#include <limits>

using namespace attend_test;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

template <class T>
bool all_finite(const output<T>& got) {
    return std::all_of(got.rows.begin(), got.rows.end(),
                       [](T value) { return std::isfinite(up::to_float(value)); }) &&
           std::none_of(got.lse.begin(), got.lse.end(),
                        [](float lse) { return std::isnan(lse) || lse == infinity; });
}

/// Fills what a request has, cached and in the step, with NaN.
template <class T>
void spoil_request(scene<T>& what, std::size_t index, bool queries) {
    const model& shape = what.keys.shape();
    const T nan = up::from_float<T>(std::numeric_limits<float>::quiet_NaN());
    for (step<T>* const part : {&what.keys, &what.values}) {
        auto& own = part->data[index].keys;
        std::fill(own.begin(), own.end(), nan);
        const std::int64_t row = std::int64_t{shape.kv_heads} * shape.head_dim;
        std::fill(part->keys.begin() + part->cu_seqlens[index] * row,
                  part->keys.begin() + part->cu_seqlens[index + 1] * row, nan);
    }
    if (queries) {
        const std::int64_t row = std::int64_t{shape.heads} * shape.head_dim;
        std::fill(what.keys.queries.begin() + what.keys.cu_seqlens[index] * row,
                  what.keys.queries.begin() + what.keys.cu_seqlens[index + 1] * row, nan);
    }
}

} // namespace

TEMPLATE_TEST_CASE("device attention: rows that read nothing, one block, or a sink alone", "[gpu]",
                   small_blocks, large_blocks) {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const model shape = shape_of<TestType>();
    scene_of<TestType> what(shape, contract_requests());
    for (const up::cuda_device& device : each_body<true>()) {
        INFO(name_of(device));
        for (const std::int32_t heads : {shape.heads, shape.kv_heads}) {
            what.list_blocks(heads, 0, no_block);
            auto got = attend_there<TestType>(what, device);
            check_on_device(what, {got}, uniprefill_test::scaled(16, 4));
            REQUIRE(got.lse[0] == -infinity);
            what.list_blocks(heads, 1, no_block); // its own block
            check_on_device(what, {attend_there<TestType>(what, device)}, uniprefill_test::scaled(16, 4));
            what.list_blocks(heads, 0, [](auto, auto, auto, int block) { return block == 1; });
            check_on_device(what, {attend_there<TestType>(what, device)}, uniprefill_test::scaled(16, 4));

            what.list_blocks(heads, 0, no_block);
            what.sinks = {0.5f, -3.0f, 4.0f, 0.0f, 2.0f, 1.0f, -100.0f, 700.0f};
            what.options.params.sink_logits = what.sinks.data();
            got = attend_there<TestType>(what, device);
            check_on_device(what, {got}, uniprefill_test::scaled(16, 4));
            for (std::size_t head = 0; head < 8; ++head) {
                REQUIRE(std::abs(got.lse[head] - what.sinks[head]) <= 1e-4f + 1e-6f * std::abs(what.sinks[head]));
            }
            what.options.params.sink_logits = nullptr;
        }
    }
}

TEMPLATE_TEST_CASE("device attention: logits of tens of thousands stay finite", "[gpu]", small_blocks,
                   large_blocks) {
    if (!uniprefill_test::has_device()) {
        return;
    }
    std::vector<request> requests = contract_requests();
    for (request& one : requests) {
        one.spread = 4000.0f;
    }
    scene_of<TestType> what(shape_of<TestType>(), requests);
    for (const float softcap : {0.0f, 30.0f}) {
        what.options.params.softcap = softcap;
        for (const up::cuda_device& device : each_body<true>()) {
            INFO(name_of(device) << ", soft-cap " << softcap);
            const auto got = attend_there<TestType>(what, device);
            REQUIRE(all_finite(got));
            check_on_device(what, {got}, uniprefill_test::scaled(12, 4));
        }
    }
}

TEMPLATE_TEST_CASE("device attention: what isn't a number stays with its request", "[gpu]", small_blocks,
                   large_blocks) {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const model shape = shape_of<TestType>();
    // Lengths that end within a tile, behind and before the spoilt ones, in the step's rows and in the cache.
    std::vector<request> requests;
    for (std::uint64_t i = 0; i < 7; ++i) {
        const auto more = static_cast<std::int32_t>(i);
        requests.push_back({51 + i, up::request_tag::chunk, 30 + 7 * more, {61 + 17 * more}});
    }
    for (const std::int32_t lists : {0, shape.kv_heads}) {
        scene_of<TestType> sound(shape, requests);
        scene_of<TestType> spoilt(shape, requests);
        for (const std::size_t r : {1u, 3u, 4u, 6u}) {
            spoil_request(spoilt, r, r == 4);
        }
        if (lists > 0) {
            sound.list_blocks(lists, 20, some_blocks);
            spoilt.list_blocks(lists, 20, some_blocks);
        }
        for (const up::cuda_device& device : each_body<true>()) {
            INFO(name_of(device) << ", " << lists << " lists");
            const auto right = attend_there<TestType>(sound, device);
            const auto got = attend_there<TestType>(spoilt, device);
            for (const std::size_t r : {0u, 2u, 5u}) {
                CAPTURE(r);
                REQUIRE(of_request(spoilt, got, r) == of_request(sound, right, r));
            }
            REQUIRE(std::isnan(got.lse[static_cast<std::size_t>(sound.keys.cu_seqlens[1]) * 8]));
        }
    }
}

TEMPLATE_TEST_CASE("device attention: arrays that make no sense lead nowhere", "[gpu]", small_blocks,
                   large_blocks) {
    if (!uniprefill_test::has_device()) {
        return;
    }
    using T = typename TestType::element;
    using policy = typename TestType::policy;
    const model shape = shape_of<TestType>();
    scene<T> what(shape, contract_requests());
    what.set_window(300);
    what.list_blocks(shape.heads, 40, some_blocks);
    what.keep_rows(some_rows);
    const caches<T> k(what.keys);
    const caches<T> v(what.values);
    const device_caches<T> device_k(k);
    const device_caches<T> device_v(v);
    for (const up::cuda_device& device : each_body<true>()) {
        INFO(name_of(device));
        device_scene<T> sound(what);
        const auto run = [&](device_scene<T>& on_device) {
            return attend_on_device<policy>(what, on_device, device_k.contiguous(), device_v.contiguous(),
                                            device);
        };
        const output<T> right = run(sound);
        const auto& offsets = what.lists.offsets;
        { // head 3's list of the first segment: other heads don't notice
            device_scene<T> spoilt(what);
            std::vector<std::int32_t> blocks = what.lists.blocks;
            const std::int32_t nonsense[] = {-1, 2147483647, -2147483647 - 1, 7, 3, 3, 1000000, 0, 33};
            std::size_t next = 0;
            for (auto i = offsets[3]; i < offsets[4]; ++i) {
                blocks[static_cast<std::size_t>(i)] = nonsense[next++ % 9];
            }
            spoilt.blocks().set(blocks);
            const output<T> got = run(spoilt);
            REQUIRE(all_finite(got));
            for (std::int32_t query = 0; query < what.num_queries(); ++query) {
                for (std::int32_t head = 0; head < shape.heads; ++head) {
                    if (head != 3 || query >= what.kept.cu_segments[1]) {
                        REQUIRE(std::equal(got.at(query, head), got.at(query, head) + shape.head_dim,
                                           right.at(query, head),
                                           [](T a, T b) { return up::to_float(a) == up::to_float(b); }));
                    }
                }
            }
        }
        const std::int64_t far = std::int64_t{1} << 40;
        for (const std::int64_t offset : {std::int64_t{-5}, far, -far}) {
            device_scene<T> spoilt(what);
            std::vector<std::int64_t> moved = offsets;
            moved[4] = offset;
            moved[9] = offset;
            spoilt.offsets().set(moved);
            REQUIRE(all_finite(run(spoilt)));
        }
        for (const std::int32_t row : {-1, 2147483647, -2147483647 - 1, 700}) {
            scene<T> other = what;
            for (std::size_t i = 0; i < other.kept.kept_to_old.size(); i += 3) {
                other.kept.kept_to_old[i] = row;
            }
            device_scene<T> spoilt(what);
            spoilt.assign_rows(other.kept.kept_to_old, other.kept.cu_segments);
            const output<T> got = run(spoilt);
            REQUIRE(all_finite(got));
            REQUIRE(got.lse[0] == -infinity); // row 0 of segment 0 isn't any of these
        }
        for (const std::int32_t begin : {-1, 2147483647, -2147483647 - 1, 3}) {
            std::vector<std::int32_t> cut = what.kept.cu_segments;
            cut[3] = begin;
            device_scene<T> spoilt(what);
            spoilt.assign_rows(what.kept.kept_to_old, cut);
            const up::prefill_attention<policy, up::backend::cuda> attention(what.keys.tight_limits(),
                                                                             device);
            const device_array<unsigned char> memory(attention.workspace_bytes());
            const device_output<T> out(shape, what.num_queries());
            const up::status done = attention.run(
                spoilt.query_rows(),
                up::key_source<T, cache_of<TestType>>{spoilt.key_rows(), device_k.contiguous()},
                up::key_source<T, cache_of<TestType>>{spoilt.value_rows(), device_v.contiguous()},
                spoilt.options(), spoilt.batch(), spoilt.kept(), spoilt.lists(), out.rows(), out.lse(),
                up::workspace(memory.data(), memory.size()), nullptr);
            REQUIRE(done.ok());
            uniprefill_test::check_cuda(cudaDeviceSynchronize(), "nonsense in kept.cu_segments");
        }
    }
}
