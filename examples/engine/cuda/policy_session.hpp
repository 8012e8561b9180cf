// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/app/policy.hpp"
#include "engine/cuda/session.hpp"
#include "engine/model/layer_record.hpp"

#include <cstdint>
#include <vector>

namespace engine::cuda {

/// What a policy says of a session. Throws `error` on what is the CPU engine's alone.
session_options options_under(const policy& policy, std::int32_t prompt, std::int32_t following);

/// The same for a session that there is, of the same prompt length and spans.
void change_policy(session& session, const policy& policy);

/// Facts as both engines report them. The estimator's pairs are those of rows that entered: segments that it
/// leaves alone are counted all the same.
std::vector<layer_record> records_of(const session& session);

} // namespace engine::cuda
