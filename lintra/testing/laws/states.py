"""Laws of states, of decoding and of a module: they stay as they were, and can be used again."""

# Laws call with lists of inputs, whose lengths no type knows.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
from torch import Tensor
from torch.testing import assert_close

from lintra.attention import leaves, map_state
from lintra.testing.laws.cases import (
    EXACT,
    Case,
    cross,
    extend,
    extra_inputs,
    forward,
    keeps_state,
    outputs,
    raises,
    same_states,
)


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


def no_samples_have_states(case: Case) -> None:
    """A batch of none is extended, by several tokens and by one."""
    attention = case.build()
    state = attention.start(0, dtype=torch.float64)
    for first, time in ((0, 5), (5, 1), (6, 0), (6, 3)):
        rope = case.rope(first, time)
        rope = None if rope is None else rope.moved(rope.position[:0])
        y, state = extend(case, attention, [x[:0] for x in case.draw(time)], state, rope=rope)
        assert y.shape == (0, time, *outputs(case))


def constant_states_keep_no_tokens(case: Case) -> None:
    """The memory that a state of constant size holds on to after a long prompt is its own."""
    attention, inputs = case.build(), case.draw(time := 512)
    fresh = attention.start(case.batch, dtype=torch.float64)
    _, state = extend(case, attention, inputs, fresh, rope=case.rope(0, time))
    for x in leaves(state):
        assert x.untyped_storage().nbytes() == x.nbytes
