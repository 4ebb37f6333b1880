"""Packages of extras: imported where they are used, everything else works without."""

import importlib
from types import ModuleType


def package(name: str, *, extra: str = "speech", needs: str = "speech needs") -> ModuleType:
    """The package of this name. Raises ModuleNotFoundError that says, after `needs`, how to install it."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: soundfile, where its C library is missing
        raise ModuleNotFoundError(
            f"{needs} {name} ({error}): pip install 'lintra[{extra}]'", name=name
        ) from error
