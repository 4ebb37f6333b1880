"""The package FLA itself, which is made for GPUs and gives many warnings without one."""

import warnings
from functools import cache
from importlib import import_module

import pytest


@cache
def fla(name="fla.ops"):
    """One of its modules; the test is skipped if it cannot be imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return import_module(name)
        except ImportError as error:
            pytest.skip(f"{name} cannot be imported (fla.layers is in flash-linear-attention): {error}")


def gates():
    """Its reference implementations of the gates, by name."""
    kda, gdn = fla("fla.ops.kda.gate"), fla("fla.ops.gated_delta_rule.gate")
    return {
        "kda": kda.naive_kda_gate,
        "bounded": kda.naive_kda_lowerbound_gate,
        "gdn": gdn.naive_gdn_gate,
    }
