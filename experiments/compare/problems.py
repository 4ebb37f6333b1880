"""Problems of comparisons: tasks, networks and steps, and the files that some of them read."""

import dataclasses
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from lintra import checkpoint
from lintra.tasks import recall, selective_copying, state_tracking, text
from lintra.tasks.base import Samples

HERE = Path(__file__).parent
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
_HALF_AT_ONCE = RATES[1:]  # where a quarter of the steps does not separate them: all of these with half
TEST_SEED = 2**20  # the seed of synthetic test data, on which nothing is trained or chosen
Preset = Literal["small", "whole", "paper"]
SHAKESPEARE = {"tinyshakespeare.txt": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"}


class Judge(Protocol):
    """Scorer of a trained model: a task, or the part of one that scoring needs."""

    def per_sample(self, model: Any, batch: Any) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Judged:
    """Samples to test on, scored as a task scores its own."""

    task: Any
    test: Samples

    def per_sample(self, model: Any, batch: Any) -> Any:
        return self.task.per_sample(model, batch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem: what is learned, by which network, in how many steps, and how it is judged."""

    name: str
    title: str
    steps: dict[Preset, int]  # of a training with the full budget
    score: str = "accuracy"
    lower_is_better: bool = False
    causal: bool = True
    files: dict[str, str] = dataclasses.field(default_factory=dict)  # in the folder --data: name -> SHA-256
    batch: int = 32
    rates: Sequence[float] = RATES  # the rates that are searched
    halvings: int = 2  # rungs of the search, the first of steps / 2^halvings
    network: dict[str, Any] = dataclasses.field(default_factory=dict)  # fields of the model's Config
    settings: Any = None  # the task's Config; a problem with files makes it when they are known

    def task(self, data: Path | None) -> Any:
        """Return the task's Config. data: the folder of the files, None if only its settings matter."""
        return self.settings

    def check(self, data: Path | None) -> None:
        """End the program unless `data` holds the files that are needed, unchanged."""
        for name, digest in self.files.items():
            place = self.folder(name, data) / name
            if not place.is_file():
                sys.exit(f"{place} is missing: README.md says where {name} is from")
            refuse_others(str(place), hashlib.sha256(place.read_bytes()).hexdigest(), digest)

    def folder(self, what: str, data: Path | None) -> Path:
        """Return `data`; ends the program if there is none."""
        if data is None:
            sys.exit(f"{self.name} reads {what}: give its folder with --data")
        return data

    def judge(self, data: Path | None) -> Judge:
        """Return the test set, on which nothing was chosen: that of the files, or samples of another seed."""
        if self.settings is None:
            task = self.task(data).build()
            return Judged(task, task.test)
        task = dataclasses.replace(self.settings, data_seed=TEST_SEED).build()
        return Judged(task, task.validate)

    def model(self, attention: Any, network: dict[str, Any]) -> Any:
        """Return the network's Config around a mechanism, with these fields besides the problem's own."""
        return dataclasses.replace(self.task(None).build().model(attention), **{**self.network, **network})

    @property
    def width(self) -> int:
        return self.network["width"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shakespeare(Problem):
    """Bytes of Tiny Shakespeare: nine tenths to learn from and to validate on, the last tenth to test on."""

    files: dict[str, str] = dataclasses.field(default_factory=lambda: dict(SHAKESPEARE))
    length: int = 256

    def task(self, data: Path | None) -> Any:
        place = None if data is None else str(self._first_part(data))
        return text.Config(data=place, length=self.length)

    def judge(self, data: Path | None) -> Judge:
        assert data is not None
        whole = self._whole(data)
        last = np.frombuffer(whole, np.uint8)[_nine_tenths(whole) :]
        return Judged(self.task(data).build(), text.Consecutive(last, self.length))

    def _whole(self, data: Path) -> bytes:
        (name,) = self.files
        return (data / name).read_bytes()

    def _first_part(self, data: Path) -> Path:
        """The nine tenths in a file of their own, because the task holds out the end of its file."""
        whole = self._whole(data)
        part = whole[: _nine_tenths(whole)]
        place = HERE / "runs" / "tinyshakespeare-first-part.txt"
        if not place.exists() or place.read_bytes() != part:
            place.parent.mkdir(parents=True, exist_ok=True)
            checkpoint.write_atomically(place, lambda temporary: temporary.write_bytes(part))
        return place


def mqar(length: int, pairs: int, width: int) -> Problem:
    """Multi-query associative recall, Arora et al. 2023, with 64 keys and 16 values.

    A convolution of four tokens joins a value to its key. Without it no mechanism begins to learn the task in
    thousands of steps. A search that begins with fewer than half of the steps does not separate the rates.
    """
    return Problem(
        name=f"mqar-{length}-{pairs}-{width}",
        title=f"recall of {pairs} pairs in {length} tokens, width {width}",
        steps={"small": 1_000, "whole": 4_000},
        settings=recall.Config(pairs=pairs, keys=64, values=16, length=length),
        rates=_HALF_AT_ONCE,
        halvings=1,
        network={"layers": 2, "width": width, "heads": width // 32, "position": "none", "conv": 4},
    )


_SMALL = {"layers": 2, "width": 64, "heads": 2, "position": "none"}
PROBLEMS: tuple[Problem, ...] = (
    Problem(
        name="parity",
        title="parity of 64 bits",
        steps={"small": 400, "whole": 4_000},
        settings=state_tracking.Config(points=2, length=64),
        rates=RATES[:4],  # contestants that fail are at chance at each of these
        network=_SMALL,
    ),
    mqar(64, 16, 64),
    Problem(
        name="copying",
        title="selective copying of 8 symbols among 48",
        steps={"small": 1_500, "whole": 6_000},
        settings=selective_copying.Config(copied=8, length=48),
        rates=_HALF_AT_ONCE,
        halvings=1,
        network=_SMALL,
    ),
    Problem(
        name="s5",
        title="swaps of S5, 32 of them",
        steps={"small": 800, "whole": 8_000},
        settings=state_tracking.Config(points=5, swaps=True, length=32),
        network=_SMALL,
    ),
    mqar(64, 16, 128),
    mqar(64, 16, 256),
    Shakespeare(
        name="shakespeare",
        title="Tiny Shakespeare, byte by byte",
        steps={"small": 800, "whole": 8_000},
        score="bits_per_byte",
        lower_is_better=True,
        batch=16,
        network={"layers": 2, "width": 128, "heads": 4, "position": "sinusoidal", "dropout": 0.0},
    ),
    *(
        mqar(length, pairs, width)
        for length, pairs in ((256, 64), (64, 4), (128, 8), (128, 32), (256, 16), (512, 64))
        for width in (128, 64, 256)
    ),
)


@dataclasses.dataclass(frozen=True)
class Study:
    """Problems that are compared together, with their command and the folder of the outcomes."""

    command: str
    folder: Path
    problems: tuple[Problem, ...]
    presets: dict[Preset, tuple[str, ...]]  # names of problems
    baselines: tuple[str, ...] = ()  # reports in the folder with scores to compare with

    @property
    def by_name(self) -> dict[str, Problem]:
        return {problem.name: problem for problem in self.problems}

    @property
    def outcomes(self) -> Path:
        return self.folder / "outcomes"

    def of_preset(self, preset: Preset, names: Sequence[str] | None) -> list[Problem]:
        """Return the problems of a preset, or those of these names; a preset may have one as NAME-PRESET.

        Ends the program for one that the preset has no steps for.
        """
        known = self.by_name
        found = [known.get(f"{name}-{preset}", known[name]) for name in names or self.presets[preset]]
        for problem in found:
            if preset not in problem.steps:
                sys.exit(f"{problem.name} is of the preset {', '.join(problem.steps)}, not {preset}")
        return found


# Ordered by how much they tell per hour.
_SMALL_PRESET = tuple(problem.name for problem in PROBLEMS[:7])
COMPARISON = Study(
    "python -m experiments.compare",
    HERE,
    PROBLEMS,
    {"small": _SMALL_PRESET, "whole": tuple(problem.name for problem in PROBLEMS)},
    ("guesses.json",),
)
BY_NAME = COMPARISON.by_name


def refuse_others(what: str, found: str, meant: str) -> None:
    """End the program unless two SHA-256 are equal."""
    if found != meant:
        sys.exit(f"{what} is other data: its SHA-256 is {found} and should be {meant}")


def _nine_tenths(whole: bytes) -> int:
    return 9 * len(whole) // 10
