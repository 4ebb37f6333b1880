import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from lintra.attention import softmax
from lintra.tasks import recall

SMALL = recall.Config(pairs=5, keys=9, values=7, train_samples=300, validate_samples=20)


def test_every_key_comes_back_with_its_value():
    batch = SMALL.build().train.__getitems__(range(300))
    assert batch["tokens"].shape == (300, 20)
    for tokens, counted in zip(batch["tokens"], batch["counted"], strict=True):
        pairs = [tuple(pair) for pair in tokens.reshape(-1, 2).tolist()]
        assert sorted(pairs[:5]) == sorted(pairs[5:])
        keys = {key for key, _ in pairs}
        assert len(keys) == 5
        assert keys <= set(range(9))
        assert {value for _, value in pairs} <= set(range(9, 16))
        assert counted.nonzero().flatten().tolist() == [11, 13, 15, 17, 19]
    orders = [tokens[0::2].tolist() for tokens in batch["tokens"]]
    assert any(order[:5] != order[5:] for order in orders)


def test_joined_pairs_are_the_same_ones_in_a_symbol_each():
    joined = dataclasses.replace(SMALL, joined=True).build()
    found = joined.train.__getitems__(range(50))
    expected = SMALL.build().train.__getitems__(range(50))
    keys, values = expected["tokens"][:, :10:2], expected["tokens"][:, 1:10:2] - 9
    assert torch.equal(found["tokens"][:, :5], 16 + 7 * keys + values)
    assert torch.equal(found["tokens"][:, 5:], expected["tokens"][:, 10:])
    assert torch.equal(found["counted"][:, 5:], expected["counted"][:, 10:])
    assert not found["counted"][:, :5].any()
    assert joined.length == 15
    assert joined.model(softmax.Config()).vocabulary == 16 + 63


@pytest.mark.parametrize("joined", [False, True])
def test_with_a_length_queries_stand_among_filler(joined):
    """Every value that counts is the one that followed its key; all else after the pairs is filler."""
    config = dataclasses.replace(SMALL, joined=joined, length=41)
    task = config.build()
    batch = task.train.__getitems__(range(300))
    assert batch["tokens"].shape == (300, task.length) == (300, 41)
    shown, filler = (5 if joined else 10), recall.vocabulary(config) - 1
    assert task.model(softmax.Config()).vocabulary == filler + 1
    for tokens, counted in zip(batch["tokens"].tolist(), batch["counted"].tolist(), strict=True):
        if joined:
            beside = {(x - 16) // 7: 9 + (x - 16) % 7 for x in tokens[:5]}
        else:
            beside = dict(zip(tokens[:10:2], tokens[1:10:2], strict=True))
        asked = [place for place, count in enumerate(counted) if count]
        assert {tokens[place - 1]: tokens[place] for place in asked} == beside
        used = {*range(shown), *asked, *(place - 1 for place in asked)}
        assert len(used) == shown + 10
        assert all(tokens[place] == filler for place in range(41) if place not in used)


def test_queries_come_soon_where_the_power_is_small():
    def place(power):
        config = dataclasses.replace(SMALL, pairs=1, length=100, gap_power=power)
        counted = config.build().train.__getitems__(range(300))["counted"]
        return counted.float().argmax(1).double().mean().item()

    assert place(0.01) < 40 < place(1.0)  # of 3 .. 99; uniform would be 51


def test_samples_follow_from_seed_and_number():
    train, validate = SMALL.build().train, SMALL.build().validate
    both = torch.cat([x.__getitems__(range(len(x)))["tokens"] for x in (train, validate)])
    assert len(both.unique(dim=0)) == 320
    assert torch.equal(train[17]["tokens"], both[17])
    other = recall.Config(pairs=5, keys=9, values=7, data_seed=1).build().train[17]["tokens"]
    assert not torch.equal(other, both[17])


def test_looking_up_is_right_and_guessing_is_not():
    task = SMALL.build()
    batch = task.validate.__getitems__(range(20))
    tokens = batch["tokens"]
    params = torch.full((*tokens.shape, 16), -50.0).scatter(-1, tokens[..., None], 0.0)
    model = SimpleNamespace(
        shift=lambda x: x,
        start_token=0,
        output=SimpleNamespace(
            log_probs=lambda p: p.log_softmax(-1),
            log_prob=lambda p, x: p.log_softmax(-1).gather(-1, x[..., None])[..., 0],
        ),
    )

    def score(params):
        class Model(SimpleNamespace):
            def __call__(self, tokens):
                return params

        return task.score(Model(**vars(model)), batch)

    assert score(params)["accuracy"] == 1
    assert score(params)["weight"] == 100
    flat = score(torch.zeros_like(params))
    assert math.isclose(flat["loss"], math.log(16), rel_tol=1e-6)
    assert flat["accuracy"] < 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": 0}, "pairs must lie in 1 .. keys=64, got 0"),
        ({"pairs": 65}, "pairs must lie in 1 .. keys=64, got 65"),
        ({"values": 0}, "values must be at least 1, got 0"),
        ({"length": 63}, "length must be at least 64, for 16 pairs twice, got 63"),
        ({"gap_power": 0.0}, "gap_power must be above 0 and at most 1, got 0"),
        ({"validate_samples": 0}, "validate_samples must be at least 1, got 0"),
    ],
)
def test_config_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        recall.Config(**options)


@pytest.mark.slow
def test_softmax_learns_to_look_up():
    """Two layers of softmax find the value of a key; chance is one in eight."""
    task = recall.Config(pairs=4, keys=8, values=8).build()
    torch.manual_seed(0)
    model = task.model(softmax.Config()).build()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(600):
        loss = task.loss(model, task.train.__getitems__(range(64 * step, 64 * step + 64)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert task.score(model, task.validate.__getitems__(range(200)))["accuracy"] > 0.9
