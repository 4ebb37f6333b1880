"""Log-mel filterbanks, as Kaldi computes them: the energies that a recogniser reads."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lintra.config import fields
from lintra.io.packages import package

_FULL_SCALE = 32_768  # Kaldi's samples are those of 16 bit audio
_PREEMPHASIS = 0.97
_FLOOR = float(np.finfo(np.float32).eps)  # of an energy, before its logarithm


@dataclass(frozen=True, kw_only=True)
class Config:
    """Form of a frame. "given": arrays used as they are, of `bins` numbers a frame, `shift_ms` apart."""

    kind: Literal["fbank", "given"] = "fbank"
    rate: int = 16_000  # Hz; audio of another rate is resampled
    bins: int = 40  # triangular filters, evenly spaced on the mel scale
    frame_ms: float = 25.0
    shift_ms: float = 10.0  # from the beginning of a frame to that of the next
    low_hz: float = 20.0
    high_hz: float = 0.0  # 0: half the rate
    dither: float = 0.0  # deviation of added noise, in steps of 16 bit audio; the same noise each time

    def __post_init__(self):
        fields.check(self)
        fields.finite(self, "frame_ms", "shift_ms", "low_hz", "high_hz", "dither")
        fields.at_least(self, rate=1, bins=1, low_hz=0, high_hz=0, dither=0)
        if self.frame < 2 or not 1 <= self.shift <= (self.frame if self.kind == "fbank" else math.inf):
            raise ValueError(
                f"frame_ms must be at least 2 samples of {self.rate} Hz, shift_ms from 1 sample to a frame; "
                f"got {self.frame_ms} and {self.shift_ms} ms"
            )
        if not self.low_hz < self.top_hz <= self.rate / 2:
            raise ValueError(
                f"low_hz must be below high_hz, and that at most half the rate, {self.rate / 2:g} Hz; "
                f"got {self.low_hz:g} and {self.top_hz:g}"
            )
        if self.kind == "fbank" and (self.bins < 3 or not _filters(self).any(1).all()):
            raise ValueError(
                f"bins must be at least 3, and few enough that each holds a frequency of a frame of "
                f"{self.frame} samples; got {self.bins}"
            )

    @property
    def frame(self) -> int:
        """The samples of a frame."""
        return _samples(self.frame_ms, self.rate)

    @property
    def shift(self) -> int:
        """The samples from the beginning of a frame to that of the next."""
        return _samples(self.shift_ms, self.rate)

    @property
    def top_hz(self) -> float:
        """The highest frequency used."""
        return self.high_hz or self.rate / 2

    @property
    def seconds(self) -> float:
        """Seconds from the beginning of a frame to that of the next; of audio a whole number of samples."""
        return self.shift / self.rate if self.kind == "fbank" else self.shift_ms / 1000

    def frames(self, samples: int) -> int:
        """Return how many frames fit into so many samples; a remainder at the end is in none."""
        return max(0, 1 + (samples - self.frame) // self.shift)


class Stream:
    """Features of audio that comes in pieces, with constant memory. Refuses what `compute` does."""

    def __init__(self, config: Config):
        _check_kind(config)
        self.config = config
        self._restart()

    def push(self, samples: np.ndarray) -> np.ndarray:
        """Samples float [n] in [-1, 1] at `config.rate` -> the frames that they complete [t bins]."""
        config = self.config
        self._left = np.concatenate([self._left, self._scaled(samples)])
        frames = config.frames(len(self._left))
        used, self._left = self._left, self._left[frames * config.shift :].copy()
        return _filterbank(used, frames, config)

    def finish(self) -> np.ndarray:
        """The remaining frames, of which there are none [0 bins]: an incomplete frame is dropped.

        The stream then starts anew.
        """
        self._restart()
        return np.zeros((0, self.config.bins), np.float32)

    def _restart(self) -> None:
        self._left = np.zeros(0, np.float32)  # samples that later frames need, scaled
        self._noise = np.random.Generator(np.random.Philox(0))

    def _scaled(self, samples: np.ndarray) -> np.ndarray:
        _check(samples)
        scaled = samples.astype(np.float32) * np.float32(_FULL_SCALE)
        if self.config.dither:
            scaled += self.config.dither * self._noise.standard_normal(len(samples)).astype(np.float32)
        return scaled


def compute(samples: np.ndarray, config: Config) -> np.ndarray:
    """Samples float [n] in [-1, 1] at `config.rate` -> log-mel energies float32 [t bins], in nats.

    t is `config.frames(n)`: 0 for audio shorter than a frame. Equal to `reference` to 1e-3, except in bins
    with less than a millionth of a frame's energy. Raises ValueError for samples that are not finite floats
    [n], and where features are given and not computed.
    """
    return Stream(config).push(samples)


def reference(samples: np.ndarray, config: Config) -> np.ndarray:
    """The definition, in float64 and without dither: what `compute` does, after Kaldi's feature-fbank.cc.

    Each frame loses its mean, is pre-emphasised, windowed (Povey: a Hann window to the power 0.85) and padded
    to a power of two; the powers of its spectrum are summed with triangular weights; then the logarithm.
    """
    _check_kind(config)
    _check(samples)
    starts = np.arange(config.frames(len(samples))) * config.shift
    frames = samples.astype(np.float64)[starts[:, None] + np.arange(config.frame)] * _FULL_SCALE
    frames -= frames.mean(1, keepdims=True)
    before = np.concatenate([frames[:, :1], frames[:, :-1]], 1)
    window = np.hanning(config.frame) ** 0.85
    spectrum = np.fft.rfft((frames - _PREEMPHASIS * before) * window, _padded(config))
    return np.log(np.maximum(np.abs(spectrum) ** 2 @ _filters(config).T, _FLOOR))


def _filterbank(scaled: np.ndarray, frames: int, config: Config) -> np.ndarray:
    """The first `frames` frames of samples scaled as Kaldi does -> [frames bins]."""
    features = np.empty((frames, config.bins), np.float32)
    if not frames:
        return features
    knf = package("kaldi_native_fbank")
    options = knf.FbankOptions()
    frame = options.frame_opts
    frame.samp_freq, frame.dither, frame.snip_edges = config.rate, 0.0, True
    frame.preemph_coeff, frame.window_type, frame.remove_dc_offset = _PREEMPHASIS, "povey", True
    # It rounds down: half a sample more gives the same number however the product is rounded.
    frame.frame_length_ms = (config.frame + 0.5) / config.rate * 1000
    frame.frame_shift_ms = (config.shift + 0.5) / config.rate * 1000
    mel = options.mel_opts
    mel.num_bins, mel.low_freq, mel.high_freq = config.bins, config.low_hz, config.top_hz
    bank = knf.OnlineFbank(options)
    bank.accept_waveform(config.rate, scaled)
    bank.input_finished()
    for i in range(frames):
        features[i] = bank.get_frame(i)
    return features


def _filters(config: Config) -> np.ndarray:
    """The weights of a frame's spectrum in each bin, triangles in mel [bins padded/2+1]."""
    mel = _mel(np.arange(_padded(config) // 2) * config.rate / _padded(config))
    low, high = _mel(np.array([config.low_hz, config.top_hz]))
    edges = np.linspace(low, high, config.bins + 2)[:, None]
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    weights = np.minimum((mel - left) / (centre - left), (right - mel) / (right - centre)).clip(0)
    return np.pad(weights, ((0, 0), (0, 1)))  # the highest frequency is in no bin


def _mel(hz: np.ndarray) -> np.ndarray:
    return 1127 * np.log1p(hz / 700)


def _padded(config: Config) -> int:
    return 1 << (config.frame - 1).bit_length()


def _samples(milliseconds: float, rate: int) -> int:
    return int(round(milliseconds * rate / 1000, 6))  # rounded down, but 0.3 * 10 is 3


def _check_kind(config: Config) -> None:
    if config.kind != "fbank":
        raise ValueError(f"features of kind {config.kind!r} come as arrays: they are not computed from audio")


def _check(samples: np.ndarray) -> None:
    if samples.ndim != 1 or not np.issubdtype(samples.dtype, np.floating):
        raise ValueError(f"samples must be floats [n] in [-1, 1], got {samples.dtype} {list(samples.shape)}")
    if not np.isfinite(samples).all():
        raise ValueError("samples must be finite, got some that are not")
