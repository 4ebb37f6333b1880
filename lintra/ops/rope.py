"""Where tokens stand, and the rotary embedding of it. Su et al. 2021, arXiv:2104.09864, section 3.2."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lintra.ops.packed import PackedRow


def token_positions(
    seen: Int[Tensor, "n"],
    time: int,
    mask: Bool[Tensor, "b t"] | None,
    row: PackedRow | None = None,
) -> Int[Tensor, "b t"]:
    """The place of each of `time` new tokens among the real ones, `seen` of them earlier; -1 if padded.

    Of packed sequences [1 t], each counts its own, after its own `seen` [n]."""
    if row is not None:
        sequence, position = row.locate()
        return (seen[sequence] + position)[None]
    if mask is None:
        return seen[:, None] + torch.arange(time, device=seen.device)
    return torch.where(mask, seen[:, None] + mask.cumsum(1) - 1, -1)


def angles(position: Int[Tensor, "b t"], width: int, base: float) -> Float[Tensor, "b t half"]:
    """position * base^(-2i/width) for i below width / 2, in radians."""
    # float64 where there is one: at position 65,536 a float32 angle is already off by 0.004 radian.
    dtype = torch.float32 if position.device.type == "mps" else torch.float64
    exponent = torch.arange(width // 2, dtype=dtype, device=position.device) * (-2 / width)
    return position[..., None].to(dtype) * base**exponent


class RotaryEmbedding(NamedTuple):
    """Turns vectors by angles that grow with their position, so that q . k depends on the distance only."""

    position: Int[Tensor, "b t"]
    base: float  # no wavelength is longer than 2 pi base tokens

    def __call__(self, x: Float[Tensor, "b t h f"]) -> Float[Tensor, "b t h f"]:
        """x with pairs rotated by position * base^(-2i/f); pairs are (i, i + f/2), in the paper neighbours.

        Raises ValueError for odd f.
        """
        f = x.shape[-1]
        if f % 2:
            raise ValueError(f"rotary embedding turns pairs: the width must be even, got {f}")
        angle = angles(self.position, f, self.base)
        cos, sin = angle.cos()[:, :, None].to(x.dtype), angle.sin()[:, :, None].to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    def at(self, time: slice) -> "RotaryEmbedding":
        """The rotation of those tokens alone."""
        return self._replace(position=self.position[:, time])
