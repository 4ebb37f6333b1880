"""The kernels pass a GPU's compiler, which the interpreter does not test. That needs no GPU."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

SCRIPT = """
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lintra.ops.linear_attention import triton as linear_attention_triton
from lintra.ops.linear_attention import triton_recurrence

KINDS = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.int64: "*i64", torch.uint8: "*u8",
}
LEAST = 99 * 1024  # bytes of shared memory to a program on the smallest GPUs that are served
launched = []
for module in (linear_attention_triton, triton_recurrence):
    module.launch = lambda kernel, grid, **arguments: launched.append((kernel, arguments))
    module.target_programs = lambda x: 528


def compiled(kernel, arguments, capability):
    plain = isinstance(kernel, triton.JITFunction)
    function = kernel if plain else kernel.fn
    signature, constants = {}, {}
    for i, parameter in enumerate(function.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = KINDS[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    shared = []
    for config in [triton.Config({})] if plain else kernel.configs:
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert made.asm["cubin"]
        shared.append(made.metadata.shared)
    # Of those that are tried a GPU drops what it has no room for.
    assert min(shared) <= LEAST, (function.__name__, shared)
    return function.__name__


def go(
    capability, dtype, *, b=2, t=300, h=8, g=4, f=64, e=64, decay=False, mask=False, packed=False,
    kept=torch.float32, tf32=False, used=True, **options
):
    launched.clear()
    torch.backends.cuda.matmul.allow_tf32 = tf32
    options = {"causal": True, "normalize": True, "eps": 1e-6, "feature_map": "elu+1"} | options
    q, k, v = (torch.zeros(b, t, n, d, dtype=dtype) for n, d in ((h, f), (g, f), (g, e)))
    mask = torch.ones(b, t, dtype=torch.bool) if mask else None
    cu_seqlens = torch.tensor([0, 5, t]) if packed else None
    kv, z = torch.zeros(2, g, f, e, dtype=kept), torch.zeros(2, g, f)
    logarithm = torch.zeros(b, t, g) if decay else None
    others = (logarithm, logarithm, kv, z, mask, cu_seqlens, *options.values())
    y, kv, z, denominator, lost = linear_attention_triton.forward(q, k, v, *others, True)
    after = (kv, z) if used else (None, None)
    linear_attention_triton.backward(y, *after, q, k, v, y, denominator, lost, *others)
    return [(*each, capability) for each in launched]


def recur(
    capability, dtype, decay=None, *, beta=False, b=2, t=300, h=8, g=4, f=128, e=128, mask=False,
    packed=False, tf32=False
):
    launched.clear()
    torch.backends.cuda.matmul.allow_tf32 = tf32
    q, k, v = (torch.zeros(b, t, n, d, dtype=dtype) for n, d in ((h, f), (g, f), (g, e)))
    rate = {None: None, "head": torch.zeros(b, t, g), "feature": torch.zeros(b, t, g, f)}[decay]
    beta = torch.zeros(b, t, g) if beta else None
    mask = torch.ones(b, t, dtype=torch.bool) if mask else None
    cu_seqlens = torch.tensor([0, 5, t]) if packed else None
    others = mask, cu_seqlens, 0.5
    state = torch.zeros(2, g, f, e)
    y, after, saved = triton_recurrence.forward(q, k, v, rate, beta, state, *others, t > 1)
    if t > 1:
        triton_recurrence.backward(y, after, q, k, v, rate, beta, saved, state, *others)
    return [(*each, capability) for each in launched]


def check_choices(launches):
    seen = {}
    for kernel, arguments, _ in launches:
        if isinstance(kernel, triton.JITFunction):
            continue
        name, parameters = kernel.fn.__name__, kernel.fn.params
        # What the tuner makes of a call, and what decides the code.
        dtypes = [str(x.dtype) for x in arguments.values() if isinstance(x, torch.Tensor)]
        kind = name, *(arguments[x] for x in kernel.keys), *dtypes
        code = {p.name: arguments[p.name] for p in parameters if p.is_constexpr or arguments[p.name] is None}
        assert seen.setdefault(kind, code) == code, name


what, *calls = sys.argv[1:]
launches = [launch for call in calls for launch in eval(call)]
if what == "compile":
    print(*{compiled(*launch) for launch in launches})
else:
    check_choices(launches)
"""
FORWARD = {"sum_spans", "scan_spans", "outputs"}
BOTH = FORWARD | {"denominator_gradients", "query_gradients", "key_gradients", "value_gradients"}
DECAYED = BOTH | {"logarithm_gradients"}
RECURRENT = {"chunk_scores", "chunk_states", "outputs", "chunk_gradients", "state_gradients"}
RECURRENT |= {"score_gradients", "late_gradients", "reader_gradients"}
GATED = RECURRENT | {"chunk_sides"}
DELTA = GATED | {"value_gradients"}
FEW = [
    (["go(90, torch.bfloat16, t=1, kept=torch.bfloat16)"], BOTH - {"outputs"} | {"step"}),
    (["recur(80, torch.float32, 'head', beta=True, b=1, f=64, e=64, t=1)"], {"step"}),
]
MORE = [
    ([f"go({capability}, torch.{dtype}, {rest})"], DECAYED if "decay" in rest else BOTH)
    for capability in (80, 90, 100)
    for dtype in ("float32", "bfloat16", "float16")
    for rest in ("decay=True, mask=True", "causal=False, normalize=False", "f=576, e=33, feature_map='relu'")
    if capability == 80 or dtype == "bfloat16"
]
MORE += [
    (["go(90, torch.bfloat16)", "go(90, torch.bfloat16, t=1)"], BOTH | {"step"}),
    (["go(80, torch.float32, b=1, decay=True, packed=True)"], DECAYED),
    (["recur(90, torch.bfloat16, 'head', beta=True, f=64, e=20)"], DELTA),
]
MORE += [
    ([f"recur({capability}, torch.{dtype}, {rest})"], DELTA if "beta" in rest else GATED)
    for capability in (80, 90, 100)
    for dtype in ("float32", "bfloat16", "float16")
    for rest in ("'feature', beta=True, mask=True", "'head', beta=True, f=256, e=33", "'feature', g=8")
    if capability == 80 or dtype == "bfloat16"
]
MORE.append((["recur(90, torch.bfloat16, beta=True, b=1, packed=True)"], DELTA))
MORE += [  # float32 where PyTorch may use TF32
    ([f"{call}({capability}, torch.float32, {rest}, tf32=True)"], kernels)
    for capability in (80, 90)
    for call, rest, kernels in (
        ("go", "decay=True, mask=True", DECAYED),
        ("go", "f=576, e=33, feature_map='relu'", BOTH),
        ("recur", "'feature', beta=True, mask=True", DELTA),
        ("recur", "'head', beta=True, f=256, e=33", DELTA),
    )
]


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def run_python(script, *arguments, **variables):
    """Run a script in which Triton compiles instead of interpreting."""
    environment = os.environ | variables
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@needs_triton
@pytest.mark.parametrize(
    ("calls", "kernels"), [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_kernels_compile(calls, kernels, tmp_path):
    """With each setting that is tried on a GPU, for every kernel launched in forward and backward."""
    done = run_python(SCRIPT, "compile", *calls, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(done.stdout.split()) == kernels


@needs_triton
def test_a_choice_of_launch_parameters_serves_one_code():
    """Without gradients of the state, tensors of the same dtypes are given forwards and backwards in time;
    and programs go through a sequence, or not, by the number of samples alone."""
    calls = [
        "go(90, torch.bfloat16, used=False)",
        "go(90, torch.bfloat16, f=576, used=False)",
        "go(90, torch.bfloat16, f=576, b=200, used=False)",
        "go(90, torch.bfloat16, normalize=False)",
        "recur(90, torch.bfloat16, 'feature', beta=True)",
        "recur(90, torch.bfloat16, 'head')",
    ]
    done = run_python(SCRIPT, "choices", *calls)
    assert done.returncode == 0, done.stderr[-3000:]


SETTINGS = """
from lintra.ops.linear_attention.triton_kernels import outputs
from lintra.ops.linear_attention.triton_recurrence_gradients import reader_gradients, state_gradients
for kernel in (outputs, state_gradients, reader_gradients):
    print(*(f"{config.num_warps},{config.num_stages}" for config in kernel.configs))
"""


@needs_triton
def test_launch_parameters_can_be_fixed():
    """Those of a kernel that is not tuned stay."""
    free = run_python(SETTINGS, LINTRA_TRITON_CONFIG="")
    assert free.stdout.splitlines() == ["4,2 8,1", "4,2 8,2 8,1", "8,1"]
    fixed = run_python(SETTINGS, LINTRA_TRITON_CONFIG="4,3")
    assert fixed.stdout.splitlines() == ["4,3", "4,3", "8,1"]
    for wrong in ("8", "6,1", "8,0"):
        error = run_python(SETTINGS, LINTRA_TRITON_CONFIG=wrong).stderr
        assert f"LINTRA_TRITON_CONFIG must be warps and stages, such as 8,1; got {wrong!r}" in error
