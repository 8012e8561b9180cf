// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The caller's memory, carved into aligned pieces; the same code that carves also counts.
#pragma once

#include <uniprefill/core/status.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// A borrowed buffer. Operations carve their temporaries from it and never allocate.
///
/// Made without memory it only counts: every function that carves can be run on `workspace{}` to learn its
/// size, so the size query and the use can't disagree. Sizes are pure (no device needed) and monotone in
/// the extents that `limits` names, so an engine may size once for its maximum.
class workspace {
  public:
    /// Every piece starts at a multiple of this many bytes.
    static constexpr std::size_t alignment = 256;

    /// A workspace that only counts.
    workspace() noexcept = default;

    /// Borrows @p bytes bytes at @p data, which must be aligned to `alignment`.
    UNIPREFILL_HOST_API workspace(void* data, std::size_t bytes) noexcept
        : data_(static_cast<std::byte*>(data))
        , bytes_(bytes) {}

    /// Carves @p count elements. @return null when counting, or when the buffer is too small (see check()).
    template <class T>
    [[nodiscard]] UNIPREFILL_HOST_API T* take(std::int64_t count) noexcept {
        const std::size_t begin = used_;
        const std::size_t piece = static_cast<std::size_t>(count > 0 ? count : 0) * sizeof(T);
        used_ = begin + (piece + alignment - 1) / alignment * alignment;
        return data_ != nullptr && used_ <= bytes_ ? reinterpret_cast<T*>(data_ + begin) : nullptr;
    }

    /// Bytes carved so far, at least 1 so that an engine never allocates nothing by accident.
    [[nodiscard]] UNIPREFILL_HOST_API std::size_t bytes_used() const noexcept {
        return used_ == 0 ? 1 : used_;
    }
    [[nodiscard]] UNIPREFILL_HOST_API std::size_t bytes() const noexcept { return bytes_; }
    [[nodiscard]] UNIPREFILL_HOST_API void* data() const noexcept { return data_; }

    /// Whether this buffer holds @p needed bytes at the right alignment.
    [[nodiscard]] UNIPREFILL_HOST_API status check(std::size_t needed) const noexcept {
        if (data_ == nullptr) {
            return failure(status_code::invalid_argument, "workspace", "memory, not a null pointer", 0);
        }
        if (reinterpret_cast<std::uintptr_t>(data_) % alignment != 0) {
            return failure(status_code::misaligned, "workspace", "an address that is a multiple of 256",
                           reinterpret_cast<std::uintptr_t>(data_) % alignment);
        }
        if (bytes_ < needed) {
            return failure(status_code::workspace_too_small, "workspace", "at least workspace_bytes() bytes",
                           bytes_);
        }
        return success();
    }

  private:
    std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;
    std::size_t used_ = 0;
};

UNIPREFILL_END_NAMESPACE
