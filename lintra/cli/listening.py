"""Transcription while listening: of a file, of standard input, of a microphone."""

import contextlib
import dataclasses
import io
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import cast

import numpy as np

from lintra.audio import piped, samples, waveform
from lintra.audio.errors import SpeechError
from lintra.audio.microphone import Microphone
from lintra.cli.arguments import UsageError
from lintra.cli.stopping import Stopping, StopRequested
from lintra.cli.transcripts import Form
from lintra.models import CTC
from lintra.speech.streaming import Transcriber

STDIN = Path("-")

SECONDS_TO_SIGNAL = 0.2  # until a signal that came while there was nothing to read is noticed


@dataclasses.dataclass(frozen=True)
class Source:
    """Recording in pieces at a model's rate; the pieces end on a request to stop."""

    name: str
    pieces: Iterable[np.ndarray]
    waits: bool = False  # for audio still to come; waiting does not count as work
    stopped: Callable[[], bool] = lambda: False  # perhaps before any audio came, which is no error


def of_file(file: Path, rate: int, stop: Stopping, *, seconds: float) -> Source:
    """An audio file."""
    return Source(str(file), _until(stop, waveform.blocks(file, rate, seconds=seconds)))


def of_stdin(rate: int, stop: Stopping, *, raw_rate: int | None, seconds: float) -> Source:
    """Piped WAV or, at `raw_rate`, raw samples. Raises UsageError for a terminal."""
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("standard input is a terminal: pipe audio into it")
    content = cast("io.BufferedReader", sys.stdin.buffer)

    def read(n: int) -> bytes:
        try:
            with stop.interrupting():
                _await(content)  # a signal here loses nothing; one during a read would
        except StopRequested:
            return b""
        return content.read1(n)

    pieces = piped.pieces(read, rate=raw_rate, seconds=seconds, name="standard input", stopped=stop)
    return Source("stdin", samples.resampled(pieces, rate), waits=True, stopped=stop)


def of_microphone(device: Microphone, rate: int, stop: Stopping, *, seconds: float) -> Source:
    """Audio of a microphone."""
    pieces = device.pieces(seconds=seconds, stopped=stop)
    return Source("microphone", samples.resampled(pieces, rate), waits=True, stopped=stop)


def listen(model: CTC, source: Source, form: Form, *, seconds: float, quiet: bool = False) -> None:
    """Write the transcript as it comes, in pieces of about so many seconds; then, unless `quiet`, print the
    time taken on standard error. Raises SpeechError."""
    hearing, rate = Transcriber(model), model.config.features.rate
    heard, taken = 0, []
    try:
        clock = time.perf_counter
        began = clock()  # reading the next piece and bringing it to the rate counts
        for piece in _with_end(source.pieces):
            began = clock() if source.waits else began
            text = hearing.finish() if piece is None else hearing.push(piece)
            taken.append(clock() - began)
            heard += 0 if piece is None else len(piece)
            if model.config.features.frames(heard):  # nothing is said of what is too short to be heard
                form.push(text, hearing)
            began = clock()
    finally:
        form.finish(hearing)
    if not model.config.features.frames(heard):
        if source.stopped():
            return
        raise SpeechError(f"{heard:,} samples at {rate:,} Hz are too short for one frame")
    if quiet:
        return
    work = "hear it" if source.waits else "read and hear it"
    print(
        f"{source.name}: {heard / rate:.2f} s of audio in {sum(taken):.3f} s, real-time factor "
        f"{sum(taken) * rate / heard:.4f}; latency {1e3 * seconds:.0f} ms for a piece to come and "
        f"{1e3 * float(np.median(taken)):.1f} ms to {work}, at most {1e3 * max(taken):.1f} ms",
        file=sys.stderr,
    )


def _await(content: io.BufferedReader) -> None:
    """Wait until there is something to read, if the system can tell for a pipe: Windows cannot."""
    with contextlib.suppress(OSError):  # not a file of the system
        # A signal that comes just before the call does not end it.
        while not select.select([content], [], [], SECONDS_TO_SIGNAL)[0]:
            pass


def _until(stopped: Callable[[], bool], pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    for piece in pieces:
        yield piece
        if stopped():
            return


def _with_end(pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray | None]:
    """Yield the pieces, then None, even if an error follows, so that earlier pieces are transcribed."""
    any_came = False
    try:
        for piece in pieces:
            any_came = True
            yield piece
    except SpeechError:
        if any_came:
            yield None
        raise
    yield None
