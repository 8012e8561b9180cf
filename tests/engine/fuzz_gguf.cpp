// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
// 20,000 broken files: no crash, no hang, no allocation that the file doesn't pay for.

#include "engine/fuzz_harness.hpp"
#include "engine/fuzz_mutations.hpp"
#include "engine/gguf_samples.hpp"
#include "support/catch.hpp"

#include <array>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <malloc.h>
#include <new>
#include <random>
#include <string>

namespace {

/// What this program's `operator new` gave out since `reset`.
struct allocation_meter {
    std::size_t live = 0;
    std::size_t peak = 0;
    std::size_t total = 0;

    void reset() { live = peak = total = 0; }
    void add(std::size_t size) {
        live += size;
        total += size;
        peak = peak < live ? live : peak;
    }
    // Older memory may be freed meanwhile.
    void remove(std::size_t size) { live -= size < live ? size : live; }
};

allocation_meter meter;

} // namespace

void* operator new(std::size_t size) {
    void* const memory = std::malloc(size == 0 ? 1 : size);
    if (memory == nullptr) throw std::bad_alloc();
    meter.add(malloc_usable_size(memory));
    return memory;
}

// Sanitizers bring their own of this one, which must not meet the `delete` below.
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
    void* const memory = std::malloc(size == 0 ? 1 : size);
    if (memory != nullptr) meter.add(malloc_usable_size(memory));
    return memory;
}

void operator delete(void* memory) noexcept {
    if (memory != nullptr) meter.remove(malloc_usable_size(memory));
    std::free(memory);
}

void operator delete(void* memory, std::size_t) noexcept {
    operator delete(memory);
}

void operator delete(void* memory, const std::nothrow_t&) noexcept {
    operator delete(memory);
}

using namespace engine_test;

namespace {

constexpr int files = 20000;
// Bytes at once and in all, by byte of the file, and what even an empty file may cost (an error's text, a
// first block).
constexpr std::size_t most_live = 4;
constexpr std::size_t most_in_all = 6;
constexpr std::size_t at_least = 16384;

} // namespace

TEST_CASE("the seeds themselves are sound") {
    std::array<int, fates> counts = {};
    for (const seed_file& seed : seed_files()) {
        ++counts[static_cast<std::size_t>(load_everything(span_of(seed.content)))];
    }
    CHECK(counts[static_cast<std::size_t>(fate::accepted)] == 11);
    CHECK(counts[static_cast<std::size_t>(fate::hyperparameters)] == 1); // every kind of value, but no model
    CHECK(counts[static_cast<std::size_t>(fate::metadata)] == 1);        // the nested array
}

TEST_CASE("broken files") {
    const std::vector<seed_file> seeds = seed_files();
    std::mt19937_64 random(uniprefill_test::seed());
    std::array<int, fates> counts = {};
    double worst_live = 0;
    double worst_total = 0;
    std::chrono::duration<double> slowest{};
    for (int i = 0; i < files; ++i) {
        // A vector of the exact size, so that a sanitizer sees the first byte read beyond it.
        const bytes file = mutated(seeds[random() % seeds.size()], random);
        meter.reset();
        const auto start = std::chrono::steady_clock::now();
        const fate end = load_everything(span_of(file));
        const allocation_meter used = meter;
        slowest = std::max(slowest, std::chrono::duration<double>(std::chrono::steady_clock::now() - start));
        ++counts[static_cast<std::size_t>(end)];
        const auto size = static_cast<double>(file.size() + 1);
        worst_live = std::max(worst_live, (static_cast<double>(used.peak) - at_least) / size);
        worst_total = std::max(worst_total, (static_cast<double>(used.total) - at_least) / size);
        if (used.peak > most_live * file.size() + at_least ||
            used.total > most_in_all * file.size() + at_least) {
            FAIL("file " << i << " of " << file.size() << " bytes cost " << used.peak << " bytes at once, "
                         << used.total << " in all");
        }
    }
    for (std::size_t i = 0; i < fates; ++i) {
        std::cout << "  " << fate_names[i] << ": " << counts[i] << '\n';
    }
    std::cout << "  memory beyond 16 KiB by byte of the file: " << worst_live << " at once, " << worst_total
              << " in all; slowest " << slowest.count() << " s\n";

    const auto count_of = [&](fate end) { return counts[static_cast<std::size_t>(end)]; };
    CHECK(files - count_of(fate::magic) >= files / 2);
    // Each stage has stopped enough of them to be said to be tested, and some have come through.
    for (fate end : {fate::magic, fate::header, fate::metadata, fate::tensor_table, fate::hyperparameters,
                     fate::tokenizer, fate::accepted}) {
        CHECK(count_of(end) >= files / 200);
    }
    CHECK(slowest.count() < 10);
}

TEST_CASE("counts that promise more than the file holds allocate nothing for it") {
    // As many entries, strings and tokens of no bytes at all as the limits allow: what costs most by byte of
    // the file.
    for (int shape = 0; shape < 3; ++shape) {
        gguf_builder builder;
        if (shape == 0) {
            for (int i = 0; i < 60000; ++i) {
                builder.add_bool(std::to_string(i), true);
            }
        } else if (shape == 1) {
            builder.add_strings("s", std::vector<std::string>(200000));
        } else {
            builder.add_string("tokenizer.ggml.model", "gpt2");
            builder.add_string("tokenizer.ggml.pre", "gpt-2");
            builder.add_strings("tokenizer.ggml.tokens", std::vector<std::string>(200000));
            builder.add_strings("tokenizer.ggml.merges", std::vector<std::string>(200000, "t h"));
        }
        const bytes file = builder.build();
        meter.reset();
        load_everything(span_of(file));
        const allocation_meter used = meter;
        INFO("shape " << shape << ", " << file.size() << " bytes: " << used.peak << " at once, "
                      << used.total);
        CHECK(used.peak <= most_live * file.size());
        CHECK(used.total <= most_in_all * file.size());
    }
}
