"""What a trained model is worth: its scores on a whole test set with their standard errors, and pictures."""

from lintra.evaluate._pictures import draw
from lintra.evaluate._scores import TOLERANCE, Estimate, nats, normalisation, of_images, scores
from lintra.evaluate._speech import ErrorRate, UtteranceSet, error_rates, transcripts

__all__ = [
    "TOLERANCE",
    "ErrorRate",
    "Estimate",
    "UtteranceSet",
    "draw",
    "error_rates",
    "nats",
    "normalisation",
    "of_images",
    "scores",
    "transcripts",
]
