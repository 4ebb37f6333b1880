"""`lintra transcribe --model DIR FILES...`: files, standard input or a microphone."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from lintra import checkpoint
from lintra.audio.microphone import Microphone
from lintra.cli import listening
from lintra.cli.arguments import UsageError, changed, parse
from lintra.cli.decoding import DecodingOptions
from lintra.cli.failures import report_failure
from lintra.cli.listening import STDIN
from lintra.cli.model import Device, chosen
from lintra.cli.output import Quiet
from lintra.cli.stopping import stopping
from lintra.cli.transcripts import Ctm, Form, Json, Srt, Text
from lintra.models import CTC
from lintra.speech import Search, transcribe
from lintra.speech.nist import names

Files = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILES")]

_READ_AT_ONCE = 1.0  # seconds of standard input, where it is heard as a whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Transcribe audio files (arrays in .npy, for a model that was trained on features), standard input (-)
    or a microphone (--live)."""

    files: Files = ()  # audio files; -: standard input, WAV or raw samples
    model: Path = Path("spoken-digits")  # folder of a run or checkpoint, or a bundled model
    json: bool = False  # one object per line: text, words and their times
    ctm: bool = False  # one line per word: name of the file, channel, start, duration, word
    srt: bool = False  # subtitles
    stream: bool = False  # read piece by piece, write while listening
    live: bool = False  # listen to a microphone, until Ctrl-C
    microphone: str | None = None  # its name, a part of it or its number; None: the system's
    rate: int | None = None  # Hz of raw samples on standard input: 16 bits, one channel
    block: float = 0.5  # seconds of a piece
    device: Device = "auto"  # auto: a GPU if there is one
    decoding: DecodingOptions = dataclasses.field(default_factory=DecodingOptions)
    output: Quiet = dataclasses.field(default_factory=Quiet)

    def __post_init__(self):
        if not self.files and not self.live:
            raise ValueError(
                "files must name at least one file to transcribe, or - for standard input, got none "
                "(--live hears a microphone)"
            )
        if self.files and self.live:
            raise ValueError("live hears a microphone: leave the files out")
        if self.json + self.ctm + self.srt > 1:
            raise ValueError("json, ctm and srt are alternatives: choose one")
        if self.srt and len(self.files) > 1:
            raise ValueError(f"srt has the times of one recording: name one file, got {len(self.files)}")
        if self.streams and (given := changed(self.decoding)):
            raise ValueError(f"stream and live write the best path: leave out {', '.join(given)}")
        if not self.streams and self.block != Options.block:
            raise ValueError(f"block is for stream, got {self.block} without it")
        if not 0.01 <= self.block <= 60:
            raise ValueError(f"block must be between 0.01 and 60 seconds, got {self.block}")
        if self.microphone is not None and not self.live:
            raise ValueError("microphone is for live: add --live")
        if self.rate is not None and STDIN not in self.files:
            raise ValueError("rate is for raw samples on standard input, which is named -")
        if self.files.count(STDIN) > 1:
            raise ValueError("files can name standard input, -, only once")

    @property
    def streams(self) -> bool:
        """Return whether text is written while audio is heard."""
        return self.stream or self.live

    def form(self, audio: str, name: str) -> Form:
        """Return the form of a recording's transcript. name: of the recording in CTM."""
        if self.json:
            return Json(audio)
        if self.ctm:
            return Ctm(name)
        return Srt() if self.srt else Text(audio if len(self.files) > 1 else None)


def transcribe_command(args: Sequence[str]) -> int:
    options = parse(
        Options, args, prog="lintra transcribe", takes="FILES ...", description=Options.__doc__ or ""
    )
    model = checkpoint.load(options.model, chosen(options.device))
    if not isinstance(model, CTC):
        raise UsageError(f"{options.model} holds no recogniser of speech, but a {type(model).__name__}")
    if options.streams and (why := model.why_not_stream()):
        raise UsageError(f"{options.model} cannot stream: {why}")
    if STDIN in options.files and model.config.features.kind == "given":
        raise UsageError(
            f"{options.model} reads features made elsewhere, and standard input is read as audio"
        )
    search, failed = options.decoding.search(model), 0
    if options.live:
        return _live(model, options)
    called = names("stdin" if file == STDIN else file.stem for file in options.files)  # in CTM
    for file, name in zip(options.files, called, strict=True):
        try:
            stopped = _hear(file, name, model, search, options)
        except ValueError as error:  # from the file, or from a mechanism for which it is too long
            failed += 1
            report_failure("standard input" if file == STDIN else file, error)
        else:
            if stopped:
                return stopped
    if failed and len(options.files) > 1:
        print(f"lintra: {failed:,} of {len(options.files):,} files failed", file=sys.stderr)
    return 1 if failed else 0


def _live(model: CTC, options: Options) -> int:
    """Transcribe a microphone until a signal, the normal way to end -> 0. Raises SpeechError."""
    device, rate = Microphone(options.microphone), model.config.features.rate
    quiet = options.output.quiet
    if not quiet:
        print(f"hearing {device.name!r}: Ctrl-C ends it", file=sys.stderr)
    with stopping() as stop:
        source = listening.of_microphone(device, rate, stop, seconds=options.block)
        form = options.form(source.name, source.name)
        listening.listen(model, source, form, seconds=options.block, quiet=quiet)
    if device.lost:
        print(f"lintra: audio was lost {device.lost:,} times: this computer is too busy", file=sys.stderr)
    return 0


def _hear(file: Path, name: str, model: CTC, search: Search, options: Options) -> int:
    """Transcribe a file or standard input -> 0, or the exit code of a signal that ended it, once what was
    heard until then is written. Raises ValueError."""
    rate = model.config.features.rate
    form = options.form("stdin" if file == STDIN else str(file), name)
    if not options.streams and file != STDIN:
        form.whole(transcribe(model, file, search=search, timestamps=form.needs_times))
        return 0
    with stopping() as stop:
        seconds = options.block if options.streams else _READ_AT_ONCE
        if file == STDIN:
            source = listening.of_stdin(rate, stop, raw_rate=options.rate, seconds=seconds)
        else:
            source = listening.of_file(file, rate, stop, seconds=seconds)
        if options.streams:
            listening.listen(model, source, form, seconds=seconds, quiet=options.output.quiet)
            return stop.exit_code
        samples = np.concatenate([np.zeros(0, np.float32), *source.pieces])
        if stop() and not model.config.features.frames(len(samples)):
            return stop.exit_code
    form.whole(transcribe(model, samples, rate=rate, search=search, timestamps=form.needs_times))
    return stop.exit_code
