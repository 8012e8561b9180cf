# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors

find_package(nlohmann_json QUIET)
uniprefill_add_test(
    engine_app
    SOURCES app_options_test.cpp
            app_output_test.cpp
            app_policy_test.cpp
            app_quality_test.cpp
            app_report_test.cpp
            app_sampling_test.cpp
    LIBS engine_app nlohmann_json::nlohmann_json)

# The program as a whole; skipped without UNIPREFILL_MODEL.
if(NOT UNIPREFILL_SANITIZE)
    find_package(Python3 REQUIRED COMPONENTS Interpreter)
    add_test(NAME engine_cli COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/cli.py $<TARGET_FILE:uniprefill-engine>)
    set_tests_properties(engine_cli PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 900 LABELS model
                                    ENVIRONMENT "${test_environment}")
endif()
