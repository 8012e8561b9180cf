// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#ifdef _OPENMP
#    include <omp.h>
#endif

namespace engine::cpu {

/// Threads that the next parallel region may have, and the calling thread's number in its region.
inline int max_threads() {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}
inline int this_thread() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

/// Sets how many threads the parallel regions of the calling thread have.
inline void set_threads([[maybe_unused]] int threads) {
#ifdef _OPENMP
    omp_set_num_threads(threads);
#endif
}

} // namespace engine::cpu
