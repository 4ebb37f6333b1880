"""Pages in which a model runs in the visitor's browser: it draws, or transcribes speech.

One HTML file with the program, the runtime in WebAssembly and the model's weights inside: it works without a
server and asks the network for nothing. `page` makes it of a model of grey images with linear attention,
which completes a drawing, or of a recogniser that can stream, which listens to the microphone. `Server`
answers with it on this machine.
"""

from typing import Any

from lintra.export.runtime import Weights
from lintra.models import CTC
from lintra.web import _drawing, _speech
from lintra.web._parts import file
from lintra.web._server import Server

__all__ = ["Server", "file", "page", "why_not"]


def why_not(model: Any, task: Any) -> str | None:
    """Return why there is no page of a model and its task; None if there is one. For a recogniser the task is
    not used, and may be None."""
    return _speech.why_not(model) if isinstance(model, CTC) else _drawing.why_not(model, task)


def page(model: Any, task: Any, name: str, weights: Weights = "float16") -> str:
    """The page of a model, called `name` in it, and of its task, as `why_not` takes them.

    weights: how they are kept in it, as in `lintra.export.runtime`. Raises ValueError with the reason where
    there is no page for the model.
    """
    if reason := why_not(model, task):
        raise ValueError(f"there is no page of this model: {reason}")
    if isinstance(model, CTC):
        return _speech.page(model, name, weights)
    return _drawing.page(model, task, name, weights)
