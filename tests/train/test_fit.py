"""A run stopped anywhere and resumed ends like one that was not; a failure keeps the last checkpoint."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from lintra import checkpoint, train
from lintra.cli import progress
from lintra.io import files, tensors
from lintra.io.files import Error, read_json
from lintra.tasks import Samples, copy, digits, pathfinder, text
from lintra.tasks.datasets.documents import Document
from lintra.tasks.datasets.shard_writer import write_shards
from lintra.train import learner
from lintra.train.batches import seed_of
from lintra.train.callbacks import Interrupted
from lintra.train.console import LastingConsole, console
from lintra.train.learner import Diverged, Learner
from lintra.train.schedule import LearningRateSchedule
from tests.train.conftest import assert_same_weights, folders, weights


@pytest.mark.parametrize("stop", [1, 5, 6, 7])
def test_resumed_at_any_step_is_the_same(new_run, stop):
    """Before, at and after a checkpoint and a validation."""
    whole, halved = new_run("whole"), new_run("halved", steps=stop)
    train.fit(whole)
    train.fit(halved)
    train.fit(train.Run.read(halved.folder).changed(steps=12))
    assert_same_weights(whole, halved)


def test_resumed_across_an_epoch(new_run):
    """1,500 digits are 6 batches of 250: step 7 begins the second epoch, whose order must go on."""
    settings = {"batch": 250, "steps": 10, "save_every": 7}
    whole, halved = new_run("whole", **settings), new_run("halved", **settings | {"steps": 5})
    train.fit(whole)
    train.fit(halved)
    train.fit(halved.changed(steps=10))
    assert_same_weights(whole, halved)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [4, 5, 6, 7])
def test_a_plateau_is_resumed_exactly(new_run, stop, monkeypatch):
    """Stopped before, at and after a validation: no validation counts twice, and none is added to those of
    the whole run. With a loss that never falls, the rate is halved at every second one."""
    monkeypatch.setattr(
        LearningRateSchedule, "update", lambda rate, loss, hear=LearningRateSchedule.update: hear(rate, 1.0)
    )
    settings = {"schedule": "plateau", "patience": 1, "validate_every": 2, "save_every": 2}
    whole, halved = new_run("whole", **settings), new_run("halved", **settings, max_minutes=None)
    train.fit(whole)
    train.fit(halved.changed(steps=stop))
    train.fit(train.Run.read(halved.folder).changed(steps=12))
    assert_same_weights(whole, halved)
    assert read_json(whole.checkpoints()[-1] / "training.json")["checkpoint"]["callbacks"][
        "LearningRateSchedule"
    ] == {
        "factor": 2**-5,  # the first of six validations is the lowest
        "lowest": 1.0,
        "waited": 0,
        "seen": 12,
    }


def test_a_signal_at_a_validation_waits_for_it(new_run, monkeypatch):
    """Otherwise the validation would count in the whole run only."""
    settings = {"schedule": "plateau", "patience": 1, "validate_every": 2, "save_every": 100}
    whole, run = new_run("whole", **settings), new_run("run", **settings)
    monkeypatch.setattr(
        LearningRateSchedule, "update", lambda rate, loss, hear=LearningRateSchedule.update: hear(rate, 1.0)
    )
    train.fit(whole)
    step = Learner.training_step

    def interrupted(learner, batch, batch_idx):
        if learner.trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(learner, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "training_step", interrupted)
        with pytest.raises(Interrupted):
            train.fit(run)
    assert folders(run) == ["step-00000004"]
    train.fit(run)
    assert_same_weights(whole, run)


class Uneven(Samples):
    """Sequences {"tokens": [1 + i mod 7]} of one symbol each; a batch is as long as its longest."""

    lengths = tuple(1 + i % 7 for i in range(23))

    def __len__(self):
        return len(self.lengths)

    def __getitems__(self, indices):
        rows = [torch.full((self.lengths[i],), i % 3) for i in indices]
        counted = [torch.ones(len(row), dtype=torch.bool) for row in rows]
        return {
            "tokens": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
            "counted": torch.nn.utils.rnn.pad_sequence(counted, batch_first=True),
        }


def test_batches_by_tokens(new_run, monkeypatch):
    """A task that asks for it gets batches of at most so many tokens, validates on all samples and is resumed
    exactly; a fresh model is prepared, a resumed one is not."""
    samples, seen, prepared = Uneven(), [], []
    for name in ("train", "validate"):
        monkeypatch.setattr(digits.Digits, name, property(lambda task: samples))
    monkeypatch.setattr(digits.Digits, "batch_tokens", 20)
    monkeypatch.setattr(digits.Digits, "prepare", lambda task, model: prepared.append(model))
    per_sample, loss = digits.Digits.per_sample, digits.Digits.loss
    monkeypatch.setattr(
        digits.Digits, "loss", lambda *args: seen.append(args[2]["tokens"].shape) or loss(*args)
    )
    scored = []
    monkeypatch.setattr(
        digits.Digits, "per_sample", lambda *args: scored.append(len(args[2]["tokens"])) or per_sample(*args)
    )
    whole, halved = new_run("whole"), new_run("halved", steps=5)
    train.fit(whole)
    assert all(samples * longest <= 20 for samples, longest in seen)
    assert sum(scored) == 2 * len(samples)  # in each of two validations
    train.fit(halved)
    train.fit(halved.changed(steps=12))
    assert_same_weights(whole, halved)
    assert len(prepared) == 2


@pytest.mark.parametrize(
    ("task", "samples"), [(copy.Config(length=8, validate_samples=40), 40), (digits.Config(), 32)]
)
def test_a_validation_looks_at_as_many_samples_as_its_task_says(new_run, monkeypatch, task, samples):
    """If it sets no number, validation uses the first batches: there may be many."""
    seen = []
    kind = type(task.build())
    score = kind.score
    monkeypatch.setattr(kind, "score", lambda *args: seen.append(len(args[2]["tokens"])) or score(*args))
    train.fit(new_run(task=task, steps=1, batch=2))
    assert sum(seen) == samples


@pytest.mark.parametrize(("part", "word"), [("train", "train"), ("validate", "validate")])
def test_no_samples_are_refused(new_run, monkeypatch, part, word):
    """Checkpoints are saved after validations."""
    kind = type(digits.Config().build())
    monkeypatch.setattr(kind, part, [])
    run = new_run(task=digits.Config(), steps=1, batch=2, precision="auto")
    with pytest.raises(Error, match=f"there must be at least 1 sample to {word} on, got 0"):
        train.fit(run)


def test_keeps_two_checkpoints_and_reads_its_logs_as_one_curve(new_run):
    run = new_run(steps=20, save_every=5)
    (run.folder / ".step-00000003.abc").mkdir()  # left by a killed process
    (run.folder / ".run.json.abc").mkdir()
    others = [run.folder / ".run.json.swp", run.folder / ".step-by-step"]  # an editor's, a user's
    others[0].touch()
    others[1].mkdir()
    train.fit(run.changed(steps=10))
    assert folders(run) == [".run.json.swp", ".step-by-step", "step-00000005", "step-00000010"]
    others[0].unlink()
    others[1].rmdir()
    train.fit(run)
    assert folders(run) == ["step-00000015", "step-00000020"]
    curves = train.curves(run.folder)
    assert list(curves["train_loss"]) == [10, 20]
    assert list(curves["validate_loss"]) == [6, 10, 12, 18, 20]
    assert 0 < curves["minutes"][10] < curves["minutes"][20]  # of both parts together
    assert curves["validate_bits_per_dim"][20] == pytest.approx(
        curves["validate_loss"][20] / 0.6931, rel=1e-3
    )
    assert checkpoint.load(run.folder).config == run.model
    step = run.checkpoints()[0]
    assert train.Run.around(step) == train.Run.read(run.folder)
    (run.folder / "run.json").rename(run.folder.parent / "run.json")  # it is not that of a run below it
    assert train.Run.of(run.folder) is None


def test_the_checkpoint_with_the_lowest_loss_is_kept(new_run, monkeypatch, capsys):
    """Also one saved before the run was resumed."""
    losses, score = iter([3.0, 1.0, 2.0, 1.5, 4.0, 5.0]), digits.Digits.score
    monkeypatch.setattr(
        digits.Digits, "score", lambda *args: score(*args) | {"loss": torch.tensor(next(losses))}
    )
    monkeypatch.setattr(learner, "VALIDATION_BATCHES", 1)
    run = new_run(steps=6, save_every=1, validate_every=1)
    train.fit(run.changed(steps=3))
    assert folders(run) == ["step-00000002", "step-00000003"]
    assert f"lowest validation loss of those saved: {run.folder}/step-00000002" in " ".join(
        capsys.readouterr().out.split()
    )
    train.fit(run)
    assert folders(run) == ["step-00000002", "step-00000005", "step-00000006"]


def test_nothing_is_pickled(new_run):
    run = new_run(steps=2)
    train.fit(run)
    files = list(run.checkpoints()[-1].iterdir())
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            with safe_open(path, "pt") as tensors:
                assert len(list(tensors.keys())) > 0


def test_time_is_up(new_run):
    run = new_run(steps=100_000, max_minutes=1e-9)
    train.fit(run)
    assert folders(run) == ["step-00000001"]


def test_a_finished_run_stays_as_it_is(new_run, capsys):
    run = new_run(steps=3)
    train.fit(run)
    before = folders(run)
    train.fit(run)
    assert folders(run) == before
    assert "step 3" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_stops_before_the_weights_are_spoiled(new_run, monkeypatch, where):
    run = new_run(save_every=2)
    step = Learner.training_step

    def spoiled(learner, batch, batch_idx):
        loss = step(learner, batch, batch_idx)
        if learner.trainer.global_step == 4:
            bad = torch.tensor(float("nan"))
            loss = loss * bad if where == "loss" else loss + (loss - loss.detach()).sqrt()
        return loss

    monkeypatch.setattr(Learner, "training_step", spoiled)
    with pytest.raises(Diverged, match=r"at step 5\b"):
        train.fit(run)
    assert folders(run) == ["step-00000002", "step-00000004"]
    monkeypatch.setattr(Learner, "training_step", step)
    train.fit(run)
    whole = new_run("whole", save_every=2)
    train.fit(whole)
    assert_same_weights(whole, run)


def test_a_full_disk_leaves_the_checkpoint_before(new_run, monkeypatch):
    run = new_run(save_every=2)

    def full(content, file):
        if "00000004" in str(file):
            file.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        original(content, file)

    original = tensors.save_file
    monkeypatch.setattr(tensors, "save_file", full)
    with pytest.raises(checkpoint.Error, match=r"step-00000004 cannot be written.*No space left"):
        train.fit(run)
    assert folders(run) == ["step-00000002"]
    assert checkpoint.load(run.folder).config == run.model


def test_an_unwritable_folder(new_run, monkeypatch):
    run = new_run()

    def read_only(**_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(files.tempfile, "mkdtemp", read_only)
    with pytest.raises(checkpoint.Error, match="cannot be written: Read-only file system"):
        train.fit(run)


SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
SIGNALS += [(signal.SIGHUP, 129)] if hasattr(signal, "SIGHUP") else []  # a terminal is closed; not on Windows


@pytest.fixture
def hangup():
    """Gives the handler of SIGHUP back, and begins with its usual effect, also where nohup runs the tests."""
    if not hasattr(signal, "SIGHUP"):
        yield None
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield signal.SIGHUP
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize(("signum", "code"), SIGNALS)
def test_a_signal_saves_and_stops(new_run, monkeypatch, capfd, signum, code):
    whole, run = new_run("whole", save_every=100), new_run("run", save_every=100)
    train.fit(whole)
    step = Learner.training_step

    def interrupted(learner, batch, batch_idx):
        if learner.trainer.global_step == 3:
            os.kill(os.getpid(), signum)
        return step(learner, batch, batch_idx)

    handlers = [signal.getsignal(s) for s, _ in SIGNALS]
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "training_step", interrupted)
        with pytest.raises(Interrupted, match=signal.Signals(signum).name) as caught:
            train.fit(run)
    assert caught.value.exit_code == code
    assert [signal.getsignal(s) for s, _ in SIGNALS] == handlers
    assert "lintra: stopping after this step, to save it; the same signal again" in capfd.readouterr().err
    assert folders(run) == ["step-00000004"]
    train.fit(run)
    assert_same_weights(whole, run)


def test_a_run_under_nohup_outlives_its_terminal(new_run, monkeypatch, hangup):
    if hangup is None:
        pytest.skip("Windows has no SIGHUP")
    run, step = new_run(steps=3), Learner.training_step

    def hung_up(learner, batch, batch_idx):
        os.kill(os.getpid(), hangup)
        return step(learner, batch, batch_idx)

    monkeypatch.setattr(Learner, "training_step", hung_up)
    signal.signal(hangup, signal.SIG_IGN)
    train.fit(run)
    assert run.checkpoints()[-1].name == "step-00000003"


@pytest.mark.slow
def test_two_processes_are_as_good_as_one(new_run):
    """The copy task: shares of a batch hold different numbers of predictions, and must be weighted by them.

    In float32, so only up to the order of sums: 1e-5, where weights have moved by 1e-2. The first four
    steps of RAdam do not divide by the size of the gradient, which could amplify a difference.
    """
    task = copy.Config(length=24, train_samples=50)
    settings = {"task": task, "dropout": 0.0, "steps": 4, "lr": 0.1, "save_every": 100, "clip": None}
    one, two, output = by_one_and_by_two(new_run, **settings)
    assert output.count("done: step 4") == 1
    torch.manual_seed(seed_of(one.train.seed))
    before, ours, theirs = one.model.build().state_dict(), weights(one), weights(two)
    assert max(float((ours[name] - before[name]).abs().max()) for name in ours) > 1e-2
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)


TWICE = """
import dataclasses
from lintra import train
from lintra.attention import linear
from lintra.tasks import TaskConfig, digits

@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(TaskConfig):
    def build(self):
        return digits.Config().build()

runs = (("first", digits.Config(), 2), ("second", Own(), 2), ("third", digits.Config(), 1))
for name, task, devices in runs:
    settings = train.Config(steps=2, batch=4, devices=devices, timeout=60.0)
    model = task.build().model(linear.Config())
    run = train.Run.create(name, task=task, model=model, train=settings)
    train.fit(run, verbosity="result")
"""


@pytest.mark.slow
def test_a_program_trains_several_times(tmp_path):
    """The second process lives on: it may be ready for a run before the first one has begun it, such as one
    of a task of its own, and takes no part in one on a single device."""
    (tmp_path / "twice.py").write_text(TWICE)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 240}
    done = subprocess.run([sys.executable, "twice.py"], **options)
    assert done.returncode == 0, done.stderr
    for name in ("first", "second", "third"):
        assert [x.name for x in checkpoint.checkpoints(tmp_path / name)] == ["step-00000002"]


@pytest.mark.slow
def test_two_processes_learn_from_shards_as_one(new_run, tmp_path):
    """The sequences of documents are the same, up to the order of sums, as above."""
    texts = [Document(f"{i}: {'some words ' * (i % 9)}".encode(), "") for i in range(200)]
    write_shards(tmp_path / "shards", texts, None, held_out=0.2, shard_tokens=2_000)
    task = text.Config(data=str(tmp_path / "shards"), length=32, batch_tokens=8 * 32)
    settings = {"task": task, "dropout": 0.0, "steps": 4, "lr": 0.01, "save_every": 100, "clip": None}
    one, two, _ = by_one_and_by_two(new_run, **settings)
    torch.testing.assert_close(weights(two), weights(one), rtol=0, atol=1e-5)
    (ours, theirs) = (train.curves(run.folder)["validate_bits_per_byte"] for run in (one, two))
    assert theirs == pytest.approx(ours, rel=1e-4)


@pytest.mark.slow
def test_a_validation_of_fewer_batches_than_processes(new_run):
    """It ends, training continues after it, and its score is that of one process.

    Up to the order of sums, on which the weights depend too."""
    task = copy.Config(length=24, train_samples=50, validate_samples=1)
    settings = {"task": task, "dropout": 0.0, "steps": 4, "batch": 2, "validate_every": 2, "clip": None}
    one, two, _ = by_one_and_by_two(new_run, **settings)
    (ours, theirs) = (train.curves(run.folder)["validate_loss"] for run in (one, two))
    assert list(ours) == list(theirs) == [2, 4]
    for step in ours:
        assert theirs[step] == pytest.approx(ours[step], rel=1e-4)


def by_one_and_by_two(new_run, **settings) -> tuple[train.Run, train.Run, str]:
    """The same training by one process and by two that share its batches, and the output of the two."""
    one = new_run("one", **settings)
    two = new_run("two", **settings, devices=2, strategy="ddp")
    train.fit(one)
    process = start(two)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return one, two, output


def start(run: train.Run, **options) -> subprocess.Popen[str]:
    """Start the command that resumes a run, and wait until it trains."""
    command = [sys.executable, "-m", "lintra.cli", "train", "--resume", str(run.folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 1/"):
            return process
    raise AssertionError(process.communicate()[1])


@pytest.mark.slow
def test_killed_at_a_random_moment(new_run):
    whole, killed = (
        new_run(name, steps=300, save_every=3, validate_every=50) for name in ("whole", "killed")
    )
    process = start(killed)
    delay = int.from_bytes(os.urandom(1), "big") / 1024
    print(f"killed after {delay} s")  # shown if it fails
    time.sleep(delay)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    done = killed.checkpoints()
    assert not done or int(done[-1].name.removeprefix("step-")) < 300  # it was killed before the end
    train.fit(killed)
    train.fit(whole)
    assert_same_weights(whole, killed)


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_line_stopped_by_a_signal(new_run, signum, code):
    run = new_run(steps=100_000, save_every=100_000)
    process = start(run)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    name = signal.Signals(signum).name
    assert re.fullmatch(rf"lintra: stopping .*\nlintra: stopped by {name} after .* --resume .*\n", errors)
    assert len(run.checkpoints()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_processes_that_read_ahead_loses_no_run(new_run, signum, code):
    """A terminal and a batch system send it to all; here, the training process waits for the others."""
    task = pathfinder.Config(size=32)
    assert task.build().train.workers
    run = new_run(task=task, steps=100_000, save_every=100_000, batch=16)
    process = start(run, start_new_session=True)
    os.killpg(process.pid, signum)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, len(run.checkpoints())) == (code, 1), errors


@pytest.mark.slow
def test_training_goes_on_when_nobody_reads_its_lines(new_run):
    run = new_run(steps=200, save_every=1_000)
    with start(run) as process:
        process.stdout.close()
        assert process.wait(timeout=120) == 0
    assert [x.name for x in run.checkpoints()] == ["step-00000200"]


def test_the_faster_precision_is_found_once(new_run):
    run = new_run(steps=2, precision="auto")
    train.fit(run)
    found = train.Run.read(run.folder).train.precision
    assert found in ("32", "bf16")
    train.fit(train.Run.read(run.folder).changed(steps=3))
    assert train.Run.read(run.folder).train.precision == found


def test_bf16_trains(new_run):
    run = new_run(steps=3, precision="bf16")
    train.fit(run)
    assert all(tensor.dtype == torch.float32 and tensor.isfinite().all() for tensor in weights(run).values())


def test_a_run_is_trained_by_one_process_at_a_time(new_run):
    run = new_run()
    with run.locked(), pytest.raises(checkpoint.Error, match="is being trained by another process"):
        train.fit(run)


def test_what_would_block_while_a_run_is_locked_is_not_its_lock(new_run):
    with pytest.raises(BlockingIOError, match="a full pipe"), new_run().locked():
        raise BlockingIOError("a full pipe")


def test_weights_that_are_not_finite_are_not_saved(new_run, monkeypatch):
    """The last update may spoil them, and no later gradient would reveal it."""
    run = new_run(steps=1)
    monkeypatch.setattr(torch.optim.RAdam, "step", spoil)
    with pytest.raises(Diverged, match="not finite"):
        train.fit(run)
    assert run.checkpoints() == []


def spoil(optimizer, closure):
    closure()
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.fill_(torch.inf)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mapped files")
def test_a_resumed_training_holds_no_checkpoint_open(new_run):
    run = new_run(steps=10)
    train.fit(run)
    train.fit(train.Run.read(run.folder).changed(steps=20))
    mapped = Path("/proc/self/maps").read_text().splitlines()
    assert not [line for line in mapped if str(run.folder) in line and "training" in line]


def test_a_checkpoint_that_cannot_be_removed_does_not_end_training(new_run, monkeypatch):
    run = new_run(steps=15)

    def refuse(folder, **_):
        raise OSError("Directory not empty")

    monkeypatch.setattr("lintra.train.run.shutil", SimpleNamespace(rmtree=refuse))
    train.fit(run)
    assert run.checkpoints()[-1].name == "step-00000015"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_console_outlives_what_it_writes_to():
    with open("/dev/full", "w") as full:
        shown = LastingConsole(file=full)
        shown.print("one")
        shown.print("two")
        full.flush()


def test_names_are_printed_as_they_are(capsys, monkeypatch):
    """Not as emoji or styles of rich, in training and in the progress of other commands."""
    name = "u8.wav:100: [bold]:fire:"
    console().print(name)
    monkeypatch.setattr(progress, "SECONDS_PER_LINE", 0.0)
    with progress.progress(name, 2, "rows") as show:
        show(1)
    (first,), (second,) = (text.splitlines() for text in capsys.readouterr())
    assert first == name
    assert second.startswith(f"{name} 1/2 rows")
