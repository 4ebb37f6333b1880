"""Subtitles: words in cues of two lines, as SubRip (.srt) files have them.

A cue is complete as soon as nothing more can be added, so that it can be shown while the rest is said.
How long lines and cues are follows the rules of broadcasters and streaming services.
"""

import textwrap
from collections.abc import Iterable
from typing import NamedTuple

from lintra.speech.alignment import Word

LINE, LINES = 42, 2  # characters of a line, lines of a cue
LONGEST, SHORTEST = 7.0, 5 / 6  # seconds of a cue
PAUSE = 1.0  # seconds without a word that end a cue; at least SHORTEST


class Cue(NamedTuple):
    """Lines of a subtitle and when they are shown, in seconds."""

    lines: tuple[str, ...]
    start: float
    end: float


class Subtitles:
    """Cues of words that come one after another, the same however many come at once."""

    def __init__(self):
        self._words: list[Word] = []  # of the next cue

    def push(self, words: Iterable[Word], partial: Word | None = None, *, seconds: float = 0.0) -> list[Cue]:
        """The cues that words complete. partial: the word in progress; seconds: of the recording heard so
        far, after which all other words begin."""
        done: list[Cue] = []
        for word in words:
            if self._words and not self._fits(word):
                done += self._close(until=word.start)
            self._words.append(word)
        begins = seconds if partial is None else partial.start
        if self._words and begins >= self._words[-1].end + PAUSE:
            done += self._close(until=begins)
        return done

    def finish(self, duration: float) -> list[Cue]:
        """The last cue, where there is one. duration: of the recording, in seconds."""
        return self._close(until=duration) if self._words else []

    def _fits(self, word: Word) -> bool:
        """Return whether a word may come into the cue."""
        first, last = self._words[0], self._words[-1]
        if word.start >= last.end + PAUSE or word.end > first.start + LONGEST:
            return False
        return len(_lines([*self._words, word])) <= LINES

    def _close(self, *, until: float) -> list[Cue]:
        words, self._words = self._words, []
        start, end = words[0].start, words[-1].end
        return [Cue(_lines(words), start, max(end, min(start + SHORTEST, until)))]


def srt(number: int, cue: Cue) -> str:
    """A cue as SubRip has it, with the empty line that ends it. number: from 1."""
    return "\n".join((str(number), f"{_time(cue.start)} --> {_time(cue.end)}", *cue.lines, "", ""))


def _lines(words: Iterable[Word]) -> tuple[str, ...]:
    return tuple(textwrap.wrap(" ".join(word.text for word in words), LINE, break_on_hyphens=False))


def _time(seconds: float) -> str:
    """Hours, minutes, seconds and milliseconds."""
    whole, milliseconds = divmod(round(1_000 * seconds), 1_000)
    minutes, second = divmod(whole, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{second:02},{milliseconds:03}"
