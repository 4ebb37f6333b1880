"""The laws of attention: equalities between two ways to compute one thing, and limits.

A law takes a `Case`, a mechanism in one configuration and mode, and raises AssertionError where it is broken.
`lintra.testing.check_attention` applies all that say something about a mechanism. Float64 unless said.
"""

# Laws call with lists of inputs, whose lengths no type knows.
# pyright: reportCallIssue=false, reportArgumentType=false

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lintra.attention import Attention, Capabilities, leaves, map_state
from lintra.ops.layout import Layout
from lintra.ops.padding import expand_mask
from lintra.ops.rope import RotaryEmbedding

BATCH, TIME, DIM, VALUE_DIM = 2, 19, 6, 4
EXACT: dict[str, Any] = {
    "rtol": 1e-9,
    "atol": 1e-11,
}  # float64; sums of about 1e2 terms taken in another order


@dataclass(frozen=True)
class Case:
    """One mechanism in one configuration and mode."""

    name: str
    config: Any
    causal: bool
    heads: int = 4
    kv_heads: int = 2
    rotary: bool = False
    value_dim: int = VALUE_DIM
    time: int = TIME
    batch: int = BATCH
    dim: int = DIM
    seed: int = 0

    def __str__(self) -> str:
        mode = "causal" if self.causal else "bidirectional"
        return f"{self.name}-{mode}{'-rotary' if self.rotary else ''}-{self.config}".replace(" ", "")

    def build(self, **shape) -> Attention:
        torch.manual_seed(1)
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "dim": self.dim, "value_dim": self.value_dim}
        return self.config.build(causal=self.causal, **sizes | shape).double()

    def possible(self) -> bool:
        """Return whether this mode can be built; what cannot is refused with a ValueError."""
        try:
            attention = self.build()
        except ValueError:
            return False
        return not self.rotary or attention.rope_dim > 0

    def draw(
        self, time: int | None = None, seed: int = 0, dtype: torch.dtype = torch.float64
    ) -> list[Tensor]:
        """q, k, v and what else the mechanism reads [b t width], in its order."""
        time = self.time if time is None else time
        generator = torch.Generator().manual_seed(self.seed + seed)
        attention = self.build()
        shapes = [(self.heads, self.dim), (self.kv_heads, self.dim), (attention.value_heads, self.value_dim)]
        shapes += [(width,) for width in extra_inputs(self).values()]
        sampled = [
            torch.randn(self.batch, time, *shape, generator=generator, dtype=torch.float64).to(dtype)
            for shape in shapes
        ]
        if attention.shared_key:
            sampled[1] = sampled[0].clone()
        return [x.requires_grad_() for x in sampled]

    def fits(self, time: int) -> bool:
        """Return whether sequences of that length go."""
        longest = getattr(self.config, "max_length", None)
        return longest is None or longest >= time

    def sized(self, time: int) -> int:
        """A length that a law names, or the longest there is where the case is a small one."""
        return time if self.time >= TIME else min(time, self.time)

    def masks(self) -> list[Tensor]:
        """`some_masks` of its sizes."""
        return some_masks(self.time, self.batch)

    def rope(self, first: int, time: int, mask: Tensor | None = None) -> RotaryEmbedding | None:
        if not self.rotary:
            return None
        here = torch.ones(self.batch, time, dtype=torch.bool) if mask is None else mask
        return RotaryEmbedding(first + here.cumsum(1) - 1, 100.0)


@cache
def can(case: Case) -> Capabilities:
    """Return what the mechanism declares in this configuration."""
    return case.build().can


@cache
def extra_inputs(case: Case) -> dict[str, int]:
    """Return what the mechanism takes beyond q, k, v: name -> width."""
    return case.build().extra_inputs()


@cache
def outputs(case: Case) -> tuple[int, int]:
    """Return the heads of y and their width."""
    attention = case.build()
    return attention.out_heads, attention.value_dim


def gradients(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return the gradients of a sum of y with fixed, unequal weights."""
    found = torch.autograd.grad(weighted(y), inputs, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


def weighted(y: Tensor) -> Tensor:
    return (y * torch.arange(1, y.numel() + 1, dtype=y.dtype, device=y.device).sin().reshape(y.shape)).sum()


def raises(kind: type[Exception], pattern: str, call: Callable[..., object], *args, **options) -> None:
    """Assert that a call raises an exception of this kind, whose text has the pattern in it."""
    try:
        call(*args, **options)
    except kind as error:
        said = str(error)
    else:
        raise AssertionError(f"{kind.__name__} was not raised")
    assert re.search(pattern, said), f"another message: {said}"


def same_states(one: object, other: object) -> None:
    for a, b in zip(leaves(one), leaves(other), strict=True):
        assert_close(a, b, **EXACT)


def some_masks(time: int = TIME, batch: int = BATCH) -> list[Tensor]:
    """Padding at the right, at the left, holes; never the whole of a sample."""
    places, some, few = torch.arange(time), min(5, time - 1), min(3, time)
    holes = torch.rand(batch, time, generator=torch.Generator().manual_seed(3)) > 0.4
    holes[:, time // 2] = True
    return [
        torch.stack((places < time - some, places < few))[torch.arange(batch) % 2],
        torch.stack((places >= some, places >= time - few))[torch.arange(batch) % 2],
        holes,
    ]


def forward(case: Case, attention: Attention, *inputs: Tensor, mask=None) -> Tensor:
    q, k, v, *rest = inputs
    named = dict(zip(extra_inputs(case), rest, strict=True))
    return attention(q, k, v, mask=mask, rope=case.rope(0, q.shape[1], mask), **named)


def extend(
    case: Case, attention: Attention, inputs: list[Tensor], state, mask=None, rope=None, stepped: bool = False
):
    """`extend`, or `extend_by_steps`."""
    q, k, v, *rest = inputs
    named = dict(zip(extra_inputs(case), rest, strict=True))
    call = partial(extend_by_steps, attention) if stepped else attention.extend
    return call(q, k, v, state, mask=mask, rope=rope, **named)


def extend_by_steps(attention: Attention, *args, **options):
    """`extend` by the loop over the recurrence that the base class has."""
    with patch.object(attention, "_extend", partial(Attention._extend, attention)):
        return attention.extend(*args, **options)


def some_lengths(case: Case) -> list[int]:
    """One token, two, and as many as a block of the parallel form has, one less, one more and three of them;
    where a configuration names no small block, one of 16, as the native sum has."""
    named = (getattr(case.config, name, None) for name in ("chunk", "block", "segment", "landmarks"))
    block = next((size for size in named if size is not None and 1 < size <= 16), 16)
    lengths = {case.sized(n) for n in (1, 2, block - 1, block, block + 1, case.time, 3 * block + 5)}
    return [time for time in sorted(lengths) if case.fits(time)]


def equals_its_definition(case: Case, dense) -> None:
    """The parallel form is the dense N x N definition, values and gradients, at any length."""
    attention = case.build()
    for time in some_lengths(case):
        inputs = case.draw(time)
        everything = [*inputs, *attention.parameters()]
        y, expected = forward(case, attention, *inputs), dense(attention, *inputs)
        assert_close(y, expected, **EXACT)
        assert_close(gradients(y, everything), gradients(expected, everything), **EXACT)


def second_derivatives_are_those_of_its_definition(case: Case, dense) -> None:
    """A gradient has a gradient, by PyTorch's own operators: native kernels say that they have none."""
    case = replace(case, value_dim=case.dim)  # what PyTorch's fused kernels take
    if hasattr(case.config, "impl"):
        case = replace(case, config=replace(case.config, impl="torch"))
    attention, found = case.build(), []
    inputs = case.draw(case.sized(8 if case.fits(8) else 5))
    for form in (partial(forward, case), dense):
        y = form(attention, *inputs).square()
        first = torch.autograd.grad(weighted(y), inputs, create_graph=True, materialize_grads=True)
        found.append(gradients(torch.cat([g.flatten() for g in first]), inputs))
    # Nystromformer's is that of an inverse, three times as ill-conditioned as its matrix in digits.
    assert_close(*found, rtol=1e-6, atol=1e-8)


def some_cuts(time: int) -> list[tuple[int, ...]]:
    """Ways to cut a sequence: at its ends, in the middle, into single tokens among longer pieces."""
    cuts = [(0, time), (1, time - 1), (7, time - 7), (time - 1, 1), (3, 1, 1, 9, time - 14)]
    return [each for each in cuts if min(each) >= 0]


def parallel_is_recurrent(case: Case) -> None:
    """forward = the recurrence step by step = split anywhere and resumed, final states included."""
    attention, inputs = case.build(), case.draw()
    whole = forward(case, attention, *inputs)
    whole_gradients = gradients(whole, inputs)
    state = attention.start(case.batch, dtype=torch.float64)
    rope = case.rope(0, case.time)
    stepped, stepped_state = extend(case, attention, inputs, state, rope=rope, stepped=True)
    assert_close(stepped, whole, **EXACT)
    assert_close(gradients(stepped, inputs), whole_gradients, **EXACT)
    for cuts in some_cuts(case.time):
        state, first, ys = attention.start(case.batch, dtype=torch.float64), 0, []
        for size in cuts:
            part = [x[:, first : first + size] for x in inputs]
            y, state = extend(case, attention, part, state, rope=case.rope(first, size))
            ys.append(y)
            first += size
        assert_close(torch.cat(ys, 1), whole, **EXACT)
        assert_close(gradients(torch.cat(ys, 1), inputs), whole_gradients, **EXACT)
        same_states(state, stepped_state)


def final_state_has_gradients(case: Case) -> None:
    """A state is differentiable in its tokens, with the same gradients split or whole."""
    attention, inputs = case.build(), case.draw()

    def of_state(cut: int) -> list[Tensor]:
        state = attention.start(case.batch, dtype=torch.float64)
        for piece in (slice(0, cut), slice(cut, case.time)):
            rope = case.rope(piece.start, piece.stop - piece.start)
            _, state = extend(case, attention, [x[:, piece] for x in inputs], state, rope=rope)
        real = torch.cat([x.flatten() for x in leaves(state) if x.is_floating_point()])
        return gradients(real, inputs)

    assert_close(of_state(case.sized(5)), of_state(0), **EXACT)


def blind_to_the_future(case: Case) -> None:
    """Changing tokens from `cut` on leaves every earlier output as it was, and has no gradient there."""
    attention = case.build()
    for cut in {cut for cut in (1, 8, case.time - 1) if 0 < cut < case.time}:
        inputs = case.draw()
        before = forward(case, attention, *inputs)[:, :cut]
        later = [g[:, cut:] for g in gradients(before, inputs)]
        assert_close(later, [torch.zeros_like(x) for x in later], rtol=0, atol=0)
        changed = [torch.cat((x[:, :cut], 7.0 - 100 * x[:, cut:]), 1) for x in inputs]
        assert_close(forward(case, attention, *changed)[:, :cut], before, **EXACT)


def padding_changes_nothing(case: Case) -> None:
    """Whatever stands in padded places, NaN and inf included; there y is 0 and no gradient passes."""
    attention = case.build()
    for mask in case.masks():
        inputs = case.draw()
        clean = forward(case, attention, *inputs, mask=mask)
        clean_gradients = gradients(clean, inputs)
        assert (clean[~mask] == 0).all()
        for g in clean_gradients:
            assert (g[~mask] == 0).all()
        for junk in (torch.nan, torch.inf, -1e30):
            dirty = [x.detach().masked_fill(~expand_mask(mask, x), junk).requires_grad_() for x in inputs]
            y = forward(case, attention, *dirty, mask=mask)
            assert_close(y, clean, rtol=0, atol=0)
            assert_close(gradients(y, dirty), clean_gradients, rtol=0, atol=0)


def padded_places_hold_numbers(case: Case) -> None:
    """Below the edge of a network, where nothing is made zero: finite values and gradients there, whatever q,
    k and v are, so that no 0 of a later mask meets a NaN in a product."""
    attention = case.build()
    for mask in (*case.masks(), torch.zeros(case.batch, case.time, dtype=torch.bool)):
        inputs = case.draw()
        q, k, v, *rest = inputs
        named = dict(zip(extra_inputs(case), rest, strict=True))
        layout = Layout.of("q", q, mask)
        y = attention(q, k, v, layout=layout, rope=case.rope(0, case.time, mask), **named)
        assert y.isfinite().all()
        assert_close(layout.zero(y), forward(case, attention, *inputs, mask=mask), **EXACT)
        for g in gradients(y, inputs):
            assert g.isfinite().all()


def dropout_does_not_see_padding(case: Case) -> None:
    """Dropping weights in training: what stands in padded places still changes nothing."""
    attention = replace(case, config=replace(case.config, dropout=0.4)).build()

    def sampled(inputs: list[Tensor], mask: Tensor) -> Tensor:
        torch.manual_seed(2)
        return forward(case, attention.train(), *inputs, mask=mask)

    for mask in case.masks():
        inputs = case.draw()
        dirty = [x.detach().masked_fill(~expand_mask(mask, x), torch.nan).requires_grad_() for x in inputs]
        y, clean = sampled(dirty, mask), sampled(inputs, mask)
        assert not torch.allclose(clean, forward(case, attention.eval(), *inputs, mask=mask))
        assert_close(y, clean, rtol=0, atol=0)
        assert_close(gradients(y, dirty), gradients(clean, inputs), rtol=0, atol=0)


def padding_is_absence(case: Case) -> None:
    """A padded sequence gives what its real tokens alone give, states included; more padding does too."""
    attention, inputs = case.build(), case.draw()
    for mask in case.masks():
        y = forward(case, attention, *inputs, mask=mask)
        for i in range(case.batch):
            real = [x[i : i + 1, mask[i]].repeat_interleave(case.batch, 0) for x in inputs]
            alone = forward(case, attention, *real)
            assert_close(y[i, mask[i]], alone[0], **EXACT)
        longer = [torch.cat((x, x.new_full((case.batch, 9, *x.shape[2:]), torch.nan)), 1) for x in inputs]
        more = torch.cat((mask, mask.new_zeros(case.batch, 9)), 1)
        assert_close(forward(case, attention, *longer, mask=more)[:, : case.time], y, **EXACT)


def padding_between_states_changes_nothing(case: Case) -> None:
    """A masked piece after a state = its real tokens after that state."""
    attention, inputs, first = case.build(), case.draw(), case.draw(6, seed=9)
    state = attention.start(case.batch, dtype=torch.float64)
    _, state = extend(case, attention, first, state, rope=case.rope(0, 6))
    for mask in case.masks():
        y, after = extend(case, attention, inputs, state, mask, case.rope(6, case.time, mask))
        for i in range(case.batch):
            real = [x[i : i + 1, mask[i]] for x in inputs]
            rope = case.rope(6, real[0].shape[1])
            rope = None if rope is None else rope.moved(rope.position[:1])
            one = map_state(lambda x, i=i: x[i : i + 1], state)
            alone, alone_after = extend(case, attention, real, one, rope=rope)
            assert_close(y[i, mask[i]], alone[0], **EXACT)
            if attention.can.state == "constant":
                same_states(map_state(lambda x, i=i: x[i : i + 1], after), alone_after)


def padding_leaves_the_state(case: Case) -> None:
    """Extending by padded tokens in between changes nothing, as if they had not been there."""
    attention, inputs = case.build(), case.draw()
    after = case.draw(5, seed=9)
    for mask in case.masks():
        seen = mask.sum(1, keepdim=True)
        rope = RotaryEmbedding(seen + torch.arange(5), 100.0) if case.rotary else None
        state = attention.start(case.batch, dtype=torch.float64)
        _, state = extend(case, attention, inputs, state, mask, case.rope(0, case.time, mask))
        y, _ = extend(case, attention, after, state, rope=rope)
        for i in range(case.batch):
            real = [
                torch.cat((x[i : i + 1, mask[i]], a[i : i + 1]), 1).repeat_interleave(case.batch, 0)
                for x, a in zip(inputs, after, strict=True)
            ]
            assert_close(y[i], forward(case, attention, *real)[0, -5:], **EXACT)


def padding_alone_keeps_the_state(case: Case) -> None:
    """Tokens of which none is real: y is 0, and a state of constant size stays what it is, to the bit."""
    attention, inputs = case.build(), case.draw()
    state = attention.start(case.batch, dtype=torch.float64)
    _, state = extend(case, attention, inputs, state, rope=case.rope(0, case.time))
    nobody = torch.zeros(case.batch, case.time, dtype=torch.bool)
    large = [30 * x for x in inputs]
    y, after = extend(case, attention, large, state, nobody, case.rope(case.time, case.time, nobody))
    assert (y == 0).all()
    assert_close(leaves(after), leaves(state), rtol=0, atol=0)


def packed(
    case: Case, lengths: list[int], seed: int = 0
) -> tuple[list[Tensor], Tensor, RotaryEmbedding | None]:
    """Inputs [1 t ...] of sequences of these lengths in a row, cu_seqlens, a rotation that starts again."""
    inputs = [x[:1].detach().requires_grad_() for x in case.draw(sum(lengths), seed)]
    position = torch.cat([torch.arange(length) for length in lengths])[None]
    rope = RotaryEmbedding(position, 100.0) if case.rotary else None
    return inputs, torch.tensor([0, *lengths]).cumsum(0), rope


def one_by_one(case: Case, attention: Attention, inputs: list[Tensor], lengths: list[int]) -> list[Tensor]:
    """Return what each sequence of a packed batch gives alone."""
    q, k, v, *rest = (x.split(lengths, 1) for x in inputs)
    found = []
    for i, length in enumerate(lengths):
        rope = RotaryEmbedding(torch.arange(length)[None], 100.0) if case.rotary else None
        named = {name: x[i] for name, x in zip(extra_inputs(case), rest, strict=True)}
        found.append(attention(q[i], k[i], v[i], rope=rope, **named))
    return found


def packed_is_each_alone(case: Case) -> None:
    """A row of sequences gives what each gives alone, values and gradients; a broken one stays alone."""
    attention = case.build()
    everything = list(attention.parameters())
    for named_lengths in ([7, 0, 1, case.time, 2], [5, 5], [0, 0], [case.time]):
        lengths = [case.sized(length) for length in named_lengths]
        inputs, cu_seqlens, rope = packed(case, lengths)
        named = dict(zip(extra_inputs(case), inputs[3:], strict=True))
        y = attention(*inputs[:3], cu_seqlens=cu_seqlens, rope=rope, **named)
        expected = torch.cat(one_by_one(case, attention, inputs, lengths), 1)
        assert_close(y, expected, **EXACT)
        if sum(lengths):
            found = gradients(y, inputs + everything)
            assert_close(found, gradients(expected, inputs + everything), **EXACT)
    lengths = [case.sized(7), case.sized(6), case.sized(6)]
    inputs, cu_seqlens, rope = packed(case, lengths)
    expected = one_by_one(case, attention, inputs, lengths)
    first, last = lengths[0], sum(lengths[:2])
    broken = [x.clone() for x in inputs]
    for x in broken:
        x[:, first:last] = torch.nan
    named = dict(zip(extra_inputs(case), broken[3:], strict=True))
    y = attention(*broken[:3], cu_seqlens=cu_seqlens, rope=rope, **named)
    assert_close(torch.cat((y[:, :first], y[:, last:]), 1), torch.cat(expected[::2], 1), **EXACT)


def packed_after_states(case: Case) -> None:
    """Two rows, one after the other: each sequence continues from its own state, values and gradients."""
    attention = case.build()
    first, second = ([case.sized(length) for length in each] for each in ([7, 0, 3, 4], [2, 5, 0, 1]))
    start = attention.start(len(first), dtype=torch.float64)
    state, ys, rows = start, [], []
    for lengths in (first, second):
        inputs, cu_seqlens, rope = packed(case, lengths, seed=len(rows))
        if rope is not None and rows:
            seen = torch.tensor(first).repeat_interleave(torch.tensor(second))
            rope = rope.moved(rope.position + seen)
        named = dict(zip(extra_inputs(case), inputs[3:], strict=True))
        y, state = attention.extend(*inputs[:3], state, cu_seqlens=cu_seqlens, rope=rope, **named)
        ys.append(y)
        rows.append(inputs)
    split = [
        [x.split(lengths, 1) for x in inputs] for lengths, inputs in zip((first, second), rows, strict=True)
    ]
    whole = [[torch.cat((a[i], b[i]), 1) for a, b in zip(*split, strict=True)] for i in range(len(first))]
    states, expected = [], ([], [])
    for i, inputs in enumerate(whole):
        empty = map_state(lambda x: x[:1], start)
        rope = RotaryEmbedding(torch.arange(inputs[0].shape[1])[None], 100.0) if case.rotary else None
        y, after = extend(case, attention, inputs, empty, rope=rope)
        for part, found in zip(y.split([first[i], second[i]], 1), expected, strict=True):
            found.append(part)
        states.append(after)
    expected = [torch.cat(found, 1) for found in expected]
    if not attention.can.lookahead:
        assert_close(ys, expected, **EXACT)
        everything = rows[0] + rows[1]
        assert_close(
            gradients(torch.cat(ys, 1), everything),
            gradients(torch.cat(expected, 1), everything),
            **EXACT,
        )
    if attention.can.state == "constant":
        for i, after in enumerate(states):
            same_states(map_state(lambda x, i=i: x[i : i + 1], state), after)


def nothing_to_attend_to_gives_zero(case: Case) -> None:
    """A sample without a real token: 0, not NaN, and no gradient."""
    attention, inputs = case.build(), case.draw()
    mask = torch.ones(case.batch, case.time, dtype=torch.bool)
    mask[0] = False
    y = forward(case, attention, *inputs, mask=mask)
    assert (y[0] == 0).all()
    for g in gradients(y, inputs):
        assert (g[0] == 0).all()
        assert g.isfinite().all()
    if not case.causal and attention.can.cross:
        read = attention.cross_attend(inputs[0], attention.encode_memory(*inputs[1:3], mask))
        assert (read[0] == 0).all()
        for g in gradients(read, inputs):
            assert (g[0] == 0).all()
            assert g.isfinite().all()


def cross_is_the_same_sum(case: Case) -> None:
    """Cross-attention to the sequence's own keys is the bidirectional form; any lengths go."""
    attention, (q, k, v) = case.build(), case.draw()
    assert_close(attention.cross_attend(q, attention.encode_memory(k, v)), attention(q, k, v), **EXACT)
    few = attention.cross_attend(q[:, :3], attention.encode_memory(k, v))
    if attention.can.joint_queries:
        assert few.shape == (*q[:, :3].shape[:2], *outputs(case))
    else:
        assert_close(few, attention(q, k, v)[:, :3], **EXACT)
    fewer = [x[:, :7] for x in (k, v)]
    many = attention.cross_attend(q, attention.encode_memory(*fewer))
    assert many.isfinite().all()
    if not attention.can.joint_queries:
        assert_close(many[:, :7], attention(q[:, :7], *fewer), **EXACT)
        if not attention.can.placed_queries:
            assert_close(many[:, -7:], attention(q[:, -7:], *fewer), **EXACT)
    mask = case.masks()[2]
    y = attention.cross_attend(q, attention.encode_memory(k, v, mask), mask)
    assert_close(y, attention(q, k, v, mask=mask), **EXACT)
    dirty = [x.masked_fill(~expand_mask(mask, x), torch.nan) for x in (q, k, v)]
    again = attention.cross_attend(dirty[0], attention.encode_memory(*dirty[1:], mask), mask)
    assert_close(again, y, rtol=0, atol=0)


def runs_on_meta(case: Case) -> None:
    """Tensors without numbers, a mask among them: shapes decide all, so that no forward waits for a value."""
    attention, inputs = case.build().to("meta"), [x.to("meta") for x in case.draw()]
    inputs[1] = inputs[0] if attention.shared_key else inputs[1]
    masks = [None, case.masks()[2].to("meta")]
    for mask in masks if not case.rotary else masks[1:]:
        y = forward(case, attention, *inputs, mask=mask)
        assert (y.device.type, y.shape) == ("meta", (case.batch, case.time, *outputs(case)))


def a_sample_does_not_see_its_neighbours(case: Case) -> None:
    """Alone, or in a batch with extreme or broken neighbours: the same, values and gradients."""
    attention, inputs = case.build(), case.draw()
    for i in range(len(inputs[0])):
        alone = forward(case, attention, *inputs)[i]
        expected = [g[i] for g in gradients(alone, inputs)]
        for neighbour in (1e6, torch.nan):
            batch = [among(x, i, neighbour) for x in inputs]
            y = forward(case, attention, *batch)[i]
            assert_close(y, alone, **EXACT)
            assert_close([g[i] for g in gradients(y, batch)], expected, **EXACT)


def among(x: Tensor, i: int, neighbour: float) -> Tensor:
    """Return x with all samples but number i full of a number."""
    others = torch.arange(len(x), device=x.device) != i
    return torch.where(others.reshape(-1, *[1] * (x.dim() - 1)), neighbour, x)


def leaves_the_random_generator_alone(case: Case) -> None:
    """A forward draws nothing from the global generator."""
    attention, inputs = case.build(), case.draw()
    before = torch.get_rng_state()
    gradients(forward(case, attention, *inputs), inputs)
    assert torch.equal(torch.get_rng_state(), before)


def never_mutates_a_state(case: Case) -> None:
    """A state may be used again: two continuations from one state are the same."""
    attention, inputs = case.build(), case.draw()
    with torch.no_grad():
        rope, more = case.rope(0, case.time), case.rope(case.time, 1)
        state = attention.start(case.batch, dtype=torch.float64)
        _, state = extend(case, attention, inputs, state, rope=rope)
        kept = map_state(torch.clone, state)
        token = [x[:, :1] for x in inputs]
        first, after = extend(case, attention, token, state, rope=more)
        second, _ = extend(case, attention, token, state, rope=more)
        extend(case, attention, token, after, rope=more)
        same_states(state, kept)
        assert torch.equal(first, second)


def states_and_memories_are_copies(case: Case) -> None:
    """Whatever is written into q, k, v, a mask or positions after a call, the state it left stays; so does
    the memory of cross-attention. A buffer that is used for every token, say."""
    attention = case.build()
    for time, masked, stepped in (
        (case.time, True, False),
        (case.time, False, False),
        (1, False, False),
        (1, False, True),
    ):
        inputs = [x.detach() for x in case.draw(time)]
        mask = torch.ones(case.batch, time, dtype=torch.bool) if masked else None
        rope = case.rope(0, time)
        written = [*inputs, *(x for x in (mask, rope and rope.position) if isinstance(x, Tensor))]
        made = []
        if keeps_state(case):
            state = attention.start(case.batch, dtype=torch.float64)
            made.append(extend(case, attention, inputs, state, mask, rope, stepped)[1])
        if cross(case):
            made.append(attention.encode_memory(*inputs[1:3], mask))
        expected = map_state(torch.clone, tuple(made))
        for x in written:
            x.copy_(~x if x.dtype == torch.bool else x + 7)
        for x, y in zip(leaves(tuple(made)), leaves(expected), strict=True):
            assert torch.equal(x, y)


def states_of_another_dtype_are_refused(case: Case) -> None:
    """A state must be as `start` makes it for the inputs; else it would err late, or round."""
    for dtype, other in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
        attention, inputs = case.build().to(dtype), [x.detach() for x in case.draw(dtype=dtype)]
        rope, more = case.rope(0, case.time), case.rope(case.time, 1)
        _, state = extend(case, attention, inputs, attention.start(case.batch, dtype=dtype), rope=rope)
        wrong = map_state(lambda x, other=other: x.to(other) if x.is_floating_point() else x, state)
        token = [x[:, :1] for x in inputs]
        for given, turn, stepped in ((inputs, rope, False), (token, more, False), (token, more, True)):
            message = f"state.* must .*{dtype}.*got {other}"
            raises(TypeError, message, extend, case, attention, given, wrong, rope=turn, stepped=stepped)


def states_can_be_indexed(case: Case) -> None:
    """Beam search is an index: reordering a state reorders what follows."""
    attention, inputs = case.build(), case.draw()
    rope, more = case.rope(0, case.time), case.rope(case.time, 1)
    state = attention.start(case.batch, dtype=torch.float64)
    _, state = extend(case, attention, inputs, state, rope=rope)
    order = torch.arange(case.batch).flip(0)
    token = [x[:, :1] for x in inputs]
    y, _ = extend(case, attention, token, state, rope=more)
    reordered = map_state(lambda x: x[order], state)
    swapped, _ = extend(case, attention, [x[order] for x in token], reordered, rope=more)
    assert_close(swapped, y[order], **EXACT)


def parameters_and_buffers_are_saved(case: Case) -> None:
    """Another instance with the state_dict of the first gives what the first gives."""
    attention, inputs = case.build(), case.draw()
    other = case.build()
    attention.redraw(torch.Generator().manual_seed(7))
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter += torch.randn_like(parameter)
    other.load_state_dict(attention.state_dict())
    assert_close(forward(case, other, *inputs), forward(case, attention, *inputs), **EXACT)


def grouped_heads_are_repeated_heads(case: Case) -> None:
    """Sharing keys and values among query heads = repeating them."""
    grouped, repeated = case.build(), case.build(kv_heads=case.heads)
    inputs = case.draw()
    group = case.heads // case.kv_heads
    with torch.no_grad():
        for many, few in zip(repeated.state_dict().values(), grouped.state_dict().values(), strict=True):
            many.copy_(few if many.shape == few.shape else few.repeat_interleave(group, 0))
    values = repeated.value_heads // grouped.value_heads  # 1 where there is a number of them by itself
    wide = [inputs[0], inputs[1].repeat_interleave(group, 2), inputs[2].repeat_interleave(values, 2)]
    for given, (name, width) in zip(inputs[3:], extra_inputs(case).items(), strict=True):
        # What is read for each key-value head is read for each head then.
        more = repeated.extra_inputs()[name] // width
        if more == 1:  # or for all of them
            wide.append(given)
        else:
            wide.append(given.unflatten(2, (case.kv_heads, -1)).repeat_interleave(more, 2).flatten(2))
    y = forward(case, grouped, *inputs)
    expected = forward(case, repeated, *wide)
    assert_close(y, expected, **EXACT)
    assert_close(gradients(y, inputs), gradients(expected, inputs), **EXACT)


def sixteen_bits_lose_no_more_than_the_textbook(case: Case, dense) -> None:
    """bf16 and fp16 in: off by at most twice the error of the textbook formula in that precision."""
    for dtype in (torch.bfloat16, torch.float16):
        attention, inputs = case.build(), [x.detach() for x in case.draw(case.sized(64), dtype=dtype)]
        # The parameters of both are those 16 bits can hold: the law is about the arithmetic.
        attention = attention.to(dtype).double()
        exact = dense(attention, *(x.double() for x in inputs))
        attention = attention.to(dtype)
        textbook = dense(attention, *inputs)
        y = forward(case, attention, *inputs)
        assert y.dtype == dtype
        error = (y.double() - exact).abs()
        allowed = (textbook.double() - exact).abs()
        assert error.max() <= 2 * allowed.max()
        assert error.mean() <= 2 * allowed.mean()


def autocast_rounds_nothing_that_is_added(case: Case) -> None:
    """On inputs that are bf16 already, autocast changes nothing: what is float32 without it stays so, and the
    recurrence is as near to `extend` as it is without. To the bit, for the arithmetic is the same."""
    attention, inputs = case.build().float(), [x.detach() for x in case.draw(dtype=torch.bfloat16)]

    def found(autocast: bool) -> list:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            every = [forward(case, attention, *inputs)]
            if keeps_state(case):
                state = attention.start(case.batch, dtype=torch.bfloat16)
                for stepped in (False, True):
                    rope = case.rope(0, case.time)
                    y, after = extend(case, attention, inputs, state, rope=rope, stepped=stepped)
                    every += [y, *leaves(after)]
            if cross(case):
                every.append(attention.cross_attend(inputs[0], attention.encode_memory(*inputs[1:3])))
            return every

    assert_close(found(True), found(False), rtol=0, atol=0)


def long_sequences_do_not_drift(case: Case) -> None:
    """65,536 tokens in float32 stay within 1e-4 of float64, relative to the largest output."""
    time = 65_536
    attention = case.build(heads=1, kv_heads=1)
    alone = replace(case, heads=1, kv_heads=1)
    inputs = [x.detach()[:1] for x in alone.draw(time)]
    single = [x.float() for x in inputs]
    if case.causal:
        exact = forward(alone, attention, *inputs)
        y = forward(alone, attention.float(), *single)
    else:
        few = [x[:, :16] for x in (inputs[0], single[0])]
        exact = attention.cross_attend(few[0], attention.encode_memory(*inputs[1:]))
        attention.float()
        y = attention.cross_attend(few[1], attention.encode_memory(*single[1:]))
    assert (y.double() - exact).abs().max() < 1e-4 * exact.abs().max()


def no_tokens_leave_the_state(case: Case) -> None:
    """Extending by no tokens, masked or in a row of empty sequences: no outputs, and a state as it was, which
    shares no memory with it."""
    attention, inputs = case.build(), case.draw()
    fresh, (mask, *_) = attention.start(case.batch, dtype=torch.float64), case.masks()
    states = [fresh]
    for each in (None, mask):
        _, state = extend(case, attention, inputs, fresh, each, case.rope(0, case.time, each))
        states.append(state)
    none, rope = [x[:, :0] for x in inputs], case.rope(0, 0)
    row = [x[:1] for x in none]
    named = dict(zip(extra_inputs(case), row[3:], strict=True))
    of_row = None if rope is None else rope.moved(rope.position[:1])
    for state in states:
        for each in (None, mask[:, :0]):
            y, after = extend(case, attention, none, state, each, rope)
            assert y.shape == (case.batch, 0, *outputs(case))
            same_states(after, state)
            before = {x.data_ptr() for x in leaves(state) if x.numel()}
            assert before.isdisjoint(x.data_ptr() for x in leaves(after))
        cu_seqlens = torch.zeros(case.batch + 1, dtype=torch.int64)
        y, after = attention.extend(*row[:3], state, cu_seqlens=cu_seqlens, rope=of_row, **named)
        assert y.shape == (1, 0, *outputs(case))
        same_states(after, state)


def constant_states_keep_no_tokens(case: Case) -> None:
    """The memory that a state of constant size holds on to after a long prompt is its own."""
    attention, inputs = case.build(), case.draw(time := 512)
    fresh = attention.start(case.batch, dtype=torch.float64)
    _, state = extend(case, attention, inputs, fresh, rope=case.rope(0, time))
    for x in leaves(state):
        assert x.untyped_storage().nbytes() == x.nbytes


def no_samples_have_states(case: Case) -> None:
    """A batch of none is extended, by several tokens and by one."""
    attention = case.build()
    state = attention.start(0, dtype=torch.float64)
    for first, time in ((0, 5), (5, 1), (6, 0), (6, 3)):
        rope = case.rope(first, time)
        rope = None if rope is None else rope.moved(rope.position[:0])
        y, state = extend(case, attention, [x[:0] for x in case.draw(time)], state, rope=rope)
        assert y.shape == (0, time, *outputs(case))


def empty_sequences_and_batches(case: Case) -> None:
    """No tokens, or no samples: outputs of that shape, and gradients that are empty, not missing."""
    attention, inputs = case.build(), case.draw()
    for part in (slice(0, 0), slice(None)):
        for rows in (slice(0, 0), slice(None)):
            few = [x[rows, part] for x in inputs]
            rope = None
            if case.rotary:
                rope = RotaryEmbedding(torch.arange(few[0].shape[1]).repeat(len(few[0]), 1), 100.0)
            y = attention(*few[:3], rope=rope, **dict(zip(extra_inputs(case), few[3:], strict=True)))
            assert y.shape == (*few[0].shape[:2], *outputs(case))
            assert any(g is not None for g in torch.autograd.grad(y.sum(), few, allow_unused=True))


def extremes_stay_finite(case: Case) -> None:
    """Inputs 30 times as large or a thousandth of it: no inf, no NaN, in values and gradients that the dtype
    has numbers for."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for size in (30.0, 1.0, 1e-3):
            attention = case.build()
            inputs = [(x.detach() * size).requires_grad_() for x in case.draw(dtype=dtype)]
            exact = [x.detach().double().requires_grad_() for x in inputs]
            y = forward(case, attention.double(), *exact)
            expected = [y, *gradients(y, exact)]
            y = forward(case, attention.to(dtype), *inputs)
            for found, x in zip([y, *gradients(y, inputs)], expected, strict=True):
                if x.numel() and x.abs().max() < torch.finfo(dtype).max / 2:
                    assert found.isfinite().all()


def training_is_evaluation(case: Case) -> None:
    """Without dropout both modes give the same, and so does a second call: nothing is sampled in between."""
    attention, inputs = case.build(), case.draw()
    y = forward(case, attention.train(), *inputs)
    assert_close(forward(case, attention.eval(), *inputs), y, rtol=0, atol=0)
    assert_close(forward(case, attention.train(), *inputs), y, rtol=0, atol=0)


def transforms_are_what_they_transform(case: Case) -> None:
    """torch.func: grad is the backward, a product of jvp is its product, vmap is the loop; of inputs, masks
    and parameters, with one transform in the other and with a mapped argument among others that are not."""
    attention = case.build()
    own = {name: x.detach() for name, x in attention.named_parameters()}

    def value(inputs: list[Tensor], parameters: dict[str, Tensor], mask: Tensor | None) -> Tensor:
        def called(*args, **named):
            return torch.func.functional_call(attention, parameters, args, named)

        return weighted(forward(case, called, *inputs, mask=mask))

    def backward(*given):
        numbers, form = tree_flatten(given[:2])
        numbers = [x.clone().requires_grad_() for x in numbers]
        y = value(*tree_unflatten(numbers, form), given[2])
        return tree_unflatten(torch.autograd.grad(y, numbers, materialize_grads=True), form)

    gradient = torch.func.grad(value, (0, 1))
    for masks in ((None, None), case.masks()[1:]):
        each = [
            ([x.detach() for x in case.draw(seed=seed)], {name: x * size for name, x in own.items()}, mask)
            for seed, size, mask in zip((0, 1), (1.0, 1.1), masks, strict=True)
        ]
        mapped = tree_map(lambda *x: None if x[0] is None else torch.stack(x), *each)
        found, expected = gradient(*each[0]), [backward(*given) for given in each]
        assert_close(found, expected[0], **EXACT)
        moved = torch.func.jvp(partial(value, mask=masks[0]), each[0][:2], each[1][:2])[1]
        pairs = zip(tree_flatten(found)[0], tree_flatten(each[1][:2])[0], strict=True)
        assert_close(moved, sum((g * x).sum() for g, x in pairs), **EXACT)
        over = tuple(None if x is None or x == {} else 0 for x in each[0])
        several = torch.vmap(gradient, over)(*mapped)
        assert_close(several, tree_map(lambda *x: torch.stack(x), *expected), **EXACT)
        for i in (i for i in range(3) if over[i] == 0):
            alone, given = [None] * 3, list(each[0])
            alone[i], given[i] = 0, mapped[i]
            loop = [value(*each[0][:i], x[i], *each[0][i + 1 :]) for x in each]
            assert_close(torch.vmap(value, tuple(alone))(*given), torch.stack(loop), **EXACT)


class Largest(TorchDispatchMode):
    """Watches how many numbers the largest tensor of a computation has."""

    numbers = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        found = function(*arguments, **keywords or {})
        for x in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(x, Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return found


def no_array_is_square(case: Case) -> None:
    """16,384 tokens, forward and backward: no tensor has more than a sixteenth of 16,384^2 numbers."""
    time = 16_384
    alone = replace(case, heads=1, kv_heads=1)
    attention = alone.build().float()
    inputs = [x.detach()[:1].requires_grad_() for x in alone.draw(time, dtype=torch.float32)]
    with Largest() as largest:
        gradients(forward(alone, attention, *inputs), inputs)
    assert largest.numbers <= time**2 // 16


def kept_for_backward(case: Case, attention: Attention, time: int) -> int:
    """The bytes that a forward of so many tokens keeps until the backward, shared memory once."""
    sizes = {}

    def keep(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    inputs = [x.detach()[:1].requires_grad_() for x in case.draw(time, dtype=torch.float32)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y = forward(case, attention, *inputs)  # as long as it lives, no address is given out again
    assert y.requires_grad
    return sum(sizes.values())


def memory_is_linear(case: Case) -> None:
    """Twice the tokens keep about twice the bytes for the backward."""
    alone = replace(case, heads=1, kv_heads=1)
    attention = alone.build().float()
    few, many = (kept_for_backward(alone, attention, time) for time in (2048, 4096))
    assert many < 2.3 * few  # sizes are rounded up to whole blocks


def always(case: Case) -> bool:
    return True


def recurrent(case: Case) -> bool:
    return keeps_state(case) and not can(case).lookahead


def keeps_state(case: Case) -> bool:
    return case.causal and can(case).recurrent


def cross(case: Case) -> bool:
    return not case.causal and not case.rotary and can(case).cross


def linear_cost(case: Case) -> bool:
    return (
        "t^2" not in can(case).cost and getattr(case.config, "impl", None) != "reference" and not case.rotary
    )


def long(case: Case) -> bool:
    """65,536 tokens are too many for what is quadratic; then 16 queries of all of them are looked at."""
    if case.causal:
        return linear_cost(case) and can(case).state == "constant"
    return cross(case) and not can(case).joint_queries and case.fits(65_536)


# What a law says nothing about. Definitions are written without positions: see the tests of rotary embedding.
APPLIES = {
    equals_its_definition: lambda case: not case.rotary,
    second_derivatives_are_those_of_its_definition: lambda case: not case.rotary,
    sixteen_bits_lose_no_more_than_the_textbook: lambda case: not case.rotary,
    parallel_is_recurrent: recurrent,
    final_state_has_gradients: recurrent,
    blind_to_the_future: lambda case: case.causal and not can(case).lookahead,
    padding_leaves_the_state: recurrent,
    padding_between_states_changes_nothing: keeps_state,
    padding_alone_keeps_the_state: lambda case: keeps_state(case) and can(case).state == "constant",
    packed_after_states: recurrent,
    cross_is_the_same_sum: cross,
    dropout_does_not_see_padding: lambda case: hasattr(case.config, "dropout") and not case.rotary,
    runs_on_meta: lambda case: getattr(case.config, "impl", None) != "native",
    transforms_are_what_they_transform: lambda case: getattr(case.config, "impl", None) != "native",
    never_mutates_a_state: keeps_state,
    states_and_memories_are_copies: lambda case: keeps_state(case) or cross(case),
    states_of_another_dtype_are_refused: keeps_state,
    states_can_be_indexed: keeps_state,
    no_tokens_leave_the_state: keeps_state,
    no_samples_have_states: keeps_state,
    grouped_heads_are_repeated_heads: lambda case: case.heads != case.kv_heads,
    long_sequences_do_not_drift: long,
    constant_states_keep_no_tokens: lambda case: (
        recurrent(case) and can(case).state == "constant" and case.fits(512)
    ),
    no_array_is_square: lambda case: linear_cost(case) and case.fits(16_384),
    memory_is_linear: lambda case: linear_cost(case) and case.fits(4096),
}
WITH_DEFINITION = [
    equals_its_definition,
    second_derivatives_are_those_of_its_definition,
    sixteen_bits_lose_no_more_than_the_textbook,
]
LAWS = [
    parallel_is_recurrent,
    final_state_has_gradients,
    blind_to_the_future,
    padding_changes_nothing,
    padded_places_hold_numbers,
    dropout_does_not_see_padding,
    padding_is_absence,
    padding_leaves_the_state,
    padding_between_states_changes_nothing,
    padding_alone_keeps_the_state,
    packed_is_each_alone,
    packed_after_states,
    nothing_to_attend_to_gives_zero,
    cross_is_the_same_sum,
    runs_on_meta,
    a_sample_does_not_see_its_neighbours,
    leaves_the_random_generator_alone,
    never_mutates_a_state,
    states_and_memories_are_copies,
    states_of_another_dtype_are_refused,
    states_can_be_indexed,
    parameters_and_buffers_are_saved,
    grouped_heads_are_repeated_heads,
    autocast_rounds_nothing_that_is_added,
    long_sequences_do_not_drift,
    no_tokens_leave_the_state,
    no_samples_have_states,
    constant_states_keep_no_tokens,
    empty_sequences_and_batches,
    extremes_stay_finite,
    training_is_evaluation,
    transforms_are_what_they_transform,
    no_array_is_square,
    memory_is_linear,
]
