// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// A thread block or a whole cluster as a team.
#pragma once

#include <uniprefill/select/detail/cuda_cluster.cuh>
#include <uniprefill/select/detail/cuda_teams.cuh>
#include <uniprefill/select/detail/cut_search.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// What a block_team shares.
template <std::int32_t Threads>
struct block_team_memory {
    UNIPREFILL_HIDDEN static constexpr std::int32_t bins = Threads < 256 ? 512 : 8 * Threads;
    UNIPREFILL_HIDDEN static constexpr std::int32_t groups = 64;
    UNIPREFILL_HIDDEN static constexpr std::int32_t capacity = 128;
    UNIPREFILL_HIDDEN static constexpr std::int32_t words = 12; ///< of a tally
    UNIPREFILL_HIDDEN static constexpr std::int32_t bits_word = 9;

    uint4 counts[bins / 4]; ///< weights by bins
    // From here on in use while rows are written too.
    collected_block collected[capacity];
    collected_block gathered[capacity]; ///< of the whole cluster
    std::uint64_t totals[words];        ///< of the whole cluster
    std::uint64_t of_block[2];
    std::uint32_t sums[3][words];
    std::uint32_t of_warps[32];
    alignas(8) std::uint32_t of_groups[groups];
    std::uint32_t near[8]; ///< kept rows by thread blocks of the cluster in whose stretch they lie
    std::uint32_t num_collected;
    bool noted[2]; ///< in turn: others may still read the last one
    found_bin found;
    cut_result told;
    quick_cut quick_told;
};

/// A thread block of @p Threads threads; if @p Clustered, all thread blocks of a cluster when they wish.
template <std::int32_t Threads, bool Clustered>
class block_team {
    static_assert(Threads >= 128 && Threads <= 512 && (Threads & (Threads - 1)) == 0);

  public:
    using memory = block_team_memory<Threads>;
    UNIPREFILL_HIDDEN static constexpr bool is_clustered = Clustered;
    UNIPREFILL_HIDDEN static constexpr std::int32_t capacity = memory::capacity;
    UNIPREFILL_HIDDEN static constexpr std::int32_t held_blocks = Threads < 256 ? 1 : Threads == 256 ? 8 : 4;
    UNIPREFILL_HIDDEN static constexpr std::int32_t digit_bits = Threads < 256 ? 9 : Threads == 256 ? 11 : 12;
    static_assert(memory::bins == 1 << digit_bits && memory::bins % (4 * Threads) == 0);
    UNIPREFILL_HIDDEN static constexpr std::int32_t fours = memory::bins / (4 * Threads);
    UNIPREFILL_HIDDEN static constexpr std::uint32_t limb = (1u << 22) - 1;

    /// One for a kernel, after clear(): it remembers which shared memory comes next.
    __device__ UNIPREFILL_HIDDEN explicit block_team(memory& shared)
        : shared_(&shared)
        , rank_(near_rank()) {}

    /// Empties everything. Other threads may use it after the next __syncthreads().
    __device__ UNIPREFILL_HIDDEN static void clear(memory& shared) {
        const auto thread = static_cast<std::int32_t>(threadIdx.x);
        clear_bins(shared);
        if (thread < 3 * memory::words) {
            (&shared.sums[0][0])[thread] = 0;
        }
        if (thread < 8) {
            shared.near[thread] = 0;
        }
        if (thread == 0) {
            shared.num_collected = 0;
            shared.told.at.order = -1;
            shared.quick_told.at.order = -1;
        }
    }

    /// From here on the team is this thread block alone.
    __device__ UNIPREFILL_HIDDEN void alone() {
        ctas_ = 1;
        rank_ = near_rank();
    }
    /// From here on the team is the whole cluster, of whose thread blocks all have done the same so far.
    __device__ UNIPREFILL_HIDDEN void together() {
        if constexpr (Clustered) {
            ctas_ = cluster_ctas();
            rank_ = rank_in_cluster() * Threads + near_rank();
        }
    }

    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::int32_t rank() const { return rank_; }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::int32_t size() const { return ctas() * Threads; }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN static std::int32_t near_rank() {
        return static_cast<std::int32_t>(threadIdx.x);
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN static constexpr std::int32_t near_size() { return Threads; }
    __device__ UNIPREFILL_HIDDEN void sync() const {
        if (ctas() > 1) {
            arrive_at_cluster();
            wait_for_cluster();
        } else {
            __syncthreads();
        }
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::int32_t count(bool mine) const {
        return __syncthreads_count(mine ? 1 : 0);
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN bool is_alone() const { return ctas() == 1; }
    /// Sums by limbs of 22 bits: those of 1024 threads fit 32 bits, which have native atomics.
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN tally combine(const tally& mine, bool with_free) {
        const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
        const std::uint32_t bits = __reduce_max_sync(~0u, mine.bits);
        std::uint32_t own = bits;
        const auto add = [&](std::int32_t word, std::uint32_t part) {
            const std::uint32_t sum = __reduce_add_sync(~0u, part);
            own = lane == word ? sum : own;
        };
        const auto add_wide = [&](std::int32_t word, std::uint64_t wide) {
            add(word, static_cast<std::uint32_t>(wide) & limb);
            add(word + 1, static_cast<std::uint32_t>(wide >> 22) & limb);
            add(word + 2, static_cast<std::uint32_t>(wide >> 44));
        };
        add_wide(0, mine.mass);
        add(3, mine.rows);
        add(4, mine.blocks);
        add(5, mine.inside);
        if (with_free) {
            add_wide(6, mine.free);
        }
        std::uint32_t* sums = next_sums();
        if (lane < (with_free ? 9 : 6)) {
            atomicAdd(&sums[lane], own);
        } else if (lane == memory::bits_word) {
            atomicMax(&sums[lane], own);
        }
        sync();
        clear_last_sums();
        if (ctas() == 1) {
            return made_of(sums);
        }
        if (threadIdx.x < memory::words) {
            std::uint32_t loaded[8];
#pragma unroll
            for (std::int32_t cta = 0; cta < 8; ++cta) {
                loaded[cta] = load_from_cluster(&sums[threadIdx.x], cta < ctas() ? cta : 0);
            }
            std::uint64_t all = 0;
#pragma unroll
            for (std::int32_t cta = 0; cta < 8; ++cta) {
                const std::uint32_t other = cta < ctas() ? loaded[cta] : 0;
                all = threadIdx.x == memory::bits_word ? (other > all ? other : all) : all + other;
            }
            shared_->totals[threadIdx.x] = all;
        }
        __syncthreads();
        return made_of(shared_->totals);
    }
    /// Of the thread blocks' tallies, each @p own: the sum of all rows and of the masses of lower ranks. Once
    /// in a kernel; end with leave().
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::int32_t exchange(const tally& own) {
        if constexpr (!Clustered) {
            return static_cast<std::int32_t>(own.rows);
        }
        if (threadIdx.x == 0) {
            shared_->of_block[0] = own.mass;
            shared_->of_block[1] = own.rows;
        }
        arrive_at_cluster();
        wait_for_cluster();
        const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
        std::uint64_t before = 0;
        if (lane < cluster_ctas()) {
            const std::uint64_t mass = load_from_cluster(&shared_->of_block[0], lane);
            before = load_from_cluster(&shared_->of_block[1], lane);
            before += lane < rank_in_cluster() ? mass : 0;
        }
        const auto rows = static_cast<std::int32_t>(__reduce_add_sync(~0u, static_cast<unsigned>(before)));
        arrive_at_cluster();
        return rows;
    }
    /// The sum of this thread's number and those of lower threads of the thread block; @p total of all.
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::uint32_t prefix(std::uint32_t mine,
                                                                    std::uint32_t& total) const {
        __syncthreads(); // others may still read the last ones
        return block_prefix<Threads>(mine, shared_->of_warps, total);
    }
    /// Waits for the cluster if there is one.
    __device__ UNIPREFILL_HIDDEN void sync_cluster() const {
        if constexpr (Clustered) {
            arrive_at_cluster();
            wait_for_cluster();
        }
    }
    /// Waits until nobody reads this thread block's shared memory any more.
    __device__ UNIPREFILL_HIDDEN void leave() const {
        if constexpr (Clustered) {
            wait_for_cluster();
        }
    }

    __device__ UNIPREFILL_HIDDEN void start_search(bool counts) {
        if (searched_) {
            sync(); // others may still read what the last search told
            if (counted_) {
                clear_bins(*shared_);
            }
            if (threadIdx.x < 8) {
                shared_->near[threadIdx.x] = 0;
            }
            if (threadIdx.x == 0) {
                shared_->num_collected = 0;
                shared_->told.at.order = -1;
                shared_->quick_told.at.order = -1;
            }
            sync();
        }
        searched_ = true;
        counted_ = counts;
    }
    __device__ UNIPREFILL_HIDDEN void add(std::uint32_t digit, std::uint32_t weight) {
        atomicAdd(reinterpret_cast<std::uint32_t*>(shared_->counts) + digit, weight);
    }
    /// What this thread block's first thread has to say, for noted() by all after the next count().
    __device__ UNIPREFILL_HIDDEN void note(bool yes) const {
        if (threadIdx.x == 0) {
            shared_->noted[note_turn_] = yes;
        }
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN bool noted() {
        note_turn_ ^= 1;
        return shared_->noted[note_turn_ ^ 1];
    }
    /// Sums of limbs, as combine() makes them.
    __device__ UNIPREFILL_HIDDEN void sum(quick_sums& mine) {
        const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
        const std::uint32_t limbs = limb_sums(mine.mass);
        const std::uint32_t rows = __reduce_add_sync(~0u, mine.rows);
        const std::uint32_t near = __reduce_add_sync(~0u, mine.near);
        std::uint32_t* sums = next_sums();
        if (lane < 5) {
            atomicAdd(&sums[lane], lane < 3 ? limbs : lane == 3 ? rows : near);
        }
        sync();
        clear_last_sums();
        if (ctas() == 1) {
            mine = {mass_of(sums[0], sums[1], sums[2]), sums[3], sums[4], shared_->num_collected};
            return;
        }
        if (threadIdx.x < 32) {
            const std::uint32_t* word = lane < 8    ? &shared_->near[lane]
                                        : lane < 13 ? &sums[lane - 8]
                                                    : &shared_->num_collected;
            const std::uint64_t all = sum_in_cluster(word);
            // Of the cluster's stretch, what lies before this thread block's, belongs to the rows before it.
            const std::uint32_t before = __reduce_add_sync(
                ~0u, lane < rank_in_cluster() && lane < 8 ? static_cast<std::uint32_t>(all) : 0);
            if (lane >= 8 && lane < 14) {
                shared_->totals[lane - 8] = all + (lane == 12 ? before : 0);
            }
        }
        __syncthreads();
        const std::uint64_t* totals = shared_->totals;
        mine = {mass_of(totals[0], totals[1], totals[2]), static_cast<std::uint32_t>(totals[3]),
                static_cast<std::uint32_t>(totals[4]), static_cast<std::uint32_t>(totals[5])};
    }
    /// Counts rows in the stretch of thread block @p cta of the cluster.
    __device__ UNIPREFILL_HIDDEN void add_near(std::int32_t cta, std::uint32_t rows) {
        if constexpr (Clustered) {
            atomicAdd(&shared_->near[cta], rows);
        }
    }
    template <class Need>
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN found_bin find(std::uint64_t mass, Need need_of) {
        const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
        const auto warp = static_cast<std::int32_t>(threadIdx.x / 32);
        const std::uint32_t limbs = limb_sums(mass);
        std::uint32_t* sums = next_sums();
        if (lane < 3) {
            atomicAdd(&sums[lane], limbs);
        }
        __syncthreads();
        std::uint32_t here[fours];
#pragma unroll
        for (std::int32_t i = 0; i < fours; ++i) {
            const uint4 four = shared_->counts[warp * (32 * fours) + 32 * i + lane];
            here[i] = four.x + four.y + four.z + four.w;
        }
        if constexpr (Clustered) {
            if (ctas() > 1) {
                return find_together(here, sums, need_of);
            }
        }
#pragma unroll
        for (std::int32_t i = 1; i < fours; ++i) {
            here[0] += here[i];
        }
        const std::uint32_t of_warp = __reduce_add_sync(~0u, here[0]);
        if (lane == 0) {
            shared_->of_warps[warp] = of_warp;
        }
        __syncthreads();
        if (warp == 0) { // alone: 16 warps that do the same stand in each other's way
            found_bin found;
            found.total = mass_of(sums[0], sums[1], sums[2]);
            const std::uint32_t need = need_of(found);
            constexpr std::int32_t warps = Threads / 32;
            // From the highest bin down.
            const std::uint32_t weight = lane < warps ? shared_->of_warps[warps - 1 - lane] : 0;
            std::uint32_t reach = warp_prefix(weight);
            const std::int32_t chunk = first_lane(lane == warps - 1 || reach >= need);
            const std::uint32_t before = __shfl_sync(~0u, reach - weight, chunk);
            const std::int32_t highest = (warps - chunk) * 32 * fours - 1 - lane * fours;
            std::uint32_t weights[4 * fours];
            std::uint32_t own = 0;
#pragma unroll
            for (std::int32_t i = 0; i < fours; ++i) {
                const uint4 four = shared_->counts[highest - i];
                weights[4 * i] = four.w;
                weights[4 * i + 1] = four.z;
                weights[4 * i + 2] = four.y;
                weights[4 * i + 3] = four.x;
                own += four.x + four.y + four.z + four.w;
            }
            reach = before + warp_prefix(own);
            const bool is_owner = first_lane(lane == 31 || reach >= need) == lane;
            reach -= own;
            std::int32_t digit = 4 * highest + 3;
#pragma unroll
            for (std::int32_t i = 0; i < 4 * fours - 1; ++i) {
                reach += weights[i];
                digit -= reach < need ? 1 : 0;
            }
            if (is_owner) {
                found.digit = static_cast<std::uint32_t>(digit);
                shared_->found = found;
            }
        } else if (warp == 1) {
            clear_last_sums(lane);
        }
        __syncthreads();
        return shared_->found;
    }
    /// Every thread block has a list of its own.
    __device__ UNIPREFILL_HIDDEN void collect(const collected_block& block) {
        const std::uint32_t place = atomicAdd(&shared_->num_collected, 1u);
        if (place < static_cast<std::uint32_t>(capacity)) {
            shared_->collected[place] = block;
        }
    }
    __device__ UNIPREFILL_HIDDEN void gather(std::int32_t count) {
        if (ctas() == 1) {
            return;
        }
        if (near_rank() < count) {
            std::int32_t counts[8];
#pragma unroll
            for (std::int32_t cta = 0; cta < 8; ++cta) {
                counts[cta] = static_cast<std::int32_t>(
                    load_from_cluster(&shared_->num_collected, cta < ctas() ? cta : 0));
            }
            std::int32_t owner = 0;
            std::int32_t i = near_rank();
            bool found = false;
#pragma unroll
            for (std::int32_t cta = 0; cta < 8; ++cta) {
                found = found || i < counts[cta];
                i -= found ? 0 : counts[cta];
                owner += found ? 0 : 1;
            }
            const auto* there = reinterpret_cast<const uint4*>(&shared_->collected[i]);
            auto* here = reinterpret_cast<uint4*>(&shared_->gathered[near_rank()]);
            here[0] = load_four_from_cluster(there, owner);
            here[1] = load_four_from_cluster(there + 1, owner);
        }
        __syncthreads();
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN const collected_block& collected(std::int32_t i) const {
        return ctas() == 1 ? shared_->collected[i] : shared_->gathered[i];
    }
    __device__ UNIPREFILL_HIDDEN void quick_collect(const quick_block& block) {
        // Few threads collect: to count them by warps first is more code than they are worth.
        std::uint32_t place = 0;
        asm volatile("atom.shared.add.u32 %0, [%1], 1;"
                     : "=r"(place)
                     : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(&shared_->num_collected)))
                     : "memory");
        if (place < static_cast<std::uint32_t>(capacity)) {
            *reinterpret_cast<quick_block*>(&shared_->collected[place]) = block;
        }
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN quick_block quick_collected(std::int32_t i) const {
        return *reinterpret_cast<const quick_block*>(&collected(i));
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN static std::int32_t quick_share_bits(std::int32_t count) {
        return Threads >= 256 ? 5 : share_bits(count); // a warp for each, which sums up sooner
    }
    __device__ UNIPREFILL_HIDDEN static void sum_shares(quick_sums& mine, std::int32_t bits) {
        if constexpr (Threads >= 256) {
            const std::uint32_t low = __reduce_add_sync(~0u, static_cast<std::uint32_t>(mine.mass) & limb);
            const std::uint32_t middle =
                __reduce_add_sync(~0u, static_cast<std::uint32_t>(mine.mass >> 22) & limb);
            const std::uint32_t high = __reduce_add_sync(~0u, static_cast<std::uint32_t>(mine.mass >> 44));
            mine.mass = low + (std::uint64_t{middle} << 22) + (std::uint64_t{high} << 44);
            mine.rows = __reduce_add_sync(~0u, mine.rows);
            mine.near = __reduce_add_sync(~0u, mine.near);
        } else {
#pragma unroll 1
            for (std::int32_t bit = 0; bit < bits; ++bit) {
                mine.mass += __shfl_xor_sync(~0u, mine.mass, 1 << bit);
                mine.rows += __shfl_xor_sync(~0u, mine.rows, 1 << bit);
                mine.near += __shfl_xor_sync(~0u, mine.near, 1 << bit);
            }
        }
    }
    UNIPREFILL_HIDDEN static constexpr std::int32_t quick_copies = Threads >= 256 ? 1 : 4;
    __device__ UNIPREFILL_HIDDEN void quick_tell(const quick_cut& result) {
        shared_->quick_told = result;
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN quick_cut quick_told() const {
        __syncthreads();
        return shared_->quick_told;
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN static std::int32_t share_bits(std::int32_t count) {
        constexpr std::int32_t most = 3; // more take longer to sum up
        constexpr std::int32_t of_threads = Threads == 128 ? 7 : Threads == 256 ? 8 : 9;
        const std::int32_t fit = of_threads - bit_length(static_cast<std::uint32_t>(count - 1));
        return fit < most ? fit : most;
    }
    __device__ UNIPREFILL_HIDDEN static void sum_shares(tally& sides, std::int32_t bits) {
#pragma unroll 1
        for (std::int32_t bit = 0; bit < bits; ++bit) {
            sides.mass += __shfl_xor_sync(~0u, sides.mass, 1 << bit);
            sides.free += __shfl_xor_sync(~0u, sides.free, 1 << bit);
            sides.rows += __shfl_xor_sync(~0u, sides.rows, 1 << bit);
        }
    }
    /// The lowest rank of the threads that have to stay together.
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN static std::int32_t group_rank() {
        return static_cast<std::int32_t>(threadIdx.x & ~31u);
    }
    __device__ UNIPREFILL_HIDDEN void tell(const cut_result& result) {
        shared_->told = result;
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN cut_result told() const {
        __syncthreads();
        return shared_->told;
    }

  private:
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::int32_t ctas() const {
        return Clustered ? ctas_ : 1;
    }
    /// Little is read of other thread blocks: sums of groups of bins, then the bins of one group.
    template <class Need>
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN found_bin find_together(std::uint32_t (&here)[fours],
                                                                       const std::uint32_t* sums,
                                                                       Need need_of) {
        const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
        constexpr std::int32_t bins = memory::bins / memory::groups;
        static_assert(bins == 64 && memory::groups == 64); // 16 lanes' fours, and two of each for every lane
#pragma unroll
        for (std::int32_t i = 0; i < fours; ++i) {
#pragma unroll
            for (std::int32_t step = 1; step < 16; step *= 2) {
                here[i] += __shfl_xor_sync(~0u, here[i], step);
            }
            if (lane % 16 == 0) {
                const auto warp = static_cast<std::int32_t>(threadIdx.x / 32);
                shared_->of_groups[(warp * fours + i) * 2 + lane / 16] = here[i];
            }
        }
        sync();
        if (threadIdx.x < 32) {
            const std::uint64_t limbs = sum_in_cluster(&sums[lane % 4]);
            std::int32_t place = 2 * (31 - lane);
            std::uint64_t pair = pair_in_cluster(&shared_->of_groups[place]);
            found_bin found;
            found.total =
                mass_of(__shfl_sync(~0u, limbs, 0), __shfl_sync(~0u, limbs, 1), __shfl_sync(~0u, limbs, 2));
            const std::uint32_t need = need_of(found);
            std::uint32_t before = 0;
            const auto* counts = reinterpret_cast<const std::uint32_t*>(shared_->counts);
#pragma unroll
            for (std::int32_t step = 0; step < 2; ++step) {
                const auto high = static_cast<std::uint32_t>(pair >> 32);
                const std::uint32_t both = high + static_cast<std::uint32_t>(pair);
                std::uint32_t reach = before + warp_prefix(both);
                const std::int32_t owner = first_lane(lane == 31 || reach >= need);
                reach -= both;
                const bool is_low = reach + high < need;
                before = __shfl_sync(~0u, is_low ? reach + high : reach, owner);
                place = __shfl_sync(~0u, place + (is_low ? 0 : 1), owner);
                if (step == 0) {
                    place = bins * place + 2 * (31 - lane);
                    pair = pair_in_cluster(&counts[place]);
                }
            }
            if (lane == 0) {
                found.digit = static_cast<std::uint32_t>(place);
                shared_->found = found;
            }
        } else if (threadIdx.x < 64) {
            clear_last_sums(lane);
        }
        __syncthreads();
        return shared_->found;
    }
    /// What thread blocks have at @p word together. No branches: all is loaded at once.
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::uint64_t sum_in_cluster(const std::uint32_t* word) const {
        std::uint32_t loaded[8];
#pragma unroll
        for (std::int32_t cta = 0; cta < 8; ++cta) {
            loaded[cta] = load_from_cluster(word, cta < ctas() ? cta : 0);
        }
        std::uint64_t sum = 0;
#pragma unroll
        for (std::int32_t cta = 0; cta < 8; ++cta) {
            sum += cta < ctas() ? loaded[cta] : 0;
        }
        return sum;
    }
    /// What they have at two words together; each sum fits 32 bits.
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::uint64_t
    pair_in_cluster(const std::uint32_t* words) const {
        const auto* pair = reinterpret_cast<const std::uint64_t*>(words);
        std::uint64_t loaded[8];
#pragma unroll
        for (std::int32_t cta = 0; cta < 8; ++cta) {
            loaded[cta] = load_from_cluster(pair, cta < ctas() ? cta : 0);
        }
        std::uint64_t sum = 0;
#pragma unroll
        for (std::int32_t cta = 0; cta < 8; ++cta) {
            sum += cta < ctas() ? loaded[cta] : 0;
        }
        return sum;
    }
    /// Limbs of 22 bits of the sum over this warp, one for each of the first three lanes.
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN static std::uint32_t limb_sums(std::uint64_t mass) {
        const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
        const std::uint32_t low = __reduce_add_sync(~0u, static_cast<std::uint32_t>(mass) & limb);
        const std::uint32_t middle = __reduce_add_sync(~0u, static_cast<std::uint32_t>(mass >> 22) & limb);
        const std::uint32_t high = __reduce_add_sync(~0u, static_cast<std::uint32_t>(mass >> 44));
        return lane == 0 ? low : lane == 1 ? middle : high;
    }
    /// Three sets in turn: one that is added to, one that others may still read, one that is empty.
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::uint32_t* next_sums() {
        turn_ = turn_ == 2 ? 0 : turn_ + 1;
        return shared_->sums[turn_];
    }
    /// After a barrier of the whole team.
    __device__ UNIPREFILL_HIDDEN void clear_last_sums() {
        clear_last_sums(near_rank());
    }
    __device__ UNIPREFILL_HIDDEN void clear_last_sums(std::int32_t word) {
        if (word < memory::words) {
            shared_->sums[turn_ == 0 ? 2 : turn_ - 1][word] = 0;
        }
    }
    /// The first lane for which @p holds is true; there is one.
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN static std::int32_t first_lane(bool holds) {
        return __ffs(static_cast<int>(__ballot_sync(~0u, holds))) - 1;
    }
    template <class Number>
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN static tally made_of(const Number* sums) {
        tally all;
        all.mass = mass_of(sums[0], sums[1], sums[2]);
        all.rows = static_cast<std::uint32_t>(sums[3]);
        all.blocks = static_cast<std::uint32_t>(sums[4]);
        all.inside = static_cast<std::uint32_t>(sums[5]);
        all.free = mass_of(sums[6], sums[7], sums[8]);
        all.bits = static_cast<std::uint32_t>(sums[memory::bits_word]);
        return all;
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN static std::uint64_t
    mass_of(std::uint64_t low, std::uint64_t middle, std::uint64_t high) {
        middle += low >> 22;
        high += middle >> 22;
        return high >= std::uint64_t{1} << 19 ? tally::full
                                              : (high << 44) | ((middle & limb) << 22) | (low & limb);
    }

    __device__ UNIPREFILL_HIDDEN static void clear_bins(memory& shared) {
#pragma unroll
        for (std::int32_t i = 0; i < fours; ++i) {
            shared.counts[threadIdx.x + static_cast<unsigned>(i * Threads)] = uint4{};
        }
    }

    memory* shared_;
    std::int32_t ctas_ = 1;
    std::int32_t rank_;
    std::int32_t turn_ = 0;
    std::int32_t note_turn_ = 0;
    bool searched_ = false;
    bool counted_ = false;
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
