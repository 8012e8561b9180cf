// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace engine {

/// Where the forward pass runs.
enum class device_kind { cpu, cuda };

/// What a measured prefill does besides what every prefill does.
enum class prefill_mode {
    dense, ///< nothing
    drop,  ///< rows are dropped at selecting layers
    lists, ///< each head reads the blocks of its list
    both,
};

/// Whose attention reads the keys where every query reads every key before it.
enum class attention_kind {
    cudnn,      ///< cuDNN's; where kept queries read keys of dropped rows too, the library's
    uniprefill, ///< the library's everywhere
};

/// How the host learns the number of rows after a decision.
enum class counts_kind {
    read,    ///< one asynchronous copy for each selecting layer, waited for
    budget,  ///< it says the number itself (fixed-budget rule): the whole prefill is one graph
    buckets, ///< read, rounded up, and what lies between two decisions is a graph for each rounded number
};

/// A measured prefill (command prefill): every attention, length and mode asked for.
struct prefill_options {
    std::string shape = "llama3-8b";
    std::optional<std::int32_t> layers; ///< fewer or more than the shape's
    std::vector<std::int32_t> tokens{32768};
    std::vector<prefill_mode> modes{prefill_mode::dense};
    std::vector<attention_kind> attention{attention_kind::uniprefill};
    counts_kind counts = counts_kind::read;
    std::int32_t bucket_rows = 1024;
    double keep = 0.65;                  ///< of the rows, at each selecting layer
    std::vector<std::int32_t> selecting; ///< layers; empty: 7, 11, 15, ... but not the last
    double blocks = 0.15;                ///< of a segment's blocks, on each list
    bool lists_by_kv_head = false;
    std::int32_t list_sink = 64;
    std::int32_t list_window = 256;
    std::int32_t min_length = 0; ///< shorter prompts run dense
    std::int32_t warmups = 2;
    std::int32_t repeats = 5;
    bool in_turn = false; ///< all that is asked for of one length at once, run by run
    std::uint64_t seed = 1;
    std::string json; ///< a file for the figures; empty: none
};

const char* name_of(device_kind kind);
const char* name_of(prefill_mode mode);
const char* name_of(attention_kind kind);
const char* name_of(counts_kind kind);
bool parse(const std::string& text, device_kind& kind);
bool parse(const std::string& text, prefill_mode& mode);
bool parse(const std::string& text, attention_kind& kind);
bool parse(const std::string& text, counts_kind& kind);

} // namespace engine
