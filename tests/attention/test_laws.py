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
        can = next(row for row in attention.describe() if row["name"] == name)
        for config in _tests(name).VARIANTS:
            modes = [mode for mode, able in ((True, can["causal"]), (False, can["bidirectional"])) if able]
            for causal in modes:
                if getattr(config, "window", None) is not None and not causal:
                    continue  # refused when built: see test_softmax.py
                found.append(Case(name, config, causal))
                found.append(Case(name, config, causal, rotary=True))
    return found


def _tests(name: str):
    return import_module(f"tests.attention.test_{name}")


@pytest.mark.parametrize("case", cases(), ids=str)
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_law(law, case):
    law(case)


@pytest.mark.parametrize("case", cases(), ids=str)
@pytest.mark.parametrize("law", laws.WITH_DEFINITION, ids=lambda law: law.__name__)
def test_law_with_definition(law, case):
    law(case, _tests(case.name).dense)
