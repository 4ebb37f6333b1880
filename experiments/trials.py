"""Many short trainings, a few at a time: folders of `lintra train`, which can be killed and resumed."""

import argparse
import contextlib
import dataclasses
import io
import json
import math
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Literal

import torch

from lintra import checkpoint, evaluate, legacy, train
from lintra.allocator import keep_freed_memory
from lintra.bench import reports
from lintra.checkpoint import from_json, to_json
from lintra.io.files import locked
from lintra.train.callbacks import Interrupted
from lintra.train.curve import MINUTES
from lintra.train.learner import Diverged
from lintra.train.optimizer import optimizer
from lintra.train.run import Run, from_anywhere

reports.commit()  # of the code that this program, or process, has loaded

STUDENT = 4.303  # 97.5 % quantile of Student's t with 2 degrees of freedom
SAMPLES = 2_000  # the most samples that a trial is judged by
BATCH = 50
OF_THE_PLACE = ("nodes", "devices", "timeout")  # settings of training that say where it runs


@dataclasses.dataclass(frozen=True)
class Trial:
    """One model trained on one problem, and its score on the problem's first test samples, or on the first
    validation samples if something is chosen by it."""

    name: str
    folder: Path
    task: Any  # the task's Config
    model: Any  # the model's Config
    training: train.Config
    score: str  # what the task's score calls it
    samples: int = SAMPLES
    split: Literal["test", "validate"] = "test"
    # The file of the outcome. It is part of the repository, so that what is trained on one machine need not
    # be trained on another.
    kept: Path | None = None

    @property
    def result(self) -> Path:
        return self.folder / "result.json"

    def scored(self) -> float | None:
        """The score once it is trained, NaN if the training diverged."""
        if not self.result.exists():
            return None
        score = json.loads(self.result.read_text())[self.score]
        return math.nan if score is None else score

    def train(self) -> None:
        """Train to the end, or until it diverges, and score it. Raises checkpoint.Error if the folder is that
        of another trial, or if another process is training it."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        lock = self.folder.with_name(f".{self.folder.name}.lock")  # beside the folder, which may be removed
        lock.touch()
        with locked(lock, self.folder):
            self.check()
            if self.scored() is None:
                self._train()

    def _train(self) -> None:
        run = self._begun()
        if run is None:
            run = Run.create(self.folder, task=self.task, model=self.model, train=self.training)
        found: dict[str, Any] = {"steps": self.training.steps}
        try:
            train.fit(run)
            found[self.score] = self._scored_on(self.task.build(), self.split, self.samples)
        except Diverged as error:
            found |= {self.score: None, "why": str(error)}
        text = json.dumps(found, indent=1)
        checkpoint.write_atomically(self.result, lambda place: place.write_text(text))

    def check(self) -> None:
        """Raise checkpoint.Error if the folder holds a run of other settings, which are not this trial's."""
        self._begun()

    def _begun(self) -> Run | None:
        """The run in the folder, as far as it has got; None if there is none. Raises checkpoint.Error."""
        if not (self.folder / "run.json").exists():
            return None
        run = Run.read(self.folder)
        asked = from_anywhere(self.training)
        if asked.precision == "auto":  # a run records the precision that was chosen
            asked = dataclasses.replace(asked, precision=run.train.precision)
        others = [
            *_differences("task", from_anywhere(run.task), from_anywhere(self.task)),
            *_differences("model", run.model, self.model),
            *_differences("train", run.train, dataclasses.replace(asked, **_of_the_place(run.train))),
        ]
        if others:
            raise checkpoint.Error(
                f"{self.folder} holds a run of other settings than {self.name!r}: {', '.join(others)}; "
                "delete or rename the folder"
            )
        return run

    def settings(self) -> dict[str, Any]:
        """All settings of its training, except the places of files."""
        task = dataclasses.replace(self.task, **dict.fromkeys(getattr(self.task, "PATHS", ())))
        parts = {"task": task, "model": self.model, "train": self.training}
        return {name: _plain(part) for name, part in parts.items()}

    def concluded(self) -> dict[str, Any] | None:
        """Return what the kept file says, None without one. Ends the program if its settings are others."""
        if self.kept is None or not self.kept.exists():
            return None
        saved, settings = json.loads(self.kept.read_text()), self.settings()
        for name, part in (("task", self.task), ("model", self.model), ("train", self.training)):
            # A setting that did not exist when the file was written has its default.
            saved["settings"][name] = _plain(
                from_json(type(part), legacy.upgrade_config(saved["settings"][name]), name)
            )
        for training in (saved["settings"]["train"], settings["train"]):
            for name in OF_THE_PLACE:
                training.pop(name)
        if saved["settings"] != settings:
            sys.exit(f"{self.kept} is of other settings than {self.name!r}: delete or rename it")
        return saved

    def conclude(self, command: str, found: Callable[["Trial"], dict[str, Any]]) -> None:
        """Write the kept file, if the trial is trained and has none: how it learned, and what `found` returns
        for it, or why it diverged."""
        if self.kept is None or self.concluded() is not None or (score := self.scored()) is None:
            return
        curves = train.curves(self.folder)
        # Wall-clock minutes, whatever else the machine did meanwhile; None if nothing was logged.
        minutes = max(curves.get(MINUTES, {}).values(), default=None)
        more = {"curve": curves.get(f"validate_{self.score}", {}), "minutes_by_the_clock": minutes}
        if math.isnan(score):
            more |= {"diverged": True, "why": json.loads(self.result.read_text())["why"]}
        else:
            more |= found(self)
        reports.save(self.kept, command=command, settings=self.settings(), **more)

    def _scored_on(self, judge: Any, split: Any, most: int) -> float:
        """The score of its model on the first samples of a split. Raises Diverged if it is not finite."""
        places = range(min(most, len(getattr(judge, split))))
        model = checkpoint.load(self.folder)
        score = evaluate.scores(model, judge, places, batch=BATCH, split=split)[self.score].mean
        if not math.isfinite(score):
            raise Diverged(f"the score on {split} samples is not finite")
        return score


def train_all(trials: Sequence[Trial], *, workers: int | None, minutes: float) -> None:
    """Train what is not trained yet, one core each, and start none after so many minutes.

    Ends the program with exit code 1 and the reasons: before the first training if a folder is that of
    another trial, after the last one if any failed.
    """
    trials = [trial for trial in trials if trial.concluded() is None]
    _end_with([failure for trial in trials if (failure := _failure(trial.check))])
    todo = [trial for trial in trials if trial.scored() is None]
    train_ready(lambda: todo, workers=workers, minutes=minutes, of=f" of {len(todo)}")


def train_ready(
    ready: Callable[[], Iterable[Trial]], *, workers: int | None, minutes: float, of: str = ""
) -> None:
    """Train what is ready, one core each, and start none after so many minutes. Whenever a training ends,
    look again, because others may have become ready.

    ready: the trials that can start, the most urgent first; they may include those in training. of: how many
    there are, if known. If any failed, the program ends with exit code 1 and the reasons, after all the
    others.
    """
    workers = workers or os.cpu_count() or 1
    end = time.time() + 60 * minutes
    began: set[Path] = set()
    ended = 0
    failed = []
    running: set[Future[tuple[str, bool]]] = set()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_worker) as pool:
        try:
            while True:
                for trial in ready():
                    if len(running) == workers or time.time() >= end:
                        break
                    if trial.folder not in began:
                        began.add(trial.folder)
                        running.add(pool.submit(_train_one, trial))
                if not running:
                    break
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for each in done:
                    report, failure = each.result()
                    ended += 1
                    print(f"{ended}{of}: {report}", flush=True)
                    failed += [report] if failure else []
        except (KeyboardInterrupt, BrokenProcessPool):
            pool.shutdown(cancel_futures=True)
            sys.exit("a training was stopped or killed: the same command resumes")
    _end_with(failed)


def train_and_keep(
    parts: Iterable[Callable[[], Sequence[Trial]]],
    command: str,
    found: Callable[[Trial], dict[str, Any]],
    *,
    workers: int | None,
    minutes: float,
) -> None:
    """Train each part and save the kept file of each trained trial, even if others have failed. A part may
    depend on the outcomes of those before it, and waits for all of them. Starts no training after so many
    minutes.
    """
    end = time.time() + 60 * minutes
    for part in parts:
        trials = part()
        try:
            train_all(trials, workers=workers, minutes=(end - time.time()) / 60)
        finally:
            for one in trials:
                one.conclude(command, found)
        if any(one.concluded() is None for one in trials):
            print("no time left: the same command resumes")
            return


def add_options(parser: argparse.ArgumentParser, *, minutes: float) -> None:
    """The flags of every experiment that trains."""
    text = "begin no further training after so many"
    parser.add_argument("--minutes", type=float, default=minutes, help=text)
    parser.add_argument("--workers", type=_workers, default=os.cpu_count(), help="trainings at a time")
    parser.add_argument("--list", action="store_true", help="what is done and what is not")


def _workers(text: str) -> int:
    """Parse the value of --workers."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


PLAIN = train.Config(optimizer="radam", lr=1e-4, weight_decay=0.0, precision="32")


def updates(
    task: Any, model: Any, batches: Sequence[Any], training: train.Config = PLAIN
) -> Callable[[], None]:
    """A call that updates a fresh model once for each of these batches, to time a step."""
    torch.manual_seed(0)
    network = model.build()
    stepped = optimizer(network, training)

    def step() -> None:
        for batch in batches:
            stepped.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=training.precision == "bf16"):
                loss = task.loss(network, batch)
            loss.backward()
            stepped.step()

    return step


def earlier(saved: dict[str, Any]) -> list[dict[str, Any]]:
    """The reports that a report's file has held so far, the oldest first, for a new one to keep; none if
    there was no file."""
    if not saved:
        return []
    return [*saved.get("earlier", []), {name: x for name, x in saved.items() if name != "earlier"}]


def tell(trials: Sequence[Trial]) -> None:
    """Print what is done and what is not, and which folders hold the run of another trial."""
    for trial in trials:
        if trial.concluded() is not None:
            print(f"done  {trial.name}")
            continue
        other = _failure(trial.check)
        print(other or f"{'to do' if trial.scored() is None else 'done '} {trial.name}")


def ranked(scores: Mapping[float, float | None], *, lower_is_better: bool) -> list[float]:
    """Learning rates, that of the best score first, and of equal scores the lower rate; none whose score is
    None or NaN, because it diverged."""
    sign = 1 if lower_is_better else -1
    known = {rate: sign * x for rate, x in scores.items() if x is not None and not math.isnan(x)}
    return sorted(known, key=lambda rate: (known[rate], rate))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean of three seeds and half of its 95 % confidence interval, Student's t."""
    if len(values) != 3:
        raise ValueError(f"the quantile is that of three values, got {len(values)}")
    return statistics.mean(values), STUDENT * statistics.stdev(values) / 3**0.5


def markdown(lines: Iterable[Iterable[str]]) -> str:
    """A table of these cells; the second line must be that of dashes."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _of_the_place(training: Any) -> dict[str, Any]:
    return {name: getattr(training, name) for name in OF_THE_PLACE}


def _plain(part: Any) -> Any:
    """A configuration as a file holds it, with lists for tuples."""
    return json.loads(json.dumps(to_json(part)))


def _differences(where: str, there: Any, here: Any) -> Iterator[str]:
    """The fields in which two configurations differ, and how."""
    if dataclasses.is_dataclass(there) and type(there) is type(here):
        for field in dataclasses.fields(there):
            name = field.name
            yield from _differences(f"{where}.{name}", getattr(there, name), getattr(here, name))
    elif there != here:
        yield f"{where} is {there!r} there and {here!r} here"


def _failure(call: Callable[[], object]) -> str | None:
    """Return the error that a call raises, as a line; None if it raises none."""
    try:
        call()
    except Interrupted:
        raise
    except Exception as error:
        message = " ".join(str(error).split())
        return message if isinstance(error, checkpoint.Error) else f"{type(error).__name__}: {message}"
    return None


def _end_with(failures: list[str]) -> None:
    """End the program with the failures, if there are any."""
    if failures:
        sys.exit("\n".join(failures))


def _worker() -> None:
    """Use one thread, and end with the program that started this process."""
    keep_freed_memory()
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _train_one(trial: Trial) -> tuple[str, bool]:
    """Train one trial to its end -> a line about it, and whether it failed. A trial that is stopped ends the
    process, and with it all the others.
    """
    began = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            failure = _failure(trial.train)
        except Interrupted:
            os._exit(130)
    if failure:
        return f"{trial.name} failed: {failure}", True
    return f"{trial.name}: {trial.score} {trial.scored():.3f}, {time.monotonic() - began:.0f} s", False
