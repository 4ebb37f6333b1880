"""Every law for every mechanism in the folder, in every configuration and mode it declares."""

from importlib import import_module

import pytest

from lintra import attention
from tests import laws
from tests.laws import Case


def cases() -> list[Case]:
    """A test file `test_NAME.py` beside this one names the `VARIANTS` of its mechanism."""
    found = []
    for name in attention.names():
        for config in _tests(name).VARIANTS:
            for causal in (True, False):
                for rotary in (False, True):
                    case = Case(name, config, causal, rotary=rotary)
                    if case.possible():
                        found.append(case)
    return found


def pairs(all_laws):
    """Each law with each case it says something about."""
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
    """Every law applies to something, and every mechanism obeys all that apply to it in some mode."""
    applies = laws.APPLIES.get(law, laws.always)
    assert {case.name for case in cases() if applies(case)} == set(attention.names())
