"""The page that transcribes speech from the microphone."""

import html
from typing import Any

from lintra.attention import leaves
from lintra.attention.softmax import SoftmaxAttention
from lintra.audio.symbols import Symbols
from lintra.export import runtime as export
from lintra.models import CTC
from lintra.web._parts import file, fill, head, scripts

_PROGRAM = (
    "worker.js",
    "runtime.js",
    "recogniser.js",
    "resample.js",
    "hearing.js",
)  # what runs in the worker
_TITLE = "a transformer writes down what you say"
_DESCRIPTION = "A small transformer in this page writes down what the microphone hears, while it is said."
_MOST_WORDS = 60  # that are all named


def why_not(model: CTC) -> str | None:
    """Return why a recogniser has no page; None if it has one."""
    return model.why_not_stream() or export.why_not(model)


def page(model: CTC, name: str, weights: export.Weights) -> str:
    """The page of a recogniser."""
    encoder: Any = model.encoder
    state, heads = _state_bytes(model), encoder.blocks[0].attn
    names = dict.fromkeys(block.attn.attention.name for block in encoder.blocks)
    about = {
        "state_bytes": state,
        "cache_bytes": 4 * 2 * len(encoder.blocks) * heads.kv_heads * heads.dim,  # of a step, in all layers
        "step_seconds": model.config.seconds,
    }
    parts = {
        "attention": html.escape(" and ".join(names)),
        "state": f"{state / 1024:,.0f} KiB",
        "knows": _knows(model.config.symbols),
        "model": html.escape(name),
        "layers": len(encoder.blocks),
        "model_width": encoder.config.width,
        "parameters": f"{sum(x.numel() for x in model.parameters()):,}",
        "step": f"{1000 * model.config.seconds:g}",
        "head": head(title=_TITLE, description=_DESCRIPTION, sources="blob: data:"),
        "tap": file("tap.js"),
        "scripts": scripts(model, weights, program=_PROGRAM, page="speech.js", about=about),
    }
    return fill("speech.html", parts)


def _state_bytes(model: CTC) -> int:
    """Bytes of the state, with full windows of softmax attention."""
    encoder: Any = model.encoder
    windows = [block.attn for block in encoder.blocks if isinstance(block.attn.attention, SoftmaxAttention)]
    kept = sum(2 * x.attention.config.window * x.kv_heads * x.dim for x in windows)
    return 4 * (kept + sum(leaf[0].numel() for leaf in leaves(model.start(1))))


def _knows(symbols: Symbols) -> str:
    """Return what the model writes, as a sentence."""
    if symbols.unit != "word":
        return f"It writes {symbols.unit}s, {len(symbols.names)} kinds of them."
    if len(symbols.names) > _MOST_WORDS:
        return f"It knows {len(symbols.names):,} words, and writes nothing else whatever is said."
    *most, last = (f"<b>{html.escape(name)}</b>" for name in symbols.names)
    words = f"words {', '.join(most)} and {last}" if most else f"word {last}"
    return f"It knows the {words}, and writes nothing else whatever is said."
