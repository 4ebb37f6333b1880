"""The interface of fast-transformers 0.4 (Katharopoulos and Vyas, 2020) on lintra's mechanisms.

    import lintra.compat.fast_transformers as fast_transformers

or, for programs that import it themselves, `install()` first. State dicts have the same names, so weights
trained with that library load and give the same outputs; docs/migrating.md says what differs on purpose.
Events, weight mappers and the private kernels are not covered and say so.
"""

import sys
from types import ModuleType

from lintra.compat.fast_transformers import (
    attention,
    builders,
    feature_maps,
    masking,
    recurrent,
    transformers,
)
from lintra.compat.fast_transformers.recurrent import attention as _recurrent_attention
from lintra.compat.fast_transformers.recurrent import transformers as _recurrent_transformers

__all__ = [
    "attention",
    "builders",
    "feature_maps",
    "install",
    "masking",
    "recurrent",
    "transformers",
]

_NAME = "fast_transformers"
_COVERED = {
    "": sys.modules[__name__],
    ".attention": attention,
    ".builders": builders,
    ".feature_maps": feature_maps,
    ".masking": masking,
    ".recurrent": recurrent,
    ".recurrent.attention": _recurrent_attention,
    ".recurrent.transformers": _recurrent_transformers,
    ".transformers": transformers,
}
_NOT_COVERED = {
    "aggregate": "its kernels are private",
    "attention_registry": "a mechanism is a file in lintra/attention",
    "causal_product": "lintra.ops.linear_attention is the sum it computes",
    "clustering": "its kernels are private",
    "events": "PyTorch has hooks",
    "hashing": "its kernels are private",
    "local_product": "lintra.ops.banded.banded_attention is the band it computes",
    "sparse_product": "its kernels are private",
    "weight_mapper": "load the state dict of a model of that library",
}


class _Missing(ModuleType):
    """A part of the library that is not here: whatever is asked of it raises."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        part = self.__name__.partition(".")[2]
        raise ImportError(
            f"{self.__name__} is not covered by lintra.compat.fast_transformers: {_NOT_COVERED[part]}"
        )


def install() -> None:
    """Makes `import fast_transformers` find this module. Raises RuntimeError if it has found another one."""
    found = sys.modules.get(_NAME)
    if found is not None and found is not sys.modules[__name__]:
        raise RuntimeError(f"{_NAME} is imported already, from {found.__file__}: install() must come first")
    for name, module in _COVERED.items():
        sys.modules[_NAME + name] = module
    for name in _NOT_COVERED:
        sys.modules[f"{_NAME}.{name}"] = _Missing(f"{_NAME}.{name}")
