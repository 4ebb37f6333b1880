"""The state of a decoder as the cache that `generate` of transformers hands from call to call."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import Cache

from lintra.attention import leaves, map_state


class LintraCache(Cache):
    """Holds the `state` of a decoder (None: before any token) and `length`, the tokens so far with padding.

    The state of a recurrence has one size whatever the length. Each call of a model puts a new one in place
    of the old, whose tensors are never written into: `copy.copy(cache)` keeps a place to come back to.
    """

    def __init__(self):
        super().__init__(layers=[])
        self.state: Any = None
        self.length = 0

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors of the state."""
        return 0 if self.state is None else sum(x.nbytes for x in leaves(self.state))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # without end, as transformers writes it

    def reset(self) -> None:
        self.state, self.length = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the sequences of these numbers [b], as beam search does."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda x: x.repeat_interleave(repeats, 0))

    def crop(self, tokens_to_remove: int) -> None:
        """Raises ValueError unless there is nothing to remove: a state does not hold its past."""
        if tokens_to_remove:
            raise ValueError("a state cannot go back to an earlier token: return to a copy.copy of the cache")

    def _each(self, function: Callable[[Tensor], Tensor]) -> None:
        self.state = None if self.state is None else map_state(function, self.state)
