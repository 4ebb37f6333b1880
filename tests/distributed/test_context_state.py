"""Pieces after a state: outputs, the next state and gradients equal those of `extend` in one process."""

import copy
import re
from typing import cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

from lintra.attention import bigbird, cosformer, delta, gated, leaves, linear, longformer, map_state, softmax
from lintra.distributed import context_parallel, extend, gather, reduce_gradients, shard
from lintra.nn import AttentionLayer, Block
from tests.distributed.test_context import HOLES, KINDS, MECHANISMS, PADDED, TIME, N, build, draw

SEEN = 9  # tokens that the state has read
# Room for the tokens of the state.
OPTIONS = [
    *({"attention": x} for x in MECHANISMS if x.__class__ is not cosformer.Config),
    {"attention": cosformer.Config(max_length=SEEN + TIME)},
    *(x for x in KINDS if "max_length" not in x and "grid" not in x),
    {"attention": (delta.Config(), softmax.Config()), "position": "learned", "max_length": SEEN + TIME},
    {"attention": gated.Config(), "context": (1, 20), "position": "grid", "grid": (SEEN, 8)},
]
MASKS = [None, PADDED, PADDED.flip(1), HOLES]


def state_of(model):
    """A state after some tokens; one of the sequences has fewer of them."""
    mask = torch.arange(SEEN) < torch.tensor([SEEN, 4])[:, None]
    tokens = torch.randint(0, N, (2, SEEN), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return model.extend(tokens, mask=mask)[1]


def leaf(state):
    """A copy that receives a gradient."""
    return map_state(lambda x: x.clone().requires_grad_(x.is_floating_point()), state)


def weigh(state, seed):
    """The sum of all numbers of a state, each with its own random weight."""
    generator = torch.Generator().manual_seed(seed)
    parts = [x for x in leaves(state) if x.is_floating_point()]
    return sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in parts)


def gradients(model, state):
    named = {name: x.grad for name, x in model.named_parameters() if x.requires_grad}
    given = [x.grad for x in leaves(state) if x.is_floating_point()]
    return named, [torch.zeros(()) if x is None else x for x in given]


def alone(model, tokens, mask, state):
    """Params, the next state, and the gradients of parameters and state, in one process."""
    model, state = copy.deepcopy(model), leaf(state)
    params, after = model.extend(tokens, state, mask=mask)
    (params.square().sum() + weigh(after, 3)).backward()
    return params.detach(), map_state(torch.Tensor.detach, after), *gradients(model, state)


def on_rank(cases):
    """The results of `alone` if this rank has its piece and, except for rank 0, no state."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    rank, last = mesh.get_local_rank(), mesh.size() - 1
    found = []
    for model, tokens, mask, given in cases:
        context_parallel(model, mesh)
        state = leaf(given)
        mask = None if mask is None else shard(mask, mesh)
        params, after = extend(model, shard(tokens, mesh), None if rank else state, mask=mask)
        # Any rank may use the next state: the first and the last rank each use a part of it.
        share = {0: 0.25, last: 0.75}.get(rank, 0.0) if last else 1.0
        loss = params.square().sum() + (share * weigh(after, 3) if share else 0.0)
        loss.backward()
        reduce_gradients(model, mesh)
        after = map_state(torch.Tensor.detach, after)
        found.append((gather(params, mesh), after, *gradients(model, state)))
    return found


def compare(ranks, cases):
    expected = [alone(*case) for case in cases]
    for rank, found in enumerate(ranks.call(on_rank, cases)):
        for case, (params, after, named, given), (own, state, own_named, own_given) in zip(
            cases, found, expected, strict=True
        ):
            told = {"atol": 1e-12, "msg": lambda m, case=case: f"{case[0].config}: {m}"}
            assert_close((params, leaves(after)), (own, leaves(state)), rtol=1e-12, **told)
            assert_close(named, own_named, rtol=1e-11, **told)
            if rank == 0:
                assert_close(given, own_given, rtol=1e-11, **told)
                assert any(x.any() for x in own_given)


def compare_all(ranks, mask):
    models = [build(**options) for options in OPTIONS]
    compare(ranks, [(model, draw(), mask, state_of(model)) for model in models])


masks = pytest.mark.parametrize("mask", MASKS, ids=["dense", "right", "left", "holes"])


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS[:2], ids=["dense", "right"])
def test_every_mechanism_behind_a_state(two_ranks, mask):
    compare_all(two_ranks, mask)


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS[2:], ids=["left", "holes"])
def test_every_mechanism_behind_a_state_with_padding_before_tokens(two_ranks, mask):
    compare_all(two_ranks, mask)


@pytest.mark.slow
@masks
def test_every_mechanism_behind_a_state_on_four_ranks(four_ranks, mask):
    compare_all(four_ranks, mask)


HYBRID = (delta.Config(), softmax.Config())


def in_segments(model, tokens, cut, run):
    """Params of two segments; the gradients of the second reach the first through the state."""
    first, state = run(tokens[:, :cut], None)
    second, state = run(tokens[:, cut:], state)
    (first.square().sum() + second.square().sum()).backward()
    return first.detach(), second.detach()


def segments_on_rank(model, tokens, cut):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    context_parallel(model, mesh)
    parts = in_segments(model, tokens, cut, lambda x, state: extend(model, shard(x, mesh), state))
    reduce_gradients(model, mesh)
    return [gather(x, mesh) for x in parts], {name: x.grad for name, x in model.named_parameters()}


def test_gradients_pass_from_one_segment_to_the_one_before(two_ranks):
    model, tokens = build(HYBRID, conv=3), draw()
    whole = copy.deepcopy(model)
    whole(tokens).square().sum().backward()
    expected = {name: x.grad for name, x in whole.named_parameters()}
    for parts, named in two_ranks.call(segments_on_rank, model, tokens, 16):
        assert_close(torch.cat(parts, 1), whole(tokens).detach(), rtol=1e-12, atol=1e-12)
        assert_close(named, expected, rtol=1e-11, atol=1e-12)


@torch.no_grad()
def generated_on_rank(model, tokens, method):
    """Params of the last tokens, computed by each rank alone after all have read the others; and the result
    of `forward` afterwards."""
    mesh = init_device_mesh("cpu", (2,))
    context_parallel(model, mesh, method=method)
    _, state = extend(model, shard(tokens[:, :-2], mesh))
    params = []
    for i in (-2, -1):
        one, state = model.extend(tokens[:, i : tokens.shape[1] + i + 1], state)
        params.append(one)
    return torch.cat(params, 1), gather(model(shard(tokens, mesh)), mesh)


@pytest.mark.parametrize("method", ["relay", "scan"])
def test_any_rank_generates_behind_a_prompt_that_all_have_read(two_ranks, method):
    model, tokens = build(HYBRID, position="rotary"), draw()
    expected = model(tokens).detach()
    for behind, again in two_ranks.call(generated_on_rank, model, tokens, method):
        assert_close(behind, expected[:, -2:])
        assert_close(again, expected)


class Network(nn.Module):
    """A custom network."""

    def __init__(self):
        super().__init__()
        layers = nn.ModuleList(AttentionLayer(8, delta.Config(), heads=2) for _ in range(3))
        self.layers = cast("list[AttentionLayer]", layers)

    def extend(self, x, states=None, *, mask=None):
        states = [None] * len(self.layers) if states is None else states
        after = []
        for layer, state in zip(self.layers, states, strict=True):
            y, state = layer.extend(x, state, mask=mask)
            x = x + y.tanh()
            after.append(state)
        return x, tuple(after)


def part_on_rank(model, x, state, extra):
    mesh = init_device_mesh("cpu", (2,))
    context_parallel(model, mesh)
    with torch.no_grad():
        y, state = extend(
            model, shard(x, mesh), state, **{name: shard(each, mesh) for name, each in extra.items()}
        )
    return gather(y, mesh), state


@pytest.mark.parametrize("kind", ["layer", "block", "network", "global tokens"])
def test_layers_blocks_and_networks_of_ones_own(two_ranks, kind):
    torch.manual_seed(0)
    extra = {}
    layer = AttentionLayer(8, bigbird.Config(block=4), heads=2, conv=3)
    if kind == "global tokens":
        layer = AttentionLayer(8, longformer.Config(window=3, global_projections=True), heads=2)
        extra = {"global_mask": torch.rand(2, 12) < 0.3}
    model = {"block": lambda: Block(layer, None, width=8), "network": Network}.get(
        kind, lambda: layer
    )().double()
    x = torch.randn(2, 21, 8, dtype=torch.float64)
    with torch.no_grad():
        state = model.extend(x[:, :SEEN])[1]
        y, after = model.extend(x[:, SEEN:], state, **extra)
    for found, then in two_ranks.call(part_on_rank, model, x[:, SEEN:], state, extra):
        assert_close(found, y, rtol=1e-12, atol=1e-12)
        assert_close(leaves(then), leaves(after), rtol=1e-12, atol=1e-12)


def autocast_on_rank(model, tokens):
    mesh = init_device_mesh("cpu", (2,))
    context_parallel(model, mesh)
    with torch.autocast("cpu", torch.bfloat16):
        params, state = extend(model, shard(tokens, mesh))
    params.square().sum().backward()
    return gather(params, mesh), state.layers[0].attention.k.detach()


def test_a_cache_keeps_the_dtype_that_autocast_decides(two_ranks):
    model, tokens = build(softmax.Config()).float(), draw()
    with torch.autocast("cpu", torch.bfloat16):
        params, state = model.extend(tokens)
    expected = state.layers[0].attention.k
    assert expected.dtype == torch.bfloat16
    for found, k in two_ranks.call(autocast_on_rank, model, tokens):
        assert_close(found, params.detach(), rtol=0.05, atol=0.05)  # rounded to 8 bits
        assert_close(k, expected.detach())


def refused_on_rank(model, pieces, states, masks):
    """The message of the error that a rank raises; the ranks can continue afterwards."""
    mesh = init_device_mesh("cpu", (2,))
    rank = mesh.get_local_rank()
    context_parallel(model, mesh)
    said = ""
    try:
        extend(model, pieces[rank], states[rank], mask=masks[rank])
    except ValueError as error:
        said = str(error)
    return said, extend(model, draw(2, 3))[1].seen.tolist()


def packed_on_rank(cu_seqlens):
    model = build(linear.Config())
    context_parallel(model, init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match=r"rank 0 .*: packed sequences cannot be extended over ranks"):
        extend(model, draw(1, 6), cu_seqlens=cu_seqlens)


def test_packed_sequences_are_refused(two_ranks):
    two_ranks.call(packed_on_rank, torch.tensor([0, 4, 6]))


def bad(model=None, pieces=None, states=None, masks=(None, None)):
    model = build(HYBRID) if model is None else model
    return model, pieces or [draw(2, 6)] * 2, states or [None] * 2, masks


def first_layer(state, **parts):
    layer = state.layers[0]
    return state._replace(layers=(layer._replace(**parts), *state.layers[1:]))


STATE = build(HYBRID).start(2)
LEARNED = build(linear.Config(), position="learned", max_length=20)
FIVE = map_state(torch.Tensor.detach, LEARNED.extend(draw(2, 5))[1])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            bad(states=[build(HYBRID).start(3), None]),
            "rank 0 cannot extend the state: state is for 3 sequences",
        ),
        (bad(states=[build(HYBRID, layers=4).start(2), None]), "rank 0 .* state is for 4 layers"),
        (bad(states=[build(softmax.Config()).start(2), None]), "rank 0 .* state must be a ConvolvedState"),
        (
            bad(states=[STATE.layers[0], None]),
            "rank 0 .* state must be a DecoderState, got AttentionLayerState",
        ),
        (bad(states=[first_layer(STATE, seen=torch.zeros(1)), None]), "rank 0 .* state is for 1 sequences"),
        (bad(pieces=[draw(2, 6), draw(3, 6)]), "shards of the same sequences, got 2 on rank 0, 3 on rank 1"),
        (bad(pieces=[draw(2, 6), draw(2, 6) + N]), "rank 1 .* tokens must be between 0 and 11"),
        (bad(pieces=[draw(2, 6), draw(2, 6).float()]), "rank 1 .* tokens"),
        (bad(masks=[None, torch.ones(2, 5, dtype=torch.bool)]), r"rank 1 .* mask must be \[b=2 t=6\]"),
        (bad(masks=[torch.ones(2, 6), None]), "rank 0 .* mask must be boolean"),
        (
            bad(LEARNED, [draw(2, 8)] * 2, [FIVE, None]),
            "learned positions of max_length=20 reach 20 tokens, got token 21",
        ),
        (
            bad(build(cosformer.Config(max_length=10)), [draw(2, 6)] * 2),
            "a sequence may have max_length=10 tokens, got 12",
        ),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank_that_then_goes_on(two_ranks, case, message):
    for said, seen in two_ranks.call(refused_on_rank, *case):
        assert re.search(message, said), said
        assert seen == [6, 6]


def test_a_model_that_is_not_parallel_is_refused():
    with pytest.raises(ValueError, match="extend needs a model of context_parallel, got Decoder without"):
        extend(build(linear.Config()), draw())
