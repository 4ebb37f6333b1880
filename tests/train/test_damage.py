"""A run continues with what it began with, or not at all; an error names a damaged checkpoint."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from lintra import checkpoint, train
from lintra.attention import linear
from lintra.tasks import Samples, copy, digits, text, text_classification
from lintra.train import data_checks
from lintra.train.schedule import LearningRateSchedule


def change_json(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def change_tensors(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def model(name, value):
    return lambda run, step: change_json(run / "run.json", lambda c: c["model"].update({name: value}))


def tree(change):
    return lambda run, step: change_json(step / "training.json", lambda c: change(c["checkpoint"]))


def moments(tensors):
    for name in (name for name in tensors if name.endswith("exp_avg")):
        tensors[name] = torch.zeros(3)


DAMAGE = {
    "another model": (
        model("layers", 2),
        r"model\.safetensors lacks tensor 'blocks\.1\.attn\.out_proj\.bias'",
    ),
    "another width": (
        model("width", 32),
        r"model\.safetensors: embedding\.table\.weight must be torch\.float32",
    ),
    "no tree": (
        lambda run, step: change_json(step / "training.json", lambda c: c.update(checkpoint=None)),
        r"training\.json is damaged: its pytorch-lightning_version is missing or no str",
    ),
    "no keys": (
        tree(dict.clear),
        r"training\.json is damaged: its pytorch-lightning_version is missing or no",
    ),
    "another kind": (tree(lambda c: c.update(loops=["x"])), r"its loops is missing or no dict"),
    "no loops": (tree(lambda c: c["loops"].clear()), r"training\.json does not fit this run: KeyError"),
    "no version": (
        tree(lambda c: c.update({"pytorch-lightning_version": "x"})),
        r"training\.json does not fit this run: InvalidVersion",
    ),
    "no groups": (
        tree(lambda c: c["optimizer_states"][0].update(param_groups=[])),
        r"training\.json does not fit this run: ValueError",
    ),
    "moments": (
        lambda run, step: change_tensors(step / "training.safetensors", moments),
        r"exp_avg of the optimizer must be \[18, 8\] as its weight is, got \[3\]",
    ),
    "a weight": (
        lambda run, step: change_tensors(
            step / "model.safetensors", lambda t: t.update({"head.bias": torch.zeros(3)})
        ),
        r"model\.safetensors: head\.bias must be torch\.float32 \[17\], got torch\.float32 \[3\]",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_named(new_run, damage, message):
    run = new_run(steps=1)
    train.fit(run)
    damage(run.folder, run.checkpoints()[-1])
    with pytest.raises(checkpoint.Error, match=message) as found:
        train.fit(train.Run.read(run.folder).changed(steps=2))
    sentence = str(found.value).replace(str(run.folder), "")
    assert "\n" not in sentence
    assert len(sentence) < 200


def test_other_data_are_refused(new_run, tmp_path):
    """The path may change, the content may not; and the length of a sequence must stay the same."""
    first, moved, other = (tmp_path / name for name in ("first.txt", "moved.txt", "other.txt"))
    for file, content in ((first, "abcdefg " * 100), (moved, "abcdefg " * 100), (other, "abcdefh " * 100)):
        file.write_text(content)
    run = new_run(task=text.Config(data=str(first), length=16), steps=1)
    train.fit(run)

    def resume(steps, **changes):
        change_json(run.folder / "run.json", lambda c: c["task"].update(changes))
        train.fit(train.Run.read(run.folder).changed(steps=steps))

    resume(2, data=str(moved))
    for changes, message in [
        ({"data": str(other)}, r"samples 1000000, length 16, digest \w+; now it is .* length 16, digest"),
        (
            {"data": str(first), "length": 8},
            r"length 16, digest \w+; now it is samples 1000000, length 8,",
        ),
    ]:
        with pytest.raises(
            checkpoint.Error, match=rf"run\.json was begun with other data or another .*{message}"
        ):
            resume(3, **changes)
    resume(3, length=16)
    change_json(run.folder / "run.json", lambda c: c.pop("data"))  # as by an older lintra
    resume(4, data=str(other))
    assert [x.name for x in run.checkpoints()][-1] == "step-00000004"


def test_a_fingerprint_is_of_the_data_alone(tmp_path):
    (tmp_path / "a.tsv").write_text("".join(f"{i % 2}\tline {i}\n" for i in range(40)))
    (tmp_path / "b.tsv").write_text("".join(f"{i % 2}\tline {i}\n" for i in range(39)) + "1\tline 40\n")
    for last in "bc":  # only the validation data differ
        (tmp_path / f"{last}.txt").write_text("a" * 900 + last * 100)
    lines = partial(text_classification.Config, length=16)
    of = [
        data_checks.fingerprint(config.build())
        for config in (
            digits.Config(),
            digits.Config(),
            copy.Config(length=8),
            copy.Config(length=9),
            copy.Config(length=8, data_seed=1),
            lines(data=str(tmp_path / "a.tsv")),
            lines(data=str(tmp_path / "b.tsv")),
            text.Config(data=str(tmp_path / "b.txt"), length=16),
            text.Config(data=str(tmp_path / "c.txt"), length=16),
        )
    ]
    assert of[0] == of[1]
    assert len({x["digest"] for x in of}) == 8
    assert of[2]["length"] == 8


class Drawn(Samples):
    """Ten counts, each with draws of three kinds: a cut, a flip, some noise."""

    def __init__(self, first):
        self.first = first

    def __len__(self):
        return 10

    def __getitems__(self, indices):
        (place,) = indices
        return {
            "tokens": torch.arange(place, place + 20)[None] + self.first,
            "cut": torch.zeros(1, int(torch.randint(1, 1_000, ()))),
            "flip": torch.randint(0, 2, (1,)),
            "noise": torch.rand(1, 7),
        }


class Drawing(digits.Digits):
    """A custom task whose samples are drawn anew at each access."""

    first = 0

    @property
    def train(self):
        return Drawn(self.first)


def test_what_is_drawn_anew_is_in_no_fingerprint():
    """Otherwise a run on it could never be resumed; what is not drawn still tells data apart."""
    task = Drawing(digits.Config())
    found = [data_checks.fingerprint(task) for _ in range(4)]
    assert all(each == found[0] for each in found)
    task.first = 1
    assert data_checks.fingerprint(task) != found[0]


@pytest.mark.parametrize("parts", [1, 4])
def test_room_is_asked_for_batches_of_the_shortest(monkeypatch, parts):
    """The first sample may be the only long one. Of the activations one part at a time is kept."""
    task, model = Drawing(digits.Config()), digits.Config().build().model(linear.Config())

    def read(samples, places):
        return {"tokens": torch.zeros(1, 1_000 if places == [0] else 20, dtype=torch.int64)}

    monkeypatch.setattr(Drawn, "__getitems__", read)
    cpu, settings = torch.device("cpu"), train.Config(batch=100, accumulate=parts)
    least = 100 * (40 + 20 * 8 + 4 * 20 * model.width * model.layers // parts)
    monkeypatch.setattr(data_checks, "available", lambda device: least)
    data_checks.check_room(task, model, settings, cpu)
    monkeypatch.setattr(data_checks, "available", lambda device: least - 1)
    with pytest.raises(ValueError, match=r"a batch of 100 sequences needs at least .* smaller --batch, or"):
        data_checks.check_room(task, model, settings, cpu)
    monkeypatch.setattr(task, "batch", 100)  # as of batch_tokens, beside which --batch is refused
    with pytest.raises(ValueError, match="take a smaller --batch-tokens, or"):
        data_checks.check_room(task, model, settings, cpu)


@pytest.mark.parametrize("hook", ["setup", "on_fit_start"])
def test_what_fails_beside_a_checkpoint_keeps_its_own_words(new_run, monkeypatch, hook):
    """A resumed run may fail where its checkpoint is neither read nor restored, and is not to blame."""
    run = new_run(steps=1)
    train.fit(run)

    def fail(*given, **named):
        raise ValueError("mine")

    monkeypatch.setattr(LearningRateSchedule, hook, fail, raising=False)
    with pytest.raises(ValueError, match=r"^mine$") as found:
        train.fit(run.changed(steps=2))
    assert not isinstance(found.value, checkpoint.Error)


def test_a_batch_that_finds_no_room(new_run, monkeypatch):
    """From run.json too: if it began, it would build its list of samples until the system kills it."""
    run = new_run()
    change_json(run.folder / "run.json", lambda c: c["train"].update(batch=10**9))
    with pytest.raises(
        ValueError, match=r"a batch of 1,000,000,000 sequences needs at least [\d,.]+ GB and "
    ):
        train.fit(train.Run.read(run.folder))
    monkeypatch.setattr(data_checks, "available", lambda device: None)  # the system does not report it
    train.fit(new_run("small", steps=1))
