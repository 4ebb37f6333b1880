"""Rendezvous at the start of a distributed run: rank 0 decides the run, the others wait to receive it."""

import json
import os
import secrets
import time
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from torch import distributed as dist
from torch.distributed import Store, TCPStore  # pyright: ignore (public, says PyTorch's documentation)
from torch.distributed.rendezvous import rendezvous

from lintra.io.files import Error
from lintra.train import launch
from lintra.train.lost_processes import lost_at_start
from lintra.train.run import Run

SHARED = 60.0  # seconds until every node sees what the first one has written: NFS caches for as long
_ASKED = "lintra/asked"  # of the store: how many have asked the first process, and below it their names
_SERVERS: list[TCPStore] = []  # of stores, which end with them


def announce_run(run: Run, start: Path | None) -> None:
    """Tell the processes that wait in `await_run` that the run is in its folder, and where it starts; return
    when all have heard it. Raises LostProcess where they do not come in time."""
    rank, size = launch.starting(run.train)
    if size == 1:
        _meet(run)
        return
    with lost_at_start(run):
        store = _store(rank, size, run.train.timeout)
        name = secrets.token_hex(8)
        word = {
            "run": run.digest(),
            "start": start.name if start else "",
            "name": name,
            "port": _fresh_port(),
        }
        answered, limit = set(), time.monotonic() + run.train.timeout
        while store.add(name, 0) < size - 1:
            for i in {*range(1, store.add(_ASKED, 0) + 1)} - answered:
                if store.check([f"{_ASKED}/{i}"]):
                    store.set(store.get(f"{_ASKED}/{i}").decode(), json.dumps(word))
                    answered.add(i)
            if time.monotonic() > limit:
                raise TimeoutError
            time.sleep(0.02)
    _meet(run)


def await_run(run: Run) -> Run:
    """Wait until the first process has begun the run, and return the run as it wrote it. Raises LostProcess,
    and Error where its folder does not appear here."""
    if launch.is_started_by_lightning():  # by the first process, once it has begun the first run
        _meet(run)
        return run.joined()
    with lost_at_start(run):
        # The store of torchrun outlives a restart, and so do messages of ended processes: only a process that
        # exists now answers to a name that nobody had before.
        store, name = _store(*launch.starting(run.train), run.train.timeout), secrets.token_hex(8)
        store.set(f"{_ASKED}/{store.add(_ASKED, 1)}", name)
        word = json.loads(store.get(name))
        store.add(word["name"], 1)
    if word["port"]:
        _use_port(word["port"])
    limit = time.monotonic() + SHARED
    while run.digest() != word["run"] or (
        word["start"] and run.folder / word["start"] not in run.checkpoints()
    ):
        if time.monotonic() > limit:
            raise Error(
                f"{run.folder.absolute()} is not what the first process has there: the run's folder must be "
                "on a file system that all nodes share"
            )
        time.sleep(0.1)
    _meet(run)
    return run.joined()


def _meet(run: Run) -> None:
    """Wait until all processes are here, where Lightning has started them for an earlier run of this program:
    they do not wait for the first one to start them again."""
    size = launch.processes(run.train)
    if launch.launcher() is not None or not dist.is_initialized() or size == 1:
        return
    if (before := dist.get_world_size()) != size:  # Lightning starts no others any more
        raise Error(f"this program has trained with {before} processes before, and cannot with {size}")
    with lost_at_start(run):
        dist.barrier()


@lru_cache(maxsize=1)
def _store(rank: int, size: int, seconds: float) -> Store:
    """Return the store through which the first processes communicate, for as long as this one lives: the
    process group uses its server afterwards. Raises Error where the first one cannot listen."""
    if isinstance(cluster := cluster_environment(), SLURMEnvironment):
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = cluster.main_address, str(cluster.main_port)
    try:
        return next(rendezvous("env://", rank, size, timeout=timedelta(seconds=seconds)))[0]
    except dist.DistNetworkError as error:
        if rank:  # it has not found the first one
            raise
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise Error(
            f"the first process cannot listen at {place} (MASTER_ADDR, MASTER_PORT): {error}"
        ) from error


def _fresh_port() -> int:
    """Return the port of a new store for the process group that is to be started under torchrun, whose own
    store has the addresses of processes that have ended, https://github.com/pytorch/pytorch/issues/135712;
    0 elsewhere."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return 0
    server = TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    _SERVERS.append(server)
    _use_port(server.port)
    return server.port


def _use_port(port: int) -> None:
    """Have the process group start through the first process's store at a port of its node."""
    os.environ["MASTER_PORT"], os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(port), "False"


def cluster_environment() -> ClusterEnvironment | None:
    """Return how Lightning finds the other processes; None where it recognises by itself who started them.

    It would take a batch script of Slurm's for processes of srun. A signal of Slurm's before the end saves
    and stops, as it does everywhere; nothing is queued again by ourselves."""
    found = launch.launcher()
    if found is None:
        return LightningEnvironment() if SLURMEnvironment.detect() else None
    return SLURMEnvironment(auto_requeue=False) if found.name == "srun" else None
