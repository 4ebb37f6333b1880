"""Builders take the arguments of those in the library, and build the same modules."""

import argparse
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from lintra.compat.fast_transformers.attention import AttentionLayer
from lintra.compat.fast_transformers.attention_registry import AttentionRegistry, Float, Int, Optional
from lintra.compat.fast_transformers.builders import (
    AttentionBuilder,
    RecurrentDecoderBuilder,
    RecurrentEncoderBuilder,
    TransformerDecoderBuilder,
    TransformerEncoderBuilder,
)
from lintra.compat.fast_transformers.builders.transformer_builders import (
    BaseTransformerBuilder,
    BaseTransformerEncoderBuilder,
)
from lintra.compat.fast_transformers.events import EventDispatcher, QKVEvent
from lintra.compat.fast_transformers.feature_maps import GeneralizedRandomFeatures
from lintra.compat.fast_transformers.masking import LengthMask
from lintra.compat.fast_transformers.transformers import TransformerEncoder, TransformerEncoderLayer
from lintra.testing.laws import EXACT

FEED = ["linear1", "linear2", "norm1", "norm2"]
PROJECTIONS = ["query_projection", "key_projection", "value_projection", "out_projection"]


def named(prefix: str, parts: list[str]) -> list[str]:
    return [f"{prefix}{part}.{kind}" for part in parts for kind in ("weight", "bias")]


def test_attributes():
    builder = TransformerEncoderBuilder()
    builder.n_layers = 1
    builder.attention_type = "full"
    builder.softmax_temp = 0.5
    assert builder.attention.softmax_temp == 0.5
    inner = builder.get().layers[0].attention.inner_attention
    assert inner.softmax_temp == 0.5
    assert inner.dropout.p == 0.1
    spaces = argparse.Namespace(n_layers=3, learning_rate=0.1, n_heads=None)
    builder = TransformerEncoderBuilder.from_namespace(spaces)
    assert builder.n_layers == 3
    assert builder.n_heads is None
    assert TransformerEncoderBuilder.from_kwargs(final_normalization=False).get().norm is None
    assert "clusters=7" in repr(AttentionBuilder.from_kwargs(clusters=7))


def test_what_is_wrong_is_said():
    builder = TransformerEncoderBuilder()
    with pytest.raises(AttributeError, match="perhaps n_layers"):
        builder.n_layer = 3
    with pytest.raises(ValueError, match="no parameter 'n_layer'"):
        TransformerEncoderBuilder.from_kwargs(n_layer=3)
    assert not hasattr(TransformerEncoderBuilder.from_kwargs(n_layer=3, strict=False), "n_layer")
    with pytest.raises(ValueError, match="perhaps causal-linear"):
        builder.attention_type = "causal-liner"
    with pytest.raises(ValueError, match="activation must name a function"):
        builder.activation = "silly"
    with pytest.raises(ValueError, match="clusters must be Int, got 'many'"):
        builder.clusters = "many"
    with pytest.raises(ValueError, match="'clustered' cannot be built: clusters must be Int, got None"):
        TransformerEncoderBuilder.from_kwargs(attention_type="clustered").get()
    with pytest.raises(TypeError, match="other_attention"):
        TransformerEncoderBuilder.from_kwargs(attention_type="conditional-full").get()
    with pytest.raises(TypeError, match="'full' cannot be built around 1 others"):
        AttentionBuilder.from_kwargs(query_dimensions=4).get("full:linear")
    with pytest.raises(ValueError, match="must end in one attention"):
        AttentionBuilder.from_kwargs(query_dimensions=4).get("full,linear")


def test_a_builder_of_ones_own_has_attributes_of_its_own():
    """The common base class takes any attribute; builders of encoders and decoders refuse unknown ones."""

    class Chain(BaseTransformerBuilder):
        def __init__(self):
            self.attention = AttentionBuilder()
            self.stages = 2

        def get(self):
            kind = self.attention.get("full")
            return nn.Sequential(
                *(TransformerEncoderLayer(AttentionLayer(kind, 8, 2), 8) for _ in range(self.stages))
            )

    assert len(Chain.from_kwargs(stages=3).get()) == 3
    for kind in (TransformerEncoderBuilder, RecurrentDecoderBuilder):
        with pytest.raises(AttributeError, match="no parameter 'stages'"):
            kind().stages = 2


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "tanh"])
def test_an_activation_is_a_function_of_torch(activation):
    model = TransformerEncoderBuilder.from_kwargs(n_layers=1, activation=activation).get()
    assert model.layers[0].activation is getattr(functional, activation)


@pytest.mark.parametrize("builder", [TransformerEncoderBuilder, RecurrentEncoderBuilder])
def test_an_encoder_has_its_parameters_in_their_order(builder):
    """The state of an optimizer identifies parameters by their number."""
    model = builder.from_kwargs(n_layers=2).get()
    names = []
    for i in range(2):
        names += named(f"layers.{i}.attention.", PROJECTIONS) + named(f"layers.{i}.", FEED)
    assert [n for n, _ in model.named_parameters()] == names + named("", ["norm"])


@pytest.mark.parametrize("builder", [TransformerDecoderBuilder, RecurrentDecoderBuilder])
def test_a_decoder_has_its_parameters_in_their_order(builder):
    model = builder.from_kwargs(n_layers=1).get()
    names = named("layers.0.self_attention.", PROJECTIONS) + named("layers.0.cross_attention.", PROJECTIONS)
    names += named("layers.0.", [*FEED, "norm3"]) + named("", ["norm"])
    assert [n for n, _ in model.named_parameters()] == names


@pytest.mark.parametrize("recurrent", [False, True])
def test_cross_attention_may_have_sizes_of_its_own(recurrent):
    builder = RecurrentDecoderBuilder if recurrent else TransformerDecoderBuilder
    sizes = {"cross_n_heads": 3, "cross_query_dimensions": 6, "cross_value_dimensions": 5}
    sizes |= {
        "n_layers": 2,
        "n_heads": 2,
        "query_dimensions": 4,
        "value_dimensions": 8,
        "model_dimensions": 14,
    }
    builder = builder.from_kwargs(
        cross_attention_type="linear", feature_map=GeneralizedRandomFeatures, **sizes
    )
    assert builder.cross_model_dimensions == 15
    model = builder.get()
    cross = model.layers[1].cross_attention
    assert cross.query_projection.weight.shape == (18, 14)
    assert cross.key_projection.weight.shape == (18, 15)
    assert cross.value_projection.weight.shape == (15, 15)
    assert cross.out_projection.weight.shape == (14, 15)
    assert cross.inner_attention.feature_map.omega.shape[0] == 6
    x, memory = torch.rand(2, 7, 14), torch.rand(2, 9, 15)
    y = model(x[:, 0], memory)[0] if recurrent else model(x, memory)
    assert y.shape == ((2, 14) if recurrent else (2, 7, 14))
    assert TransformerDecoderBuilder.from_kwargs(cross_model_dimensions=9).cross_model_dimensions == 9


class Mean(nn.Module):
    """A custom inner attention that reads every mask."""

    def __init__(self, strength, n_heads):
        super().__init__()
        self.strength, self.n_heads = strength, n_heads

    def forward(self, queries, keys, values, attn_mask, query_lengths, key_lengths):
        weights = attn_mask.float_matrix * key_lengths.float_matrix[:, None]
        weights = (weights / weights.sum(-1, keepdim=True)).to(values.dtype)
        y = torch.einsum("nls,nshd->nlhd", weights, values) * self.strength
        return y * query_lengths.float_matrix.to(y)[..., None, None]


@pytest.fixture
def registered(monkeypatch):
    for name in ("_types", "_specs"):
        monkeypatch.setattr(AttentionRegistry, name, dict(getattr(AttentionRegistry, name)))
    AttentionRegistry.register("mean", Mean, [("strength", Optional(Float, 2.0)), ("n_heads", Int)])


@pytest.mark.usefixtures("registered")
def test_a_registered_attention_is_built_and_finds_all_masks():
    options = {"n_layers": 1, "value_dimensions": 4, "feed_forward_dimensions": 8}
    with pytest.raises(ValueError, match="'mean' cannot be built: n_heads must be Int, got None"):
        TransformerEncoderBuilder.from_kwargs(attention_type="mean", **options).get()
    options |= {"n_heads": 3}
    model = TransformerEncoderBuilder.from_kwargs(attention_type="mean", **options).get()
    assert model.layers[0].attention.inner_attention.strength == 2
    assert model.layers[0].attention.inner_attention.n_heads == 3
    x, memory = torch.rand(2, 7, 12), torch.rand(2, 9, 12)
    assert model(x).shape == x.shape
    assert model.layers[0](x).shape == x.shape
    assert model(x, length_mask=LengthMask(torch.tensor([7, 3]))).isfinite().all()
    both = {"self_attention_type": "mean", "cross_attention_type": "mean"}
    model = TransformerDecoderBuilder.from_kwargs(**both, **options).get()
    assert model(x, memory).shape == x.shape
    assert model.layers[0](x, memory).shape == x.shape


class Rotated(nn.Module):
    """A custom attention layer that rotates queries and keys by their positions."""

    def __init__(self, attention, d_model, n_heads, d_keys=None, d_values=None, event_dispatcher=""):
        super().__init__()
        self.inner_attention = attention
        self.query_projection = nn.Linear(d_model, d_keys * n_heads)
        self.key_projection = nn.Linear(d_model, d_keys * n_heads)
        self.value_projection = nn.Linear(d_model, d_values * n_heads)
        self.out_projection = nn.Linear(d_values * n_heads, d_model)
        self.n_heads = n_heads
        self.event_dispatcher = EventDispatcher.get(event_dispatcher)
        self.register_buffer("rates", 10.0 ** -torch.arange(d_keys // 2))

    def turned(self, x):
        angles = torch.arange(x.shape[1])[:, None] * self.rates
        z = (
            torch.view_as_complex(x.unflatten(-1, (-1, 2)))
            * torch.polar(torch.ones_like(angles), angles)[:, None]
        )
        return torch.view_as_real(z).flatten(-2)

    def forward(self, queries, keys, values, attn_mask, query_lengths, key_lengths):
        n, length = queries.shape[:2]
        q = self.turned(self.query_projection(queries).view(n, length, self.n_heads, -1))
        k = self.turned(self.key_projection(keys).view(n, length, self.n_heads, -1))
        v = self.value_projection(values).view(n, length, self.n_heads, -1)
        self.event_dispatcher.dispatch(QKVEvent(self, q, k, v))
        y = self.inner_attention(q, k, v, attn_mask, query_lengths, key_lengths).view(n, length, -1)
        return self.out_projection(y)


class RotatedEncoderBuilder(BaseTransformerEncoderBuilder):
    """A program that puts its own attention layer into an encoder, as models of molecules do."""

    def _get_attention_builder(self):
        return AttentionBuilder()

    def _get_attention_layer_class(self):
        return Rotated

    def _get_encoder_class(self):
        return TransformerEncoder

    def _get_encoder_layer_class(self):
        return TransformerEncoderLayer


def test_a_builder_of_ones_own_puts_its_own_attention_layer_in():
    torch.manual_seed(0)
    options = {"n_layers": 2, "n_heads": 3, "query_dimensions": 4, "value_dimensions": 4, "dropout": 0.0}
    options |= {"feature_map": partial(GeneralizedRandomFeatures, n_dims=8), "activation": "gelu"}
    builder = RotatedEncoderBuilder.from_kwargs(
        attention_type="linear", feed_forward_dimensions=12, **options
    )
    model = builder.get().double()
    assert all(isinstance(layer.attention, Rotated) for layer in model.layers)
    assert model.layers[0].attention.inner_attention.feature_map.omega.shape == (4, 8)
    x = torch.rand(2, 9, 12, dtype=torch.float64, requires_grad=True)
    y = model(x, length_mask=LengthMask(torch.tensor([9, 5]), max_len=9))
    assert_close(model(x[1:, :5]), y[1:, :5], **EXACT)
    assert not torch.allclose(model(x.flip(1)).flip(1)[0], y[0])  # it uses the positions
    y.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
