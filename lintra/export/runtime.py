"""A decoder or a recogniser as one file for `lintra.runtime`: docs/format.md, byte by byte.

What the runtime would compute in another way than PyTorch is folded into the weights here: an embedding of
levels is the table of its values; retention's scale of keys is in their projection, which has rows for every
rate of decay. Layers are those of `lintra.export._runtime_layer`.
"""

import struct
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lintra.attention.linear import LinearAttention
from lintra.checkpoint import write_atomically
from lintra.export import frames
from lintra.export._runtime_layer import (
    ATTENTIONS,
    DECAYS,
    DENOMINATORS,
    HEAD_GATES,
    HEAD_NORMS,
    MAPS,
    UPDATES,
    Kind,
    foreign_attention,
    write_layer,
)
from lintra.export._sections import Sections, Weights
from lintra.generation.native_decode import epsilons
from lintra.models import CTC, Decoder, Encoder, Seq2Seq
from lintra.nn.attention_layer import AttentionLayer
from lintra.nn.block import Block
from lintra.nn.distributions import Categorical, DiscretisedLogistics
from lintra.nn.embedding import ContextEmbedding, TiedHead, TokenEmbedding, ValueEmbedding
from lintra.nn.mlp import MLP
from lintra.nn.parameters import has_hooks, reference_param
from lintra.nn.position import Grid, Learned, Sinusoidal
from lintra.ops.rope import angles

HEADER = {1: 320, 2: 384}  # bytes, by the version of the format
AXES, PLACES = 8, 32
_BEGINNING = struct.Struct("<8sIIQ")  # magic, version, checksum of what follows, bytes of the file
_MAGIC = b"lintraRT"

# The kinds a field may have, in the order of their numbers.
WEIGHTS = ("float32", "float16", "int8")
FEEDS = ("gelu", "swiglu", "relu")
NORM_PLACES = ("pre", "post")
POSITIONS = ("none", "sinusoidal", "concatenated", "tables", "rotary")
OUTPUTS = ("logits", "mixture")

_LIMITS = {"vocabulary": 2**24, "layers": 2**12, "width": 2**16, "rows": 2**15, "hidden": 2**20}
_LIMITS |= {
    "components": 2**16,
    "place": 2**16,
    "axis": 2**24,
    "conv": 2**10,
    "rank": 2**16,
    "head_dim": 2**16,
}
_LIMITS |= {"heads": 2**16, "heads * head_dim": 2**18}

# What is taken apart here. A class derived from one of them may compute something else.
_KNOWN = (Block, AttentionLayer, MLP, *ATTENTIONS, Grid, Learned, Sinusoidal)
_KNOWN += (ContextEmbedding, TiedHead, TokenEmbedding, ValueEmbedding, nn.Embedding, nn.Linear, nn.LayerNorm)
_KNOWN += (nn.RMSNorm, nn.Dropout, nn.Identity, nn.ModuleList, nn.ModuleDict, Decoder)
_KNOWN += (nn.Conv1d, Encoder, CTC)


def why_not(model: Any) -> str | None:
    """Return why the runtime cannot serve a model; None if it can."""
    if isinstance(model, Seq2Seq):
        return "the runtime does not read another sequence"
    if not isinstance(model, (Decoder, CTC)):
        return f"the runtime is for decoders and recognisers of speech, got {type(model).__name__}"
    if isinstance(model, CTC) and (reason := frames.why_not(model)):
        return reason
    network = _network(model)
    functions: set[nn.Module] = set()  # feature maps: what they are stands in the configuration
    for block in network.blocks:
        if type(block) is not Block or type(block.attn) is not AttentionLayer:
            return f"the runtime does not know {type(block).__name__} with {type(block.attn).__name__}"
        if reason := foreign_attention(block.attn):
            return reason
        if block.mlp is not None and block.mlp.activation not in FEEDS:
            return f"the runtime does not know the activation {block.mlp.activation!r}"
        if isinstance(block.attn.attention, LinearAttention):
            functions |= {block.attn.attention.query_map, block.attn.attention.key_map}
    for module in model.modules():
        if module not in functions and type(module) not in _KNOWN:
            return f"the runtime does not know {type(module).__name__}"
        if has_hooks(module):
            return f"the runtime would pass over the hooks of {type(module).__name__}"
    if isinstance(model, Decoder) and type(model.output) not in (Categorical, DiscretisedLogistics):
        return f"the runtime does not know the distribution {type(model.output).__name__}"
    if len({Kind.of(block) for block in network.blocks}) != 1 or len(epsilons(network)) != 1:
        return "the runtime needs layers that are alike, these differ in size or kind"
    for name, parameter in model.state_dict().items():
        if not bool(parameter.isfinite().all()):
            return f"{name} holds numbers that are infinite or NaN"
    for name, value, most in _sizes(model):
        if value > most:
            return f"the runtime takes {name} of at most {most:,}, got {value:,}"
    return None


def _network(model: Decoder | CTC) -> Any:
    """The blocks, with what stands before and behind them."""
    return model.encoder if isinstance(model, CTC) else model


def _vocabulary(model: Decoder | CTC) -> int:
    """The symbols that are predicted, CTC's blank among them."""
    return len(model.config.symbols.names) + 1 if isinstance(model, CTC) else model.config.vocabulary


def write(model: Decoder | CTC, file: str | Path, weights: Weights = "float32") -> None:
    """The model into one file, which appears whole or not at all. Raises as `to_bytes` does, and
    checkpoint.Error where the file cannot be written."""
    content = to_bytes(model, weights)
    write_atomically(Path(file), lambda place: place.write_bytes(content))


@torch.no_grad()
def to_bytes(model: Decoder | CTC, weights: Weights = "float32") -> bytes:
    """The content of a file. weights: how those of the layers and the head are kept, int8 with a scale for
    each row; tables, of which a token reads one row, are float16 unless weights are float32.

    Raises ValueError with the reason for a model that the runtime does not know, or whose weights are too
    large for float16.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {weights!r}")
    if reason := why_not(model):
        raise ValueError(f"this model cannot be exported to the runtime: {reason}")
    out, network = Sections(weights), _network(model)
    if isinstance(model, CTC):
        out.add(frames.header(model))
        frames.write(model, out)
    else:
        _write_symbols(model, out)
    _write_positions(network, out)
    for block in network.blocks:
        write_layer(block, out)
    if not isinstance(network.norm, nn.Identity):
        out.norm(network.norm)
    out.linear(model.head.weight, model.head.bias)
    return _whole(version(model), _fields(model, weights) + b"".join(out.parts))


def version(model: Decoder | CTC) -> int:
    """Return the version of the format that a model takes: 1, which older programs read too, or 2."""
    network = _network(model)
    kind = Kind.of(network.blocks[0])
    return 1 if kind.first and kind.heads * kind.dim == network.config.width else 2


def _whole(number: int, content: bytes) -> bytes:
    size = _BEGINNING.size + len(content)
    content = _BEGINNING.pack(_MAGIC, number, 0, size)[16:] + content
    return _BEGINNING.pack(_MAGIC, number, zlib.crc32(content), size)[:16] + content


def _write_symbols(model: Any, out: Sections) -> None:
    if isinstance(model.embedding, ContextEmbedding):
        for x in (model.embedding.own.table.weight, *model.embedding.earlier.parameters()):
            out.table(x)
    else:
        symbols = torch.arange(
            model.config.vocabulary + model.config.start, device=reference_param(model).device
        )
        out.table(model.embedding(symbols[None])[0])


def _write_positions(model: Any, out: Sections) -> None:
    if isinstance(model.position, Grid):
        for x in model.position.tables.parameters():
            out.table(x)
    if isinstance(model.position, Learned):
        out.table(model.position.table.weight)
    heads = model.blocks[0].attn
    if isinstance(model.position, Sinusoidal):
        out.add(_frequencies(model.position.width, 10_000.0))
    elif heads.rotary is not None:
        out.add(_frequencies(heads.dim, heads.rotary))


def _frequencies(width: int, base: float) -> bytes:
    """Radians a token, float64: the angles at position 1."""
    return angles(torch.ones(1, 1, dtype=torch.int64), width, base).numpy().tobytes()


def _fields(model: Any, weights: Weights) -> bytes:
    """The header behind its first 24 bytes."""
    network, hears = _network(model), isinstance(model, CTC)
    kind, config = Kind.of(network.blocks[0]), network.config
    axes, context = _axes(network), () if hears else config.context
    words = [
        WEIGHTS.index(weights),
        _vocabulary(model),
        int(not hears and config.start),
        len(network.blocks),
        config.width,
        kind.heads,
        kind.kv_heads,
        kind.rows,
        kind.hidden,
        FEEDS.index(kind.activation),
        NORM_PLACES.index(kind.norm),
        int(kind.rms),
        int(not isinstance(network.norm, nn.Identity)),
        POSITIONS.index("tables" if axes else config.position),
        *(len(axes), *axes, *[0] * (AXES - len(axes))),
        *(len(context), *context, *[0] * (PLACES - len(context))),
        MAPS.index(kind.map),
        DECAYS.index(kind.decay),
        DENOMINATORS.index(kind.denominator),
        HEAD_NORMS.index(kind.head_norm),
        HEAD_GATES.index(kind.head_gate),
        OUTPUTS.index("mixture" if _components(model) else "logits"),
        _components(model),
    ]
    packed = struct.pack(f"<{len(words)}I2f", *words, kind.eps, *epsilons(network))
    packed += bytes(HEADER[1] - _BEGINNING.size - len(packed) - 4) + struct.pack("<I", hears)
    if version(model) == 1:
        return packed
    words = [kind.dim, kind.conv, int(kind.unit_keys), UPDATES.index(kind.update), kind.decay_rank]
    words += [kind.gate_rank, int(kind.skip)]
    packed += struct.pack(f"<{len(words)}I2f", *words, kind.scale, kind.beta_scale)
    return packed + bytes(HEADER[2] - _BEGINNING.size - len(packed))


def _axes(model: Any) -> tuple[int, ...]:
    if isinstance(model.position, Grid):
        return model.position.sizes
    return (model.position.table.num_embeddings,) if isinstance(model.position, Learned) else ()


def _components(model: Any) -> int:
    if isinstance(model, CTC) or isinstance(model.output, Categorical):
        return 0
    return model.output.size // 3


def _sizes(model: Any) -> list[tuple[str, int, int]]:
    """Return what the format bounds: name, value, the most."""
    network = _network(model)
    kind, config = Kind.of(network.blocks[0]), network.config
    context = () if isinstance(model, CTC) else config.context
    given = {
        "vocabulary": _vocabulary(model),
        "layers": len(network.blocks),
        "width": config.width,
        "rows": kind.rows,
        "hidden": kind.hidden,
        "components": _components(model),
        "place": max(context, default=0),
        "axis": max(_axes(network), default=0),
        "conv": kind.conv,
        "rank": max(kind.decay_rank, kind.gate_rank),
        "heads": kind.heads,
        "head_dim": kind.dim,
        "heads * head_dim": kind.heads * kind.dim,
    }
    found = [(name, value, _LIMITS[name]) for name, value in given.items()]
    return [*found, ("axes", len(_axes(network)), AXES), ("places", len(context), PLACES)]
