"""The page's plain JavaScript gives the same as the library, for every kind of model that it supports."""

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from lintra import runtime, web
from lintra.attention import softmax
from lintra.attention.linear import LinearAttention
from lintra.export import runtime as export
from lintra.generation.options import Sampler
from lintra.runtime import Model, Sequence
from tests.kinds import build
from tests.runtime.kinds import KINDS

HERE = Path(__file__).parent
PLAIN = Path(web.__file__).parent / "plain.js"
NODE = shutil.which("node")

pytestmark = [
    pytest.mark.skipif(not runtime.available(), reason=f"no runtime: {runtime.why_not()}"),
    pytest.mark.skipif(NODE is None, reason="there is no node to run JavaScript"),
    pytest.mark.usefixtures("one_thread"),
]


def is_linear(kind):
    model = build(**KINDS[kind])
    return isinstance(model.blocks[0].attn.attention, LinearAttention) and export.version(model) == 1


LINEAR = [kind for kind in KINDS if is_linear(kind)]


def tokens_of(model):
    """The start symbol, then 12 symbols."""
    start = [] if model.start_token is None else [model.start_token]
    return start + [i * i % model.config.vocabulary for i in range(12)]


def in_javascript(file, attention, tokens):
    command = [NODE, HERE / "plain.mjs", PLAIN, file, attention, *tokens]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_near(found, expected, weights="float32"):
    """To 1e-4, like the runtime compared with PyTorch: both sum in their own order. With int8 the runtime
    also rounds the activations to 2^-16 of the largest one, which these small models magnify."""
    tolerance = 1e-3 if weights == "int8" else 1e-4
    torch.testing.assert_close(torch.tensor(found), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("kind", "weights"),
    [*((kind, "float32") for kind in LINEAR), ("context", "float16"), ("mixture", "int8")],
)
def test_linear(kind, weights, tmp_path):
    model = build(**KINDS[kind])
    export.write(model, tmp_path / "model.lrt", weights)
    tokens = tokens_of(model)
    found = in_javascript(tmp_path / "model.lrt", "linear", tokens)
    sequence = Sequence(Model.open(tmp_path / "model.lrt"))
    for token, params in zip(tokens, found["params"], strict=True):
        sequence.step(token)
        assert_near(params, sequence.params(), weights)
    assert found["resumed"] == found["params"][-1]
    assert sequence.sample(0.4, Sampler(temperature=0.8)) == found["drawn"]
    sequence.seed(7 | 9 << 32)
    assert found["uniforms"] == [sequence.uniform(), sequence.uniform()]


@pytest.mark.parametrize("kind", [kind for kind in LINEAR if "attention" not in KINDS[kind]])
def test_softmax(kind, tmp_path):
    """Equal to PyTorch's softmax attention with the same weights, which come from a linear model."""
    model = build(**KINDS[kind])
    export.write(model, tmp_path / "model.lrt")
    other = dataclasses.replace(model.config, attention=softmax.Config()).build().eval()
    other.load_state_dict(model.state_dict())
    tokens = tokens_of(model)
    found = in_javascript(tmp_path / "model.lrt", "softmax", tokens)
    with torch.no_grad():
        expected, _ = other.extend(torch.tensor([tokens]))
    assert_near(found["params"], expected[0])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content[:5000], "the model's file is shorter than it must be"),
        (lambda content: b"none" + content[4:], "this is not a model that this page reads"),
        (lambda content: content[:8] + b"\2" + content[9:], "this is not a model that this page reads"),
    ],
)
def test_what_it_refuses(change, reason, tmp_path):
    (tmp_path / "model.lrt").write_bytes(change(export.to_bytes(build(**KINDS["plain"]))))
    assert in_javascript(tmp_path / "model.lrt", "linear", [0]) == {"error": reason}


def test_other_attentions_are_refused(tmp_path):
    export.write(build(**KINDS["retention"]), tmp_path / "model.lrt")
    assert "linear attention only" in in_javascript(tmp_path / "model.lrt", "linear", [0])["error"]
