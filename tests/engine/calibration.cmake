# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors

# Tests of examples/engine/calibration, and of steps that begin where others were.
find_package(nlohmann_json QUIET)
uniprefill_add_test(
    engine_calibration
    SOURCES calibration_test.cpp calibration_search_test.cpp calibration_sweep_test.cpp trail_test.cpp small_model.cpp
    LIBS engine_calibration engine_test_gguf uniprefill_oracle nlohmann_json::nlohmann_json)
