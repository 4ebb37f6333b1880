"""A table of the fields of each dataclass for the site, inherited ones too, with what their comments say."""

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
    """Puts the table behind the docstring; the comments of a source are in no syntax tree."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if any(each.callable_path == "dataclasses.dataclass" for each in cls.decorators):
            said = [cls.docstring.value] if cls.docstring else []
            cls.docstring = griffe.Docstring("\n\n".join([*said, table(locate(cls.path))]), parent=cls)


def table(kind: Any) -> str:
    """A row for each field: its type, its default, and what the comment beside or above it says."""
    said, hints = comments(kind), get_type_hints(kind)
    rows = []
    for field in dataclasses.fields(kind):
        cells = (f"`{field.name}`", _type(hints[field.name]), _default(field), said.get(field.name, ""))
        rows.append([cell.replace("|", r"\|") for cell in cells])
    if rows:
        rows = [["field", "type", "default", "meaning"], ["---"] * 4, *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def comments(kind: type) -> dict[str, str]:
    """field -> its comment: what stands in its lines, else the lines directly above that are nothing else."""
    found = {}
    for base in reversed([each for each in kind.__mro__ if dataclasses.is_dataclass(each)]):
        source = textwrap.dedent(inspect.getsource(base))
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        said = {x.start[0]: x for x in tokens if x.type == tokenize.COMMENT}
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


def _type(hint: Any) -> str:
    """As `fields.describe` says it; of the many classes that are called Config, which one."""
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
