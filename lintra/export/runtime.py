"""A decoder or a recogniser as one file for `lintra.runtime`: docs/format.md, byte by byte.

What the runtime would compute in another way than PyTorch is folded into the weights here: an embedding of
levels is the table of its values; retention's scale of keys is in their projection, which has rows for every
rate of decay.
"""

import struct
import zlib
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra.attention.linear import EluPlusOne, Identity, LinearAttention, Relu, SquaredRelu
from lintra.attention.retention import Retention
from lintra.attention.rfa import RandomFeatureAttention
from lintra.checkpoint import write_atomically
from lintra.export import frames
from lintra.generation.native_decode import epsilons
from lintra.models import CTC, Decoder, Encoder, Seq2Seq
from lintra.native.quantize import round_rows
from lintra.nn.attention_layer import AttentionLayer
from lintra.nn.block import Block
from lintra.nn.distributions import Categorical, DiscretisedLogistics
from lintra.nn.embedding import ContextEmbedding, TiedHead, TokenEmbedding, ValueEmbedding
from lintra.nn.mlp import MLP
from lintra.nn.parameters import has_hooks, reference_param
from lintra.nn.position import Grid, Learned, Sinusoidal
from lintra.ops.rope import angles

Weights = Literal["float32", "float16", "int8"]

FORMAT = 1
HEADER, ALIGN, LANES = 320, 64, 16  # bytes, bytes, numbers: rows are filled up to a multiple
AXES, PLACES = 8, 32
_BEGINNING = struct.Struct("<8sIIQ")  # magic, version, checksum of what follows, bytes of the file
_MAGIC = b"lintraRT"

# The kinds a field may have, in the order of their numbers.
WEIGHTS = ("float32", "float16", "int8")
FEEDS = ("gelu", "swiglu", "relu")
NORM_PLACES = ("pre", "post")
POSITIONS = ("none", "sinusoidal", "concatenated", "tables", "rotary")
MAPS = ("identity", "elu+1", "relu", "squared relu", "trig", "arccos")
DECAYS = ("none", "fixed", "gated")
DENOMINATORS = ("none", "sum", "bounded")
OUTPUTS = ("logits", "mixture")

_FEATURE_MAPS = {Identity: "identity", EluPlusOne: "elu+1", Relu: "relu", SquaredRelu: "squared relu"}
_TORCH = {"float32": torch.float32, "float16": torch.float16}
_LIMITS = {"vocabulary": 2**24, "layers": 2**12, "width": 2**16, "rows": 2**15, "hidden": 2**20}
_LIMITS |= {"components": 2**16, "place": 2**16, "axis": 2**24}

# What is taken apart here. A class derived from one of them may compute something else.
_KNOWN = (
    Block,
    AttentionLayer,
    MLP,
    LinearAttention,
    Retention,
    RandomFeatureAttention,
    Grid,
    Learned,
    Sinusoidal,
)
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
    if network.config.dim * network.config.heads != network.config.width:
        return f"the runtime needs heads of width / heads numbers, got head_dim={network.config.head_dim}"
    functions: set[nn.Module] = set()  # feature maps: what they are stands in the configuration
    for block in network.blocks:
        if type(block) is not Block or type(block.attn) is not AttentionLayer:
            return f"the runtime does not know {type(block).__name__} with {type(block.attn).__name__}"
        if reason := _foreign_attention(block.attn.attention, block.attn.rotary):
            return reason
        if block.attn.additions is not None:
            return f"the runtime does not know layers with {block.attn.additions}"
        if block.mlp is None:
            return "the runtime needs blocks with an mlp"
        if block.mlp.activation not in FEEDS:
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
    if len({_Kind.of(block) for block in network.blocks}) != 1 or len(epsilons(network)) != 1:
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
    out, network = _Content(weights), _network(model)
    if isinstance(model, CTC):
        out.add(frames.header(model))
        frames.write(model, out)
    else:
        _write_symbols(model, out)
    _write_positions(network, out)
    for block in network.blocks:
        _write_layer(block, out)
    if not isinstance(network.norm, nn.Identity):
        out.norm(network.norm)
    out.linear(model.head.weight, model.head.bias)
    return _whole(_fields(model, weights), b"".join(out.parts))


def _whole(fields: bytes, body: bytes) -> bytes:
    content = _BEGINNING.pack(_MAGIC, FORMAT, 0, HEADER + len(body))[16:] + fields + body
    return _BEGINNING.pack(_MAGIC, FORMAT, zlib.crc32(content), HEADER + len(body))[:16] + content


class _Content:
    """Content behind the header, in its order."""

    def __init__(self, weights: Weights):
        self.weights: Weights = weights
        self.parts: list[bytes] = []

    def add(self, content: bytes) -> None:
        self.parts += content, bytes(-len(content) % ALIGN)

    def vector(self, x: Tensor) -> None:
        self.rows(x[None], "float32")

    def rows(self, x: Tensor, kind: Weights) -> None:
        """x [o i], the rows filled up with zeros."""
        x = x.detach().cpu().float()
        scale = None
        if kind == "int8":
            x, scale = round_rows(x)
        stored = x.to(torch.int8 if kind == "int8" else _TORCH[kind])
        if kind == "float16" and not bool(stored.isfinite().all()):
            raise ValueError(f"weights must fit into float16, got {float(x.abs().max()):g}: keep float32")
        if scale is not None:
            self.vector(scale)
        self.add(functional.pad(stored, (0, -x.shape[1] % LANES)).contiguous().numpy().tobytes())

    def table(self, x: Tensor) -> None:
        self.rows(x, "float32" if self.weights == "float32" else "float16")

    def linear(self, weight: Tensor, bias: Tensor | None) -> None:
        self.rows(weight, self.weights)
        self.vector(weight.new_zeros(weight.shape[0]) if bias is None else bias)

    def norm(self, norm: Any) -> None:
        self.vector(norm.weight)
        if isinstance(norm, nn.LayerNorm):
            self.vector(norm.bias)


def _write_symbols(model: Any, out: _Content) -> None:
    if isinstance(model.embedding, ContextEmbedding):
        for x in (model.embedding.own.table.weight, *model.embedding.earlier.parameters()):
            out.table(x)
    else:
        symbols = torch.arange(
            model.config.vocabulary + model.config.start, device=reference_param(model).device
        )
        out.table(model.embedding(symbols[None])[0])


def _write_positions(model: Any, out: _Content) -> None:
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


def _write_layer(block: Any, out: _Content) -> None:
    heads, feed, attention = block.attn, block.mlp, block.attn.attention
    weight, bias = heads.qkv_proj.weight, _bias(heads.qkv_proj)
    if isinstance(attention, Retention):
        weight, bias = (_for_each_rate(x, heads) for x in (weight, bias))
    out.norm(block.attn_norm)
    out.linear(weight, bias)
    if "gate" in heads.extra_proj:
        gate = heads.extra_proj["gate"]
        bias = _bias(gate)
        if isinstance(attention, RandomFeatureAttention):
            assert attention.gate_bias is not None
            bias = bias + attention.gate_bias
        out.linear(gate.weight, bias)
    if isinstance(attention, Retention):
        out.vector(attention.log_decay.double().exp())
    if isinstance(attention, RandomFeatureAttention):
        rows = attention.rows / attention.config.tau
        rows = rows if attention.sigma is None else rows * attention.sigma[:, None]
        out.rows(rows.flatten(0, 1), "float32")
    out.linear(heads.out_proj.weight, heads.out_proj.bias)
    out.norm(block.mlp_norm)
    out.linear(feed.up.weight, feed.up.bias)
    out.linear(feed.down.weight, feed.down.bias)


def _for_each_rate(x: Tensor, heads: Any) -> Tensor:
    """The rows of q, k and v of retention: keys scaled, keys and values repeated for each rate of decay."""
    q, k, v = x.split(heads.widths)
    times = heads.attention.rates // heads.kv_heads
    k, v = (
        part.unflatten(0, (heads.kv_heads, -1)).repeat_interleave(times, 0).flatten(0, 1)
        for part in (k * heads.dim**-0.5, v)
    )
    return torch.cat((q, k, v))


def _bias(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias


class _Kind(NamedTuple):
    """Sizes and kinds of a layer, which must be alike in all of them."""

    heads: int
    kv_heads: int
    rows: int  # of a random projection
    hidden: int
    activation: str
    norm: str
    rms: bool
    rotary: float | None
    map: str
    decay: str
    denominator: str
    head_norm: bool
    head_gate: bool
    eps: float

    @classmethod
    def of(cls, block: Any) -> "_Kind":
        heads, attention = block.attn, block.attn.attention
        config, rows = attention.config, 0
        kind = {"decay": "none", "denominator": "none", "head_norm": False, "head_gate": False, "eps": 0.0}
        if isinstance(attention, LinearAttention):
            kind["map"] = _FEATURE_MAPS[type(config.feature_map)]
            if config.normalize:
                kind |= {"denominator": "sum", "eps": config.eps}
        elif isinstance(attention, Retention):
            kind |= {"map": "identity", "decay": "fixed", "head_norm": config.normalize_heads}
            kind["head_gate"] = config.gate
        else:
            kind |= {"map": config.kernel, "decay": "gated" if config.gate else "none", "denominator": "sum"}
            rows = config.features
            if config.kernel == "trig":
                kind |= {"denominator": "bounded", "eps": attention.den_eps * rows}
        return cls(
            heads=heads.heads,
            kv_heads=attention.rates if isinstance(attention, Retention) else heads.kv_heads,
            rows=rows,
            hidden=block.mlp.down.in_features,
            activation=block.mlp.activation,
            norm="pre" if block.pre else "post",
            rms=isinstance(block.attn_norm, nn.RMSNorm),
            rotary=heads.rotary,
            **kind,
        )


def _fields(model: Any, weights: Weights) -> bytes:
    """The header behind its first 24 bytes."""
    network, hears = _network(model), isinstance(model, CTC)
    kind, config = _Kind.of(network.blocks[0]), network.config
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
        int(kind.head_norm),
        int(kind.head_gate),
        OUTPUTS.index("mixture" if _components(model) else "logits"),
        _components(model),
    ]
    packed = struct.pack(f"<{len(words)}I2f", *words, kind.eps, *epsilons(network))
    rest, last = bytes(HEADER - _BEGINNING.size - len(packed) - 4), int(hears)
    return packed + rest + struct.pack("<I", last)


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
    kind, config = _Kind.of(network.blocks[0]), network.config
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
    }
    found = [(name, value, _LIMITS[name]) for name, value in given.items()]
    return [*found, ("axes", len(_axes(network)), AXES), ("places", len(context), PLACES)]


def _foreign_attention(attention: Any, rotary: float | None) -> str | None:
    """Return what the runtime does not know about a mechanism."""
    if type(attention) is LinearAttention:
        if type(attention.config.feature_map) not in _FEATURE_MAPS:
            known = ", ".join(_FEATURE_MAPS.values())
            return f"of linear attention the runtime knows {known}, got {attention.config.feature_map}"
        if rotary is not None and attention.config.rotary == "inputs":
            return f"the runtime turns the features of linear, got rotary={attention.config.rotary!r}"
        return None
    if type(attention) is Retention and attention.config.centre_heads:
        return "the runtime divides heads by their root mean square, got centre_heads=True"
    if type(attention) is Retention and attention.value_heads != attention.kv_heads:
        return (
            f"the runtime has a value head for each key head, got value_heads={attention.value_heads} for "
            f"{attention.kv_heads} key heads"
        )
    if type(attention) in (Retention, RandomFeatureAttention):
        return None
    return f"the runtime knows the attentions linear, retention and rfa, got {attention.name}"
