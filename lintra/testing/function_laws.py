"""The laws that can be stated for a plain function (q, k, v, mask) -> y, of whatever library.

q, k and v are [b t h d], mask [b t] is True for real tokens or None, y is [b t h d]. A law takes a `Trial`
and raises AssertionError where it is broken.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from lintra.ops.padding import expand_mask
from lintra.testing._apply import Law, Raised, check_assertions, find, select
from lintra.testing.laws import BATCH, EXACT, TIME, among, gradients, some_masks
from lintra.testing.report import Report

STEP = 1e-6  # of finite differences, in float64: their error is about 1e-12 / STEP + STEP^2

Function = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Trial:
    """A function and the sizes of what it is given."""

    function: Function
    causal: bool = False
    mask: bool = True  # whether it takes masks
    dense: Function | None = None
    heads: int = 4
    dim: int = 8
    time: int = TIME
    batch: int = BATCH
    seed: int = 0

    def draw(self, time: int | None = None, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """Return q, k, v."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, self.time if time is None else time, self.heads, self.dim)
        sampled = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]
        return [x.to(dtype).requires_grad_() for x in sampled]

    def __call__(self, *given: Tensor | None) -> Tensor:
        """Return y of copies of q, k, v and perhaps a mask: writing into inputs breaks one law and not all.

        A module is taken in the dtype of q, in evaluation. Raises Raised for whatever is raised."""
        return self.call(*(None if x is None else x.clone() for x in given))

    def call(self, q: Any, k: Any, v: Any, mask: Tensor | None = None) -> Tensor:
        """Return y of these very tensors; otherwise like calling the trial."""
        function: Any = self.function
        if isinstance(function, nn.Module):
            function = copy.deepcopy(function).to(q.dtype).eval()
        try:
            return function(q, k, v, mask)
        except Exception as error:
            raise Raised(f"raised {type(error).__name__}: {error}") from error

    def masks(self) -> list[Tensor]:
        """Return masks with padding at the right, at the left, and holes."""
        return some_masks(self.time, self.batch)


def check_module(
    function: Function,
    *,
    heads: int = 4,
    dim: int = 8,
    causal: bool = False,
    mask: bool = True,
    dense: Function | None = None,
    laws: list[Any] | None = None,
    time: int = TIME,
    batch: int = BATCH,
    seed: int = 0,
    fixed_heads: bool = False,
    name: str | None = None,
) -> Report:
    """Return which laws hold for a function (q, k, v, mask) -> y of somebody else's library.

    q, k, v and y are [b t h d]; mask is [b t], True for real tokens, or None; always None with `mask=False`.
    A `torch.nn.Module` is copied for each call, put in the dtype of q and in evaluation. `dense` is the
    definition, with the arguments of the function. `laws` are functions of this module or their names, by
    default all.
    An exception out of the function breaks the law that called it. The function must take float64. With
    `fixed_heads` it is not tried with fewer heads than `heads`, as a layer built for so many is not.

    Raises ValueError for a law that does not exist, or sizes below 1.
    """
    check_assertions()
    for what, size in (("heads", heads), ("dim", dim), ("time", time), ("batch", batch)):
        if size < 1:
            raise ValueError(f"{what} must be at least 1, got {size}")
    trial = Trial(function, causal, mask, dense, heads, dim, time, batch, seed)
    mode = "causal" if causal else "bidirectional"
    found = [
        find(law, law, trial, mode, partial(_applies, law), fixed_heads=fixed_heads)
        for law in select(MODULE_LAWS, laws)
    ]
    return Report(name or getattr(function, "__name__", type(function).__name__), tuple(found))


def has_the_shape_and_dtype_of_its_values(trial: Trial) -> None:
    """y is [b t h d] in the dtype of v, float64 and float32."""
    for dtype in (torch.float64, torch.float32):
        q, k, v = trial.draw(dtype=dtype)
        y = trial(q, k, v)
        assert (y.shape, y.dtype) == (v.shape, dtype), f"{list(y.shape)} {y.dtype} of {list(v.shape)} {dtype}"


def equals_its_definition(trial: Trial) -> None:
    """Values and gradients are those of the dense definition."""
    assert trial.dense is not None
    dense = replace(trial, function=trial.dense)
    for mask in [None, *(trial.masks() if trial.mask else [])]:
        inputs = trial.draw()
        y, expected = trial(*inputs, mask), dense(*inputs, mask)
        real = slice(None) if mask is None else mask
        assert_close(y[real], expected[real], **EXACT)
        assert_close(gradients(y[real], inputs), gradients(expected[real], inputs), **EXACT)


def gradients_are_those_of_its_values(trial: Trial) -> None:
    """Gradients in float64 are finite differences of the values, along a random direction."""
    inputs = trial.draw()
    y = trial(*inputs)
    weights = torch.arange(1, y.numel() + 1, dtype=y.dtype).sin().reshape(y.shape)
    found = gradients(y, inputs)
    for i, x in enumerate(inputs):
        generator = torch.Generator().manual_seed(trial.seed + i + 1)
        direction = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        direction /= direction.norm()
        with torch.no_grad():
            moved = [
                (trial(*inputs[:i], x + sign * STEP * direction, *inputs[i + 1 :]) * weights).sum()
                for sign in (1, -1)
            ]
        difference = (moved[0] - moved[1]) / (2 * STEP)
        assert_close((found[i] * direction).sum(), difference, rtol=1e-5, atol=1e-7)


def blind_to_the_future(trial: Trial) -> None:
    """Later tokens change no earlier output, and get no gradient from it."""
    for cut in sorted({cut for cut in (1, 8, trial.time - 1) if 0 < cut < trial.time}):
        inputs = trial.draw()
        before = trial(*inputs)[:, :cut]
        for g in gradients(before, inputs):
            assert (g[:, cut:] == 0).all(), "a later token has a gradient"
        changed = [torch.cat((x[:, :cut], 7.0 - 100 * x[:, cut:]), 1) for x in inputs]
        assert_close(trial(*changed)[:, :cut], before, **EXACT)


def padding_changes_nothing(trial: Trial) -> None:
    """Whatever numbers stand in padded places, no real output changes, and no gradient."""
    _padding_as_zeros(trial, (-1e3, 1.0))


def padding_may_hold_nan(trial: Trial) -> None:
    """Where inf or NaN stands in padded places, no real output changes, and no gradient."""
    _padding_as_zeros(trial, (torch.inf, torch.nan))


def _padding_as_zeros(trial: Trial, others: tuple[float, ...]) -> None:
    """Other padding than zeros gives the real outputs and all gradients that zeros give."""
    for mask in trial.masks():
        sampled = trial.draw()
        found = []
        for junk in (0.0, *others):
            inputs = [x.detach().masked_fill(~expand_mask(mask, x), junk).requires_grad_() for x in sampled]
            y = trial(*inputs, mask)[mask]
            found.append((junk, y, gradients(y, inputs)))
        (_, y, expected), *rest = found
        for g in expected:
            assert (g[~mask] == 0).all(), "a padded token has a gradient"
        for junk, other, other_gradients in rest:
            assert_close(other, y, **EXACT, msg=partial(_with_junk, "output", junk))
            assert_close(other_gradients, expected, **EXACT, msg=partial(_with_junk, "gradient", junk))


def padding_is_absence(trial: Trial) -> None:
    """A padded sequence gives what its real tokens alone give."""
    for mask in trial.masks():
        inputs = trial.draw()
        y = trial(*inputs, mask)
        for i in range(trial.batch):
            alone = trial(*(x[i : i + 1, mask[i]] for x in inputs))
            assert_close(y[i, mask[i]], alone[0], **EXACT)


def padded_outputs_are_zero(trial: Trial) -> None:
    """y is 0 in padded places."""
    for mask in trial.masks():
        assert (trial(*trial.draw(), mask)[~mask] == 0).all(), "an output of a padded place is not 0"


def nothing_to_attend_to_gives_zero(trial: Trial) -> None:
    """A sample without a real token gets 0, not NaN, and no gradient."""
    inputs = trial.draw()
    mask = torch.ones(trial.batch, trial.time, dtype=torch.bool)
    mask[0] = False
    y = trial(*inputs, mask)
    assert (y[0] == 0).all(), "the output is not 0"
    for g in gradients(y, inputs):
        assert g.isfinite().all(), "a gradient is not finite"
        assert (g[0] == 0).all(), "a gradient is not 0"


def a_sample_does_not_see_its_neighbours(trial: Trial) -> None:
    """Beside extreme or broken samples each sample gets what it gets alone, values and gradients."""
    inputs = trial.draw()
    for i in range(len(inputs[0])):
        alone = [x.detach()[i : i + 1].requires_grad_() for x in inputs]
        expected = trial(*alone)
        expected_gradients = gradients(expected, alone)
        for neighbour in (1e3, torch.nan):
            batch = [among(x, i, neighbour) for x in inputs]
            y = trial(*batch)[i : i + 1]
            assert_close(y, expected, **EXACT)
            assert_close([g[i : i + 1] for g in gradients(y, batch)], expected_gradients, **EXACT)


def leaves_the_random_generator_alone(trial: Trial) -> None:
    """In evaluation nothing is sampled from PyTorch's global generator, forward or backward."""
    inputs, before = trial.draw(), torch.get_rng_state()
    gradients(trial(*inputs), inputs)
    assert torch.equal(torch.get_rng_state(), before), "numbers were sampled"


def evaluation_is_deterministic(trial: Trial) -> None:
    """Two calls give the same, to the bit, whatever the state of the global generator."""
    inputs, found = trial.draw(), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(trial(*inputs))
    assert_close(*found, rtol=0, atol=0)


def never_mutates_its_inputs(trial: Trial) -> None:
    """q, k, v and the mask are after a call what they were before."""
    for mask in [None, *(trial.masks() if trial.mask else [])]:
        given = [x.detach() for x in trial.draw()] + ([] if mask is None else [mask])
        before = [x.clone() for x in given]
        with torch.no_grad():
            trial.call(*given)
        for name, x, was in zip(("q", "k", "v", "mask"), given, before, strict=False):
            assert torch.equal(x, was), f"{name} was written into"


def empty_batches_and_sequences(trial: Trial) -> None:
    """No samples, or no tokens: an output of that shape."""
    q, k, v = (x.detach() for x in trial.draw())
    for rows, places in ((0, trial.time), (trial.batch, 0), (0, 0)):
        y = trial(*(x[:rows, :places] for x in (q, k, v)))
        assert y.shape == (rows, places, trial.heads, trial.dim), f"got {list(y.shape)}"


def sixteen_bits_keep_what_they_can(trial: Trial) -> None:
    """bfloat16 and float16 in and out, off by at most 16 roundings of the largest output from float64."""
    for dtype in (torch.bfloat16, torch.float16):
        inputs = [x.detach() for x in trial.draw(dtype=dtype)]
        rounded = trial
        if isinstance(trial.function, nn.Module):  # the law is about the arithmetic, not about parameters
            rounded = replace(trial, function=copy.deepcopy(trial.function).to(dtype))
        y, exact = rounded(*inputs), rounded(*(x.double() for x in inputs))
        assert y.dtype == dtype, f"{dtype} in, {y.dtype} out"
        error, allowed = (y.double() - exact).abs().max(), 16 * torch.finfo(dtype).eps * exact.abs().max()
        assert error <= allowed, f"{dtype}: an error of {error:.3g}, more than {allowed:.3g}"


def extremes_stay_finite(trial: Trial) -> None:
    """Inputs 30 times as large, or a thousandth, in float32: finite values and gradients."""
    for size in (30.0, 1e-3):
        inputs = [(x.detach() * size).requires_grad_() for x in trial.draw(dtype=torch.float32)]
        y = trial(*inputs)
        assert y.isfinite().all(), f"an output is not finite for inputs times {size:g}"
        for g in gradients(y, inputs):
            assert g.isfinite().all(), f"a gradient is not finite for inputs times {size:g}"


def _with_junk(what: str, junk: float, text: str) -> str:
    return f"{what} with {junk:g} in padded places: {text}"


MODULE_LAWS: list[Law] = [
    has_the_shape_and_dtype_of_its_values,
    equals_its_definition,
    gradients_are_those_of_its_values,
    blind_to_the_future,
    padding_changes_nothing,
    padding_may_hold_nan,
    padding_is_absence,
    padded_outputs_are_zero,
    nothing_to_attend_to_gives_zero,
    a_sample_does_not_see_its_neighbours,
    leaves_the_random_generator_alone,
    evaluation_is_deterministic,
    never_mutates_its_inputs,
    empty_batches_and_sequences,
    sixteen_bits_keep_what_they_can,
    extremes_stay_finite,
]
MASKED = {
    padding_changes_nothing,
    padding_may_hold_nan,
    padding_is_absence,
    padded_outputs_are_zero,
    nothing_to_attend_to_gives_zero,
}


def _applies(law: Law, trial: Trial) -> bool:
    if law is equals_its_definition:
        return trial.dense is not None
    if law is blind_to_the_future:
        return trial.causal
    return trial.mask or law not in MASKED
