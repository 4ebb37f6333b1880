"""Padding is moved after the real tokens by counting, as it would be by sorting."""

import pytest
import torch

from lintra.ops.padding import LeftAlign, put_last


@pytest.mark.parametrize(("batch", "time"), [(40, 9), (3, 1), (2, 0), (0, 5), (2, 700)])
def test_real_tokens_come_first_in_their_order(batch, time):
    mask = torch.rand(batch, time, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[:1], mask[1:2] = True, False
    front = LeftAlign.of(mask)
    order = put_last(~mask)  # stable
    assert torch.equal(front.order, order)
    assert torch.equal(front.inverse, order.argsort(1))
    assert torch.equal(front.mask, mask.gather(1, order))
    x = torch.arange(1.0, batch * time + 1).reshape(batch, time, 1)
    assert torch.equal(front.restore(front.gather(x)), x * mask[..., None])
