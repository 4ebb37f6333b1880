"""A language model of symbols: n-grams, interpolated by the estimate of Witten and Bell.

    p(w | h) = (c(h w) + t(h) p(w | h')) / (c(h) + t(h))

h are the order - 1 symbols before w, h' those without the first of them, c counts and t(h) the number of
different symbols seen after h; below the empty history p is uniform. Number 0, elsewhere the blank, is the
end of a text here, and stands before its first symbol too. Witten and Bell 1991, IEEE Transactions on
Information Theory 37(4), method C; Chen and Goodman 1999, Computer Speech and Language 13(4), section 2.5.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lintra.audio.errors import SpeechError
from lintra.io.files import Error, read_json, write_atomically

FORMAT = 1
LONGEST = 16  # symbols of an n-gram; of more, hardly one is seen twice
MOST = 2**53  # of one n-gram: counts are exact in float64


class NGram:
    """A language model of counted n-grams of the symbols 1 .. n; 0 marks both ends of a text.

    With names, a saved model records which symbols it is for.

    Raises ValueError or TypeError for an order below 1 or above LONGEST, no symbols or a name twice, no
    counts, and an n-gram that no text can have.
    """

    def __init__(
        self,
        counts: Mapping[tuple[int, ...], int],  # how often each n-gram, a tuple of `order` numbers, was seen
        *,
        order: int,  # symbols of an n-gram
        symbols: int | tuple[str, ...],  # how many there are, or their names
    ):
        self.names = symbols if isinstance(symbols, tuple) else None
        if self.names is not None and len(set(self.names)) < len(self.names):
            raise ValueError(f"symbols must have different names, got {list(self.names)}")
        number = _number(symbols)
        for name, value in (("order", order), ("symbols", number)):
            if type(value) is not int:
                raise TypeError(f"{name} must be int, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if order > LONGEST:
            raise ValueError(f"order must be at most {LONGEST} symbols, got {order}")
        if not counts:
            raise ValueError("counts must hold at least one n-gram, got none")
        self.order, self.symbols = order, number
        self.counts = dict(counts)
        self._following: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for gram, count in counts.items():
            self._check(gram, count)
            for first in range(order):
                self._following[gram[first:-1]][gram[-1]] += count
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    @classmethod
    def learn(
        cls, sequences: Iterable[Sequence[int]], *, order: int, symbols: int | tuple[str, ...]
    ) -> "NGram":
        """The model of these texts, each the numbers of its symbols. Raises as the class does."""
        counts: Counter[tuple[int, ...]] = Counter()
        for text in sequences:
            if 0 in text:
                raise ValueError(f"a text must hold symbols 1 .. {_number(symbols)}, got {list(text)}")
            padded = (*[0] * (order - 1), *text, 0)
            counts.update(padded[i : i + order] for i in range(len(text) + 1))
        return cls(counts, order=order, symbols=symbols)

    @classmethod
    def load(cls, file: str | Path) -> "NGram":
        """Return the model that `save` wrote. Raises SpeechError that names the file if it is missing,
        damaged or not a lintra model."""
        try:
            content = read_json(Path(file))
        except Error as error:
            raise SpeechError(str(error)) from error
        if not isinstance(content, dict) or content.keys() != {"format", "order", "symbols", "counts"}:
            raise SpeechError(f"{file} is not a language model of lintra")
        if content.pop("format") != FORMAT:
            raise SpeechError(f"{file} has another format than {FORMAT}, which this lintra reads")
        try:
            rows = content.pop("counts")
            if isinstance(content["symbols"], list):
                content["symbols"] = tuple(content["symbols"])
            counts = {tuple(gram): count for gram, count in rows}
            if len(counts) < len(rows):
                raise ValueError("counts must hold each n-gram once")
            return cls(counts, **content)
        except (TypeError, ValueError) as error:
            raise SpeechError(f"{file}: {error}") from error

    def save(self, file: str | Path) -> None:
        """Write a JSON file. Atomic; raises SpeechError if it cannot be written."""
        rows = [[list(gram), count] for gram, count in sorted(self.counts.items())]
        symbols = self.symbols if self.names is None else self.names
        content = {"format": FORMAT, "order": self.order, "symbols": symbols, "counts": rows}
        try:
            write_atomically(Path(file), lambda place: place.write_text(json.dumps(content) + "\n"))
        except Error as error:
            raise SpeechError(str(error)) from error

    def recent(self, history: Sequence[int]) -> tuple[int, ...]:
        """Return the part of the text so far that the model uses: order - 1 numbers, 0 for those before its
        start."""
        return (*[0] * (self.order - 1), *history)[len(history) :]

    def log_prob(self, history: Sequence[int], symbol: int) -> float:
        """Return the log-probability of `symbol` after the text so far, or of its end for 0; nats."""
        return float(self.log_probs(history)[symbol])

    def log_probs(self, history: Sequence[int]) -> np.ndarray:
        """Return [symbols + 1], of the end and every symbol; their probabilities sum to 1. Not to be written
        to."""
        return self._after(self.recent(history))

    def _after(self, history: tuple[int, ...]) -> np.ndarray:
        while history not in self._following:  # a history that was never seen adds nothing
            history = history[1:]
        if history not in self._known:
            less = np.exp(self._after(history[1:])) if history else 1 / (self.symbols + 1)
            following = self._following[history]
            counts = np.zeros(self.symbols + 1)
            counts[list(following)] = list(following.values())
            found = np.log((counts + len(following) * less) / (counts.sum() + len(following)))
            found.flags.writeable = False
            self._known.setdefault(history, found)  # of two threads the first: beams tell arrays by identity
        return self._known[history]

    def _check(self, gram: Any, count: Any) -> None:
        """Raise ValueError unless the n-gram is of a text: 0 only at its end, or before its first symbol."""
        whole = isinstance(gram, tuple) and len(gram) == self.order and all(type(x) is int for x in gram)
        if not whole or not all(0 <= x <= self.symbols for x in gram):
            raise ValueError(f"an n-gram must be {self.order} integers in 0 .. {self.symbols}, got {gram!r}")
        began = False
        for number in gram[:-1]:
            if began and not number:
                raise ValueError(f"an n-gram must not continue after the end of a text, got {gram}")
            began = began or number > 0
        if type(count) is not int or not 1 <= count <= MOST:
            raise ValueError(f"the count of an n-gram must be an integer in 1 .. {MOST}, got {count!r}")


def _number(symbols: int | tuple[str, ...]) -> int:
    return len(symbols) if isinstance(symbols, tuple) else symbols
