"""The JSON beside exported graphs is enough to run them."""

import dataclasses
import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lintra.attention import cosformer, linear, performer, softmax
from lintra.checkpoint import Error, from_json
from lintra.export import onnx as export
from lintra.models import decoder
from tests.export.test_onnx import build, session
from tests.export.test_onnx_whole import build_ctc, build_encoder

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def described(model, folder, *forms, **target):
    export.write_description(
        model, folder / "m-onnx.json", {form: folder / f"m-{form}.onnx" for form in forms}, **target
    )
    return json.loads((folder / "m-onnx.json").read_text())


def as_in_the_file(about, content):
    """Names, types and shapes in the description are those of the graph, except for axes of another form."""
    runner, types = (
        session(content),
        {"tensor(float)": "float32", "tensor(int64)": "int64", "tensor(bool)": "bool"},
    )
    for kind, found in (("inputs", runner.get_inputs()), ("outputs", runner.get_outputs())):
        assert about[kind] == [
            {"name": x.name, "type": types[x.type], "shape": x.shape}
            | {name: said[name] for name in ("start", "next") if name in said}
            for x, said in zip(found, about[kind], strict=True)
        ]


@pytest.mark.slow
def test_a_decoder_is_described(tmp_path):
    model = build(attention=(performer.Config(), softmax.Config()), layers=2)
    about = described(model, tmp_path, "step", "parallel", domain="com.microsoft")
    assert (about["opset"], about["domain"]) == (20, "com.microsoft")
    assert about["files"] == {"step": "m-step.onnx", "parallel": "m-parallel.onnx"}
    assert (about["model"], about["vocabulary"], about["start_symbol"]) == ("decoder", 5, 5)
    assert from_json(decoder.Config, about["config"], "config") == model.config
    inputs = {x["name"]: x for x in about["inputs"]}
    assert inputs["tokens"] == {"name": "tokens", "type": "int64", "shape": ["batch", "time"]}
    exponents = inputs["state.layers.0.attention.c"]
    assert (exponents["start"], exponents["next"]) == ("-Infinity", "next.layers.0.attention.c")
    assert any("past" in x["shape"] for x in about["inputs"])
    assert {x["next"] for x in about["inputs"] if "next" in x} < {x["name"] for x in about["outputs"]}
    assert all(isinstance(line, str) for line in about["feed"])
    as_in_the_file(about, export.to_bytes(model, "parallel", domain="com.microsoft"))


def test_an_encoder_is_described(tmp_path):
    about = described(build_encoder(linear.Config(), pool="mean"), tmp_path, "whole")
    assert [x["name"] for x in about["inputs"]] == ["tokens", "mask"]
    assert about["outputs"] == [{"name": "predictions", "type": "float32", "shape": ["batch", 3]}]
    assert "start_symbol" not in about
    assert not any("time:" in line for line in about["feed"])


@pytest.mark.slow
def test_a_recogniser_is_described(tmp_path):
    """The description is enough to transcribe speech."""
    model = build_ctc(linear.Config())
    about = described(model, tmp_path, "whole")
    assert (about["model"], about["symbols"], about["blank"]) == ("ctc", ["no", "yes"], 0)
    assert about["seconds_per_step"] == pytest.approx(0.04)
    content = export.to_bytes(model, "whole")
    as_in_the_file(about, content)
    x = np.random.default_rng(0).normal(size=(1, 41, about["features"]["bins"])).astype(np.float32)
    log_probs, real = session(content).run(None, {"features": x, "mask": np.ones((1, 41), bool)})
    assert real.sum() == -(-41 // about["subsample"])
    torch.testing.assert_close(
        torch.from_numpy(log_probs).exp().sum(-1), torch.ones(1, 11), rtol=1e-5, atol=1e-5
    )


def test_a_description_is_written_whole_or_not_at_all(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(Error, match="cannot be written"):
        export.write_description(build(), tmp_path / "file" / "m.json", {"step": "m"})
    with pytest.raises(ValueError, match="cannot be exported to ONNX as 'whole'"):
        export.write_description(build(), tmp_path / "m.json", {"whole": "m"})
    assert [x.name for x in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "target", [{}, pytest.param({"opset": 27}, marks=pytest.mark.slow)], ids=["opset 20", "opset 27"]
)
def test_the_example_draws(tmp_path, monkeypatch, capsys, target):
    monkeypatch.setenv("ALLOW_RELEASED_ONNX_OPSET_ONLY", "1")  # restored afterwards
    model = build(layers=1)
    export.write(model, tmp_path / "m-step.onnx", "step", **target)
    described(model, tmp_path, "step", **target)
    example = Path(__file__).parents[2] / "examples" / "draw_onnx.py"
    monkeypatch.setattr(sys, "argv", ["draw_onnx.py", str(tmp_path / "m-onnx.json"), "12", "4"])
    runpy.run_path(str(example))
    first, *rows = capsys.readouterr().out.splitlines()
    assert first == "P2 4 3 4"
    values = [[int(x) for x in row.split()] for row in rows]
    assert [len(row) for row in values] == [4, 4, 4]
    assert len({x for row in values for x in row}) > 1
    assert all(0 <= x < 5 for row in values for x in row)


@pytest.mark.parametrize(
    ("options", "longest"),
    [
        ({"position": "grid", "grid": (8, 8, 1)}, 64),
        ({"position": "learned", "max_length": 68}, 68),
        ({"position": "learned", "max_length": 500, "attention": cosformer.Config(max_length=200)}, 200),
        ({"position": "learned", "max_length": 150, "attention": cosformer.Config(max_length=200)}, 150),
    ],
)
def test_models_of_few_positions_are_described(options, longest, tmp_path):
    """The sizes of outputs are found with one token, which every model takes."""
    model = decoder.Config(vocabulary=5, layers=1, heads=2, width=16, **options).build().eval()
    about = described(model, tmp_path, "step", "parallel")
    assert about["files"] == {"step": "m-step.onnx", "parallel": "m-parallel.onnx"}
    assert [line for line in about["feed"] if line.startswith("time")] == [
        "time: 1 in the step form, any number in the parallel form",
        f"time: {longest} tokens at most, with those that a state has seen",
    ]


def test_few_positions_of_other_models_are_described(tmp_path):
    few = {"position": "learned", "max_length": 9}
    about = described(build_encoder(linear.Config(), **few), tmp_path, "whole")
    assert about["feed"][-1] == "time: 9 tokens at most"
    model = build_ctc(linear.Config())
    model = build_ctc(linear.Config(), encoder=dataclasses.replace(model.encoder.config, **few))
    about = described(model, tmp_path, "whole")
    assert about["feed"][-1] == f"time: {9 * about['subsample']} frames at most"
