"""Transcribe digits while they are being spoken, and draw the waveform with each word where it came.

python examples/stream_speech.py --out stream.png a.wav b.wav

The recordings are joined with pauses between them; without any, the example uses three recordings from the
tests. The model, "spoken-digits", comes with lintra. It hears 8,000 samples a second and keeps a state of
constant size. `--quick` hears only the first recording. Needs `pip install ".[train,speech]"`.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from lintra import checkpoint
from lintra.audio import waveform
from lintra.models import CTC
from lintra.speech.streaming import Transcriber

RECORDINGS = Path(__file__).parents[1] / "tests" / "speech" / "data"
PIECE, PAUSE = 0.05, 0.4  # seconds heard at a time; seconds of silence before and after every recording
BLUE, RED, GREY = "#0b6e99", "#d1495b", "#8a8a8a"


def join(files: list[Path], rate: int) -> np.ndarray:
    """Return the recordings as one waveform [n] at a rate in Hz, with pauses around each."""
    pause = np.zeros(round(PAUSE * rate), np.float32)
    parts = [pause]
    for file in files:
        parts += [waveform.read(file, rate), pause]
    return np.concatenate(parts)


def listen(model: CTC, samples: np.ndarray) -> Iterator[tuple[float, str]]:
    """Yield (seconds heard so far, the text that was added), as the samples [n] come in piece by piece."""
    transcriber, rate = Transcriber(model), model.config.features.rate
    size = round(PIECE * rate)
    for first in range(0, len(samples), size):
        if text := transcriber.push(samples[first : first + size]):
            yield min(first + size, len(samples)) / rate, text
    if text := transcriber.finish():
        yield len(samples) / rate, text


def draw(path: Path, samples: np.ndarray, rate: int, heard: list[tuple[float, str]]) -> None:
    """Write a PNG of a waveform, with each text at the second when it was written."""
    figure = Figure(figsize=(8, 3), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.plot(np.arange(len(samples)) / rate, samples / np.abs(samples).max(), color=BLUE, linewidth=0.5)
    for seconds, text in heard:
        axes.axvline(seconds, color=RED, linewidth=1)
        axes.text(seconds, 1.12, f" {text.strip()}", color=RED, fontsize=11, va="bottom")
    axes.set_title("Spoken digits, each word when it was written", loc="left", fontsize=11, pad=22)
    axes.set_xlabel("seconds heard", color=GREY)
    axes.set_ylabel("waveform", color=GREY)
    axes.set_xlim(0, len(samples) / rate)
    axes.set_ylim(-1.1, 1.1)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write down spoken digits while they are being said.")
    parser.add_argument("recordings", type=Path, nargs="*", help="audio files; three of the tests if none")
    parser.add_argument("--out", type=Path, default=Path("stream.png"), help="where the picture goes")
    parser.add_argument("--quick", action="store_true", help="hear the first recording alone")
    arguments = parser.parse_args()
    files = arguments.recordings or sorted(RECORDINGS.glob("*.wav"))
    model = checkpoint.load("spoken-digits")
    rate = model.config.features.rate
    samples = join(files[:1] if arguments.quick else files, rate)
    heard = []
    for seconds, text in listen(model, samples):
        print(f"{seconds:5.2f} s  {text.strip()}")
        heard.append((seconds, text))
    draw(arguments.out, samples, rate, heard)


if __name__ == "__main__":
    main()
