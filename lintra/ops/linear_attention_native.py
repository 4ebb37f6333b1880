"""The C++ kernels as the operator `lintra::linear_attention`."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lintra import native
from lintra.ops import _operator

# Here and not at the first call, which torch.compile may be tracing. A wrong LINTRA_NATIVE is told then.
with suppress(ValueError):
    native.available()


def _named(arguments: Sequence[Any]) -> dict[str, Any]:
    """The arguments after those that `native` takes by place."""
    names = ("log_decay", "log_input", "kv", "z", "mask", "cu_seqlens")
    names += ("causal", "normalize", "eps", "feature_map")
    return dict(zip(names, arguments, strict=True))


def _forward(q, k, v, *others):
    return native.forward(q, k, v, **_named(others))


def _backward(dy, dkv, dz, q, k, v, y, denominator, *others):
    return native.backward(dy, dkv, dz, q, k, v, y, denominator, **_named(others))


linear_attention_native = _operator.register("linear_attention", "native", _forward, _backward, ["CPU"])
