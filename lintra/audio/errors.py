"""Errors of recordings and transcripts that cannot be used."""


class SpeechError(ValueError):
    """Audio, a transcript or a corpus that cannot be used; the message names the file and the reason."""
