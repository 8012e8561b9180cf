// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace engine::cpu {

/// Uninitialised memory aligned to 64 bytes.
class aligned_buffer {
  public:
    aligned_buffer() = default;
    explicit aligned_buffer(std::size_t bytes) { at_least(bytes); }

    /// Grows to `bytes` if smaller, losing the contents.
    std::byte* at_least(std::size_t bytes) {
        if (bytes > size_) {
            data_.reset(); // before the new one, so that both never exist at once
            size_ = 0;
            const std::size_t rounded = (bytes + 63) / 64 * 64;
            data_.reset(static_cast<std::byte*>(std::aligned_alloc(64, rounded)));
            if (!data_) throw std::bad_alloc();
            size_ = rounded;
        }
        return data_.get();
    }
    std::byte* data() const { return data_.get(); }
    std::size_t size() const { return size_; }

  private:
    struct free_memory {
        void operator()(std::byte* p) const { std::free(p); }
    };
    std::unique_ptr<std::byte, free_memory> data_;
    std::size_t size_ = 0;
};

} // namespace engine::cpu
