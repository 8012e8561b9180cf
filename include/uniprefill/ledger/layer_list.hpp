// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Some layers of a model, for calls that answer for several at once.
#pragma once

#include <uniprefill/core/config.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// Layers `first` to `first + count - 1`, or those that an array names.
struct layer_list {
    std::int32_t first = 0;
    std::int32_t count = 0;
    const std::int32_t* layers = nullptr; // [count]; null: consecutive

    /// The layer at place @p index, below count.
    [[nodiscard]] UNIPREFILL_API std::int32_t at(std::int32_t index) const noexcept {
        return layers != nullptr ? layers[index] : first + index;
    }
};

UNIPREFILL_END_NAMESPACE
