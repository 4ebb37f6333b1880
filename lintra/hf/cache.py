"""The state of a decoder as the cache that `generate` of transformers passes from call to call."""

from transformers import Cache

from lintra.compat.transformers.cache import StateHolder


class LintraCache(StateHolder, Cache):
    """The `state` of a whole decoder and `length`, the tokens so far with padding.

    The state of a recurrence has one size whatever the length. `copy.copy(cache)` keeps a state to return
    to: tensors of a state are never overwritten.
    """

    # Set where a caller has passed it: `generate` then reads nothing beyond what it returns.
    _is_user_defined: bool = False

    def __init__(self):
        super().__init__(layers=[])

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_linear(self) -> list[bool]:
        # True would have `generate` read tokens again that the state has already (transformers 5.24).
        return [False]
