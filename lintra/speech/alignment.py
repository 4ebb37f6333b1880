"""Alignment of a known text: the most probable path says when each symbol was said.

Graves et al. 2006, ICML, section 4.1: symbols y with blanks around them, s = 2 len(y) + 1 places of which a
path visits them in order, and may leave out a blank between two different symbols.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from torch import Tensor

from lintra.audio.errors import SpeechError
from lintra.audio.symbols import Symbols
from lintra.speech.decoding import check_log_probs


def frames_needed(ids: Sequence[int]) -> int:
    """The fewest frames in which CTC can say these symbols: one each, and a blank between repeats."""
    return len(ids) + sum(a == b for a, b in pairwise(ids))


def align(log_probs: Float[Tensor, "t n"], ids: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last frame of each symbol on the best path for `ids`, numbers 1 .. n.

    Raises SpeechError where the frames are too few or make the text impossible, ValueError for ids that are
    no symbols and log_probs that are not [t n+1]. Time and memory O(t len(ids)).
    """
    table = check_log_probs(log_probs)
    if any(not 1 <= symbol < table.shape[1] for symbol in ids):
        raise ValueError(f"ids must be symbols 1 .. {table.shape[1] - 1}, got {list(ids)}")
    if len(table) < frames_needed(ids):
        raise SpeechError(
            f"{len(table)} frames are too few for a text of {len(ids)} symbols: it needs {frames_needed(ids)}"
        )
    places = np.zeros(2 * len(ids) + 1, int)
    places[1::2] = ids
    # A path comes from the place itself, the one before or, over a blank between two symbols, one more.
    leap = np.zeros(len(places), bool)
    leap[2:] = (places[2:] > 0) & (places[2:] != places[:-2])
    best = np.full(len(places), -np.inf)
    best[0] = 0.0  # before the first frame: then a path continues there, or one place farther, as ever
    moves = np.zeros((len(table), len(places)), np.uint8)
    for t, frame in enumerate(table):
        one, two = np.roll(best, 1), np.where(leap, np.roll(best, 2), -np.inf)
        one[0] = -np.inf
        ways = np.stack((best, one, two))
        moves[t] = ways.argmax(0)
        best = ways.max(0) + frame[places]
    place = len(best) - 1 - int(len(ids) > 0 and best[-2] > best[-1])
    if best[place] == -np.inf:
        raise SpeechError(f"the text of {len(ids)} symbols is impossible in these {len(table)} frames")
    path = np.zeros(len(table), int)
    for t in reversed(range(len(table))):
        path[t] = place
        place -= int(moves[t, place])
    first = np.searchsorted(path, np.arange(1, len(places), 2))
    last = np.searchsorted(path, np.arange(1, len(places), 2), side="right") - 1
    return list(zip(first.tolist(), last.tolist(), strict=True))


class Word(NamedTuple):
    """A word and when it was said, in seconds."""

    text: str
    start: float
    end: float


def word_times(
    symbols: Symbols,
    ids: Sequence[int],
    spans: Sequence[tuple[int, int]],
    *,
    seconds: float,
    start: float = 0.0,
    end: float = math.inf,
) -> list[Word]:
    """The words of an alignment, with the time from their first symbol to the end of their last.

    spans: as `align` gives them; seconds: from one frame to the next; start: of the first; end: of the
    recording, which the last frame may pass. Characters make words between spaces; a phoneme stands for
    itself.
    """
    times = WordTimes(symbols, seconds=seconds, start=start, end=end)
    found = [word for id, span in zip(ids, spans, strict=True) for word in times.push(id, *span)]
    return found + times.finish()


class WordTimes:
    """Words with their times, as their symbols come; `word_times` is this for all of them at once.

    end: of the recording, where it is known; it may be set later.
    """

    def __init__(self, symbols: Symbols, *, seconds: float, start: float = 0.0, end: float = math.inf):
        self.end = end
        self._symbols, self._seconds, self._start = symbols, seconds, start
        self._current: Word | None = None

    def push(self, symbol: int, first: int, last: int) -> list[Word]:
        """The words that a symbol completes, which is said from frame `first` to frame `last`: of characters
        the one before a space, else the symbol itself."""
        if self._ends_word(symbol):
            return self.finish()
        word = self._with(symbol, first, last)
        if self._symbols.unit != "character":
            return [word]
        self._current = word
        return []

    def partial(self, symbol: int, first: int, last: int) -> Word | None:
        """The word that is not complete, with one more symbol, which may last longer."""
        return None if self._ends_word(symbol) else self._with(symbol, first, last)

    @property
    def current(self) -> Word | None:
        """The word that is not complete."""
        return self._current

    def finish(self) -> list[Word]:
        """The word that is not complete, which then is."""
        done, self._current = self._current, None
        return [] if done is None else [done]

    def _ends_word(self, symbol: int) -> bool:
        return self._symbols.decode([symbol]) == " "

    def _with(self, symbol: int, first: int, last: int) -> Word:
        text = self._symbols.decode([symbol])
        until = min(self._start + (last + 1) * self._seconds, self.end)
        if self._current is not None:
            return self._current._replace(text=self._current.text + text, end=until)
        return Word(text, self._start + first * self._seconds, until)
