"""The interface of mamba_ssm 2.3 (state-spaces/mamba) on lintra's ops, which run on every CPU: its functions.

docs/mamba.md says what is supported. Its modules and models (`Mamba`, `Mamba2`, `MambaLMHeadModel`) are not
here.
"""

from lintra.compat.mamba_ssm import ops
from lintra.compat.mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, selective_scan_fn

__all__ = ["mamba_inner_fn", "ops", "selective_scan_fn"]
__version__ = "2.3.2"  # of the interface
