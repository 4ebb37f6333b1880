#!/usr/bin/env bash
# What only a GPU can show, into benchmarks/results/: all of it, or the parts that are named, each in at most 8
# minutes.
#
#   benchmarks/gpu.sh [tests] [ranks] [measure] [recurrence]
#
#   tests        the tests of the kernels: the quick ones, then slow ones that have chunks of the actual length
#   ranks        ranks that speak by NCCL; this needs two GPUs, and says so on one
#   measure      the tables of `python -m benchmarks gpu`
#   recurrence   those of `python -m benchmarks gpu_recurrence`
#
# Needs CUDA, a Python with PyTorch and this tree, nothing installed. Tests and recurrences that run out of time keep
# what they have; run again, they find their kernels compiled.
#
#   PYTHON                 the interpreter with PyTorch (default python3)
#   OUT                    the folder of the results (default benchmarks/results)
#   TRITON_CACHE_DIR       compiled kernels and the choice of their warps and stages, which the next call reads
#                          (default build/triton-cache); an empty folder has all compiled and chosen anew
#   LINTRA_TRITON_CONFIG   these warps and stages for all kernels, such as 8,1, instead of the fastest
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
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$PWD/build/triton-cache}"
unset TRITON_INTERPRET

fail() {
    echo "benchmarks/gpu.sh: $1" >&2
    exit 1
}

[ $# -gt 0 ] || set -- tests ranks measure recurrence
for part in "$@"; do
    case $part in
        tests | ranks | measure | recurrence) ;;
        *) fail "a part must be tests, ranks, measure or recurrence; got '$part'" ;;
    esac
done

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
failed=()
# Warnings of other versions of PyTorch and Triton than the tested ones are no failures; the second v makes up for the
# q in pyproject.toml.
pytest=("$PYTHON" -m pytest -vv -rfE --tb=short -W default -p no:cacheprovider -p no:benchmark)

# check NAME SECONDS ARGUMENT...: tests, into gpu-tests-NAME.txt and, also if their time is up, gpu-tests-NAME.xml.
check() {
    local name=$1 seconds=$2
    shift 2
    # A failed test shows which warps and stages were chosen in it.
    TRITON_PRINT_AUTOTUNING=1 timeout --signal=INT --kill-after=10 "$seconds" "${pytest[@]}" \
        --junitxml="$OUT/gpu-tests-$name.xml" "$@" 2>&1 | tee "$OUT/gpu-tests-$name.txt" || failed+=("tests ($name)")
}

tests() {
    # Most of the time of these tests is compiling, one kernel at a time: in several processes where pytest can.
    local began=$SECONDS linear=tests/ops/test_linear_attention_triton.py recurrence=tests/ops/test_recurrence_triton.py
    local workers
    workers=$("$PYTHON" -c 'import os; from importlib.util import find_spec as f; print(f"-n{min(8, os.cpu_count())}" if f("xdist") else "")')
    echo "== quick tests of the kernels on the GPU"
    check quick 300 ${workers:+"$workers"} -m "not slow" $linear $recurrence tests/ops/test_dispatch.py \
        tests/generation/test_cuda_graph.py::test_a_graph_gives_the_tokens_of_the_steps
    echo "== slow tests of the kernels on the GPU"
    check slow $((began + 440 - SECONDS)) ${workers:+"$workers"} \
        $linear::test_gradients_of_decays_are_as_exact_far_from_the_end $linear::test_wide $linear::test_packed_lengths \
        $recurrence::test_lengths_in_full_chunks $recurrence::test_wide \
        $recurrence::test_equal_keys_for_a_long_time_stay_bounded
}

ranks() {
    local gpus
    echo "== ranks on GPUs of their own, by NCCL"
    gpus=$("$PYTHON" -c 'import torch, torch.distributed as d; print(torch.cuda.device_count() if d.is_nccl_available() else 0)')
    if [ "$gpus" -lt 2 ]; then
        echo "not run: this needs two GPUs and a PyTorch with NCCL, and found $gpus"
        return
    fi
    LINTRA_TEST_BACKEND=nccl timeout 260 "${pytest[@]}" -m "not slow" tests/distributed/test_context.py || failed+=("ranks")
    if "$PYTHON" -c 'import lightning' 2>/dev/null; then
        timeout 180 "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 -m lintra.cli train digits \
            --strategy ddp --precision 32 --steps 50 --dir "$(mktemp -d)/run" || failed+=("ranks (DDP)")
    else
        echo "DDP was not run: $PYTHON has no lightning (pip install 'lintra[train]')"
    fi
}

# bench NAME FILE: a benchmark, into FILE-GPU.json.
bench() {
    local name
    name=$("$PYTHON" -c 'import re, torch; print(re.sub("[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-"))')
    timeout 450 "$PYTHON" -m benchmarks "$1" --out "$OUT/$2-$name.json" || failed+=("python -m benchmarks $1")
}

measure() {
    echo "== measurements"
    bench gpu gpu
}

recurrence() {
    echo "== measurements of the recurrences"
    bench gpu_recurrence gpu-recurrence
}

for part in "$@"; do
    "$part"
done
[ ${#failed[@]} -eq 0 ] || fail "failed, or out of time: $(printf '%s; ' "${failed[@]}" | sed 's/; $//') (above)"
