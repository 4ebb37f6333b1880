"""Killed ranks: torchrun restarts all, and they end as if nothing had happened; without it, all end."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch.testing import assert_close

from lintra import checkpoint
from lintra.io.files import leftovers
from lintra.io.shards import read_whole
from tests.distributed.conftest import free_port

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SETTINGS = {
    "layers": 1,
    "heads": 2,
    "width": 16,
    "precision": 32,
    "batch": 12,
    "steps": 24,
    "save-every": 3,
    "validate-every": 6,
    "timeout": 60,
    "strategy": "ddp",
}
STANDALONE = ("--standalone", "--nnodes", "1")


def arguments(folder: Path, **changes: Any) -> list[str]:
    settings = {"dir": folder, **SETTINGS, **{name.replace("_", "-"): x for name, x in changes.items()}}
    return ["train", "digits", *(part for name, x in settings.items() for part in (f"--{name}", str(x)))]


def start(
    command: list[str], victims: list[dict[str, Any]] | None = None, **variables: str
) -> subprocess.Popen:
    """A single-threaded program that inherits no launcher variables from this test."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "VICTIMS": json.dumps(victims or []),
        **variables,
    }
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen, seconds: float = 400) -> tuple[int, str, str]:
    """The exit code and output of a program, which is killed if it does not end in time."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def torchrun(
    folder: Path, victims: list[dict[str, Any]], *, ranks: int = 2, seconds: float = 400, **changes: Any
):
    restarts = ["--max-restarts", str(len(victims)), "--nproc-per-node", str(ranks)]
    program = ["-m", "tests.distributed.victim", *arguments(folder, **changes)]
    return ended(start(["torch.distributed.run", *STANDALONE, *restarts, *program], victims), seconds)


def assert_none_left(folder: Path) -> None:
    """No process whose command names the folder is left shortly after its parent has ended."""
    limit, left = time.monotonic() + 20, ["?"]
    while left and time.monotonic() < limit:
        found = [x for x in Path("/proc").glob("[0-9]*/cmdline") if str(folder).encode() in content(x)]
        left = [x.parent.name for x in found]
        time.sleep(0.2)
    assert left == []


def content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # it has ended in the meantime
        return b""


def assert_same_end(ours: Path, theirs: Path) -> None:
    last = [checkpoint.checkpoints(folder)[-1] for folder in (ours, theirs)]
    assert [folder.name for folder in last] == ["step-00000024"] * 2
    for part in ("model", "training"):
        assert_close(*(read_whole(folder, part) for folder in last), rtol=0, atol=0)
    assert [*leftovers(theirs, "step-[0-9]*")] == []


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def strategy(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def undisturbed(strategy, tmp_path_factory) -> Path:
    """A run by two processes that Lightning starts."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    code, out, err = ended(start(["lintra.cli", *arguments(folder, devices=2, strategy=strategy)]))
    assert code == 0, err
    assert out.count("done: step 24") == 1
    return folder


@pytest.mark.parametrize("seed", [0, 1])
def test_a_killed_rank_changes_nothing(undisturbed, strategy, tmp_path, seed):
    """At a random step, of a random rank, after a random time."""
    draw = random.Random(seed)
    victim = {"rank": draw.randrange(2), "step": draw.randrange(24), "delay": draw.uniform(0, 0.03)}
    folder = tmp_path / "run"
    code, out, err = torchrun(folder, [victim], strategy=strategy)
    assert code == 0, err
    assert out.count("done: step 24") == 1
    assert_same_end(undisturbed, folder)


def test_killed_before_and_while_a_checkpoint_is_written(undisturbed, strategy, tmp_path):
    """Before the first one, also with --resume, and before a later one gets its name: the last is good."""
    folder = tmp_path / "run"
    victims = [
        {"attempt": 0, "rank": 1, "step": 1},
        {"attempt": 1, "rank": 0, "step": 9, "where": "save"},
    ]
    code, out, err = torchrun(folder, victims, strategy=strategy)
    assert code == 0, err
    assert re.findall("resumed after (.*)", out) == ["step-00000006"]
    assert_same_end(undisturbed, folder)


def test_ten_killed_ranks_of_four(tmp_path):
    """Bit for bit the same with four ranks too: their sums have a fixed order."""
    draw = random.Random(0)
    steps = sorted(draw.sample(range(1, 24), 10))
    victims = [
        {"attempt": i, "rank": draw.randrange(4), "step": step, "delay": draw.uniform(0, 0.05)}
        for i, step in enumerate(steps)
    ]
    for folder, of_it in ((tmp_path / "whole", []), (tmp_path / "run", victims)):
        code, out, err = torchrun(folder, of_it, ranks=4, seconds=1200)
        assert code == 0, err
        assert out.count("done: step 24") == 1
    assert_same_end(tmp_path / "whole", tmp_path / "run")


def test_a_lost_node_leaves_a_smaller_world(tmp_path):
    """Two nodes of one process each, one of which is lost with its torchrun. The other continues by itself,
    and ends like a single process, up to the order of sums."""
    port, folder = free_port(), tmp_path / "run"
    elastic = (
        f"--nnodes 1:2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-id x"
    )
    options = [*elastic.split(), "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=30"]
    command = [
        "torch.distributed.run",
        *options,
        "-m",
        "tests.distributed.victim",
        *arguments(folder, dropout=0),
    ]
    first = start(command)
    listening(port)  # the node that holds the rendezvous is the first
    second = start(command, [{"rank": 1, "step": 10, "to": "both"}])
    assert ended(second)[0] == -signal.SIGKILL
    code, out, err = ended(first)
    assert code == 0, err
    assert re.findall("resumed after (.*)", out) == ["step-00000009"]
    code, _, err = ended(start(["lintra.cli", *arguments(tmp_path / "one", dropout=0)]))
    assert code == 0, err
    ours, theirs = (checkpoint.load(x).state_dict() for x in (tmp_path / "one", folder))
    for name, x in theirs.items():
        assert_close(x, ours[name], rtol=0, atol=1e-5)
    assert_none_left(folder)


def listening(port: int) -> None:
    """Wait until a process listens at this port."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"nobody listens at port {port}")


def test_none_outlives_torchrun(tmp_path):
    """A launcher that is killed has no time to end its processes."""
    folder = tmp_path / "run"
    options = [*STANDALONE, "--nproc-per-node", "2", "-m", "tests.distributed.victim"]
    command = ["torch.distributed.run", *options, *arguments(folder, steps=1_000_000, save_every=1_000_000)]
    code, _, err = ended(start(command, [{"rank": 1, "step": 7, "to": "parent", "delay": 0.01}]))
    assert code == -signal.SIGKILL
    assert "lintra: stopped, as the process that started this one has ended" in err
    assert_none_left(folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_without_torchrun_all_end_with_the_killed_one(tmp_path, rank):
    folder = tmp_path / "run"
    command = ["tests.distributed.victim", *arguments(folder, devices=2)]
    code, _, err = ended(start(command, [{"rank": rank, "step": 7}]))
    assert code == (-signal.SIGKILL if rank == 0 else 1)
    assert re.fullmatch(
        rf"lintra: process {1 - rank} of 2 has lost another one, which ended or did not answer within 60 "
        rf"seconds \(--timeout\), after step 7: resume the run with lintra train --resume {folder}\n",
        err,
    )
    assert_none_left(folder)


def test_one_that_is_killed_before_it_joins_the_others(strategy, tmp_path):
    """The first process waits for it at a point where no communication error comes before the timeout."""
    folder = tmp_path / "run"
    command = ["tests.distributed.victim", *arguments(folder, devices=2, strategy=strategy)]
    code, _, err = ended(start(command, [{"rank": 1, "step": 0, "where": "start"}]))
    assert code == 1
    assert re.fullmatch(
        "lintra: process 0 of 2 has lost another one, .*, after step 0: resume the run .*\n", err
    )
    assert_none_left(folder)


def test_one_that_does_not_answer_is_waited_for_as_long_as_the_timeout(tmp_path):
    """It is then killed, since it cannot end itself."""
    folder = tmp_path / "run"
    command = ["tests.distributed.victim", *arguments(folder, devices=2, timeout=25)]
    code, _, err = ended(start(command, [{"rank": 1, "step": 7, "signal": int(signal.SIGSTOP)}]))
    assert code == 1
    assert re.search(
        "process 0 of 2 has lost another one, .* within 25 seconds .*, after step 7: resume", err
    )
    assert "Traceback" not in err
    assert_none_left(folder)


NODES = {
    "srun": lambda rank, port: {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(rank),
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_ID": "0",
        "SLURM_NODELIST": "127.0.0.1",
        "MASTER_PORT": str(port),
    },
    "nothing": lambda rank, port: {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NODE_RANK": str(rank),
    },
}


@pytest.mark.parametrize("launcher", NODES)
def test_two_nodes_of_one_process(undisturbed, strategy, tmp_path, launcher):
    folder, port = tmp_path / "run", free_port()
    changes = {} if launcher == "srun" else {"nodes": 2}
    command = ["lintra.cli", *arguments(folder, strategy=strategy, **changes)]
    both = [start(command, None, **NODES[launcher](rank, port)) for rank in range(2)]
    for code, out, err in [ended(process) for process in both]:
        assert (code, err) == (0, "")
        assert out == "" or out.count("done: step 24") == 1
    assert_same_end(undisturbed, folder)
