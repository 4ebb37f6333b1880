"""Masks as objects. True is what is kept: real tokens, or keys a query may see."""

import torch
from torch import Tensor


class BaseMask:
    """What the layers ask of a mask. `bool_matrix` is the mask; the rest follows from it."""

    @property
    def bool_matrix(self) -> Tensor:
        raise NotImplementedError

    @property
    def float_matrix(self) -> Tensor:
        """1.0 where True, 0.0 elsewhere."""
        return self.bool_matrix.float()

    @property
    def additive_matrix(self) -> Tensor:
        """0 where True, -inf elsewhere."""
        return self.float_matrix.log()

    @property
    def additive_matrix_finite(self) -> Tensor:
        """0 where True, -1e24 elsewhere."""
        return (~self.bool_matrix).float() * -1e24

    @property
    def lengths(self) -> Tensor:
        """How many are True in each row. Raises ValueError unless these come first."""
        matrix = self.bool_matrix
        lengths = matrix.sum(-1)
        places = torch.arange(matrix.shape[-1], device=matrix.device)
        if not torch.equal(places < lengths[..., None], matrix):
            raise ValueError("this mask has no lengths: in some row a False stands before a True")
        return lengths

    @property
    def shape(self) -> torch.Size:
        return self.bool_matrix.shape

    @property
    def all_ones(self) -> bool:
        return bool(self.bool_matrix.all())

    @property
    def lower_triangular(self) -> bool:
        """Whether row i keeps the first i + 1 columns."""
        matrix = self.bool_matrix
        square = matrix.dim() == 2 and matrix.shape[0] == matrix.shape[1]
        return square and torch.equal(matrix, torch.ones_like(matrix).tril())


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
            self._matrix = mask.clone()
            return
        rows, columns = (mask, N if M is None else M) if mask is not None else (N, M)
        if rows is None:
            raise ValueError("FullMask needs a mask or its size N")
        # One True that looks like as many as are wanted.
        columns = rows if columns is None else columns
        self._matrix = torch.ones(1, 1, dtype=torch.bool, device=device).expand(rows, columns)

    @property
    def bool_matrix(self) -> Tensor:
        return self._matrix

    @property
    def all_ones(self) -> bool:
        return self._matrix.stride() == (0, 0) or super().all_ones


class LengthMask(BaseMask):
    """The first `lengths[i]` of `max_len` (default: the longest) places in row i."""

    def __init__(self, lengths: Tensor, max_len: int | None = None, device: torch.device | str | None = None):
        self._lengths = lengths.clone().to(lengths.device if device is None else device)
        self._max_len = int(self._lengths.max()) if max_len is None else int(max_len)

    @property
    def bool_matrix(self) -> Tensor:
        return torch.arange(self._max_len, device=self._lengths.device) < self._lengths[:, None]

    @property
    def lengths(self) -> Tensor:
        return self._lengths

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self._lengths), self._max_len))

    @property
    def all_ones(self) -> bool:
        return bool((self._lengths >= self._max_len).all())


class TriangularCausalMask(LengthMask):
    """Each of N queries keeps the keys up to its own place. The matrix is made only if it is asked for."""

    def __init__(self, N: int, device: torch.device | str = "cpu"):
        super().__init__(torch.arange(1, N + 1, device=device), N)

    @property
    def all_ones(self) -> bool:
        return self._max_len == 1

    @property
    def lower_triangular(self) -> bool:
        return True
