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
_SHA256 = {  # of the unpacked files, so that any compression of them will do, and of the files as published
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
}


def find(folder: Path) -> data_files.Splits | None:
    """The data set in this folder, None if there is nothing of it. Raises DataError."""
    names = [name if (folder / name).is_file() else f"{name}.gz" for name in _NAMES]
    if paths := data_files.all_or_none(folder, names):
        train, test = paths
        return data_files.Splits([partial(_read, train, TRAIN_IMAGES)], [partial(_read, test, TEST_IMAGES)])
    return None


def download(folder: Path) -> None:
    """Make sure that `folder` holds the data set. Raises DataError."""
    for name in _NAMES:
        data_files.fetch(f"{SOURCE}/{name}.gz", _SHA256[f"{name}.gz"], folder)


def _read(path: Path, count: int) -> np.ndarray:
    """The images of an IDX file -> [count 28 28 1] uint8. Raises DataError."""
    content = data_files.unpack(path)
    images = idx.images(content, path)
    if images.shape != (expected := (count, *SHAPE[:2])):
        raise DataError(f"{path} says it holds images x rows x columns {images.shape}, expected {expected}")
    if hashlib.sha256(content).hexdigest() != _SHA256[path.name.removesuffix(".gz")]:
        raise DataError(f"{path} differs from the published file (its sha256 is another); fetch it again")
    return images[..., None]
