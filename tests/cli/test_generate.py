"""`lintra generate`: completing given images, batches, Ctrl-C, memory."""

import re
import signal
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from lintra import allocator, checkpoint, runtime
from lintra.attention import delta, leaves, linear, longformer, softmax
from lintra.cli import generate_text, memory
from lintra.generation import sampling
from lintra.models import decoder
from lintra.tasks import DataError, copy, digits, images


def save(name: str, values: np.ndarray) -> None:
    Image.fromarray(values).save(name)


def test_own_images_are_completed(lintra_says, folder, drawn):
    """Their upper part is kept; the library draws the same continuation."""
    run = folder("run", digits.Config())
    task = digits.Config().build()
    whole = task.to_images(task.validate.values[:2])
    for i in range(2):
        save(f"{i}.png", whole[i, :, :, 0].numpy())
    args = ["--samples", "0", "--complete", "0.png", "1.png", "--completions", "2", "--fraction", "0.25"]
    code, out, err = lintra_says("generate", "--model", "run", *args, "--seed", "3", "--out", "a.png")
    assert (code, err.count("\n")) == (0, 1)  # the speed
    assert "completions: a-completions.png" in out
    path, originals, given, completed, _ = drawn["completions"]
    completed = torch.stack(completed)
    assert (str(path), given, completed.shape) == ("a-completions.png", 2, (2, 2, 8, 8, 1))
    assert torch.equal(originals, whole)
    assert torch.equal(completed[:, 1, :2], whole[:, :2])
    prompts = task.validate.values[:2, :16].long().repeat_interleave(2, 0)
    rest = sampling.generate(checkpoint.load(run.folder), prompts, steps=48, seed=3)
    assert torch.equal(completed.flatten(0, 1), task.to_images(torch.cat((prompts, rest), 1)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros((8, 9), np.uint8), r"9 x 8 pixels, mode L; this model's images have 8 x 8 pixels in grey"),
        (np.zeros((8, 8, 3), np.uint8), r'8 x 8 pixels, mode RGB; .*convert\("L"\)\.resize\(\(8, 8\)\)'),
        (np.zeros((8, 8, 4), np.uint8), "mode RGBA; this model's images have 8 x 8 pixels"),
        (None, "must have 8 x 8 pixels in grey"),
    ],
)
def test_images_that_do_not_fit(lintra_says, folder, tmp_path, values, message):
    folder("run", digits.Config())
    (tmp_path / "x.png").write_text("no image")
    if values is not None:
        save("x.png", values)
    code, out, err = lintra_says("generate", "--model", "run", "--complete", "x.png")
    assert (code, out) == (2, "")
    assert re.search(message, err)
    assert err.count("\n") == 1
    code, _, err = lintra_says("generate", "--model", "run", "--complete", "y.png")
    assert (code, err) == (2, "lintra: y.png does not exist\n")


@pytest.mark.parametrize("engine", ["pytorch", "runtime"])
def test_samples_differ_and_follow_from_the_seed_alone(lintra_says, folder, drawn, engine):
    """Whatever the batches are."""
    if engine == "runtime" and runtime.why_not():
        pytest.skip(f"no runtime: {runtime.why_not()}")
    run = folder("run", digits.Config())
    args = ["generate", "--model", "run", "--complete", "0", "--samples", "5", "--seed", "7"]
    found = []
    for batch in ("2", "5"):
        assert lintra_says(*args, "--batch", batch, "--engine", engine)[0] == 0
        found.append(drawn["samples"][1])
    assert torch.equal(*found)
    assert not torch.equal(found[0][:2], found[0][2:4])
    whole = sampling.generate(checkpoint.load(run.folder), steps=64, seed=7, batch=5)
    assert torch.equal(found[0], digits.Config().build().to_images(whole))


@pytest.mark.parametrize(
    ("calls", "told", "samples", "completions"),
    [
        (64 * 2 + 9, "4 of 5", 4, []),
        (9, "0 of 5", None, []),
        # 5 samples in 3 batches are done; of 3 completions of each of 2 images, in batches of 2, only some.
        (64 * 3 + 32 * 2 + 9, "4 of 6", 5, [3, 1]),
        (64 * 3 + 32 + 9, "2 of 6", 5, [2]),
    ],
)
@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_is_finished_is_kept(
    lintra_says, folder, drawn, monkeypatch, calls, told, samples, completions, signum, exit_code
):
    folder("run", digits.Config())
    stream, tokens = sampling.stream, iter(range(calls))

    def interrupted(*args, **options):
        for token in stream(*args, **options):
            if next(tokens, None) is None:
                signal.raise_signal(signum)
            yield token

    monkeypatch.setattr(sampling, "stream", interrupted)
    args = ["--complete", "2", "--samples", "5", "--batch", "2"]
    code, _, err = lintra_says("generate", "--model", "run", *args)
    assert code == exit_code
    assert f"stopped: {told} are finished\n" in err
    assert (len(drawn["samples"][1]) if "samples" in drawn else None) == samples
    assert [len(x) for x in (drawn["completions"][3] if "completions" in drawn else ())] == completions


def test_nothing_to_draw_is_told(lintra_says, folder, monkeypatch):
    folder("run", digits.Config())
    monkeypatch.setattr(digits.Digits, "at_hand", lambda task: False)
    code, _, err = lintra_says("generate", "--model", "run", "--samples", "0")
    assert (code, "name some with --complete FILE" in err) == (2, True)


def test_without_the_first_value(lintra_says, folder, drawn, monkeypatch):
    """A model that does not predict it takes it from training images, which the seed selects."""
    source = np.arange(40, dtype=np.uint8)[:, None, None, None].repeat(28, 1).repeat(28, 2)
    splits = images.data_files.Splits(train=[lambda: source], test=[lambda: source])
    monkeypatch.setattr(images, "locate", lambda data, data_dir: splits)
    folder("run", images.Config(preset="paper"), output=decoder.Logits())
    args = ["--samples", "6", "--complete", "1", "--seed", "7"]
    assert lintra_says("generate", "--model", "run", *args)[0] == 0
    assert drawn["samples"][1].shape == (6, 28, 28, 1)
    expected = images.Config(preset="paper").build().beginnings(6, 7)
    assert torch.equal(drawn["samples"][1][:, 0, 0, 0], expected[:, 0])


def test_why_drawing_needs_training_images(lintra_says, folder, tmp_path, monkeypatch):
    """A refused command leaves no folder behind."""

    def missing(data, data_dir):
        raise DataError("mnist is not at hand")

    monkeypatch.setattr(images, "locate", missing)
    folder("run", images.Config(preset="paper"), output=decoder.Logits())
    code, out, err = lintra_says("generate", "--model", "run", "--samples", "2", "--out", "new/a.png")
    assert (code, out) == (2, "")
    assert err.endswith("the first value of an image: training images give it, and mnist is not at hand\n")
    assert not (tmp_path / "new").exists()


def test_too_many_at_once(lintra_says, folder, monkeypatch):
    folder("run", digits.Config())
    model = checkpoint.load("run")
    one = memory.per_sequence(model, 0, 64)
    monkeypatch.setattr(memory, "available", lambda device: 100 * one)
    monkeypatch.setattr(memory, "check_all", lambda *args: None)
    args = ["generate", "--model", "run", "--complete", "0", "--samples", "200"]
    code, out, err = lintra_says(*args, "--batch", "91")
    assert (code, out) == (2, "")
    assert err.endswith("are free: take a --batch of at most 90\n")
    assert lintra_says(*args[:-1], "91", "--batch", "90")[0] == 0


def test_the_state_is_what_grows():
    """It grows with the number of tokens if the mechanism keeps them all, and otherwise not at all."""
    sizes = {}
    for attention in (linear.Config(), softmax.Config()):
        shape = {"vocabulary": 5, "layers": 2, "heads": 2, "width": 16}
        model = decoder.Config(attention=attention, **shape).build()
        sizes[type(attention)] = [memory.per_sequence(model, 0, steps) for steps in (100, 200)]
    assert sizes[linear.Config][0] == sizes[linear.Config][1]
    # 100 more keys and values of 16 numbers of 4 bytes in 2 layers, before and after the last token, and the
    # position of each key.
    grown = sizes[softmax.Config][1] - sizes[softmax.Config][0]
    assert 1 <= grown / (2 * 100 * 2 * 2 * 16 * 4) < 1.1


def test_a_state_of_constant_size_is_not_computed(monkeypatch):
    """It is as large before the first token as after the last one: a pass over a long text would be
    wasted."""
    shape = {"vocabulary": 5, "layers": 2, "heads": 2, "width": 16}
    for attention in (linear.Config(), delta.Config(), softmax.Config(window=7)):
        model = decoder.Config(attention=attention, context=(1, 3), **shape).build()
        state = model.extend(torch.zeros(1, 20, dtype=torch.int64))[1]
        found = memory._state(model, 20)
        assert [x.shape for x in leaves(found)] == [x.shape for x in leaves(state)]
        assert [x.dtype for x in leaves(found)] == [x.dtype for x in leaves(state)]
    model = decoder.Config(**shape).build()
    monkeypatch.setattr(model, "extend", None)
    assert memory.per_sequence(model, 0, 10**9) == memory.per_sequence(model, 0, 1)


def test_one_sequence_that_finds_no_room(monkeypatch):
    """Neither a smaller batch nor fewer sequences would help."""
    shape = {"vocabulary": 5, "layers": 1, "heads": 2, "width": 8}
    model = decoder.Config(attention=softmax.Config(), **shape).build()
    monkeypatch.setattr(memory, "available", lambda device: 1_000)
    with pytest.raises(ValueError, match=r"one sequence of 100 tokens needs about .* GB are free: make it"):
        memory.check_batch(model, 3, 0, 100)
    with pytest.raises(ValueError, match=r"one sequence of 100 tokens needs about .* GB are free: make it"):
        memory.check_all(3, 100)


@pytest.mark.parametrize("attention", [softmax.Config(), longformer.Config(window=16)])
def test_a_long_state_is_estimated_from_shorter_ones(attention, monkeypatch):
    """Measuring it with a pass over a million tokens would itself take hours and all the memory."""
    model = decoder.Config(vocabulary=5, layers=1, heads=2, width=8, attention=attention).build()
    monkeypatch.setattr(memory, "_MADE", 10_000)
    exact = memory.per_sequence(model, 0, 600)
    monkeypatch.setattr(memory, "_MADE", 64)
    read, extend = [], model.extend
    monkeypatch.setattr(model, "extend", lambda x, *more: (read.append(x.shape[1]), extend(x, *more))[1])
    assert memory.per_sequence(model, 0, 600) == pytest.approx(exact, rel=0.01)
    assert max(read, default=0) <= 64


def test_more_than_there_is_room_for_when_they_are_done(lintra_says, folder, monkeypatch):
    """The error comes before anything of that size is allocated, however large it is."""
    folder("run", digits.Config())
    free = 30 * 64 * memory._DONE  # the rest is for the batch
    monkeypatch.setattr(memory, "available", lambda device: free)
    monkeypatch.setattr(memory, "check_batch", lambda *args: None)
    args = ["generate", "--model", "run"]
    for asked, n in (
        (["--complete", "0", "--samples", "28"], 28),
        (["--complete", "0", "--samples", str(10**20)], 10**20),
        (["--samples", "0", "--complete", "2", "--completions", "14"], 28),
        (["--samples", "0", "--complete", "2", "--completions", str(10**8)], 2 * 10**8),
    ):
        code, out, err = lintra_says(*args, *asked)
        assert (code, out) == (2, "")
        assert err.startswith(f"lintra: {n:,} sequences take about ")
        assert err.endswith("draw at most 27 in one go\n")
    assert lintra_says(*args, "--complete", "0", "--samples", "27")[0] == 0


def test_memory_is_known_here():
    assert memory.available(torch.device("cpu")) > 1e6


def test_memory_of_a_container(tmp_path, monkeypatch):
    """Less than that of the machine if there is a limit; memory that caches files counts as free."""
    groups = [tmp_path / name for name in ("limit", "used", "stat")]
    monkeypatch.setattr(allocator, "_CONTAINERS", [groups])
    machine = memory.available(torch.device("cpu"))
    groups[1].write_text("700000\n")
    groups[2].write_text("anon 1\ninactive_file 200000\n")
    for limit, free in (("1000000", 500_000), ("max", machine), ("100", 0)):
        groups[0].write_text(limit + "\n")
        assert memory.available(torch.device("cpu")) == pytest.approx(free, rel=0.2)


@pytest.mark.parametrize(
    "flag", [["--complete", "4"], ["--completions", "2"], ["--fraction", "0.1"], ["--out", "a.png"]]
)
def test_only_images_are_completed_or_drawn_into_files(lintra_says, folder, flag):
    folder("run", copy.Config(length=16))
    code, _, err = lintra_says("generate", "--model", "run", *flag)
    assert code == 2
    assert err == f"lintra: {flag[0][2:]} is for models of images, run is of the task copy\n"
    assert lintra_says("generate", "--model", "run", "--samples", "2")[0] == 0


def test_missing_data_is_no_end(lintra_says, folder, drawn):
    folder("run", images.Config(data_dir="nowhere"))
    code, _, err = lintra_says("generate", "--model", "run", "--samples", "1", "--complete", "1")
    assert code == 2
    assert "holds no mnist files" in err
    assert "--complete 0 draws without test images" in err
    assert lintra_says("generate", "--model", "run", "--samples", "1")[0] == 0  # it does not complete images
    for asked in (["--data", "elsewhere"], ["--completions", "2"], ["--fraction", "0.3"]):
        code, _, err = lintra_says("generate", "--model", "run", "--samples", "1", *asked)
        assert code == 2
        assert "holds no mnist files" in err


def test_damaged_data_are_no_end_either(lintra_says, folder, drawn, tmp_path):
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "t10k-images-idx3-ubyte.gz").write_bytes(b"no images")
    folder("run", images.Config(data_dir="half"))
    assert lintra_says("generate", "--model", "run", "--samples", "1")[0] == 0
    code, _, err = lintra_says("generate", "--model", "run", "--samples", "1", "--complete", "1")
    assert code == 2
    assert "half" in err


@pytest.mark.parametrize("out", ["file/a.png", "file/b/c.png", "file/b/c/d.png"])
def test_a_place_that_cannot_be_written_is_told_before_drawing(lintra_says, folder, tmp_path, out):
    folder("run", digits.Config())
    (tmp_path / "file").touch()
    code, told, err = lintra_says("generate", "--model", "run", "--samples", "1", "--out", out)
    assert (code, told) == (2, "")
    assert err == f"lintra: {tmp_path / out} cannot be written: above it is a file, not a folder\n"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--samples", "-1"], "samples must be at least 0, got -1"),
        (["--fraction", "2"], "fraction must lie between 0 and 1, both excluded, got 2.0"),
        (
            ["--complete", "0", "--completions", "5"],
            "completions is for completed images, and complete is 0",
        ),
        (
            ["--complete", "0", "--fraction", "0.2"],
            "fraction is for completed images, and complete is 0",
        ),
        (["--out", "folder.png"], "out must be a file, got the folder folder.png"),
    ],
)
def test_what_is_wrong_is_said_first(lintra_says, tmp_path, monkeypatch, wrong, message):
    """The message names the argument alone, before a model is read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    code, out, err = lintra_says("generate", "--model", "nowhere", *wrong)
    assert (code, out) == (2, "")
    assert err == f"lintra: {message} (see lintra generate --help)\n"


def test_what_is_written_does_not_steer_a_terminal(monkeypatch):
    """A barely trained model writes any bytes, and some of them clear a screen or change its letters."""
    text = "a\x1b[2Jb\x0ec\tis\r\nd\x9be\x7f é\n"
    assert generate_text.shown(text) == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert generate_text.shown(text) == "a�[2Jb�c\tis\nd�e� é\n"
    assert "".join(map(generate_text.shown, "is\r\nd")) == "is\nd"  # as bytes come in a stream


def test_an_image_to_complete_is_not_written_over(lintra_says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given, out in (("x.png", "x.png"), ("x-completions.png", "x.png"), ("samples.png", None)):
        (tmp_path / given).write_bytes(b"mine")
        code, _, err = lintra_says("generate", "--complete", given, *(() if out is None else ("--out", out)))
        assert (code, "out would replace an image to complete" in err) == (2, True)
        assert (tmp_path / given).read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("weights", "engine", "other"), [("float16", "pytorch", "runtime"), ("bfloat16", "runtime", "pytorch")]
)
def test_weights_of_the_other_engine_are_refused_with_its_name(lintra_says, weights, engine, other):
    code, _, err = lintra_says("generate", "--weights", weights, "--engine", engine)
    assert code == 2
    assert f"weights {weights} are for --engine {other}, got engine='{engine}'" in err
