// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The vectors that the host kernels are written in: the compiler's own where it has them, arrays elsewhere.
#pragma once

#include <uniprefill/core/detail/host_build.hpp>
#include <uniprefill/core/element.hpp>

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

#if (defined(__GNUC__) || defined(__clang__)) && !defined(UNIPREFILL_ARRAY_VECTORS)

// Declared outside of templates: __builtin_convertvector wants to see the type.
using float_vector __attribute__((vector_size(host_vectors.bytes))) = float;
using int_vector __attribute__((vector_size(host_vectors.bytes))) = std::int32_t;

template <std::int32_t Build>
struct UNIPREFILL_HIDDEN vectors {
    using floats = float_vector;
    using ints = int_vector;

    static ints to_ints(floats value) noexcept { return __builtin_convertvector(value, int_vector); }
    static floats to_floats(ints value) noexcept { return __builtin_convertvector(value, float_vector); }
    static ints bits(floats value) noexcept { return reinterpret_cast<int_vector>(value); }
    static floats from_bits(ints value) noexcept { return reinterpret_cast<float_vector>(value); }
    static floats select(ints condition, floats yes, floats no) noexcept { return condition ? yes : no; }
    static ints select(ints condition, ints yes, ints no) noexcept { return condition ? yes : no; }
    static floats splat(float value) noexcept { return value - floats{}; }
    static ints splat(std::int32_t value) noexcept { return value - ints{}; }
};

#else

/// Element-wise arithmetic on a plain array, with the operators that the kernels use.
template <class T>
struct UNIPREFILL_HIDDEN array_vector {
    static constexpr std::int32_t size = host_vectors.bytes / 4;
    T lane[size];

    template <class Result, class Operation>
    static array_vector<Result> map(Operation operation) noexcept {
        array_vector<Result> result;
        for (std::int32_t i = 0; i < size; ++i) {
            result.lane[i] = static_cast<Result>(operation(i));
        }
        return result;
    }
    friend array_vector operator+(const array_vector& a, const array_vector& b) noexcept {
        return map<T>([&](std::int32_t i) { return a.lane[i] + b.lane[i]; });
    }
    friend array_vector operator-(const array_vector& a, const array_vector& b) noexcept {
        return map<T>([&](std::int32_t i) { return a.lane[i] - b.lane[i]; });
    }
    friend array_vector operator*(const array_vector& a, const array_vector& b) noexcept {
        return map<T>([&](std::int32_t i) { return a.lane[i] * b.lane[i]; });
    }
    friend array_vector operator/(const array_vector& a, const array_vector& b) noexcept {
        return map<T>([&](std::int32_t i) { return a.lane[i] / b.lane[i]; });
    }
    friend array_vector operator&(const array_vector& a, const array_vector& b) noexcept {
        return map<T>([&](std::int32_t i) { return a.lane[i] & b.lane[i]; });
    }
    friend array_vector operator|(const array_vector& a, const array_vector& b) noexcept {
        return map<T>([&](std::int32_t i) { return a.lane[i] | b.lane[i]; });
    }
    friend array_vector operator<<(const array_vector& a, std::int32_t bits) noexcept {
        return map<T>([&](std::int32_t i) { return static_cast<std::uint32_t>(a.lane[i]) << bits; });
    }
    friend array_vector operator>>(const array_vector& a, std::int32_t bits) noexcept {
        return map<T>([&](std::int32_t i) { return a.lane[i] >> bits; });
    }
    friend array_vector<std::int32_t> operator>(const array_vector& a, const array_vector& b) noexcept {
        return map<std::int32_t>([&](std::int32_t i) { return a.lane[i] > b.lane[i] ? -1 : 0; });
    }
};

template <std::int32_t Build>
struct UNIPREFILL_HIDDEN vectors {
    using floats = array_vector<float>;
    using ints = array_vector<std::int32_t>;

    static ints to_ints(const floats& value) noexcept {
        return floats::map<std::int32_t>([&](std::int32_t i) { return value.lane[i]; });
    }
    static ints bits(const floats& value) noexcept { return bit_cast<ints>(value); }
    static floats from_bits(const ints& value) noexcept { return bit_cast<floats>(value); }
    static floats to_floats(const ints& value) noexcept {
        return ints::map<float>([&](std::int32_t i) { return value.lane[i]; });
    }
    template <class T>
    static array_vector<T> select(const ints& condition, const array_vector<T>& yes,
                                  const array_vector<T>& no) noexcept {
        return array_vector<T>::template map<T>(
            [&](std::int32_t i) { return condition.lane[i] != 0 ? yes.lane[i] : no.lane[i]; });
    }
    static floats splat(float value) noexcept {
        return floats::map<float>([&](std::int32_t) { return value; });
    }
    static ints splat(std::int32_t value) noexcept {
        return ints::map<std::int32_t>([&](std::int32_t) { return value; });
    }
};

#endif

/// A function that is always part of its caller: what it does with registers can't wait for a call.
#if defined(__GNUC__) || defined(__clang__)
#    define UNIPREFILL_INLINED UNIPREFILL_HOST_API inline __attribute__((always_inline))
#else
#    define UNIPREFILL_INLINED UNIPREFILL_HOST_API inline
#endif

/// Calls body(0), body(1), ... with constants: an unrolled loop that keeps arrays in registers at every
/// optimisation level.
template <class Body, std::int32_t... Index>
UNIPREFILL_INLINED void unroll(std::integer_sequence<std::int32_t, Index...>, const Body& body) noexcept {
    (body(std::integral_constant<std::int32_t, Index>{}), ...);
}
template <std::int32_t Count, class Body>
UNIPREFILL_INLINED void unroll(const Body& body) noexcept {
    unroll(std::make_integer_sequence<std::int32_t, Count>{}, body);
}

/// Everything else that the kernels do with vectors, in terms of the above.
template <std::int32_t Build>
struct UNIPREFILL_HIDDEN lanes : vectors<Build> {
    using typename vectors<Build>::floats;
    using typename vectors<Build>::ints;
    using vectors<Build>::bits;
    using vectors<Build>::select;
    using vectors<Build>::splat;
    using vectors<Build>::to_floats;
    using vectors<Build>::to_ints;

    static constexpr std::int32_t width = host_vectors.bytes / 4;
    static constexpr std::int32_t panel_vectors = host_vectors.panel_vectors;
    static constexpr std::int32_t panel = width * panel_vectors; ///< query rows of a tile
    static constexpr std::int32_t keys = host_vectors.keys;      ///< keys of a tile

    static floats load(const float* from) noexcept {
        floats value;
        std::memcpy(&value, from, sizeof value);
        return value;
    }
    static ints load(const std::int32_t* from) noexcept {
        ints value;
        std::memcpy(&value, from, sizeof value);
        return value;
    }
    static void store(float* to, floats value) noexcept { std::memcpy(to, &value, sizeof value); }
    static void store(std::int32_t* to, ints value) noexcept { std::memcpy(to, &value, sizeof value); }

    /// Copies a row into floats. Runs of constant length vectorise at every optimisation level.
    template <class T>
    static void convert_row(const T* from, std::int32_t count, float* to) noexcept {
        std::int32_t i = 0;
        for (; i + 16 <= count; i += 16) {
            for (std::int32_t j = 0; j < 16; ++j) {
                to[i + j] = to_float(from[i + j]);
            }
        }
        for (; i < count; ++i) {
            to[i] = to_float(from[i]);
        }
    }

    static floats larger(floats a, floats b) noexcept { return select(a > b, a, b); }

    /// Keeps the larger of @p largest and the bits of @p value without its sign.
    static ints larger_magnitude(ints largest, floats value) noexcept {
        const ints magnitude = bits(value) & splat(0x7fffffff);
        return select(magnitude > largest, magnitude, largest);
    }
    /// Whether any lane of larger_magnitude()'s result saw NaN or infinity, told by its bits.
    static bool any_non_finite(ints largest) noexcept {
        std::int32_t each[width];
        std::memcpy(each, &largest, sizeof largest);
        bool found = false;
        for (const std::int32_t one : each) {
            found = found || one >= 0x7f800000;
        }
        return found;
    }
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
