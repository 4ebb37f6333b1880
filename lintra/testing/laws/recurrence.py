"""Laws of the order of tokens: the parallel form is the recurrence, and no output depends on the future."""

# Laws call with lists of inputs, whose lengths no type knows.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
from torch import Tensor
from torch.testing import assert_close

from lintra.attention import leaves
from lintra.testing.laws.cases import EXACT, Case, extend, forward, gradients, same_states


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
