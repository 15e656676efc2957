# SPDX-License-Identifier: Apache-2.0
# The library, the same objects for the tests, the modules and the program.

set(RFR_OBJECTS "")
foreach(part ${RFR_PARTS})
  list(APPEND RFR_OBJECTS $<TARGET_OBJECTS:${part}>)
endforeach()
set(RFR_DEMO_OBJECTS $<TARGET_OBJECTS:refrain_objects> $<TARGET_OBJECTS:refrain_choice_demo>)
foreach(isa ${RFR_DEMO_ISAS})
  list(APPEND RFR_DEMO_OBJECTS $<TARGET_OBJECTS:refrain_kernels_${isa}>)
endforeach()

# Before 1.0 a minor version may break callers, so it is part of the soname.
if(PROJECT_VERSION_MAJOR EQUAL 0)
  set(RFR_ABI 0.${PROJECT_VERSION_MINOR})
else()
  set(RFR_ABI ${PROJECT_VERSION_MAJOR})
endif()
configure_file(cmake/refrain.map.in refrain.map @ONLY)
add_library(refrain SHARED ${RFR_OBJECTS})
add_library(refrain::refrain ALIAS refrain)
add_library(refrain_demo SHARED EXCLUDE_FROM_ALL ${RFR_DEMO_OBJECTS})
foreach(library refrain refrain_demo)
  target_link_libraries(${library} PRIVATE ${RFR_LIBRARIES})
  target_link_options(${library} PRIVATE -Wl,--version-script=${PROJECT_BINARY_DIR}/refrain.map -Wl,--as-needed)
  target_include_directories(${library} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                               $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  set_target_properties(${library} PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${RFR_ABI} OUTPUT_NAME refrain
                                              LINK_DEPENDS ${PROJECT_BINARY_DIR}/refrain.map)
endforeach()
set_target_properties(refrain_demo PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/demo)

# The tests see the inside: every object is linked, because a table's weak reference would not pull one out of
# an archive.
add_library(refrain_inside INTERFACE)
target_sources(refrain_inside INTERFACE ${RFR_OBJECTS})
target_include_directories(refrain_inside INTERFACE include src)
target_link_libraries(refrain_inside INTERFACE ${RFR_LIBRARIES})
if(NOT RFR_SANITIZE)
  target_link_options(refrain PRIVATE -Wl,--no-undefined)
endif()

# `product`, the target of `make`: everything but the tests. `product_cpu`: that without the CUDA module, which compiles
# longest. `demo_cpu`: the program of the first `make demo`, in a separate folder, with a library that has kernels for
# this machine's CPU only. `demo_gpu`: also the CUDA module of the demo (cmake/cuda.cmake).
add_custom_target(product_cpu DEPENDS refrain)
add_custom_target(product DEPENDS product_cpu)
add_custom_target(demo_cpu DEPENDS refrain_demo)
add_custom_target(demo_gpu DEPENDS demo_cpu)

# It sets how many of OpenMP's threads a product uses.
include(CheckCCompilerFlag)
if(RFR_ONEDNN AND RFR_OPENMP)
  find_path(DNNL_INCLUDE oneapi/dnnl/dnnl.h)
  find_library(DNNL_LIBRARY dnnl)
  file(GLOB RFR_ONEDNN_SOURCES CONFIGURE_DEPENDS src/backend/onednn/*.c)
  list(FILTER RFR_ONEDNN_SOURCES EXCLUDE REGEX "_test\\.c$")
  if(DNNL_INCLUDE AND DNNL_LIBRARY AND RFR_ONEDNN_SOURCES)
    add_library(refrain_onednn MODULE ${RFR_ONEDNN_SOURCES})
    target_include_directories(refrain_onednn PRIVATE include src ${DNNL_INCLUDE})
    target_compile_options(refrain_onednn PRIVATE ${RFR_FAST})
    set(RFR_AMX_FLAGS -march=x86-64-v4 -mavx512bf16 -mamx-tile -mamx-bf16)
    check_c_compiler_flag("${RFR_AMX_FLAGS}" RFR_HAS_AMX)
    if(RFR_HAS_AMX) # the file runs only where the CPU has AVX512-BF16 at least
      set_source_files_properties(src/backend/onednn/panel_gemm.c PROPERTIES COMPILE_OPTIONS "${RFR_AMX_FLAGS}")
    endif()
    target_link_libraries(refrain_onednn PRIVATE ${DNNL_LIBRARY} $<TARGET_NAME_IF_EXISTS:OpenMP::OpenMP_C>)
    add_dependencies(product_cpu refrain_onednn)
    # Modules are found in the library's folder.
    set(copy ${PROJECT_BINARY_DIR}/demo/${CMAKE_SHARED_MODULE_PREFIX}refrain_onednn${CMAKE_SHARED_MODULE_SUFFIX})
    add_custom_command(OUTPUT ${copy} COMMAND ${CMAKE_COMMAND} -E copy $<TARGET_FILE:refrain_onednn> ${copy}
                       DEPENDS refrain_onednn)
    add_custom_target(onednn_demo DEPENDS ${copy})
    add_dependencies(demo_cpu onednn_demo)
  elseif(RFR_ONEDNN_SOURCES)
    message(STATUS "oneDNN is missing: GEMMs run on the portable kernel (tools/deps installs it)")
  endif()
endif()

# Ranks that are processes on CPUs. Loaded on demand, so that the library does not depend on MPI.
if(RFR_MPI)
  find_package(MPI QUIET COMPONENTS C)
  if(MPI_C_FOUND)
    add_library(refrain_mpi MODULE src/dist/mpi/mpi_module.c)
    target_include_directories(refrain_mpi PRIVATE include src)
    target_link_libraries(refrain_mpi PRIVATE MPI::MPI_C)
    add_dependencies(product_cpu refrain_mpi)
  else()
    message(STATUS "MPI is missing: several ranks on CPUs are threads of a program (tools/deps installs Open MPI)")
  endif()
endif()

# The program knows the demo's configuration by name: the file itself, as a string.
file(READ examples/demo.yaml demo)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS examples/demo.yaml)
string(REPLACE "\\" "\\\\" demo "${demo}")
string(REPLACE "\"" "\\\"" demo "${demo}")
string(REPLACE "\n" "\\n" demo "${demo}")
file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/made/demo_yaml.h CONTENT "#define DEMO_YAML \"${demo}\"\n")

file(GLOB RFR_CLI CONFIGURE_DEPENDS cli/*.c)
if(RFR_CLI)
  set(libraries PkgConfig::JANSSON m $<TARGET_NAME_IF_EXISTS:OpenMP::OpenMP_C>)
  add_library(refrain_cli_objects OBJECT ${RFR_CLI})
  target_link_libraries(refrain_cli_objects PRIVATE ${libraries})
  target_include_directories(refrain_cli_objects PRIVATE include ${PROJECT_BINARY_DIR}/made)
  add_executable(refrain_cli $<TARGET_OBJECTS:refrain_cli_objects>)
  target_link_libraries(refrain_cli PRIVATE refrain ${libraries})
  add_executable(refrain_cli_demo EXCLUDE_FROM_ALL $<TARGET_OBJECTS:refrain_cli_objects>)
  target_link_libraries(refrain_cli_demo PRIVATE refrain_demo ${libraries})
  set_target_properties(refrain_cli refrain_cli_demo PROPERTIES OUTPUT_NAME refrain)
  set_target_properties(refrain_cli_demo PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/demo
                                                    BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN")
  add_dependencies(product_cpu refrain_cli)
  add_dependencies(demo_cpu refrain_cli_demo)
  # Man pages and shell completion, from the program's own tables.
  add_executable(make_man tools/make_man.c cli/commands.c)
  target_include_directories(make_man PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(make_man PRIVATE refrain)
  set(RFR_MAN ${PROJECT_BINARY_DIR}/made/completion/refrain)
  add_custom_command(OUTPUT ${RFR_MAN} COMMAND make_man ${PROJECT_BINARY_DIR}/made DEPENDS make_man)
  add_custom_target(man ALL DEPENDS ${RFR_MAN})
  add_dependencies(product_cpu man)
endif()

# LeakSanitizer crashes on the thread-local storage of a library that is loaded late: here it is loaded early.
if(RFR_SANITIZE MATCHES "address" AND TARGET refrain_onednn)
  set(RFR_EARLY -Wl,--push-state,--no-as-needed ${DNNL_LIBRARY} -Wl,--pop-state)
  target_link_libraries(refrain_inside INTERFACE ${RFR_EARLY})
  if(TARGET refrain_cli)
    target_link_libraries(refrain_cli PRIVATE ${RFR_EARLY})
  endif()
endif()
