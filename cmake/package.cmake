# SPDX-License-Identifier: Apache-2.0
# The .deb files, one for each component of cmake/install.cmake: `cpack -G DEB`, which tools/package calls. The modules
# are in the library's folder without a version in their names, so two versions of the library exclude each other.
set(RFR_MAINTAINER "Refrain authors <refrain@invalid>" CACHE STRING "Maintainer of the .deb files")
set(CPACK_COMPONENTS_ALL library dev)
foreach(part program/refrain_cli mpi/refrain_mpi cuda/refrain_cuda)
  string(REGEX MATCH "^[a-z]+" component ${part})
  string(REGEX MATCH "[a-z_]+$" target ${part})
  if(TARGET ${target})
    list(APPEND CPACK_COMPONENTS_ALL ${component})
  endif()
endforeach()

set(library librefrain${RFR_ABI})
set(same "${library} (= ${PROJECT_VERSION})")
set(CPACK_DEBIAN_LIBRARY_PACKAGE_NAME ${library})
set(CPACK_DEBIAN_LIBRARY_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_PROVIDES librefrain)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_CONFLICTS librefrain)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_SUGGESTS "${library}-cuda, ${library}-mpi")
set(CPACK_COMPONENT_LIBRARY_DESCRIPTION "Trains transformers: shared library
Records a training step once, computes the address of every buffer, and
runs the step without allocation, on CPUs and GPUs.")
set(CPACK_DEBIAN_DEV_PACKAGE_NAME librefrain-dev)
set(CPACK_DEBIAN_DEV_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS "${same}")
set(CPACK_DEBIAN_DEV_PACKAGE_SUGGESTS refrain)
set(CPACK_COMPONENT_DEV_DESCRIPTION "Trains transformers: headers for C and C++
Headers, the CMake package and the pkg-config file of librefrain.")
set(CPACK_DEBIAN_PROGRAM_PACKAGE_NAME refrain)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_DEPENDS "${same}")
set(CPACK_COMPONENT_PROGRAM_DESCRIPTION "Trains and fine-tunes transformers
The program, its man pages, the completion of shells, documentation and
examples.")
set(CPACK_DEBIAN_MPI_PACKAGE_NAME ${library}-mpi)
set(CPACK_DEBIAN_MPI_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_MPI_PACKAGE_DEPENDS "${same}")
set(CPACK_DEBIAN_MPI_PACKAGE_RECOMMENDS openmpi-bin) # mpirun, for train --ranks
set(CPACK_COMPONENT_MPI_DESCRIPTION "Trains transformers: module for MPI
Lets ranks on CPUs be processes of an MPI job.")
set(CPACK_DEBIAN_CUDA_PACKAGE_NAME ${library}-cuda)
set(CPACK_DEBIAN_CUDA_PACKAGE_SECTION contrib/libs)
set(CPACK_DEBIAN_CUDA_PACKAGE_DEPENDS "${same}")
set(CPACK_COMPONENT_CUDA_DESCRIPTION "Trains transformers: module for NVIDIA GPUs
Needs NVIDIA's driver and cuBLASLt of CUDA 13, which it loads when a GPU is
used.")

# Each package has its licence; no other installation has these copies.
set(folder_library ${library})
set(folder_dev librefrain-dev)
set(folder_program refrain)
set(folder_mpi ${library}-mpi)
set(folder_cuda ${library}-cuda)
foreach(component ${CPACK_COMPONENTS_ALL})
  install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/${folder_${component}} COMPONENT ${component}
          RENAME copyright EXCLUDE_FROM_ALL)
endforeach()

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME refrain)
set(CPACK_PACKAGE_VENDOR Refrain)
set(CPACK_PACKAGE_CONTACT "${RFR_MAINTAINER}")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_THREADS 0)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${PROJECT_BINARY_DIR})
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE
                                                WORLD_READ WORLD_EXECUTE)
include(CPack)
