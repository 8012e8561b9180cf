// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Times of the example engine's CPU operators in one layer of SmolLM2-135M, for each arithmetic that this
// processor has: products, attention (dense prefill, and decode of one row), row operations. Writes JSON to
// the path given, or to standard output.
//
//   uniprefill_bench_cpu_operators [--tokens N] [--threads T] [--out FILE]

#include "engine/cpu/attention.hpp"
#include "engine/cpu/kernels.hpp"
#include "engine/cpu/products.hpp"
#include "engine/cpu/rows.hpp"
#include "engine/cpu/threads.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <functional>
#include <iostream>
#include <random>
#include <string>
#include <vector>

namespace {

using json = nlohmann::json;
using namespace engine::cpu;

constexpr int hidden = 576, ffn = 1536, query_heads = 9, kv_heads = 3, head_dim = 64;

std::vector<float> normal(std::int64_t n) {
    std::mt19937 bits(1);
    std::normal_distribution<float> distribution;
    std::vector<float> values(static_cast<std::size_t>(n));
    for (float& v : values) {
        v = distribution(bits);
    }
    return values;
}

// Wall time and processor time (of all threads), both in milliseconds: where other programs take turns on the
// cores, the second, divided by the threads, says what a quiet machine would need.
struct times {
    double wall, processor;
};

times best_times(const std::function<void()>& work) {
    times best{1e30, 1e30};
    double spent = 0;
    for (int i = 0; i < 10 && (i < 2 || spent < 1500); ++i) {
        const auto start = std::chrono::steady_clock::now();
        const std::clock_t ticks = std::clock();
        work();
        const double used = 1e3 * static_cast<double>(std::clock() - ticks) / CLOCKS_PER_SEC;
        const double wall =
            std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
        best = {std::min(best.wall, wall), std::min(best.processor, used)};
        spent += wall;
    }
    return best;
}

void put(json& list, json entry, const std::function<void()>& work, double operations = 0) {
    const times t = best_times(work);
    entry["ms"] = t.wall;
    entry["processor_ms"] = t.processor;
    if (operations > 0) entry["gflops"] = operations / t.wall * 1e-6;
    list.push_back(std::move(entry));
}

const char* level_name(simd_level level) {
    return level == simd_level::avx512 ? "avx512" : level == simd_level::avx2 ? "avx2" : "portable";
}

} // namespace

int main(int argc, char** argv) {
    std::int64_t tokens = 7575;
    int threads = max_threads();
    std::string out;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string option = argv[i];
        if (option == "--tokens") tokens = std::atoll(argv[i + 1]);
        if (option == "--threads") threads = std::atoi(argv[i + 1]);
        if (option == "--out") out = argv[i + 1];
    }
    if (tokens < 1 || tokens > 1000000) {
        std::cerr << "--tokens: expected 1 to 1000000, came " << tokens << '\n';
        return 2;
    }
    if (threads < 1 || threads > max_threads()) {
        std::cerr << "--threads: expected 1 to " << max_threads() << ", came " << threads << '\n';
        return 2;
    }
    set_threads(threads);
    scratch memory;
    json report{{"cpu", cpu_name()},
                {"threads", threads},
                {"tokens", tokens},
                {"library", products_library()},
                {"simd", level_name(best_simd())},
                {"unit", "milliseconds for one layer, best of 2 to 10 runs; processor_ms is that of all "
                         "threads together; GFLOP/s count two for each multiply-add"},
                {"products", json::array()},
                {"attention", json::array()},
                {"rows", json::array()}};

    const auto x = normal(tokens * ffn);
    std::vector<float> y(static_cast<std::size_t>(tokens * 2 * ffn));
    const struct {
        const char* name;
        int in, out;
    } shapes[] = {{"qkv", hidden, (query_heads + 2 * kv_heads) * head_dim},
                  {"output", query_heads * head_dim, hidden},
                  {"gate_up", hidden, 2 * ffn},
                  {"down", ffn, hidden}};
    for (const arithmetic kind : {arithmetic::fp32, arithmetic::bf16x3, arithmetic::bf16}) {
        if (resolve(kind) != kind) continue;
        for (const auto& s : shapes) {
            const auto w = normal(std::int64_t{s.in} * s.out);
            const matrix packed(s.out, s.in, kind, w.data(), s.in);
            for (const std::int64_t rows : {tokens, std::int64_t{1}}) {
                put(
                    report["products"], {{"shape", s.name}, {"rows", rows}, {"arithmetic", name(kind)}},
                    [&] { multiply(packed, x.data(), s.in, rows, y.data(), s.out, memory); },
                    2.0 * static_cast<double>(rows) * s.in * s.out);
            }
        }
    }

    const std::int64_t q_width = query_heads * head_dim, kv_width = kv_heads * head_dim;
    const auto q = normal(tokens * q_width), k = normal(tokens * kv_width), v = normal(tokens * kv_width);
    std::vector<std::int32_t> positions(static_cast<std::size_t>(tokens));
    for (std::size_t i = 0; i < positions.size(); ++i) {
        positions[i] = static_cast<std::int32_t>(i);
    }
    attention_call call;
    call.query_heads = query_heads;
    call.kv_heads = kv_heads;
    call.head_dim = head_dim;
    call.scale = 0.125f;
    call.query_row_stride = q_width;
    call.query_head_stride = head_dim;
    call.key_rows = tokens;
    call.key_positions = positions.data();
    call.keys.data = k.data();
    call.values.data = v.data();
    call.keys.row_stride = call.values.row_stride = kv_width;
    call.keys.head_stride = call.values.head_stride = head_dim;
    call.out = y.data();
    call.out_row_stride = q_width;
    call.out_head_stride = head_dim;
    for (const std::int64_t rows : {tokens, std::int64_t{1}}) {
        call.query_rows = rows;
        call.query_positions = positions.data() + (tokens - rows);
        call.queries = q.data();
        const double pairs =
            query_heads * (rows == 1 ? static_cast<double>(tokens)
                                     : 0.5 * static_cast<double>(tokens) * static_cast<double>(tokens + 1));
        const auto record = [&](const char* kind, const char* kernel, const std::function<void()>& work) {
            put(report["attention"], {{"queries", rows}, {"arithmetic", kind}, {"kernel", kernel}}, work,
                4 * pairs * head_dim);
        };
        for (const simd_level level : {simd_level::avx2, simd_level::avx512}) {
            if (level <= best_simd()) {
                record("fp32", level_name(level), [&] { attend_fp32(call, memory, level); });
            }
        }
        for (const arithmetic kind : {arithmetic::bf16x3, arithmetic::bf16}) {
            if (resolve(kind) != kind) continue;
            call.kind = kind;
            record(name(kind), "amx", [&] { attend(call, memory); });
        }
    }

    const auto record = [&](const char* operation, const std::function<void()>& work) {
        put(report["rows"], {{"operation", operation}}, work);
    };
    const auto weight = normal(hidden);
    const rope_table table(static_cast<std::int32_t>(tokens), head_dim, 100000);
    std::vector<float> z(static_cast<std::size_t>(tokens * ffn));
    record("rms_norm",
           [&] { rms_norm(x.data(), hidden, weight.data(), 1e-5f, tokens, hidden, z.data(), hidden); });
    record("rope q and k", [&] {
        rope(y.data(), q_width, head_dim, query_heads, tokens, positions.data(), table);
        rope(z.data(), kv_width, head_dim, kv_heads, tokens, positions.data(), table);
    });
    record("swiglu", [&] { swiglu(y.data(), 2 * ffn, y.data() + ffn, 2 * ffn, tokens, ffn, z.data(), ffn); });
    record("add", [&] { add(x.data(), hidden, tokens, hidden, z.data(), hidden); });

    if (out.empty()) {
        std::cout << report.dump(1) << '\n';
    } else if (!(std::ofstream(out) << report.dump(1) << '\n')) {
        std::cerr << "--out: expected a path that can be written, came " << out << '\n';
        return 2;
    }
}
