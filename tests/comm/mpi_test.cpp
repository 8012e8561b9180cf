// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Ranks that are processes. Each makes the whole problem from the same seed, decides about its share, and
// compares with the decision of one rank that has all heads. Nothing ends a test case early (CHECK, not
// REQUIRE) once ranks have begun to wait for each other.

#include "comm/tensor_parallel.hpp"
#include "ledger/ledger_fixture.hpp"

#include <uniprefill/comm/mpi.hpp>

using namespace tensor_parallel;

namespace {

static_assert(up::is_reduction_v<up::mpi_reduction, up::host_stream>);
static_assert(!up::is_reduction_v<up::mpi_reduction, up::backend::cuda::stream>, "it takes host buffers");

/// What the library asked of MPI, and what it is told instead, if anything.
struct {
    std::vector<std::pair<const void*, int>> calls; // buffer and count
    int answer = MPI_SUCCESS;
    bool reaches_mpi = true;
} asked;

/// The processes of this run, on a communicator that reports errors.
class processes {
  public:
    static const processes& all() {
        static const processes one;
        return one;
    }
    processes(const processes&) = delete;
    processes& operator=(const processes&) = delete;

    MPI_Comm ranks() const { return ranks_; }
    int rank() const { return rank_; }
    int count() const { return count_; }

  private:
    processes() {
        MPI_Init(nullptr, nullptr);
        MPI_Comm_dup(MPI_COMM_WORLD, &ranks_);
        MPI_Comm_set_errhandler(ranks_, MPI_ERRORS_RETURN);
        MPI_Comm_rank(ranks_, &rank_);
        MPI_Comm_size(ranks_, &count_);
    }
    ~processes() {
        MPI_Comm_free(&ranks_);
        MPI_Finalize();
    }

    MPI_Comm ranks_ = MPI_COMM_NULL;
    int rank_ = 0;
    int count_ = 1;
};

template <class HeadReduction>
void split_decides_as_unsplit() {
    const processes& all = processes::all();
    int dropped = 0;
    const int cases = scaled(60);
    for (int i = 0; i < cases; ++i) {
        const std::uint64_t seed = base_seed() + static_cast<std::uint64_t>(i);
        INFO("UNIPREFILL_TEST_SEED=" << seed << " (first case), rank " << all.rank() << " of "
                                     << all.count());
        random_numbers numbers(seed);
        const problem whole = random_problem(numbers, all.count());
        const up::mpi_reduction reduction(all.ranks(), numbers.one_of({INT_MAX, 1, 7}));
        const unsplit<HeadReduction> wanted(whole);
        rank_step<HeadReduction> rank(share_of(whole, all.rank(), all.count()), whole.of.heads);
        rank.decide(reduction);
        CHECK(rank.result().ok());
        CHECK(rank.masses() == wanted.masses);
        CHECK(rank.kept() == wanted.kept);
        for (const kept_segment& segment : wanted.kept) {
            dropped += segment.outcome.rows - segment.outcome.kept;
        }
    }
    CHECK(dropped > 0);
}

/// The ledger of a rank that has decided, each request of it as a flat buffer: what was alive enters layer 1,
/// what the decision left enters layer 2.
std::vector<std::byte> ledger_after(const problem& whole, const std::vector<kept_segment>& kept) {
    using ledger_test::must;
    using ledger_test::positions;
    const auto requests = static_cast<std::int32_t>(whole.requests.size());
    ledger_test::owned_ledger owner({requests, 4096, 3, 3, up::set_relation::nested}, {0, 1, 2});
    ledger_test::rows_batch batch;
    ledger_test::rows_batch alive;
    ledger_test::rows_batch left;
    auto segment = kept.begin();
    for (std::int32_t id = 0; id < requests; ++id) {
        const request& one = whole.requests[static_cast<std::size_t>(id)];
        must(owner.ledger.admit(id));
        const bool decodes = one.tag == up::request_tag::decode;
        const std::int32_t begin = decodes ? one.positions.front() : 0;
        if (begin > 0) { // what it has decoded before
            const positions before = ledger_test::range(0, begin);
            ledger_test::open_step(owner, {{id, up::request_tag::prefill, before, before}}, 1).commit();
        }
        const positions rows(one.positions.begin(), one.positions.end());
        positions stay;
        for (int of = 0, row = 0; of < one.segments(); ++of, ++segment) {
            for (const bool keep : segment->keep) {
                if (keep) {
                    stay.push_back(rows[static_cast<std::size_t>(row)]);
                }
                ++row;
            }
        }
        batch.add(id, one.tag, ledger_test::range(begin, rows.back() + 1));
        alive.add(id, one.tag, rows);
        left.add(id, one.tag, stay);
    }
    up::ledger_step step;
    must(owner.ledger.begin_step(batch.view(), batch.ids.data(), step));
    must(owner.ledger.append(step, 1, alive.view()));
    must(owner.ledger.append(step, 2, left.view()));
    must(owner.ledger.commit_step(step));
    std::vector<std::byte> all;
    for (std::int32_t id = 0; id < requests; ++id) {
        std::size_t bytes = 0;
        must(owner.ledger.saved_bytes(id, bytes));
        std::vector<std::byte> saved(bytes);
        must(owner.ledger.save(id, saved.data(), bytes));
        all.insert(all.end(), saved.begin(), saved.end());
    }
    return all;
}

} // namespace

// MPI's profiling interface: a program's own function goes before the library's.
int MPI_Allreduce(const void* from, void* to, int count, MPI_Datatype type, MPI_Op operation,
                  MPI_Comm ranks) {
    asked.calls.emplace_back(to, count);
    return asked.reaches_mpi ? PMPI_Allreduce(from, to, count, type, operation, ranks) : asked.answer;
}

TEST_CASE("heads summed over processes: masses and keep sets as if one process had all heads") {
    split_decides_as_unsplit<up::head_sum>();
}

TEST_CASE("the maximum over heads of all processes") {
    split_decides_as_unsplit<up::head_max>();
}

TEST_CASE("ledgers of all processes are the same, bit for bit, though nobody sends them") {
    const processes& all = processes::all();
    const up::mpi_reduction reduction(all.ranks());
    int dropped = 0;
    const int cases = scaled(60);
    for (int i = 0; i < cases; ++i) {
        const std::uint64_t seed = base_seed() + static_cast<std::uint64_t>(i);
        INFO("UNIPREFILL_TEST_SEED=" << seed << " (first case), rank " << all.rank() << " of "
                                     << all.count());
        random_numbers numbers(seed);
        const problem whole = random_problem(numbers, all.count());
        rank_step<up::head_sum> rank(share_of(whole, all.rank(), all.count()), whole.of.heads);
        rank.decide(reduction);
        const std::vector<kept_segment> kept = rank.kept();
        const std::vector<std::byte> mine = ledger_after(whole, kept);
        CHECK(mine == ledger_after(whole, unsplit<up::head_sum>(whole).kept));
        // The first process's is sent here, to be compared.
        std::int64_t bytes = static_cast<std::int64_t>(mine.size());
        MPI_Bcast(&bytes, 1, MPI_INT64_T, 0, all.ranks());
        std::vector<std::byte> first = mine;
        first.resize(static_cast<std::size_t>(bytes));
        MPI_Bcast(first.data(), static_cast<int>(bytes), MPI_BYTE, 0, all.ranks());
        CHECK(mine == first);
        for (const kept_segment& segment : kept) {
            dropped += segment.outcome.rows - segment.outcome.kept;
        }
    }
    CHECK(dropped > 0);
}

TEST_CASE("a fault in one process keeps its request whole in every process") {
    const processes& all = processes::all();
    const up::mpi_reduction reduction(all.ranks());
    const int cases = scaled(60);
    for (int i = 0; i < cases; ++i) {
        const std::uint64_t seed = base_seed() + static_cast<std::uint64_t>(i);
        INFO("UNIPREFILL_TEST_SEED=" << seed << " (first case), rank " << all.rank() << " of "
                                     << all.count());
        random_numbers numbers(seed);
        const problem whole = random_problem(numbers, all.count());
        problem spoilt = whole;
        spoil_keys(spoilt, 0);
        const unsplit<up::head_sum> wanted(spoilt);
        problem share = share_of(whole, all.rank(), all.count());
        if (all.rank() == numbers.between(0, all.count() - 1)) {
            spoil_keys(share, 0);
        }
        rank_step<up::head_sum> rank(share, whole.of.heads);
        rank.decide(reduction);
        CHECK(rank.result().ok());
        CHECK(same_rows_and_reasons(rank.kept(), wanted.kept));
    }
}

TEST_CASE("every integer is reduced once, whatever MPI takes at a time") {
    const processes& all = processes::all();
    constexpr std::int64_t large = std::int64_t{1} << 59; // doubles would round
    for (const int at_once : {1, 3, 4, 10, INT_MAX}) {
        for (const auto how : {up::rank_reduction::sum, up::rank_reduction::maximum}) {
            std::vector<std::int64_t> buffer;
            std::vector<std::int64_t> wanted;
            for (int i = 0; i < 10; ++i) {
                const std::int64_t last = large / 8 + all.count() - 1 + i;
                buffer.push_back(large / 8 + all.rank() + i);
                wanted.push_back(how == up::rank_reduction::sum
                                     ? all.count() * (large / 8 + i) + all.count() * (all.count() - 1) / 2
                                     : last);
            }
            asked = {};
            CHECK(up::mpi_reduction(all.ranks(), at_once)(buffer.data(), 10, how, {}).ok());
            CHECK(buffer == wanted);
            CHECK(asked.calls.size() == static_cast<std::size_t>((10 + std::int64_t{at_once} - 1) / at_once));
        }
    }
}

TEST_CASE("more integers than an int can count") {
    std::int64_t first = 0; // MPI isn't reached, so nobody looks behind it
    asked = {{}, MPI_SUCCESS, false};
    const std::int64_t count = 2 * std::int64_t{INT_MAX} + 5;
    CHECK(up::mpi_reduction(processes::all().ranks())(&first, count, up::rank_reduction::sum, {}).ok());
    std::int64_t sum = 0;
    for (const auto& [buffer, part] : asked.calls) {
        CHECK(reinterpret_cast<std::uintptr_t>(buffer) ==
              reinterpret_cast<std::uintptr_t>(&first) + static_cast<std::uintptr_t>(sum) * sizeof first);
        sum += part;
    }
    CHECK(sum == count);
    CHECK(asked.calls.size() == 3);
    asked = {};
}

TEST_CASE("errors of MPI come back with their code, and end the reduction") {
    std::int64_t buffer[4] = {};
    asked = {{}, MPI_ERR_OTHER, false};
    const up::status failed =
        up::mpi_reduction(processes::all().ranks(), 1)(buffer, 4, up::rank_reduction::sum, {});
    CHECK(failed.code == up::status_code::backend_error);
    CHECK(failed.came == MPI_ERR_OTHER);
    CHECK(asked.calls.size() == 1);
    asked = {};
}

TEST_CASE("arguments that make no sense are refused before anything is sent") {
    const MPI_Comm ranks = processes::all().ranks();
    std::int64_t buffer[1] = {7};
    asked = {};
    const auto refused = [&](MPI_Comm over, int at_once, std::int64_t* data, std::int64_t count) {
        const up::status result = up::mpi_reduction(over, at_once)(data, count, up::rank_reduction::sum, {});
        CHECK(result.code == up::status_code::invalid_argument);
        return std::string(result.argument);
    };
    CHECK(refused(MPI_COMM_NULL, 1, buffer, 1) == "ranks");
    CHECK(refused(ranks, 0, buffer, 1) == "at_once");
    CHECK(refused(ranks, 1, buffer, -1) == "count");
    CHECK(refused(ranks, 1, nullptr, 1) == "buffer");
    CHECK(up::mpi_reduction(ranks)(nullptr, 0, up::rank_reduction::sum, {}).ok());
    CHECK(asked.calls.empty());
}
