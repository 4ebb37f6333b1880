"""Decoding of CTC's log-probabilities: the best path, and the best text over all of its paths.

Column 0 of log_probs [t n+1] is the blank, column i is symbol i. A path has one of them in each frame; its
text is what remains when repeats are merged and blanks removed. Graves et al. 2006, ICML, section 3.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from torch import Tensor

from lintra.ops import checks
from lintra.speech.ngram import NGram


class Span(NamedTuple):
    """A symbol of a path and the first and the last of its frames."""

    symbol: int
    first: int
    last: int


class Greedy:
    """The best path, piece by piece: the ids of all pieces together are those of the whole."""

    def __init__(self):
        self.frames = 0
        self.closed: list[Span] = []  # symbols that ended in the last piece, or at the end of the one before
        self.open: Span | None = None  # the symbol of the last frame, which may continue in the next

    def push(self, log_probs: Float[Tensor, "t n"]) -> list[int]:
        """The ids that these frames add."""
        new, self.closed = [], []
        for frame, symbol in enumerate(check_log_probs(log_probs).argmax(-1).tolist(), self.frames):
            if self.open is not None and symbol == self.open.symbol:
                self.open = self.open._replace(last=frame)
                continue
            self.closed += [] if self.open is None else [self.open]
            self.open = Span(symbol, frame, frame) if symbol else None
            new += [symbol] if symbol else []
        self.frames += len(log_probs)
        return new


def greedy(log_probs: Float[Tensor, "t n"]) -> list[int]:
    """The text of the best path: in each frame the most probable symbol."""
    return Greedy().push(log_probs)


def best_path(log_probs: Float[Tensor, "t n"]) -> list[Span]:
    """The symbols that `greedy` finds, with their frames."""
    path = Greedy()
    path.push(log_probs)
    return path.closed if path.open is None else [*path.closed, path.open]


class Hypothesis(NamedTuple):
    """A text and how probable it is.

    log_prob: of all its paths together, in nats; score: the same plus the language model and the bonus.
    """

    ids: tuple[int, ...]
    log_prob: float
    score: float


def beam(
    log_probs: Float[Tensor, "t n"],
    *,
    width: int,
    lm: NGram | None = None,
    weight: float = 0.0,
    bonus: float = 0.0,
) -> list[Hypothesis]:
    """Up to `width` texts of the highest score that a beam of that many prefixes finds, the best first.

    The score of a text is log_prob + weight * (its log-probability by `lm`, its end included) + bonus * (the
    number of its symbols). Paths that meet in one text are summed; a beam that holds every prefix is exact.
    Time O(t width n). Raises ValueError for a width below 1, a weight that is negative, not finite or without
    a model, a bonus that is not finite, a model of other symbols, and log_probs that are not [t n+1] or NaN.
    Graves 2012, Supervised Sequence Labelling, section 7.5.3; Hannun et al. 2014, arXiv:1408.2873.
    """
    table = check_log_probs(log_probs)
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise ValueError(f"width must be an integer of at least 1, got {width}")
    if not 0 <= weight < math.inf:
        raise ValueError(f"weight must be at least 0 and finite, got {weight}")
    if weight and lm is None:
        raise ValueError(f"weight needs a language model, got {weight} and lm=None")
    if not math.isfinite(bonus):
        raise ValueError(f"bonus must be finite, got {bonus}")
    if lm is not None and lm.symbols + 1 != table.shape[1]:
        raise ValueError(f"lm must be of {table.shape[1] - 1} symbols, got one of {lm.symbols}")
    found = _Beam.start(_Prior(table.shape[1], lm, weight, bonus))
    for frame in table:
        found = found.after(frame, width)
    return found.hypotheses()


class _Prior:
    """Scores that each symbol adds to the text before it."""

    def __init__(self, columns: int, lm: NGram | None, weight: float, bonus: float):
        self.lm, self.weight = lm, weight
        self.bonus = np.full(columns, bonus)
        self.bonus[0] = 0.0
        self._known: dict[int, np.ndarray] = {}

    def recent(self, history: tuple[int, ...]) -> tuple[int, ...]:
        """Return the part of a text that affects what follows."""
        return () if self.lm is None else self.lm.recent(history)

    def after(self, history: tuple[int, ...]) -> np.ndarray:
        """[n+1]: what the end, number 0, and each symbol add."""
        if self.lm is None:
            return self.bonus
        log_probs = self.lm.log_probs(history)  # one array for histories the model does not distinguish
        if id(log_probs) not in self._known:
            self._known[id(log_probs)] = self.weight * log_probs + self.bonus
        return self._known[id(log_probs)]


class _Prefix:
    """A node of the tree of texts. One that has left the beam and comes back is the same node again."""

    __slots__ = ("added", "following", "history", "parent", "prior", "score", "symbol")

    def __init__(self, prior: _Prior, parent: "_Prefix | None" = None, symbol: int = 0):
        self.prior, self.parent, self.symbol = prior, parent, symbol
        self.history = () if parent is None else prior.recent((*parent.history, symbol))
        self.score = 0.0 if parent is None else parent.score + parent.added[symbol]  # of lm and bonus
        self.added = prior.after(self.history)
        self.following: dict[int, _Prefix] = {}

    def then(self, symbol: int) -> "_Prefix":
        """The text that is longer by this symbol."""
        if symbol not in self.following:
            self.following[symbol] = _Prefix(self.prior, self, symbol)
        return self.following[symbol]

    @property
    def ids(self) -> tuple[int, ...]:
        """The text."""
        symbols, node = [], self
        while node.parent is not None:
            symbols.append(node.symbol)
            node = node.parent
        return tuple(reversed(symbols))


class _Beam(NamedTuple):
    """Prefixes [k], and the log-probability of all of their paths that end in a blank, or in a symbol."""

    prefixes: list[_Prefix]
    blank: np.ndarray
    symbol: np.ndarray

    @classmethod
    def start(cls, prior: _Prior) -> "_Beam":
        return cls([_Prefix(prior)], np.zeros(1), np.full(1, -np.inf))

    def after(self, frame: np.ndarray, width: int) -> "_Beam":
        """The beam after one more frame [n+1]."""
        every = np.arange(len(self.prefixes))
        last = np.array([prefix.symbol for prefix in self.prefixes], int)
        total = np.logaddexp(self.blank, self.symbol)
        blank, symbol = total + frame[0], self.symbol + frame[last]
        longer = total[:, None] + frame
        longer[every, last] = self.blank + frame[last]  # without a blank between, a repeat is the same symbol
        longer[:, 0] = -np.inf
        # A prefix in the beam may also arise from its parent and a symbol.
        places = {id(prefix): i for i, prefix in enumerate(self.prefixes)}
        pairs = [(i, places.get(id(prefix.parent))) for i, prefix in enumerate(self.prefixes)]
        child, parent = np.array([pair for pair in pairs if pair[1] is not None], int).reshape(-1, 2).T
        symbol[child] = np.logaddexp(symbol[child], longer[parent, last[child]])
        longer[parent, last[child]] = -np.inf

        score = np.array([prefix.score for prefix in self.prefixes])
        added = np.array([prefix.added for prefix in self.prefixes]).reshape(longer.shape)
        stays, grows = np.logaddexp(blank, symbol) + score, longer + score[:, None] + added
        candidates = np.concatenate((stays, grows.ravel()))
        best = (candidates > -np.inf).nonzero()[0]
        if len(best) > width:
            best = best[np.argpartition(-candidates[best], width)[:width]]

        kept = best[best < len(every)]
        parents, symbols = divmod(best[best >= len(every)] - len(every), len(frame))
        prefixes = [self.prefixes[i] for i in kept]
        prefixes += [self.prefixes[i].then(int(c)) for i, c in zip(parents, symbols, strict=True)]
        nothing = np.full(len(parents), -np.inf)
        return _Beam(
            prefixes,
            np.concatenate((blank[kept], nothing)),
            np.concatenate((symbol[kept], longer[parents, symbols])),
        )

    def hypotheses(self) -> list[Hypothesis]:
        """The texts with their ends, the best first."""
        log_prob = np.logaddexp(self.blank, self.symbol)
        found = [
            Hypothesis(prefix.ids, float(each), float(each + prefix.score + prefix.added[0]))
            for prefix, each in zip(self.prefixes, log_prob, strict=True)
        ]
        return sorted(found, key=lambda hypothesis: -hypothesis.score)


def check_log_probs(log_probs: Tensor) -> np.ndarray:
    """Return log_probs in float64.

    Raises ValueError or TypeError unless there is a blank, a symbol and no NaN."""
    checks.shape("log_probs", log_probs, "t n", {})
    checks.floating("log_probs", log_probs)
    if log_probs.shape[1] < 2:
        raise ValueError(f"log_probs must have a blank and a symbol, 2 columns, got {log_probs.shape[1]}")
    table = log_probs.detach().cpu().double().numpy()
    if np.isnan(table).any():
        raise ValueError("log_probs must be numbers, got NaN: is the model sound?")
    return table
