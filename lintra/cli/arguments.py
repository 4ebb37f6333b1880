"""Frozen dataclasses as a command line: tyro parses, this file keeps help and errors short."""

import contextlib
import dataclasses
import io
import itertools
import os
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lintra.io.files import expanded

T = TypeVar("T")

_FLAG_WIDTH = 29  # columns for a flag and its values
_NARROWEST = 20  # columns for what a flag means, on any terminal


class UsageError(ValueError):
    """The command line is not one that the program accepts."""


def parse(form: type[T], args: Sequence[str], *, prog: str, description: str, takes: str = "") -> T:
    """Parse flags into an instance of the dataclass `form`; nested dataclasses give flags without a prefix.

    takes: positional arguments, for the help.

    Prints the help and raises SystemExit(0) for --help. Raises UsageError with one line.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            return _cli(form, args, prog=prog)
    except SystemExit as end:
        if end.code in (0, None):
            print("\n".join(textwrap.wrap(" ".join(description.split()), _width())))
            print(f"\nusage: {' '.join(filter(None, (prog, takes, '[--flag value ...]')))}\n")
            print("\n".join(_help_lines(printed.getvalue())))
            raise SystemExit(0) from None
        raise UsageError(f"{_reason(_errors(form, args, prog))} (see {prog} --help)") from None


def parse_known(form: type[T], args: Sequence[str], default: T | None = None) -> T:
    """Return `default`, an instance of the dataclass `form`, changed by those of the flags that it has. If
    they are wrong, none applies, and `parse` reports it."""
    default = form() if default is None else default
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return _cli(form, args, default=default, return_unknown_args=True, add_help=False)[0]
    except SystemExit:
        return default


def changed(options: Any, names: Iterable[str] | None = None) -> list[str]:
    """Return which flags of a dataclass `options` differ from their defaults, among these or all."""
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    return [x for x in (defaults if names is None else names) if getattr(options, x) != defaults[x]]


def check_seed(seed: int | None) -> None:
    """Raise ValueError for a seed that is not a number of 63 bits; None passes."""
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"seed must be between 0 and 2^63 - 1, got {seed}")


def _cli(form: Any, args: Sequence[str], **options: Any) -> Any:
    import tyro

    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_path)
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    with registry:
        return tyro.cli(form, args=list(args), config=config, **options)


def _path(info: Any) -> Any:
    """Return how tyro reads a Path: with the home that ~ stands for, which shells leave in --flag=~/file."""
    from tyro.constructors import PrimitiveConstructorSpec

    if info.type is not Path:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=lambda args: expanded(args[0]),
        is_instance=lambda x: isinstance(x, Path),
        str_from_instance=lambda x: [str(x)],
    )


def _errors(form: Any, args: Sequence[str], prog: str) -> str:
    """Return tyro's message on a wrong command line, without line breaks inside what a user wrote."""
    errors, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(10**6)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),  # to no terminal, so that no boxes are drawn
            contextlib.redirect_stderr(errors),
            contextlib.suppress(SystemExit),
        ):
            _cli(form, args, prog=prog)
    finally:
        del os.environ["COLUMNS"]
        if columns is not None:
            os.environ["COLUMNS"] = columns
    return errors.getvalue()


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 110)


def _reason(printed: str) -> str:
    """The reason in tyro's error, and what it suggests, as one line."""
    _title, first, *others = [" ".join(map(str.strip, lines)) for lines in _paragraphs(printed)]
    if lacking := re.match(r"Missing from .*?: (--\S+ \S+)", first):
        return f"{lacking[1]} is missing"
    if wrong := re.match(r"Error parsing --(\S+): .*('.*'|\".*\")", first):
        takes = re.search(rf"--{wrong[1]} \S*\b(INT|FLOAT)\b", " ".join(others))
        if takes:
            number = "a whole number" if takes[1] == "INT" else "a number"
            return f"{wrong[1]} must be {number}, got {wrong[2]}"
    suggestion = re.search(r"Perhaps you meant: (--\S+)", " ".join(others))
    own = re.match(r"Error parsing \w+: ", first)  # the name of one of our classes or fields
    reason = first[own.end() :] if own else first.removesuffix(".")
    reason = reason[0].lower() + reason[1:]
    return f"{reason}; perhaps you meant {suggestion[1]}" if suggestion else reason


def _help_lines(printed: str) -> Iterator[str]:
    """tyro's help in two columns: a flag with its values, and what it means."""
    width = max(_width() - _FLAG_WIDTH - 2, _NARROWEST)
    flags: list[list[str]] = []
    for line in itertools.chain.from_iterable(_paragraphs(printed)):
        text = line.strip()
        is_text = line.startswith("      ")  # a text, whatever sign its line begins with
        if text.startswith("-") and not is_text:
            flags.append(re.split(r"\s{2,}", text, maxsplit=1))
        elif is_text and flags:
            flags[-1].append(text)
    for flag, *words in flags:
        flag = flag.replace("-h, --help", "--help").replace("{None}|", "")
        flag = re.sub(r"\{?\[(\w+) \[\1 \.\.\.\]\]\}?", r"\1 ...", flag)
        text = re.sub(r"\(default: (.*)\)", r"(\1)", " ".join(words)).replace("(None)", "")
        lines = textwrap.wrap(text, width) or [""]
        yield f"  {flag}" if len(flag) > _FLAG_WIDTH - 1 else f"  {flag:<{_FLAG_WIDTH}}{lines.pop(0)}"
        yield from (" " * (_FLAG_WIDTH + 2) + line for line in lines)


def _paragraphs(printed: str) -> Iterator[list[str]]:
    """The lines between tyro's rulers: printed to no terminal, it draws no boxes."""
    lines: list[str] = []
    for line in printed.splitlines():
        if line.strip(" -"):
            lines.append(line.rstrip())
        elif lines:
            yield lines
            lines = []
    if lines:
        yield lines
