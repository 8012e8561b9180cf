// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// The method once more, in double precision and in the plainest words: one loop for each index, no blocking,
/// no online softmax, no packing. It shares nothing with the library, not even a type, so that an error in a
/// definition of the library can't hide in both.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace oracle {

/// Rows of heads of numbers.
struct tensor {
    int rows = 0;
    int heads = 0;
    int dim = 0;
    std::vector<double> data; // [rows][heads][dim]

    tensor() = default;
    tensor(int num_rows, int num_heads, int head_dim)
        : rows(num_rows)
        , heads(num_heads)
        , dim(head_dim)
        , data(index(num_rows, 0, 0), 0.0) {}
    double& at(int row, int head, int i) { return data[index(row, head, i)]; }
    double at(int row, int head, int i) const { return data[index(row, head, i)]; }
    /// The rows of @p other behind these.
    void append(const tensor& other);

  private:
    std::size_t index(int row, int head, int i) const {
        return (static_cast<std::size_t>(row) * static_cast<std::size_t>(heads) +
                static_cast<std::size_t>(head)) *
                   static_cast<std::size_t>(dim) +
               static_cast<std::size_t>(i);
    }
};

/// A half-open range of positions.
struct range {
    int begin = 0;
    int end = 0;
};

bool contains(const std::vector<range>& ranges, int position);

// ---------------------------------------------------------------------------------------------------- masses

/// softmax's parameters. A soft-cap of 0 is none; no sink logits: none.
struct score_parameters {
    double scale = 1;
    double softcap = 0;              // score = softcap * tanh(score / softcap)
    std::vector<double> sink_logits; // [heads] one more term of each row's denominator
};

/// One decision's view of one segment (a request's span).
struct segment_problem {
    tensor q;                       // the segment's rows
    std::vector<int> positions;     // [rows]
    tensor keys;                    // everything the segment may look at: context, then its own rows
    std::vector<int> key_positions; // [keys]
    score_parameters score;
    std::vector<int> observers; // rows of the segment whose queries observe
    std::vector<bool> forced;   // [rows]
    int block_rows = 1;
};

/// The mass of each block: of its rows that may be dropped, and of its forced rows.
struct block_masses {
    std::vector<std::vector<double>> head_free;   // [heads][blocks]
    std::vector<std::vector<double>> head_forced; // [heads][blocks]
    std::vector<double> free;                     // [blocks] summed over heads
    std::vector<double> forced;                   // [blocks]
    bool non_finite = false; // a score of an observer, seen or masked, is NaN or infinite
    bool unscored = false;   // no observer
};

block_masses masses_of(const segment_problem& problem);

/// Rows that observe: the last @p n of those whose position lies in @p observed, or of all rows where there
/// are no such ranges.
std::vector<int> observers_of(const std::vector<int>& positions, const std::vector<range>& observed, int n);

/// Rows that must be kept: below @p sink, among the last @p tail rows, or inside @p spans.
std::vector<bool> forced_rows(const std::vector<int>& positions, int sink, int tail,
                              const std::vector<range>& spans);

// ------------------------------------------------------------------------------------------------- selection

enum class rule_kind {
    top_p,        // the fewest blocks, largest first, that hold the fraction of the total
    ratio,        // ceil(fraction * candidate blocks) blocks, largest first
    budget,       // exactly `budget` rows
    max_fraction, // every block with at least the fraction of the largest mass
};

/// Whose mass counts. Blocks without a row that counts are no candidates.
enum class scope { free, all };

/// A fraction, as an integer multiple of 2^-63: exact for all that the tests use.
std::uint64_t fraction(double number);

struct rule {
    rule_kind kind = rule_kind::top_p;
    scope over = scope::free;
    std::uint64_t fraction = std::uint64_t{1} << 63;
    bool later_block_first = false;     // ties
    bool keep_when_exactly_met = false; // the published `<=`: one block more when the fraction is met exactly
    int budget = 0;
    int min_rows = 0; // the bounds cut a block if they must; forced rows stay beyond max_rows
    int max_rows = 2147483647;
};

enum class kept_because {
    selected,
    everything,
    empty,
    not_prefill,
    switched_off,
    short_segment,
    non_finite,
    zero_mass,
    unscored,
    rank,
    overflow,
    rerun_dense,
};

bool is_fault(kept_because reason);

/// What a decision looks at, with masses as exact integers.
struct selection_problem {
    std::vector<bool> forced;              // [rows]
    std::vector<std::int64_t> free_mass;   // [blocks]
    std::vector<std::int64_t> forced_mass; // [blocks]
    int block_rows = 1;
    bool is_prefill = true;
    bool enabled = true;
    int min_length = 0;
    kept_because fault = kept_because::selected; // reported with the masses; `selected` for none
};

struct selected_rows {
    std::vector<bool> keep; // [rows]
    kept_because reason = kept_because::selected;
    // Where the rule decided, 0 elsewhere:
    std::int64_t total = 0;   // over the scope of the rule
    std::int64_t dropped = 0; // of the dropped rows; a cut block counts in proportion, rounded up
};

selected_rows select(const selection_problem& problem, const rule& how);

// ----------------------------------------------------------------------------------------------- propagation

enum class propagation { cumulative, revive };

/// The rows of one request through the layers, as sets of positions.
class row_history {
  public:
    row_history(propagation mode, std::vector<int> prompt);

    /// Positions that enter a layer: those that a decision there is about, and those whose keys it stores.
    /// With `revive`, a selecting layer sees all rows again.
    const std::vector<int>& enter(bool layer_selects);
    /// What a decision at the layer just entered keeps of the rows that entered it.
    void keep(const std::vector<bool>& kept);

    const std::vector<std::vector<int>>& stored() const { return stored_; }       // [layers]
    const std::vector<std::vector<int>>& processed() const { return processed_; } // [layers]
    /// Positions of the prompt that a layer stores no key of, as ranges.
    std::vector<range> dropped_ranges(int layer) const;

  private:
    propagation mode_;
    std::vector<int> prompt_;
    std::vector<int> alive_;
    std::vector<std::vector<int>> stored_;
    std::vector<std::vector<int>> processed_;
};

/// Runs of positions of @p prompt that are not in @p held (both ascending).
std::vector<range> missing_ranges(const std::vector<int>& prompt, const std::vector<int>& held);

// ------------------------------------------------------------------------------------------------- attention

/// What a query may see: allowed[query][key].
using mask = std::vector<std::vector<bool>>;

/// Causal by position, and only keys whose position is in @p stored (ascending); a window of @p window
/// positions (the query's own included) where it is not 0.
mask stored_causal_mask(const std::vector<int>& query_positions, const std::vector<int>& key_positions,
                        const std::vector<int>& stored, int window = 0);

/// softmax(q k^T) v over the allowed keys, all of N x N written out. A row that may see nothing gives zeros.
tensor masked_attention(const tensor& q, const tensor& k, const tensor& v, const score_parameters& score,
                        const mask& allowed);

/// The block list of one head: blocks are runs of @p block_rows keys from key @p first_key on. Keys before it
/// belong to no block and are read by all.
struct block_list {
    int first_key = 0;
    int block_rows = 1;
    std::vector<bool> listed; // [blocks]
    int window = 0;           // positions; blocks from the first on with one inside are read, listed or not
};

/// Of the keys that a query at @p position may see (@p allowed), those that it reads.
std::vector<bool> listed_keys(const std::vector<bool>& allowed, int position,
                              const std::vector<int>& key_positions, const block_list& list);

/// The attention of one query of one head, and what an error bound is made of.
struct attended_row {
    int reads = 0;
    std::vector<double> out;       // [dim] zeros where nothing is read
    double lse = 0;                // log of the softmax's denominator, sink logit included; -infinity: empty
    std::vector<double> magnitude; // [dim] sum of share * |v|
    double score_magnitude = 0; // largest scale * sum of |q k| * (products that aren't 0 + extra), over keys
                                // of any weight
    double largest_score = 0;   // largest magnitude among scores of any weight
};
attended_row attend_row(const tensor& q, int row, int head, const tensor& k, const tensor& v,
                        const score_parameters& score, const std::vector<bool>& reads, int extra = 0,
                        const std::vector<double>& log_weights = {}); // [keys] added to scores; empty: 0

} // namespace oracle
