"""MNIST: 28 x 28 grey digits, LeCun, Cortes and Burges."""

import hashlib
from functools import partial
from pathlib import Path

import numpy as np

from lintra.tasks.base import DataError
from lintra.tasks.datasets import data_files, idx

SHAPE = (28, 28, 1)
TRAIN_IMAGES, TEST_IMAGES = 60_000, 10_000
FORMS = "train-images-idx3-ubyte and t10k-images-idx3-ubyte, plain or .gz"
SOURCE = "https://ossci-datasets.s3.amazonaws.com/mnist"
_NAMES = ("train-images-idx3-ubyte", "t10k-images-idx3-ubyte")
_LABELS = {"train": "train-labels-idx1-ubyte", "test": "t10k-labels-idx1-ubyte"}
_SHA256 = {  # of the unpacked files, so that any compression of them will do, and of the files as published
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "51fc562b6747b666fbf6e84ce29d43c3cb5f9c388c664d43b33f02095313405a",
    "t10k-labels-idx1-ubyte.gz": "e41c74e484045d39b462a7790a4af51301bd9b0b24f0154798d713ec68c45920",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
}


def find(folder: Path) -> data_files.Splits | None:
    """The data set in this folder, None if there is nothing of it. Raises DataError."""
    names = [_plain_or_gz(folder, name) for name in _NAMES]
    if paths := data_files.all_or_none(folder, names):
        train, test = paths
        shards = [partial(_read, train, TRAIN_IMAGES)], [partial(_read, test, TEST_IMAGES)]
        return data_files.Splits(*shards, labels=partial(_labels, folder))
    return None


def download(folder: Path, *, labels: bool = False) -> None:
    """Make sure that `folder` holds the images, and their labels too if asked. Raises DataError."""
    for name in (*_NAMES, *(_LABELS.values() if labels else ())):
        data_files.fetch(f"{SOURCE}/{name}.gz", _SHA256[f"{name}.gz"], folder)


def _plain_or_gz(folder: Path, name: str) -> str:
    return name if (folder / name).is_file() else f"{name}.gz"


def _read(path: Path, count: int) -> np.ndarray:
    """The images of an IDX file -> [count 28 28 1] uint8. Raises DataError."""
    content = data_files.unpack(path)
    images = idx.images(content, path)
    if images.shape != (expected := (count, *SHAPE[:2])):
        raise DataError(f"{path} says it holds images x rows x columns {images.shape}, expected {expected}")
    _check(content, path)
    return images[..., None]


def _labels(folder: Path, split: str) -> np.ndarray:
    """The digits of a split -> [n] uint8. Raises DataError."""
    path = folder / _plain_or_gz(folder, _LABELS[split])
    if not path.is_file():
        raise DataError(f"{path} is missing, the labels of {split} images: fetch it")
    content = data_files.unpack(path)
    labels = idx.labels(content, path)
    _check(content, path)
    return labels


def _check(content: bytes, path: Path) -> None:
    if hashlib.sha256(content).hexdigest() != _SHA256[path.name.removesuffix(".gz")]:
        raise DataError(f"{path} differs from the published file (its sha256 is another); fetch it again")
