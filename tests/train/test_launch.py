"""Who started the processes of a run is read from the environment, and must match the settings."""

import os
import subprocess
import sys

import pytest
import torch

from lintra import checkpoint, train
from lintra.train import Config, launch

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "17",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}
SRUN = {
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Set these environment variables, and clear all others that matter."""
    of = ("TORCHELASTIC_", "SLURM_", "MASTER_", "GROUP_")
    for name in os.environ:
        if name.startswith(of) or name in (
            "RANK",
            "LOCAL_RANK",
            "NODE_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
        ):
            monkeypatch.delenv(name)

    def put(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize(
    ("variables", "settings", "world", "first"),
    [
        ({}, {}, (1, 1), True),
        ({}, {"devices": 3}, (1, 3), True),
        ({"LOCAL_RANK": "1", "NODE_RANK": "0"}, {"devices": 2}, (1, 2), False),  # started by Lightning
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1", "NODE_RANK": "1"}, {"nodes": 2}, (2, 1), False),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1", "NODE_RANK": "0"}, {"nodes": 2}, (2, 1), True),
        (TORCHRUN, {}, (2, 2), False),
        (TORCHRUN, {"nodes": 2, "devices": 2}, (2, 2), False),
        (TORCHRUN | {"RANK": "2", "LOCAL_RANK": "0"}, {}, (2, 2), False),  # the first on the second node
        (TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}, {}, (2, 2), True),
        (SRUN, {}, (2, 2), False),
        (SRUN | {"SLURM_PROCID": "0"}, {"devices": 2}, (2, 2), True),
        ({"SLURM_NTASKS": "3", "SLURM_STEP_ID": "0"}, {}, (1, 3), True),
        ({"SLURM_NTASKS": "3"}, {"devices": 2}, (1, 2), True),  # a batch script, before any srun
        (SRUN | {"SLURM_JOB_NAME": "bash"}, {}, (1, 1), True),  # a shell, which starts one process
        (SRUN | TORCHRUN, {}, (2, 2), False),  # srun starts one torchrun on each node
    ],
)
def test_a_launcher_says_how_many_there_are(environment, variables, settings, world, first):
    environment(variables)
    config = Config(**settings)
    assert launch.world(config) == world
    assert launch.processes(config) == world[0] * world[1]
    assert launch.is_first_process() is first


@pytest.mark.parametrize(
    ("variables", "settings", "message"),
    [
        (
            TORCHRUN,
            {"devices": 4},
            "devices=4 contradicts torchrun, which has started nodes=2 with devices=2: leave devices out",
        ),
        (SRUN, {"nodes": 1}, "nodes=1 contradicts srun, which has started nodes=2 with devices=2"),
        (
            TORCHRUN | {"WORLD_SIZE": "3"},
            {},
            "3 processes on 2 nodes, which must be as many on each: give it --nproc",
        ),
        (
            {"SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_STEP_ID": "0"},
            {},
            "as many on each: give it --ntasks-per-node",
        ),
        (TORCHRUN | {"RANK": "x"}, {}, "RANK must be a whole number in the environment, got 'x'"),
        ({}, {"nodes": 2}, "nodes=2 needs MASTER_ADDR and MASTER_PORT and NODE_RANK in the environment"),
        (
            {"MASTER_ADDR": "a", "MASTER_PORT": "1", "NODE_RANK": "2"},
            {"nodes": 2},
            "NODE_RANK must lie in 0 .. nodes - 1 = 1, got 2",
        ),
    ],
)
def test_what_contradicts_is_refused(environment, variables, settings, message):
    environment(variables)
    with pytest.raises(ValueError, match=message):
        Config(**settings).check_batch(None)


@pytest.mark.parametrize(
    ("variables", "settings", "message"),
    [
        ({}, {"devices": 2}, "devices=2 needs a GPU for each, and this process sees 1: .* fewer --devices$"),
        (TORCHRUN, {}, "devices=2 needs a GPU for each, .* or have torchrun start fewer processes on a node"),
    ],
)
def test_each_process_needs_a_gpu_where_there_are_any(environment, monkeypatch, variables, settings, message):
    environment(variables)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=message):
        launch.world(Config(**settings))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # it then trains on the CPU
    assert launch.world(Config(**settings))[1] == 2


def test_a_batch_is_shared_by_all_nodes(environment):
    environment(TORCHRUN)
    with pytest.raises(ValueError, match="batch must be a multiple of nodes=2 x devices=2, got 6"):
        Config(batch=6).check_batch(None)


ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"}


@pytest.mark.parametrize("name", ["17", "none"])  # none: torchrun got no --rdzv-id
def test_a_restarted_job_finds_the_run_that_it_began(environment, new_run, name):
    environment(ALONE | {"TORCHELASTIC_RUN_ID": name})
    run = new_run()
    assert new_run() == run == train.Run.read(run.folder)
    with pytest.raises(checkpoint.Error, match="holds a run already"):
        new_run(seed=1)  # the same job has begun another run
    environment({"TORCHELASTIC_RUN_ID": "18"})
    with pytest.raises(checkpoint.Error, match="holds a run already"):
        new_run()
    (run.folder / "run.json").unlink()  # a checkpoint that nothing describes
    checkpoint.save(run.model.build(), run.folder / "step-00000001")
    with pytest.raises(checkpoint.Error, match="holds checkpoints without"):
        new_run()


def test_a_job_of_slurm_is_queued_again(environment, new_run):
    environment({"SLURM_NTASKS": "1", "SLURM_JOB_ID": "17"})
    run = new_run()
    with pytest.raises(checkpoint.Error, match="holds a run already"):
        new_run()  # a second line of the script, not a restart
    environment({"SLURM_RESTART_COUNT": "1"})
    assert new_run() == run


def test_a_run_that_no_launcher_began_is_never_taken_for_its_own(environment, new_run):
    run = new_run()
    environment(ALONE | {"TORCHELASTIC_RUN_ID": "17", "TORCHELASTIC_RESTART_COUNT": "1"})
    with pytest.raises(checkpoint.Error, match="holds a run already"):
        new_run()
    assert train.Run.read(run.folder) == run


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_knows_the_parent_of_its_own():
    program = """
import os
from lintra.train import launch
known = launch.PARENT == os.getppid()
if child := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or not known)
os._exit(launch.PARENT != os.getppid())
"""
    subprocess.run([sys.executable, "-c", program], check=True)
