// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/calibration/search.hpp"

#include "engine/app/number_text.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <random>
#include <utility>

namespace engine::calibration {

namespace {

/// The rungs of the ladders that this search climbs down: the p that is worth a run each.
constexpr std::array<double, 5> layer_rungs = {0.995, 0.99, 0.98, 0.95, 0.90};
constexpr std::array<double, 4> list_rungs = {0.995, 0.99, 0.98, 0.95};
constexpr auto last_layer_rung = static_cast<std::int8_t>(layer_rungs.size());
constexpr auto last_list_rung = static_cast<std::int8_t>(list_rungs.size());

/// Smaller gains aren't worth a change: the windows are few.
constexpr double least_gain = 0.002;
/// What a guess may spend of the wanted divergence for the search to begin there, and how many are tried.
constexpr double begin_within = 0.6;
constexpr int most_guesses = 6;
/// What a rung harms and saves, as a share of the last one; of no more use than to guess.
constexpr std::array<double, 6> harm_shares = {0, 0.05, 0.1, 0.2, 0.45, 1};
constexpr std::array<double, 6> saving_shares = {0, 0.2, 0.3, 0.45, 0.75, 1};
/// How far above the wanted divergence single moves may go before they are repaired.
constexpr double most_excess = 1.5;

double share_of_harm(int rung) {
    return harm_shares[static_cast<std::size_t>(rung)];
}

double share_of_saving(int rung) {
    return saving_shares[static_cast<std::size_t>(rung)];
}

/// The rung that a step is on, the last one above it where it is on none.
template <class Rungs, class Step>
std::int8_t rung_of(const Rungs& rungs, std::int8_t step, const Step& step_at) {
    std::int8_t rung = 0;
    for (std::size_t i = 0; i < rungs.size() && step_at(rungs[i]) <= step; ++i) {
        rung = static_cast<std::int8_t>(i + 1);
    }
    return rung;
}

std::string figures(const score& of) {
    return "KL " + fixed(of.kl, 4) + ", work " + fixed(of.work.total, 3) + " (lin " + fixed(of.work.lin, 3) +
           ", att " + fixed(of.work.att, 3) + ")";
}

} // namespace

std::vector<std::int32_t> candidate_layers(std::int32_t layers) {
    std::vector<std::int32_t> made;
    const std::int32_t stride = layers > 16 ? 2 : 1;
    for (std::int32_t layer = stride - 1; layer < layers - 1; layer += stride) {
        made.push_back(layer);
    }
    return made;
}

std::vector<bool> marked_layers(const std::vector<std::int32_t>& wanted, std::int32_t layers) {
    std::vector<bool> made(static_cast<std::size_t>(layers), false);
    for (const std::int32_t layer : wanted) {
        made[static_cast<std::size_t>(layer)] = true;
    }
    return made;
}

search::search(std::int32_t layers, const search_options& options, search_calls calls)
    : layers_(layers)
    , options_(options)
    , calls_(std::move(calls))
    , now_(dense_choice(layers)) {
    seen_[now_] = at_; // nothing diverges, all of the work is done
}

std::int8_t search::rung(const choice& of, coordinate at) const {
    return at == lists() ? rung_of(list_rungs, of.lists.front(), list_step)
                         : rung_of(layer_rungs, of.steps[at], layer_step);
}

std::int8_t search::last_rung(coordinate at) const {
    return at == lists() ? last_list_rung : last_layer_rung;
}

choice search::with_rung(const choice& of, coordinate at, std::int8_t rung) const {
    const auto place = static_cast<std::size_t>(std::max(rung - 1, 0));
    if (at == lists()) return with_lists(of, rung == 0 ? std::int8_t{0} : list_step(list_rungs[place]));
    choice made = of;
    made.steps[at] = rung == 0 ? std::int8_t{0} : layer_step(layer_rungs[place]);
    return made;
}

const score* search::measure(const choice& one) {
    const auto known = seen_.find(one);
    if (known != seen_.end()) return &known->second;
    if (out_of_time_) return nullptr;
    const std::optional<score> came = calls_.run(one);
    if (!came) {
        out_of_time_ = true;
        return nullptr;
    }
    return &(seen_[one] = *came);
}

void search::accept(const choice& next, const score& measured, const char* how) {
    now_ = next;
    at_ = measured;
    path_.push_back({now_, at_});
    calls_.say(std::string(how) + ": " + describe(now_) + ": " + figures(at_));
    std::vector<bool> marked(static_cast<std::size_t>(layers_), false);
    for (const coordinate at : kept_) {
        if (at != lists()) marked[at] = true;
    }
    calls_.adopt(now_, marked);
}

bool search::probe() {
    for (const std::int32_t layer : candidate_layers(layers_)) {
        const choice alone =
            with_rung(dense_choice(layers_), static_cast<coordinate>(layer), last_layer_rung);
        const score* measured = measure(alone);
        if (measured == nullptr) return false;
        probes_.push_back({layer, *measured});
        calls_.say("layer " + std::to_string(layer) + " alone: " + figures(*measured));
    }
    return true;
}

/// A choice that should spend @p harm, were harms and savings of layers what they are alone: a guess that
/// costs no run.
choice search::guess(double harm) const {
    choice made = dense_choice(layers_);
    double spent = 0;
    while (true) {
        choice best = made;
        double best_ratio = 0;
        double best_harm = 0;
        const double work = guessed_work(made);
        for (const layer_probe& probe : probes_) {
            const auto at = static_cast<coordinate>(probe.layer);
            const std::int8_t step = rung(made, at);
            if (step == last_layer_rung || std::find(kept_.begin(), kept_.end(), at) == kept_.end()) continue;
            const choice next = with_rung(made, at, static_cast<std::int8_t>(step + 1));
            const double added = std::max(probe.measured.kl, options_.divergence * 1e-3) *
                                 (share_of_harm(step + 1) - share_of_harm(step));
            const double ratio = (work - guessed_work(next)) / added;
            if (spent + added <= harm && ratio > best_ratio) {
                best = next;
                best_ratio = ratio;
                best_harm = added;
            }
        }
        if (best == made) return made;
        made = best;
        spent += best_harm;
    }
}

/// Rows that each layer leaves to the ones after it, as it leaves alone.
double search::guessed_work(const choice& of) const {
    double left = 1;
    double sum = 0;
    auto probe = probes_.begin();
    for (std::int32_t layer = 0; layer < layers_; ++layer) {
        if (probe != probes_.end() && probe->layer == layer) {
            const double after = static_cast<double>(layers_ - layer) / layers_;
            const double saved = std::clamp((1 - probe->measured.work.total) / after, 0.0, 1.0);
            left *= 1 - saved * share_of_saving(rung(of, static_cast<coordinate>(layer)));
            ++probe;
        }
        sum += left;
    }
    return sum / layers_;
}

/// Where the descent begins: a guess within the divergence, but not far within it.
bool search::begin() {
    double harm = options_.divergence;
    for (int attempt = 0; attempt < most_guesses; ++attempt, harm *= 0.5) {
        const choice guessed = guess(harm);
        if (guessed == now_) break;
        const score* measured = measure(guessed);
        if (measured == nullptr) return false;
        calls_.say("guess: " + describe(guessed) + ": " + figures(*measured));
        if (measured->kl > begin_within * options_.divergence) continue;
        accept(guessed, *measured, "from");
        break;
    }
    return true;
}

/// Work saved for each nat, from where the search is.
double search::ratio(const score& next) const {
    return (at_.work.total - next.work.total) / std::max(next.kl - at_.kl, options_.divergence * 1e-3);
}

bool search::descend() {
    struct option {
        coordinate at;
        double expected; ///< ratio when it was last measured
    };
    std::vector<option> open;
    for (const coordinate at : kept_) {
        open.push_back({at, std::numeric_limits<double>::max()}); // all are measured once
    }
    while (!open.empty()) {
        std::stable_sort(open.begin(), open.end(),
                         [](const option& a, const option& b) { return a.expected > b.expected; });
        std::size_t best = open.size();
        double best_ratio = 0;
        // Expectations are old: they only say where to look first.
        for (std::size_t i = 0; i < open.size(); ++i) {
            if (best < open.size() && best_ratio >= open[i].expected) break;
            const auto step = static_cast<std::int8_t>(rung(now_, open[i].at) + 1);
            if (step > last_rung(open[i].at)) {
                open[i].expected = 0;
                continue;
            }
            const score* measured = measure(with_rung(now_, open[i].at, step));
            if (measured == nullptr) return false;
            open[i].expected = measured->kl <= options_.divergence ? ratio(*measured) : 0;
            if (open[i].expected > best_ratio) {
                best = i;
                best_ratio = open[i].expected;
            }
        }
        if (best == open.size()) break;
        const coordinate at = open[best].at;
        const choice next = with_rung(now_, at, static_cast<std::int8_t>(rung(now_, at) + 1));
        slope_ = best_ratio;
        accept(next, seen_.at(next), "down");
        // What doesn't fit now won't later: divergence only grows on the way down.
        open.erase(
            std::remove_if(open.begin(), open.end(), [](const option& one) { return one.expected <= 0; }),
            open.end());
    }
    return true;
}

std::vector<choice> search::neighbours(coordinate at) const {
    std::vector<choice> made;
    const std::int8_t step = rung(now_, at);
    if (step < last_rung(at)) made.push_back(with_rung(now_, at, static_cast<std::int8_t>(step + 1)));
    if (step > 0) made.push_back(with_rung(now_, at, static_cast<std::int8_t>(step - 1)));
    if (at == lists() || step == 0) return made;
    for (const std::int32_t by : {-1, 1, -2, 2}) {
        const auto to = static_cast<std::int32_t>(at) + by;
        if (to < 0 || to >= layers_ - 1 || now_.steps[static_cast<std::size_t>(to)] != 0) continue;
        made.push_back(with_rung(with_rung(now_, at, 0), static_cast<coordinate>(to), step));
    }
    return made;
}

/// Each coordinate moves by one, or a selection to a layer nearby, where that lowers work plus divergence at
/// the going rate.
bool search::refine() {
    std::vector<coordinate> order = kept_;
    for (coordinate layer = 0; layer < static_cast<coordinate>(layers_); ++layer) {
        const bool there = std::find(order.begin(), order.end(), layer) != order.end();
        if (now_.steps[layer] != 0 && !there) order.push_back(layer);
    }
    std::mt19937_64 random(options_.seed);
    for (std::size_t i = order.size(); i > 1; --i) {
        std::swap(order[i - 1], order[static_cast<std::size_t>(random() % i)]);
    }
    for (const coordinate at : order) {
        for (const choice& next : neighbours(at)) {
            const score* measured = measure(next);
            if (measured == nullptr) return false;
            if (measured->kl > most_excess * options_.divergence) continue;
            if (price(*measured) > price(at_) * (1 - least_gain)) continue;
            accept(next, *measured, "moved");
            break;
        }
    }
    return true;
}

/// Back within the wanted divergence, by the steps that cost least work for what they mend.
bool search::repair() {
    while (at_.kl > options_.divergence) {
        choice best = now_;
        double best_ratio = -1;
        for (coordinate at = 0; at <= lists(); ++at) {
            if (rung(now_, at) == 0) continue;
            const choice next = with_rung(now_, at, static_cast<std::int8_t>(rung(now_, at) - 1));
            const score* measured = measure(next);
            if (measured == nullptr) return false;
            const double mended = at_.kl - measured->kl;
            const double cost = std::max(measured->work.total - at_.work.total, 1e-6);
            if (mended / cost > best_ratio) {
                best = next;
                best_ratio = mended / cost;
            }
        }
        if (best == now_) break;
        accept(best, seen_.at(best), "up");
    }
    return true;
}

bool search::run() {
    // Where a layer is least worth it alone, it is hardly worth it with others.
    std::vector<layer_probe> ranked = probes_;
    const auto worth = [&](const layer_probe& one) {
        return (1 - one.measured.work.total) / std::max(one.measured.kl, options_.divergence * 1e-3);
    };
    std::stable_sort(ranked.begin(), ranked.end(),
                     [&](const layer_probe& a, const layer_probe& b) { return worth(a) > worth(b); });
    for (std::size_t i = 0; i < std::min(ranked.size(), options_.most_layers); ++i) {
        kept_.push_back(static_cast<coordinate>(ranked[i].layer));
    }
    std::sort(kept_.begin(), kept_.end());
    if (options_.lists) kept_.push_back(lists());

    if (!begin() || !descend()) return false;
    for (double before = 1; best().measured.work.total < before;) {
        before = best().measured.work.total;
        if (!refine() || !repair() || !descend()) return false;
    }
    return true;
}

measured_choice search::best() const {
    const auto* found = &*seen_.find(dense_choice(layers_));
    for (const auto& one : seen_) {
        if (one.second.kl <= options_.divergence && one.second.work.total < found->second.work.total) {
            found = &one;
        }
    }
    return {found->first, found->second};
}

} // namespace engine::calibration
