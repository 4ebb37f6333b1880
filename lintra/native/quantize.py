"""Weights rounded to bfloat16 or int8, and packed as the native decoder reads them."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Weights = Literal["float32", "bfloat16", "int8"]

PANEL = 64  # LINTRA_PANEL of abi.h
DTYPES = {"float32": (torch.float32, 0), "bfloat16": (torch.bfloat16, 2), "int8": (torch.int8, 4)}


class Map(NamedTuple):
    """A linear map, packed: lintra_map of abi.h."""

    panels: Tensor
    scale: Tensor | None
    bias: Tensor
    inputs: int
    outputs: int

    def words(self) -> tuple[int, ...]:
        scale = 0 if self.scale is None else self.scale.data_ptr()
        return self.panels.data_ptr(), scale, self.bias.data_ptr(), self.inputs, self.outputs


class Norm(NamedTuple):
    """A norm of rows: LayerNorm, without bias RMSNorm, without weight none."""

    weight: Tensor | None
    bias: Tensor | None

    def words(self) -> tuple[int, ...]:
        return tuple(0 if x is None else x.data_ptr() for x in self)


def pack(weight: Tensor, bias: Tensor | None, weights: Weights, *, gated: bool = False) -> Map:
    """Pack weight [o i] and bias [o] of a linear map. gated: the first half of the outputs gates the second.

    int8 has a scale for each output, its largest weight / 127.
    """
    (outputs, inputs), dtype = weight.shape, DTYPES[weights][0]
    bias = weight.new_zeros(outputs) if bias is None else bias
    scale = None
    if weights == "int8":
        weight, scale = round_rows(weight)
    halves = 2 if gated else 1
    scale = None if scale is None else _panels(scale, halves)
    return Map(
        _words(_panels(weight.to(dtype), halves)),
        scale,
        _panels(bias, halves),
        inputs,
        halves * pad_to_panels(outputs // 2) if gated else outputs,
    )


def round_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round weight [o i] to whole numbers of at most 127 in size, as floats; return them and the scale [o] of
    each row."""
    scale = weight.abs().amax(1) / 127
    scale = torch.where(scale == 0, 1.0, scale)
    # Beyond where the scale is subnormal; NaN where the scale is, which stays NaN.
    return (weight / scale[:, None]).round().clamp(-127, 127).nan_to_num(0), scale


def pack_norm(weight: Tensor, bias: Tensor | None) -> Norm:
    """Return the packed parameters [c] of a norm."""
    return Norm(_panels(weight, 1), None if bias is None else _panels(bias, 1))


def pad_to_panels(n: int) -> int:
    return -(-n // PANEL) * PANEL


def _panels(x: Tensor, halves: int) -> Tensor:
    """x [o ..] filled up with zeros -> [panels 64 ..], those of the halves in turn."""
    own = x.shape[0] // halves
    whole = x.new_zeros(halves, pad_to_panels(own), *x.shape[1:])
    whole[:, :own] = x.unflatten(0, (halves, own))
    return whole.unflatten(1, (-1, PANEL)).transpose(0, 1).flatten(0, 1).contiguous()


def _words(panels: Tensor) -> Tensor:
    """[panels 64 i] -> [panels words 64 n], n inputs in a word of 32 bits."""
    count = 4 // panels.element_size()
    padded = torch.nn.functional.pad(panels, (0, -panels.shape[2] % count))
    return padded.unflatten(2, (-1, count)).transpose(1, 2).contiguous()
