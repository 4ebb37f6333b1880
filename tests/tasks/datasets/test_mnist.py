import gzip
import struct

import numpy as np
import pytest

from lintra.tasks import DataError
from lintra.tasks.datasets import mnist
from lintra.tasks.datasets.data_files import Splits

TRAIN = "train-images-idx3-ubyte"


def found(folder) -> Splits:
    splits = mnist.find(folder)
    assert splits is not None
    return splits


@pytest.mark.parametrize("form", ["files", "zipped"])
def test_both_forms_are_read(small_mnist, form):
    labels = {"files": small_mnist.label_files, "zipped": small_mnist.zipped_labels}[form]
    small_mnist.write(getattr(small_mnist, form) | labels)
    splits = found(small_mnist.folder)
    np.testing.assert_array_equal(splits.train[0](), small_mnist.train[..., None])
    np.testing.assert_array_equal(splits.test[0](), small_mnist.test[..., None])
    for split in ("train", "test"):
        np.testing.assert_array_equal(splits.labels(split), small_mnist.labels[split])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: None, r"\.gz is missing, the labels of train images"),
        (lambda content: b"\0\0\x08\x03" + content[4:], "not an IDX file of labels"),
        (lambda content: content[:-1], "holds 4 labels, 5 expected"),
        (lambda content: content[:-1] + b"\7", "differs from the published file"),
    ],
)
def test_bad_labels_are_named(small_mnist, change, message):
    changed = change(small_mnist.label_files["train-labels-idx1-ubyte"])
    small_mnist.write(small_mnist.files | ({} if changed is None else {"train-labels-idx1-ubyte": changed}))
    with pytest.raises(DataError, match=f"train-labels-idx1-ubyte.*{message}"):
        found(small_mnist.folder).labels("train")


def test_any_compression_will_do(small_mnist):
    small_mnist.write({f"{name}.gz": gzip.compress(c, 1) for name, c in small_mnist.files.items()})
    np.testing.assert_array_equal(found(small_mnist.folder).train[0](), small_mnist.train[..., None])


def test_nothing_there(tmp_path):
    assert mnist.find(tmp_path) is None


def test_a_part_is_missing(small_mnist):
    small_mnist.write({TRAIN: small_mnist.files[TRAIN]})
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz missing"):
        mnist.find(small_mnist.folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: b"", "not an IDX file"),
        (lambda content: b"\0\0\x08\x01" + content[4:], "not an IDX file of images"),
        (
            lambda content: content[:4] + struct.pack(">3I", 6, 28, 28) + content[16:] + bytes(784),
            r"\(6, 28, 28\), expected",
        ),
        (lambda content: content[:-1], "holds 3919 values, 3920 expected"),
        (lambda content: content + b"\0", "holds 3921 values, 3920 expected"),
        (lambda content: content[:-1] + b"\1", "differs from the published file"),
    ],
)
def test_bad_files_are_named(small_mnist, change, message):
    small_mnist.files[TRAIN] = change(small_mnist.files[TRAIN])
    small_mnist.write(small_mnist.files)
    with pytest.raises(DataError, match=rf"{TRAIN}.*{message}"):
        found(small_mnist.folder).train[0]()


def test_a_truncated_gz_is_named(small_mnist):
    small_mnist.zipped[f"{TRAIN}.gz"] = small_mnist.zipped[f"{TRAIN}.gz"][:-100]
    small_mnist.write(small_mnist.zipped)
    with pytest.raises(DataError, match=rf"{TRAIN}\.gz cannot be read"):
        found(small_mnist.folder).train[0]()


def test_download(small_mnist, server, tmp_path):
    server.files = small_mnist.zipped
    mnist.download(tmp_path / "here")
    np.testing.assert_array_equal(found(tmp_path / "here").test[0](), small_mnist.test[..., None])
    assert not set(server.asked) & set(small_mnist.zipped_labels)  # these are never read
    server.files |= small_mnist.zipped_labels
    mnist.download(tmp_path / "here", labels=True)
    np.testing.assert_array_equal(found(tmp_path / "here").labels("test"), small_mnist.labels["test"])
