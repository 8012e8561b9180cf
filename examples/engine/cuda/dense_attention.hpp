// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/cuda/runtime.hpp"

#include <uniprefill/core/element.hpp>
#include <uniprefill/core/rows.hpp>

#include <cstdint>
#include <memory>

namespace engine::cuda {

/// Causal attention of rows over themselves by cuDNN, the fastest dense attention that a user has without
/// this library. A graph for each number of rows is built at its first use and kept: build before capturing.
class dense_attention {
  public:
    /// Throws `error` where the program was built without cuDNN, or it can't be started.
    dense_attention(std::int32_t heads, std::int32_t kv_heads, std::int32_t head_dim);
    ~dense_attention();
    dense_attention(const dense_attention&) = delete;
    dense_attention& operator=(const dense_attention&) = delete;

    /// Row i reads keys 0 to i. All views have the same number of rows.
    void run(const uniprefill::head_rows<const uniprefill::bfloat16>& q,
             const uniprefill::head_rows<const uniprefill::bfloat16>& k,
             const uniprefill::head_rows<const uniprefill::bfloat16>& v,
             const uniprefill::head_rows<uniprefill::bfloat16>& out, cudaStream_t on);

    static bool built();
    /// Of cuDNN and its frontend: "cuDNN 9.13.0, frontend 1.14.0"; "not built".
    static std::string library();

  private:
    struct state;
    std::unique_ptr<state> state_;
};

} // namespace engine::cuda
