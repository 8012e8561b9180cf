// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// A thread block or a whole cluster as a team, for segments that are too large for a warp.
#pragma once

#include <uniprefill/select/detail/cuda_cluster.cuh>
#include <uniprefill/select/detail/cuda_teams.cuh>
#include <uniprefill/select/detail/held_blocks.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// What a block_team shares. Bins, by 32-bit words: that width has native atomics.
struct block_team_memory {
    UNIPREFILL_HIDDEN static constexpr std::int32_t bins = 2048;
    UNIPREFILL_HIDDEN static constexpr std::int32_t bins_of_group = 32;
    UNIPREFILL_HIDDEN static constexpr std::int32_t groups = bins / bins_of_group;
    UNIPREFILL_HIDDEN static constexpr std::int32_t capacity = 128;

    std::uint32_t low[bins];
    std::uint32_t high[bins];
    std::uint64_t merged[bins / 2]; ///< of a cluster's bins those that this thread block has added up
    // From here on in use while rows are written too.
    tally of_warps[2][32];
    std::uint64_t of_block[2][4];
    std::uint64_t of_groups[groups];
    held_block collected[capacity];
    std::uint32_t num_collected;
};

/// A thread block of select_threads threads, or all thread blocks of a cluster.
class block_team {
  public:
    UNIPREFILL_HIDDEN static constexpr std::int32_t held_blocks = 8;
    UNIPREFILL_HIDDEN static constexpr bool has_bins = true;
    UNIPREFILL_HIDDEN static constexpr std::int32_t digit_bits = 11;
    using memory = block_team_memory;
    UNIPREFILL_HIDDEN static constexpr std::int32_t capacity = memory::capacity;
    static_assert(memory::bins == 1 << digit_bits);

    /// One for a kernel, after clear(): it remembers which of two sets of shared memory comes next.
    __device__ UNIPREFILL_HIDDEN explicit block_team(memory& shared)
        : shared_(shared)
        , rank_(static_cast<std::int32_t>(threadIdx.x)) {}

    /// Empties the bins. Other threads may use them after the next __syncthreads().
    __device__ UNIPREFILL_HIDDEN static void clear(memory& shared) {
        for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < memory::bins / 4;
             i += select_threads) {
            reinterpret_cast<uint4*>(shared.low)[i] = uint4{};
            reinterpret_cast<uint4*>(shared.high)[i] = uint4{};
        }
        if (threadIdx.x == 0) {
            shared.num_collected = 0;
        }
    }

    /// From here on the team is this thread block alone.
    __device__ UNIPREFILL_HIDDEN void alone() {
        ctas_ = 1;
        rank_ = static_cast<std::int32_t>(threadIdx.x);
    }
    /// From here on the team is the whole cluster.
    __device__ UNIPREFILL_HIDDEN void together() {
        ctas_ = cluster_ctas();
        rank_ = rank_in_cluster() * select_threads + static_cast<std::int32_t>(threadIdx.x);
    }

    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::int32_t rank() const { return rank_; }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::int32_t size() const { return ctas_ * select_threads; }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN warp_lanes lanes() const { return {}; }
    __device__ UNIPREFILL_HIDDEN void sync() const {
        if (ctas_ > 1) {
            arrive_at_cluster();
            wait_for_cluster();
        } else {
            __syncthreads();
        }
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN tally combine(const tally& mine) {
        const std::int32_t lane = lanes().rank();
        // Two sets in turn: a thread that is ahead can't overwrite what another still reads.
        turn_ ^= 1;
        const tally of_warp = warp_combine(mine);
        if (lane == 0) {
            shared_.of_warps[turn_][threadIdx.x / 32] = of_warp;
        }
        __syncthreads();
        tally all = warp_combine(lane < select_threads / 32 ? shared_.of_warps[turn_][lane] : tally{});
        if (ctas_ > 1) {
            cluster_turn_ ^= 1; // apart from turn_: thread blocks differ in what they do alone
            std::uint64_t* words = shared_.of_block[cluster_turn_];
            if (threadIdx.x == 0) {
                words[0] = all.largest;
                words[1] = all.mass;
                words[2] = (static_cast<std::uint64_t>(all.rows) << 32) | all.blocks;
            }
            sync();
            tally other;
            if (lane < ctas_) {
                other.largest = load_from_cluster(words, lane);
                other.mass = load_from_cluster(words + 1, lane);
                const std::uint64_t counts = load_from_cluster(words + 2, lane);
                other.rows = static_cast<std::uint32_t>(counts >> 32);
                other.blocks = static_cast<std::uint32_t>(counts);
            }
            all = warp_combine(other);
        }
        return all;
    }
    /// Of the tallies of the cluster's thread blocks, each @p own: the sum of all rows and of the masses of
    /// lower ranks. End with leave().
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::int32_t exchange(const tally& own) {
        if (cluster_ctas() == 1) {
            return static_cast<std::int32_t>(own.rows);
        }
        cluster_turn_ ^= 1;
        std::uint64_t* words = shared_.of_block[cluster_turn_];
        if (threadIdx.x == 0) {
            words[0] = own.mass;
            words[1] = own.rows;
        }
        arrive_at_cluster();
        wait_for_cluster();
        const std::int32_t lane = lanes().rank();
        std::uint64_t before = 0;
        if (lane < cluster_ctas()) {
            const std::uint64_t mass = load_from_cluster(words, lane);
            before = load_from_cluster(words + 1, lane);
            before += lane < rank_in_cluster() ? mass : 0;
        }
        const auto rows = static_cast<std::int32_t>(__reduce_add_sync(~0u, static_cast<unsigned>(before)));
        arrive_at_cluster();
        return rows;
    }
    /// Waits until nobody reads this thread block's shared memory any more.
    __device__ UNIPREFILL_HIDDEN void leave() const {
        if (cluster_ctas() > 1) {
            wait_for_cluster();
        }
    }

    /// Whatever was read of the bins of the search before, a combine() came after it.
    __device__ UNIPREFILL_HIDDEN void start_search() {
        if (searched_) {
            if (ctas_ > 1) { // others may still read the collection
                sync();
            }
            clear(shared_);
            sync();
        }
        searched_ = true;
    }
    /// 64-bit sums by two 32-bit ones. Carries depend on the sum alone, so the order of threads doesn't
    /// matter, and there may be any number of weights. All low halves come first: none waits for another.
    template <std::int32_t Count>
    __device__ UNIPREFILL_HIDDEN void add(const std::uint32_t (&digits)[Count],
                                          const std::uint64_t (&weights)[Count]) {
        std::uint32_t before[Count];
#pragma unroll
        for (std::int32_t k = 0; k < Count; ++k) {
            before[k] = 0;
            if (weights[k] != 0) {
                before[k] = atomicAdd(&shared_.low[digits[k]], static_cast<std::uint32_t>(weights[k]));
            }
        }
#pragma unroll
        for (std::int32_t k = 0; k < Count; ++k) {
            const std::uint32_t carry =
                before[k] + static_cast<std::uint32_t>(weights[k]) < before[k] ? 1u : 0u;
            const std::uint32_t rest = static_cast<std::uint32_t>(weights[k] >> 32) + carry;
            if (rest != 0) {
                atomicAdd(&shared_.high[digits[k]], rest);
            }
        }
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN found_bin find(std::uint64_t need) {
        return ctas_ == 1 ? find_alone(need) : find_together(need);
    }
    /// Every thread block has a list of its own; collected() finds its way.
    __device__ UNIPREFILL_HIDDEN void collect(const held_block& block) {
        const std::uint32_t place = atomicAdd(&shared_.num_collected, 1u);
        if (place < static_cast<std::uint32_t>(capacity)) {
            shared_.collected[place] = block;
        }
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN held_block collected(std::int32_t i) const {
        if (ctas_ == 1) {
            return shared_.collected[i < capacity ? i : capacity - 1];
        }
        std::int32_t cta = 0;
#pragma unroll 1
        for (; cta < ctas_ - 1; ++cta) {
            const auto there = static_cast<std::int32_t>(load_from_cluster(&shared_.num_collected, cta));
            if (i < there) {
                break;
            }
            i -= there;
        }
        const auto* words =
            reinterpret_cast<const std::uint64_t*>(&shared_.collected[i < capacity ? i : capacity - 1]);
        held_block block;
        block.mass = load_from_cluster(words, cta);
        const std::uint64_t rest = load_from_cluster(words + 1, cta);
        block.block = static_cast<std::int32_t>(rest & 0xffffffffu);
        block.free_rows = static_cast<std::int32_t>(rest >> 32);
        return block;
    }

  private:
    /// Bins go to threads from the highest down, and so do the sums of warps. The sums tell the warp whose
    /// bins hold the cut; every warp then looks at those bins for itself.
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN found_bin find_alone(std::uint64_t need) const {
        constexpr std::int32_t warps = select_threads / 32;
        constexpr std::int32_t each = memory::bins / select_threads;
        const std::int32_t lane = lanes().rank();
        std::uint64_t weights[each];
        __syncthreads();
        const std::uint64_t of_warp = warp_sum(take(static_cast<std::int32_t>(threadIdx.x), weights));
        if (lane == 0) {
            shared_.of_groups[threadIdx.x / 32] = of_warp;
        }
        __syncthreads();
        const std::uint64_t mine = shared_.of_groups[lane % warps];
        const std::uint64_t sums = warp_prefix<warps>(mine);
        const std::int32_t warp = first_lane(lane < warps && sums >= need) % warps;
        const std::uint64_t before = __shfl_sync(~0u, sums - mine, warp);

        const std::uint64_t here = take(warp * 32 + lane, weights);
        std::uint64_t above = before + warp_prefix(here) - here;
        const std::int32_t owner = first_lane(above + here >= need);
        std::int32_t skipped = 0;
#pragma unroll
        for (std::int32_t i = 0; i < each - 1; ++i) {
            if (skipped == i && above + weights[i] < need) {
                above += weights[i];
                ++skipped;
            }
        }
        const std::int32_t bin = memory::bins - 1 - (warp * 32 + lane) * each - skipped;
        return {__shfl_sync(~0u, above, owner), static_cast<std::uint32_t>(__shfl_sync(~0u, bin, owner))};
    }
    /// The bins of thread @p thread, highest first. @return their sum
    template <std::int32_t Each>
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::uint64_t take(std::int32_t thread,
                                                                  std::uint64_t (&weights)[Each]) const {
        static_assert(Each % 4 == 0);
        std::uint64_t sum = 0;
#pragma unroll
        for (std::int32_t i = 0; i < Each / 4; ++i) {
            const std::int32_t four = memory::bins / 4 - 1 - thread * (Each / 4) - i;
            const uint4 low = reinterpret_cast<const uint4*>(shared_.low)[four];
            const uint4 high = reinterpret_cast<const uint4*>(shared_.high)[four];
            weights[4 * i] = (static_cast<std::uint64_t>(high.w) << 32) | low.w;
            weights[4 * i + 1] = (static_cast<std::uint64_t>(high.z) << 32) | low.z;
            weights[4 * i + 2] = (static_cast<std::uint64_t>(high.y) << 32) | low.y;
            weights[4 * i + 3] = (static_cast<std::uint64_t>(high.x) << 32) | low.x;
            sum += weights[4 * i] + weights[4 * i + 1] + weights[4 * i + 2] + weights[4 * i + 3];
        }
        return sum;
    }

    /// Each thread block adds up its part of the cluster's bins; groups of 32 bins have sums. The sums tell
    /// the group that holds the cut; every warp then looks at its bins for itself.
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN found_bin find_together(std::uint64_t need) const {
        constexpr std::int32_t warps = select_threads / 32;
        const std::int32_t lane = lanes().rank();
        const std::int32_t own_groups = memory::groups / ctas_;
        sync();
#pragma unroll 1
        for (auto group = static_cast<std::int32_t>(threadIdx.x / 32); group < own_groups; group += warps) {
            const std::int32_t place = group * memory::bins_of_group + lane;
            const std::int32_t bin =
                memory::bins - 1 - rank_in_cluster() * own_groups * memory::bins_of_group - place;
            std::uint64_t weight = 0;
#pragma unroll
            for (std::int32_t cta = 0; cta < 8; ++cta) {
                if (cta < ctas_) {
                    weight += (static_cast<std::uint64_t>(load_from_cluster(&shared_.high[bin], cta)) << 32) +
                              load_from_cluster(&shared_.low[bin], cta);
                }
            }
            shared_.merged[place] = weight;
            const std::uint64_t sum = warp_sum(weight);
            if (lane == 0) {
                shared_.of_groups[group] = sum;
            }
        }
        sync();
        const std::int32_t own = lane * 2 % own_groups;
        const std::int32_t cta = lane * 2 / own_groups;
        const std::uint64_t first = load_from_cluster(&shared_.of_groups[own], cta);
        const std::uint64_t second = load_from_cluster(&shared_.of_groups[own + 1], cta);
        const std::uint64_t sums = warp_prefix(first + second);
        const std::int32_t pair = first_lane(sums >= need);
        const bool in_second = sums - second < need;
        const std::uint64_t before = __shfl_sync(~0u, sums - second - (in_second ? 0 : first), pair);
        const std::int32_t group = __shfl_sync(~0u, 2 * lane + (in_second ? 1 : 0), pair);

        const std::uint64_t here = load_from_cluster(
            &shared_.merged[group % own_groups * memory::bins_of_group + lane], group / own_groups);
        const std::uint64_t above = before + warp_prefix(here) - here;
        const std::int32_t owner = first_lane(above + here >= need);
        return {__shfl_sync(~0u, above, owner),
                static_cast<std::uint32_t>(memory::bins - 1 - group * memory::bins_of_group - owner)};
    }
    /// The first lane of those where @p holds is true, the last one where it never is.
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN static std::int32_t first_lane(bool holds) {
        const unsigned lanes = __ballot_sync(~0u, holds);
        return lanes == 0 ? 31 : __ffs(static_cast<int>(lanes)) - 1;
    }

    memory& shared_;
    std::int32_t ctas_ = 1;
    std::int32_t rank_;
    std::int32_t turn_ = 0;
    std::int32_t cluster_turn_ = 0;
    bool searched_ = false;
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
