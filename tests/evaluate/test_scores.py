import dataclasses
import math

import pytest
import torch

from lintra import evaluate
from lintra.attention import linear
from lintra.evaluate import Estimate
from lintra.models import decoder
from lintra.tasks import copy, digits

TASK = digits.Config().build()


def small(**changes) -> decoder.Decoder:
    config = dataclasses.replace(TASK.model(linear.Config()), layers=1, heads=2, width=16, **changes)
    torch.manual_seed(0)
    return config.build()


def test_the_error_of_a_mean():
    """With equal weights it is s / sqrt(n)."""
    values = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = Estimate.of(7 * values, torch.full((50,), 7))
    assert found.mean == pytest.approx(float(values.mean()))
    assert found.error == pytest.approx(float(values.std()) / math.sqrt(50))
    assert (found.samples, found.predictions) == (50, 350)


def test_the_error_of_a_ratio():
    """It matches the spread of means of such samples, and is 0 for equal samples of any weights."""
    draw = torch.Generator().manual_seed(0)
    weights = torch.randint(1, 9, (4000, 100), generator=draw)
    sums = weights * torch.rand(weights.shape, generator=draw)
    all_of_them = [Estimate.of(x, w) for x, w in zip(sums, weights, strict=True)]
    spread = torch.tensor([x.mean for x in all_of_them]).std()
    mean_error = torch.tensor([x.error for x in all_of_them]).mean()
    # 4,000 draws give a standard deviation to 1.1 %, and the error of 100 samples is a few percent too small.
    assert float(mean_error / spread) == pytest.approx(1, abs=0.06)
    assert Estimate.of(0.5 * weights[0], weights[0]).error == pytest.approx(0, abs=1e-9)


def test_one_sample_has_no_error():
    assert math.isnan(Estimate.of(torch.ones(1), torch.ones(1)).error)


@pytest.mark.parametrize("task", [TASK, copy.Config(length=16, validate_samples=9).build()])
def test_scores_of_many_batches_are_those_of_one(task):
    model = dataclasses.replace(task.model(linear.Config()), layers=1, heads=2, width=16).build()
    told = []
    found = evaluate.scores(model, task, [8, 1, 5], batch=2, report=told.append)
    expected = task.score(model.eval(), task.test.__getitems__([8, 1, 5]))
    assert told == [2, 3]
    for name, estimate in found.items():
        assert estimate.mean == pytest.approx(expected[name].item(), rel=1e-5)  # float32
        assert (estimate.samples, estimate.predictions) == (3, expected["weight"])


def test_what_models_are_chosen_by_is_no_test_sample():
    """The same positions of the two splits hold other samples, and each split is scored separately."""
    model, chosen = small(), [0, 3]
    for split in ("test", "validate"):
        found = evaluate.scores(model, TASK, chosen, batch=2, split=split)["loss"].mean
        batch = getattr(TASK, split).__getitems__(chosen)
        assert found == pytest.approx(TASK.score(model.eval(), batch)["loss"].item(), rel=1e-5)  # float32
    assert not torch.equal(TASK.test.values[chosen], TASK.validate.values[chosen])


def test_stopped_it_has_scored_what_came_first():
    model, images = small(), TASK.test.values[:6]
    told = []
    options = {"batch": 2, "report": told.append, "stopped": lambda: told[-1] >= 4}
    assert torch.equal(evaluate.nats(model, images, **options), evaluate.nats(model, images[:4], batch=2))
    assert evaluate.scores(model, TASK, range(6), **options) == evaluate.scores(
        model, TASK, range(4), batch=2
    )
    assert told == [2, 4, 2, 4]


def test_an_evaluation_leaves_training_as_it_was():
    model = small(dropout=0.5).train()
    first, second = (evaluate.nats(model, TASK.test.values[:4], batch=2) for _ in range(2))
    assert torch.equal(first, second)  # without dropout
    assert model.training


def test_both_conventions_of_bits_per_dim():
    """Over all values, or all but the first, for which a model without a start symbol pays log2(17) bits."""
    images = TASK.test.values[:6]
    model = small()
    found = evaluate.of_images(evaluate.nats(model, images, batch=4), 64, 17)
    batch = {"tokens": images.long()}
    whole = TASK.score(model.eval(), batch)["bits_per_dim"].item()
    first = model.output.log_prob(model(model.shift(batch["tokens"]))[:, :1], batch["tokens"][:, :1])
    first = -first.mean().item() / math.log(2)
    assert found["bits_per_dim"].mean == pytest.approx(whole, rel=1e-5)
    assert found["bits_per_dim"].predictions == 6 * 64
    others = found["bits_per_dim_without_the_first"]
    assert others.mean == pytest.approx((64 * whole - first) / 63, rel=1e-5)
    assert others.predictions == 6 * 63

    model = small(start=False)
    found = evaluate.of_images(evaluate.nats(model, images, batch=4), 64, 17)
    others = TASK.score(model.eval(), batch)["bits_per_dim"].item()
    assert found["bits_per_dim_without_the_first"].mean == pytest.approx(others, rel=1e-5)
    assert found["bits_per_dim"].mean == pytest.approx((63 * others + math.log2(17)) / 64, rel=1e-5)


@pytest.mark.parametrize("output", [decoder.Logits(), decoder.LogisticMixture(components=3)])
def test_probabilities_that_do_not_sum_to_one_are_seen(output, monkeypatch):
    model = small(output=output)
    images = TASK.test.values[:2]
    assert evaluate.normalisation(model, images) < evaluate.TOLERANCE
    exact = model.output.log_probs
    monkeypatch.setattr(model.output, "log_probs", lambda params: exact(params) + 1e-3)
    assert evaluate.normalisation(model, images) == pytest.approx(1e-3, rel=0.1)
    monkeypatch.setattr(model.output, "log_probs", lambda params: exact(params)[..., 1:])
    assert evaluate.normalisation(model, images) > 1e-3


def test_a_seed_chooses_the_predictions_that_are_summed(monkeypatch):
    model, found = small(), []
    exact = model.output.log_probs
    monkeypatch.setattr(model.output, "log_probs", lambda params: found.append(params) or exact(params))
    for seed in (0, 0, 1):
        evaluate.normalisation(model, TASK.test.values[:40], seed=seed)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_where_nothing_is_predicted_nothing_is_wrong():
    assert evaluate.normalisation(small(start=False), torch.zeros(3, 1, dtype=torch.int64)) == 0.0
