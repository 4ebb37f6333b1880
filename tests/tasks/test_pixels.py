import numpy as np
import pytest
import torch

from lintra.tasks import PixelTask


class Tiny(PixelTask):
    """Images of 3 rows, 2 columns, 2 channels and 5 levels."""

    name = "tiny"
    image_shape = (3, 2, 2)
    levels = 5

    def images(self, split):
        n = {"train": 4, "validate": 3, "test": 2}[split]
        return (np.arange(n * 12) % 5).astype(np.uint8).reshape(n, 3, 2, 2)

    def model(self, attention):
        raise NotImplementedError


def test_rows_then_columns_then_channels():
    task = Tiny()
    tokens = task.train[1]["tokens"]
    image = task.images("train")[1]
    assert tokens.dtype == torch.int64
    assert tokens[0] == image[0, 0, 0]
    assert tokens[1] == image[0, 0, 1]  # the next channel
    assert tokens[2] == image[0, 1, 0]  # the next column
    assert tokens[4] == image[1, 0, 0]  # the next row


def test_to_images_undoes_it():
    task = Tiny()
    whole = task.test.__getitems__([0, 1])["tokens"]
    pictures = task.to_images(whole)
    assert pictures.dtype == torch.uint8
    np.testing.assert_array_equal(pictures, task.images("test").astype(int) * 255 // 4)


def test_every_level_comes_back():
    tokens = (torch.arange(60) % 5).reshape(5, 12)
    assert torch.equal(Tiny().to_tokens(Tiny().to_images(tokens)), tokens)
    grey = torch.tensor([31, 32, 223, 224], dtype=torch.uint8).repeat(3).reshape(1, 3, 2, 2)
    assert Tiny().to_tokens(grey)[0, :4].tolist() == [0, 1, 3, 4]  # levels are at 0, 63.75, ... 255
    for wrong in (grey.long(), grey[:, :2], grey[..., :1]):
        with pytest.raises(ValueError, match=r"images must be \[b 3, 2, 2\] of uint8"):
            Tiny().to_tokens(wrong)


def test_what_is_drawn_follows_its_prompt():
    """As many completions as requested; an image with fewer is left out."""
    task = Tiny()
    prompts, _ = task.prompts(2, 0.34)

    def draw(prompts, steps, n=None):
        return (torch.arange(len(prompts)) % 5)[:n, None].repeat(1, steps)

    completed = torch.stack(task.complete(prompts, 2, draw))
    assert completed.shape == (2, 2, 3, 2, 2)
    assert torch.equal(completed[:, 0, : task.rows(prompts)], completed[:, 1, : task.rows(prompts)])
    assert torch.equal(task.to_tokens(completed[1])[:, 4:], draw(torch.empty(4), 8)[2:])
    fewer = task.complete(prompts, 2, lambda p, s: draw(p, s, 3))
    assert torch.equal(torch.cat(fewer), completed.flatten(0, 1)[:3])
    assert [len(x) for x in fewer] == [2, 1]
    assert task.complete(prompts, 2, lambda p, s: draw(p, s, 0)) == []


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(2, 11), r"whole images \[b 12\], got shape \[2, 11\]"),
        (torch.zeros(12), r"got shape \[12\]"),
        (torch.full((1, 12), 5), r"must lie in 0 .. 4, got 5 .. 5"),
        (torch.full((1, 12), -1), r"must lie in 0 .. 4, got -1 .. -1"),
    ],
)
def test_what_is_no_image(tokens, message):
    with pytest.raises(ValueError, match=message):
        Tiny().to_images(tokens)


def test_no_images_at_all():
    assert Tiny().to_images(torch.zeros(0, 12)).shape == (0, 3, 2, 2)


@pytest.mark.parametrize(("fraction", "rows"), [(0.01, 1), (0.34, 1), (0.6, 2), (0.99, 2)])
def test_prompts_are_whole_rows(fraction, rows):
    prompt, whole = Tiny().prompts(2, fraction)
    assert whole.shape == (2, 12)
    assert torch.equal(prompt, whole[:, : rows * 4])


@pytest.mark.parametrize(
    ("n", "fraction", "message"),
    [
        (0, 0.5, "complete must lie in 1 .. 2, the test images, got 0"),
        (3, 0.5, "complete must .* got 3"),
        (1, 0.0, "fraction must"),
        (1, 1.0, "fraction must"),
    ],
)
def test_prompts_that_cannot_be(n, fraction, message):
    with pytest.raises(ValueError, match=message):
        Tiny().prompts(n, fraction)
