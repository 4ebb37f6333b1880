"""The old place of `lintra.testing.function_laws`."""

from lintra.legacy import moved_module

__getattr__ = moved_module(__name__, "lintra.testing.function_laws")
