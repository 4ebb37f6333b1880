"""Decoding on a CPU as one call of the native library a token: all layers, the last norm and the head.

`model.extend` goes through some twenty operators a layer, and calling one takes about as long as its work for
one token. Serves a `Decoder` in float32 whose mechanism is `linear` with elu+1 or relu, without rotary
positions; its embedding and positions stay PyTorch's.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lintra import native
from lintra.attention import State, map_state
from lintra.attention.linear import LinearAttention
from lintra.config.fields import spelled
from lintra.legacy import renamed_attribute
from lintra.models import Decoder, Seq2Seq
from lintra.models.decoder import DecoderState
from lintra.native.decoder import Decoder as Native
from lintra.native.decoder import Layer, Shape
from lintra.native.quantize import DTYPES, Map, Norm, Weights, pack, pack_norm
from lintra.nn.attention_layer import AttentionLayer, AttentionLayerState
from lintra.nn.block import Block
from lintra.nn.embedding import TiedHead
from lintra.nn.mlp import MLP
from lintra.nn.parameters import has_hooks
from lintra.ops import LinearState
from lintra.ops.autocast import no_autocast
from lintra.ops.layout import Layout

MIN_STEPS = 16  # tokens: packing the weights takes as long as a few steps of `model.extend`

# Classes whose parameters are read here. A class derived from one of them may compute something else.
_KNOWN = (Block, AttentionLayer, MLP, LinearAttention, nn.ModuleList, nn.ModuleDict)
_KNOWN += (TiedHead, nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity)


def why_not(model: Decoder) -> str | None:
    """Return why the steps of a model cannot be fused here; None if they can."""
    if isinstance(model, Seq2Seq):
        return "a fused step does not read another sequence"
    if type(model) is not Decoder:
        return f"a fused step does not know {type(model).__name__}"
    if not native.available():
        return f"the native kernels are not available: {native.why_not()}"
    if torch.is_autocast_enabled("cpu"):
        return "a fused step computes in float32, and autocast asks for another precision"
    for parameter in model.parameters():
        if parameter.device.type != "cpu" or parameter.dtype != torch.float32:
            return f"a fused step takes float32 on the CPU, got {parameter.dtype} on {parameter.device.type}"
    if type(model.head) not in (nn.Linear, TiedHead):
        return f"a fused step does not know {type(model.head).__name__} as head"
    for part in (*model.blocks, model.norm, model.head):
        for module in part.modules():
            if reason := _foreign(module):
                return reason
    if reason := unknown_norm(model):
        return reason
    kinds = {_shape(model, block, batch=1) for block in model.blocks}
    if len(kinds) != 1:
        return "a fused step needs layers that are alike, these differ in size or kind"
    return None


def norms(model: Any) -> list[Any]:
    """Return the norms of a network's blocks that are computed, and its last one if it has one."""
    inside = [block.attn_norm for block in model.blocks]
    inside += [block.mlp_norm for block in model.blocks if block.mlp is not None]
    return inside if isinstance(model.norm, nn.Identity) else [*inside, model.norm]


def unknown_norm(model: Any) -> str | None:
    """Return what is unusual about a network's norms; None if all have weights, and the same eps."""
    found = norms(model)
    for norm in found:
        if not isinstance(norm, nn.LayerNorm | nn.RMSNorm) or norm.weight is None or norm.eps is None:
            return f"norms must have weights and an eps, got {norm}"
    return None if len({norm.eps for norm in found}) == 1 else "norms must have the same eps"


def _foreign(module: nn.Module) -> str | None:
    """Return what a fused step does not know about a part of a model."""
    name = type(module).__name__
    if isinstance(module, Block) and type(module.mlp) is not MLP:
        return f"a fused step needs blocks with an MLP, got {type(module.mlp).__name__}"
    for part in {MLP: ("up", "down"), AttentionLayer: ("qkv_proj", "out_proj")}.get(type(module), ()):
        if type(linear := getattr(module, part)) is not nn.Linear:
            return f"a fused step does not know {type(linear).__name__} as {part}"
    if isinstance(module, MLP) and type(module.dropout) not in (nn.Dropout, nn.Identity):
        return f"a fused step does not know {type(module.dropout).__name__} in the place of a dropout"
    if isinstance(module, MLP) and module.activation not in native.ACTIVATIONS:
        return f"a fused step does not know the activation {module.activation!r}"
    if isinstance(module, AttentionLayer):
        attention = module.attention
        if not isinstance(attention, LinearAttention) or attention.config.feature_map.fused is None:
            return f"a fused step knows linear attention with elu+1 or relu, got {spelled(attention.config)}"
        if attention.config.impl not in ("auto", "native"):
            return f"a fused step is native, got impl={attention.config.impl!r}"
        if module.additions is not None:
            return f"a fused step knows no {module.additions}"
        if module.rope_base is not None:
            return "a fused step does not support rotary positions"
    if type(module) not in _KNOWN:
        return f"a fused step does not know {name}"
    if has_hooks(module):
        return f"a fused step would pass over the hooks of {name}"
    return None


class NativeDecoder:
    """`model.extend` of one token for every sequence, from `state` on.

    The weights are those at construction, kept as `weights` says; sums are float32. Each call overwrites the
    states that earlier ones returned; a state from elsewhere, as at construction, is copied. Not for two
    threads at once. Raises ValueError with the reason where the model cannot be served, or is in training.
    """

    def __init__(
        self,
        model: Decoder,  # in evaluation mode
        state: DecoderState,  # to continue from; it is copied
        weights: Weights = "float32",  # how the weights are kept: "float32", "bfloat16" or "int8"
    ):
        check_weights(model, weights)
        drops = (module for module in model.modules() if isinstance(module, nn.Dropout))
        if model.training or any(module.training for module in drops):
            raise ValueError("a fused step is for evaluation: call model.eval() first")
        self.model = model
        _check_state(model.start(len(state.seen)), state)
        self.state = map_state(lambda x: x.clone(memory_format=torch.contiguous_format), state)
        layers = [
            _layer(block, own.attention, weights)
            for block, own in zip(model.blocks, self.state.layers, strict=True)
        ]
        norm = Norm(None, None) if isinstance(model.norm, nn.Identity) else _norm(model.norm)
        with torch.no_grad():
            shape = _shape(model, model.blocks[0], len(state.seen))
            self.native = Native(shape, layers, norm, _map(model.head, weights))

    def __call__(self, tokens: Tensor, state: State, mask: None = None) -> tuple[Tensor, DecoderState]:
        """Extend as `model.extend`, without a mask."""
        if mask is not None:
            raise ValueError("a fused step takes no mask")
        batch = self.native.shape.batch
        if tokens.shape != (batch, 1):
            raise ValueError(f"tokens must be [{batch}, 1], got {list(tokens.shape)}")
        if state is not self.state:
            _check_state(self.state, state)
            map_state(Tensor.copy_, self.state, state)
        with torch.no_grad(), no_autocast(tokens):  # the kernels read float32
            layout = Layout(batch, 1, tokens.device, seen=self.state.seen)
            x, recent = self.model.embed(tokens, self.state.recent, layout)
            params = self.native(x[:, 0].contiguous())
        seen = self.state.seen + 1
        layers = tuple(AttentionLayerState(seen, layer.attention) for layer in self.state.layers)
        self.state = DecoderState(seen, recent, layers)
        return params[:, None], self.state


def check_weights(model: Decoder, weights: Weights) -> None:
    """Raise ValueError unless the weights of a model can be kept in this form."""
    if weights not in DTYPES:
        raise ValueError(f"weights must be one of {', '.join(DTYPES)}, got {weights!r}")
    if reason := why_not(model):
        raise ValueError(f"weights={weights!r} needs a fused step: {reason}")


def _check_state(like: DecoderState, state: DecoderState) -> None:
    """Raise ValueError unless the tensors of a state are as native code will take them to be."""

    def check(like: Tensor, x: Tensor) -> Tensor:
        if (x.shape, x.dtype, x.device) != (like.shape, like.dtype, like.device):
            raise ValueError(
                f"state must hold {like.dtype} {list(like.shape)} on {like.device}, got {x.dtype} "
                f"{list(x.shape)} on {x.device}"
            )
        return x

    map_state(check, like, state)


def _shape(model: Decoder, block: Any, batch: int) -> Shape:
    config = block.attn.attention.config
    return Shape(
        batch=batch,
        layers=len(model.blocks),
        width=model.config.width,
        heads=block.attn.heads,
        kv_heads=block.attn.kv_heads,
        dim=block.attn.dim,
        hidden=block.mlp.down.in_features,
        feature_map=config.feature_map.fused,
        normalize=config.normalize,
        norm_first=block.pre,
        activation=block.mlp.activation,
        eps=config.eps,
        norm_eps=block.attn_norm.eps,
    )


def _layer(block: Block, state: LinearState, weights: Weights) -> Layer:
    mlp = block.mlp
    assert mlp is not None, "_foreign refuses blocks without one"
    with torch.no_grad():
        return Layer(
            _map(block.attn.qkv_proj, weights),
            _map(block.attn.out_proj, weights),
            pack(mlp.up.weight, mlp.up.bias, weights, gated=mlp.activation == "swiglu"),
            _map(mlp.down, weights),
            _norm(block.attn_norm),
            _norm(block.mlp_norm),
            state.kv,
            state.z,
        )


def _map(linear: nn.Linear | TiedHead, weights: Weights) -> Map:
    return pack(linear.weight, linear.bias, weights)


def _norm(norm: Any) -> Norm:
    bias = getattr(norm, "bias", None)
    if bias is None and isinstance(norm, nn.LayerNorm):  # to the kernel, one without a bias is an RMSNorm
        bias = torch.zeros_like(norm.weight)
    return pack_norm(norm.weight, bias)


__getattr__ = renamed_attribute(__name__, {"Fused": NativeDecoder})
