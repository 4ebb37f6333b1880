"""Padding is moved after the real tokens by counting, as it would be by sorting; filled and moved rows are
those that masked_fill and gather give."""

import pytest
import torch
from torch.testing import assert_close

from lintra.ops.padding import LeftAlign, put_last, take, take_by_head, zero_padding


@pytest.mark.parametrize(("batch", "time"), [(40, 9), (3, 1), (2, 0), (0, 5), (2, 700)])
def test_real_tokens_come_first_in_their_order(batch, time):
    mask = torch.rand(batch, time, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[:1], mask[1:2] = True, False
    front = LeftAlign.of(mask)
    order = put_last(~mask)  # stable
    places = torch.arange(time).expand(batch, -1)
    assert torch.equal(places if front.order is None else front.order, order)
    assert torch.equal(places if front.inverse is None else front.inverse, order.argsort(1))
    assert torch.equal(front.mask, mask.gather(1, order))
    x = torch.arange(1.0, batch * time + 1).reshape(batch, time, 1) * mask[..., None]
    moved = front.gather(x)
    assert torch.equal(moved[front.mask], x[mask])
    assert torch.equal(front.restore(moved + 1.0), (x + 1.0) * mask[..., None])


def test_padding_behind_the_real_tokens_is_where_it_belongs():
    """Nothing is moved or copied, unless a graph is made, in which nobody can look."""
    mask = torch.arange(5) < torch.tensor([[5], [2], [0]])
    front = LeftAlign.of(mask)
    assert (front.order, front.inverse) == (None, None)
    x = torch.randn(3, 5, 2)
    assert front.gather(x) is x
    traced = torch.compile(LeftAlign.of, backend="eager")(mask)
    assert torch.equal(traced.order, torch.arange(5).expand(3, -1))
    assert torch.equal(traced.restore(x), front.restore(x))


MASK = torch.tensor([[True, False, True, True], [False, False, False, False], [True, True, True, False]])
ORDER = torch.tensor([[3, 0], [1, 1], [2, 3]])
BY_HEAD = (torch.arange(3 * 5 * 7).reshape(3, 5, 7) * 11 + 2) % 4


def filled(mask, x):
    return x.masked_fill(~mask[:, :, None, None], 0)


def moved(x, order):
    return x.gather(1, order[:, :, None, None].expand(-1, -1, *x.shape[2:]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("cut", [slice(None), slice(1, 3)], ids=["whole", "view"])
def test_rows_are_those_of_masked_fill_and_gather(dtype, cut):
    x = (torch.arange(3 * 4 * 5 * 2.0).reshape(3, 4, 5, 2) % 7).to(dtype)[:, :, cut]
    before = x.clone()
    assert torch.equal(zero_padding(MASK, x)[0], filled(MASK, x))
    assert torch.equal(take(x, ORDER), moved(x, ORDER))
    assert torch.equal(x, before)
    assert torch.equal(zero_padding(MASK, x[..., 0, 0])[0], x[..., 0, 0].masked_fill(~MASK, 0))


@pytest.mark.parametrize("cut", [slice(None), slice(1, 3)], ids=["whole", "view"])
def test_rows_by_head_are_those_of_gather(cut):
    x, places = torch.randn(3, 4, 5, 2)[:, :, cut], BY_HEAD[:, cut]
    index = places[..., None].expand(-1, -1, -1, 2)
    assert torch.equal(take_by_head(x, places), x.transpose(1, 2).gather(2, index))
    assert take_by_head(x[:, :0], places[..., :0]).shape == (3, x.shape[2], 0, 2)


def test_rows_have_the_same_derivatives():
    x = torch.randn(3, 4, 5, 2, dtype=torch.float64, requires_grad=True)
    moves = (lambda x: take(x, ORDER), lambda x: take_by_head(x, BY_HEAD))
    for call in (lambda x: zero_padding(MASK, x)[0], *moves):
        assert torch.autograd.gradcheck(call, x)
        assert torch.autograd.gradgradcheck(lambda x, call=call: call(x) ** 2, x)


def test_padding_that_is_not_finite_has_no_gradient():
    x = torch.full((3, 4, 5, 2), torch.nan).masked_fill(MASK[:, :, None, None], 2.0).requires_grad_()
    (dx,) = torch.autograd.grad((zero_padding(MASK, x)[0] ** 2).sum(), x)
    assert torch.equal(dx, filled(MASK, torch.full_like(x, 4.0)))


@pytest.mark.parametrize("of", ["x", "x and mask"])
def test_rows_inside_vmap(of):
    x = torch.randn(2, 3, 4, 5, 2)
    masks, orders = torch.stack((MASK, ~MASK)), torch.stack((ORDER, ORDER.flip(1)))
    if of == "x":
        fill, move = (
            torch.vmap(call)(x) for call in (lambda x: zero_padding(MASK, x)[0], lambda x: take(x, ORDER))
        )
        masks, orders = MASK.expand(2, 3, 4), ORDER.expand(2, 3, 2)
    else:
        fill, move = (
            torch.vmap(lambda mask, x: zero_padding(mask, x)[0])(masks, x),
            torch.vmap(take)(x, orders),
        )
    for i in range(2):
        assert_close(fill[i], filled(masks[i], x[i]), rtol=0, atol=0)
        assert_close(move[i], moved(x[i], orders[i]), rtol=0, atol=0)


def test_rows_in_one_graph():
    x = torch.randn(3, 4, 5, 2)
    both = torch.compile(
        lambda x, mask, order: take(zero_padding(mask, x)[0], order), backend="eager", fullgraph=True
    )
    assert torch.equal(both(x, MASK, ORDER), moved(filled(MASK, x), ORDER))
