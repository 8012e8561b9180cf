// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// Memory for workspaces, exactly as large as asked for, so that a sanitizer sees one byte too many.

#include <uniprefill/core/workspace.hpp>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace property {

class aligned_memory {
  public:
    explicit aligned_memory(std::size_t bytes)
        : bytes_((bytes + alignment - 1) / alignment * alignment)
        , data_(std::aligned_alloc(alignment, bytes_)) {
        std::memset(data_.get(), 0xa5, bytes_); // nothing may rely on zeros
    }
    uniprefill::workspace view() const { return {data_.get(), bytes_}; }

  private:
    static constexpr std::size_t alignment = uniprefill::workspace::alignment;
    struct release {
        void operator()(void* data) const { std::free(data); }
    };
    std::size_t bytes_;
    std::unique_ptr<void, release> data_;
};

} // namespace property
