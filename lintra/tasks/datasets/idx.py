"""IDX, the form of MNIST's files: the bytes 0 0 8 d (8: the values are bytes, d: how many axes), d sizes as
32-bit big-endian numbers, the values."""

import math
import struct
from pathlib import Path

import numpy as np

from lintra.tasks.base import DataError


def images(content: bytes, name: Path) -> np.ndarray:
    """Return the grey images [n h w] uint8 that an unpacked file holds. Raises DataError."""
    found = _array(content, name, "images", "values", axes=3)
    if not found.size:
        raise DataError(f"{name} holds no pixels: it says images x rows x columns {found.shape}")
    return found


def labels(content: bytes, name: Path) -> np.ndarray:
    """Return the classes [n] uint8 that an unpacked file holds. Raises DataError."""
    return _array(content, name, "labels", "labels", axes=1)


def _array(content: bytes, name: Path, kind: str, unit: str, *, axes: int) -> np.ndarray:
    """The bytes of a file of this kind and so many axes. Raises DataError."""
    header = struct.Struct(f">4s{axes}I")
    if len(content) < header.size or content[:4] != bytes((0, 0, 8, axes)):
        raise DataError(
            f"{name} is not an IDX file of {kind}: it starts with {content[:4]!r}, not 00 00 08 0{axes}"
        )
    sizes = header.unpack_from(content)[1:]
    values = np.frombuffer(content, np.uint8, offset=header.size)
    if values.size != math.prod(sizes):
        raise DataError(f"{name} holds {values.size} {unit}, {math.prod(sizes)} expected; fetch it again")
    return values.reshape(sizes)
