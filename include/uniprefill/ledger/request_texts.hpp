// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Where the tokens of several requests lie, for calls about all of them at once.
#pragma once

#include <uniprefill/ledger/kv_slots.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// One text for each request, at equal distances.
/// @tparam Token int32, uint32 or int64
template <class Token = std::int32_t>
struct request_texts {
    const Token* tokens = nullptr; // [num_requests, stride]
    std::int64_t stride = 0;       ///< tokens from one text to the next; no text is longer
    request_index rows = request_index::batch;
};

UNIPREFILL_END_NAMESPACE
