"""Parts of every page: its files, and the runtime and a model in it."""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lintra import runtime
from lintra.export import runtime as export

_HERE = Path(__file__).parent
_RUNTIME = Path(runtime.__file__).parent


def file(name: str) -> str:
    """Return one of the pages' files."""
    return (_HERE / name).read_text(encoding="utf-8")


def fill(name: str, parts: Mapping[str, object]) -> str:
    """Return a file with `{{mark}}` replaced by the part of that name."""
    # Split at the marks, so that none is looked for in inserted text.
    pieces = file(name).replace("}}", "{{").split("{{")
    pieces[1::2] = [str(parts[mark]) for mark in pieces[1::2]]
    return "".join(pieces)


def head(*, title: str, description: str, sources: str = "blob:") -> str:
    """Return the head of a page. sources: of its scripts, beside itself, for the policy."""
    parts = {"title": title, "description": description, "sources": sources, "style": file("style.css")}
    return fill("head.html", parts)


def scripts(
    model: Any, weights: export.Weights, *, program: Sequence[str], page: str, about: Mapping[str, object]
) -> str:
    """Return the model, the runtime and the scripts. program: the files of what runs in the worker; page: the
    file of what the visitor sees; about: what that file reads."""
    parts = {
        "about": json.dumps(about).replace("<", "\\u003c"),  # what a name of a symbol holds ends no script
        "model_file": _base64(export.to_bytes(model, weights)),
        "wasm": _base64((_RUNTIME / "lintra_runtime.wasm").read_bytes()),
        "wasm_relaxed": _base64((_RUNTIME / "lintra_runtime_relaxed.wasm").read_bytes()),
        "program": "\n".join(map(file, program)),
        "host": file("host.js"),
        "page": file(page),
    }
    return fill("scripts.html", parts)


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
