"""The old place of `lintra.speech.transcribe`."""

from lintra.legacy import moved_module

__getattr__ = moved_module(__name__, "lintra.speech.transcribe")
