"""The old place of `lintra.generation.beam`."""

from lintra.legacy import moved_module

__getattr__ = moved_module(__name__, "lintra.generation.beam")
