"""The Triton kernels equal the definition, in values and gradients: on a GPU if there is one, otherwise in
Triton's interpreter, on the CPU. Buffers are filled with NaN first, so that unwritten elements show."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from lintra.ops import LinearState, dispatch, linear_attention
from lintra.ops.features import apply_feature_map
from lintra.ops.linear_attention import divide, linear_attention_reference
from lintra.ops.linear_attention import triton as linear_attention_triton
from tests.ops.interpreter import (
    as_if_compiled_alike,
    close_in_tf32,
    limit,
    patient_interpreter,  # noqa: F401 (a fixture)
    poison,
    tf32,  # noqa: F401 (a fixture)
)
from tests.ops.test_layout import alone, gradients, places, sequences
from tests.ops.test_linear_attention import (
    accepted,
    draw,
    error_of_gradients,
    flat,
    forgetful,
    results,
    shift_of_decay_gradients,
    uneven,
)

WHY_NOT = dispatch._no_gpu_kernels(torch.device("cuda"))
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"no Triton kernels: {WHY_NOT}")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
C = 16  # tokens per chunk here: few tokens then make many chunks
LENGTHS = [1, C - 1, C, C + 1, 3 * C + 5]
ROUNDED = {"rtol": 2**-7, "atol": 1e-5}  # a unit of bfloat16, and float32 where sums cancel


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """The buffers that the kernels write to are filled with NaN."""
    poison(monkeypatch, linear_attention_triton)


@pytest.fixture
def cut(monkeypatch):
    """Set how the work is cut: tokens per chunk, the widest tile, the number of programs wanted."""

    def set_it(widest=64, programs=4, chunk=C):
        cut_like(monkeypatch, widest, programs, chunk)

    set_it()
    return set_it


def cut_like(patch, widest, programs, chunk=C):
    patch.setattr(linear_attention_triton, "CHUNK", chunk)
    patch.setattr(linear_attention_triton, "WIDEST", widest)
    patch.setattr(linear_attention_triton, "target_programs", lambda x: programs)


def moved(arguments, dtype=torch.float32):
    """The same arguments on the device of the kernels: q, k and v in `dtype`, all others in float32."""

    def move(name, x):
        kind = dtype if name in ("q", "k", "v") else torch.float32
        return x.detach().to(DEVICE, kind, copy=True).requires_grad_()

    return {
        name: LinearState(*(move(name, y) for y in x)) if isinstance(x, tuple) else move(name, x)
        for name, x in arguments.items()
    }


def exactly(arguments):
    """The same numbers in float64."""
    return {
        name: LinearState(*(y.detach().cpu().double().requires_grad_() for y in x))
        if isinstance(x, tuple)
        else x.detach().cpu().double().requires_grad_()
        for name, x in arguments.items()
    }


def close(found, formula, expected, names):
    """The errors are within the `limit` beside the same formula, with 4 roundings. With decays there are 64:
    the decay between two tokens, exp(-x), comes from the difference of two sums, with as many roundings as x,
    about 30, has units, while chunked PyTorch sums each span separately; and the gradient of log_decay is the
    difference of two sums over a span, each as large as the gradient of log_input, whose roundings remain
    where the sums cancel."""
    roundings = 64 if "log_decay" in names else 4
    largest = {
        name: float(e.detach().abs().max()) for name, e in zip(names, expected, strict=True) if e.numel()
    }
    for name, a, b, e in zip(names, found, formula, expected, strict=True):
        assert a.shape == e.shape
        if e.numel():
            error, allowed = (float((x.cpu().double() - e).detach().abs().max()) for x in (a, b))
            scale = float(e.detach().abs().max())
            if name == "log_decay":
                scale = max(scale, largest.get("log_input", 0.0))
            assert error <= limit(allowed, roundings, scale), name


def agrees(arguments, **options):
    """`arguments` in any precision: the kernels, chunked PyTorch and, in float64, the definition."""
    placed = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    found = results(arguments, impl="triton", **placed)
    formula = results(arguments, impl="torch", chunk=C, **placed)
    here = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    expected = results(exactly(arguments), impl="reference", **here)
    close(found, formula, expected, ["y", "kv", "z", *named(arguments)])


def named(arguments):
    return [n for n, x in arguments.items() for _ in range(2 if isinstance(x, tuple) else 1)]


SMALL = {"b": 1, "h": 2, "g": 1}


@pytest.mark.parametrize("time", LENGTHS)
def test_tails(cut, time):
    """Around the length of a chunk, and several chunks with one chunk per span."""
    cut(programs=100)
    agrees(moved(draw(**SMALL, t=time)), feature_map="elu+1", eps=1e-2)


@pytest.mark.parametrize(
    ("programs", "widest", "sizes", "options"),
    [
        (1, 64, {}, {"mask": True}),  # all chunks in one span
        (2, 64, {"b": 2, "g": 2}, {"mask": True, "feature_map": "relu", "normalize": False}),
        (100, 16, {"f": 17, "e": 18}, {}),  # several tiles, chunk sums in parallel
        (1, 16, {"f": 17, "e": 18}, {"feature_map": None, "normalize": False}),  # chunk by chunk
        (2, 64, {"decay": False}, {"causal": False, "mask": True}),
        (1, 16, {"f": 17, "e": 18, "decay": False}, {"causal": False, "s": 21}),
        (1, 64, {"decay": False, "state": False}, {}),
    ],
)
def test_every_way_to_cut_the_work(cut, programs, widest, sizes, options):
    cut(widest=widest, programs=programs)
    options = {"feature_map": "elu+1", "eps": 1e-2} | options
    sizes = SMALL | {"t": 2 * C + 3} | sizes | ({"s": options.pop("s")} if "s" in options else {})
    if options.pop("mask", False):
        generator = torch.Generator().manual_seed(1)
        options["mask"] = torch.rand(sizes["b"], sizes["t"], generator=generator) > 0.3
    agrees(moved(draw(**sizes)), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("feature_map", ["elu+1", "relu", "exp"])
def test_sixteen_bits(cut, dtype, feature_map):
    """y: twice the error of float32 sums, and half a unit of y. States and gradients: twice the error of the
    definition in 16 bits, as the products have no fewer bits."""
    sixteen_bits(moved(draw(**SMALL, t=C + 3, decay=False), dtype), feature_map)


@pytest.mark.parametrize("time", [1, C + 3])
def test_gradients_do_not_see_the_rounding_of_y(cut, time):
    """One token and spans. The interpreter rounds what it multiplies to TF32, a GPU to two bfloat16."""
    error = error_of_gradients("triton", torch.bfloat16, DEVICE, time)
    assert error < torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("decay", [False, True])
def test_sixteen_bits_in_full_blocks(cut, decay):
    """Heads of 64, and spans of several chunks that keep the state in place."""
    cut(widest=64, programs=1, chunk=64)
    sixteen_bits(moved(draw(**SMALL, t=200, f=64, e=64, decay=decay), torch.float16), "relu")


def sixteen_bits(arguments, feature_map):
    options = {"feature_map": feature_map, "eps": 1e-2}
    found = results(arguments, impl="triton", **options)
    sums = results(arguments, impl="torch", **options)
    expected = results(exactly(arguments), impl="reference", **options)
    formula = [sums[0], *textbook(arguments, **options)]
    close(found, formula, expected, ["y", "kv", "z", *named(arguments)])


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("decay", [False, True])
def test_float32_in_tf32(cut, decay):
    """In chunks and tiles of the actual size."""
    cut(programs=1, chunk=64)
    arguments = moved(draw(**SMALL, t=200, f=64, e=64, decay=decay))
    options = {"feature_map": "elu+1", "eps": 1e-2}
    found = results(arguments, impl="triton", **options)
    expected = results(exactly(arguments), impl="reference", **options)
    close_in_tf32(found, expected, ["y", "kv", "z", *named(arguments)])


def textbook(arguments, *, feature_map, eps):
    """The states and gradients of the definition, with every number in the dtype of v."""
    dtype = arguments["v"].dtype
    q, k = (apply_feature_map(feature_map, arguments[name]) for name in "qk")
    state = LinearState(*(x.to(dtype) for x in arguments["state"]))
    logarithms = [arguments[name] for name in ("log_decay", "log_input") if name in arguments]
    logarithms = [None] * (2 - len(logarithms)) + [x.to(dtype) for x in logarithms]
    found = linear_attention_reference(q, k, arguments["v"], *logarithms, state, True)
    y = divide(found.numerator, found.denominator + eps)
    return [*found.state, *torch.autograd.grad(uneven(y, *found.state), flat(arguments))]


@pytest.mark.parametrize("programs", [1, 100])
@pytest.mark.parametrize("causal", [True, False])
def test_packed_is_each_sequence_alone(cut, programs, causal):
    """The longest sequence takes several spans, one has no tokens, and one has a single token."""
    cut(programs=programs)
    packed_agrees([C, 0, 1, 2 * C + 5], causal=causal)


def packed_agrees(lengths, *, causal, **options):
    arguments = sequences(lengths, h=2, g=1, decay=causal)
    options = {"feature_map": "elu+1", "eps": 1e-2, "causal": causal} | options
    found, formula = [], []
    for into, impl in ((found, "triton"), (formula, "torch")):
        given = moved(arguments)
        y, state = linear_attention(**given, cu_seqlens=places(lengths).to(DEVICE), impl=impl, **options)
        into += [x.cpu() for x in (y, *state, *gradients((y, *state), given))]
    exact = exactly(moved(arguments))
    outputs = alone(exact, lengths, **options)
    names = ["y", "kv", "z", *named(arguments)]
    close(found, formula, [*outputs, *gradients(outputs, exact)], names)


def test_steps_are_the_whole(cut):
    """Token by token, with one launch each, from a state and with padding."""
    arguments = moved(draw(b=2, h=4, g=2, t=3))
    mask = torch.tensor([[True, False, True], [True, True, True]], device=DEVICE)
    options = {"feature_map": "elu+1", "impl": "triton"}
    with torch.no_grad():
        expected, final = linear_attention(**arguments, mask=mask, **options)
        state, ys = arguments.pop("state"), []
        for i in range(3):
            one = {name: x[:, i : i + 1] for name, x in arguments.items()}
            y, state = linear_attention(**one, state=state, mask=mask[:, i : i + 1], **options)
            ys.append(y)
    # A sum of three terms and a state, in two orders.
    for a, b in ((torch.cat(ys, 1), expected), (state.kv, final.kv), (state.z, final.z)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert (ys[1][0] == 0).all()


@pytest.mark.parametrize(("widest", "dtype"), [(64, torch.float32), (16, torch.bfloat16)])
@pytest.mark.parametrize("decay", [False, True])
def test_a_step_rounds_the_kv_it_keeps_once(cut, widest, dtype, decay):
    """From a kv in bfloat16: the results are those of float32, except for the rounded kv."""
    cut(widest=widest)
    arguments = moved(draw(b=2, h=4, g=2, t=1, f=20, e=18, decay=decay), dtype)
    options = {"feature_map": "elu+1", "impl": "triton"}
    kv, z = arguments.pop("state")
    with torch.no_grad():
        y, state = linear_attention(**arguments, state=LinearState(kv.bfloat16(), z), **options)
        wide = LinearState(kv.bfloat16().float(), z)
        expected, after = linear_attention(**arguments, state=wide, **options)
    assert state.kv.dtype == torch.bfloat16
    as_if_compiled_alike(state.kv, after.kv.bfloat16(), **ROUNDED)
    as_if_compiled_alike(y, expected)
    as_if_compiled_alike(state.z, after.z)


@pytest.mark.parametrize(("t", "causal"), [(1, True), (C + 3, True), (C + 3, False)])
def test_a_kv_in_bfloat16_is_that_in_float32_rounded_once(cut, t, causal):
    """Only kv and its gradient are rounded. Of one token, the kernel is not that of a kv in float32; of
    more, all else is the same to the last bit."""
    arguments = moved(draw(**SMALL, t=t, decay=causal))
    options = {"feature_map": "elu+1", "eps": 1e-2, "causal": causal, "impl": "triton"}

    def outcome(kind):
        kv, z = (x.detach().clone() for x in arguments["state"])
        state = LinearState(kv.bfloat16().to(kind).requires_grad_(), z.requires_grad_())
        y, after = linear_attention(**arguments | {"state": state}, **options)
        inputs = [*flat({n: x for n, x in arguments.items() if n != "state"}), z, state.kv]
        gradients = torch.autograd.grad((y, *after), inputs, [torch.ones_like(x) for x in (y, *after)])
        return [y, after.z, *gradients[:-1]], [after.kv, gradients[-1]]

    (same, kept), (others, wide) = outcome(torch.bfloat16), outcome(torch.float32)
    wide = [x.bfloat16() for x in wide]
    if t == 1:
        as_if_compiled_alike(same, others, rtol=1e-5, atol=1e-5)  # sums that may cancel
        as_if_compiled_alike(kept, wide, **ROUNDED)
    else:
        assert_close([*same, *kept], [*others, *wide], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # from NumPy, in the interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["k", "v"])
def test_what_is_broken_stays_broken_and_in_its_future(cut, name, bad):
    """It reaches all later tokens, no earlier chunk and, if packed, no other sequence."""
    token = C + 2
    given = draw(**SMALL, t=2 * C, decay=False, state=False)
    arguments = {n: x.detach().abs().float().to(DEVICE) for n, x in given.items()}
    arguments[name][:, token, 0, 1] = bad
    y, _ = linear_attention(**arguments, feature_map="elu+1", impl="triton")
    fine = y.isfinite().flatten(2).all(-1)[0]
    assert not fine[token:].any()
    assert fine[:C].all()
    rows = places([C, C - 4, 4]).to(DEVICE)
    y, _ = linear_attention(**arguments, cu_seqlens=rows, feature_map="elu+1", impl="triton")
    fine = y.isfinite().flatten(2).all(-1)[0]
    assert fine[:C].all()
    assert fine[2 * C - 4 :].all()
    assert not fine[token : 2 * C - 4].any()


def test_nan_in_padding_changes_nothing(cut):
    mask = torch.arange(C + 5, device=DEVICE)[None] < C + 1
    arguments = moved(draw(**SMALL, t=C + 5))
    options = {"mask": mask, "feature_map": "elu+1", "impl": "triton"}
    expected = results(arguments, **options)
    for name in ("q", "k", "v", "log_decay", "log_input"):
        arguments[name].data[:, C + 1 :] = torch.nan
    for a, b in zip(results(arguments, **options), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("at", [20, slice(0, None, 3), slice(0, 12)], ids=["once", "often", "at first"])
def test_decays_keep_their_digits_beside_those_that_leave_nothing(cut, at):
    exact = results(forgetful(-1e9, torch.float64, at), impl="reference")
    single = forgetful(-1e9, torch.float32, at)
    found, formula = results(moved(single), impl="triton"), results(single, impl="torch")
    for e, x, same in zip(exact, found, formula, strict=True):
        most = limit(float((same - e).abs().max()), 16, float(e.abs().max()))
        assert_close(x.double().cpu(), e, rtol=0, atol=most)


@pytest.mark.parametrize("lengths", [[], [C - 3, 8]])
def test_rows_of_no_packed_sequence_are_zero(cut, lengths):
    """On a GPU, `cu_seqlens` is not read to refuse such rows: batches of a fixed shape may end in them."""
    x = moved(draw(**SMALL, t=3 * C))
    q, k, v, log_decay, log_input = (
        x[name].detach()[:1] for name in ("q", "k", "v", "log_decay", "log_input")
    )
    kv, z = (s.detach()[:1].expand(len(lengths), *s.shape[1:]) for s in x["state"])
    others = log_decay, log_input, kv, z, None, places(lengths).to(DEVICE), True, True, 1e-6, "relu"
    y, *_, denominator, lost = linear_attention_triton.forward(q, k, v, *others, True)
    gradients = linear_attention_triton.backward(
        torch.ones_like(y), None, None, q, k, v, y, denominator, lost, *others
    )
    for result in (y, *gradients[:5]):
        assert result[:, : sum(lengths)].isfinite().all()
        assert not result[:, sum(lengths) :].any()


def test_padding_is_zero_behind_a_state_that_is_not_a_number(cut):
    x = moved(draw(**SMALL, t=C))
    x["v"].data[:, 0] = torch.nan
    mask = torch.ones(x["q"].shape[:2], dtype=torch.bool, device=DEVICE)
    mask[:, 5:] = False
    for time in (C, 1):  # chunks, and one token
        given = {name: each if name == "state" else each[:, -time:] for name, each in x.items()}
        given["state"] = LinearState(torch.full_like(x["state"].kv, torch.nan), x["state"].z)
        y, _ = linear_attention(**given, mask=mask[:, -time:], impl="triton", feature_map="relu")
        assert not y[~mask[:, -time:]].any()


@pytest.mark.slow
def test_gradients_of_decays_are_as_exact_far_from_the_end(cut):
    """Fewer tokens than for the other implementations, in spans of one chunk: the interpreter is slow."""
    cut(programs=100)
    assert shift_of_decay_gradients(1000, DEVICE, impl="triton") < limit(0, 16, 1)


def test_no_denominator_gives_zero_without_a_nan(cut):
    q = torch.zeros(1, 3, 1, 2, device=DEVICE, requires_grad=True)
    k, v = torch.zeros_like(q).requires_grad_(), torch.ones_like(q)
    y, _ = linear_attention(q, k, v, eps=0.0, impl="triton")
    assert (y == 0).all()
    for g in torch.autograd.grad(y.sum(), (q, k)):
        assert (g == 0).all()


def test_nothing_to_do(cut):
    """No tokens, no sequences, no samples: the state is unchanged, and outputs have the right shape."""
    for b, time in ((2, 0), (0, 3)):
        arguments = moved(draw(b=b, t=time, h=2, g=1))
        y, state = linear_attention(**arguments, impl="triton")
        assert y.shape == (b, time, 2, 3)
        assert torch.equal(state.kv, arguments["state"].kv)
    q = torch.zeros(1, 0, 2, 4, device=DEVICE)
    y, state = linear_attention(q, q, q, cu_seqlens=places([]).to(DEVICE), impl="triton")
    assert (y.shape, state.kv.shape) == ((1, 0, 2, 4), (0, 2, 4, 4))


def test_opcheck(cut):
    x = moved(draw(b=1, t=2, h=1, g=1, f=2, e=2))
    mask = torch.ones(1, 2, dtype=torch.bool, device=DEVICE)
    kv, z = x["state"]
    for kind in (torch.float32, torch.bfloat16):
        state = kv.detach().to(kind).requires_grad_(), z
        others = (x["log_decay"], x["log_input"], *state, mask, None, True, True, 1e-6, "relu", True)
        accepted((x["q"], x["k"], x["v"], *others), "linear_attention_triton")


def test_second_derivatives_are_refused(cut):
    q, k, v = (moved(draw(b=1, h=1, g=1, t=2))[n] for n in "qkv")
    y, _ = linear_attention(q, k, v, impl="triton", feature_map="elu+1")
    (g,) = torch.autograd.grad(y.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="impl='triton' can be differentiated once"):
        g.sum().backward()


def test_what_it_refuses():
    q = torch.zeros(1, 2, 1, 2, device=DEVICE)
    for x, message in (
        (q.double(), r"the tensors are float64; impl='torch' keeps their digits"),
        (q.to("meta"), "it runs on an NVIDIA GPU, the tensors are on meta"),
    ):
        with pytest.raises(RuntimeError, match=f"impl='triton' cannot serve .*{message}"):
            linear_attention(x, x, x, impl="triton")
    with pytest.raises(RuntimeError, match=r"no rule for torch\.func"):
        torch.func.vmap(lambda x: linear_attention(x, x, x, impl="triton")[0])(q[None])


@pytest.mark.slow  # a minute or two in the interpreter
@settings(max_examples=40)
@given(data=st.data())
def test_every_shape_and_option(data):
    """The grid on which the other implementations are tested, with the work cut in every way."""
    choose = data.draw
    causal = choose(st.booleans(), label="causal")
    time = choose(st.sampled_from([0, 1, 2, *LENGTHS]), label="t")
    g = choose(st.integers(1, 2), label="g")
    sizes = {
        "b": choose(st.integers(0, 2), label="b"),
        "t": time,
        "s": time if causal else choose(st.sampled_from([0, 1, 20, 33]), label="s"),
        "h": g * choose(st.integers(1, 2), label="h/g"),
        "g": g,
        "f": choose(st.sampled_from([1, 3, 8, 17]), label="f"),
        "e": choose(st.sampled_from([1, 4, 9, 16]), label="e"),
        "decay": causal and choose(st.booleans(), label="decay"),
        "state": choose(st.booleans(), label="state"),
    }
    options = {
        "causal": causal,
        "normalize": choose(st.booleans(), label="normalize"),
        "feature_map": choose(st.sampled_from(["elu+1", "relu", "exp"]), label="feature_map"),
        "eps": 1e-2,
    }
    # With one key or feature, y hardly depends on q: its gradients are the remainder of terms that cancel.
    assume(not (options["normalize"] and 1 in (sizes["s"], sizes["f"])))
    if choose(st.booleans(), label="mask"):
        options["mask"] = torch.rand(sizes["b"], sizes["s"], generator=torch.Generator().manual_seed(7)) > 0.3
    machine = choose(st.sampled_from([(w, p) for w in (16, 64) for p in (1, 2, 100)]), label="machine")
    arguments = moved(draw(**sizes))
    if choose(st.booleans(), label="strided"):
        for name in "qkv":
            x = arguments[name].detach()
            wide = torch.cat((x, x + 7), -1).movedim(1, 2).contiguous().movedim(2, 1)
            arguments[name] = wide[..., : x.shape[-1]].requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        cut_like(patch, *machine)
        agrees(arguments, **options)


@pytest.mark.slow  # half a minute in the interpreter
@pytest.mark.parametrize("lengths", [[5, 70, 0, 0, 16], [0], [1] * 9, [40, 3, 33]])
@pytest.mark.parametrize(("causal", "normalize"), [(True, True), (True, False), (False, True)])
def test_packed_lengths(cut, lengths, causal, normalize):
    packed_agrees(lengths, causal=causal, normalize=normalize)


@pytest.mark.slow  # a minute in the interpreter
@pytest.mark.parametrize(("f", "e"), [(576, 64), (96, 256), (64, 64), (128, 128)])
def test_wide(f, e):
    """Tiles of the actual sizes, chunks of the actual length."""
    agrees(moved(draw(b=1, h=1, g=1, t=70, f=f, e=e)), feature_map="elu+1", eps=1e-2)
