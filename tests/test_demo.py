"""The demo, shortened to seconds: it finishes, shows what it promises, and touches only its own files."""

import dataclasses

import pytest

from lintra import checkpoint, demo, train
from lintra.models import decoder
from lintra.tasks import digits


@pytest.fixture
def _tiny(monkeypatch, one_thread):
    model = digits.Digits.model
    shape = {"layers": 1, "heads": 2, "width": 16}
    monkeypatch.setattr(
        digits.Digits, "model", lambda self, attention: dataclasses.replace(model(self, attention), **shape)
    )


@pytest.mark.usefixtures("_tiny")
def test_the_demo(tmp_path):
    (tmp_path / "mine.txt").write_text("not the demo's")
    config = demo.Config(dir=tmp_path, seconds=0.01, longest=32)
    for _ in range(2):  # twice in the same folder
        figures, paths = demo.run(config)
    assert len(paths) == len(set(paths)) >= 4
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert {"validation", "parallel and RNN form differ by"} <= {what for what, _ in figures}
    assert {path.name for path in tmp_path.iterdir()} == {"mine.txt", "run", *(path.name for path in paths)}


@pytest.mark.usefixtures("_tiny")
def test_a_run_of_another_is_kept(tmp_path, monkeypatch):
    """A run that the demo did not make, and one of the demo that was trained further."""
    config = demo.Config(dir=tmp_path, seconds=0.01, longest=32)
    demo.run(config)
    run = train.Run.read(tmp_path / "run")
    with run.locked(), pytest.raises(checkpoint.Error, match="is being trained by another process"):
        demo.run(config)
    with pytest.raises(ValueError, match="seed must lie in"):
        demo.run(dataclasses.replace(config, seed=-1))
    assert run.checkpoints()
    before = run.train
    run = run.changed(max_minutes=600.0)
    with pytest.raises(checkpoint.Error, match="not the demo's, or was trained further"):
        demo.run(config)
    assert run.checkpoints()
    (dataclasses.replace(run, train=before).folder / demo.MARK).unlink()
    with pytest.raises(checkpoint.Error, match="holds a run that is not the demo's"):
        demo.run(config)
    assert run.checkpoints()


@pytest.mark.usefixtures("_tiny")
def test_a_picture_of_another_is_kept(tmp_path):
    (tmp_path / "loss.png").write_text("mine")
    with pytest.raises(checkpoint.Error, match=r"loss\.png is not the demo's and is kept"):
        demo.run(demo.Config(dir=tmp_path, seconds=0.01, longest=32))
    assert [x.name for x in tmp_path.iterdir()] == ["loss.png"]


def test_disagreement_is_seen():
    """Zero up to rounding for one model; a broken RNN form would be visible."""
    config = decoder.Config(vocabulary=17, layers=1, heads=2, width=16)
    model = config.build().eval()
    tokens = digits.Config().build().validate.__getitems__(range(3))["tokens"]
    assert demo.disagreement(model, tokens) < 1e-4
    extend = model.extend
    model.extend = lambda tokens, state=None: extend(tokens.flip(0), state)
    assert demo.disagreement(model, tokens) > 1e-2
