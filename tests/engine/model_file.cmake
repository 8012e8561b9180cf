# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors

# Tests of examples/engine/model_file and of inspect.
find_package(nlohmann_json REQUIRED)

add_library(engine_test_gguf STATIC gguf_builder.cpp gguf_samples.cpp)
target_include_directories(engine_test_gguf PUBLIC ${PROJECT_SOURCE_DIR}/tests)
target_link_libraries(engine_test_gguf PUBLIC engine_model_file PRIVATE uniprefill_warnings)
target_compile_definitions(
    engine_test_gguf PUBLIC ENGINE_TEST_DATA="${CMAKE_CURRENT_SOURCE_DIR}"
                            ENGINE_TEST_OUTPUT="${CMAKE_CURRENT_BINARY_DIR}")

uniprefill_add_test(engine_dequantize SOURCES dequantize_test.cpp LIBS engine_test_gguf)
uniprefill_add_test(engine_gguf SOURCES gguf_test.cpp LIBS engine_test_gguf)
uniprefill_add_test(engine_gguf_file SOURCES gguf_file_test.cpp ${PROJECT_SOURCE_DIR}/examples/engine/inspect.cpp
                    LIBS engine_test_gguf nlohmann_json::nlohmann_json)
uniprefill_add_test(engine_llama_config SOURCES gguf_llama_config_test.cpp LIBS engine_test_gguf)
uniprefill_add_test(engine_tokenizer SOURCES tokenizer_test.cpp LIBS engine_test_gguf)
# UNIPREFILL_MODEL names the model's file; skipped without it.
uniprefill_add_test(engine_tokenizer_model SOURCES tokenizer_model_test.cpp LIBS engine_test_gguf LABELS model)

add_library(engine_fuzz STATIC fuzz_harness.cpp fuzz_mutations.cpp)
target_link_libraries(engine_fuzz PUBLIC engine_test_gguf PRIVATE uniprefill_warnings)
uniprefill_add_test(engine_fuzz_gguf SOURCES fuzz_gguf.cpp LIBS engine_fuzz)
if(PROJECT_IS_TOP_LEVEL AND NOT UNIPREFILL_SANITIZE)
    # Prints which lines of the loader those files reach; skipped without clang and llvm-cov.
    add_test(NAME engine_fuzz_coverage COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/fuzz_gguf.sh coverage
                                               ${CMAKE_CURRENT_BINARY_DIR}/fuzz_coverage)
    set_tests_properties(engine_fuzz_coverage PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 300)
endif()
