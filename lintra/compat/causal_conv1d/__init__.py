"""The interface of causal-conv1d 1.6 (Dao-AILab) on lintra's short convolution, which runs on every CPU.

docs/mamba.md says what is supported. The kernels' own names (`causal_conv1d.cpp_functions`) are not here.
"""

from lintra.compat.causal_conv1d.causal_conv1d_interface import causal_conv1d_fn, causal_conv1d_update

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]
__version__ = "1.6.1"  # of the interface
