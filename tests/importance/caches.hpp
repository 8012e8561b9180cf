// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The cached keys of a step, laid out as each cache view has it.
#pragma once

#include "step.hpp"

#include <uniprefill/core/kv_view.hpp>

#include <cmath>
#include <numeric>
#include <type_traits>

namespace importance_test {

/// The value of an element; of e4m3, one that is no NaN.
template <class T>
float value_of(T number) {
    return up::to_float(number);
}
template <>
inline float value_of(up::float8_e4m3 number) {
    const int exponent = number.bits >> 3 & 15;
    const int mantissa = number.bits & 7;
    const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                     : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    return (number.bits & 0x80) != 0 ? -size : size;
}

/// A value as an element: to nearest, ties to even; e4m3 saturates at 448.
template <class T>
T element_of(float value) {
    if constexpr (std::is_same_v<T, up::float8_e4m3>) {
        const float size = std::fabs(value);
        int code = 0;
        while (code < 126 && value_of(up::float8_e4m3{static_cast<std::uint8_t>(code + 1)}) <= size) {
            ++code;
        }
        if (code < 126) {
            const float below = size - value_of(up::float8_e4m3{static_cast<std::uint8_t>(code)});
            const float above = value_of(up::float8_e4m3{static_cast<std::uint8_t>(code + 1)}) - size;
            code += above < below || (above == below && code % 2 == 1) ? 1 : 0;
        }
        code = std::isnan(value) ? 127 : code;
        return {static_cast<std::uint8_t>(code | (std::signbit(value) ? 0x80 : 0))};
    } else {
        return up::from_float<T>(value);
    }
}

/// Cached keys behind all six views. T is the element of the cache, Source that of the step.
template <class T>
class caches {
  public:
    static constexpr std::int32_t page_tokens = 5;

    template <class Source>
    explicit caches(const step<Source>& from) {
        const model& shape = from.shape();
        const auto& requests = from.requests();
        for (const request& what : requests) {
            most_ = std::max(most_, what.cached);
        }
        token_ = std::int64_t{shape.kv_heads} * shape.head_dim;
        head_ = shape.head_dim;
        pages_each_ = (most_ + page_tokens - 1) / page_tokens;
        const auto count = static_cast<std::int64_t>(requests.size());
        const std::int64_t num_pages = count * pages_each_;
        rows_.resize(static_cast<std::size_t>(count * most_ * token_));
        pages_.resize(static_cast<std::size_t>(num_pages * page_tokens * token_));
        slots_.resize(static_cast<std::size_t>(count * most_));
        table_.resize(static_cast<std::size_t>(num_pages));
        pointers_.resize(static_cast<std::size_t>(num_pages));
        // Pages and slots in an order that has nothing to do with tokens.
        std::iota(table_.begin(), table_.end(), 0);
        std::shuffle(table_.begin(), table_.end(), std::mt19937(7));
        for (std::size_t i = 0; i < table_.size(); ++i) {
            pointers_[i] = page(table_[i]);
        }
        for (std::int32_t r = 0; r < static_cast<std::int32_t>(count); ++r) {
            const std::int32_t cached = requests[static_cast<std::size_t>(r)].cached;
            const Source* keys = from.data[static_cast<std::size_t>(r)].keys.data();
            for (std::int32_t token = 0; token < cached; ++token) {
                const std::int32_t entry =
                    table_[static_cast<std::size_t>(r * pages_each_ + token / page_tokens)];
                slots_[static_cast<std::size_t>(r * most_ + token)] =
                    entry * page_tokens + token % page_tokens;
                T* in_page = page(entry) + token % page_tokens * token_;
                T* in_row = rows_.data() + (std::int64_t{r} * most_ + token) * token_;
                for (std::int64_t i = 0; i < token_; ++i) {
                    in_page[i] = in_row[i] = element_of<T>(up::to_float(keys[token * token_ + i]));
                }
            }
            for (std::int32_t i = 0; i < (cached + page_tokens - 1) / page_tokens; ++i) {
                indices_.push_back(table_[static_cast<std::size_t>(r * pages_each_ + i)]);
            }
            indptr_.push_back(static_cast<std::int32_t>(indices_.size()));
        }
        indices_.push_back(0); // an array even where nothing is cached
    }

    [[nodiscard]] up::contiguous_cache<T> contiguous() const {
        return {rows_.data(), most_ * token_, token_, head_};
    }
    [[nodiscard]] up::page_table_cache<T> page_table() const {
        return {pages_.data(), page_tokens * token_, token_, head_, table_.data(), pages_each_, page_tokens};
    }
    [[nodiscard]] up::csr_page_cache<T> csr_pages() const {
        return {pages_.data(),  page_tokens * token_, token_,     head_,
                indptr_.data(), indices_.data(),      page_tokens};
    }
    [[nodiscard]] up::token_slot_cache<T> token_slots() const {
        return {pages_.data(), token_, head_, slots_.data(), most_};
    }
    [[nodiscard]] up::page_pointer_cache<T> page_pointers() const {
        return {pointers_.data(), pages_each_, 0, token_, head_, page_tokens};
    }

    /// The arrays, for copies in other memory: the views of a copy differ in addresses alone.
    [[nodiscard]] const std::vector<T>& rows() const { return rows_; }
    [[nodiscard]] const std::vector<T>& pages() const { return pages_; }
    [[nodiscard]] const std::vector<std::int32_t>& slots() const { return slots_; }
    [[nodiscard]] const std::vector<std::int32_t>& table() const { return table_; }
    [[nodiscard]] const std::vector<std::int32_t>& indptr() const { return indptr_; }
    [[nodiscard]] const std::vector<std::int32_t>& indices() const { return indices_; }

    T* contiguous_token(std::int32_t request_index, std::int32_t token) {
        return rows_.data() + (std::int64_t{request_index} * most_ + token) * token_;
    }

  private:
    T* page(std::int32_t index) { return pages_.data() + index * page_tokens * token_; }

    std::int32_t most_ = 1;
    std::int32_t pages_each_ = 0;
    std::int64_t token_ = 0;
    std::int64_t head_ = 0;
    std::vector<T> rows_;
    std::vector<T> pages_;
    std::vector<std::int32_t> slots_;
    std::vector<std::int32_t> table_;
    std::vector<const void*> pointers_;
    std::vector<std::int32_t> indptr_{0};
    std::vector<std::int32_t> indices_;
};

} // namespace importance_test
