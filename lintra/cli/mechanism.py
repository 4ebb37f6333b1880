"""A mechanism's configuration out of words."""

import json
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from lintra import attention
from lintra.attention import AttentionConfig
from lintra.checkpoint import from_json, to_json
from lintra.cli.arguments import UsageError

_WORDS = {"None": None, "True": True, "False": False}  # beside JSON's own


def mechanism(name: str, options: Sequence[str], length: int) -> Any:
    """The `Config` of the mechanism of that name for sequences of up to `length` tokens, each FIELD=VALUE of
    `options` put into it. A value is JSON or a word. Raises ValueError.
    """
    module, by_class, _ = name.partition(":")
    if by_class:
        _import(module)
    content = to_json(attention.for_length(attention.load(name).Config, length))
    for option in options:
        field, equals, text = option.partition("=")
        if not equals:
            raise UsageError(f"attention-options must be FIELD=VALUE ..., got {option!r}")
        value = _value(text)
        chosen = isinstance(content.get(field), dict) and isinstance(value, str)  # one of several by its name
        content[field] = {"name": value} if chosen else value
    return from_json(AttentionConfig, content, f"attention {name}")


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
