"""Audio into the runtime: features and text, computed by the C program alone.

`Features` are those of `lintra.audio.features`, `Transcriber` is `lintra.speech.streaming.Transcriber` with
a model's file in place of PyTorch.
"""

from __future__ import annotations

import ctypes

import numpy as np
from jaxtyping import Float

from lintra.runtime import Error, Model, Sequence, aligned


class FilterbankConfig(ctypes.Structure):
    """The `lrt_features_config` of lintra_audio.h: how frames are computed from audio."""

    _fields_ = [(name, ctypes.c_uint32) for name in ("rate", "bins", "frame", "shift")]
    _fields_ += [(name, ctypes.c_float) for name in ("low_hz", "high_hz")]


class Features:
    """Features of audio that comes in pieces, as `model` reads them.

    Raises Error for a model that reads no audio, or whose filters hold no frequency.
    """

    def __init__(self, model: Model):
        self._model, self._library = model, model.library
        address = self._library.lrt_features_of(model.address)
        if address is None:
            raise Error("the model reads no audio: it is given tokens, or frames that are computed elsewhere")
        config = FilterbankConfig.from_address(address)
        self.rate, self.bins = config.rate, config.bins  # Hz; numbers of a frame
        self._memory = aligned(self._library.lrt_features_size(address))
        self._address = self._memory.ctypes.data
        model.check(self._library.lrt_features_start(self._address, len(self._memory), address))

    def push(self, samples: Float[np.ndarray, "n"]) -> Float[np.ndarray, "t bins"]:
        """Samples in [-1, 1] at `rate` -> the frames that they complete. Raises Error for samples that are
        infinite or NaN, or not floats [n]; then nothing has changed."""
        samples = np.asarray(samples)
        if samples.ndim != 1 or not np.issubdtype(samples.dtype, np.floating):
            raise Error(f"samples must be floats [n] in [-1, 1], got {samples.dtype} {list(samples.shape)}")
        given, done, frames = np.ascontiguousarray(samples, np.float32), 0, []
        if not np.isfinite(given).all():
            raise Error("samples must be finite, got infinity or NaN")
        while done < len(given):
            at = given.ctypes.data + given.itemsize * done
            done += self._model.check(self._library.lrt_features_push(self._address, at, len(given) - done))
            if frame := self._library.lrt_features_frame(self._address):
                frames.append(np.array((ctypes.c_float * self.bins).from_address(frame), np.float32))
        return np.stack(frames) if frames else np.zeros((0, self.bins), np.float32)


class Transcriber:
    """Transcribes one recording. The results of `push` and `finish` together are its best path.

    Raises Error for a model that reads no audio.
    """

    def __init__(self, model: Model):
        self._model, self._features, self._sequence = model, Features(model), Sequence(model)
        self._group, self._between = model.facts["subsample"], " " if model.facts["spaced"] else ""
        self._waiting = np.zeros((0, self._features.bins), np.float32)
        self._said = self._over = False

    def push(self, samples: Float[np.ndarray, "n"]) -> str:
        """Return the text that these samples, at the rate of the model, add; it is often empty."""
        self._check()
        frames = np.concatenate((self._waiting, self._features.push(samples)))
        whole = len(frames) - len(frames) % self._group
        self._waiting = frames[whole:].copy()
        return "".join(self._read(frames[i : i + self._group]) for i in range(0, whole, self._group))

    def finish(self) -> str:
        """The text that the last samples add. Nothing may follow."""
        self._check()
        self._over = True
        return self._read(self._waiting) if len(self._waiting) else ""

    def _read(self, frames: np.ndarray) -> str:
        self._sequence.read(frames)
        name = self._model.symbol(self._sequence.new_symbol())
        if name is None:
            return ""
        text = self._between + name if self._said else name
        self._said = True
        return text

    def _check(self) -> None:
        if self._over:
            raise Error("this recording is finished: make a new Transcriber for the next one")
