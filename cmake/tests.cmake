# SPDX-License-Identifier: Apache-2.0
# The tests: one cmocka program per X_test.c, and checks of the source tree and of what is installed.
enable_testing()
rfr_require(CMOCKA cmocka)

file(GLOB_RECURSE RFR_TEST_SOURCES CONFIGURE_DEPENDS src/*_test.c tests/*_test.c)
if(NOT TARGET refrain_cuda) # its headers are not there
  list(FILTER RFR_TEST_SOURCES EXCLUDE REGEX "/src/backend/cuda/|_cuda_test\\.c$")
endif()
if(NOT TARGET refrain_mpi)
  list(FILTER RFR_TEST_SOURCES EXCLUDE REGEX "/(comm_mpi|cli_ranks|ranks_faults)_test\\.c$")
endif()
file(GLOB_RECURSE RFR_TEST_SUPPORT CONFIGURE_DEPENDS src/*_ref.c tests/support/*.c)
if(RFR_TEST_SUPPORT)
  add_library(refrain_test_objects OBJECT ${RFR_TEST_SUPPORT})
  target_include_directories(refrain_test_objects PRIVATE include src tests)
  set_target_properties(refrain_test_objects PROPERTIES C_VISIBILITY_PRESET default)
  target_compile_definitions(refrain_test_objects PRIVATE RFT_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  if(RFR_SANITIZE)
    target_compile_definitions(refrain_test_objects PRIVATE RFT_SANITIZED)
  endif()
  target_link_libraries(refrain_test_objects PRIVATE PkgConfig::CMOCKA ${RFR_LIBRARIES})
  list(APPEND RFR_TEST_PARTS $<TARGET_OBJECTS:refrain_test_objects>)
endif()
# The references once more in f32, as the plain low-precision computation that tolerances come from. With sanitizers
# nothing is compared with a tolerance (tests/support/op_check.c).
file(GLOB_RECURSE RFR_TEST_REFERENCES CONFIGURE_DEPENDS src/*_ref.c)
if(RFR_TEST_REFERENCES AND NOT RFR_SANITIZE)
  add_library(refrain_test_plain OBJECT ${RFR_TEST_REFERENCES})
  target_include_directories(refrain_test_plain PRIVATE include src tests)
  set_target_properties(refrain_test_plain PROPERTIES C_VISIBILITY_PRESET default)
  target_compile_options(refrain_test_plain PRIVATE -include ${PROJECT_SOURCE_DIR}/tests/support/op_plain.h)
  target_link_libraries(refrain_test_plain PRIVATE ${RFR_LIBRARIES})
  list(APPEND RFR_TEST_PARTS $<TARGET_OBJECTS:refrain_test_plain>)
endif()
# Each call of a reference or of support code reads one element, which takes long under sanitizers. They are compiled
# with -O2 and without checks of undefined behaviour. Library and kernels keep these checks.
if(RFR_SANITIZE)
  file(GLOB slow CONFIGURE_DEPENDS tests/support/op_*.c tests/support/interp.c)
  set_source_files_properties(${RFR_TEST_REFERENCES} ${slow} PROPERTIES COMPILE_OPTIONS "-O2;-fno-sanitize=undefined")
endif()
# The tests link one shared library with all objects and the tests' own parts: linked into each of 200 programs, the
# objects took a quarter of a build. Calls of rfi_backend_find go to tests/support/backend.c.
add_library(refrain_test SHARED ${RFR_OBJECTS} ${RFR_TEST_PARTS})
set_target_properties(refrain_test PROPERTIES OUTPUT_NAME test_parts) # librefrain* are installed
target_include_directories(refrain_test INTERFACE include src)
target_link_libraries(refrain_test PUBLIC ${RFR_LIBRARIES} PkgConfig::CMOCKA ${RFR_EARLY})
target_link_options(refrain_test PRIVATE -Wl,-Bsymbolic-functions -Wl,--wrap=rfi_backend_find)
# Timeout of a test in seconds. It is generous, for busy machines: only a test that hangs reaches it.
set(patience 900)
if(RFR_SANITIZE OR CMAKE_CROSSCOMPILING)
  set(patience 1200)
endif()
# The thread sanitizer sees the threads that a test or the program starts, but not those of OpenMP. With it only these
# tests are built: they include pthread.h or support/ranks.h, or they start a program with threads. Layouts differ
# in what is computed: run_ranks_test and run_stages_test have their threads and messages.
set(RFR_THREADED cli_ranks_test comm_mpi_test ranks_faults_test)
set(RFR_UNTHREADED run_layouts_test run_pipelines_test)
# References are found by weak tables too.
foreach(source ${RFR_TEST_SOURCES})
  get_filename_component(name ${source} NAME_WE)
  file(STRINGS ${source} threads REGEX "#include <pthread\\.h>|#include \"support/ranks\\.h\"" LIMIT_COUNT 1)
  if(name IN_LIST RFR_THREADED)
    set(threads TRUE)
  endif()
  if(RFR_SANITIZE STREQUAL "thread" AND (NOT threads OR name IN_LIST RFR_UNTHREADED))
    continue()
  endif()
  add_executable(${name} ${source})
  target_include_directories(${name} PRIVATE tests)
  target_link_libraries(${name} PRIVATE refrain_test)
  target_compile_definitions(${name} PRIVATE RFT_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
                                             RFT_BINARY_DIR="${PROJECT_BINARY_DIR}")
  target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O1>) # -O2 takes half as long again to compile
  if(RFR_SANITIZE)
    target_compile_definitions(${name} PRIVATE RFT_SANITIZED)
  endif()
  if(source MATCHES "/src/backend/cuda/|_cuda_test\\.c$")
    target_include_directories(${name} SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  endif()
  foreach(module refrain_onednn refrain_mpi)
    if(TARGET ${module})
      add_dependencies(${name} ${module})
    endif()
  endforeach()
  if(name MATCHES "^(cli_.*|ranks_faults_|python_)test$" AND TARGET refrain_cli)
    add_dependencies(${name} refrain_cli)
  endif()
  # Waiting threads sleep: tests run in parallel, and spinning would take cores from other tests.
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${patience} ENVIRONMENT OMP_WAIT_POLICY=passive)
endforeach()
# The longest tests start first, so that the others fill the remaining time.
foreach(name ops_test cli_test cli_plan_test cli_runs_test run_layouts_test ranks_faults_test comm_mpi_test
        run_stages_test state_ranks_test run_recipe_test run_pipelines_test cli_ranks_test backend_faults_test
        run_budget_ranks_test stages_test)
  if(TEST ${name})
    set_tests_properties(${name} PROPERTIES COST 1000)
  endif()
endforeach()
if(TEST ranks_faults_test)
  set_tests_properties(ranks_faults_test PROPERTIES COST 2000) # it mostly waits
endif()

if(TARGET ranks_faults_test AND NOT RFR_SANITIZE)
  add_library(stops_in_mpi MODULE tests/e2e/stops_in_mpi.c)
  add_dependencies(ranks_faults_test stops_in_mpi)
  target_compile_definitions(ranks_faults_test PRIVATE RFT_STOPS="$<TARGET_FILE:stops_in_mpi>")
endif()
if(TARGET comm_mpi_test)
  set_tests_properties(comm_mpi_test cli_ranks_test PROPERTIES SKIP_RETURN_CODE 77)
  # Open MPI leaks and takes locks in both orders. It unloads its components before leaks are reported, so only whole
  # stacks name it.
  set_property(TEST comm_mpi_test cli_ranks_test ranks_faults_test APPEND PROPERTY ENVIRONMENT
    ASAN_OPTIONS=fast_unwind_on_malloc=0
    LSAN_OPTIONS=print_suppressions=0:suppressions=${PROJECT_SOURCE_DIR}/tests/mpi_leaks.txt
    TSAN_OPTIONS=halt_on_error=1:print_suppressions=0:suppressions=${PROJECT_SOURCE_DIR}/tests/mpi_locks.txt)
endif()

if(RFR_SANITIZE STREQUAL "thread")
  # A plan that does not fit is followed by others, one a thread.
  add_test(NAME plan_threads COMMAND refrain_cli plan ${PROJECT_SOURCE_DIR}/examples/small.yaml
                                     --set memory.budget=1MiB)
  set_tests_properties(plan_threads PROPERTIES PASS_REGULAR_EXPRESSION "settings that need less"
                                               FAIL_REGULAR_EXPRESSION ThreadSanitizer)
  return()
endif()

# CUDA modules of other builds: one with another build name, one without a build name.
set(entry "__attribute__((visibility(\"default\")))")
set(trap "${entry} void rfi_cuda_module_get(void);\nvoid rfi_cuda_module_get(void) { __builtin_trap(); }\n")
file(CONFIGURE OUTPUT old_build/module.c CONTENT "${trap}")
file(CONFIGURE OUTPUT other_build/module.c
     CONTENT "${trap}${entry} const char rfi_cuda_module_built[] = \"0.0.1-other\";\n")
foreach(build old other)
  add_library(module_of_${build}_build MODULE ${PROJECT_BINARY_DIR}/${build}_build/module.c)
  set_target_properties(module_of_${build}_build PROPERTIES OUTPUT_NAME refrain_cuda LIBRARY_OUTPUT_DIRECTORY
                                                            ${PROJECT_BINARY_DIR}/${build}_build)
  add_dependencies(cuda_loader_test module_of_${build}_build)
endforeach()

# A foreign module in a working folder: loading it ends the process with status 42.
file(CONFIGURE OUTPUT trap/module.c CONTENT "#include <unistd.h>
__attribute__((constructor)) static void trap(void) { _exit(42); }\n")
add_library(trap_module MODULE ${PROJECT_BINARY_DIR}/trap/module.c)
set_target_properties(trap_module PROPERTIES OUTPUT_NAME refrain_onednn
                                             LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/trap)
configure_file(${PROJECT_BINARY_DIR}/trap/module.c ${PROJECT_BINARY_DIR}/trap/librefrain.so COPYONLY)
add_dependencies(module_path_test trap_module refrain)

# Sources named from the root on, and from the build folder on.
set(from_root ${PROJECT_SOURCE_DIR})
set(from_build ${RFR_UP})
foreach(from root build)
  set(up ${from_${from}})
  if(up)
    add_test(NAME places_from_${from} COMMAND ${CMAKE_C_COMPILER} ${RFR_PLACES} -E -I${up}/include -I${up}/src
                                              ${up}/src/nn/mlp.c WORKING_DIRECTORY ${CMAKE_BINARY_DIR})
    set_tests_properties(places_from_${from} PROPERTIES PASS_REGULAR_EXPRESSION "[{(]\"src/nn/mlp\\.c\", [0-9]")
  endif()
endforeach()

# Checks of the CUDA backend that need no GPU: every op has a kernel, the shipped configurations have a plan.
if(TARGET refrain_cuda AND NOT RFR_SANITIZE)
  add_dependencies(ops_test refrain_cuda)
  add_dependencies(grouped_choice_test refrain_cuda)
  add_test(NAME cuda_kernels COMMAND ops_test --device cuda:none)
  add_test(NAME cuda_ops COMMAND ops_test --device cuda)
  set_tests_properties(cuda_kernels cuda_ops PROPERTIES TIMEOUT 300 SKIP_RETURN_CODE 77
                                                       ENVIRONMENT OMP_WAIT_POLICY=passive)
endif()
if(TARGET refrain_cuda AND TARGET refrain_cli AND NOT RFR_SANITIZE)
  file(GLOB configurations CONFIGURE_DEPENDS examples/*.yaml)
  foreach(configuration ${configurations})
    get_filename_component(name ${configuration} NAME_WE)
    foreach(program train evaluate prefill decode)
      add_test(NAME cuda_plan_${name}_${program} COMMAND refrain_cli plan ${configuration} --device cuda:none
                                                         --program ${program})
      set_tests_properties(cuda_plan_${name}_${program} PROPERTIES PASS_REGULAR_EXPRESSION "lower bound")
    endforeach()
  endforeach()
  set(small ${PROJECT_SOURCE_DIR}/examples/small.yaml)
  add_test(NAME cuda_plan_no_branch COMMAND refrain_cli plan ${small} --device cuda:none)
  set_tests_properties(cuda_plan_no_branch PROPERTIES PASS_REGULAR_EXPRESSION
                                                      "branch +0 bytes +none: [0-9]+ would be more than the budget has")
  # A recipe without tensor cores for it on Hopper.
  add_test(NAME cuda_trace_decoded COMMAND refrain_cli trace ${small} --device cuda:none --after lower
                                           --set precision.recipe=mxfp8)
  set_tests_properties(cuda_trace_decoded PROPERTIES PASS_REGULAR_EXPRESSION
                       "matmul_scaled in layer1.mlp on sm80: decoded to bf16: its scaling has no tensor-core kernel")
  # Sizes that the GPU's kernels do not support are refused.
  add_test(NAME cuda_refused_heads COMMAND refrain_cli plan ${small} --device cuda:none
                                           --set model.head_dim=512)
  set_tests_properties(cuda_refused_heads PROPERTIES PASS_REGULAR_EXPRESSION
                       "on CUDA: 4 heads of size 512. the kernels take at most 65535 heads of size 256")
  # The line names the GPU or the missing part; the program works either way.
  add_test(NAME cuda_doctor COMMAND refrain_cli doctor)
  set_tests_properties(cuda_doctor PROPERTIES PASS_REGULAR_EXPRESSION
                                              "GPU +(no NVIDIA GPU can be used here: |.*compute capability )")
  set_property(TEST cuda_doctor PROPERTY ENVIRONMENT OMP_WAIT_POLICY=passive)
endif()

# Generates the pages of docs/. With a sanitizer it would run again what the tests run.
if(NOT RFR_SANITIZE)
  add_executable(make_docs tools/make_docs.c tools/docs_limits.c tools/docs_shows.c tools/docs_schedules.c
                           tools/docs_scale.c
                           cli/plan_svg.c cli/shared.c
                           cli/plan_ranks.c cli/commands.c cli/options.c cli/frontier_table.c cli/schedule_table.c
                           cli/schedule_svg.c)
  target_include_directories(make_docs PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(make_docs PRIVATE refrain_inside)
  add_test(NAME docs_current COMMAND make_docs --check ${PROJECT_SOURCE_DIR}/docs)
endif()

# Pages of `refrain report` in Chromium, where there is one.
find_program(RFR_PYTHON python3)
if(TARGET refrain_cli AND RFR_PYTHON AND NOT RFR_SANITIZE)
  add_test(NAME report_browser COMMAND ${RFR_PYTHON} ${PROJECT_SOURCE_DIR}/tests/e2e/report_browser
                                       $<TARGET_FILE:refrain_cli>)
  set_tests_properties(report_browser PROPERTIES TIMEOUT 300 SKIP_RETURN_CODE 77 ENVIRONMENT OMP_WAIT_POLICY=passive)
endif()

# The commands, configurations and C of README.md and docs/*.md.
if(TARGET refrain_cli AND RFR_PYTHON AND NOT RFR_SANITIZE AND NOT CMAKE_CROSSCOMPILING)
  add_test(NAME page_blocks COMMAND ${RFR_PYTHON} ${PROJECT_SOURCE_DIR}/tests/e2e/page_blocks
                                    ${PROJECT_BINARY_DIR})
  set_tests_properties(page_blocks PROPERTIES TIMEOUT ${patience} COST 1000)
endif()

if(RFR_PYTHON)
  add_test(NAME sbom COMMAND ${RFR_PYTHON} ${PROJECT_SOURCE_DIR}/tests/e2e/sbom_check
                             ${PROJECT_SOURCE_DIR}/tools)
endif()

# A few kills of the campaign that `make check-kills` runs in full.
if(TARGET refrain_cli AND NOT RFR_SANITIZE)
  add_test(NAME kill_campaign COMMAND ${PROJECT_SOURCE_DIR}/tools/kill-campaign $<TARGET_FILE:refrain_cli> 5)
  set_tests_properties(kill_campaign PROPERTIES TIMEOUT 300 ENVIRONMENT OMP_WAIT_POLICY=passive)
endif()

# Verdicts of the watch over hours of training, and a few seconds of it.
if(TARGET refrain_cli AND NOT RFR_SANITIZE AND NOT CMAKE_CROSSCOMPILING)
  add_test(NAME endurance_check COMMAND ${PROJECT_SOURCE_DIR}/tests/e2e/endurance_check
                                        ${PROJECT_SOURCE_DIR}/tools/endurance $<TARGET_FILE:refrain_cli>)
  set_tests_properties(endurance_check PROPERTIES TIMEOUT 300 ENVIRONMENT OMP_WAIT_POLICY=passive)
endif()

add_test(NAME demo_choice COMMAND ${PROJECT_SOURCE_DIR}/tests/e2e/demo_choice ${PROJECT_SOURCE_DIR}/tools/demo)
if(TARGET refrain_cli AND NOT RFR_SANITIZE AND NOT CMAKE_CROSSCOMPILING)
  add_custom_target(demo_of_tests ALL DEPENDS demo_cpu)
  add_test(NAME demo_program COMMAND ${PROJECT_SOURCE_DIR}/tests/e2e/demo_program $<TARGET_FILE:refrain_cli>
                                     $<TARGET_FILE:refrain_cli_demo>)
  set_tests_properties(demo_program PROPERTIES ENVIRONMENT OMP_WAIT_POLICY=passive)
endif()

# Checks of sources, symbols and the installed package: the same under every sanitizer.
if(NOT RFR_SANITIZE)
  set(tools ${PROJECT_SOURCE_DIR}/tools)
  add_test(NAME include_direction COMMAND ${tools}/include-check ${PROJECT_SOURCE_DIR})
  add_test(NAME op_index_current COMMAND ${tools}/make_op_index --check)
  add_test(NAME exported_symbols COMMAND ${tools}/export-check $<TARGET_FILE:refrain>
                                         ${PROJECT_SOURCE_DIR}/include/refrain)
  set(linked refrain)
  foreach(target refrain_cli refrain_onednn refrain_mpi refrain_cuda)
    if(TARGET ${target})
      list(APPEND linked ${target})
    endif()
  endforeach()
  list(TRANSFORM linked REPLACE "(.+)" "$<TARGET_FILE:\\1>")
  add_test(NAME runpath_entries COMMAND ${tools}/rpath-check ${linked})
  # Ubuntu 24.04 has glibc 2.39 and the libstdc++ of gcc 14.
  add_test(NAME symbol_versions COMMAND ${tools}/symbol-check 2.39 3.4.33 ${linked})
  set_tests_properties(symbol_versions PROPERTIES SKIP_RETURN_CODE 77)
  add_test(NAME mutants_apply COMMAND ${tools}/check-mutants --apply)
  add_test(NAME source_form COMMAND ${tools}/form-check ${PROJECT_SOURCE_DIR})
  add_test(NAME language COMMAND ${tools}/language-check ${PROJECT_SOURCE_DIR})
  add_test(NAME declared_symbols COMMAND ${tools}/export-check --all $<TARGET_FILE:refrain>
                                         ${PROJECT_SOURCE_DIR}/include/refrain)
  file(GLOB headers CONFIGURE_DEPENDS include/refrain/*.h)
  set(strict -pedantic -Wall -Wextra -Werror -fsyntax-only -I${PROJECT_SOURCE_DIR}/include)
  foreach(header ${headers})
    get_filename_component(name ${header} NAME_WE)
    add_test(NAME header_${name}_c11 COMMAND ${CMAKE_C_COMPILER} -std=c11 -Wstrict-prototypes ${strict}
                                         -include ${header} -x c /dev/null)
    add_test(NAME header_${name}_cxx17 COMMAND ${CMAKE_CXX_COMPILER} -std=c++17 ${strict}
                                           -include ${header} -x c++ /dev/null)
  endforeach()
  if(TARGET refrain_cli)
    add_test(NAME python_wheel COMMAND ${PROJECT_SOURCE_DIR}/python/tests/wheel-check ${PROJECT_BINARY_DIR})
    set_tests_properties(python_wheel PROPERTIES SKIP_RETURN_CODE 77 ENVIRONMENT OMP_WAIT_POLICY=passive)
  endif()
  file(GLOB examples CONFIGURE_DEPENDS examples/*.c examples/*.cpp)
  if(examples)
    add_test(NAME installed_examples COMMAND ${tools}/install-check ${PROJECT_BINARY_DIR} ${PROJECT_SOURCE_DIR}/examples
                                             ${CMAKE_INSTALL_LIBDIR} ${CMAKE_C_COMPILER})
    set_tests_properties(installed_examples PROPERTIES TIMEOUT 600 ENVIRONMENT OMP_WAIT_POLICY=passive)
  endif()
endif()
