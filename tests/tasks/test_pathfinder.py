"""Pathfinder: every label is what a walk over the pixels finds, in steps that the drawing guarantees."""

import itertools

import numpy as np
import pytest
import torch

from lintra.tasks import pathfinder

CONFIG = pathfinder.Config(train_samples=120, validate_samples=12)


def images(samples):
    batch = samples.__getitems__(range(len(samples)))
    side = CONFIG.size
    return batch["tokens"].reshape(-1, side, side).numpy(), batch["label"].tolist()


def regions(image):
    """Connected sets of pixels that are not black: steps of at most GAP connect them."""
    left = {(int(y), int(x)) for y, x in np.argwhere(image != pathfinder.BLACK)}
    found = []
    while left:
        region, edge = set(), [left.pop()]
        while edge:
            y, x = edge.pop()
            region.add((y, x))
            reach = range(-pathfinder.GAP, pathfinder.GAP + 1)
            near = {(y + i, x + j) for i in reach for j in reach} & left
            left -= near
            edge += near
        found.append(region)
    return found


def test_labels_are_what_a_walk_says():
    drawn, labels = images(CONFIG.build().train)
    for image, label in zip(drawn, labels, strict=True):
        circles = {(int(y), int(x)) for y, x in np.argwhere(image == pathfinder.CIRCLE)}
        assert len(circles) == 18  # two of 3 x 3
        marked = [region for region in regions(image) if region & circles]
        assert len(marked) == (1 if label else 2)
    assert 40 < sum(labels) < 80


def test_paths_keep_apart(monkeypatch):
    """Distractors too: pixels of different paths are more than GAP apart along a row or column."""
    drawn = []
    draw = pathfinder._Image.draw
    monkeypatch.setattr(pathfinder._Image, "draw", lambda *args: (drawn.append(args[:2]), draw(*args)))
    for seed in range(40):
        pathfinder.draw(CONFIG, np.random.default_rng(seed))
        paths = [
            np.array(path) for image, path in drawn if image is drawn[-1][0]
        ]  # one without room is begun again
        assert len(paths) > 2
        for one, other in itertools.combinations(paths, 2):
            assert np.abs(one[:, None] - other[None]).max(2).min() > pathfinder.GAP


def test_the_classes_differ_in_nothing_that_is_easier():
    """Neither the number of bright pixels nor the distance between the circles reveals the label."""
    drawn, labels = images(pathfinder.Config(train_samples=400).build().train)
    labels = np.array(labels) == 1
    bright = (drawn != pathfinder.BLACK).sum((1, 2))
    for measure in (bright, np.array([_distance(image) for image in drawn])):
        means = [measure[labels == kind].mean() for kind in (False, True)]
        assert abs(means[0] - means[1]) < 0.5 * measure.std()


def _distance(image):
    places = np.argwhere(image == pathfinder.CIRCLE)
    return np.abs(places[:, None] - places[None, :]).max()


def test_there_are_other_paths():
    drawn, _ = images(CONFIG.build().train)
    assert np.mean([len(regions(image)) for image in drawn]) > 4


def test_samples_follow_from_seed_and_number():
    train, validate = CONFIG.build().train, CONFIG.build().validate
    assert torch.equal(train[17]["tokens"], train.__getitems__(range(20))["tokens"][17])
    assert not torch.equal(train[0]["tokens"], validate[0]["tokens"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 8}, "size must be at least 16, got 8"),
        ({"dashes": 2}, "dashes must be at least 3, got 2"),
        ({"dashes": 40}, "dashes must be at most 16 at size=32, got 40"),
        ({"distractors": -1}, "distractors must be at least 0, got -1"),
    ],
)
def test_config_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        pathfinder.Config(**options)
