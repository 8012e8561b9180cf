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
    UNIPREFILL_HIDDEN static constexpr std::int32_t bins = Threads < 256 ? 512 : 4096;
    UNIPREFILL_HIDDEN static constexpr std::int32_t groups = 64;
    UNIPREFILL_HIDDEN static constexpr std::int32_t capacity = 128;
    UNIPREFILL_HIDDEN static constexpr std::int32_t words = 12; ///< of a tally
    UNIPREFILL_HIDDEN static constexpr std::int32_t bits_word = 9;

    uint4 counts[bins / 4]; ///< weights by bins
    // From here on in use while rows are written too.
    collected_block collected[2 * capacity]; ///< its own, then those of the whole cluster
    std::uint64_t totals[words];             ///< of the whole cluster
    std::uint64_t of_block[2];
    std::uint32_t sums[3][words];
    std::uint32_t of_warps[32];
    std::uint32_t reach[32]; ///< weights in bins of a warp and in higher ones
    std::uint32_t ahead[8];  ///< kept rows by thread blocks of the cluster in whose stretch they lie
    std::uint32_t num_collected;
    quick_note notes[2]; ///< in turn: others may still read the last one
    found_bin found;
    cut_result told;
    quick_cut quick_told;
    // What thread blocks of a cluster send each other.
    mailbox boxes[4];
    std::uint64_t groups_of[8][groups / 2]; ///< sums of groups of bins, by twos
    std::uint64_t bins_of[8][groups / 2];   ///< of one group, by twos
    std::uint32_t limbs_of[8][4];
    std::uint32_t sums_of[8][16];
};

/// A thread block of @p Threads threads; if @p Clustered, all thread blocks of a cluster when they wish.
template <std::int32_t Threads, bool Clustered>
class block_team {
    static_assert(Threads >= 128 && Threads <= 512 && (Threads & (Threads - 1)) == 0);

  public:
    using memory = block_team_memory<Threads>;
    UNIPREFILL_HIDDEN static constexpr bool is_clustered = Clustered;
    UNIPREFILL_HIDDEN static constexpr std::int32_t capacity = memory::capacity;
    UNIPREFILL_HIDDEN static constexpr std::int32_t held_blocks = Threads < 256 ? 1 : 4;
    UNIPREFILL_HIDDEN static constexpr std::int32_t digit_bits = Threads < 256 ? 9 : 12;
    static_assert(memory::bins == 1 << digit_bits && memory::bins % (4 * Threads) == 0);
    UNIPREFILL_HIDDEN static constexpr std::int32_t fours = memory::bins / (4 * Threads);
    UNIPREFILL_HIDDEN static constexpr std::uint32_t limb = (1u << 22) - 1;

    /// One for a kernel, after clear(): it remembers which shared memory comes next.
    __device__ UNIPREFILL_HIDDEN explicit block_team(memory& shared)
        : shared_(shared) {
        state_.rank = near_rank();
    }

    /// Empties everything. Other threads may use it after the next __syncthreads().
    __device__ UNIPREFILL_HIDDEN static void clear(memory& shared) {
        const auto thread = static_cast<std::int32_t>(threadIdx.x);
        clear_bins(shared);
        if (thread < 3 * memory::words) {
            (&shared.sums[0][0])[thread] = 0;
        }
        if (thread < 8) {
            shared.ahead[thread] = 0;
        }
        if (thread < 32) {
            shared.reach[thread] = 0;
        }
        if (thread == 0) {
            shared.num_collected = 0;
            shared.told.at.order = -1;
            shared.quick_told.at.order = -1;
            if constexpr (Clustered) {
                make_mailboxes(shared.boxes);
            }
        }
    }

    /// What it remembers, for another object to go on with.
    struct memento {
        std::int32_t ctas = 1;
        std::int32_t rank = 0;
        std::int32_t turn = 0;
        std::int32_t note_turn = 0;
        std::uint32_t box_turns = 0; ///< by bits
        bool searched = false;
        bool counted = false;
    };
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN memento remembered() const { return state_; }
    __device__ UNIPREFILL_HIDDEN void go_on(const memento& state) { state_ = state; }

    /// From here on the team is this thread block alone.
    __device__ UNIPREFILL_HIDDEN void alone() {
        state_.ctas = 1;
        state_.rank = near_rank();
    }
    /// From here on the team is the whole cluster, of whose thread blocks all have done the same so far.
    __device__ UNIPREFILL_HIDDEN void together() {
        if constexpr (Clustered) {
            state_.ctas = cluster_ctas();
            state_.rank = rank_in_cluster() * Threads + near_rank();
        }
    }

    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::int32_t rank() const { return state_.rank; }
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
            shared_.totals[threadIdx.x] = all;
        }
        __syncthreads();
        return made_of(shared_.totals);
    }
    /// Of the thread blocks' tallies, each @p own: the sum of all rows and of the masses of lower ranks. Once
    /// in a kernel; end with leave().
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::int32_t exchange(const tally& own) {
        if constexpr (!Clustered) {
            return static_cast<std::int32_t>(own.rows);
        }
        if (threadIdx.x == 0) {
            shared_.of_block[0] = own.mass;
            shared_.of_block[1] = own.rows;
        }
        arrive_at_cluster();
        wait_for_cluster();
        const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
        std::uint64_t before = 0;
        if (lane < cluster_ctas()) {
            const std::uint64_t mass = load_from_cluster(&shared_.of_block[0], lane);
            before = load_from_cluster(&shared_.of_block[1], lane);
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
        return block_prefix<Threads>(mine, threadIdx.x / 32, shared_.of_warps, total);
    }
    /// Waits for the cluster if there is one.
    __device__ UNIPREFILL_HIDDEN void sync_cluster() const {
        if constexpr (Clustered) {
            arrive_at_cluster();
            wait_for_cluster();
        }
    }
    /// After clear(), before others send anything: all of the cluster have to have come so far. meet() tells,
    /// have_met() waits.
    __device__ UNIPREFILL_HIDDEN void meet() const {
        if constexpr (Clustered) {
            come_to_cluster();
        }
    }
    __device__ UNIPREFILL_HIDDEN void have_met() const {
        if constexpr (Clustered) {
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
        if (state_.searched) {
            sync(); // others may still read what the last search told
            if (state_.counted) {
                clear_bins(shared_);
            }
            if (threadIdx.x < 8) {
                shared_.ahead[threadIdx.x] = 0;
            }
            if (threadIdx.x < 32) {
                shared_.reach[threadIdx.x] = 0;
            }
            if (threadIdx.x == 0) {
                shared_.num_collected = 0;
                shared_.told.at.order = -1;
                shared_.quick_told.at.order = -1;
            }
            sync();
        }
        state_.searched = true;
        state_.counted = counts;
    }
    __device__ UNIPREFILL_HIDDEN void add(std::uint32_t digit, std::uint32_t weight) {
        atomicAdd(reinterpret_cast<std::uint32_t*>(shared_.counts) + digit, weight);
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN quick_note& note() {
        return shared_.notes[state_.note_turn];
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN const quick_note& noted() {
        state_.note_turn ^= 1;
        return shared_.notes[state_.note_turn ^ 1];
    }
    /// Sums of limbs, as combine() makes them.
    __device__ UNIPREFILL_HIDDEN void sum(quick_sums& mine) {
        const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
        const std::uint32_t limbs = limb_sums(mine.mass);
        const std::uint32_t rows = __reduce_add_sync(~0u, mine.rows);
        const std::uint32_t ahead = __reduce_add_sync(~0u, mine.ahead);
        std::uint32_t* sums = next_sums();
        if (lane < 5) {
            atomicAdd(&sums[lane], lane < 3 ? limbs : lane == 3 ? rows : ahead);
        }
        __syncthreads();
        clear_last_sums();
        if (ctas() == 1) {
            mine = {mass_of(sums[0], sums[1], sums[2]), sums[3], sums[4], shared_.num_collected};
            return;
        }
        const std::uint32_t turn = next_turn(sums_box);
        if (threadIdx.x < 32) {
            mailbox* box = &shared_.boxes[sums_box];
            const std::int32_t word = lane % 16;
            if (lane == 0) {
                expect_bytes(box, ctas() * 16 * 4);
            }
            const std::uint32_t own = word < 8    ? shared_.ahead[word]
                                      : word < 13 ? sums[word - 8]
                                                  : shared_.num_collected;
#pragma unroll
            for (std::int32_t cta = 0; cta < 8; cta += 2) {
                if (cta + lane / 16 < ctas()) {
                    send(own, &shared_.sums_of[rank_in_cluster()][word], box, cta + lane / 16);
                }
            }
            wait_for_mail(box, turn);
            std::uint64_t all = 0;
            for (std::int32_t cta = 0; cta < ctas(); ++cta) {
                all += shared_.sums_of[cta][word];
            }
            // Of the cluster's stretch, what lies before this thread block's, belongs to the rows before it.
            const std::uint32_t before = __reduce_add_sync(
                ~0u, lane < rank_in_cluster() && lane < 8 ? static_cast<std::uint32_t>(all) : 0);
            if (lane >= 8 && lane < 14) {
                shared_.totals[lane - 8] = all + (lane == 12 ? before : 0);
            }
        }
        __syncthreads();
        const std::uint64_t* totals = shared_.totals;
        mine = {mass_of(totals[0], totals[1], totals[2]), static_cast<std::uint32_t>(totals[3]),
                static_cast<std::uint32_t>(totals[4]), static_cast<std::uint32_t>(totals[5])};
    }
    /// Counts rows in the stretch of thread block @p cta of the cluster.
    __device__ UNIPREFILL_HIDDEN void add_near(std::int32_t cta, std::uint32_t rows) {
        if constexpr (Clustered) {
            atomicAdd(&shared_.ahead[cta], rows);
        }
    }
    template <class Need, class Meanwhile>
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN found_bin find(std::uint64_t mass, Need need_of,
                                                              Meanwhile meanwhile) {
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
            const uint4 four = shared_.counts[warp * (32 * fours) + 32 * i + lane];
            here[i] = four.x + four.y + four.z + four.w;
        }
        if constexpr (Clustered) {
            if (ctas() > 1) {
                return find_together(here, sums, need_of, meanwhile);
            }
        }
#pragma unroll
        for (std::int32_t i = 1; i < fours; ++i) {
            here[0] += here[i];
        }
        const std::uint32_t of_warp = __reduce_add_sync(~0u, here[0]);
        if (lane <= warp) {
            atomicAdd(&shared_.reach[lane], of_warp);
        }
        __syncthreads();
        if (warp == 0) { // alone: 16 warps that do the same stand in each other's way
            found_bin found;
            found.total = mass_of(sums[0], sums[1], sums[2]);
            const std::uint32_t need = need_of(found);
            // From the highest bin down.
            constexpr std::int32_t warps = Threads / 32;
            const bool reaches = lane < warps && shared_.reach[lane] >= need;
            const std::int32_t chunk = 31 - __clz(static_cast<int>(__ballot_sync(~0u, reaches) | 1u));
            const std::uint32_t before = chunk + 1 < warps ? shared_.reach[chunk + 1] : 0;
            const std::int32_t highest = (chunk + 1) * 32 * fours - 1 - lane * fours;
            std::uint32_t weights[4 * fours];
            std::uint32_t own = 0;
#pragma unroll
            for (std::int32_t i = 0; i < fours; ++i) {
                const uint4 four = shared_.counts[highest - i];
                weights[4 * i] = four.w;
                weights[4 * i + 1] = four.z;
                weights[4 * i + 2] = four.y;
                weights[4 * i + 3] = four.x;
                own += four.x + four.y + four.z + four.w;
            }
            std::uint32_t reach = before + warp_prefix(own);
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
                shared_.found = found;
            }
        } else {
            if (warp == 1) {
                clear_last_sums(lane);
            }
            meanwhile();
        }
        __syncthreads();
        return shared_.found;
    }
    /// Every thread block has a list of its own.
    __device__ UNIPREFILL_HIDDEN void collect(const collected_block& block) {
        const std::uint32_t place = atomicAdd(&shared_.num_collected, 1u);
        if (place < static_cast<std::uint32_t>(capacity)) {
            shared_.collected[place] = block;
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
                    load_from_cluster(&shared_.num_collected, cta < ctas() ? cta : 0));
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
            const auto* there = reinterpret_cast<const uint4*>(&shared_.collected[i]);
            auto* here = reinterpret_cast<uint4*>(&shared_.collected[capacity + near_rank()]);
            here[0] = load_four_from_cluster(there, owner);
            here[1] = load_four_from_cluster(there + 1, owner);
        }
        __syncthreads();
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN const collected_block& collected(std::int32_t i) const {
        return shared_.collected[ctas() == 1 ? i : capacity + i];
    }
    __device__ UNIPREFILL_HIDDEN void quick_collect(const quick_block& block) {
        // Few threads collect: to count them by warps first is more code than they are worth.
        std::uint32_t place = 0;
        asm volatile("atom.shared.add.u32 %0, [%1], 1;"
                     : "=r"(place)
                     : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(&shared_.num_collected)))
                     : "memory");
        if (place < static_cast<std::uint32_t>(capacity)) {
            *reinterpret_cast<quick_block*>(&shared_.collected[place]) = block;
        }
    }
    /// After a sum(), as gather().
    __device__ UNIPREFILL_HIDDEN void quick_gather(std::int32_t count) {
        if (ctas() == 1) {
            return;
        }
        const std::uint32_t turn = next_turn(blocks_box);
        mailbox* box = &shared_.boxes[blocks_box];
        if (threadIdx.x == 0) {
            expect_bytes(box, count * static_cast<std::int32_t>(sizeof(quick_block)));
        }
        std::int32_t first = capacity;
        for (std::int32_t cta = 0; cta < rank_in_cluster(); ++cta) {
            first += static_cast<std::int32_t>(shared_.sums_of[cta][15]);
        }
        const auto halves = static_cast<std::int32_t>(2 * shared_.num_collected);
        for (std::int32_t i = near_rank(); i < halves * 8; i += Threads) {
            if (i / halves < ctas()) {
                const auto words = [&](std::int32_t block) {
                    return reinterpret_cast<std::uint64_t*>(&shared_.collected[block]);
                };
                const std::int32_t half = i % halves;
                send(words(half / 2)[half % 2], words(first + half / 2) + half % 2, box, i / halves);
            }
        }
        wait_for_mail(box, turn);
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN quick_block quick_collected(std::int32_t i) const {
        return *reinterpret_cast<const quick_block*>(&collected(i));
    }
    UNIPREFILL_HIDDEN static constexpr std::int32_t group_size = 32;
    __device__ UNIPREFILL_HIDDEN static void sum_group(quick_sums& mine) {
        const std::uint32_t low = __reduce_add_sync(~0u, static_cast<std::uint32_t>(mine.mass) & limb);
        const std::uint32_t middle =
            __reduce_add_sync(~0u, static_cast<std::uint32_t>(mine.mass >> 22) & limb);
        const std::uint32_t high = __reduce_add_sync(~0u, static_cast<std::uint32_t>(mine.mass >> 44));
        mine.mass = low + (std::uint64_t{middle} << 22) + (std::uint64_t{high} << 44);
        mine.rows = __reduce_add_sync(~0u, mine.rows);
        mine.ahead = __reduce_add_sync(~0u, mine.ahead);
    }
    __device__ UNIPREFILL_HIDDEN void quick_tell(const quick_cut& result) {
        shared_.quick_told = result;
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN quick_cut quick_told() const {
        __syncthreads();
        return shared_.quick_told;
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
        shared_.told = result;
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN cut_result told() const {
        __syncthreads();
        return shared_.told;
    }

  private:
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::int32_t ctas() const {
        return Clustered ? state_.ctas : 1;
    }
    /// Little is sent to other thread blocks: sums of groups of bins, then the bins of one group.
    template <class Need, class Meanwhile>
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN found_bin find_together(std::uint32_t (&here)[fours],
                                                                       const std::uint32_t* sums,
                                                                       Need need_of, Meanwhile meanwhile) {
        const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
        const std::int32_t self = rank_in_cluster();
        static_assert(memory::groups == 64 &&
                      memory::bins == 64 * 64); // half a warp's fours; two for each lane
        mailbox* box = &shared_.boxes[groups_box];
        if (threadIdx.x == 0) {
            expect_bytes(box, ctas() * (memory::groups + 3) * 4);
        }
#pragma unroll
        for (std::int32_t i = 0; i < fours; ++i) {
#pragma unroll
            for (std::int32_t step = 1; step < 16; step *= 2) {
                here[i] += __shfl_xor_sync(~0u, here[i], step);
            }
            const auto group = (static_cast<std::int32_t>(threadIdx.x / 32) * fours + i) * 2 + lane / 16;
            if (lane % 16 < ctas()) {
                send(here[i], reinterpret_cast<std::uint32_t*>(shared_.groups_of[self]) + group, box,
                     lane % 16);
            }
        }
        const std::uint32_t turn = next_turn(groups_box);
        const std::uint32_t bins_turn = next_turn(bins_box);
        if (threadIdx.x < 32) {
            if (lane / 4 < ctas() && lane % 4 < 3) {
                send(sums[lane % 4], &shared_.limbs_of[self][lane % 4], box, lane / 4);
            }
            wait_for_mail(box, turn);
            clear_last_sums(lane); // all of the cluster have sent, so none looks at those any more
            std::uint64_t limbs = 0;
            std::uint64_t pair = 0; // each sum fits 32 bits
            for (std::int32_t cta = 0; cta < ctas(); ++cta) {
                limbs += shared_.limbs_of[cta][lane % 4];
                pair += shared_.groups_of[cta][31 - lane];
            }
            found_bin found;
            found.total =
                mass_of(__shfl_sync(~0u, limbs, 0), __shfl_sync(~0u, limbs, 1), __shfl_sync(~0u, limbs, 2));
            const std::uint32_t need = need_of(found);
            std::uint32_t before = 0;
            std::int32_t place = 2 * (31 - lane);
            step_down(pair, need, before, place);
            box = &shared_.boxes[bins_box];
            if (lane == 0) {
                expect_bytes(box, ctas() * 64 * 4);
            }
            const std::uint64_t bins =
                reinterpret_cast<const std::uint64_t*>(shared_.counts)[32 * place + lane];
            for (std::int32_t cta = 0; cta < ctas(); ++cta) {
                send(bins, &shared_.bins_of[self][lane], box, cta);
            }
            wait_for_mail(box, bins_turn);
            pair = 0;
            for (std::int32_t cta = 0; cta < ctas(); ++cta) {
                pair += shared_.bins_of[cta][31 - lane];
            }
            place = 64 * place + 2 * (31 - lane);
            step_down(pair, need, before, place);
            if (lane == 0) {
                found.digit = static_cast<std::uint32_t>(place);
                shared_.found = found;
            }
        } else {
            meanwhile();
        }
        __syncthreads();
        return shared_.found;
    }
    /// Of weights at @p place and the next one for each lane, from the highest down: where the sum of @p
    /// before and them reaches @p need, and what lies before that.
    __device__ UNIPREFILL_HIDDEN static void step_down(std::uint64_t pair, std::uint32_t need,
                                                       std::uint32_t& before, std::int32_t& place) {
        const auto high = static_cast<std::uint32_t>(pair >> 32);
        const std::uint32_t both = high + static_cast<std::uint32_t>(pair);
        std::uint32_t reach = before + warp_prefix(both);
        const std::int32_t owner = first_lane(threadIdx.x % 32 == 31 || reach >= need);
        reach -= both;
        const bool is_low = reach + high < need;
        before = __shfl_sync(~0u, is_low ? reach + high : reach, owner);
        place = __shfl_sync(~0u, place + (is_low ? 0 : 1), owner);
    }
    UNIPREFILL_HIDDEN static constexpr std::int32_t groups_box = 0;
    UNIPREFILL_HIDDEN static constexpr std::int32_t bins_box = 1;
    UNIPREFILL_HIDDEN static constexpr std::int32_t sums_box = 2;
    UNIPREFILL_HIDDEN static constexpr std::int32_t blocks_box = 3;
    /// For all threads alike.
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::uint32_t next_turn(std::int32_t box) {
        state_.box_turns ^= 1u << box;
        return ((state_.box_turns >> box) & 1u) ^ 1u;
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
        state_.turn = state_.turn == 2 ? 0 : state_.turn + 1;
        return shared_.sums[state_.turn];
    }
    /// After a barrier of the whole team.
    __device__ UNIPREFILL_HIDDEN void clear_last_sums() {
        clear_last_sums(near_rank());
    }
    __device__ UNIPREFILL_HIDDEN void clear_last_sums(std::int32_t word) {
        if (word < memory::words) {
            shared_.sums[state_.turn == 0 ? 2 : state_.turn - 1][word] = 0;
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

    memory& shared_;
    memento state_{};
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
