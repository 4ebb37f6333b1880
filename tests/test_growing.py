"""experiments/images/grow.py: a larger model that computes the same function."""

import dataclasses
import runpy
from pathlib import Path

import pytest
import torch

from lintra.models import decoder

grow = runpy.run_path(str(Path(__file__).parents[1] / "experiments" / "images" / "grow.py"))["grow"]

SMALL = decoder.Config(
    vocabulary=7, layers=2, heads=2, width=16, mlp_ratio=3, position="grid", grid=(4, 5, 1), context=(1, 5)
)
LARGE = dataclasses.replace(SMALL, layers=4, heads=4, width=32, mlp_ratio=3.5)


def grown(config):
    small = SMALL.build().double()
    for x in small.parameters():  # biases and norms too, which begin as constants
        torch.nn.init.normal_(x, std=0.3)
    return small, grow(small, config, torch.Generator().manual_seed(0))


def test_it_computes_the_same():
    small, large = grown(LARGE)
    tokens = torch.randint(7, (2, 20))
    torch.testing.assert_close(large(tokens), small(tokens), rtol=1e-9, atol=1e-9)
    assert large.config == LARGE


def test_its_copies_learn_different_things():
    """With equal shares, each copy would get the same gradient as the other forever."""
    _, large = grown(LARGE)
    large(torch.randint(7, (2, 20))).square().sum().backward()
    for block in large.blocks[::2]:
        first, second = block.attn.out_proj.weight.grad.chunk(2, 0)
        assert not torch.allclose(first, second)
    assert all(block.mlp.down.weight.grad.abs().max() > 0 for block in large.blocks)


@pytest.mark.parametrize(
    "changes",
    [{"width": 64}, {"heads": 2}, {"layers": 3}, {"mlp_ratio": 2.0}, {"norm": "post"}, {"context": ()}],
)
def test_other_sizes_are_refused(changes):
    with pytest.raises(ValueError, match="config must"):
        grown(dataclasses.replace(LARGE, **changes))
