"""Laws of padded and packed batches: a sequence gives what it gives alone."""

# Laws call with lists of inputs, whose lengths no type knows.
# pyright: reportCallIssue=false, reportArgumentType=false

from dataclasses import replace

import torch
from torch import Tensor
from torch.testing import assert_close

from lintra.attention import Attention, leaves, map_state
from lintra.ops.layout import Layout
from lintra.ops.padding import expand_mask
from lintra.ops.rope import RotaryEmbedding
from lintra.testing.laws.cases import (
    EXACT,
    Case,
    among,
    extend,
    extra_inputs,
    forward,
    gradients,
    same_states,
)


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
