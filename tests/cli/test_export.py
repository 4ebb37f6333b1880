"""`lintra export`, and drawing with the files it writes."""

import json
import os
import re
import resource
import sys
from pathlib import Path

import pytest
import torch

from lintra import checkpoint, runtime
from lintra.attention import delta, lsh, softmax
from lintra.export import onnx
from lintra.export import runtime as export
from lintra.models import decoder
from lintra.tasks import copy, digits, image_folder

needs_runtime = pytest.mark.skipif(not runtime.available(), reason=f"no runtime: {runtime.why_not()}")


def test_a_file_is_written(lintra_says, folder, tmp_path):
    run = folder("run", digits.Config())
    code, out, err = lintra_says("export", "--to", "runtime", "--model", "run", "--weights", "int8")
    assert (code, err) == (0, "")
    assert out.startswith("run.lrt: 0.0")
    assert "weights in int8" in out
    content = export.to_bytes(checkpoint.load(run.folder), "int8")
    assert (tmp_path / "run.lrt").read_bytes() == content
    code, _, err = lintra_says("export", "--to", "runtime", "--model", "run")
    assert (code, err) == (2, "lintra: run.lrt exists: say --out run.lrt to replace it\n")
    assert lintra_says("export", "--to", "runtime", "--model", "run", "--out", "run.lrt")[0] == 0
    assert (tmp_path / "run.lrt").read_bytes() != content


def test_a_model_of_its_own(lintra_says, folder, tmp_path):
    """The newest checkpoint of a run, as `checkpoint.save` writes it; a folder of anything else is kept."""
    run = folder("run", digits.Config())
    code, out, err = lintra_says("export", "--to", "safetensors", "--model", "run")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"run-model: model.safetensors \d+\.\d+ MiB\n", out)
    assert {x.name for x in (tmp_path / "run-model").iterdir()} == {"config.json", "model.safetensors"}
    ours, theirs = (checkpoint.load(x).state_dict() for x in (tmp_path / "run-model", run.folder))
    assert all(torch.equal(ours[name], x) for name, x in theirs.items())
    for args, message in (
        ([], "run-model exists: say --out run-model to replace it"),
        (["--out", "run"], "run exists and is not a saved model: choose another folder"),
        (["--weights", "int8"], "weights must be float32 in safetensors, got int8"),
    ):
        code, _, err = lintra_says("export", "--to", "safetensors", "--model", "run", *args)
        assert code == 2
        assert message in err
    args = ["--out", "run-model", "--model", "run"]
    assert lintra_says("export", "--to", "safetensors", *args)[0] == 0


def test_what_is_refused(lintra_says, folder, tmp_path):
    model = decoder.Config(vocabulary=5, attention=lsh.Config(chunk=4), layers=1, heads=1, width=8).build()
    checkpoint.save(model, tmp_path / "lsh")
    folder("run", digits.Config())
    for args, message in (
        (["--model", "lsh"], "cannot be exported to the runtime: the runtime knows the attentions linear"),
        (["--model", "nothing"], "nothing does not exist"),
        (["--model", "run", "--out", "."], "out must be a file, got the folder"),
        (["--model", "run", "--to", "onnx", "--out", "lsh"], "out must be a file, got the folder lsh"),
        (["--model", "run", "--weights", "int4"], "invalid choice"),
    ):
        code, out, err = lintra_says("export", "--to", "runtime", *args)
        assert (code, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1
    os.mkfifo(tmp_path / "pipe")
    for args in (["runtime", "--out", "pipe"], ["onnx", "--out", "pipe"], ["onnx", "--out", os.devnull]):
        code, out, err = lintra_says("export", "--model", "run", "--to", *args)
        assert (code, out) == (2, "")
        assert f"{args[-1]} is not a regular file, but a pipe or a device: name a file" in err
    code, _, err = lintra_says("export", "--to", "tape")
    assert code == 2
    assert err.count("\n") == 1
    assert not list(tmp_path.glob("*.lrt"))


@needs_runtime
def test_the_runtime_draws_what_pytorch_draws(lintra_says, folder, drawn):
    folder("run", digits.Config())
    args = ["generate", "--model", "run", "--complete", "2", "--samples", "5", "--seed", "7", "--batch", "2"]
    args += ["--temperature", "0.8", "--top-k", "9"]
    found = []
    for engine in ("pytorch", "runtime"):
        assert lintra_says(*args, "--engine", engine)[0] == 0
        found.append((drawn["samples"][1], torch.stack(drawn["completions"][3])))
    for mine, right in zip(*found, strict=True):
        assert torch.equal(mine, right)
    for weights in ("float16", "int8"):
        assert lintra_says(*args, "--engine", "runtime", "--weights", weights)[0] == 0


@needs_runtime
def test_sequences_of_the_runtime(lintra_says, folder):
    folder("run", copy.Config())
    args = ["generate", "--model", "run", "--samples", "3", "--seed", "1"]
    mine, right = lintra_says(*args, "--engine", "runtime")[1], lintra_says(*args)[1]
    assert mine == right


def test_where_there_is_no_runtime(lintra_says, folder, monkeypatch):
    folder("run", digits.Config())
    monkeypatch.setattr(runtime, "why_not", lambda: "the native library is not built")
    code, _, err = lintra_says("generate", "--model", "run", "--engine", "runtime")
    assert (code, err) == (2, "lintra: engine=runtime cannot be used here: the native library is not built\n")


@needs_runtime
def test_what_does_not_go_with_an_engine(lintra_says, folder):
    folder("run", digits.Config())
    for args, message in (
        (["--engine", "runtime", "--device", "cuda"], "engine=runtime is for the CPU: add --device cpu"),
        (["--engine", "runtime", "--weights", "bfloat16"], "weights bfloat16 are for --engine pytorch"),
        (["--weights", "float16"], "weights float16 are for --engine runtime"),
    ):
        code, _, err = lintra_says("generate", "--model", "run", "--complete", "0", *args)
        assert code == 2
        assert message in err


def test_onnx_has_a_file_for_each_form(lintra_says, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx, "to_bytes", lambda model, form, **target: form.encode())
    folder("run", digits.Config())
    code, out, err = lintra_says("export", "--to", "onnx", "--model", "run")
    assert (code, err) == (0, "")
    said = [f"run-{form}.onnx: 0.00 MiB, opset 20\n" for form in ("step", "parallel")]
    assert out == "".join([*said, "run-onnx.json: inputs, outputs, first states, symbols\n"])
    assert json.loads((tmp_path / "run-onnx.json").read_text())["files"] == {
        form: f"run-{form}.onnx" for form in ("step", "parallel")
    }
    assert (tmp_path / "run-step.onnx").read_bytes() == b"step"
    assert (tmp_path / "run-parallel.onnx").read_bytes() == b"parallel"
    code, _, err = lintra_says("export", "--to", "onnx", "--model", "run")
    assert (code, err) == (2, "lintra: run-step.onnx exists: say --out run.onnx to replace it\n")
    (tmp_path / "run-step.onnx").unlink()
    code, out, err = lintra_says("export", "--to", "onnx", "--model", "run")
    assert (code, out) == (2, "")
    assert "run-parallel.onnx exists" in err
    assert not (tmp_path / "run-step.onnx").exists()
    assert lintra_says("export", "--to", "onnx", "--model", "run", "--out", "run.onnx")[0] == 0
    assert len(list(tmp_path.glob("*.onnx"))) == 2
    assert lintra_says("export", "--to", "onnx", "--model", "run", "--out", "mine")[0] == 0
    assert (tmp_path / "mine-parallel.onnx").read_bytes() == b"parallel"
    assert json.loads((tmp_path / "mine-onnx.json").read_text())["files"]["step"] == "mine-step.onnx"


@pytest.mark.parametrize(
    ("flags", "target", "said"),
    [
        (["--opset", "27"], {"opset": 27, "domain": "ai.onnx"}, "opset 27"),
        (
            ["--domain", "com.microsoft"],
            {"opset": 20, "domain": "com.microsoft"},
            "opset 20 and com.microsoft",
        ),
    ],
)
def test_onnx_has_a_target(lintra_says, tmp_path, monkeypatch, flags, target, said):
    monkeypatch.chdir(tmp_path)
    found = []
    monkeypatch.setattr(onnx, "to_bytes", lambda model, form, **given: found.append(given) or b"")
    model = decoder.Config(vocabulary=5, attention=delta.Config(), layers=1, heads=1, width=8).build()
    checkpoint.save(model, tmp_path / "delta")
    code, out, err = lintra_says("export", "--to", "onnx", "--model", "delta", *flags)
    assert (code, err) == (0, "")
    assert found == [target, target]  # for the parallel form too
    assert out.splitlines()[:2] == [f"delta-{form}.onnx: 0.00 MiB, {said}" for form in ("step", "parallel")]
    about = json.loads((tmp_path / "delta-onnx.json").read_text())
    assert {name: about[name] for name in target} == target
    code, _, err = lintra_says("export", "--to", "runtime", "--model", "delta", *flags)
    assert code == 2
    assert re.search(r"(opset|domain) is for ONNX, got \S+ with to=runtime", err)
    code, _, err = lintra_says("export", "--to", "onnx", "--model", "delta", "--opset", "21")
    assert (code, err.count("\n")) == (2, 1)
    assert "invalid choice" in err


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_of_another_dtype_becomes_graphs_in_float32(lintra_says, tmp_path, monkeypatch, dtype):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(onnx, "to_bytes", lambda model, *_, **target: str(model.head.weight.dtype).encode())
    model = decoder.Config(vocabulary=5, layers=1, heads=1, width=8).build().to(dtype)
    checkpoint.save(model, tmp_path / "model")
    assert lintra_says("export", "--to", "onnx", "--model", "model")[::2] == (0, "")
    assert (tmp_path / "model-step.onnx").read_text() == "torch.float32"


def test_what_onnx_has_not(lintra_says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(onnx, "to_bytes", lambda model, form, **target: form.encode())
    for name, attention in (("delta", delta.Config()), ("window", softmax.Config(window=4))):
        model = decoder.Config(vocabulary=5, attention=attention, layers=1, heads=1, width=8).build()
        checkpoint.save(model, tmp_path / name)
    code, out, _ = lintra_says("export", "--to", "onnx", "--model", "delta")
    assert code == 0
    assert "no parallel form: attention 'delta': it solves a triangle of tokens" in out
    assert [x.name for x in tmp_path.glob("*.onnx")] == ["delta-step.onnx"]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    code, _, err = lintra_says("export", "--to", "onnx", "--model", "window")
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot be exported to ONNX as 'step': attention 'softmax': its cache is a window" in err
    code, _, err = lintra_says("export", "--to", "onnx", "--model", "delta", "--weights", "int8")
    assert code == 2
    assert "weights must be float32 in ONNX, got int8" in err
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    code, _, err = lintra_says("export", "--to", "onnx", "--model", "delta", "--out", "again")
    assert code == 2
    assert (
        err == "lintra: this command needs onnxscript, which is not installed: pip install 'lintra[onnx]'\n"
    )


@pytest.mark.parametrize("task", [digits.Config(), image_folder.Config(data="photographs")])
def test_the_extra_of_onnx_is_enough(lintra_says, folder, monkeypatch, task):
    """The command works without the packages that only the other extras install."""
    tomllib = pytest.importorskip("tomllib")  # since Python 3.11
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = {
        extra: {re.match(r"[\w-]+", each)[0].replace("-", "_") for each in packages}
        for extra, packages in project["optional-dependencies"].items()
    }
    folder("run", task)
    monkeypatch.setattr(onnx, "to_bytes", lambda model, form, **target: form.encode())
    for name in (extras["train"] | extras["speech"]) - extras["onnx"]:
        monkeypatch.setitem(sys.modules, {"pillow": "PIL"}.get(name, name), None)
    code, _, err = lintra_says("export", "--to", "onnx", "--model", "run")
    assert (code, err) == (0, "")


@pytest.mark.parametrize("written", [0, 1])
def test_a_full_disk_is_an_error(lintra_says, folder, tmp_path, monkeypatch, written):
    """While the first or second form is written: an earlier file is whole, nothing is left of the other."""
    folder("run", digits.Config())
    forms = iter([b"x" * (1_000 if written else 100_000), b"x" * 100_000])
    monkeypatch.setattr(onnx, "to_bytes", lambda model, form, **target: next(forms))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # per file, like a full disk
    try:
        code, _, err = lintra_says("export", "--to", "onnx", "--model", "run", "--out", "m.onnx")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2
    assert re.fullmatch(r"lintra: \S*/m-(step|parallel)\.onnx cannot be written: .*\n", err)
    assert [x.stat().st_size for x in tmp_path.glob("*.onnx")] == [1_000] * written
    assert {x.name for x in tmp_path.iterdir()} - {"run"} == ({"m-step.onnx"} if written else set())
