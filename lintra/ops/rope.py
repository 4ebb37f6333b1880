"""Rotary position embedding (RoPE). Su et al. 2021, arXiv:2104.09864, section 3.2."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lintra.ops import checks
from lintra.ops.dispatch import once


def angles(position: Int[Tensor, "b t"], width: int, base: float) -> Float[Tensor, "b t half"]:
    """Return position * base^(-2i/width) for i below width / 2, in radians."""
    # float64 where supported: at position 65,536 a float32 angle is already off by 0.004 radian.
    dtype = torch.float32 if position.device.type == "mps" else torch.float64
    exponent = torch.arange(width // 2, dtype=dtype, device=position.device) * (-2 / width)
    return position[..., None].to(dtype) * base**exponent


def at_positions(code: Callable[[Tensor], Tensor], position: Int[Tensor, "b t"]) -> Float[Tensor, "b t ..."]:
    """Return code(position), computed only once for a position that several samples share. On a GPU and in a
    graph, where looking at positions would stop the device, it is computed for each of them."""
    if min(position.shape) > 1 and checks.readable(position):
        first, last = (int(x) for x in position.aminmax())
        if last - first < position.numel() // 2:
            table = code(torch.arange(first, last + 1, device=position.device)[None])[0]
            return table.index_select(0, (position - first).flatten()).unflatten(0, position.shape)
    return code(position)


class RotaryEmbedding:
    """Rotation of vectors by angles that grow with their position: q . k then depends on the distance alone.

    position [b t] counts tokens; no wavelength is longer than 2 pi `base` tokens.
    """

    def __init__(self, position: Int[Tensor, "b t"], base: float):
        self.position, self.base = position, base
        self._made: dict[Any, tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Float[Tensor, "b t h f"]) -> Float[Tensor, "b t h f"]:
        """Return x with its pairs rotated by position * base^(-2i/f); pairs are (i, i + f/2), in the paper
        neighbours. Raises ValueError for odd f."""
        cos, sin = self._cos_sin(x.shape[-1], x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    def at(self, tokens: slice) -> "RotaryEmbedding":
        """Return the rotation of those tokens alone."""
        return RotaryEmbedding(self.position[:, tokens], self.base)

    def moved(self, position: Int[Tensor, "b t"]) -> "RotaryEmbedding":
        """Return the same rotation at other positions."""
        return RotaryEmbedding(position, self.base)

    def _cos_sin(self, f: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[b t 1 f/2] each: made once for queries, keys and all layers."""
        if f % 2:
            raise ValueError(f"rotary embedding rotates pairs: the width must be even, got {f}")

        def code(position: Tensor) -> Tensor:
            angle = angles(position, f, self.base)
            return torch.cat((angle.cos(), angle.sin()), -1).to(dtype)

        def make() -> tuple[Tensor, Tensor]:
            cos, sin = at_positions(code, self.position)[:, :, None].chunk(2, -1)
            return cos, sin

        return once(self._made, (f, dtype), make)
