// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The facade with its heads spread over devices and NCCL between them: ranks that are threads of one process,
// and ranks that are processes.

#include "check_nccl.hpp"
#include "pipeline/gpu_ranks.cuh"

#include <uniprefill/comm/nccl.cuh>

#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <unistd.h>

using namespace pipeline_test;

namespace {

/// Communicators of one process, and their reductions.
class communicators {
  public:
    /// One for each of the first @p count devices.
    explicit communicators(int count)
        : all_(static_cast<std::size_t>(count)) {
        check_nccl(ncclCommInitAll(all_.data(), count, nullptr), "ncclCommInitAll");
    }
    /// One rank of a group of processes.
    communicators(const ncclUniqueId& group, head_share share)
        : all_(1) {
        check_nccl(ncclCommInitRank(all_.data(), share.ranks, group, share.rank), "ncclCommInitRank");
    }
    communicators(const communicators&) = delete;
    communicators& operator=(const communicators&) = delete;
    ~communicators() {
        for (const ncclComm_t one : all_) {
            ncclCommDestroy(one);
        }
    }
    [[nodiscard]] auto reductions() const {
        return [this](int index) { return up::nccl_reduction(all_[static_cast<std::size_t>(index)]); };
    }

  private:
    std::vector<ncclComm_t> all_;
};

/// Runs ranks eagerly and replayed, and compares each with an engine that has all heads.
void check_against_one_engine(const communicators& comms, const std::vector<engine_place>& places,
                              int compared_on) {
    const content contents[] = {first_content(), second_content(), content_with_fault()};
    for (const up::propagation mode : modes) {
        INFO((mode == up::propagation::revive ? "revive" : "cumulative"));
        std::vector<std::vector<seen>> wanted;
        use_device(compared_on);
        for (const content& what : contents) {
            wanted.push_back(of_one_engine(contents[0], what, mode));
        }
        CHECK(wanted[0][0].outcomes[0].reason == up::keep_reason::selected);
        CHECK(wanted[2][0].outcomes[0].reason == up::keep_reason::non_finite);
        engine_crew ranks(contents[0], some_layers(), mode, places);
        for (const std::size_t which : {0u, 1u, 2u}) {
            INFO("content " << which);
            ranks.load(contents[which]);
            ranks.run(comms.reductions());
            check_ranks(contents[which], ranks.recorded(), wanted[which]);
        }
        for (const auto capture_mode : {cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeGlobal}) {
            INFO((capture_mode == cudaStreamCaptureModeGlobal ? "global" : "thread-local") << " capture");
            ranks.load(contents[0]);
            ranks.capture(capture_mode, comms.reductions());
            for (const std::size_t which : {1u, 0u, 2u, 1u}) {
                INFO("content " << which << ", replayed");
                ranks.load(contents[which]);
                ranks.replay();
                check_ranks(contents[which], ranks.recorded(), wanted[which]);
            }
        }
    }
    use_device(0);
}

constexpr int num_ranks = kv_heads;

bool has_device_for_each_rank() {
    if (num_devices() >= num_ranks) {
        return true;
    }
    uniprefill_test::skip("fewer than two CUDA devices");
    return false;
}

std::string hexadecimal(const ncclUniqueId& id) {
    std::string text;
    for (const char byte : id.internal) {
        char digits[3];
        std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned>(static_cast<unsigned char>(byte)));
        text += digits;
    }
    return text;
}
ncclUniqueId from_hexadecimal(const std::string& text) {
    ncclUniqueId id;
    REQUIRE(text.size() == 2 * sizeof id.internal);
    for (std::size_t i = 0; i < sizeof id.internal; ++i) {
        id.internal[i] = static_cast<char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
    }
    return id;
}

constexpr const char* rank_variable = "UNIPREFILL_TEST_NCCL_RANK";
constexpr const char* group_variable = "UNIPREFILL_TEST_NCCL_GROUP";

} // namespace

TEST_CASE("a facade with one rank and NCCL decides as without, eager and captured") {
    if (uniprefill_test::has_device()) {
        const communicators comms(1);
        check_against_one_engine(comms, places_of_ranks(1, false), 0);
    }
}

TEST_CASE("heads shared by two devices, a thread each: as if one had them all, eager and captured") {
    if (has_device_for_each_rank()) {
        const communicators comms(num_ranks);
        check_against_one_engine(comms, places_of_ranks(num_ranks, false), 0);
    }
}

TEST_CASE("heads shared by two processes, a device each: as if one had them all, eager and captured") {
    if (!has_device_for_each_rank()) {
        return;
    }
    ncclUniqueId group;
    check_nccl(ncclGetUniqueId(&group), "ncclGetUniqueId");
    char self[4096] = {};
    REQUIRE(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
    std::vector<int> results(num_ranks, -1);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < num_ranks; ++rank) {
        threads.emplace_back([&, rank] {
            const std::string command = std::string(rank_variable) + "=" + std::to_string(rank) + " " +
                                        group_variable + "=" + hexadecimal(group) + " '" + self +
                                        "' '[rank-of-a-group]'";
            results[static_cast<std::size_t>(rank)] = std::system(command.c_str());
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    for (int rank = 0; rank < num_ranks; ++rank) {
        CAPTURE(rank);
        const int result = results[static_cast<std::size_t>(rank)];
        CHECK(WIFEXITED(result));
        CHECK(WEXITSTATUS(result) == 0);
    }
}

TEST_CASE("one of two processes", "[.rank-of-a-group]") { // which the test case above starts
    const char* const rank = std::getenv(rank_variable);
    const char* const group = std::getenv(group_variable);
    REQUIRE(rank != nullptr);
    REQUIRE(group != nullptr);
    const head_share share{std::atoi(rank), num_ranks};
    REQUIRE(share.rank < num_devices());
    use_device(share.rank);
    const engine_place place{this_device(), share};
    const communicators comms(from_hexadecimal(group), share);
    check_against_one_engine(comms, {place}, share.rank);
}
