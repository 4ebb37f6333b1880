"""Pictures of what a model draws, how it learned and how fast it writes. The only user of matplotlib."""

from lintra.pictures._charts import logarithmic, loss_curve, matrices, roofline, time_per_token
from lintra.pictures._images import completions, read, samples

__all__ = [
    "completions",
    "logarithmic",
    "loss_curve",
    "matrices",
    "read",
    "roofline",
    "samples",
    "time_per_token",
]
