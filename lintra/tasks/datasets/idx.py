"""IDX, the form of MNIST's files: the bytes 0 0 8 d (8: the values are bytes, d: how many axes), d sizes as
32-bit big-endian numbers, the values."""

import math
import struct
from pathlib import Path

import numpy as np

from lintra.tasks.base import DataError


def images(content: bytes, name: Path) -> np.ndarray:
    """Return the grey images [n h w] uint8 that an unpacked file holds. Raises DataError."""
    header = struct.Struct(">4s3I")
    if len(content) < header.size or content[:4] != b"\0\0\x08\x03":
        raise DataError(f"{name} is no IDX file of images: it starts with {content[:4]!r}, not 00 00 08 03")
    sizes = header.unpack_from(content)[1:]
    if not math.prod(sizes):
        raise DataError(f"{name} holds no pixels: it says images x rows x columns {sizes}")
    values = np.frombuffer(content, np.uint8, offset=header.size)
    if values.size != math.prod(sizes):
        raise DataError(f"{name} holds {values.size} values, {math.prod(sizes)} expected; fetch it again")
    return values.reshape(sizes)


def labels(content: bytes, name: Path) -> np.ndarray:
    """Return the classes [n] uint8 that an unpacked file holds. Raises DataError."""
    header = struct.Struct(">4sI")
    if len(content) < header.size or content[:4] != b"\0\0\x08\x01":
        raise DataError(f"{name} is no IDX file of labels: it starts with {content[:4]!r}, not 00 00 08 01")
    (count,) = header.unpack_from(content)[1:]
    values = np.frombuffer(content, np.uint8, offset=header.size)
    if values.size != count:
        raise DataError(f"{name} holds {values.size} labels, {count} expected; fetch it again")
    return values
