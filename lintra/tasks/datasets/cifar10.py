"""CIFAR-10: 32 x 32 colour photographs, Krizhevsky 2009.

Three forms are read, each as 5 shards for training and one for the test, 10,000 images a shard:

* the authors' binary version: records of one byte (the class, 0 .. 9) and 3,072 bytes [ch h w];
* the same in their archive, cifar-10-binary.tar.gz;
* train_1.xz .. train_5.xz, test.xz: prediction residuals, lossless at half the size (`_from_residuals`).
  A shard takes about a second, so those that are not needed are not read.
"""

import math
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from lintra.tasks.base import DataError
from lintra.tasks.datasets import data_files

SHAPE = (32, 32, 3)
TRAIN_IMAGES, TEST_IMAGES = 50_000, 10_000
FORMS = (
    "data_batch_1.bin .. data_batch_5.bin and test_batch.bin (there or in cifar-10-batches-bin), "
    "or cifar-10-binary.tar.gz, or train_1.xz .. train_5.xz and test.xz"
)
SOURCE = "https://www.cs.toronto.edu/~kriz"
_SHARD = 10_000  # images
_ARCHIVE = "cifar-10-binary.tar.gz"
_ARCHIVE_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
_BATCHES = "cifar-10-batches-bin"  # the folder in the archive
_BINARY = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
Part = Callable[[np.ndarray], np.ndarray]  # of records
_RESIDUALS = [*(f"train_{i}.xz" for i in range(1, 6)), "test.xz"]


def find(folder: Path) -> data_files.Splits | None:
    """The data set in this folder, None if there is nothing of it. Raises DataError."""
    for place in (folder / _BATCHES, folder):
        if paths := data_files.all_or_none(place, _BINARY):
            shards = [partial(_read_binary, path, _images) for path in paths]
            labels = partial(_labels, [partial(_read_binary, path, _classes) for path in paths])
            return data_files.Splits(shards[:-1], shards[-1:], labels)
    if paths := data_files.all_or_none(folder, [_ARCHIVE]):
        parts = _BINARY[:-1], _BINARY[-1:]
        train, test = ([partial(_read_archive, paths[0], names, _images)] for names in parts)
        labels = partial(_labels, [partial(_read_archive, paths[0], names, _classes) for names in parts])
        return data_files.Splits(train, test, labels)
    if paths := data_files.all_or_none(folder, _RESIDUALS):
        shards = [partial(_read_residuals, path) for path in paths]
        return data_files.Splits(shards[:-1], shards[-1:], partial(_labels_beside, folder / "labels.npz"))
    return None


def download(folder: Path, *, labels: bool = False) -> None:
    """Make sure that `folder` holds the data set, the labels in any case. Raises DataError."""
    data_files.fetch(f"{SOURCE}/{_ARCHIVE}", _ARCHIVE_SHA256, folder)


def _read_binary(path: Path, part: Part) -> np.ndarray:
    return part(_records(data_files.unpack(path), path))


def _read_archive(path: Path, names: list[str], part: Part) -> np.ndarray:
    """A part of the records of some batches of the archive, in one pass, since it cannot be searched."""
    found: dict[str, np.ndarray] = {}
    try:
        with tarfile.open(path, "r|gz") as archive:
            for member in archive:
                name = member.name.removeprefix(f"{_BATCHES}/")
                if name in names and (file := archive.extractfile(member)):
                    found[name] = part(_records(file.read(), f"{name} of {path}"))
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise DataError(f"{path} cannot be read, it may be cut short ({error}); fetch it again") from error
    if missing := [name for name in names if name not in found]:
        raise DataError(f"{path} holds no {', '.join(missing)}; fetch it again")
    return np.concatenate([found[name] for name in names])


def _records(content: bytes, name: Path | str) -> np.ndarray:
    """Records of class and planes, [n 1 + 3 h w] uint8."""
    records = _bytes_per_image(content, 1 + math.prod(SHAPE), name).reshape(_SHARD, -1)
    if records[:, 0].max() > 9:
        raise DataError(f"{name} is not in CIFAR-10's binary form: a class is {records[:, 0].max()}, over 9")
    return records


def _images(records: np.ndarray) -> np.ndarray:
    """Records -> images [n h w 3] uint8."""
    height, width, channels = SHAPE
    planes = records[:, 1:].reshape(len(records), channels, height, width)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1))


def _classes(records: np.ndarray) -> np.ndarray:
    """Records -> the classes [n] uint8."""
    return records[:, 0]


def _labels(shards: data_files.Shards, split: str) -> np.ndarray:
    """The classes of a split from shards of them, the last one that of the test."""
    return np.concatenate([shard() for shard in (shards[:-1] if split == "train" else shards[-1:])])


def _labels_beside(path: Path, split: str) -> np.ndarray:
    """The classes of a split from the arrays "train" and "test" of an .npz file. Raises DataError."""
    if not path.is_file():
        raise DataError(f"{path} is missing, the labels of the images beside it: fetch it")
    try:
        with np.load(path, allow_pickle=False) as file:
            labels = file[split]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read ({error}); fetch it again") from error
    expected = TRAIN_IMAGES if split == "train" else TEST_IMAGES
    if labels.shape != (expected,) or labels.dtype != np.uint8 or labels.max() > 9:
        raise DataError(f"{path} holds no {expected} classes from 0 to 9 of {split} images; fetch it again")
    return labels


def _read_residuals(path: Path) -> np.ndarray:
    height, width, channels = SHAPE
    residuals = _bytes_per_image(data_files.unpack(path), height * width * channels, path)
    return _from_residuals(residuals.reshape(channels, _SHARD, height, width))


def _bytes_per_image(content: bytes, size: int, name: Path | str) -> np.ndarray:
    """A shard's content as an array. DataError unless it has `size` bytes for each image."""
    if len(content) != _SHARD * size:
        raise DataError(f"{name} holds {len(content)} bytes, {_SHARD} x {size} expected; fetch it again")
    return np.frombuffer(content, np.uint8)


def _from_residuals(residuals: np.ndarray) -> np.ndarray:
    """Prediction residuals [3 n h w] uint8 -> images [n h w 3] uint8.

    The three planes are G, R - G and B - G. A value is predicted from its neighbours left, above and above
    left (0 outside the image) as the median of left, above and left + above - corner; stored is value minus
    prediction, modulo 256. Differences lie in -255 .. 255: of the two with the right remainder, the one
    that gives a byte when G is added.

    The loop runs over the places of an image, each step on all images at once.
    """
    _, n, height, width = residuals.shape
    residuals = np.ascontiguousarray(residuals.transpose(0, 2, 3, 1))
    planes = np.zeros((3, height + 1, width + 1, n), np.int16)  # with a row and a column of zeros in front
    for plane, row, column in np.ndindex(3, height, width):
        left, above = planes[plane, row + 1, column], planes[plane, row, column + 1]
        prediction = np.clip(
            left + above - planes[plane, row, column], np.minimum(left, above), np.maximum(left, above)
        )
        green = planes[0, row + 1, column + 1] if plane else np.int16(0)
        level = (prediction + residuals[plane, row, column] + green) & 255
        planes[plane, row + 1, column + 1] = level - green
    green, red, blue = planes[:, 1:, 1:].astype(np.uint8)
    return np.ascontiguousarray(np.stack([red + green, green, blue + green], -1).transpose(2, 0, 1, 3))
