// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// One random request, whole: what it is about doesn't depend on how a step packs it.

#include "oracle/oracle.hpp"
#include "property/random.hpp"

#include <uniprefill/core/batch.hpp>

#include <string>
#include <vector>

namespace property {

namespace up = uniprefill;

/// What all requests of a step share.
struct shape {
    int heads = 1;
    int kv_heads = 1;
    int dim = 8;
    int block_rows = 8;   // G
    int observations = 4; // n
    oracle::score_parameters score;
};

/// How keys are drawn.
enum class key_style {
    plain,     ///< independent normals
    sharp,     ///< normals of larger variance: few keys hold most of the mass
    tied,      ///< every key is the same: every row has the same share
    few,       ///< keys come from a set of three: ties between blocks
    one_block, ///< one key outweighs all others by far
};

/// A request's rows of one step, after @p cached keys of earlier steps.
struct request {
    up::request_tag tag = up::request_tag::prefill;
    up::request_options options{};
    int cached = 0;
    std::vector<int> cached_positions; // [cached]
    std::vector<int> positions;        // [rows]
    std::vector<int> span_rows;        // rows of each segment; they sum to rows
    oracle::tensor q;                  // [rows]
    oracle::tensor k;                  // [cached + rows]
    std::vector<oracle::range> forced;
    std::vector<oracle::range> observed;

    int rows() const { return static_cast<int>(positions.size()); }
    int segments() const { return static_cast<int>(span_rows.size()); }
};

/// How a request is drawn; anything negative is random.
struct request_wishes {
    int rows = -1;
    int cached = 0;
    int segments = 1;
    bool gaps = false;     ///< positions with holes, as after an earlier layer's drop
    bool spans = false;    ///< forced spans of the caller
    bool observed = false; ///< observation rows of the caller
    up::request_tag tag = up::request_tag::prefill;
    key_style style = key_style::plain;
};

/// Rounds to what an element type can hold.
enum class rounding { f32, f16, bf16 };
double rounded(double value, rounding to);

shape random_shape(random_numbers& numbers);
key_style random_style(random_numbers& numbers);
request random_request(random_numbers& numbers, const shape& of, const request_wishes& wishes, rounding to);

/// The oracle's view of one segment: keys are the cache's and all rows up to the segment's end.
oracle::segment_problem problem_of(const request& what, int segment, const shape& of);

/// First row of a segment within its request.
int segment_begin(const request& what, int segment);

/// For messages.
std::string describe(const request& what, const shape& of);

} // namespace property
