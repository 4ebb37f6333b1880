"""Interfaces of other libraries on top of this one.

install: programs find lintra's CPU kernels under the names fla, mamba_ssm and causal_conv1d. accelerate:
models that are already built use them. fla, mamba_ssm, causal_conv1d, fast_transformers: the stand-ins, which
can also be imported directly. `python -m lintra.compat program.py` runs a program after `install`.
transformers: lintra's attention in the models of the real package, which `lintra.hf` exports. timm: the
mechanisms in its vision transformers.
"""

from lintra.compat.acceleration import Accelerated, Replaced, accelerate
from lintra.compat.stand_ins import install, uninstall

__all__ = ["Accelerated", "Replaced", "accelerate", "install", "uninstall"]
