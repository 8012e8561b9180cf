// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// The CUDA backend against the oracle.
///
/// Which combinations are compiled: every value occurs, and every pair of an element with a D, a G or a page
/// model. Each line runs on both bodies with every number of query heads of a KV head (1, 3, 4, 5, 8),
/// without lists, with lists by query head, by KV head and by query block, with a soft-cap, with sink logits
/// and a scale, with the model's window over dropped stretches, and with kept rows alone: so that each of
/// these meets every value below, and every number of heads meets every kind of lists.
///
///   D    G    element    page model
///   64   16   bfloat16   page table
///   64   256  half       none
///   80   64   half       CSR
///   80   32   bfloat16   token slots
///   96   128  bfloat16   contiguous
///   96   16   half       page pointers
///   128  64   bfloat16   CSR
///   128  32   half       page table
///   192  256  bfloat16   page pointers
///   192  64   half       token slots
///   256  32   bfloat16   none
///   256  128  half       contiguous

#include "gpu_scene.cuh"

namespace attend_test {

using importance_test::contiguous;
using importance_test::csr_pages;
using importance_test::none;
using importance_test::page_pointers;
using importance_test::page_table;
using importance_test::token_slots;

inline std::vector<request> ragged_requests(std::int32_t G, bool cached) {
    const std::int32_t c = cached ? 1 : 0;
    std::vector<request> requests;
    requests.push_back({11, up::request_tag::prefill, 0, {433 + G}});
    requests.push_back({12, up::request_tag::prefill, 0, {5}});
    requests.push_back({13, up::request_tag::prefill, 0, {170, 0, 229, 77}});
    requests.push_back({14, up::request_tag::decode, 300 * c, {1}});
    requests.push_back({15, up::request_tag::chunk, 275 * c, {264, 90}});
    requests.push_back({16, up::request_tag::prefill, 0, {0}});
    requests.push_back({17, up::request_tag::chunk, 700 * c, {G + 1}});
    requests[0].gaps = true;
    requests[4].gaps = true;
    requests[6].spread = 4.0f;
    return requests;
}

/// Three of four query blocks of a head have a list.
inline bool own_blocks(std::uint64_t seed, std::int32_t segment, std::int32_t head, std::int32_t query_block,
                       int block) {
    const auto list = static_cast<std::uint64_t>((segment * 100 + query_block) * 100 + head);
    return block < 0 ? coin(seed, 3, list, 0, 75)
                     : coin(seed, 1, list, static_cast<std::uint64_t>(block), 40);
}

/// @p line counts the combinations
template <class T, std::int32_t D, std::int32_t G, class View>
void check_line(std::int32_t line) {
    using policy = up::attention_policy<G, D>;
    constexpr std::int32_t groups[] = {1, 3, 4, 5, 8};
    for (const std::uint32_t number : uniprefill_test::spread_cases(5, 2)) {
        const auto which = static_cast<std::int32_t>(number);
        const std::int32_t kv_heads = which == 0 ? 3 : which == 4 ? 1 : 2;
        const model shape{groups[which] * kv_heads, kv_heads, D, G, 8};
        scene<T> what(shape, ragged_requests(G, !std::is_same_v<View, none>));
        if (which >= 3) {
            what.keep_rows([](std::uint64_t seed, std::int32_t row) {
                return coin(seed, 2, 0, static_cast<std::uint64_t>(row), 60);
            });
        }
        const std::int32_t kind = (which + line) % 4;
        const std::int32_t lists = kind == 0                                   ? 0
                                   : kind == 1 || (kind == 3 && line % 2 == 0) ? shape.heads
                                                                               : shape.kv_heads;
        const std::int32_t windows[] = {0, 1, G + 40, 100, 300};
        if (kind == 3) {
            constexpr std::int32_t query_rows[] = {64, 16, 100, 33, 48};
            what.list_own_blocks(lists, windows[(which + line) % 5], query_rows[which], own_blocks);
        } else if (lists > 0) {
            what.list_blocks(lists, windows[(which + line) % 5],
                             [](std::uint64_t seed, std::int32_t segment, std::int32_t head, int block) {
                                 return coin(seed, 1, static_cast<std::uint64_t>(segment * 100 + head),
                                             static_cast<std::uint64_t>(block), 40);
                             });
        }
        if (which == 1) {
            what.options.params.softcap = 6.0f;
        } else if (which == 2) {
            what.sinks = {0.5f, -3.0f, 4.0f, 0.0f, 2.0f, 1.0f, -1.0f, 7.0f};
            what.options.params.sink_logits = what.sinks.data();
            what.options.params.scale = 0.15f;
        } else if (which == 3) {
            what.set_window(150);
        }
        device_scene<T> on_device(what);
        const caches<T> k(what.keys);
        const caches<T> v(what.values);
        const device_caches<T> device_k(k);
        const device_caches<T> device_v(v);
        if (std::is_same_v<View, none>) {
            on_device.batch().cached_lens = nullptr;
        }
        INFO("D " << D << ", G " << G << ", " << shape.heads << '/' << shape.kv_heads << " heads, " << lists
                  << " lists");
        std::vector<output<T>> results;
        for (const up::cuda_device& device : each_body<true>()) {
            INFO(name_of(device));
            results.push_back(attend_on_device<policy>(what, on_device, View::view(device_k),
                                                       View::view(device_v), device));
        }
        if (results.size() == 2) {
            check_agreement(results[0], results[1]);
        }
        const double worst = check_on_device(what, results, uniprefill_test::scaled(24, 6));
        std::cout << "D " << D << " G " << G << " case " << which << ": " << worst << " of the bound"
                  << std::endl;
    }
}

} // namespace attend_test
