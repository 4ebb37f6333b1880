"""How a recogniser looks for a text, as flags of the commands that use one."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lintra.cli._arguments import UsageError
from lintra.models import CTC
from lintra.speech.errors import SpeechError
from lintra.speech.lines import lines
from lintra.speech.ngram import NGram
from lintra.speech.symbols import Symbols
from lintra.transcribe import Search


@dataclasses.dataclass(frozen=True, kw_only=True)
class Searching:
    """How a text is found."""

    beam: int | None = None  # texts followed at once; None: the best path
    lm: Path | None = None  # text, or a saved n-gram model, for --beam
    lm_order: int = 5  # symbols of an n-gram, where --lm is text
    lm_weight: float = 0.5  # of its log-probabilities
    bonus: float = 0.0  # for each symbol, in nats

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "lm": None if self.lm is None else str(self.lm)}

    def search(self, model: CTC) -> Search:
        """Raises ValueError, UsageError and SpeechError."""
        if self.beam is None and (self.lm is not None or self.bonus):
            raise UsageError("lm and bonus are for a beam: add --beam 20")
        for name in ("lm_order", "lm_weight"):
            if self.lm is None and getattr(self, name) != getattr(Searching, name):
                raise UsageError(f"{name} is for a language model: name one with --lm FILE")
        found = None if self.lm is None else language_model(self.lm, self.lm_order, model.config.symbols)
        return Search(beam=self.beam, lm=found, weight=self.lm_weight, bonus=self.bonus)


def language_model(file: Path, order: int, known: Symbols) -> NGram:
    """A saved n-gram model (.json), or one learned from the lines of a text; lines with unknown symbols are
    left out. Raises SpeechError."""
    if file.suffix == ".json":
        found = NGram.load(file)
        if found.symbols != len(known.names):
            raise SpeechError(f"{file} is of {found.symbols} symbols, the recogniser of {len(known.names)}")
        return found
    texts = list(_encoded(file, known))
    if not texts:
        raise SpeechError(f"{file} holds no line that is made of the recogniser's {len(known.names)} symbols")
    return NGram.learn(texts, order=order, symbols=len(known.names))


def _encoded(file: Path, known: Symbols) -> Iterator[list[int]]:
    for _, line in lines(file):
        try:
            yield known.encode(line)
        except SpeechError:
            continue
