# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors

# Tests of examples/engine/serving.
uniprefill_add_test(engine_serving SOURCES serve_test.cpp workload_test.cpp small_model.cpp
                    LIBS engine_serving engine_test_gguf uniprefill_oracle)

# The program with the real model; skipped without UNIPREFILL_MODEL.
if(NOT UNIPREFILL_SANITIZE)
    find_package(Python3 REQUIRED COMPONENTS Interpreter)
    add_test(NAME engine_serve_sim COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/serve.py $<TARGET_FILE:uniprefill-engine>)
    set_tests_properties(engine_serve_sim PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 1500 LABELS model
                                    ENVIRONMENT "${test_environment}")
endif()
