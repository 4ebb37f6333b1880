"""The old place of `lintra.generation.sampling`."""

from lintra.legacy import moved_module

__getattr__ = moved_module(__name__, "lintra.generation.sampling")
