"""Pieces of softmax attention: joined over any split of the keys, they equal the whole."""

import weakref
from itertools import pairwise, permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lintra.ops.padding import LeftAlign
from lintra.ops.softmax_attention import PartialAttention, fused_attention, merge_lse, softmax_attention
from lintra.testing.laws import EXACT, gradients


def draw(i=5, j=11, d=4, e=3):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, n, w, generator=generator, dtype=torch.float64).requires_grad_()
        for n, w in ((i, d), (j, d), (j, e))
    ]


@given(cuts=st.lists(st.integers(0, 11), max_size=3).map(sorted))
def test_pieces_join_to_the_whole(cuts):
    q, k, v = draw()
    visible = torch.rand(2, 5, 11, generator=torch.Generator().manual_seed(1)) > 0.3
    edges = [0, *cuts, 11]
    pieces = [
        softmax_attention(q, k[:, a:b], v[:, a:b], visible=visible[..., a:b]) for a, b in pairwise(edges)
    ]
    joined, whole = merge_lse(*pieces), softmax_attention(q, k, v, visible=visible)
    scores = (q @ k.mT / 2).masked_fill(~visible, -torch.inf)
    assert_close(whole.o, scores.softmax(-1) @ v, **EXACT)
    assert_close(whole.logsumexp, scores.logsumexp(-1), **EXACT)
    assert_close(joined.o, whole.o, **EXACT)
    assert_close(joined.logsumexp, whole.logsumexp, **EXACT)
    assert_close(gradients(joined.o, [q, k, v]), gradients(whole.o, [q, k, v]), **EXACT)
    ours = gradients(joined.logsumexp, [q, k, v])
    assert_close(ours, gradients(whole.logsumexp, [q, k, v]), **EXACT)


def test_pieces_join_in_any_order_and_grouping():
    """Values and gradients, with pieces that are empty for some queries or for all, and one without keys."""
    q, k, v = draw()
    visible = torch.rand(2, 5, 11, generator=torch.Generator().manual_seed(1)) > 0.3
    visible[:, 2], visible[0, 3, :8], visible[..., 4:8] = False, False, False
    pieces = [
        softmax_attention(q, k[:, i:j], v[:, i:j], visible=visible[..., i:j])
        for i, j in ((0, 4), (4, 8), (8, 8), (8, 11))
    ]

    def everything(piece: PartialAttention) -> list[torch.Tensor]:
        finite = piece.logsumexp.masked_fill(piece.logsumexp == -torch.inf, 0.0)
        return [*piece, *gradients(piece.o, [q, k, v]), *gradients(finite, [q, k, v])]

    expected = everything(merge_lse(*pieces))
    for a, b, c, d in permutations(pieces):
        for joined in (
            merge_lse(a, b, c, d),
            merge_lse(a, merge_lse(b, merge_lse(c, d))),
            merge_lse(merge_lse(a, b), merge_lse(c, d)),
        ):
            assert_close(everything(joined), expected, **EXACT)


def test_an_empty_set_is_nothing():
    """A row that sees no key: 0 and -inf, no gradient, and no effect on what it is joined with."""
    q, k, v = draw()
    visible = torch.ones(2, 5, 11, dtype=torch.bool)
    visible[:, 2] = False
    seen, nothing = softmax_attention(q, k, v, visible=visible), softmax_attention(q, k[:, :0], v[:, :0])
    assert (nothing.o == 0).all()
    assert (nothing.logsumexp == -torch.inf).all()
    joined = merge_lse(nothing, seen, nothing)
    assert_close(joined, seen, **EXACT)
    assert (joined.o[:, 2] == 0).all()
    for g in gradients(joined.o, [q, k, v]):
        assert g.isfinite().all()
    assert (gradients(joined.o, [q])[0][:, 2] == 0).all()


@pytest.mark.parametrize("keys", [0, 11])
def test_pieces_keep_their_dtype_under_autocast(keys):
    """Without keys too: the pieces to be joined are float32."""
    q, k, v = (x.detach().float() for x in draw())
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            piece = softmax_attention(q.to(dtype), k[:, :keys].to(dtype), v[:, :keys].to(dtype))
            assert (piece.o.dtype, piece.logsumexp.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize("size", [1e4, 1e-4])
def test_scores_of_any_size(size):
    q, k, v = (x.detach().float() for x in draw())
    whole = softmax_attention(q * size, k, v)
    assert whole.o.isfinite().all()
    halves = merge_lse(
        softmax_attention(q * size, k[:, :5], v[:, :5]), softmax_attention(q * size, k[:, 5:], v[:, 5:])
    )
    assert_close(halves.o, whole.o)


def test_bias_and_scale():
    q, k, v = draw()
    bias = torch.randn(5, 11, dtype=torch.float64)
    y = softmax_attention(q, k, v, bias=bias, scale=0.3)
    assert isinstance(y, PartialAttention)
    assert_close(y.o, (0.3 * q @ k.mT + bias).softmax(-1) @ v, **EXACT)


def test_real_tokens_come_first_and_go_back():
    mask = torch.tensor([[True, False, True, False], [False, False, False, True], [True] * 4, [False] * 4])
    x = torch.arange(1.0, 33.0).reshape(4, 4, 2).masked_fill(~mask[..., None], 0.0)
    packed = LeftAlign.of(mask)
    front = packed.gather(x)
    assert packed.mask.sum(1).tolist() == [2, 1, 4, 0]
    assert_close(front[0, :2], x[0, [0, 2]])
    assert_close(packed.restore(front.masked_fill(~packed.mask[..., None], torch.nan)), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_scores_of_16_bits_are_not_rounded_to_them(dtype, autocast):
    """Only weights and the result are, each by at most half a unit in the last place of the largest value."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(40, 64, generator=generator) * size for size in (6, 6, 1))
    exact = softmax_attention(*(x.to(dtype).double() for x in (q, k, v))).o
    with torch.autocast("cpu", dtype, enabled=autocast):
        q, k, v = (x.to(dtype).float() if autocast else x.to(dtype) for x in (q, k, v))
        o = softmax_attention(q, k, v).o
    assert (o - exact).abs().max() <= torch.finfo(dtype).eps * v.abs().max()


def test_fused_attention_is_softmax_attention():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, h, n, w, generator=generator, dtype=torch.float64).requires_grad_()
        for h, n, w in ((4, 6, 4), (2, 9, 4), (2, 9, 3))
    )
    visible = torch.rand(2, 1, 6, 9, generator=generator) > 0.5
    visible[0, 0, 2] = False
    wide = [x.repeat_interleave(2, 1) for x in (k, v)]
    expected = softmax_attention(q, *wide, visible=visible, scale=0.3).o
    y = fused_attention(q, k, v, visible=visible, scale=0.3)
    assert_close(y, expected, **EXACT)
    for ours, theirs in zip(gradients(y, (q, k, v)), gradients(expected, (q, k, v)), strict=True):
        assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_fused_attention_hides_the_future_at_any_scale(scale):
    """A hidden score of -inf, scaled by 0 or less, becomes NaN or the largest of all."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 9, 4, generator=generator).requires_grad_() for _ in range(3))
    past = torch.ones(9, 9, dtype=torch.bool).tril()
    y = fused_attention(q, k, v, causal=True, scale=scale)
    expected = softmax_attention(q, k, v, visible=past, scale=scale).o
    assert_close(y, expected)
    assert_close(gradients(y, [q, k, v]), gradients(expected, [q, k, v]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"scale": -0.4}, {"visible": True}], ids=lambda x: "-".join(x)
)
def test_second_derivatives(options, dtype):
    """They are those of the formula where PyTorch's kernel has none: for a mask with a blind row, for groups
    and for a part of the inputs."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, h, 5, 3, generator=generator, dtype=dtype) for h in (4, 2, 2)]
    if "visible" in options:
        visible = torch.rand(2, 1, 5, 5, generator=generator) > 0.3
        visible[0, 0, 2] = False
        options = {"visible": visible}
    for constant in range(4):
        inputs = [x.requires_grad_(i != constant) for i, x in enumerate(x.clone() for x in drawn)]
        some = [x for x in inputs if x.requires_grad]

        def both(attention, inputs=inputs, some=some):
            y = attention(*inputs) + inputs[0].sin()  # one part that does not come from attention
            first = torch.autograd.grad((y**2).sum(), some, create_graph=True)
            once = torch.autograd.grad((attention(*inputs) ** 2).sum(), some)
            return [*once, *first, *gradients(torch.cat([g.flatten() for g in first]), some)]

        found = both(lambda *x: fused_attention(*x, **options))
        exact = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
        expected = both(lambda *x: formula(*x, **options), exact, [x for x in exact if x.requires_grad])
        # float32: some ten roundings of 6e-8 of numbers up to 1e2.
        close = EXACT if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
        assert_close([x.double() for x in found], expected, **close)


def formula(q, k, v, visible=None, causal=False, scale=None):
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    if causal:
        visible = torch.ones(5, 5, dtype=torch.bool).tril()
    return softmax_attention(q, k, v, visible=visible, scale=scale).o


def test_a_backward_pass_without_a_graph_is_the_kernels():
    """Its gradient has no graph, and no scores are stored: only q, k, v, y and one number per row."""
    q, k, v = (torch.randn(1, 1, 300, 4, requires_grad=True) for _ in range(3))
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        y = fused_attention(q, k, v, causal=True)
    (g,) = torch.autograd.grad(y.sum(), q, retain_graph=True)
    assert not g.requires_grad
    assert sum(x.numel() for x in kept.values()) <= 4 * q.numel() + 300
    assert torch.autograd.grad(y.sum(), q, create_graph=True)[0].requires_grad


def test_the_mask_is_kept_as_the_graph_keeps_tensors():
    """Saved-tensor hooks see it, a second derivative uses what they return, and backward frees it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 7, 4, generator=generator).requires_grad_() for _ in range(3))
    visible = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    masks = []

    def pack(x):
        if x.dtype == torch.bool and x.shape[-2:] == visible.shape[-2:]:
            masks.append(weakref.ref(x))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = fused_attention(q, k, v, visible=visible)
    assert [mask() is not None for mask in masks] == [True]
    torch.autograd.grad(y.sum(), q)
    assert masks[0]() is None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        y = fused_attention(q, k, v, visible=visible)
    (g,) = torch.autograd.grad((y**2).sum(), q, create_graph=True)
    expected = torch.autograd.grad((fused_attention(q, k, v, causal=True) ** 2).sum(), q)
    assert_close(g, expected[0])


@pytest.mark.parametrize("causal", [False, True])
def test_transforms_of_torch_func(causal):
    """With q, k and v of one width, for which kernels of PyTorch support neither forward mode nor vmap."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 4, 5, 8, generator=generator, dtype=torch.float64)
    past = torch.ones(5, 5, dtype=torch.bool).tril() if causal else None

    def call(q, k, v):
        return fused_attention(q, k, v, causal=causal)

    def definition(q, k, v):
        return softmax_attention(q, k, v, visible=past).o

    assert_close(torch.vmap(call)(q, k, v), torch.stack([definition(*x) for x in zip(q, k, v, strict=True)]))
    one, direction = (q[0], k[0], v[0]), (q[1], k[1], v[1])
    assert_close(torch.func.jvp(call, one, direction), torch.func.jvp(definition, one, direction))
    square = [lambda *x, f=f: f(*x).square().sum() for f in (call, definition)]
    found, expected = (torch.func.hessian(f)(*(x[:1, :1] for x in one)) for f in square)
    assert_close(found, expected)
