"""Forms in which a transcript is written: of a whole recording, or while it is heard."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from lintra.cli import json_lines
from lintra.models import CTC
from lintra.speech import Search, Transcript, Word, transcribe
from lintra.speech.nist import ctm
from lintra.speech.streaming import Transcriber
from lintra.speech.subtitles import Cue, Subtitles, srt


class Form(Protocol):
    """Form of one recording's transcript; either `whole` is called, or `push` for each piece, then `finish`,
    which is called after an error as well."""

    needs_times: bool

    def whole(self, found: Transcript) -> None: ...

    def push(self, text: str, transcriber: Transcriber) -> None: ...

    def finish(self, transcriber: Transcriber) -> None: ...


class Text:
    """Text alone, behind the recording's name where there are several."""

    needs_times = False

    def __init__(self, label: str | None):
        self._label = "" if label is None else f"{label}: "
        self._begun = False

    def whole(self, found: Transcript) -> None:
        _say(self._label + found.text)

    def push(self, text: str, transcriber: Transcriber) -> None:
        print(text if self._begun else self._label + text, end="", flush=True)
        self._begun = True

    def finish(self, transcriber: Transcriber) -> None:
        if self._begun:
            _say("")


class Json:
    """An object a line: the recording with its words, or each word as it is heard."""

    needs_times = True

    def __init__(self, audio: str):
        self._audio = audio
        self._partial: Word | None = None

    def whole(self, found: Transcript) -> None:
        json_lines.print_json(as_json(self._audio, found))

    def push(self, text: str, transcriber: Transcriber) -> None:
        for word in transcriber.words:
            self._say(word, final=True)
        if transcriber.partial not in (None, self._partial):
            self._say(transcriber.partial, final=False)
        self._partial = transcriber.partial

    def finish(self, transcriber: Transcriber) -> None:
        pass

    def _say(self, word: Word, *, final: bool) -> None:
        json_lines.print_json({"audio": self._audio, **_timed(word), "final": final})


class Ctm:
    """A line a word, as NIST's tools read it."""

    needs_times = True

    def __init__(self, name: str):
        self._name = name

    def whole(self, found: Transcript) -> None:
        self._words(found.words)

    def push(self, text: str, transcriber: Transcriber) -> None:
        self._words(transcriber.words)

    def finish(self, transcriber: Transcriber) -> None:
        pass

    def _words(self, words: Iterable[Word]) -> None:
        for word in words:
            _say(ctm(self._name, word))


class Srt:
    """Subtitles."""

    needs_times = True

    def __init__(self):
        self._subtitles, self._number = Subtitles(), 0

    def whole(self, found: Transcript) -> None:
        self._cues(self._subtitles.push(found.words) + self._subtitles.finish(found.duration))

    def push(self, text: str, transcriber: Transcriber) -> None:
        self._cues(self._subtitles.push(transcriber.words, transcriber.partial, seconds=transcriber.seconds))

    def finish(self, transcriber: Transcriber) -> None:
        self._cues(self._subtitles.finish(transcriber.duration))

    def _cues(self, cues: Iterable[Cue]) -> None:
        for cue in cues:
            self._number += 1
            print(srt(self._number, cue), end="", flush=True)


def transcribe_as_json(model: CTC, file: Path, search: Search | None = None) -> dict[str, Any]:
    """Return what is said in an audio file, for JSON: its text, and its words with their times in seconds."""
    return as_json(str(file), transcribe(model, file, search=search, timestamps=True))


def as_json(audio: str, found: Transcript) -> dict[str, Any]:
    """Return a transcript for JSON."""
    return {"audio": audio, "text": found.text, "words": [_timed(word) for word in found.words]}


def _timed(word: Word) -> dict[str, Any]:
    return {"word": word.text, "start": round(word.start, 3), "end": round(word.end, 3)}


def _say(line: str) -> None:
    print(line, flush=True)
