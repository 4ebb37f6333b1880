"""A layer of a decoder as the runtime has it: its kind, its weights, and why the runtime may not know it.

The mechanisms are one recurrence in the runtime, of which each uses some parts, and softmax attention, which
keeps keys and values in place of a state: docs/format.md. A decay of
every feature is exp(-rate softplus(x)) there; sigmoid(x)^(1 / temperature), that of gated linear attention,
becomes it with the sign of x turned. Heads that share keys or values have copies of their weights.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lintra.attention.delta import DeltaNet
from lintra.attention.gated import GatedLinearAttention
from lintra.attention.kda import KimiDeltaAttention
from lintra.attention.linear import EluPlusOne, Identity, LinearAttention, Relu, SquaredRelu
from lintra.attention.retention import Retention
from lintra.attention.rfa import RandomFeatureAttention
from lintra.attention.softmax import SoftmaxAttention
from lintra.attention.ssd import StateSpaceDuality
from lintra.export._sections import Sections

# The kinds a field may have, in the order of their numbers.
MAPS = ("identity", "elu+1", "relu", "squared relu", "trig", "arccos")
DECAYS = ("none", "fixed", "gated", "per head", "per feature")
DENOMINATORS = ("none", "sum", "bounded")
HEAD_NORMS = ("none", "plain", "weighted", "all heads")
HEAD_GATES = ("none", "silu", "sigmoid")
UPDATES = ("added", "delta", "stepped", "kept")

ATTENTIONS = (LinearAttention, Retention, RandomFeatureAttention, GatedLinearAttention, DeltaNet)
ATTENTIONS += (KimiDeltaAttention, StateSpaceDuality, SoftmaxAttention)
_WITH_NORM = (GatedLinearAttention, DeltaNet, StateSpaceDuality)  # behind the state, as output_gate is
_FEATURE_MAPS = {Identity: "identity", EluPlusOne: "elu+1", Relu: "relu", SquaredRelu: "squared relu"}


class Surroundings(NamedTuple):
    """Sizes and kinds of the parts around a mechanism, which must be the same in all layers."""

    hidden: int
    activation: str
    norm: str
    rms: bool
    rope_base: float | None
    dim: int

    @classmethod
    def of(cls, block: Any) -> "Surroundings":
        mlp = block.mlp
        return cls(
            hidden=0 if mlp is None else mlp.down.in_features,
            activation="gelu" if mlp is None else mlp.activation,
            norm="pre" if block.pre else "post",
            rms=isinstance(block.attn_norm, nn.RMSNorm),
            rope_base=block.attn.rope_base,
            dim=block.attn.dim,
        )


class Kind(NamedTuple):
    """Sizes and kinds of a layer's mechanism, in which layers may differ."""

    heads: int
    kv_heads: int
    map: str = "identity"
    rows: int = 0  # of a random projection
    decay: str = "none"
    denominator: str = "none"
    head_norm: str = "none"
    head_gate: str = "none"
    eps: float = 0.0
    # Of version 2 of the format.
    conv: int = 0
    unit_keys: bool = False
    update: str = "added"
    decay_rank: int = 0
    gate_rank: int = 0
    skip: bool = False
    scale: float = 1.0  # of queries
    beta_scale: float = 0.0
    # Of version 3.
    window: int = 0  # tokens that softmax attention keeps; 0: all

    @classmethod
    def of(cls, block: Any) -> "Kind":
        layer = block.attn
        kind = {"conv": _conv(layer) or 0, "unit_keys": layer.qk_norm is not None}
        if layer.output_gate:
            kind |= {"head_norm": "weighted", "head_gate": "silu"}
        return cls(
            heads=layer.attention.out_heads,
            kv_heads=_groups(layer.attention),
            **(kind | _of_attention(layer)),
        )

    @property
    def first(self) -> bool:
        """Return whether version 1 of the format has it."""
        later = ("conv", "unit_keys", "update", "decay_rank", "gate_rank", "skip", "scale", "beta_scale")
        return (
            all(getattr(self, name) == self._field_defaults[name] for name in later)
            and self.decay in DECAYS[:3]
            and self.head_norm in HEAD_NORMS[:2]
            and self.head_gate in HEAD_GATES[:2]
        )


def _of_attention(layer: Any) -> dict[str, Any]:
    """The fields of a `Kind` that a layer's mechanism decides."""
    attention, config = layer.attention, layer.attention.config
    root = layer.dim**-0.5
    if isinstance(attention, LinearAttention):
        kind: dict[str, Any] = {"map": _FEATURE_MAPS[type(config.feature_map)]}
        return kind | ({"denominator": "sum", "eps": config.eps} if config.normalize else {})
    if isinstance(attention, Retention):
        kind = {"decay": "fixed"} | ({} if _scaled(layer) else {"scale": root})
        kind |= {"head_norm": "plain"} if config.normalize_heads else {}
        return kind | ({"head_gate": "silu"} if config.gate else {})
    if isinstance(attention, RandomFeatureAttention):
        kind = {"map": config.kernel, "rows": config.features, "denominator": "sum"}
        kind |= {"decay": "gated"} if config.gate else {}
        if config.kernel == "trig":
            kind |= {"denominator": "bounded", "eps": attention.den_eps * config.features}
        return kind
    if isinstance(attention, GatedLinearAttention):
        kind = {"decay": "per feature", "decay_rank": config.rank, "scale": root}
        return kind | {"head_norm": "weighted", "head_gate": "silu"}
    if isinstance(attention, StateSpaceDuality):
        kind = {"decay": "per head", "update": "stepped", "head_norm": "all heads", "skip": config.skip}
        return kind | ({"head_gate": "silu"} if config.gate else {})
    if isinstance(attention, SoftmaxAttention):
        return {"update": "kept", "scale": attention.scale, "window": config.window or 0}
    kind = {"update": "delta", "unit_keys": True, "scale": root, "head_norm": "weighted"}
    kind["beta_scale"] = 2.0 if config.negative_eigenvalues else 1.0
    if isinstance(attention, KimiDeltaAttention):
        kind |= {"decay": "per feature", "decay_rank": attention.rank}
        return kind | ({"head_gate": "sigmoid", "gate_rank": attention.rank} if config.gate else {})
    kind |= {"decay": "per head"} if config.decay else {}
    return kind | ({"head_gate": "silu"} if config.gate else {})


def foreign_attention(layer: Any) -> str | None:
    """Return what the runtime does not know about a layer and its mechanism."""
    attention, rope_base = layer.attention, layer.rope_base
    if type(attention) not in ATTENTIONS:
        names = "linear, retention, rfa, gated, delta, kda, ssd and softmax"
        return f"the runtime knows the attentions {names}, got {attention.name}"
    config = attention.config
    if type(attention) is LinearAttention and type(config.feature_map) not in _FEATURE_MAPS:
        known = ", ".join(_FEATURE_MAPS.values())
        return f"of linear attention the runtime knows {known}, got {config.feature_map}"
    if type(attention) is LinearAttention and rope_base is not None and config.rotary == "inputs":
        return f"the runtime turns the features of linear, got rotary={config.rotary!r}"
    if type(attention) is Retention and config.centre_heads:
        return "the runtime divides heads by their root mean square, got centre_heads=True"
    if type(attention) is SoftmaxAttention and attention.scale < 0:
        return f"the runtime multiplies scores with at least 0, got scale={attention.scale}"
    if layer.conv is not None and _own_conv(attention) is not None:
        return f"the runtime has one convolution: {attention.name} has its own, got conv={layer.conv}"
    if layer.qk_norm is not None and (_own_conv(attention) is not None or isinstance(attention, DeltaNet)):
        return (
            f"the runtime makes keys unit vectors once, behind a convolution, got qk_norm={layer.qk_norm!r}"
        )
    own = isinstance(attention, _WITH_NORM) or (
        isinstance(attention, Retention) and (config.normalize_heads or config.gate)
    )
    if layer.output_gate and own:
        return (
            f"the runtime has one norm and gate of heads: {attention.name} has its own, got output_gate=True"
        )
    return None


def _conv(layer: Any) -> int | None:
    """Return how many tokens the convolution of a layer, or of its mechanism, sees; None without one."""
    return _own_conv(layer.attention) if layer.conv is None else layer.conv


def _own_conv(attention: Any) -> int | None:
    return getattr(attention.config, "conv", None)


def _groups(attention: Any) -> int:
    """Return the number of states."""
    return attention.rates if isinstance(attention, Retention) else attention.value_heads


def _scaled(layer: Any) -> bool:
    """Return whether retention's scale goes into the projection of the keys: nothing stands between."""
    return _conv(layer) is None and layer.qk_norm is None


def write_layer(block: Any, out: Sections) -> None:
    """The sections of a layer, in the order of docs/format.md."""
    layer, attention = block.attn, block.attn.attention
    extra = layer.extra_proj
    out.norm(block.attn_norm)
    weight, bias = (_repeated(x, layer) for x in (layer.qkv_proj.weight, out.bias(layer.qkv_proj)))
    if isinstance(attention, Retention) and _scaled(layer):
        keys = slice(attention.out_heads * layer.dim, (attention.out_heads + attention.rates) * layer.dim)
        weight[keys] *= layer.dim**-0.5
        bias[keys] *= layer.dim**-0.5
    out.linear(weight, bias)
    _write_convolution(layer, out)
    _write_gate(layer, out)
    _write_decay(layer, out)
    if "beta" in extra:
        out.linear(extra["beta"].weight, extra["beta"].bias)
    if isinstance(attention, RandomFeatureAttention):
        rows = attention.rows / attention.config.tau
        rows = rows if attention.sigma is None else rows * attention.sigma[:, None]
        out.rows(rows.flatten(0, 1), "float32")
    if isinstance(attention, StateSpaceDuality) and attention.config.skip:
        out.vector(attention.D)
    if layer.output_gate:
        out.vector(layer.out_norm)
    elif isinstance(attention, _WITH_NORM):
        out.vector(attention.norm)
    out.linear(layer.out_proj.weight, layer.out_proj.bias)
    if block.mlp is not None:
        out.norm(block.mlp_norm)
        out.linear(block.mlp.up.weight, block.mlp.up.bias)
        out.linear(block.mlp.down.weight, block.mlp.down.bias)


def _repeated(x: Tensor, layer: Any) -> Tensor:
    """Rows of q, k and v, of every head and state its own."""
    attention = layer.attention
    states = _groups(attention)
    times = (attention.out_heads // layer.heads, states // layer.kv_heads, states // attention.value_heads)
    parts = zip(x.split(layer.widths), times, strict=True)
    return torch.cat(
        [y.unflatten(0, (-1, layer.dim)).repeat_interleave(n, 0).flatten(0, 1) for y, n in parts]
    )


def _write_convolution(layer: Any, out: Sections) -> None:
    if _conv(layer) is None:
        return
    if layer.conv is not None:
        weight, bias = layer.conv_weight, layer.conv_weight.new_zeros(len(layer.conv_weight))
    else:
        attention = layer.attention
        weight = torch.cat([getattr(attention, f"conv_{name}").flatten(0, 1) for name in "qkv"])
        bias = weight.new_zeros(len(weight))
        if attention.conv_bias:
            bias = torch.cat([getattr(attention, f"bias_{name}").flatten() for name in "qkv"])
    out.rows(_repeated(weight, layer).mT, "float32")
    out.vector(_repeated(bias, layer))


def _write_gate(layer: Any, out: Sections) -> None:
    attention, extra = layer.attention, layer.extra_proj
    if layer.output_gate:
        out.linear(layer.gate_proj.weight, layer.gate_proj.bias)
    elif "gate" in extra and not isinstance(attention, RandomFeatureAttention):
        out.linear(extra["gate"].weight, extra["gate"].bias)
        if isinstance(attention, KimiDeltaAttention):
            out.linear(attention.gate_weight, attention.gate_bias)


def _write_decay(layer: Any, out: Sections) -> None:
    attention, extra = layer.attention, layer.extra_proj
    if isinstance(attention, Retention):
        out.vector(attention.log_decay.double().exp())
    elif isinstance(attention, RandomFeatureAttention) and "gate" in extra:
        assert attention.gate_bias is not None
        out.linear(extra["gate"].weight, out.bias(extra["gate"]) + attention.gate_bias)
    elif isinstance(attention, GatedLinearAttention):
        out.linear(extra["decay"].weight, extra["decay"].bias)
        out.linear(-attention.weight.flatten(0, 1), -attention.bias.flatten())
        out.vector(attention.bias.new_full((attention.value_heads,), 1 / attention.config.temperature))
    elif isinstance(attention, KimiDeltaAttention):
        out.linear(extra["decay"].weight, extra["decay"].bias)
        out.linear(attention.decay_weight.flatten(0, 1), attention.dt_bias.flatten())
        out.vector(attention.A_log.exp())
    elif isinstance(attention, (DeltaNet, StateSpaceDuality)) and attention.rates() is not None:
        step = extra["dt" if isinstance(attention, StateSpaceDuality) else "decay"]
        out.linear(step.weight, out.bias(step) + attention.dt_bias)
        out.vector(attention.A_log.exp())
