"""Caches of transformers that keep states in place of keys and values."""

import copy
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from lintra.attention import Attention, State, leaves, map_state
from lintra.ops.layout import Layout

# What transformers calls the cache of a call, of `generate` and of what they return: "cache" since 5.24.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
_OWNER = "lintra_layer"  # the attribute of keys by which attention finds the layer they passed


class StateHolder:
    """A `state` (None: before any token) and `length`, the tokens so far with padding, for transformers.

    Each call of a model puts a new state in place of the old, whose tensors are never overwritten: a
    `copy.copy` keeps a state to return to.
    """

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.state: State | None = None
        self.length = 0

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors of the state."""
        return 0 if self.state is None else sum(x.nbytes for x in leaves(self.state))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, self.length  # keys of new tokens alone, and what is before them

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1  # without end, as transformers writes it

    def reset(self) -> None:
        self.state, self.length = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError unless there is nothing to remove: a state does not hold its past."""
        if tokens_to_remove:
            raise ValueError("a state cannot go back to an earlier token: return to a copy.copy of the cache")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the sequences of these numbers [b], as beam search does."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = map_state(lambda x: x[indices.to(x.device)], self.state)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = map_state(lambda x: x.repeat_interleave(repeats, 0), self.state)


class StateLayer(StateHolder, CacheLayerMixin):
    """The state of one layer. `update` passes the new keys through; attention `claim`s them, then extends."""

    supports_early_init = False
    waiting = False  # for attention to take the tokens of the last update

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values [b g t d] alone, marked as this layer's.

        Raises RuntimeError if no attention of lintra took those of the previous call: its tokens would be
        lost.
        """
        if self.waiting:
            raise RuntimeError(
                "a StateCache needs a model that hands keys from its cache to lintra's attention, as they "
                "are; the tokens of the call before were not taken"
            )
        self.lazy_initialization(key_states, value_states)
        self.waiting = True
        key_states = key_states.view_as(key_states)
        setattr(key_states, _OWNER, self)
        return key_states, value_states

    def extend(self, mechanism: Attention, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Return y [b t h e] of new tokens after the state, which then has them too.

        Raises NotImplementedError for packed sequences; the state is then as before."""
        if layout.packed:
            raise NotImplementedError("a StateCache does not take packed sequences: pass use_cache=False")
        if self.state is None:
            self.state = mechanism.start(q.shape[0], device=q.device, dtype=q.dtype)
        y, self.state = mechanism.extend(q, k, v, self.state, layout=layout)
        self.length += q.shape[1]
        return layout.zero(y)

    def reset(self) -> None:
        super().reset()
        self.waiting = False


class StateCache(Cache):
    """The states of all layers of a model built with attn_implementation="lintra-<mechanism>".

    `cache` of a forward or of `generate`, `past_key_values` before transformers 5.24. Where the mechanism's
    state is constant, decoding takes as much time and memory after 64,000 tokens as after one. A state cannot
    be cropped: assisted decoding refuses it, and `copy.copy(cache)` keeps a state to return to.

    layers: those of a hybrid model, with transformers' own for convolutions and recurrences; None: a
    `StateLayer` for each layer there is."""

    def __init__(self, layers: list[Any] | None = None):
        if layers is None:
            super().__init__(layer_class_to_replicate=StateLayer)
        else:
            super().__init__(layers=layers)

    def __copy__(self) -> "StateCache":
        # transformers writes into the tensors of its own layers.
        other = type(self)(
            [copy.copy(x) if isinstance(x, StateLayer) else copy.deepcopy(x) for x in self.layers]
        )
        other.layer_class_to_replicate = self.layer_class_to_replicate
        return other

    @property
    def nbytes(self) -> int:
        """The bytes of all states."""
        return sum(x.nbytes if isinstance(x, StateLayer) else _nbytes(vars(x)) for x in self.layers)


def _nbytes(held: Any) -> int:
    """Return the bytes of the tensors in a mapping, and in mappings in it."""
    if isinstance(held, Tensor):
        return held.nbytes
    return sum(map(_nbytes, held.values())) if isinstance(held, dict) else 0


def claim(keys: Tensor) -> StateLayer | None:
    """Return the layer of a StateCache that passed these keys through; None if there is no such cache.

    The layer then accepts the next call, whether or not this one is refused. Raises NotImplementedError for
    keys that have been claimed before, as by layers that share keys and values."""
    layer = getattr(keys, _OWNER, None)
    if layer is not None:
        if not layer.waiting:
            raise NotImplementedError(
                f"a StateCache does not support layers that share keys and values: leave {CACHE} out, "
                "for a cache of transformers' own"
            )
        layer.waiting = False
    return layer
