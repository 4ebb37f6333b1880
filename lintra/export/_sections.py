"""Sections of a file for the runtime: matrices, tables and vectors, rows filled up with zeros."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra.native.quantize import round_rows

Weights = Literal["float32", "float16", "int8"]

ALIGN, LANES = 64, 16  # bytes, numbers: sections and rows are filled up to a multiple
_TORCH = {"float32": torch.float32, "float16": torch.float16}


class Sections:
    """Content after the header, in order."""

    def __init__(self, weights: Weights):
        self.weights: Weights = weights
        self.parts: list[bytes] = []

    def add(self, content: bytes) -> None:
        self.parts += content, bytes(-len(content) % ALIGN)

    def vector(self, x: Tensor) -> None:
        self.rows(x[None], "float32")

    def rows(self, x: Tensor, kind: Weights) -> None:
        """x [o i], the rows filled up with zeros. Raises ValueError for numbers that would be stored as
        infinite or NaN: what is computed from sound weights may overflow."""
        given = x.detach().cpu()
        x, scale = given.float(), None
        if not bool(x.isfinite().all()):
            raise ValueError(f"what a file holds must fit into float32, got {float(given.abs().max()):g}")
        if kind == "int8":
            x, scale = round_rows(x)
        stored = x.to(torch.int8 if kind == "int8" else _TORCH[kind])
        if kind == "float16" and not bool(stored.isfinite().all()):
            raise ValueError(f"weights must fit into float16, got {float(x.abs().max()):g}: keep float32")
        if scale is not None:
            self.vector(scale)
        self.add(functional.pad(stored, (0, -x.shape[1] % LANES)).contiguous().numpy().tobytes())

    def table(self, x: Tensor) -> None:
        self.rows(x, "float32" if self.weights == "float32" else "float16")

    def linear(self, weight: Tensor, bias: Tensor | None) -> None:
        self.rows(weight, self.weights)
        self.vector(weight.new_zeros(weight.shape[0]) if bias is None else bias)

    @staticmethod
    def bias(linear: nn.Linear) -> Tensor:
        """Return the bias of a linear map, zeros where it has none."""
        return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias

    def norm(self, norm: Any) -> None:
        self.vector(norm.weight)
        if isinstance(norm, nn.LayerNorm):
            self.vector(torch.zeros_like(norm.weight) if norm.bias is None else norm.bias)
