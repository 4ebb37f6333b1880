"""A run, trained by Lightning."""

import contextlib
import logging
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.connectors import checkpoint_connector
from rich.console import Console

from lintra.io.files import Error
from lintra.tasks import Task
from lintra.train.batches import seed_of
from lintra.train.budget import TimeBudget, shortened
from lintra.train.callbacks import CheckpointCallback, MetricLogger, StopCallback
from lintra.train.config import Config, Verbosity
from lintra.train.consistency import AlikeCallback
from lintra.train.console import console
from lintra.train.data_checks import check_begun, check_room
from lintra.train.ddp import OrderedDDP
from lintra.train.ema import WeightEMA
from lintra.train.launch import is_first_process, processes, takes_part, world
from lintra.train.learner import Learner
from lintra.train.logs import loggers
from lintra.train.lost_processes import end_with_parent, lost_in_training
from lintra.train.precision import choose_precision
from lintra.train.progress import ProgressBar, in_words, validation
from lintra.train.rendezvous import announce_run, await_run, cluster_environment
from lintra.train.run import Run, first_model
from lintra.train.schedule import LearningRateSchedule, notices
from lintra.train.storage import TREE, Storage
from lintra.train.strategy import ShardedStrategy
from lintra.train.summary import described

_MISFITS = (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError)


def fit(run: Run, task: Task | None, verbosity: Verbosity = "progress") -> None:
    """See lintra.train.fit."""
    problem = run.task.build() if task is None else task
    run.train.check_batch(problem.batch_tokens, problem.batch)
    check_room(problem, run.model, run.train, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    fit_checked(run, problem, verbosity)


def fit_checked(run: Run, task: Task, verbosity: Verbosity = "progress") -> None:
    """Train as `fit` does, without checking again that its batches are right and fit in memory."""
    with run.locked():
        fit_locked(run, task, verbosity)


def fit_locked(run: Run, task: Task, verbosity: Verbosity = "progress") -> None:
    """Train as `fit_checked` does, for a caller that holds the lock of the run."""
    if takes_part(run.train):
        end_with_parent()
        _fit(run, task, verbosity, is_first_process())


def _fit(run: Run, task: Task, verbosity: Verbosity, first: bool) -> None:
    shown = console(quiet=not first or verbosity == "result")
    run, start, data = _begun(run, task)
    with _quiet(), loggers(run, quiet=verbosity == "result") as logs:
        torch.manual_seed(seed_of(run.train.seed))
        model = _model(run, task, start is None, first)
        size = f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters"
        after = f", resumed after {start.name}" if start else ""
        shown.print(f"{task.name}: {size}, {run.train.precision} precision, in {run.folder}{after}")
        config = shortened(run.train, run.steps)
        for notice in (*notices(config), *task.notices(run.folder)) if first else ():
            shown.print(notice)
        stop = StopCallback(config.steps, config.max_minutes)
        for line in described(run, config, model, task) if verbosity == "all" else ():
            shown.print(line)
        alike = AlikeCallback(run, data, start)
        trainer = _trainer(run, config, stop, logs, shown, alike)
        learner = Learner(model, task, run.train)
        try:
            with lost_in_training(run, trainer):
                trainer.fit(learner, ckpt_path=start)
        except SystemExit as end:  # what Lightning makes of Ctrl-C before the first step
            raise KeyboardInterrupt from end
        except _MISFITS as error:  # from Lightning and the optimizer as they restore their state
            reported = isinstance(error, (Error, torch.OutOfMemoryError))
            if start is None or learner.restored or reported or not _restoring(error):
                raise
            reason = " ".join(str(error).split())[:80]
            raise Error(f"{start / TREE} does not fit this run: {type(error).__name__}, {reason}") from error
    if not first:
        return
    step = trainer.global_step
    what = "done" if step >= stop.steps else f"time is up, {run.resuming} resumes it"
    # Otherwise the scores have been printed before.
    scores = in_words(validation(trainer), task.loss_unit) if verbosity == "result" else ""
    saving: Any = trainer.checkpoint_callback
    saved, best = run.checkpoints()[-1], saving.best()
    result = ", ".join(filter(None, (f"step {step:,}", scores, f"saved in {saved}")))
    console().print(f"{what}: {result}")
    if best not in (None, saved):
        console().print(f"lowest validation loss of those saved: {best}")


def _model(run: Run, task: Task, fresh: bool, first: bool) -> Any:
    """Return the model before a checkpoint, if any, is read. Processes that shard a model get it from the
    first one, or from the checkpoint: their own weights are empty until then, however large."""
    if run.train.strategy == "fsdp" and not (first and fresh):
        with torch.device("meta"):
            return run.model.build()
    if not fresh:
        return run.model.build()
    model = first_model(run.model, run.train, run.task)
    if run.train.start_from is None:
        task.prepare(model)
    return model


def _restoring(error: Exception) -> bool:
    """Return whether an error comes from where Lightning restores a checkpoint, and not from a hook, or the
    optimizer that is built meanwhile."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__") == checkpoint_connector.__name__ for frame in frames)


def _trainer(
    run: Run, config: Config, stop: StopCallback, logs: list[Logger], console: Console, alike: AlikeCallback
) -> pl.Trainer:
    """The Trainer of a run, whose settings with the schedule that fits are `config`."""
    schedule = LearningRateSchedule(config)
    budget = [] if config.max_minutes is None else [TimeBudget(run, stop, schedule, console)]
    average = [] if config.ema is None else [WeightEMA(config.ema)]
    nodes, devices = world(config)
    cluster = cluster_environment()
    return pl.Trainer(
        default_root_dir=run.folder,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        num_nodes=nodes,
        devices=devices,
        strategy=_strategy(config),
        precision="bf16-mixed" if config.precision == "bf16" else "32-true",
        max_steps=config.steps,
        max_epochs=-1,
        val_check_interval=config.validate_every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # StepSampler distributes the batches
        inference_mode=False,  # a buffer first filled in a validation must serve training too
        enable_checkpointing=True,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=logs,
        callbacks=[
            alike,
            *average,
            *budget,  # before the callbacks that ask for the last step
            stop,
            schedule,
            ProgressBar(stop, console),
            MetricLogger(stop),
            CheckpointCallback(run, stop),
        ],
        plugins=[Storage(run.model), *([] if cluster is None else [cluster])],
    )


def _begun(run: Run, task: Task) -> tuple[Run, Path | None, dict[str, Any]]:
    """Return the run with what is decided before its first step, by the first process for all, the checkpoint
    that it starts from, and the fingerprint of its data."""
    first = is_first_process()
    if not len(task.train):
        raise Error("there must be at least 1 sample to train on, got 0")
    if first:
        run.sweep()
        if run.train.precision == "auto":
            run = run.changed(precision=choose_precision(run.model, task, run.train))
    else:
        run = await_run(run)
    start = run.checkpoints()[-1] if run.checkpoints() else None
    if not len(task.validate):  # checkpoints are saved after validations
        raise Error("there must be at least 1 sample to validate on, got 0")
    data = check_begun(run, task)
    run = run.changed(task=task.freeze_config(run.task), data=None if start else data)
    if first:
        announce_run(run, start)
    return run, start, data


def _strategy(config: Config) -> Strategy | str:
    """Return how the processes share a batch."""
    timeout = timedelta(seconds=config.timeout)
    if config.strategy == "fsdp":
        return ShardedStrategy(timeout)
    return "auto" if processes(config) == 1 else OrderedDDP(timeout=timeout)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning's advice off the terminal: what it warns of is intended here."""
    exchange = "torch.distributed.tensor._collective_utils"  # reports that gloo lacks one (`Muon`)
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", exchange)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*does not have many workers.*")  # batches are made at once
            warnings.filterwarnings("ignore", "FSDP2-wrapped .* returned a view")  # which no task changes
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # Dynamo
            warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated")  # between Lightning and PyTorch
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
