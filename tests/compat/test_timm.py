"""Vision transformers with other attention: one with the interface of timm, and a real one if installed."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from lintra.attention import aft, delta, linear, longformer, lsh, nystromformer, retention, rfa, softmax
from lintra.compat.timm import Attention, replace_attention
from lintra.nn import AttentionLayer


class TimmAttention(nn.Module):
    """Softmax attention with the interface and the parameter names of that in timm."""

    def __init__(self, dim, num_heads, *, qk_norm=False, norm=False, gated=False, attn_drop=0.0):
        super().__init__()
        self.num_heads, self.fused = num_heads, True
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm = nn.LayerNorm(dim // num_heads) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(dim // num_heads) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm = nn.LayerNorm(dim) if norm else nn.Identity()
        self.gate = nn.Linear(dim, dim) if gated else None
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x, attn_mask=None, is_causal=False):
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, attn_mask)
        y = self.norm(y.transpose(1, 2).flatten(2))
        return self.proj_drop(self.proj(y if self.gate is None else y * self.gate(x).sigmoid()))


class Block(nn.Module):
    def __init__(self, dim, heads, **options):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), TimmAttention(dim, heads, **options)

    def forward(self, x, attn_mask=None):
        return x + self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=False)


class VisionTransformer(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(16, 2, **options) for _ in range(2))
        self.double()

    def forward(self, x, attn_mask=None):
        for block in self.blocks:
            x = block(x, attn_mask)
        return x


X = torch.randn(3, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
REAL = torch.arange(9) < torch.tensor([9, 5, 1])[:, None]
PAIRS = REAL[:, None, None] & REAL[:, None, :, None]  # the form that models of any size in timm pass
KEYS = REAL[:, None, None].expand(PAIRS.shape)


LEAST = torch.finfo(torch.float64).min


def added(pairs, least=LEAST):
    return torch.zeros(pairs.shape, dtype=torch.float64).masked_fill_(~pairs, least)


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"norm": True}, {"gated": True}], ids=str)
def test_softmax_leaves_outputs_as_they_were(options):
    model = VisionTransformer(**options)
    expected, weights = model(X), {name: x.clone() for name, x in model.state_dict().items()}
    assert replace_attention(model, softmax.Config()) == ["blocks.0.attn", "blocks.1.attn"]
    assert_close(model(X), expected)
    assert all(isinstance(block.attn, Attention) for block in model.blocks)
    assert_close(model.state_dict(), weights)  # under their original names


@pytest.mark.parametrize("mask", [PAIRS, KEYS, added(PAIRS), added(KEYS, -torch.inf)], ids=range(4))
def test_padding_as_softmax_sees_it(mask):
    model = VisionTransformer()
    expected = model(X, mask)[REAL]
    replace_attention(model, softmax.Config())
    assert_close(model(X, mask)[REAL], expected)


@pytest.mark.parametrize(
    "config", [linear.Config(), nystromformer.Config(landmarks=4), rfa.Config()], ids=str
)
def test_a_mechanism_is_that_of_an_attention_layer(config):
    model = VisionTransformer()
    replace_attention(model, config)
    attn = model.blocks[0].attn
    layer = AttentionLayer(16, config, heads=2, causal=False).double()
    layer.qkv_proj, layer.out_proj, layer.extra_proj = attn.qkv, attn.proj, attn.extra_proj
    layer.attention = attn.attention
    assert_close(attn(X), layer(X))
    assert_close(attn(X, PAIRS), layer(X, mask=REAL))
    model(X).square().sum().backward()
    assert all(x.grad is not None for x in model.parameters() if x.requires_grad)


def test_extra_projections_begin_as_those_of_qkv():
    model, config = VisionTransformer(), longformer.Config(window=4, global_tokens=1)
    expected = VisionTransformer().blocks[0].attn.qkv.weight.chunk(3)
    replace_attention(model, config)
    projections = [x.weight for x in model.blocks[0].attn.extra_proj.values()]
    assert projections
    assert all(any(torch.equal(x, part) for part in expected) for x in projections)
    assert model(X).isfinite().all()


def test_a_model_in_half_precision_and_evaluation_stays_so():
    model = VisionTransformer().bfloat16().eval()
    replace_attention(model, linear.Config())
    assert model(X.bfloat16()).dtype == torch.bfloat16
    assert not any(module.training for module in model.modules())


class WithBias(TimmAttention):
    def __init__(self, *args):
        super().__init__(*args)
        self.bias_table = nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (lambda model: nn.Linear(3, 3), linear.Config(), "Linear has no attention as in timm's"),
        (lambda model: nn.ModuleList([WithBias(16, 2)]), linear.Config(), "no bias of scores"),
        (lambda model: model, retention.Config(), "causal"),
        (lambda model: model, delta.Config(), "causal"),
        (lambda model: model, lsh.Config(), "other keys or values than the 2 heads"),
        (lambda model: VisionTransformer(attn_drop=0.1), aft.Config(), "attn_drop must be 0"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(change, config, message):
    model = change(VisionTransformer())
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=message):
        replace_attention(model, config)
    assert str(model) == str(before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_causal": True}, "is_causal must be False"),
        ({"attn_mask": REAL}, r"attn_mask must have the shape \[3 1 9 9\], got \[3, 9\]"),
        ({"attn_mask": torch.ones(3, 1, 9, 9, dtype=torch.bool).tril()}, "padding is, and nothing else"),
        ({"attn_mask": torch.full((3, 1, 9, 9), -0.5).triu(1).tril(1)}, "no bias is added"),
        ({"attn_mask": added(KEYS, -3.0)}, "no bias is added to scores"),
    ],
)
def test_calls_that_cannot_be_served_are_refused(options, message):
    model = VisionTransformer()
    replace_attention(model, linear.Config())
    with pytest.raises(ValueError, match=message):
        model.blocks[0].attn(X, **options)


def test_timms_own_models():
    timm = pytest.importorskip(
        "timm", reason="timm, which brings torchvision, is not installed (pip install timm)"
    )
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=5).eval()
    images = torch.randn(2, 3, 32, 32)
    expected = model(images)
    assert len(replace_attention(model, softmax.Config())) == 12
    assert_close(model(images), expected)
    replace_attention(model, linear.Config())
    assert not torch.allclose(model(images), expected, atol=1e-3)
