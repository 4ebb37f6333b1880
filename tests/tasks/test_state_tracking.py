"""Products of permutations, compared with a composition point by point; what is refused or learned."""

import itertools

import pytest
import torch

from lintra.attention import delta, linear
from lintra.tasks import state_tracking


def samples(**options):
    task = state_tracking.Config(train_samples=50, length=20, **options).build()
    return task, task.train.__getitems__(range(50))


def test_of_two_points_it_is_parity():
    _, batch = samples(points=2)
    assert torch.equal(batch["states"], batch["tokens"].cumsum(1) % 2)
    assert set(batch["tokens"].unique().tolist()) == {0, 1}


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("points", [3, 5])
def test_states_are_products_the_latest_applied_last(points, swaps):
    _, batch = samples(points=points, swaps=swaps)
    number = list(itertools.permutations(range(points)))
    for tokens, states in zip(batch["tokens"].tolist(), batch["states"].tolist(), strict=True):
        now = list(range(points))  # the position of each point
        for token, state in zip(tokens, states, strict=True):
            now = [number[token][place] for place in now]
            assert number[state] == tuple(now)


def test_the_product_is_that_of_a_group_and_not_commutative():
    table = torch.from_numpy(state_tracking.products(4))
    everything = torch.arange(24)
    assert torch.equal(table[0], everything)  # the first is the identity
    assert torch.equal(table[:, 0], everything)
    assert torch.equal(table.sort(1).values, everything.expand(24, 24))  # every row occurs once
    assert torch.equal(table[table], table[everything[:, None, None], table])
    assert not torch.equal(table, table.T)


def test_swaps_move_two_points_or_none():
    assert len(state_tracking.letters(5, True)) == 1 + 10
    assert len(state_tracking.letters(5, False)) == 120
    _, batch = samples(points=5, swaps=True)
    assert set(batch["tokens"].unique().tolist()) == set(state_tracking.letters(5, True).tolist())


def test_answers_are_of_what_was_read_alone():
    """A later symbol changes no earlier answer of the model, and answers are not part of the input."""
    task, batch = samples(points=3)
    model = task.model(linear.Config()).build().eval()
    other = batch["tokens"].clone()
    other[:, -1] = (other[:, -1] + 1) % 6
    assert torch.allclose(model(batch["tokens"])[:, :-1], model(other)[:, :-1], atol=1e-6)
    score = task.score(model, batch)
    assert score["weight"] == 50 * 20
    assert torch.isclose(score["loss"], task.loss(model, batch))
    assert task.weight(batch) == 50 * 20
    guess = model.output.log_probs(model(batch["tokens"])).argmax(-1)
    assert torch.isclose(score["accuracy"], (guess == batch["states"]).float().mean())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"points": 1}, r"points must lie in 2 \.\. 5, got 1"),
        ({"points": 6}, r"points must lie in 2 \.\. 5, got 6"),
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"validate_samples": 0}, "validate_samples must be at least 1, got 0"),
    ],
)
def test_config_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        state_tracking.Config(**options)


@pytest.mark.slow
def test_reflections_learn_parity():
    """The delta rule with eigenvalues down to -1 can represent it; chance is a half."""
    task = state_tracking.Config(length=32).build()
    torch.manual_seed(0)
    attention = delta.Config(decay=False, negative_eigenvalues=True, conv=None)
    model = task.model(attention).build()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(400):
        loss = task.loss(model, task.train.__getitems__(range(32 * step, 32 * step + 32)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert task.score(model, task.validate.__getitems__(range(200)))["accuracy"] > 0.95
