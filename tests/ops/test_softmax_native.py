"""Softmax over some of the keys in C++: the definition on every instruction set, dtype and number of threads;
what does not leak; what it shares with PyTorch's form."""

import math

import pytest
import torch
from torch.testing import assert_close

from lintra import native
from lintra.ops import lsh, norms, softmax_native
from lintra.ops.banded import banded_attention, banded_attention_reference
from lintra.ops.blocks import block_attention, block_attention_reference
from lintra.ops.segments import segment_attention, segment_attention_reference
from lintra.testing.laws import EXACT, gradients

pytestmark = pytest.mark.skipif(not native.available(), reason="no C++")
BLOCK = 20
SHAPES = [(1, 1, 1, 1), (2, 1, 64, 64), (4, 2, 5, 3), (3, 1, 20, 70), (10, 2, 33, 17)]  # h, g, d, e


def draw(t, s=None, h=4, g=2, d=5, e=3, batch=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((t, h, d), (s or t, g, d), (s or t, g, e))
    return [
        torch.randn(batch, *shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def lists(t, s, g, causal, batch=2):
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(s // BLOCK, (batch, g, t // BLOCK, 3), generator=generator)
    listed = torch.rand(blocks.shape, generator=generator) > 0.3
    own = torch.randint(s // BLOCK, (batch, t // BLOCK), generator=generator) if causal else None
    return {"blocks": blocks, "listed": listed, "own": own, "block": BLOCK}


def band(q, k, v, reference=False, **options):
    return (banded_attention_reference if reference else banded_attention)(q, k, v, **options)


def segments(q, k, v, reference=False, **options):
    return (segment_attention_reference if reference else segment_attention)(q, k, v, **options)


def listed(q, k, v, reference=False, **options):
    y = (block_attention_reference if reference else block_attention)(q, k, v, **options)
    return y, q.new_zeros(q.shape[:3])


def hashed(q, k, v, reference=False, **options):
    """Attention among tokens sorted by hashes; the keys are the queries."""
    q = q + k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    y = (lsh.lsh_attention_reference if reference else lsh.lsh_attention)(q, v, **options)
    return y, q.new_zeros(q.shape[:3])


PATTERNS = [
    lsh.Pattern(causal=False, chunk=20),
    lsh.Pattern(causal=True, chunk=70, look_ahead=1, see_self=True),
    lsh.Pattern(causal=True, chunk=7, look_back=2, wrap=False),
    lsh.Pattern(causal=False, chunk=5, across_buckets=False),
    lsh.Pattern(causal=False, chunk=90, look_back=4),
]


def sorts(t, h, batch=2):
    """Options of `hashed`, one for each pattern."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(batch, t, generator=generator) > 0.2
    mask[0] = True
    for i, pattern in enumerate(PATTERNS):
        bucket = torch.randint(4, (batch, t, h, 1 + i % 3), generator=generator)
        yield {"bucket": bucket, "pattern": pattern, "mask": mask, "exact_union": i != 1, "scale": 0.7}


def cases(h, g, d, e, dtype=torch.float64):
    """Calls of every kind, over several tiles of queries and of keys: name, function, inputs, options."""
    visible = torch.rand(2, 160, generator=torch.Generator().manual_seed(1)) > 0.3
    size = {"h": h, "g": g, "d": d, "e": e, "dtype": dtype}
    yield "band", band, draw(150, 160, **size), {"before": 70, "after": 9}
    yield "mask", band, draw(160, **size), {"before": 20, "after": 0, "visible": visible}
    yield (
        "dilated",
        band,
        draw(150, 160, **size),
        {"before": 4, "after": 2, "dilation": 7, "visible": visible},
    )
    yield "segments", segments, draw(160, **size), {"segment": 30, "side": 17, "visible": visible}
    yield "blocks", listed, draw(100, 160, **size), lists(100, 160, g, False) | {"visible": visible}
    for options in sorts(160, h):
        yield "sorted", hashed, draw(160, **size), options
    yield "causal blocks", listed, draw(80, 160, **size), lists(80, 160, g, True) | {"scale": -0.3}


def results(function, inputs, **options):
    """o, the logsumexp with 0 for -inf, and the gradients through both."""
    o, logsumexp = function(*inputs, **options)
    logsumexp = logsumexp.masked_fill(logsumexp == -math.inf, 0.0)
    both = torch.cat((o, logsumexp[..., None]), -1)
    # Weights that every dtype represents exactly.
    weight = torch.randint(-8, 9, both.shape, generator=torch.Generator().manual_seed(0)).to(both.dtype) / 8
    return o, logsumexp, *torch.autograd.grad(both, inputs, weight)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", native.instruction_sets())
def test_every_instruction_set_computes_its_definition(name, shape):
    with native.use(name):
        for _, function, inputs, options in cases(*shape):
            found = results(function, inputs, **options)
            assert_close(found, results(function, inputs, reference=True, **options), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", native.instruction_sets())
def test_every_dtype_is_summed_in_float32(name, dtype):
    """Exact for the rounded inputs; gradients are rounded once more, to their dtype."""
    with native.use(name):
        for _, function, inputs, options in cases(4, 2, 40, 24, dtype):
            found = results(function, inputs, **options)
            exact = [x.detach().double().requires_grad_() for x in inputs]
            expected = results(function, exact, reference=True, **options)
            for i, (x, y) in enumerate(zip(found, expected, strict=True)):
                if function is hashed and dtype != torch.float32:
                    continue  # hashed inputs are rounded and normalised first
                # The o of blocks has the dtype of v, and its gradient so far is rounded as well.
                rounded = i > 1 or function is listed
                eps = torch.finfo(dtype if rounded else torch.float32).eps
                assert_close(x.double(), y, rtol=4 * eps, atol=4 * eps * float(y.detach().abs().max() + 1))


@pytest.mark.parametrize("batch", [1, 2])
def test_threads_change_no_bit(batch):
    """For one head, whose gradients are sums over several parts, and for several heads."""
    before = torch.get_num_threads()
    for t, h, g in ((1200, 1, 1), (200, 4, 2)):
        inputs = draw(t, h=h, g=g, batch=batch, dtype=torch.float32)
        everywhere = torch.arange(t // BLOCK).expand(1, g, t // BLOCK, -1)
        lists = {"blocks": everywhere, "listed": everywhere % 3 > 0, "block": BLOCK}
        bucket = torch.randint(40, (batch, t, h, 2), generator=torch.Generator().manual_seed(0))
        for function, options in (
            (hashed, {"bucket": bucket, "pattern": PATTERNS[0]}),
            (band, {"before": 90, "after": 10}),
            (band, {"before": 9, "after": 10, "dilation": 3}),
            (segments, {"segment": 50, "side": 30}),
            (listed, lists),
        ):
            found = []
            try:
                for threads in (1, 2, 5):
                    torch.set_num_threads(threads)
                    found.append(results(function, inputs, **options))
            finally:
                torch.set_num_threads(before)
            assert_close(found[1], found[0], rtol=0, atol=0)
            assert_close(found[2], found[0], rtol=0, atol=0)
            exact = [x.detach().double().requires_grad_() for x in inputs]
            expected = results(function, exact, reference=True, **options)
            for x, y in zip(found[0], expected, strict=True):  # float32; sums of 1e3 terms
                assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


def test_strides_are_read_as_they_lie():
    """Views of one product with q, k and v, and an expanded gradient."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 90, 4, 15, generator=generator, dtype=torch.float64)
    q, k, v = (x.requires_grad_() for x in qkv.split(5, -1))
    assert not q.is_contiguous()
    ours = banded_attention(q, k, v, before=9, after=3).o
    expected = banded_attention_reference(q, k, v, before=9, after=3).o
    found = torch.autograd.grad(ours.sum(), (q, k, v))
    assert_close(ours, expected, **EXACT)
    assert_close(found, torch.autograd.grad(expected.sum(), (q, k, v)), **EXACT)


@pytest.mark.parametrize("scale", [0.0, -2.0, 1e4, 1e30])
def test_any_scale_and_huge_scores(scale):
    inputs = draw(90, dtype=torch.float32 if scale > 1 else torch.float64)
    options = {"before": 20, "after": 5, "scale": scale}
    found, expected = results(band, inputs, **options), results(band, inputs, reference=True, **options)
    assert all(x.isfinite().all() for x in found)
    assert_close(found[0], expected[0])
    assert_close(found[1], expected[1])


def test_nan_of_a_visible_key_reaches_those_who_see_it_only():
    for which in (1, 2):  # of keys, of values
        inputs = draw(200)
        with torch.no_grad():
            inputs[which][0, 77] = math.nan
        o, logsumexp = banded_attention(*inputs, before=30, after=4)
        reached = torch.zeros(2, 200, dtype=torch.bool)
        reached[0, 73:108] = True
        assert_close(o.isnan().all(-1).all(-1), reached)
        assert_close(o.isnan().any(-1).any(-1), reached)
        assert logsumexp.isnan().any() == (which == 1)
        dq, dk, dv = gradients(o, inputs)
        assert_close(dq.isnan().any(-1).any(-1), reached)
        near = torch.zeros(2, 200, dtype=torch.bool)
        near[0, 43:112] = True  # seen by a query that sees it
        assert not dk[~near].isnan().any()
        assert not dv[~near].isnan().any()


def test_nan_that_no_query_sees_goes_nowhere():
    """It may be hidden by the mask, beyond the band, or in a block on no list."""
    visible = torch.ones(2, 100, dtype=torch.bool)
    visible[:, 40:60] = False
    clean = draw(100)
    dirty = [clean[0], *(x.detach().clone().requires_grad_() for x in clean[1:])]
    with torch.no_grad():
        for x in dirty[1:]:
            x[:, 40:60] = math.nan
    own = torch.tensor([[0, 1, 0, 4, 4]])
    blocks = torch.tensor([[[[0], [1], [3], [3], [4]]]]).expand(1, 2, -1, -1)
    where = {"blocks": blocks, "listed": torch.ones(1, 1, 5, 1, dtype=torch.bool), "own": own, "block": BLOCK}
    for function, options in (
        (band, {"before": 9, "after": 30, "visible": visible}),
        (segments, {"segment": 7, "side": 9, "visible": visible}),
        (listed, where),
    ):
        for x, y in zip(
            results(function, clean, **options), results(function, dirty, **options), strict=True
        ):
            assert_close(x, y, **EXACT)  # sums beside NaN are rounded in other places


def test_nan_in_a_gradient_reaches_what_its_query_sees_only():
    inputs = draw(200)
    o = banded_attention(*inputs, before=10, after=2).o
    given = torch.ones_like(o)
    given[1, 99] = math.nan
    dq, dk, dv = torch.autograd.grad(o, inputs, given)
    for x, first, last in ((dq, 99, 100), (dk, 89, 102), (dv, 89, 102)):
        expected = torch.zeros(2, 200, dtype=torch.bool)
        expected[1, first:last] = True
        assert_close(x.isnan().any(-1).any(-1), expected)


def test_a_query_that_sees_nothing_passes_no_gradient_however_it_comes():
    """With NaN in o and logsumexp of such queries, their gradient could be anything."""
    inputs = draw(80)
    visible = torch.ones(2, 80, dtype=torch.bool)
    visible[0, 20:40] = False
    o, logsumexp = banded_attention(*inputs, before=3, after=3, visible=visible)
    blind = logsumexp == -math.inf
    assert blind[0, 23:37].all()
    assert (o[blind] == 0).all()
    given = [
        torch.ones_like(x).masked_fill(mask, math.nan)
        for x, mask in ((o, blind[..., None]), (logsumexp, blind))
    ]
    for x in torch.autograd.grad((o, logsumexp), inputs, given):
        assert x.isfinite().all()


@pytest.mark.parametrize("kind", ["band", "segments", "blocks"])
def test_operator_obeys_pytorch(kind):
    """Its schema, its shapes without data, autograd, and graphs that contain it."""
    q, k, v = draw(40, batch=1)
    visible = torch.rand(1, 40, generator=torch.Generator().manual_seed(0)) > 0.3
    where = lists(40, 40, 2, True, batch=1)
    given = [where[name] if kind == "blocks" else None for name in ("blocks", "listed", "own")]
    arguments = (q, k, v, visible, *given, kind, 7, 3, 1, BLOCK, 0.5)
    torch.library.opcheck(softmax_native._operator, arguments)


def test_sorted_operator_obeys_pytorch():
    u, _, v = draw(40, h=2, g=2, batch=1)
    options = list(sorts(40, 2, 1))[2]
    pattern, order = options["pattern"], lsh.Order.of(options["bucket"], options["mask"], 7)
    sizes = (pattern.rule(True), pattern.chunk, pattern.look_back, pattern.look_ahead, 0.5)
    keys = norms.unit(u).detach().requires_grad_()
    torch.library.opcheck(
        lsh._operator, (u, keys, v, options["mask"], order.token, order.place, order.bucket, *sizes)
    )


def test_compiled_whole():
    for name, function, inputs, options in cases(4, 2, 5, 3):
        if name == "sorted" and options["pattern"] != PATTERNS[1]:
            continue  # a graph of each takes seconds
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert_close(
            results(compiled, inputs, **options), results(function, inputs, **options), rtol=0, atol=0
        )
        torch._dynamo.reset()


@pytest.mark.parametrize("kernels", ["off", None])
def test_autocast_keeps_the_digits(kernels):
    """In C++, and in PyTorch, whose products of matrices would otherwise be rounded."""
    with native.use(kernels or native.instruction_set()):
        for _, function, inputs, options in cases(4, 2, 5, 3, torch.float32):
            with torch.autocast("cpu", torch.bfloat16):
                o = function(*inputs, **options)[0]
            assert_close(o, function(*inputs, **options)[0], rtol=0, atol=0)


@pytest.mark.parametrize("function", [band, segments, listed, hashed])
def test_second_derivatives_and_transforms(function):
    inputs, options = draw(40, h=2, g=1, d=2, e=2, batch=1), lists(40, 40, 1, True, batch=1)
    given = {
        band: {"before": 3, "after": 1},
        segments: {"segment": 6, "side": 2},
        hashed: next(sorts(40, 2, 1)),
    }
    options = given.get(function, options)
    found = []
    for reference in (False, True):
        o, _ = function(*inputs, reference=reference, **options)
        first = torch.autograd.grad(o.square().sum(), inputs, create_graph=True)
        found.append(gradients(torch.cat([x.flatten() for x in first]), inputs))
    assert_close(*found, **EXACT)
    detached = [x.detach() for x in inputs]

    def scalar(q):
        return function(q, *detached[1:], **options)[0].square().sum()

    assert_close(torch.func.grad(scalar)(detached[0]), gradients_of(scalar, detached[0]), **EXACT)
    one = torch.func.vmap(lambda q: function(q, *detached[1:], **options)[0])(detached[0][None])
    assert_close(one[0], function(*detached, **options)[0], **EXACT)


@pytest.mark.parametrize("impl", ["native", "off"])
def test_second_derivatives_of_keys_that_are_computed_from_queries(impl):
    """A path from one input to another belongs to neither's own gradient."""
    q, _, v = draw(30, h=2, g=2, d=3)
    found = []
    with native.use(native.instruction_set() if impl == "native" else "off"):
        for attention in (banded_attention, banded_attention_reference):
            o = attention(q, q.sin(), v, before=3, after=1).o
            (first,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), (q, v)))
    assert_close(*found, **EXACT)


def gradients_of(scalar, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(scalar(x), x)[0]


def test_switched_off_it_is_pytorch():
    for _, function, inputs, options in cases(4, 2, 5, 3):
        with native.use("off"):
            found = results(function, inputs, **options)
        assert_close(found, results(function, inputs, **options), **EXACT)


def test_refuses_blocks_that_are_not_there():
    """In a compiled graph nothing else checks them."""
    q, k, v = (x.detach() for x in draw(40, batch=1))
    blocks = torch.full((1, 2, 2, 1), 2)
    with pytest.raises(RuntimeError, match="refused the call"):
        softmax_native.softmax_native(q, k, v, "blocks", blocks=blocks, listed=blocks > 0, unit=BLOCK)
