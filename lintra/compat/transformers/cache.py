"""A cache of transformers that keeps the states of mechanisms in place of keys and values."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from lintra.attention import Attention, State, leaves, map_state
from lintra.ops.layout import Layout

_OWNER = "lintra_layer"  # the attribute of keys by which attention finds the layer they passed


class StateLayer(CacheLayerMixin):
    """The state of one layer. `update` hands the new keys through; attention then asks `extend`."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, **_: Any):
        super().__init__()
        self.state: State | None = None
        self.seen, self.waiting = 0, False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values [b g t d] alone, marked as this layer's.

        Raises RuntimeError if no attention of lintra took those of the call before: its tokens would be lost.
        """
        if self.waiting:
            raise RuntimeError(
                "a StateCache needs attn_implementation='lintra' or 'lintra-...' and a model that hands keys "
                "from its cache to attention as they are; the tokens of the call before were not taken"
            )
        self.lazy_initialization(key_states, value_states)
        self.waiting = True
        key_states = key_states.view_as(key_states)
        setattr(key_states, _OWNER, self)
        return key_states, value_states

    def extend(self, mechanism: Attention, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        """Return y [b t h e] of new tokens after the state, which then has them too."""
        if self.state is None:
            self.state = mechanism.start(q.shape[0], device=q.device, dtype=q.dtype)
        y, self.state = mechanism.extend(q, k, v, self.state, layout=layout)
        self.seen, self.waiting = self.seen + q.shape[1], False
        return layout.zero(y)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, self.seen

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state, self.seen, self.waiting = None, 0, False

    def crop(self, tokens_to_remove: int) -> None:
        """Raises NotImplementedError: a state cannot forget its last tokens."""
        if tokens_to_remove:
            raise NotImplementedError(f"a state has no tokens to remove, got {tokens_to_remove}")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = map_state(lambda x: x.repeat_interleave(repeats, 0), self.state)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = map_state(lambda x: x[indices.to(x.device)], self.state)


class StateCache(Cache):
    """The states of all layers of a model built with attn_implementation="lintra-<mechanism>".

    `past_key_values` of a forward or of `generate`. Where the mechanism's state is constant, decoding takes
    as much time and memory after 64,000 tokens as after one. A sequence that has begun goes on; it cannot be
    cropped, so that assisted decoding refuses it."""

    def __init__(self):
        super().__init__(layer_class_to_replicate=StateLayer)

    def nbytes(self) -> int:
        """Return the bytes of all states."""
        states = [layer.state for layer in self.layers if isinstance(layer, StateLayer)]
        return sum(
            x.numel() * x.element_size() for state in states if state is not None for x in leaves(state)
        )


def owner(keys: Tensor) -> StateLayer | None:
    """Return the layer of a StateCache that handed these keys through; None: there is no such cache."""
    return getattr(keys, _OWNER, None)


def cache_for(model: torch.nn.Module) -> StateCache:
    """Return an empty cache for `model.generate(..., past_key_values=cache_for(model))`.

    Raises ValueError unless the model was built with attention of lintra that has a recurrent form."""
    from lintra.compat.transformers.attention import configured

    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    config = configured(name)
    if config is None:
        raise ValueError(
            f"cache_for needs a model with attn_implementation='lintra' or 'lintra-...', got {name!r}"
        )
    with torch.device("meta"):
        mechanism = config.build(heads=1, dim=2, causal=True)
    if not mechanism.can.recurrent:
        raise ValueError(f"attention {mechanism.name!r} has no recurrent form, and so no state")
    return StateCache()
