"""Two free corpora: AN4, spelled names and numbers as mel cepstra, and the Free Spoken Digit Dataset.

AN4 (CMU 1991): an4_index.tsv with the columns split, utterance, speaker, first_frame, frames, transcript, and
an4_mfcc_train.f16.xz, an4_mfcc_test.f16.xz, float16 [13, frames of the split], 100 frames a second.
FSDD (Jackson et al.): fsdd_index.csv with file, digit, speaker, take, split, samples, and fsdd.tar.xz with
wave files of 8 kHz, 16 bit, one channel.
"""

import io
import lzma
import tarfile
import wave
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lintra.audio.errors import SpeechError
from lintra.audio.lines import lines
from lintra.audio.waveform import Audio
from lintra.io.files import expanded, refuse_irregular
from lintra.speech.manifest import Utterance

SPLITS = ("train", "test")
AN4_CEPSTRA, AN4_SHIFT_MS = 13, 10.0
FSDD_RATE = 8_000  # Hz
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
AN4_FILES = ("an4_index.tsv", *(f"an4_mfcc_{split}.f16.xz" for split in SPLITS))
FSDD_FILES = ("fsdd_index.csv", "fsdd.tar.xz")
_AN4_COLUMNS = ("split", "utterance", "speaker", "first_frame", "frames", "transcript")
_FSDD_COLUMNS = ("file", "digit", "speaker", "take", "split", "samples")
_MOST = 2**24  # bytes of one recording in an archive


def an4(folder: str | Path) -> dict[str, list[Utterance]]:
    """AN4's utterances, {"train": ..., "test": ...}, with their features [t 13]. Raises SpeechError."""
    folder = expanded(folder)
    cepstra = {split: _cepstra(folder / f"an4_mfcc_{split}.f16.xz") for split in SPLITS}
    found: dict[str, list[Utterance]] = {split: [] for split in SPLITS}
    for place, row in _rows(folder / "an4_index.tsv", "\t", _AN4_COLUMNS):
        split = row["split"]
        first, frames = _number(row, "first_frame", place), _number(row, "frames", place)
        if first + frames > len(cepstra[split]):
            raise SpeechError(f"{place}: frames {first} to {first + frames} of {len(cepstra[split])}")
        found[split].append(
            Utterance(
                id=row["utterance"],
                text=row["transcript"],
                features=cepstra[split][first : first + frames],
                speaker=row["speaker"],
            )
        )
    return found


def fsdd(
    folder: str | Path, *, joined: tuple[int, int] = (1, 7), rounds: int = 1, seed: int = 0
) -> dict[str, list[Utterance]]:
    """Strings of spoken digits, {"train": ..., "test": ...}, such as "three one four". Raises SpeechError.

    From joined[0] to joined[1] recordings of one speaker and one split follow each other; a speaker's last
    string may be shorter. Each recording is used once, for training `rounds` times in different strings. The
    choice follows from the seed.
    """
    low, high = joined
    if not 1 <= low <= high:
        raise ValueError(f"joined must be the fewest and the most digits of a string, got {joined}")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    folder = expanded(folder)
    index, archive = (folder / name for name in FSDD_FILES)
    waves = _waves(archive)
    recordings: dict[tuple[str, str], list[tuple[str, np.ndarray]]] = {}
    for place, row in _rows(index, ",", _FSDD_COLUMNS):
        name, samples, digit = row["file"], _number(row, "samples", place), _number(row, "digit", place)
        if digit >= len(DIGITS):
            raise SpeechError(f"{place}: digit must be 0 to 9, got {digit}")
        if name not in waves:
            raise SpeechError(f"{place}: {archive} has no file {name}")
        if len(waves[name]) != samples:
            raise SpeechError(f"{place}: {name} of {archive} has {len(waves[name])} samples, not {samples}")
        recordings.setdefault((row["split"], row["speaker"]), []).append((DIGITS[digit], waves[name]))
    draw = np.random.default_rng(seed)
    found: dict[str, list[Utterance]] = {split: [] for split in SPLITS}
    for (split, speaker), own in sorted(recordings.items(), key=lambda item: item[0]):
        strings = [
            x for _ in range(rounds if split == "train" else 1) for x in _strings(own, low, high, draw)
        ]
        for number, string in enumerate(strings):
            words, samples = zip(*string, strict=True)
            audio = Audio(np.concatenate(samples), FSDD_RATE)
            id = f"{speaker}-{split}-{number:04d}"
            found[split].append(Utterance(id=id, text=" ".join(words), audio=audio, speaker=speaker))
    return found


def _strings(
    recordings: Sequence[tuple[str, np.ndarray]], low: int, high: int, draw: np.random.Generator
) -> Iterator[list[tuple[str, np.ndarray]]]:
    """Yield all recordings of a speaker in a random order, some at a time."""
    order = draw.permutation(len(recordings)).tolist()
    while order:
        n = int(draw.integers(low, high + 1))
        yield [recordings[i] for i in order[:n]]
        del order[:n]


def _cepstra(path: Path) -> np.ndarray:
    """Return the cepstra of a file, [frames 13] float32."""
    refuse_irregular(path, SpeechError)
    try:
        content = lzma.decompress(path.read_bytes())
    except FileNotFoundError as error:
        raise SpeechError(f"{path} does not exist") from error
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise SpeechError(f"{path} cannot be read, it may be cut short ({error})") from error
    if not content or len(content) % (2 * AN4_CEPSTRA):
        raise SpeechError(f"{path} holds {len(content)} bytes, which is not {AN4_CEPSTRA} float16 a frame")
    return np.frombuffer(content, "<f2").reshape(AN4_CEPSTRA, -1).T.astype(np.float32)


def _waves(path: Path) -> dict[str, np.ndarray]:
    """The wave files of an archive by name, float32 [n] in [-1, 1]; nothing is extracted to the disk."""
    found = {}
    refuse_irregular(path, SpeechError)
    try:
        with tarfile.open(path, "r|xz") as archive:
            for member in archive:
                if member.isfile() and member.size <= _MOST and (file := archive.extractfile(member)):
                    found[member.name] = _wave(file.read(), f"{member.name} of {path}")
    except FileNotFoundError as error:
        raise SpeechError(f"{path} does not exist") from error
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError) as error:
        raise SpeechError(f"{path} cannot be read, it may be cut short ({error})") from error
    return found


def _wave(content: bytes, name: str) -> np.ndarray:
    try:
        with wave.open(io.BytesIO(content)) as file:
            form = (file.getnchannels(), file.getsampwidth(), file.getframerate())
            samples = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise SpeechError(f"{name} is not a wave file ({error})") from error
    if form != (1, 2, FSDD_RATE):
        raise SpeechError(f"{name} must have 1 channel of 2 bytes at {FSDD_RATE} Hz, got {form}")
    return np.frombuffer(samples, "<i2").astype(np.float32) / 32_768


def _rows(path: Path, separator: str, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (place, values by column) of each line after the first, which must name the columns."""
    for number, line in lines(path):
        place, values = f"{path}, line {number:,}", line.split(separator)
        if number == 1:
            if values != list(columns):
                raise SpeechError(f"{place} must be the columns {' '.join(columns)}, got {line[:80]!r}")
            continue
        if len(values) != len(columns):
            raise SpeechError(f"{place}: expected {len(columns)} columns, got {len(values)}")
        row = dict(zip(columns, values, strict=True))
        if row["split"] not in SPLITS:
            raise SpeechError(f"{place}: split must be train or test, got {row['split']!r}")
        yield place, row


def _number(row: dict[str, str], column: str, place: str) -> int:
    if not row[column].isdecimal():
        raise SpeechError(f"{place}: {column} must be a whole number, got {row[column]!r}")
    return int(row[column])
