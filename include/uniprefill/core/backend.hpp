// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Where memory lives and which implementation runs: tags that select a backend at compile time.
#pragma once

#include <uniprefill/core/config.hpp>

#include <cstdint>

struct CUstream_st; // what cudaStream_t points to; naming it needs no CUDA header

UNIPREFILL_BEGIN_NAMESPACE

/// Where the arrays of a view live.
enum class memory_space : std::int32_t { host, device };

/// The execution queue of the host backend: operations are done when they return. It keeps call sites alike.
struct host_stream {};

namespace backend {

/// Portable C++17, vectorised by the compiler; uses OpenMP exactly when the including project compiles with
/// it.
struct host {
    using stream = host_stream;
    static constexpr memory_space space = memory_space::host;
};

/// CUDA, compute capability 8.0 and up; its specialisations are in .cuh headers. Arrays of a `batch_view`, of
/// rules and of every other view lie in device memory; what `limits` and plain members say is known to the
/// host.
///
/// Nothing is allocated, synchronised with or read back, and nothing but kernels goes onto the stream, so
/// every operation can be captured into a graph and replayed with other contents of the same arrays. Device
/// arrays can't be judged on the host: one that makes no sense (lengths that fall, say) is clamped, keeps
/// every row it concerns, and raises a fault.
struct cuda {
    using stream = CUstream_st*; ///< cudaStream_t
    static constexpr memory_space space = memory_space::device;
};

} // namespace backend

UNIPREFILL_END_NAMESPACE
