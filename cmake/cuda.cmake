# SPDX-License-Identifier: Apache-2.0
# The CUDA module: every .cu and X_cuda.c under src/, and src/backend/cuda. Needs nvcc and cuBLASLt's headers to
# build; to run, a driver and cuBLASLt, which are looked for when a GPU is used. The portable kernels are code for
# sm_80 (and PTX of it for what comes later); sm_90a has Hopper's own instructions.
include(CheckLanguage)
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80 90a-real)
endif()
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(STATUS "nvcc is missing: no CUDA module is built")
  return()
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 17)
file(GLOB_RECURSE RFR_CUDA_SOURCES CONFIGURE_DEPENDS src/*.cu src/*_cuda.c src/backend/cuda/*.c)
list(FILTER RFR_CUDA_SOURCES EXCLUDE REGEX "_test\\.c$")
set(flags -Xcompiler=-fno-exceptions,-fno-rtti,-fno-threadsafe-statics,-fvisibility=hidden --Werror=all-warnings
          --expt-relaxed-constexpr)
# Replaces the small CUDA sources in a list by `parts` sources that include them, so that nvcc reads the headers once
# for many: for a small source that is two thirds of the time. Each is in a namespace, since some have functions of the
# same name; what other files call is extern "C". The headers come first, outside the namespaces; tables (.def) do not.
function(rfr_join list name parts)
  set(sources ${${list}})
  set(together ${sources})
  list(FILTER together INCLUDE REGEX "\\.cu$")
  list(FILTER together EXCLUDE REGEX "_sm[89]0\\.cu$") # these define macros
  list(REMOVE_ITEM sources ${together})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${together})
  foreach(source ${together})
    file(STRINGS ${source} lines REGEX "^#include (<.*>|\".*h\")")
    list(APPEND headers ${lines})
  endforeach()
  list(REMOVE_DUPLICATES headers)
  list(JOIN headers "\n" headers)
  math(EXPR last "${parts} - 1")
  foreach(part RANGE ${last})
    set(text "${headers}\n")
    set(i 0)
    foreach(source ${together})
      math(EXPR of "${i} % ${parts}")
      math(EXPR i "${i} + 1")
      if(of EQUAL part)
        get_filename_component(namespace ${source} NAME_WE)
        string(APPEND text "namespace in_${namespace} {\n#include \"${source}\"\n}\n")
      endif()
    endforeach()
    file(CONFIGURE OUTPUT made/joined/${name}_${part}.cu CONTENT "${text}" @ONLY)
    list(APPEND sources ${PROJECT_BINARY_DIR}/made/joined/${name}_${part}.cu)
  endforeach()
  set(${list} ${sources} PARENT_SCOPE)
endfunction()
# A source that lacks an #include still compiles with it, so only the preset ci sets it.
option(RFR_CUDA_JOIN "Compile the small sources of the CUDA module together, which is faster" OFF)
set(sources ${RFR_CUDA_SOURCES})
if(RFR_CUDA_JOIN)
  rfr_join(sources module 2)
endif()
add_library(refrain_cuda MODULE ${sources})
# The module of `make demo` where none is built: for this machine's GPU alone, and with optimized kernels only for the
# ops of examples/demo-gpu.yaml. It takes a fourth of the time.
# "9.0" of each GPU. Only Hopper has kernels of its own; the driver compiles the code for sm_80 for newer GPUs.
set(architectures ${CMAKE_CUDA_ARCHITECTURES})
execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader OUTPUT_VARIABLE found
                RESULT_VARIABLE failed ERROR_QUIET)
string(REGEX MATCHALL "[0-9]+\\.[0-9]" found "${found}")
list(REMOVE_DUPLICATES found)
if(NOT failed AND found STREQUAL "9.0")
  set(architectures 90a-real)
elseif(NOT failed AND found MATCHES "^8\\.[0-9]$")
  set(architectures 80-real)
elseif(NOT failed AND found MATCHES "^1[0-9]\\.[0-9]$")
  set(architectures 80-virtual)
endif()
set(other ${RFR_CUDA_SOURCES})
list(FILTER other INCLUDE REGEX "\\.cu$")
list(FILTER other EXCLUDE REGEX
     "/(attention_(bwd_)?sm90|ce_rows(_sm90)?|embedding|rope|rmsnorm|activation|dropout|update)\\.cu$")
if(NOT architectures STREQUAL "90a-real")
  list(FILTER other EXCLUDE REGEX "/attention_sm80\\.cu$")
endif()
set(sources ${RFR_CUDA_SOURCES})
list(REMOVE_ITEM sources ${other})
rfr_join(sources demo 2)
rfr_join(other other 2)
add_library(refrain_cuda_other OBJECT EXCLUDE_FROM_ALL ${other})
target_compile_options(refrain_cuda_other PRIVATE --Ofast-compile=max)
add_library(refrain_cuda_demo MODULE EXCLUDE_FROM_ALL ${sources} $<TARGET_OBJECTS:refrain_cuda_other>)
set_target_properties(refrain_cuda_other refrain_cuda_demo PROPERTIES CUDA_ARCHITECTURES "${architectures}")
set_target_properties(refrain_cuda_demo PROPERTIES OUTPUT_NAME refrain_cuda
                                                   LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/demo)
foreach(target refrain_cuda refrain_cuda_other refrain_cuda_demo)
  target_include_directories(${target} PRIVATE include src ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${flags}>")
  set_target_properties(${target} PROPERTIES CUDA_RUNTIME_LIBRARY Static)
endforeach()
foreach(target refrain_cuda refrain_cuda_demo)
  set_target_properties(${target} PROPERTIES LINKER_LANGUAGE C)
  target_link_directories(${target} PRIVATE ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES})
  target_link_libraries(${target} PRIVATE ${CMAKE_CUDA_IMPLICIT_LINK_LIBRARIES} cudart_static rt Threads::Threads
                                          ${CMAKE_DL_LIBS})
  # Report missing symbols here and not when the module is loaded; weak references to absent kernels are allowed.
  target_link_options(${target} PRIVATE -Wl,--no-undefined)
endforeach()
add_dependencies(demo_gpu refrain_cuda_demo)
add_dependencies(product refrain_cuda)

# The programs of tests/gpu need a GPU: tools/gpu-check builds and runs them, `make` does not.
# `delayed` compiles Hopper's kernels under other names, with random delays before barriers and copies.
add_library(delayed OBJECT EXCLUDE_FROM_ALL src/ops/attention/attention_sm90.cu src/ops/attention/attention_bwd_sm90.cu
                           src/ops/grouped/grouped_sm90.cu)
target_include_directories(delayed PRIVATE include src)
target_compile_definitions(delayed PRIVATE RFI_DELAYS rfi_attention_sm90=rfi_attention_delayed
                                           rfi_attention_sm90_bwd=rfi_attention_delayed_bwd
                                           rfi_grouped_sm90=rfi_grouped_delayed
                                           rfi_grouped_sm90_lacks=rfi_grouped_delayed_lacks)
target_compile_options(delayed PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings;--expt-relaxed-constexpr>")
set_target_properties(delayed PROPERTIES CUDA_RUNTIME_LIBRARY Static)
add_executable(attention_check EXCLUDE_FROM_ALL tests/gpu/attention_check.cu src/ops/attention/attention_any.cu
                               src/ops/attention/attention_sm80.cu src/ops/attention/attention_sm90.cu
                               src/ops/attention/attention_bwd_sm90.cu $<TARGET_OBJECTS:delayed>)
target_include_directories(attention_check PRIVATE include src)
target_compile_options(attention_check PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings>")
set_target_properties(attention_check PROPERTIES CUDA_RUNTIME_LIBRARY Static)
add_executable(grouped_check EXCLUDE_FROM_ALL tests/gpu/grouped_check.cu src/ops/grouped/grouped_sm90.cu
                             src/ops/elementwise/swiglu_weighted.cu $<TARGET_OBJECTS:delayed>)
target_include_directories(grouped_check PRIVATE include src)
target_compile_options(grouped_check PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings>"
                                             "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>")
set_target_properties(grouped_check PROPERTIES CUDA_RUNTIME_LIBRARY Static)
add_executable(scaled_check EXCLUDE_FROM_ALL tests/gpu/scaled_check.cu src/ops/quant/scaled_sm90.cu)
target_include_directories(scaled_check PRIVATE include src)
target_compile_options(scaled_check PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings>"
                                            "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>")
target_link_libraries(scaled_check PRIVATE cublasLt)
target_link_directories(scaled_check PRIVATE ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES})
set_target_properties(scaled_check PROPERTIES CUDA_RUNTIME_LIBRARY Static)
file(GLOB sources CONFIGURE_DEPENDS src/ops/moe/*.cu src/ops/grouped/grouped_rows.cu src/ops/elementwise/activation.cu
     src/ops/elementwise/swiglu_weighted.cu)
add_executable(moe_check EXCLUDE_FROM_ALL tests/gpu/moe_check.cu ${sources})
target_include_directories(moe_check PRIVATE include src)
target_compile_options(moe_check PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings;--expt-relaxed-constexpr>")
set_target_properties(moe_check PROPERTIES CUDA_RUNTIME_LIBRARY Static)
foreach(check trap_check memory_check stream_check custom_op_check wgrad_check)
  add_executable(${check} EXCLUDE_FROM_ALL tests/gpu/${check}.cu)
  target_link_libraries(${check} PRIVATE refrain ${CMAKE_DL_LIBS})
  target_compile_options(${check} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings>")
  set_target_properties(${check} PROPERTIES CUDA_RUNTIME_LIBRARY Static)
endforeach()

add_executable(parity_run EXCLUDE_FROM_ALL bench/peers/parity_run.c)
target_link_libraries(parity_run PRIVATE refrain)
add_executable(contexts_check EXCLUDE_FROM_ALL tests/gpu/contexts_check.c)
target_link_libraries(contexts_check PRIVATE refrain Threads::Threads)
add_executable(lora_check EXCLUDE_FROM_ALL tests/gpu/lora_check.c)
target_link_libraries(lora_check PRIVATE refrain m)
add_executable(quantize_check EXCLUDE_FROM_ALL tests/gpu/quantize_check.c)
target_link_libraries(quantize_check PRIVATE refrain)
add_executable(rounding_check EXCLUDE_FROM_ALL tests/gpu/rounding_check.c)
target_link_libraries(rounding_check PRIVATE refrain)
add_executable(tune_check EXCLUDE_FROM_ALL tests/gpu/tune_check.c)
target_link_libraries(tune_check PRIVATE refrain)
add_executable(shard_check EXCLUDE_FROM_ALL tests/gpu/shard_check.c)
target_link_libraries(shard_check PRIVATE refrain Threads::Threads)
add_executable(dist_check EXCLUDE_FROM_ALL tests/gpu/dist_check.c)
target_include_directories(dist_check PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_link_directories(dist_check PRIVATE ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES})
target_link_libraries(dist_check PRIVATE refrain cudart_static rt Threads::Threads ${CMAKE_DL_LIBS})

# bench/timeline.c: a library that records when kernels and copies run.
find_path(RFR_CUPTI_INCLUDE cupti.h HINTS ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}
  PATH_SUFFIXES ../extras/CUPTI/include)
find_library(RFR_CUPTI_LIBRARY cupti HINTS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES}
  ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}/../lib)
mark_as_advanced(RFR_CUPTI_INCLUDE RFR_CUPTI_LIBRARY)
if(RFR_CUPTI_INCLUDE AND RFR_CUPTI_LIBRARY)
  add_library(timeline MODULE EXCLUDE_FROM_ALL bench/timeline.c)
  target_include_directories(timeline PRIVATE ${RFR_CUPTI_INCLUDE} ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_link_libraries(timeline PRIVATE ${RFR_CUPTI_LIBRARY} Threads::Threads)
  set_target_properties(timeline PROPERTIES C_VISIBILITY_PRESET default) # CUDA looks up InitializeInjection
endif()
