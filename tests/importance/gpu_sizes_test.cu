// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Sizes at which 32 bits and floats come to their ends.

#include "gpu_contracts.cuh"
#include "support/scale.hpp"

#include <algorithm>
#include <cmath>
#include <iostream>
#include <numeric>

using namespace importance_test;
using uniprefill_test::check_cuda;

namespace {

/// Elements that look random, with a standard deviation of about @p spread; 0: zeros.
__global__ void fill(bf16* values, std::int64_t count, float spread) {
    for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
         i += std::int64_t{gridDim.x} * blockDim.x) {
        std::uint64_t z = static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        std::int32_t sum = -1020 * 2; // eight bytes, each uniform in 0..255, have a deviation of 209 together
        for (std::int32_t byte = 0; byte < 8; ++byte) {
            sum += static_cast<std::int32_t>(z >> (8 * byte) & 255u);
        }
        values[i] = up::from_float<bf16>(static_cast<float>(sum + 1020) * (spread / 209.0f));
    }
}
void fill(const device_array<bf16>& values, float spread) {
    fill<<<1024, 256>>>(values.data(), static_cast<std::int64_t>(values.size()), spread);
    check_cuda(cudaGetLastError(), "fill");
}
bool has_memory(std::size_t bytes) {
    std::size_t available = 0;
    std::size_t total = 0;
    check_cuda(cudaMemGetInfo(&available, &total), "cudaMemGetInfo");
    if (available < bytes) {
        uniprefill_test::skip("too little device memory");
        return false;
    }
    return true;
}
} // namespace

TEST_CASE("2 million tokens", "[gpu]") {
    if (!uniprefill_test::has_device() || !has_memory(std::size_t{3} << 30)) {
        return;
    }
    const std::int32_t tokens = uniprefill_test::scaled(2000000, 40000);
    constexpr std::int32_t heads = 2;
    up::limits bounds;
    bounds.max_rows = tokens;
    bounds.max_cached_tokens = tokens;
    bounds.num_heads = heads;
    bounds.head_dim = D;
    bounds.block_rows = G;
    bounds.num_observations = N;
    const auto count = static_cast<std::size_t>(tokens);
    const device_array<bf16> queries(count * heads * D);
    const device_array<bf16> keys(count * D);
    std::vector<std::int32_t> ascending(count);
    std::iota(ascending.begin(), ascending.end(), 0);
    const device_array<std::int32_t> positions(ascending);
    const device_array<up::request_tag> tags(std::vector<up::request_tag>{up::request_tag::chunk});
    device_array<std::int32_t> cu_seqlens(std::vector<std::int32_t>{0, tokens});
    device_array<std::int32_t> cached_lens(std::vector<std::int32_t>{0});
    up::batch_view batch;
    batch.space = up::memory_space::device;
    batch.num_requests = batch.num_segments = 1;
    batch.num_rows = tokens;
    batch.tags = tags.data();
    batch.cu_seqlens = cu_seqlens.data();
    batch.positions = positions.data();
    batch.cached_lens = cached_lens.data();
    const cache_view cached{keys.data(), std::int64_t{tokens} * D, D, D};
    const up::key_source<bf16, cache_view> source{{keys.data(), D, D, tokens, 1, D}, cached};
    const up::head_rows<const bf16> query_rows{queries.data(), heads * D, D, tokens, heads, D};
    fill(keys, 1.0f);
    for (const up::cuda_device& device : each_body<has_sm90>()) {
        INFO(name_of(device));
        fill(queries, 2.0f);
        cu_seqlens.set({0, tokens});
        cached_lens.set({0});
        masses all = run_on_device<policy>(query_rows, source, {}, batch, bounds, device);
        REQUIRE(all.view().faults[0] == 0);
        double total = 0;
        std::int64_t empty = 0;
        for (std::int64_t b = 0; b < tokens / G; ++b) {
            const double mass = all.view().format.to_double(all.view().free[b] + all.view().forced[b]);
            total += mass;
            empty += mass > 0 ? 0 : 1;
        }
        std::cout << name_of(device) << ": total mass of " << tokens << " keys " << total << " of "
                  << N * heads << std::endl;
        CHECK(std::abs(total - N * heads) < 1e-4 * N * heads);
        CHECK(empty == 0);

        // All keys alike, all but the last rows cached: each key has the same share.
        constexpr std::int32_t own = 4000;
        fill(queries, 0.0f);
        cu_seqlens.set({0, own});
        cached_lens.set({tokens});
        masses last = run_on_device<policy>(query_rows, source, {}, batch, bounds, device);
        REQUIRE(last.view().faults[0] == 0);
        double worst = 0;
        for (std::int64_t b = 0; b < (own - N) / G; ++b) {
            double expected = 0;
            for (std::int32_t row = own - N; row < own; ++row) {
                expected += heads * G / (tokens + row + 1.0);
            }
            const double mass = last.view().format.to_double(last.view().free[b] + last.view().forced[b]);
            worst = std::max(worst, std::abs(mass / expected - 1));
        }
        std::cout << name_of(device) << ": worst relative error beside " << tokens << " cached keys " << worst
                  << std::endl;
        CHECK(worst < 1e-5);
    }
}

TEST_CASE("a pool of more than 2^31 elements", "[gpu]") {
    const std::int32_t pool_slots = uniprefill_test::scaled((1 << 25) + 4096, 1 << 16);
    static_assert(std::int64_t{D} << 25 == std::int64_t{1} << 31);
    if (!uniprefill_test::has_device() ||
        !has_memory(static_cast<std::size_t>(pool_slots) * D * 2 + (std::size_t{1} << 30))) {
        return;
    }
    using slot_view = up::token_slot_cache<bf16>;
    const model shape{2, 1, D, G, N};
    both what(shape, {{71, up::request_tag::chunk, 500, {200}, {1, 4, 4, 0}}});
    bf16* pool = nullptr;
    check_cuda(cudaMalloc(&pool, static_cast<std::size_t>(pool_slots) * D * sizeof(bf16)), "cudaMalloc");
    std::vector<std::int32_t> slots;
    for (std::int32_t token = 0; token < 500; ++token) {
        slots.push_back(pool_slots - 1 - pool_slots / 501 * token);
        check_cuda(cudaMemcpy(pool + std::int64_t{slots.back()} * D,
                              what.device_cached.contiguous().data + std::int64_t{token} * D,
                              D * sizeof(bf16), cudaMemcpyDeviceToDevice),
                   "copy on the device");
    }
    const device_array<std::int32_t> device_slots(slots);
    const slot_view view{pool, D, D, device_slots.data(), 500};
    for (const up::cuda_device& device : each_body<has_sm90>()) {
        INFO(name_of(device));
        const masses far = estimate_on_device<policy>(what.device, view, {}, what.bounds, device);
        CHECK((far.buffer == what.estimate_here(device).buffer));
    }
    cudaFree(pool);
}
