"""The interface of flash-linear-attention (FLA) 0.6 on lintra's recurrences, for machines without a GPU.

Modules have the names and functions the signatures they have there; docs/fla.md says what is supported and
what is not. `__version__` is that of the interface.
"""

import sys
from importlib import import_module

from lintra.compat.fla import modules, ops

__all__ = ["modules", "ops"]
__version__ = "0.6.0"

# Further names of modules: those that FLA had before 0.6, and files of a recurrence that is one file here.
ALIASES = {
    "modules.conv": "modules.causal_conv1d",
    "modules.convolution": "modules.causal_conv1d",
    "modules.fused_norm_gate": "modules.norm.fused_norm_gate",
    "modules.l2norm": "modules.norm.l2norm",
    "modules.layernorm": "modules.norm.layernorm",
    **{
        f"ops.{op}.{file}": f"ops.{op}"
        for op, files in {
            "delta_rule": ("chunk", "fused_recurrent"),
            "gla": ("chunk", "fused_recurrent"),
            "lightning_attn": ("chunk", "fused_recurrent"),
            "linear_attn": ("chunk", "fused_chunk", "fused_recurrent"),
            "retention": ("chunk", "fused_chunk", "fused_recurrent", "parallel"),
            "simple_gla": ("chunk", "fused_chunk", "fused_recurrent", "parallel"),
        }.items()
        for file in files
    },
}
for _alias, _name in ALIASES.items():
    _module = import_module(f"{__name__}.{_name}")
    sys.modules[f"{__name__}.{_alias}"] = _module
    _parent, _, _child = _alias.rpartition(".")
    setattr(import_module(f"{__name__}.{_parent}"), _child, _module)
