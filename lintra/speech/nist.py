"""Files that NIST's scoring tools, such as sclite, read: CTM, STM and trn, a word or an utterance a line."""

import itertools
import re
from collections.abc import Iterable

from lintra.speech.alignment import Word


def names(own: Iterable[str], unwanted: str = r"\s") -> list[str]:
    """Return names that are one word each: matches of the pattern `unwanted` become _; where a name is taken,
    -2 follows it, or the next number that makes it unique."""
    found: dict[str, None] = {}
    for name in own:
        word = re.sub(unwanted, "_", name)
        numbered = (f"{word}-{i}" for i in itertools.count(2))
        found[next(name for name in itertools.chain([word], numbered) if name not in found)] = None
    return list(found)


def ctm(name: str, word: Word) -> str:
    """Return a line of CTM: the recording's name, channel, start, duration, word.

    The end is rounded to milliseconds too, so that no word ends after its recording."""
    start = round(word.start, 3)
    return f"{name} 1 {start:.3f} {round(word.end, 3) - start:.3f} {word.text}"


def stm(name: str, speaker: str | None, duration: float, text: str) -> str:
    """Return a line of STM, the references for CTM: recording, channel, speaker, start, end, text."""
    return f"{name} 1 {names([speaker or name])[0]} 0.000 {duration:.3f} {text}"


def trn(name: str, text: str) -> str:
    """Return a line of trn, hypotheses or references: the text, and the utterance's name in parentheses."""
    return f"{text} ({name})".lstrip()
