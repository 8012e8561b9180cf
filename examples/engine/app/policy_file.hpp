// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/app/policy.hpp"

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace engine {

// A policy file (docs/policy-file.md has the whole story):
//
//   {
//     "uniprefill_policy": 1,         the format's version; required, as is "layers"
//     "name": "...",
//     "comment": "..." or ["...", ...],
//     "block_rows": 64,               G, 8 to 256
//     "observations": 128,            n, 1 to 512
//     "sink": 128, "tail": 128,       forced rows; tail is n unless given
//     "min_length": 0, "span": 0,
//     "propagation": "cumulative",    or "revive"
//     "selector": "top-p",            these may stand in an entry of "layers" too, and win there
//     "scope": "free",                or "all"
//     "p": 0.98,
//     "budget": 2048,
//     "min_kept": 0, "max_kept": 2147483647,
//     "ties": "lower-block-first",    or "higher-block-first"
//     "crossing": "minimal",          or "published"
//     "layers": [7, {"layer": 11, "p": 0.99}, ...],
//     "lists": {"p": 0.99, "sink": 64, "window": 256,   and the other keys of a rule; left out: no lists
//               "mean": false,                          whether blocks that are skipped are met by their
//               means "query_rows": 64, "sample": 8,          lists of their own for so many query rows; else
//               none "layers": [{"layer": 3, "p": 0.9}]}     rules of their own by layer, as above
//   }

/// Larger files are refused unread.
constexpr std::size_t max_policy_bytes = std::size_t{1} << 16;

/// Reads a policy file. Strict: what isn't known, is twice there, has the wrong type or is out of range is an
/// `error` whose argument is `source` and the JSON path.
policy parse_policy(std::string_view json, const std::string& source);

/// The same from a file. Throws `error` if it can't be read or is larger than `max_policy_bytes`.
policy load_policy(const std::string& path);

/// A policy file that `parse_policy` reads back to the same policy, every key written out. Ends with a
/// newline.
std::string write_policy(const policy& written);

/// A policy that ships with the engine and is compiled into it.
struct shipped_policy {
    const char* file; ///< name under examples/engine/policies
    const char* json;
};
const std::vector<shipped_policy>& shipped_policies();

} // namespace engine
