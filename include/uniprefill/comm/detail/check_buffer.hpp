// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What every reduction refuses before it sends anything.
#pragma once

#include <uniprefill/core/status.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

[[nodiscard]] inline UNIPREFILL_HOST_API status check_rank_buffer(bool has_ranks, const std::int64_t* buffer,
                                                                  std::int64_t count) noexcept {
    if (!has_ranks) {
        return failure(status_code::invalid_argument, "ranks", "a communicator", 0);
    }
    if (count < 0) {
        return failure(status_code::invalid_argument, "count", ">= 0", count);
    }
    if (buffer == nullptr && count > 0) {
        return failure(status_code::invalid_argument, "buffer", "an array of count integers", 0);
    }
    return success();
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
