// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Language level, namespace and visibility macros. Every macro of the library starts with UNIPREFILL_.
#pragma once

#include <uniprefill/core/version.hpp>

#if defined(_MSVC_LANG)
#    if _MSVC_LANG < 201703L
#        error "uniprefill needs C++17: pass /std:c++17 or newer"
#    endif
#elif __cplusplus < 201703L
#    error "uniprefill needs C++17: pass -std=c++17 or newer"
#endif

/// Functions of a header-only library must not leave the shared object that compiled them: another object may
/// have been built with other flags or another version. Types keep default visibility, so that a user's class
/// may hold them without -Wattributes.
#if defined(__GNUC__) || defined(__clang__)
#    define UNIPREFILL_HIDDEN __attribute__((visibility("hidden")))
#else
#    define UNIPREFILL_HIDDEN
#endif

/// Marks functions of the host.
#define UNIPREFILL_HOST_API UNIPREFILL_HIDDEN
/// Marks functions of host and device.
#if defined(__CUDACC__)
#    define UNIPREFILL_API UNIPREFILL_HIDDEN __host__ __device__
#else
#    define UNIPREFILL_API UNIPREFILL_HIDDEN
#endif

/// The inline namespace carries the version, so that two versions can live in one process.
/// A project that vendors the library may wrap it by defining UNIPREFILL_WRAPPED_NAMESPACE.
#define UNIPREFILL_VERSION_NAMESPACE v0_1
#if defined(UNIPREFILL_WRAPPED_NAMESPACE)
/// Opens namespace uniprefill and its version.
#    define UNIPREFILL_BEGIN_NAMESPACE                                                                       \
        namespace UNIPREFILL_WRAPPED_NAMESPACE {                                                             \
        namespace uniprefill {                                                                               \
        inline namespace UNIPREFILL_VERSION_NAMESPACE {
/// Closes what UNIPREFILL_BEGIN_NAMESPACE opened.
#    define UNIPREFILL_END_NAMESPACE                                                                         \
        }                                                                                                    \
        }                                                                                                    \
        }
#else
/// Opens namespace uniprefill and its version.
#    define UNIPREFILL_BEGIN_NAMESPACE                                                                       \
        namespace uniprefill {                                                                               \
        inline namespace UNIPREFILL_VERSION_NAMESPACE {
/// Closes what UNIPREFILL_BEGIN_NAMESPACE opened.
#    define UNIPREFILL_END_NAMESPACE                                                                         \
        }                                                                                                    \
        }
#endif
