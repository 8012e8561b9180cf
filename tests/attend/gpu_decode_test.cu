// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Decode attention and the merge of states on the device: against the oracle, bits that don't depend on other
// rows, graphs, refusals.

#include "decode_step.hpp"
#include "gpu_agreement.cuh"

#include <uniprefill/attend/decode.cuh>
#include <uniprefill/attend/merge.cuh>

using namespace attend_test;
using uniprefill_test::captured_graph;

namespace {

template <class T, std::int32_t D, class Cache>
using decoder = up::decode_attention<up::decode_policy<D>, up::backend::cuda>;

/// A step's arrays on the device, and a call that is ready to run.
template <class T, std::int32_t D, class View>
class device_decode {
  public:
    device_decode(const decode_step<T>& what, const up::limits& bounds)
        : shape_(what.shape())
        , k_(what.k)
        , v_(what.v)
        , queries_(what.queries)
        , requests_(what.requests)
        , lens_(what.lens)
        , first_keys_(what.first_keys)
        , sinks_(what.params.sink_logits != nullptr
                     ? std::vector<float>(what.params.sink_logits, what.params.sink_logits + shape_.heads)
                     : std::vector<float>{})
        , attention_(bounds, importance_test::this_device())
        , memory_(attention_.workspace_bytes())
        , out_(shape_, what.rows)
        , params_(what.params)
        , rows_(what.view()) {
        params_.sink_logits = params_.sink_logits != nullptr ? sinks_.data() : nullptr;
        rows_.space = up::memory_space::device;
        rows_.requests = requests_.data();
        rows_.lens = lens_.data();
        rows_.first_keys = first_keys_.data();
        using cache = decltype(View::view(k_));
        const up::status ready = attention_.template prepare<T, cache>();
        INFO(message(ready));
        REQUIRE(ready.ok());
    }
    up::status run(up::backend::cuda::stream stream = nullptr) {
        const up::head_rows<const T> queries{
            queries_.data(), std::int64_t{shape_.heads} * D, D, rows_.num_rows, shape_.heads, D};
        return attention_.run(queries, View::view(k_), View::view(v_), params_, rows_, out_.rows(),
                              out_.lse(), up::workspace(memory_.data(), bytes), stream);
    }
    output<T> result() {
        const up::status done = run();
        INFO(message(done));
        REQUIRE(done.ok());
        return out_.get(rows_.num_rows);
    }
    void set(const std::vector<std::int32_t>& requests, const std::vector<std::int32_t>& lens) {
        requests_.set(requests);
        lens_.set(lens);
        out_.forget();
    }
    [[nodiscard]] output<T> get() const { return out_.get(rows_.num_rows); }
    [[nodiscard]] up::decode_rows& rows() { return rows_; }
    [[nodiscard]] up::attention_params& params() { return params_; }
    std::size_t bytes = SIZE_MAX; ///< of workspace that is offered

  private:
    model shape_;
    device_caches<T> k_, v_;
    device_array<T> queries_;
    device_array<std::int32_t> requests_, lens_, first_keys_;
    device_array<float> sinks_;
    decoder<T, D, View> attention_;
    device_array<unsigned char> memory_;
    device_output<T> out_;
    up::attention_params params_;
    up::decode_rows rows_;
};

template <class T>
double check_decoded(const decode_step<T>& what, const output<T>& got) {
    double worst = 0;
    for (std::int32_t row = 0; row < what.rows; ++row) {
        for (std::int32_t head = 0; head < got.heads; ++head) {
            const oracle::attended_row right = decoded_row(what, row, head);
            const device_bound bound(right, static_cast<double>(what.params.softcap));
            const float lse = got.lse[static_cast<std::size_t>(row * got.heads + head)];
            INFO("row " << row << ", head " << head << ", reads " << right.reads);
            if (std::isinf(right.lse)) {
                REQUIRE(lse == -std::numeric_limits<float>::infinity());
            } else {
                CAPTURE(lse, right.lse);
                REQUIRE(std::abs(static_cast<double>(lse) - right.lse) <= bound.of_lse(right));
            }
            for (std::size_t i = 0; i < right.out.size(); ++i) {
                const double off =
                    std::abs(static_cast<double>(up::to_float(got.at(row, head)[i])) - right.out[i]);
                const double most = right.reads == 0 ? 0 : bound.template of_out<T>(right, i);
                if (!(off <= most)) {
                    CAPTURE(i, off, most);
                    REQUIRE(off <= most);
                }
                worst = most > 0 ? std::max(worst, off / most) : worst;
            }
        }
    }
    return worst;
}

template <class T, std::int32_t D, class View>
void check_random_steps(std::uint32_t line) {
    for (const std::uint32_t number : uniprefill_test::spread_cases(10, 2)) {
        generator random(uniprefill_test::seed() * 1000 + 40 * line + number);
        model shape;
        shape.kv_heads = random.among({1, 2, 3});
        shape.heads = shape.kv_heads * random.among({1, 3, 4, 5, 8, 17});
        shape.head_dim = D;
        std::vector<std::int32_t> cached;
        for (std::int32_t r = 1 + random.below(4); r > 0; --r) {
            cached.push_back(random.among({0, 1, 15, 16, 17, 255, 257, 700, 1500}));
        }
        decode_step<T> what(shape, cached, 1 + random.below(6), number + 1);
        what.draw_rows(random);
        what.params = random.any_params(shape, what.tokens.sinks);
        INFO("line " << line << ", case " << number << ", seed " << uniprefill_test::seed() << ": "
                     << shape.heads << '/' << shape.kv_heads << " heads, d " << D);
        check_decoded(what, device_decode<T, D, View>(what, what.bounds()).result());
    }
}

} // namespace

TEST_CASE("device decode: random steps by every cache view", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    check_random_steps<up::bfloat16, 64, page_table>(1);
    check_random_steps<up::half, 80, csr_pages>(2);
    check_random_steps<up::bfloat16, 96, token_slots>(3);
    check_random_steps<up::half, 128, contiguous>(4);
    check_random_steps<up::bfloat16, 192, page_pointers>(5);
    check_random_steps<up::half, 256, page_table>(6);
}

TEST_CASE("device decode: other rows, and how many there are, don't matter", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const model shape{8, 2, 64, 16, 8};
    const std::vector<std::int32_t> cached{300, 41, 0, 3000};
    const decode_step<up::bfloat16> what(shape, cached, 9);
    const output<up::bfloat16> together =
        device_decode<up::bfloat16, 64, page_table>(what, what.bounds()).result();
    check_decoded(what, together);
    for (std::int32_t row = 0; row < what.rows; ++row) {
        decode_step<up::bfloat16> alone(shape, cached, 1);
        alone.queries.assign(what.queries.begin() + row * 512, what.queries.begin() + (row + 1) * 512);
        alone.requests[0] = what.requests[static_cast<std::size_t>(row)];
        alone.lens[0] = what.lens[static_cast<std::size_t>(row)];
        const output<up::bfloat16> got =
            device_decode<up::bfloat16, 64, page_table>(alone, what.bounds()).result();
        REQUIRE(got.bits(0) == together.bits(row));
    }
}

TEST_CASE("device decode: a graph is replayed with other requests and lengths, nonsense reads nothing",
          "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const model shape{8, 2, 64, 16, 8};
    decode_step<up::bfloat16> what(shape, {1000, 500}, 4);
    device_decode<up::bfloat16, 64, page_table> step(what, what.bounds());
    captured_graph graph([&](up::backend::cuda::stream stream) { REQUIRE(step.run(stream).ok()); });
    for (const std::vector<std::int32_t>& lens :
         {std::vector<std::int32_t>{1000, 500, 1, 0}, {3, 500, 999, 499}, {0, 0, 0, 0}}) {
        what.lens = lens;
        step.set(what.requests, lens);
        graph.replay();
        check_decoded(what, step.get());
    }
    step.set({-1, 2, 1000000, 0}, {1000, 1000, 1000, -7});
    graph.replay();
    const output<up::bfloat16> nothing = step.get();
    for (const up::bfloat16 element : nothing.rows) {
        REQUIRE(up::to_float(element) == 0);
    }
    for (const float lse : nothing.lse) {
        REQUIRE(lse == -std::numeric_limits<float>::infinity());
    }
}

TEST_CASE("device decode: wrong arguments are named, nothing is written", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const decode_step<up::bfloat16> what({8, 2, 64, 16, 8}, {100}, 2);
    device_decode<up::bfloat16, 64, page_table> step(what, what.bounds());
    const auto refuses = [&](const char* argument) {
        const up::status answer = step.run();
        INFO(message(answer));
        REQUIRE_FALSE(answer.ok());
        REQUIRE(std::string(answer.argument) == argument);
    };
    step.rows().space = up::memory_space::host;
    refuses("rows.space");
    step.rows().space = up::memory_space::device;
    step.rows().num_rows = 3;
    refuses("rows.num_rows");
    step.rows().num_rows = 2;
    const std::int32_t* const lens = step.rows().lens;
    step.rows().lens = nullptr;
    refuses("rows.lens");
    step.rows().lens = lens;
    step.params().scale = -1;
    refuses("params.scale");
    step.params().scale = 0;
    step.bytes = 16;
    refuses("workspace");
    uniprefill_test::check_cuda(cudaDeviceSynchronize(), "nothing ran");
}

TEST_CASE("device merge: parts of the keys make the whole, empty parts aren't read", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const up::cuda_device device = importance_test::this_device();
    const model shape{6, 2, 64, 16, 8};
    const decode_step<up::bfloat16> whole(shape, {500, 3, 64, 2000}, 7);
    const output<up::bfloat16> all =
        device_decode<up::bfloat16, 64, page_table>(whole, whole.bounds()).result();
    const std::int64_t wide = std::int64_t{shape.heads} * shape.head_dim;
    for (const std::vector<std::int32_t>& cuts :
         {std::vector<std::int32_t>{}, {250}, {0}, {1, 2, 3}, {64, 128, 400, 1999}}) {
        std::vector<device_array<up::bfloat16>> rows;
        std::vector<device_array<float>> lses;
        std::vector<up::attention_state<up::bfloat16>> states;
        for (std::size_t i = 0; i <= cuts.size(); ++i) {
            decode_step<up::bfloat16> some = whole;
            for (std::size_t row = 0; row < 7; ++row) {
                some.first_keys[row] = i > 0 ? std::min(cuts[i - 1], whole.lens[row]) : 0;
                some.lens[row] = i < cuts.size() ? std::min(cuts[i], whole.lens[row]) : whole.lens[row];
            }
            output<up::bfloat16> part =
                device_decode<up::bfloat16, 64, page_table>(some, whole.bounds()).result();
            for (std::size_t at = 0; at < part.lse.size(); ++at) { // an empty part may hold anything
                if (std::isinf(part.lse[at])) {
                    std::fill_n(part.rows.begin() + static_cast<std::ptrdiff_t>(at) * 64, 64,
                                up::from_float<up::bfloat16>(NAN));
                }
            }
            rows.emplace_back(part.rows);
            lses.emplace_back(part.lse);
            states.push_back({{rows.back().data(), wide, shape.head_dim, 7, shape.heads, shape.head_dim},
                              lses.back().data()});
        }
        // Into the memory of the last part.
        const up::head_rows<up::bfloat16> out{rows.back().data(), wide,          shape.head_dim, 7,
                                              shape.heads,        shape.head_dim};
        const up::status done =
            up::merge_attention(device, states.data(), static_cast<std::int32_t>(states.size()), out,
                                lses.back().data(), nullptr);
        INFO(message(done));
        REQUIRE(done.ok());
        const std::vector<up::bfloat16> merged = rows.back().get();
        const std::vector<float> merged_lse = lses.back().get();
        for (std::int32_t row = 0; row < 7; ++row) {
            for (std::int32_t head = 0; head < shape.heads; ++head) {
                const oracle::attended_row right = decoded_row(whole, row, head);
                const device_bound bound(right, 0);
                const auto at = static_cast<std::size_t>(row * shape.heads + head);
                REQUIRE(std::abs(static_cast<double>(merged_lse[at]) - right.lse) <=
                        2 * bound.of_lse(right) + 1e-6);
                for (std::size_t i = 0; i < right.out.size(); ++i) {
                    const double came = static_cast<double>(up::to_float(merged[at * 64 + i]));
                    // A part's outputs are rounded to T before they are added.
                    REQUIRE(std::abs(came - right.out[i]) <=
                            2 * bound.of_out<up::bfloat16>(right, i) +
                                2 * rounding<up::bfloat16>() * right.magnitude[i]);
                }
            }
        }
        if (cuts.empty() || cuts.back() == 0) {
            REQUIRE(std::memcmp(merged.data(), all.rows.data(), merged.size() * 2) == 0);
        }
    }
    up::attention_state<up::bfloat16> none[17]{};
    REQUIRE(std::string(up::merge_attention(device, none, -1, {}, nullptr, nullptr).argument) == "count");
}
