# SPDX-License-Identifier: Apache-2.0
# The fuzz targets, tests/fuzz/fuzz_X.c: with RFR_FUZZ (clang) linked with libFuzzer, else with a
# main that replays the committed inputs of tests/data/fuzz/X as a test.
file(GLOB RFR_FUZZ_TARGETS CONFIGURE_DEPENDS tests/fuzz/fuzz_*.c)
foreach(source ${RFR_FUZZ_TARGETS})
  get_filename_component(name ${source} NAME_WE)
  string(REPLACE "fuzz_" "" corpus ${name})
  add_executable(${name} ${source} tests/fuzz/support.c)
  target_link_libraries(${name} PRIVATE refrain_inside)
  target_compile_definitions(${name} PRIVATE RFT_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  if(RFR_FUZZ)
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  else()
    target_sources(${name} PRIVATE tests/fuzz/replay.c)
    add_test(NAME ${name} COMMAND ${name} ${PROJECT_SOURCE_DIR}/tests/data/fuzz/${corpus})
  endif()
endforeach()
