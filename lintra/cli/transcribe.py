"""`lintra transcribe --model DIR FILES...`."""

import dataclasses
import itertools
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from lintra import checkpoint
from lintra.audio import waveform
from lintra.audio.errors import SpeechError
from lintra.cli.arguments import UsageError, parse
from lintra.cli.failures import report_failure
from lintra.cli.model import Device, chosen
from lintra.cli.search import DecodingOptions
from lintra.models import CTC
from lintra.speech import Search, transcribe
from lintra.speech.streaming import Transcriber

Files = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILES")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Write down what is said in audio files (arrays in .npy, for a model that was trained on features)."""

    files: Files = ()  # what to hear
    model: Path = Path("spoken-digits")  # the folder of a run or checkpoint, or what comes with lintra
    json: bool = False  # an object a line: text, words and their times
    ctm: bool = False  # a line a word: name of the file, channel, start, duration, word
    stream: bool = False  # read piece by piece, write while listening
    block: float = 0.5  # seconds of a piece
    device: Device = "auto"  # auto: a GPU if there is one
    searching: DecodingOptions = dataclasses.field(default_factory=DecodingOptions)

    def __post_init__(self):
        if not self.files:
            raise ValueError("files must name at least one file to hear, got none")
        if self.json and self.ctm:
            raise ValueError("json and ctm are two forms of the same: choose one")
        if self.stream and (self.json or self.ctm or self.searching.beam is not None):
            raise ValueError("stream writes the best path as text: leave out json, ctm and beam")
        if not self.stream and self.block != Options.block:
            raise ValueError(f"block is for stream, got {self.block} without it")
        if not 0.01 <= self.block <= 60:
            raise ValueError(f"block must be between 0.01 and 60 seconds, got {self.block}")


def transcribe_command(args: Sequence[str]) -> int:
    options = parse(
        Options, args, prog="lintra transcribe", takes="FILES ...", description=Options.__doc__ or ""
    )
    model = checkpoint.load(options.model, chosen(options.device))
    if not isinstance(model, CTC):
        raise UsageError(f"{options.model} holds no recogniser of speech, but a {type(model).__name__}")
    if options.stream and (why := model.why_not_stream()):
        raise UsageError(f"{options.model} cannot stream: {why}")
    search, failed = options.searching.search(model), 0
    for file, name in zip(options.files, names(options.files), strict=True):
        try:
            if options.stream:
                _stream(file, model, options)
            else:
                _whole(file, name, model, search, options)
        except ValueError as error:  # of the file, or of a mechanism that such a file is too long for
            failed += 1
            report_failure(file, error)
    if failed and len(options.files) > 1:
        print(f"lintra: {failed:,} of {len(options.files):,} files failed", file=sys.stderr)
    return 1 if failed else 0


def names(files: Sequence[Path]) -> list[str]:
    """Return what CTM calls them: without folder and suffix, white space as _; where a name is taken, -2
    follows it, or the next number that makes it another."""
    found: dict[str, None] = {}
    for file in files:
        own = re.sub(r"\s", "_", file.stem)
        numbered = (f"{own}-{i}" for i in itertools.count(2))
        found[next(name for name in itertools.chain([own], numbered) if name not in found)] = None
    return list(found)


def heard(model: CTC, file: Path, search: Search | None = None) -> dict[str, Any]:
    """Return what is said in an audio file, for JSON: its text, and its words with their times in seconds."""
    found = transcribe(model, file, search=search, timestamps=True)
    said = [{"word": x.text, "start": round(x.start, 3), "end": round(x.end, 3)} for x in found.words]
    return {"audio": str(file), "text": found.text, "words": said}


def _whole(file: Path, name: str, model: CTC, search: Search, options: Options) -> None:
    """Hears a file and prints what was said, in the form that was asked for."""
    if options.json:
        print(json.dumps(heard(model, file, search), ensure_ascii=False), flush=True)
        return
    found = transcribe(model, file, search=search, timestamps=options.ctm)
    if options.ctm:
        for x in found.words:
            start = round(x.start, 3)
            print(f"{name} 1 {start:.3f} {round(x.end, 3) - start:.3f} {x.text}", flush=True)
    else:
        print(found.text if len(options.files) == 1 else f"{file}: {found.text}", flush=True)


def _stream(file: Path, model: CTC, options: Options) -> None:
    """Hears a file piece by piece, prints text as it comes, and then how long that took."""
    hearing, rate = Transcriber(model), model.config.features.rate
    if len(options.files) > 1:
        print(f"{file}: ", end="", flush=True)
    samples, taken = 0, []
    try:
        began = time.perf_counter()
        for block in _with_end(waveform.blocks(file, rate, seconds=options.block)):
            text = hearing.finish() if block is None else hearing.push(block)
            taken.append(time.perf_counter() - began)
            samples += 0 if block is None else len(block)
            print(text, end="", flush=True)
            began = time.perf_counter()  # reading the next piece and bringing it to the rate counts
    finally:
        print(flush=True)
    if not model.config.features.frames(samples):
        raise SpeechError(f"{samples:,} samples at {rate:,} Hz are too short for one frame")
    print(
        f"{file}: {samples / rate:.2f} s of audio in {sum(taken):.3f} s, real-time factor "
        f"{sum(taken) * rate / samples:.4f}; latency {1e3 * options.block:.0f} ms for a piece to come and "
        f"{1e3 * float(np.median(taken)):.1f} ms to read and hear it, at most {1e3 * max(taken):.1f} ms",
        file=sys.stderr,
    )


def _with_end(blocks: Iterator[np.ndarray]) -> Iterator[np.ndarray | None]:
    """None after the last one."""
    yield from blocks
    yield None
