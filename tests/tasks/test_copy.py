import math
from types import SimpleNamespace

import pytest
import torch

from lintra.attention import linear
from lintra.tasks import copy

SMALL = copy.Config(train_samples=500, validate_samples=50)


def all_of(samples):
    return samples.__getitems__(range(len(samples)))


def test_the_second_half_repeats_the_first():
    batch = all_of(SMALL.build().train)
    lengths = batch["counted"].sum(1)
    assert batch["tokens"].shape == (500, 128)
    assert set(lengths.tolist()) == set(range(32, 63))
    for tokens, counted, n in zip(batch["tokens"], batch["counted"], lengths, strict=True):
        s = tokens[1 : n + 1]
        whole = torch.cat([torch.tensor([copy.SEPARATOR]), s]).repeat(2)
        assert torch.equal(tokens[: 2 * n + 2], whole)
        assert (tokens[2 * n + 2 :] == copy.SEPARATOR).all()
        assert (s != copy.SEPARATOR).all()
        assert torch.equal(counted.nonzero().flatten(), torch.arange(n + 2, 2 * n + 2))
    assert set(batch["tokens"].flatten().tolist()) == set(range(11))


def test_a_sample_follows_from_seed_and_index():
    train = SMALL.build().train
    batch = all_of(train)
    for i in (499, 0, 17):
        sample = copy.Config(train_samples=1000).build().train[i]
        assert torch.equal(sample["tokens"], batch["tokens"][i])


def test_every_seed_gives_other_samples():
    seeds = [0, 1, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1]
    samples = [copy.Config(data_seed=seed).build().train[0]["tokens"] for seed in seeds]
    assert len(torch.stack(samples).unique(dim=0)) == len(seeds)


def test_no_two_samples_are_equal():
    task = SMALL.build()
    both = torch.cat([all_of(task.train)["tokens"], all_of(task.validate)["tokens"]])
    assert len(both.unique(dim=0)) == 550


def test_the_global_generator_is_untouched():
    before = torch.get_rng_state()
    all_of(SMALL.build().train)
    assert torch.equal(torch.get_rng_state(), before)


def test_outside_is_an_index_error():
    with pytest.raises(IndexError):
        SMALL.build().train[500]


class Fixed:
    """A model with the given parameters [b t n]: log-probabilities up to a constant."""

    def __init__(self, params: torch.Tensor):
        self.params, self.start_token = params, params.shape[-1]
        self.output = SimpleNamespace(
            log_probs=lambda p: p.log_softmax(-1),
            log_prob=lambda p, x: p.log_softmax(-1).gather(-1, x[..., None])[..., 0],
        )

    def shift(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.params


def test_loss_and_score():
    task = SMALL.build()
    batch = task.train.__getitems__(range(8))
    n = batch["counted"].sum().item()
    right = 50.0 * torch.nn.functional.one_hot(batch["tokens"], 11)

    uniform = torch.zeros(8, 128, 11)
    torch.testing.assert_close(task.loss(Fixed(uniform), batch), torch.tensor(math.log(11)))
    assert task.loss(Fixed(right), batch) < 1e-6

    elsewhere_wrong = right.where(batch["counted"][..., None], right.roll(1, -1))
    score = task.score(Fixed(elsewhere_wrong), batch)
    assert (score["accuracy"].item(), score["weight"].item()) == (1.0, n)

    row, column = batch["counted"].nonzero()[0]
    right[row, column] = right[row, column].roll(1)
    assert task.score(Fixed(right), batch)["accuracy"].item() == pytest.approx((n - 1) / n)


def test_only_the_second_half_has_a_gradient():
    task = SMALL.build()
    batch = task.train.__getitems__(range(8))
    params = torch.zeros(8, 128, 11, requires_grad=True)
    task.loss(Fixed(params), batch).backward()
    assert params.grad is not None
    assert torch.equal(params.grad.abs().sum(-1) > 0, batch["counted"])


def test_the_paper_s_model():
    config = SMALL.build().model(linear.Config())
    assert (config.layers, config.heads, config.width, config.vocabulary) == (4, 8, 256, 11)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"symbols": 0}, "symbols must be at least 1, got 0"),
        ({"length": 7}, "length must be at least 8 tokens, got 7"),
        ({"train_samples": 0}, "train_samples must lie in 1 .. 4294967296, got 0"),
        ({"validate_samples": 0}, "validate_samples must be at least 1, got 0"),
        ({"data_seed": -1}, r"data_seed must lie in 0 .. 2\^64 - 1, got -1"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        copy.Config(**settings)


def test_the_shortest_length():
    batch = all_of(copy.Config(length=8, train_samples=20).build().train)
    assert set(batch["counted"].sum(1).tolist()) == {2}
