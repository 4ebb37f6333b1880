"""All mechanisms, configured for the tests of networks."""

import functools
from typing import Any

from lintra import attention


@functools.cache
def configs(length: int) -> dict[str, Any]:
    """Every mechanism in its default configuration, for sequences of up to `length` tokens."""
    return {name: attention.for_length(attention.load(name).Config, length) for name in attention.names()}


def bidirectional(config: Any) -> Any:
    """The capabilities of the bidirectional form; None for a mechanism that is causal only."""
    try:
        return config.build(heads=4, dim=8, causal=False).can
    except ValueError:
        return None
