# SPDX-License-Identifier: Apache-2.0
# A thin front for the CMake presets. `demo`, `check`, `wheel` and `package` may install packages, through tools/deps.
PRESET := release
BUILD := build/$(PRESET)
PREFIX ?= /usr/local
JOBS ?= $(shell nproc)
GPU := $(wildcard /dev/nvidiactl /dev/dxg)
export CMAKE_GENERATOR ?= $(if $(shell command -v ninja),Ninja,Unix Makefiles)

.PHONY: all configure deps demo demo-finetune check check-faults check-kills check-mutants fuzz bench docs fmt install \
	wheel package
all: configure
	@cmake --build --preset $(PRESET) --target product -j $(JOBS)

configure:
	@mkdir -p build
	@cmake --preset $(PRESET) >build/configure.log 2>&1 || { cat build/configure.log; exit 1; }

deps:
	@tools/deps

# Before the first `make`, it builds only what this machine's demo needs, in a separate folder (cmake/targets.cmake).
demo: deps
	@$(MAKE) --no-print-directory configure
	@if [ -e $(BUILD)/$(if $(GPU),librefrain_cuda.so,refrain) ]; then \
		cmake --build --preset $(PRESET) --target $(if $(GPU),product,product_cpu) -j $(JOBS) && \
		tools/demo $(BUILD)/refrain; \
	else \
		cmake --build --preset $(PRESET) --target $(if $(GPU),demo_gpu,demo_cpu) -j $(JOBS) && \
		tools/demo $(BUILD)/demo/refrain; \
	fi

demo-finetune: deps
	@$(MAKE) --no-print-directory all
	@tools/demo-finetune $(BUILD)/refrain

check: deps
	@$(MAKE) --no-print-directory configure
	@cmake --build --preset $(PRESET) -j $(JOBS)
	@ctest --preset $(PRESET) -j $$(($(JOBS) + 1))

# The campaigns: what `check` tries in part, in full.
SECONDS ?= 60
TIMES ?= 200
check-faults: configure
	@cmake --build --preset $(PRESET) --target faults_test -j $(JOBS)
	@OMP_WAIT_POLICY=passive $(BUILD)/faults_test all

check-kills: all
	@tools/kill-campaign $(BUILD)/refrain $(TIMES)

check-mutants:
	@tools/check-mutants

fuzz:
	@tools/fuzz $(SECONDS)

bench: all
	@$(BUILD)/refrain bench

docs: configure
	@cmake --build --preset $(PRESET) --target make_docs -j $(JOBS)
	@$(BUILD)/make_docs docs

fmt:
	@command -v clang-format >/dev/null || { echo "clang-format is missing: apt-get install clang-format" >&2; exit 3; }
	@find $(wildcard include src cli tests examples bench) -name '*.[ch]' -o -name '*.cpp' -o -name '*.cu' |\
		xargs -r clang-format -i

install: all
	@cmake --install $(BUILD) --prefix $(PREFIX)

# The Python package in build/wheel. A separate build, with the libraries that others link in it.
wheel:
	@tools/deps wheel
	@mkdir -p build/wheel
	@cmake -S . -B build/wheel/build -DCMAKE_BUILD_TYPE=Release -DRFR_TESTS=OFF -DRFR_BUNDLE=ON \
		-DCMAKE_INSTALL_LIBDIR=lib >build/wheel/configure.log 2>&1 || { cat build/wheel/configure.log; exit 1; }
	@cmake --build build/wheel/build --target product -j $(JOBS)
	@rm -rf build/wheel/prefix
	@cmake --install build/wheel/build --prefix build/wheel/prefix >build/wheel/install.log
	@python3 python/make_wheel build/wheel/prefix build/wheel

# The .deb files and the archive that runs from any folder, in build/package.
package:
	@tools/deps package
	@tools/package build/package
