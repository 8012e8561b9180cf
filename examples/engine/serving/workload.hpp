// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/app/serve_options.hpp"
#include "engine/model_file/tokenizer.hpp"
#include "engine/serving/request.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace engine {

/// A request and when it comes.
struct arrival {
    double seconds = 0;
    std::int32_t number = 0; ///< as drawn, whatever the order of arrival
    serving_request request;
};

/// Times and lengths of one request of a trace.
struct trace_row {
    double seconds = 0; ///< since the first one
    std::int32_t prompt = 0;
    std::int32_t new_tokens = 0;
};

/// Reads CSV text whose first line is TIMESTAMP,ContextTokens,GeneratedTokens and whose timestamps are of one
/// form, 2023-11-16 18:15:46.6805900, and don't fall; at most @p most rows of it. Throws `error`, naming the
/// file and the line.
std::vector<trace_row> read_trace(const std::string& name, const std::string& text, std::int32_t most);

/// The tokens of each text that the list names. Throws `error` where one can't be read.
std::vector<std::vector<std::int32_t>> read_texts(const std::string& list, const tokenizer& words);

/// Requests by rising time: passages of the texts, their lengths and the times between them drawn by the seed
/// (prompt lengths evenly on a logarithmic scale, times as a Poisson process has them) or taken from a trace,
/// whose lengths are cut to the options' bounds and whose times are its own unless a rate is asked for. A
/// share of the prompts begins with the beginning of one of a few texts, as questions about the same document
/// do, and goes on with a passage of its own. The same everywhere for the same options.
std::vector<arrival> draw_workload(const workload_options& options,
                                   const std::vector<std::vector<std::int32_t>>& texts);

} // namespace engine
