"""Splits of utterances into training, validation and test sets, without those that cannot be used."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lintra.audio import features
from lintra.audio.errors import SpeechError
from lintra.audio.symbols import Symbols
from lintra.io.files import expanded
from lintra.models import ctc
from lintra.speech import corpora
from lintra.speech.alignment import frames_needed
from lintra.speech.corpus import CorpusLike, Skipped, describe_skipped
from lintra.speech.manifest import Utterance, read_kaldi, read_manifest
from lintra.speech.utterance_features import given
from lintra.tasks.base import DataError
from lintra.tasks.datasets.data_files import NAME_THE_FOLDER, all_or_none, named_folder

HELD_BACK = 10  # one utterance or speaker in this many, where there is no test set
ENOUGH_SPEAKERS = 2 * HELD_BACK  # with fewer, training would miss one held back

Splits = dict[str, list[Utterance]]  # by their use

_CORPORA: Mapping[str, tuple[Callable[[Path], Splits], Sequence[str]]] = {
    "an4": (corpora.an4, corpora.AN4_FILES),
    "fsdd": (corpora.fsdd, corpora.FSDD_FILES),
}


def read(config: Any) -> Splits:
    """The utterances that a configuration of the task names to learn from, "train"; of a corpus with a name
    those to test on too, "test". Raises DataError and SpeechError.
    """
    if config.data is not None:
        return _corpus(config)
    if config.manifest is not None:
        return {"train": read_manifest(config.manifest)}
    if config.kaldi is not None:
        return {"train": read_kaldi(config.kaldi)}
    raise DataError(
        "which speech? Name a corpus with --data an4 or fsdd, a file of JSON lines with --manifest or a "
        "folder in Kaldi's form with --kaldi"
    )


def hold_back(utterances: Sequence[Utterance]) -> tuple[list[Utterance], list[Utterance]]:
    """Hold back a tenth to validate on: of the speakers if all are known and there are enough of them, so
    that none is heard in training, else of the utterances. The choice is random, by a fixed seed. Raises
    DataError for fewer than ten utterances.
    """
    if len(utterances) < HELD_BACK:
        raise DataError(f"there are {len(utterances)} utterances to learn from: take {HELD_BACK} or more")
    groups = [utterance.speaker for utterance in utterances]
    if None in groups or len(set(groups)) < ENOUGH_SPEAKERS:
        groups = [utterance.id for utterance in utterances]
    names = sorted(set(groups))  # pyright: ignore[reportArgumentType]
    held = {names[i] for i in np.random.default_rng(0).permutation(len(names))[: len(names) // HELD_BACK]}
    train, validate = [], []
    for group, utterance in zip(groups, utterances, strict=True):
        (validate if group in held else train).append(utterance)
    return train, validate


def features_of(utterances: Sequence[Utterance], audio: features.Config) -> features.Config:
    """Return `audio` where there is audio, else a configuration as wide as the first frames that can be used.

    Raises DataError where some come as audio and some as frames, and where none can be used.
    """
    sources = [each.features for each in utterances if each.features is not None]
    if not sources:
        return audio
    if len(sources) < len(utterances):
        raise DataError("some utterances are audio and some are features: they cannot be learned together")
    reasons: list[str] = []
    for source in sources:
        try:
            return features.Config(kind="given", bins=given(source).shape[1])
        except SpeechError as error:
            reasons.append(str(error))
    first = f"{utterances[0].id}: {reasons[0]}"
    raise DataError(f"the features of none of {len(sources):,} utterances can be used; the first, {first}")


@dataclass
class UtteranceSet:
    """A split as training reads it: its features, what was said as numbers, and what could not be used."""

    corpus: CorpusLike
    places: list[int]  # of the utterances that can be used, in the corpus
    targets: list[list[int]]  # the transcript of each
    skipped: list[Skipped] = field(default_factory=list)

    @classmethod
    def of(
        cls, found: tuple[CorpusLike, list[Skipped]], symbols: Symbols, subsample: int, what: str
    ) -> "UtteranceSet":
        """Return the utterances that can be used. Raises DataError, with the first reasons, if there is
        none."""
        utterances = cls(found[0], [], [], list(found[1]))
        for place, (name, text) in enumerate(
            zip(utterances.corpus.ids, utterances.corpus.texts, strict=True)
        ):
            try:
                target = symbols.encode(text or "")
            except SpeechError as error:
                utterances.skipped.append(Skipped(name, str(error)))
                continue
            steps = ctc.steps(utterances.corpus.frames(place), subsample)
            if not target:
                utterances.skipped.append(Skipped(name, "it has no transcript"))
            elif steps < (needed := frames_needed(target)):
                reason = f"{steps} frames after subsampling are too few for its {len(target)} symbols"
                utterances.skipped.append(Skipped(name, f"{reason}: it needs {needed}"))
            else:
                utterances.places.append(place)
                utterances.targets.append(target)
        if not utterances.places:
            raise DataError(f"no utterance to {what} on can be used: {describe_skipped(utterances.skipped)}")
        return utterances


def _corpus(config: Any) -> Splits:
    """The splits of a corpus with a name; its files are in the folder that is named, or in `speech` there."""
    folder = named_folder(config.data_dir)
    if folder is None:
        raise DataError(f"the files of {config.data} are not known: {NAME_THE_FOLDER}")
    if not folder.is_dir():
        wrong = "is not a folder" if folder.exists() else "does not exist"
        raise DataError(f"{folder}, for the files of {config.data}, {wrong}: {NAME_THE_FOLDER}")
    read, names = _CORPORA[config.data]
    place = folder / "speech" if (folder / "speech").is_dir() else folder
    if all_or_none(place, names) is None:
        raise DataError(
            f"{place} holds neither the corpus {config.data}, which is {' and '.join(names)}, nor a data "
            "folder of Kaldi, which has a file text; utterances of your own can also be a file of JSON lines"
        )
    return read(place)


def is_own(path: str) -> bool:
    """Return whether there is a file of JSON lines or a Kaldi folder at a path, judging by its content."""
    place = expanded(path)
    return place.is_file() or (place / "text").is_file()


def own(path: str) -> list[Utterance]:
    """Return the utterances of a file of JSON lines, or of a Kaldi folder. Raises SpeechError."""
    place = expanded(path)
    return read_kaldi(place) if place.is_dir() else read_manifest(place)
