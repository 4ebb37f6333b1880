"""Audio of any format, rate and number of channels as one channel at the rate a recogniser reads."""

import math
import os
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from lintra.audio import decoder, streams
from lintra.audio.errors import SpeechError
from lintra.audio.piped import ANOTHER, UNKNOWN
from lintra.audio.samples import (
    CONVERT,
    Audio,
    check_end,
    check_rate,
    check_seconds,
    checked,
    cut,
    resampled,
    section,
)
from lintra.io.packages import package

_SECONDS = 30.0  # of audio that are read at once
# What libsndfile notes where the header of a wave, AIFF or AU file counts other bytes than there are, and
# where an Ogg file has no end. A file written before its end was known counts UNKNOWN bytes or more.
_COUNTED = re.compile(r"^ *(?:data|SSND|Data Size) *: (\d+) \(should be (\d+)\)", re.MULTILINE)
# The bits of a sample. Where they fill no bytes, programs disagree about the end at which the zeros are.
_DEPTH = re.compile(r"^ *(?:Bit Width|Sample Size) *: (\d+)", re.MULTILINE)
_ENDLESS = "lacks an end-of-stream"
# How files begin that libsndfile does not hand to its MP3 decoder: wave, AIFF, FLAC, Ogg, AU and CAF.
_NO_MP3 = (b"RIFF", b"RIFX", b"RF64", b"FORM", b"fLaC", b"OggS", b".snd", b"dns.", b"caff")
_ONE_AT_A_TIME = threading.Lock()  # of the threads that point standard error elsewhere
_PADDING = 4 * 1_152  # samples that an MP3 may hold beside its audio: frames before and behind it
_NO_LENGTH = 2**62  # samples, or more: of a FLAC stream that does not say how long it is


def read(
    source: str | Path | Audio, rate: int, *, start: float = 0.0, duration: float | None = None
) -> np.ndarray:
    """Audio at `rate` Hz -> float32 [n]: all of it, or the seconds from `start` to `start + duration`.

    Channels are averaged; full scale is 1. Raises SpeechError for a file that is missing, empty, cut short,
    no audio or more than one WAV, for samples that are not finite or, in memory, no floats [n], for a rate
    of less than 1,000 Hz, for bits that fill no bytes, and for seconds that the recording does not have.
    """
    check_seconds(start, duration)
    if isinstance(source, Audio):
        pieces = _of_array(source, start, duration)
    else:
        pieces = _of_file(Path(source), start, duration, _SECONDS)
    return np.concatenate([np.zeros(0, np.float32), *resampled(pieces, rate)])


def seconds_of(source: str | Path | Audio, *, start: float = 0.0, duration: float | None = None) -> float:
    """Return the seconds that `read` would give: as many as are asked for, or those from `start` to the end,
    by the header of a file; where that does not say, the file is decoded.

    Raises SpeechError for a file that is missing or, if its header is read, empty or no audio, and where
    nothing is from `start` on.
    """
    check_seconds(start, duration)
    if isinstance(source, Audio):
        return sum(len(samples) for samples, _ in _of_array(source, start, duration)) / source.rate
    path = Path(source)
    if duration is not None:
        check_file(path)
        return duration
    try:
        with _opened(path) as file:
            known = file.format != "MP3" and file.frames < _NO_LENGTH
            if known:
                first, _ = section(start, None, file.samplerate, file.frames, path)
                return (file.frames - first) / file.samplerate
    except _Unknown:
        pass
    return sum(len(samples) / rate for samples, rate in _of_file(path, start, None, _SECONDS))


def blocks(path: str | Path, rate: int, *, seconds: float = _SECONDS) -> Iterator[np.ndarray]:
    """The samples `read` gives of a file, in pieces of about so many seconds, with constant memory.

    Raises what `read` does, some of it only when the pieces before are out.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds must be more than 0, and finite, got {seconds}")
    return resampled(_of_file(Path(path), 0.0, None, seconds), rate)


def changed_speed(samples: np.ndarray, factor: float) -> np.ndarray:
    """Samples [n] played `factor` times as fast, pitch and all -> [about n / factor].

    Ko et al. 2015, "Audio augmentation for speech recognition". Raises ValueError for a factor that is not in
    0.1 .. 10.
    """
    if not 0.1 <= factor <= 10:
        raise ValueError(f"factor must be in 0.1 .. 10, got {factor}")
    return samples if factor == 1 else package("soxr").resample(samples, factor, 1.0)


def _of_array(audio: Audio, start: float, duration: float | None) -> Iterator[Audio]:
    given = audio.samples
    if not isinstance(given, np.ndarray) or given.ndim != 1 or not np.issubdtype(given.dtype, np.floating):
        found = (
            f"{given.dtype} {list(given.shape)}" if isinstance(given, np.ndarray) else type(given).__name__
        )
        raise SpeechError(
            f"samples must be floats [n] in [-1, 1], a numpy array, got {found}: take the mean of channels, "
            "divide integers by their full scale"
        )
    check_rate(audio.rate, "the audio")
    first, end = section(start, duration, audio.rate, len(given), "the audio")
    samples = np.asarray(given[first:end], np.float32)  # soxr refuses subclasses, such as memmap
    check_end(first + len(samples), end, audio.rate, "the audio")
    yield Audio(checked(samples, "the audio"), audio.rate)


def _of_file(path: Path, start: float, duration: float | None, seconds: float) -> Iterator[Audio]:
    with ExitStack() as stack:
        try:
            file = stack.enter_context(_opened(path))
        except _Unknown as error:
            decoded = decoder.pieces(path, seconds=seconds, refused=str(error))
            yield from cut(decoded, start, duration, path)
            return
        rate, length = file.samplerate, file.frames
        check_rate(rate, path)
        first, end = section(start, duration, rate, length, path)
        here = first
        if length >= _NO_LENGTH:
            file.seekable = lambda: False  # else soundfile seeks after each read, which fails at the end
        step = max(1, round(seconds * rate))
        if file.format == "MP3" and streams.mp3_samples(path) > length + _PADDING:
            decoded = decoder.pieces(path, seconds=seconds, refused="it holds more than its header says")
            yield from cut(decoded, start, duration, path)
            return
        if here:
            _skip(file, here, step)
        while len(block := _read(file, min(step, end - here))):
            here += len(block)
            yield Audio(checked(block.mean(1), path), rate)
        guess = file.format == "MP3" or length >= _NO_LENGTH
        if here == first and here and end > first:
            raise SpeechError(f"{path} ends before {start:g} seconds")
        if here < min(length, end) and not guess:
            raise SpeechError(f"{path} is cut short: it should have {length:,} samples and has {here:,}")
        check_end(here, end, rate, path)


def _skip(file: Any, samples: int, step: int) -> None:
    """Go to a sample from the beginning of a file; read up to there where its encoding allows no other
    way."""
    try:
        file.seek(samples)
    except package("soundfile").LibsndfileError:
        while samples and len(block := _read(file, min(step, samples))):
            samples -= len(block)


def _read(file: Any, most: int) -> np.ndarray:
    """The next samples [n channels] of an open file, `most` of them or as many as there are."""
    with _silenced() if file.format == "MP3" else nullcontext():
        return file.read(most, dtype="float32", always_2d=True)


@contextmanager
def _silenced() -> Iterator[None]:
    """Keep off the terminal what the MP3 decoder in libsndfile writes to the process' standard error about
    files that it then reads or refuses; it has no other way to be silenced. Only around that decoder, and
    not across a yield: what other threads write there meanwhile is lost."""
    with _ONE_AT_A_TIME:
        try:
            kept = os.dup(2)
        except OSError:  # there is no standard error
            yield
            return
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 2)
            os.close(nowhere)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _renew_lock() -> None:
    """Replace the lock in a forked child, where the thread that may hold it does not run."""
    global _ONE_AT_A_TIME
    _ONE_AT_A_TIME = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_renew_lock)


def _may_be_mp3(path: Path) -> bool:
    """Return whether libsndfile may hand the file to its MP3 decoder, by the first bytes."""
    with path.open("rb") as file:
        return not file.read(4).startswith(_NO_MP3)


class _Unknown(Exception):
    """A file that libsndfile does not open; the message says why."""


def check_file(path: Path) -> None:
    """Raise SpeechError for a file that is missing or empty."""
    try:
        if not path.is_file():
            raise SpeechError(f"{path} {'is not a file' if path.exists() else 'does not exist'}")
        if not path.stat().st_size:
            raise SpeechError(f"{path} is empty")
    except OSError as error:
        raise SpeechError(f"{path} cannot be read: {error.strerror}") from error


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file as soundfile opens it; what goes wrong inside is a SpeechError that names it."""
    check_file(path)
    try:
        silenced = _silenced if _may_be_mp3(path) else nullcontext
        another = streams.holds_another(path)  # of two MP3s the header says less than there is
    except OSError as error:
        raise SpeechError(f"{path} cannot be read: {error.strerror}") from error
    if another:
        raise SpeechError(f"{path} {ANOTHER}")
    soundfile = package("soundfile")
    try:
        with silenced():
            # As bytes: soundfile encodes a name strictly, and not every one is text.
            opened = soundfile.SoundFile(path if os.name == "nt" else os.fsencode(path))
    except soundfile.LibsndfileError as error:
        raise _Unknown(error.error_string.rstrip(".")) from error
    except TypeError as error:  # of soundfile, for a name that ends in .raw
        raise _Unknown("by its name it holds raw samples, which do not say their rate") from error
    try:
        with opened as file:
            notes = file.extra_info
            depth = _DEPTH.search(notes)
            if depth and int(depth[1]) % 8 and file.subtype.startswith("PCM"):
                raise SpeechError(
                    f"{path} must have samples of 8, 16, 24 or 32 bits, got {depth[1]}: {CONVERT}"
                )
            for counted, there in _COUNTED.findall(notes):
                if int(there) < int(counted) < UNKNOWN:
                    raise SpeechError(
                        f"{path} is cut short: it should have {counted} bytes of audio and has {there}"
                    )
            if _ENDLESS in notes:
                raise SpeechError(f"{path} is cut short: it has no end")
            yield file
    except soundfile.LibsndfileError as error:
        raise SpeechError(f"{path} cannot be read as audio: {error.error_string}") from error
