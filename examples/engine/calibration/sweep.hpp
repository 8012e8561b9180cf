// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/calibration/search.hpp"

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace engine::calibration {

/// What may be spent, and what is to be least within it.
struct sweep_options {
    double lin = 0.5;         ///< most rows entering output projection and MLP, as score::work has them
    double att = 0.15;        ///< most (query, key) pairs
    double worst = 0.1;       ///< weight of the worst window's KL beside the mean's 1
    bool lists = true;        ///< whether block lists may be chosen; if not, none to begin with
    std::uint64_t seed = 1;   ///< of the order in which moves are tried, and of kicks
    std::int32_t idle = 20;   ///< kicks that bring nothing, one after another, after which it ends
    std::int32_t fresh = 48;  ///< moves that are measured between two exchanges
    std::int32_t trials = 12; ///< exchanges that are run between two such batches
};

/// Looks for the choice with the least divergence within bounds of work: p of every layer, p of the lists of
/// every layer, the lists' window, and how many first and last rows are never dropped. Thousands of runs: for
/// a device.
///
/// What one move does (a step up or down a ladder, a selection more, less or at a layer nearby) is measured
/// from where the search is and remembered; since bounds are tight, what helps is mostly an exchange: some
/// moves that spend work and some that save it. Exchanges that the sum of remembered effects promises most of
/// are run, and taken where they keep the promise at all. Where none does, the search is kicked some moves
/// away from the best so far and goes on from there. See docs/decisions/0011. The same for the same seed and
/// measurements, unless time runs out.
class sweep {
  public:
    /// @param calls  as search has them
    sweep(std::int32_t layers, const sweep_options& options, search_calls calls);

    /// @return whether it came to its end before time was up
    bool run(const choice& start);

    /// The least divergence within the bounds; where nothing was within them, what came nearest.
    measured_choice best() const { return best_; }
    /// Of choices that were the best so far when they were measured, accepted or not, in order.
    const std::vector<measured_choice>& path() const { return path_; }
    std::int64_t evaluations() const { return static_cast<std::int64_t>(seen_.size()); }

    /// Divergence, the worst window's weighed in.
    double value(const score& of) const;
    /// Whether @p a is better than @p b: within the bounds, or less beyond them, and then by value().
    bool better(const score& a, const score& b) const;

  private:
    /// Coordinates: layers, then the lists of each layer, then all lists together, the window, sink and tail.
    struct move {
        std::size_t at = 0;
        std::int32_t by = 0; ///< steps; for a layer, 100 + d: the selection moves d layers on

        friend bool operator<(const move& a, const move& b) {
            return a.at != b.at ? a.at < b.at : a.by < b.by;
        }
    };
    struct effect {
        double divergence = 0; ///< of its logarithm
        double lin = 0;
        double att = 0;
        std::int64_t measured = 0; ///< when
    };
    using exchange = std::vector<move>;

    bool applies(const choice& to, const move& what) const;
    choice moved(choice to, const move& what) const;
    std::vector<move> moves() const;
    bool touch(const move& a, const move& b) const;
    const score* measure(const choice& one);
    void note(const move& what, const score& came);
    void accept(const choice& next, const score& measured);
    bool look_around();
    bool exchange_moves();
    std::vector<exchange> promising() const;
    double excess(double lin, double att) const;
    double merit(const score& of) const;
    bool kick();

    std::int32_t layers_;
    sweep_options options_;
    search_calls calls_;
    std::mt19937_64 random_;
    double penalty_; ///< for work beyond the bounds, in logarithms of both
    std::map<choice, score> seen_;
    std::map<move, effect> effects_;
    choice now_;
    score at_;
    measured_choice best_;
    std::vector<measured_choice> path_;
    std::int64_t accepted_ = 0;
    bool improved_ = false; ///< since the last look around
    bool out_of_time_ = false;
};

} // namespace engine::calibration
