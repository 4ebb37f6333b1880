"""Pictures of what a model draws, how it learned and how fast it writes. Only this package uses
matplotlib."""

from lintra.pictures.charts import (
    histograms,
    loss_curve,
    matrices,
    roofline,
)
from lintra.pictures.families import families
from lintra.pictures.images import completions, heat, read, rows, samples
from lintra.pictures.lines import curves, logarithmic, percentages, time_per_token
from lintra.pictures.speech import alignment

__all__ = [
    "alignment",
    "completions",
    "curves",
    "families",
    "heat",
    "histograms",
    "logarithmic",
    "loss_curve",
    "matrices",
    "percentages",
    "read",
    "roofline",
    "rows",
    "samples",
    "time_per_token",
]
