// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/calibration/trial.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace engine::calibration {

/// What is searched for.
struct search_options {
    double divergence = 0.01;     ///< most KL, mean over windows
    bool lists = true;            ///< whether block lists may be chosen
    std::uint64_t seed = 1;       ///< of the order in which coordinates are tried
    std::size_t most_layers = 12; ///< the search goes on with so many of the candidates
};

/// One selection at p 0.90 at one layer and nothing else.
struct layer_probe {
    std::int32_t layer = 0;
    score measured;
};

/// A choice with what it was measured at.
struct measured_choice {
    calibration::choice choice;
    score measured;
};

/// What the search asks of whoever runs choices.
struct search_calls {
    /// None where time is up.
    std::function<std::optional<score>(const choice&)> run;
    /// The choices to come differ from this one in few places, at the layers that are marked.
    std::function<void(const choice&, const std::vector<bool>&)> adopt;
    /// A line for whoever waits.
    std::function<void(const std::string&)> say;
};

/// Layers that may select: all but the last; every second one, the odd ones, of more than sixteen.
std::vector<std::int32_t> candidate_layers(std::int32_t layers);

/// The same, marked.
std::vector<bool> marked_layers(const std::vector<std::int32_t>& wanted, std::int32_t layers);

/// Looks for the choice with the least work whose divergence is at most the wanted one. See
/// docs/decisions/0011. The same for the same seed and measurements, unless time runs out.
class search {
  public:
    search(std::int32_t layers, const search_options& options, search_calls calls);

    /// Measures what each candidate does alone. @return whether time sufficed
    bool probe();
    /// From a guess of what layers do together, takes the step that saves most for its harm until none fits,
    /// then moves single coordinates while that helps. @return whether time sufficed
    bool run();

    const std::vector<layer_probe>& probes() const { return probes_; }
    /// The best that was measured within the wanted divergence; the dense choice if nothing was.
    measured_choice best() const;
    /// Of accepted steps, in order.
    const std::vector<measured_choice>& path() const { return path_; }
    std::int64_t evaluations() const { return static_cast<std::int64_t>(seen_.size()); }

  private:
    /// Coordinates are layers, and the lists after the last.
    using coordinate = std::size_t;
    coordinate lists() const { return static_cast<coordinate>(layers_); }
    std::int8_t rung(const choice& of, coordinate at) const;
    std::int8_t last_rung(coordinate at) const;
    choice with_rung(const choice& of, coordinate at, std::int8_t rung) const;

    const score* measure(const choice& one);
    void accept(const choice& next, const score& measured, const char* how);
    double ratio(const score& next) const;
    double price(const score& of) const { return of.work.total + of.kl * slope_; }

    choice guess(double harm) const;
    double guessed_work(const choice& of) const;
    bool begin();
    bool descend();
    bool refine();
    bool repair();
    std::vector<choice> neighbours(coordinate at) const;

    std::int32_t layers_;
    search_options options_;
    search_calls calls_;
    std::vector<layer_probe> probes_;
    std::vector<coordinate> kept_; ///< candidates that the search goes on with
    std::map<choice, score> seen_;
    std::vector<measured_choice> path_;
    choice now_;
    score at_;
    double slope_ = 0; ///< work that a nat saves, at the end of the descent
    bool out_of_time_ = false;
};

} // namespace engine::calibration
