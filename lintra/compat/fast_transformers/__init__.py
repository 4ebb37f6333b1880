"""The interface of fast-transformers 0.4 (Katharopoulos and Vyas, 2020) on lintra's mechanisms.

    from lintra.compat.fast_transformers import install

    install()  # from now on `import fast_transformers` finds this package, and its modules under their names

State dicts have the same names, so weights trained with that library load and give the same outputs;
docs/migrating.md says what differs on purpose. The private kernels are not covered and say so.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

from lintra.compat.fast_transformers import (
    attention,
    attention_registry,
    builders,
    events,
    feature_maps,
    masking,
    recurrent,
    transformers,
)
from lintra.compat.stand_ins import alias

__all__ = [
    "attention",
    "attention_registry",
    "builders",
    "events",
    "feature_maps",
    "install",
    "masking",
    "recurrent",
    "transformers",
]
__version__ = "0.4.0"  # of the interface

_NAME = "fast_transformers"
_NOT_COVERED = {
    "aggregate": "its kernels are private",
    "causal_product": "lintra.ops.linear_attention is the sum it computes",
    "clustering": "its kernels are private",
    "hashing": "its kernels are private",
    "local_product": "lintra.ops.banded.banded_attention is the band it computes",
    "sparse_product": "its kernels are private",
}


class _Refusal(MetaPathFinder):
    """Raise ImportError for a part of that library, or anything in it, that is not covered here."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        # `from fast_transformers import ...` looks under the name the package has here.
        name = fullname.removeprefix("lintra.compat.")
        library, _, part = name.partition(".")
        if library == _NAME and part in _NOT_COVERED:
            raise ImportError(f"{name} is not covered by {__name__}: {_NOT_COVERED[part]}", name=fullname)


def install() -> None:
    """Make `import fast_transformers` find this package, and its public modules under their names there.

    Raises RuntimeError if another one has been imported. Done twice, it does nothing more.
    """
    this = sys.modules[__name__]
    found = sys.modules.get(_NAME)
    if found is this:
        return
    if found is not None:
        raise RuntimeError(f"{_NAME} is imported already, from {found.__file__}: install() must come first")
    alias(_NAME, this)
    sys.meta_path.insert(0, _Refusal())
