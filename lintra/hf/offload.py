"""Weights that accelerate offloads, for code that reads them outside a call of their module."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from torch import nn

from lintra.attention import Attention
from lintra.models import Decoder
from lintra.nn import AttentionLayer, Block


def is_offloaded(model: nn.Module) -> bool:
    """Return whether accelerate keeps weights of a model on disk or in memory between calls."""
    places = getattr(model, "hf_device_map", None)
    if places is None:
        return hasattr(model, "_hf_hook")
    return not {"disk", "cpu"}.isdisjoint(places.values())


def several_devices(model: nn.Module) -> bool:
    """Return whether accelerate has spread a model over several devices: a call of `extend` does not go
    through its hooks, which move tensors from one to the next."""
    return len(set(getattr(model, "hf_device_map", {}).values()) - {"cpu", "disk"}) > 1


def extending(model: Decoder) -> Iterator[nn.Module]:
    """Yield the parts of a model that `extend` goes through without a call of their forward."""
    return (x for x in model.modules() if isinstance(x, Decoder | Block | AttentionLayer | Attention))


@contextmanager
def onloaded(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Have the weights of modules themselves, not of those in them, where they compute.

    Hooks of accelerate bring weights from disk or memory for a call of `forward` alone, between two of which
    they are on the device "meta"; a call of `extend` is not one of them."""
    with ExitStack() as stack:
        for module in modules:
            if (hook := cast("Any", getattr(module, "_hf_hook", None))) is not None:
                stack.callback(hook.post_forward, module, None)
                hook.pre_forward(module)
        yield
