"""Processes that communicate through gloo, started once for all tests of a worker.

With LINTRA_TEST_BACKEND=nccl each process has its own GPU, and its arguments are moved there.
"""

import contextlib
import multiprocessing
import os
import random
import socket
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

SECONDS = 60  # without a message from the others
LONGEST = 600  # the most seconds that a call may take
BACKEND = os.environ.get("LINTRA_TEST_BACKEND", "gloo")


class Ranks:
    """`call(function, ...)` returns the results of a function from each rank, or raises the error of one."""

    def __init__(self, count: int, folder: str):
        context = multiprocessing.get_context("spawn")
        self.count, self._pipes = count, []
        for rank in range(count):
            ours, theirs = context.Pipe()
            context.Process(target=_serve, args=(rank, count, folder, theirs), daemon=True).start()
            self._pipes.append(ours)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args))
        results = [self._answer(pipe) for pipe in self._pipes]
        for error, text in (x for ok, *x in results if not ok):
            raise error from RuntimeError(text)
        return [result for _, result, _ in results]

    def _answer(self, pipe: Any) -> Any:
        if not pipe.poll(LONGEST):
            raise TimeoutError(f"a rank has not answered within {LONGEST} seconds")
        return pipe.recv()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)


def _serve(rank: int, count: int, folder: str, pipe: Any) -> None:
    from datetime import timedelta

    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if BACKEND == "nccl" else torch.device("cpu")
    if BACKEND == "nccl":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if BACKEND == "nccl" else BACKEND
    store = dist.FileStore(f"{folder}/store", count)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=count, timeout=timedelta(seconds=SECONDS)
    )
    while (asked := pipe.recv()) is not None:
        function, args = asked
        try:
            pipe.send((True, moved(function(*moved(args, device)), torch.device("cpu")), ""))
        except Exception as error:
            pipe.send((False, error, traceback.format_exc()))
    dist.destroy_process_group()


def free_port() -> int:
    """Return a port on which nobody listens. Each of the processes that run tests at the same time has a
    range of its own, below those that systems give to connections: nobody takes it before the test does."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 20
    ports = range(20_000 + 500 * worker, 20_500 + 500 * worker)
    for port in random.Random().sample(ports, len(ports)):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"none of the ports {ports} is free")


def moved(x: Any, device: torch.device) -> Any:
    """The arguments or results of a function, with their tensors and modules moved to a device."""
    if device.type == "cpu" and BACKEND != "nccl":
        return x
    return pytree.tree_map_only((torch.Tensor, torch.nn.Module), lambda part: part.to(device), x)


def _started(count: int, tmp_path_factory: pytest.TempPathFactory):
    ranks = Ranks(count, str(tmp_path_factory.mktemp("ranks")))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    yield from _started(2, tmp_path_factory)


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory):
    yield from _started(4, tmp_path_factory)
