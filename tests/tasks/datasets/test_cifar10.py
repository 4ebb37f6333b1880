import hashlib
import io
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lintra.tasks import DataError
from lintra.tasks.datasets import cifar10, data_files

SHARD = 2
IMAGES = np.random.default_rng(0).integers(0, 256, (6, SHARD, 32, 32, 3), np.uint8)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(cifar10, "_SHARD", SHARD)
    monkeypatch.setattr(cifar10, "TRAIN_IMAGES", 5 * SHARD)
    monkeypatch.setattr(cifar10, "TEST_IMAGES", SHARD)


def to_residuals(images: np.ndarray) -> np.ndarray:
    """The inverse of `_from_residuals`, by its description, value by value."""
    n, height, width, _ = images.shape
    red, green, blue = np.moveaxis(images.astype(int), -1, 0)
    planes = np.stack([green, red - green, blue - green])
    residuals = np.zeros(planes.shape, np.uint8)
    for place in np.ndindex(3, n, height, width):
        plane, image, row, column = place
        left = planes[plane, image, row, column - 1] if column else 0
        above = planes[plane, image, row - 1, column] if row else 0
        corner = planes[plane, image, row - 1, column - 1] if row and column else 0
        prediction = sorted([left, above, left + above - corner])[1]
        residuals[place] = (planes[place] - prediction) % 256
    return residuals


@settings(deadline=None, max_examples=30)
@given(st.tuples(*[st.integers(1, 5)] * 3), st.integers(0, 2**32))
def test_residuals_and_back(shape, seed):
    draw = np.random.default_rng(seed)
    images = draw.choice(np.array([0, 1, 128, 254, 255], np.uint8), (*shape, 3))  # mostly the edge values
    np.testing.assert_array_equal(cifar10._from_residuals(to_residuals(images)), images)


def records(images: np.ndarray) -> bytes:
    """The authors' binary format; the classes are 0, 1, 2 ..."""
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    return np.concatenate([np.arange(len(images), dtype=np.uint8)[:, None], planes], 1).tobytes()


def binary_files() -> dict[str, bytes]:
    return {name: records(images) for name, images in zip(cifar10._BINARY, IMAGES, strict=True)}


def archive(files: dict[str, bytes]) -> bytes:
    """As published: the batches are out of order, among other files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name in ["batches.meta.txt", *reversed(files)]:
            content = files.get(name, b"airplane ...")
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def plain(folder: Path) -> None:
    for name, content in binary_files().items():
        (folder / name).write_bytes(content)


def in_their_folder(folder: Path) -> None:
    (folder / "cifar-10-batches-bin").mkdir()
    plain(folder / "cifar-10-batches-bin")


def packed(folder: Path) -> None:
    (folder / "cifar-10-binary.tar.gz").write_bytes(archive(binary_files()))


def residuals(folder: Path) -> None:
    for name, images in zip(cifar10._RESIDUALS, IMAGES, strict=True):
        (folder / name).write_bytes(lzma.compress(to_residuals(images).tobytes()))
    classes = np.tile(np.arange(IMAGES.shape[1], dtype=np.uint8), 5)
    np.savez(folder / "labels.npz", train=classes, test=classes[: IMAGES.shape[1]])


def read(shards: data_files.Shards) -> np.ndarray:
    return np.concatenate([shard() for shard in shards])


def found(folder: Path) -> data_files.Splits:
    splits = cifar10.find(folder)
    assert splits is not None
    return splits


@pytest.mark.parametrize("form", [plain, in_their_folder, packed, residuals])
def test_all_forms_hold_the_same_images(tmp_path, form: Callable[[Path], None]):
    form(tmp_path)
    splits = found(tmp_path)
    np.testing.assert_array_equal(read(splits.train), IMAGES[:5].reshape(-1, 32, 32, 3))
    np.testing.assert_array_equal(read(splits.test), IMAGES[5])
    classes = np.arange(IMAGES.shape[1])
    np.testing.assert_array_equal(splits.labels("train"), np.tile(classes, 5))
    np.testing.assert_array_equal(splits.labels("test"), classes)


def test_bad_labels_beside_residuals_are_named(tmp_path):
    residuals(tmp_path)
    labels = found(tmp_path).labels
    np.savez(tmp_path / "labels.npz", train=np.arange(3))
    with pytest.raises(DataError, match=r"labels\.npz holds no 10 classes from 0 to 9 of train images"):
        labels("train")
    with pytest.raises(DataError, match=r"labels\.npz cannot be read .*test"):
        labels("test")
    (tmp_path / "labels.npz").unlink()
    with pytest.raises(DataError, match=r"labels\.npz is missing, the labels of the images beside it"):
        labels("train")


def test_nothing_there(tmp_path):
    assert cifar10.find(tmp_path) is None


@pytest.mark.parametrize(("form", "lost"), [(plain, "data_batch_4.bin"), (residuals, "test.xz")])
def test_a_part_is_missing(tmp_path, form: Callable[[Path], None], lost):
    form(tmp_path)
    (tmp_path / lost).unlink()
    with pytest.raises(DataError, match=rf"only a part of .*: {lost} missing"):
        cifar10.find(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-1], "holds 6145 bytes, 2 x 3073 expected"),
        (lambda content: b"\x0a" + content[1:], "a class is 10, over 9"),
    ],
)
@pytest.mark.parametrize("form", ["plain", "packed"])
def test_bad_batches_are_named(tmp_path, form, change, message):
    files = binary_files()
    files["data_batch_2.bin"] = change(files["data_batch_2.bin"])
    if form == "packed":
        (tmp_path / "cifar-10-binary.tar.gz").write_bytes(archive(files))
    else:
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"data_batch_2\.bin.*{message}"):
        read(found(tmp_path).train)


def test_bad_archives_are_named(tmp_path):
    path, files = tmp_path / "cifar-10-binary.tar.gz", binary_files()
    whole = archive(files)
    for content in (whole[: len(whole) // 2], b"something else", b""):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz cannot be read"):
            read(found(tmp_path).train)
    del files["data_batch_3.bin"]
    path.write_bytes(archive(files))
    with pytest.raises(DataError, match=r"holds no data_batch_3\.bin"):
        read(found(tmp_path).train)


def test_bad_residuals_are_named(tmp_path):
    residuals(tmp_path)
    path = tmp_path / "train_2.xz"
    whole = path.read_bytes()
    path.write_bytes(whole[:-50])
    with pytest.raises(DataError, match=r"train_2\.xz cannot be read"):
        read(found(tmp_path).train)
    path.write_bytes(lzma.compress(lzma.decompress(whole)[:-1]))
    with pytest.raises(DataError, match=r"train_2\.xz holds 6143 bytes, 2 x 3072 expected"):
        read(found(tmp_path).train)


def test_download(server, tmp_path, monkeypatch):
    server.files["cifar-10-binary.tar.gz"] = archive(binary_files())
    sha256 = hashlib.sha256(server.files["cifar-10-binary.tar.gz"]).hexdigest()
    monkeypatch.setattr(cifar10, "_ARCHIVE_SHA256", sha256)
    cifar10.download(tmp_path / "here")
    np.testing.assert_array_equal(read(found(tmp_path / "here").test), IMAGES[5])
