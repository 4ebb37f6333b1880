# make demo, make test: the two commands of the README. A change to pyproject.toml or to the native
# sources triggers a new installation.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := CMakeLists.txt $(wildcard lintra/native/*.cpp lintra/native/*.h lintra/runtime/*.c lintra/runtime/*.h)
CROSS := aarch64-linux-gnu-g++

demo: install
	$(BIN)/lintra demo --dir demo

# One single-threaded process per core; timings mean nothing here.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -rs

test: install
	$(PYTEST) -m "not slow"

test-all: install
	$(PYTEST)

# Models of transformers, with the newest release that pyproject.toml allows; all other tests use the pinned one.
TRANSFORMERS := 5.24.0
test-transformers: install
	$(BIN)/pip install --quiet --no-deps --upgrade --target build/transformers transformers==$(TRANSFORMERS)
	PYTHONPATH=build/transformers $(PYTEST) -m "not slow" tests/hf tests/compat

# All tests of the Triton kernels: on a GPU if there is one, otherwise in the interpreter.
test-gpu: install
	$(BIN)/python -m pytest tests/ops/test_linear_attention_triton.py tests/ops/test_recurrence_triton.py \
		tests/ops/test_dispatch.py tests/generation/test_cuda_graph.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: install
	$(BIN)/lintra bench attention
	$(BIN)/lintra bench mechanisms

# The documentation as a site, in build/site; any warning is an error.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# The attention matrices in docs/pictures/, drawn from the definitions in the tests, and the charts of measured figures.
pictures: install
	$(BIN)/python docs/draw.py
	$(BIN)/python docs/charts.py
	$(BIN)/python docs/photograph.py

# The NEON kernels, cross-compiled on other processors.
cross:
	mkdir -p build/cross
	$(CROSS:g++=gcc) $(RUNTIME_FLAGS) -fno-trapping-math -Werror -fPIC -shared \
		-o build/cross/liblintra_runtime_neon.so $(RUNTIME).c $(AUDIO).c
	$(CROSS) -std=c++17 -O3 -fno-math-errno -fno-trapping-math -ffp-contract=fast -fno-exceptions -fno-rtti \
		-fvisibility=hidden -Wall -Wextra -Werror -fPIC -shared -DLINTRA_ISA=neon \
		-o build/cross/liblintra.so lintra/native/*.cpp

# The runtime as standalone programs: examples/draw.c and examples/hear.c say how to use them.
RUNTIME := lintra/runtime/lintra_runtime
AUDIO := lintra/runtime/lintra_audio
RUNTIME_FLAGS := -std=c11 -O3 -ffp-contract=fast -fno-math-errno -Wall -Wextra -Ilintra/runtime

draw: build/runtime/draw

build/runtime/draw: examples/draw.c $(RUNTIME).c $(RUNTIME).h $(AUDIO).h
	mkdir -p build/runtime
	$(CC) $(RUNTIME_FLAGS) -march=native -o $@ examples/draw.c $(RUNTIME).c

hear: build/runtime/hear

build/runtime/hear: examples/hear.c $(RUNTIME).c $(AUDIO).c $(RUNTIME).h $(AUDIO).h
	mkdir -p build/runtime
	$(CC) $(RUNTIME_FLAGS) -march=native -o $@ examples/hear.c $(RUNTIME).c $(AUDIO).c

# The runtime in WebAssembly, with SIMD for every browser that has it and with relaxed SIMD; both are committed.
CLANG ?= clang-19
WASM_FLAGS := --target=wasm32 -fno-unroll-loops -nostdlib -fno-builtin -mbulk-memory -msimd128 -fvisibility=default \
	-Wl,--no-entry,--export-dynamic,--export=__heap_base,--strip-all
WASM ?= lintra/runtime

wasm: $(WASM)/lintra_runtime.wasm $(WASM)/lintra_runtime_relaxed.wasm

$(WASM)/lintra_runtime.wasm: $(RUNTIME).c $(AUDIO).c $(RUNTIME).h $(AUDIO).h
	$(CLANG) $(RUNTIME_FLAGS) $(WASM_FLAGS) -o $@ $(RUNTIME).c $(AUDIO).c

$(WASM)/lintra_runtime_relaxed.wasm: $(RUNTIME).c $(AUDIO).c $(RUNTIME).h $(AUDIO).h
	$(CLANG) $(RUNTIME_FLAGS) $(WASM_FLAGS) -mrelaxed-simd -o $@ $(RUNTIME).c $(AUDIO).c

# The runtime's reader of files and states under libFuzzer, for FUZZ seconds.
FUZZ ?= 600
fuzz: install
	$(BIN)/python -m tests.runtime.corpus build/fuzz/corpus
	$(CLANG) -std=c11 -g -O2 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -Wall -Wextra \
		-o build/fuzz/fuzz tests/runtime/fuzz.c $(RUNTIME).c $(AUDIO).c
	build/fuzz/fuzz -max_total_time=$(FUZZ) -max_len=200000 -artifact_prefix=build/fuzz/ build/fuzz/corpus

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
		$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

.PHONY: demo test test-all test-transformers test-gpu lint bench docs pictures cross draw hear wasm fuzz install
