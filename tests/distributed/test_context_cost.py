"""The method chosen for each layer, from the predicted cost of both."""

import math

import pytest
import torch
from torch import nn

from lintra.attention import bigbird, delta, linear, softmax
from lintra.distributed import explain
from lintra.models import decoder, encoder
from lintra.nn import AttentionLayer
from lintra.nn.context_cost import Machine, relay_seconds, scan_seconds


def build(attention, layers=8):
    shape = {"layers": layers, "heads": 4, "width": 64, "vocabulary": 16}
    with torch.device("meta"):
        return decoder.Config(attention=attention, **shape).build()


def methods(attention, layers=8, **options):
    return [x.method for x in explain(build(attention, layers), **{"ranks": 2, "tokens": 65_536} | options)]


def seconds(layers, ranks, tokens, machine):
    model = build(linear.Config(), layers)
    composing = [x for x in model.modules() if isinstance(x, AttentionLayer)]
    return (
        relay_seconds(model, composing, ranks, 1, tokens, machine),
        scan_seconds(composing, ranks, 1, tokens, machine),
    )


def test_without_messages_waiting_grows_with_the_ranks_and_exchanging_with_the_layers():
    machine = Machine(latency=0.0, bandwidth=math.inf)
    relay, scan = seconds(8, 3, 1000, machine)
    assert seconds(8, 5, 1000, machine) == pytest.approx((2 * relay, scan), rel=1e-6)
    # the head, which belongs to the whole network, is spread over its layers
    assert seconds(16, 3, 1000, machine) == pytest.approx((relay, 2 * scan), rel=0.01)
    assert seconds(8, 3, 4000, machine) == pytest.approx((4 * relay, 4 * scan))


def test_between_two_ranks_no_pass_for_states_is_needed():
    machine = Machine(latency=0.0, bandwidth=math.inf)
    relay, scan = seconds(8, 2, 1000, machine)
    assert (relay > 0, scan) == (True, 0)


def test_where_messages_are_all_that_counts_there_are_log_ranks_of_them_a_layer():
    machine = Machine(rate=math.inf, latency=1.0, bandwidth=math.inf)
    assert seconds(8, 2, 1000, machine) == (2, 16)
    assert seconds(8, 64, 1000, machine) == (126, 96)
    assert seconds(1, 64, 1000, machine) == (126, 12)


def test_the_faster_method_is_chosen_for_all_layers_whose_states_compose():
    assert set(methods(linear.Config())) == {"scan"}
    assert set(methods(linear.Config(), tokens=64)) == {"relay"}  # its messages take longer than a layer
    assert set(methods(delta.Config(), layers=64, ranks=3)) == {"relay"}
    assert set(methods(delta.Config(), layers=4, ranks=64)) == {"scan"}
    assert set(methods(linear.Config(), machine=Machine(latency=10.0))) == {"relay"}


@pytest.mark.parametrize("method", ["relay", "scan"])
def test_a_method_that_is_asked_for_is_taken(method):
    for tokens in (64, 65_536):
        found = explain(build(delta.Config()), ranks=2, tokens=tokens, method=method)
        assert {(x.method, x.reason) for x in found} == {(method, "as asked for")}


def test_windows_and_rings_never_wait_and_what_must_wait_has_the_others_wait():
    attention = (linear.Config(), softmax.Config(window=8), softmax.Config(), bigbird.Config(block=4))
    model = build(attention, layers=4)
    found = explain(model, ranks=2, tokens=65_536)
    assert [x.method for x in found] == ["relay", "scan", "scan", "relay"]
    assert [x.layer for x in found] == [f"blocks.{i}.attn" for i in range(4)]
    assert "in any case" in found[0].reason
    assert "without waiting" in found[1].reason
    assert "go round" in found[2].reason
    assert "no state that composes" in found[3].reason


def test_the_reason_has_both_predictions():
    (reason,) = {x.reason for x in explain(build(linear.Config()), ranks=4, tokens=4096)}
    assert reason.startswith("predicted to add ")
    assert reason.count(" ms") == 2


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Linear(2, 2), {}, "has no lintra.nn.AttentionLayer"),
        (encoder.Config(inputs=3, causal=True, layers=1, heads=2, width=16).build(), {}, "must be a Decoder"),
        (build(linear.Config()), {"ranks": 9}, "a token for each rank, got ranks=9, tokens=8"),
        (build(linear.Config()), {"ranks": 0}, "a token for each rank, got ranks=0"),
        (build(linear.Config()), {"rows": 0}, "rows=0"),
    ],
)
def test_bad_input(model, options, message):
    with pytest.raises(ValueError, match=message):
        explain(model, **{"ranks": 2, "tokens": 8} | options)


def test_a_head_does_not_wait_whether_it_is_tied_or_not():
    seconds = []
    for tied in (False, True):
        model = decoder.Config(
            vocabulary=5_000, attention=delta.Config(), layers=2, heads=2, width=16, tie_embeddings=tied
        ).build()
        (choice, *_) = explain(model, ranks=3, tokens=10_000)
        seconds.append(choice.reason)
    assert seconds[0] == seconds[1]
