"""Weights that accelerate offloads, for what reads them outside a call of their module."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def onloaded(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Have the weights of modules themselves, not of those in them, where they compute.

    Hooks of accelerate bring weights from disk or memory for a call of `forward` alone, between two of which
    they are on the device "meta"; `extend` is none."""
    hooks: list[tuple[nn.Module, Any]] = [
        (module, module._hf_hook) for module in modules if hasattr(module, "_hf_hook")
    ]
    for module, hook in hooks:
        hook.pre_forward(module)
    try:
        yield
    finally:
        for module, hook in hooks:
            hook.post_forward(module, None)
