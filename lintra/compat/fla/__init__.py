"""The interface of flash-linear-attention (FLA) 0.6 on lintra's recurrences, for machines without a GPU.

Modules have the names and functions the signatures they have there; docs/fla.md says what is served and
what is not. `__version__` is that of the interface.
"""

from lintra.compat.fla import modules, ops

__all__ = ["modules", "ops"]
__version__ = "0.6.0"
