"""Hypotheses of a recogniser for each utterance of a test set, in files that people and other tools read."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lintra.audio.symbols import Unit
from lintra.evaluate.speech import ScoredUtterance
from lintra.io.files import write_lines
from lintra.speech.manifest import Utterance
from lintra.speech.nist import ctm, names, stm, trn

SUFFIXES = (".jsonl", ".trn", ".ctm")


def needs_times(path: Path) -> bool:
    """Return whether a file of this name has the times of words."""
    return path.suffix == ".ctm"


def written(path: Path) -> list[Path]:
    """Return the files that `write` makes of a path: beside .trn and .ctm those of the references, .ref.trn
    and .ref.stm. Raises ValueError for another suffix."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"hypotheses must be files named *{', *'.join(SUFFIXES)}, got {path}")
    beside = {".trn": ".ref.trn", ".ctm": ".ref.stm"}.get(path.suffix)
    return [path] if beside is None else [path, path.with_suffix(beside)]


def write(path: Path, scored: Sequence[ScoredUtterance], utterances: Sequence[Utterance], unit: Unit) -> None:
    """Write hypotheses and references into `written(path)`, each file whole or not at all.

    utterances: of the test set, among them those in `scored`, whose audio and speakers they name. unit: of
    what the model writes. Raises files.Error.
    """
    known = {utterance.id: utterance for utterance in utterances}
    for file, lines in zip(written(path), _LINES[path.suffix], strict=True):
        write_lines(file, lines(scored, known, unit))


Known = Mapping[str, Utterance]
_Lines = Callable[[Sequence[ScoredUtterance], Known, Unit], Iterator[str]]


def _objects(scored: Sequence[ScoredUtterance], known: Known, unit: Unit) -> Iterator[str]:
    for each in scored:
        errors = {name: asdict(edits) for name, edits in each.edits(unit).items()}
        said = {"reference": each.reference, "hypothesis": each.hypothesis, "errors": errors}
        yield json.dumps({"id": each.id, **_source(known[each.id]), **said}, ensure_ascii=False)


def _source(utterance: Utterance) -> dict[str, Any]:
    """Return the source of an utterance, as in a manifest; audio in memory has none."""
    places = {name: getattr(utterance, name) for name in ("audio", "features")}
    found: dict[str, Any] = {name: str(x) for name, x in places.items() if isinstance(x, Path)}
    if utterance.duration is not None or utterance.start:
        found |= {"start": utterance.start}
    if utterance.duration is not None:
        found |= {"duration": utterance.duration}
    return found if utterance.speaker is None else {**found, "speaker": utterance.speaker}


def _trn(text: Callable[[ScoredUtterance], str]) -> _Lines:
    def lines(scored: Sequence[ScoredUtterance], known: Known, unit: Unit) -> Iterator[str]:
        called = names((each.id for each in scored), r"[\s()]")
        yield from (trn(name, text(each)) for name, each in zip(called, scored, strict=True))

    return lines


def _ctm(scored: Sequence[ScoredUtterance], known: Known, unit: Unit) -> Iterator[str]:
    for name, each in _sorted(scored):
        yield from (ctm(name, word) for word in each.words)


def _stm(scored: Sequence[ScoredUtterance], known: Known, unit: Unit) -> Iterator[str]:
    for name, each in _sorted(scored):
        yield stm(name, known[each.id].speaker, each.duration, each.reference)


def _sorted(scored: Sequence[ScoredUtterance]) -> list[tuple[str, ScoredUtterance]]:
    """Sort by name, as these tools require."""
    return sorted(zip(names(each.id for each in scored), scored, strict=True), key=lambda item: item[0])


_LINES: Mapping[str, Sequence[_Lines]] = {
    ".jsonl": (_objects,),
    ".trn": (_trn(lambda each: each.hypothesis), _trn(lambda each: each.reference)),
    ".ctm": (_ctm, _stm),
}
