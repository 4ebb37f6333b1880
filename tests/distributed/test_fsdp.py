"""A model sharded over processes learns as in one process; its checkpoints suit any number of them."""

import contextlib
import copy as copying
import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader as Reader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter as Writer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from lintra import attention, checkpoint, train
from lintra.attention import bigbird, cosformer, delta, linear, linformer, longformer, performer
from lintra.io.shards import describe, read_whole
from lintra.models import bilstm, decoder, encoder, forecaster, seq2seq
from lintra.tasks import copy
from lintra.train import callbacks
from lintra.train.learner import Learner
from lintra.train.muon import Muon
from lintra.train.sharding import full_tensor, shard
from tests.distributed.conftest import free_port

TIME, N = 12, 11
SMALL = {
    "bigbird": bigbird.Config(block=4),
    "cosformer": cosformer.Config(max_length=TIME),
    "linformer": linformer.Config(max_length=TIME),
    "longformer": longformer.Config(window=4),
}
SIZES = {"layers": 2, "heads": 2, "width": 12}


def networks():
    """A network of each mechanism, by name; and networks that use weights outside their blocks."""
    for name in attention.names():
        config, causal = (
            SMALL.get(name) or attention.load(name).Config(),
            attention.mechanism(name).can.causal,
        )
        kind = decoder.Config if causal else encoder.Config
        yield name, kind(vocabulary=N, attention=config, **({} if causal else {"outputs": N}), **SIZES)
    yield "tied", decoder.Config(vocabulary=N, tie_embeddings=True, context=(1, 3), **SIZES)
    yield "odd", decoder.Config(vocabulary=N, layers=1, heads=3, width=15, position="none")
    yield (
        "recomputed",
        decoder.Config(vocabulary=N, attention=delta.Config(), checkpoint_blocks=True, **SIZES),
    )
    reads = encoder.Config(vocabulary=N, outputs=None, pool=None, **SIZES)
    yield "forecaster", forecaster.Config(**SIZES)
    yield "bilstm", bilstm.Config(vocabulary=N, width=8)  # it has no blocks
    yield "seq2seq", seq2seq.Config(vocabulary=N, encoder=reads, **SIZES)


def loss(model, config, tokens):
    """The mean over samples of equal length: the mean over ranks is that of all samples."""
    if isinstance(config, forecaster.Config):
        return model(tokens.double()).params.square().mean()
    if isinstance(config, bilstm.Config):
        return model(tokens).square().mean()
    if isinstance(config, seq2seq.Config):
        params = model(model.shift(tokens), model.encode_memory(tokens.flip(1)))
    elif isinstance(config, decoder.Config):
        params = model(model.shift(tokens))
    else:
        params = model(tokens)
    return torch.nn.functional.cross_entropy(
        params.movedim(-1, 1), tokens if params.dim() == 3 else tokens[:, 0]
    )


def gradients(model):
    return {name: None if x.grad is None else full_tensor(x.grad) for name, x in model.named_parameters()}


def worst(dtype):
    """On a rank: the largest deviation of DDP and FSDP2 from one process, by network."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    tokens = torch.randint(0, N, (2 * world, TIME), generator=torch.Generator().manual_seed(1))
    own = tokens[2 * rank : 2 * rank + 2]
    found = {}
    for name, config in networks():
        torch.manual_seed(0)
        model = config.build().to(dtype)
        expected = loss(model, config, tokens)
        expected.backward()
        wanted = gradients(model)
        model.zero_grad()
        shared = shard(copying.deepcopy(model), mesh)
        first, second = loss(shared, config, own[:1]), loss(shared, config, own[1:])  # accumulated
        (first / 2).backward()
        (second / 2).backward()
        mean = torch.stack([first, second]).mean().detach()
        dist.all_reduce(mean)
        off = [mean / world - expected.detach(), *differences(gradients(shared), wanted)]
        if not isinstance(config, seq2seq.Config):  # its memory is made outside forward
            replicated = DistributedDataParallel(model, find_unused_parameters=True)
            loss(Shifted(replicated, model), config, own).backward()
            off += differences(gradients(model), wanted)
        found[name] = max(float(x.abs().max()) for x in off if x.numel())
    return found


class Shifted:
    """A model called through the wrapper around it, with a shift of its own."""

    def __init__(self, outside, inside):
        self.outside, self.shift = outside, getattr(inside, "shift", None)

    def __call__(self, *args):
        return self.outside(*args)


def differences(ours, theirs):
    assert ours.keys() == theirs.keys()
    zero = [0 * next(x for x in theirs.values() if x is not None)]
    for name in ours:
        a, b = ours[name], theirs[name]
        if a is not None or b is not None:  # where the loss does not depend on it, either may be missing
            zero.append((0 if a is None else a) - (0 if b is None else b))
    return zero


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float64, 1e-12), pytest.param(torch.float32, 1e-6, marks=pytest.mark.slow)]
)
def test_gradients_are_those_of_one_process(two_ranks, dtype, most):
    for found in two_ranks.call(worst, dtype):
        assert set(attention.names()) < found.keys()
        assert {name: x for name, x in found.items() if not x <= most} == {}


@pytest.mark.slow
def test_gradients_of_four(four_ranks):
    for found in four_ranks.call(worst, torch.float64):
        assert {name: x for name, x in found.items() if not x <= 1e-12} == {}


def muon_steps():
    """On a rank: matrices after three steps, whole and sharded, with sizes that do not divide evenly."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.ParameterDict({str(i): torch.ones(5 + i // 3, 4) for i in range(5)})
    generator = torch.Generator().manual_seed(0)
    for x in model.parameters():
        x.data.copy_(torch.randn(x.shape, generator=generator))
    shared = fully_shard(copying.deepcopy(model), mesh=mesh)
    for parameters in (list(model.parameters()), list(shared.parameters())):
        optimizer, generator = Muon(parameters, lr=0.1, weight_decay=0.1), torch.Generator().manual_seed(1)
        for _ in range(3):
            for x in parameters:
                gradient = torch.randn(x.shape, generator=generator)
                x.grad = gradient
                if isinstance(x, DTensor):
                    x.grad = distribute_tensor(gradient, mesh, x.placements)
            optimizer.step()
    return [
        (x.detach(), full_tensor(y).detach())
        for x, y in zip(model.parameters(), shared.parameters(), strict=True)
    ]


def test_muon_of_shared_matrices(two_ranks):
    generator = torch.Generator().manual_seed(0)
    for ours, theirs in two_ranks.call(muon_steps)[0]:
        before = torch.randn(ours.shape, generator=generator)  # as the ranks begin
        assert_close(theirs, ours, rtol=0, atol=1e-6)
        assert not torch.equal(ours, before)


# Whole runs: the ranks train as if a launcher had started them.


@functools.lru_cache(maxsize=1)
def port():
    """Return a free port, the same on all ranks."""
    found = [free_port() if dist.get_rank() == 0 else 0]
    dist.broadcast_object_list(found)
    return str(found[0])


@contextlib.contextmanager
def launched(dtype):
    """The environment that torchrun gives a process, in which weights have this dtype."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    names |= {
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "x",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port(),
    }
    os.environ.update(names)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        for name in names:
            del os.environ[name]


def fit(folder, settings, dtype=torch.float64):
    """On a rank: trains the run in a folder, with other settings from now on."""
    with launched(dtype):
        train.fit(train.Run.read(folder).changed(**settings), verbosity="result")


def fit_alone(run, **settings):
    torch.set_default_dtype(torch.float64)
    try:
        train.fit(run.changed(**settings), verbosity="result")
    finally:
        torch.set_default_dtype(torch.float32)


def new_run(folder, **settings):
    """A run of the copy task: the parts of a batch hold different numbers of predictions."""
    task = copy.Config(length=8, train_samples=40, validate_samples=12)
    small = {"steps": 8, "batch": 8, "precision": "32", "save_every": 100, "validate_every": 2, "clip": 0.5}
    model = decoder.Config(
        vocabulary=task.build().model(linear.Config()).vocabulary,
        attention=settings.pop("attention", performer.Config(features=8, redraw_every=3)),
        layers=2,
        heads=2,
        width=12,
        tie_embeddings=True,
    )
    return train.Run.create(folder, task=task, model=model, train=train.Config(**small | settings))


@pytest.fixture(autouse=True)
def alone(one_thread):
    """Both sides add in the same order."""


def assert_same(run, other, most=1e-12):
    """Assert that model, optimizer and validation losses are the same, up to rounding."""
    ours, theirs = run.checkpoints()[-1], other.checkpoints()[-1]
    assert ours.name == theirs.name
    for part in ("model", "training"):
        a, b = read_whole(ours, part), read_whole(theirs, part)
        assert a.keys() == b.keys()
        for name in a:
            assert_close(a[name], b[name], rtol=0, atol=most, msg=f"{name} {a[name]} {b[name]}")
    a, b = (train.curves(x.folder)["validate_loss"] for x in (run, other))
    assert a.keys() == b.keys()
    for step in a:
        assert a[step] == pytest.approx(b[step], abs=1e-9)  # up to the digits that are written


FSDP, DDP = ({"devices": 2, "strategy": name} for name in ("fsdp", "ddp"))
ONE = {"devices": 1, "strategy": "auto"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "muon", "ema": 0.9, "weight_decay": 0.1},
        {"optimizer": "adamw", "accumulate": 2, "attention": delta.Config()},
        {"accumulate": 3, "batch": 8, "checkpoint_blocks": True, "attention": linear.Config()},
    ],
    ids=lambda x: x.get("optimizer", "recomputed"),
)
def test_from_any_strategy_to_any_other(two_ranks, tmp_path, settings):
    """Stopped between validations, and resumed by whatever number of processes there then are."""
    whole, parts = new_run(tmp_path / "whole", **settings), new_run(tmp_path / "parts", **settings)
    fit_alone(whole, accumulate=1)
    two_ranks.call(fit, parts.folder, FSDP | {"steps": 2})
    assert sorted(describe(parts.checkpoints()[-1], "model")) == sorted(parts.model.build().state_dict())
    fit_alone(parts, **ONE, steps=4)
    two_ranks.call(fit, parts.folder, FSDP | {"steps": 6})
    two_ranks.call(fit, parts.folder, DDP | {"steps": 8})
    assert_same(whole, parts)


@pytest.mark.slow
def test_from_four_to_two_to_one(four_ranks, two_ranks, tmp_path):
    settings = {"optimizer": "muon", "ema": 0.9}
    whole, parts = new_run(tmp_path / "whole", **settings), new_run(tmp_path / "parts", **settings)
    fit_alone(whole)
    four_ranks.call(fit, parts.folder, {"devices": 4, "strategy": "fsdp", "steps": 2})
    two_ranks.call(fit, parts.folder, FSDP | {"steps": 4})
    four_ranks.call(fit, parts.folder, {"devices": 4, "strategy": "ddp", "steps": 6})
    fit_alone(parts, **ONE, steps=8)
    assert_same(whole, parts)


@pytest.fixture
def sharded(two_ranks, tmp_path):
    run = new_run(tmp_path / "run", attention=linear.Config())
    two_ranks.call(fit, run.folder, FSDP | {"steps": 2, "save_every": 1})
    return run


def test_a_sharded_checkpoint_is_read_as_any_other(sharded, tmp_path):
    step = sharded.checkpoints()[-1]
    assert {x.suffix for x in step.iterdir()} == {".json", ".safetensors"}  # nothing is pickled
    assert [x.name for x in sharded.checkpoints()] == ["step-00000001", "step-00000002"]
    model = checkpoint.load(sharded.folder)
    checkpoint.save(model, tmp_path / "one")
    again = checkpoint.load(tmp_path / "one").state_dict()
    for name, x in read_whole(step, "model").items():
        assert torch.equal(again[name], x)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    assert model(tokens).isfinite().all()


def cut(step):
    shard = sorted(step.glob("shard-00002-*"))[0]
    shard.write_bytes(shard.read_bytes()[:-8])
    return shard


def remove(step):
    shard = sorted(step.glob("shard-00001-*"))[1]
    shard.unlink()
    return shard


def other_index(step):
    (step / "shards.json").write_text('{"format": 2}')
    return step / "shards.json"


def other_version(step):
    file = step / "shards.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 9}))
    return file


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "a shard of this checkpoint, cannot be read: it has .* bytes and was written with"),
        (remove, "a shard of this checkpoint, cannot be read: No such file"),
        (other_index, "does not say which shards and tensors there are"),
        (other_version, "has format 9, this lintra reads format 2"),
    ],
)
def test_a_damaged_shard_is_named(two_ranks, sharded, damage, message):
    file = damage(sharded.checkpoints()[-1])
    for read in (
        lambda: two_ranks.call(fit, sharded.folder, FSDP | {"steps": 3}),
        lambda: fit_alone(sharded, **ONE, steps=3),
        lambda: checkpoint.load(sharded.folder),
    ):
        with pytest.raises(checkpoint.Error, match=message) as found:
            read()
        assert str(file) in str(found.value)
        assert "\n" not in str(found.value)


def test_a_checkpoint_of_another_model(two_ranks, sharded):
    file = sharded.folder / "run.json"
    content = json.loads(file.read_text())
    content["model"]["width"] = 16
    file.write_text(json.dumps(content))
    with pytest.raises(checkpoint.Error, match=r"must be torch.* \[\d+, 16\], got torch.*, 12\]"):
        two_ranks.call(fit, sharded.folder, FSDP | {"steps": 3})


def fit_where_a_write_fails(folder, settings, failing):
    """On a rank: trains while the second rank's disk is full at some step."""
    write = Writer.write_data

    def full(writer, plan, planner):
        if f"{failing:08d}" in str(writer.path) and dist.get_rank() == 1:
            (Path(writer.path) / "half").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return write(writer, plan, planner)

    Writer.write_data = full
    try:
        fit(folder, settings)
    finally:
        Writer.write_data = write


@pytest.mark.parametrize("failing", [2, 4])
def test_a_full_disk_leaves_the_checkpoint_before(two_ranks, tmp_path, failing):
    """In the middle of training and at its end."""
    whole, run = new_run(tmp_path / "whole", steps=4), new_run(tmp_path / "run", steps=4)
    settings = FSDP | {"save_every": 1}
    with pytest.raises(checkpoint.Error, match=rf"step-0000000{failing} cannot be written: .*No space left"):
        two_ranks.call(fit_where_a_write_fails, run.folder, settings, failing)
    assert [x.name for x in run.checkpoints()][-1] == f"step-0000000{failing - 1}"
    assert list(run.folder.glob(".step*")) == []
    assert checkpoint.load(run.folder).config == run.model
    two_ranks.call(fit, run.folder, settings)
    fit_alone(whole, save_every=1)
    assert_same(whole, run)


def test_what_a_killed_write_left_is_removed(two_ranks, sharded):
    left = sharded.folder / ".step-00000009.shards"
    (left / "step-00000009").mkdir(parents=True)
    assert [x.name for x in sharded.checkpoints()][-1] == "step-00000002"
    two_ranks.call(fit, sharded.folder, FSDP | {"steps": 3})
    assert not left.exists()


def fit_until_a_signal(folder, settings):
    """On a rank: trains until the second rank gets a signal in its third step -> its message."""
    step = Learner.training_step

    def interrupted(learner, batch, batch_idx):
        if learner.trainer.global_step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(learner, batch, batch_idx)

    Learner.training_step = interrupted
    try:
        with pytest.raises(callbacks.Interrupted) as found:
            fit(folder, settings)
    finally:
        Learner.training_step = step
    return str(found.value)


def test_a_signal_saves_and_stops(two_ranks, tmp_path):
    whole, run = (new_run(tmp_path / name, steps=6) for name in ("whole", "run"))
    for said in two_ranks.call(fit_until_a_signal, run.folder, FSDP):
        assert "stopped by SIGTERM after step 3" in said
    assert [x.name for x in run.checkpoints()] == ["step-00000003"]
    two_ranks.call(fit, run.folder, FSDP)
    fit_alone(whole)
    assert_same(whole, run)


def test_autocast_is_that_of_whole_weights(two_ranks, tmp_path):
    """Shards and sums of gradients are float32, and blocks compute in bfloat16, as with DDP.

    Sums of float32 in another order may round to a neighbouring bfloat16, 2^-8 apart, in a step of 1e-3."""
    runs = [new_run(tmp_path / name, steps=3, precision="bf16") for name in ("ddp", "fsdp")]
    for run, settings in zip(runs, (DDP, FSDP), strict=True):
        two_ranks.call(fit, run.folder, settings, torch.float32)
    ours, theirs = (read_whole(run.checkpoints()[-1], "model") for run in runs)
    for name, x in ours.items():
        assert theirs[name].dtype == x.dtype == torch.float32
        assert_close(theirs[name], x, rtol=0, atol=1e-4)


def first_weights(folder, settings):
    """On a rank: the weights at the start of a run, gathered from all ranks."""
    with launched(torch.float64):
        found = {}

        def stop(learner, batch, batch_idx):
            state = learner.state_dict()
            found.update({name: full_tensor(x).clone() for name, x in state.items()})
            raise InterruptedError

        step, Learner.training_step = Learner.training_step, stop
        try:
            with pytest.raises(InterruptedError):
                train.fit(train.Run.read(folder).changed(**settings), verbosity="result")
        finally:
            Learner.training_step = step
        return found


def test_a_run_starts_from_a_trained_model(two_ranks, sharded, tmp_path):
    run = new_run(tmp_path / "next", attention=linear.Config(), start_from=str(sharded.folder))
    wanted = read_whole(sharded.checkpoints()[-1], "model")
    for found in two_ranks.call(first_weights, run.folder, FSDP):
        for name, x in wanted.items():
            assert torch.equal(found[f"model.{name}"], x)


def test_two_checkpoints_are_kept(two_ranks, tmp_path):
    run = new_run(tmp_path / "run", steps=5)
    two_ranks.call(fit, run.folder, FSDP | {"save_every": 1})
    assert len(run.checkpoints()) == callbacks.KEPT
    assert list(run.folder.glob(".*")) == []


@pytest.mark.slow
def test_a_checkpoint_of_0_1(two_ranks, tmp_path):
    """Its tensors have other names: each rank reads all of it and keeps its part."""
    old = Path(__file__).parents[1] / "data" / "v0.1" / "run-plateau"
    for name in ("one", "two"):
        shutil.copytree(old, tmp_path / name)
        file = tmp_path / name / "run.json"
        file.write_text(file.read_text().replace('"dropout": 0.2', '"dropout": 0.0'))
    one, two = (train.Run.read(tmp_path / name) for name in ("one", "two"))
    train.fit(one.changed(steps=6), verbosity="result")
    two_ranks.call(fit, two.folder, FSDP | {"steps": 6}, torch.float32)
    ours, theirs = (read_whole(run.checkpoints()[-1], "model") for run in (one, two))
    for name, x in ours.items():
        assert_close(theirs[name], x, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_killed_at_a_random_moment(tmp_path):
    """Both processes at once, while they write nearly all the time: the files are whole, and resumed from."""
    settings = {"steps": 200, "save_every": 1, "validate_every": 100}
    run = new_run(tmp_path / "run", **settings)
    command = [sys.executable, "-m", "lintra.cli", "train", "--resume", str(run.folder)]
    for _ in range(2):
        before = run.checkpoints()[-1:]
        process = subprocess.Popen(
            [*command, "--devices", "2", "--strategy", "fsdp"],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until = time.monotonic() + 60
        while time.monotonic() < until and process.poll() is None and run.checkpoints()[-1:] == before:
            time.sleep(0.05)
        delay = int.from_bytes(os.urandom(1), "big") / 1024
        print(f"killed {delay} s after a checkpoint")  # shown if it fails
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=60)
    done = run.checkpoints()
    assert 0 < int(done[-1].name.removeprefix("step-")) < 200  # it was killed before the end
    for step in done:
        checkpoint.load(step)
    torch.set_default_dtype(torch.float32)
    train.fit(run.changed(**ONE, steps=200, save_every=100), verbosity="result")
    whole = new_run(tmp_path / "whole", **settings | {"save_every": 100})
    train.fit(whole, verbosity="result")
    ours, theirs = (read_whole(x.checkpoints()[-1], "model") for x in (whole, run))
    for name, x in ours.items():
        assert_close(theirs[name], x, rtol=0, atol=1e-3)  # float32 over 200 steps, in another order


def numbers_read(folder, settings):
    """On a rank: how many numbers of a checkpoint it reads when it resumes a run."""
    read, count = Reader._process_read_request, []

    def counted(reader, file, request, planner):
        count.append(math.prod(request.lengths))
        return read(reader, file, request, planner)

    Reader._process_read_request = counted
    try:
        fit(folder, settings)
    finally:
        Reader._process_read_request = read
    return sum(count)


@pytest.mark.parametrize("form", ["shards", "one file"])
def test_each_process_reads_its_part(two_ranks, tmp_path, form):
    """Half of all numbers, or a row more of an axis of odd length; and the tensors that are not sharded."""
    run = new_run(tmp_path / "run", steps=1, ema=0.9, attention=linear.Config())
    if form == "shards":
        two_ranks.call(fit, run.folder, FSDP)
    else:
        fit_alone(run)
    held = [
        x.numel() for part in ("model", "training") for x in describe(run.checkpoints()[-1], part).values()
    ]
    for count in two_ranks.call(numbers_read, run.folder, FSDP | {"steps": 2}):
        assert 0.4 * sum(held) < count < 0.6 * sum(held)
