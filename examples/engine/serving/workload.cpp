// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/serving/workload.hpp"

#include "engine/app/options.hpp"
#include "engine/error.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <random>
#include <sstream>
#include <utility>

namespace engine {

namespace {

constexpr std::size_t shared_openings = 3;

/// Numbers that are the same with every standard library, up to the last bits of its logarithm.
class source {
  public:
    explicit source(std::uint64_t seed)
        : random_(seed) {}
    /// In [0, 1).
    double share() { return static_cast<double>(random_() >> 11) * 0x1p-53; }
    std::size_t below(std::size_t bound) { return static_cast<std::size_t>(random_() % bound); }
    /// Evenly on a logarithmic scale.
    std::int32_t between(std::int32_t lowest, std::int32_t highest) {
        const double ratio = (highest + 1.0) / lowest;
        return std::min(highest, static_cast<std::int32_t>(lowest * std::pow(ratio, share())));
    }
    double waiting_time(double rate) { return -std::log(1 - share()) / rate; }

  private:
    std::mt19937_64 random_;
};

/// Reads digits and the character after them.
class fields_of {
  public:
    fields_of(const std::string& line, const std::string& place)
        : line_(line)
        , place_(place) {}
    std::int32_t number(char end, std::int32_t lowest, std::int32_t highest) {
        std::int32_t value = 0;
        const char* const last = line_.data() + line_.size();
        const char* const first = line_.data() + std::min(at_, line_.size());
        const auto [stop, fault] = std::from_chars(first, last, value);
        const bool ends = end == '\0' ? stop == last : stop != last && *stop == end;
        if (fault != std::errc{} || !ends || *first == '-' || value < lowest || value > highest) refuse();
        at_ = static_cast<std::size_t>(stop - line_.data()) + 1;
        return value;
    }
    /// Seconds since a moment, to seven decimals.
    double time() {
        const std::int32_t year = number('-', 1, 9999);
        const std::int32_t month = number('-', 1, 12);
        const std::int32_t day = number(' ', 1, 31);
        const std::int32_t hour = number(':', 0, 23);
        const std::int32_t minute = number(':', 0, 59);
        const std::int32_t second = number('.', 0, 60);
        const std::size_t first_decimal = at_;
        double decimals = number(',', 0, 9999999);
        for (std::size_t digits = at_ - 1 - first_decimal; digits > 0; --digits) {
            decimals /= 10;
        }
        // Days of the civil calendar, a year beginning in March (Hinnant, chrono-compatible low-level date
        // algorithms).
        const std::int32_t from_march = year - (month <= 2 ? 1 : 0);
        const std::int32_t days = 365 * from_march + from_march / 4 - from_march / 100 + from_march / 400 +
                                  (153 * ((month + 9) % 12) + 2) / 5 + day;
        return days * 86400.0 + hour * 3600.0 + minute * 60.0 + second + decimals;
    }
    [[noreturn]] void refuse() const {
        throw error(place_, "2023-11-16 18:15:46.6805900,PROMPT,NEW, not before the line above",
                    quoted(line_, 100));
    }

  private:
    const std::string& line_;
    const std::string& place_;
    std::size_t at_ = 0;
};

std::string next_line(std::istream& from) {
    std::string line;
    std::getline(from, line);
    if (!line.empty() && line.back() == '\r') line.pop_back();
    return line;
}

/// Some tokens in a row from anywhere in the texts.
void add_passage(const std::vector<std::vector<std::int32_t>>& texts, std::int32_t tokens, source& random,
                 std::vector<std::int32_t>& to) {
    const auto& text = texts[random.below(texts.size())];
    std::size_t at = random.below(text.size());
    for (std::int32_t i = 0; i < tokens; ++i) {
        to.push_back(text[at]);
        at = at + 1 < text.size() ? at + 1 : 0;
    }
}

} // namespace

std::vector<trace_row> read_trace(const std::string& name, const std::string& text, std::int32_t most) {
    std::istringstream lines(text);
    const auto place_of = [&name](std::size_t line) {
        return "--trace " + quoted(name) + " line " + std::to_string(line);
    };
    const std::string head = next_line(lines);
    if (head != "TIMESTAMP,ContextTokens,GeneratedTokens") {
        throw error(place_of(1), "TIMESTAMP,ContextTokens,GeneratedTokens", quoted(head, 100));
    }
    std::vector<trace_row> rows;
    double first = 0;
    for (std::size_t number = 2; static_cast<std::int32_t>(rows.size()) < most && lines.peek() != EOF;
         ++number) {
        const std::string line = next_line(lines);
        const std::string place = place_of(number);
        fields_of fields(line, place);
        const double time = fields.time();
        if (rows.empty()) first = time;
        trace_row row;
        row.seconds = time - first;
        row.prompt = fields.number(',', 0, 1 << 30);
        row.new_tokens = fields.number('\0', 0, 1 << 30);
        if (!rows.empty() && row.seconds < rows.back().seconds) fields.refuse();
        rows.push_back(row);
    }
    return rows;
}

std::vector<std::vector<std::int32_t>> read_texts(const std::string& list, const tokenizer& words) {
    std::vector<std::vector<std::int32_t>> texts;
    std::istringstream lines(read_file("--texts", list));
    while (lines.peek() != EOF) {
        const std::string path = next_line(lines);
        if (path.empty()) continue;
        texts.push_back(words.encode(read_file("--texts", path)));
        if (texts.back().empty()) throw error("--texts", "files that aren't empty", quoted(path));
    }
    if (texts.empty()) throw error("--texts", "a list of at least one file", "none in " + quoted(list));
    return texts;
}

std::vector<arrival> draw_workload(const workload_options& options,
                                   const std::vector<std::vector<std::int32_t>>& texts) {
    std::vector<trace_row> trace;
    if (!options.trace.empty()) {
        trace = read_trace(options.trace, read_file("--trace", options.trace), options.requests);
        if (static_cast<std::int32_t>(trace.size()) < options.requests) {
            throw error("--trace " + quoted(options.trace), std::to_string(options.requests) + " requests",
                        std::to_string(trace.size()));
        }
    }
    // A trace keeps its rhythm at any rate that is asked for.
    const double span = trace.empty() ? 0 : trace.back().seconds;
    const double pace = options.rate && span > 0 ? (options.requests - 1) / *options.rate / span : 1;
    const double rate = options.rate.value_or(default_rate);

    source random(options.seed);
    std::vector<const std::vector<std::int32_t>*> openings;
    for (std::size_t i = 0; i < std::min(shared_openings, texts.size()); ++i) {
        openings.push_back(&texts[random.below(texts.size())]);
    }
    std::vector<arrival> made;
    double now = 0;
    for (std::int32_t i = 0; i < options.requests; ++i) {
        arrival next;
        std::int32_t prompt = random.between(options.min_prompt, options.max_prompt);
        next.request.new_tokens = random.between(options.min_new, options.max_new);
        if (trace.empty()) {
            now += random.waiting_time(rate);
        } else {
            const trace_row& row = trace[static_cast<std::size_t>(i)];
            now = row.seconds * pace;
            prompt = std::clamp(row.prompt, options.min_prompt, options.max_prompt);
            next.request.new_tokens = std::clamp(row.new_tokens, options.min_new, options.max_new);
        }
        next.seconds = now;
        next.number = i;
        if (random.share() < options.shared) {
            // All but a last part of its own, up to half of it.
            const auto& opening = *openings[random.below(openings.size())];
            const auto length = static_cast<std::size_t>(prompt);
            const std::size_t own = std::min(length, 1 + random.below(length / 2 + 1));
            const std::size_t shared = std::min(opening.size(), length - own);
            next.request.prompt.assign(opening.begin(),
                                       opening.begin() + static_cast<std::ptrdiff_t>(shared));
        }
        add_passage(texts, prompt - static_cast<std::int32_t>(next.request.prompt.size()), random,
                    next.request.prompt);
        made.push_back(std::move(next));
    }
    if (options.order != 0) {
        source other(options.order);
        for (std::size_t i = made.size(); i > 1; --i) {
            arrival& here = made[i - 1];
            arrival& there = made[other.below(i)];
            std::swap(here.number, there.number);
            std::swap(here.request, there.request);
        }
    }
    return made;
}

} // namespace engine
