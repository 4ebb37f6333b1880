"""The counted operations, parameters and bytes of a step are those of networks that are run."""

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lintra.attention import delta, gated, linear, softmax
from lintra.bench.step_work import Bytes, Work
from lintra.models import decoder
from lintra.nn import context_cost
from lintra.ops import linear_attention
from lintra.ops.layout import Layout
from lintra.ops.sequence_shard import SequenceShard, Span

KINDS = {
    "linear": linear.Config(impl="torch"),
    "delta": delta.Config(impl="torch"),
    "softmax": softmax.Config(),
}
BATCH, TIME = 3, 512


def config_of(kind, **more):
    shape = {"layers": 2, "heads": 4, "kv_heads": 2, "width": 64, "vocabulary": 100} | more
    return decoder.Config(attention=KINDS[kind], **shape)


def counted(config, time=TIME):
    """The operations of matrix products, forward and backward, of a network run in plain PyTorch."""
    model, tokens = config.build(), torch.zeros(BATCH, time, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            params = model(tokens)
        with FlopCounterMode(display=False) as backward:
            params.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def whole(work, time=TIME):
    one = work.block_operations(BATCH * time, time)
    head = work.head_operations(BATCH * time)
    return work.layers * one.forward + head.forward, work.layers * one.backward + head.backward


@pytest.mark.parametrize("more", [{}, {"activation": "swiglu", "kv_heads": 4}, {"mlp_ratio": 0}])
def test_operations_of_the_sum_are_those_that_pytorch_counts(more):
    config = config_of("linear", **more)
    assert counted(config) == whole(Work(config))
    assert counted(config, 48) == whole(Work(config), 48)  # less than a chunk


def test_operations_of_the_delta_rule_are_those_that_pytorch_counts():
    """Triangular solves are left out, since PyTorch does not count them; a first state has no gradient."""
    config = config_of("delta")
    work = Work(config)
    found, expected = counted(config), whole(work)
    triangles = BATCH * TIME * work.layers * work.states * 64 * (work.features + 16)
    assert found[0] == expected[0] - triangles
    assert found[1] == pytest.approx(expected[1] - triangles, rel=0.001)


def test_operations_of_softmax_are_half_of_those_over_all_keys():
    """The plain form of PyTorch computes all scores and masks half; its backward computes none again."""
    config = config_of("softmax")
    work = Work(config)
    attended = work.attention_operations(BATCH * TIME, TIME)
    every = work.layers * 4 * 4 * 16 * BATCH * TIME**2
    forward, backward = whole(work)
    assert work.layers * attended.forward == every * (TIME + 1) / (2 * TIME)
    assert attended.backward == 2.5 * attended.forward
    rest = forward - work.layers * attended.forward
    assert counted(config) == (rest + every, 2 * (rest + every))
    assert backward == 2 * rest + 2.5 * work.layers * attended.forward


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_the_states_of_an_optimizer_are_those_of_a_network(kind):
    config = config_of(kind)
    work, model = Work(config), config.build()
    assert work.parameters == sum(x.numel() for x in model.parameters())
    assert work.block_parameters == sum(x.numel() for x in model.blocks[1].parameters())
    assert work.tensors == len(list(model.parameters()))
    optimizer = torch.optim.AdamW(model.parameters())
    for x in model.parameters():
        x.grad = torch.zeros_like(x)
    optimizer.step()
    held = sum(2 * x.nbytes for x in model.parameters())  # with its gradient
    for state in optimizer.state.values():
        held += sum(x.nbytes for name, x in state.items() if name != "step")
    assert work.optimizer_bytes(1, Bytes()) == held
    assert work.optimizer_bytes(4, Bytes()) == held / 4
    assert work.update_bytes(1, Bytes()) == held * 7 / 4  # 3 of the 4 numbers are written as well


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_block_keeps_for_its_backward(kind, activation):
    """Accurate to within a third, for the forms that run by default."""
    config = config_of(kind, activation=activation)
    config = dataclasses.replace(config, attention=type(config.attention)())
    block = config.build().blocks[0]
    own = {x.untyped_storage().data_ptr() for x in block.parameters()}
    kept = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # kept alive so that its address is not reused
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        block(torch.randn(BATCH, TIME, 64, requires_grad=True))
    found = sum(storage.nbytes() for storage in kept.values())
    assert Work(config).block_activation_bytes(BATCH * TIME, Bytes()) == pytest.approx(found, rel=1 / 3)


def test_the_state_of_a_recurrence_is_that_of_a_block():
    """Integers have no gradient. The cache of softmax is empty before any token."""
    for kind in ("linear", "delta"):
        config = config_of(kind)
        state = config.build().blocks[0].start(5).attention
        floats = sum(x.nbytes for x in state)
        held = Work(config).state_bytes(5)
        assert (held.forward, held.backward) == (floats + 5 * 8, floats)
    assert Work(config_of("softmax")).state_bytes(5).backward == 0


class Between:
    """The ranks around a piece in the middle; nothing comes in from them."""

    rank, size = 1, 3

    def scan(self, added, transition, sizes):
        self.given = added, transition
        return torch.zeros_like(added)


@pytest.mark.parametrize("kind", ["linear", "delta"])
def test_the_pass_for_a_state_is_counted_as_it_runs(kind):
    """The triangular solves of the delta rule are left out, since PyTorch does not count them. Its backward
    is that of a kernel, which also computes gradients that nobody asked for."""
    work, ranks = Work(config_of(kind)), Between()
    g, f, e = work.states, work.features, work.attention.value_dim
    k, v = (torch.randn(1, TIME, g, n, requires_grad=True) for n in (f, e))
    options = {
        "normalize": False,
        "impl": "torch",
        "beta": None if kind == "linear" else torch.rand(1, TIME, g),
    }
    found = []
    for layout in (Layout(1, TIME, k.device), Layout(1, TIME, k.device)):
        if found:
            layout.shard = SequenceShard(ranks, [Span(TIME, [TIME], True, True, True)] * 3)
        with FlopCounterMode(display=False) as forward:
            linear_attention(k, k, v, layout=layout, **options)
        found.append(forward.get_total_flops())
    with FlopCounterMode(display=False) as backward:
        sum(x.sum() for x in ranks.given).backward()
    more = work.state_operations(TIME, TIME)
    if kind == "linear":
        one = 2 * g * f * (e + 1)  # for one query, which reads the state and the sum of the keys
        assert (found[1] - found[0], backward.get_total_flops()) == (more.forward + one, more.backward)
    else:
        assert found[1] - found[0] + TIME * g * 64 * (2 * f + e) == more.forward
        assert more.backward > 2 * more.forward


@pytest.mark.parametrize("kind", ["linear", "delta"])
def test_both_cost_models_count_the_pass_for_a_state_alike(kind, monkeypatch):
    """The operations by which `method="auto"` chooses, in multiply-adds."""
    monkeypatch.setattr(context_cost, "TOUCHED", 0)
    work = Work(config_of(kind))
    counted = work.state_operations(1, context_cost.CHUNK).forward
    assert 2 * context_cost.state_operations(work.attention) == counted


@pytest.mark.parametrize("attention", [gated.Config(), softmax.Config(window=4), (linear.Config(),) * 2])
def test_other_mechanisms_are_refused(attention):
    config = dataclasses.replace(config_of("linear", kv_heads=4), attention=attention)
    with pytest.raises(ValueError, match="attention must"):
        Work(config)
