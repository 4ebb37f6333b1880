"""Nested plain data and tensors <-> JSON with places + a flat dictionary of tensors; nothing is pickled."""

import math
from typing import Any

from torch import Tensor

TENSOR, TUPLE, PAIRS, FLOAT = "$tensor", "$tuple", "$pairs", "$float"


def flatten(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return what JSON can hold, and the tensors by their paths.

    Dictionaries (keys of any kind that is allowed as a value), lists, tuples, tensors, strings, numbers,
    booleans and None. TypeError for anything else, naming its place.
    """
    tensors: dict[str, Tensor] = {}

    def plain(value: Any, path: str) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {FLOAT: str(value)}
        if isinstance(value, Tensor):
            name = f"{len(tensors)}{path}"  # numbered, since keys with a slash could make equal paths
            tensors[name] = value.detach()
            return {TENSOR: name}
        if type(value) in (list, tuple):
            items = [plain(item, f"{path}/{i}") for i, item in enumerate(value)]
            return {TUPLE: items} if type(value) is tuple else items
        if isinstance(value, dict):
            if all(type(key) is str and not key.startswith("$") for key in value):
                return {key: plain(item, f"{path}/{key}") for key, item in value.items()}
            return {PAIRS: [[plain(k, f"{path}.{k}"), plain(v, f"{path}/{k}")] for k, v in value.items()]}
        raise TypeError(
            f"a checkpoint holds only plain data and tensors, but {path} is {type(value).__name__}"
        )

    return plain(tree, ""), tensors


def unflatten(plain: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `flatten`. ValueError where the two do not belong together."""
    if isinstance(plain, list):
        return [unflatten(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    match plain:
        case {"$tensor": path}:
            if path not in tensors:
                raise ValueError(f"the tensor {path} is missing")
            return tensors[path]
        case {"$tuple": items}:
            return tuple(unflatten(item, tensors) for item in items)
        case {"$float": text}:
            return float(text)
        case {"$pairs": pairs}:
            return {unflatten(key, tensors): unflatten(value, tensors) for key, value in pairs}
    return {key: unflatten(value, tensors) for key, value in plain.items()}
