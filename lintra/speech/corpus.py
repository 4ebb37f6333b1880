"""The features of many utterances in one array, and the utterances they belong to."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from lintra.audio import features
from lintra.audio.errors import SpeechError
from lintra.io.files import (
    expanded,
    in_turn,
    refuse_irregular,
    remove_abandoned,
    write_atomically,
    write_lines,
)
from lintra.speech.cache import Parts, Write, holds_other_tensors, origin_of, reopen, write
from lintra.speech.manifest import Utterance
from lintra.speech.utterance_features import arrays

SHOWN = 3  # of what cannot be used


class Skipped(NamedTuple):
    """An utterance that cannot be used."""

    id: str
    reason: str


def describe_skipped(skipped: Sequence[Skipped], file: Path | None = None) -> str:
    """Say how many cannot be used, why the first ones cannot, and which file lists all of them."""
    parts = [f"{each.id}: {each.reason}" for each in skipped[:SHOWN]]
    parts += ["..."] if len(skipped) > SHOWN else []
    parts += [] if file is None else [f"all of them in {file}"]
    return f"{len(skipped):,} skipped: {'; '.join(parts)}"


def write_skipped(path: Path, skipped: Sequence[Skipped]) -> None:
    """Write a file with a line {"id": ..., "reason": ...} for each, no file for none. Raises files.Error."""
    if skipped:
        write_lines(path, (json.dumps(each._asdict(), ensure_ascii=False) for each in skipped))
    else:
        path.unlink(missing_ok=True)  # from an earlier time with some


class CorpusLike(Protocol):
    """Utterances and their features, which are kept or computed when they are asked for."""

    @property
    def ids(self) -> list[str]: ...
    @property
    def texts(self) -> list[str | None]: ...
    @property
    def speakers(self) -> list[str | None]: ...

    def __len__(self) -> int: ...

    def frames(self, i: int) -> int:
        """Return the number of frames of utterance i."""
        ...

    def array(self, i: int) -> np.ndarray:
        """Return the features of utterance i, float32 [t bins]."""
        ...

    def sampled_frames(self) -> np.ndarray:
        """Return features that represent those of all utterances, float32 [t bins]."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Utterances and features in one array, those of utterance i in rows offsets[i] to offsets[i + 1]."""

    ids: list[str]
    texts: list[str | None]
    speakers: list[str | None]
    features: np.ndarray  # float32 [frames bins], in memory or mapped from a file
    offsets: np.ndarray  # int64 [n + 1]

    def __len__(self) -> int:
        return len(self.ids)

    def frames(self, i: int) -> int:
        """Return the number of frames of utterance i."""
        return int(self.offsets[i + 1] - self.offsets[i])

    def array(self, i: int) -> np.ndarray:
        """The features of utterance i, float32 [t bins]; a view."""
        return self.features[self.offsets[i] : self.offsets[i + 1]]

    def sampled_frames(self) -> np.ndarray:
        """Return the features that stand for all, float32 [t bins]: all of them."""
        return self.features


def prepare(
    utterances: Sequence[Utterance],
    config: features.Config,
    *,
    cache: Path | None,
    speeds: Sequence[float] = (1.0,),
    report: Callable[[int], object] = lambda done: None,
) -> tuple[Corpus, list[Skipped]]:
    """The features of those that can be used, and the others with the reason.

    cache: a file *.safetensors to keep them in, from which they are then mapped into memory, however many; a
    cache of other audio or settings, or a damaged one, is computed again. speeds: each utterance is included
    once for each, called id@1.1 and so on; given features change in tempo alone. report: is called with how
    many utterances are done. Raises SpeechError if no utterance can be used, files.Error
    if the cache cannot be written.
    """
    check_speeds(speeds)
    if cache is None:
        pieces: list[np.ndarray] = []
        parts = _compute(utterances, config, speeds, report, pieces.append)
        return _corpus(np.concatenate(pieces), parts, utterances, speeds)
    path = expanded(cache)
    if path.suffix != ".safetensors" or path.is_dir():  # perhaps the audio itself, which would be overwritten
        raise ValueError(f"cache must be a file named *.safetensors, got {cache}")
    refuse_irregular(path, SpeechError)
    origin = origin_of(utterances, config, speeds)
    wanted = (path, origin, config.bins, len(utterances), len(speeds))
    found = reopen(*wanted)
    if found is None:
        if holds_other_tensors(path):
            raise SpeechError(f"{path} holds other tensors than a cache of features: name another file")
        remove_abandoned(path)
        compute = partial(_compute, utterances, config, speeds, report)
        with in_turn(path):  # all processes of a training begin here at once
            found = reopen(*wanted)
            if found is None:
                write_atomically(path, lambda place: write(place, origin, config.bins, compute))
                found = reopen(*wanted)
    if found is None:
        raise SpeechError(f"{path} is not what was written: something else changes it")
    return _corpus(*found, utterances, speeds)


def check_speeds(speeds: Sequence[float]) -> None:
    """Raise ValueError unless utterances can be heard at each of these speeds."""
    if not speeds or len(set(speeds)) < len(speeds) or not all(0.1 <= speed <= 10 for speed in speeds):
        raise ValueError(f"speeds must be different numbers in 0.1 .. 10, got {tuple(speeds)}")


def id_at_speed(utterance: Utterance, speed: float) -> str:
    """Return the id of an utterance at a speed: its own, or with the speed after it, as in id@1.1."""
    return utterance.id if speed == 1 else f"{utterance.id}@{speed:g}"


def none_usable(utterances: Sequence[Utterance], reasons: Sequence[str]) -> SpeechError:
    """Return the error for utterances of which none can be used, the first for the first of these reasons."""
    first = f"; the first, {utterances[0].id}: {reasons[0]}" if reasons else ""
    return SpeechError(f"none of {len(utterances)} utterances can be used{first}")


def _corpus(
    rows: np.ndarray, parts: Parts, utterances: Sequence[Utterance], speeds: Sequence[float]
) -> tuple[Corpus, list[Skipped]]:
    used = [(utterances[i], speed) for i in parts.kept for speed in speeds]
    corpus = Corpus(
        ids=[id_at_speed(x, speed) for x, speed in used],
        texts=[x.text for x, _ in used],
        speakers=[x.speaker for x, _ in used],
        features=rows,
        offsets=np.concatenate([[0], np.cumsum(parts.lengths, dtype=np.int64)]),
    )
    return corpus, [Skipped(utterances[i].id, reason) for i, reason in parts.skipped]


def _compute(
    utterances: Sequence[Utterance],
    config: features.Config,
    speeds: Sequence[float],
    report: Callable[[int], object],
    write: Write,
) -> Parts:
    """Give `write` the features of one utterance after another."""
    lengths, kept, skipped = [], [], []
    for i, utterance in enumerate(utterances):
        try:
            found = arrays(utterance, config, speeds)
        except SpeechError as error:
            skipped.append((i, str(error)))
        else:
            kept.append(i)
            lengths += [len(x) for x in found]
            for x in found:
                write(x)
        report(i + 1)
    if not kept:
        raise none_usable(utterances, [reason for _, reason in skipped])
    return Parts(np.array(lengths, np.int32), np.array(kept, np.int32), skipped)
