"""Images and their classes: each keeps its own label, and no image is in two splits."""

import numpy as np
import pytest
import torch

from lintra.tasks import image_classification
from tests.tasks.conftest import assert_a_step_lowers_the_loss


@pytest.fixture
def task(small_mnist):
    small_mnist.write(small_mnist.zipped | small_mnist.zipped_labels)
    config = image_classification.Config(data="mnist", data_dir=str(small_mnist.folder), validate_images=2)
    return config.build()


def test_every_image_has_its_label(task, small_mnist):
    parts = ((task.train, "train", slice(0, 3)), (task.validate, "train", slice(3, 5)))
    for samples, split, places in (*parts, (task.test, "test", slice(0, 3))):
        batch = samples.__getitems__(range(len(samples)))
        images = getattr(small_mnist, split)[places]
        assert torch.equal(batch["tokens"], torch.from_numpy(images.reshape(len(images), -1)).long())
        assert batch["label"].tolist() == small_mnist.labels[split][places].tolist()
    assert task.judged_by == "test"
    assert task.length == 784


def test_it_learns(task):
    assert_a_step_lowers_the_loss(task, 3)


def test_grey_is_that_of_the_standard():
    """White and black are kept; the weights of red, green and blue are 30, 59 and 11 percent."""
    colors = np.array([[0, 0, 0], [255, 255, 255], [255, 0, 0], [0, 255, 0], [0, 0, 255]], np.uint8)
    found = image_classification.grey(colors[None, None])
    assert found.tolist() == [[[0, 255, 76, 150, 29]]]
    assert found.dtype == np.uint8


@pytest.mark.parametrize("count", [0, 50_000])
def test_config_refuses(count):
    with pytest.raises(ValueError, match=rf"validate_images must lie in 1 \.\. 49999, got {count}"):
        image_classification.Config(validate_images=count)
