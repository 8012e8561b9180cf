// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Ranks on devices of their own decide from masses that NCCL has summed, and note in ledgers of their own
// what is left: the same ledger on each, bit for bit, though nobody sends one.

#include "check_nccl.hpp"
#include "pipeline/gpu_ranks.cuh"
#include "property/random.hpp"

#include <uniprefill/comm/nccl.cuh>
#include <uniprefill/ledger/drop_ledger.cuh>

#include <functional>
#include <numeric>
#include <thread>

namespace up = uniprefill;
using pipeline_test::device_selector;
using pipeline_test::require_ok;
using pipeline_test::use_device;
using uniprefill_test::check_cuda;
using uniprefill_test::device_array;

namespace {

using numbers = std::vector<std::int32_t>;
constexpr std::int32_t max_requests = 6, max_rows = 3000;
constexpr int num_ranks = 2;

up::limits step_limits() {
    up::limits bounds;
    bounds.max_requests = bounds.max_segments = max_requests;
    bounds.max_rows = max_rows;
    bounds.num_layers = 2;
    bounds.num_heads = bounds.num_kv_heads = 1;
    bounds.num_global_heads = num_ranks;
    bounds.head_dim = 64;
    bounds.block_rows = 16;
    bounds.num_observations = 32;
    return bounds;
}

/// Prompts, their rules, and each rank's part of the masses.
struct prompts {
    numbers cu_seqlens{0}, positions;
    std::vector<up::selection_rule> rules;
    std::vector<std::vector<std::int64_t>> masses; // [num_ranks][rank_buffer_size]

    explicit prompts(property::random_numbers& random) {
        for (int count = random.between(1, max_requests); count > 0; --count) {
            const int rows = random.between(0, max_rows / max_requests);
            for (int row = 0; row < rows; ++row) {
                positions.push_back(row);
            }
            cu_seqlens.push_back(static_cast<std::int32_t>(positions.size()));
            rules.push_back(up::selection_rule::top_p(0.3 + 0.7 * random.unit()));
        }
        const auto words = static_cast<std::size_t>(up::mass_view::rank_buffer_size(step_limits()));
        for (int rank = 0; rank < num_ranks; ++rank) {
            masses.emplace_back(words);
            const auto blocks = static_cast<std::size_t>(step_limits().max_blocks());
            for (std::size_t block = 0; block < blocks; ++block) {
                masses.back()[block] =
                    static_cast<std::int64_t>(random.next() >> 24) >> random.between(0, 30);
            }
        }
        if (random.chance(0.2)) { // one rank alone met a fault
            masses[0][words - max_requests] = up::fault_word(up::mass_fault::non_finite);
        }
    }
    [[nodiscard]] std::int32_t num_requests() const { return static_cast<std::int32_t>(rules.size()); }
};

__global__ void positions_of(const std::int32_t* rows, const std::int32_t* positions, std::int32_t count,
                             std::int32_t* out) {
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < count;
         i += static_cast<std::int32_t>(blockDim.x)) {
        out[i] = rows[i] < 0 ? 0 : positions[rows[i]];
    }
}

/// A rank: what it decides, and its ledger, on the device that is current where it is made.
class rank {
  public:
    rank()
        : device_(pipeline_test::this_device())
        , selector_(step_limits(), device_)
        , buffer_(static_cast<std::size_t>(up::mass_view::rank_buffer_size(step_limits())))
        , selected_(selection_bytes())
        , scratch_(selector_.workspace_bytes())
        , cu_seqlens_(max_requests + 1)
        , positions_(max_rows)
        , left_(max_rows)
        , tags_(std::vector<up::request_tag>(max_requests, up::request_tag::prefill))
        , options_(std::vector<up::request_options>(max_requests, {1, 3, 2, 0}))
        , rules_(max_requests)
        , ids_([] {
            numbers ids(max_requests);
            std::iota(ids.begin(), ids.end(), 0);
            return ids;
        }())
        , memory_(up::drop_ledger<up::backend::cuda>::state_bytes(ledger_limits())) {
        check_cuda(cudaStreamCreate(&stream_), "cudaStreamCreate");
        up::workspace pieces(selected_.data(), selected_.size());
        decided_ = up::selection::carve(pieces, step_limits(), up::memory_space::device);
    }
    rank(const rank&) = delete;
    rank& operator=(const rank&) = delete;
    ~rank() { cudaStreamDestroy(stream_); }

    void load(const prompts& what, const std::vector<std::int64_t>& masses) {
        buffer_.set(masses);
        cu_seqlens_.set(what.cu_seqlens);
        positions_.set(what.positions);
        rules_.set(what.rules);
        num_requests_ = what.num_requests();
        num_rows_ = static_cast<std::int32_t>(what.positions.size());
    }
    /// Nothing is read back on the way.
    template <class Reduction>
    up::status run(const Reduction& reduction) {
        const numbers sets{0, 1};
        UNIPREFILL_TRY(
            ledger_.bind(ledger_limits(), sets.data(), memory_.data(), memory_.size(), device_, stream_));
        UNIPREFILL_TRY(ledger_.admit(ids_.data(), num_requests_, stream_));
        const up::batch_view rows = batch(cu_seqlens_.data(), positions_.data(), num_rows_);
        const up::mass_view masses =
            up::mass_view::over(buffer_.data(), step_limits(), up::memory_space::device);
        UNIPREFILL_TRY(reduction(buffer_.data(), static_cast<std::int64_t>(buffer_.size()),
                                 up::rank_reduction::sum, stream_));
        UNIPREFILL_TRY(selector_.run(masses, rows, rules_.data(), num_rows_, decided_,
                                     up::workspace(scratch_.data(), scratch_.size()), stream_));
        positions_of<<<1, 256, 0, stream_>>>(decided_.kept_to_old, positions_.data(), num_rows_,
                                             left_.data());
        up::ledger_step step;
        UNIPREFILL_TRY(ledger_.begin_step(rows, ids_.data(), step, stream_));
        UNIPREFILL_TRY(ledger_.append(step, 1, batch(decided_.cu_seqlens, left_.data(), num_rows_), stream_));
        UNIPREFILL_TRY(ledger_.commit_step(step, stream_));
        return up::cuda_result(cudaStreamSynchronize(stream_), "run");
    }
    [[nodiscard]] std::vector<unsigned char> state() const {
        std::uint64_t word = 0;
        check_cuda(cudaMemcpy(&word, ledger_.fault(), sizeof word, cudaMemcpyDeviceToHost), "fault");
        require_ok(up::ledger_fault(word).to_status());
        return memory_.get();
    }
    [[nodiscard]] std::int32_t rows_left() const {
        std::int32_t rows = 0;
        check_cuda(
            cudaMemcpy(&rows, decided_.cu_seqlens + num_requests_, sizeof rows, cudaMemcpyDeviceToHost),
            "rows");
        return rows;
    }

  private:
    static up::ledger_limits ledger_limits() {
        return {max_requests, max_rows, 2, 2, up::set_relation::nested};
    }
    static std::size_t selection_bytes() {
        up::workspace counting;
        static_cast<void>(up::selection::carve(counting, step_limits(), up::memory_space::device));
        return counting.bytes_used();
    }
    [[nodiscard]] up::batch_view batch(const std::int32_t* cu_seqlens, const std::int32_t* positions,
                                       std::int32_t rows) const {
        up::batch_view made;
        made.space = up::memory_space::device;
        made.num_requests = made.num_segments = num_requests_;
        made.num_rows = rows;
        made.tags = tags_.data();
        made.cu_seqlens = cu_seqlens;
        made.positions = positions;
        made.options = options_.data();
        return made;
    }

    up::cuda_device device_;
    device_selector selector_;
    up::drop_ledger<up::backend::cuda> ledger_;
    device_array<std::int64_t> buffer_;
    device_array<unsigned char> selected_, scratch_;
    device_array<std::int32_t> cu_seqlens_, positions_, left_;
    device_array<up::request_tag> tags_;
    device_array<up::request_options> options_;
    device_array<up::selection_rule> rules_;
    device_array<std::int32_t> ids_;
    device_array<unsigned char> memory_;
    up::selection decided_;
    cudaStream_t stream_ = nullptr;
    std::int32_t num_requests_ = 0;
    std::int32_t num_rows_ = 0;
};

} // namespace

TEST_CASE("two devices: ledgers of all ranks are the same, bit for bit, though nobody sends them") {
    if (pipeline_test::num_devices() < num_ranks) {
        uniprefill_test::skip("fewer than two CUDA devices");
        return;
    }
    std::vector<ncclComm_t> comms(num_ranks);
    check_nccl(ncclCommInitAll(comms.data(), num_ranks, nullptr), "ncclCommInitAll");
    std::vector<std::unique_ptr<rank>> ranks;
    for (int ordinal = 0; ordinal < num_ranks; ++ordinal) {
        use_device(ordinal);
        ranks.push_back(std::make_unique<rank>());
    }
    use_device(0);
    rank alone; // has all masses, and no neighbour
    std::int64_t dropped = 0;
    const std::uint64_t seed = property::base_seed();
    for (int i = 0; i < property::scaled(200, 10); ++i) {
        INFO("case " << i << " of seed " << seed);
        property::random_numbers random(seed + static_cast<std::uint64_t>(i));
        const prompts what(random);
        std::vector<std::int64_t> sums(what.masses[0].size());
        for (const std::vector<std::int64_t>& part : what.masses) {
            std::transform(sums.begin(), sums.end(), part.begin(), sums.begin(), std::plus<>());
        }
        alone.load(what, sums);
        require_ok(alone.run(up::no_reduction{}));
        std::vector<up::status> results(num_ranks);
        std::vector<std::thread> threads;
        for (int ordinal = 0; ordinal < num_ranks; ++ordinal) {
            const auto index = static_cast<std::size_t>(ordinal);
            use_device(ordinal);
            ranks[index]->load(what, what.masses[index]);
            check_cuda(cudaDeviceSynchronize(), "load");
        }
        for (int ordinal = 0; ordinal < num_ranks; ++ordinal) {
            threads.emplace_back([&, ordinal] {
                const auto index = static_cast<std::size_t>(ordinal);
                results[index] = up::cuda_result(cudaSetDevice(ordinal), "cudaSetDevice");
                if (results[index].ok()) {
                    results[index] = ranks[index]->run(up::nccl_reduction(comms[index]));
                }
            });
        }
        for (std::thread& thread : threads) {
            thread.join();
        }
        use_device(0);
        const std::vector<unsigned char> wanted = alone.state();
        for (int ordinal = 0; ordinal < num_ranks; ++ordinal) {
            INFO("rank " << ordinal);
            const auto index = static_cast<std::size_t>(ordinal);
            require_ok(results[index]);
            use_device(ordinal);
            REQUIRE((ranks[index]->state() == wanted));
        }
        use_device(0);
        dropped += static_cast<std::int64_t>(what.positions.size()) - alone.rows_left();
    }
    CHECK(dropped > 1000);
    for (std::size_t index = ranks.size(); index-- > 0;) {
        use_device(static_cast<int>(index));
        ranks[index].reset();
        ncclCommDestroy(comms[index]);
    }
    use_device(0);
}
