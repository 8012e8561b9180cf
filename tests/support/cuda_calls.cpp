// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "support/cuda_calls.hpp"

#include <cuda_runtime_api.h> // without the overloads of cuda_runtime.h, so that decltype knows which function

#include <atomic>
#include <cstddef>
#include <tuple>

namespace {

template <class Function>
struct signature;
template <class... Parameters>
struct signature<cudaError_t(Parameters...)> {
    static constexpr int count = sizeof...(Parameters);
    template <std::size_t I>
    using parameter = std::tuple_element_t<I, std::tuple<Parameters...>>;
};

enum function : std::size_t {
#define COUNTED(arity, name) index_of_##name,
#include "support/cuda_calls.inl"
#undef COUNTED
    num_functions
};

constexpr const char* names[] = {
#define COUNTED(arity, name) #name,
#include "support/cuda_calls.inl"
#undef COUNTED
};

std::atomic<std::int64_t> counts[num_functions];

} // namespace

// The linker sends calls of `name` to __wrap_name, and calls of __real_name to `name`.
#define P(name, i) signature<decltype(name)>::parameter<i> p##i
#define PARAMETERS_0(name)
#define PARAMETERS_1(name) P(name, 0)
#define PARAMETERS_2(name) PARAMETERS_1(name), P(name, 1)
#define PARAMETERS_3(name) PARAMETERS_2(name), P(name, 2)
#define PARAMETERS_4(name) PARAMETERS_3(name), P(name, 3)
#define PARAMETERS_5(name) PARAMETERS_4(name), P(name, 4)
#define PARAMETERS_6(name) PARAMETERS_5(name), P(name, 5)
#define PARAMETERS_7(name) PARAMETERS_6(name), P(name, 6)
#define PARAMETERS_8(name) PARAMETERS_7(name), P(name, 7)
#define ARGUMENTS_0
#define ARGUMENTS_1 p0
#define ARGUMENTS_2 ARGUMENTS_1, p1
#define ARGUMENTS_3 ARGUMENTS_2, p2
#define ARGUMENTS_4 ARGUMENTS_3, p3
#define ARGUMENTS_5 ARGUMENTS_4, p4
#define ARGUMENTS_6 ARGUMENTS_5, p5
#define ARGUMENTS_7 ARGUMENTS_6, p6
#define ARGUMENTS_8 ARGUMENTS_7, p7
#define COUNTED(arity, name)                                                                                 \
    static_assert(signature<decltype(name)>::count == arity, #name " has other parameters");                 \
    extern "C" cudaError_t __real_##name(PARAMETERS_##arity(name));                                          \
    extern "C" cudaError_t __wrap_##name(PARAMETERS_##arity(name));                                          \
    cudaError_t __wrap_##name(PARAMETERS_##arity(name)) {                                                    \
        counts[index_of_##name].fetch_add(1);                                                                \
        return __real_##name(ARGUMENTS_##arity);                                                             \
    }
#include "support/cuda_calls.inl"

namespace uniprefill_test {

cuda_calls cuda_calls::now() {
    cuda_calls mark;
    for (const std::atomic<std::int64_t>& count : counts) {
        mark.counts_.push_back(count.load());
    }
    return mark;
}

std::string cuda_calls::since() const {
    const cuda_calls present = now();
    std::string text;
    for (std::size_t i = 0; i < num_functions; ++i) {
        if (present.counts_[i] != counts_[i]) {
            text += (text.empty() ? "" : ", ") + std::string(names[i]) + " x" +
                    std::to_string(present.counts_[i] - counts_[i]);
        }
    }
    return text;
}

} // namespace uniprefill_test
