"""Transcription while somebody speaks: audio in pieces of any size, in constant memory."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lintra.audio import features
from lintra.speech.alignment import Word, WordTimes
from lintra.speech.decoding import Greedy, Span


@runtime_checkable
class Recogniser(Protocol):
    """Interface of a recogniser, such as `lintra.models.CTC`."""

    config: Any
    training: bool

    def parameters(self) -> Iterator[Tensor]: ...

    def why_not_stream(self) -> str | None: ...

    def extend(self, x: Tensor, state: Any = None, *, last: bool = False) -> tuple[Tensor, Any]: ...


class Transcriber:
    """Transcriber of one recording: the results of `push` and `finish` together are its best path.

    words: those that the last call completed, with the same times as in the whole recording; partial: the
    word in progress, as far as it is known.

    Raises ValueError, with the reason, for a model that needs whole recordings, has a state that grows, reads
    features not computed from audio, or is in training mode.
    """

    def __init__(
        self,
        model: Recogniser,  # a CTC model that can stream, in evaluation mode
    ):
        config = model.config
        if why := model.why_not_stream():
            raise ValueError(f"this model cannot stream: {why}")
        if model.training:
            raise ValueError("a model that streams must be in evaluation mode: call eval()")
        self._model, self._symbols, self._group = model, config.symbols, config.subsample
        self._frames = features.Stream(config.features)
        self._waiting = np.zeros((0, config.features.bins), np.float32)
        self._state: Any = None
        self.words: list[Word] = []
        self.partial: Word | None = None
        self._path = Greedy()
        self._times = WordTimes(config.symbols, seconds=config.seconds)
        self._count = 0  # frames that were heard
        self._before: list[int] = []  # the last symbol: the next may need a space between
        self._over = False

    def push(self, samples: Float[np.ndarray, "n"]) -> str:
        """Return the text that these samples, at the rate of the model's features, add; it is often empty."""
        self._check()
        frames = np.concatenate((self._waiting, self._frames.push(samples)))
        whole = len(frames) - len(frames) % self._group
        self._waiting = frames[whole:].copy()
        return self._hear(frames[:whole], last=False)

    def finish(self) -> str:
        """The text that the last samples add. Nothing may follow."""
        self._check()
        self._over = True
        text = self._hear(np.concatenate((self._waiting, self._frames.finish())), last=True)
        self.words += self._times.finish()
        self.partial = None
        return text

    @property
    def seconds(self) -> float:
        """Seconds of the recording heard so far: later words begin after them."""
        return self._path.frames * self._model.config.seconds

    @property
    def duration(self) -> float:
        """Seconds of the frames that were heard."""
        return self._count * self._model.config.features.seconds

    @torch.inference_mode()
    def _hear(self, frames: np.ndarray, *, last: bool) -> str:
        self._count += len(frames)
        if last:
            self._times.end = self.duration
        self.words, new = [], []
        if len(frames):
            weight = next(iter(self._model.parameters()))
            x = torch.from_numpy(frames).to(weight)[None]
            log_probs, self._state = self._model.extend(x, self._state, last=last)
            new = self._path.push(log_probs[0])
            self._complete(self._path.closed)
        open = self._path.open
        if open is not None and (last or self._times.partial(*open) is None):
            self._complete([open])  # a space, which completes no other word when it ends
            open = None
        self.partial = self._times.current if open is None else self._times.partial(*open)
        return self._text(new)

    def _complete(self, spans: Sequence[Span]) -> None:
        self.words += [word for span in spans for word in self._times.push(*span)]

    def _text(self, ids: list[int]) -> str:
        before = len(self._symbols.decode(self._before))
        text = self._symbols.decode(self._before + ids)[before:]
        self._before = (self._before + ids)[-1:]
        return text

    def _check(self) -> None:
        if self._over:
            raise ValueError("this recording is finished: make a new Transcriber for the next one")
