"""timm's vision transformers with any mechanism for attention, from the weights they have."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from lintra.attention import AttentionConfig
from lintra.config import fields
from lintra.ops.layout import Layout

# The modules of timm's `Attention`: those it always has, and those of some versions or options.
_ALWAYS = {"qkv", "q_norm", "k_norm", "attn_drop", "proj", "proj_drop"}
_SOMETIMES = {"norm", "gate"}


def replace_attention(model: nn.Module, attention: AttentionConfig) -> list[str]:
    """Replace every attention of a timm model by the mechanism `attention`, in place; return their names.

    Projections and norms stay, under the names they have: the model's weights load before and after, and with
    `softmax.Config()` its outputs stay. Attention is bidirectional. Raises ValueError, with nothing replaced,
    where there is no attention as in timm's `Attention`, such as where a position bias is added to its
    scores, and where the mechanism cannot take its heads or its dropout.
    """
    fields.check_one("attention", AttentionConfig, attention)
    found = {name: module for name, module in model.named_modules() if _is_timms(module)}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention as in timm's vision transformers (qkv, proj, "
            "num_heads, no bias of scores): build its layers with lintra.nn.AttentionLayer"
        )
    replacements = {name: Attention(module, attention) for name, module in found.items()}
    for name, replacement in replacements.items():
        model.set_submodule(name, replacement)
    return list(found)


class Attention(nn.Module):
    """Self-attention by any mechanism, x [b t c] -> [b t c], with the projections of timm's `Attention`.

    Keeps the modules of `replaced`, such as `qkv` and `proj`. Inputs that a mechanism takes besides q, k and
    v, such as gates, are new projections of x. Raises ValueError for what the mechanism cannot do.
    """

    qkv: nn.Linear

    def __init__(self, replaced: Any, attention: AttentionConfig):
        super().__init__()
        if drop := getattr(replaced.attn_drop, "p", 0):
            raise ValueError(f"attn_drop must be 0, since few mechanisms have weights to drop, got {drop}")
        self.num_heads = replaced.num_heads
        self.qkv, self.q_norm, self.k_norm = replaced.qkv, replaced.q_norm, replaced.k_norm
        self.attn_drop = replaced.attn_drop
        self.norm, self.gate = getattr(replaced, "norm", nn.Identity()), getattr(replaced, "gate", None)
        self.proj, self.proj_drop = replaced.proj, replaced.proj_drop
        inputs, outputs, bias = self.qkv.in_features, self.qkv.out_features, self.qkv.bias is not None
        self.attention = attention.build(
            heads=self.num_heads, dim=outputs // 3 // self.num_heads, causal=False
        )
        if self.attention.shared_key or self.attention.value_heads != self.num_heads:
            raise ValueError(f"{attention} has other keys or values than the {self.num_heads} heads of qkv")
        widths = self.attention.extra_inputs()
        self.extra_proj = nn.ModuleDict({x: nn.Linear(inputs, n, bias) for x, n in widths.items()})
        if widths:
            self.attention.initialize(self.qkv, self.extra_proj)
        self.attention.to(self.qkv.weight)
        self.extra_proj.to(self.qkv.weight)
        self.train(replaced.training)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Return the output of self-attention for tokens x [b t c].

        `attn_mask` [b 1 t t] says where padding is, as in timm's models of images of any size: boolean, True
        for what is attended to, or added to scores. Raises ValueError for another, and for is_causal.
        """
        if is_causal:
            raise ValueError("is_causal must be False: the patches of an image have no order in time")
        layout = Layout.of("x", x, None if attn_mask is None else _real_tokens(attn_mask, x))
        x = layout.zero(x)
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).unbind(2)
        extra = {name: project(x) for name, project in self.extra_proj.items()}
        y = self.attention(self.q_norm(q), self.k_norm(k), v, layout=layout, **extra)
        y = self.norm(y.flatten(2))
        y = y if self.gate is None else y * self.gate(x).sigmoid()
        return layout.zero(self.proj_drop(self.proj(y)))


def _is_timms(module: nn.Module) -> bool:
    """Return whether a module is made like timm's `Attention`, with nothing else in it, or replaces one."""
    if isinstance(module, Attention):
        return True
    parts = {name for name, _ in module.named_children()}
    return (
        parts >= _ALWAYS
        and parts <= _ALWAYS | _SOMETIMES
        and isinstance(module.qkv, nn.Linear)
        and hasattr(module, "num_heads")
        and not list(module.parameters(recurse=False))
        and set(inspect.signature(module.forward).parameters) <= {"x", "attn_mask", "is_causal"}
    )


def _real_tokens(mask: Tensor, x: Tensor) -> Tensor:
    """Return which of the tokens x [b t c] are real, [b t], of timm's mask [b 1 t t] of pairs.

    Raises ValueError where it leaves out other pairs than those with padding."""
    b, t = x.shape[:2]
    if mask.shape not in ((b, 1, t, t), (1, 1, t, t)):
        raise ValueError(f"attn_mask must have the shape [{b} 1 {t} {t}], got {list(mask.shape)}")
    if mask.dtype != torch.bool and bool((mask[mask != 0] > -1e4).any()):
        raise ValueError("attn_mask must be boolean, or 0 and the least number: no bias is added to scores")
    allowed = (mask if mask.dtype == torch.bool else mask == 0)[:, 0].expand(b, t, t)
    real = allowed.any(1)
    keys = real[:, None].expand(b, t, t)
    if not (torch.equal(allowed, keys) or torch.equal(allowed, keys & real[:, :, None])):
        raise ValueError("attn_mask must say where padding is, and nothing else")
    return real
