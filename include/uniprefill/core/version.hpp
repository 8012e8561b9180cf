// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// The version, as plain literals: the build files and every `-I include` consumer read the same lines.
///
/// Semantic versioning; below 1.0 a minor release may break the interface and says so in CHANGELOG.md.

#if defined(UNIPREFILL_VERSION) && UNIPREFILL_VERSION != 100
#    error "two versions of uniprefill meet in one translation unit: check the order of the include paths"
#endif

/// 10000 * major + 100 * minor + patch, for `#if UNIPREFILL_VERSION >= 100`.
#define UNIPREFILL_VERSION 100
#define UNIPREFILL_VERSION_MAJOR 0 ///< breaking changes, from 1.0 on
#define UNIPREFILL_VERSION_MINOR 1 ///< additions; below 1.0 breaking changes too
#define UNIPREFILL_VERSION_PATCH 0 ///< corrections

#if UNIPREFILL_VERSION !=                                                                                    \
    10000 * UNIPREFILL_VERSION_MAJOR + 100 * UNIPREFILL_VERSION_MINOR + UNIPREFILL_VERSION_PATCH
#    error "the numbers in uniprefill/core/version.hpp disagree"
#endif
