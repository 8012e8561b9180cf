// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// Ranks that are threads of one process, and the reduction between them.

#include <uniprefill/comm/reduction.hpp>
#include <uniprefill/core/backend.hpp>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace tensor_parallel {

namespace up = uniprefill;

/// Combines the buffers of all ranks in the order in which they come, which differs from run to run.
class rank_group {
  public:
    explicit rank_group(int ranks)
        : ranks_(ranks) {}

    void reduce(std::int64_t* buffer, std::int64_t count, up::rank_reduction how) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !leaving_; });
        if (arrived_ == 0) {
            total_.assign(buffer, buffer + count);
        } else {
            for (std::size_t i = 0; i < total_.size(); ++i) {
                total_[i] =
                    how == up::rank_reduction::sum ? total_[i] + buffer[i] : std::max(total_[i], buffer[i]);
            }
        }
        leaving_ = ++arrived_ == ranks_;
        changed_.notify_all();
        changed_.wait(lock, [&] { return leaving_; });
        std::copy(total_.begin(), total_.end(), buffer);
        leaving_ = --arrived_ != 0;
        changed_.notify_all();
    }

    /// Runs @p work(rank) for every rank at the same time.
    template <class Work>
    void run(const Work& work) const {
        std::vector<std::thread> threads;
        for (int rank = 0; rank < ranks_; ++rank) {
            threads.emplace_back(work, rank);
        }
        for (std::thread& one : threads) {
            one.join();
        }
    }

  private:
    int ranks_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::int64_t> total_;
    int arrived_ = 0;
    bool leaving_ = false;
};

/// A reduction of a user's own.
struct group_reduction {
    rank_group* group;

    up::status operator()(std::int64_t* buffer, std::int64_t count, up::rank_reduction how,
                          up::host_stream) const noexcept {
        group->reduce(buffer, count, how);
        return up::success();
    }
};

/// The same behind a function pointer.
inline up::reduction_callback<up::host_stream> group_callback(rank_group& group) {
    return {
        [](void* context, std::int64_t* buffer, std::int64_t count, up::rank_reduction how, up::host_stream) {
            static_cast<rank_group*>(context)->reduce(buffer, count, how);
            return up::success();
        },
        &group};
}

} // namespace tensor_parallel
