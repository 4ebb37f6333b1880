"""Masks as objects. True is what is kept: real tokens, or keys a query may see.

Derived values are computed on first use and kept, since layers share a mask.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _once(compute: Callable[[Any], Any]) -> property:
    """A property that is computed once and kept in `_name`. (cached_property breaks graphs of torch.compile.)

    Out of inference mode: a mask that was first read in it must serve training.
    """
    name = f"_{compute.__name__}"

    def get(mask: Any) -> Any:
        if not hasattr(mask, name):
            with torch.inference_mode(False):
                setattr(mask, name, compute(mask))
        return getattr(mask, name)

    return property(get, doc=compute.__doc__)


class BaseMask:
    """Interface of a mask. `bool_matrix` is the mask; the rest follows from it."""

    @property
    def bool_matrix(self) -> Tensor:
        raise NotImplementedError

    @_once
    def float_matrix(self) -> Tensor:
        """1.0 where True, 0.0 elsewhere."""
        return self.bool_matrix.float()

    @_once
    def additive_matrix(self) -> Tensor:
        """0 where True, -inf elsewhere."""
        return self.bool_matrix.float().log()

    @_once
    def additive_matrix_finite(self) -> Tensor:
        """0 where True, -1e24 elsewhere."""
        return (~self.bool_matrix).float() * -1e24

    @_once
    def lengths(self) -> Tensor:
        """Return how many are True in each row. Raises ValueError unless these come first."""
        matrix = self.bool_matrix
        lengths = matrix.sum(-1)
        if not torch.equal(_first(lengths, matrix.shape[-1]), matrix):
            raise ValueError("this mask has no lengths: in some row a False stands before a True")
        return lengths

    @property
    def shape(self) -> torch.Size:
        return self.bool_matrix.shape

    @_once
    def all_ones(self) -> bool:
        return bool(self.bool_matrix.all())

    @_once
    def lower_triangular(self) -> bool:
        """Return whether each row i keeps the first i + 1 columns, and no others."""
        try:
            lengths = self.lengths
        except ValueError:
            return False
        return lengths.dim() == 1 and bool((lengths == _counted(len(lengths), lengths.device)).all())


class FullMask(BaseMask):
    """Any mask: FullMask(matrix), or all True: FullMask(n), FullMask(n, m), FullMask(N=n, M=m)."""

    def __init__(
        self,
        mask: Tensor | int | None = None,
        N: int | None = None,
        M: int | None = None,
        device: torch.device | str = "cpu",
    ):
        if isinstance(mask, Tensor):
            if mask.dtype != torch.bool:
                raise ValueError(f"a mask must be boolean, got {mask.dtype}")
            self._shape, self._device = mask.shape, mask.device
            with torch.inference_mode(False):
                self._mask = mask.clone()
            return
        rows, columns = (N, M) if mask is None else (mask, N if M is None else M)
        if rows is None:
            raise ValueError("FullMask needs a mask or its size N")
        # All True: the matrix is made if it is asked for.
        self._mask, self._shape, self._device = None, torch.Size((rows, columns or rows)), device

    @_once
    def bool_matrix(self) -> Tensor:
        return (
            torch.ones(self._shape, dtype=torch.bool, device=self._device)
            if self._mask is None
            else self._mask
        )

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @_once
    def all_ones(self) -> bool:
        return self._mask is None or bool(self._mask.all())


class LengthMask(BaseMask):
    """The first `lengths[i]` of `max_len` (default: the longest) places in row i."""

    def __init__(self, lengths: Tensor, max_len: int | None = None, device: torch.device | str | None = None):
        with torch.inference_mode(False):
            self._lengths = lengths.clone().to(lengths.device if device is None else device)
        self._max_len = int(max_len or self._lengths.max())

    @_once
    def bool_matrix(self) -> Tensor:
        return _first(self._lengths, self._max_len)

    @property
    def lengths(self) -> Tensor:
        return self._lengths

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self._lengths), self._max_len))

    @_once
    def all_ones(self) -> bool:
        return bool((self._lengths >= self._max_len).all())


class TriangularCausalMask(LengthMask):
    """Each of N queries keeps the keys up to its own place. The matrix is made only if it is asked for."""

    def __init__(self, N: int, device: torch.device | str = "cpu"):
        super().__init__(_counted(N, device), N)

    @_once
    def all_ones(self) -> bool:
        return self._max_len == 1

    @_once
    def lower_triangular(self) -> bool:
        return True


def _first(lengths: Tensor, size: int) -> Tensor:
    """Rows [... size] in which the first lengths[...] are True."""
    return torch.arange(size, device=lengths.device) < lengths[..., None]


def _counted(number: int, device: torch.device | str) -> Tensor:
    return torch.arange(1, number + 1, device=device)
