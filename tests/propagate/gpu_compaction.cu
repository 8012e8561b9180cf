// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Rows move on a device as they do on the host, byte for byte: in and out of place, whatever their size,
// address and stride, the number of thread blocks and what the map says.

#include "device_tensors.cuh"
#include "support/cuda_calls.hpp"

#include <climits>
#include <functional>
#include <memory>

using namespace propagate_test;
using uniprefill_test::captured_graph;
using uniprefill_test::check_cuda;
using uniprefill_test::cuda_calls;
using uniprefill_test::device_array;
using uniprefill_test::has_device;

namespace {

struct shape {
    std::int64_t row_bytes;
    std::int64_t gap;
    std::size_t offset; // of the first row from an aligned address
};

shape random_shape(std::mt19937& random) {
    constexpr std::int64_t sizes[] = {0, 1, 2, 4, 6, 16, 30, 64, 48, 512, 1040, 2048, 8192, 10768};
    constexpr std::int64_t gaps[] = {0, 0, 16, 2, 7};
    constexpr std::size_t offsets[] = {0, 0, 0, 16, 4, 2, 1};
    return {sizes[random() % 14], gaps[random() % 5], offsets[random() % 7]};
}

/// Several tensors on the host and the same on a device.
struct pair_of_lists {
    std::vector<tensor> host;
    std::vector<std::unique_ptr<device_tensor>> device;

    void add(const tensor& values, std::size_t offset) {
        host.push_back(values);
        device.push_back(std::make_unique<device_tensor>(values, offset));
    }
    [[nodiscard]] std::vector<up::byte_rows> host_views() {
        std::vector<up::byte_rows> views;
        for (tensor& t : host) {
            views.push_back(t.view());
        }
        return views;
    }
    [[nodiscard]] std::vector<up::byte_rows> device_views() const {
        std::vector<up::byte_rows> views;
        for (const auto& t : device) {
            views.push_back(t->view());
        }
        return views;
    }
    void compare() const {
        for (std::size_t t = 0; t < host.size(); ++t) {
            INFO("tensor " << t << ": " << host[t].rows << " rows of " << host[t].row_bytes
                           << " bytes, stride " << host[t].stride);
            REQUIRE(device[t]->bytes() == host[t].bytes);
        }
    }
};

constexpr std::int32_t grids[] = {0, 1, 2, 7};

} // namespace

TEST_CASE("compact on a device: the host's bytes, in and out of place, and back") {
    if (!has_device()) {
        return;
    }
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()));
    const device_scratch scratch;
    for (const std::uint32_t i : spread_cases(160, 3)) {
        const auto rows = static_cast<std::int32_t>(i % 20 == 0 ? random() % 3 : random() % 600);
        const keep_set kept(keeps_of_kind(random, rows, i), {0, rows});
        const device_keep_set on_device(kept);
        const up::cuda_device device = current_device(grids[i / 8 % 4]);
        const auto count = static_cast<std::int32_t>(1 + random() % 10);
        INFO("case " << i << ": " << count << " tensors, " << kept.kept() << " of " << rows
                     << " rows, max_ctas " << device.max_ctas);
        pair_of_lists full, packed, working, back;
        for (std::int32_t t = 0; t < count; ++t) {
            const shape from = random_shape(random);
            const shape to = random_shape(random);
            const std::int64_t bytes = from.row_bytes;
            full.add(tensor(rows + 1, bytes, bytes + from.gap, random()), from.offset);
            packed.add(tensor(rows + 2, bytes, bytes + to.gap, random()), to.offset);
            working.add(tensor(rows, bytes, bytes + from.gap, random()), from.offset);
            back.add(tensor(rows, bytes, bytes + to.gap, random()), to.offset);
        }
        REQUIRE(up::compact(kept.view, full.host_views().data(), packed.host_views().data(), count, {}).ok());
        REQUIRE(
            up::compact(kept.view, working.host_views().data(), working.host_views().data(), count, {}).ok());
        REQUIRE(up::scatter(kept.view, packed.host_views().data(), back.host_views().data(), count, {}).ok());
        check_ok(up::compact(on_device.view, full.device_views().data(), packed.device_views().data(), count,
                             {}, device, nullptr));
        check_ok(up::compact(on_device.view, working.device_views().data(), working.device_views().data(),
                             count, scratch.view(), device, nullptr));
        check_ok(up::scatter(on_device.view, packed.device_views().data(), back.device_views().data(), count,
                             device, nullptr));
        full.compare();
        packed.compare();
        working.compare();
        back.compare();
    }
}

TEST_CASE("compact on a device: tensors in place and out of place in one call") {
    if (!has_device()) {
        return;
    }
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()) + 1);
    const device_scratch scratch;
    for (const std::uint32_t i : spread_cases(24, 3)) {
        constexpr std::int32_t rows = 3000;
        const keep_set kept(keeps_of_kind(random, rows, i), {0, rows});
        const device_keep_set on_device(kept);
        pair_of_lists from, to;
        for (std::int32_t t = 0; t < 4; ++t) {
            from.add(tensor(rows, 1024 + 16 * t, 1024 + 16 * t, random()), 0);
            to.add(tensor(rows, 1024 + 16 * t, 1024 + 16 * t, random()), 0);
        }
        std::vector<up::byte_rows> host_to = to.host_views();
        std::vector<up::byte_rows> device_to = to.device_views();
        for (const std::size_t t : {std::size_t{1}, std::size_t{2}}) {
            host_to[t] = from.host_views()[t];
            device_to[t] = from.device_views()[t];
        }
        REQUIRE(up::compact(kept.view, from.host_views().data(), host_to.data(), 4, {}).ok());
        check_ok(up::compact(on_device.view, from.device_views().data(), device_to.data(), 4, scratch.view(),
                             current_device(grids[i % 4]), nullptr));
        from.compare();
        to.compare();
    }
}

TEST_CASE("compact on a device: rows that are where they go stay, and those behind them move") {
    if (!has_device()) {
        return;
    }
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()) + 7);
    const device_scratch scratch;
    constexpr std::int32_t rows = 5000;
    for (const std::int32_t stay : {0, 1, 63, 64, 2047, 2500, 4998, 4999, 5000}) {
        std::vector<bool> keeps(rows, true);
        for (std::int32_t row = stay; row < rows; ++row) {
            keeps[static_cast<std::size_t>(row)] = row > stay && random() % 4 != 0;
        }
        const keep_set kept(keeps, {0, rows});
        const device_keep_set on_device(kept);
        INFO(stay << " rows stay, " << kept.kept() << " are kept");
        pair_of_lists list;
        for (const std::int64_t bytes : {8192, 48, 30, 40000}) {
            list.add(tensor(rows, bytes, bytes + 16, random()), 0);
        }
        REQUIRE(up::compact(kept.view, list.host_views().data(), list.host_views().data(), 4, {}).ok());
        check_ok(up::compact(on_device.view, list.device_views().data(), list.device_views().data(), 4,
                             scratch.view(), current_device(grids[stay % 4]), nullptr));
        list.compare();
    }
}

TEST_CASE("compact on a device: many thread blocks in place, again and again") {
    if (!has_device()) {
        return;
    }
    // Enough rows that some are written while others are read, at every distance.
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()) + 2);
    const device_scratch scratch;
    // Several rows of a tile, rows that begin anywhere in one, and more tiles than there are bits for.
    for (const auto& [rows, row_bytes] : {std::pair{20000, 2048}, {6000, 8208}, {70000, 1025}}) {
        const tensor values(rows, row_bytes, row_bytes, 5);
        device_tensor on_device(values);
        for (const std::uint32_t i : spread_cases(8, 3)) {
            const keep_set kept(keeps_of_kind(random, rows, i), {0, rows});
            const device_keep_set map(kept);
            tensor wanted = values;
            REQUIRE(up::compact(kept.view, wanted.view(), wanted.view(), {}).ok());
            on_device.set(values.bytes);
            check_ok(up::compact(map.view, on_device.view(), on_device.view(), scratch.view(),
                                 current_device(), nullptr));
            INFO("case " << i << ": " << kept.kept() << " of " << rows << " rows of " << row_bytes
                         << " bytes");
            REQUIRE(on_device.bytes() == wanted.bytes);
        }
    }
}

TEST_CASE("compact on a device: keep all does nothing in place and copies otherwise") {
    if (!has_device()) {
        return;
    }
    const auto all = up::selection::keep_all(1, 1, 50, up::memory_space::device);
    const tensor source(50, 12, 15, 1);
    const device_tensor from(source);
    const device_tensor to(tensor(51, 12, 12, 2));
    const device_tensor back(tensor(50, 12, 16, 3));
    check_ok(up::compact(all, from.view(), from.view(), {}, current_device(), nullptr));
    check_ok(up::scatter(all, from.view(), from.view(), current_device(), nullptr));
    CHECK(from.bytes() == source.bytes);
    check_ok(up::compact(all, from.view(), to.view(), {}, current_device(), nullptr));
    check_ok(up::scatter(all, to.view(), back.view(), current_device(), nullptr));
    tensor copied(51, 12, 12, 2);
    tensor returned(50, 12, 16, 3);
    for (std::int32_t row = 0; row < 50; ++row) {
        copied.set_row(row, source.row(row));
        returned.set_row(row, source.row(row));
    }
    CHECK(to.bytes() == copied.bytes);
    CHECK(back.bytes() == returned.bytes);
    check_ok(up::compact(all, nullptr, nullptr, 0, {}, current_device(), nullptr));
}

TEST_CASE("compact on a device: a captured graph follows maps and counts") {
    if (!has_device()) {
        return;
    }
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()) + 4);
    constexpr std::int32_t rows = 4000;
    device_keep_set map(rows, 1);
    const device_scratch scratch;
    tensor first(rows, 4096, 4096, 1), second(rows, 6, 10, 2), packed(rows, 4096, 4096, 3),
        full(rows, 6, 6, 4);
    device_tensor on_first(first), on_second(second), on_packed(packed), on_full(full);
    const up::cuda_device device = current_device();
    captured_graph graph([&](cudaStream_t stream) {
        const up::byte_rows in_place[] = {on_first.view(), on_second.view()};
        check_ok(up::compact(map.view, on_first.view(), on_packed.view(), {}, device, stream));
        check_ok(up::compact(map.view, in_place, in_place, 2, scratch.view(), device, stream));
        check_ok(up::scatter(map.view, on_second.view(), on_full.view(), device, stream));
    });
    for (const std::uint32_t i : spread_cases(24, 3)) {
        const keep_set kept(keeps_of_kind(random, rows, i), {0, rows});
        map.set(kept);
        tensor a = first, b = second, p = packed, f = full;
        on_first.set(a.bytes);
        on_second.set(b.bytes);
        on_packed.set(p.bytes);
        on_full.set(f.bytes);
        REQUIRE(up::compact(kept.view, a.view(), p.view(), {}).ok());
        REQUIRE(up::compact(kept.view, a.view(), a.view(), {}).ok());
        REQUIRE(up::compact(kept.view, b.view(), b.view(), {}).ok());
        REQUIRE(up::scatter(kept.view, b.view(), f.view(), {}).ok());
        graph.replay();
        INFO("replay " << i);
        REQUIRE(on_packed.bytes() == p.bytes);
        REQUIRE(on_first.bytes() == a.bytes);
        REQUIRE(on_second.bytes() == b.bytes);
        REQUIRE(on_full.bytes() == f.bytes);
    }
}

TEST_CASE("compact and scatter on a device: nothing is allocated, asked or waited for") {
    if (!has_device()) {
        return;
    }
    const keep_set kept({false, true, true, false, true}, {0, 5});
    const device_keep_set map(kept);
    const device_tensor full(tensor(5, 8, 8, 1)), packed(tensor(5, 8, 8, 2));
    const device_scratch scratch;
    const up::cuda_device device = current_device();
    const cuda_calls before = cuda_calls::now();
    check_ok(up::compact(map.view, full.view(), packed.view(), {}, device, nullptr));
    check_ok(up::compact(map.view, full.view(), full.view(), scratch.view(), device, nullptr));
    check_ok(up::scatter(map.view, packed.view(), full.view(), device, nullptr));
    CHECK(before.since().empty());
}

TEST_CASE("compact on a device: maps and counts that make no sense touch no other memory") {
    if (!has_device()) {
        return;
    }
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()) + 5);
    constexpr std::int32_t rows = 700;
    const std::int32_t counts[] = {rows, rows + 1, INT32_MAX, 350, 0, -1, INT32_MIN};
    const device_scratch scratch;
    for (const std::uint32_t i : spread_cases(28, 3)) {
        std::vector<std::int32_t> map(rows);
        for (std::int32_t& entry : map) {
            const std::int32_t wild[] = {-1, rows, INT32_MIN, INT32_MAX, -rows, rows + 5};
            entry = random() % 3 == 0 ? wild[random() % 6] : static_cast<std::int32_t>(random() % rows);
        }
        const std::int32_t count = counts[i % 7];
        const std::int32_t counted = count < 0 ? 0 : count < rows ? count : rows;
        device_keep_set hostile(rows, 1);
        hostile.set_raw(map, {0, count});
        for (const std::int64_t bytes : {30, 64, 1040, 4096, 8208}) {
            INFO("case " << i << ", rows of " << bytes << " bytes");
            tensor source(rows, bytes, bytes, 1), packed(rows, bytes, bytes, 2);
            const device_tensor from(source), to(packed), back(packed);
            const up::cuda_device device = current_device();
            check_ok(up::compact(hostile.view, from.view(), to.view(), {}, device, nullptr));
            for (std::int32_t row = 0; row < counted; ++row) {
                const std::int32_t old = map[static_cast<std::size_t>(row)];
                if (old >= 0 && old < rows) {
                    packed.set_row(row, source.row(old));
                }
            }
            REQUIRE(to.bytes() == packed.bytes);
            REQUIRE(from.bytes() == source.bytes);
            // What goes where is anybody's guess now, but it stays inside (bytes() looks) and comes to an
            // end.
            check_ok(up::scatter(hostile.view, from.view(), back.view(), device, nullptr));
            check_ok(up::compact(hostile.view, from.view(), from.view(), scratch.view(), device, nullptr));
            static_cast<void>(back.bytes());
            static_cast<void>(from.bytes());
        }
    }
}

TEST_CASE("compact and scatter on a device: wrong arguments are named, and nothing moves") {
    if (!has_device()) {
        return;
    }
    const keep_set kept({false, true, true, false, true}, {0, 5});
    const device_keep_set map(kept);
    const tensor full_values(5, 8, 8, 1), packed_values(5, 8, 8, 2);
    const device_tensor full(full_values), packed(packed_values);
    const device_scratch scratch;
    const up::cuda_device device = current_device();
    const auto refuses = [&](const up::status& result, up::status_code code, const char* argument) {
        CHECK(up::to_string(result.code) == std::string(up::to_string(code)));
        CHECK(result.argument == std::string(argument));
        CHECK(full.bytes() == full_values.bytes);
        CHECK(packed.bytes() == packed_values.bytes);
    };
    using code = up::status_code;
    const auto compact = [&](const up::row_map& rows, const up::byte_rows& from, const up::byte_rows& to,
                             up::workspace memory) {
        return up::compact(rows, from, to, memory, device, nullptr);
    };
    refuses(compact(kept.view, full.view(), packed.view(), {}), code::not_supported, "rows.space");
    refuses(compact(map.view, full.view(), full.view(), {}), code::invalid_argument, "workspace");
    refuses(compact(map.view, full.view(), full.view(), {scratch.view().data(), 100}),
            code::workspace_too_small, "workspace");
    refuses(compact(map.view, full.view(), full.view(),
                    {static_cast<char*>(scratch.view().data()) + 4, up::in_place_scratch_bytes()}),
            code::misaligned, "workspace");
    up::byte_rows wrong = packed.view();
    wrong.num_rows = 4; // the bound counts, not what is kept
    refuses(compact(map.view, full.view(), wrong, {}), code::out_of_range, "destination");
    wrong = full.view();
    wrong.data = static_cast<char*>(wrong.data) + 4;
    refuses(compact(map.view, full.view(), wrong, {}), code::invalid_argument, "destination");
    refuses(up::scatter(map.view, full.view(), full.view(), device, nullptr), code::invalid_argument,
            "destination");
    refuses(up::scatter(kept.view, packed.view(), full.view(), device, nullptr), code::not_supported,
            "rows.space");
    up::row_map rows = map.view;
    rows.kept_to_old = nullptr;
    refuses(compact(rows, full.view(), packed.view(), {}), code::invalid_argument, "rows.kept_to_old");
    up::byte_rows endless{full.view().data, std::int64_t{1} << 50, std::int64_t{1} << 50, 5};
    up::byte_rows elsewhere{packed.view().data, std::int64_t{1} << 50, std::int64_t{1} << 50, 5};
    elsewhere.data = static_cast<char*>(full.view().data) + (std::int64_t{1} << 60);
    refuses(compact(map.view, endless, elsewhere, {}), code::out_of_range, "source");
}

namespace {

/// What a word of the large tensor holds at first.
__host__ __device__ unsigned word_at(std::uint64_t row, std::uint64_t word) {
    const std::uint64_t mixed = (row * 0x9e3779b97f4a7c15ull) ^ (word * 0xc2b2ae3d27d4eb4full);
    return static_cast<unsigned>(mixed >> 29);
}
__global__ void fill_large(unsigned* tensor, std::uint64_t rows, std::uint64_t words) {
    for (std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x; i < rows * words;
         i += std::uint64_t{gridDim.x} * blockDim.x) {
        tensor[i] = word_at(i / words, i % words);
    }
}
/// Counts words that are not those of row map[j].
__global__ void compare_large(const unsigned* tensor, std::uint64_t kept, std::uint64_t words,
                              const std::int32_t* map, unsigned long long* wrong) {
    for (std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x; i < kept * words;
         i += std::uint64_t{gridDim.x} * blockDim.x) {
        if (tensor[i] != word_at(static_cast<std::uint64_t>(map[i / words]), i % words)) {
            atomicAdd(wrong, 1ull);
        }
    }
}

} // namespace

TEST_CASE("compact on a device: tensors of more than 2^31 elements", "[large]") {
    if (!has_device()) {
        return;
    }
    if (uniprefill_test::is_scaled_down()) {
        return; // hours under a sanitizer
    }
    constexpr std::int32_t rows = 300000;
    constexpr std::uint64_t words = 4096; // 16 KiB: 2.4 * 10^9 elements of 16 bits, 4.9 GB
    static_assert(rows * words * 2 > (std::uint64_t{1} << 31));
    std::size_t free_bytes = 0, total_bytes = 0;
    check_cuda(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    if (free_bytes < std::size_t{12} << 30) {
        uniprefill_test::skip("no 12 GiB of device memory");
        return;
    }
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()) + 6);
    device_array<unsigned> source(rows * words), destination(rows * words);
    device_array<unsigned long long> wrong(1);
    const device_scratch scratch;
    for (const std::uint32_t kind : {2u, 4u, 6u}) {
        const keep_set kept(keeps_of_kind(random, rows, kind), {0, rows});
        const device_keep_set map(kept);
        const auto count = static_cast<std::uint64_t>(kept.kept());
        fill_large<<<1024, 256>>>(source.data(), rows, words);
        const up::byte_rows from = up::as_byte_rows(source.data(), rows, words);
        const up::byte_rows to = up::as_byte_rows(destination.data(), rows, words);
        check_ok(up::compact(map.view, from, to, {}, current_device(), nullptr));
        wrong.set({0});
        compare_large<<<1024, 256>>>(destination.data(), count, words, map.view.kept_to_old, wrong.data());
        REQUIRE(wrong.get()[0] == 0);
        check_ok(up::compact(map.view, from, from, scratch.view(), current_device(), nullptr));
        compare_large<<<1024, 256>>>(source.data(), count, words, map.view.kept_to_old, wrong.data());
        REQUIRE(wrong.get()[0] == 0);
        check_ok(up::scatter(map.view, from, to, current_device(), nullptr));
        // The last kept row is back where it was.
        compare_large<<<1, 256>>>(destination.data() + std::uint64_t(kept.kept_to_old[count - 1]) * words, 1,
                                  words, map.view.kept_to_old + count - 1, wrong.data());
        REQUIRE(wrong.get()[0] == 0);
    }
}
