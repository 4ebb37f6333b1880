"""Symbols of a recogniser as numbers: characters, words, or phonemes through a lexicon. Blank is 0."""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar

from lintra.audio.errors import SpeechError
from lintra.audio.lines import lines
from lintra.config import fields
from lintra.io.files import expanded

Unit = Literal["character", "phoneme", "word"]
Lexicon = Mapping[str, tuple[str, ...]]  # the phonemes of each word

_VARIANT = re.compile(r"(.+)\(\d+\)")  # WORD(2): WORD, pronounced in another way
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Symbols:
    """The symbols of a model: `names[i]` is number i + 1, 0 is CTC's blank.

    In a text any white space is one space, none stands at its ends, and a letter and its accent are one
    character (Unicode NFC); "A" and "a" are two. Among characters the space is a symbol like the others;
    between words, and between phonemes, there is none. Raises TypeError or ValueError.
    """

    unit: Unit
    names: tuple[str, ...]
    lexicon: tuple[tuple[str, tuple[str, ...]], ...] = ()  # for phonemes: each word and its phonemes

    def __post_init__(self):
        fields.check(self)
        if not self.names:
            raise ValueError("names must hold at least one symbol, got none")
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"names must all be different, got {_first_twice(self.names)!r} twice")
        for name in self.names:
            if _split(name, self.unit) != [name]:
                raise ValueError(f"names must each be one {self.unit}, got {name!r}")
        if (self.unit == "phoneme") != bool(self.lexicon):
            raise ValueError(
                f"a lexicon belongs to phonemes, got {len(self.lexicon)} words of one for {self.unit} symbols"
            )
        for word, phonemes in self.lexicon:
            if not phonemes or not set(phonemes) <= set(self.names):
                raise ValueError(f"lexicon must give the phonemes of each word, got {word!r}: {phonemes}")
        if len(self._said) < len(self.lexicon):
            twice = _first_twice([word for word, _ in self.lexicon])
            raise ValueError(f"lexicon must hold a word once, got {twice!r} twice")

    def encode(self, text: str) -> list[int]:
        """The numbers of a text. Raises SpeechError for symbols that are unknown, or words not in the
        lexicon."""
        text = plain(text)
        if self.unit != "phoneme":
            return _look_up(_split(text, self.unit), self._numbers, self.unit, text)
        words = _look_up(_split(text, "word"), self._said, "word", text)
        return [self._numbers[phoneme] for word in words for phoneme in word]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of numbers; phonemes stay phonemes. Raises ValueError for a number without a symbol."""
        for i in ids:
            if not 1 <= i <= len(self.names):
                raise ValueError(f"ids must be between 1 and {len(self.names)}, got {i}")
        return ("" if self.unit == "character" else " ").join(self.names[i - 1] for i in ids)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names, 1)}

    @cached_property
    def _said(self) -> Lexicon:
        return dict(self.lexicon)


def learn(texts: Iterable[str], unit: Unit, lexicon: Lexicon | None = None) -> Symbols:
    """The symbols of these texts, in the order of their code points; of phonemes all that the lexicon has.

    Raises SpeechError if there are none, or for a word that the lexicon lacks.
    """
    if unit != "phoneme":
        if lexicon is not None:
            raise ValueError(f"a lexicon belongs to phonemes, got one for {unit} symbols")
        names = sorted({symbol for text in texts for symbol in _split(plain(text), unit)})
        if not names:
            raise SpeechError(f"there is no {unit} to learn: every transcript is empty")
        return Symbols(unit, tuple(names))
    if not lexicon:
        raise ValueError("phonemes need a lexicon, which says those of each word; got none")
    names = sorted({phoneme for word in lexicon.values() for phoneme in word})
    symbols = Symbols(
        unit, tuple(names), tuple(sorted((plain(word), said) for word, said in lexicon.items()))
    )
    for text in texts:
        symbols.encode(text)
    return symbols


def read_lexicon(path: str | Path) -> dict[str, tuple[str, ...]]:
    """A pronouncing dictionary: lines of a word and its phonemes, as in Kaldi's lexicon.txt and CMUdict.

    Of several lines for a word, WORD(2) among them, the first counts. A line that begins with ;;; is a
    comment, and so is what follows a lone #. Raises SpeechError that names the file and the line.
    """
    path = expanded(path)
    found: dict[str, tuple[str, ...]] = {}
    for number, line in lines(path):
        if line.startswith(";;;"):
            continue
        word, *phonemes = line.split()
        if "#" in phonemes:
            phonemes = phonemes[: phonemes.index("#")]
        if not phonemes:
            raise SpeechError(f"{path}, line {number:,}: expected a word and its phonemes, got {line[:60]!r}")
        variant = _VARIANT.fullmatch(word)
        found.setdefault(plain(variant[1] if variant else word), tuple(phonemes))
    if not found:
        raise SpeechError(f"{path} holds no words")
    return found


def plain(text: str) -> str:
    """Normalise a text: one space between words, none around them, Unicode's NFC."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def _split(text: str, unit: Unit) -> list[str]:
    return list(text) if unit == "character" else text.split()


def _look_up(symbols: list[str], table: Mapping[str, _Value], what: str, text: str) -> list[_Value]:
    for place, symbol in enumerate(symbols, 1):
        if symbol not in table:
            shown = text if len(text) <= 60 else f"{text[:60]}..."
            raise SpeechError(f"{symbol!r}, {what} {place} of {shown!r}, is none of the {len(table):,} known")
    return [table[symbol] for symbol in symbols]


def _first_twice(names: Sequence[str]) -> str:
    return next(name for i, name in enumerate(names) if name in names[:i])
