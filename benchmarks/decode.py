"""`python -m benchmarks decode`: the time of one more token, against how many came before it."""

from lintra.bench.next_token import QUICK, Sizes, run

__all__ = ["MEASURES", "QUICK", "Sizes", "run"]
MEASURES = ("lintra/native", "lintra/ops", "lintra/attention", "lintra/nn", "lintra/models")
