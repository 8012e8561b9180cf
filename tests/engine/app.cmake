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
