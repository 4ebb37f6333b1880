"""The part of a recogniser's file that a decoder's lacks (docs/format.md): the stages that frames pass.

`lintra.export.runtime` writes the rest, as for a decoder without tokens.
"""

import struct
from typing import Any

from torch import nn

from lintra.export._sections import Sections
from lintra.models.ctc import CTC

_HEADER = struct.Struct("<9I2f20x")  # docs/format.md
_AUDIO = ("given", "fbank")  # the kinds of features, in the order of their numbers
_LIMITS = {"inputs": 2**16, "bins": 2**16, "rate": 2**24, "frame": 2**15}


def why_not(model: CTC) -> str | None:
    """Return why the runtime cannot hear as a recogniser does; None if it can."""
    if why := model.why_not_extend():
        return f"the runtime hears piece by piece: {why}"
    encoder: Any = model.encoder
    if encoder.token_types is not None or not isinstance(encoder.embedding_norm, nn.Identity):
        return "the runtime does not know encoders with token_types or embedding_norm"
    read = model.config.features
    if read.dither:
        return f"the runtime adds no noise to audio, got dither={read.dither}"
    if any("\0" in name for name in model.config.symbols.names):
        return "the runtime needs names of symbols without zero bytes"
    sizes = {"inputs": encoder.config.inputs, "bins": read.bins}
    if read.kind == "fbank":
        sizes |= {"rate": read.rate, "frame": read.frame}
    for name, value in sizes.items():
        if value > _LIMITS[name]:
            return f"the runtime takes {name} of at most {_LIMITS[name]:,}, got {value:,}"
    return None


def header(model: CTC) -> bytes:
    """The second header, after the first."""
    config, audio = model.config, model.config.features.kind == "fbank"
    read = config.features
    return _HEADER.pack(
        read.bins,
        config.encoder.inputs,
        len(model.stages),
        len(_names(model)),
        int(config.symbols.unit != "character"),
        _AUDIO.index(read.kind),
        read.rate if audio else 0,
        read.frame if audio else 0,
        read.shift if audio else 0,
        read.low_hz if audio else 0.0,
        read.top_hz if audio else 0.0,
    )


def write(model: CTC, out: Sections) -> None:
    """Add the parts before the layers."""
    out.vector(model.mean)
    out.vector(model.scale)
    for stage in model.stages:
        out.linear(stage.weight.permute(0, 2, 1).flatten(1), stage.bias)  # [o, 3 i]: frame by frame
    embedding: Any = model.encoder.embedding
    out.linear(embedding.weight, embedding.bias)
    out.add(_names(model))


def _names(model: CTC) -> bytes:
    return b"".join(name.encode() + b"\0" for name in model.config.symbols.names)
