// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/calibration/sweep.hpp"

#include "engine/app/number_text.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace engine::calibration {

namespace {

/// Halving the rows costs some tenfold divergence: a penalty of so many e-folds for each of work is mostly
/// steeper; where the search comes to rest beyond the bounds it is not, and grows.
constexpr double first_penalty = 10;
constexpr double penalty_growth = 3;
/// Divergences below it are all the same: the arithmetic's rounding.
constexpr double least_divergence = 1e-5;
/// Smaller gains aren't worth a run of all windows to go on from.
constexpr double least_gain = 5e-4;
/// By far the most moves that an exchange is made of: what single moves do adds up less and less well.
constexpr std::size_t most_moves = 6;
/// A selection at a layer nearby.
constexpr std::int32_t shifted = 100;

const std::int8_t first_layer_step = layer_step(0.99);
const std::int8_t first_list_step = list_step(0.99);

double beyond(double came, double most) {
    return came > most ? std::log(came / most) : 0;
}

std::string figures(const score& of) {
    return "KL " + significant(of.kl, 4) + ", worst " + significant(of.kl_max, 3) + ", lin " +
           fixed(of.work.lin, 4) + ", att " + fixed(of.work.att, 4);
}

/// A step by @p by on a ladder of @p last steps; from 0 straight to @p first, where a difference shows.
std::int8_t stepped(std::int8_t from, std::int32_t by, std::int8_t first, std::int8_t last) {
    if (from == 0) return by > 0 ? first : std::int8_t{0};
    return static_cast<std::int8_t>(std::clamp<std::int32_t>(from + by, 0, last));
}

constexpr auto last_layer_step = static_cast<std::int8_t>(choice::layer_shares.size());
constexpr auto last_list_step = static_cast<std::int8_t>(choice::list_shares.size());
constexpr auto last_forced = static_cast<std::int8_t>(choice::forced_rows.size() - 1);
constexpr auto last_window = static_cast<std::int8_t>(choice::list_windows.size() - 1);

} // namespace

sweep::sweep(std::int32_t layers, const sweep_options& options, search_calls calls)
    : layers_(layers)
    , options_(options)
    , calls_(std::move(calls))
    , random_(options.seed)
    , penalty_(first_penalty)
    , now_(dense_choice(layers)) {}

double sweep::value(const score& of) const {
    return of.kl + options_.worst * of.kl_max + least_divergence;
}

double sweep::excess(double lin, double att) const {
    return beyond(lin, options_.lin) + beyond(att, options_.att);
}

double sweep::merit(const score& of) const {
    return std::log(value(of)) + penalty_ * excess(of.work.lin, of.work.att);
}

bool sweep::better(const score& a, const score& b) const {
    const double of_a = excess(a.work.lin, a.work.att);
    const double of_b = excess(b.work.lin, b.work.att);
    return of_a != of_b ? of_a < of_b : value(a) < value(b);
}

std::vector<sweep::move> sweep::moves() const {
    std::vector<move> made;
    const auto layers = static_cast<std::size_t>(layers_);
    for (std::size_t layer = 0; layer + 1 < layers; ++layer) { // nothing is left to gain after the last
        for (const std::int32_t by :
             {-1, 1, -2, 2, -shifted, shifted - 2, shifted - 1, shifted + 1, shifted + 2}) {
            made.push_back({layer, by});
        }
    }
    for (std::size_t layer = 0; options_.lists && layer < layers; ++layer) {
        for (const std::int32_t by : {-1, 1, -2, 2}) {
            made.push_back({layers + layer, by});
        }
    }
    for (const std::int32_t by : {-1, 1}) {
        for (std::size_t other = options_.lists ? 0 : 2; other < 4; ++other) {
            made.push_back({2 * layers + other, by});
        }
    }
    return made;
}

choice sweep::moved(choice to, const move& what) const {
    const auto layers = static_cast<std::size_t>(layers_);
    if (what.at < layers) {
        std::int8_t& step = to.steps[what.at];
        if (what.by <= -shifted) {
            step = 0;
        } else if (what.by > shifted / 2) {
            const auto other = static_cast<std::int32_t>(what.at) + what.by - shifted;
            if (other >= 0 && other < layers_ - 1 && step > 0) {
                std::swap(step, to.steps[static_cast<std::size_t>(other)]);
            }
        } else {
            step = stepped(step, what.by, first_layer_step, last_layer_step);
        }
    } else if (what.at < 2 * layers) {
        std::int8_t& step = to.lists[what.at - layers];
        step = stepped(step, what.by, first_list_step, last_list_step);
    } else if (what.at == 2 * layers) {
        for (std::int8_t& step : to.lists) {
            step = stepped(step, what.by, first_list_step, last_list_step);
        }
    } else if (what.at == 2 * layers + 1) {
        to.window = static_cast<std::int8_t>(std::clamp<std::int32_t>(to.window + what.by, 0, last_window));
    } else {
        std::int8_t& step = what.at == 2 * layers + 2 ? to.sink : to.tail;
        if (step >= 0) {
            step = static_cast<std::int8_t>(std::clamp<std::int32_t>(step + what.by, 0, last_forced));
        }
    }
    return to;
}

bool sweep::applies(const choice& to, const move& what) const {
    // Off the ladder or half a move: others do that.
    if (what.at < 2 * static_cast<std::size_t>(layers_) && std::abs(what.by) == 2) {
        const auto layers = static_cast<std::size_t>(layers_);
        const std::int8_t step = what.at < layers ? to.steps[what.at] : to.lists[what.at - layers];
        const std::int8_t last = what.at < layers ? last_layer_step : last_list_step;
        if (step == 0 || step + what.by < 0 || step + what.by > last) return false;
    }
    if (what.at < static_cast<std::size_t>(layers_) && what.by <= -shifted && to.steps[what.at] < 3) {
        return false;
    }
    return !(moved(to, what) == to);
}

/// Whether two moves are about the same thing, so that their effects don't add up.
bool sweep::touch(const move& a, const move& b) const {
    const auto layers = static_cast<std::size_t>(layers_);
    const auto of_lists = [&](const move& one) { return one.at >= layers; };
    const auto of_forced = [&](const move& one) { return one.at >= 2 * layers + 2; };
    if (a.at == b.at) return true;
    if (of_lists(a) != of_lists(b) || of_forced(a) || of_forced(b)) return false;
    if (of_lists(a)) return a.at >= 2 * layers || b.at >= 2 * layers;
    const auto shifts = [](const move& one) { return one.by > shifted / 2; };
    const auto apart = static_cast<std::int32_t>(std::max(a.at, b.at) - std::min(a.at, b.at));
    return (shifts(a) || shifts(b)) && apart <= 4;
}

const score* sweep::measure(const choice& one) {
    const auto known = seen_.find(one);
    if (known != seen_.end()) return &known->second;
    if (out_of_time_) return nullptr;
    const std::optional<score> came = calls_.run(one);
    if (!came) {
        out_of_time_ = true;
        return nullptr;
    }
    const score& kept = seen_[one] = *came;
    if (path_.empty() || better(kept, best_.measured)) {
        best_ = {one, kept};
        improved_ = true;
        path_.push_back(best_);
        calls_.say("best of " + std::to_string(seen_.size()) + ": " + figures(kept) + ": " + describe(one));
    }
    return &kept;
}

void sweep::note(const move& what, const score& came) {
    effects_[what] = {std::log(value(came) / value(at_)), came.work.lin - at_.work.lin,
                      came.work.att - at_.work.att, accepted_};
}

void sweep::accept(const choice& next, const score& measured) {
    now_ = next;
    at_ = measured;
    ++accepted_;
    calls_.adopt(now_, std::vector<bool>(static_cast<std::size_t>(layers_), true));
}

/// Measures the moves whose effects are oldest; one that helps by itself is taken at once. @return whether
/// time sufficed
bool sweep::look_around() {
    std::vector<move> all = moves();
    all.erase(std::remove_if(all.begin(), all.end(), [this](const move& one) { return !applies(now_, one); }),
              all.end());
    for (std::size_t i = all.size(); i > 1; --i) {
        std::swap(all[i - 1], all[static_cast<std::size_t>(random_() % i)]);
    }
    const auto age = [this](const move& one) {
        const auto known = effects_.find(one);
        return known == effects_.end() ? std::int64_t{-1} : known->second.measured;
    };
    std::stable_sort(all.begin(), all.end(), [&](const move& a, const move& b) { return age(a) < age(b); });
    std::int32_t left = options_.fresh;
    for (const move& one : all) {
        if (left-- == 0) break;
        if (!applies(now_, one)) continue;
        const choice next = moved(now_, one);
        const score* came = measure(next);
        if (came == nullptr) return false;
        note(one, *came);
        if (merit(*came) < merit(at_) - least_gain) accept(next, *came);
    }
    return true;
}

/// Exchanges that promise to help, the best ones first: of every move the best partner, and as many more as
/// add to the promise; then the same with fewer.
std::vector<sweep::exchange> sweep::promising() const {
    struct part {
        move what;
        effect does;
    };
    std::vector<part> all;
    for (const auto& [one, does] : effects_) {
        if (applies(now_, one)) all.push_back({one, does});
    }
    const double divergence = std::log(value(at_));
    const auto promise = [&](const effect& sum) {
        return divergence + sum.divergence +
               penalty_ * excess(at_.work.lin + sum.lin, at_.work.att + sum.att);
    };
    const auto plus = [](effect sum, const effect& more) {
        sum.divergence += more.divergence;
        sum.lin += more.lin;
        sum.att += more.att;
        return sum;
    };
    const double now = merit(at_);
    std::vector<std::pair<double, exchange>> found;
    for (const part& first : all) {
        exchange made{first.what};
        effect sum = first.does;
        while (made.size() < most_moves) {
            const part* best = nullptr;
            double best_promise = promise(sum) - least_gain;
            for (const part& one : all) {
                const double promised = promise(plus(sum, one.does));
                if (promised >= best_promise) continue;
                const bool apart = std::none_of(made.begin(), made.end(),
                                                [&](const move& other) { return touch(one.what, other); });
                if (!apart) continue;
                best = &one;
                best_promise = promised;
            }
            if (best == nullptr) break;
            made.push_back(best->what);
            sum = plus(sum, best->does);
            // Long sums are believed less.
            const double gain = (now - best_promise) / std::sqrt(static_cast<double>(made.size()));
            if (gain > least_gain) found.emplace_back(-gain, made);
        }
    }
    std::stable_sort(found.begin(), found.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<exchange> made;
    made.reserve(found.size());
    for (auto& one : found) {
        made.push_back(std::move(one.second));
    }
    return made;
}

/// @return whether time sufficed
bool sweep::exchange_moves() {
    std::int32_t left = options_.trials;
    for (bool helped = true; helped && left > 0;) {
        helped = false;
        for (const exchange& one : promising()) {
            choice next = now_;
            for (const move& part : one) {
                next = moved(next, part);
            }
            if (seen_.count(next) > 0) continue; // it didn't help then
            if (left-- == 0) return true;
            const score* came = measure(next);
            if (came == nullptr) return false;
            if (merit(*came) < merit(at_) - least_gain) {
                accept(next, *came);
                helped = true;
                break;
            }
        }
    }
    return true;
}

/// Some moves away from the best so far. @return whether time sufficed
bool sweep::kick() {
    choice next = best_.choice;
    const std::vector<move> all = moves();
    const auto count = 2 + random_() % 4;
    for (std::uint64_t done = 0; done < count;) {
        const move& one = all[static_cast<std::size_t>(random_() % all.size())];
        if (!applies(next, one)) continue;
        next = moved(next, one);
        ++done;
    }
    const score* came = measure(next);
    if (came == nullptr) return false;
    accept(next, *came);
    return true;
}

bool sweep::run(const choice& start) {
    const score* came = measure(start);
    if (came == nullptr) return false;
    accept(start, *came);
    std::int32_t idle = 0;
    while (idle <= options_.idle) {
        improved_ = false;
        // Until nothing here helps any more: every move measured since the last one that was accepted.
        for (double before = merit(at_) + 1; merit(at_) < before - least_gain;) {
            before = merit(at_);
            const std::size_t batches = moves().size() / static_cast<std::size_t>(options_.fresh) + 1;
            for (std::size_t batch = 0; batch < batches; ++batch) {
                if (!look_around() || !exchange_moves()) return false;
                if (merit(at_) < before - least_gain) break;
            }
        }
        if (excess(at_.work.lin, at_.work.att) > 0 && penalty_ < 1e6) {
            penalty_ *= penalty_growth; // at rest beyond the bounds
            continue;
        }
        idle = improved_ ? 0 : idle + 1;
        if (idle <= options_.idle && !kick()) return false;
    }
    return true;
}

} // namespace engine::calibration
