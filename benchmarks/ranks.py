"""Processes that communicate through gloo, one thread each; the process that starts them is rank 0."""

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lintra.allocator import keep_freed_memory

SECONDS = 120  # how long to wait for another rank


_groups: dict[int, Any] = {}  # of the first ranks, by their number


def group(count: int) -> Any:
    """Return the group of the first `count` ranks, at least 2, which include this one."""
    return _groups[count]


class Ranks:
    """Ranks 0 to `count` - 1 of torch.distributed's default group; rank 0 is this process."""

    def __init__(self, count: int, store: str):
        context = multiprocessing.get_context("spawn")
        self.count, self._pipes, self._processes = count, [], []
        for rank in range(1, count):
            ours, theirs = context.Pipe()
            arguments = (store, rank, count, theirs)
            process = context.Process(target=_follow, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        _join(store, 0, count)

    def call(self, count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function on the first `count` ranks at once -> what it returns on each.

        Raises RuntimeError if it raises on another rank, or if a rank ends or does not answer for SECONDS."""
        for pipe in self._pipes[: count - 1]:
            with suppress(BrokenPipeError):  # of a process that has ended, as its answer shows
                pipe.send((function, arguments))
        found = [function(*arguments)]
        for rank, pipe in enumerate(self._pipes[: count - 1], start=1):
            if not pipe.poll(SECONDS):
                raise RuntimeError(f"rank {rank} does not answer for {SECONDS} s: nothing is measured")
            try:
                result, failure = pipe.recv()
            except (EOFError, ConnectionResetError):
                raise RuntimeError(f"rank {rank} has ended: nothing is measured") from None
            if failure:
                raise RuntimeError(f"rank {rank} failed:\n{failure}")
            found.append(result)
        return found

    def close(self) -> None:
        """End the other processes."""
        for pipe in self._pipes:
            with suppress(OSError):  # of a process that has ended
                pipe.send(None)
        for process in self._processes:
            process.join(SECONDS)
            process.kill()
        dist.destroy_process_group()


@contextmanager
def started(count: int) -> Iterator[Ranks]:
    """Start processes and join them, one thread in each of them and in this one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(count, f"{folder}/store")
        try:
            yield ranks
        finally:
            ranks.close()
            torch.set_num_threads(threads)


def _join(store: str, rank: int, count: int) -> None:
    limit, place = timedelta(seconds=SECONDS), f"file://{store}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=count, timeout=limit)
    for size in range(2, count + 1):  # by all and in one order: names of groups are counted
        _groups[size] = dist.new_group(list(range(size)))


def _follow(store: str, rank: int, count: int, pipe: Any) -> None:
    """The main function of another process, which calls what it is told to."""
    keep_freed_memory()
    torch.set_num_threads(1)
    _join(store, rank, count)
    while (told := pipe.recv()) is not None:
        function, arguments = told
        try:
            pipe.send((function(*arguments), ""))
        except Exception:
            pipe.send((None, traceback.format_exc()))
    dist.destroy_process_group()
