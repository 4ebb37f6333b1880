"""Processes that train together and lose one another: none waits forever or outlives the one that started
it."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from lintra.train import launch
from lintra.train.run import Run

_WORDS = (
    "gloo",
    "nccl",
    "connection reset",
    "connection closed",
    "broken pipe",
)  # of errors of communication
NOTICED = 10.0  # seconds within which a process notices by itself that another has ended
_ending = threading.Event()  # this process, which has noticed and says so


class LostProcess(ConnectionError):
    """Another of the processes that train together has ended or does not answer."""

    exit_code = 1


class WatchingLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher without its observer, which kills this process and says nothing once another one
    of the node has ended: `lost_in_training` watches over them."""

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any
    ) -> Any:
        """Start the other processes, unless something else has, then call a function."""
        if self.cluster_environment.creates_processes_externally:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        self._call_children_scripts()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


class LaunchesWatched:
    """Base of strategies, before Lightning's own: a `WatchingLauncher` starts the other processes."""

    def _configure_launcher(self: Any) -> None:
        assert self.cluster_environment is not None
        self._launcher = WatchingLauncher(self.cluster_environment, self.num_processes, self.num_nodes)


@contextlib.contextmanager
def lost_in_training(run: Run, trainer: pl.Trainer) -> Iterator[None]:
    """Turn a communication error inside into a LostProcess that says where training was, and end the
    processes that a `WatchingLauncher` has started. Where this process does not notice that one of them has
    ended, since it waits for that one or computes, it ends with the same message."""
    launcher, over = trainer.strategy.launcher, threading.Event()
    _ending.clear()

    def lost() -> LostProcess:
        return LostProcess(
            f"process {trainer.global_rank} of {trainer.world_size} has lost another one, which ended or did "
            f"not answer within {run.train.timeout:g} seconds (--timeout), after step "
            f"{trainer.global_step:,}: resume the run with lintra train {run.resuming}"
        )

    def watch(launcher: WatchingLauncher) -> None:
        while not any(process.poll() for process in launcher.procs):
            if over.wait(0.5):
                return
        if over.wait(NOTICED):
            return
        launcher.kill(signal.SIGKILL)
        print(f"lintra: {lost()}", file=sys.stderr, flush=True)
        os._exit(LostProcess.exit_code)

    if isinstance(launcher, WatchingLauncher):
        threading.Thread(target=watch, args=[launcher], daemon=True, name="watch-processes").start()
    try:
        yield
    except RuntimeError as error:
        if trainer.world_size == 1 or not _is_lost(error):
            raise
        if launcher is not None:
            launcher.kill(signal.SIGKILL)
        _ending.set()
        raise lost() from error
    finally:
        over.set()


@contextlib.contextmanager
def lost_at_start(run: Run) -> Iterator[None]:
    """Turn an error inside into a LostProcess: a process is missing, or ended before the first step."""
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        raise LostProcess(
            f"{run.folder} is not trained: of the processes to train it one has ended, or has not come "
            f"within {run.train.timeout:g} seconds (--timeout)"
        ) from error


def _is_lost(error: RuntimeError) -> bool:
    """Return whether an error comes from torch.distributed: of gloo's, only the text says so."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in _WORDS)


@lru_cache(maxsize=1)
def end_with_parent() -> None:
    """End this process as soon as the one has ended that started it and watches over it: Lightning's first
    process of the node, or torchrun."""
    found = launch.launcher()
    watched = launch.is_started_by_lightning() if found is None else found.name == "torchrun"
    if not watched:
        return

    def watch() -> None:
        while os.getppid() == launch.PARENT:
            time.sleep(0.5)
        if found is None and _ending.wait(NOTICED):  # that one trained too: its end came as an error
            time.sleep(NOTICED)
        print("lintra: stopped, as the process that started this one has ended", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end-with-parent").start()
