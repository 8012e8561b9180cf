// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cstddef>
#include <cstdlib>
#include <limits>
#include <new>
#include <vector>

#if defined(__linux__)
#    include <sys/mman.h>
#endif

namespace engine::cpu {

/// Asks the system for large pages where an array is large: a forward pass over a long prompt touches
/// hundreds of megabytes for the first time, and each small page costs a fault.
template <class T>
class huge_page_allocator {
  public:
    using value_type = T;

    huge_page_allocator() = default;
    template <class U>
    huge_page_allocator(const huge_page_allocator<U>&) {}

    T* allocate(std::size_t count) {
        if (count > std::numeric_limits<std::size_t>::max() / 2 / sizeof(T)) throw std::bad_alloc();
        const std::size_t bytes = count * sizeof(T);
        const std::size_t alignment = bytes < page ? 64 : page;
        const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
        void* const memory = std::aligned_alloc(alignment, rounded);
        if (memory == nullptr && rounded > 0) throw std::bad_alloc();
#if defined(__linux__) && defined(MADV_HUGEPAGE)
        if (alignment == page) static_cast<void>(madvise(memory, rounded, MADV_HUGEPAGE)); // a wish, no more
#endif
        return static_cast<T*>(memory);
    }
    void deallocate(T* memory, std::size_t) {
        std::free(memory);
    }

    friend bool operator==(const huge_page_allocator&, const huge_page_allocator&) {
        return true;
    }
    friend bool operator!=(const huge_page_allocator&, const huge_page_allocator&) {
        return false;
    }

  private:
    static constexpr std::size_t page = std::size_t{2} << 20;
};

/// Activations of many rows.
using activations = std::vector<float, huge_page_allocator<float>>;

} // namespace engine::cpu
