// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/app/calibrate_options.hpp"
#include "engine/app/policy.hpp"
#include "engine/app/prefill_options.hpp"
#include "engine/app/sampling.hpp"
#include "engine/app/serve_options.hpp"
#include "engine/cpu/features.hpp"

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

namespace engine {

enum class command { calibrate, compare, generate, inspect, prefill, serve_sim };

using cpu::arithmetic; ///< what the matrix products compute in

/// What the command line says about the policy; empty where it says nothing.
struct policy_options {
    struct layer_share {
        std::int32_t layer = 0;
        std::optional<double> share;
    };
    std::string file;
    std::optional<uniprefill::rule_kind> selector;
    std::optional<uniprefill::mass_scope> scope;
    std::optional<double> share;
    std::optional<std::int32_t> budget;
    std::optional<std::int32_t> min_kept;
    std::optional<std::int32_t> max_kept;
    std::optional<std::int32_t> block_rows;
    std::optional<std::int32_t> observations;
    std::optional<std::int32_t> sink;
    std::optional<std::int32_t> tail;
    std::optional<std::int32_t> min_length;
    std::optional<std::int32_t> span;
    std::optional<uniprefill::propagation> propagation;
    std::optional<double> list_share; ///< of block lists; 0: none
    std::vector<layer_share> layers;  ///< empty: those of the policy file

    /// Whether anything at all was said.
    bool any() const;
};

struct options {
    engine::command command = command::compare;
    std::string model;
    std::optional<std::string> text;
    std::optional<std::string> text_file; ///< "-": standard input
    policy_options policy;
    bool dense = false; ///< generate without dropping anything
    device_kind device = device_kind::cpu;
    engine::arithmetic arithmetic = arithmetic::automatic;
    std::int32_t threads = 1;
    std::int32_t tokens = 40; ///< to generate
    sampling_options sampling;
    std::optional<std::int32_t> continuation; ///< real tokens at the prompt's end that are held out
    std::string out = "uniprefill-report";
    bool json = false;
    serve_options serve;     ///< serve-sim
    prefill_options prefill; ///< prefill
    calibrate_options calibrate;
};

/// A command line as understood: either something to do, or a text (help, version) to print before exit code
/// 0.
struct command_line {
    std::optional<options> run;
    std::string print;
};

/// Reads the arguments after the program's name. Throws `error` on anything that can't be done, whatever the
/// reason; `cores` bounds the threads and is their default.
command_line parse_command_line(const std::vector<std::string>& arguments, std::int32_t cores);

/// The policy for this model: the file's if one is named, else the default, changed by the options. Throws
/// `error` if the file is bad, the whole doesn't hold together, or a layer is one that the model doesn't
/// have.
policy resolve_policy(const options& chosen, const model_identity& model);

/// The bytes of a file that @p option names. Throws `error` if it can't be read or is larger than 256 MiB.
std::string read_file(const std::string& option, const std::string& path);

/// The prompt's bytes, from the option, the file or `standard_input`. Throws `error` if the file can't be
/// read, the prompt is empty or it is larger than 256 MiB.
std::string read_prompt(const options& chosen, std::istream& standard_input);

/// How the tokens of the text are used.
struct prompt_plan {
    std::int32_t prompt = 0; ///< tokens that are prefilled
    std::int32_t held_out =
        0; ///< real tokens after them, for the quality figures; 0: compare on greedy tokens
    std::int32_t compared = 0; ///< tokens fed after the prompt for the quality figures, real or greedy
};

/// `compare` holds out `--continuation` tokens (64 unless given, none if the text is too short for that);
/// `generate` prefills all. Throws `error` if there are no tokens, none is left to prefill, or prompt and
/// what follows it exceed the model's context.
prompt_plan plan_prompt(const options& chosen, std::int32_t tokens, std::int32_t context);

bool parse(const std::string& text, arithmetic& kind);
bool parse(const std::string& text, preemption& way);
const char* name_of(preemption way);

} // namespace engine
