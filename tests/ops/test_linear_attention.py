"""The sum: every implementation equals the definition, in values and gradients; what it refuses."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from lintra import native
from lintra.ops import LinearState, checks, linear_attention

FAST = ["torch", *(["native"] if native.available() else [])]
# The second generates C++ and compiles it, which takes minutes for a sum in chunks.
COMPILED = [x if x == "native" else pytest.param(x, marks=pytest.mark.slow) for x in FAST]
COMPILERS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
needs_native = pytest.mark.skipif(not native.available(), reason=f"no native library: {native.why_not()}")
EXACT = {"rtol": 1e-9, "atol": 1e-10}  # float64; sums of about 1e2 terms in another order


def draw(b=2, t=9, s=None, h=4, g=2, f=5, e=3, *, decay=True, state=True, dtype=torch.float64, seed=0):
    """The arguments of one call, all differentiable."""
    generator = torch.Generator().manual_seed(seed)
    s = t if s is None else s

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    total = torch.float64 if dtype == torch.float64 else torch.float32
    arguments = {"q": normal(b, t, h, f), "k": normal(b, s, g, f), "v": normal(b, s, g, e)}
    arguments = {name: x.to(dtype) for name, x in arguments.items()}
    if decay:
        arguments["log_decay"] = -normal(b, s, g).abs().to(total)
    arguments["log_input"] = normal(b, s, g).to(total)
    if state:
        arguments["state"] = LinearState(normal(b, g, f, e).to(total), normal(b, g, f).abs().to(total))
    for x in flat(arguments):
        x.requires_grad_()
    return arguments


def flat(arguments):
    return [
        y
        for x in arguments.values()
        for y in (x if isinstance(x, tuple) else (x,))
        if isinstance(y, torch.Tensor) and y.is_floating_point()
    ]


def uneven(*outputs):
    """A sum with a different weight for every number."""
    weights = (torch.arange(1, x.numel() + 1, device=x.device).reshape(x.shape).sin() for x in outputs)
    return sum((x * weight).sum() for x, weight in zip(outputs, weights, strict=True))


def results(arguments, **options):
    """y, the final state, and the gradients of an uneven sum over all of them."""
    y, state = linear_attention(**arguments, **options)
    inputs = flat(arguments)
    gradients = torch.autograd.grad(uneven(y, *state), inputs, allow_unused=True)
    gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True)]
    return [y.detach(), *(x.detach() for x in state), *gradients]


@pytest.mark.parametrize("impl", FAST)
@settings(max_examples=60)
@given(data=st.data())
def test_every_implementation_is_the_definition(impl, data):
    """Over shapes, options, masks, decays and states, and with unusual strides."""
    choose = data.draw
    g = choose(st.integers(1, 3), label="g")
    causal = choose(st.booleans(), label="causal")
    t = choose(st.sampled_from([0, 1, 2, 15, 16, 17, 33, 70]), label="t")
    s = t if causal else choose(st.sampled_from([0, 1, 20, 33]), label="s")
    b = choose(st.integers(0, 3), label="b")
    arguments = draw(
        b=b,
        t=t,
        s=s,
        h=g * choose(st.integers(1, 3), label="h/g"),
        g=g,
        f=choose(st.sampled_from([1, 3, 8, 17]), label="f"),
        e=choose(st.sampled_from([1, 4, 9, 16]), label="e"),
        decay=causal and choose(st.booleans(), label="decay"),
        state=choose(st.booleans(), label="state"),
    )
    if choose(st.booleans(), label="strided"):
        for name in "qkv":
            x = arguments[name].detach()
            wide = torch.cat((x, x + 7), -1).movedim(1, 2).contiguous().movedim(2, 1)
            arguments[name] = wide[..., : x.shape[-1]].requires_grad_()
    options = {
        "causal": causal,
        "normalize": choose(st.booleans(), label="normalize"),
        "feature_map": choose(st.sampled_from(["elu+1", "relu", "exp"]), label="feature_map"),
        "eps": 1e-2,
    }
    if choose(st.booleans(), label="mask"):
        options["mask"] = torch.rand(b, s, generator=torch.Generator().manual_seed(t)) > 0.3
    chunk = choose(st.sampled_from([1, 7, 16, 64]), label="chunk")
    expected = results(arguments, impl="reference", **options)
    found = results(arguments, impl=impl, chunk=chunk, **options)
    for a, e in zip(found, expected, strict=True):
        assert_close(a, e, **EXACT)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("cut", [0, 1, 16, 50, 69, 70])
def test_split_anywhere_and_resumed(impl, cut):
    arguments = draw(t=70)
    whole = results(arguments, impl=impl)
    first, rest = ({n: x[:, p] for n, x in arguments.items() if n != "state"} for p in
                   (slice(0, cut), slice(cut, 70)))  # fmt: skip
    y1, middle = linear_attention(**first, state=arguments["state"], impl=impl)
    y2, final = linear_attention(**rest, state=middle, impl=impl)
    found = [torch.cat((y1, y2), 1), *final]
    for a, e in zip(found, whole, strict=False):
        assert_close(a, e, **EXACT)
    for a, e in zip(torch.autograd.grad(uneven(*found), flat(arguments)), whole[3:], strict=True):
        assert_close(a, e, **EXACT)


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("causal", [True, False])
def test_gradcheck(impl, causal):
    arguments = draw(t=5, h=2, g=1, f=2, e=2, decay=causal)
    names = list(arguments)
    mask = torch.tensor([[True, True, False, True, True], [False, True, True, True, False]])

    def call(*tensors):
        parts = list(tensors)
        named = {n: LinearState(parts.pop(0), parts.pop(0)) if n == "state" else parts.pop(0) for n in names}
        y, state = linear_attention(**named, mask=mask, causal=causal, feature_map="elu+1", impl=impl)
        return y, *state

    assert torch.autograd.gradcheck(call, tuple(flat(arguments)), atol=1e-6, eps=1e-6)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_second_derivatives(impl):
    q, k, v = (draw(t=5, h=1, g=1, f=2, e=2)[n] for n in "qkv")
    call = lambda *x: linear_attention(*x, impl=impl, feature_map="elu+1", chunk=2)[0]  # noqa: E731
    assert torch.autograd.gradgradcheck(call, (q, k, v))


@needs_native
def test_second_derivatives_of_native_are_refused():
    q, k, v = (draw()[n] for n in "qkv")
    y, _ = linear_attention(q, k, v, impl="native", feature_map="elu+1")
    (g,) = torch.autograd.grad(y.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="impl='torch' for second derivatives"):
        g.sum().backward()


@pytest.mark.parametrize("impl", ["auto", "torch"])
def test_transforms_of_torch_func(impl):
    """vmap, forward mode and reverse mode: "auto" selects an implementation that supports them."""
    each = [draw(seed=i) for i in range(3)]
    names = ("q", "k", "v", "log_decay")
    stacked = [torch.stack([x[n].detach() for x in each]) for n in names]

    def call(q, k, v, log_decay):
        return linear_attention(q, k, v, log_decay=log_decay, feature_map="elu+1", impl=impl)[0]

    mapped = torch.vmap(call)(*stacked)
    for i in range(3):
        assert_close(mapped[i], call(*(x[i] for x in stacked)), **EXACT)
    one = tuple(x[0] for x in stacked)
    direction = tuple(torch.full_like(x, 0.1) for x in one)
    y, forward = torch.func.jvp(call, one, direction)
    _, backward = torch.func.vjp(call, *one)
    cotangent = torch.ones_like(y)
    both = sum((g * d).sum() for g, d in zip(backward(cotangent), direction, strict=True))
    assert_close((forward * cotangent).sum(), both, **EXACT)
    assert forward.abs().max() > 1e-3
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(one[0], direction[0])
        tangent = torch.autograd.forward_ad.unpack_dual(call(dual, *one[1:])).tangent
    assert tangent is not None


@needs_native
def test_transforms_of_native_are_refused():
    q, k, v = (draw()[n].detach() for n in "qkv")
    call = lambda x: linear_attention(x, k, v, impl="native")[0]  # noqa: E731
    with pytest.raises(RuntimeError, match=r"no rule for torch\.func"):
        torch.func.jvp(call, (q,), (q,))


@pytest.mark.parametrize("impl", ["torch", "native"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("token", [2, 7, 16, 19])
def test_what_is_broken_stays_broken_and_in_its_future(impl, bad, token):
    """NaN and inf in a real token reach all later outputs and, with the native kernels, no earlier one."""
    if impl == "native" and not native.available():
        pytest.skip(f"no native library: {native.why_not()}")
    for name in "kv":
        arguments = {n: x.detach().abs().float() for n, x in draw(t=24, state=False).items() if n in "qkv"}
        arguments[name][:, token, 0, 1] = bad
        y, _ = linear_attention(**arguments, impl=impl)
        rows = y[:, :, :2].isfinite().flatten(2).all(-1)  # the heads that read that key-value head
        assert not rows[:, token:].any()
        if impl == "native":
            assert rows[:, :token].all()


@needs_native
def test_overflow_is_not_hidden():
    """inf / inf is NaN, in chunks as in steps, not 0."""
    k = torch.full((1, 4, 1, 1), 3e38)
    k[:, 0] = 1.0
    y, _ = linear_attention(torch.full_like(k, 4.0), k, torch.ones_like(k), impl="native")
    assert y[0, 0].isfinite().all()
    assert y[0, 1:].isnan().all()


@pytest.mark.parametrize("impl", ["torch", "auto"])
def test_meta_tensors_have_shapes(impl):
    q, k, v = torch.empty(3, 2, 5, 2, 4, device="meta")
    y, state = linear_attention(q, k, v, impl=impl)
    assert (y.shape, state.kv.shape) == ((2, 5, 2, 4), (2, 2, 4, 4))


def accepted(forward, name="linear_attention"):
    """Run PyTorch's checks of the operator of that name, called with `forward`, and of its backward."""
    operator, backward_operator = (getattr(torch.ops.lintra, n) for n in (name, f"{name}_backward"))
    torch.library.opcheck(operator.default, forward)
    y, kv, z, denominator, lost = operator(*forward)
    backward = (y, kv, z, *forward[:3], y, denominator, lost, *forward[3:-1])
    backward = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in backward)
    torch.library.opcheck(backward_operator.default, backward)


@pytest.mark.parametrize("impl", ["reference", "torch", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("time", [1, 9])
def test_a_kv_in_bfloat16_is_that_in_the_dtype_of_sums_rounded_once(impl, time):
    arguments = draw(t=time)
    kv, z = arguments["state"]
    y, state = linear_attention(**arguments | {"state": LinearState(kv.bfloat16(), z)}, impl=impl)
    wide = LinearState(kv.bfloat16().double(), z)
    expected, after = linear_attention(**arguments | {"state": wide}, impl=impl)
    assert state.kv.dtype == torch.bfloat16
    for a, b in ((y, expected), (state.kv, after.kv.bfloat16()), (state.z, after.z)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("impl", ["reference", "torch", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_a_state_without_a_denominator_stays_without_one(impl, scale):
    arguments = draw() | {"normalize": False, "scale": scale, "impl": impl}
    kv, _ = arguments.pop("state")
    y, state = linear_attention(**arguments, state=LinearState.of(kv))
    expected, after = linear_attention(**arguments, state=LinearState(kv, kv.new_zeros(kv.shape[:3])))
    assert torch.equal(y, expected)
    assert torch.equal(state.kv, after.kv)
    assert state.z.shape == (*kv.shape[:2], 0)
    with pytest.raises(ValueError, match=r"state.z must be"):
        linear_attention(**arguments | {"normalize": True}, state=LinearState.of(kv))


@needs_native
@pytest.mark.parametrize("causal", [True, False])
def test_opcheck(causal):
    x = draw(decay=causal)
    mask = torch.ones(2, 9, dtype=torch.bool)
    kv, z = x["state"]
    for state in ((kv, z), (kv.detach().mT.contiguous().mT.requires_grad_(), z)):
        others = (x.get("log_decay"), x["log_input"], *state, mask, None, causal, True, 1e-6, "relu")
        accepted((x["q"], x["k"], x["v"], *others, False))
    x = draw(decay=causal, dtype=torch.bfloat16)
    others = (None, None, *x["state"], mask, None, causal, True, 1e-6, "relu", True)
    accepted((x["q"], x["k"], x["v"], *others))


@pytest.mark.parametrize("impl", FAST)
def test_half_precision_in_and_out(impl):
    """16-bit inputs and 32-bit sums: the only error is the rounding of inputs and output."""
    for dtype, unit in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        arguments = draw(t=70, dtype=dtype)
        exact = {
            n: LinearState(*(y.double() for y in x)) if n == "state" else x.double()
            for n, x in arguments.items()
        }
        y, state = linear_attention(**arguments, feature_map="elu+1", impl=impl)
        expected, exact_state = linear_attention(**exact, feature_map="elu+1", impl="reference")
        assert y.dtype == dtype
        assert state.kv.dtype == torch.float32
        # Half a unit for the rounding of y; both sides have the same inputs.
        assert ((y.double() - expected).abs() <= unit * expected.abs() + 1e-5).all()
        assert_close(state.kv.double(), exact_state.kv, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_do_not_see_the_rounding_of_y(impl, dtype, causal):
    error = error_of_gradients(impl, dtype, causal=causal)
    assert error < torch.finfo(dtype).eps


def error_of_gradients(impl, dtype, device="cpu", time=40, **options):
    """The largest error of dq, dk and dv relative to their norms, for values far from 0, after nine tokens:
    with what y loses in 16 bits in it, that of dq would be many times its rounding."""
    q, k, v = (draw(t=time + 9)[name].detach() for name in "qkv")
    _, state = linear_attention(q[:, :9], k[:, :9], v[:, :9] + 30, feature_map="elu+1")
    given = [x[:, 9:].to(dtype) for x in (q, k, v + 30)]
    dy = torch.randn(*given[0].shape[:3], v.shape[3]).to(dtype)

    def gradients(impl, kind, device):
        inputs = [x.to(device, kind).requires_grad_() for x in given]
        before = LinearState(*(x.to(device, checks.sum_dtype(kind)) for x in state))
        y, _ = linear_attention(*inputs, state=before, feature_map="elu+1", impl=impl, **options)
        return torch.autograd.grad(y, inputs, dy.to(device, kind))

    exact = gradients("reference", torch.float64, "cpu")
    found = gradients(impl, dtype, device)
    return max(float((x.cpu() - e).norm() / e.norm()) for x, e in zip(found, exact, strict=True))


@pytest.mark.parametrize("impl", FAST)
def test_autocast_brings_the_inputs_to_its_dtype_and_keeps_the_sums(impl):
    q, k, v = (draw(t=40, dtype=torch.float32)[n] for n in "qkv")
    with torch.autocast("cpu", torch.bfloat16):
        y, state = linear_attention(q, k.bfloat16(), v, feature_map="elu+1", impl=impl)
    expected, expected_state = linear_attention(
        q.bfloat16(), k.bfloat16(), v.bfloat16(), feature_map="elu+1", impl=impl
    )
    assert y.dtype == torch.bfloat16
    assert_close(y, expected, rtol=0, atol=0)
    assert_close(state.kv, expected_state.kv, rtol=0, atol=0)
    y.float().sum().backward()
    assert q.grad.dtype == torch.float32


def test_no_denominator_gives_zero_without_a_nan():
    q = torch.zeros(1, 3, 1, 2, requires_grad=True)
    k, v = torch.zeros(1, 3, 1, 2, requires_grad=True), torch.ones(1, 3, 1, 2)
    for impl in ("reference", *FAST):
        y, _ = linear_attention(q, k, v, eps=0.0, impl=impl)
        assert (y == 0).all()
        for g in torch.autograd.grad(y.sum(), (q, k)):
            assert (g == 0).all()


@pytest.mark.parametrize("impl", FAST)
def test_65_536_tokens_of_equal_keys_still_count(impl):
    """A 16-bit sum would stall at 256 equal terms; the denominator must keep counting."""
    ones = torch.ones(1, 65_536, 1, 1, dtype=torch.bfloat16)
    _, state = linear_attention(ones, ones, ones, impl=impl)
    assert state.z.item() == 65_536
    assert state.kv.item() == 65_536


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("decay", [-1e4, -1e9, -1e30])
def test_decays_keep_their_digits_beside_one_that_leaves_nothing(impl, decay):
    """After a token that wipes the state, float32 is as exact as if the sequence began there."""
    exact, single = (forgetful(decay, dtype) for dtype in (torch.float64, torch.float32))
    for e, x in zip(results(exact, impl="reference"), results(single, impl=impl), strict=True):
        assert_close(x.double(), e, rtol=0, atol=1e-4 * float(e.abs().max()))  # hundreds of roundings


@pytest.mark.parametrize("impl", FAST)
def test_gradients_of_decays_are_as_exact_far_from_the_end(impl):
    """Late roundings do not accumulate in the gradients of all earlier tokens, which a shared parameter would
    sum: with 8,000 tokens the error is no larger than with a few, 16 roundings on average."""
    assert shift_of_decay_gradients(8000, impl=impl) < 16 * 2**-23


def shift_of_decay_gradients(time, device="cpu", **options):
    """The mean error of the gradients of log_decay in float32, as a fraction of their mean size."""
    found = []
    for dtype, how in ((torch.float64, {"impl": "torch"}), (torch.float32, options)):
        given = draw(b=1, t=time, h=4, g=4, f=16, e=16, state=False)
        del given["log_input"]
        given = {n: x.detach().float().to(device, dtype).requires_grad_() for n, x in given.items()}
        found.append(results(given, feature_map="elu+1", **how)[-1].double().cpu())
    exact, single = found
    return float((single - exact).abs().mean() / exact.abs().mean())


def forgetful(decay, dtype, at=20):
    """Arguments with this decay at the token, or the slice of tokens, `at`."""
    arguments = draw(t=40)
    arguments["log_decay"].data[:, at] = decay
    arguments["log_input"].data[:, at] = 0.0
    rounded = {n: x.detach().float().to(dtype) for n, x in arguments.items() if n != "state"}
    rounded["state"] = LinearState(*(x.detach().float().to(dtype) for x in arguments["state"]))
    for x in flat(rounded):
        x.requires_grad_()
    return rounded


SCRIPT = """
import torch
from lintra.ops import linear_attention, LinearState
impl = {impl!r}
def call(q, k, v, log_decay, kv, z, mask):
    y, state = linear_attention(q * 1.5, k, v, log_decay=log_decay, state=LinearState(kv, z), mask=mask,
                                feature_map="elu+1", impl=impl)
    return y.sin(), state.kv
torch.manual_seed(0)
for t in (33, 20):
    x = [torch.randn(2, t, 4, 8), torch.randn(2, t, 2, 8), torch.randn(2, t, 2, 8), -torch.rand(2, t, 2),
         torch.randn(2, 2, 8, 8), torch.rand(2, 2, 8)]
    x = [each.requires_grad_() for each in x]
    mask = torch.rand(2, t) > 0.3
    expected = call(*x, mask)
    gradients = torch.autograd.grad(expected[0].sum() + expected[1].sum(), x)
    found = torch.compile(call, fullgraph=True, backend={compiler!r})(*x, mask)
    compiled = torch.autograd.grad(found[0].sum() + found[1].sum(), x)
    for a, b in zip((*found, *compiled), (*expected, *gradients)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
print("same")
"""


FIRST_USE = """
import torch
from lintra.ops import linear_attention
q, k, v = torch.rand(3, 1, 5, 2, 4)
found, _ = torch.compile(linear_attention, fullgraph=True, backend="eager")(q, k, v)
torch.testing.assert_close(found, linear_attention(q, k, v)[0])
print("same")
"""


def test_compiling_may_be_the_first_use():
    """The compiled call loads the native library, which a tracer cannot follow."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FIRST_USE], capture_output=True, text=True)
    assert done.stdout.strip() == "same", done.stderr


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("impl", COMPILED)
def test_torch_compile_keeps_it_in_one_graph(impl, compiler):
    """fullgraph=True raises at a graph break. In a separate process, since the compiler gives warnings."""
    script = SCRIPT.format(impl=impl, compiler=compiler)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "same", done.stderr


def change(**changes):
    arguments = draw()
    for name, function in changes.items():
        arguments[name] = function(arguments.get(name)) if callable(function) else function
    return arguments


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (change(q=lambda x: x[0]), ValueError, r"q must have the 4 axes \[b t h d\], got shape \[9, 4, 5\]"),
        (change(q=lambda x: x.long()), TypeError, "q must be float16, .* got torch.int64"),
        (change(q=[1]), TypeError, r"q must be a tensor \[b t h d\], got list"),
        (change(k=lambda x: x[:1]), ValueError, r"k must be \[b=2 .* got shape \[1, 9, 2, 5\]: b is 2"),
        (change(k=lambda x: x[..., :4]), ValueError, r"k must be .*d=5.* got shape \[2, 9, 2, 4\]"),
        (change(v=lambda x: x[:, :8]), ValueError, "v must be .*s=9"),
        (
            change(v=lambda x: x.float()),
            TypeError,
            "v must have the dtype of k, torch.float64, got torch.float32",
        ),
        (change(v=lambda x: x.to("meta")), ValueError, "v must be on the device of k, cpu, got meta"),
        (change(q=lambda x: x[:, :, :3]), ValueError, "multiple of the key-value heads, got h=3, g=2"),
        (change(q=lambda x: x[:, :5]), ValueError, "as many queries as keys, got t=5 and s=9"),
        (change(log_decay=lambda x: -x), ValueError, "log_decay must be finite and at most 0"),
        (change(log_decay=lambda x: x * torch.inf), ValueError, "log_decay must be finite"),
        (change(log_decay=lambda x: x[..., :1]), ValueError, r"log_decay must be \[b=2 s=9 g=2\]"),
        (change(log_input=lambda x: x.long()), TypeError, "log_input must be float16"),
        (change(causal=False), ValueError, "log_decay needs causal=True"),
        (change(mask=torch.ones(2, 8, dtype=torch.bool)), ValueError, r"mask must be \[b=2 s=9\]"),
        (change(mask=torch.ones(2, 9)), TypeError, "mask must be boolean, True for a real token"),
        (change(state=lambda s: LinearState(s.kv[:, :1], s.z)), ValueError, "state.kv must be .*g=2"),
        (change(state=lambda s: LinearState(s.kv.float(), s.z)), TypeError, "state.kv must be torch.float64"),
        (change(state=lambda s: LinearState(s.kv.half(), s.z)), TypeError, "or bfloat16, got torch.float16"),
        (
            change(state=lambda s: LinearState(s.kv, s.z.bfloat16())),
            TypeError,
            "inputs of torch.float64, got",
        ),
        (change(state=lambda s: s.kv), TypeError, "state must be a LinearState, got Tensor"),
        (change(state=tuple), TypeError, r"state must be a LinearState, got tuple"),
        (change(eps=-1.0), ValueError, "eps must be at least 0 and finite, got -1"),
        (change(eps=float("nan")), ValueError, "eps must be at least 0 and finite, got nan"),
        (
            change(q=lambda x: x[..., :0], k=lambda x: x[..., :0]),
            ValueError,
            "at least 1 wide, got d=0 and e=3",
        ),
        (change(q=lambda x: x[:, :, :0]), ValueError, "multiple of the key-value heads, got h=0, g=2"),
        (change(chunk=0), ValueError, "chunk must be at least 1 token, got 0"),
        (change(impl="cuda"), ValueError, "impl must be 'auto' or one of .* got 'cuda'"),
        (change(feature_map="cos"), ValueError, r"feature_map must be one of .*'elu\+1'.* got 'cos'"),
    ],
)
def test_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        linear_attention(**arguments)
