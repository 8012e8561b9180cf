// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Extents that are a constant or known at run time only, with one spelling (G, n, head dimension).
#pragma once

#include <uniprefill/core/config.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// Marks an extent whose value comes at run time.
inline constexpr std::int32_t dynamic = -1;

/// An extent: `extent<64>{}` occupies nothing and is a constant, `extent<dynamic>{g}` carries a value.
template <std::int32_t Value>
struct extent {
    static constexpr bool is_static = true;
    constexpr extent() noexcept = default;
    /// A run-time value is accepted so that generic code can construct either kind; it is not stored.
    UNIPREFILL_API constexpr explicit extent(std::int32_t) noexcept {}
    [[nodiscard]] UNIPREFILL_API static constexpr std::int32_t value() noexcept { return Value; }
};

template <>
struct extent<dynamic> {
    static constexpr bool is_static = false;
    constexpr extent() noexcept = default;
    /// Carries @p value.
    UNIPREFILL_API constexpr explicit extent(std::int32_t value) noexcept
        : value_(value) {}
    [[nodiscard]] UNIPREFILL_API constexpr std::int32_t value() const noexcept { return value_; }

  private:
    std::int32_t value_ = 0;
};

UNIPREFILL_END_NAMESPACE
