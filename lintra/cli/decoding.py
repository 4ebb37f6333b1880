"""Flags of the commands that use a recogniser: how it looks for a text."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

from lintra.audio.errors import SpeechError
from lintra.audio.lines import lines
from lintra.audio.symbols import Symbols
from lintra.cli.arguments import UsageError, changed
from lintra.models import CTC
from lintra.speech import Search
from lintra.speech.ngram import NGram

ORDER = 5  # symbols of an n-gram, unless said


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """Options of the search for a text."""

    beam: int | None = None  # how many texts a search follows at once; None: the best path
    lm: Path | None = None  # lines of text, or a saved n-gram model, for --beam
    lm_order: int | None = None  # symbols of an n-gram, where --lm is text; None: 5
    lm_weight: float | None = None  # of its log-probabilities; None: 0.5
    bonus: float = 0.0  # for each symbol, in nats

    def as_json(self, search: Search) -> dict[str, Any]:
        """Describe how `search`, built from these flags by the method `search`, finds a text."""
        lm = None if search.lm is None else {"file": str(self.lm), "order": search.lm.order}
        return {"beam": search.beam, "lm": lm, "lm_weight": lm and search.weight, "bonus": search.bonus}

    def search(self, model: CTC) -> Search:
        """Raise ValueError, UsageError and SpeechError."""
        if self.beam is None and (self.lm is not None or self.bonus):
            raise UsageError("lm and bonus are for a beam: add --beam 20")
        if self.lm is None:
            for name in changed(self, ("lm_order", "lm_weight")):
                raise UsageError(f"{name} is for a language model: name one with --lm FILE")
            return Search(beam=self.beam, bonus=self.bonus)
        found = language_model(self.lm, self.lm_order, model.config.symbols)
        weight = Search.weight if self.lm_weight is None else self.lm_weight
        return Search(beam=self.beam, lm=found, weight=weight, bonus=self.bonus)


def language_model(file: Path, order: int | None, known: Symbols) -> NGram:
    """A saved n-gram model (.json), or one learned from the lines of a text. Lines with unknown symbols are
    left out, and counted on standard error. Raises SpeechError, UsageError."""
    if file.suffix == ".json":
        if order is not None:
            raise UsageError(f"lm_order is for text: {file} has an order of its own")
        found = NGram.load(file)
        if found.symbols != len(known.names):
            raise SpeechError(f"{file} has {found.symbols} symbols, the recogniser {len(known.names)}")
        if found.names not in (None, known.names):
            raise SpeechError(f"{file} has other symbols than the recogniser")
        return found
    texts, reasons = _encoded(file, known)
    if not texts:
        first = f"; the first, {reasons[0]}" if reasons else ""
        raise SpeechError(f"{file} holds no line of symbols that the recogniser knows{first}")
    if reasons:
        total = len(texts) + len(reasons)
        print(f"lintra: {file}: {len(reasons):,} of {total:,} lines left out: {reasons[0]}", file=sys.stderr)
    return NGram.learn(texts, order=ORDER if order is None else order, symbols=known.names)


def _encoded(file: Path, known: Symbols) -> tuple[list[list[int]], list[str]]:
    """Return the lines as numbers, and why each of the others has none."""
    texts, reasons = [], []
    for number, line in lines(file):
        try:
            texts.append(known.encode(line))
        except SpeechError as error:
            reasons.append(f"line {number:,}: {error}")
    return texts, reasons
