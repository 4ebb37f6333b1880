"""Whole networks."""

from lintra.models.decoder import Decoder, DecoderState

__all__ = ["Decoder", "DecoderState"]
