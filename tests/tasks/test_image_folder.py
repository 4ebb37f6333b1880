"""A user's images: of any size and mode, in folders or an IDX file."""

import dataclasses
import gzip
import os
import struct

import numpy as np
import pytest
import torch
from PIL import Image

from lintra.tasks import DataError, image_folder
from tests.tasks.conftest import assert_a_step_lowers_the_loss

MODES = ("RGB", "L", "RGBA", "LA", "P", "1", "CMYK")


def gradient(height, width):
    """An image that is darker on the left, with a red upper half."""
    image = np.zeros((height, width, 3), np.uint8)
    image[..., 0] = np.linspace(0, 255, width)
    image[height // 2 :] = image[height // 2 :, :, :1]
    return Image.fromarray(image)


@pytest.fixture
def folder(tmp_path):
    """Images of all modes and several sizes, in a folder and a subfolder, among other files."""
    below = tmp_path / "own" / "below"
    below.mkdir(parents=True)
    for i, mode in enumerate(MODES):
        place = below if i % 2 else below.parent
        name = f"{i}.tiff" if mode == "CMYK" else f"{i}.png"
        gradient(20 + i, 31 - i).convert(mode).save(place / name)
    gradient(40, 24).save(below / "photo.JPG", "JPEG")
    (below / "notes.txt").write_text("not an image")
    (below / ".hidden.png").write_text("not an image either")
    return below.parent


def test_images_of_any_size_and_mode_become_squares(folder):
    task = image_folder.Config(data=str(folder), size=8).build()
    assert task.images("train").shape == (len(MODES), 8, 8, 3)
    assert task.images("validate").shape == task.images("test").shape == (1, 8, 8, 3)
    assert (task.judged_by, task.image_shape, task.length) == ("validate", (8, 8, 3), 192)
    gray = image_folder.Config(data=str(folder), size=8, color="gray").build()
    assert gray.images("train").shape == (len(MODES), 8, 8, 1)


def test_pictures_of_a_run_among_the_images_are_not_read(folder):
    run = folder / "runs" / "image-folder"
    (run / "logs").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    gradient(9, 9).save(run / "logs" / "curve.png")
    assert len(image_folder.Config(data=str(folder), size=8).build().images("train")) == len(MODES)


def test_the_middle_square_is_kept_and_turned_as_the_camera_says(tmp_path):
    image = np.zeros((8, 24, 3), np.uint8)
    image[:, 8:16] = 255
    Image.fromarray(image).save(tmp_path / "1.png")
    turned = Image.fromarray(np.rot90(gradient(8, 8)).copy())
    exif = Image.Exif()
    exif[0x0112] = 6  # a camera held upright: rotate by 90 degrees to the right
    turned.save(tmp_path / "2.png", exif=exif)
    task = image_folder.Config(data=str(tmp_path), size=8).build()
    assert (task.images("train")[0] == 255).all()
    assert (task.images("validate")[0] == np.asarray(gradient(8, 8))).all()


def test_transparent_places_are_white_and_sixteen_bits_are_scaled(tmp_path):
    Image.new("RGBA", (8, 8), (10, 20, 30, 0)).save(tmp_path / "1.png")
    Image.fromarray(np.full((8, 8), 0x8000, np.uint16)).save(tmp_path / "2.png")
    task = image_folder.Config(data=str(tmp_path), size=8).build()
    assert (task.images("train") == 255).all()
    assert (task.images("validate") == 128).all()


def test_sixteen_bits_of_a_pgm_are_scaled(tmp_path):
    for name, most, value in (("1.pgm", 65_535, 0x8000), ("2.pgm", 4_095, 2_048)):
        (tmp_path / name).write_bytes(f"P5 8 8 {most}\n".encode() + value.to_bytes(2, "big") * 64)
    task = image_folder.Config(data=str(tmp_path), size=8, color="gray").build()
    assert (task.images("train") == 128).all()
    assert (task.images("validate") == 128).all()


@pytest.mark.parametrize("suffix", ["png", "webp"])
def test_a_damaged_orientation_is_told_by_name(tmp_path, suffix):
    Image.new("RGB", (8, 8)).save(tmp_path / f"1.{suffix}", exif=b"Exif\0\0MM\0*")
    with pytest.raises(DataError, match=rf"1\.{suffix} cannot be read as an image"):
        image_folder.Config(data=str(tmp_path)).build().images("train")


@pytest.mark.parametrize(("dtype", "white"), [(np.float32, 1.0), (np.int32, 70_000)])
def test_numbers_of_32_bits_have_no_white(tmp_path, dtype, white):
    """Read as bytes, these images would be all black and white."""
    Image.fromarray(np.full((8, 8), white, dtype)).save(tmp_path / "1.tif")
    with pytest.raises(DataError, match=r"1\.tif cannot be read as an image .*32 bits.*white"):
        image_folder.Config(data=str(tmp_path)).build().images("train")


def test_every_tenth_image_is_held_out(tmp_path):
    for i in range(25):
        Image.new("L", (4, 4), i).save(tmp_path / f"{i:02}.png")
    task = image_folder.Config(data=str(tmp_path), size=4, color="gray").build()
    assert sorted(task.images("validate")[:, 0, 0, 0]) == [9, 19, 24]
    assert len(task.images("train")) == 22
    tested = image_folder.Config(data=str(tmp_path), test=str(tmp_path), size=4, color="gray").build()
    assert (len(tested.images("test")), tested.judged_by) == (25, "test")
    config = image_folder.Config(data=str(tmp_path))
    assert config.with_data(str(tmp_path)) == config
    assert config.with_data("new") == dataclasses.replace(config, test="new")


@pytest.mark.parametrize("packed", [False, True])
def test_an_idx_file_of_any_size(tmp_path, packed):
    values = np.arange(3 * 6 * 8, dtype=np.uint8)
    content = struct.pack(">4s3I", b"\0\0\x08\x03", 3, 6, 8) + values.tobytes()
    path = tmp_path / ("images.gz" if packed else "images")
    path.write_bytes(gzip.compress(content) if packed else content)
    task = image_folder.Config(data=str(path), size=6, color="gray").build()
    images = np.concatenate((task.images("train"), task.images("validate")))
    assert (images[..., 0] == values.reshape(3, 6, 8)[:, :, 1:7]).all()
    path.write_bytes(gzip.compress(content[:-1]) if packed else content[:-1])
    with pytest.raises(DataError, match="holds 143 values, 144 expected"):
        image_folder.Config(data=str(path)).build().images("train")
    content = struct.pack(">4s3I", b"\0\0\x08\x03", 3, 0, 8)
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(DataError, match=r"holds no pixels: it says images x rows x columns \(3, 0, 8\)"):
        image_folder.Config(data=str(path)).build().images("train")


def test_what_cannot_be_read_is_named(folder, tmp_path):
    def refused(place, message, **options):
        with pytest.raises(DataError, match=message):
            image_folder.Config(data=place, **options).build().images("train")

    refused(None, "which images.*--data FOLDER")
    refused(str(tmp_path / "nowhere"), "nowhere does not exist")
    (tmp_path / "none").mkdir()
    refused(str(tmp_path / "none"), "none holds no images: expected .png")
    refused(str(folder / "below" / "notes.txt"), "notes.txt is not an IDX file")
    whole = (folder / "below" / "photo.JPG").read_bytes()
    (folder / "below" / "photo.JPG").write_bytes(whole[: len(whole) // 2])
    refused(str(folder), "photo.JPG cannot be read as an image.*repair or remove it")
    (folder / "below" / "photo.JPG").write_bytes(b"")
    refused(str(folder), "photo.JPG cannot be read as an image")
    (folder / "below" / "photo.JPG").unlink()
    os.mkfifo(folder / "below" / "photo.JPG")
    refused(str(folder), "photo.JPG is not a regular file")
    gradient(8, 8).save(tmp_path / "none" / "alone.png")
    refused(str(tmp_path / "none"), "holds one image")


@pytest.mark.parametrize(("color", "size"), [("rgb", 6), ("gray", 6), ("gray", 4)])
def test_a_step_lowers_the_loss(folder, color, size):
    torch.manual_seed(0)
    task = image_folder.Config(data=str(folder), size=size, color=color).build()
    assert_a_step_lowers_the_loss(task, samples=4)


def test_a_validation_of_the_first_held_out_images_sees_all_folders(tmp_path):
    for shade in range(10):
        (tmp_path / str(shade)).mkdir()
        for i in range(20):
            Image.new("L", (8, 8), 20 * shade).save(tmp_path / str(shade) / f"{i}.png")
    task = image_folder.Config(data=str(tmp_path), size=8, color="gray").build()
    held_out = task.images("validate")
    assert len(held_out) == 20
    assert len(np.unique(held_out[:10])) > 5  # in the order of names there would be 5
    assert (np.sort(np.unique(held_out)) == 20 * np.arange(10)).all()


def test_an_image_that_has_no_such_colors_is_told_by_name(tmp_path):
    Image.new("LAB", (8, 8)).save(tmp_path / "1.tif")
    with pytest.raises(DataError, match=r"1\.tif cannot be read as an image \(conversion from LAB"):
        image_folder.Config(data=str(tmp_path), color="gray").build().images("train")
