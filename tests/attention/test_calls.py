"""How any mechanism is built and called: with sizes that are integers, what it reads and nothing else."""

from dataclasses import replace

import pytest
import torch

from lintra import attention
from lintra.ops import RotaryEmbedding
from lintra.testing.laws import BATCH, Case, extend_by_steps, keeps_state
from tests.attention.test_laws import cases

MODES = [pytest.param(case, id=str(case)) for case in cases() if not case.rotary]


@pytest.mark.parametrize("case", MODES)
def test_an_unknown_keyword_is_refused(case: Case):
    q, k, v, *reads = case.draw()
    mechanism = case.build()
    given = dict(zip(mechanism.extra_inputs(), reads, strict=True))
    with pytest.raises(TypeError, match="glboal_mask"):
        mechanism(q, k, v, glboal_mask=torch.ones(q.shape[:2], dtype=torch.bool), **given)


@pytest.mark.parametrize("name", attention.names())
@pytest.mark.parametrize("size", ["heads", "kv_heads", "dim", "value_dim"])
def test_sizes_are_whole_numbers(name, size):
    causal = attention.mechanism(name).can.causal
    with pytest.raises(TypeError, match=rf"^{size} must be int, got 2\.0$"):
        attention.load(name).Config().build(**{"heads": 4, "dim": 4, "causal": causal, size: 2.0})


@pytest.mark.parametrize("case", [x for x in MODES if keeps_state(x.values[0])])
def test_a_step_takes_a_state_of_its_own(case: Case):
    """Neither the state of another mechanism nor that of another batch."""
    mechanism = case.build()
    q, k, v, *reads = (x[:, :1] for x in case.draw())
    given = dict(zip(mechanism.extra_inputs(), reads, strict=True))
    state = mechanism.start(BATCH, dtype=torch.float64)
    mechanism.step(q, k, v, state, **given)
    with pytest.raises(TypeError, match=f"state must be a {type(state).__name__}, got tuple"):
        mechanism.step(q, k, v, tuple(state), **given)
    with pytest.raises(ValueError, match=r"state.* must be .* as start gives it"):
        mechanism.step(q, k, v, mechanism.start(1, dtype=torch.float64), **given)


@pytest.mark.parametrize("name", [x for x in attention.names() if attention.mechanism(x).can.recurrent])
def test_steps_under_autocast_take_the_state_of_the_last(name):
    torch.manual_seed(0)
    mechanism = attention.for_length(attention.load(name).Config, 8).build(heads=2, dim=8, causal=True)
    given = {x: torch.randn(2, 1, width) for x, width in mechanism.extra_inputs().items()}
    q, state = torch.randn(2, 1, 2, 8), mechanism.start(2)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            y, state = mechanism.step(q, q, q, state, **given)
    assert y.dtype == torch.bfloat16


def test_the_loop_over_steps_refuses_a_mask_where_the_state_grows():
    """Padding would leave a token out in only some of the samples."""
    kind = attention.load("softmax")
    built = kind.Config().build(heads=2, dim=4, causal=True)
    q, k, v = torch.randn(3, 1, 6, 2, 4)
    y, state = extend_by_steps(built, q, k, v, built.start(1))
    assert state.k.shape[1] == 6
    torch.testing.assert_close(y, built(q, k, v))
    with pytest.raises(NotImplementedError, match="a state that grows needs its own `extend`"):
        extend_by_steps(built, q, k, v, built.start(1), mask=torch.ones(1, 6, dtype=torch.bool))


@pytest.mark.parametrize("verb", ["forward", "extend", "step", "encode_memory", "cross_attend"])
def test_the_verbs_are_final(verb):
    """A mechanism cannot bypass the code that checks, pads and rotates."""
    with pytest.raises(TypeError, match=rf"Mine\.{verb} is final in Attention: write the hook _{verb}"):
        type("Mine", (attention.Attention,), {verb: lambda self: None})


@pytest.mark.parametrize("name", [x for x in attention.names() if attention.mechanism(x).can.cross])
def test_a_memory_of_other_heads_or_widths_is_refused(name):
    def built(**sizes):
        config = attention.for_length(attention.load(name).Config, 8)
        config = replace(config, window=0) if name == "longshort" else config
        mechanism = config.build(**{"heads": 4, "dim": 8, "causal": False, **sizes}).double()
        return mechanism, torch.randn(2, 8, mechanism.kv_heads, mechanism.dim, dtype=torch.float64)

    mechanism, k = built()
    q = torch.randn(2, 3, 4, 8, dtype=torch.float64)
    assert mechanism.cross_attend(q, mechanism.encode_memory(k, k)).shape == q.shape
    for sizes in ({"kv_heads": 2}, {"dim": 4}):
        other, k = built(**sizes)
        with pytest.raises(ValueError, match=r"^(memory|state)\..* must be"):
            mechanism.cross_attend(q, other.encode_memory(k, k))


@pytest.mark.parametrize(
    ("name", "options", "causal"),
    [
        ("aft", {"window": 2, "max_length": 8}, True),
        ("aft", {"window": 2, "max_length": 8}, False),
        ("longshort", {"window": 16}, True),
        ("nystromformer", {"conv": 3}, False),
    ],
)
def test_every_parameter_has_a_gradient_without_tokens(name, options, causal):
    """Training in several processes waits for all of them."""
    mechanism = attention.load(name).Config(**options).build(heads=2, dim=4, causal=causal)
    x = torch.zeros(1, 0, 2, 4, requires_grad=True)
    mechanism(x, x, x).sum().backward()
    assert [name for name, x in mechanism.named_parameters() if x.grad is None] == []


def test_an_empty_state_of_another_device_is_refused():
    mechanism = attention.load("softmax").Config().build(heads=1, dim=4, causal=True)
    q = torch.zeros(1, 2, 1, 4)
    with pytest.raises(TypeError, match=r"as start gives it, got torch\.float32 on meta"):
        mechanism.extend(q, q, q, mechanism.start(1, device="meta"))


def test_global_tokens_under_autocast_give_a_state_for_the_next_token():
    longformer = attention.load("longformer")
    mechanism = longformer.Config(window=2, global_tokens=2).build(heads=2, dim=8, causal=True)
    x, state = torch.randn(1, 1, 2, 8), mechanism.start(1)
    wide = dict.fromkeys(("global_q", "global_k", "global_v"), torch.randn(1, 1, 16))
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            y, state = mechanism.extend(x, x, x, state, **wide)
    assert y.dtype == torch.bfloat16


def test_a_rotation_of_other_tokens_is_refused():
    mechanism = attention.load("softmax").Config().build(heads=2, dim=4, causal=True)
    q = torch.zeros(3, 1, 2, 4)
    for shape in ((1, 9), (3, 9), (2, 1), (1,)):
        rope = RotaryEmbedding(torch.zeros(shape, dtype=torch.int64), 100.0)
        for call in (mechanism, lambda *x, **given: mechanism.step(*x, mechanism.start(3), **given)):
            with pytest.raises(ValueError, match=r"rope must have a position for each token, \[b=3 t=1\] or"):
                call(q, q, q, rope=rope)
    for shape in ((1, 1), (3, 1)):
        mechanism(q, q, q, rope=RotaryEmbedding(torch.zeros(shape, dtype=torch.int64), 100.0))


@pytest.mark.parametrize(
    "config", [attention.load("lsh").Config(), attention.load("rfa").Config(impl="torch")]
)
def test_a_token_of_zeros_has_a_gradient_that_can_be_differentiated(config):
    """It has no direction, so that one that is nearly 0 must not have a gradient of 1 / its length."""
    mechanism = config.build(heads=2, dim=4, causal=True)
    x = torch.randn(1, 6, 2, 4)
    x[:, 2] = 0
    x[:, 3] *= 1e-9
    x.requires_grad_()
    (first,) = torch.autograd.grad(mechanism(x, x, x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert first.norm(dim=-1).max() < 1e3
    assert second.isfinite().all()
