// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/model_file/gguf.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace engine {

/// Throws `error` where the file has no such tensor.
const tensor_info& tensor_of(const gguf& file, const std::string& name);

/// Rows [first, first + count) of a tensor as float, dense.
void dequantize_rows(const tensor_info& from, std::int64_t first, std::int64_t count, float* to);

/// All of a tensor as float.
std::vector<float> vector_of(const tensor_info& from);

/// The rows of several tensors, one after another, as one matrix.
class stacked_rows {
  public:
    explicit stacked_rows(std::vector<const tensor_info*> parts);
    std::int64_t out() const { return out_; }
    std::int64_t in() const { return parts_.front()->shape[0]; }
    /// Rows [first, first + count) as float, dense. Several threads may read at once.
    void read(std::int64_t first, std::int64_t count, float* to) const;

  private:
    std::vector<const tensor_info*> parts_;
    std::int64_t out_ = 0;
};

} // namespace engine
