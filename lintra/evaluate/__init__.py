"""What a trained model is worth: its scores on a whole test set with their standard errors, and pictures."""

from lintra.evaluate._pictures import draw
from lintra.evaluate._scores import TOLERANCE, Estimate, nats, normalisation, of_images, scores

__all__ = ["TOLERANCE", "Estimate", "draw", "nats", "normalisation", "of_images", "scores"]
