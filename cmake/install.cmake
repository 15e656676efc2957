# SPDX-License-Identifier: Apache-2.0
# Files of `cmake --install`, and the component of each, which is a package of cmake/package.cmake. Modules go next to
# the library, in the build tree and when installed, because the library looks for them in its own folder. No installed
# file contains an absolute path: program, pkg-config file and CMake package find the others relative to themselves, so
# an installed tree can be moved.
include(CMakePackageConfigHelpers)

set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME program)
install(TARGETS refrain EXPORT refrain LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library
        NAMELINK_COMPONENT dev)
install(DIRECTORY include/refrain DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT dev FILES_MATCHING PATTERN "*.h")
set(component_refrain_onednn library)
set(component_refrain_mpi mpi)
set(component_refrain_cuda cuda)
foreach(module refrain_onednn refrain_mpi refrain_cuda)
  if(TARGET ${module})
    install(TARGETS ${module} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT ${component_${module}})
    # Their libraries are those of the system; a path of the build machine does not belong into them.
    set_target_properties(${module} PROPERTIES INSTALL_RPATH "" BUILD_WITH_INSTALL_RPATH ON)
  endif()
endforeach()
install(FILES LICENSE THIRD_PARTY.md README.md CHANGELOG.md SECURITY.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY docs DESTINATION ${CMAKE_INSTALL_DOCDIR} FILES_MATCHING PATTERN "*.md" PATTERN "*.svg"
        PATTERN "*.png")
install(DIRECTORY examples DESTINATION ${CMAKE_INSTALL_DOCDIR})
if(TARGET refrain_cli)
  install(TARGETS refrain_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(DIRECTORY ${PROJECT_BINARY_DIR}/made/man/ DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
  install(FILES ${PROJECT_BINARY_DIR}/made/completion/refrain
          DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
  install(FILES ${PROJECT_BINARY_DIR}/made/completion/_refrain DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
  file(RELATIVE_PATH to_lib /${CMAKE_INSTALL_BINDIR} /${CMAKE_INSTALL_LIBDIR})
  # The same in the build tree, where one folder has library and program. Otherwise CMake pads the path of the build
  # with an empty entry, which the loader takes for the working folder.
  set_target_properties(refrain_cli PROPERTIES INSTALL_RPATH "$ORIGIN;$ORIGIN/${to_lib}" BUILD_WITH_INSTALL_RPATH ON)
endif()

file(RELATIVE_PATH RFR_PC_UP /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" RFR_PC_UP ${RFR_PC_UP})
configure_file(cmake/refrain.pc.in refrain.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/refrain.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT dev)

set(package ${CMAKE_INSTALL_LIBDIR}/cmake/refrain)
install(EXPORT refrain NAMESPACE refrain:: FILE refrainConfig.cmake DESTINATION ${package} COMPONENT dev)
# Before 1.0 a minor version may break callers, as SemVer says.
if(PROJECT_VERSION_MAJOR EQUAL 0)
  set(compatible SameMinorVersion)
else()
  set(compatible SameMajorVersion)
endif()
write_basic_package_version_file(refrainConfigVersion.cmake COMPATIBILITY ${compatible})
install(FILES ${PROJECT_BINARY_DIR}/refrainConfigVersion.cmake DESTINATION ${package} COMPONENT dev)

if(RFR_BUNDLE)
  if(TARGET refrain_onednn)
    # RPATH, which holds for what oneDNN itself needs too; RUNPATH does not.
    target_link_options(refrain_onednn PRIVATE -Wl,--disable-new-dtags)
  endif()
  foreach(target refrain refrain_onednn)
    if(TARGET ${target})
      set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN" BUILD_WITH_INSTALL_RPATH ON)
    endif()
  endforeach()
  install(CODE "execute_process(COMMAND ${PROJECT_SOURCE_DIR}/tools/bundle
    \$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX} ${CMAKE_INSTALL_LIBDIR} COMMAND_ERROR_IS_FATAL ANY)" COMPONENT library)
endif()
