"""One law applied to one case, and shrunk until the law holds again."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch

from lintra.testing.report import Finding, meaning, message

Law = Callable[..., None]
C = TypeVar("C")


class Raised(Exception):
    """An attention raised instead of returning; the law that called it is broken."""


def select(laws: list[Law], chosen: list[Any] | None) -> list[Law]:
    """Return the laws that are chosen by function or by name, all for None. Raises ValueError for others."""
    if chosen is None:
        return laws
    named = {law.__name__: law for law in laws}
    wanted = [each if isinstance(each, str) else each.__name__ for each in chosen]
    unknown = [name for name in wanted if name not in named]
    if unknown:
        raise ValueError(f"laws must be of {', '.join(named)}; got {', '.join(unknown)}")
    return [named[name] for name in wanted]


def check_assertions() -> None:
    """Raise RuntimeError where Python removes assertions, so that every law would pass."""
    if not __debug__:
        raise RuntimeError("the laws are assertions, which python -O removes: run without it")


def find(
    law: Law,
    call: Law,
    case: C,
    mode: str,
    applies: Callable[[C], bool],
    fixed: dict[str, int] | None = None,
    fixed_heads: bool = False,
) -> Finding:
    """Return the finding of `call(case)` about a law.

    A law of `fixed` sizes builds sequences of that length itself and is not made smaller."""
    about = (law.__name__, meaning(law), mode)
    if not applies(case):
        return Finding(*about, "not applicable")
    error = _error(call, case)
    if error is None:
        return Finding(*about, "passed")
    if fixed is None:
        case, error = _shrink(call, case, error, applies, fixed_heads)
    sizes = {
        name: getattr(case, name) for name in ("batch", "time", "heads", "kv_heads") if hasattr(case, name)
    }
    sizes |= fixed or {}
    return Finding(*about, "failed", sizes, getattr(case, "seed", 0), message(error))


def _error(call: Law, case: Any) -> Exception | None:
    """Return what a law raises; the global random generator is restored."""
    with torch.random.fork_rng(devices=[]):
        try:
            call(case)
        except Exception as error:
            return error
    return None


def _shrink(
    call: Law, case: C, error: Exception, applies: Callable[[C], bool], fixed_heads: bool
) -> tuple[C, Exception]:
    """The least time that fails the same way, then the smallest batch, then the fewest heads."""
    for smaller in (_less_time, _less_batch, *(() if fixed_heads else (_fewer_heads,))):
        for small in smaller(case):
            with torch.random.fork_rng(devices=[]):
                try:
                    possible = applies(small)
                except Exception:  # a mechanism that cannot be built so small
                    continue
            found = _error(call, small) if possible else None
            if found is not None and _alike(found, error):
                case, error = small, found
                break
    return case, error


def _less_time(case: Any) -> Iterator[Any]:
    return (replace(case, time=time) for time in range(1, case.time))


def _less_batch(case: Any) -> Iterator[Any]:
    return (replace(case, batch=batch) for batch in range(1, case.batch))


def _fewer_heads(case: Any) -> Iterator[Any]:
    for heads in range(1, case.heads):
        if not hasattr(case, "kv_heads"):
            yield replace(case, heads=heads)
            continue
        for kv_heads in range(1, heads + 1):
            if heads % kv_heads == 0:
                yield replace(case, heads=heads, kv_heads=kv_heads)


def _alike(one: Exception, other: Exception) -> bool:
    """Return whether a smaller input fails like the first; numbers in the text of an error may
    differ."""
    if type(one) is not type(other):
        return False
    return isinstance(one, AssertionError) or _without_digits(one) == _without_digits(other)


def _without_digits(error: Exception) -> str:
    return re.sub(r"\d+", "", str(error))
