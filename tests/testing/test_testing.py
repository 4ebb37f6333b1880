"""The kit of laws: each law detects what breaks it, and correct attentions pass."""

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from lintra.attention import linear, linformer, lsh, map_state, softmax
from lintra.testing import LAWS, MODULE_LAWS, WITH_DEFINITION, check_attention, check_module, laws, laws_of
from lintra.testing.check import FIXED
from tests.attention.test_linear import dense

# Attentions with the interface of lintra, each broken in one way.


@dataclass(frozen=True)
class Broken:
    """Linear attention, or softmax, after a change."""

    change: Callable
    of: object = linear.Config()

    def build(self, **shape):
        attention = self.of.build(**shape)
        self.change(attention)
        return attention


@dataclass(frozen=True)
class BrokenDropout(Broken):
    of: object = softmax.Config()
    dropout: float = 0.0

    def build(self, **shape):
        attention = softmax.Config(dropout=self.dropout).build(**shape)
        self.change(attention)
        return attention


def around(verb: str, changed: Callable) -> Callable:
    """A change of one verb: `changed(attention, verb as it was, *args, **options)` is called instead."""

    def change(attention):
        before = getattr(attention, verb)
        setattr(attention, verb, lambda *args, **options: changed(attention, before, *args, **options))

    return change


def output(changed: Callable) -> Callable:
    """A change of what forward returns: `changed(y, q, v)`."""
    return around("forward", lambda _, verb, q, k, v, **more: changed(verb(q, k, v, **more), q, v))


def after(changed: Callable) -> Callable:
    """A change of the state that extend returns: `changed(state, k, options)`."""

    def extended(_, verb, q, k, v, state, **options):
        y, state = verb(q, k, v, state, **options)
        return y, changed(state, k, options)

    return around("extend", extended)


def plus_one(state):
    return map_state(lambda x: x + 1, state)


def unsaved(attention):
    """What `redraw` changes is in no state_dict."""
    scale = [1.0]
    attention.redraw = lambda generator: scale.append(2.0)
    output(lambda y, q, v: y * scale[-1])(attention)


def deaf(attention):
    attention.check_state = lambda *args, **options: None


def in_place(attention, verb, q, k, v, state, **options):
    with torch.no_grad():
        map_state(lambda x: x.add_(1), state)
    return verb(q, k, v, state, **options)


def mixed_row(attention, verb, q, k, v, cu_seqlens=None, **options):
    """Packed sequences see each other."""
    return verb(q, k, v, **options)


def nan_where_padded(attention, verb, q, k, v, layout=None, **options):
    y = verb(q, k, v, layout=layout, **options)
    if layout is None or layout.mask is None:
        return y
    return y.masked_fill(~layout.mask[:, :, None, None], torch.nan)


def filled(attention, verb, q, k, v, mask=None, **options):
    """Samples of padding alone get 1."""
    y = verb(q, k, v, mask=mask, **options)
    return y if mask is None else y + (~mask.any(1)).to(y.dtype)[:, None, None, None]


def reads_a_value(y, q, v):
    q.sum().item()
    return y


def refuses(size: int, verb: str) -> Callable:
    def changed(attention, verb, q, *args, **options):
        if q.shape[size] == 0:
            raise RuntimeError("nothing to do")
        return verb(q, *args, **options)

    return around(verb, changed)


def refuses_autocast(y, q, v):
    return y * 1.01 if torch.is_autocast_enabled("cpu") else y


def square(y, q, v):
    if q.shape[1] > 10_000:
        torch.empty(q.shape[1], q.shape[1], dtype=torch.int8)
    return y


def keeps_square(y, q, v):
    x = v[0, :, 0, 0]
    return y + 0 * (x[:, None] * x[None]).sin().sum()


def row_of(attention, verb, q, k, v, state, cu_seqlens=None, **options):
    y, state = verb(q, k, v, state, cu_seqlens=cu_seqlens, **options)
    return (y if cu_seqlens is None else 1.01 * y), state


scaled = output(lambda y, q, v: 1.01 * y)
CAUSAL = {
    laws.equals_its_definition: scaled,
    laws.second_derivatives_are_those_of_its_definition: scaled,
    laws.sixteen_bits_lose_no_more_than_the_textbook: output(
        lambda y, q, v: 1.5 * y if y.dtype.itemsize == 2 else y
    ),
    laws.parallel_is_recurrent: scaled,
    laws.final_state_has_gradients: around(
        "extend",
        lambda _, verb, q, k, v, state, **more: verb(q, k, v, map_state(torch.Tensor.detach, state), **more),
    ),
    laws.blind_to_the_future: output(lambda y, q, v: y + v.mean()),
    laws.padding_changes_nothing: output(lambda y, q, v: y + 0 * v.sum()),
    laws.padded_places_hold_numbers: around("forward", nan_where_padded),
    laws.dropout_does_not_see_padding: output(lambda y, q, v: y + 0 * v.sum()),
    laws.padding_is_absence: output(lambda y, q, v: y * q.shape[1]),
    laws.padding_leaves_the_state: after(lambda s, k, more: s if more.get("mask") is None else plus_one(s)),
    laws.padding_between_states_changes_nothing: after(
        lambda s, k, more: s if more.get("mask") is None else plus_one(s)
    ),
    laws.padding_alone_keeps_the_state: after(
        lambda s, k, more: s if more.get("mask") is None else plus_one(s)
    ),
    laws.packed_is_each_alone: around("forward", mixed_row),
    laws.packed_after_states: around("extend", row_of),
    laws.nothing_to_attend_to_gives_zero: around("forward", filled),
    laws.runs_on_meta: output(reads_a_value),
    laws.a_sample_does_not_see_its_neighbours: output(lambda y, q, v: y + v.mean()),
    laws.leaves_the_random_generator_alone: output(lambda y, q, v: y + 0 * torch.rand(1, dtype=y.dtype)),
    laws.never_mutates_a_state: around("extend", in_place),
    laws.states_and_memories_are_copies: after(lambda s, k, more: s._replace(z=k[:, 0])),
    laws.states_of_another_dtype_are_refused: deaf,
    laws.states_can_be_indexed: around(
        "extend",
        lambda _, verb, q, *args, **more: (
            lambda y, state: (y + torch.arange(len(y))[:, None, None, None], state)
        )(*verb(q, *args, **more)),
    ),
    laws.parameters_and_buffers_are_saved: unsaved,
    laws.grouped_heads_are_repeated_heads: output(lambda y, q, v: y * v.shape[2]),
    laws.autocast_rounds_nothing_that_is_added: output(refuses_autocast),
    laws.long_sequences_do_not_drift: output(lambda y, q, v: y + 1 if y.dtype == torch.float32 else y),
    laws.no_tokens_leave_the_state: after(lambda s, k, more: s if k.shape[1] else plus_one(s)),
    laws.no_samples_have_states: refuses(0, "extend"),
    laws.constant_states_keep_no_tokens: after(
        lambda s, k, more: map_state(lambda x: torch.stack((x, x))[0], s)
    ),
    laws.empty_sequences_and_batches: refuses(1, "forward"),
    laws.extremes_stay_finite: output(
        lambda y, q, v: y if y.dtype == torch.float64 else y.masked_fill(y.abs() > 20, torch.inf)
    ),
    laws.transforms_are_what_they_transform: output(reads_a_value),
    laws.no_array_is_square: output(square),
    laws.memory_is_linear: output(keeps_square),
}
BIDIRECTIONAL = {
    laws.cross_is_the_same_sum: around(
        "cross_attend", lambda _, verb, *args, **more: 1.01 * verb(*args, **more)
    ),
}


def by_mode(attention):
    """Training differs from evaluation."""
    output(lambda y, q, v: 1.01 * y if attention.training else y)(attention)


CAUSAL[laws.training_is_evaluation] = by_mode


def test_every_law_of_mechanisms_has_something_that_breaks_it():
    assert CAUSAL.keys() | BIDIRECTIONAL.keys() == {*LAWS, *WITH_DEFINITION}


@pytest.mark.parametrize("law", [*LAWS, *WITH_DEFINITION], ids=lambda law: law.__name__)
def test_a_law_of_mechanisms_is_broken_by_what_breaks_it(law):
    config = BrokenDropout if law is laws.dropout_does_not_see_padding else Broken
    of = [] if config is BrokenDropout else [linear.Config(impl="torch")]  # it has second derivatives
    options = {"laws": [law], "causal": law in CAUSAL}
    if law in WITH_DEFINITION:
        options["dense"] = dense
    right = check_attention(config(lambda attention: None, *of), **options)
    assert right.passed == [law.__name__], right
    broken = check_attention(config((CAUSAL | BIDIRECTIONAL)[law], *of), **options)
    assert broken.failed == [law.__name__]
    assert broken.failures[0].message


# Functions of q, k, v and a mask.


def textbook(causal: bool) -> Callable:
    """Softmax attention, every weight written out."""

    def attend(q, k, v, mask=None):
        if mask is not None:
            q, k, v = (x.masked_fill(~mask[:, :, None, None], 0) for x in (q, k, v))
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
        seen = (seen.tril() if causal else seen)[None, None]
        if mask is not None:
            seen = seen & mask[:, None, None]
        some = seen.any(-1, keepdim=True)
        weights = scores.masked_fill(~seen & some, -torch.inf).softmax(-1)
        y = torch.einsum("bhts,bshd->bthd", weights, v)
        return y if mask is None else y.masked_fill(~mask[:, :, None, None], 0)

    return attend


both = textbook(causal=False)


def without_maximum(q, k, v, mask):
    weights = torch.einsum("bthd,bshd->bhts", q, k).exp()
    return torch.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdim=True), v)


def writes(q, k, v, mask):
    v.mul_(2)
    return both(q, k, v, mask)


def refuses_nothing(q, k, v, mask):
    if not q.numel():
        raise RuntimeError("nothing to do")
    return both(q, k, v, mask)


def changed(change: Callable) -> Callable:
    return lambda q, k, v, mask: change(both(q, k, v, mask), v)


WRONG = {
    "has_the_shape_and_dtype_of_its_values": changed(lambda y, v: y.float()),
    "equals_its_definition": changed(lambda y, v: 1.01 * y),
    "gradients_are_those_of_its_values": changed(lambda y, v: y.detach() + 0 * v),
    "blind_to_the_future": both,
    "padding_changes_nothing": changed(lambda y, v: y + v.mean()),
    "padding_may_hold_nan": changed(lambda y, v: y + 0 * v.sum()),
    "padding_is_absence": changed(lambda y, v: y * v.shape[1]),
    "padded_outputs_are_zero": changed(lambda y, v: y + 1),
    "nothing_to_attend_to_gives_zero": changed(lambda y, v: y + 1),
    "a_sample_does_not_see_its_neighbours": changed(lambda y, v: y + v.mean()),
    "leaves_the_random_generator_alone": changed(lambda y, v: y + 0 * torch.rand(1, dtype=y.dtype)),
    "evaluation_is_deterministic": changed(lambda y, v: y + torch.rand(1, dtype=y.dtype)),
    "never_mutates_its_inputs": writes,
    "empty_batches_and_sequences": refuses_nothing,
    "sixteen_bits_keep_what_they_can": changed(lambda y, v: 1.5 * y if y.dtype.itemsize == 2 else y),
    "extremes_stay_finite": without_maximum,
}


def test_every_law_of_functions_has_something_that_breaks_it():
    assert list(WRONG) == [law.__name__ for law in MODULE_LAWS]


@pytest.mark.parametrize("law", MODULE_LAWS, ids=lambda law: law.__name__)
def test_a_law_of_functions_is_broken_by_what_breaks_it(law):
    name = law.__name__
    options = {"dense": both} if name == "equals_its_definition" else {}
    report = check_module(WRONG[name], laws=[law], causal=name == "blind_to_the_future", **options)
    assert report.failed == [name]
    assert report.failures[0].message


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("time", "batch", "heads"), [(19, 2, 4), (1, 1, 1), (2, 1, 1), (4, 2, 1), (7, 3, 2)])
def test_the_textbook_passes_every_law_at_every_size(causal, time, batch, heads):
    attend = textbook(causal)
    sizes = {"time": time, "batch": batch, "heads": heads}
    report = check_module(attend, causal=causal, dense=attend, **sizes)
    report.raise_if_failed()
    assert report.not_applicable == ([] if causal else ["blind_to_the_future"])


def test_a_function_without_masks_is_not_asked_for_them():
    report = check_module(both, mask=False)
    assert report.ok
    assert [name for name in report.not_applicable if "padd" in name or "nothing" in name] == [
        "padding_changes_nothing",
        "padding_may_hold_nan",
        "padding_is_absence",
        "padded_outputs_are_zero",
        "nothing_to_attend_to_gives_zero",
    ]


class Projected(nn.Module):
    """A module with parameters and dropout."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, q, k, v, mask):
        y = self.dropout(self.proj(both(q, k, v, mask)))
        return y if mask is None else y.masked_fill(~mask[:, :, None, None], 0)


def test_a_module_is_checked_in_evaluation_and_stays_what_it_was():
    module = Projected()
    before = {name: x.clone() for name, x in module.state_dict().items()}
    check_module(module).raise_if_failed()
    assert module.training
    assert_close(module.state_dict(), before, rtol=0, atol=0)


# Reports, and the smallest input.


def draws_where_large(q, k, v, mask):
    b, t, h, _ = q.shape
    if b >= 2 and t >= 5 and h >= 3:
        torch.rand(1)
    return both(q, k, v, mask)


def test_a_failure_names_the_smallest_input():
    report = check_module(draws_where_large)
    (failure,) = report.failures
    assert failure.sizes == {"batch": 2, "time": 5, "heads": 3}
    assert str(report) == (
        "draws_where_large: 13 of 14 applicable laws passed\n"
        "leaves_the_random_generator_alone [bidirectional]: failed\n"
        "    In evaluation nothing is sampled from PyTorch's global generator, forward or backward.\n"
        "    smallest input: batch 2, time 5, heads 3, seed 0\n"
        "    numbers were sampled\n"
        "not applicable: equals_its_definition, blind_to_the_future"
    )
    assert check_module(draws_where_large, fixed_heads=True).failures[0].sizes["heads"] == 4
    with pytest.raises(AssertionError, match="13 of 14"):
        report.raise_if_failed()


def test_a_mechanism_too():
    broken = Broken(output(lambda y, q, v: y + v.mean() if q.shape[1] >= 3 else y))
    report = check_attention(broken, causal=True, laws=["blind_to_the_future"])
    assert [each.mode for each in report.failures] == ["causal", "causal-rotary"]
    for failure in report.failures:
        assert failure.sizes == {"batch": 1, "time": 3, "heads": 1, "kv_heads": 1}


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 2), (5, 1, 2), (8, 2, 1)])
@pytest.mark.parametrize("of", [linear.Config(), softmax.Config()], ids=["linear", "softmax"])
def test_laws_hold_at_the_sizes_that_failures_are_shrunk_to(of, sizes):
    """A law that fails by itself on short sequences would be blamed on the mechanism."""
    time, batch, heads = sizes
    for causal in (True, False):
        case = laws.Case("any", of, causal, heads=heads, kv_heads=1, time=time, batch=batch)
        for law in LAWS:
            if law not in FIXED and laws.APPLIES.get(law, laws.always)(case):
                law(case)


def test_what_a_mechanism_can_be_built_with_is_found():
    """It may share one projection for queries and keys, or have a longest sequence."""
    for config in (lsh.Config(), linformer.Config(max_length=32)):
        check_attention(config, laws=["padding_changes_nothing", "parallel_is_recurrent"]).raise_if_failed()


@pytest.mark.parametrize(
    ("name", "test"), laws_of(linear.Config(), causal=True, laws=["blind_to_the_future", "runs_on_meta"])
)
def test_laws_are_tests(name, test):
    assert name.split("-")[0] in ("blind_to_the_future", "runs_on_meta")
    test()


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"laws must be of .*blind_to_the_future.*; got gravity"):
        check_attention(linear.Config(), laws=["gravity"])
    with pytest.raises(ValueError, match="no causal form"):
        check_attention(linformer.Config(max_length=32), causal=True)
    with pytest.raises(ValueError, match="heads must be at least 1, got 0"):
        check_module(both, heads=0)
    with pytest.raises(TypeError, match=r"laws_of takes .*; got width"):
        laws_of(linear.Config(), width=3)


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    check_module(both)
    check_attention(linear.Config(), laws=["blind_to_the_future"])
    assert torch.equal(torch.get_rng_state(), before)


ALONE = """
import sys
import lintra.testing
assert not {"pytest", "hypothesis", "lightning"} & set(sys.modules)
"""


def test_it_needs_pytorch_alone():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_assertions_it_refuses():
    code = "from lintra.testing import check_module; check_module(lambda q, k, v, mask: v)"
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True)
    assert "python -O removes" in done.stderr


def test_keys_that_the_first_sample_chooses_for_all_are_found():
    """What leaks this way has no gradient, and without a mask no other law detects it."""

    def chosen(q, k, v, mask):
        if not k.numel():
            return torch.zeros_like(v)
        place = k[0].detach().double().square().sum((-1, -2)).topk((k.shape[1] + 1) // 2).indices
        k, v = k[:, place], v[:, place]
        weights = torch.einsum("bthd,bshd->bhts", q, k).double().softmax(-1)
        return torch.einsum("bhts,bshd->bthd", weights, v.double()).to(v.dtype)

    report = check_module(chosen, mask=False)
    assert "a_sample_does_not_see_its_neighbours" in report.failed
