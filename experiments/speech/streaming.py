"""A recogniser that listens for minutes: its errors, the time it takes and the memory it keeps.

    python experiments/speech/streaming.py --data DIR

One thread. Nothing else may run beside it. What is measured of another model (--model) is written to --out.
"""

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from lintra import checkpoint, evaluate
from lintra.allocator import keep_freed_memory
from lintra.bench import reports
from lintra.bench.memory import forget_peak, peak
from lintra.bench.reports import Row
from lintra.evaluate import ScoredUtterance
from lintra.models import CTC
from lintra.speech import corpora
from lintra.speech.manifest import Utterance
from lintra.speech.streaming import Transcriber

RESULTS = Path(__file__).with_name("streaming.json")
MODEL = "spoken-digits"
MINUTES = 10
PIECE = 0.5  # seconds


def endless(data: Path) -> Iterator[Utterance]:
    """Strings of the test set, speaker by speaker, with different strings in each round."""
    for seed in itertools.count():
        yield from corpora.fsdd(data, seed=seed)["test"]


def listen(model: CTC, strings: Sequence[Utterance]) -> list[Row]:
    """Process these as one recording, in pieces: errors, seconds, and growth of memory after a minute."""
    rate = model.config.features.rate
    audio = np.concatenate([x.audio.samples for x in strings])  # pyright: ignore
    length = int(PIECE * rate)
    pieces = [audio[i : i + length] for i in range(0, len(audio), length)]
    hearing, text, seconds, peaks = Transcriber(model), "", [], []
    forget_peak()
    for number, piece in enumerate(pieces, 1):
        began = time.perf_counter()
        text += hearing.push(piece)
        seconds.append(time.perf_counter() - began)
        if number * PIECE % 60 == 0:
            peaks.append(peak())
    text += hearing.finish()
    said = " ".join(x.text or "" for x in strings)
    errors = evaluate.error_rates([ScoredUtterance("all", said, text)], "word")["word"].rate
    return [
        Row(f"a recording of {MINUTES} minutes, in pieces, word errors", 100 * errors, "%"),
        Row("seconds of work for a second of audio", sum(seconds) / (len(audio) / rate), "", at_most=0.1),
        Row(f"a piece of {PIECE:g} s, median", 1e3 * float(np.median(seconds)), "ms"),
        Row(f"a piece of {PIECE:g} s, the slowest", 1e3 * max(seconds), "ms"),
        Row(f"memory that minutes 2 to {MINUTES} add", (peaks[-1] - peaks[0]) / 1e6, "MB", at_most=1.0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="A recogniser that listens for minutes.")
    parser.add_argument("--data", type=Path, required=True, help="folder with fsdd.tar.xz and fsdd_index.csv")
    parser.add_argument("--model", default=MODEL, help="the folder of a run, or what comes with lintra")
    parser.add_argument("--out", type=Path, help="the file to write, needed with --model")
    options = parser.parse_args()
    if options.out is None and options.model != MODEL:
        parser.error(f"--model needs --out: {RESULTS.name} is of {MODEL}")
    keep_freed_memory()
    torch.set_num_threads(1)
    model = checkpoint.load(checkpoint.find(options.model))
    strings, samples = [], 0
    for string in endless(options.data):
        strings.append(string)
        samples += len(string.audio.samples)  # pyright: ignore
        if samples >= 60 * MINUTES * model.config.features.rate:
            break
    rows = listen(model, strings)
    print(reports.table(rows))
    command = "python experiments/speech/streaming.py --data DIR"
    command += "" if options.model == MODEL else f" --model {options.model}"
    command += "" if options.out is None else f" --out {options.out}"
    reports.write(options.out or RESULTS, rows, {}, command=command)


if __name__ == "__main__":
    main()
