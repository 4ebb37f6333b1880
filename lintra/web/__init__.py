"""A page in which a visitor watches a model draw, and has it complete a drawing of their own.

One HTML file with the program, the runtime in WebAssembly and the model's weights inside: it works without a
server and asks the network for nothing. `page` makes it of a model of grey images with linear attention,
`Server` answers with it on this machine.
"""

from typing import Any

from lintra.export.runtime import Weights
from lintra.web import _drawing
from lintra.web._parts import file
from lintra.web._server import Server

__all__ = ["Server", "file", "page", "why_not"]


def why_not(model: Any, task: Any) -> str | None:
    """Return why there is no page of a model and its task; None if there is one."""
    return _drawing.why_not(model, task)


def page(model: Any, task: Any, name: str, weights: Weights = "float16") -> str:
    """The page of a model, called `name` in it, and of its task, as `why_not` takes them.

    weights: how they are kept in it, as in `lintra.export.runtime`. Raises ValueError with the reason where
    there is no page of the model.
    """
    if reason := why_not(model, task):
        raise ValueError(f"there is no page of this model: {reason}")
    return _drawing.page(model, task, name, weights)
