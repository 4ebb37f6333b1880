"""Position codes that are added to, or concatenated with, an embedding. Rotary: `lintra.ops.positions`."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lintra.ops import _check
from lintra.ops.positions import angles


class Sinusoidal(nn.Module):
    """Sines and cosines of geometric wavelengths. Vaswani et al. 2017, arXiv:1706.03762, section 3.5."""

    def __init__(self, width: int):
        super().__init__()
        if width % 2:
            raise ValueError(f"a sinusoidal position code needs an even width, got {width}")
        self.width = width

    def forward(self, position: Int[Tensor, "b t"]) -> Float[Tensor, "b t c"]:
        """In float32 or wider, whatever the model is: 16 bits cannot tell position 1,000 from 1,001."""
        angle = angles(position, self.width, 10_000.0)
        return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2)


class Grid(nn.Module):
    """A learned vector for each place along each axis of a grid, added; the last of `sizes` runs fastest.

    For an image as rows of values, sizes are rows, columns and channels.
    """

    def __init__(self, sizes: tuple[int, ...], width: int):
        super().__init__()
        self.sizes = sizes
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        for weight in self.tables.parameters():  # together about as large as a sinusoidal code
            nn.init.normal_(weight, std=0.7 / len(sizes) ** 0.5)

    def forward(self, position: Int[Tensor, "b t"]) -> Float[Tensor, "b t c"]:
        """Raises ValueError past the last place."""
        check_reach(position, math.prod(self.sizes), f"positions in a grid of {self.sizes}")
        codes, rest = [], position
        for table, size in zip(reversed(self.tables), reversed(self.sizes), strict=True):
            codes.append(table(rest % size))
            rest = rest // size
        return torch.stack(codes).sum(0)


class Learned(nn.Module):
    """One learned vector for each of the first `max_length` positions."""

    def __init__(self, max_length: int, width: int):
        super().__init__()
        self.table = nn.Embedding(max_length, width)
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, position: Int[Tensor, "b t"]) -> Float[Tensor, "b t c"]:
        """Raises ValueError past the last position."""
        length = self.table.num_embeddings
        check_reach(position, length, f"learned positions of max_length={length}")
        return self.table(position)


def check_reach(position: Tensor, length: int, what: str) -> None:
    """Raises ValueError if a token stands past the last place of `what`."""
    if _check.readable(position) and position.numel() and int(position.max()) >= length:
        raise ValueError(f"{what} reach {length} tokens, got token {int(position.max()) + 1}")
