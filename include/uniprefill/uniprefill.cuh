// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Everything. So far that is what a plain C++17 compiler builds too; it compiles under nvcc unchanged.
#pragma once

#include <uniprefill/uniprefill.hpp>
