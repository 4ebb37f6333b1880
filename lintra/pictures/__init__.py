"""Pictures of what a model draws, how it learned and how fast it writes. The only user of matplotlib."""

from lintra.pictures._charts import (
    curves,
    histograms,
    logarithmic,
    loss_curve,
    matrices,
    roofline,
    time_per_token,
)
from lintra.pictures._images import completions, heat, read, rows, samples
from lintra.pictures._speech import alignment

__all__ = [
    "alignment",
    "completions",
    "curves",
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
