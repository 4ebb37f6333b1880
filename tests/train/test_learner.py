"""What the optimizer is given."""

import dataclasses
import statistics
from types import SimpleNamespace

import pytest
import torch

from lintra import checkpoint, train
from lintra.attention import delta, linear
from lintra.models import bilstm
from lintra.tasks import digits
from lintra.train.learner import Diverged, Learner
from lintra.train.optimizer import optimizer as make
from tests.train.conftest import assert_same_weights


def groups(mechanism, optimizer="radam"):
    task = digits.Config().build()
    model = dataclasses.replace(task.model(mechanism), layers=2, heads=2, width=16).build()
    learner = Learner(model, task, train.Config(weight_decay=0.1, optimizer=optimizer))
    names = {id(x): name for name, x in learner.named_parameters()}
    optimizer = learner.configure_optimizers()
    return [({names[id(x)] for x in g["params"]}, g["weight_decay"]) for g in optimizer.param_groups], names


def test_what_a_mechanism_wants_left_alone_does_not_decay():
    (decayed, others), names = groups(delta.Config())
    assert decayed[0] | others[0] == set(names.values())
    assert {name.rpartition(".")[2] for name in others[0]} == {"A_log", "dt_bias"}
    assert len(others[0]) == 4  # of two layers
    assert (decayed[1], others[1]) == (0.1, 0.0)
    (everything,), names = groups(linear.Config())
    assert everything == (set(names.values()), 0.1)


@pytest.mark.parametrize("optimizer", ["radam", "adamw"])
def test_decay_is_no_part_of_the_gradient(optimizer):
    """Without a gradient a weight shrinks by lr * weight_decay in each step, and no moment grows."""
    layer = torch.nn.Linear(3, 2).double()
    expected = [(1 - 0.1 * 0.01) ** 10 * x.detach() for x in layer.parameters()]
    made = make(layer, train.Config(optimizer=optimizer, lr=0.1, weight_decay=0.01))
    for _ in range(10):
        for x in layer.parameters():
            x.grad = torch.zeros_like(x)
        made.step()
    torch.testing.assert_close(list(layer.parameters()), expected)


def small_model(task):
    return dataclasses.replace(task.model(linear.Config()), layers=1, heads=2, width=16, dropout=0.0).build()


@pytest.mark.parametrize("precision", ["32", "bf16"])
def test_muon_decays_as_adamw_does(precision):
    model = small_model(digits.Config().build())
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    made = make(model, train.Config(optimizer="muon", lr=0.1, weight_decay=0.01, precision=precision))
    assert made.parts[0].bf16 is (precision == "bf16")
    for x in model.parameters():
        x.grad = torch.zeros_like(x)
    made.step()
    for name, x in model.named_parameters():
        torch.testing.assert_close(x, (1 - 0.1 * 0.01) * before[name], msg=name)


@pytest.mark.parametrize("clip", [1e-3, None])
def test_gradients_are_clipped_to_their_norm(clip):
    task = digits.Config().build()
    learner = Learner(small_model(task), task, train.Config(clip=clip))
    task.loss(learner.model, task.train.__getitems__(range(8))).backward()
    before = torch.cat([x.grad.flatten() for x in learner.parameters()])
    learner.configure_gradient_clipping(None)
    after = torch.cat([x.grad.flatten() for x in learner.parameters()])
    factor = 1.0 if clip is None else clip / before.norm()
    assert before.norm() > 10 * 1e-3
    torch.testing.assert_close(after, factor * before)


def test_the_validation_loss_is_that_of_all_samples(new_run):
    """A last batch of fewer samples counts for less."""
    run = new_run(steps=1, validate_every=1, batch=40, dropout=0.0)
    train.fit(run)
    task, model = run.task.build(), checkpoint.load(run.folder)
    places = range(len(task.validate))
    assert len(places) % 40
    with torch.inference_mode():
        losses = [float(task.score(model, task.validate.__getitems__([place]))["loss"]) for place in places]
    (found,) = train.curves(run.folder)["validate_loss"].values()
    assert found == pytest.approx(statistics.mean(losses), rel=1e-5)
    batches = [statistics.mean(losses[i : i + 40]) for i in range(0, len(losses), 40)]
    assert statistics.mean(batches) != pytest.approx(statistics.mean(losses), rel=1e-4)


def test_the_loss_that_is_shown_is_that_of_all_processes(monkeypatch):
    """With two processes whose batches weigh 100 and 300, each has its share, and both see the mean."""
    learner = Learner(torch.nn.Linear(1, 1), SimpleNamespace(weight=None, loss=None), train.Config())
    losses, weights = torch.tensor([2.0, 4.0], requires_grad=True), torch.tensor([100, 300])
    for i, share in enumerate((2.0 * 100 / 200, 4.0 * 300 / 200)):
        asked = []

        def reduce(x, reduce_op, asked=asked):
            asked.append(x.item())
            return torch.tensor([200.0, 3.5][len(asked) - 1])

        strategy = SimpleNamespace(reduce=reduce)
        monkeypatch.setattr(Learner, "trainer", SimpleNamespace(world_size=2, strategy=strategy))
        learner.task.weight = lambda batch, i=i: weights[i]
        learner.task.loss = lambda model, batch, i=i: losses[i] * 1
        loss = learner.training_step({"tokens": torch.zeros(1)}, 0)
        learner.on_before_optimizer_step(None)
        assert asked == [weights[i].item(), share]
        assert (loss.item(), learner.batch_loss.item()) == (share, 3.5)


def test_two_groups_are_resumed_exactly(new_run):
    whole, parts = (new_run(name, attention=delta.Config()) for name in ("whole", "parts"))
    train.fit(whole)
    train.fit(parts.changed(steps=5))
    train.fit(parts.changed(steps=12))
    assert_same_weights(parts, whole)
    assert torch.isfinite(torch.tensor(list(train.curves(whole.folder)["train_loss"].values()))).all()


def test_muon_is_for_the_matrices_inside_blocks():
    (matrices, decayed, others), names = groups(delta.Config(), "muon")
    assert matrices[0] | decayed[0] | others[0] == set(names.values())
    assert all(".blocks." in name and name.endswith(".weight") for name in matrices[0])
    assert {"model.head.weight", "model.embedding.table.weight"} <= decayed[0]
    assert not any("norm" in name for name in matrices[0])


def test_muon_s_step_is_orthogonal(new_run):
    """The singular values of its first update of a matrix are about equal, and as large as with AdamW."""
    task = digits.Config().build()
    model = dataclasses.replace(task.model(linear.Config()), layers=1, heads=2, width=16).build()
    learner = Learner(model, task, train.Config(optimizer="muon", lr=1e-2, weight_decay=0.0))
    optimizer = learner.configure_optimizers()
    before = model.blocks[0].mlp.up.weight.clone()
    table = model.head.weight.clone()
    task.loss(model, task.train.__getitems__(range(8))).backward()
    optimizer.step()
    change = model.blocks[0].mlp.up.weight.detach() - before
    values = torch.linalg.svdvals(change.detach())
    # Five Newton-Schulz steps reach 0.7 to 1.2, except for a direction with almost no gradient.
    assert values[:-1].min() > 0.5 * values.max()
    assert 0.1e-2 < change.square().mean().sqrt() < 0.3e-2  # 0.2 lr
    assert not torch.equal(model.head.weight, table)
    assert optimizer.param_groups[-1]["betas"] == (0.9, 0.95)  # those of AdamW beside it


def test_muon_is_resumed_exactly(new_run):
    whole, parts = (new_run(name, optimizer="muon") for name in ("whole", "parts"))
    train.fit(whole)
    train.fit(parts.changed(steps=5))
    train.fit(parts.changed(steps=12))
    assert_same_weights(parts, whole)


def test_muon_where_it_cannot_be():
    model = bilstm.Config(vocabulary=4, width=8).build()
    with pytest.raises(ValueError, match="optimizer='muon' is for the matrices of blocks"):
        make(model, train.Config(optimizer="muon"))


def test_muon_is_resumed_from_an_optimizer_without_a_newer_setting():
    """As PyTorch 2.6 saved the groups of AdamW, without `decoupled_weight_decay`."""
    task = digits.Config().build()
    model = dataclasses.replace(task.model(linear.Config()), layers=1, heads=2, width=16).build()
    saved = make(model, train.Config(optimizer="muon")).state_dict()
    for group in saved["param_groups"]:
        group.pop("decoupled_weight_decay", None)
    resumed = make(model, train.Config(optimizer="muon"))
    resumed.load_state_dict(saved)
    for x in model.parameters():
        x.grad = torch.ones_like(x)
    resumed.step()


def test_a_score_that_is_no_number_on_another_process_ends_the_validation(monkeypatch):
    learner = Learner(torch.nn.Linear(1, 1), SimpleNamespace(), train.Config())
    strategy = SimpleNamespace(reduce_boolean_decision=lambda found, all: True)
    monkeypatch.setattr(Learner, "trainer", SimpleNamespace(strategy=strategy, global_step=7))
    with pytest.raises(Diverged, match="the validation score of another process is not finite after step 7"):
        learner.on_validation_epoch_end()
    learner.not_finite = "loss"
    with pytest.raises(Diverged, match="the validation loss is not finite after step 7"):
        learner.on_validation_epoch_end()
