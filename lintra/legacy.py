"""Names of lintra 0.1 in today's words: files it wrote keep loading, programs written for it keep running.

Files: `upgrade_config`, `upgrade_run`, `upgrade_training` and `upgrade_tensors` convert files of format 1 to
format 2. Programs: `renamed_attribute`, `renamed_attributes` and `renamed_arguments` accept an old name for
one more version, with a DeprecationWarning that gives the new one.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeVar

from torch import nn

FORMAT = 1  # of files that 0.1 wrote

_FIELDS = {"feed": "mlp_ratio", "feed_kind": "activation"}
_VALUES = {("schedule", "trapezoid"): "wsd"}
_CALLBACKS = {"Rate": "LearningRateSchedule", "Average": "WeightEMA"}
_MODULES = {
    "mix": "attn",
    "feed": "mlp",
    "read": "cross_attn",
    "norm_mix": "attn_norm",
    "norm_feed": "mlp_norm",
    "norm_read": "cross_attn_norm",
    "inward": "qkv_proj",
    "outward": "out_proj",
    "reads": "extra_proj",
}
_Class = TypeVar("_Class", bound=type)


def upgrade_config(content: Any) -> Any:
    """Return a configuration as JSON, of format 1 or later, with the field names and values of format 2."""
    if not isinstance(content, dict):
        return content
    return {
        _FIELDS.get(name, name): _VALUES.get((name, x), x) if isinstance(x, str) else upgrade_config(x)
        for name, x in content.items()
    }


def upgrade_run(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a run.json of format 1 in format 2."""
    return {name: upgrade_config(x) if name in ("model", "train") else x for name, x in content.items()}


def upgrade_training(checkpoint: Any) -> Any:
    """Return a training state of format 1, its tensors in it, in format 2."""
    if not isinstance(checkpoint, dict):
        return checkpoint
    checkpoint = dict(checkpoint)
    if isinstance(callbacks := checkpoint.get("callbacks"), dict):
        checkpoint["callbacks"] = {_CALLBACKS.get(name, name): x for name, x in callbacks.items()}
    if isinstance(weights := checkpoint.get("current_model_state"), dict):
        checkpoint["current_model_state"] = upgrade_tensors(weights)
    return checkpoint


def upgrade_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of format 1 under the names of format 2."""
    return {".".join(_MODULES.get(part, part) for part in name.split(".")): x for name, x in tensors.items()}


def accept_old_tensors(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename the tensors of a module's own parts in a state dict of 0.1: a pre-hook of `load_state_dict`."""
    for name in [x for x in state_dict if x.startswith(prefix)]:
        part, dot, rest = name[len(prefix) :].partition(".")
        new = _MODULES.get(part)
        if new in module._modules and part not in module._modules:
            state_dict[f"{prefix}{new}{dot}{rest}"] = state_dict.pop(name)


def renamed_attribute(module: str, names: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module that returns the object of an old name, with a warning.

    names: old name -> the object, which has a `__name__`.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = names[name]
        warn(f"{module}.{name}", f"{new.__module__}.{new.__name__}")
        return new

    return find


def moved_module(old: str, new: str, names: Mapping[str, str] = MappingProxyType({})) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module whose content has moved to the module `new`, with a warning.

    names: old name -> new name, where it differs.
    """

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        there = names.get(name, name)
        found = getattr(import_module(new), there)
        warn(f"{old}.{name}", f"{new}.{there}")
        return found

    return find


def renamed_arguments(**names: str) -> Callable[[_Class], _Class]:
    """Return a class decorator: the constructor takes old keyword arguments too, with a warning.

    names: old name=new name. The constructor raises TypeError for an argument given under both.
    """

    def decorate(cls: _Class) -> _Class:
        construct = cls.__init__
        signature = inspect.signature(construct)

        @functools.wraps(construct)
        def init(self: Any, *args: Any, **options: Any) -> None:
            for old in names.keys() & options:
                new = names[old]
                if new in options:
                    raise TypeError(f"{new} is given twice: {old} is its old name")
                warn(f"{old}=", f"{new}=")
                options[new] = options.pop(old)
            construct(self, *args, **options)

        init.__signature__ = signature  # pyright: ignore (functools.wraps leaves it to __wrapped__)
        cls.__init__ = init
        return cls

    return decorate


def renamed_attributes(**names: str) -> Callable[[_Class], _Class]:
    """Return a class decorator: instances answer to the old names of attributes and methods, with a warning.

    names: old name=new name.
    """

    def decorate(cls: _Class) -> _Class:
        for old, new in names.items():
            setattr(cls, old, _renamed_property(old, new))
        return cls

    return decorate


def _renamed_property(old: str, new: str) -> property:
    def read(self: Any) -> Any:
        warn(f".{old}", f".{new}")
        return getattr(self, new)

    return property(read, doc=f"The old name of `{new}`.")


def warn(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn that an old name is given and which one to use instead.

    stacklevel: the frame to blame, counted from this function, 1; by default the caller's caller."""
    message = f"{old} is now {new}: the old name will be gone in lintra 0.3"
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)
