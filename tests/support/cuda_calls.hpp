// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// Counts the calls of the CUDA runtime that a hot path may not make: allocation, synchronisation, copies and
/// memsets, questions about devices, functions and occupancy (cuda_calls.inl lists them). Link
/// uniprefill_cuda_calls: the linker then puts a counter before each of them, in the whole executable.
///
///     const cuda_calls before = cuda_calls::now();
///     run();
///     CHECK(before.since() == "");

#include <cstdint>
#include <string>
#include <vector>

namespace uniprefill_test {

/// A mark in the counts of all threads of the process.
class cuda_calls {
  public:
    [[nodiscard]] static cuda_calls now();
    /// What was called since this mark: "cudaMalloc x1, cudaFree x2", or "".
    [[nodiscard]] std::string since() const;

  private:
    std::vector<std::int64_t> counts_;
};

} // namespace uniprefill_test
