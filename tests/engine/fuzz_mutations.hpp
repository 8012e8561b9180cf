// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/gguf_builder.hpp"

#include <random>
#include <vector>

namespace engine_test {

struct seed_file {
    bytes content;
    std::vector<gguf_builder::field> fields;
    std::size_t data_start;
};

/// Sound files to begin from: a model of each type that can be read, versions 2 and 3, each pre-tokeniser,
/// tied or not, other alignments, and one file of every kind of value.
std::vector<seed_file> seed_files();

/// One to four changes to header, metadata and tensor table: values that provoke (0, largest, sign bits, one
/// more or less, the file's own size, another field's), other types, cuts, insertions, bytes moved and
/// flipped. One in twenty touches the magic number or the version.
bytes mutated(const seed_file& seed, std::mt19937_64& random);

} // namespace engine_test
