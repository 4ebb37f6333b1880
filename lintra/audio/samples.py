"""Samples in memory, and checks of them whatever their source: rates, sections, loudness."""

import math
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lintra.audio.errors import SpeechError
from lintra.io.packages import package

CONVERT = "convert it, for instance with sox or ffmpeg"
ALL = sys.maxsize  # the end of a section that has none
_OVERSHOOT = 0.5  # seconds by which a section may end after its recording, since times are rounded
_FASTEST = 2**24  # Hz
_SLOWEST = 1_000  # Hz: below, frames hold nothing above 500 Hz, and the mel scale up to there no vowel
_LOUDEST = 1e6  # times full scale: energies of far louder samples overflow float32

Name = Path | str  # what an error calls a recording


class Audio(NamedTuple):
    """Audio in memory."""

    samples: np.ndarray  # floats [n], in [-1, 1]
    rate: int  # Hz


def resampled(pieces: Iterable[Audio], rate: int) -> Iterator[np.ndarray]:
    """Pieces of one recording at another rate: the same samples however it was cut, and all that came before
    an error."""
    if rate < 1:
        raise ValueError(f"rate must be at least 1 Hz, got {rate}")
    stream = failure = None
    try:
        for samples, own in pieces:
            if own == rate:
                yield samples
            else:
                stream = stream or package("soxr").ResampleStream(own, rate, 1)
                yield stream.resample_chunk(samples)
    except SpeechError as error:
        failure = error
    if stream:
        yield stream.resample_chunk(np.zeros(0, np.float32), last=True)
    if failure:
        raise failure


def check_seconds(start: float, duration: float | None) -> None:
    """Raise SpeechError for seconds that no recording can have."""
    if not 0 <= start < math.inf:
        raise SpeechError(f"start must be 0 or more seconds, got {start}")
    if duration is not None and not 0 < duration < math.inf:
        raise SpeechError(f"duration must be more than 0 seconds, and finite, got {duration}")


def section(start: float, duration: float | None, rate: int, length: int, name: Name) -> tuple[int, int]:
    """The first sample, and that before which the section ends. Raises SpeechError where a recording of so
    many samples has nothing there."""
    if not length:
        raise SpeechError(f"{name} is empty: it has no samples")
    if start * rate > length - 1:
        raise SpeechError(f"{name} ends after {length / rate:g} seconds: there is nothing from {start:g} on")
    return round(start * rate), _end(start, duration, rate)


def check_end(here: int, end: int, rate: int, name: Name) -> None:
    """Raise SpeechError where a section extends beyond the recording."""
    if here + _OVERSHOOT * rate < end < ALL:
        raise SpeechError(f"{name} ends after {here / rate:g} seconds, before the {end / rate:g} asked for")


def cut(
    pieces: Generator[Audio, None, None], start: float, duration: float | None, name: Name
) -> Iterator[Audio]:
    """A section of a recording whose length is known only in the end. Raises SpeechError where it has none
    such."""
    here, rate = 0, 1
    with closing(pieces):
        for samples, rate in pieces:
            first, end = round(start * rate), _end(start, duration, rate)
            kept = samples[max(0, first - here) : max(0, end - here)]
            here += len(samples)
            if len(kept):
                yield Audio(kept, rate)
            if here >= end:
                return
    check_end(here, section(start, duration, rate, here, name)[1], rate, name)


def _end(start: float, duration: float | None, rate: int) -> int:
    return ALL if duration is None else round(min((start + duration) * rate, ALL // 2))


def check_rate(rate: int, name: Name) -> None:
    """Raise SpeechError for a rate too low for speech, or of no audio."""
    if not rate >= _SLOWEST:
        raise SpeechError(
            f"{name} must have a rate of at least {_SLOWEST:,} Hz to be heard, got {rate:,}: {CONVERT}"
        )
    if not rate <= _FASTEST:
        raise SpeechError(f"{name} must have a rate of at most {_FASTEST:,} Hz, got {rate:,}: {CONVERT}")


def checked(samples: np.ndarray, name: Name) -> np.ndarray:
    """Return samples as they are. Raises SpeechError for what is not finite, or too loud to be audio."""
    if not np.isfinite(samples).all():
        raise SpeechError(f"{name} has samples that are not finite")
    if len(samples) and np.abs(samples).max() > _LOUDEST:
        raise SpeechError(
            f"{name} has samples beyond {_LOUDEST:.0e}, where full scale is 1: this is not audio"
        )
    return samples
