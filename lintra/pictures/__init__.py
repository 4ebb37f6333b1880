"""Pictures of what a model draws, how it learned and how fast it writes. The only user of matplotlib."""

from lintra.pictures._charts import histograms, logarithmic, loss_curve, matrices, roofline, time_per_token
from lintra.pictures._images import completions, heat, read, rows, samples

__all__ = [
    "completions",
    "heat",
    "histograms",
    "logarithmic",
    "loss_curve",
    "matrices",
    "read",
    "roofline",
    "rows",
    "samples",
    "time_per_token",
]
