// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The one error type: what failed, which argument, what was expected, what came.
#pragma once

#include <uniprefill/core/config.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdio>

UNIPREFILL_BEGIN_NAMESPACE

/// Why a call was refused.
enum class status_code : std::int32_t {
    ok = 0,
    invalid_argument,    ///< a value that no call can accept (null pointer, p = 0, unsorted positions)
    out_of_range,        ///< a value beyond the limits that the object was made with
    workspace_too_small, ///< fewer bytes than workspace_bytes() or state_bytes() says
    misaligned,          ///< memory not aligned to `workspace::alignment`
    not_supported,       ///< a combination that this backend or method does not do
    wrong_state,         ///< a call out of order (append before begin, layers out of order)
    unknown_request,     ///< a request that was never admitted, or already released
    capacity_exceeded,   ///< no room left (requests, tokens, slots)
    backend_error,       ///< an error of the device runtime; `came` holds its code
};

/// The name of a code, for messages.
[[nodiscard]] UNIPREFILL_API constexpr const char* to_string(status_code code) noexcept {
    switch (code) {
    case status_code::ok:
        return "ok";
    case status_code::invalid_argument:
        return "invalid argument";
    case status_code::out_of_range:
        return "out of range";
    case status_code::workspace_too_small:
        return "workspace too small";
    case status_code::misaligned:
        return "misaligned";
    case status_code::not_supported:
        return "not supported";
    case status_code::wrong_state:
        return "wrong state";
    case status_code::unknown_request:
        return "unknown request";
    case status_code::capacity_exceeded:
        return "capacity exceeded";
    case status_code::backend_error:
        return "backend error";
    }
    return "unknown status code";
}

/// Result of a host call. Trivially copyable, holds static strings only, needs no exceptions.
/// A call that returns anything but ok has changed nothing.
struct [[nodiscard]] status {
    status_code code = status_code::ok;
    const char* argument = ""; ///< name of the argument, as in the documentation
    const char* expected = ""; ///< what would have been accepted
    double came = 0;           ///< the value that came; integers up to 2^53 are exact
    std::int32_t request = -1; ///< request (or segment) concerned, -1 when none
    std::int32_t layer = -1;   ///< layer concerned, -1 when none

    [[nodiscard]] UNIPREFILL_API constexpr bool ok() const noexcept { return code == status_code::ok; }
    UNIPREFILL_API constexpr explicit operator bool() const noexcept { return ok(); }

    /// The same status, naming a request.
    UNIPREFILL_API constexpr status at_request(std::int32_t index) const noexcept {
        status copy = *this;
        copy.request = index;
        return copy;
    }
    /// The same status, naming a layer.
    UNIPREFILL_API constexpr status at_layer(std::int32_t index) const noexcept {
        status copy = *this;
        copy.layer = index;
        return copy;
    }
};

/// The status of a call that did what it was asked.
UNIPREFILL_API constexpr status success() noexcept {
    return {};
}

/// A refusal. @p argument and @p expected must be string literals.
template <class Number>
UNIPREFILL_API constexpr status failure(status_code code, const char* argument, const char* expected,
                                        Number came) noexcept {
    return {code, argument, expected, static_cast<double>(came), -1, -1};
}

/// Writes "p: expected (0, 1], came 1.5 (invalid argument, request 3, layer 7)" into @p buffer.
/// @return the characters that the whole message needs, as snprintf does; the message is cut to @p size - 1.
inline UNIPREFILL_HOST_API std::size_t format(const status& what, char* buffer, std::size_t size) noexcept {
    if (what.ok()) {
        return static_cast<std::size_t>(std::snprintf(buffer, size, "ok"));
    }
    char request[24] = "";
    char layer[24] = "";
    if (what.request >= 0) {
        std::snprintf(request, sizeof request, ", request %ld", static_cast<long>(what.request));
    }
    if (what.layer >= 0) {
        std::snprintf(layer, sizeof layer, ", layer %ld", static_cast<long>(what.layer));
    }
    return static_cast<std::size_t>(std::snprintf(buffer, size, "%s: expected %s, came %.16g (%s%s%s)",
                                                  what.argument, what.expected, what.came,
                                                  to_string(what.code), request, layer));
}

UNIPREFILL_END_NAMESPACE

/// Returns from the enclosing function when @p expression is a status that is not ok.
#define UNIPREFILL_TRY(expression)                                                                           \
    do {                                                                                                     \
        if (const auto uniprefill_status_ = (expression); !uniprefill_status_.ok()) {                        \
            return uniprefill_status_;                                                                       \
        }                                                                                                    \
    } while (false)
