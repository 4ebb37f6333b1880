import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from lintra import train
from lintra.attention import linear
from lintra.tasks import DataError, _files, images


@pytest.fixture
def mnist(small_mnist, monkeypatch):
    """The small MNIST as a folder."""
    monkeypatch.delenv("LINTRA_DATA", raising=False)
    small_mnist.write(small_mnist.files)
    return small_mnist


def build(**settings) -> images.Images:
    return images.Config(**{"validate_images": None} | settings).build()


def test_data_dir(mnist):
    task = build(data_dir=str(mnist.folder))
    np.testing.assert_array_equal(task.train.values, mnist.train.reshape(5, 784))
    np.testing.assert_array_equal(task.validate.values, mnist.test.reshape(3, 784))


def test_a_folder_above_will_do(mnist):
    assert len(build(data_dir=str(mnist.folder.parent)).train) == 5


def test_the_environment_names_it_and_data_dir_comes_first(mnist, tmp_path, monkeypatch):
    monkeypatch.setenv("LINTRA_DATA", str(mnist.folder))
    assert len(build().train) == 5
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
        np.testing.assert_array_equal(build().train.values, small_mnist.train.reshape(5, 784))
    assert sorted(server.asked) == sorted(small_mnist.zipped)
    assert sorted(path.name for path in (tmp_path / "cache/lintra/mnist").iterdir()) == sorted(server.asked)


def test_a_failed_download_is_one_line(small_mnist, server):
    with pytest.raises(DataError, match=r"cannot download .*404"):
        build().images("train")


def test_limits(mnist):
    task = build(data_dir=str(mnist.folder), limit=2, validate_images=1)
    np.testing.assert_array_equal(task.train.values, mnist.train[:2].reshape(2, 784))
    np.testing.assert_array_equal(task.validate.values, mnist.test[:1].reshape(1, 784))
    np.testing.assert_array_equal(task.test.values, mnist.test.reshape(3, 784))


@pytest.mark.parametrize(("count", "shards"), [(1, 1), (4, 1), (5, 2), (8, 2), (None, 3)])
def test_no_shard_is_read_in_vain(count, shards, monkeypatch):
    read = []

    def shard(i: int) -> np.ndarray:
        read.append(i)
        return np.full((4, 32, 32, 3), i, np.uint8)

    splits = _files.Splits(train=[lambda i=i: shard(i) for i in range(3)], test=[])
    monkeypatch.setattr(images, "_locate", lambda data, data_dir: splits)
    assert len(build(data="cifar10", limit=count).train) == (count or 12)
    assert read == list(range(shards))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limit": 0}, "limit must lie in 1 .. 60000, or be None for all, got 0"),
        ({"data": "cifar10", "limit": 50_001}, "limit must lie in 1 .. 50000"),
        ({"validate_images": 10_001}, "validate_images must lie in 1 .. 10000"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        images.Config(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": "fashion"}, "data must be 'mnist' or 'cifar10', got 'fashion'"),
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
    assert (config.feed_kind, config.dropout) == ("relu", 0.1)


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
    config = train.Config(**images.training({"preset": preset, "data": data}))
    paper = {"mnist": (937_500, 16, 1e-4), "cifar10": (500_000, 10, 2e-4)}[data]
    assert (config.steps, config.batch, config.lr) == (paper if preset == "paper" else (12_000, 8, 3e-3))
    assert images.training({"data": data}) == images.training({"preset": "best"})


ABOVE = {(-1, -1), (-1, 0), (-1, 1), (-2, 0)}  # rows, columns


def test_what_surrounds_the_next_value():
    """The neighbours (row, column, channel) of the value that comes next, beside the latest one."""
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
    batch = task.validate.__getitems__([0, 2])
    assert task.score(model, batch)["weight"] == 2 * 783
    tokens = batch["tokens"]
    log_prob = model.output.log_prob(model(tokens)[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(task.loss(model, batch), -log_prob.mean())
    assert torch.equal(task.beginnings(5, seed=1), task.beginnings(5, seed=1))
    assert task.beginnings(5).shape == (5, 1)


def test_bits_and_nats(mnist):
    task = build(data_dir=str(mnist.folder))
    model = replace(task.model(linear.Config()), layers=1, heads=2, width=16).build()
    batch = task.validate.__getitems__([0, 2])
    loss, score = task.loss(model, batch), task.score(model, batch)
    assert loss.requires_grad
    assert not score["loss"].requires_grad
    torch.testing.assert_close(score["loss"], loss.detach())
    torch.testing.assert_close(score["bits_per_dim"] * math.log(2), score["loss"])
    assert score["weight"].item() == 2 * 784
