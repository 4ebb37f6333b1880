"""Selective copying: the symbols among the noise, in order; nothing else counts."""

import pytest
import torch

from lintra.tasks import selective_copying
from lintra.tasks.selective_copying import NOISE, SEPARATOR

SMALL = selective_copying.Config(symbols=5, copied=6, length=20, train_samples=200, validate_samples=20)


def test_the_symbols_come_back_without_the_noise():
    batch = SMALL.build().train.__getitems__(range(200))
    assert batch["tokens"].shape == (200, 20 + 1 + 6)
    for tokens, counted in zip(batch["tokens"].tolist(), batch["counted"].tolist(), strict=True):
        assert [x for x in tokens[:20] if x != NOISE] == tokens[21:]
        assert tokens[20] == SEPARATOR
        assert counted == 21 * [False] + 6 * [True]
        assert set(tokens[21:]) <= set(range(2, 7))
    places = (batch["tokens"][:, :20] != NOISE).sum(0)
    assert (places > 0).all()  # symbols stand anywhere


def test_samples_follow_from_seed_and_number():
    train, validate = SMALL.build().train, SMALL.build().validate
    both = torch.cat([x.__getitems__(range(len(x)))["tokens"] for x in (train, validate)])
    assert len(both.unique(dim=0)) == 220
    assert torch.equal(train[17]["tokens"], both[17])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"symbols": 0}, "symbols must be at least 1, got 0"),
        ({"copied": 0}, "copied must be at least 1, got 0"),
        ({"length": 15}, "length must be at least copied=16, got 15"),
    ],
)
def test_config_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        selective_copying.Config(**options)
