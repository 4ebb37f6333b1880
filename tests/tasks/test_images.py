import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lintra import train
from lintra.attention import linear
from lintra.checkpoint import from_json, to_json
from lintra.tasks import DataError, images
from lintra.tasks.datasets import cifar10, data_files

ROOT = Path(__file__).parents[2]


@pytest.fixture
def mnist(small_mnist, monkeypatch):
    """The small MNIST as a folder."""
    monkeypatch.delenv("LINTRA_DATA", raising=False)
    small_mnist.write(small_mnist.files)
    return small_mnist


@pytest.fixture
def shared(monkeypatch):
    """CIFAR-10 as three shards of four images, filled with their number -> the shards that were read."""
    read = []

    def shard(i: int) -> np.ndarray:
        read.append(i)
        return np.full((4, 32, 32, 3), i, np.uint8)

    splits = data_files.Splits(train=[lambda i=i: shard(i) for i in range(3)], test=[])
    monkeypatch.setattr(images, "locate", lambda data, data_dir: splits)
    monkeypatch.setattr(cifar10, "TRAIN_IMAGES", 12)
    return read


def build(**settings) -> images.Images:
    """The task; one of the five training images of the small MNIST is held out."""
    return images.Config(**{"validate_images": 1} | settings).build()


@pytest.mark.parametrize("held_out", [1, 2, 4])
def test_train_validate_and_test_are_the_files_in_three_parts(mnist, held_out):
    """No image is in two of them, and all in the fixture differ. The last training images are held out."""
    task = build(data_dir=str(mnist.folder), validate_images=held_out)
    np.testing.assert_array_equal(task.train.values, mnist.train[:-held_out].reshape(-1, 784))
    np.testing.assert_array_equal(task.validate.values, mnist.train[-held_out:].reshape(-1, 784))
    np.testing.assert_array_equal(task.test.values, mnist.test.reshape(3, 784))
    parts = [{bytes(x) for x in part.values.numpy()} for part in (task.train, task.validate, task.test)]
    assert list(map(len, parts)) == [5 - held_out, held_out, 3]
    assert len(set().union(*parts)) == 8


@pytest.mark.parametrize(("count", "validated"), [(2, 2), (None, 3)])
def test_a_run_of_version_0_1_validates_on_what_it_did(mnist, count, validated):
    """Its run.json has no `validate_on`: it validates on the first test images, and trains on all others."""
    content = to_json(images.Config(data_dir=str(mnist.folder), validate_images=1))
    del content["validate_on"]
    task = from_json(images.Config, content | {"validate_images": count}, "task").build()
    np.testing.assert_array_equal(task.train.values, mnist.train.reshape(5, 784))
    np.testing.assert_array_equal(task.validate.values, mnist.test[:validated].reshape(-1, 784))
    assert "test images" in task.notices(mnist.folder)[0]


@pytest.mark.parametrize(
    "name", ["mnist-small", str(ROOT / "weights" / "mnist")], ids=["mnist-small", "mnist"]
)
def test_shipped_runs_were_validated_on_held_out_training_images(name):
    task = train.Run.around(name).task
    assert (task.validate_on, task.validate_images, task.held_out) == ("train", 256, 256)


def test_what_is_validated_on_is_told():
    assert images.Config().build().notices(ROOT) == ["validates on 256 held-out training images"]


def test_a_folder_above_will_do(mnist):
    assert len(build(data_dir=str(mnist.folder.parent)).test) == 3


def test_the_environment_names_it_and_data_dir_comes_first(mnist, tmp_path, monkeypatch):
    monkeypatch.setenv("LINTRA_DATA", str(mnist.folder))
    assert len(build().test) == 3
    with pytest.raises(DataError, match=f"data_dir {tmp_path}/other holds no mnist files"):
        build(data_dir=str(tmp_path / "other")).images("train")


def test_nothing_there_says_what_is_expected(tmp_path, monkeypatch):
    monkeypatch.setenv("LINTRA_DATA", str(tmp_path))
    with pytest.raises(
        DataError, match=r"\$LINTRA_DATA .* holds no mnist files.*train-images-idx3-ubyte.*\.gz"
    ):
        build().images("train")
    with pytest.raises(DataError, match=r"holds no cifar10 files.*data_batch_1\.bin.*tar\.gz.*train_1\.xz"):
        build(data="cifar10").images("test")


@pytest.mark.parametrize("named", [None, ""])
def test_else_it_is_downloaded(small_mnist, server, tmp_path, monkeypatch, named):
    if named is not None:
        monkeypatch.setenv("LINTRA_DATA", named)
    server.files = small_mnist.zipped
    for _ in range(2):
        np.testing.assert_array_equal(build().test.values, small_mnist.test.reshape(3, 784))
    assert sorted(server.asked) == sorted(small_mnist.zipped)
    assert sorted(path.name for path in (tmp_path / "cache/lintra/mnist").iterdir()) == sorted(server.asked)


def test_a_failed_download_is_one_line(small_mnist, server):
    with pytest.raises(DataError, match=r"cannot download .*404"):
        build().images("train")


def test_limits(mnist):
    task = build(data_dir=str(mnist.folder), limit=2, validate_images=1)
    np.testing.assert_array_equal(task.train.values, mnist.train[:2].reshape(2, 784))
    np.testing.assert_array_equal(task.validate.values, mnist.train[-1:].reshape(1, 784))
    np.testing.assert_array_equal(task.test.values, mnist.test.reshape(3, 784))


@pytest.mark.parametrize(
    ("count", "shards"), [(1, [0]), (4, [0]), (5, [0, 1]), (8, [0, 1]), (None, [0, 1, 2])]
)
def test_no_shard_is_read_in_vain(count, shards, shared):
    assert len(build(data="cifar10", limit=count).train) == (count or 11)
    assert shared == shards


@pytest.mark.parametrize(("held_out", "shards"), [(1, [2]), (4, [2]), (5, [2, 1])])
def test_what_is_held_out_is_read_alone(held_out, shards, shared):
    validate = build(data="cifar10", validate_images=held_out).validate
    assert validate.values[:, 0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2][-held_out:]
    assert shared == shards


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limit": 0}, "limit must lie in 1 .. 59744, since 256 are held out to validate on, got 0"),
        ({"data": "cifar10", "limit": 49_745}, "limit must lie in 1 .. 49744, since 256 .*, got 49745"),
        (
            {"limit": 59_001, "validate_images": 1_000},
            "limit must lie in 1 .. 59000, since 1000 are held out",
        ),
        ({"limit": 60_001, "validate_on": "test"}, "limit must lie in 1 .. 60000, got 60001"),
        ({"validate_images": 60_000}, "validate_images must lie in 1 .. 59999, got 60000"),
        ({"validate_images": 0}, "validate_images must lie in 1 .. 59999, got 0"),
        ({"validate_images": 10_001, "validate_on": "test"}, "validate_images must lie in 1 .. 10000, got"),
        (
            {"validate_images": None},
            "validate_images must be a number where validate_on is 'train', got None",
        ),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        images.Config(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": "fashion"}, "data must be 'mnist' or 'cifar10', got 'fashion'"),
        ({"validate_on": "dev"}, "validate_on must be 'train' or 'test', got 'dev'"),
        ({"limit": 2.0}, r"limit must be int or None, got 2\.0"),
    ],
)
def test_settings_of_a_wrong_type(settings, message):
    with pytest.raises(TypeError, match=message):
        images.Config(**settings)


@pytest.mark.parametrize(("data", "layers"), [("mnist", 8), ("cifar10", 16)])
def test_the_paper_s_model(data, layers):
    config = build(data=data, preset="paper").model(linear.Config())
    assert (config.layers, config.heads, config.width, config.vocabulary) == (layers, 8, 256, 256)
    assert (config.norm, config.final_norm, config.output.components) == ("post", True, 10)
    assert (config.activation, config.dropout) == ("relu", 0.1)


@pytest.mark.parametrize("data", ["mnist", "cifar10"])
def test_ours_is_no_larger_than_the_paper_s(data):
    count = {
        preset: sum(
            x.numel() for x in build(data=data, preset=preset).model(linear.Config()).build().parameters()
        )
        for preset in images.PRESETS
    }
    assert 0.95 * count["paper"] < count["best"] <= count["paper"]
    assert 2 * count["small"] <= 2_000_000  # bytes in 16 bits


@pytest.mark.parametrize("preset", images.PRESETS)
@pytest.mark.parametrize("data", ["mnist", "cifar10"])
def test_a_preset_is_a_way_to_train(preset, data):
    config = train.Config(**images.Config(preset=preset, data=data).training_preset())
    paper = {"mnist": (937_500, 16, 1e-4), "cifar10": (500_000, 10, 2e-4)}[data]
    assert (config.steps, config.batch, config.lr) == (paper if preset == "paper" else (12_000, 8, 3e-3))


ABOVE = {(-1, -1), (-1, 0), (-1, 1), (-2, 0)}  # rows, columns


def test_what_surrounds_the_next_value():
    """The neighbours (row, column, channel) of the next value, besides the latest one."""
    for data, columns, channels, left in (
        ("mnist", 28, 1, {(0, -2), (0, -3)}),
        ("cifar10", 32, 3, {(0, -1)}),
    ):
        places = [(row * columns + column) * channels for row, column in left | ABOVE]
        found = [-1 - back for back in build(data=data).surroundings()]
        assert set(places) <= set(found)
        assert len(found) == 6


def test_without_a_start_symbol_the_first_value_is_not_predicted(mnist):
    task = build(data_dir=str(mnist.folder), preset="paper")
    model = replace(task.model(linear.Config()), layers=1, heads=2, width=16, dropout=0.0).build()
    batch = task.test.__getitems__([0, 2])
    assert task.score(model, batch)["weight"] == 2 * 783
    tokens = batch["tokens"]
    log_prob = model.output.log_prob(model(tokens)[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(task.loss(model, batch), -log_prob.mean())
    assert torch.equal(task.beginnings(5, seed=1), task.beginnings(5, seed=1))
    assert task.beginnings(5).shape == (5, 1)


def test_bits_and_nats(mnist):
    task = build(data_dir=str(mnist.folder))
    model = replace(task.model(linear.Config()), layers=1, heads=2, width=16).build()
    batch = task.test.__getitems__([0, 2])
    loss, score = task.loss(model, batch), task.score(model, batch)
    assert loss.requires_grad
    assert not score["loss"].requires_grad
    torch.testing.assert_close(score["loss"], loss.detach())
    torch.testing.assert_close(score["bits_per_dim"] * math.log(2), score["loss"])
    assert score["weight"].item() == 2 * 784
