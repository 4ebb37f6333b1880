"""Plans of a step: limit cases, and that more of anything costs more."""

import dataclasses
import math

import pytest

from lintra.attention import delta, linear, softmax
from lintra.bench.machines import Group, Link, Links, Machine, h100
from lintra.bench.step_plan import Plan, plans, strategies
from lintra.bench.step_time import Step, best
from lintra.bench.step_work import MIXED, Work
from lintra.models import decoder

SHAPE = {"layers": 4, "heads": 2, "width": 64, "vocabulary": 100}
LINEAR, DELTA, SOFTMAX = (
    Work(decoder.Config(attention=each, **SHAPE))
    for each in (linear.Config(), delta.Config(), softmax.Config())
)
FREE = Links.alike(Link(0.0, math.inf))
IDEAL = Machine(operations=1e9, memory=1e12, memory_bandwidth=math.inf, node=8, inside=FREE, between=FREE)
TIME, SEQUENCES = 4096, 64


def step(plan, work=LINEAR, machine=IDEAL, **more):
    return Step(work=work, machine=machine, plan=plan, length=TIME, sequences=SEQUENCES, **more)


def test_one_rank_takes_its_operations_alone():
    assert step(Plan()).seconds == pytest.approx(step(Plan()).operations / 1e9)
    assert step(Plan()).efficiency == pytest.approx(1)
    again = step(Plan(), recompute=False)
    forward = 4 * LINEAR.block_operations(SEQUENCES * TIME, TIME).forward
    assert step(Plan()).operations - again.operations == pytest.approx(forward)
    assert step(Plan()).sent == 0


@pytest.mark.parametrize("plan", [Plan(data=8), Plan(data=8, shard=8), Plan(data=8, shard=2, accumulate=4)])
def test_data_over_links_that_cost_nothing_scales(plan):
    assert step(plan).efficiency == pytest.approx(1)
    assert step(plan).operations == step(Plan()).operations


def test_a_ring_and_a_relay_over_links_that_cost_nothing():
    """All ranks of a ring do equal work; R ranks of a relay wait (L + R - 1) / L, except for the head."""
    assert step(Plan(context=8, exchange="ring"), SOFTMAX).efficiency == pytest.approx(1)
    found = step(Plan(context=8, exchange="relay"))
    head = LINEAR.head_operations(SEQUENCES * TIME)
    outside = (head.forward + head.backward) / 1e9 / 8
    waited = (found.seconds - outside) / (found.ideal_seconds - outside)
    assert waited == pytest.approx((4 + 8 - 1) / 4)


def test_groups_that_skip_ranks_are_on_no_more_nodes_than_ranks():
    for size, stride, nodes in ((2, 16, 2), (8, 64, 8), (8, 1, 1), (16, 1, 2), (4, 4, 2)):
        assert h100().nodes(Group(size, stride)) == nodes
    assert h100().collective_seconds("all_gather", 1, Group(8, 64)) == pytest.approx(
        h100().call + 7 * h100().between.all_gather.latency, rel=1e-3
    )


def test_a_relay_over_several_nodes_waits_for_the_links_between_them():
    slow = dataclasses.replace(IDEAL, between=Links.alike(Link(1e3, 1.0)))
    for context, same in ((8, True), (16, False)):
        plan = Plan(context=context, exchange="relay")
        assert (step(plan, machine=slow).seconds == step(plan).seconds) is same


def test_a_scan_takes_one_more_pass_for_states():
    found, n = step(Plan(context=8, exchange="scan")), SEQUENCES * TIME // 8
    more = LINEAR.state_operations(n, TIME)
    expected = 4 * (2 * more.forward + more.backward) / 1e9  # the forward pass is computed again
    assert found.seconds - found.ideal_seconds == pytest.approx(expected)


def test_what_is_sent_grows_as_the_formulas_say():
    """DDP: 2 (R - 1) / R of the gradients; FSDP2: blocks twice and the rest once, and gradients, (R - 1) / R;
    a relay: a state and its gradient, whatever the length; a scan: log2 R of them."""
    n, blocks = LINEAR.parameters, 4 * LINEAR.block_parameters
    assert step(Plan(data=8)).sent == pytest.approx(2 * 7 / 8 * 4 * n)
    sharded = 7 / 8 * 4 * (2 * blocks + LINEAR.root_parameters + n)
    assert step(Plan(data=8, shard=8)).sent == pytest.approx(sharded)
    assert step(Plan(data=8, shard=8, accumulate=2)).sent == pytest.approx(2 * sharded)
    reduced = 2 * 7 / 8 * 4 * n
    states = step(Plan(context=8, exchange="relay")).sent - reduced
    held = LINEAR.state_bytes(SEQUENCES)
    assert states == pytest.approx(4 * (held.forward + held.backward))
    long = dataclasses.replace(step(Plan(context=8, exchange="relay")), length=16 * TIME)
    assert long.sent - reduced == pytest.approx(states)
    scanned = step(Plan(context=8, exchange="scan"), recompute=False).sent - reduced
    assert scanned == pytest.approx(3 * states)
    relayed, joined = (step(Plan(context=8, exchange=each), DELTA).sent for each in ("relay", "scan"))
    assert joined - relayed > scanned  # it sends transitions as well


def test_ranks_on_few_cores_share_them():
    """Four ranks take twice as long on two cores, and as long as alone on four; at the ends of a relay there
    are cores to spare."""
    one, two, four = (dataclasses.replace(IDEAL, cores=n) for n in (1, 2, 4))
    data = Plan(data=4)
    assert step(data, machine=four).seconds == pytest.approx(step(data).seconds)
    assert step(data, machine=two).seconds == pytest.approx(2 * step(data).seconds)
    relay = Plan(context=4, exchange="relay")
    assert step(relay, machine=four).seconds == pytest.approx(step(relay).seconds)
    alone = step(Plan()).seconds
    assert step(relay, machine=one).seconds == pytest.approx(alone, rel=0.01)
    assert step(relay).seconds < step(relay, machine=two).seconds < alone


def test_a_relay_whose_hops_take_longer_than_its_layers_waits_for_them():
    slow = dataclasses.replace(IDEAL, inside=Links.alike(Link(10.0, math.inf)))
    found = step(Plan(context=2, exchange="relay"), machine=slow, recompute=False)
    hops = 2 * (1 + len(LINEAR.state)) * 10.0 * 4  # forward and backward, each layer after the one before
    assert found.seconds > hops


def test_collectives():
    """R - 1 steps inside a node; twice that for all-reduce; between nodes, all ports of a node work."""
    links = Links.alike(Link(1.0, 100.0)), Links.alike(Link(10.0, 10.0))
    machine = dataclasses.replace(IDEAL, inside=links[0], between=links[1])
    seconds = machine.collective_seconds
    assert seconds("all_gather", 800, Group(8)) == pytest.approx(7 * 1 + 700 / 100)
    assert seconds("all_reduce", 800, Group(8)) == pytest.approx(2 * seconds("all_gather", 800, Group(8)))
    assert seconds("reduce_scatter", 1600, Group(16)) == pytest.approx(14 * 1 + 10 + 1500 / (8 * 10))
    assert seconds("all_gather", 200, Group(2, stride=8)) == pytest.approx(10 + 100 / 10)
    assert seconds("all_gather", 200, Group(1)) == 0
    assert seconds("all_reduce", 1e-9, Group(64)) == pytest.approx(2 * (3 * 10 + 7))  # through trees
    assert machine.send_seconds(100, 1) == pytest.approx(1 + 1)
    assert machine.send_seconds(100, 8) == pytest.approx(10 + 10)


def test_what_does_not_fit_is_no_plan():
    least = step(Plan(data=8, shard=8, accumulate=8), bytes=MIXED).memory
    small = dataclasses.replace(h100(), memory=1.01 * least)
    given = (8, TIME, SEQUENCES, MIXED)
    assert best("DDP", LINEAR, small, *given) is None
    found = best("FSDP2", LINEAR, small, *given)
    assert found is not None
    assert found.fits
    assert found.plan == Plan(data=8, shard=8, accumulate=8)
    assert best("DDP", LINEAR, h100(), 128, TIME, SEQUENCES, MIXED) is None  # more ranks than sequences


def test_the_plans_of_a_strategy():
    assert all(plan.data == 8 and plan.shard == 1 for plan in plans("DDP", 8, TIME, SEQUENCES))
    assert {plan.shard for plan in plans("FSDP2", 8, TIME, SEQUENCES)} == {2, 4, 8}
    assert {plan.context for plan in plans("scan", 8, TIME, SEQUENCES)} == {8}
    both = list(plans("FSDP2 x relay", 8, TIME, SEQUENCES))
    assert {(plan.data, plan.context) for plan in both} == {(4, 2), (2, 4)}
    assert all(plan.data % plan.shard == 0 and plan.shard > 1 for plan in both)
    assert not list(plans("ring", 8, 256, SEQUENCES))  # less than 64 tokens a piece
    for mechanism in ("linear", "softmax"):
        for strategy in strategies(mechanism):
            for plan in plans(strategy, 16, TIME, 4):
                assert plan.ranks == 16
                assert 4 % (plan.data * plan.accumulate) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Plan(data=4, shard=3), "shard must divide the 4 ranks, got 3"),
        (lambda: Plan(context=4), "exchange goes with context > 1"),
        (lambda: Plan(data=2, context=4, shard=8, exchange="relay"), "a relay shards over the 2 ranks"),
        (lambda: step(Plan(data=3)), "must divide the sequences"),
        (lambda: step(Plan(context=2, exchange="ring")), "softmax goes round a ring"),
        (lambda: step(Plan(context=2, exchange="scan"), SOFTMAX), "softmax goes round a ring"),
    ],
)
def test_plans_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()
