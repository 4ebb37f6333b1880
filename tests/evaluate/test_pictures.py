import contextlib
import dataclasses
import math

import pytest
import torch

from lintra import evaluate, pictures
from lintra.attention import linear
from lintra.evaluate.out_of_domain import out_of_domain
from lintra.tasks import PixelTask, digits

TASK = digits.Config().build()


class Larger(PixelTask):
    """Grey images of 12 x 10 pixels."""

    name = "larger"
    image_shape = (12, 10, 1)
    levels = 256

    def images(self, split):
        raise NotImplementedError

    def model(self, attention):
        raise NotImplementedError


def test_other_images_are_what_they_say():
    images = torch.randint(256, (6, 120), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images[0], images[2] = 0, images[1]
    found = out_of_domain(Larger(), images, seed=1)
    assert torch.equal(found["inverted"] + images, torch.full_like(images, 255))
    shuffled = found["pixels shuffled"]
    assert torch.equal(shuffled.sort(1).values, images.sort(1).values)
    assert (shuffled[1:] != images[1:]).float().mean() > 0.9
    assert not torch.equal(shuffled[1], shuffled[2])  # each in an order of its own
    assert found["black"].tolist() == [[0] * 120]
    assert found["uniform noise"].max() > 250
    small = TASK.to_images(TASK.test.values[:6]).double().mean((1, 2, 3))
    large = found["8 x 8 digits, enlarged"].double().mean(1)
    assert torch.corrcoef(torch.stack((small, large)))[0, 1] > 0.99
    again, other = out_of_domain(Larger(), images, seed=1), out_of_domain(Larger(), images, seed=2)
    assert all(torch.equal(found[kind], again[kind]) for kind in found)
    assert not torch.equal(found["pixels shuffled"], other["pixels shuffled"])


def test_other_images_of_small_images_and_colours():
    """The channels of a pixel stay together; 17 levels remain 17; digits are not out of domain for digits."""
    assert "8 x 8 digits, enlarged" not in out_of_domain(TASK, TASK.test.values[:2])
    assert max(int(x.max()) for x in out_of_domain(TASK, TASK.test.values[:2]).values()) == 16

    class Colours(Larger):
        image_shape = (2, 2, 3)

    image = torch.arange(12, dtype=torch.uint8)[None]
    pixels = out_of_domain(Colours(), image)["pixels shuffled"].unflatten(1, (4, 3))[0]
    assert sorted(pixels.tolist()) == image.unflatten(1, (4, 3))[0].tolist()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("start", [True, False])
def test_the_pictures_of_a_model(tmp_path, monkeypatch, start):
    monkeypatch.setattr(evaluate.pictures, "TEMPERATURES", (0.0, 1.0))
    monkeypatch.setattr(evaluate.pictures, "DRAWN", 2)
    config = dataclasses.replace(TASK.model(linear.Config()), layers=1, heads=2, width=16, start=start)
    model, images = config.build(), TASK.test.values[:7]
    found = evaluate.nats(model, images, batch=4)
    drawn, told = {}, []
    for name in ("rows", "completions", "heat", "histograms"):
        monkeypatch.setattr(pictures, name, lambda *a, name=name, **b: drawn.__setitem__(name, (a, b)))

    @contextlib.contextmanager
    def watch(what, total, unit):
        done = []
        yield done.append
        assert done[-1] == total  # it ends at the announced total
        told.append(what)

    paths = evaluate.draw(model, TASK, images, found, tmp_path, watch=watch, batch=4)
    assert len(set(paths)) == len(drawn) == 4
    assert told == ["temperature 0", "temperature 1", "completions", "scoring other images"]
    rows = drawn["rows"][0][1]
    assert list(rows) == ["0.0", "1.0"]
    if start:  # otherwise the first values, from training images, differ
        assert torch.equal(rows["0.0"][0], rows["0.0"][1])  # at temperature 0 all are alike
    assert not torch.equal(rows["1.0"][0], rows["1.0"][1])
    completed = drawn["completions"][0][3]
    assert [each.shape for each in completed] == [(5, 8, 8, 1)] * 6
    for each, whole in zip(completed, TASK.to_images(images[:6]), strict=True):
        assert torch.equal(each[2, :4], whole[:4])
    mean, bits = drawn["heat"][0][1], drawn["heat"][0][3]
    assert bool(mean[0, 0].isnan()) != start
    total = bits.nansum((1, 2)) * math.log(2)
    torch.testing.assert_close(total, found[:5].double().sum(1))
    kinds = drawn["histograms"][0][1]
    expected = evaluate.nats(model, 16 - images, batch=3).mean(1) / math.log(2)
    torch.testing.assert_close(torch.from_numpy(kinds["inverted"]), expected.double(), rtol=1e-5, atol=0)
