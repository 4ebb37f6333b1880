"""Laws of numbers, memory and devices: precision, extremes, transforms and sizes."""

# Laws call with lists of inputs, whose lengths no type knows.
# pyright: reportCallIssue=false, reportArgumentType=false

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lintra.attention import Attention, leaves
from lintra.ops.rope import RotaryEmbedding
from lintra.testing.laws.cases import (
    EXACT,
    Case,
    cross,
    extend,
    extra_inputs,
    forward,
    gradients,
    keeps_state,
    outputs,
    weighted,
)


def runs_on_meta(case: Case) -> None:
    """Tensors without numbers, a mask among them: shapes decide all, so that no forward waits for a value."""
    attention, inputs = case.build().to("meta"), [x.to("meta") for x in case.draw()]
    inputs[1] = inputs[0] if attention.shared_key else inputs[1]
    masks = [None, case.masks()[2].to("meta")]
    for mask in masks if not case.rotary else masks[1:]:
        y = forward(case, attention, *inputs, mask=mask)
        assert (y.device.type, y.shape) == ("meta", (case.batch, case.time, *outputs(case)))


def leaves_the_random_generator_alone(case: Case) -> None:
    """A forward draws nothing from the global generator."""
    attention, inputs = case.build(), case.draw()
    before = torch.get_rng_state()
    gradients(forward(case, attention, *inputs), inputs)
    assert torch.equal(torch.get_rng_state(), before)


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
