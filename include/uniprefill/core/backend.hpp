// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Where memory lives and which implementation runs: tags that select a backend at compile time.
#pragma once

#include <uniprefill/core/config.hpp>

#include <cstdint>

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

} // namespace backend

UNIPREFILL_END_NAMESPACE
