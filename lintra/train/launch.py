"""Launcher of the processes that train a run together, read from environment variables.

Lightning starts the processes of one machine itself, and those of several where each machine has MASTER_ADDR,
MASTER_PORT and NODE_RANK. torchrun and Slurm's srun start all of them at once: their variables take
precedence then.
"""

import os
import socket
from pathlib import Path
from typing import Any, NamedTuple

import torch

PARENT = os.getppid()  # read before Lightning is imported, which takes seconds: it may end meanwhile


def _read_parent() -> None:
    global PARENT
    PARENT = os.getppid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_read_parent)


class LauncherInfo(NamedTuple):
    """A program that has started this process together with others."""

    name: str
    rank: int  # of this process among all
    nodes: int
    devices: int  # processes on each node; 0: not as many on each
    size: int  # processes in all


def launcher() -> LauncherInfo | None:
    """Return the launcher that started this process; None where it was a person or Lightning."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        size, devices = _number("WORLD_SIZE", 1), _number("LOCAL_WORLD_SIZE", 1)
        nodes = _number("GROUP_WORLD_SIZE", size // max(devices, 1))
        devices = devices if devices * nodes == size else 0
        return LauncherInfo("torchrun", _number("RANK", 0), nodes, devices, size)
    # A batch script has SLURM_NTASKS too, before any srun.
    if "SLURM_NTASKS" in os.environ and "SLURM_STEP_ID" in os.environ and not _is_shell_of_slurm():
        size, nodes = _number("SLURM_NTASKS", 1), _number("SLURM_NNODES", 1)
        devices = _number("SLURM_NTASKS_PER_NODE", size if nodes == 1 else 0)
        devices = devices if devices * nodes == size else 0
        return LauncherInfo("srun", _number("SLURM_PROCID", 0), nodes, devices, size)
    return None


def job() -> str | None:
    """Return the name of the job of torchrun or Slurm that this process is of, the same after a restart; None
    where nothing could restart it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return f"torchrun {_agent()}"
    if "SLURM_JOB_ID" in os.environ and not _is_shell_of_slurm():
        return f"slurm {os.environ['SLURM_JOB_ID']}"
    return None


def restarted() -> bool:
    """Return whether this process may belong to a job that was begun before."""
    found = job()
    return found is not None and (found.startswith("torchrun") or _number("SLURM_RESTART_COUNT", 0) > 0)


def is_first_process() -> bool:
    """Return whether this process is the first one of all nodes, which writes and speaks for all."""
    found = launcher()
    return _node_rank() == _number("LOCAL_RANK", 0) == 0 if found is None else found.rank == 0


def is_started_by_lightning() -> bool:
    """Return whether another process of this node has started this one, for a further device."""
    return launcher() is None and _number("LOCAL_RANK", 0) > 0


def takes_part(settings: Any) -> bool:
    """Return whether this process trains: Lightning may have started it for another run of this program, on
    more devices."""
    return launcher() is not None or _number("LOCAL_RANK", 0) < (settings.devices or 1)


def starting(settings: Any) -> tuple[int, int]:
    """Return the rank of this process and the number of processes, among those that exist from the beginning:
    all that a launcher has started, otherwise one on each node."""
    found = launcher()
    return (_node_rank(), settings.nodes or 1) if found is None else (found.rank, found.size)


def world(settings: Any) -> tuple[int, int]:
    """Return the number of nodes, and of processes on each, of the settings `nodes` and `devices`; where
    these are None, of the launcher, else 1. Raises ValueError where they contradict the launcher, nothing
    says where the other nodes are, or there are GPUs and not one for each process of this node."""
    found = launcher()
    if found is None:
        nodes = settings.nodes or 1
        if nodes > 1:
            _check_nodes(nodes)
        devices = settings.devices or 1
        _check_gpus(devices, "or take fewer --devices")
        return nodes, devices
    if not found.devices:
        wanted = "--ntasks-per-node" if found.name == "srun" else "--nproc-per-node"
        raise ValueError(
            f"{found.name} has started {found.size} processes on {found.nodes} nodes, which must be as many "
            f"on each: give it {wanted}"
        )
    for name in ("nodes", "devices"):
        asked = getattr(settings, name)
        if asked not in (None, getattr(found, name)):
            raise ValueError(
                f"{name}={asked} contradicts {found.name}, which has started nodes={found.nodes} with "
                f"devices={found.devices}: leave {name} out, or start as many"
            )
    _check_gpus(found.devices, f"or have {found.name} start fewer processes on a node")
    return found.nodes, found.devices


def processes(settings: Any) -> int:
    """Return how many processes share a batch. Raises ValueError as `world` does."""
    nodes, devices = world(settings)
    return nodes * devices


def _check_nodes(nodes: int) -> None:
    """Raise ValueError unless the environment says which of several nodes this is, and where the first one
    is."""
    lacking = [x for x in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if x not in os.environ]
    if lacking:
        raise ValueError(
            f"nodes={nodes} needs {' and '.join(lacking)} in the environment of every node, or torchrun or "
            "srun to start the processes"
        )
    if not 0 <= _node_rank() < nodes:
        raise ValueError(f"NODE_RANK must lie in 0 .. nodes - 1 = {nodes - 1}, got {_node_rank()}")


def _check_gpus(devices: int, otherwise: str) -> None:
    """Raise ValueError where this node trains on GPUs and has fewer of them than processes."""
    if torch.cuda.is_available() and (count := torch.cuda.device_count()) < devices:
        raise ValueError(
            f"devices={devices} needs a GPU for each, and this process sees {count}: let it see more, "
            f"{otherwise}"
        )


def _is_shell_of_slurm() -> bool:
    """Return whether a person works in a shell of `salloc` or `srun --pty`, which starts programs itself."""
    return os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")


def _node_rank() -> int:
    """Return the place of this node, as Lightning reads it."""
    return _number("NODE_RANK", _number("GROUP_RANK", 0))


def _number(name: str, default: int) -> int:
    """Return an environment variable as a number. Raises ValueError where it is not one."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{name} must be a whole number in the environment, got {text!r}") from error


def _agent() -> str:
    """Return the id of a torchrun job, or where it was given none, what is known of the process that restarts
    this one."""
    name = os.environ["TORCHELASTIC_RUN_ID"]
    if name != "none":  # what torchrun writes without --rdzv-id
        return name
    status = Path(f"/proc/{PARENT}/stat")  # of Linux; numbers of processes come again
    started = status.read_text().rpartition(")")[2].split()[19] if status.exists() else ""
    return f"on {socket.gethostname()}, process {PARENT} {started}".rstrip()
