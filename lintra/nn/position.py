"""Position codes that are added to, or concatenated with, an embedding. Rotary: `lintra.ops.rope`."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lintra.ops import checks
from lintra.ops.rope import angles, at_positions


class Sinusoidal(nn.Module):
    """Sines and cosines of geometric wavelengths. Vaswani et al. 2017, arXiv:1706.03762, section 3.5."""

    def __init__(
        self,
        width: int,  # of a code, even
    ):
        super().__init__()
        if width % 2:
            raise ValueError(f"a sinusoidal position code needs an even width, got {width}")
        self.width = width

    def forward(self, position: Int[Tensor, "b t"]) -> Float[Tensor, "b t c"]:
        """Return codes in float32 or wider, whatever the model is: 16 bits do not tell 1,000 from 1,001."""
        return at_positions(self._codes, position)

    def _codes(self, position: Tensor) -> Tensor:
        angle = angles(position, self.width, 10_000.0)
        return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2)


class Bounded(nn.Module):
    """Base: a code for each of `reach` positions. `what` names them in an error."""

    def __init__(self, reach: int, what: str):
        super().__init__()
        self.reach, self.what = reach, what

    def forward(self, position: Int[Tensor, "b t"]) -> Float[Tensor, "b t c"]:
        """Raise ValueError past the last position. On a GPU and in a graph, where looking at positions would
        stop the device, what stands there is NaN instead."""
        if checks.readable(position):
            if position.numel():
                self.check(int(position.max()) + 1)
            return self.code(position)
        code = self.code(position.clamp(max=self.reach - 1))
        return code.masked_fill((position >= self.reach)[..., None], math.nan)

    def check(self, tokens: int) -> None:
        """Raise ValueError if there are not as many positions as tokens."""
        if tokens > self.reach:
            raise ValueError(f"{self.what} reach {self.reach} tokens, got token {tokens}")

    def code(self, position: Int[Tensor, "b t"]) -> Float[Tensor, "b t c"]:
        """Return the codes of positions that there are."""
        raise NotImplementedError


class Grid(Bounded):
    """A learned vector for each place along each axis of a grid, added; the last of `sizes` runs fastest.

    For an image as rows of values, sizes are rows, columns and channels.
    """

    def __init__(self, sizes: tuple[int, ...], width: int):
        super().__init__(math.prod(sizes), f"positions in a grid of {sizes}")
        self.sizes = sizes
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        for weight in self.tables.parameters():  # together about as large as a sinusoidal code
            nn.init.normal_(weight, std=0.7 / len(sizes) ** 0.5)

    def code(self, position: Tensor) -> Tensor:
        codes, rest = [], position
        for table, size in zip(reversed(self.tables), reversed(self.sizes), strict=True):
            codes.append(table(rest % size))
            rest = rest // size
        return torch.stack(codes).sum(0)


class Learned(Bounded):
    """One learned vector for each of the first `max_length` positions."""

    def __init__(
        self,
        max_length: int,  # positions that are learned; a later one is refused
        width: int,  # of a code
    ):
        super().__init__(max_length, f"learned positions of max_length={max_length}")
        self.table = nn.Embedding(max_length, width)
        nn.init.normal_(self.table.weight, std=0.02)

    def code(self, position: Tensor) -> Tensor:
        return self.table(position)
