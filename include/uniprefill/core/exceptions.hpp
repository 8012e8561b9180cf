// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// For those who want exceptions: turns a status into one. Nothing else in the library includes this header.
#pragma once

#include <uniprefill/core/status.hpp>

#include <stdexcept>

UNIPREFILL_BEGIN_NAMESPACE

/// Thrown by throw_if_failed(); what() is the formatted status.
class error : public std::runtime_error {
  public:
    /// An exception with @p reason as its text.
    explicit UNIPREFILL_HOST_API error(const uniprefill::status& reason)
        : std::runtime_error(message(reason).text)
        , reason_(reason) {}
    /// What failed.
    [[nodiscard]] UNIPREFILL_HOST_API const uniprefill::status& reason() const noexcept { return reason_; }

  private:
    struct text_buffer {
        char text[320];
    };
    static UNIPREFILL_HOST_API text_buffer message(const uniprefill::status& reason) {
        text_buffer buffer{};
        static_cast<void>(format(reason, buffer.text, sizeof buffer.text));
        return buffer;
    }
    uniprefill::status reason_;
};

/// Throws uniprefill::error unless @p result is ok.
inline UNIPREFILL_HOST_API void throw_if_failed(const status& result) {
    if (!result.ok()) {
        throw error(result);
    }
}

UNIPREFILL_END_NAMESPACE
