"""A mechanism's configuration from text."""

import json
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from lintra import attention
from lintra.attention import AttentionConfig, AttentionPattern
from lintra.checkpoint import from_json, to_json
from lintra.cli.arguments import UsageError

_WORDS = {"None": None, "True": True, "False": False}  # beside JSON's own


def mechanism(named: str, options: Sequence[str], length: int) -> AttentionPattern:
    """Return the `Config` of the named mechanism for sequences of up to `length` tokens; for several names
    with commas between them, a tuple.

    Each FIELD=VALUE of `options` is set in all of them, each NAME.FIELD=VALUE in those of that name. A
    value is JSON or a word. Raises ValueError.
    """
    names = [name.strip() for name in named.split(",")]
    contents = [_content(name, length) for name in names]
    for option in options:
        place, equals, text = option.partition("=")
        owner, _, field = place.rpartition(".")
        if not equals:
            raise UsageError(f"attention-options must be FIELD=VALUE ..., got {option!r}")
        if owner and owner not in names:
            known = " or ".join(dict.fromkeys(names))
            raise UsageError(f"attention-options must be of {known}, got {option!r}")
        for name, content in zip(names, contents, strict=True):
            if owner in ("", name):
                _put(content, field, _value(text))
    found = [
        from_json(AttentionConfig, content, f"attention {name}")
        for name, content in zip(names, contents, strict=True)
    ]
    return found[0] if len(found) == 1 else tuple(found)


def _content(name: str, length: int) -> dict[str, Any]:
    """Return the defaults of a mechanism."""
    module, by_class, _ = name.partition(":")
    if by_class:
        _import(module)
    return to_json(attention.for_length(attention.load(name).Config, length))


def _put(content: dict[str, Any], field: str, value: Any) -> None:
    chosen = isinstance(content.get(field), dict) and isinstance(value, str)  # one of several by its name
    content[field] = {"name": value} if chosen else value


def _import(module: str) -> None:
    try:
        import_module(module)
    except ImportError as error:
        raise UsageError(
            f"attention must be a mechanism or MODULE:Config, and {module} fails: {error}"
        ) from error


def _value(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except ValueError:
        return text
