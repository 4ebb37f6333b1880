"""Lists of recordings with their transcripts: JSON lines, and the folders of Kaldi."""

import json
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lintra.audio.errors import SpeechError
from lintra.audio.lines import lines
from lintra.audio.waveform import Audio
from lintra.config import fields
from lintra.io.files import expanded

_FIELDS = {"audio": str, "text": str, "id": str, "speaker": str, "start": float, "duration": float}
_LONGEST = 1e9  # seconds
_UNPAIRED = frozenset(map(chr, range(0xD800, 0xE000)))  # surrogate halves, which JSON can write


@dataclass(frozen=True, kw_only=True)
class Utterance:
    """Utterance of a corpus: a recording, a section of it or its features, and the text."""

    id: str
    text: str | None = None
    audio: Path | Audio | None = None
    start: float = 0.0  # second of the audio
    duration: float | None = None  # seconds of the audio; None: to its end
    features: np.ndarray | Path | None = None  # [t bins]; a .npy file, or a .npz file that holds one array
    speaker: str | None = None


def read_manifest(path: str | Path) -> list[Utterance]:
    """A file of lines {"audio": "a.wav", "text": "HELLO"}; "id", "speaker", "start" and "duration" as needed.

    Audio paths are relative to the file's folder; start and duration are seconds. Without an id, an utterance
    is named after its audio, and its start if it has one. Fields of other names are ignored.
    Raises SpeechError that names the file, the line and what is wrong there.
    """
    path = expanded(path)
    found: dict[str, Utterance] = {}
    for number, line in lines(path):
        place = _Place(path, number)
        utterance = _of_json(line, place)
        if utterance.id in found:
            raise SpeechError(f"{place}: the id {utterance.id!r} is there already")
        found[utterance.id] = utterance
    if not found:
        raise SpeechError(f"{path} holds no utterances")
    return list(found.values())


def read_kaldi(folder: str | Path) -> list[Utterance]:
    """The utterances of a Kaldi folder, in the order of its file `text`.

    wav.scp: recordings, an id and a file a line; segments, where there is one: utterance, recording, start
    and end in seconds (-1: to its end). feats.scp, as well or instead: utterances, each with a .npy or .npz
    file; training then reads these, and a trained model what it was trained on. utt2spk, where there is one.
    Paths are relative to the folder. Commands in wav.scp are refused, not run, and Kaldi's archives are not
    read. Every utterance with a text must be in the other files, and vice versa. Raises SpeechError that
    names the file, the line and what is wrong there.
    """
    folder = expanded(folder)
    if not (folder / "text").exists():
        raise SpeechError(f"{folder} is not a Kaldi folder: {folder / 'text'} does not exist")
    texts = _table(folder / "text", empty=True)
    sections = _sections(folder)
    features = {id: _features(entry, folder) for id, entry in _table(folder / "feats.scp").items()}
    speakers = _table(folder / "utt2spk")
    for found, name in ((sections, "audio"), (features, "features"), (speakers, "speaker")):
        for id, entry in texts.items() if found else ():
            if id not in found:
                raise SpeechError(f"{entry.place}: utterance {id!r} has no {name}")
        for id, entry in found.items():
            if id not in texts:
                raise SpeechError(f"{entry.place}: utterance {id!r} has no text")
    if not sections and not features:
        raise SpeechError(f"{folder} has no audio (wav.scp) and no features (feats.scp)")
    return [
        Utterance(
            id=id,
            text=entry.value,
            audio=sections[id].audio if sections else None,
            start=sections[id].start if sections else 0.0,
            duration=sections[id].duration if sections else None,
            features=features[id].value if features else None,
            speaker=speakers[id].value if speakers else None,
        )
        for id, entry in texts.items()
    ]


class _Place(NamedTuple):
    path: Path
    number: int

    def __str__(self) -> str:
        return f"{self.path}, line {self.number:,}"


_SECTIONS = {"begin", "end", "offset"}  # of other formats: left out, the text would be of other audio


class _Entry(NamedTuple):
    value: Any
    place: _Place


class _Section(NamedTuple):
    audio: Path
    start: float
    duration: float | None
    place: _Place


def _of_json(line: str, place: _Place) -> Utterance:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SpeechError(f"{place} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise SpeechError(f"{place} must be an object {{...}}, got {line[:60]}")
    values = {name: x for name, x in content.items() if x is not None and name in _FIELDS}
    for name in content.keys() & _SECTIONS:
        raise SpeechError(f"{place} has {name!r}: give the seconds of a section as start and duration")
    for name in content.keys() - _FIELDS:
        if near := get_close_matches(name.lower(), _FIELDS.keys() - values, 1, 0.8):
            raise SpeechError(f"{place} has the unknown field {name!r} (perhaps {near[0]})")
    for name in ("audio", "text"):
        if name not in values:
            raise SpeechError(f"{place} lacks {name!r}: it has {', '.join(content) or 'nothing'}")
    for name, x in values.items():
        if not fields.fits(_FIELDS[name], x):
            raise SpeechError(f"{place}: {name} must be {fields.describe(_FIELDS[name])}, got {x!r}")
        if x == "" and name != "text":
            raise SpeechError(f"{place}: {name} must not be empty")
        if isinstance(x, str) and not _UNPAIRED.isdisjoint(x):
            raise SpeechError(f"{place}: {name} must be Unicode text, got {x!r}")
    if not 0 <= values.get("start", 0) < _LONGEST:
        raise SpeechError(f"{place}: start must be 0 or more seconds, got {values['start']}")
    if not 0 < values.get("duration", 1) < _LONGEST:
        raise SpeechError(f"{place}: duration must be more than 0 seconds, got {values['duration']}")
    id = values["audio"] + (f":{values['start']}" if "start" in values else "")
    values |= {name: float(values[name]) for name in ("start", "duration") if name in values}
    return Utterance(**{"id": id, **values, "audio": _path(values["audio"], place.path.parent)})


def _sections(folder: Path) -> dict[str, _Section]:
    """Return the sections with speech: the segments of recordings, or each recording whole."""
    recordings = {}
    for id, entry in _table(folder / "wav.scp").items():
        if entry.value == "-" or "|" in (entry.value[0], entry.value[-1]):
            raise SpeechError(f"{entry.place}: a command, which is not run; name the file it would write")
        recordings[id] = _Section(_path(entry.value, folder), 0.0, None, entry.place)
    segments = _table(folder / "segments")
    return {id: _segment(entry, recordings) for id, entry in segments.items()} or recordings


def _segment(entry: _Entry, recordings: dict[str, _Section]) -> _Section:
    recording, *times = entry.value.split()
    try:
        start, end = map(float, times)
    except ValueError as error:
        raise SpeechError(
            f"{entry.place}: expected an utterance, its recording, start and end in seconds"
        ) from error
    if recording not in recordings:
        raise SpeechError(f"{entry.place}: there is no recording {recording!r} in wav.scp")
    if not 0 <= start < _LONGEST or not (end == -1 or start < end < _LONGEST):
        raise SpeechError(f"{entry.place}: an end must come after its start, got {times[0]} to {times[1]}")
    return _Section(recordings[recording].audio, start, None if end == -1 else end - start, entry.place)


def _features(entry: _Entry, folder: Path) -> _Entry:
    path = _path(entry.value, folder)
    if path.suffix not in (".npy", ".npz"):
        raise SpeechError(f"{entry.place}: features must be in a .npy or .npz file, got {entry.value}")
    return entry._replace(value=path)


def _table(path: Path, *, empty: bool = False) -> dict[str, _Entry]:
    """Lines of an id and what belongs to it, which may be nothing if `empty`; of no file, none."""
    found: dict[str, _Entry] = {}
    for number, line in lines(path) if path.exists() else ():
        place = _Place(path, number)
        id, *rest = line.split(maxsplit=1)
        if not rest and not empty:
            raise SpeechError(f"{place}: expected an id and what belongs to it, got {line[:60]!r}")
        if id in found:
            raise SpeechError(f"{place}: {id!r} is there already, in line {found[id].place.number:,}")
        found[id] = _Entry(rest[0] if rest else "", place)
    return found


def _path(written: str, folder: Path) -> Path:
    own = Path(written)
    return folder / (expanded(own) if own.parts[:1] == ("~",) else own)
