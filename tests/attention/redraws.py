"""What mechanisms with random parts share: a seed determines them, and only `redraw` changes them."""

from collections.abc import Callable

import torch
from torch import Tensor

from lintra.attention import Attention


def resamples_only_on_redraw(build: Callable[..., Attention], inputs: list[Tensor]) -> None:
    """Assert that random parts follow from the configuration's seed, then from the generator of `redraw`.

    `build` takes options of the configuration. Processes that share a batch have the same random parts.
    Not every mechanism obeys this law: where there are few random parts, every draw may be the same."""
    attention = build().train()
    y = attention(*inputs)
    assert torch.equal(attention.eval()(*inputs), y)
    assert torch.equal(build()(*inputs), y)
    assert not torch.allclose(build(seed=1)(*inputs), y)
    ranks = [build(), build()]
    for each in ranks:
        each.redraw(torch.Generator().manual_seed(5))
    assert torch.equal(ranks[0](*inputs), ranks[1](*inputs))
    assert not torch.allclose(ranks[0](*inputs), y)
