#!/usr/bin/env bash
# What only a GPU can show: the tests of the kernels on it, then the tables of `python -m benchmarks gpu`, into
# benchmarks/results/. Needs CUDA, a Python with PyTorch and this tree, nothing installed; takes at most 13 minutes
# on one GPU, and 9 for the recurrences. Ranks that speak by NCCL need two GPUs; on one their tests are left out, and it says so.
#
#   PYTHON   the interpreter with PyTorch (default python3)
#   OUT      the folder of the results (default benchmarks/results)
#
# Packages that are missing are installed into build/gpu-packages; without a network, fill that folder
# beforehand: pip install --target build/gpu-packages --no-deps PACKAGE...
# flash-linear-attention is never installed here; where it is (fla-core, einops), ours is timed beside it.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results}
PACKAGES=build/gpu-packages
export PYTHONPATH="$PWD:$PWD/$PACKAGES${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
unset TRITON_INTERPRET

fail() {
    echo "benchmarks/gpu.sh: $1" >&2
    exit 1
}

"$PYTHON" -c 'import torch' 2>/dev/null || fail "$PYTHON has no PyTorch (set PYTHON to one that has)"
"$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    fail "no GPU: torch.cuda.is_available() is false for $PYTHON. Nothing was measured."

missing=$("$PYTHON" - <<'END'
from importlib.util import find_spec

needed = {"numpy": "numpy", "safetensors": "safetensors", "jaxtyping": "jaxtyping wadler-lindig", "triton": "triton",
          "typing_extensions": "typing_extensions", "tyro": "tyro docstring-parser typeguard",
          "rich": "rich markdown-it-py mdurl pygments", "pytest": "pytest iniconfig pluggy packaging pygments",
          "hypothesis": "hypothesis sortedcontainers"}
print(*(packages for module, packages in needed.items() if find_spec(module) is None))
END
)
if [ -n "$missing" ]; then
    # Not their dependencies: they must not bring another PyTorch.
    # shellcheck disable=SC2086
    "$PYTHON" -m pip install --quiet --no-deps --target "$PACKAGES" $missing ||
        fail "these packages are missing and could not be installed: $missing"
fi

mkdir -p "$OUT"
status=0
# Most of the time of these tests is compiling, one kernel at a time: in several processes where pytest can.
workers=$("$PYTHON" -c 'import os; from importlib.util import find_spec as f; print(f"-n {min(8, os.cpu_count())}" if f("xdist") else "")')
echo "== tests of the kernels on the GPU"
# shellcheck disable=SC2086
timeout --signal=INT --kill-after=20 460 "$PYTHON" -m pytest -v -rfE --tb=short -p no:cacheprovider -p no:benchmark $workers -m "not slow" \
    tests/ops/test_linear_attention_triton.py tests/ops/test_recurrence_triton.py tests/ops/test_dispatch.py \
    "tests/generation/test_cuda_graph.py::test_a_graph_gives_the_tokens_of_the_steps" 2>&1 | tee "$OUT/gpu-tests.txt" || status=$?
echo "== ranks on GPUs of their own, by NCCL"
gpus=$("$PYTHON" -c 'import torch, torch.distributed as d; print(torch.cuda.device_count() if d.is_nccl_available() else 0)')
if [ "$gpus" -ge 2 ]; then
    LINTRA_TEST_BACKEND=nccl timeout 460 "$PYTHON" -m pytest -q -p no:cacheprovider -m "not slow" \
        tests/distributed/test_context.py || status=$?
    if "$PYTHON" -c 'import lightning' 2>/dev/null; then
        timeout 300 "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 -m lintra.cli train digits \
            --strategy ddp --precision 32 --steps 50 --dir "$(mktemp -d)/run" || status=$?
    else
        echo "DDP was not run: $PYTHON has no lightning (pip install 'lintra[train]')"
    fi
else
    echo "not run: this needs two GPUs and a PyTorch with NCCL, and found $gpus"
fi
echo "== measurements"
name=$("$PYTHON" -c 'import re, torch; print(re.sub("[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-"))')
timeout 280 "$PYTHON" -m benchmarks gpu --out "$OUT/gpu-$name.json" || fail "python -m benchmarks gpu did not finish"
timeout 500 "$PYTHON" -m benchmarks gpu_recurrence --out "$OUT/gpu-recurrence-$name.json" ||
    fail "python -m benchmarks gpu_recurrence did not finish"
[ "$status" -eq 0 ] || fail "the measurements are done, but tests failed (above)"
