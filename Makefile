# make demo, make test: the two commands of the README. A change of pyproject.toml or of the native
# sources installs again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := CMakeLists.txt $(wildcard lintra/native/*.cpp lintra/native/*.h)
CROSS := aarch64-linux-gnu-g++

demo: install
	$(BIN)/lintra demo --dir demo

test: install
	$(BIN)/python -m pytest -m "not slow"

test-all: install
	$(BIN)/python -m pytest

# The Triton kernels where there is a GPU, all of their tests; without one, under the interpreter.
test-gpu: install
	$(BIN)/python -m pytest tests/ops/test_linear_attention_triton.py tests/ops/test_dispatch.py tests/test_replay.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: install
	$(BIN)/lintra bench attention
	$(BIN)/lintra bench mechanisms

# The documentation as a site, in build/site; any warning is an error.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# The attention matrices in docs/pictures/, from the definitions in the tests.
pictures: install
	$(BIN)/python docs/draw.py

# The NEON kernels, compiled where there is no such processor.
cross:
	mkdir -p build/cross
	$(CROSS) -std=c++17 -O3 -fno-math-errno -fno-trapping-math -ffp-contract=fast -fno-exceptions -fno-rtti \
		-fvisibility=hidden -Wall -Wextra -Werror -fPIC -shared -DLINTRA_ISA=neon \
		-o build/cross/liblintra.so lintra/native/kernel.cpp lintra/native/decode.cpp \
		lintra/native/library.cpp

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

.PHONY: demo test test-all test-gpu lint bench docs pictures cross install
