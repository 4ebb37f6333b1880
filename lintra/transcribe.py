"""The old place of `lintra.speech.transcription`."""

from lintra.legacy import moved_module

__getattr__ = moved_module(__name__, "lintra.speech.transcription")
