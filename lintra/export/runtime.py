"""A decoder or a recogniser as one file for `lintra.runtime`: docs/format.md, byte by byte.

Computations in which the runtime differs from PyTorch are folded into the weights here: an embedding of
levels is the table of its values; retention's scale of keys is in their projection, which has rows for every
rate of decay. Layers are those of `lintra.export._runtime_layer`.
"""

import copy
import struct
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lintra.attention.linear import LinearAttention
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
    Surroundings,
    foreign_attention,
    write_layer,
)
from lintra.export._sections import Sections, Weights
from lintra.generation.native_decode import norms, unknown_norm
from lintra.io.files import write_atomically
from lintra.models import CTC, Decoder, Encoder, Seq2Seq
from lintra.native import ACTIVATIONS
from lintra.nn.attention_layer import AttentionLayer
from lintra.nn.block import Block
from lintra.nn.distributions import Categorical, DiscretisedLogistics
from lintra.nn.embedding import ContextEmbedding, TiedHead, TokenEmbedding, ValueEmbedding
from lintra.nn.mlp import MLP
from lintra.nn.parameters import has_hooks, reference_param
from lintra.nn.position import Grid, Learned, Sinusoidal
from lintra.ops.rope import angles

HEADER = {1: 320, 2: 384, 3: 384}  # bytes, by the version of the format
_RECORD = 128  # bytes of a kind of layers beside the first
AXES, PLACES = 8, 32
_BEGINNING = struct.Struct("<8sIIQ")  # magic, version, checksum of what follows, bytes of the file
_MAGIC = b"lintraRT"

# The kinds a field may have, in the order of their numbers.
WEIGHTS = ("float32", "float16", "int8")
NORM_PLACES = ("pre", "post")
POSITIONS = ("none", "sinusoidal", "concatenated", "tables", "rotary")
OUTPUTS = ("logits", "mixture")

_FLOAT32 = torch.finfo(torch.float32).max
_LIMITS = {
    "vocabulary": 2**24,
    "layers": 2**12,
    "width": 2**16,
    "rows": 2**15,
    "hidden": 2**20,
    "heads": 2**16,
    "head_dim": 2**16,
    "heads * head_dim": 2**18,
    "kinds of layers": 16,
    "components": 2**16,
    "place": 2**16,
    "axis": 2**24,
    "conv": 2**10,
    "rank": 2**16,
    "window": 2**24,
    "eps": _FLOAT32,
    "scale": _FLOAT32,
    "beta_scale": _FLOAT32,
    "eps of norms": _FLOAT32,
}

# Classes whose parts are read here. A class derived from one of them may compute something else.
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
    functions: set[nn.Module] = set()  # feature maps: the configuration names them
    for block in network.blocks:
        if type(block) is not Block or type(block.attn) is not AttentionLayer:
            return f"the runtime does not know {type(block).__name__} with {type(block.attn).__name__}"
        if reason := foreign_attention(block.attn):
            return reason
        if block.mlp is not None and block.mlp.activation not in ACTIVATIONS:
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
    if reason := unknown_norm(network):
        return reason
    if len({type(norm) for norm in norms(network)}) != 1:
        return "norms must all be LayerNorm, or all RMSNorm"
    if len({Surroundings.of(block) for block in network.blocks}) != 1:
        return "the runtime needs layers that are alike but for their attention, these differ in size or kind"
    for name, parameter in model.state_dict().items():
        if not bool(parameter.isfinite().all()):
            return f"{name} holds numbers that are infinite or NaN"
    for name, value, most in _sizes(model):
        if value > most:
            return f"the runtime takes {name} of at most {most:,}, got {value:,}"
    return None


def _kinds(network: Any) -> list[Kind]:
    """The kinds of layers, in the order in which they come."""
    return list(dict.fromkeys(Kind.of(block) for block in network.blocks))


def _network(model: Decoder | CTC) -> Any:
    """The blocks, with the layers before and after them."""
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

    Raises ValueError with the reason for a model that the runtime does not know, or whose numbers are too
    large for float16, or for float32, as the exponential of a rate of decay may be.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {weights!r}")
    if reason := why_not(model):
        raise ValueError(f"this model cannot be exported to the runtime: {reason}")
    if reference_param(model).dtype in (torch.float16, torch.bfloat16):  # what is derived keeps its digits
        model = copy.deepcopy(model).float()
    out, network = Sections(weights), _network(model)
    if isinstance(model, CTC):
        out.add(frames.header(model))
    if version(model) == 3:
        _write_kinds(network, out)
    if isinstance(model, CTC):
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
    """Return the version of the format that a model takes, the lowest: older programs read it too."""
    network = _network(model)
    around, (kind, *others) = Surroundings.of(network.blocks[0]), _kinds(network)
    if others or kind.update == "kept":
        return 3
    whole = kind.heads * around.dim == network.config.width and around.hidden > 0
    return 1 if kind.first and whole else 2


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


def _write_kinds(network: Any, out: Sections) -> None:
    """The kinds of layers beside the first, and the number of the one that each layer is of."""
    kinds = _kinds(network)
    for kind in kinds[1:]:
        fields = _heads(kind) + _mechanism(kind) + struct.pack("<f", kind.eps) + _additions(kind)
        out.add(fields + struct.pack("<I", kind.window) + bytes(_RECORD - len(fields) - 4))
    out.add(bytes(kinds.index(Kind.of(block)) for block in network.blocks))


def _write_positions(model: Any, out: Sections) -> None:
    if isinstance(model.position, Grid):
        for x in model.position.tables.parameters():
            out.table(x)
    if isinstance(model.position, Learned):
        out.table(model.position.table.weight)
    heads = model.blocks[0].attn
    if isinstance(model.position, Sinusoidal):
        out.add(_frequencies(model.position.width, 10_000.0))
    elif heads.rope_base is not None:
        out.add(_frequencies(heads.dim, heads.rope_base))


def _frequencies(width: int, base: float) -> bytes:
    """Radians a token, float64: the angles at position 1."""
    return angles(torch.ones(1, 1, dtype=torch.int64), width, base).numpy().tobytes()


def _fields(model: Any, weights: Weights) -> bytes:
    """The header after its first 24 bytes."""
    network, hears = _network(model), isinstance(model, CTC)
    around, (kind, *others), config = Surroundings.of(network.blocks[0]), _kinds(network), network.config
    axes, context = _axes(network), () if hears else config.context
    packed = _words(
        WEIGHTS.index(weights),
        _vocabulary(model),
        int(not hears and config.start),
        len(network.blocks),
        config.width,
    )
    packed += _heads(kind) + _words(
        around.hidden,
        ACTIVATIONS[around.activation],
        NORM_PLACES.index(around.norm),
        int(around.rms),
        int(not isinstance(network.norm, nn.Identity)),
        POSITIONS.index("tables" if axes else config.position),
        *(len(axes), *axes, *[0] * (AXES - len(axes))),
        *(len(context), *context, *[0] * (PLACES - len(context))),
    )
    components = _components(model)
    packed += _mechanism(kind) + _words(OUTPUTS.index("mixture" if components else "logits"), components)
    packed += struct.pack("<2f", kind.eps, norms(network)[0].eps)
    packed += bytes(HEADER[1] - _BEGINNING.size - len(packed) - 4) + _words(hears)
    if version(model) == 1:
        return packed
    packed += _words(around.dim) + _additions(kind)
    if version(model) == 3:
        packed += _words(kind.window, 1 + len(others))
    return packed + bytes(HEADER[2] - _BEGINNING.size - len(packed))


# The fields of a kind of layers, in the three parts in which they stand in the header.


def _heads(kind: Kind) -> bytes:
    return _words(kind.heads, kind.kv_heads, kind.rows)


def _mechanism(kind: Kind) -> bytes:
    found = MAPS.index(kind.map), DECAYS.index(kind.decay), DENOMINATORS.index(kind.denominator)
    return _words(*found, HEAD_NORMS.index(kind.head_norm), HEAD_GATES.index(kind.head_gate))


def _additions(kind: Kind) -> bytes:
    found = kind.conv, int(kind.unit_keys), UPDATES.index(kind.update), kind.decay_rank, kind.gate_rank
    return _words(*found, int(kind.skip)) + struct.pack("<2f", kind.scale, kind.beta_scale)


def _words(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def _axes(model: Any) -> tuple[int, ...]:
    if isinstance(model.position, Grid):
        return model.position.sizes
    return (model.position.table.num_embeddings,) if isinstance(model.position, Learned) else ()


def _components(model: Any) -> int:
    if isinstance(model, CTC) or isinstance(model.output, Categorical):
        return 0
    return model.output.size // 3


def _sizes(model: Any) -> list[tuple[str, float, float]]:
    """Return what the format bounds: name, value, the most."""
    network = _network(model)
    around, kinds, config = Surroundings.of(network.blocks[0]), _kinds(network), network.config
    context = () if isinstance(model, CTC) else config.context
    given = {
        "vocabulary": _vocabulary(model),
        "layers": len(network.blocks),
        "kinds of layers": len(kinds),
        "width": config.width,
        "rows": max(kind.rows for kind in kinds),
        "hidden": around.hidden,
        "components": _components(model),
        "place": max(context, default=0),
        "axis": max(_axes(network), default=0),
        "conv": max(kind.conv for kind in kinds),
        "rank": max(max(kind.decay_rank, kind.gate_rank) for kind in kinds),
        "window": max(kind.window for kind in kinds),
        "heads": max(kind.heads for kind in kinds),
        "head_dim": around.dim,
        "heads * head_dim": max(kind.heads for kind in kinds) * around.dim,
        "eps": max(kind.eps for kind in kinds),
        "scale": max(kind.scale for kind in kinds),
        "beta_scale": max(kind.beta_scale for kind in kinds),
        "eps of norms": norms(network)[0].eps,
    }
    found = [(name, value, _LIMITS[name]) for name, value in given.items()]
    return [*found, ("axes", len(_axes(network)), AXES), ("places", len(context), PLACES)]
