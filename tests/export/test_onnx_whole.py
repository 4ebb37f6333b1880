"""ONNX encoders and recognisers give in onnxruntime what they give in PyTorch, for any padding."""

import pytest
import torch

from lintra import checkpoint
from lintra.attention import cosformer, delta, gated, kda, linear, performer, retention, rfa, softmax, ssd
from lintra.audio import features
from lintra.audio.symbols import Symbols
from lintra.export import onnx as export
from lintra.models import bilstm, ctc, encoder
from tests.export.test_onnx import CLOSE, session

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.usefixtures("opset_27")

PLAIN, OPERATORS, CONTRIB = {}, {"opset": 27}, {"domain": "com.microsoft"}
slow = pytest.mark.slow


def build_encoder(attention, **changes):
    torch.manual_seed(0)
    options = {"vocabulary": 5, "outputs": 3, "layers": 1, "heads": 2, "width": 16} | changes
    model = encoder.Config(attention=attention, **options).build().eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape))
    return model


def build_ctc(attention, *, causal=None, **changes):
    torch.manual_seed(0)
    options = {
        "symbols": Symbols("word", ("no", "yes")),
        "features": features.Config(kind="given", bins=6),
        "encoder": encoder.Config(
            inputs=12, layers=1, heads=2, width=12, attention=attention, causal=causal, position="rotary"
        ),
    }
    return ctc.Config(**(options | changes)).build().eval()


def check(model, content):
    """The same outputs for many batches and lengths, with padding after, before and among real tokens."""
    runner = session(content)
    name = runner.get_inputs()[0].name
    width = model.config.features.bins if isinstance(model, ctc.CTC) else model.config.inputs
    for batch, time in ((2, 5), (1, 1), (3, 62), (2, 4)):
        x = torch.randint(0, 5, (batch, time)) if name == "tokens" else torch.randn(batch, time, width)
        behind = torch.arange(time) < torch.randint(1, time + 1, (batch, 1))
        for mask in (behind, behind.flip(1), torch.rand(batch, time) < 0.6, torch.ones_like(behind)):
            mask[:, time // 2] = True
            given = {}
            if getattr(model.config, "token_types", None) is not None:
                given["token_types"] = torch.randint(0, model.config.token_types, (batch, time))
            more = {name: types.numpy() for name, types in given.items()}
            found = runner.run(None, {name: x.numpy(), "mask": mask.numpy(), **more})
            with torch.no_grad():
                right = model(x, mask=mask, **given)
            right = right if isinstance(right, tuple) else (right,)
            for mine, its in zip(found, right, strict=True):
                torch.testing.assert_close(torch.from_numpy(mine), its, **CLOSE)


@pytest.mark.parametrize(
    ("attention", "changes", "target"),
    [
        (linear.Config(), {"pool": "mean"}, PLAIN),
        (softmax.Config(), {"token_types": 3}, PLAIN),
        pytest.param(softmax.Config(), {"inputs": 4, "vocabulary": None}, PLAIN, marks=slow),
        pytest.param(performer.Config(), {"pool": "mean"}, PLAIN, marks=slow),
        pytest.param(cosformer.Config(), {"pool": "mean"}, PLAIN, marks=slow),
        pytest.param(rfa.Config(), {"pool": "mean"}, PLAIN, marks=slow),
        pytest.param(linear.Config(), {"pool": "first"}, PLAIN, marks=slow),
        pytest.param(linear.Config(), {"pool": "first"}, OPERATORS, marks=slow),
        pytest.param(linear.Config(), {"pool": "last"}, PLAIN, marks=slow),
        pytest.param(linear.Config(), {"head_activation": "gelu", "head_norm": True}, PLAIN, marks=slow),
        pytest.param(retention.Config(chunk=8), {}, PLAIN, marks=slow),
        pytest.param(gated.Config(chunk=8), {"pool": "mean"}, PLAIN, marks=slow),
        pytest.param(ssd.Config(chunk=8), {}, PLAIN, marks=slow),
        pytest.param(ssd.Config(), {}, OPERATORS, marks=slow),
        pytest.param(gated.Config(), {}, CONTRIB, marks=slow),
        pytest.param(delta.Config(), {}, CONTRIB, marks=slow),
        pytest.param(delta.Config(), {"pool": "mean"}, OPERATORS, marks=slow),
        pytest.param(kda.Config(rank=4), {}, CONTRIB, marks=slow),
        pytest.param(linear.Config(), {"causal": True, "conv": 3}, CONTRIB, marks=slow),
        pytest.param(performer.Config(), {"causal": True}, OPERATORS, marks=slow),
        pytest.param(gated.Config(chunk=8), {"alternating": True, "layers": 2}, PLAIN, marks=slow),
        pytest.param(delta.Config(), {"alternating": True, "layers": 2}, CONTRIB, marks=slow),
        pytest.param(softmax.Config(), {"causal": True}, OPERATORS, marks=slow),
    ],
)
def test_an_encoder_gives_the_same(attention, changes, target):
    model = build_encoder(attention, **changes)
    check(model, export.to_bytes(model, "whole", **target))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "changes", "target"),
    [
        (linear.Config(), {}, PLAIN),
        pytest.param(linear.Config(), {"subsample": 2, "normalize": "global"}, PLAIN, marks=slow),
        pytest.param(softmax.Config(), {}, PLAIN, marks=slow),
        pytest.param(softmax.Config(), {}, OPERATORS, marks=slow),
        pytest.param(retention.Config(chunk=8), {"causal": True}, PLAIN, marks=slow),
        pytest.param(delta.Config(), {"causal": True, "subsample": 2}, OPERATORS, marks=slow),
        pytest.param(kda.Config(), {"causal": True, "normalize": "global"}, CONTRIB, marks=slow),
    ],
)
def test_a_recogniser_gives_the_same(attention, changes, target):
    model = build_ctc(attention, **changes)
    check(model, export.to_bytes(model, "whole", **target))


@pytest.mark.slow
def test_a_recogniser_without_subsampling():
    heard = encoder.Config(inputs=6, layers=1, heads=2, width=12, attention=linear.Config())
    model = build_ctc(linear.Config(), subsample=1, encoder=heard)
    check(model, export.to_bytes(model, "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("target", [PLAIN, OPERATORS, CONTRIB])
def test_the_recogniser_that_is_shipped(target):
    model = checkpoint.load("spoken-digits")
    content = export.to_bytes(model, "whole", **target)
    check(model, content)
    shapes = {x.name: x.shape for x in session(content).get_outputs()}
    assert shapes == {"log_probs": ["batch", "steps", 11], "real": ["batch", "steps"]}


def test_a_recogniser_that_packs_is_refused():
    model = build_ctc(linear.Config(), encoder=bilstm.Config(inputs=12, layers=1, width=4))
    assert "its encoder is a BiLSTM, which packs sequences" in export.why_not(model, "whole")


def test_a_causal_encoder_needs_more_tokens_than_a_chunk():
    short = build_encoder(cosformer.Config(max_length=64), causal=True)
    assert "chunks of 64 tokens need a max_length of 68 or more, got 64" in export.why_not(short, "whole")
    assert export.why_not(short, "whole", opset=27) is None
    both_ways = build_encoder(cosformer.Config(max_length=64))  # which has no chunks
    assert export.why_not(both_ways, "whole") is None
    assert export.to_bytes(both_ways, "whole")
