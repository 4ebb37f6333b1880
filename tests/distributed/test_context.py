"""A model over several ranks equals one process: outputs, gradients, padding, packed sequences."""

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from lintra.attention import (
    aft,
    bigbird,
    cosformer,
    delta,
    gated,
    kda,
    linear,
    longformer,
    lsh,
    performer,
    retention,
    rfa,
    softmax,
    ssd,
)
from lintra.distributed import context_parallel, gather, reduce_gradients, shard, shard_packed
from lintra.models import decoder, encoder
from lintra.nn import AttentionLayer
from lintra.ops import ranks

TIME, N = 37, 11
MECHANISMS = [
    linear.Config(),
    linear.Config(feature_map=linear.Relu(), normalize=False),
    performer.Config(),
    rfa.Config(),
    cosformer.Config(max_length=TIME + 1),
    retention.Config(),
    gated.Config(),
    ssd.Config(),
    delta.Config(),
    kda.Config(),
    aft.Config(),
    softmax.Config(),
    softmax.Config(window=5),
    longformer.Config(window=4),
    bigbird.Config(block=4),
]


def build(attention, **options):
    torch.manual_seed(0)
    shape = {"layers": 2, "heads": 2, "width": 16, "vocabulary": N}
    model = decoder.Config(attention=attention, **shape | options).build().double()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, dtype=torch.float64))
    return model


def draw(b=2, t=TIME):
    return torch.randint(0, N, (b, t), generator=torch.Generator().manual_seed(1))


def results(model, tokens, targets, real, mesh=None, **layout):
    """Params, and the gradients of the summed cross-entropy of real tokens; with a mesh, of all ranks."""
    params = model(tokens, **layout)
    losses = torch.nn.functional.cross_entropy(params.transpose(1, 2), targets, reduction="none")
    losses[real].sum().backward()
    if mesh is not None:
        reduce_gradients(model, mesh)
        params = gather(params, mesh)
    return params.detach(), {name: x.grad for name, x in model.named_parameters() if x.requires_grad}


def on_rank(model, method, tokens, targets, mask, cu_seqlens):
    """The outcome of `results` when this rank has only its piece."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = context_parallel(model, mesh, method=method)
    tokens, targets = shard(tokens, mesh), shard(targets, mesh)
    layout = {} if mask is None else {"mask": shard(mask, mesh)}
    layout |= {} if cu_seqlens is None else {"cu_seqlens": shard_packed(cu_seqlens, mesh)}
    real = layout.get("mask", torch.ones_like(tokens, dtype=torch.bool))
    return results(model, tokens, targets, real, mesh, **layout)


def compare(ranks, model, mask=None, cu_seqlens=None, b=2, methods=("relay", "scan")):
    targets = draw(b)
    tokens = model.shift(targets, cu_seqlens)
    layout = {} if mask is None else {"mask": mask}
    layout |= {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    whole = copy.deepcopy(model)
    expected = results(whole, tokens, targets, real, **layout)
    assert any(bool(x.any()) for x in expected[1].values())
    for method in methods:
        for params, gradients in ranks.call(on_rank, model, method, tokens, targets, mask, cu_seqlens):
            assert_close(params[real], expected[0][real], rtol=1e-12, atol=1e-12)
            for name, gradient in gradients.items():
                assert_close(
                    gradient,
                    expected[1][name],
                    rtol=1e-11,
                    atol=1e-12,
                    msg=lambda m, n=name, how=method: f"{how}, {n}: {m}",
                )


PADDED = torch.arange(TIME) < torch.tensor([TIME, 14])[:, None]
HOLES = torch.rand(2, TIME, generator=torch.Generator().manual_seed(5)) < 0.7
PACKED = torch.tensor([0, 3, 12, 12, 30, TIME])


KINDS = [
    {"attention": linear.Config(), "position": "rotary"},
    {"attention": softmax.Config(), "position": "rotary", "heads": 4, "kv_heads": 2},
    {"attention": (delta.Config(), softmax.Config()), "position": "learned", "max_length": TIME},
    {"attention": gated.Config(), "position": "none", "conv": 4, "qk_norm": "l2", "output_gate": True},
    {"attention": retention.Config(), "context": (1, 20), "position": "grid", "grid": (5, 8)},
    {"attention": kda.Config(value_heads=4), "tie_embeddings": True, "norm_kind": "rms"},
    {"attention": (rfa.Config(), softmax.Config(window=5)), "context": (2,), "checkpoint_blocks": True},
    {"attention": (delta.Config(), softmax.Config()), "position": "rotary", "checkpoint_blocks": True},
]


def mechanism(config):
    return f"{type(config).__module__.rpartition('.')[2]}{MECHANISMS.index(config)}"


each = pytest.mark.parametrize("attention", MECHANISMS, ids=mechanism)
kinds = pytest.mark.parametrize("options", KINDS, ids=range(len(KINDS)))


@each
def test_equals_one_process(two_ranks, attention):
    compare(two_ranks, build(attention))


@kinds
def test_positions_convolutions_and_hybrids(two_ranks, options):
    compare(two_ranks, build(**options))


@each
@pytest.mark.parametrize("mask", [PADDED, PADDED.flip(1), HOLES], ids=["right", "left", "holes"])
def test_padding_that_may_fill_a_whole_piece(two_ranks, attention, mask):
    compare(two_ranks, build(attention), mask)


@each
def test_packed_sequences_of_which_one_is_on_both_ranks(two_ranks, attention):
    compare(two_ranks, build(attention), cu_seqlens=PACKED, b=1)


LONG = [softmax.Config(window=25), longformer.Config(window=22, dilation=(1, 2)), delta.Config(conv=23)]


@pytest.mark.parametrize("attention", LONG, ids=["softmax", "longformer", "delta"])
def test_pieces_shorter_than_the_window(two_ranks, attention):
    model = build(attention, context=(1, 21))
    compare(two_ranks, model)
    compare(two_ranks, model, HOLES)
    compare(two_ranks, model, cu_seqlens=torch.tensor([0, 2, 33, TIME]), b=1)


@pytest.mark.parametrize("cu_seqlens", [[0, TIME], [0, 19, TIME], [0, 19, 19, TIME], [0, 20, TIME]], ids=str)
def test_where_packed_sequences_begin(two_ranks, cu_seqlens):
    """The piece of rank 1 begins with token 19."""
    model = build((delta.Config(), softmax.Config()), position="rotary", conv=3)
    compare(two_ranks, model, cu_seqlens=torch.tensor(cu_seqlens), b=1)


def test_packed_sequences_together_may_have_more_tokens_than_there_are_positions(two_ranks):
    model = build(cosformer.Config(max_length=21), position="learned", max_length=21)
    compare(two_ranks, model, cu_seqlens=torch.tensor([0, 9, 30, TIME]), b=1)


class Network(nn.Module):
    """A custom network."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(AttentionLayer(8, delta.Config(), heads=2) for _ in range(3))
        self.double()

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def network_on_rank(x, method):
    mesh = init_device_mesh("cpu", (2,))
    model = context_parallel(Network(), mesh, method=method)
    with torch.no_grad():
        y = gather(model(shard(x, mesh)), mesh)
        return y, model.layers[0].extend(x)[0]


@pytest.mark.parametrize("method", ["relay", "scan", "auto"])
def test_a_network_of_ones_own_without_gradients(two_ranks, method):
    model, x = (
        Network(),
        torch.randn(3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3)),
    )
    for y, extended in two_ranks.call(network_on_rank, x, method):
        assert_close(y, model(x))
        assert_close(extended, model.layers[0](x))  # a whole sequence, as before


def pieces_on_rank(x, cu_seqlens):
    mesh = init_device_mesh("cpu", (2,))
    layout = shard_packed(cu_seqlens, mesh)
    piece = shard(x, mesh)
    return piece, gather(piece, mesh), layout.cu_seqlens, layout.begun, layout.unfinished


def test_pieces_are_the_whole_in_order(two_ranks):
    x, bounds = torch.arange(14).view(2, 7), torch.tensor([0, 2, 2, 5, 7], dtype=torch.int32)
    first, last = two_ranks.call(pieces_on_rank, x, bounds)
    assert_close((first[0], last[0]), (x[:, :4], x[:, 4:]))
    assert_close((first[1], last[1]), (x, x))
    assert (first[2].tolist(), *first[3:]) == ([0, 2, 4], False, True)
    assert (last[2].tolist(), *last[3:]) == ([0, 1, 3], True, False)


def refused_on_rank(make, arguments):
    """The message of the error that a rank raises."""
    mesh = init_device_mesh("cpu", (2,))
    try:
        make(mesh, *arguments)
    except ValueError as error:
        return str(error)
    return ""


def parallel(mesh, model):
    context_parallel(model, mesh)


def of_other_sizes(mesh):
    context_parallel(build(linear.Config(), layers=1 + mesh.get_local_rank()), mesh)


def of_other_settings(mesh):
    context_parallel(build(linear.Config(eps=10.0 ** -(5 + mesh.get_local_rank()))), mesh)


def of_two_axes(mesh):
    context_parallel(build(linear.Config()), init_device_mesh("cpu", (1, 2)))


def of_few_tokens(mesh):
    shard(torch.zeros(3, 1), mesh)


def of_few_packed_tokens(mesh):
    shard_packed(torch.tensor([0, 1]), mesh)


def of_wrong_bounds(mesh):
    shard_packed(torch.tensor([0, 5, 3]), mesh)


def of_other_batches(mesh, model, inputs, method):
    """One rank has more sequences than the other."""
    model = context_parallel(model, mesh, method=method)
    model(inputs[: 2 + mesh.get_local_rank()])


def packed_on_one_rank(mesh):
    model = context_parallel(build(linear.Config()), mesh)
    bounds = torch.tensor([0, 4, 9])
    model(draw(1, 9), cu_seqlens=bounds if mesh.get_local_rank() else None)


def packed_with_bounds_of_ones_own(mesh, cut):
    """Rank 1 has the bounds of its shard as a tensor; rank 0 those of `shard_packed`, or a tensor too."""
    model = context_parallel(build(linear.Config()), mesh)
    bounds = torch.tensor([0, 4, 5])
    layout = shard_packed(torch.tensor([0, 4, 10]), mesh) if cut and not mesh.get_local_rank() else bounds
    model(draw(1, 5), cu_seqlens=layout)


def of_long_sequences(mesh, model, inputs, layout):
    """At most one of the ranks has a token whose position is too late."""
    model = context_parallel(model, mesh)
    mask, bounds = layout.get("mask"), layout.get("cu_seqlens")
    shards = {} if mask is None else {"mask": shard(mask, mesh)}
    shards |= {} if bounds is None else {"cu_seqlens": shard_packed(bounds, mesh)}
    model(shard(inputs, mesh), **shards)


def of_other_methods(mesh):
    context_parallel(build(linear.Config()), mesh, method=("relay", "scan")[mesh.get_local_rank()])


def of_no_method(mesh):
    context_parallel(build(linear.Config()), mesh, method="ring")


def sent_on_rank(attention, method, tokens, options):
    """Bytes that this rank has sent in a forward and a backward pass over sequences."""
    mesh = init_device_mesh("cpu", (2,))
    model = context_parallel(build(attention, **options), mesh, method=method)
    model(shard(tokens, mesh)).sum().backward()
    return model.context_parallel.ranks.bytes_sent


@pytest.mark.parametrize("method", ["relay", "scan"])
@pytest.mark.parametrize("attention", [*MECHANISMS[:11], MECHANISMS[12]], ids=mechanism)
def test_what_a_rank_sends_does_not_grow_with_the_length(two_ranks, attention, method):
    short, long, again = (
        two_ranks.call(sent_on_rank, attention, method, draw(2, t), options)
        for t, options in ((16, {}), (TIME, {}), (TIME, {"checkpoint_blocks": True}))
    )
    assert again == long
    assert short == long
    assert all(sent > 0 for sent in short)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = linear.Config().build(heads=2, dim=4, causal=True)


TOO_LONG = [  # a layout of 37 tokens, and how many its longest sequence has
    ({}, 37),
    ({"mask": torch.arange(TIME)[None] < 21}, 21),
    ({"cu_seqlens": torch.tensor([0, TIME])}, 37),
    ({"cu_seqlens": torch.tensor([0, 9, 30, TIME])}, 21),  # on both ranks
    ({"cu_seqlens": torch.tensor([0, 1, 12, 20, 28, TIME])}, 11),  # between the ends of the first shard
]


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (parallel, [nn.Linear(2, 2)], "Linear has no lintra.nn.AttentionLayer"),
        (parallel, [Bare()], "attention must be within a lintra.nn.AttentionLayer, got Bare"),
        (parallel, [AttentionLayer(8, linear.Config(), heads=2, causal=False)], "attention must be causal"),
        (
            parallel,
            [build(lsh.Config())],
            "cannot hand on its state: attention 'lsh' lets later tokens decide",
        ),
        (
            parallel,
            [encoder.Config(inputs=3, causal=True, layers=1, heads=2, width=16).build()],
            "model must be a Decoder or a module around AttentionLayer, got Encoder",
        ),
        (of_other_sizes, [], r"the model must be the same on all ranks, but on \[1\] it is not"),
        (of_other_settings, [], r"the model must be the same on all ranks, but on \[1\] it is not"),
        (of_two_axes, [], "mesh must have one axis"),
        (of_few_tokens, [], "a sequence needs a token for each of 2 ranks, got 1"),
        (of_few_packed_tokens, [], "a sequence needs a token for each of 2 ranks, got 1"),
        (of_wrong_bounds, [], "cu_seqlens must begin with 0 and not decrease"),
        (of_other_methods, [], r"the model must be the same on all ranks, but on \[1\] it is not"),
        (of_no_method, [], "method must be 'auto', 'relay' or 'scan', got 'ring'"),
        *(
            (of_other_batches, [model, inputs, method], "shards of the same sequences, got 2 on rank 0, 3 on")
            for model, inputs in (
                (build(linear.Config()), draw(3)),
                (Network(), torch.zeros(3, 8, 8).double()),
            )
            for method in ("relay", "scan")
        ),
        *(
            (
                of_long_sequences,
                [build(linear.Config(), position="learned", max_length=tokens - 1), draw(1), layout],
                f"learned positions of max_length={tokens - 1} reach .* tokens, got token {tokens}",
            )
            for layout, tokens in TOO_LONG
        ),
        (
            of_long_sequences,
            [build(cosformer.Config(max_length=20)), draw(2), {}],
            "a sequence may have max_length=20 tokens, got 37",
        ),
        *(
            (
                packed_with_bounds_of_ones_own,
                [cut],
                rf"need cu_seqlens=shard_packed\(cu_seqlens, mesh\), .* ranks \[{'' if cut else '0, '}1\]",
            )
            for cut in (False, True)
        ),
        (packed_on_one_rank, [], r"packed sequences or none, got them on ranks \[1\] alone"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(two_ranks, make, arguments, message):
    for found in two_ranks.call(refused_on_rank, make, arguments):
        assert re.search(message, found), found


@pytest.mark.slow
def test_the_example_prints_the_losses_of_one_process():
    example = [
        str(Path(__file__).parents[2] / "examples" / "long_sequence.py"),
        "--steps",
        "3",
        "--tokens",
        "301",
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = [
        subprocess.run([*start, *example], capture_output=True, text=True, check=True).stdout
        for start in ([sys.executable], torchrun)
    ]
    assert said[0] == said[1]
    assert len(said[0].splitlines()) == 3


@pytest.mark.slow
@kinds
def test_four_ranks(four_ranks, options):
    compare(four_ranks, build(**options))
    compare(four_ranks, build(**options), HOLES)
    compare(four_ranks, build(**options), cu_seqlens=PACKED, b=1)


@pytest.mark.slow
@pytest.mark.parametrize("attention", LONG, ids=["softmax", "longformer", "delta"])
def test_windows_over_several_of_four_ranks(four_ranks, attention):
    compare(four_ranks, build(attention), PADDED.flip(1))
    for bounds in ([0, TIME], [0, 33, TIME], [0, 12, 14, 16, TIME]):
        compare(four_ranks, build(attention), cu_seqlens=torch.tensor(bounds), b=1)


@pytest.mark.slow
@each
def test_every_mechanism_on_four_ranks(four_ranks, attention):
    compare(four_ranks, build(attention), PADDED)
    compare(four_ranks, build(attention), cu_seqlens=PACKED, b=1)


def steps_on_rank(model, method, count, batch):
    """The gradients of each of several steps, and the number of messages still held after each."""
    mesh = init_device_mesh("cpu", (2,))
    model = context_parallel(model, mesh, method=method)
    tokens, targets = (shard(x, mesh) for x in batch)
    found = []
    for _ in range(count):
        model.zero_grad()
        gradients = results(model, tokens, targets, torch.ones_like(tokens, dtype=torch.bool), mesh)[1]
        found.append((gradients, sum(map(len, ranks._under_way.values()))))
    return found


@pytest.mark.parametrize("method", ["relay", "scan"])
def test_layers_below_that_do_not_learn_change_nothing_in_any_step(two_ranks, method):
    """Rank 0 receives even a state gradient that it does not need; else it would take it for the next one."""
    model = build((linear.Config(), softmax.Config()))
    model.embedding.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    targets = draw()
    batch = model.shift(targets), targets
    whole = copy.deepcopy(model)
    expected = results(whole, *batch, torch.ones_like(targets, dtype=torch.bool))[1]
    for steps in two_ranks.call(steps_on_rank, model, method, 3, batch):
        for gradients, _ in steps:
            for name, gradient in gradients.items():
                assert_close(gradient, expected[name], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "attention", [softmax.Config(), delta.Config(), bigbird.Config(block=4)], ids=mechanism
)
def test_what_was_sent_is_let_go_of(two_ranks, attention):
    model, targets = build(attention), draw()
    for steps in two_ranks.call(steps_on_rank, model, "auto", 6, (model.shift(targets), targets)):
        held = [count for _, count in steps]
        assert held[2:] == [held[2]] * 4


def of_other_weights(mesh):
    model = build(linear.Config())
    model.head.weight.data.add_(mesh.get_local_rank())
    context_parallel(model, mesh)


def of_other_mechanisms(mesh):
    context_parallel(build((linear, lsh)[mesh.get_local_rank()].Config()), mesh)


def test_a_mechanism_that_is_refused_on_one_rank_is_refused_on_all(two_ranks):
    for told in two_ranks.call(refused_on_rank, of_other_mechanisms, ()):
        assert "the model must be the same on all ranks" in told


def test_models_of_other_weights_are_refused_on_all_ranks(two_ranks):
    for told in two_ranks.call(refused_on_rank, of_other_weights, ()):
        assert (
            "seed all ranks alike, or load one checkpoint: the model's numbers must be the same on all"
            in told
        )
        assert "head.weight is" in told


def twice_on_rank(model, batch):
    mesh = init_device_mesh("cpu", (2,))
    model = context_parallel(model, mesh, method="scan")
    tokens, targets = (shard(x, mesh) for x in batch)
    loss = torch.nn.functional.cross_entropy(model(tokens).mT, targets, reduction="sum")
    found = []
    for retain in (True, False):
        model.zero_grad()
        loss.backward(retain_graph=retain)
        reduce_gradients(model, mesh)
        found.append({name: x.grad.clone() for name, x in model.named_parameters()})
    return found


def test_blocks_are_recomputed_for_each_backward(two_ranks):
    model, targets = build(delta.Config(), checkpoint_blocks=True), draw()
    for first, second in two_ranks.call(twice_on_rank, model, (model.shift(targets), targets)):
        assert_close(first, second)


def recomputed_on_rank(x, method):
    mesh = init_device_mesh("cpu", (2,))
    model = context_parallel(Network(), mesh, method=method)
    x = shard(x, mesh)
    y = checkpoint(model.layers[0], x, use_reentrant=False)
    if method == "scan" or not mesh.get_local_rank():  # the first rank waits for the gradient of the last
        return None if method == "relay" else y.square().sum().backward()
    with pytest.raises(ValueError, match=r"cannot be computed again in the backward: .* needs method='scan'"):
        y.square().sum().backward()
    return None


@pytest.mark.parametrize("method", ["relay", "scan"])
def test_a_layer_that_waits_is_not_recomputed(two_ranks, method):
    two_ranks.call(recomputed_on_rank, torch.randn(1, 8, 8, dtype=torch.float64), method)


def copied_on_rank(batch):
    mesh = init_device_mesh("cpu", (2,))
    model = context_parallel(build((delta.Config(), softmax.Config())), mesh, method="scan")
    tokens = shard(batch, mesh)
    with torch.no_grad():
        before = model(tokens)
        other = copy.deepcopy(model)
        model.head.weight.zero_()
        return before, other(tokens)


def test_a_copy_of_a_model_has_its_pieces_on_the_same_ranks(two_ranks):
    for before, after in two_ranks.call(copied_on_rank, draw()):
        assert torch.equal(before, after)


def hooked_on_rank(batch):
    model = build(linear.Config(), checkpoint_blocks=True)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    context_parallel(model, mesh, method="relay")
    model.blocks[0].register_forward_hook(lambda module, inputs, y: 2 * y)
    return model(shard(batch, mesh)).detach()


def test_forward_hooks_of_blocks_that_wait_for_a_state(two_ranks):
    model = build(linear.Config())
    model.blocks[0].register_forward_hook(lambda module, inputs, y: 2 * y)
    batch = torch.randint(0, N, (2, TIME))
    found = torch.cat(two_ranks.call(hooked_on_rank, batch), 1)
    assert_close(found, model(batch).detach(), rtol=1e-10, atol=1e-10)
