"""The mechanisms there are, as the tests of networks need them."""

import functools
from typing import Any

from lintra import attention


@functools.cache
def configs(length: int) -> dict[str, Any]:
    """Every mechanism in its own configuration, for sequences of up to `length` tokens."""
    return {name: attention.for_length(attention.load(name).Config, length) for name in attention.names()}


def bidirectional(config: Any) -> Any:
    """What it can do when it is not causal; None where it has to be."""
    try:
        return config.build(heads=4, dim=8, causal=False).can
    except ValueError:
        return None
