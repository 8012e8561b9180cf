// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/app/policy.hpp"
#include "engine/app/quality.hpp"

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace engine {

struct machine_info {
    std::string cpu; ///< as the processor calls itself
    std::int32_t threads = 1;
    std::string arithmetic; ///< of the matrix products
    std::string device{};   ///< that computed instead of the processor's threads; empty: none
};

/// One layer of one prefill.
struct layer_row {
    std::int32_t layer = 0;
    std::int32_t rows_in = 0;
    std::int32_t rows_kept = 0;
    double share = 1;              ///< rows_kept of the prompt's tokens
    double dropped_mass_share = 0; ///< of the mass that the rule looked at
    double seconds = 0;
    bool selects = false;
    std::string reason; ///< why the layer kept what it kept, where it selects
};

/// One prefill and what was generated after it.
struct prefill_run {
    double ttft_s = 0; ///< from tokens in to the first token out
    std::vector<layer_row> layers;
    std::int64_t peak_memory_bytes = 0; ///< 0: not known
    std::vector<std::int32_t> generated;
    std::string generated_text; ///< any bytes
};

/// What a selecting layer saw.
struct selecting_layer_masses {
    std::int32_t layer = 0;
    std::string rule;                               ///< in words
    std::vector<double> block_mass;                 ///< share of the whole mass, forced rows included
    std::vector<std::int32_t> block_first_position; ///< in the prompt; as long as block_mass
    std::vector<bool> kept;
    std::vector<bool> forced; ///< no row of the block could have been dropped
};

/// All that `compare` has to say.
struct report {
    std::string model;
    std::string prompt_name;
    engine::policy policy;
    machine_info machine;
    std::int32_t tokens = 0; ///< of the prompt
    prefill_run dense;
    prefill_run sparsified;
    double lin = 1;             ///< rows entering output projection and MLP, mean over layers, share of dense
    double att = 1;             ///< (query, key) pairs that attention scores, share of dense
    double estimator_pairs = 0; ///< pairs that the estimator scores, share of the same; not in att
    engine::quality quality;
    bool quality_on_real_tokens = true; ///< else on the dense run's greedy ones
    std::vector<selecting_layer_masses> masses;
    std::vector<std::int32_t> drop_layer; ///< [tokens] layer at which each was (first) dropped, -1: never
    std::vector<std::string> token_bytes; ///< [tokens] its text, any bytes

    /// Dense over sparsified time to first token; 0 if the latter isn't positive.
    double speedup() const { return sparsified.ttft_s > 0 ? dense.ttft_s / sparsified.ttft_s : 0; }
};

/// For a terminal: at most 100 columns, no control characters from outside.
void print_report(const report& made, std::ostream& out);

/// One JSON object: tokens, dense.ttft_s, sparsified.ttft_s, speedup, lin, att, estimator_pairs,
/// quality.{kl_mean, kl_median, kl_max, agree, agree_sure, dnll, ...}, layers[], model, prompt, machine,
/// policy (as in a policy file), selecting_layers[] (masses), dropped[] (runs of positions and the layer that
/// dropped them). Numbers that don't exist are null, bytes that aren't UTF-8 become U+FFFD. Ends with a
/// newline.
std::string report_json(const report& made);

/// One page that needs nothing from anywhere. Scripts and outside resources are forbidden by its own policy;
/// every text from outside is escaped.
std::string report_html(const report& made);

} // namespace engine
