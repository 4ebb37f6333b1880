"""A page in which a visitor watches a model draw, and has it complete a drawing of their own.

One HTML file with the program, the runtime in WebAssembly and the model's weights inside: it works without a
server and asks the network for nothing. `page` makes it of a model of grey images with linear attention,
`Server` answers with it on this machine.
"""

import base64
import html
import json
from pathlib import Path
from typing import Any

from lintra import runtime
from lintra.attention.linear import EluPlusOne, Identity, LinearAttention, Relu, SquaredRelu
from lintra.export import runtime as export
from lintra.tasks import PixelTask
from lintra.web._server import Server

__all__ = ["Server", "file", "page", "why_not"]

MOST = 64  # pixels a side: a larger image is too long to be waited for

_HERE = Path(__file__).parent
_RUNTIME = Path(runtime.__file__).parent
_PROGRAM = ("runtime.js", "plain.js", "drawing.js")  # what runs in the worker
_FEATURE_MAPS = {
    EluPlusOne: "elu(<i>x</i>) + 1",
    Relu: "max(<i>x</i>, 0)",
    SquaredRelu: "max(<i>x</i>, 0)²",
    Identity: "<i>x</i>",
}
_PHI = '<mi>φ</mi><mo stretchy="false">(</mo><msub><mi>{}</mi><mi>i</mi></msub>{}'
_PHI_K = _PHI.format("k", '<mo stretchy="false">)</mo>')
_PHI_Q = _PHI.format("q", '<msup><mo stretchy="false">)</mo><mi>⊤</mi></msup>')
_ALOUD = "S is increased by phi of k i times v i, z by phi of k i; y i is phi of q i times S"
_READ = "<mrow>" + _PHI_Q + "<msub><mi>{}</mi><mi>i</mi></msub></mrow>"


def why_not(model: Any, task: Any) -> str | None:
    """Return why there is no page of a model and its task; None if there is one."""
    if not isinstance(task, PixelTask):
        return f"the page draws images, this model is of the task {task.name}"
    height, width, channels = task.image_shape
    if channels != 1:
        return f"the page draws grey images, these have {channels} channels"
    if max(height, width) > MOST:
        return f"the page draws images of at most {MOST} x {MOST} pixels, these have {height} x {width}"
    if reason := export.why_not(model):
        return reason
    attention = model.blocks[0].attn.attention
    if not isinstance(attention, LinearAttention):
        return f"the page is about linear attention, this model has {attention.name}"
    return None


def page(model: Any, task: Any, name: str, weights: export.Weights = "float16") -> str:
    """The page of a model that a task draws with, called `name` in it.

    weights: how they are kept in it, as in `lintra.export.runtime`. Raises ValueError with the reason where
    there is no page of the model.
    """
    if reason := why_not(model, task):
        raise ValueError(f"there is no page of this model: {reason}")
    height, width, _ = task.image_shape
    heads = model.blocks[0].attn
    attention = heads.attention.config
    numbers = len(model.blocks) * heads.kv_heads * heads.dim  # of the keys of one token, in all layers
    above = _READ.format("S")
    about = {
        "height": height,
        "width": width,
        "levels": task.levels,
        "first": int(model.start_token is None),  # values that are not sampled
        "state_bytes": 4 * numbers * (heads.dim + 1),
        "cache_bytes": 4 * numbers * 2,
    }
    parts = {
        "width": width,
        "height": height,
        "half": height // 2,
        "most_rows": height - 1,
        "phi_k": _PHI_K,
        "read": f"<mfrac>{above}{_READ.format('z')}</mfrac>" if attention.normalize else above,
        "read_aloud": _ALOUD + " over phi of q i times z i" * attention.normalize,
        "feature_map": _FEATURE_MAPS[type(attention.feature_map)],
        "model": html.escape(name),
        "layers": len(model.blocks),
        "model_width": model.config.width,
        "parameters": f"{sum(x.numel() for x in model.parameters()):,}",
        "about": json.dumps(about),
        "model_file": _base64(export.to_bytes(model, weights)),
        "wasm": _base64((_RUNTIME / "lintra_runtime.wasm").read_bytes()),
        "wasm_relaxed": _base64((_RUNTIME / "lintra_runtime_relaxed.wasm").read_bytes()),
        "style": file("style.css"),
        "program": "\n".join(map(file, _PROGRAM)),
        "page": file("page.js"),
    }
    # Split at the marks, so that none is looked for in what was put in before.
    pieces = file("page.html").replace("}}", "{{").split("{{")
    pieces[1::2] = [str(parts[mark]) for mark in pieces[1::2]]
    return "".join(pieces)


def file(name: str) -> str:
    """One of the page's files."""
    return (_HERE / name).read_text(encoding="utf-8")


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
