"""Checks of the arguments of ops, with the same messages everywhere."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

_GRAPHS = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE)  # modes that make them


def shape(name: str, x: Tensor, letters: str, sizes: dict[str, int]) -> None:
    """Binds each letter of `letters` ("b t h d") to the size of that axis of `x`, or raises ValueError.

    `sizes` holds the letters bound so far and receives the new ones.
    """
    axes = letters.split()
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor [{letters}], got {type(x).__name__}")
    if x.dim() != len(axes):
        raise ValueError(f"{name} must have the {len(axes)} axes [{letters}], got shape {list(x.shape)}")
    for axis, size in zip(axes, x.shape, strict=True):
        if sizes.setdefault(axis, size) != size:
            expected = " ".join(f"{a}={sizes[a]}" if a in sizes else a for a in axes)
            raise ValueError(
                f"{name} must be [{expected}], got shape {list(x.shape)}: {axis} is {sizes[axis]} elsewhere"
            )


def parts(name: str, x: Any, kind: type[Any], letters: tuple[str, ...], sizes: dict[str, int]) -> None:
    """Bind the letters of each tensor of a NamedTuple, in their order, or raise; TypeError unless `x` is a
    `kind`."""
    if not isinstance(x, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {type(x).__name__}")
    for field, tensor, axes in zip(kind._fields, x, letters, strict=True):
        shape(f"{name}.{field}", tensor, axes, sizes)


def floating(name: str, x: Tensor) -> None:
    """Raise TypeError unless `x` is of a floating type the ops compute with."""
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")


def same_device_and_dtype(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Raise unless `x` has the device and dtype of `other`."""
    if x.device != other.device:
        raise ValueError(f"{name} must be on the device of {other_name}, {other.device}, got {x.device}")
    if x.dtype != other.dtype:
        raise TypeError(f"{name} must have the dtype of {other_name}, {other.dtype}, got {x.dtype}")


def mask(x: Tensor, letters: str, sizes: dict[str, int], device: torch.device, name: str = "mask") -> None:
    """Raise unless `x` is a boolean padding mask of these axes on `device`."""
    shape(name, x, letters, sizes)
    if x.dtype != torch.bool:
        raise TypeError(f"{name} must be boolean, True for a real token, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"{name} must be on the device of the tokens, {device}, got {x.device}")


def qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_: Tensor | None,
    sizes: dict[str, int],
    *,
    same_length: bool,
    remedy: str = "",
    value_heads: str = "g",
    mask_name: str = "mask",
) -> None:
    """Raise unless q [b t h d], k [b s g d], v [b s g e] and the mask [b s] fit together.

    `sizes` holds the letters bound so far and receives the new ones. same_length: t = s is required; the
    error ends with `remedy`, what to call for other lengths.
    value_heads: the letter of v's heads, another one where they may differ from those of k. mask_name: the
    caller's argument that is the mask.
    """
    shape("q", q, "b t h d", sizes)
    floating("q", q)
    if same_length and isinstance(k, Tensor) and k.dim() == 4 and k.shape[1] != q.shape[1]:
        raise ValueError(
            f"a sequence attending to itself has as many queries as keys, got t={q.shape[1]} and "
            f"s={k.shape[1]}{remedy and f': {remedy}'}"
        )
    kv(k, v, mask_, sizes, value_heads, mask_name)
    same_device_and_dtype("k", k, "q", q)


def kv(
    k: Tensor,
    v: Tensor,
    mask_: Tensor | None,
    sizes: dict[str, int],
    value_heads: str = "g",
    mask_name: str = "mask",
) -> None:
    """Raise unless k [b s g d], v [b s g e] and their mask [b s] fit together."""
    shape("k", k, "b s g d", sizes)
    floating("k", k)
    shape("v", v, f"b s {value_heads} e", sizes)
    same_device_and_dtype("v", v, "k", k)
    if mask_ is not None:
        mask(mask_, "b s", sizes, k.device, mask_name)


def activations(x: Tensor, width: int) -> None:
    """Raise ValueError or TypeError unless x is [b t c] of that width, of a floating type."""
    shape("x", x, "b t c", {"c": width})
    floating("x", x)


def transformed(x: Tensor) -> bool:
    """Return whether `x` is inside a torch.func transform or forward-mode differentiation."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(x):  # pyright: ignore (it has no stub)
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def transforming(*tensors: Tensor) -> bool:
    """Return whether a tensor is transformed, or a transform of torch.func is active: PyTorch then refuses
    every autograd.Function without rules for transforms."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or any(map(transformed, tensors))


def recorded(*tensors: Tensor) -> bool:
    """Return whether autograd records what is computed from these tensors."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def readable(*tensors: Tensor | None) -> bool:
    """Return whether looking at values costs nothing and is possible: not on a GPU, not while a graph is
    being made and not inside a transform. A tensor that is None does not matter."""
    given = [x for x in tensors if x is not None]
    return all(x.device.type == "cpu" and has_values(x) and not transformed(x) for x in given)


def has_values(x: Tensor) -> bool:
    """Return whether there are numbers behind a tensor: not on the device meta, and not while a graph is made
    of it, by torch.compile, by make_fx or of a FakeTensor."""
    if torch.compiler.is_compiling() or x.device.type == "meta" or isinstance(x, FakeTensor):
        return False
    modes = torch._C._len_torch_dispatch_stack()
    return not modes or all(torch._C._get_dispatch_mode(mode) is None for mode in _GRAPHS)


def symbols(name: str, x: Tensor, last: int) -> None:
    """Raise ValueError unless every number of x is in 0 .. last, where that is readable."""
    if not readable(x) or not x.numel():
        return
    low, high = (int(value) for value in x.aminmax())
    if low < 0 or high > last:
        raise ValueError(f"{name} must be between 0 and {last}, got {low if low < 0 else high}")


def decay(log_decay: Tensor, mask: Tensor | None, *, finite: bool) -> None:
    """Raise ValueError where a decay [b t ...] is above 1 or, if it must be `finite`, 0; where readable."""
    if not readable(log_decay, mask):
        return
    with torch.no_grad():
        wrong = ~((log_decay <= 0) & log_decay.isfinite()) if finite else ~(log_decay <= 0)
        if mask is not None:
            wrong = wrong & mask[(..., *[None] * (wrong.dim() - 2))]
        if bool(wrong.any()):
            raise ValueError(
                f"log_decay must be {'finite and ' if finite else ''}at most 0 (a decay of at most 1), got "
                f"{log_decay[wrong][0].item():g}"
            )


def heads(query_heads: int, kv_heads: int, value_heads: int | None = None) -> None:
    """Raise ValueError unless the key-value heads divide the query heads; and those of v, where it has its
    own, are a multiple of the key heads, and divide the query heads or are a multiple of them."""
    if kv_heads < 1 or query_heads < 1 or query_heads % kv_heads:
        raise ValueError(
            f"the query heads must be a multiple of the key-value heads, got h={query_heads}, g={kv_heads}"
        )
    if value_heads is None:
        return
    if value_heads % kv_heads:
        raise ValueError(
            f"value_heads must be a multiple of the key heads, got {value_heads} and g={kv_heads}"
        )
    if max(query_heads, value_heads) % min(query_heads, value_heads):
        raise ValueError(
            "value_heads must divide the query heads or be a multiple of them, got "
            f"{value_heads} and h={query_heads}"
        )


def state_dtype(name: str, x: Tensor, q: Tensor, *, narrow: bool = True) -> None:
    """Raise TypeError unless x, of a state, is on q's device in its sum dtype or, if `narrow`, bfloat16."""
    total = sum_dtype(q.dtype)
    if x.device != q.device or (x.dtype != total and not (narrow and x.dtype == torch.bfloat16)):
        raise TypeError(
            f"{name} must be {total} on {q.device} for inputs of {q.dtype}"
            f"{', or bfloat16' if narrow else ''}, got {x.dtype} on {x.device}"
        )


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums and states are kept in: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32
