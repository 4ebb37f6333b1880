"""PyTorch's multi-head attention by any mechanism: its signature, parameters and state dicts."""

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra.attention import Attention, AttentionConfig
from lintra.config import fields
from lintra.config.fields import spelled
from lintra.nn.mask import padded, warn_if_inverted
from lintra.nn.parameters import hooked
from lintra.ops import checks
from lintra.ops.dispatch import eager
from lintra.ops.layout import Layout


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with `attention`, a mechanism's `Config`, in place of softmax.

    The other arguments are PyTorch's, and so are the names of the parameters: its state dicts load, and with
    `softmax.Config()` the output is the same. A mechanism's sampled features keep their values; parameters
    of its own, such as gates, need `strict=False`. `dropout` is that of the weights, for a mechanism that has
    any. Each call says by `is_causal` or `attn_mask` whether it is causal. `causal` is the only form that
    calls may then ask for; None: both, where the mechanism has both with the same parameters.

    Raises ValueError for what a mechanism cannot do, and for add_bias_kv and add_zero_attn. Projections of
    the input that a mechanism takes besides q, k and v, such as gates, are computed from `key`.
    """

    def __init__(
        self,
        embed_dim: int,  # features of a token
        num_heads: int,  # a divisor of embed_dim
        dropout: float = 0.0,  # of the weights, in training; of mechanisms that have them
        bias: bool = True,  # of the projections
        add_bias_kv: bool = False,  # must be False
        add_zero_attn: bool = False,  # must be False
        kdim: int | None = None,  # features of a key; None: embed_dim
        vdim: int | None = None,  # features of a value; None: embed_dim
        batch_first: bool = False,  # True: tensors are [b t c]; False: [t b c]
        device: torch.device | str | None = None,  # of the parameters
        dtype: torch.dtype | None = None,  # of the parameters
        *,
        attention: AttentionConfig,  # a mechanism's Config
        causal: bool | None = None,  # the only form of calls; None: both, as each call says
    ):
        fields.check_one("attention", AttentionConfig, attention)
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        if add_bias_kv or add_zero_attn:
            raise ValueError("add_bias_kv and add_zero_attn must be False: no mechanism adds keys")
        if dropout and getattr(attention, "dropout", None) != 0:
            raise ValueError(
                f"dropout must be 0 for {spelled(attention)}, which has no weights to drop or a dropout of "
                f"its own, got {dropout}"
            )
        if dropout:
            attention = dataclasses.replace(attention, dropout=dropout)  # pyright: ignore (it has the field)
        super().__init__(
            embed_dim, num_heads, dropout, bias, False, False, kdim, vdim, batch_first, device, dtype
        )
        # Read by PyTorch's encoder layer: it would otherwise compute softmax attention by itself in
        # evaluation.
        self._qkv_same_embed_dim = False
        self._forms, self._refused = _build(attention, causal, heads=num_heads, dim=self.head_dim)
        self.attention = next(iter(self._forms.values()))
        if self.attention.shared_key:
            raise ValueError(
                f"attention {self.attention.name!r} has one projection for queries and keys, and PyTorch's "
                "parameters are for two: use lintra.nn.AttentionLayer"
            )
        if self.attention.value_heads != num_heads:
            raise ValueError(
                f"value_heads must be num_heads={num_heads} or None, since PyTorch's parameters are for as "
                f"many values as keys, got {self.attention.value_heads}: use lintra.nn.AttentionLayer"
            )
        if self.in_proj_weight is None and not self.attention.can.cross:
            raise ValueError(
                f"kdim and vdim must be embed_dim={embed_dim}, since attention {self.attention.name!r} has "
                f"no cross form with {spelled(attention)}, got {self.kdim} and {self.vdim}"
            )
        widths = self.attention.extra_inputs()
        self.extra_proj = nn.ModuleDict({x: nn.Linear(embed_dim, n, bias) for x, n in widths.items()})
        if widths:
            joint = nn.Linear(embed_dim, 3 * embed_dim, bias, device="meta")
            joint.weight, joint.bias = self.in_proj_weight, self.in_proj_bias
            self.attention.initialize(joint, self.extra_proj)
        self.register_load_state_dict_pre_hook(_keep_sampled)
        self.to(device=device, dtype=dtype)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Return the output for `query`, [b t c] or with `batch_first=False` [t b c] or unbatched [t c], and
        None.

        A sequence attends to itself where `key` is the tensor `query`, or causally; it then gets 0 where
        `key_padding_mask` [b s] says padding. Anything else is cross-attention. Both masks are as PyTorch's,
        boolean and True for what is left out, or 0 and -inf. `attn_mask` is None or the causal mask [t s].
        `is_causal` needs no mask. One given with it is not read: that would make a GPU wait and break a
        compiled graph.

        Raises ValueError for another `attn_mask`, for need_weights, and for a form the mechanism does not
        have.
        """
        if need_weights:
            raise ValueError("need_weights must be False: most mechanisms never compute attention weights")
        if query.is_nested:
            return self._attend_nested(query, key, value, key_padding_mask, attn_mask, causal=is_causal), None
        to_itself, batched = _same(query, key), query.dim() != 2
        padding = None if key_padding_mask is None else _left_out("key_padding_mask", key_padding_mask)
        if not batched:
            query, key, value = query[None], key[None], value[None]
            padding = None if padding is None else padding[None]
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        sizes = {"c": self.embed_dim, "k": self.kdim, "v": self.vdim}
        checks.shape("query", query, "b t c", sizes)
        checks.shape("key", key, "b s k", sizes)
        checks.shape("value", value, "b s v", sizes)
        if padding is not None:
            checks.shape("key_padding_mask", padding, "b s", sizes)
        if attn_mask is not None and not is_causal:
            _check_causal(attn_mask, sizes["t"], sizes["s"])
        causal = is_causal or attn_mask is not None
        mask = None if padding is None else ~padding
        warn_if_inverted(mask, as_padding=True)
        layout = Layout.of("key", key, mask)
        if causal or to_itself:
            y = self._attend_to_itself(query, key, value, layout, causal)
        else:
            y = self._attend_across(query, key, value, layout)
        if not batched:
            return y[0], None
        return y if self.batch_first else y.transpose(0, 1), None

    def _attend_to_itself(
        self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, causal: bool
    ) -> Tensor:
        if query.shape[1] != key.shape[1]:
            raise ValueError(
                f"is_causal needs as many queries as keys, got {query.shape[1]} and {key.shape[1]}"
            )
        if causal not in self._forms:
            other = f"; pass is_causal={not causal}" if (not causal) in self._forms else ""
            raise ValueError(f"is_causal={causal} is not supported: {self._refused[causal]}{other}")
        query, key, value = layout.zero(query), layout.zero(key), layout.zero(value)
        extra = {name: project(key) for name, project in self.extra_proj.items()}
        form = self._forms[causal]
        if form.training != self.attention.training:  # what sets the modes of all submodules passes over one
            form.train(self.attention.training)
        y = form(*self._project(query, key, value), layout=layout, **extra)
        return layout.zero(self.out_proj(y.flatten(2)))

    def _attend_nested(
        self, query: Tensor, key: Tensor, value: Tensor, *masks: Tensor | None, causal: bool
    ) -> Tensor:
        """Return what nested sequences get: what nn.TransformerEncoder makes of padded ones in evaluation."""
        if not (query is key is value) or any(mask is not None for mask in masks):
            raise ValueError("a nested query must be key and value too, and go without masks")
        x, mask = padded(query.unbind())
        y = self._attend_to_itself(x, x, x, Layout.of("query", x, mask), causal)
        return torch.nested.as_nested_tensor([each[real] for each, real in zip(y, mask, strict=True)])

    def _attend_across(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
        form = self._forms.get(False)
        if form is None or not form.can.cross:
            reason = (
                f"attention {self.attention.name!r} has no cross form with {spelled(self.attention.config)}"
            )
            raise ValueError(f"key must be the tensor query: {self._refused.get(False, reason)}")
        q, k, v = self._project(query, layout.zero(key), layout.zero(value))
        memory = form.encode_memory(k, v, layout=layout)
        y = hooked(form, "cross_attend")(q, memory, layout=Layout.of("query", query))
        return self.out_proj(y.flatten(2))

    def _project(self, *inputs: Tensor) -> list[Tensor]:
        """q [b t h d], k [b s h d], v [b s h d] of query, key and value."""
        if self.in_proj_weight is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        else:
            weights = self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        parts = map(functional.linear, inputs, weights, biases)
        return [x.unflatten(2, (self.num_heads, self.head_dim)) for x in parts]


def _same(query: Tensor, key: Tensor) -> bool:
    """Return whether these are one tensor, or one's other views, which activation checkpointing passes on."""
    if query is key:
        return True
    return eager() and (query.dtype, query.device) == (key.dtype, key.device) and query.is_set_to(key)


def _keep_sampled(module: MultiheadAttention, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Add a mechanism's sampled buffers to a state dict that knows no mechanism, as PyTorch's do."""
    own = f"{prefix}attention."
    if not any(name.startswith(own) for name in state_dict):
        learned = dict(module.attention.named_parameters())
        kept = module.attention.state_dict()
        state_dict.update({own + name: x for name, x in kept.items() if name not in learned})


def _build(
    attention: AttentionConfig, causal: bool | None, **shape: int
) -> tuple[dict[bool, Attention], dict[bool, str]]:
    """Return the forms of a mechanism, by whether they are causal, and why there is no other."""
    forms, refused = {}, {}
    for each in (False, True):
        if causal is not None and each != causal:
            refused[each] = f"the layer was built with causal={causal}"
            continue
        try:
            forms[each] = attention.build(causal=each, **shape)
        except ValueError as error:
            refused[each] = str(error)
    if not forms:
        raise ValueError(refused[bool(causal)])
    if len(forms) == 2:
        _share(forms[False], forms[True])
    return forms, refused


def _share(owner: Attention, other: Attention) -> None:
    """Have one form compute with the parameters, buffers and forward hooks of the other, now and after they
    are replaced.

    Raises ValueError where they differ."""
    owned, others = (
        {name: x.shape for name, x in (*form.named_parameters(), *form.named_buffers())}
        for form in (owner, other)
    )
    if owned != others:
        raise ValueError(
            f"causal must be True or False, got None: with {spelled(owner.config)} the parameters of "
            f"attention {owner.name!r} are others where it is causal"
        )
    for name, module in owner.named_modules():
        there = other.get_submodule(name)
        there._parameters, there._buffers = module._parameters, module._buffers
        there._forward_hooks, there._forward_pre_hooks = module._forward_hooks, module._forward_pre_hooks
        there._forward_hooks_with_kwargs = module._forward_hooks_with_kwargs
        there._forward_pre_hooks_with_kwargs = module._forward_pre_hooks_with_kwargs


def _left_out(name: str, mask: Tensor) -> Tensor:
    """Return a mask of PyTorch, boolean or added to scores, as booleans, True for what is left out."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise TypeError(f"{name} must be boolean, or 0 and -inf, got {mask.dtype}")
    left_out = mask == -torch.inf
    # PyTorch's TransformerEncoderLayer makes such a mask of a boolean one, in graphs and transforms too.
    known = checks.has_values(mask) and not checks.transformed(mask)
    if known and not bool((left_out | (mask == 0)).all()):
        raise ValueError(
            f"{name} must be boolean, or 0 and -inf: other numbers would be added to scores, which few "
            "mechanisms have"
        )
    return left_out


def _check_causal(mask: Tensor, queries: int, keys: int) -> None:
    """Raise ValueError unless this is the causal mask [t s]."""
    if not checks.has_values(mask):
        raise ValueError("attn_mask is not compared with the causal mask in a graph: pass is_causal=True")
    causal = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).triu(1)
    if not torch.equal(_left_out("attn_mask", mask), causal):
        raise ValueError(
            f"attn_mask must be None or the causal mask [t={queries} s={keys}], since few mechanisms have "
            "scores to add another to; padding goes in as key_padding_mask, a window is part of a mechanism. "
            f"Got another mask, of shape {list(mask.shape)}"
        )
