"""Every law for every mechanism in the folder, in every configuration and mode it declares."""

from collections import defaultdict
from functools import cache
from importlib import import_module

import pytest

from lintra import attention
from lintra.testing import laws
from lintra.testing.laws import Case


@cache
def cases() -> list[Case]:
    """All cases. The test file `test_NAME.py` beside this one names the `VARIANTS` of its mechanism, and its
    `SHAPE` if that of `Case` does not fit."""
    found = []
    for name in attention.names():
        shape = getattr(_tests(name), "SHAPE", {})
        for config in _tests(name).VARIANTS:
            for causal in (True, False):
                for rotary in (False, True):
                    case = Case(name, config, causal, rotary=rotary, **shape)
                    if case.possible():
                        found.append(case)
    return found


def pairs(all_laws):
    """Each law with each case that it applies to."""
    return [
        pytest.param(law, case, id=f"{law.__name__}-{case}")
        for law in all_laws
        for case in cases()
        if laws.APPLIES.get(law, laws.always)(case)
    ]


def _tests(name: str):
    return import_module(f"tests.attention.test_{name}")


@pytest.mark.parametrize(("law", "case"), pairs(laws.LAWS))
def test_law(law, case):
    law(case)


@pytest.mark.parametrize(("law", "case"), pairs(laws.WITH_DEFINITION))
def test_law_with_definition(law, case):
    law(case, _tests(case.name).dense)


@pytest.mark.parametrize("law", [*laws.LAWS, *laws.WITH_DEFINITION], ids=lambda law: law.__name__)
def test_no_law_is_idle(law):
    """Each law applies to every mechanism in some mode, unless the mechanism declares a reason not to."""
    applies = laws.APPLIES.get(law, laws.always)
    obeyed = {case.name for case in cases() if applies(case)}
    assert obeyed >= {each["name"] for each in attention.describe() if DEMANDS[law](each)}


def recurrent(can) -> bool:
    return can["recurrent"] and not can["lookahead"]


DEMANDS = defaultdict(
    lambda: lambda can: True,
    {
        laws.parallel_is_recurrent: recurrent,
        laws.final_state_has_gradients: recurrent,
        laws.padding_leaves_the_state: recurrent,
        laws.padding_between_states_changes_nothing: lambda can: can["recurrent"],
        laws.padding_alone_keeps_the_state: lambda can: can["recurrent"] and can["state"] == "constant",
        laws.packed_after_states: recurrent,
        laws.never_mutates_a_state: lambda can: can["recurrent"],
        laws.states_and_memories_are_copies: lambda can: can["recurrent"] or can["cross"],
        laws.states_of_another_dtype_are_refused: lambda can: can["recurrent"],
        laws.states_can_be_indexed: lambda can: can["recurrent"],
        laws.no_tokens_leave_the_state: lambda can: can["recurrent"],
        laws.no_samples_have_states: lambda can: can["recurrent"],
        laws.blind_to_the_future: lambda can: can["causal"] and not can["lookahead"],
        laws.cross_is_the_same_sum: lambda can: can["cross"],
        laws.dropout_does_not_see_padding: lambda can: hasattr(attention.load(can["name"]).Config, "dropout"),
        laws.grouped_heads_are_repeated_heads: lambda can: not can["shared_key"],
        laws.long_sequences_do_not_drift: lambda can: can["state"] == "constant",
        laws.constant_states_keep_no_tokens: lambda can: can["state"] == "constant",
        laws.no_array_is_square: lambda can: "t^2" not in can["cost"],
        laws.memory_is_linear: lambda can: "t^2" not in can["cost"],
    },
)
