// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// For functions that threads of the device run together, and tests with a single thread on the host.
#pragma once

/// In front of a function template for any team of threads: teams of the device have functions that only the
/// device runs.
#if defined(__CUDACC__)
#    define UNIPREFILL_ANY_TEAM _Pragma("nv_exec_check_disable")
#else
#    define UNIPREFILL_ANY_TEAM
#endif

/// In front of a loop over what registers hold: registers have no addresses, so nothing may be left of it. In
/// front of one whose loads shouldn't wait for each other, eight of which are enough. And in front of one
/// that is rarely run, or whose body is large, of which one copy is enough.
#if defined(__CUDA_ARCH__)
#    define UNIPREFILL_UNROLL _Pragma("unroll")
#    define UNIPREFILL_EIGHT_COPIES _Pragma("unroll 8")
#    define UNIPREFILL_ONE_COPY _Pragma("unroll 1")
#else
#    define UNIPREFILL_UNROLL
#    define UNIPREFILL_EIGHT_COPIES
#    define UNIPREFILL_ONE_COPY
#endif

/// A condition that mostly holds: what happens otherwise lies elsewhere among the instructions.
#if defined(__GNUC__) || defined(__CUDACC__)
#    define UNIPREFILL_LIKELY(condition) __builtin_expect((condition) ? 1 : 0, 1)
#else
#    define UNIPREFILL_LIKELY(condition) (condition)
#endif
