"""Processes that train together: they follow the settings of the first, and stop if they differ."""

import dataclasses
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lintra
from lintra import checkpoint
from lintra.agreement import RanksDiffer, check_alike
from lintra.attention import linear
from lintra.tasks import digits
from lintra.train import Config, Run, fit, rendezvous
from lintra.train.consistency import digest_of_folder
from tests.distributed.conftest import free_port

SMALL = {"steps": 2, "batch": 4, "precision": "32", "lr": 3e-3, "strategy": "ddp", "timeout": 50.0}


def trained(folder: str, port: int, changes: list[dict[str, Any]]) -> tuple[str, Any]:
    """Begin and train a run like a process of torchrun, with changes of settings for each rank, and of
    "folder", "task", "version" and "resume" -> the error raised, and the precision of the run."""
    rank = dist.get_rank()
    change = dict(changes[rank])
    place = Path(change.pop("folder", folder))
    variables = {"TORCHELASTIC_RUN_ID": "test", "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    variables |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    variables |= {"CUDA_VISIBLE_DEVICES": ""}
    before, version, shared = dict(os.environ), lintra.__version__, rendezvous.SHARED
    os.environ.update(variables)
    rendezvous._store.cache_clear()
    rendezvous.SHARED = 1.0
    lintra.__version__ = change.pop("version", version)
    try:
        task = digits.Config(**change.pop("task", {}))
        model = task.build().model(linear.Config())
        model = dataclasses.replace(model, layers=1, heads=2, width=16, dropout=0.0)
        if change.pop("resume", False):
            run = Run.read(place).changed(**change)
        else:
            run = Run.create(place, task=task, model=model, train=Config(**SMALL | change))
        fit(run, verbosity="result")
        return "", Run.read(place).train.precision
    except (ValueError, ConnectionError) as error:
        return f"{type(error).__name__}: {error}", None
    finally:
        lintra.__version__, rendezvous.SHARED = version, shared
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.slow
def test_two_ranks_train_as_one_process(two_ranks, tmp_path, one_thread):
    """With a precision that the first one chooses, and resumed; in float32 up to the order of sums."""
    folder = str(tmp_path / "two")
    found = two_ranks.call(trained, folder, free_port(), [{"precision": "auto"}] * 2)
    assert [error for error, _ in found] == ["", ""]
    assert found[0][1] in ("32", "bf16")
    run = Run.read(folder)
    assert [x.name for x in run.checkpoints()] == ["step-00000002"]
    assert two_ranks.call(trained, folder, free_port(), [{"resume": True, "steps": 3}] * 2)[1][0] == ""
    one = Run.create(tmp_path / "one", task=run.task, model=run.model, train=Run.read(folder).train)
    fit(one, verbosity="result")
    ours, theirs = (checkpoint.load(x).state_dict() for x in (one.folder, folder))
    exact = found[0][1] == "32"
    for name, x in theirs.items():
        torch.testing.assert_close(x, ours[name], rtol=0, atol=1e-5 if exact else 1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 1e-2, "seed": 3}, r"on rank 1 train.lr is 0.01, not 0.003, train.seed is 3, not 0$"),
        ({"version": "0.0"}, r"on rank 1 lintra is '0.0', not "),
    ],
)
def test_ranks_that_differ_stop_together(two_ranks, tmp_path, change, message):
    found = two_ranks.call(trained, str(tmp_path / "run"), free_port(), [{}, change])
    for error, _ in found:
        assert error.startswith(
            "RanksDiffer: what a run is trained with must be the same on all ranks, but on [1] "
        )
        assert re.search(message, error)
    assert Run.read(tmp_path / "run").checkpoints() == []


def test_a_checkpoint_of_another_folder_is_noticed(two_ranks, tmp_path):
    """Each rank has its own copy of the run, as on nodes that share nothing, and one of them has other
    weights."""
    for name in ("a", "b"):
        found = two_ranks.call(trained, str(tmp_path / name), free_port(), [{"seed": len(name)}] * 2)
        assert found[0][0] == found[1][0] == ""
    run = Run.read(tmp_path / "b")
    file = run.checkpoints()[0] / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    (run.folder / "run.json").write_bytes((tmp_path / "a" / "run.json").read_bytes())
    of_each = [{"resume": True, "folder": str(tmp_path / name)} for name in ("a", "b")]
    for error, _ in two_ranks.call(trained, "", free_port(), of_each):
        assert re.search(r"on rank 1 checkpoint is '\w+', not '\w+'$", error)


def test_a_folder_that_nodes_do_not_share_is_refused(two_ranks, tmp_path):
    """The second rank waits for the files of the first, which it cannot see; the first then loses it."""
    of_each = [{"folder": str(tmp_path / name)} for name in ("a", "b")]
    found = two_ranks.call(refused_alone, free_port(), of_each)
    assert re.search("must be on a file system that all nodes share$", found[1][0])


def refused_alone(port: int, changes: list[dict[str, Any]]) -> tuple[str, Any]:
    """Like `trained`, but the first rank only announces that it has begun."""
    if dist.get_rank() == 1:
        return trained("", port, changes)
    import lintra.train.loop as loop

    def stop(run: Run, start: Path | None) -> None:
        rendezvous.announce_run(run, start)
        raise ValueError("the other one is not here")

    loop.announce_run, said = stop, loop.announce_run
    try:
        return trained("", port, changes)
    finally:
        loop.announce_run = said


def test_one_that_does_not_come_is_waited_for_no_longer_than_the_timeout(two_ranks, tmp_path):
    found = two_ranks.call(first_alone, str(tmp_path / "run"), free_port())
    assert found[0] == (
        f"LostProcess: {tmp_path}/run is not trained: of the processes to train it one has ended, or has not "
        "come within 1 seconds (--timeout)"
    )


def test_a_port_that_is_taken_is_named(two_ranks):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = two_ranks.call(first_listens, port)[0]
    assert error.startswith(f"Error: the first process cannot listen at 127.0.0.1:{port} (MASTER_ADDR, ")


def first_listens(port: int) -> str:
    """The error of the first of two processes that are started on two nodes."""
    if dist.get_rank():
        return ""
    rendezvous._store.cache_clear()
    before = dict(os.environ)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        rendezvous._store(0, 2, 5.0)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.clear()
        os.environ.update(before)
    return ""


def first_alone(folder: str, port: int) -> str:
    return trained(folder, port, [{"timeout": 1.0}])[0] if dist.get_rank() == 0 else ""


def differing(own: list[dict[str, Any]]) -> str:
    try:
        check_alike("it", own[dist.get_rank()])
    except RanksDiffer as error:
        return str(error)
    return ""


def test_differences_are_named(two_ranks):
    assert two_ranks.call(differing, [{"a": 1, "b": [2]}, {"b": [2], "a": 1}]) == ["", ""]
    few, many = {"a": 1}, {"b": 2, "c": 3, "d": 4}
    for said in two_ranks.call(differing, [few, many]):
        assert said.endswith("on rank 1 a is None, not 1, b is 2, not None, c is 3, not None, and 1 more")


def test_a_digest_is_of_every_part(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    file, found = tmp_path / "a" / "b" / "x.safetensors", set()
    for place in (0, 1_000_010, 2_999_999):
        content = bytearray(3_000_000)
        content[place] = 1
        file.write_bytes(content)
        found.add(digest_of_folder(tmp_path / "a"))
    file.write_bytes(bytes(3_000_001))
    found.add(digest_of_folder(tmp_path / "a"))
    assert len(found) == 4
    file.write_bytes(content)
    assert digest_of_folder(tmp_path / "a") in found
