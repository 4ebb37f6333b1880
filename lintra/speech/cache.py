"""The file that keeps the features of a corpus: written piece by piece, mapped into memory when it is read.

It is a safetensors file: features [frames bins] float32, lengths [n] int32 (the frames of each array), kept
[m] int32 (the utterances they are of), skipped uint8 (the others, and why, in JSON). Its metadata say what it
was made of.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from lintra.audio.features import Config
from lintra.audio.waveform import Audio
from lintra.speech.manifest import Utterance

FORMAT = "1"
Write = Callable[[np.ndarray], Any]
_HEADER = 2_048  # bytes set aside for the header, known when the features are written; it needs some 600
_ROWS = 2**20  # of features that are checked together


class Parts(NamedTuple):
    """Rows of the features of a corpus."""

    lengths: np.ndarray  # int32 [n], of each array
    kept: np.ndarray  # int32 [m], the utterances they are of; all speeds of each in turn
    skipped: list[tuple[int, str]]  # the other utterances


def origin_of(utterances: Sequence[Utterance], config: Config, speeds: Sequence[float]) -> dict[str, str]:
    """Return what a cache was made of: a file is identified by its size and time. Texts are not in
    it."""
    digest = hashlib.sha256(json.dumps(list(speeds)).encode())
    for utterance in utterances:
        if config.kind == "given":
            source = _identity(utterance.features)
        else:
            source = [_identity(utterance.audio), utterance.start, utterance.duration]
        digest.update(json.dumps(source).encode() + b"\n")
    return {"format": FORMAT, "features": json.dumps(asdict(config)), "made_of": digest.hexdigest()}


def _identity(source: Path | Audio | np.ndarray | None) -> Any:
    if source is None:
        return None
    if isinstance(source, Path):
        place = str(source.absolute())
        try:
            found = source.stat()
        except (OSError, ValueError):  # ValueError: what no path may contain
            return [place]
        return [place, found.st_size, found.st_mtime_ns]
    if isinstance(source, Audio):
        return [_identity(source.samples), source.rate]
    x = np.ascontiguousarray(source)
    return [str(x.dtype), x.shape, hashlib.sha256(x.data).hexdigest()]


def write(place: Path, origin: dict[str, str], bins: int, compute: Callable[[Write], Parts]) -> None:
    """Make the file of a cache: the arrays [t bins] that `compute` writes, and their description."""
    with open(place, "wb") as file:
        file.write(bytes(8 + _HEADER))
        parts = compute(lambda x: file.write(np.ascontiguousarray(x, "<f4").data))
        frames = int(parts.lengths.sum(dtype=np.int64))
        skipped = np.frombuffer(json.dumps(parts.skipped).encode(), np.uint8)
        header: dict[str, Any] = {"__metadata__": origin}
        end = _entry(header, "features", "F32", [frames, bins], 4, 0)
        for name, x, dtype in (
            ("lengths", parts.lengths, "I32"),
            ("kept", parts.kept, "I32"),
            ("skipped", skipped, "U8"),
        ):
            end = _entry(header, name, dtype, list(x.shape), x.itemsize, end)
            file.write(x.astype(x.dtype.newbyteorder("<")).data)
        _begin(file, header)


def _entry(header: dict[str, Any], name: str, dtype: str, shape: list[int], size: int, start: int) -> int:
    """Put a tensor that begins at byte `start` into a safetensors header; the byte after it."""
    end = start + int(np.prod(shape, dtype=np.int64)) * size
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    return end


def _begin(file: BinaryIO, header: dict[str, Any]) -> None:
    """The beginning of a safetensors file: how long its header is, and the header, filled up with spaces."""
    content = json.dumps(header).encode().ljust(_HEADER)
    file.seek(0)
    file.write(len(content).to_bytes(8, "little") + content)


def holds_other_tensors(path: Path) -> bool:
    """Return whether there is a safetensors file that is no cache, such as the weights of a model."""
    try:
        with safe_open(path, framework="pt") as file:
            return "made_of" not in (file.metadata() or {})
    except (OSError, SafetensorError):  # there is none, or it is damaged
        return False


def reopen(
    cache: Path, origin: dict[str, str], bins: int, utterances: int, speeds: int
) -> tuple[np.ndarray, Parts] | None:
    """The features [frames bins] of a cache and what they are; None unless it is there, of this origin and
    undamaged, with each of the utterances kept or skipped, and as many arrays of one as there are speeds.
    """
    try:
        with safe_open(cache, framework="pt") as file:  # which maps the file, where numpy's would read it
            if file.metadata() != origin:
                return None
            found = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118 (no mapping)
        rows = found["features"]
        parts = Parts(found["lengths"], found["kept"], json.loads(found["skipped"].tobytes()))
        places = sorted([*parts.kept.tolist(), *(i for i, _ in parts.skipped)])
        reasons = [reason for _, reason in parts.skipped]
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError):
        return None
    fits = (
        places == list(range(utterances))
        and all(isinstance(reason, str) for reason in reasons)
        and (rows.dtype, parts.lengths.dtype, parts.kept.dtype) == (np.float32, np.int32, np.int32)
        and rows.shape == (parts.lengths.sum(dtype=np.int64), bins)
        and parts.lengths.shape == (len(parts.kept) * speeds,)
        and (parts.lengths > 0).all()
        and all(np.isfinite(rows[i : i + _ROWS]).all() for i in range(0, len(rows), _ROWS))
    )
    return (rows, parts) if fits else None
