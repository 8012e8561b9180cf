// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "property/request.hpp"

#include <uniprefill/core/element.hpp>

#include <sstream>

namespace property {

namespace {

/// Disjoint ascending ranges over [0, end), some of them empty of rows.
std::vector<oracle::range> random_ranges(random_numbers& numbers, int end, int most) {
    std::vector<oracle::range> ranges;
    int position = numbers.between(0, std::max(0, end / 3));
    for (int i = numbers.between(1, most); i > 0 && position < end; --i) {
        const int length = numbers.between(0, std::max(1, end / 4));
        ranges.push_back({position, position + length});
        position += length + numbers.between(0, std::max(1, end / 3));
    }
    return ranges;
}

void draw_rows(random_numbers& numbers, const shape& of, const request_wishes& wishes, rounding to,
               request& made) {
    const int rows = made.rows();
    const int keys = made.cached + rows;
    made.q = oracle::tensor(rows, of.heads, of.dim);
    made.k = oracle::tensor(keys, of.kv_heads, of.dim);
    for (double& value : made.q.data) {
        value = rounded(numbers.normal(), to);
    }
    const double size = wishes.style == key_style::sharp ? 3.0 : 1.0;
    const int distinct = wishes.style == key_style::tied  ? 1
                         : wishes.style == key_style::few ? 3
                                                          : std::max(1, keys);
    oracle::tensor pool(distinct, of.kv_heads, of.dim);
    for (double& value : pool.data) {
        value = rounded(size * numbers.normal(), to);
    }
    for (int key = 0; key < keys; ++key) {
        const int from = distinct < keys ? numbers.between(0, distinct - 1) : key;
        for (int head = 0; head < of.kv_heads; ++head) {
            for (int i = 0; i < of.dim; ++i) {
                made.k.at(key, head, i) = pool.at(from, head, i);
            }
        }
    }
    if (wishes.style == key_style::one_block && rows > 0) {
        // All queries point one way and one key does too, so that it takes nearly all of every row's mass.
        const int key = made.cached + numbers.between(0, rows - 1);
        for (int row = 0; row < rows; ++row) {
            for (int head = 0; head < of.heads; ++head) {
                made.q.at(row, head, 0) = rounded(4.0 + 0.1 * numbers.normal(), to);
            }
        }
        for (int head = 0; head < of.kv_heads; ++head) {
            made.k.at(key, head, 0) = rounded(40.0 / of.score.scale, to);
        }
    }
}

} // namespace

double rounded(double value, rounding to) {
    const auto single = static_cast<float>(value);
    switch (to) {
    case rounding::f32:
        return static_cast<double>(single);
    case rounding::f16:
        return static_cast<double>(up::to_float(up::from_float<up::half>(single)));
    case rounding::bf16:
        return static_cast<double>(up::to_float(up::from_float<up::bfloat16>(single)));
    }
    return value;
}

shape random_shape(random_numbers& numbers) {
    shape made;
    const int groups[] = {1, 2, 3, 4, 8};
    const int dims[] = {1, 8, 16, 40, 64, 80, 128, 256};
    const int blocks[] = {8, 16, 24, 64, 100, 128, 256};
    const int observers[] = {1, 2, 7, 16, 33, 128};
    made.kv_heads = numbers.between(1, 3);
    made.heads = made.kv_heads * numbers.one_of(groups);
    made.dim = numbers.one_of(dims);
    made.block_rows = numbers.one_of(blocks);
    made.observations = numbers.one_of(observers);
    made.score.scale = 1.0 / std::sqrt(static_cast<double>(made.dim));
    made.score.scale = static_cast<double>(static_cast<float>(made.score.scale));
    if (numbers.chance(0.2)) {
        made.score.softcap = numbers.one_of({1.0, 5.0, 30.0, 50.0});
    }
    if (numbers.chance(0.2)) {
        for (int head = 0; head < made.heads; ++head) {
            made.score.sink_logits.push_back(rounded(2 * numbers.normal(), rounding::f32));
        }
    }
    return made;
}

key_style random_style(random_numbers& numbers) {
    return numbers.one_of(
        {key_style::plain, key_style::sharp, key_style::tied, key_style::few, key_style::one_block});
}

request random_request(random_numbers& numbers, const shape& of, const request_wishes& wishes, rounding to) {
    request made;
    made.tag = wishes.tag;
    made.cached = wishes.cached;
    const int rows = wishes.rows >= 0 ? wishes.rows : numbers.between(0, 5 * of.block_rows);
    int position = 0;
    for (int key = 0; key < made.cached + rows; ++key) {
        position += wishes.gaps && numbers.chance(0.3) ? numbers.between(1, 9) : 0;
        (key < made.cached ? made.cached_positions : made.positions).push_back(position++);
    }
    int left = rows;
    for (int segment = wishes.segments; segment > 1; --segment) {
        made.span_rows.push_back(numbers.between(0, left));
        left -= made.span_rows.back();
    }
    made.span_rows.push_back(left);
    made.options.sink = numbers.one_of({0, 0, 1, 5, of.block_rows, 20});
    made.options.tail = numbers.one_of({0, 0, 1, 3, of.block_rows, of.observations});
    if (wishes.spans) {
        made.forced = random_ranges(numbers, position, 4);
    }
    if (wishes.observed) {
        made.observed = random_ranges(numbers, position, 3);
    }
    draw_rows(numbers, of, wishes, to, made);
    return made;
}

int segment_begin(const request& what, int segment) {
    int begin = 0;
    for (int i = 0; i < segment; ++i) {
        begin += what.span_rows[static_cast<std::size_t>(i)];
    }
    return begin;
}

oracle::segment_problem problem_of(const request& what, int segment, const shape& of) {
    const int begin = segment_begin(what, segment);
    const int rows = what.span_rows[static_cast<std::size_t>(segment)];
    const int keys = what.cached + begin + rows;
    oracle::segment_problem problem;
    problem.score = of.score;
    problem.block_rows = of.block_rows;
    problem.q = oracle::tensor(rows, of.heads, of.dim);
    problem.keys = oracle::tensor(keys, of.kv_heads, of.dim);
    for (int row = 0; row < rows; ++row) {
        problem.positions.push_back(what.positions[static_cast<std::size_t>(begin + row)]);
        for (int head = 0; head < of.heads; ++head) {
            for (int i = 0; i < of.dim; ++i) {
                problem.q.at(row, head, i) = what.q.at(begin + row, head, i);
            }
        }
    }
    std::copy_n(what.k.data.begin(), problem.keys.data.size(), problem.keys.data.begin());
    problem.key_positions = what.cached_positions;
    problem.key_positions.insert(problem.key_positions.end(), what.positions.begin(),
                                 what.positions.begin() + begin + rows);
    problem.observers = oracle::observers_of(problem.positions, what.observed, of.observations);
    problem.forced =
        oracle::forced_rows(problem.positions, what.options.sink, what.options.tail, what.forced);
    return problem;
}

std::string describe(const request& what, const shape& of) {
    std::ostringstream text;
    text << "rows " << what.rows() << " cached " << what.cached << " tag " << static_cast<int>(what.tag)
         << " sink " << what.options.sink << " tail " << what.options.tail << " heads " << of.heads << "/"
         << of.kv_heads << " d " << of.dim << " G " << of.block_rows << " n " << of.observations
         << " softcap " << of.score.softcap << " sink logits " << of.score.sink_logits.size() << " spans";
    for (const int rows : what.span_rows) {
        text << " " << rows;
    }
    for (const oracle::range& r : what.forced) {
        text << " forced[" << r.begin << "," << r.end << ")";
    }
    for (const oracle::range& r : what.observed) {
        text << " observed[" << r.begin << "," << r.end << ")";
    }
    return text.str();
}

} // namespace property
