// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace engine {

/// The cached keys and values of one request in one layer, in order of position.
struct kv_sequence {
    const float* k = nullptr;            // [slots, kv_heads, head_dim]
    const float* v = nullptr;            // [slots, kv_heads, head_dim]
    std::int64_t row_stride = 0;         ///< elements
    std::int64_t head_stride = 0;        ///< elements
    std::int64_t length = 0;             ///< rows that were written or have a page
    const std::int32_t* pages = nullptr; ///< null: row i is at slot i

    /// Where row @p row is in k and v. @param page_tokens the store's
    std::int64_t slot_of(std::int64_t row, std::int32_t page_tokens) const {
        return pages == nullptr ? row
                                : std::int64_t{pages[row / page_tokens]} * page_tokens + row % page_tokens;
    }
};

/// Where keys and values live. Every layer of every request has a length of its own, told by the ledger.
class kv_store {
  public:
    virtual ~kv_store() = default;
    /// Writes @p rows rows at index @p first, which is at most the present length; what lay beyond is gone.
    /// Source rows are `kv_heads * head_dim` elements, @p stride elements apart.
    virtual void write(std::int32_t layer, std::int32_t request, std::int64_t first, const float* k,
                       const float* v, std::int64_t rows, std::int64_t stride) = 0;
    /// The rows @p from, ascending, become the first @p count ones in place; what lay beyond is gone.
    virtual void keep(std::int32_t layer, std::int32_t request, const std::int32_t* from,
                      std::int32_t count) = 0;
    virtual kv_sequence rows(std::int32_t layer, std::int32_t request) const = 0;
    /// Rows of a page; the largest int32 where a sequence is one stretch.
    virtual std::int32_t page_tokens() const = 0;
    virtual void release(std::int32_t request) = 0;
    /// Bytes that hold keys and values now.
    virtual std::size_t bytes() const = 0;
};

/// One growing array for each (layer, request).
class contiguous_kv_store final : public kv_store {
  public:
    contiguous_kv_store(std::int32_t layers, std::int32_t requests, std::int32_t kv_heads,
                        std::int32_t head_dim);
    void write(std::int32_t layer, std::int32_t request, std::int64_t first, const float* k, const float* v,
               std::int64_t rows, std::int64_t stride) override;
    void keep(std::int32_t layer, std::int32_t request, const std::int32_t* from,
              std::int32_t count) override;
    kv_sequence rows(std::int32_t layer, std::int32_t request) const override;
    std::int32_t page_tokens() const override { return std::numeric_limits<std::int32_t>::max(); }
    void release(std::int32_t request) override;
    std::size_t bytes() const override;

  private:
    struct sequence {
        std::vector<float> k;
        std::vector<float> v;
    };
    std::size_t index(std::int32_t layer, std::int32_t request) const {
        return static_cast<std::size_t>(layer) * static_cast<std::size_t>(requests_) +
               static_cast<std::size_t>(request);
    }
    std::int32_t requests_;
    std::int64_t head_dim_;
    std::int64_t row_elements_;
    std::vector<sequence> sequences_;
};

} // namespace engine
