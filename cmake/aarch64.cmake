# SPDX-License-Identifier: Apache-2.0
# Toolchain for aarch64: -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64.cmake -DRFR_ROOT=FOLDER. The folder has the libraries of
# that architecture, as tools/arm-check lays them; programs run under qemu.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES RFR_ROOT)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(RFR_ROOT_LIBRARIES ${RFR_ROOT}/usr/lib/aarch64-linux-gnu)
set(ENV{PKG_CONFIG_LIBDIR} ${RFR_ROOT_LIBRARIES}/pkgconfig:${RFR_ROOT}/usr/share/pkgconfig)
set(ENV{PKG_CONFIG_SYSROOT_DIR} ${RFR_ROOT})
set(CMAKE_FIND_ROOT_PATH ${RFR_ROOT})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_EXE_LINKER_FLAGS_INIT -Wl,-rpath-link,${RFR_ROOT_LIBRARIES})
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64;-L;${RFR_ROOT})
