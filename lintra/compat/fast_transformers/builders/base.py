"""Base class of builders, made of keyword arguments."""

from argparse import Namespace
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

Builder = TypeVar("Builder", bound="BaseBuilder")


class BaseBuilder:
    """Takes attributes, and builds a module in `get()`."""

    @classmethod
    def from_kwargs(cls: type[Builder], *, strict: bool = True, **kwargs: Any) -> Builder:
        """A builder with these attributes. Raises ValueError for an unknown one, unless strict=False."""
        return cls.from_dictionary(kwargs, strict=strict)

    @classmethod
    def from_namespace(cls: type[Builder], args: Namespace, strict: bool = False) -> Builder:
        """A builder from parsed arguments; unknown ones are ignored unless strict=True."""
        return cls.from_dictionary(vars(args), strict=strict)

    @classmethod
    def from_dictionary(cls: type[Builder], dictionary: Mapping[str, Any], strict: bool = True) -> Builder:
        """A builder with these attributes, as `from_kwargs`."""
        builder = cls()
        for name, value in dictionary.items():
            try:
                setattr(builder, name, value)
            except AttributeError as error:
                if strict:
                    raise ValueError(str(error)) from None
        return builder


def unknown(what: str, name: str, known: list[str]) -> str:
    """A sentence for an error: there is no such name, and which are similar, or else all."""
    near = get_close_matches(name, known)
    hint = f"; perhaps {' or '.join(near)}" if near else f"; there are {', '.join(known)}"
    return f"there is no {what} {name!r}{hint}"
