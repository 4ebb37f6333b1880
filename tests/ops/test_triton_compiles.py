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
    kept=torch.float32, tf32=False, **options
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
    linear_attention_triton.backward(y, kv, z, q, k, v, y, denominator, lost, *others)
    return {compiled(kernel, arguments, capability) for kernel, arguments in launched}


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
    return {compiled(kernel, arguments, capability) for kernel, arguments in launched}


print(*(name for call in sys.argv[1:] for name in eval(call)))
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


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    ("calls", "kernels"), [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_kernels_compile(calls, kernels, tmp_path):
    """With each setting that is tried on a GPU, for every kernel launched in forward and backward."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, *calls],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(done.stdout.split()) == kernels
