// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/cpu/aligned_buffer.hpp"

#include <cstddef>
#include <vector>

namespace engine::cpu {

/// Memory that operations need while they run: one shared part and one for each thread. It grows to the
/// largest size ever asked for and is kept, so a steady loop allocates nothing. One operation at a time may
/// use it.
class scratch {
  public:
    /// `bytes` of memory aligned to 64 bytes, contents undefined. Earlier pointers to the same part become
    /// invalid.
    std::byte* shared(std::size_t bytes) { return shared_.at_least(bytes); }

    /// Makes room for `bytes` in each of `threads` parts; to be called before the threads start.
    void reserve_threads(int threads, std::size_t bytes) {
        if (own_.size() < static_cast<std::size_t>(threads)) own_.resize(static_cast<std::size_t>(threads));
        for (int t = 0; t < threads; ++t) {
            own_[static_cast<std::size_t>(t)].at_least(bytes);
        }
    }
    /// The part of thread `t`, as large as reserved.
    std::byte* own(int t) { return own_[static_cast<std::size_t>(t)].at_least(0); }

    /// Bytes held now.
    std::size_t bytes() const {
        std::size_t total = shared_.size();
        for (const aligned_buffer& part : own_) {
            total += part.size();
        }
        return total;
    }

  private:
    aligned_buffer shared_;
    std::vector<aligned_buffer> own_;
};

/// Hands out consecutive 64-byte aligned arrays; with a null base it only counts, so that one function can
/// both size and carve a buffer.
class carver {
  public:
    explicit carver(std::byte* base)
        : base_(base) {}
    template <class Element>
    Element* take(std::size_t count) {
        std::byte* at = base_ == nullptr ? nullptr : base_ + used_;
        used_ += (count * sizeof(Element) + 63) / 64 * 64;
        return reinterpret_cast<Element*>(at);
    }
    std::size_t used() const { return used_; }

  private:
    std::byte* base_;
    std::size_t used_ = 0;
};

} // namespace engine::cpu
