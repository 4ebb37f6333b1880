"""Tables of the fields of dataclasses and of constructor arguments, with their comments, for the site."""

import ast
import dataclasses
import inspect
import io
import textwrap
import tokenize
from pydoc import locate
from typing import Any, get_type_hints

import griffe

from lintra.config import fields


class Fields(griffe.Extension):
    """Puts a table after the docstring of a class, from comments, which the syntax tree does not have."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if any(each.callable_path == "dataclasses.dataclass" for each in cls.decorators):
            rows = table(locate(cls.path))
        elif any(str(base) in ("NamedTuple", "PreTrainedConfig") for base in cls.bases):
            _add_constructor(cls)
            return
        else:
            rows = arguments(locate(cls.path)) if cls.name[0] != "_" else ""
        if rows:
            said = [cls.docstring.value] if cls.docstring else []
            cls.docstring = griffe.Docstring("\n\n".join([*said, rows]), parent=cls)


def _add_constructor(cls: griffe.Class) -> None:
    """Give a NamedTuple or a configuration of transformers the constructor that its source does not show."""
    fields = [x for x in cls.members.values() if x.is_attribute and x.annotation is not None]
    kind = griffe.ParameterKind.positional_or_keyword
    given = [griffe.Parameter(x.name, annotation=x.annotation, kind=kind, default=x.value) for x in fields]
    first = griffe.Parameter("self", kind=kind)
    if not any(str(base) == "NamedTuple" for base in cls.bases):
        given.append(griffe.Parameter("others", kind=griffe.ParameterKind.var_keyword))
    cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(first, *given)))


def arguments(kind: Any) -> str:
    """A row for each argument of a constructor: its type, its default, and what the comment beside it says.

    If it passes others on to the class that it extends, as **shape, these have rows too. Empty if no argument
    has a comment."""
    rows: dict[str, list[str]] = {}
    for base in kind.__mro__ if isinstance(kind, type) else ():
        if "__init__" in vars(base) and base.__module__.startswith("lintra."):
            passed_on = _arguments(vars(base)["__init__"], rows)
            if not passed_on:
                break
    if not any(meaning for *_, meaning in rows.values()):
        return ""
    return _markdown("argument", [[f"`{name}`", *cells] for name, cells in rows.items()])


def _arguments(init: Any, rows: dict[str, list[str]]) -> bool:
    """Add type, default and meaning of each argument that has no row -> whether others are passed on."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(init)))
    except (OSError, TypeError):  # there is no source: it is generated
        return False
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    positional = given.posonlyargs + given.args
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults + given.kw_defaults
    said = _beside(source)
    for argument, default in zip(positional + given.kwonlyargs, defaults, strict=True):
        if argument.arg not in ("self", *rows):
            hint = f"`{ast.unparse(argument.annotation)}`" if argument.annotation else ""
            value = f"`{ast.unparse(default)}`" if default else ""
            lines = range(argument.lineno, (default or argument).end_lineno + 1)
            meaning = " ".join(said[n].string.lstrip("# ") for n in lines if n in said)
            rows[argument.arg] = [hint, value, meaning or rows.get(argument.arg, [""])[-1]]
        elif argument.arg in rows and not rows[argument.arg][-1] and argument.lineno in said:
            rows[argument.arg][-1] = said[argument.lineno].string.lstrip("# ")
    return given.kwarg is not None


def table(kind: Any) -> str:
    """A row for each field: its type, its default, and what the comment beside or above it says."""
    said, hints = comments(kind), get_type_hints(kind)
    rows = []
    for field in dataclasses.fields(kind):
        cells = (f"`{field.name}`", _type(hints[field.name]), _default(field), said.get(field.name, ""))
        rows.append(list(cells))
    return _markdown("field", rows)


def _markdown(what: str, rows: list[list[str]]) -> str:
    """A table with the name of its first column; empty without rows."""
    rows = [[cell.replace("|", r"\|") for cell in cells] for cells in rows]
    if rows:
        rows = [[what, "type", "default", "meaning"], ["---"] * 4, *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def comments(kind: type) -> dict[str, str]:
    """field -> its comment: that in its own lines, or else the comment lines directly above."""
    found = {}
    for base in reversed([each for each in kind.__mro__ if dataclasses.is_dataclass(each)]):
        source = textwrap.dedent(inspect.getsource(base))
        said = _beside(source)
        (body,) = ast.parse(source).body
        alone = {n for n, x in said.items() if x.line.lstrip().startswith("#")}
        for node in (x for x in body.body if isinstance(x, ast.AnnAssign)):
            lines = [n for n in range(node.lineno, node.end_lineno + 1) if n in said]
            if not lines:
                first = node.lineno
                while first - 1 in alone:
                    first -= 1
                lines = list(range(first, node.lineno))
            if lines:
                found[node.target.id] = " ".join(said[n].string.lstrip("# ") for n in lines)
    return found


def _beside(source: str) -> dict[int, tokenize.TokenInfo]:
    """line -> the comment in it."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {x.start[0]: x for x in tokens if x.type == tokenize.COMMENT}


def _type(hint: Any) -> str:
    """The type as `fields.describe` names it, with the module for classes that are called Config."""
    each = fields.options(hint)
    return " or ".join(_named(x) if dataclasses.is_dataclass(x) else fields.describe(x) for x in each)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    made = field.default_factory
    if made is dataclasses.MISSING:
        return ""
    return f"`{_named(made)}()`" if isinstance(made, type) else f"`{made()!r}`"


def _named(kind: type) -> str:
    file = kind.__module__.rpartition(".")[2]
    return f"{file}.Config" if kind.__name__ == "Config" else kind.__name__
