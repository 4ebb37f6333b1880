"""Signatures of the stand-in and of the installed FLA: if they differ, a newer version has changed them."""

from importlib import import_module
from inspect import Parameter, signature

import pytest

from lintra.compat import fla as ours
from lintra.compat.fla import ops
from lintra.compat.fla.ops import gated_delta_rule, kda
from tests.compat.fla import real
from tests.compat.fla.cases import FLA

# FLA reads them from **kwargs; here they are keyword parameters.
BEHIND_KWARGS = {
    *("use_gate_in_kernel", "A_log", "dt_bias", "chunk_size", "head_first", "transpose_state_layout")
}
PLACES = [
    *(("ops", name) for name in ops.__all__),
    *(("ops.gated_delta_rule", name) for name in gated_delta_rule.__all__),
    *(("ops.kda", name) for name in kda.__all__),
    *(("ops.gated_delta_rule.gate", "fused_gdn_gate"), ("ops.kda.gate", "fused_kda_gate")),
    *(("ops.gated_delta_rule.chunk", "chunk_gdn"), ("ops.kda.fused_recurrent", "fused_recurrent_kda")),
]


@pytest.mark.parametrize(("module", "name"), PLACES, ids=lambda x: x)
def test_a_signature(module, name):
    theirs = signature(getattr(real.fla(f"fla.{module}"), name)).parameters.values()
    found = signature(getattr(import_module(f"lintra.compat.fla.{module}"), name)).parameters.values()
    ours = [(x.name, x.default) for x in found if x.kind is Parameter.POSITIONAL_OR_KEYWORD]
    known = [(x.name, x.default) for x in theirs if x.kind is Parameter.POSITIONAL_OR_KEYWORD]
    assert ours == known, f"fla {FLA.version} has moved {module}.{name}"
    extra = {x.name for x in found if x.kind is Parameter.KEYWORD_ONLY}
    assert extra <= BEHIND_KWARGS
    assert not extra or any(x.kind is Parameter.VAR_KEYWORD for x in theirs)


def test_the_version_is_the_installed_one():
    assert ours.__version__ == FLA.version


def test_a_name_we_do_not_have():
    with pytest.raises(ImportError):
        exec("from lintra.compat.fla.ops import chunk_rwkv7")
    with pytest.raises(ImportError):
        import_module("lintra.compat.fla.ops.rwkv7")
