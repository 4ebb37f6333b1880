"""What every mechanism must obey: equalities between two ways to compute the same thing, and limits.

A law takes a `Case` and asserts. `tests/attention/test_laws.py` applies all of them to all mechanisms in the
folder; each mechanism's test file gives its variants and its dense definition. Float64 unless said.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.testing import assert_close

from lintra.attention import Attention, map_state
from lintra.ops.positions import Rotation

BATCH, TIME, DIM, VALUE_DIM = 2, 19, 6, 4
EXACT = {"rtol": 1e-9, "atol": 1e-11}  # float64; sums of about 1e2 terms taken in another order


@dataclass(frozen=True)
class Case:
    """One mechanism in one configuration and mode."""

    name: str
    config: object
    causal: bool
    heads: int = 4
    kv_heads: int = 2
    rotary: bool = False

    def __str__(self) -> str:
        mode = "causal" if self.causal else "bidirectional"
        return f"{self.name}-{mode}{'-rotary' if self.rotary else ''}-{self.config}".replace(" ", "")

    def build(self, **shape) -> Attention:
        torch.manual_seed(1)
        shape = {"heads": self.heads, "kv_heads": self.kv_heads, "dim": DIM, "value_dim": VALUE_DIM} | shape
        return self.config.build(causal=self.causal, **shape).double()

    def possible(self) -> bool:
        """Whether this mode can be built; what cannot is refused with a ValueError."""
        try:
            self.build()
        except ValueError:
            return False
        return True

    def draw(self, time: int = TIME, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [
            torch.randn(BATCH, time, heads, width, generator=generator, dtype=torch.float64)
            .to(dtype)
            .requires_grad_()
            for heads, width in ((self.heads, DIM), (self.kv_heads, DIM), (self.kv_heads, VALUE_DIM))
        ]

    def rotate(self, first: int, time: int, mask: Tensor | None = None) -> Rotation | None:
        if not self.rotary:
            return None
        here = torch.ones(BATCH, time, dtype=torch.bool) if mask is None else mask
        return Rotation(first + here.cumsum(1) - 1, 100.0)


def gradients(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Of a sum with fixed, unequal weights."""
    weights = torch.arange(1, y.numel() + 1, dtype=y.dtype).sin().reshape(y.shape)
    found = torch.autograd.grad((y * weights).sum(), inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


def leaves(state: object) -> list[Tensor]:
    found: list[Tensor] = []
    map_state(lambda x: found.append(x) or x, state)
    return found


def same_states(one: object, other: object) -> None:
    for a, b in zip(leaves(one), leaves(other), strict=True):
        assert_close(a, b, **EXACT)


def some_masks(time: int = TIME) -> list[Tensor]:
    """Padding at the right, at the left, holes; never the whole of a sample."""
    places = torch.arange(time)
    holes = torch.rand(BATCH, time, generator=torch.Generator().manual_seed(3)) > 0.4
    holes[:, time // 2] = True
    return [
        torch.stack((places < time - 5, places < 3)),
        torch.stack((places >= 5, places >= time - 3)),
        holes,
    ]


def forward(case: Case, attention: Attention, q: Tensor, k: Tensor, v: Tensor, mask=None) -> Tensor:
    return attention(q, k, v, mask=mask, rotate=case.rotate(0, q.shape[1], mask))


def equals_its_definition(case: Case, dense) -> None:
    """The parallel form is the dense N x N definition, values and gradients."""
    attention, inputs = case.build(), case.draw()
    parameters = list(attention.parameters())
    y, expected = attention(*inputs), dense(attention, *inputs)
    assert_close(y, expected, **EXACT)
    everything = inputs + parameters
    assert_close(gradients(y, everything), gradients(expected, everything), **EXACT)


def parallel_is_recurrent(case: Case) -> None:
    """forward = the recurrence step by step = split anywhere and resumed, final states included."""
    attention, inputs = case.build(), case.draw()
    whole = forward(case, attention, *inputs)
    whole_gradients = gradients(whole, inputs)
    state = attention.start(BATCH, dtype=torch.float64)
    stepped, stepped_state = Attention.extend(attention, *inputs, state, rotate=case.rotate(0, TIME))
    assert_close(stepped, whole, **EXACT)
    assert_close(gradients(stepped, inputs), whole_gradients, **EXACT)
    for cuts in ((0, TIME), (1, TIME - 1), (7, 12), (TIME - 1, 1), (3, 1, 1, 9, 5)):
        state, first, ys = attention.start(BATCH, dtype=torch.float64), 0, []
        for size in cuts:
            part = [x[:, first : first + size] for x in inputs]
            y, state = attention.extend(*part, state, rotate=case.rotate(first, size))
            ys.append(y)
            first += size
        assert_close(torch.cat(ys, 1), whole, **EXACT)
        assert_close(gradients(torch.cat(ys, 1), inputs), whole_gradients, **EXACT)
        same_states(state, stepped_state)


def final_state_has_gradients(case: Case) -> None:
    """What a state says about its tokens is differentiable, the same split or whole."""
    attention, inputs = case.build(), case.draw()

    def of_state(cut: int) -> list[Tensor]:
        state = attention.start(BATCH, dtype=torch.float64)
        for piece in (slice(0, cut), slice(cut, TIME)):
            rotate = case.rotate(piece.start, piece.stop - piece.start)
            _, state = attention.extend(*(x[:, piece] for x in inputs), state, rotate=rotate)
        real = torch.cat([x.flatten() for x in leaves(state) if x.is_floating_point()])
        return gradients(real, inputs)

    assert_close(of_state(5), of_state(0), **EXACT)


def blind_to_the_future(case: Case) -> None:
    """Changing tokens from `cut` on leaves every earlier output as it was, and has no gradient there."""
    attention = case.build()
    for cut in (1, 8, TIME - 1):
        inputs = case.draw()
        before = forward(case, attention, *inputs)[:, :cut]
        later = [g[:, cut:] for g in gradients(before, inputs)]
        assert_close(later, [torch.zeros_like(x) for x in later], rtol=0, atol=0)
        changed = [torch.cat((x[:, :cut], 7.0 - 100 * x[:, cut:]), 1) for x in inputs]
        assert_close(forward(case, attention, *changed)[:, :cut], before, **EXACT)


def padding_changes_nothing(case: Case) -> None:
    """Whatever stands in padded places, NaN and inf included; there y is 0 and no gradient passes."""
    attention = case.build()
    for mask in some_masks():
        inputs = case.draw()
        clean = forward(case, attention, *inputs, mask=mask)
        clean_gradients = gradients(clean, inputs)
        assert (clean[~mask] == 0).all()
        for g in clean_gradients:
            assert (g[~mask] == 0).all()
        for junk in (torch.nan, torch.inf, -1e30):
            dirty = [x.detach().masked_fill(~mask[..., None, None], junk).requires_grad_() for x in inputs]
            y = forward(case, attention, *dirty, mask=mask)
            assert_close(y, clean, rtol=0, atol=0)
            assert_close(gradients(y, dirty), clean_gradients, rtol=0, atol=0)


def padding_is_absence(case: Case) -> None:
    """A padded sequence gives what its real tokens alone give, states included; more padding does too."""
    attention, inputs = case.build(), case.draw()
    for mask in some_masks():
        y = forward(case, attention, *inputs, mask=mask)
        for i in range(BATCH):
            real = [x[i : i + 1, mask[i]].repeat(BATCH, 1, 1, 1) for x in inputs]
            alone = forward(case, attention, *real)
            assert_close(y[i, mask[i]], alone[0], **EXACT)
        longer = [torch.cat((x, torch.full_like(x[:, :9], torch.nan)), 1) for x in inputs]
        more = torch.cat((mask, mask.new_zeros(BATCH, 9)), 1)
        assert_close(forward(case, attention, *longer, mask=more)[:, :TIME], y, **EXACT)


def padding_between_states_changes_nothing(case: Case) -> None:
    """A masked piece after a state = its real tokens after that state."""
    attention, inputs, first = case.build(), case.draw(), case.draw(6, seed=9)
    state = attention.start(BATCH, dtype=torch.float64)
    _, state = attention.extend(*first, state, rotate=case.rotate(0, 6))
    for mask in some_masks():
        y, after = attention.extend(*inputs, state, mask=mask, rotate=case.rotate(6, TIME, mask))
        for i in range(BATCH):
            real = [x[i : i + 1, mask[i]] for x in inputs]
            rotate = case.rotate(6, real[0].shape[1])
            rotate = None if rotate is None else rotate._replace(position=rotate.position[:1])
            one = map_state(lambda x, i=i: x[i : i + 1], state)
            alone, alone_after = attention.extend(*real, one, rotate=rotate)
            assert_close(y[i, mask[i]], alone[0], **EXACT)
            if attention.can.state == "constant":
                same_states(map_state(lambda x, i=i: x[i : i + 1], after), alone_after)


def padding_leaves_the_state(case: Case) -> None:
    """Extending by padded tokens in between goes on as if they had not been there."""
    attention, inputs = case.build(), case.draw()
    after = case.draw(5, seed=9)
    for mask in some_masks():
        seen = mask.sum(1, keepdim=True)
        rotate = Rotation(seen + torch.arange(5), 100.0) if case.rotary else None
        state = attention.start(BATCH, dtype=torch.float64)
        _, state = attention.extend(*inputs, state, mask=mask, rotate=case.rotate(0, TIME, mask))
        y, _ = attention.extend(*after, state, rotate=rotate)
        for i in range(BATCH):
            real = [
                torch.cat((x[i : i + 1, mask[i]], a[i : i + 1]), 1).repeat(BATCH, 1, 1, 1)
                for x, a in zip(inputs, after, strict=True)
            ]
            assert_close(y[i], forward(case, attention, *real)[0, -5:], **EXACT)


def nothing_to_attend_to_gives_zero(case: Case) -> None:
    """A sample without a real token: 0, not NaN, and no gradient."""
    attention, inputs = case.build(), case.draw()
    mask = torch.ones(BATCH, TIME, dtype=torch.bool)
    mask[0] = False
    y = forward(case, attention, *inputs, mask=mask)
    assert (y[0] == 0).all()
    for g in gradients(y, inputs):
        assert (g[0] == 0).all()
        assert g.isfinite().all()
    if not case.causal and attention.can.cross:
        read = attention.read(inputs[0], attention.remember(*inputs[1:], mask))
        assert (read[0] == 0).all()
        for g in gradients(read, inputs):
            assert (g[0] == 0).all()
            assert g.isfinite().all()


def cross_is_the_same_sum(case: Case) -> None:
    """read(q, remember(k, v)) with the sequence's own keys is the bidirectional form; any lengths go."""
    attention, (q, k, v) = case.build(), case.draw()
    assert_close(attention.read(q, attention.remember(k, v)), attention(q, k, v), **EXACT)
    few = attention.read(q[:, :3], attention.remember(k, v))
    assert_close(few, attention(q, k, v)[:, :3], **EXACT)
    mask = some_masks()[2]
    memory = attention.remember(k, v, mask)
    dirty = [x.masked_fill(~mask[..., None, None], torch.nan) for x in (k, v)]
    assert_close(
        attention.read(q, attention.remember(*dirty, mask)), attention.read(q, memory), rtol=0, atol=0
    )
    assert_close(attention.read(q, memory)[mask], attention(q, k, v, mask=mask)[mask], **EXACT)


def a_sample_does_not_see_its_neighbours(case: Case) -> None:
    """Alone, or in a batch with extreme or broken neighbours: the same."""
    attention, inputs = case.build(), case.draw()
    alone = forward(case, attention, *inputs)[0]
    for neighbour in (1e6, torch.nan):
        batch = [torch.stack((x[0], torch.full_like(x[1], neighbour))) for x in inputs]
        assert_close(forward(case, attention, *batch)[0], alone, **EXACT)


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
        rotate, more = case.rotate(0, TIME), case.rotate(TIME, 1)
        _, state = attention.extend(*inputs, attention.start(BATCH, dtype=torch.float64), rotate=rotate)
        kept = map_state(torch.clone, state)
        token = [x[:, :1] for x in inputs]
        first, after = attention.extend(*token, state, rotate=more)
        second, _ = attention.extend(*token, state, rotate=more)
        attention.extend(*token, after, rotate=more)
        same_states(state, kept)
        assert torch.equal(first, second)


def states_can_be_indexed(case: Case) -> None:
    """Beam search is an index: reordering a state reorders what follows."""
    attention, inputs = case.build(), case.draw()
    rotate, more = case.rotate(0, TIME), case.rotate(TIME, 1)
    _, state = attention.extend(*inputs, attention.start(BATCH, dtype=torch.float64), rotate=rotate)
    order = torch.tensor([1, 0])
    token = [x[:, :1] for x in inputs]
    y, _ = attention.extend(*token, state, rotate=more)
    swapped, _ = attention.extend(
        *(x[order] for x in token), map_state(lambda x: x[order], state), rotate=more
    )
    assert_close(swapped, y[order], **EXACT)


def parameters_and_buffers_are_saved(case: Case) -> None:
    """Another instance with the state_dict of the first gives what the first gives."""
    attention, inputs = case.build(), case.draw()
    other = case.build()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter += torch.randn_like(parameter)
    other.load_state_dict(attention.state_dict())
    assert_close(forward(case, other, *inputs), forward(case, attention, *inputs), **EXACT)


def grouped_heads_are_repeated_heads(case: Case) -> None:
    """Sharing keys and values among query heads = repeating them."""
    grouped, repeated = case.build(), case.build(kv_heads=case.heads)
    q, k, v = case.draw()
    group = case.heads // case.kv_heads
    with torch.no_grad():
        for many, few in zip(repeated.parameters(), grouped.parameters(), strict=True):
            many.copy_(few if many.shape == few.shape else few.repeat_interleave(group, 0))
    y = forward(case, grouped, q, k, v)
    expected = forward(case, repeated, q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))
    assert_close(y, expected, **EXACT)
    assert_close(gradients(y, [q, k, v]), gradients(expected, [q, k, v]), **EXACT)


def sixteen_bits_lose_no_more_than_the_textbook(case: Case, dense) -> None:
    """bf16 and fp16 in: off by at most twice the error of the textbook formula in that precision."""
    for dtype in (torch.bfloat16, torch.float16):
        attention, inputs = case.build(), [x.detach() for x in case.draw(64, dtype=dtype)]
        # The parameters of both are those 16 bits can hold: the law is about the arithmetic.
        attention = attention.to(dtype).double()
        exact = dense(attention, *(x.double() for x in inputs))
        attention = attention.to(dtype)
        textbook = dense(attention, *inputs)
        y = attention(*inputs)
        assert y.dtype == dtype
        error = (y.double() - exact).abs()
        allowed = (textbook.double() - exact).abs()
        assert error.max() <= 2 * allowed.max()
        assert error.mean() <= 2 * allowed.mean()


def long_sequences_do_not_drift(case: Case) -> None:
    """65,536 tokens in float32 stay within 1e-4 of float64, relative to the largest output."""
    time = 65_536
    attention = case.build(heads=1, kv_heads=1)
    alone = Case(case.name, case.config, case.causal, heads=1, kv_heads=1)
    inputs = [x.detach()[:1] for x in alone.draw(time)]
    single = [x.float() for x in inputs]
    if case.causal:
        exact = attention(*inputs)
        y = attention.float()(*single)
    else:
        few = [x[:, :16] for x in (inputs[0], single[0])]
        exact = attention.read(few[0], attention.remember(*inputs[1:]))
        attention.float()
        y = attention.read(few[1], attention.remember(*single[1:]))
    assert (y.double() - exact).abs().max() < 1e-4 * exact.abs().max()


def empty_sequences_and_batches(case: Case) -> None:
    """No tokens, or no samples: outputs of that shape."""
    attention, inputs = case.build(), case.draw()
    for part in (slice(0, 0), slice(None)):
        for rows in (slice(0, 0), slice(None)):
            few = [x[rows, part] for x in inputs]
            rotate = None
            if case.rotary:
                rotate = Rotation(torch.arange(few[0].shape[1]).repeat(len(few[0]), 1), 100.0)
            y = attention(*few, rotate=rotate)
            assert y.shape == (*few[0].shape[:3], VALUE_DIM)


def always(case: Case) -> bool:
    return True


def recurrent(case: Case) -> bool:
    return case.causal and case.build().can.recurrent


def cross(case: Case) -> bool:
    return not case.causal and not case.rotary and case.build().can.cross


def long(case: Case) -> bool:
    """65,536 tokens are too many for what is quadratic; then 16 queries of all of them are looked at."""
    linear = case.build().can.state == "constant" and getattr(case.config, "impl", None) != "reference"
    return not case.rotary and (linear if case.causal else cross(case))


# What a law says nothing about. Definitions are written without positions: see the tests of rotary embedding.
APPLIES = {
    equals_its_definition: lambda case: not case.rotary,
    sixteen_bits_lose_no_more_than_the_textbook: lambda case: not case.rotary,
    parallel_is_recurrent: recurrent,
    final_state_has_gradients: recurrent,
    blind_to_the_future: lambda case: case.causal,
    padding_leaves_the_state: recurrent,
    padding_between_states_changes_nothing: recurrent,
    cross_is_the_same_sum: cross,
    never_mutates_a_state: recurrent,
    states_can_be_indexed: recurrent,
    long_sequences_do_not_drift: long,
}
WITH_DEFINITION = [equals_its_definition, sixteen_bits_lose_no_more_than_the_textbook]
LAWS = [
    parallel_is_recurrent,
    final_state_has_gradients,
    blind_to_the_future,
    padding_changes_nothing,
    padding_is_absence,
    padding_leaves_the_state,
    padding_between_states_changes_nothing,
    nothing_to_attend_to_gives_zero,
    cross_is_the_same_sum,
    a_sample_does_not_see_its_neighbours,
    leaves_the_random_generator_alone,
    never_mutates_a_state,
    states_can_be_indexed,
    parameters_and_buffers_are_saved,
    grouped_heads_are_repeated_heads,
    long_sequences_do_not_drift,
    empty_sequences_and_batches,
]
