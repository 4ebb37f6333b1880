"""Exported ONNX graphs give in onnxruntime what the model gives in PyTorch."""

import json
import sys

import numpy as np
import pytest
import torch

from lintra.attention import (
    cosformer,
    delta,
    gated,
    kda,
    linear,
    linformer,
    performer,
    retention,
    rfa,
    softmax,
    ssd,
)
from lintra.checkpoint import Error, from_json
from lintra.export import onnx as export
from lintra.models import bilstm, decoder, encoder
from lintra.nn import LogisticMixture
from tests.generation.test_sampling import build_seq2seq
from tests.kinds import build

pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

# Both add float32 numbers in different orders: a few hundred roundings of 6e-8 along a sequence.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}

# Small chunks, so that sequences of a few tokens have several.
MECHANISMS = {
    "linear": linear.Config(chunk=8),
    "retention": retention.Config(chunk=8),
    "gated": gated.Config(chunk=8),
    "performer": performer.Config(chunk=8),
    "rfa, gate": rfa.Config(chunk=8, gate=True, gate_bias=1.0, features=8),
    "rfa": rfa.Config(chunk=8, features=8),
    "cosformer": cosformer.Config(chunk=8, max_length=64),
    "softmax": softmax.Config(),
    "delta": delta.Config(),
    "kda": kda.Config(rank=4),
    "ssd": ssd.Config(chunk=8),
    "retention, value heads": retention.Config(chunk=8, value_heads=6),
    "gated, value heads": gated.Config(chunk=8, value_heads=6),
    "delta, value heads": delta.Config(value_heads=6),
    "kda, value heads": kda.Config(rank=4, value_heads=6),
    "ssd, value heads": ssd.Config(chunk=8, value_heads=6),
}
LAYOUTS = {
    "post": {"norm": "post", "position": "concatenated", "heads": 2, "output": LogisticMixture(components=2)},
    "grid": {"context": (1, 4), "position": "grid", "grid": (5, 13)},
    "rotary": {"position": "rotary", "kv_heads": 1, "heads": 2, "norm_kind": "rms", "activation": "swiglu"},
    "tied": {"tie_embeddings": True, "position": "rotary", "rope_base": 500.0},
    "learned": {"position": "learned", "max_length": 64, "embed": "value"},
    "recurrent": {"conv": 3, "qk_norm": "l2", "output_gate": True, "mlp_ratio": 0},
}
TRIANGULAR = ("delta", "kda")  # no parallel form in opset 20
LENGTHS = [3, 1, 13, 8, 16]  # in a chunk, one token, more than a chunk, exactly one, two; in this order
FAST = {("retention", "step"), ("softmax", "step")}  # an export takes seconds


def session(content):
    return ort.InferenceSession(content, providers=["CPUExecutionProvider"])


def about(session):
    return session.get_modelmeta().custom_metadata_map


def start(session, batch):
    """The state before any token, according to the metadata of the file."""
    fills, state = json.loads(about(session)["start"]), {}
    sizes = {"batch": batch, "past": 1}
    for x in session.get_inputs()[1:]:
        shape = [sizes.get(n, n) for n in x.shape]
        dtype = np.int64 if x.type == "tensor(int64)" else np.float32
        state[x.name] = np.full(shape, float(fills[x.name]), dtype)
    return state


def check_decoder(model, content, lengths, batch=2, then=None):
    """The same params and, at the end, the same again from the same state, token by token or many at once,
    and for three more tokens one by one in the graph `then`."""
    runner, torch_state = session(content), None
    state = start(runner, batch)
    runners = [runner] * len(lengths) + ([] if then is None else [session(then)] * 3)
    for runner, length in zip(runners, [*lengths, 1, 1, 1], strict=False):
        tokens = torch.randint(0, 5, (batch, length))
        with torch.no_grad():
            right, torch_state = model.extend(tokens, torch_state)
        params, *after = runner.run(None, {"tokens": tokens.numpy(), **state})
        torch.testing.assert_close(torch.from_numpy(params), right, **CLOSE)
        assert [x.name for x in runner.get_outputs()[1:]] == [x.replace("state", "next", 1) for x in state]
        state = dict(zip(state, after, strict=True))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=[] if (name, form) in FAST else pytest.mark.slow)
        for name in MECHANISMS
        for form in ("step", "parallel")
        if form == "step" or name.partition(",")[0] not in TRIANGULAR
    ],
)
def test_a_decoder_gives_the_same(name, form):
    model = build(attention=MECHANISMS[name], layers=1)
    content = export.to_bytes(model, form)
    assert all(x.requires_grad for x in model.parameters())  # the model is unchanged
    check_decoder(model, content, [1] * 12 if form == "step" else LENGTHS)
    check_decoder(model, content, [1], batch=1)


@pytest.mark.slow
def test_a_hybrid_gives_the_same():
    model = build(attention=(softmax.Config(), retention.Config(chunk=8)))
    check_decoder(model, export.to_bytes(model, "step"), [1] * 12)


@pytest.mark.slow
def test_random_features_lose_no_more_digits_than_in_torch():
    """A small denominator of RFA magnifies the roundings of float32, so that two correct programs may differ
    by more than `CLOSE`: each is compared with float64, by the root mean square over many tokens."""
    config = MECHANISMS["rfa, gate"]
    model, batch, errors = build(attention=config, layers=1), 3, [[], []]
    exact = build(attention=config, layers=1).double()
    runner = session(export.to_bytes(model, "step"))
    torch.manual_seed(0)
    for _ in range(8):
        state, states = start(runner, batch), [None, None]
        for _ in range(16):
            tokens = torch.randint(0, 5, (batch, 1))
            with torch.no_grad():
                right, states[0] = exact.extend(tokens, states[0])
                ours, states[1] = model.extend(tokens, states[1])
            params, *after = runner.run(None, {"tokens": tokens.numpy(), **state})
            state = dict(zip(state, after, strict=True))
            for found, kept in zip((torch.from_numpy(params), ours), errors, strict=True):
                kept.append((found - right).square().mean())
    of_onnx, of_torch = (torch.stack(kept).mean().sqrt() for kept in errors)
    assert of_onnx < 2 * of_torch


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["step", "parallel"])
def test_every_position_norm_and_embedding(layout, form):
    model = build(attention=linear.Config(chunk=8), **LAYOUTS[layout])
    check_decoder(model, export.to_bytes(model, form), [1] * 12 if form == "step" else LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "feature_map",
    [linear.Relu(), linear.SquaredRelu(), linear.Dpfp(), linear.Hedgehog(), linear.T2R()],
    ids=str,
)
def test_feature_maps(feature_map):
    model = build(attention=linear.Config(feature_map=feature_map, chunk=8), layers=1)
    check_decoder(model, export.to_bytes(model, "parallel"), LENGTHS)


@pytest.mark.slow
def test_what_a_file_says_of_itself(tmp_path):
    model = build(attention=performer.Config(), layers=1)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    file = tmp_path / "model.onnx"
    export.write(model, file, "step")
    content = file.read_bytes()
    check_decoder(model, content, [1] * 12)
    assert b".py" not in content  # no file names from the machine that wrote it
    runner = session(content)
    said = about(runner)
    assert (said["form"], said["model"], said["format"]) == ("step", "decoder", "1")
    assert from_json(decoder.Config, json.loads(said["config"]), "config") == model.config
    assert json.loads(said["start"])["state.layers.0.attention.c"] == "-Infinity"
    shapes = {x.name: x.shape for x in [*runner.get_inputs(), *runner.get_outputs()]}
    assert (shapes["tokens"], shapes["params"]) == (["batch", 1], ["batch", 1, 5])
    assert shapes["state.seen"] == ["batch"]
    import onnx

    graph = onnx.load_from_string(content)
    assert {(x.domain, x.version) for x in graph.opset_import} == {("", 20)}
    onnx.checker.check_model(graph)
    assert model.blocks[0].attn.attention.config.impl == "auto"  # the model is unchanged
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def has_hooks(kind):
    model = build()
    getattr(model.head, f"register_forward_{kind}")(print)
    return model


@pytest.mark.parametrize(
    ("model", "form", "reason"),
    [
        (build_seq2seq(), "step", "decoders, encoders and recognisers are written, got Seq2Seq"),
        (
            bilstm.Config(vocabulary=5, layers=1, width=4).build(),
            "whole",
            "decoders, encoders and recognisers are written, got BiLSTM",
        ),
        (build(), "whole", "Decoder is written as step or parallel, got 'whole'"),
        (
            encoder.Config(vocabulary=5, layers=1, heads=1, width=8).build(),
            "step",
            "Encoder is written as whole",
        ),
        (build(attention=delta.Config()), "parallel", "'delta': it solves a triangle"),
        (build(attention=softmax.Config(window=4)), "step", "'softmax': its cache is a window"),
        (
            encoder.Config(
                vocabulary=5, layers=1, heads=1, width=8, attention=linformer.Config(max_length=9)
            ).build(),
            "whole",
            "'linformer': graphs are known to be right for cosformer, delta",
        ),
        (
            build(attention=cosformer.Config(max_length=64)),
            "parallel",
            "chunks of 64 tokens need a max_length of 68 or more, got 64",
        ),
        (has_hooks("hook"), "step", "a graph would keep what the hooks of Linear did once"),
        (has_hooks("pre_hook"), "step", "a graph would keep what the hooks of Linear did once"),
        (build().double(), "step", "must be float32, .* is torch.float64: call model.float"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_not_written(model, form, reason):
    with pytest.raises(ValueError, match=f"cannot be exported to ONNX as '{form}': .*{reason}"):
        export.to_bytes(model, form)


def test_other_refusals(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="form must be one of step, parallel, whole, got 'all'"):
        export.to_bytes(build(), "all")
    with monkeypatch.context() as changed:
        changed.setattr(export, "MOST", 1000)
        with pytest.raises(ValueError, match="one file holds 1,000 bytes of weights at most"):
            export.to_bytes(build(), "step")
    with monkeypatch.context() as changed:
        changed.setitem(sys.modules, "onnxscript", None)
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'lintra\[onnx\]'"):
            export.to_bytes(build(), "step")
    monkeypatch.setattr(export, "to_bytes", lambda *_, **target: b"graph")
    (tmp_path / "file").touch()
    with pytest.raises(Error, match="cannot be written"):
        export.write(build(), tmp_path / "file" / "model.onnx", "step")
