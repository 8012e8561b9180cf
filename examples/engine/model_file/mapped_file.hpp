// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/model_file/byte_span.hpp"

#include <string>

namespace engine {

/// A regular file mapped read-only for as long as this object lives. Pages are shared between processes and
/// read from disk when first touched, so opening costs nothing. The file must not be truncated meanwhile: the
/// system would answer a touch with SIGBUS.
class mapped_file {
  public:
    /// Throws `error` if `path` can't be opened, isn't a regular file or is empty.
    explicit mapped_file(const std::string& path);
    ~mapped_file();
    mapped_file(mapped_file&& other) noexcept;
    mapped_file& operator=(mapped_file&& other) noexcept;
    mapped_file(const mapped_file&) = delete;
    mapped_file& operator=(const mapped_file&) = delete;

    byte_span bytes() const { return bytes_; }

  private:
    byte_span bytes_;
};

} // namespace engine
