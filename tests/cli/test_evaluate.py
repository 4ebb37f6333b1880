"""`lintra evaluate`: it reports what the library computes; and what it refuses."""

import json
import math
import re
import shutil
import signal

import numpy as np
import pytest
import torch

from lintra import checkpoint, evaluate, tasks
from lintra.cli import memory
from lintra.models.decoder import LogisticMixture
from lintra.nn.distributions import DiscretisedLogistics
from lintra.tasks import copy, digits, images, text, text_classification
from lintra.tasks.base import predict


def scores(file) -> dict:
    return json.loads(file.read_text())["scores"]


def test_images_by_both_conventions(lintra_says, folder):
    run = folder("run", digits.Config())
    code, out, err = lintra_says("evaluate", "--model", "run", "--json", "found/a.json")
    assert (code, err) == (0, "")
    report = json.loads((run.folder.parent / "found" / "a.json").read_text())
    assert {"machine", "versions", "command", "date"} <= report.keys()
    model, values = checkpoint.load("run"), digits.Config().build().test.values
    expected = evaluate.of_images(evaluate.nats(model, values, batch=64), 64, 17)
    for (name, estimate), each in zip(expected.items(), (63, 64), strict=True):
        assert report["scores"][name]["mean"] == pytest.approx(estimate.mean, rel=1e-6)
        assert report["scores"][name]["error"] == pytest.approx(estimate.error, rel=1e-3)
        assert f"{estimate.mean:.4f} +- {estimate.error:.4f}   of {each} predictions" in out
    assert "all 150 test samples" in out
    assert not report["partial"]
    assert report["probabilities_sum_to_1_within"] < report["tolerance"] == evaluate.TOLERANCE
    assert "The probabilities of all 17 symbols sum to 1 within" in out


def test_the_weights_named_are_those_scored(lintra_says, folder, tmp_path, monkeypatch):
    """Those of the newest checkpoint when the command began, though training may save another."""
    run = folder("run", digits.Config())
    scored = checkpoint.digest(run.folder)

    def trained(path):
        checkpoint.save(run.model.build(), run.folder / "step-00000002")

    monkeypatch.setattr("lintra.cli.evaluate.refuse_unwritable", trained)
    assert lintra_says("evaluate", "--model", "run", "--limit", "3", "--json", "a.json")[0] == 0
    assert json.loads((tmp_path / "a.json").read_text())["weights"] == scored
    assert checkpoint.digest(run.folder) != scored


@pytest.mark.parametrize("flag", ["--json", "--pictures"])
def test_a_place_that_cannot_be_written_is_told_before_scoring(lintra_says, folder, tmp_path, flag):
    folder("run", digits.Config())
    (tmp_path / "file").touch()
    code, out, err = lintra_says("evaluate", "--model", "run", flag, "file/a/b")
    assert (code, out) == (2, "")
    assert "cannot be written: above it is a file, not a folder" in err


def test_too_many_at_once(lintra_says, folder, monkeypatch):
    folder("run", digits.Config())
    monkeypatch.setattr(memory, "available", lambda device: 10**6)
    code, out, err = lintra_says("evaluate", "--model", "run", "--batch", "100")
    assert (code, out) == (2, "")
    assert err.startswith("lintra: 100 sequences at once need about ")
    batch = int(err.rsplit(maxsplit=1)[1])
    assert lintra_says("evaluate", "--model", "run", "--batch", str(batch), "--limit", "40")[0] == 0


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("can't allocate memory: you asked"),
    ],
)
def test_no_room_is_told_in_words(lintra_says, folder, monkeypatch, error):
    folder("run", digits.Config())

    def full(*args, **settings):
        raise error

    monkeypatch.setattr(evaluate, "nats", full)
    code, _, err = lintra_says("evaluate", "--model", "run")
    assert code == 2
    assert err.startswith("lintra: there is not enough memory, take a smaller --batch")


def test_a_limit_draws_samples(lintra_says, folder, tmp_path):
    folder("run", digits.Config())
    found = []
    for seed in "001":
        args = ["evaluate", "--model", "run", "--limit", "5", "--seed", seed, "--json", "a.json"]
        assert "5 of 150 test samples" in lintra_says(*args)[1]
        found.append(scores(tmp_path / "a.json"))
    assert found[0] == found[1] != found[2]
    code, _, err = lintra_says("evaluate", "--model", "run", "--limit", "151")
    assert (code, err) == (2, "lintra: limit must be at most the 150 samples there are, got 151\n")
    assert lintra_says("evaluate", "--model", "run", "--limit", "1", "--json", "a.json")[0] == 0
    assert scores(tmp_path / "a.json")["bits_per_dim"]["error"] is None


def test_all_test_images_whatever_training_looked_at(lintra_says, tmp_path, monkeypatch, folder):
    """A model that does not predict the first value is charged 8 bits for it."""
    source = np.random.default_rng(0).integers(0, 256, (6, 28, 28, 1), np.uint8)
    found = {"train": [], "test": [lambda: source]}
    monkeypatch.setattr(images, "locate", lambda data, data_dir: images.data_files.Splits(**found))
    folder("run", images.Config(preset="paper", validate_images=2))
    code, out, err = lintra_says("evaluate", "--model", "run", "--json", "a.json")
    assert (code, err) == (0, "")
    assert "all 6 test samples" in out
    assert "of 784 predictions a sample, the first one at 8 bits: it is not predicted" in out
    saved = scores(tmp_path / "a.json")
    others = saved["bits_per_dim_without_the_first"]["mean"]
    assert saved["bits_per_dim"]["mean"] == pytest.approx((783 * others + 8) / 784)


def test_other_tasks_score_what_they_score(lintra_says, folder, tmp_path):
    (tmp_path / "words.txt").write_text("a few words, and then the same again. " * 40)
    lines = [f"{i % 2}\t{('bad', 'good')[i % 2] * (i + 1)}\n" for i in range(40)]
    (tmp_path / "reviews.tsv").write_text("".join(lines))
    for name, task, words in (
        ("copy", copy.Config(length=16, validate_samples=20), ("accuracy", "nats a prediction")),
        ("text", text.Config(data="words.txt", length=24), ("bits/byte", "of 24 predictions a sample")),
        ("class", text_classification.Config(data="reviews.tsv", length=32), ("accuracy", "of 1 ")),
    ):
        run = folder(name, task)
        code, out, err = lintra_says("evaluate", "--model", name, "--json", "a.json")
        assert (code, err) == (0, "")
        assert all(word in out for word in words)
        built = task.build()
        batch = built.test.__getitems__(range(len(built.test)))
        expected = built.score(checkpoint.load(run.folder), batch)
        saved = scores(tmp_path / "a.json")
        assert saved.keys() == expected.keys() - {"weight"}
        for key, score in saved.items():
            assert score["mean"] == pytest.approx(expected[key].item(), rel=1e-5)


def test_three_files_are_a_model(lintra_says, folder, tmp_path):
    """config.json, model.safetensors and run.json in one folder, as a model is distributed."""
    run = folder("run", digits.Config())
    shutil.copytree(run.folder / "step-00000001", tmp_path / "given")
    code, _, err = lintra_says("evaluate", "--model", "given")
    assert code == 2
    assert "no run.json in it or above" in err
    assert "copy the run.json of its training into it" in err
    shutil.copy(run.folder / "run.json", tmp_path / "given")
    out = [lintra_says("evaluate", "--model", name, "--limit", "3")[1] for name in ("run", "given")]
    told = [re.findall(r"bits/dim.*", x) for x in out]
    assert told[0] == told[1] != []
    draw = ["--samples", "1", "--complete", "1", "--out", "a.png"]
    assert lintra_says("generate", "--model", "given", *draw)[0] == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("task", [digits.Config(), copy.Config(length=16, validate_samples=20)])
def test_what_was_scored_before_it_was_stopped(lintra_says, folder, tmp_path, monkeypatch, task, signum):
    """Ctrl-C in the second batch: it is finished, and the score is reported with its standard error."""
    folder("run", task)
    batches = []

    def interrupted(*args):
        batches.append(args)
        if len(batches) == 3:  # the first one is the memory check
            signal.raise_signal(signum)
        return predict(*args)

    for module in (evaluate.estimates, tasks.base):
        monkeypatch.setattr(module, "predict", interrupted)
    before = signal.getsignal(signum)
    args = ["--batch", "5", "--json", "a.json", "--pictures", "p"][: 6 if task == digits.Config() else 4]
    code, out, err = lintra_says("evaluate", "--model", "run", *args)
    assert (code, err) == (128 + signum, "")
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["partial"]
    assert all(x["samples"] == 10 and x["error"] > 0 for x in found["scores"].values())
    split = "test" if task == digits.Config() else "validation"
    assert f"10 of {found['test_samples']} {split} samples" in out
    assert f"Stopped: these are scores of the first 10 of {found['test_samples']} samples" in out
    assert not list(tmp_path.glob("p/*"))
    assert signal.getsignal(signum) is before


def test_what_is_no_likelihood_is_refused(lintra_says, folder, monkeypatch):
    folder("run", digits.Config(), output=LogisticMixture(components=2))
    exact = DiscretisedLogistics.log_probs
    monkeypatch.setattr(DiscretisedLogistics, "log_probs", lambda self, x: exact(self, x) + math.log(1.5))
    code, out, err = lintra_says("evaluate", "--model", "run")
    assert (code, out) == (2, "")
    assert "the probabilities of all 17 symbols miss a sum of 1 by 5.0e-01" in err


@pytest.mark.parametrize(
    ("task", "args", "message"),
    [
        (images.Config(data_dir="nowhere"), [], "data_dir nowhere holds no mnist files"),
        (images.Config(), ["--data", "elsewhere"], "data_dir elsewhere holds no mnist files"),
        (digits.Config(), ["--data", "x"], "data is for tasks that read files, not digits: leave --data out"),
        (digits.Config(), ["--device", "cuda"], "PyTorch finds no CUDA device here"),
    ],
)
def test_one_line_for_what_cannot_be(lintra_says, folder, monkeypatch, task, args, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    folder("run", task)
    code, out, err = lintra_says("evaluate", "--model", "run", *args)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_text_elsewhere(lintra_says, folder, tmp_path):
    (tmp_path / "words.txt").write_text("a few words, and then the same again. " * 40)
    folder("run", text.Config(data="gone.txt", length=24))
    code, _, err = lintra_says("evaluate", "--model", "run")
    assert code == 2
    assert "gone.txt does not exist" in err
    assert lintra_says("evaluate", "--model", "run", "--data", "words.txt")[0] == 0


def test_pictures_of_images_only(lintra_says, folder, tmp_path, monkeypatch):
    def draw(model, task, images, nats, path, **options):
        assert (len(images), nats.shape) == (3, (3, 64))
        assert (options["batch"], options["seed"]) == (2, 5)
        return [path / "a.png"]

    monkeypatch.setattr(evaluate, "draw", draw)
    folder("run", digits.Config())
    args = ["--limit", "3", "--pictures", "p", "--batch", "2", "--seed", "5"]
    code, out, err = lintra_says("evaluate", "--model", "run", *args)
    assert (code, err) == (0, "")
    assert out.endswith("saved in p/a.png\n")
    folder("copy", copy.Config(length=16))
    code, out, err = lintra_says("evaluate", "--model", "copy", "--pictures", "p")
    assert (code, out) == (2, "")
    assert err == "lintra: pictures is for models of images, copy is of the task copy\n"
