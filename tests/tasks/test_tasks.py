import dataclasses

import pytest
import torch

from lintra import tasks, train
from lintra.attention import linear
from lintra.tasks import (
    copy,
    digits,
    images,
    pathfinder,
    recall,
    selective_copying,
    state_tracking,
    text,
)

BUNDLED = [
    copy.Config(train_samples=10),
    digits.Config(),
    pathfinder.Config(train_samples=10, size=16, dashes=3),
    recall.Config(train_samples=10),
    recall.Config(train_samples=10, length=80),
    selective_copying.Config(train_samples=10),
    state_tracking.Config(train_samples=10),
    state_tracking.Config(train_samples=10, points=5, length=20),
]


def test_the_folder_is_the_registry():
    assert tasks.names() == [
        *("copy", "digits", "image_classification", "image_folder", "images", "listops", "pathfinder"),
        *("recall", "selective_copying", "series", "speech", "state_tracking", "text"),
        "text_classification",
    ]
    for name in tasks.names():
        assert tasks.load(name).Config().build().name == name
    assert tasks.load("text-classification") is tasks.load("text_classification")


@pytest.mark.parametrize("name", tasks.names())
def test_a_task_knows_its_settings(name):
    """The settings it was built from, and its usual training settings."""
    config = tasks.load(name).Config()
    assert isinstance(config, tasks.TaskConfig)
    assert config.build().config == config
    assert train.Config(**config.training_preset()) != train.Config()


def test_settings_with_data_elsewhere():
    assert text.Config(length=8).with_data("a.txt") == text.Config(length=8, test="a.txt")
    learned = text.Config(length=8, data="a.txt")
    assert learned.with_data("./a.txt") == learned
    tested = text.Config(length=8, data="a.txt", test="b.txt")
    assert tested.with_data("a.txt") == learned  # a tenth is held out with a test set, too
    assert images.Config(data="cifar10").with_data("x") == images.Config(data="cifar10", data_dir="x")
    with pytest.raises(tasks.DataError, match="data is for tasks that read files, not digits: leave --data"):
        digits.Config().with_data("x")


def test_a_task_needs_no_more_than_build():
    """It then has the default training settings, and reads no files."""

    @dataclasses.dataclass(frozen=True)
    class Config(tasks.TaskConfig):
        def build(self):
            return digits.Config().build()

    assert Config().training_preset() == {}
    assert Config().PATHS == ()


def test_an_unknown_task():
    known = "task must be one of copy, digits, image_classification, image_folder, "
    with pytest.raises(ValueError, match=rf"{known}.*; got 'sing'"):
        tasks.load("sing")
    with pytest.raises(ValueError, match=r"got 'digit\\n' \(perhaps digits\)$"):
        tasks.load("digit\n")
    with pytest.raises(ValueError, match=r"got 'x{79} \.\.\.$"):
        tasks.load("x" * 100)


@pytest.mark.parametrize("config", BUNDLED)
def test_a_batch_is_its_samples(config):
    samples = config.build().train
    batch = samples.__getitems__([3, 1])
    for place, index in enumerate((3, 1)):
        one = samples[index]
        assert one.keys() == batch.keys()
        assert all(torch.equal(x[place], one[name]) for name, x in batch.items())


@pytest.mark.parametrize("config", BUNDLED)
def test_no_sample_is_in_two_splits_but_where_it_is_said(config):
    """A task without a test set is scored on its validation set, and says so."""
    task = config.build()

    def all_of(samples):
        return {bytes(x) for x in samples.__getitems__(range(len(samples)))["tokens"].byte().numpy()}

    train, validate, test = all_of(task.train), all_of(task.validate), all_of(task.test)
    assert not train & validate
    assert not train & test
    assert validate == test if task.judged_by == "validate" else not validate & test


@pytest.mark.parametrize("config", BUNDLED)
def test_the_default_model_fits_its_data(config):
    task = config.build()
    model = task.model(linear.Config()).build()
    assert task.loss(model, task.train.__getitems__([0, 1])).isfinite()
    assert task.train.__getitems__([0, 1])["tokens"].shape == (2, task.length)


@pytest.mark.parametrize("config", BUNDLED)
def test_each_sample_has_its_own_score(config):
    """The score of a sample alone, times its predictions, is its part of that of the batch."""
    task = config.build()
    model = task.model(linear.Config()).build().eval()
    together = task.per_sample(model, task.validate.__getitems__([0, 1, 2]))
    for i in range(3):
        alone = task.score(model, task.validate.__getitems__([i]))
        weight = alone.pop("weight")
        assert together["weight"][i] == weight
        for name, mean in alone.items():
            # Sums of float32 in another order.
            torch.testing.assert_close(together[name][i], mean * weight, rtol=1e-4, atol=1e-4)


def test_data_that_was_learned_from_is_no_test_data(tmp_path):
    corpus = tmp_path / "corpus"
    (corpus / "more").mkdir(parents=True)
    learned = text.Config(data=str(corpus))
    with pytest.raises(tasks.DataError, match=r"more is a part of .*corpus, which was learned from"):
        learned.with_data(str(corpus / "more"))
    with pytest.raises(tasks.DataError, match=r"corpus has a part of .*more, which was learned from"):
        text.Config(data=str(corpus / "more")).with_data(str(corpus))
