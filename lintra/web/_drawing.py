"""The page in which a model draws, and completes a drawing of the visitor's."""

import html
from typing import Any

from lintra.attention.linear import EluPlusOne, Identity, LinearAttention, Relu, SquaredRelu
from lintra.export import runtime as export
from lintra.tasks import PixelTask
from lintra.web._parts import fill, head, scripts

MOST = 64  # pixels a side: a larger image takes too long

_PROGRAM = ("worker.js", "runtime.js", "plain.js", "drawing.js")  # what runs in the worker
_TITLE = "a transformer draws {}, one pixel at a time"
_DESCRIPTION = "A linear transformer draws {} in this page, pixel by pixel, and completes yours."
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
    """Return why a model and its task have no such page; None if they have one."""
    if not isinstance(task, PixelTask):
        return f"the page draws images, this model is of the task {task.name}"
    height, width, channels = task.image_shape
    if channels != 1:
        return f"the page draws grey images, these have {channels} channels"
    if max(height, width) > MOST:
        return f"the page draws images of at most {MOST} x {MOST} pixels, these have {height} x {width}"
    if reason := export.why_not(model):
        return reason
    for block in model.blocks:
        attention = block.attn.attention
        if not isinstance(attention, LinearAttention):
            return f"the page is about linear attention, this model has {attention.name}"
    if (version := export.version(model)) != 1:
        return (
            "the page's plain JavaScript reads version 1 of the runtime's files, this model takes version "
            f"{version}: train one whose layers are alike, without conv, qk_norm, output_gate and head_dim, "
            "and with mlp_ratio above 0"
        )
    return None


def page(model: Any, task: Any, name: str, weights: export.Weights) -> str:
    """The page of a model that a task draws with."""
    height, width, _ = task.image_shape
    heads = model.blocks[0].attn
    attention = heads.attention.config
    numbers = len(model.blocks) * heads.kv_heads * heads.dim  # of the keys of one token, in all layers
    above = _READ.format("S")
    digits = task.name in ("digits", "images")
    things = "digits" if digits else "images"
    about = {
        "height": height,
        "width": width,
        "levels": task.levels,
        "first": int(model.start_token is None),  # values that are not sampled
        "state_bytes": 4 * numbers * (heads.dim + 1),
        "cache_bytes": 4 * numbers * 2,
        "things": things,
        "examples": digits,
    }
    parts = {
        "things": things,
        "thing": "a digit" if digits else "an image",
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
        "head": head(title=_TITLE.format(things), description=_DESCRIPTION.format(things)),
        "scripts": scripts(model, weights, program=_PROGRAM, page="page.js", about=about),
    }
    return fill("page.html", parts)
