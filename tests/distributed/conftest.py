"""Processes that speak to each other through gloo, started once for all tests of a worker."""

import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

SECONDS = 60  # without a word from the others


class Ranks:
    """`call(function, ...)` gives what a function gives on each rank, or raises what one of them raised."""

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
        results = [pipe.recv() for pipe in self._pipes]
        for error, text in (x for ok, *x in results if not ok):
            raise error from RuntimeError(text)
        return [result for _, result, _ in results]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)


def _serve(rank: int, count: int, folder: str, pipe: Any) -> None:
    from datetime import timedelta

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", count)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=SECONDS)
    )
    while (asked := pipe.recv()) is not None:
        function, args = asked
        try:
            pipe.send((True, function(*args), ""))
        except Exception as error:
            pipe.send((False, error, traceback.format_exc()))
    dist.destroy_process_group()


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
