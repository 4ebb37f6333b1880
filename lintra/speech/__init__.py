"""Speech: corpora and features before the network; decoding, scoring and transcripts after it."""

from lintra.speech.alignment import Word
from lintra.speech.transcription import Search, Transcript, transcribe

__all__ = ["Search", "Transcript", "Word", "transcribe"]
