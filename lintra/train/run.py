"""Runs: folders whose run.json holds all that is needed to resume them."""

import contextlib
import dataclasses
import hashlib
import json
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lintra import legacy, models, tasks
from lintra.checkpoint import (
    CONFIG,
    FORMAT,
    check_format,
    checkpoints,
    find,
    from_json,
    load,
    refuse_foreign,
    step_of,
    to_json,
    with_weights,
)
from lintra.config import registry
from lintra.config.fields import check_one, shown
from lintra.io.files import (
    Error,
    expanded,
    leftovers,
    locked,
    read_json,
    refuse_unwritable,
    write_atomically,
)
from lintra.train import launch
from lintra.train.config import Config
from lintra.train.file_copies import (
    Sums,
    copied,
    find_copies,
    keep_copies,
    refuse_others,
    refuse_unreadable,
)

RUN = "run.json"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A task, a model and how it is trained; `folder` holds run.json, the checkpoints and the logs."""

    folder: Path
    task: Any  # the Config of a file in lintra/tasks
    model: Any  # the Config of a file in lintra/models
    train: Config
    data: dict[str, Any] | None = None  # fingerprint of the data; None: not begun, or by an older lintra
    fitted_steps: int | None = None  # fewer than train.steps, where max_minutes ends it sooner
    copies: Sums = dataclasses.field(default_factory=dict)  # of the copies of files in the folder
    job: str | None = None  # digest of the launcher's job that began it, and of what was asked for

    @property
    def steps(self) -> int:
        """The step that ends the run."""
        return self.train.steps if self.fitted_steps is None else self.fitted_steps

    @property
    def resuming(self) -> str:
        """The flag that resumes the run, as a shell takes it."""
        return f"--resume {shlex.quote(str(self.folder))}"

    @classmethod
    def create(cls, folder: str | Path, *, task: Any, model: Any, train: Config) -> "Run":
        """Write run.json, and copies of files that its checkpoints need, into a folder without a run or
        checkpoints; the first process does so for all. A job restarted by its launcher finds the run that it
        began itself, and resumes it. Raises Error if there is another run, or another program begins or
        trains one, TypeError for a model with a class of your own in it, of which no checkpoint could be
        written."""
        refuse_foreign(model, "model")
        run = cls(folder=Path(folder), task=from_anywhere(task), model=model, train=from_anywhere(train))
        if not launch.is_first_process():
            return run
        run = dataclasses.replace(run, job=run.digest_of_job())
        if not run.folder.is_dir():
            refuse_unreadable(run.task)  # before there is an empty folder
            refuse_unwritable(run.folder / RUN)
        with locked(run.folder):  # two may begin at once
            return run._begin()

    def _begin(self) -> "Run":
        """Return the run once it is written, or the one that this job had begun in the folder."""
        if (self.folder / RUN).exists():
            if (begun := _begun_by(self)) is not None:
                return begun
            raise Error(
                f"{self.folder} holds a run already: resume it with {self.resuming}, or choose another folder"
            )
        if checkpoints(self.folder):
            raise Error(f"{self.folder} holds checkpoints without their {RUN}: choose another folder")
        task, sums = keep_copies(self.task, self.folder)
        run = dataclasses.replace(self, task=task, copies=sums)
        run.write()
        return run

    @classmethod
    def read(cls, folder: str | Path, own: Any = None) -> "Run":
        """The run in `folder`. own: the task, for a run of one that does not come with lintra. Raises Error
        if there is none or run.json does not describe a run."""
        file = Path(folder) / RUN
        if not file.exists():
            above = file.absolute().parent.parent  # that of a checkpoint
            where = f"; that of the run is in {above}" if (above / RUN).exists() else ""
            raise Error(f"{folder} holds no run: there is no {RUN} in it{where}")
        content = read_json(file)
        if not isinstance(content, dict):
            raise Error(f"{file} is not a run: it is not an object")
        check_format(content.get("format"), file)
        content = legacy.upgrade_run(content) if content["format"] == legacy.FORMAT else content
        try:
            task, model, settings = (_object(content, name) for name in ("task", "model", "train"))
            if (name := task.get("name")) not in tasks.names() and own is None:
                known = ", ".join(tasks.names())
                raise ValueError(
                    f"its task is {shown(name)}, which does not come with lintra ({known}): the program "
                    "that defines it can train and use it, with a lintra.train.Run made there"
                )
            run = cls(
                folder=Path(folder),
                task=from_json(tasks.load(name).Config, task, "task") if name in tasks.names() else own,
                model=from_json(registry.load(models, model.get("name", ""), "model").Config, model, "model"),
                train=from_json(Config, settings, "train"),
                data=_object(content, "data") if "data" in content else None,
                fitted_steps=_fitted(content.get("fitted_steps"), settings),
                copies=_object(content, "copies") if "copies" in content else {},
                job=content.get("job"),
            )
            check_one("job", str | None, run.job)
        except (TypeError, ValueError) as error:
            raise Error(f"{file}: {error}") from error
        return dataclasses.replace(run, task=find_copies(run.task, run.folder, run.copies))

    @classmethod
    def of(cls, model: str | Path) -> "Run | None":
        """The run of a model, given the run's folder or one of its checkpoints; None if there is none. Raises
        Error."""
        folder = find(model)
        above = [folder.resolve().parent] if (folder / CONFIG).exists() else []  # only of a checkpoint
        places = [x for x in (folder, *above) if (x / RUN).exists()]
        return cls.read(places[0]) if places else None

    @classmethod
    def around(cls, model: str | Path) -> "Run":
        """The run of a model, given the run's folder or one of its checkpoints. Raises Error."""
        run = cls.of(model)
        if run is None:
            raise Error(
                f"{find(model)} belongs to no run (no {RUN} in it or above), so its task is unknown: copy "
                f"the {RUN} of its training into it, or use lintra.generation.sampling in Python"
            )
        return run

    def write(self) -> None:
        """Write run.json, atomically; the first process for all."""
        if not launch.is_first_process():
            return
        parts = {name: to_json(getattr(self, name)) for name in ("task", "model", "train")}
        parts["task"] |= copied(self.task)
        optional = {name: getattr(self, name) or None for name in ("data", "fitted_steps", "copies", "job")}
        parts |= {name: value for name, value in optional.items() if value is not None}
        text = json.dumps({"format": FORMAT, **parts}, indent=2) + "\n"
        write_atomically(self.folder / RUN, lambda place: place.write_text(text))

    def changed(
        self,
        *,
        task: Any = None,
        data: dict[str, Any] | None = None,
        fitted_steps: int | None = None,
        **settings: Any,
    ) -> "Run":
        """Return the run with another configuration of its task, other training settings, another fingerprint
        of its data or other steps that fit into its time, from now on. The steps are fitted anew to other
        `steps`, and to more time where the run has come to the last of them."""
        changes: dict[str, Any] = {"train": dataclasses.replace(self.train, **settings)}
        anew = "steps" in settings or ("max_minutes" in settings and self._ended())
        changes["fitted_steps"] = fitted_steps or (None if anew else self.fitted_steps)
        run = dataclasses.replace(self, task=task or self.task, data=data or self.data, **changes)
        if run != self:
            run.write()
        return run

    def _ended(self) -> bool:
        """Return whether the newest checkpoint is of the run's last step."""
        return bool(found := self.checkpoints()) and step_of(found[-1]) >= self.steps

    def joined(self) -> "Run":
        """Return the run as the first process has written it by now, with this process's own settings where
        they have not been left to the first one. Raises Error."""
        begun = self.read(self.folder, self.task)
        task = find_copies(self.task, self.folder, begun.copies)
        precision = begun.train.precision if self.train.precision == "auto" else self.train.precision
        train = dataclasses.replace(self.train, precision=precision)
        return dataclasses.replace(begun, task=task, model=self.model, train=train)

    def digest(self) -> str:
        """Return a digest of run.json; an empty one where there is none."""
        file = self.folder / RUN
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else ""

    def digest_of_job(self) -> str | None:
        """Return a digest of the job that started this process and of the settings of the run; None where
        nothing could restart it."""
        job = launch.job()
        if job is None:
            return None
        asked = [to_json(x) for x in (self.task, self.model, self.train)]
        return hashlib.sha256(json.dumps([job, asked]).encode()).hexdigest()[:16]

    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, the oldest first."""
        return checkpoints(self.folder)

    def drop(self, keep: int, best: Path | None = None) -> None:
        """Remove all checkpoints but the newest `keep` and `best`, each in one move: half of one would look
        whole.

        One that cannot be removed, for instance with a file open on a network drive, stays until next
        time."""
        for old in self.checkpoints()[:-keep]:
            if old == best:
                continue
            with contextlib.suppress(OSError):
                shutil.rmtree(old.rename(old.with_name(f".{old.name}.dropped")))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run for the program that trains it, by its first process for all. Raises Error if
        another holds it."""
        with locked(self.folder) if launch.is_first_process() else contextlib.nullcontext():
            yield

    def sweep(self) -> None:
        """Remove what a killed process left half written or half removed."""
        for leftover in (*leftovers(self.folder, "step-[0-9]*"), *leftovers(self.folder, RUN)):
            shutil.rmtree(leftover, ignore_errors=True)


def from_anywhere(settings: Any) -> Any:
    """Return settings of a task or of training that mean the same in every folder: with absolute paths, where
    those exist. A model that comes with lintra keeps its name.
    """
    given = {name: getattr(settings, name) for name in getattr(settings, "PATHS", ())}
    found = {name: expanded(x) for name, x in given.items() if x and expanded(x).exists()}
    if "start_from" in found and find(given["start_from"]) != found["start_from"]:
        del found["start_from"]
    return dataclasses.replace(settings, **{name: str(x.absolute()) for name, x in found.items()})


def first_model(config: Any, settings: Config, task: Any = None) -> Any:
    """The model before its first step: as initialised, or with the weights of the trained one it starts from.

    task: the settings of the task that it is to learn. Raises Error if the trained one is not there, has
    other tensors, or is of other symbols or features, or of another tokenizer.
    """
    if settings.start_from is None:
        return config.build()
    trained = load(settings.start_from).to(torch.get_default_dtype())  # in which a resumed run is built
    if getattr(task, "COPIES", {}) and (other := Run.of(settings.start_from)) is not None:
        refuse_others(task, other.task, f"start_from={settings.start_from}")
    for name in ("symbols", "features"):
        if getattr(trained.config, name, None) != getattr(config, name, None):
            raise Error(f"start_from={settings.start_from} has other {name} than the model to be trained")
    try:
        return with_weights(config, trained.state_dict(), find(settings.start_from))
    except Error as error:
        its, our = (dict(_sizes(x)) for x in (trained.config, config))
        other = [name for name in its.keys() & our.keys() if its[name] != our[name]]
        if not other:
            raise
        its, our = (", ".join(f"{name}={x[name]}" for name in sorted(other)) for x in (its, our))
        raise Error(f"{error}: it was trained with {its}, this model has {our}") from error


def _sizes(config: Any) -> Iterator[tuple[str, Any]]:
    """The plain fields of a model's configuration, including nested ones, but not its mechanism's."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name != "dropout" and isinstance(value, (int, float, str, type(None))):
            yield field.name, value
        elif field.name == "encoder":
            yield from _sizes(value)


def _begun_by(run: Run) -> Run | None:
    """Return the run in the folder, if this very job began it and was restarted since."""
    if run.job is None or not launch.restarted():
        return None
    begun = Run.read(run.folder, run.task)
    return begun if begun.job == run.job else None


def _object(content: dict[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(content.get(name), dict):
        raise ValueError(f"{name} must be an object, got {shown(content.get(name))}")
    return content[name]


def _fitted(steps: Any, settings: dict[str, Any]) -> int | None:
    """The steps to which a schedule was shortened, if it was. Raises TypeError, ValueError."""
    check_one("fitted_steps", int | None, steps)
    if steps is not None and not 1 <= steps <= settings.get("steps", Config.steps):
        raise ValueError(f"fitted_steps must lie in 1 .. steps, got {steps}")
    return steps
