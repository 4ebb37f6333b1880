"""Evaluation of trained models: scores of a whole test set with their standard errors, and pictures."""

from lintra.evaluate.estimates import TOLERANCE, Estimate, nats, normalisation, of_images, scores
from lintra.evaluate.forecasts import ForecastScores, forecast_scores
from lintra.evaluate.pictures import draw
from lintra.evaluate.speech import ErrorRate, ScoredUtterance, error_rates, transcripts
from lintra.evaluate.texts import predictions
from lintra.legacy import renamed_attribute

__all__ = [
    "TOLERANCE",
    "ErrorRate",
    "Estimate",
    "ForecastScores",
    "ScoredUtterance",
    "draw",
    "error_rates",
    "forecast_scores",
    "nats",
    "normalisation",
    "of_images",
    "predictions",
    "scores",
    "transcripts",
]

__getattr__ = renamed_attribute(__name__, {"UtteranceSet": ScoredUtterance})
